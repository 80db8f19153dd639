"""zstd frames that FanStore does not write, though zstd would read them: refused in Python and in C alike.

What holds for every codec is in test_codecs.py.
"""

from pathlib import Path

import native_codecs
import pytest
import zstandard
from native_codecs import NativeCodec
from oddities import compressible

from fanstore.errors import CorruptDataError
from fanstore.format.codec import CHUNK_BYTES
from fanstore.format.codec_zstd import ZSTD

CONTENT = compressible(5_000)
FRAME = zstandard.ZstdCompressor(3).compress(CONTENT)
SKIPPABLE = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"skip"
#: An RLE block, the last one: a frame of a few bytes can say that it holds very much.
RLE = (CHUNK_BYTES << 3 & 0xFF_FFF8 | 0b011).to_bytes(3, "little") + b"x"


def frame(descriptor: int, fields: bytes, blocks: bytes) -> bytes:
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + fields + blocks


def raw_block(content: bytes) -> bytes:
    return (len(content) << 3 | 1).to_bytes(3, "little") + content


SMALL = b"0123456789"
HOSTILE = {
    "two frames": zstandard.ZstdCompressor().compress(CONTENT[:3_000])
    + zstandard.ZstdCompressor().compress(CONTENT[3_000:]),
    "an empty frame after it": FRAME + zstandard.ZstdCompressor().compress(b""),
    "a frame to be skipped before it": SKIPPABLE + FRAME,
    "a frame to be skipped after it": FRAME + SKIPPABLE,
    "only a frame to be skipped": SKIPPABLE,
    "a checksum": zstandard.ZstdCompressor(write_checksum=True).compress(CONTENT),
    "no content size": zstandard.ZstdCompressor(write_content_size=False).compress(CONTENT),
    "without a magic number": FRAME[4:],
    "a byte too many": FRAME + b"\0",
    "a byte too few": FRAME[:-1],
    "the header alone": FRAME[:6],
    "nothing": b"",
}
#: Frames of SMALL, by hand.
ODD = {
    "a dictionary": frame(0x21, b"\x07" + bytes([len(SMALL)]), raw_block(SMALL)),
    "a reserved bit": frame(0x28, bytes([len(SMALL)]), raw_block(SMALL)),
    "a window of 4.5 MiB": frame(0x80, bytes([12 << 3 | 1]) + len(SMALL).to_bytes(4, "little"), raw_block(SMALL)),
    "a window of 2 GiB": frame(0x80, bytes([21 << 3]) + len(SMALL).to_bytes(4, "little"), raw_block(SMALL)),
    "content of a terabyte": frame(0xE0, (1 << 40).to_bytes(8, "little"), RLE),
    "more content than it says": frame(0x20, bytes([len(SMALL)]), RLE),
    "less content than it says": frame(0x20, bytes([len(SMALL)]), raw_block(SMALL[1:])),
}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeCodec:
    return native_codecs.load(tmp_path_factory.mktemp("codecs"))[ZSTD.number]


@pytest.mark.parametrize("window", [b"", bytes([12 << 3])], ids=["single segment", "window of 4 MiB"])
def test_a_frame_made_by_hand(native: NativeCodec, window: bytes) -> None:
    """What the others below are spoiled from is right."""
    size = len(SMALL).to_bytes(4, "little")
    made = frame(0x80, window + size, raw_block(SMALL)) if window else frame(0xA0, size, raw_block(SMALL))
    assert ZSTD.decode_chunk(made, len(SMALL), True) == SMALL
    assert native.decode(made, len(SMALL), True) == SMALL


@pytest.mark.parametrize(
    ("stored", "content_bytes"),
    [(stored, len(CONTENT)) for stored in HOSTILE.values()] + [(stored, len(SMALL)) for stored in ODD.values()],
    ids=[*HOSTILE, *ODD],
)
def test_what_is_not_written_is_not_read(native: NativeCodec, stored: bytes, content_bytes: int) -> None:
    for first in (True, False):
        with pytest.raises(CorruptDataError, match="zstd frame"):
            ZSTD.decode_chunk(stored, content_bytes, first)
        assert native.decode(stored, content_bytes, first) is None


def test_all_chunks_are_a_file_for_zstd(tmp_path: Path) -> None:
    """One after the other, in one stream: as the program reads them."""
    content = compressible(2 * CHUNK_BYTES + 9)
    chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
    assert ZSTD.encode is not None
    for level in (1, 3, 19):
        stored = b"".join(ZSTD.encode(chunks if level < 19 else [chunks[2]], len(content), level))
        reader = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES).stream_reader(stored, read_across_frames=True)
        assert reader.read() == (content if level < 19 else chunks[2])
