"""Packs partitions: batches in parallel, written in order.

Every worker thread takes the next batch of some partition, has C read, compress and checksum it into a buffer of its
own (native/prep/pack.c, no GIL held), waits for its turn to learn its position in the file, and writes it there. A
thread waits only for batches before its own, and those were taken earlier, so nobody waits in a circle. Files too large
for a buffer are streamed by giant.py while they hold the turn.

Threads: the caller's thread runs Packing.run and nothing else; workers share PartitionWriter (its lock), the scheduler
(Packing._lock) and disjoint rows of the result arrays (no lock).
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fanstore import _native
from fanstore.errors import OutputError
from fanstore.format.codec import CHUNK_BYTES, NONE
from fanstore.format.codec_table import Compression
from fanstore.format.index import CHUNK_RECORD
from fanstore.prep.giant import pack_giant
from fanstore.prep.journal import Finished
from fanstore.prep.outdir import Sink
from fanstore.prep.plan import ALIGNED_BYTES, PartitionPlan, has_content, member_bounds
from fanstore.prep.sources import Source
from fanstore.prep.table import Table
from fanstore.prep.writer import LEAD_BYTES, PartitionWriter, Stopped

#: The layout of struct fsx_packed in native/prep/pack.h.
PACKED = np.dtype([("status", "<i4"), ("codec", "<u4"), ("offset", "<u8"), ("stored", "<u8"), ("checksum", "<u8")])
#: Files up to this size are packed in memory; with many jobs less, so that all buffers together stay below 512 MiB.
BUFFERED_FILE_BYTES = 64 << 20
ALL_BUFFERS_BYTES = 512 << 20
_BUFFER_STEP_BYTES = 4 << 20


@dataclass
class Packed:
    """What became of the entries of some partitions. ``entries`` says which rows the columns speak of."""

    entries: npt.NDArray[np.uint32]
    results: npt.NDArray[np.void]  #: PACKED; offset is in the partition, status as in native/prep/pack.h
    chunks: dict[int, npt.NDArray[np.void]]  #: entry → records, of files of several chunks
    partitions: dict[int, tuple[int, int]]  #: partition number → bytes and checksum
    recalled: list[int] = field(default_factory=list)  #: numbers of those that an earlier run had finished


@dataclass
class _Job:
    """A partition that is being packed. ``taken`` and ``active`` are guarded by Packing._lock."""

    number: int
    plan: PartitionPlan
    writer: PartitionWriter
    taken: int = 0  #: batches given out
    active: int = 0  #: batches given out and not finished
    done: int = 0


class Packing:
    """Packs some partitions of one table with ``jobs`` threads."""

    def __init__(
        self,
        table: Table,
        sources: Sequence[Source],
        plans: dict[int, PartitionPlan],
        sink: Sink,
        compression: Compression,
        jobs: int,
        report: Callable[[int, int], None],
    ) -> None:
        """``report`` gets bytes and files as they are done, from any thread."""
        self._table = table
        self._sources = sources
        self._compression = compression
        self._jobs_wanted = jobs
        self._report = report
        self._packer = _native.Packer(
            table.columns(),
            [(source.fd, source.is_tar, source.dereference, len(source.prefix)) for source in sources],
        )
        self._bound = member_bounds(table)
        self._has_content = has_content(table)
        self._plans = plans
        self._sink = sink
        self._buffered_bytes = min(BUFFERED_FILE_BYTES, max(CHUNK_BYTES, ALL_BUFFERS_BYTES // (4 * jobs)))
        entries = np.concatenate([plan.order for plan in plans.values()]) if plans else np.zeros(0, np.uint32)
        self._result = Packed(entries, np.zeros(len(entries), PACKED), {}, {})
        self._row_start = {}
        start = 0
        for number, plan in plans.items():
            self._row_start[number] = start
            start += len(plan.order)
        self._lock = threading.Lock()  # guards _jobs, _unknown, _waiting, _error, _result.partitions and .recalled
        self._unknown = list(plans)  # perhaps an earlier run has finished them
        self._waiting: list[int] = []
        self._jobs: list[_Job] = []
        self._error: BaseException | None = None
        self.stop = threading.Event()

    def run(self, tick: Callable[[], None]) -> Packed:
        """Pack everything; ``tick`` is called in this thread a few times a second and may raise to stop the work."""
        threads = [threading.Thread(target=self._work, name=f"pack-{n}", daemon=True) for n in range(self._jobs_wanted)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    tick()
        except KeyboardInterrupt:
            # The process is about to end, perhaps with a SIGKILL a second from now: removing what was written matters
            # more than waiting for the threads, whose descriptors stay open because they may be in use.
            self.stop.set()
            raise
        except BaseException:
            self._shut_down(threads)
            raise
        self._shut_down(threads)
        if self._error is not None:
            raise self._error
        return self._result

    def _shut_down(self, threads: list[threading.Thread]) -> None:
        self.stop.set()
        for thread in threads:
            thread.join()
        for job in self._jobs:
            job.writer.close()

    def _take(self) -> tuple[_Job, int] | None:
        """The next batch, of the partition with the fewest threads at work: each has one to itself if it can."""
        with self._lock:
            open_jobs = [job for job in self._jobs if job.taken < len(job.plan.batches)]
            idle = min((job.active for job in open_jobs), default=None)
            if self._waiting and (idle is None or idle > 0):
                open_jobs.insert(0, self._open_job(self._waiting.pop(0)))
                idle = 0
            if idle is None:
                return None
            job = next(job for job in open_jobs if job.active == idle)
            number = job.taken
            job.taken += 1
            job.active += 1
            return job, number

    def _open_job(self, number: int) -> _Job:
        job = _Job(number, self._plans[number], PartitionWriter.create(self._sink.path(number)))
        self._jobs.append(job)
        return job

    def _work(self) -> None:
        buffers = _Buffers()
        try:
            while not self.stop.is_set() and self._recall_one():
                pass
            while not self.stop.is_set():
                taken = self._take()
                if taken is None:
                    break
                job, number = taken
                self._pack_batch(job, number, buffers)
                self._finish_batch(job)
        except Stopped:
            return
        except OSError as error:
            self._fail(_output_error(error))
        except BaseException as error:  # noqa: BLE001  # handed to the caller's thread, which raises it
            self._fail(error)
        finally:
            buffers.close()

    def _recall_one(self) -> bool:
        """Look whether a partition is finished already; False if all were looked at."""
        with self._lock:
            if not self._unknown:
                return False
            number = self._unknown.pop(0)
        plan = self._plans[number]
        finished = self._sink.recall(number)
        if finished is None:
            if len(plan.order):
                with self._lock:
                    self._waiting.append(number)
                return True
            # More partitions were asked for than there are files.
            length, checksum = PartitionWriter.create(self._sink.path(number)).finish()
            finished = Finished(length, checksum, np.zeros(0, PACKED), {})
            self._sink.finished(number, finished)
        else:
            with self._lock:
                self._result.recalled.append(number)
        row = self._row_start[number]
        self._result.results[row : row + len(plan.order)] = finished.results
        self._result.chunks.update(finished.chunks)
        with self._lock:
            self._result.partitions[number] = finished.bytes, finished.checksum
        self._report(plan.content_bytes, int(self._has_content[plan.order].sum()))
        return True

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
        self.stop.set()

    def _finish_batch(self, job: _Job) -> None:
        with self._lock:
            job.active -= 1
            job.done += 1
            last = job.done == len(job.plan.batches)
        if last:
            length, checksum = job.writer.finish()
            row = self._row_start[job.number]
            order = job.plan.order
            chunks = {entry: self._result.chunks[entry] for entry in order.tolist() if entry in self._result.chunks}
            results = self._result.results[row : row + len(order)]
            self._sink.finished(job.number, Finished(length, checksum, results, chunks))
            with self._lock:
                self._result.partitions[job.number] = length, checksum
                self._jobs.remove(job)

    def _pack_batch(self, job: _Job, number: int, buffers: _Buffers) -> None:
        begin = int(job.plan.batches[number - 1]) if number else 0
        end = int(job.plan.batches[number])
        order = job.plan.order[begin:end]
        row = self._row_start[job.number] + begin
        results = self._result.results[row : row + len(order)]
        content = np.where(self._has_content[order], self._table.size[order], 0)
        largest = int(content.max())
        if largest > self._buffered_bytes:
            self._pack_giant(job, number, order, results, buffers)
            return
        codec = self._compression.codec
        out = buffers.out(LEAD_BYTES + int(self._bound[order].sum()))
        scratch = buffers.scratch(_native.pack_scratch(largest) if codec is not NONE else mmap.PAGESIZE)
        several = content[content > CHUNK_BYTES].astype(np.int64)
        chunks = np.zeros(int(((several + CHUNK_BYTES - 1) // CHUNK_BYTES).sum()) + 1, CHUNK_RECORD)
        used, _ = self._packer.pack(
            order, codec.number, self._compression.level, memoryview(out)[LEAD_BYTES:], scratch, results, chunks
        )
        self._keep_chunks(order, results, chunks)
        job.writer.wait_turn(number, self.stop)
        position = job.writer.append(out, used, aligned=largest >= ALIGNED_BYTES)
        results["offset"] += np.uint64(position)
        self._report(int(content.sum()), int(self._has_content[order].sum()))

    def _pack_giant(
        self,
        job: _Job,
        number: int,
        order: npt.NDArray[np.uint32],
        results: npt.NDArray[np.void],
        buffers: _Buffers,
    ) -> None:
        """A batch of one large file, and of the further names that it may have."""
        entry, links = int(order[0]), order[1:]
        out, scratch = buffers.out(int(self._bound[links].sum())), buffers.scratch(mmap.PAGESIZE)
        used, _ = self._packer.pack(links, NONE.number, 0, out, scratch, results[1:], np.zeros(1, CHUNK_RECORD))
        job.writer.wait_turn(number, self.stop)
        outcome = pack_giant(
            self._table, self._sources, entry, self._compression, job.writer, self.stop, self._report, bytes(out[:used])
        )
        results[0] = (outcome.status, outcome.codec, outcome.offset, outcome.stored, outcome.checksum)
        if outcome.status == 0:
            self._result.chunks[entry] = outcome.chunks
        else:
            results["status"][1:] = _native.PACK_NO_CONTENT

    def _keep_chunks(
        self, order: npt.NDArray[np.uint32], results: npt.NDArray[np.void], chunks: npt.NDArray[np.void]
    ) -> None:
        """C has written the records of the files of several chunks one after another, failed ones left out."""
        start = 0
        packed = self._has_content[order] & (self._table.size[order] > CHUNK_BYTES) & (results["status"] == 0)
        for entry in order[packed]:
            count = -(-int(self._table.size[entry]) // CHUNK_BYTES)
            self._result.chunks[int(entry)] = chunks[start : start + count].copy()
            start += count


class _Buffers:
    """One thread's page-aligned memory, grown when a batch needs more."""

    def __init__(self) -> None:
        self._out = mmap.mmap(-1, mmap.PAGESIZE)
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)

    def out(self, count: int) -> mmap.mmap:
        if len(self._out) < count:
            self._out = _memory(count)
        return self._out

    def scratch(self, count: int) -> mmap.mmap:
        if len(self._scratch) < count:
            self._scratch = _memory(count)
        return self._scratch

    def close(self) -> None:
        """The maps go when nobody looks at them any more."""
        del self._out, self._scratch


def _memory(count: int) -> mmap.mmap:
    """At least ``count`` bytes. In steps, because new memory is slow to touch for the first time, and in huge pages."""
    memory = mmap.mmap(-1, -(-count // _BUFFER_STEP_BYTES) * _BUFFER_STEP_BYTES)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _output_error(error: OSError) -> BaseException:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"the disk or quota is full ({error.strerror}); nothing was left behind")
    return OutputError(f"cannot write the dataset: {error.strerror}; nothing was left behind")
