"""One rank of remote_reads.py that uses mpi4py alone: ``mpirun -n N python remote_raw.py SPEC``

The least that a program of mpi4py can do for the same files: a request message (partition, offset, length, tag), the
answer sent straight from the mapped partition and received in page-aligned memory that is posted beforehand, the same
requests under way in the same directions, non-blocking, one thread. Each place of the window has one piece of memory
that is used again and again, as the pool of FanStore's answers is; nothing is allocated, checked or kept, and an answer
is looked at at both ends only. Files of the rank's own are copied out of the mapping into the same memory.
Rank 0 prints one line of JSON per case.
"""

import json
import mmap
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.remote import WARM_UP_S, Case, Figures, File, Files, Source, Spec, total

from fanstore.format.prepared import PreparedDataset

REQUEST = struct.Struct("<IIIQ")  #: tag of the answer (0: the asker is done), partition, length, offset
TAG_REQUEST, TAG_ANSWER = 1, 16


class Rank:
    """This process: asks, and answers the others, until all are done."""

    def __init__(self, mpi: Any, source: Source, case: Case, files: list[File], seconds: float) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD
        self._rank, self._ranks = self._world.Get_rank(), self._world.Get_size()
        self._source, self._case, self._files, self._seconds = source, case, files, seconds
        self._others = [other for other in range(self._ranks) if other != self._rank]
        self._asking = self._rank < case.askers
        #: Those that ask no more.
        self._quiet = {other for other in self._others if other >= case.askers}
        self._slots = [other for other in self._others for _ in range(case.window) if other not in self._quiet]
        self._requests = [bytearray(REQUEST.size) for _ in self._slots]
        self._incoming = [self._listen(slot) for slot in range(len(self._slots))]
        self._sends: list[Any] = []
        self._next = 0
        self._figures = Figures()
        whole = np.frombuffer(mmap.mmap(-1, case.window * (case.size + 4096)), np.uint8)
        whole[:] = 0  # mapped now, not while it is measured
        step = (case.size + 4095) // 4096 * 4096
        self._memory = [whole[place * step : place * step + case.size] for place in range(case.window)]
        self._answers: list[Any] = [mpi.REQUEST_NULL] * case.window
        self._began_s = [0.0] * case.window
        self._wanted: list[Any] = [None] * case.window

    def _listen(self, slot: int) -> Any:
        return self._world.Irecv(self._requests[slot], self._slots[slot], TAG_REQUEST)

    def _ask(self, place: int, end_s: float) -> None:
        """Have this place of the window filled with the next file; those that are here are copied at once."""
        while True:
            began_s = time.perf_counter()
            if began_s >= end_s:
                return
            file = self._files[self._next % len(self._files)]
            self._next += 1
            size = self._case.size
            if file.holder != self._rank:
                break
            data = np.frombuffer(self._source.maps[file.partition][file.offset : file.offset + size], np.uint8)
            self._memory[place][:] = data
            self._figures.latencies_s.append(time.perf_counter() - began_s)
            self._source.check(file, 0, self._memory[place].data)
        self._wanted[place] = file
        self._began_s[place] = began_s
        self._answers[place] = self._world.Irecv(self._memory[place], file.holder, TAG_ANSWER + place)
        request = REQUEST.pack(TAG_ANSWER + place, file.partition, size, file.offset)
        self._sends.append(self._world.Isend(request, file.holder, TAG_REQUEST))

    def _take_answers(self, end_s: float) -> bool:
        arrived = self._mpi.Request.Testsome(self._answers) or []
        for place in arrived:
            self._figures.latencies_s.append(time.perf_counter() - self._began_s[place])
            self._source.check(self._wanted[place], 0, self._memory[place].data)
            self._ask(place, end_s)
        return bool(arrived)

    def _answer_others(self) -> bool:
        asked = self._mpi.Request.Testsome(self._incoming) or []
        for slot in asked:
            tag, partition, length, offset = REQUEST.unpack(self._requests[slot])
            if tag == 0:
                self._quiet.add(self._slots[slot])
            else:
                data = self._source.maps[partition][offset : offset + length]
                self._sends.append(self._world.Isend(data, self._slots[slot], tag))
                self._incoming[slot] = self._listen(slot)
        return bool(asked)

    def run(self) -> Figures:
        begin_s = time.perf_counter()
        end_s = begin_s + self._seconds
        if self._asking:
            for place in range(self._case.window):
                self._ask(place, end_s)
        done = not self._asking
        while not (done and len(self._quiet) == len(self._others)):
            busy = self._asking and self._take_answers(end_s)
            if not done and not any(self._answers):
                self._figures.seconds = time.perf_counter() - begin_s
                done = True
                self._sends += [self._world.Isend(REQUEST.pack(0, 0, 0, 0), o, TAG_REQUEST) for o in self._others]
            busy |= self._answer_others()
            if self._sends and self._mpi.Request.Testsome(self._sends):
                self._sends = [send for send in self._sends if send]
            if not busy:
                os.sched_yield()  # as FanStore does: with fewer cores than processes, the other one needs its turn
        for request in self._incoming:
            if request:
                request.Cancel()
                request.Wait()
        self._mpi.Request.Waitall(self._sends)
        return self._figures


def main() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    spec = Spec.read(sys.argv[1])
    rank = world.Get_rank()
    prepared = PreparedDataset.open(Path(spec.prepared))
    source = Source.open(prepared)
    files = Files(prepared, spec.ranks)
    for case in spec.cases:
        chosen = files.of(case, rank) if rank < case.askers else []
        for seconds in (WARM_UP_S, spec.seconds):
            world.Barrier()
            line = Rank(MPI, source, case, chosen, seconds).run().line()
        everybody = world.gather(line)
        if everybody:
            print(json.dumps(total(case, everybody)), flush=True)


if __name__ == "__main__":
    main()
