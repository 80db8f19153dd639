"""Lists the members of a plain tar file: ustar, pax, GNU and the old v7 form, byte-exact names, nanosecond times.

Parses headers itself instead of asking the standard library, because a tar may come from anywhere: Python's tarfile
takes a damaged header for the end of the archive, believes any size that a header claims and allocates it, and in many
releases needs quadratic time for a hostile pax header. Here every length is checked against the file before it is used,
and whatever is not a sound tar is refused with one sentence. Memory does not grow with the archive. Used by
fanstore.prep.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from fanstore.errors import FormatError
from fanstore.units import format_path

BLOCK = 512
NAME_MAX = 255
LINK_MAX = 4095
#: Directories in one path: far more than people make, and a bound for the work that one long name can cause.
DEPTH_MAX = 1024
#: Of a pax header or a GNU long name. Real ones have some hundred bytes, with extended attributes some thousand.
EXTENSION_MAX = 1 << 20
#: Bytes of a name that an error shows.
SHOWN_MAX = 160
#: mtime in 64 bits of nanoseconds; what lies outside (before 1677, after 2262) is moved to the nearest that fits.
MTIME_MIN_NS, MTIME_MAX_NS = -(1 << 63), (1 << 63) - 1

_ZEROS = bytes(BLOCK)
_KEYS = (b"path", b"linkpath", b"size", b"mtime", b"uid", b"gid")
_SPARSE = b"GNU.sparse."
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*")
_COUNT = re.compile(rb"\d{1,30}")  # leading zeros are allowed, our own headers have some
_DECIMAL = re.compile(rb"(-?)(\d{1,20})(?:\.(\d*))?")
_KINDS = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hardlink", b"2": "symlink", b"5": "directory",
          b"D": "directory", b"3": "special", b"4": "special", b"6": "special"}  # fmt: skip


class TarMember(NamedTuple):
    """One member. ``kind`` is 'file', 'directory', 'symlink', 'hardlink' or 'special' (a device or a pipe)."""

    path: tuple[bytes, ...]  #: components; empty for the root itself
    kind: str
    mode: int  #: permission bits
    mtime_ns: int
    size: int
    offset: int  #: of the content in the tar file
    link: bytes  #: target of a symbolic link
    link_path: tuple[bytes, ...]  #: of a hard link: the member it names
    uid: int
    gid: int


class _Refused(Exception):
    """Half a sentence on a member: why the archive is not taken."""


@dataclass
class _Extensions:
    """What headers before a member say about it. ``always`` holds for the rest of the archive (pax type g)."""

    always: dict[bytes, bytes] = field(default_factory=dict)
    once: dict[bytes, bytes] = field(default_factory=dict)
    pending: bool = False

    def take(self) -> dict[bytes, bytes]:
        taken = self.always | self.once
        self.once = {}
        self.pending = False
        # An empty value takes back what was said before (POSIX, pax extended header).
        return {key: value for key, value in taken.items() if value}


def list_members(file: BinaryIO, file_bytes: int, what: str) -> Iterator[TarMember]:
    """All members in order. ``what`` names the file in errors; FormatError on anything that is not a sound tar."""
    try:
        yield from _members(file, file_bytes, what)
    except OSError as error:
        raise FormatError(f"cannot read {what}: {error.strerror or error}") from error


def _members(file: BinaryIO, file_bytes: int, what: str) -> Iterator[TarMember]:
    extensions = _Extensions()
    position = 0
    if file_bytes == 0:
        raise FormatError(f"{what} is empty, not a tar file")
    while True:
        header = _read(file, position, BLOCK)
        if header == _ZEROS and not extensions.pending:
            return
        if len(header) < BLOCK or header == _ZEROS:
            raise FormatError(f"{what} is cut short: there is no end mark, or no member, at byte {position}")
        if not _checksum_matches(header):
            if position == 0:
                raise FormatError(f"{what} is not a tar file: it does not begin with a tar header")
            raise FormatError(f"{what} is damaged: there is no valid tar header at byte {position}")
        kind, content = header[156:157], position + BLOCK
        try:
            size = _number(header[124:136], "size")
        except _Refused as refused:
            raise FormatError(f"{what} is not a sound tar file: the header at byte {position} {refused}") from None
        if kind in b"xXgLK":
            _extend(extensions, kind, _extension(file, content, size, file_bytes, what), what)
            position = content + _padded(size)
            continue
        if kind == b"V":  # the label of a volume, which is no member
            position = content
            continue
        said = extensions.take()
        name = said.get(b"path") or _ustar_name(header)
        try:
            member = _member(header, name, said, content)
            has_content = kind in b"0\x007D"
            if has_content:
                size = member.size if member.kind == "file" else size
                if not 0 <= size <= file_bytes - content:
                    raise _Refused("ends after the end of the file, which is cut short")
        except _Refused as refused:
            raise FormatError(f"member {format_path(name, SHOWN_MAX)} of {what} {refused}") from None
        yield member
        position = content + (_padded(size) if has_content else 0)


def _read(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    return file.read(count)


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _checksum_matches(header: bytes) -> bool:
    match = _OCTAL.fullmatch(header[148:156])
    if match is None or not match[1]:
        return False
    rest = header[:148] + b"        " + header[156:]
    expected, unsigned = int(match[1], 8), sum(rest)
    # Some old programs added the bytes as signed numbers.
    return expected == unsigned or expected == unsigned - 256 * sum(byte > 127 for byte in rest)


def _number(value: bytes, name: str) -> int:
    """A number field: octal digits, or big-endian binary as GNU tar writes what octal cannot hold."""
    if value[0] == 0x80:
        return int.from_bytes(value[1:], "big")
    if value[0] == 0xFF:
        return int.from_bytes(value, "big", signed=True)
    match = _OCTAL.fullmatch(value)
    if match is None:
        raise _Refused(f"has an invalid {name}")
    return int(match[1] or b"0", 8)


def _extension(file: BinaryIO, position: int, size: int, file_bytes: int, what: str) -> bytes:
    if not 0 <= size <= EXTENSION_MAX:
        raise FormatError(f"{what} is not a sound tar file: an extended header at byte {position} claims {size} bytes")
    if size > file_bytes - position:
        raise FormatError(f"{what} is cut short in an extended header at byte {position}")
    data = _read(file, position, size)
    if len(data) < size:
        raise FormatError(f"{what} became shorter while it was read")
    return data


def _extend(extensions: _Extensions, kind: bytes, data: bytes, what: str) -> None:
    """Remember what a pax header (x, X, g) or a GNU long name (L, K) says about the member that follows."""
    if kind == b"g":
        extensions.always |= _records(data, what)
        return
    extensions.pending = True
    if kind in b"LK":
        extensions.once[b"path" if kind == b"L" else b"linkpath"] = data.split(b"\0", 1)[0]
    else:
        extensions.once |= _records(data, what)


def _records(data: bytes, what: str) -> dict[bytes, bytes]:
    """Of the records ``LENGTH KEY=VALUE\\n`` of a pax header, those that mean something here."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        end = at + int(data[at:space]) if space > 0 and _COUNT.fullmatch(data[at:space]) else -1
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space + 1 < end <= len(data) or data[end - 1] != 0x0A or not equals or not key:
            raise FormatError(f"{what} is not a sound tar file: a pax header has an invalid record")
        if key in _KEYS:
            records[key] = value
        elif key.startswith(_SPARSE):
            records[_SPARSE] = b"yes"
        at = end
    return records


def _member(header: bytes, name: bytes, said: dict[bytes, bytes], content: int) -> TarMember:
    flag = header[156:157]
    kind = _KINDS.get(flag)
    if flag == b"S" or _SPARSE in said:
        raise _Refused("is stored sparse, which cannot be read in place; unpack the tar and prepare the tree")
    if kind is None:
        raise _Refused(f"has the unknown type {flag!r}")
    if flag == b"\0" and name.endswith(b"/"):
        kind = "directory"  # as tar wrote directories before 1988
    size, link = 0, b""
    link_path: tuple[bytes, ...] = ()
    if kind == "file":
        size = _count(said, b"size", header[124:136])
    elif kind in ("symlink", "hardlink"):
        link = said.get(b"linkpath") or header[157:257].split(b"\0", 1)[0]
        if kind == "hardlink":
            link_path, link = _split(link, "a hard link target"), b""
        elif not 0 < len(link) <= LINK_MAX or b"\0" in link:
            raise _Refused("is a symbolic link without a valid target")
        size = len(link)
    uid, gid = _count(said, b"uid", header[108:116]), _count(said, b"gid", header[116:124])
    return TarMember(
        path=_split(name, "a name"),
        kind=kind,
        mode=_number(header[100:108], "mode") & 0o7777,
        mtime_ns=_mtime_ns(said.get(b"mtime"), header[136:148]),
        size=size,
        offset=content,
        link=link,
        link_path=link_path,
        uid=uid if 0 <= uid < 1 << 32 else 0,
        gid=gid if 0 <= gid < 1 << 32 else 0,
    )


def _ustar_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    # Only POSIX has a prefix; GNU tar keeps other things in its place.
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _count(said: dict[bytes, bytes], key: bytes, value: bytes) -> int:
    """A number that a pax header gives, or else the field of the ustar header."""
    text = said.get(key)
    if text is None:
        return _number(value, key.decode())
    if not _COUNT.fullmatch(text):
        raise _Refused(f"has an invalid {key.decode()}")
    return int(text)


def _split(path: bytes, which: str) -> tuple[bytes, ...]:
    """Components of a path in the archive; refuses what could leave its root or no file system could hold."""
    if path.startswith(b"/"):
        raise _Refused(f"has {which} that is absolute")
    if path.count(b"/") > DEPTH_MAX:
        raise _Refused(f"has {which} of more than {DEPTH_MAX} directories")
    parts = tuple(part for part in path.split(b"/") if part not in (b"", b"."))
    for part in parts:
        if part == b"..":
            raise _Refused(f"has {which} with '..' in it")
        if len(part) > NAME_MAX:
            raise _Refused(f"has {which} of {len(part)} bytes, 255 is the limit")
        if b"\0" in part:
            raise _Refused(f"has {which} with NUL in it")
    return parts


def clamp_mtime_ns(value: int) -> int:
    """The nearest time that an index can hold."""
    return min(max(value, MTIME_MIN_NS), MTIME_MAX_NS)


def _mtime_ns(text: bytes | None, value: bytes) -> int:
    if text is None:
        return clamp_mtime_ns(_number(value, "time") * 10**9)
    match = _DECIMAL.fullmatch(text)
    if match is None:
        raise _Refused("has an invalid time")
    whole = int(match[2]) * 10**9 + int(((match[3] or b"") + b"000000000")[:9])
    return clamp_mtime_ns(-whole if match[1] else whole)
