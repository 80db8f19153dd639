"""Directories that a node fills: what others see of them, and who changes names in them."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filled_jobs import (
    LONG_AGO_NS,
    PAIRS,
    RANKS,
    SERIES,
    check,
    content_of,
    fill,
    fill_more,
    filled_folder,
    names,
    new_folder,
    write,
)
from jobs import Job, in_threads, needs_jobs
from mounting import opened

pytest_plugins = ["jobs", "filled_jobs"]
pytestmark = needs_jobs

# --- looking, from another node ---


@dataclass
class View:
    """A directory that a node fills, as another one has it.

    Attributes:
        directory: where it is there; fd: of it, opened before it was filled. mine: where it is on that node.
        files: what is in it. new: the one of them that was created and closed last.
    """

    directory: Path
    fd: int
    mine: Path
    files: dict[str, bytes]
    new: str = "new"

    @property
    def content(self) -> bytes:
        return self.files[self.new]


def list_names(view: View) -> None:
    assert names(view.directory) == sorted(view.files)


def list_again(view: View) -> None:
    """Through a descriptor that is older than the files."""
    assert names(view.fd) == sorted(view.files)


def scan(view: View) -> None:
    with os.scandir(view.directory) as entries:
        found = {entry.name: entry.stat() for entry in entries}
    assert {name: status.st_size for name, status in found.items()} == {
        name: len(content) for name, content in view.files.items()
    }
    for name in (view.new, next(iter(view.files))):
        assert found[name].st_mtime_ns == os.stat(view.mine / name).st_mtime_ns


def stat(view: View) -> None:
    status = os.stat(view.directory / view.new)
    assert status.st_size == len(view.content)
    mine = os.stat(view.mine / view.new)
    assert (status.st_mtime_ns, status.st_mode, status.st_ino) == (mine.st_mtime_ns, mine.st_mode, mine.st_ino)


def stat_at(view: View) -> None:
    assert os.stat(view.new, dir_fd=view.fd).st_size == len(view.content)


def read(view: View) -> None:
    assert (view.directory / view.new).read_bytes() == view.content


def read_at(view: View) -> None:
    fd = os.open(view.new, os.O_RDONLY, dir_fd=view.fd)
    with open(fd, "rb") as file:
        assert file.read() == view.content


def stat_directory(view: View) -> None:
    """After a new name the time of the directory is that of the name, which a kernel may have cached before."""
    status = os.stat(view.directory)
    assert (status.st_mtime_ns, status.st_nlink) == (os.stat(view.mine).st_mtime_ns, 2)
    assert status.st_mtime_ns >= os.stat(view.mine / next(iter(view.files))).st_mtime_ns


def fstat_directory(view: View) -> None:
    status = os.fstat(view.fd)
    assert (status.st_mtime_ns, status.st_nlink) == (os.stat(view.mine).st_mtime_ns, 2)


def create_exclusively(view: View) -> None:
    for make in (os.mkdir, lambda path: os.symlink("target", path), lambda path: write(path, b"")):
        with pytest.raises(FileExistsError):
            make(view.directory / view.new)


def append(view: View) -> None:
    """What a node does with a file that it has never heard of: it fetches, changes and closes it."""
    with open(view.directory / view.new, "ab") as file:
        file.write(b"more")
    view.files[view.new] += b"more"
    assert (view.mine / view.new).read_bytes() == view.content


def mark(view: View) -> None:
    os.setxattr(view.directory / view.new, "user.seen", b"yes")
    assert os.getxattr(view.mine / view.new, "user.seen") == b"yes"


LOOKS = [
    *(list_names, list_again, scan, stat, stat_at, read, read_at, stat_directory, fstat_directory),
    *(create_exclusively, append, mark),
]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
def test_what_is_closed_is_seen(job: Job, look: Callable[[View], None]) -> None:
    """By the first call of another node, whichever that is, and whatever its kernel has cached."""
    for holder, other in PAIRS:
        folder = new_folder(job, other)
        directory, mine = job.mount(other) / folder, job.mount(holder) / folder
        with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as fd:
            assert os.listdir(fd) == []
            assert os.fstat(fd).st_nlink == os.stat(directory).st_nlink == 2
            assert not (directory / "new").exists()
            files = fill_more(job, holder, folder)
            files["new"] = content_of(f"new in {folder}")
            write(mine / "new", files["new"])
            view = View(directory, fd, mine, files)
            look(view)
        for rank in RANKS:
            check(job.mount(rank) / folder, view.files, ["new"])


def test_the_time_of_a_directory(job: Job) -> None:
    """It changes with each name, and another node always sees the last change."""
    folder, _ = filled_folder(job, 1)
    with opened(job.mount(0) / folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        before_ns = os.fstat(fd).st_mtime_ns
        for turn in range(3):
            fill_more(job, 1, folder, f"turn-{turn}")
            write(job.mount(1) / folder / f"last-{turn}", b"")
            now_ns = os.stat(job.mount(1) / folder).st_mtime_ns
            assert before_ns < now_ns == os.fstat(fd).st_mtime_ns == os.stat(job.mount(2) / folder).st_mtime_ns
            before_ns = now_ns
        files = len(os.listdir(fd))
        files += len(fill_more(job, 1, folder, "set"))
        os.utime(fd, ns=(LONG_AGO_NS, LONG_AGO_NS))  # without a look-up before
        for rank in (1, 2, 0):
            assert os.stat(job.mount(rank) / folder).st_mtime_ns == LONG_AGO_NS
            assert len(os.listdir(job.mount(rank) / folder)) == files


def test_the_time_of_a_directory_while_it_is_filled(job: Job) -> None:
    """Another node asks for it in that very moment, and its kernel may believe the answer only until then."""
    for holder, other in PAIRS:
        for _ in range(3):
            folder, ended = new_folder(job), threading.Event()
            with opened(job.mount(other) / folder, os.O_RDONLY | os.O_DIRECTORY) as fd:

                def write_all(holder: int = holder, folder: str = folder, ended: threading.Event = ended) -> None:
                    fill(job.mount(holder) / folder, "file", 4 * SERIES)
                    ended.set()

                def watch(fd: int = fd, ended: threading.Event = ended) -> None:
                    last_ns = 0
                    while not ended.is_set():
                        now_ns = os.fstat(fd).st_mtime_ns
                        assert now_ns >= last_ns
                        last_ns = now_ns

                in_threads(write_all, watch)
                assert os.fstat(fd).st_mtime_ns == os.stat(job.mount(holder) / folder).st_mtime_ns


def test_the_links_of_a_directory(job: Job) -> None:
    for holder in RANKS:
        folder, _ = filled_folder(job, holder)
        mine = job.mount(holder) / folder
        for rank in RANKS:
            assert os.stat(job.mount(rank) / folder).st_nlink == 2
        fill_more(job, holder, folder, "again")
        (mine / "one").mkdir()
        (mine / "two").mkdir()
        write(mine / "file", b"")
        for rank in RANKS:
            assert os.stat(job.mount(rank) / folder).st_nlink == 4
        fill_more(job, holder, folder, "once more")
        (mine / "one").rmdir()
        for rank in RANKS:
            assert os.stat(job.mount(rank) / folder).st_nlink == 3


# --- changing ---


@dataclass
class Change:
    """A node changes names in a directory that a node fills.

    Attributes:
        directory: where it is there; files: what is in it, which the change keeps right. elsewhere: another directory.
    """

    directory: Path
    files: dict[str, bytes]
    elsewhere: Path

    def take(self) -> str:
        """The file that was created last."""
        return list(self.files)[-1]


def unlink(change: Change) -> None:
    name = change.take()
    os.unlink(change.directory / name)
    del change.files[name]


def rename(change: Change) -> None:
    name = change.take()
    os.rename(change.directory / name, change.directory / "renamed")
    change.files["renamed"] = change.files.pop(name)


def rename_over(change: Change) -> None:
    name, victim = change.take(), next(iter(change.files))
    os.rename(change.directory / name, change.directory / victim)
    change.files[victim] = change.files.pop(name)


def rename_away(change: Change) -> None:
    name = change.take()
    os.rename(change.directory / name, change.elsewhere / "moved")
    assert (change.elsewhere / "moved").read_bytes() == change.files.pop(name)


def rename_into(change: Change) -> None:
    write(change.elsewhere / "coming", b"from elsewhere")
    os.rename(change.elsewhere / "coming", change.directory / "came")
    change.files["came"] = b"from elsewhere"


def rename_in_the_way(change: Change) -> None:
    """Onto a name that was just given."""
    write(change.elsewhere / "coming", b"from elsewhere")
    os.rename(change.elsewhere / "coming", change.directory / change.take())
    change.files[change.take()] = b"from elsewhere"


def create_again(change: Change) -> None:
    """A name is free at once after the file is gone."""
    name = change.take()
    os.unlink(change.directory / name)
    write(change.directory / name, b"another one")
    change.files[name] = b"another one"


def overwrite(change: Change) -> None:
    name = change.take()
    (change.directory / name).write_bytes(b"overwritten")
    change.files[name] = b"overwritten"


def truncate(change: Change) -> None:
    name = change.take()
    os.truncate(change.directory / name, 3)
    change.files[name] = change.files[name][:3]


CHANGES = [unlink, rename, rename_over, rename_away, rename_into, rename_in_the_way, create_again, overwrite, truncate]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_who_changes_names(job: Job, change: Callable[[Change], None]) -> None:
    """Whoever does it, all see it at once: also the one who fills the directory, and its native engine."""
    for holder, actor in [*PAIRS, (1, 1)]:
        folder, files = filled_folder(job, holder)
        changed = Change(job.mount(actor) / folder, files, job.mount(actor) / new_folder(job, actor))
        change(changed)
        for rank in RANKS:
            check(job.mount(rank) / folder, changed.files, list(changed.files)[-2:])


def test_directories_within(job: Job) -> None:
    """Made and removed in a directory that a node fills, by anybody."""
    for holder, actor in [*PAIRS, (1, 1)]:
        folder, files = filled_folder(job, holder)
        os.mkdir(job.mount(actor) / folder / "within")
        expected = sorted([*files, "within"])
        for rank in RANKS:
            assert (job.mount(rank) / folder / "within").is_dir()
            assert names(job.mount(rank) / folder) == expected
        files |= fill_more(job, holder, folder, "again")
        inner = fill_more(job, holder, f"{folder}/within")
        with pytest.raises(OSError, match="not empty"):
            os.rmdir(job.mount(actor) / folder / "within")
        os.rename(job.mount(actor) / folder / "within", job.mount(actor) / folder / "moved")
        for rank in RANKS:
            assert not (job.mount(rank) / folder / "within").exists()
            check(job.mount(rank) / folder / "moved", inner)
        for name in inner:
            os.unlink(job.mount(holder) / folder / "moved" / name)
        os.rmdir(job.mount(actor) / folder / "moved")
        for rank in RANKS:
            check(job.mount(rank) / folder, files)


def test_a_filled_directory_is_renamed(job: Job) -> None:
    """Its files go with it, also those that come afterwards."""
    for holder, actor in PAIRS:
        above, folder = new_folder(job, actor), new_folder(job, actor)
        files = fill_more(job, holder, folder)
        with opened(job.mount(holder) / folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.rename(job.mount(actor) / folder, job.mount(actor) / above / "here")
            for number in range(2 * SERIES):
                name = f"after-{number}"
                with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=fd), "wb") as file:
                    file.write(content_of(name))
                files[name] = content_of(name)
        os.mkdir(job.mount(actor) / folder)
        for rank in RANKS:
            check(job.mount(rank) / above / "here", files, list(files)[-2:])
            assert names(job.mount(rank) / folder) == []


def test_rmdir(job: Job) -> None:
    for holder, actor in PAIRS:
        folder, files = filled_folder(job, holder)
        with pytest.raises(OSError, match="not empty") as raised:
            os.rmdir(job.mount(actor) / folder)
        assert raised.value.errno == errno.ENOTEMPTY
        check(job.mount(actor) / folder, files)
        files |= fill_more(job, holder, folder, "again")
        for name in files:
            os.unlink(job.mount(holder) / folder / name)
        os.rmdir(job.mount(actor) / folder)
        for rank in RANKS:
            assert not (job.mount(rank) / folder).exists()
        with pytest.raises(FileNotFoundError):
            write(job.mount(holder) / folder / "late", b"")
        os.mkdir(job.mount(actor) / folder)
        files = fill_more(job, holder, folder)
        for rank in RANKS:
            check(job.mount(rank) / folder, files)


def test_rename_over_a_filled_directory(job: Job) -> None:
    for holder, actor in PAIRS:
        folder, files = filled_folder(job, holder)
        other = new_folder(job, actor)
        with pytest.raises(OSError, match="not empty"):
            os.rename(job.mount(actor) / other, job.mount(actor) / folder)
        files |= fill_more(job, holder, folder, "again")
        for name in files:
            os.unlink(job.mount(holder) / folder / name)
        write(job.mount(actor) / other / "file", b"of the other")
        os.rename(job.mount(actor) / other, job.mount(actor) / folder)
        for rank in RANKS:
            check(job.mount(rank) / folder, {"file": b"of the other"}, ["file"])
            assert not (job.mount(rank) / other).exists()


def test_attributes_by_another_node(job: Job) -> None:
    """The one who has the file open, or has just closed it, sees them at once."""
    for holder, other in PAIRS:
        folder, _ = filled_folder(job, holder)
        mine, there = job.mount(holder) / folder, job.mount(other) / folder
        for name in ("untouched", "open", "closed"):
            fill_more(job, holder, folder, name)
            fd = os.open(mine / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            content = b"" if name == "untouched" else b"content"  # after a write the kernel asks for attributes again
            if content:
                os.write(fd, content)
            if name == "closed":
                os.close(fd)
                fd = os.open(mine / name, os.O_RDONLY)
            assert os.fstat(fd).st_mode & 0o777 == 0o644
            os.chmod(there / name, 0o600)
            assert os.fstat(fd).st_mode & 0o777 == 0o600
            os.utime(there / name, ns=(LONG_AGO_NS, LONG_AGO_NS))
            assert os.fstat(fd).st_mtime_ns == LONG_AGO_NS
            assert os.stat(mine / name).st_mtime_ns == LONG_AGO_NS
            os.close(fd)
            for rank in RANKS:
                status = os.stat(job.mount(rank) / folder / name)
                assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o600, LONG_AGO_NS)
                assert (job.mount(rank) / folder / name).read_bytes() == content


def test_attributes_by_the_node_itself(job: Job) -> None:
    """Of a file that nobody else has looked at when they are changed."""
    for holder, other in PAIRS:
        folder, _ = filled_folder(job, holder)
        mine, there = job.mount(holder) / folder, job.mount(other) / folder
        write(mine / "new", b"content")
        os.chmod(mine / "new", 0o640)
        os.utime(mine / "new", ns=(LONG_AGO_NS, LONG_AGO_NS))
        os.setxattr(mine / "new", "user.kind", b"sample")
        status = os.stat(there / "new")
        assert (status.st_mode & 0o777, status.st_mtime_ns, status.st_size) == (0o640, LONG_AGO_NS, 7)
        assert os.getxattr(there / "new", "user.kind") == b"sample"
        with opened(there, os.O_RDONLY | os.O_DIRECTORY) as fd:
            assert os.fstat(fd).st_mode & 0o777 == 0o755
            fill_more(job, holder, folder, "again")
            os.chmod(mine, 0o750)
            assert os.fstat(fd).st_mode & 0o777 == 0o750
            os.utime(mine, ns=(LONG_AGO_NS, LONG_AGO_NS))
            assert os.fstat(fd).st_mtime_ns == LONG_AGO_NS == os.stat(mine).st_mtime_ns


def test_kinds_of_files(job: Job) -> None:
    """Long names, of which few fit into one message to the others; large, empty and sparse files; modes."""
    for holder, other in PAIRS:
        folder, files = filled_folder(job, holder)
        mine, there = job.mount(holder) / folder, job.mount(other) / folder
        for number in range(300):
            name = f"{number}-".ljust(255, "n")
            write(mine / name, b"")
            files[name] = b""
        for size in (1, 4096, 3 << 20):
            files[f"size-{size}"] = os.urandom(size)
            (mine / f"size-{size}").write_bytes(files[f"size-{size}"])
        with opened(mine / "sparse", os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
            os.pwrite(fd, b"end", 100_000)
        files["sparse"] = bytes(100_000) + b"end"
        with pytest.raises(OSError) as raised:
            write(mine / ("n" * 256), b"")
        assert raised.value.errno == errno.ENAMETOOLONG
        check(there, files, ["size-1", "size-4096", f"size-{3 << 20}", "sparse"])
        fill_more(job, holder, folder, "again")
        before = os.umask(0o027)
        try:
            os.close(os.open(mine / "masked", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            os.mknod(mine / "node", 0o666)
        finally:
            os.umask(before)
        with pytest.raises(PermissionError):
            os.open(mine / "special", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o4755)
        assert os.stat(there / "masked").st_mode == os.stat(there / "node").st_mode == 0o100640
        assert not (there / "special").exists()


# --- files that are open ---
