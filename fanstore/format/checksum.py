"""The one checksum of FanStore: XXH3-64, over stored bytes (docs/format.md, *Chunks*)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: A running checksum: ``update(bytes)``, ``intdigest()``.
Hasher = xxhash.xxh3_64

#: Checksum of no bytes: that of an empty file.
EMPTY = xxhash.xxh3_64_intdigest(b"")


def xxh3_64(data: Buffer) -> int:
    """Checksum of some bytes. Releases the GIL for large ones."""
    return xxhash.xxh3_64_intdigest(data)


def of_chunks(checksums: Iterable[int]) -> int:
    """Checksum of a file of several chunks, from its chunks' checksums."""
    return xxhash.xxh3_64_intdigest(b"".join(value.to_bytes(8, "little") for value in checksums))


def to_hex(value: int) -> str:
    """As it is written in manifests and extended attributes."""
    return f"{value:016x}"
