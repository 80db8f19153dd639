"""The codecs of native/ called from Python, for tests: built as a library of their own, and called by way of ctypes.

Decoding writes between guards, so that a byte too many is seen also without a sanitizer.
"""

import ctypes
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from sanitized import CODECS, LIBRARIES, compile_c

_GUARD = b"\xa5" * 64

_Decode = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t
)


class _Piece(ctypes.Structure):
    """struct fsx_piece."""

    _fields_ = (
        ("content", ctypes.c_char_p),
        ("bytes", ctypes.c_size_t),
        ("file_bytes", ctypes.c_uint64),
        ("first", ctypes.c_bool),
        ("last", ctypes.c_bool),
    )


class _Row(ctypes.Structure):
    """struct fsx_codec."""

    _fields_ = (
        ("number", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("suffix", ctypes.c_char_p),
        ("shortest_bytes", ctypes.c_size_t),
        ("overhead_bytes", ctypes.c_size_t),
        ("quick_level", ctypes.c_int),
        ("decode", _Decode),
        ("encoder_new", ctypes.CFUNCTYPE(ctypes.c_void_p)),
        ("encoder_free", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        (
            "encode",
            ctypes.CFUNCTYPE(
                ctypes.c_size_t,
                *(ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Piece), ctypes.c_void_p, ctypes.c_size_t),
            ),
        ),
    )


class NativeCodec:
    """A row of the table in C."""

    def __init__(self, row: _Row) -> None:
        self._row = row
        self.number = int(row.number)
        self.name = row.name.decode()
        self.suffix = bytes(row.suffix or b"")
        self.shortest_bytes = int(row.shortest_bytes)
        self.overhead_bytes = int(row.overhead_bytes)
        self.decodes = bool(row.decode)

    def decode(self, stored: bytes, content_bytes: int, first: bool) -> bytes | None:
        """The content, or None if it is refused."""
        memory = ctypes.create_string_buffer(_GUARD + bytes(content_bytes) + _GUARD, content_bytes + 2 * len(_GUARD))
        start = ctypes.addressof(memory) + len(_GUARD)
        accepted = self._row.decode(stored, len(stored), first, start, content_bytes)
        raw = memory.raw
        assert raw.startswith(_GUARD) and raw.endswith(_GUARD), "bytes outside the content were written"
        return raw[len(_GUARD) : -len(_GUARD)] if accepted else None

    def encode(self, chunks: Iterable[bytes], level: int) -> list[bytes]:
        """The stored chunks of a file."""
        pieces = list(chunks)
        encoder = self._row.encoder_new()
        assert encoder
        try:
            return [
                self._encode(encoder, level, pieces, number, max(map(len, pieces)) + self.overhead_bytes + 65_536)
                for number in range(len(pieces))
            ]
        finally:
            self._row.encoder_free(encoder)

    def _encode(self, encoder: int, level: int, pieces: list[bytes], number: int, room: int) -> bytes:
        out = ctypes.create_string_buffer(room)
        piece = _Piece(
            pieces[number],
            len(pieces[number]),
            sum(map(len, pieces)),
            number == 0,
            number == len(pieces) - 1,
        )
        used = self._row.encode(encoder, level, ctypes.byref(piece), out, room)
        assert 0 < used <= room
        return out.raw[:used]


def load(folder: Path) -> dict[int, NativeCodec]:
    """All rows by number; the library is built in ``folder``."""
    path = compile_c(folder / "codecs.so", ["-shared", "-fPIC", *CODECS, *LIBRARIES], [])
    library = ctypes.CDLL(str(path))
    table = (ctypes.POINTER(_Row) * 256).in_dll(library, "fsx_codecs")
    codecs: dict[int, NativeCodec] = {}
    for place in count():
        if not table[place]:
            return codecs
        codec = NativeCodec(table[place].contents)
        assert codec.number not in codecs
        codecs[codec.number] = codec
    raise AssertionError
