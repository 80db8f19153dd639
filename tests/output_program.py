"""A program that writes outputs at random, and notes in a ledger what it is about to do and what it has done.

Owns the program (``python output_program.py DIRECTORY LEDGER SEED SECONDS``): it works in one directory of a mount,
alone, until its time is up, LEDGER.end is there, or a call fails. The ledger is outside of the mount: a list of JSON,
one line before each call ("begin") and one after it ("end"); at the end of all, perhaps, "error" and when
(time.monotonic). Contents are named by checksum and size. Used by test_outputs_crash.py and test_outputs_job.py; what
the lines mean for ``--output`` is in output_model.py.
"""

import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def identity(content: bytes) -> str:
    """How a content is called in a ledger."""
    return f"{zlib.crc32(content):08x}-{len(content)}"


class Ledger:
    """Notes what is done, before and after."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *words: object) -> None:
        os.write(self._fd, json.dumps(words).encode() + b"\n")

    def do(self, call: Callable[[], Any], *words: object) -> Any:
        """Do something, and note it."""
        self.note("begin", *words)
        result = call()
        self.note("end", *words)
        return result


class Program:
    """The program; names are relative to its directory.

    Attributes:
        files: closed ones. folders: without the directory itself. log: an open file and what is in it.
    """

    def __init__(self, directory: Path, ledger: Ledger, seed: int) -> None:
        self.directory = directory
        self.ledger = ledger
        self.chance = random.Random(seed)
        self.files: list[str] = []
        self.folders: list[str] = []
        self.count = 0
        self.log: tuple[int, bytes] | None = None
        for base, folders, files in os.walk(directory):
            for name in folders:
                self.folders.append(os.path.relpath(os.path.join(base, name), directory))
            for name in files:
                path = os.path.relpath(os.path.join(base, name), directory)
                if path != "log":
                    self.files.append(path)
        # Numbers of an earlier run are not given again: a folder would be renamed to one that is there.
        self.count = max((int(name.rsplit("-", 1)[1]) for name in self.folders), default=0)

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def some_name(self) -> str:
        folder = self.chance.choice(["", *self.folders])
        return os.path.join(folder, f"n{self.chance.randrange(6)}")

    def run(self, seconds: float, end: str) -> None:
        end_s = time.monotonic() + seconds
        actions = [self.save] * 5 + [self.checkpoint] * 6 + [self.write_log] * 4 + [self.remove] * 2
        actions += [self.rename] * 3 + [self.make_folder, self.remove_folder, self.rename_folder]
        while time.monotonic() < end_s and not os.path.exists(end):
            self.chance.choice(actions)()
        if self.log is not None:
            self.close_log()

    # --- files ---

    def content(self) -> bytes:
        return self.chance.randbytes(self.chance.choice([1, 100, 5000, 70_000, 200_000]))

    def save(self, name: str | None = None, sync: bool | None = None) -> None:
        name = name or self.some_name()
        content = self.content()
        do = self.ledger.do
        fd = do(lambda: os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), "create", name)
        if name not in self.files:
            self.files.append(name)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view[:30_000]) :]
        if self.chance.random() < 0.3 if sync is None else sync:
            do(lambda: os.fsync(fd), "sync", name, identity(content))
        do(lambda: os.close(fd), "close", name, identity(content))
        if self.chance.random() < 0.15:
            do(lambda: os.utime(self.path(name), (1e9, 1e9 + self.chance.randrange(1000))), "utime", name)

    def checkpoint(self) -> None:
        """Write to a temporary name, then rename."""
        name = self.some_name()
        self.save(name + ".tmp")
        self.move(name + ".tmp", name)

    def write_log(self) -> None:
        """Append to a file that stays open."""
        if self.log is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            fd = self.ledger.do(lambda: os.open(self.path("log"), flags, 0o644), "create", "log")
            self.log = (fd, b"")
        fd, content = self.log
        line = b"%d\n" % self.chance.randrange(1 << 60)
        os.write(fd, line)
        content += line
        self.log = (fd, content)
        if self.chance.random() < 0.5:
            self.ledger.do(lambda: os.fsync(fd), "sync", "log", identity(content))
        if self.chance.random() < 0.1:
            self.close_log()

    def close_log(self) -> None:
        assert self.log is not None
        fd, content = self.log
        self.log = None
        self.ledger.do(lambda: os.close(fd), "close", "log", identity(content))

    # --- names ---

    def move(self, old: str, new: str) -> None:
        self.ledger.do(lambda: os.rename(self.path(old), self.path(new)), "rename", old, new)
        self.files = [name for name in self.files if name not in (old, new)] + [new]

    def rename(self) -> None:
        if self.files:
            old, new = self.chance.choice(self.files), self.some_name()
            if old != new:
                self.move(old, new)

    def remove(self) -> None:
        if self.files:
            name = self.chance.choice(self.files)
            self.ledger.do(lambda: os.unlink(self.path(name)), "unlink", name)
            self.files.remove(name)

    def make_folder(self) -> None:
        if len(self.folders) < 5:
            self.count += 1
            parent = self.chance.choice(["", *self.folders])
            name = os.path.join(parent, f"d{self.chance.randrange(1000)}-{self.count}")
            self.ledger.do(lambda: os.mkdir(self.path(name)), "mkdir", name)
            self.folders.append(name)

    def remove_folder(self) -> None:
        names = self.files + self.folders
        empty = [name for name in self.folders if not any(other.startswith(name + "/") for other in names)]
        if empty:
            name = self.chance.choice(empty)
            self.ledger.do(lambda: os.rmdir(self.path(name)), "rmdir", name)
            self.folders.remove(name)

    def rename_folder(self) -> None:
        if self.folders:
            self.count += 1
            old = self.chance.choice(self.folders)
            new = os.path.join(os.path.dirname(old), f"r{self.chance.randrange(1000)}-{self.count}")
            self.ledger.do(lambda: os.rename(self.path(old), self.path(new)), "rename", old, new)

            def moved(name: str) -> str:
                return new + name[len(old) :] if name == old or name.startswith(old + "/") else name

            self.files, self.folders = [*map(moved, self.files)], [*map(moved, self.folders)]


def main() -> None:
    directory, ledger, seed, seconds = Path(sys.argv[1]), Ledger(Path(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
    try:
        directory.mkdir(exist_ok=True)
        ledger.note("end", "start")
        Program(directory, ledger, seed).run(float(seconds), sys.argv[2] + ".end")
        ledger.note("end", "all")
    except OSError as error:
        ledger.note("error", time.monotonic(), str(error))


if __name__ == "__main__":
    main()
