"""The room that a dataset will take, as far as it is known before anything is packed."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fanstore.errors import OutputError
from fanstore.prep.pack import BUFFERED_FILE_BYTES
from fanstore.prep.plan import ALIGNED_BYTES, PartitionPlan, content_bytes
from fanstore.prep.sources import DirectorySource, Source
from fanstore.prep.table import Table
from fanstore.units import format_bytes, format_count

_BLOCK = 512
#: What a pax header adds where a time has fractions of a second: its own header, and a block of records.
_PAX = 2 * _BLOCK
#: Large files begin at a multiple of this.
_PAGE = 4096
_INDEX_ENTRY = 80
#: Of fewer files nobody minds the headers.
_MANY_FILES = 1000
#: What is estimated is not known to the byte: refused is only what misses by more.
_CLEARLY = 0.98


@dataclass(frozen=True)
class Room:
    """Bytes of what is to be packed: ``content`` as it is, ``holes`` in it that take no room, ``around``: tar headers
    and padding; ``index``; ``files`` for the sentence.
    """

    files: int
    content: int
    holes: int
    around: int
    index: int

    @property
    def total(self) -> int:
        """What is taken if nothing shrinks."""
        return self.content - self.holes + self.around + self.index

    def sentence(self, free_bytes: int | None, compressed: bool) -> str:
        about = "at most " if compressed else ""
        text = (
            f"{format_count(self.files, 'file')} to pack: {about}{format_bytes(self.total)} "
            f"({format_bytes(self.content)} of content, {format_bytes(self.around)} of tar headers and padding, "
            f"{format_bytes(self.index)} of index)"
        )
        if self.holes:
            text += f", without {format_bytes(self.holes)} of holes"
        if free_bytes is not None:
            text += f"; {format_bytes(free_bytes)} are free"
        if self.around > self.content and self.files >= _MANY_FILES:
            text += ". The files are small: the headers take more room than they do"
        return text


def estimate(table: Table, sources: Sequence[Source], plans: Sequence[PartitionPlan]) -> Room:
    """What these partitions and the index of the table will take."""
    order = np.concatenate([plan.order for plan in plans]) if plans else np.zeros(0, np.uint32)
    content = content_bytes(table)[order]
    fractions = int((table.mtime[order] % 10**9 != 0).sum())
    around = int((-content % _BLOCK).sum()) + _BLOCK * len(order) + _PAX * fractions + 2 * _BLOCK * len(plans)
    around += _PAGE // 2 * int((content >= ALIGNED_BYTES).sum())
    large = order[content > BUFFERED_FILE_BYTES]
    holes = sum(_holes(table, sources, entry) for entry in large.tolist())
    index = _INDEX_ENTRY * len(table) + len(table.names)
    files = int(((table.mode[order] & np.uint32(0o170000)) == stat.S_IFREG).sum())
    return Room(files, int(content.sum()), holes, around, index)


def free_bytes(directory: Path) -> int:
    """What a user may still write there. Raises OSError."""
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def refuse_too_little(room: Room, free: int, taken: int, out: Path | str) -> None:
    """OutputError if the disk has clearly too little; ``taken`` is what of it is written already."""
    if free + taken < room.total * _CLEARLY:
        raise OutputError(
            f"'{out}' would take {format_bytes(room.total)}, and only {format_bytes(free + taken)} are free there: "
            "make room, name another place, or try --codec auto, or --sample for a trial"
        )


def _holes(table: Table, sources: Sequence[Source], entry: int) -> int:
    """Of a large file, what its file system does not store: the packer leaves zeros out as well."""
    source = sources[int(table.source[entry])]
    if not isinstance(source, DirectorySource):
        return 0
    try:
        directory = source.open_directory(table.path(int(table.parent[entry])))
        try:
            status = os.stat(table.name(entry), dir_fd=directory)
        finally:
            os.close(directory)
    except OSError:
        return 0  # the packer meets the same file, and reports it
    return max(0, int(table.size[entry]) - status.st_blocks * _BLOCK)
