"""Where the files of a prepared dataset are kept, and how they are read: a directory of any file system.

Owns the interface ``Storage``, the table that tells by an address which storage it is (``STORAGES``), and the one for
directories. Does not know what is in the files: prepared.py does. Used by whoever opens a dataset, by prep.verify, and
by the sources of the dataset package. Calls block; any thread. What cannot be read is an OSError whose ``strerror`` is
for people, and a file that ends too early CorruptDataError.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Protocol

from fanstore.errors import CorruptDataError, FormatError
from fanstore.format.manifest import MANIFEST_FILE
from fanstore.format.users import wait_while_replaced

log = logging.getLogger(__name__)

#: Stored bytes as whoever has them gives them.
Stored = bytes | memoryview

#: The size of a request of Lustre and others, and small enough that the bytes are still in the processor's cache when
#: they are checked and written: 620 MB from the page cache took 0.20 s, with 8 MiB 0.47 s (cp: 0.34 s).
BLOCK_BYTES = 1 << 20


class StoredFile(Protocol):
    """A file of a dataset that is open; ``length`` is what it has now."""

    length: int

    def read(self, offset: int, length: int) -> Stored:
        """Exactly this range. Raises OSError, CorruptDataError."""

    def close(self) -> None:
        """Not before the last read has returned."""


class Storage(Protocol):
    """The files of one prepared dataset, by the names that its manifest has for them. ``str()`` is its address.

    Attributes:
        words: what kind of storage this is, for people.
        directory: where the files are if any program can open them there; else None.
    """

    words: str

    @property
    def directory(self) -> Path | None: ...

    def label(self, name: str) -> str:
        """What sentences call a file."""

    def check(self) -> None:
        """FormatError if there is no prepared dataset, as far as can be seen from outside."""

    def read(self, name: str) -> bytes:
        """A whole file that is small. Raises OSError."""

    def length(self, name: str) -> int:
        """Bytes of a file that can be read. Raises OSError."""

    def open(self, name: str) -> StoredFile:
        """Raises OSError."""

    def stream(self, name: str, length: int) -> Generator[memoryview, None, None]:
        """The first ``length`` bytes in order, in blocks; fewer if the file is shorter. Raises OSError.

        For copying all of it: a block may be overwritten as soon as the next one is asked for.
        """


class Directory:
    """A dataset in a directory, which may be on a shared file system."""

    words = "shared file system"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = Path(path).absolute()
        self._named = Path(path)

    def __str__(self) -> str:
        return str(self.directory)

    def label(self, name: str) -> str:
        return str(self.directory / name)  # that of an external partition is an absolute path

    def check(self) -> None:
        directory, named = self.directory, self._named  # a daemon has left the working directory
        try:
            os.stat(directory / MANIFEST_FILE)
        except (FileNotFoundError, NotADirectoryError):
            pass  # looked at more closely below
        except OSError as error:
            raise FormatError(f"cannot read the prepared dataset '{named}': {error.strerror}") from error
        moved = wait_while_replaced(directory)
        if moved:
            raise FormatError(f"'{named}' does not exist; a killed fanstore-prep left it as '{moved[0]}': rename that")
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            raise FormatError(f"the prepared dataset '{named}' {what}; make one with fanstore-prep")
        if not (directory / MANIFEST_FILE).exists():
            raise FormatError(f"'{named}' is not a prepared dataset: it has no {MANIFEST_FILE}; use fanstore-prep")

    def read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()

    def length(self, name: str) -> int:
        path = self.directory / name
        length = path.stat().st_size
        if not os.access(path, os.R_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return length

    def open(self, name: str) -> StoredFile:
        return _File(self.directory / name)

    def stream(self, name: str, length: int) -> Generator[memoryview, None, None]:
        with open(self.directory / name, "rb", buffering=0) as file:
            advise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield from blocks_of(file.fileno(), ((0, length),))


def blocks_of(fd: int, ranges: Iterable[tuple[int, int]]) -> Generator[memoryview, None, None]:
    """These ranges of a file, offset and length, in order, in blocks; fewer if it is shorter. Raises OSError.

    As ``Storage.stream``. Each range is taken when the one before it is about to be read.
    """
    buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # page-aligned: the kernel copies to such buffers much faster
    wanted = iter(ranges)
    following = next(wanted, None)
    while following is not None:
        position, count = following
        following = next(wanted, None)
        if following is not None:
            advise(fd, *following, os.POSIX_FADV_WILLNEED)
        end = position + count
        while position < end:
            # What may have been appended to an external tar since then is not part of the partition.
            got = os.preadv(fd, [buffer[: min(BLOCK_BYTES, end - position)]], position)
            if not got:
                return
            yield buffer[:got]
            # The copy is read from now on: do not let the source push more useful pages out of memory.
            advise(fd, position, got, os.POSIX_FADV_DONTNEED)
            position += got


class _File:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.length = os.fstat(self._fd).st_size
        advise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, offset: int, length: int) -> bytes:
        return pread_exactly(self._fd, offset, length)

    def close(self) -> None:
        os.close(self._fd)


def _objects(address: str) -> Storage:
    from fanstore.format.objects import Objects  # which imports this module

    return Objects(address)


#: How an address begins, and what makes its storage; everything else is a directory.
STORAGES: dict[str, Callable[[str], Storage]] = {"http": _objects, "https": _objects, "s3": _objects}


def is_address(text: str | os.PathLike[str]) -> bool:
    """Whether this is no path, but an address of a storage that is no directory."""
    return str(text).partition("://")[0].lower() in STORAGES and "://" in str(text)


def storage_at(address: str | os.PathLike[str]) -> Storage:
    """The storage that an address or a path leads to; nothing is looked at yet. Raises UsageError."""
    if is_address(address):
        text = str(address)
        return STORAGES[text.partition("://")[0].lower()](text)
    return Directory(address)


def pread_exactly(fd: int, offset: int, length: int) -> bytes:
    """A range of a file; one that ends before it is damaged, not at its end. Raises OSError, CorruptDataError."""
    data = os.pread(fd, length, offset)
    if len(data) == length:
        return data
    parts = [data]
    missing = length - len(data)
    while missing and data:
        data = os.pread(fd, missing, offset + length - missing)
        parts.append(data)
        missing -= len(data)
    if missing:
        raise ends_at(offset + length - missing)
    return b"".join(parts)


def ends_at(position: int) -> CorruptDataError:
    """What to raise for a file that should be longer."""
    return CorruptDataError(f"the partition file is truncated: it ends at byte {position}")


def advise(fd: int, offset: int, length: int, advice: int) -> None:
    """posix_fadvise, where it is possible."""
    try:
        os.posix_fadvise(fd, offset, length, advice)
    except OSError as error:
        log.debug("fadvise is not possible: %s", error)  # it is advice: nothing depends on it
