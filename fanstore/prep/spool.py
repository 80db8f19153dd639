"""Turns a compressed tar (gzip, zstd, bzip2, xz) into a plain one, which can be read at any position.

The plain copy lies in the directory of the dataset being written and goes with it or before it. What a file is, its
first bytes say, not its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from fanstore.errors import FormatError, SourceError

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_BLOCK = 4 << 20


def compression_of(path: str) -> str | None:
    """The name of the compression of a file, or None if it has none that is known."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise SourceError(f"cannot read the source '{path}': {error.strerror}") from error
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def decompress(path: str, compression: str, target: Path, tick: Callable[[int], None]) -> None:
    """Write the plain bytes of ``path`` to the new file ``target``; ``tick`` gets the bytes written so far."""
    done = 0
    try:
        with open(path, "rb") as file, open(target, "xb") as plain:
            for block in _READERS[compression](file):
                plain.write(block)
                done += len(block)
                tick(done)
    except _Damaged as error:
        raise FormatError(f"'{path}' is damaged or cut short: {error}") from error
    except OSError as error:
        raise SourceError(f"cannot unpack '{path}' to '{target}': {error.strerror}") from error


class _Damaged(Exception):
    """The compressed bytes do not decode; every library has its own exception for that."""


# The libraries are loaded when they are needed: most datasets need none, and a command should start quickly.


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    import gzip
    import zlib

    try:
        with gzip.open(file) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _Damaged(error) from error


def _bzip2_blocks(file: BinaryIO) -> Iterator[bytes]:
    import bz2

    try:
        with bz2.open(file) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except EOFError as error:
        raise _Damaged(error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _Damaged(error) from error  # bz2 reports damage so


def _xz_blocks(file: BinaryIO) -> Iterator[bytes]:
    import lzma

    try:
        with lzma.open(file) as stream:
            while block := stream.read(_BLOCK):
                yield block
    except (EOFError, lzma.LZMAError) as error:
        raise _Damaged(error) from error


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
        raise _Damaged(error) from error
    if begun:
        raise _Damaged("the last zstd frame is not complete")


_READERS = {"gzip": _gzip_blocks, "zstd": _zstd_blocks, "bzip2": _bzip2_blocks, "xz": _xz_blocks}
