"""How content is stored: as it is, or as one LZ4 frame whose block k is chunk k (docs/format.md, *Chunks*).

Small files are compressed in C (native/pack.c); here are the decoder, which every reader uses, and the writer for
files too large to be held in memory. Pure functions, any thread; the LZ4 calls release the GIL.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import lz4.block
import lz4.frame

from fanstore.errors import CorruptDataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 4 << 20
#: Level of lz4hc: the library's default for HC; higher levels cost several times the time for about 1 % of the size.
HC_LEVEL = 9
#: Frame descriptor of ours: version 01, independent blocks, content size present; maximum block size 4 MiB.
_FRAME_HEADER = struct.Struct("<IBBQB")
_FRAME_MAGIC = 0x184D2204
_FRAME_FLAGS = 0b01_1_0_1_0_0_0
_FRAME_BLOCK_SIZE = 7 << 4
_BLOCK_IS_PLAIN = 1 << 31


class Codec(enum.IntEnum):
    """Codec numbers as in the index."""

    NONE = 0
    LZ4 = 1


def decode_chunk(codec: int, stored: Buffer, content_bytes: int, first: bool) -> bytes:
    """Content of one stored chunk. ``first`` says that it is the first of its file, so begins with the frame header.

    Raises CorruptDataError when the bytes are not what the writer makes.
    """
    view = memoryview(stored)
    if codec == Codec.NONE:
        if len(view) != content_bytes:
            raise CorruptDataError(f"a plain chunk has {len(view)} bytes instead of {content_bytes}")
        return bytes(view)
    if codec != Codec.LZ4:
        raise CorruptDataError(f"unknown codec {codec}")
    if first:
        if len(view) < _FRAME_HEADER.size:
            raise CorruptDataError("an LZ4 frame is shorter than its header")
        magic, flags, block_size, _, _ = _FRAME_HEADER.unpack_from(view)
        if magic != _FRAME_MAGIC or flags != _FRAME_FLAGS or block_size != _FRAME_BLOCK_SIZE:
            raise CorruptDataError("an LZ4 frame has a header that FanStore does not write")
        view = view[_FRAME_HEADER.size :]
    if len(view) < 4:
        raise CorruptDataError("an LZ4 block is shorter than its length field")
    (length,) = struct.unpack_from("<I", view)
    plain = bool(length & _BLOCK_IS_PLAIN)
    length &= ~_BLOCK_IS_PLAIN
    block = view[4 : 4 + length]
    if len(block) != length:
        raise CorruptDataError("an LZ4 block is cut short")
    if plain:
        content = bytes(block)
    else:
        try:
            content = lz4.block.decompress(block, uncompressed_size=content_bytes)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptDataError(f"an LZ4 block does not decode ({error})") from error
    if len(content) != content_bytes:
        raise CorruptDataError(f"an LZ4 block decodes to {len(content)} bytes instead of {content_bytes}")
    return content


def encode_frame(chunks: Iterator[Buffer], content_bytes: int, level: int) -> Iterator[bytes]:
    """Stored chunks of one file: the frame header with chunk 0, the end mark with the last. One output per input.

    ``level`` is 1 for LZ4, more for LZ4 HC of that level.
    """
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
