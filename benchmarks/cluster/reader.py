"""The program of one host of a cluster: ``reader.py SPEC [RANK]``, by default FANSTORE_RANK. Reads, and computes.

As a training program with a data loader: some threads read, batch k the thread k mod workers, each so many batches
ahead of its turn at most; the main thread takes one batch after the other, computes (sleeps) so long per file, and
meets the other hosts if gradients are averaged. Leaves one line of JSON per epoch.
"""

import collections
import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from cluster.hosts import statistics
from cluster.meeting import Place
from cluster.orders import Spec
from cluster.shuffles import Shuffled

#: Seconds that a batch may take.
_LIMIT_S = 240.0


#: A file is dropped from memory after so many others: a kernel that is short of memory drops first what is oldest.
_RECENT_FILES = 64


class Reader:
    """One epoch of this host after the other."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._place = Place(spec.meeting)
        self._read_us: list[float] = []
        self._recent: collections.deque[int] = collections.deque()
        self._shuffled = Shuffled(spec, rank) if spec.shuffle else None

    def _read(self, number: int) -> int:
        begin_s = time.perf_counter()
        descriptor = os.open(f"{self._spec.root}/{self._spec.paths[number]}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            total = len(os.read(descriptor, size + 1))
            while total < size and (more := len(os.read(descriptor, size - total))):
                total += more
        except BaseException:
            os.close(descriptor)
            raise
        self._recent.append(descriptor)
        self._forget(_RECENT_FILES)
        if total != self._spec.sizes[number]:
            raise SystemExit(f"{self._spec.paths[number]} has {total} bytes, not {self._spec.sizes[number]}")
        self._read_us.append((time.perf_counter() - begin_s) * 1e6)
        return total

    def _forget(self, keep: int) -> None:
        """Drop what was read longest ago, but for so many files. Threads may drop one more or less."""
        while len(self._recent) > keep:
            descriptor = self._recent.popleft()
            if self._spec.forget:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _work(self, batches: list[list[int]], ready: "queue.Queue[tuple[int, int]]") -> None:
        """A thread of the loader: its batches, as files and bytes."""
        try:
            for batch in batches:
                ready.put((len(batch), sum(self._read(number) for number in batch)))
        except BaseException as error:
            print(f"reader {self._rank}: {error!r}", file=sys.stderr, flush=True)
            ready.put((-1, 0))
            raise

    def epoch(self, number: int) -> dict[str, Any]:
        spec = self._spec
        order = spec.order(number, self._rank) if self._shuffled is None else self._shuffled.begin(number)
        batches = [order[start : start + spec.batch] for start in range(0, len(order), spec.batch)]
        mount = Path(spec.mount)
        before = statistics(mount) if spec.mount else {}
        self._read_us = []
        queues: list[queue.Queue[tuple[int, int]]] = [queue.Queue(spec.ahead) for _ in range(spec.workers)]
        threads = [
            threading.Thread(target=self._work, args=(batches[own :: spec.workers], queues[own]), daemon=True)
            for own in range(spec.workers)
        ]
        self._place.epoch()
        begin_s = time.perf_counter()
        for thread in threads:
            thread.start()
        files = total = 0
        waited_s = computed_s = met_s = 0.0
        for place in range(len(batches)):
            start_s = time.perf_counter()
            count, size = queues[place % spec.workers].get(timeout=_LIMIT_S)
            if count < 0:
                raise SystemExit(1)  # the thread has said why
            files, total = files + count, total + size
            got_s = time.perf_counter()
            if spec.compute_us:
                time.sleep(count * spec.compute_us / 1e6)
            done_s = time.perf_counter()
            if spec.together:
                self._place.batch()
            waited_s += got_s - start_s
            computed_s += done_s - got_s
            met_s += time.perf_counter() - done_s
        seconds = time.perf_counter() - begin_s
        self._forget(0)
        self._place.epoch()
        read_us = sorted(self._read_us)
        return {
            "epoch": number,
            "files": files,
            "bytes": total,
            "seconds": seconds,
            "waited_s": waited_s,
            "computed_s": computed_s,
            "met_s": met_s,
            "read_us": {name: round(read_us[int(share * (len(read_us) - 1))]) for name, share in _SHARES.items()},
            "before": before,
            "after": statistics(mount) if spec.mount else {},
        }


_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def main() -> None:
    started_s = time.monotonic()
    spec = Spec.read(sys.argv[1])
    rank = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["FANSTORE_RANK"])
    reader = Reader(spec, rank)
    with (Path(spec.figures) / f"figures-{rank}").open("w") as output:
        output.write(json.dumps({"started_s": started_s}) + "\n")
        for number in range(spec.epochs):
            output.write(json.dumps(reader.epoch(number)) + "\n")


if __name__ == "__main__":
    main()
