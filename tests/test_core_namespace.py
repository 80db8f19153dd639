"""The name space against the tree that it was made from, and the control directory beside it."""

import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import oddities
import pytest
import trio
from core_parts import Parts, opened

from fanstore.dataset.namespace import (
    BLOCK_BYTES,
    ROOT_INODE,
    NoAttributeError,
    NotDirectoryError,
    NotFoundError,
    NotSymlinkError,
)
from fanstore.format.checksum import xxh3_64
from fanstore.ids import Inode

MakePrepared = Callable[..., Path]

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def resolve(parts: Parts, path: bytes) -> Inode:
    inode = ROOT_INODE
    for name in path.split(b"/"):
        inode = parts.namespace.lookup(inode, name)
    return inode


def compare(parts: Parts, directory: Inode, fd: int, inodes: dict[int, int]) -> int:
    """Compare a directory with a real one, recursively; the number of names compared."""
    namespace = parts.namespace
    listing = list(namespace.children(directory))[2:]
    names = sorted(
        name for name in os.listdir(f"/proc/self/fd/{fd}".encode())
        if stat.S_IFMT(os.lstat(os.path.join(b"/proc/self/fd/%d" % fd, name)).st_mode)
        in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    )  # fmt: skip
    assert [child.name for child in listing] == names
    compared = len(names)
    for child in listing:
        real = os.stat(child.name, dir_fd=fd, follow_symlinks=False)
        found = namespace.attributes(child.inode)
        assert namespace.lookup(directory, child.name) == child.inode == found.inode
        assert (found.mode, found.mtime_ns) == (real.st_mode, real.st_mtime_ns), child.name
        assert (found.uid, found.gid) == (os.getuid(), os.getgid())
        if stat.S_ISDIR(real.st_mode):
            inner = os.open(child.name, _OPEN, dir_fd=fd)
            try:
                compared += compare(parts, child.inode, inner, inodes)
            finally:
                os.close(inner)
            assert namespace.parent(child.inode) == directory
        else:
            assert (found.size, found.nlink) == (real.st_size, real.st_nlink), child.name
            assert found.blocks == -(-real.st_size // 512)
            assert inodes.setdefault(real.st_ino, child.inode) == child.inode, "hard links share an inode"
        if stat.S_ISLNK(real.st_mode):
            assert namespace.readlink(child.inode) == os.readlink(child.name, dir_fd=fd)
    return compared


def test_everything_that_a_tree_can_hold(tmp_path: Path, make_prepared: MakePrepared) -> None:
    tree = oddities.build(tmp_path / "tree")
    try:
        with opened(make_prepared(tree, codec="lz4")) as parts:
            fd = os.open(tree, _OPEN)
            try:
                inodes: dict[int, int] = {}
                compared = compare(parts, ROOT_INODE, fd, inodes)
            finally:
                os.close(fd)
            assert compared == parts.prepared.index.entry_count - 1
            assert len(set(inodes.values())) == len(inodes), "different files have different inodes"
            root = parts.namespace.attributes(ROOT_INODE)
            assert (root.mode, root.mtime_ns) == (tree.stat().st_mode, tree.stat().st_mtime_ns)
            assert parts.namespace.parent(ROOT_INODE) == ROOT_INODE
            parts.namespace.validate()
    finally:
        oddities.remove_tree(tree)


@pytest.fixture
def small(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    tree = tmp_path / "small"
    (tree / "d" / "sub").mkdir(parents=True)
    (tree / "d" / "text").write_bytes(oddities.compressible(5000))
    (tree / "d" / "noise").write_bytes(oddities.incompressible(5000))
    (tree / "d" / "empty").touch()
    (tree / "link").symlink_to("d/text")
    os.link(tree / "d" / "noise", tree / "again")
    return make_prepared(tree, codec="lz4")


def test_what_is_not_there(small: Path) -> None:
    with opened(small) as parts:
        namespace = parts.namespace
        for name in (b"nothing", b"D", b"d\0", b"x" * 300, b""):
            with pytest.raises(NotFoundError):
                namespace.lookup(ROOT_INODE, name)
        with pytest.raises(NotDirectoryError):
            namespace.lookup(resolve(parts, b"again"), b"x")
        with pytest.raises(NotDirectoryError):
            list(namespace.children(resolve(parts, b"again")))
        with pytest.raises(NotSymlinkError):
            namespace.readlink(resolve(parts, b"d"))
        last = parts.control.inode + 3
        for number in (0, -1, last + 1, 1 << 63):
            inode = Inode(number)
            with pytest.raises(NotFoundError):
                namespace.attributes(inode)
            with pytest.raises(NotFoundError):
                namespace.lookup(inode, b"x")
            with pytest.raises(NotFoundError):
                list(namespace.children(inode))
            with pytest.raises(NotFoundError):
                namespace.readlink(inode)
            with pytest.raises(NotFoundError):
                namespace.list_xattrs(inode)


def test_dot_and_dot_dot(small: Path) -> None:
    with opened(small) as parts:
        namespace, sub = parts.namespace, resolve(parts, b"d/sub")
        assert namespace.lookup(sub, b".") == sub
        assert namespace.lookup(sub, b"..") == resolve(parts, b"d")
        assert [(child.name, child.inode) for child in namespace.children(sub)] == [
            (b".", sub),
            (b"..", resolve(parts, b"d")),
        ]


def test_extended_attributes(small: Path) -> None:
    with opened(small) as parts:
        namespace, index = parts.namespace, parts.prepared.index
        noise = resolve(parts, b"d/noise")
        names = (
            b"user.fanstore.partition",
            b"user.fanstore.codec",
            b"user.fanstore.stored_size",
            b"user.fanstore.checksum",
        )
        assert namespace.list_xattrs(noise) == names
        values = [namespace.get_xattr(noise, name) for name in names]
        checksum = xxh3_64(oddities.incompressible(5000))
        assert values == [b"part-00000.tar", b"none", b"5000", b"%016x" % checksum]
        text = resolve(parts, b"d/text")
        assert namespace.get_xattr(text, b"user.fanstore.codec") == b"lz4"
        stored = int(namespace.get_xattr(text, b"user.fanstore.stored_size"))
        assert stored == index.stored_size[text - 1] < 5000
        assert namespace.get_xattr(resolve(parts, b"d/empty"), b"user.fanstore.stored_size") == b"0"
        for inode in (resolve(parts, b"d"), resolve(parts, b"link"), parts.control.inode, ROOT_INODE):
            assert namespace.list_xattrs(inode) == ()
            with pytest.raises(NoAttributeError):
                namespace.get_xattr(inode, names[0])
        for name in (b"user.fanstore.other", b"security.selinux", b"", b"partition"):
            with pytest.raises(NoAttributeError):
                namespace.get_xattr(noise, name)


def test_totals(small: Path) -> None:
    with opened(small) as parts:
        totals = parts.namespace.statfs()
        assert totals.blocks == 2 * -(-5000 // BLOCK_BYTES)
        assert totals.files == 7  # root, d, sub, three files (one with two names), one link


def test_control_directory(small: Path) -> None:
    with opened(small) as parts:
        namespace, control = parts.namespace, parts.control
        directory = namespace.lookup(ROOT_INODE, b".fanstore")
        assert b".fanstore" not in [child.name for child in namespace.children(ROOT_INODE)]
        assert stat.S_ISDIR(namespace.attributes(directory).mode)
        assert namespace.parent(directory) == ROOT_INODE
        assert namespace.lookup(directory, b"..") == ROOT_INODE
        listing = list(namespace.children(directory))
        assert [child.name for child in listing] == [b".", b"..", b"stats.json", b"nodes.json", b"config.json"]
        assert list(namespace.children(directory, 3)) == listing[3:]
        assert all(child.inode > parts.prepared.index.entry_count for child in listing if child.name != b"..")
        for child in listing[2:]:
            assert namespace.lookup(directory, child.name) == child.inode
            found = namespace.attributes(child.inode)
            assert stat.S_ISREG(found.mode)
            assert found.mode & 0o222 == 0
            assert namespace.is_control(child.inode)
            assert isinstance(json.loads(trio.run(control.open, child.inode)), dict)
            with pytest.raises(NotDirectoryError):
                namespace.lookup(child.inode, b"x")
        with pytest.raises(NotFoundError):
            namespace.lookup(directory, b"other.json")
        with pytest.raises(NotFoundError):
            namespace.lookup(resolve(parts, b"d"), b".fanstore")
        nodes = json.loads(trio.run(control.open, namespace.lookup(directory, b"nodes.json")))
        assert nodes == {"nodes": [{"rank": 0}]}, "content that must be waited for"
        with opened(small) as again:
            assert again.control.names() == control.names(), "inode numbers are stable"


def test_control_content_is_made_at_each_open(small: Path) -> None:
    with opened(small) as parts:
        inode = parts.namespace.lookup(parts.control.inode, b"stats.json")
        before = trio.run(parts.control.open, inode)
        parts.read("d/text")
        after = trio.run(parts.control.open, inode)
        assert json.loads(before)["sources"]["shared"]["reads"] == 0
        assert json.loads(after)["sources"]["shared"]["reads"] == 1
        assert json.loads(after)["cache"]["misses"] == 1


def test_a_dataset_with_such_a_directory_of_its_own(
    tmp_path: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    tree = tmp_path / "tree"
    for directory in (".fanstore", ".a", "z", "z/.fanstore"):
        (tree / directory).mkdir(parents=True)
    (tree / ".fanstore" / "stats.json").write_text("the dataset's own")
    expect_warnings(r"the dataset's own '\.fanstore' is hidden")
    with opened(make_prepared(tree)) as parts:
        names = [child.name for child in parts.namespace.children(ROOT_INODE)]
        assert names == [b".", b"..", b".a", b"z"]
        assert parts.namespace.lookup(ROOT_INODE, b".fanstore") == parts.control.inode
        inner = [child.name for child in parts.namespace.children(resolve(parts, b"z"))]
        assert inner == [b".", b"..", b".fanstore"], "only the one in the root is special"
        parts.namespace.validate()


@pytest.fixture
def fast_directory(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: making and removing 100,000 files took half a minute on a busy disk."""
    shared_memory = Path("/dev/shm")
    usable = shared_memory.is_dir() and os.access(shared_memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=shared_memory if usable else tmp_path) as directory:
        yield Path(directory)


def test_a_directory_of_100_000_entries(fast_directory: Path, make_prepared: MakePrepared) -> None:
    tree = fast_directory / "tree"
    (tree / "many").mkdir(parents=True)
    with oddities.opened_directory(tree / "many") as fd:
        for number in range(100_000):
            os.close(os.open(f"{number}.jpg", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
    with opened(make_prepared(tree)) as parts:
        namespace, many = parts.namespace, resolve(parts, b"many")
        expected = sorted(b"%d.jpg" % number for number in range(100_000))
        whole = list(namespace.children(many))
        assert [child.name for child in whole[2:]] == expected
        # As the kernel asks: a few at a time, each time from the cookie of the last.
        cookie, names = 0, []
        while page := [child for child, _ in zip(namespace.children(many, cookie), range(97), strict=False)]:
            names += [child.name for child in page]
            cookie = page[-1].cookie
        assert names == [child.name for child in whole]
        for position in (0, 1, 2, 3, 50_000, 100_001):
            assert next(iter(namespace.children(many, whole[position].cookie)), None) == (
                whole[position + 1] if position < 100_001 else None
            )
        assert list(namespace.children(many, 1 << 62)) == []
        assert namespace.lookup(many, b"77777.jpg") == whole[2 + expected.index(b"77777.jpg")].inode
