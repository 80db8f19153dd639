"""Files that are open on one node while others look at their directory and change it; fsync."""

import functools
import os
from pathlib import Path

import pytest
from filled_jobs import PAIRS, RANKS, SIZE, check, fill_more, filled_folder, names, new_folder, write
from jobs import Job, in_threads, needs_jobs
from mounting import opened

pytest_plugins = ["jobs", "filled_jobs"]
pytestmark = needs_jobs


def test_open_while_others_look(job: Job) -> None:
    """Its name is seen at once, what is in it when it is closed."""
    for holder, other in PAIRS:
        folder, files = filled_folder(job, holder)
        mine, there = job.mount(holder) / folder, job.mount(other) / folder
        fds = {name: os.open(mine / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644) for name in ("first", "second")}
        for name, fd in fds.items():
            os.write(fd, b"some, ")
            files[name] = b"some, and more"
        assert names(there) == sorted(files), "open(O_CREAT) has returned"
        with pytest.raises(FileExistsError):
            write(there / "first", b"")
        os.write(fds["first"], b"and more")
        os.close(fds["first"])
        for rank in RANKS:
            assert (job.mount(rank) / folder / "first").read_bytes() == files["first"]
        files |= fill_more(job, holder, folder, "again")
        os.write(fds["second"], b"and more")
        os.close(fds["second"])
        for rank in RANKS:
            check(job.mount(rank) / folder, files, ["first", "second"])


def test_reopened(job: Job) -> None:
    """Closed, and then written to and closed again."""
    for holder, other in PAIRS:
        folder, files = filled_folder(job, holder)
        mine, there = job.mount(holder) / folder, job.mount(other) / folder
        write(mine / "log", b"one ")
        with open(mine / "log", "ab") as log:
            log.write(b"two ")
        with open(mine / "log", "rb") as log:
            assert log.read() == b"one two "
        with opened(mine / "log", os.O_WRONLY | os.O_APPEND) as fd:
            os.write(fd, b"three")
            copy = os.dup(fd)
            os.close(copy)  # a close like any other
            files["log"] = b"one two three"
            check(there, files, ["log"])


@pytest.mark.parametrize("by", ["holder", "other"])
def test_renamed_while_open(job: Job, by: str) -> None:
    """To where others look without asking the node that has the file open."""
    for holder, other in PAIRS:
        actor = holder if by == "holder" else other
        for target in (new_folder(job, 0), "dataset", filled_folder(job, other)[0]):
            folder, files = filled_folder(job, holder)
            moved = Path(target, f"moved-from-{folder}")
            fd = os.open(job.mount(holder) / folder / "moving", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(fd, b"before, ")
            os.rename(job.mount(actor) / folder / "moving", job.mount(actor) / moved)
            os.write(fd, b"after")
            os.close(fd)
            for rank in sorted(RANKS, key=lambda rank: rank == holder):
                assert (job.mount(rank) / moved).stat().st_size == 13, (target, rank)
                assert (job.mount(rank) / moved).read_bytes() == b"before, after", (target, rank)
                assert names(job.mount(rank) / folder) == sorted(files)


def test_removed_while_open(job: Job) -> None:
    """It does not come back by being closed."""
    for holder, actor in [*PAIRS, (1, 1)]:
        folder, files = filled_folder(job, holder)
        fd = os.open(job.mount(holder) / folder / "gone", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, b"of the old one")
        os.unlink(job.mount(actor) / folder / "gone")
        write(job.mount(actor) / folder / "gone", b"another")
        files["gone"] = b"another"
        assert os.fstat(fd).st_size == 14
        os.close(fd)
        for rank in RANKS:
            check(job.mount(rank) / folder, files, ["gone"])


# --- --output ---


def output_dir(job: Job) -> Path:
    """``--output`` of the shared job."""
    return job.directory / "out"


def test_fsync(job: Job) -> None:
    """Of a file that no other node has looked at."""
    for holder in RANKS:
        folder, _ = filled_folder(job, holder)
        with opened(job.mount(holder) / folder / "synced", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            for text in (b"first", b"second"):
                os.write(fd, text)
                os.fsync(fd)
                content = b"first" if text == b"first" else b"firstsecond"
                assert (output_dir(job) / folder / "synced").read_bytes() == content
                assert (job.mount((holder + 1) % SIZE) / folder / "synced").read_bytes() == content


def test_fsync_and_close_at_once(job: Job) -> None:
    """A file is closed while it is made known what it was before: the close comes last."""
    for number in range(9):
        holder, other = PAIRS[number % len(PAIRS)]
        folder, _ = filled_folder(job, holder)
        with opened(job.mount(holder) / folder / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            os.write(fd, b"one, ")

            def write_more(fd: int = fd) -> None:
                copy = os.dup(fd)
                os.write(copy, b"two")
                os.close(copy)

            in_threads(functools.partial(os.fsync, fd), write_more)
            assert (job.mount(other) / folder / "file").read_bytes() == b"one, two"


def test_fsync_of_a_directory(job: Job) -> None:
    """Every name that was given before is safe, whoever gave it, and whoever asks."""
    for holder, asker in [*PAIRS, (0, 0), (1, 1)]:
        folder = new_folder(job, holder)
        with opened(job.mount(asker) / folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            files = fill_more(job, holder, folder)
            os.fsync(fd)
            check(output_dir(job) / folder, files, files)


# --- all at once ---
