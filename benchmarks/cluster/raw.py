"""The program of one host of a cluster that uses mpi4py alone: ``mpirun ... raw.py SPEC``. Reads, and does not compute.

The least that it costs to bring the files of each epoch to the host that reads them: the same placement of partitions
and the same order as FanStore has; files of the own partitions are read from the own disk, the others are asked of the
host that has them, several at a time, non-blocking, one thread. Memory is allocated once, nothing is checked but the
length. Leaves one line of JSON per epoch, as reader.py does.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from cluster.meeting import Place
from cluster.orders import Spec
from fanstore.dataset.placement import place
from fanstore.format.prepared import PreparedDataset

#: Files that a host asks for at the same time.
WINDOW = 16
#: Seconds to wait when nothing has arrived: as many processes as hosts must not spin on two cores.
_PAUSE_S = 0.0005
_TAG_REQUEST, _TAG_ANSWER = 1, 16


class Files:
    """What is where: per path partition, offset, size and holder; the own partitions lie in ``local``."""

    def __init__(self, spec: Spec, rank: int, local: Path) -> None:
        prepared = PreparedDataset.open(spec.prepared)
        parts = prepared.manifest.partitions
        placement = place(
            [part.bytes for part in parts], [part.everywhere for part in parts], [1 << 50] * spec.hosts, 1
        )
        index = prepared.index
        self.rows: list[tuple[int, int, int, int]] = []
        for path in spec.paths:
            entry = index.resolve(path.encode())
            partition = index.partition[entry]
            holder = placement.holders[partition][0]
            self.rows.append((partition, index.offset[entry], index.size[entry], holder))
        self._open = {}
        for partition in placement.of_rank(rank):
            copy = local / f"{partition}"
            shutil.copyfile(prepared.partition_path(partition), copy)
            self._open[partition] = copy.open("rb", buffering=0)

    def read(self, number: int, into: Any) -> None:
        partition, offset, size, _ = self.rows[number]
        file = self._open[partition]
        file.seek(offset)
        if file.readinto(into[:size]) != size:
            raise SystemExit(f"partition {partition} is too short")


class Rank:
    """This host: asks, and answers the others, until all are through."""

    def __init__(self, mpi: Any, files: Files) -> None:
        self._mpi, self._world = mpi, mpi.COMM_WORLD.Dup()
        self._rank, self._ranks = self._world.Get_rank(), self._world.Get_size()
        self._files = files
        most = max(row[2] for row in files.rows)
        self._memory = np.zeros((WINDOW, most), dtype=np.uint8)
        self._spare = [np.zeros(most, dtype=np.uint8)]
        self._sends: list[tuple[Any, Any]] = []

    def epoch(self, order: list[int]) -> tuple[int, int]:
        """Bytes that came from the own disk, and from others."""
        answers: list[Any] = [self._mpi.REQUEST_NULL] * WINDOW
        question = np.zeros(2, dtype=np.int64)
        listening = self._world.Irecv(question, self._mpi.ANY_SOURCE, _TAG_REQUEST)
        todo = iter(order)
        here = away = under_way = left = 0
        left = self._ranks
        asking = True
        while left:
            busy = False
            if asking and under_way < WINDOW:
                number = next(todo, None)
                busy = True
                if number is None:
                    asking = False
                elif self._files.rows[number][3] == self._rank:
                    self._files.read(number, self._spare[0])
                    here += self._files.rows[number][2]
                else:
                    slot = next(slot for slot, answer in enumerate(answers) if answer == self._mpi.REQUEST_NULL)
                    _, _, size, holder = self._files.rows[number]
                    answers[slot] = self._world.Irecv(self._memory[slot, :size], holder, _TAG_ANSWER + slot)
                    asked = np.array([number, _TAG_ANSWER + slot], dtype=np.int64)
                    self._sends.append((self._world.Isend(asked, holder, _TAG_REQUEST), asked))
                    under_way, away = under_way + 1, away + size
            if under_way and (arrived := self._mpi.Request.Testsome(answers)):
                under_way -= len(arrived)
                busy = True
            if not asking and not under_way and order:
                order = []  # through; everybody is told, this host as well
                for other in range(self._ranks):
                    told = np.array([-1, 0], dtype=np.int64)
                    self._sends.append((self._world.Isend(told, other, _TAG_REQUEST), told))
            status = self._mpi.Status()
            if listening.Test(status):
                busy = True
                number, tag = question.tolist()
                source = status.Get_source()
                if number < 0:
                    left -= 1
                else:
                    data = np.empty(self._files.rows[number][2], dtype=np.uint8)
                    self._files.read(number, data)
                    self._sends.append((self._world.Isend(data, source, tag), data))
                if left:
                    listening = self._world.Irecv(question, self._mpi.ANY_SOURCE, _TAG_REQUEST)
            self._sends = [pair for pair in self._sends if not pair[0].Test()]
            if not busy:
                time.sleep(_PAUSE_S)
        self._mpi.Request.Waitall([send for send, _ in self._sends])
        self._sends = []
        return here, away


def main() -> None:
    from mpi4py import MPI

    spec = Spec.read(sys.argv[1])
    local = Path(sys.argv[2])
    number = MPI.COMM_WORLD.Get_rank()
    rank = Rank(MPI, Files(spec, number, local))
    meeting = Place(spec.meeting)
    with (Path(spec.figures) / f"figures-{number}").open("w") as output:
        output.write(json.dumps({"started_s": time.monotonic()}) + "\n")
        for epoch in range(spec.epochs):
            order = spec.order(epoch, number)
            meeting.epoch()
            begin_s = time.perf_counter()
            here, away = rank.epoch(order)
            seconds = time.perf_counter() - begin_s
            meeting.epoch()
            figures = {"epoch": epoch, "files": len(order), "bytes": here + away, "seconds": seconds}
            output.write(json.dumps(figures | {"local_bytes": here, "remote_bytes": away}) + "\n")


if __name__ == "__main__":
    main()
