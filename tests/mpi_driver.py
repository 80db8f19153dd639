"""One rank of a scenario over MPI: ``mpirun -n 3 python tests/mpi_driver.py SCENARIO``. Started by test_transport.py.

Exit code 0 if every assertion of this rank held. Prints one line of JSON with figures, if the scenario has any.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import trio
from transport_conformance import SCENARIOS, Node

from fanstore.transport.mpi import IDLE_S, SPIN_NS, MpiPeers

#: A rank that takes longer has hung. Longer than any limit in a scenario.
LIMIT_S = 80.0
#: To leave the job. Nothing waits for it when all is well, as the tests check.
CLOSE_S = 60.0


async def idle(node: Node) -> None:
    """A daemon without work leaves the core to the training."""
    node.peers.serve(node.host)
    await node.check_fetch(node.others[0], node.partition_of(node.others[0]), 0, 100_000)
    await node.meet()
    await trio.sleep(0.5)
    begin = Effort.of_thread("mpi")
    await trio.sleep(2)
    end = Effort.of_thread("mpi")
    wakes_per_s = (end.wakes - begin.wakes) / (end.wall_s - begin.wall_s)
    cpu_per_wake_s = (end.cpu_s - begin.cpu_s) / max(1, end.wakes - begin.wakes)
    figures = {"rank": node.rank, "wakes_per_s": round(wakes_per_s, 1), "cpu_per_wake_us": round(cpu_per_wake_s * 1e6)}
    print(json.dumps(figures), flush=True)
    # Not the share of a core, which depends on what else the machine does: it sleeps its longest sleep each time, and
    # does not spin in between. To spin would take the rest of those 20 ms, however little of a core there is for it.
    assert wakes_per_s < 1.2 / IDLE_S, f"an idle rank wakes {wakes_per_s:.0f} times a second"
    assert cpu_per_wake_s < SPIN_NS / 1e9 * 4, f"an idle rank works {cpu_per_wake_s * 1e6:.0f} µs each time it wakes"
    await node.meet()


@dataclass
class Effort:
    """What a thread of this process has done so far: how often it went to sleep, and how long it has run."""

    wall_s: float
    wakes: int
    cpu_s: float

    @classmethod
    def of_thread(cls, name: str) -> "Effort":
        (number,) = (thread.native_id for thread in threading.enumerate() if thread.name == name)
        directory = Path(f"/proc/self/task/{number}")
        (wakes,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)$", (directory / "status").read_text(), re.MULTILINE)
        cpu_ns = int((directory / "schedstat").read_text().split()[0])
        return cls(time.monotonic(), int(wakes), cpu_ns / 1e9)


async def close_without_the_stopped(node: Node) -> None:
    """A peer that does not answer does not keep the others from ending."""
    node.peers.serve(node.host)
    await node.meet()
    if node.rank == 2:
        await trio.sleep_forever()
    await node.meet(0, 1)
    if node.rank == 0:
        node.stop(2)


async def never_serve(node: Node) -> None:
    """A job that fails before it has begun ends all the same."""
    assert len(await node.peers.gather_all(b"x")) == node.size


async def hard_exit(node: Node) -> None:
    """A rank that ends without a word, as after an unhandled error, is a loss for the others."""
    node.peers.serve(node.host)
    await node.meet()
    if node.rank == 2:
        os._exit(0)
    await node.until(lambda: node.host.lost_ranks == [2], "the loss of rank 2")
    await node.meet(0, 1)


ONLY_MPI = {scenario.__name__: scenario for scenario in (idle, close_without_the_stopped, never_serve, hard_exit)}


def library_version() -> str:
    """Of the MPI library that was really loaded."""
    from mpi4py import MPI

    version: str = MPI.Get_library_version()
    return version.split(",")[0].splitlines()[0]


def stop(pid: int) -> None:
    """Stop a process, and wait until it has: another core may let it run on for a moment, and it would answer."""
    os.kill(pid, signal.SIGSTOP)
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks(pid)):
        time.sleep(0.001)


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").iterdir())


async def run(name: str) -> None:
    peers = MpiPeers()
    await peers.wait_started()
    pids = [int(pid) for pid in await peers.gather_all(b"%d" % os.getpid())]
    node = Node(
        peers,
        kill=lambda rank: os.kill(pids[rank], signal.SIGKILL),
        stop=lambda rank: stop(pids[rank]),
        cont=lambda rank: os.kill(pids[rank], signal.SIGCONT),
    )
    with trio.fail_after(LIMIT_S):
        await {**SCENARIOS, **ONLY_MPI}[name](node)
    begin_s = time.monotonic()
    peers.close(3.0 if name == "close_without_the_stopped" else CLOSE_S)
    close_s = round(time.monotonic() - begin_s, 3)
    print(json.dumps({"rank": peers.rank, "close_s": close_s, "library": library_version()}), flush=True)
    if name == "close_without_the_stopped" and node.rank == 0:
        node.kill(2)  # what a batch system does in the end


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s: %(message)s")
    try:
        trio.run(run, sys.argv[1])
    except BaseException:  # noqa: BLE001  # told, and the end of the process
        # No orderly end: the other ranks are in the middle of something, and mpirun ends them.
        print(f"rank {os.environ.get('OMPI_COMM_WORLD_RANK')}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
