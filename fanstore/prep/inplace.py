"""--index-only: takes existing tar files as partitions where they are, and only computes checksums.

Each tar is read once, front to back; the checksum of the whole file and those of its members come from the same pass.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.errors import SourceError
from fanstore.format.checksum import EMPTY, Hasher, of_chunks
from fanstore.format.codec import CHUNK_BYTES, NONE
from fanstore.format.index import CHUNK_RECORD
from fanstore.prep.pack import PACKED, Packed
from fanstore.prep.plan import PartitionPlan, has_content
from fanstore.prep.sources import Source
from fanstore.prep.table import Table
from fanstore.prep.writer import Stopped

_BLOCK_BYTES = 8 << 20


def plan_in_place(table: Table, sources: Sequence[Source]) -> list[PartitionPlan]:
    """One partition per tar; its entries in the order of their content."""
    content = np.flatnonzero(has_content(table)).astype(np.uint32)
    plans = []
    for number in range(len(sources)):
        entries = content[table.source[content] == number]
        order = entries[np.argsort(table.origin[entries], kind="stable")]
        plans.append(PartitionPlan(order, np.zeros(0, np.int64), int(table.size[order].sum()), False))
    return plans


@dataclass(frozen=True)
class _Extent:
    """One chunk of one entry in the tar file."""

    row: int
    start: int
    end: int


def checksum_tars(
    table: Table,
    sources: Sequence[Source],
    plans: dict[int, PartitionPlan],
    jobs: int,
    report: Callable[[int, int], None],
    tick: Callable[[], None],
) -> Packed:
    """Checksums of some tars and all their members; ``tick`` is called in this thread and may raise to stop."""
    stop = threading.Event()
    with ThreadPoolExecutor(jobs, thread_name_prefix="checksum") as pool:
        futures = {
            number: pool.submit(_checksum_tar, table, sources[number], plan, report, stop)
            for number, plan in plans.items()
        }
        pending = set(futures.values())
        try:
            while pending:
                finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                tick()
        except BaseException:
            stop.set()
            raise
    orders = [plan.order for plan in plans.values()]
    packed = Packed(
        np.concatenate(orders) if orders else np.zeros(0, np.uint32), np.zeros(sum(map(len, orders)), PACKED), {}, {}
    )
    row = 0
    for number, plan in plans.items():
        length, checksum, results, chunks = futures[number].result()
        packed.partitions[number] = (length, checksum)
        packed.results[row : row + len(plan.order)] = results
        packed.chunks.update(chunks)
        row += len(plan.order)
    return packed


def _extents(table: Table, order: npt.NDArray[np.uint32]) -> Iterator[_Extent]:
    for row, entry in enumerate(order):
        base, size = int(table.origin[entry]), int(table.size[entry])
        for start in range(0, size, CHUNK_BYTES):
            yield _Extent(row, base + start, base + min(size, start + CHUNK_BYTES))


def _checksum_tar(
    table: Table, source: Source, plan: PartitionPlan, report: Callable[[int, int], None], stop: threading.Event
) -> tuple[int, int, npt.NDArray[np.void], dict[int, npt.NDArray[np.void]]]:
    length = os.fstat(source.fd).st_size
    whole = Hasher()
    sums: list[list[int]] = [[] for _ in plan.order]
    extents = _extents(table, plan.order)
    extent = next(extents, None)
    part = Hasher()
    for position, block in _blocks(source, length, stop):
        whole.update(block)
        before = extent.row if extent is not None else len(plan.order)
        while extent is not None and extent.start < position + len(block):
            part.update(block[max(0, extent.start - position) : extent.end - position])
            if extent.end > position + len(block):
                break
            sums[extent.row].append(part.intdigest())
            part = Hasher()
            extent = next(extents, None)
        report(len(block), (extent.row if extent is not None else len(plan.order)) - before)
    if extent is not None:
        raise SourceError(f"'{source.label}' became shorter while it was read")
    results = np.zeros(len(plan.order), PACKED)
    chunks: dict[int, npt.NDArray[np.void]] = {}
    for row, entry in enumerate(plan.order):
        size = int(table.size[entry])
        parts = sums[row]
        checksum = EMPTY if not parts else parts[0] if len(parts) == 1 else of_chunks(parts)
        results[row] = (0, NONE.number, int(table.origin[entry]), size, checksum)
        if len(parts) > 1:
            chunks[int(entry)] = np.array(
                [(number * CHUNK_BYTES, value) for number, value in enumerate(parts)], CHUNK_RECORD
            )
    return length, whole.intdigest(), results, chunks


def _blocks(source: Source, length: int, stop: threading.Event) -> Iterator[tuple[int, memoryview]]:
    """The file in large pieces, each valid until the next is asked for."""
    memory = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
    position = 0
    os.posix_fadvise(source.fd, 0, length, os.POSIX_FADV_SEQUENTIAL)
    while position < length:
        if stop.is_set():
            raise Stopped
        try:
            count = os.preadv(source.fd, [memory[: min(_BLOCK_BYTES, length - position)]], position)
        except OSError as error:
            raise SourceError(f"cannot read '{source.label}': {error.strerror}") from error
        if count == 0:
            raise SourceError(f"'{source.label}' became shorter while it was read")
        yield position, memory[:count]
        position += count
