"""Zip files: turned into a tar stream, member by member, for spool.py. What the tar reader checks is left to it: names
that lead out, for one, are refused there.
"""

from __future__ import annotations

import stat
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from fanstore.errors import FormatError
from fanstore.prep.spool import Damaged

_BLOCK_BYTES = 4 << 20
_ENCRYPTED = 1
#: The extra field in which Unix programs keep times, in UTC: https://libzip.org/specifications/extrafld.txt
_TIMES = 0x5455
#: Longer targets of symbolic links are no targets.
_LINK_MAX = 4096


def tar_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The members of a zip file as a tar file. Raises Damaged; FormatError for what cannot be taken."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if info.flag_bits & _ENCRYPTED:
                    raise FormatError(
                        f"'{info.filename}' in '{archive.filename}' is encrypted; unpack the zip file, and prepare that"
                    )
                yield from _member(archive, info)
    except (zipfile.BadZipFile, zlib.error, EOFError, struct.error) as error:
        raise Damaged(error) from error
    except NotImplementedError as error:
        raise FormatError(f"'{file.name}' cannot be unpacked here ({error}); unpack it, and prepare that") from error
    yield bytes(2 * tarfile.BLOCKSIZE)


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    mode = info.external_attr >> 16
    member = tarfile.TarInfo(info.filename)
    member.mtime = _mtime(info)
    if info.is_dir():
        member.type = tarfile.DIRTYPE
        member.mode = stat.S_IMODE(mode) or 0o755
    elif stat.S_ISLNK(mode) and info.file_size < _LINK_MAX:
        member.type = tarfile.SYMTYPE
        member.linkname = archive.read(info).decode("utf-8", "surrogateescape")
    else:
        member.size = info.file_size
        member.mode = stat.S_IMODE(mode) or 0o644
    yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    if member.size:
        with archive.open(info) as content:
            done = 0
            while block := content.read(_BLOCK_BYTES):
                done += len(block)
                yield block
        if done != member.size:
            raise Damaged(f"'{info.filename}' has {done:,} bytes instead of {member.size:,}")
        yield bytes(-member.size % tarfile.BLOCKSIZE)


def _mtime(info: zipfile.ZipInfo) -> float:
    """Seconds since 1970: as Unix programs have noted it, or else the local time that every zip file has."""
    extra = info.extra
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == _TIMES and length >= 5 and extra[4] & 1:
            return float(struct.unpack_from("<i", extra, 5)[0])
        extra = extra[4 + length :]
    try:
        return time.mktime((*info.date_time, 0, 0, -1))
    except (ValueError, OverflowError):
        return 0.0
