"""Writes index.fsx from columns (docs/format.md, *index.fsx*).

Owns the layout only: the caller brings complete, correct columns; a reader checks them again. Used by fanstore.prep and
by tests and benchmarks that need a synthetic index.
"""

from collections.abc import Iterator, Mapping
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from fanstore.format.checksum import Hasher
from fanstore.format.codec import CHUNK_BYTES
from fanstore.format.index import HEADER, MAGIC, SECTION, SECTION_ALIGN, SECTIONS, VERSION

Columns = Mapping[str, npt.NDArray[np.generic]]


def _pieces(columns: Columns) -> Iterator[bytes | memoryview]:
    """Everything after the header, piece by piece."""
    table = bytearray()
    bodies: list[tuple[int, npt.NDArray[np.generic]]] = []
    end = HEADER.size + SECTION.size * len(SECTIONS)
    for tag, (dtype, _) in SECTIONS.items():
        column = np.ascontiguousarray(columns[tag], dtype=dtype)
        start = -(-end // SECTION_ALIGN) * SECTION_ALIGN
        table += SECTION.pack(tag.encode(), start, column.nbytes, dtype.itemsize, 0)
        bodies.append((start - end, column))
        end = start + column.nbytes
    yield bytes(table)
    for padding, column in bodies:
        if padding:
            yield bytes(padding)
        if column.nbytes:
            yield column.view(np.uint8).data


def write_index(file: BinaryIO, columns: Columns) -> tuple[int, int]:
    """Write an index to a seekable file at its start; returns its length and the checksum of the whole file."""
    body = Hasher()
    length = HEADER.size
    file.seek(HEADER.size)
    for piece in _pieces(columns):
        body.update(piece)
        file.write(piece)
        length += len(piece)
    entries, partitions, chunks = len(columns["parent"]), len(columns["parts"]), len(columns["chunks"])
    fields = (MAGIC, VERSION, len(SECTIONS), length, entries, partitions, CHUNK_BYTES, chunks, body.intdigest())
    head = HEADER.pack(*fields, 0)
    header_checksum = Hasher(head[: HEADER.size - 8]).intdigest()
    head = HEADER.pack(*fields, header_checksum)
    file.seek(0)
    file.write(head)
    whole = Hasher(head)
    for piece in _pieces(columns):
        whole.update(piece)
    return length, whole.intdigest()
