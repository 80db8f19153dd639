"""What a codec is: one way to store the content of files (docs/format.md, *Chunks*).

Every codec is a row: a module of its own (codec_lz4.py) and a line in codec_table.py, where it is found by its number
or by a name of ``--codec``. The same in native/ (codec.h), where most files are compressed and decompressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fanstore.errors import CorruptDataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Method:
    """A name that ``--codec`` takes: a codec and how hard it tries."""

    name: str
    about: str  #: for --help
    level: int = 0
    levels: range = range(0)  #: what NAME:LEVEL may say
    automatic: bool = False  #: ``--codec auto`` may choose it


@dataclass(frozen=True)
class Codec:
    """A row of the table. Its functions may be called by any thread, and release the GIL while they compute.

    Without functions, content is stored as it is. ``decode`` gets the bytes of one stored chunk, the length of its
    content, and whether it is the first chunk of its file; it raises CorruptDataError when the bytes are not what the
    writer makes. ``encode`` gets the chunks of one file, its length and a level, and gives one stored chunk for each.
    """

    number: int  #: in the index
    name: str
    methods: tuple[Method, ...]
    suffix: bytes = b""  #: of the tar members that it has compressed
    decode: Callable[[memoryview, int, bool], bytes] | None = None
    encode: Callable[[Iterable[Buffer], int, int], Iterator[bytes]] | None = None

    def decode_chunk(self, stored: Buffer, content_bytes: int, first: bool) -> bytes:
        """Content of one stored chunk; raises CorruptDataError if it is not exactly ``content_bytes`` long."""
        view = memoryview(stored)
        content = bytes(view) if self.decode is None else self.decode(view, content_bytes, first)
        if len(content) != content_bytes:
            raise CorruptDataError(f"a chunk ({self.name}) has {len(content)} bytes of content, not {content_bytes}")
        return content


_AS_IT_IS = Method("none", "files are stored as they are (default; right for JPEG and other compressed formats)")
NONE = Codec(number=0, name="none", methods=(_AS_IT_IS,))
