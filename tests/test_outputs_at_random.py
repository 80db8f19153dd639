"""Directories of several nodes, and whatever programs do in them, in an order that nobody has thought of."""

import functools
import itertools
import os
import random
from pathlib import Path

import pytest
from filled_jobs import RANKS, SERIES, content_of, fill, filled_folder, folder_numbers, new_folder, write
from jobs import Job, in_threads, needs_jobs

pytest_plugins = ["jobs", "filled_jobs"]
pytestmark = needs_jobs


class Story:
    """Whatever nodes do in some directories, one after another, and what must be there then.

    Attributes:
        folders: those that there are; other stories may use them at the same time, unless this one is alone.
        tag: what the names of its files begin with. files: by path, what was written.
        held: of a file that is open, its path (None when it was removed) and what was written, by descriptor.
    """

    def __init__(self, job: Job, seed: int, folders: list[str], tag: str, alone: bool) -> None:
        self.job = job
        self.chance = random.Random(seed)
        self.folders = folders
        self.tag = tag
        self.alone = alone
        self.files: dict[str, bytes] = {}
        self.held: dict[int, tuple[str | None, bytes]] = {}
        self.count = 0
        self.steps = [self.burst] * 4 + [self.hold] * 2
        self.steps += [self.release, self.unlink, self.move, self.replace, self.append]
        self.steps += [self.move_folder, self.make_folder, self.remove_folder] if alone else []

    def tell(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
            while self.held:
                self.release()
            for rank, folder in itertools.product(RANKS, self.folders):
                self.check(rank, folder)
        finally:
            for fd in self.held:
                os.close(fd)

    def step(self) -> None:
        self.chance.choice(self.steps)()
        self.check(self.chance.choice(RANKS), self.chance.choice(self.folders))

    def mount(self) -> Path:
        return self.job.mount(self.chance.choice(RANKS))

    def new_name(self) -> str:
        self.count += 1
        return f"{self.chance.choice(self.folders)}/{self.tag}{self.count}"

    def open_paths(self) -> set[str | None]:
        return {path for path, _ in self.held.values()}

    def some_file(self) -> str | None:
        return self.chance.choice(list(self.files)) if self.files else None

    def closed_file(self) -> str | None:
        path = self.some_file()
        return None if path in self.open_paths() else path

    def replace_path(self, old: str, new: str | None) -> None:
        self.held = {fd: (new if path == old else path, text) for fd, (path, text) in self.held.items()}

    def burst(self) -> None:
        mount, folder = self.mount(), self.chance.choice(self.folders)
        for _ in range(self.chance.choice((2, 2 * SERIES, 5 * SERIES))):
            self.count += 1
            path = f"{folder}/{self.tag}{self.count}"
            write(mount / path, content_of(path))
            self.files[path] = content_of(path)

    def hold(self) -> None:
        path = self.new_name()
        fd = os.open(self.mount() / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, b"begun, ")
        self.held[fd] = (path, b"begun, ")
        self.files[path] = b"begun, "

    def release(self) -> None:
        if self.held:
            fd = self.chance.choice(list(self.held))
            path, text = self.held.pop(fd)
            os.write(fd, b"ended")
            os.close(fd)
            if path is not None:
                self.files[path] = text + b"ended"

    def unlink(self) -> None:
        if path := self.some_file():
            os.unlink(self.mount() / path)
            del self.files[path]
            self.replace_path(path, None)

    def move(self, new: str | None = None) -> None:
        old, mount = self.some_file(), self.mount()
        new = new or self.new_name()
        if old is not None and old != new:
            os.rename(mount / old, mount / new)
            self.replace_path(new, None)
            self.replace_path(old, new)
            self.files[new] = self.files.pop(old)

    def replace(self) -> None:
        self.move(self.some_file())

    def append(self) -> None:
        if path := self.closed_file():
            with open(self.mount() / path, "ab") as file:
                file.write(b"appended")
            self.files[path] += b"appended"

    def make_folder(self) -> None:
        path = self.new_name()
        os.mkdir(self.mount() / path)
        self.folders.append(path)

    def inside(self, folder: str) -> list[str]:
        return [path for path in (*self.files, *self.folders) if path.startswith(f"{folder}/")]

    def remove_folder(self) -> None:
        folder = self.chance.choice(self.folders)
        if len(self.folders) == 1:
            return
        if self.inside(folder):
            with pytest.raises(OSError, match="not empty"):
                os.rmdir(self.mount() / folder)
            return
        os.rmdir(self.mount() / folder)
        self.folders.remove(folder)

    def move_folder(self) -> None:
        old, mount = self.chance.choice(self.folders), self.mount()
        new = os.path.join(os.path.dirname(old), f"folder-{next(folder_numbers)}")
        os.rename(mount / old, mount / new)
        moved = {path: new + path.removeprefix(old) for path in (old, *self.inside(old))}
        for path, target in moved.items():
            self.replace_path(path, target)
        self.files = {moved.get(path, path): content for path, content in self.files.items()}
        self.folders = [moved.get(path, path) for path in self.folders]

    def check(self, rank: int, folder: str) -> None:
        """All of a directory, as one node sees it."""
        directory = self.job.mount(rank) / folder
        expected = {path.rpartition("/")[2] for path in self.inside(folder) if os.path.dirname(path) == folder}
        with os.scandir(directory) as entries:
            found = {entry.name: entry.stat().st_size for entry in entries if self.alone or self.is_mine(entry.name)}
        assert found.keys() == expected, f"on rank {rank}"
        closed = [
            name for name in expected if (path := f"{folder}/{name}") in self.files and path not in self.open_paths()
        ]
        for name in closed:
            assert found[name] == len(self.files[f"{folder}/{name}"]), f"{name} on rank {rank}"
        for name in self.chance.sample(sorted(closed), min(2, len(closed))):
            assert (directory / name).read_bytes() == self.files[f"{folder}/{name}"], f"{name} on rank {rank}"
        if not self.alone:
            return
        status, other = os.stat(directory), os.stat(self.mount() / folder)
        assert status.st_nlink == 2 + len(expected & {path.rpartition("/")[2] for path in self.folders})
        assert (status.st_mtime_ns, status.st_nlink) == (other.st_mtime_ns, other.st_nlink)

    def is_mine(self, name: str) -> bool:
        return name.startswith(self.tag)


@pytest.mark.parametrize("seed", range(2))
def test_at_random(job: Job, seed: int) -> None:
    """Calls of all nodes in an order that nobody has thought of, on the same directories."""
    Story(job, seed, [new_folder(job), new_folder(job)], "", alone=True).tell(50)


def test_at_random_at_once(job: Job) -> None:
    """The same three times at the same time."""
    folders = [new_folder(job), new_folder(job)]
    in_threads(*(functools.partial(Story(job, seed, folders, f"{seed}-", alone=False).tell, 30) for seed in range(3)))


def test_checkpoints(job: Job) -> None:
    """Written to a temporary name and renamed, in a directory that is filled: there is a whole one at every moment."""
    for holder in (0, 1):
        folder, _ = filled_folder(job, holder)
        mine = job.mount(holder) / folder
        for number in range(12):
            write(mine / "temporary", b"checkpoint %d" % number)
            os.rename(mine / "temporary", mine / "checkpoint")
            fill(mine, f"samples-{number}", 2 * SERIES)
            for rank in RANKS:
                assert (job.mount(rank) / folder / "checkpoint").read_bytes() == b"checkpoint %d" % number
                assert not (job.mount(rank) / folder / "temporary").exists()


# --- nodes that do not answer ---
