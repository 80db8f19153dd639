"""LZ4: a file is one LZ4 frame whose block k is chunk k (docs/format.md, *Chunks*). Twin: native/format/codec_lz4.c."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import lz4.block
import lz4.frame

from fanstore.errors import CorruptDataError
from fanstore.format.codec import Codec, Method

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Frame descriptor of ours: version 01, independent blocks, content size present; maximum block size 4 MiB.
_FRAME_HEADER = struct.Struct("<IBBQB")
_FRAME_MAGIC = 0x184D2204
_FRAME_FLAGS = 0b01_1_0_1_0_0_0
_FRAME_BLOCK_SIZE = 7 << 4
_BLOCK_IS_PLAIN = 1 << 31


def _decode(stored: memoryview, content_bytes: int, first: bool) -> bytes:
    """``first``: it begins with the header of the frame."""
    if first:
        if len(stored) < _FRAME_HEADER.size:
            raise CorruptDataError("an LZ4 frame is shorter than its header")
        magic, flags, block_size, _, _ = _FRAME_HEADER.unpack_from(stored)
        if magic != _FRAME_MAGIC or flags != _FRAME_FLAGS or block_size != _FRAME_BLOCK_SIZE:
            raise CorruptDataError("an LZ4 frame has a header that FanStore does not write")
        stored = stored[_FRAME_HEADER.size :]
    if len(stored) < 4:
        raise CorruptDataError("an LZ4 block is shorter than its length field")
    (length,) = struct.unpack_from("<I", stored)
    plain = bool(length & _BLOCK_IS_PLAIN)
    length &= ~_BLOCK_IS_PLAIN
    block = stored[4 : 4 + length]
    if len(block) != length:
        raise CorruptDataError("an LZ4 block is cut short")
    if plain:
        return bytes(block)
    try:
        content: bytes = lz4.block.decompress(block, uncompressed_size=content_bytes)
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise CorruptDataError(f"an LZ4 block does not decode ({error})") from error
    return content


def _encode(chunks: Iterable[Buffer], content_bytes: int, level: int) -> Iterator[bytes]:
    """The frame header comes with the first chunk, the end mark with the last. Level 1 is LZ4, more is LZ4 HC."""
    compressor = lz4.frame.LZ4FrameCompressor(
        block_size=lz4.frame.BLOCKSIZE_MAX4MB,
        block_linked=False,
        compression_level=0 if level <= 1 else level,
        auto_flush=True,
    )
    held = compressor.begin(source_size=content_bytes)
    pending: bytes | None = None
    for chunk in chunks:
        if pending is not None:
            yield pending
        pending = held + compressor.compress(chunk)
        held = b""
    if pending is not None:
        yield pending + compressor.flush()


LZ4 = Codec(
    number=1,
    name="lz4",
    suffix=b".lz4",
    methods=(
        Method("lz4", "quick to write and to read", level=1, automatic=True),
        # 9 is the library's default for HC; higher levels cost several times the time for about 1 % of the size.
        Method("lz4hc", "slower to write, smaller, as quick to read", level=9, levels=range(3, 13)),
    ),
    decode=_decode,
    encode=_encode,
)
