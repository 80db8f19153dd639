"""The table of codecs, and what ``--codec`` can say. The twin of native/format/codec.c. Pure functions, any thread."""

from __future__ import annotations

from dataclasses import dataclass

from fanstore.errors import UsageError
from fanstore.format.codec import NONE, Codec, Method
from fanstore.format.codec_lz4 import LZ4
from fanstore.format.codec_zstd import ZSTD

#: By number; an index that was opened has no others.
CODECS = {codec.number: codec for codec in (NONE, LZ4, ZSTD)}
METHODS: dict[str, tuple[Codec, Method]] = {
    method.name: (codec, method) for codec in CODECS.values() for method in codec.methods
}
SUFFIXES = tuple(codec.suffix for codec in CODECS.values() if codec.suffix)


@dataclass(frozen=True)
class Compression:
    """A codec and a level, and how a user says it: ``zstd:19``, or ``zstd`` for its usual level."""

    codec: Codec
    level: int
    name: str


UNCOMPRESSED = Compression(NONE, 0, NONE.name)


def parse_compression(name: str) -> Compression:
    """What a value of ``--codec`` means; raises UsageError."""
    method_name, colon, level = name.partition(":")
    if method_name not in METHODS:
        raise UsageError(f"there is no codec '{method_name}'; choose {', '.join(METHODS)}")
    codec, method = METHODS[method_name]
    if not colon:
        return Compression(codec, method.level, name)
    if not method.levels:
        raise UsageError(f"the codec {method_name} has no levels; leave out ':{level}'")
    if not level.isdecimal() or int(level) not in method.levels:
        first, last = method.levels[0], method.levels[-1]
        raise UsageError(f"'{level}' is no level of {method_name}; choose one from {method_name}:{first} to :{last}")
    return Compression(codec, int(level), name)


def is_known(name: str) -> bool:
    """Whether a manifest may name this codec. Any level is as good: it says how long was searched, not how to read."""
    return name.partition(":")[0] in METHODS
