"""What a run notes of each partition that it has finished, so that the next one can go on where it was killed.

Beside ``part-00007.tar`` lies ``part-00007.tar.done``: length and checksum of the file, and where in it everything is.
It is written when the partition is on the disk, and counts for a run only that would write the same partition: one with
the same key, which is made of all that decides about it (``key_of``). Any thread.
"""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fanstore import __version__
from fanstore.errors import CorruptDataError
from fanstore.format.checksum import Hasher, to_hex
from fanstore.format.index import CHUNK_RECORD
from fanstore.format.manifest import SourceInfo
from fanstore.format.storage import Directory
from fanstore.prep.plan import PartitionPlan
from fanstore.prep.table import Table

SUFFIX = ".done"


@dataclass(frozen=True)
class Finished:
    """A partition that is complete: what pack.py knows of it."""

    bytes: int
    checksum: int
    results: npt.NDArray[np.void]  #: PACKED, in the order of its plan
    chunks: dict[int, npt.NDArray[np.void]]  #: as in Packed


def key_of(table: Table, plans: Sequence[PartitionPlan], sources: Sequence[SourceInfo], rest: Sequence[object]) -> str:
    """The same exactly for runs that write the same partitions, as far as can be seen without reading any content."""
    hasher = Hasher(
        repr((__version__, [repr(source) for source in sources], list(rest))).encode("utf-8", "surrogatepass")
    )
    for column in table.columns().values():
        hasher.update(repr(column.shape).encode())
        hasher.update(np.ascontiguousarray(column).view(np.uint8).data)
    for plan in plans:
        hasher.update(repr((plan.order.shape, plan.everywhere)).encode())
        hasher.update(np.ascontiguousarray(plan.order).view(np.uint8).data)
        hasher.update(np.ascontiguousarray(plan.batches).view(np.uint8).data)
    return to_hex(hasher.intdigest())


def write(partition: Path, key: str, finished: Finished) -> None:
    """Note that a partition is finished. Raises OSError."""
    chunks = finished.chunks
    temporary = partition.with_name(partition.name + SUFFIX + "-new")
    with open(temporary, "wb") as file:
        np.savez(
            file,
            key=np.array(key),
            sums=np.array([finished.bytes, finished.checksum], np.uint64),
            results=finished.results,
            owners=np.array(list(chunks), np.uint32),
            counts=np.array([len(records) for records in chunks.values()], np.int64),
            chunks=np.concatenate(list(chunks.values())) if chunks else np.zeros(0, CHUNK_RECORD),
        )
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, _note(partition))


def recall(partition: Path, key: str) -> Finished | None:
    """What an earlier run has noted, if it holds for this one and every byte is as it was; else both files are gone.

    Raises OSError, but for what cannot be read.
    """
    try:
        finished = _read(partition, key)
        if finished is not None and _checksum(partition, finished.bytes) == finished.checksum:
            return finished
    except (CorruptDataError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # killed while it was written, or damaged since then: it is packed again
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
    for path in (_note(partition), partition):
        path.unlink(missing_ok=True)
    return None


def finished_in(directory: Path) -> Iterator[Path]:
    """The partitions of which a directory has a note."""
    for note in directory.glob("*" + SUFFIX):
        partition = note.with_name(note.name.removesuffix(SUFFIX))
        if partition.exists():
            yield partition


def keep_finished(directory: Path) -> int:
    """Remove all but finished partitions and what is noted of them; returns the bytes of what is left."""
    kept = set(finished_in(directory))
    notes = {_note(partition) for partition in kept}
    for path in directory.iterdir():
        if path not in kept and path not in notes:
            path.unlink(missing_ok=True)
    return sum(partition.stat().st_size for partition in kept)


def remove_notes(directory: Path) -> None:
    """The dataset is complete: nothing is to be noted any more."""
    for note in directory.glob("*" + SUFFIX):
        note.unlink()


def _note(partition: Path) -> Path:
    return partition.with_name(partition.name + SUFFIX)


def _read(partition: Path, key: str) -> Finished | None:
    with open(_note(partition), "rb") as file, np.load(file, allow_pickle=False) as note:
        if str(note["key"]) != key:
            return None
        length, checksum = (int(value) for value in note["sums"])
        ends = np.cumsum(note["counts"])
        pieces = np.split(note["chunks"], ends[:-1]) if len(ends) else []
        owners = note["owners"].tolist()
        return Finished(length, checksum, note["results"], dict(zip(owners, pieces, strict=True)))


def _checksum(partition: Path, length: int) -> int | None:
    """Of a file that has this length; None if it has another."""
    if partition.stat().st_size != length:
        return None
    hasher = Hasher()
    for block in Directory(partition.parent).stream(partition.name, length):
        hasher.update(block)
    return hasher.intdigest()
