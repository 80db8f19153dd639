"""A tree with everything that a POSIX tree can hold, and the comparison of two trees down to the last bit.

Owns how the test data looks; knows nothing of FanStore. Used by the tests of preparation, verification and mount.
Works on bytes names and on directory descriptors throughout, since names here are not always text and one path is
longer than PATH_MAX.
"""

import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
#: The chunk size of the format (docs/format.md), written out again here: the tests must notice if it moves.
CHUNK_BYTES = 4 * MIB
#: Bytes of the sparse file made with ``huge``: more than the 8 GiB that an octal field of ustar can say.
HUGE_BYTES = (8 << 30) + 12_345

#: Only root can read a file without a read bit; an ordinary user gets a tree that they can prepare.
IS_ROOT = os.geteuid() == 0

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

#: mtimes in nanoseconds, all within what ext4 and xfs can hold (1901 to 2446).
MTIMES_NS = (
    0,
    1,
    999_999_999,
    1_000_000_000,
    1_234_567_890_123_456_789,
    -1,
    -1_000_000_000,
    -999_999_999,
    -1_500_000_000,
    -2_000_000_000_123_456_789,
    4_102_444_800_000_000_001,  # 2100
    8_589_934_592_000_000_000,  # 2^33 s: does not fit in eleven octal digits
    9_223_372_036_000_000_007 // 2,
    1_700_000_000_100_000_000,  # a fraction with trailing zeros
    1_700_000_000_000_000_000,
)


def incompressible(size: int, seed: int = 0) -> bytes:
    """Bytes that no codec shrinks, the same for the same arguments."""
    return random.Random(f"{seed}/{size}").randbytes(size)


def compressible(size: int, seed: int = 0) -> bytes:
    """Text that shrinks well but is not the same everywhere."""
    lines, have, number = [], 0, seed
    while have < size:
        line = b"%d: the quick brown fox jumps over %d lazy dogs\n" % (number, number * 7919 % 65_537)
        lines.append(line)
        have += len(line)
        number += 1
    return b"".join(lines)[:size]


@contextmanager
def opened_directory(path: bytes | str | Path, dir_fd: int | None = None) -> Iterator[int]:
    """Descriptor of a directory for the time of a with block."""
    fd = os.open(path, _DIRECTORY_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def write_file(dir_fd: int, name: bytes, content: bytes) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=dir_fd)
    with open(fd, "wb") as file:
        file.write(content)


@contextmanager
def made_directory(dir_fd: int, name: bytes) -> Iterator[int]:
    os.mkdir(name, 0o755, dir_fd=dir_fd)
    with opened_directory(name, dir_fd) as fd:
        yield fd


def make_deep(dir_fd: int, components: list[bytes], at_bottom: Callable[[int], None]) -> None:
    """Make nested directories one step at a time, so that the length of the whole path does not matter."""
    if not components:
        at_bottom(dir_fd)
        return
    with made_directory(dir_fd, components[0]) as inner:
        make_deep(inner, components[1:], at_bottom)


def _sizes(fd: int) -> None:
    for size in (0, 1, 2, 15, 18, 19, 20, 34, 35, 511, 512, 513, 1024, 65_536):
        write_file(fd, b"text-%d" % size, compressible(size, size))
        write_file(fd, b"noise-%d" % size, incompressible(size))
    for size in (CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1):
        write_file(fd, b"text-%d" % size, compressible(size, 3))
        write_file(fd, b"noise-%d" % size, incompressible(size))
    write_file(fd, b"text-9MiB", compressible(9 * MIB, 5))
    write_file(fd, b"noise-9MiB", incompressible(9 * MIB))
    # Shrinks as a whole, but its middle chunk does not: a raw block inside an LZ4 frame.
    write_file(fd, b"mixed-9MiB", compressible(CHUNK_BYTES) + incompressible(CHUNK_BYTES, 1) + compressible(MIB))
    write_file(fd, b"zeros-8MiB", bytes(2 * CHUNK_BYTES))


ODD_NAMES = (
    b"-rf",
    b"--checkpoint=1",
    b" leading space",
    b"trailing space ",
    b"trailing dots...",
    b"...",
    b"..x",
    b".hidden",
    b"new\nline",
    b"\n",
    b"tab\tand\rreturn",
    b"back\\slash",
    b"\\n",
    b"quotes'\"`",
    b"star*?[a-z]",
    b"%s%n$HOME",
    b"\x01\x02\x7f",
    b"\xff\xfe\xfd",
    b"caf\xe9",  # Latin-1
    "café".encode(),
    "cafe\u0301".encode(),  # the same letters in the other normal form
    "日本語".encode(),
    b"\xed\xa0\x80",  # a surrogate as CESU would write it: not UTF-8
    b"A",
    b"a",
    b"a ",
    b"a-",
    b"a.",
    b"a0",
    b"aa",
    b"x=y",
    b"12 path=z",  # looks like a pax record
    b"@LongLink",
    b"n" * 255,
    b"\xe9" * 255,
)


def _names(fd: int) -> None:
    for number, name in enumerate(ODD_NAMES):
        write_file(fd, name, compressible(40 * number, number))
    for length in (250, 251, 252, 254, 255):
        # From 252 on, the name of the compressed member (plus ".lz4" or ".zst") would be longer than a name can be.
        write_file(fd, (b"long-%d-" % length).ljust(length, b"z"), compressible(5_000, length))
    for number, name in enumerate(ODD_NAMES):
        with made_directory(fd, name[:250] + b".dir") as inner:
            write_file(inner, name, compressible(number))


def _clashes(fd: int) -> None:
    """Names that the compressed member of another file would like to have."""
    for name in (b"a.txt", b"a.txt.lz4", b"a.txt.lz4.lz4", b"b.txt", b"c.txt", b"d.txt", b"only.lz4", b"z", b"z.zst"):
        write_file(fd, name, compressible(10_000, len(name)))
    with made_directory(fd, b"b.txt.lz4") as inner:
        write_file(inner, b"inside", compressible(10_000))
    os.symlink(b"c.txt", b"c.txt.lz4", dir_fd=fd)
    os.link(b"only.lz4", b"d.txt.lz4", src_dir_fd=fd, dst_dir_fd=fd)


def _symlinks(fd: int) -> None:
    write_file(fd, b"target", b"reached\n")
    with made_directory(fd, b"directory") as inner:
        write_file(inner, b"file", b"in a directory\n")
    targets = {
        b"to-file": b"target",
        b"to-directory": b"directory",
        b"to-directory-slash": b"directory/",
        b"to-self": b"to-self",
        b"to-root": b"/",
        b"to-parent": b"..",
        b"to-here": b".",
        b"dangling": b"nowhere/at/all",
        b"dangling-absolute": b"/nonexistent/\xff\xfe",
        b"not-utf8-\xe9": b"caf\xe9/\xff",
        b"newline": b"two\nlines",
        b"dash": b"-rf",
        b"chain": b"to-file",
        b"outside": b"../../../../../../etc/passwd",
        b"one": b"x",
        b"t100": b"t" * 100,
        b"t101": b"t" * 101,
        b"t255": b"t" * 255,
        b"t4095": b"t/" * 2047 + b"t",
        b"t4095-not-utf8": b"\xff/" * 2047 + b"\xff",
    }
    for name, target in targets.items():
        os.symlink(target, name, dir_fd=fd)


def _hardlinks(fd: int) -> None:
    with made_directory(fd, b"one") as one, made_directory(fd, b"two") as two:
        contents = {b"text": compressible(20_000), b"noise": incompressible(2_000), b"empty": b""}
        contents[b"big-text"] = compressible(CHUNK_BYTES + 5)
        for name, content in contents.items():
            write_file(one, name, content)
            os.link(name, b"again-" + name, src_dir_fd=one, dst_dir_fd=one)
            os.link(name, b"across-" + name, src_dir_fd=one, dst_dir_fd=two)
        os.symlink(b"text", b"symlink", dir_fd=one)
        os.link(b"symlink", b"again-symlink", src_dir_fd=one, dst_dir_fd=one, follow_symlinks=False)
        os.link(b"symlink", b"across-symlink", src_dir_fd=one, dst_dir_fd=two, follow_symlinks=False)
        os.symlink(b"/nowhere", b"dangling", dir_fd=one)
        os.link(b"dangling", b"across-dangling", src_dir_fd=one, dst_dir_fd=two, follow_symlinks=False)
        # The further name sorts, and so is met, before the first: in breadth-first order the shallow one comes first.
        os.link(b"text", b"zzz-shallow", src_dir_fd=one, dst_dir_fd=fd)
        # Beside names whose length needs a pax header for path and for linkpath.
        write_file(one, b"l" * 255, compressible(3_000))
        os.link(b"l" * 255, b"m" * 255, src_dir_fd=one, dst_dir_fd=two)


def _empty_directories(fd: int) -> None:
    for name in (b"empty", b"empty-too", b"\xff-empty"):
        os.mkdir(name, dir_fd=fd)
    make_deep(fd, [b"nested"] * 4, lambda bottom: None)


def _deep(fd: int) -> None:
    """Paths just below, at and above what the fields of a ustar header hold (100 for name, 155 for prefix)."""

    def leaf(bottom: int) -> None:
        write_file(bottom, b"leaf", compressible(1_000))
        os.symlink(b"leaf", b"link", dir_fd=bottom)
        os.mkdir(b"empty", dir_fd=bottom)

    # This function's directory is b"deep": 5 bytes with the slash are in front of all of these.
    for length in (94, 95, 96, 97, 100, 101, 150, 155, 156, 157, 200, 250, 255):
        write_file(fd, (b"%d-" % length).ljust(length, b"f"), compressible(length))
    for length in (90, 95, 100, 149, 150, 151, 155, 200):
        with made_directory(fd, (b"d%d-" % length).ljust(length, b"d")) as inner:
            for name_length in (1, 4, 90, 99, 100, 101, 255):
                write_file(inner, b"n" * name_length, compressible(name_length + length))
    make_deep(fd, [b"step"] * 30, leaf)  # > 100 bytes
    make_deep(fd, [b"longer-step-%d" % number for number in range(30)], leaf)  # > 256 bytes
    make_deep(fd, [b"s"] * 200, leaf)  # many short components
    make_deep(fd, [b"%02d" % number + b"x" * 240 for number in range(12)], leaf)  # about 3 KB
    # A path of exactly PATH_MAX - 1 - what the root of the tree may need cannot be known here; close is good enough.


def _beyond_path_max(fd: int) -> None:
    def leaf(bottom: int) -> None:
        write_file(bottom, b"leaf", compressible(30_000))
        write_file(bottom, b"empty", b"")
        os.symlink(b"leaf", b"link", dir_fd=bottom)
        os.link(b"leaf", b"leaf-again", src_dir_fd=bottom, dst_dir_fd=bottom)

    make_deep(fd, [b"%02d" % number + b"y" * 250 for number in range(18)], leaf)  # about 4.5 KB


def file_modes() -> list[int]:
    """Permission bits for files: each bit alone, all, none, and the usual ones."""
    modes = {0, 0o7777, 0o644, 0o600, 0o444, 0o400, 0o755, 0o4755, 0o2755, 0o1644, 0o6711, 0o777, 0o555, 0o111}
    modes |= {1 << bit for bit in range(12)}
    return sorted(mode for mode in modes if IS_ROOT or mode & 0o400)


def directory_modes() -> list[int]:
    modes = {0o755, 0o700, 0o777, 0o1777, 0o2755, 0o555, 0o500, 0o7777, 0o3770}
    if IS_ROOT:
        modes |= {0, 0o111, 0o222, 0o4000}
    return sorted(modes)


def _modes(fd: int) -> None:
    for mode in file_modes():
        write_file(fd, b"file-%04o" % mode, compressible(600, mode))
    for mode in directory_modes():
        with made_directory(fd, b"dir-%04o" % mode) as inner:
            write_file(inner, b"file", b"x" * mode)
            os.mkdir(b"sub", dir_fd=inner)


def _apply_modes(fd: int) -> None:
    for mode in file_modes():
        os.chmod(b"file-%04o" % mode, mode, dir_fd=fd)
    for mode in directory_modes():
        os.chmod(b"dir-%04o" % mode, mode, dir_fd=fd)


def _times(fd: int) -> None:
    for number, _ in enumerate(MTIMES_NS):
        write_file(fd, b"file-%02d" % number, compressible(100, number))
        os.symlink(b"file-%02d" % number, b"link-%02d" % number, dir_fd=fd)
        with made_directory(fd, b"dir-%02d" % number) as inner:
            write_file(inner, b"file", b"")


def _specials(fd: int) -> None:
    """What preparation skips with a count."""
    os.mkfifo(b"pipe", dir_fd=fd)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"/proc/self/fd/{fd}/socket")
    with made_directory(fd, b"only-specials") as inner:
        os.mkfifo(b"pipe", dir_fd=inner)


#: Sockets and pipes that ``build`` makes.
SPECIAL_COUNT = 3


def _huge(fd: int) -> None:
    file_fd = os.open(b"sparse", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd)
    try:
        os.ftruncate(file_fd, HUGE_BYTES)
        os.pwrite(file_fd, b"begin", 0)
        os.pwrite(file_fd, b"middle", 5 << 30)
        os.pwrite(file_fd, b"end", HUGE_BYTES - 3)
    finally:
        os.close(file_fd)


def _apply_times(fd: int, numbers: random.Random) -> None:
    """Give every object an mtime of its own, children first, so that directories keep theirs."""
    for name in sorted(map(os.fsencode, os.listdir(fd))):
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with opened_directory(name, fd) as inner:
                _apply_times(inner, numbers)
        mtime_ns = numbers.randrange(1, 4_000_000_000 * 10**9)
        head, _, tail = name.partition(b"-")
        if head in (b"file", b"link", b"dir") and len(tail) == 2 and tail.isdigit():
            mtime_ns = MTIMES_NS[int(tail)]
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=fd, follow_symlinks=False)


PARTS: dict[bytes, Callable[[int], None]] = {
    b"sizes": _sizes,
    b"names": _names,
    b"clashes": _clashes,
    b"symlinks": _symlinks,
    b"hardlinks": _hardlinks,
    b"empty": _empty_directories,
    b"deep": _deep,
    b"modes": _modes,
    b"times": _times,
}


def build(root: Path, *, beyond_path_max: bool = True, specials: bool = True, huge: bool = False) -> Path:
    """Make the tree at ``root``, which must not exist.

    Args:
        beyond_path_max: include a path of more than 4096 bytes, which GNU tar (for one) cannot extract.
        specials: include pipes and sockets, which preparation skips.
        huge: include a sparse file of more than 8 GiB.
    """
    parts = dict(PARTS)
    if beyond_path_max:
        parts[b"beyond"] = _beyond_path_max
    if specials:
        parts[b"specials"] = _specials
    if huge:
        parts[b"huge"] = _huge
    root.mkdir(parents=True)
    with opened_directory(root) as root_fd:
        for name, make in parts.items():
            with made_directory(root_fd, name) as fd:
                make(fd)
        write_file(root_fd, b"at-the-top", b"x")
        os.symlink(b"names", b"link-at-the-top", dir_fd=root_fd)
        with made_directory(root_fd, b"-C") as fd:  # an option, to a careless command line
            write_file(fd, b"-x", b"dash")
        _apply_times(root_fd, random.Random(2))
        # Modes after times: a directory without write permission does not mind utime, but its files could not be made.
        with opened_directory(b"modes", root_fd) as fd:
            _apply_modes(fd)
    os.chmod(root, 0o751)
    os.utime(root, ns=(1, 1_600_000_000_987_654_321))
    return root


def remove_tree(root: Path) -> None:
    """Remove a tree made here, also as an ordinary user for whom a read-only directory is in the way."""
    if not root.exists():
        return

    def make_writable(fd: int) -> None:
        os.fchmod(fd, 0o700)
        for entry in list(os.scandir(fd)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=fd)
                with opened_directory(entry.name, fd) as inner:
                    make_writable(inner)

    if not IS_ROOT:
        with opened_directory(root) as root_fd:
            make_writable(root_fd)
    shutil.rmtree(root)


@dataclass
class _Side:
    """What was seen of one of the two trees: for each inode with several names, its names so far."""

    groups: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)

    def saw(self, status: os.stat_result, path: bytes) -> None:
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            self.groups.setdefault((status.st_dev, status.st_ino), []).append(path)

    def linked_names(self) -> set[tuple[bytes, ...]]:
        return {tuple(sorted(names)) for names in self.groups.values()}


def _is_special(mode: int) -> bool:
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))


def _compare_contents(a_fd: int, b_fd: int, name: bytes) -> str | None:
    """Read both files to the end; None if they are the same."""
    with (
        open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=a_fd), "rb") as a_file,
        open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=b_fd), "rb") as b_file,
    ):
        position = 0
        while True:
            a_data, b_data = a_file.read(MIB), b_file.read(MIB)
            if a_data != b_data:
                return f"content differs in the MiB from byte {position}"
            if not a_data:
                return None
            position += len(a_data)


@dataclass
class _Comparison:
    contents: bool
    differences: list[str] = field(default_factory=list)
    a_side: _Side = field(default_factory=_Side)
    b_side: _Side = field(default_factory=_Side)

    def note(self, path: bytes, text: str) -> None:
        shown = path if len(path) < 300 else path[:100] + b"..." + path[-150:]
        self.differences.append(f"{shown!r}: {text}")

    def objects(self, a_fd: int, b_fd: int, name: bytes, path: bytes) -> None:
        """Compare two objects of one name, and what is below them."""
        a = os.stat(name, dir_fd=a_fd, follow_symlinks=False)
        b = os.stat(name, dir_fd=b_fd, follow_symlinks=False)
        self.a_side.saw(a, path)
        self.b_side.saw(b, path)
        if a.st_mode != b.st_mode:
            self.note(path, f"mode {a.st_mode:06o} against {b.st_mode:06o}")
            if stat.S_IFMT(a.st_mode) != stat.S_IFMT(b.st_mode):
                return
        if a.st_mtime_ns != b.st_mtime_ns:
            self.note(path, f"mtime {a.st_mtime_ns} against {b.st_mtime_ns}")
        if stat.S_ISDIR(a.st_mode):
            with opened_directory(name, a_fd) as a_inner, opened_directory(name, b_fd) as b_inner:
                self.directories(a_inner, b_inner, path)
            return
        if a.st_size != b.st_size:
            self.note(path, f"size {a.st_size} against {b.st_size}")
        if a.st_nlink != b.st_nlink:
            self.note(path, f"nlink {a.st_nlink} against {b.st_nlink}")
        if stat.S_ISLNK(a.st_mode):
            a_target, b_target = os.readlink(name, dir_fd=a_fd), os.readlink(name, dir_fd=b_fd)
            if a_target != b_target:
                self.note(path, f"target {a_target!r} against {b_target!r}")
        elif self.contents:
            difference = _compare_contents(a_fd, b_fd, name)
            if difference is not None:
                self.note(path, difference)

    def directories(self, a_fd: int, b_fd: int, path: bytes) -> None:
        a_names = {
            name
            for name in map(os.fsencode, os.listdir(a_fd))
            if not _is_special(os.stat(name, dir_fd=a_fd, follow_symlinks=False).st_mode)
        }
        b_list = [os.fsencode(name) for name in os.listdir(b_fd)]
        b_names = set(b_list)
        if len(b_names) != len(b_list):
            self.note(path, "listed twice: " + repr(sorted(name for name in b_names if b_list.count(name) > 1)))
        prefix = path + b"/" if path else b""
        for name in sorted(a_names - b_names):
            self.note(prefix + name, "missing in the second tree")
        for name in sorted(b_names - a_names):
            self.note(prefix + name, "only in the second tree")
        for name in sorted(a_names & b_names):
            self.objects(a_fd, b_fd, name, prefix + name)


def compare_trees(a: Path, b: Path, *, root: bool = True, contents: bool = True) -> list[str]:
    """All differences between tree ``a`` (the source) and tree ``b``, as text; none if they are the same.

    Compares listings, types, modes, mtimes in ns, sizes, bytes, link targets, link counts and hard-link groups. Pipes,
    sockets and devices of ``a`` are taken as absent, as preparation does.

    Args:
        root: compare mode and time of the two root directories too.
        contents: read the files.
    """
    comparison = _Comparison(contents)
    with opened_directory(a) as a_fd, opened_directory(b) as b_fd:
        if root:
            a_status, b_status = os.fstat(a_fd), os.fstat(b_fd)
            if a_status.st_mode != b_status.st_mode:
                comparison.note(b"", f"mode {a_status.st_mode:06o} against {b_status.st_mode:06o}")
            if a_status.st_mtime_ns != b_status.st_mtime_ns:
                comparison.note(b"", f"mtime {a_status.st_mtime_ns} against {b_status.st_mtime_ns}")
        comparison.directories(a_fd, b_fd, b"")
    a_groups, b_groups = comparison.a_side.linked_names(), comparison.b_side.linked_names()
    comparison.differences += [f"hard links only in the first tree: {group!r}" for group in sorted(a_groups - b_groups)]
    comparison.differences += [
        f"hard links only in the second tree: {group!r}" for group in sorted(b_groups - a_groups)
    ]
    return comparison.differences
