"""Puts the results of all packers together: index columns, totals, partition list, and what went wrong.

Pure arithmetic on arrays. Entries whose content could not be packed are taken out, and the rest is numbered again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fanstore import _native
from fanstore.errors import FanstoreError
from fanstore.format.index import CHUNK_RECORD, NO_PARTITION
from fanstore.format.indexwriter import Columns
from fanstore.format.manifest import PartitionInfo, Totals
from fanstore.prep.pack import PACKED, Packed
from fanstore.prep.plan import PartitionPlan, has_content
from fanstore.prep.table import Table

#: As long as a file list in an error message stays useful; the command line shows fewer and says how many more.
_INTERNAL = {_native.PACK_NO_ROOM: "no room in a buffer", _native.PACK_BAD_TABLE: "inconsistent table"}


@dataclass(frozen=True)
class Assembled:
    """Everything that goes into index and manifest."""

    columns: Columns
    totals: Totals
    partitions: tuple[PartitionInfo, ...]
    problems: list[tuple[bytes, str]]  #: path and reason of every file that is not in the dataset
    codec_of: npt.NDArray[np.uint32]  #: by entry of the table


@dataclass(frozen=True)
class PartitionName:
    """How a partition is called in the manifest; ``members`` is given for a tar that was there before."""

    file: str
    external: bool
    members: int | None


@dataclass(frozen=True)
class Kept:
    """What an update takes over: partitions of the dataset as it was, and where in them files of the new table are."""

    partitions: tuple[PartitionInfo, ...] = ()
    entries: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    results: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, PACKED))
    part: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    chunks: dict[int, npt.NDArray[np.void]] = field(default_factory=dict)  #: as in Packed


def assemble(
    table: Table,
    plans: Sequence[PartitionPlan],
    names: Sequence[PartitionName],
    packed: Sequence[Packed],
    kept: Kept,
) -> Assembled:
    """Combine the packed partitions of all ranks, behind those that are kept."""
    count = len(table)
    results = np.zeros(count, PACKED)
    part = np.full(count, NO_PARTITION, np.uint32)
    chunks: dict[int, npt.NDArray[np.void]] = {}
    written: dict[int, tuple[int, int]] = {}
    for one in packed:
        results[one.entries] = one.results
        chunks.update(one.chunks)
        written.update(one.partitions)
    results[kept.entries], part[kept.entries] = kept.results, kept.part
    chunks.update(kept.chunks)
    content = has_content(table)
    for number, plan in enumerate(plans, len(kept.partitions)):
        part[plan.order[content[plan.order]]] = number

    keep, problems = _failures(table, results)
    infos = kept.partitions + tuple(
        PartitionInfo(
            file=name.file,
            bytes=written[number][0],
            entries=int(keep[plan.order].sum()) if name.members is None else name.members,
            checksum=written[number][1],
            everywhere=plan.everywhere,
            external=name.external,
        )
        for number, (plan, name) in enumerate(zip(plans, names, strict=True))
    )
    columns = _columns(table, results, part, chunks, keep)
    columns["parts"] = np.array([info.bytes for info in infos], np.uint64)
    return Assembled(columns, _totals(columns), infos, problems, results["codec"][table.inode])


def _failures(table: Table, results: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.bool_], list[tuple[bytes, str]]]:
    """Which entries stay, and why the others do not."""
    status = results["status"][table.inode]
    problems: list[tuple[bytes, str]] = []
    for entry in np.flatnonzero(status):
        code = int(status[entry])
        if code in _INTERNAL or stat.S_IFMT(int(table.mode[entry])) != stat.S_IFREG:
            path = os.fsdecode(table.path(int(entry)))
            raise FanstoreError(f"internal error while packing '{path}': {_INTERNAL.get(code, code)}; please report it")
        reason = "changed while it was read" if code < 0 else os.strerror(code)
        problems.append((table.path(int(entry)), reason))
    return status == 0, problems


def _columns(
    table: Table,
    results: npt.NDArray[np.void],
    part: npt.NDArray[np.uint32],
    chunks: dict[int, npt.NDArray[np.void]],
    keep: npt.NDArray[np.bool_],
) -> dict[str, npt.NDArray[np.generic]]:
    is_file, is_link = table.is_type(stat.S_IFREG), table.is_type(stat.S_IFLNK)
    first = np.zeros(len(table), np.uint32)
    chunk_count = np.zeros(len(table), np.uint32)
    records: list[npt.NDArray[np.void]] = []
    start = 0
    for entry in sorted(chunks):
        first[entry], chunk_count[entry] = start, len(chunks[entry])
        records.append(chunks[entry])
        start += len(chunks[entry])

    primary = table.inode[keep]  # of each kept entry: a hard link has the columns of its first name
    is_file, is_link = is_file[keep], is_link[keep]
    renumber = np.cumsum(keep) - 1
    parent = renumber[table.parent[keep]].astype(np.uint32)
    inode = renumber[primary].astype(np.uint32)
    children = np.bincount(parent[1:], minlength=len(parent))
    is_directory = ~(is_file | is_link)
    subdirectories = np.bincount(parent[1:][is_directory[1:]], minlength=len(parent))
    first_child = 1 + np.cumsum(children) - children
    names, nameoff = _names(table, keep)
    size = np.where(is_directory, 0, table.size[primary])
    return {
        "parent": parent,
        "nameoff": nameoff,
        "mode": table.mode[primary],
        "mtime": table.mtime[primary],
        "size": size,
        "part": part[primary],
        "offset": np.where(is_file, results["offset"][primary], np.where(is_link, table.origin[primary], 0)),
        "stored": np.where(is_file, results["stored"][primary], size),
        "codec": np.where(is_file, results["codec"][primary], 0),
        "checksum": np.where(is_file, results["checksum"][primary], 0),
        "inode": inode,
        "nlink": np.where(is_directory, 2 + subdirectories, np.bincount(inode, minlength=len(inode))[inode]),
        "first": np.where(is_directory, first_child, first[primary]),
        "count": np.where(is_directory, children, chunk_count[primary]),
        "names": names,
        "links": table.links,
        "chunks": np.concatenate(records) if records else np.zeros(0, CHUNK_RECORD),
    }


def _names(table: Table, keep: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
    if keep.all():
        return table.names, table.nameoff
    lengths = np.diff(table.nameoff)
    kept_bytes = np.repeat(keep, lengths.astype(np.int64))
    return table.names[kept_bytes], np.concatenate(([0], np.cumsum(lengths[keep]))).astype(np.uint64)


def _totals(columns: Columns) -> Totals:
    kind = columns["mode"] & np.uint32(0o170000)  # type: ignore[operator]  # integers, which 'generic' hides
    own = columns["inode"] == np.arange(len(kind), dtype=np.uint32)
    files = (kind == stat.S_IFREG) & own
    return Totals(
        files=int(files.sum()),
        directories=int((kind == stat.S_IFDIR).sum()),
        symlinks=int(((kind == stat.S_IFLNK) & own).sum()),
        hardlinks=int((~own).sum()),
        bytes=int(columns["size"][files].sum()),
        stored_bytes=int(columns["stored"][files].sum()),
    )
