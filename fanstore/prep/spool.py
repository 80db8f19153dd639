"""Tar files that cannot be read where they are: compressed ones (gzip, zstd, bzip2, xz), those of addresses, zip files.

Turns each into a plain tar file, which can be read at any position. It lies in the directory of the dataset being
written and goes with it or before it. What a file is, its first bytes say, not its name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fanstore.errors import FormatError, SourceError, UsageError
from fanstore.format.checksum import Hasher
from fanstore.format.storage import is_address, storage_at

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
}
_BLOCK = 4 << 20
#: Names that one pattern may stand for.
_NAMES_MOST = 100_000


def expand(sources: Sequence[str]) -> Iterator[str]:
    """Each source; of an address with braces (``{000..999}``, ``{a,b}``) all that it stands for, as a shell has it."""
    for source in sources:
        if not is_address(source) or "{" not in source:
            yield source
            continue
        parts = [_alternatives(part) if part.startswith("{") else [part] for part in re.split(r"(\{[^{}]*\})", source)]
        for names in product(*parts):
            yield "".join(names)


def _alternatives(braces: str) -> Sequence[str]:
    numbers = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", braces)
    if numbers is None:
        return braces[1:-1].split(",") if "," in braces else [braces]
    first, last = int(numbers[1]), int(numbers[2])
    if not 0 <= last - first < _NAMES_MOST:
        raise UsageError(
            f"{braces} in a SRC is no range of numbers, from the smaller to the larger, that is of use here"
        )
    width = max(map(len, numbers.groups())) if any(text.startswith("0") for text in numbers.groups()) else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def compression_of(path: str) -> str | None:
    """The name of the compression of a file, or None if it has none that is known."""
    try:
        with open(path, "rb") as file:
            return _compression(file)
    except OSError as error:
        raise SourceError(f"cannot read the source '{path}': {error.strerror}") from error


def _compression(file: io.BufferedReader) -> str | None:
    start = file.peek(8)
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def spool(source: str, target: Path, tick: Callable[[int], None]) -> int:
    """Write the plain bytes of a file or an address to the new file ``target``; ``tick`` gets the bytes written.

    Returns their checksum.
    """
    done = 0
    hasher = Hasher()
    try:
        with _opened(source) as file, open(target, "xb") as plain:
            compression = _compression(file)
            if compression == "zip" and is_address(source):
                raise SourceError(f"'{source}' is a zip file, which cannot be read from an address; fetch it first")
            for block in _plain_blocks(file) if compression is None else _READERS[compression](file):
                plain.write(block)
                hasher.update(block)
                done += len(block)
                tick(done)
    except Damaged as error:
        raise FormatError(f"'{source}' is damaged or cut short: {error}") from error
    except OSError as error:
        what = "fetch" if is_address(source) else "unpack"
        raise SourceError(f"cannot {what} '{source}' to '{target}': {error.strerror}") from error
    return hasher.intdigest()


def _opened(source: str) -> io.BufferedReader:
    if not is_address(source):
        return open(source, "rb")
    return io.BufferedReader(_Stream(source), _BLOCK)


class _Stream(io.RawIOBase):
    """The object at an address, from its first to its last byte."""

    def __init__(self, address: str) -> None:
        folder, _, name = address.rpartition("/")
        storage = storage_at(folder)
        self._blocks = storage.stream(name, storage.length(name))
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._rest:
            self._rest = next(self._blocks, memoryview(b""))
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._blocks.close()
        super().close()


class Damaged(Exception):
    """The compressed bytes do not decode; every library has its own exception for that."""


def _plain_blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


# The libraries are loaded when they are needed: most datasets need none, and a command should start quickly.


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    import gzip
    import zlib

    try:
        with gzip.open(file) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Damaged(error) from error


def _bzip2_blocks(file: BinaryIO) -> Iterator[bytes]:
    import bz2

    try:
        with bz2.open(file) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except EOFError as error:
        raise Damaged(error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise Damaged(error) from error  # bz2 reports damage so


def _xz_blocks(file: BinaryIO) -> Iterator[bytes]:
    import lzma

    try:
        with lzma.open(file) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except (EOFError, lzma.LZMAError) as error:
        raise Damaged(error) from error


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    import zstandard

    # The library's stream reader takes the end of the file for the end of the frame: a cut file would go unnoticed.
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    begun = False
    try:
        while data := file.read(_BLOCK):
            while data:
                begun = True
                yield frame.decompress(data)
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = decompressor.decompressobj()
                    begun = False
    except zstandard.ZstdError as error:
        raise Damaged(error) from error
    if begun:
        raise Damaged("the last zstd frame is not complete")


def _zip_blocks(file: BinaryIO) -> Iterator[bytes]:
    from fanstore.prep.zipped import tar_blocks

    return tar_blocks(file)


_READERS = {
    "gzip": _gzip_blocks,
    "zstd": _zstd_blocks,
    "bzip2": _bzip2_blocks,
    "xz": _xz_blocks,
    "zip": _zip_blocks,
}
