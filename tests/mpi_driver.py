"""One rank of a scenario over MPI: ``mpirun -n 3 python tests/mpi_driver.py SCENARIO``. Started by test_transport.py.

Exit code 0 if every assertion of this rank held. Prints one line of JSON with figures, if the scenario has any.
"""

import json
import logging
import os
import signal
import sys
import time
import traceback

import trio
from transport_conformance import SCENARIOS, Node

from fanstore.transport.mpi import MpiPeers

#: A rank that takes longer has hung. Longer than any limit in a scenario.
LIMIT_S = 80.0
CLOSE_S = 10.0


async def idle(node: Node) -> None:
    """A daemon without work leaves the core to the training."""
    node.peers.serve(node.host)
    await node.check_fetch(node.others[0], node.partition_of(node.others[0]), 0, 100_000)
    await node.meet()
    await trio.sleep(0.5)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    await trio.sleep(3)
    share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
    print(json.dumps({"rank": node.rank, "idle_cpu_share": round(share, 5)}), flush=True)
    assert share < 0.02, f"an idle rank uses {share:.1%} of a core"
    await node.meet()


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


async def run(name: str) -> None:
    peers = MpiPeers()
    await peers.wait_started()
    pids = [int(pid) for pid in await peers.gather_all(b"%d" % os.getpid())]
    node = Node(
        peers,
        kill=lambda rank: os.kill(pids[rank], signal.SIGKILL),
        stop=lambda rank: os.kill(pids[rank], signal.SIGSTOP),
        cont=lambda rank: os.kill(pids[rank], signal.SIGCONT),
    )
    with trio.fail_after(LIMIT_S):
        await {**SCENARIOS, **ONLY_MPI}[name](node)
    begin_s = time.monotonic()
    peers.close(3.0 if name == "close_without_the_stopped" else CLOSE_S)
    print(json.dumps({"rank": peers.rank, "close_s": round(time.monotonic() - begin_s, 3)}), flush=True)
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
