"""zstd: every chunk is one zstd frame (docs/format.md, *Chunks*). The twin of native/format/codec_zstd.c."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fanstore.errors import CorruptDataError
from fanstore.format.codec import Codec, Method

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The library is loaded when it is needed: that takes as long as to start a command, and most datasets need it not.

_MAGIC = b"\x28\xb5\x2f\xfd"
_FRAME_MIN = 10
#: Bits of the descriptor, and the largest window descriptor: see native/format/codec_zstd.c.
_FORBIDDEN_FLAGS = 0x1F
_SINGLE_SEGMENT = 0x20
_LARGEST_WINDOW = 12 << 3


def _decode(stored: memoryview, content_bytes: int, first: bool) -> bytes:
    """Exactly one frame, for exactly this content: nobody takes memory for what a frame only says of itself."""
    import zstandard

    if (
        len(stored) < _FRAME_MIN
        or stored[:4] != _MAGIC
        or stored[4] & _FORBIDDEN_FLAGS
        or not (stored[4] & _SINGLE_SEGMENT or stored[5] <= _LARGEST_WINDOW)
    ):
        raise CorruptDataError("a zstd frame has a header that FanStore does not write")
    try:
        said = zstandard.frame_content_size(stored)
        if said != content_bytes:
            raise CorruptDataError(f"a zstd frame says that it has {said} bytes instead of {content_bytes}")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"a zstd frame does not decode ({error})") from error


def _encode(chunks: Iterable[Buffer], content_bytes: int, level: int) -> Iterator[bytes]:
    import zstandard

    compressor = zstandard.ZstdCompressor(level)
    for chunk in chunks:
        yield compressor.compress(memoryview(chunk))


ZSTD = Codec(
    number=2,
    name="zstd",
    suffix=b".zst",
    methods=(
        # 3 is the library's default. From 20 on it takes windows that are larger than a chunk, for nothing.
        Method("zstd", "smaller than lz4hc, slower to read", level=3, levels=range(1, 20), automatic=True),
    ),
    decode=_decode,
    encode=_encode,
)
