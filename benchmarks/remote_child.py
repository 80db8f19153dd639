"""One rank of remote_reads.py: ``mpirun -n N python remote_child.py WAY FILE SECONDS WINDOW SIZE...``

Every rank has FILE mapped and gives its bytes out. In jobs of two, rank 0 alone asks; in larger ones every rank asks
every other, in turn. WAY is ``raw`` (mpi4py by itself: the least that a request and its answer cost), ``fetch``
(MpiPeers.fetch, each of WINDOW tasks asking for one range after the other) or ``local`` (no MPI: copies out of the
mapping). Rank 0 prints one line of JSON per size with the figures of all askers.
"""

import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import trio

from fanstore.transport.library import keep_freed_memory

REQUEST = struct.Struct("<IIQ")  #: tag of the answer (0: the asker is done), length, offset
TAG_REQUEST, TAG_ANSWER = 1, 16


@dataclass
class Figures:
    """What one rank has read."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)


class Ranges:
    """Ranges of one size, one behind the other and round again; of every rank at another place."""

    def __init__(self, data: memoryview, size: int, rank: int) -> None:
        self.data = data
        self.size = size
        self._last = len(data) - size
        self._next = rank * 7 * size % max(1, self._last)

    def next_offset(self) -> int:
        offset = self._next
        self._next = offset + self.size if offset + self.size <= self._last else 0
        return offset

    def check(self, offset: int, answer: memoryview) -> None:
        """Both ends: bytes that are wrong would be a figure without meaning."""
        right = self.data[offset : offset + self.size]
        if len(answer) != self.size or answer[:64] != right[:64] or answer[-64:] != right[-64:]:
            raise SystemExit("wrong bytes")


def askers(ranks: int) -> list[int]:
    return [0] if ranks == 2 else list(range(ranks))


def read_raw(world: Any, mpi: Any, ranges: Ranges, seconds: float, window: int) -> Figures:
    """Requests and answers as a program of mpi4py alone would make them, with all that it can leave out left out."""
    rank, ranks = world.Get_rank(), world.Get_size()
    others = [other for other in range(ranks) if other != rank]
    asking = rank in askers(ranks)
    quiet = {other for other in others if other not in askers(ranks)}
    slots = [(other, number) for other in others for number in range(window) if other not in quiet]
    requests = [bytearray(REQUEST.size) for _ in slots]
    incoming = [world.Irecv(buffer, slot[0], TAG_REQUEST) for buffer, slot in zip(requests, slots, strict=True)]
    sends: list[Any] = []
    figures = Figures()
    memory: list[Any] = [None] * window
    answers: list[Any] = [mpi.REQUEST_NULL] * window
    began_s, offsets = [0.0] * window, [0] * window
    turn = 0

    def ask(place: int) -> None:
        nonlocal turn
        other = others[turn % len(others)]
        turn += 1
        offsets[place] = ranges.next_offset()
        memory[place] = np.empty(ranges.size, np.uint8)
        answers[place] = world.Irecv(memory[place], other, TAG_ANSWER + place)
        began_s[place] = time.perf_counter()
        sends.append(world.Isend(REQUEST.pack(TAG_ANSWER + place, ranges.size, offsets[place]), other, TAG_REQUEST))

    begin_s = time.perf_counter()
    end_s = begin_s + seconds
    if asking:
        for place in range(window):
            ask(place)
    done = not asking
    while not (done and len(quiet) == len(others)):
        arrived = (mpi.Request.Testsome(answers) or []) if asking else []
        for place in arrived:
            now_s = time.perf_counter()
            figures.latencies_s.append(now_s - began_s[place])
            ranges.check(offsets[place], memory[place].data)
            if now_s < end_s:
                ask(place)
        if not done and not any(answers):
            figures.seconds = time.perf_counter() - begin_s
            done = True
            sends += [world.Isend(REQUEST.pack(0, 0, 0), other, TAG_REQUEST) for other in others]
        asked = mpi.Request.Testsome(incoming) or []
        for slot in asked:
            tag, length, offset = REQUEST.unpack(requests[slot])
            if tag == 0:
                quiet.add(slots[slot][0])
            else:
                sends.append(world.Isend(ranges.data[offset : offset + length], slots[slot][0], tag))
                incoming[slot] = world.Irecv(requests[slot], slots[slot][0], TAG_REQUEST)
        if sends and mpi.Request.Testsome(sends):
            sends = [send for send in sends if send]
        if not arrived and not asked:
            os.sched_yield()  # as MpiPeers does: with fewer cores than processes, the other one needs its turn
    for request in incoming:
        if request:
            request.Cancel()
            request.Wait()
    mpi.Request.Waitall(sends)
    return figures


def run_raw(data: memoryview, seconds: float, window: int, sizes: list[int]) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for size in sizes:
        world.Barrier()
        figures = read_raw(world, MPI, Ranges(data, size, world.Get_rank()), seconds, window)
        everybody = world.gather(figures)
        if everybody:
            report(size, everybody)


class MappedHost:
    """Gives out the mapped file, whatever partition is asked for."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def mapped_partition(self, partition: int) -> memoryview | None:
        return self.data

    def answer(self, peer: int, question: bytes) -> bytes:
        return b""

    def heard(self, peer: int, word: bytes) -> None:
        """Nothing is told."""

    def lost(self, peer: int) -> None:
        raise SystemExit(f"rank {peer} died")


async def read_fetch(peers: Any, ranges: Ranges, seconds: float, window: int) -> Figures:
    others = [other for other in range(peers.size) if other != peers.rank]
    figures = Figures()
    begin_s = time.perf_counter()
    end_s = begin_s + seconds

    async def reader(number: int) -> None:
        turn = number
        while True:
            now_s = time.perf_counter()
            if now_s >= end_s:
                return
            offset = ranges.next_offset()
            answer = await peers.fetch(others[turn % len(others)], 0, offset, ranges.size, 20.0)
            turn += 1
            figures.latencies_s.append(time.perf_counter() - now_s)
            ranges.check(offset, answer)

    async with trio.open_nursery() as nursery:
        for number in range(window):
            nursery.start_soon(reader, number)
    figures.seconds = time.perf_counter() - begin_s
    return figures


async def run_fetch(data: memoryview, seconds: float, window: int, sizes: list[int]) -> None:
    from fanstore.transport.mpi import MpiPeers

    peers = MpiPeers()
    await peers.wait_started()
    peers.serve(MappedHost(data))
    for size in sizes:
        figures = Figures()
        await peers.gather_all(b"ready")
        if peers.rank in askers(peers.size):
            figures = await read_fetch(peers, Ranges(data, size, peers.rank), seconds, window)
        # What is sent must fit into a message: latencies as a summary.
        everybody = await peers.gather_all(json.dumps(summary(figures)).encode())
        if peers.rank == 0:
            print_line(size, [json.loads(text) for text in everybody])
    peers.close(10.0)


def run_local(data: memoryview, seconds: float, sizes: list[int]) -> None:
    for size in sizes:
        ranges, figures = Ranges(data, size, 0), Figures()
        begin_s = time.perf_counter()
        while (now_s := time.perf_counter()) < begin_s + seconds:
            offset = ranges.next_offset()
            answer = np.empty(size, np.uint8)
            answer[:] = np.frombuffer(data[offset : offset + size], np.uint8)
            figures.latencies_s.append(time.perf_counter() - now_s)
            ranges.check(offset, answer.data)
        figures.seconds = time.perf_counter() - begin_s
        report(size, [figures])


def summary(figures: Figures) -> dict[str, float]:
    latencies = sorted(figures.latencies_s) or [0.0]

    def percentile(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))] * 1e6

    return {
        "reads": len(figures.latencies_s),
        "seconds": figures.seconds,
        "p50_us": percentile(0.5),
        "p90_us": percentile(0.9),
        "p99_us": percentile(0.99),
    }


def report(size: int, everybody: list[Figures]) -> None:
    print_line(size, [summary(figures) for figures in everybody])


def print_line(size: int, everybody: list[dict[str, float]]) -> None:
    """The sum of all askers; of latencies the worst rank's."""
    asked = [line for line in everybody if line["reads"]]
    line: dict[str, float] = {"size": size, "askers": len(asked)}
    line["reads_per_s"] = sum(item["reads"] / item["seconds"] for item in asked)
    line |= {name: max(item[name] for item in asked) for name in ("p50_us", "p90_us", "p99_us")}
    print(json.dumps(line), flush=True)


def main() -> None:
    way, path = sys.argv[1:3]
    seconds, window = float(sys.argv[3]), int(sys.argv[4])
    sizes = [int(size) for size in sys.argv[5:]]
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    data = memoryview(mapping)
    keep_freed_memory()  # all ways alike: it is the way that is compared, not the allocator
    ways: dict[str, Callable[[], None]] = {
        "raw": lambda: run_raw(data, seconds, window, sizes),
        "fetch": lambda: trio.run(run_fetch, data, seconds, window, sizes),
        "local": lambda: run_local(data, seconds, sizes),
    }
    ways[way]()


if __name__ == "__main__":
    main()
