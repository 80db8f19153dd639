"""Tar files for tests: sound ones in every dialect, and the means to spoil them header by header.

Owns the making of archives with Python's tarfile, with GNU tar, and block by block; knows nothing of FanStore.
"""

import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

BLOCK = 512


def set_checksum(header: bytearray) -> None:
    """Write the header's own checksum anew, as a hostile author would."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)


def octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def base256(value: int, width: int) -> bytes:
    """A number as GNU tar writes what octal cannot hold."""
    return (0x80 if value >= 0 else 0xFF).to_bytes(1, "big") + value.to_bytes(width - 1, "big", signed=True)


def block(
    name: bytes,
    kind: bytes = b"0",
    size: int = 0,
    link: bytes = b"",
    *,
    mode: bytes = b"0000644\0",
    mtime: bytes = b"00000000000\0",
    size_field: bytes | None = None,
    prefix: bytes = b"",
    gnu: bool = False,
) -> bytes:
    """One header block, with whatever is given in its fields."""
    header = bytearray(BLOCK)
    header[0 : len(name[:100])] = name[:100]
    header[100:108] = mode.ljust(8, b"\0")[:8]
    header[108:124] = b"0000000\0" * 2
    header[124:136] = (octal(size, 12) if size_field is None else size_field)[:12]
    header[136:148] = mtime[:12]
    header[156:157] = kind
    header[157 : 157 + len(link[:100])] = link[:100]
    header[257:265] = b"ustar  \0" if gnu else b"ustar\x0000"
    header[345 : 345 + len(prefix)] = prefix
    set_checksum(header)
    return bytes(header)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def member(name: bytes, content: bytes = b"", kind: bytes = b"0", link: bytes = b"") -> bytes:
    return block(name, kind, len(content), link) + padded(content)


def record(key: bytes, value: bytes) -> bytes:
    """One record of a pax extended header."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return b"%d" % length + rest


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return block(b"PaxHeaders/x", kind, len(records)) + padded(records)


END = bytes(2 * BLOCK)


def by_python(kind: int) -> bytes:
    """A small archive with one of everything, in one of tarfile's three dialects."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=kind, errors="surrogateescape") as tar:

        def add(name: str, content: bytes = b"", **fields: object) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1_700_000_000.25 if kind == tarfile.PAX_FORMAT else 1_700_000_000
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))

        add("dir", type=tarfile.DIRTYPE, mode=0o751)
        add("dir/plain", b"plain content\n" * 20)
        add("dir/empty")
        add("dir/link", type=tarfile.SYMTYPE, linkname="plain")
        add("dir/hard", type=tarfile.LNKTYPE, linkname="dir/plain")
        add("implied/deeper/file", b"x" * 700, mode=0o4755)
        add("pipe", type=tarfile.FIFOTYPE)
        long_parts = 40 if kind != tarfile.USTAR_FORMAT else 14
        add("/".join(["longer"] * long_parts) + "/file", b"deep")
        if kind != tarfile.USTAR_FORMAT:
            add("caf\udce9", b"not UTF-8")
            add("link-to-far", type=tarfile.SYMTYPE, linkname="t/" * 100 + "t")
    return output.getvalue()


def by_gnu_tar(root: Path, *options: str) -> bytes:
    """An archive of a directory, made by GNU tar."""
    command = ["tar", "-cf", "-", *options, "-C", str(root), "."]
    return subprocess.run(command, capture_output=True, check=True, timeout=30).stdout


def headers(data: bytes) -> list[int]:
    """Positions of blocks that look like headers."""
    return [at for at in range(0, len(data) - BLOCK + 1, BLOCK) if data[at + 257 : at + 262] == b"ustar"]


def spoiled(data: bytes, numbers: random.Random, *, sealed: bool) -> bytes:
    """Some bytes of one or two headers changed; with ``sealed`` their checksums are right again."""
    result = bytearray(data)
    places = headers(data)
    for _ in range(numbers.choice((1, 1, 2))):
        at = numbers.choice(places)
        header = result[at : at + BLOCK]
        for _ in range(numbers.choice((1, 1, 1, 3))):
            # Numbers, type and link name matter most.
            position = numbers.choice((numbers.randrange(BLOCK), numbers.randrange(100, 160), numbers.randrange(20)))
            header[position] = numbers.choice(
                (numbers.randrange(256), header[position] ^ 1 << numbers.randrange(8), 0, 0x80)
            )
        if sealed:
            set_checksum(header)
        result[at : at + BLOCK] = header
    if numbers.random() < 0.2:  # the content of pax and long-name members, too
        result[numbers.randrange(len(result))] = numbers.choice(b"0123456789=/.\n \0\xff")
    return bytes(result)


def in_memory(data: bytes) -> int:
    """A descriptor of a file with these bytes: real, but on no disk."""
    fd = os.memfd_create("tar")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd
