"""One engine, served on a socket instead of /dev/fuse: ``python tests/engine_peer.py PREPARED native|python FD``.

Started by test_engines.py, which takes the kernel's place. Everything but the mount is the real thing: the core, the
handlers, pyfuse3, the C engine with one thread. Ends with its parent.
"""

import ctypes
import signal
import sys
from pathlib import Path

import pyfuse3
import trio

from fanstore.core.job import Job
from fanstore.core.node import Node, NodeSettings
from fanstore.core.placement import place
from fanstore.core.reader import Verify
from fanstore.core.statistics import Statistics
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.native import NativeEngine
from fanstore.fuse.operations import ReadOnlyOperations

_PR_SET_PDEATHSIG = 1


async def serve(prepared: Path, engine: str, connection: int) -> None:
    dataset = PreparedDataset.open(prepared)
    statistics = Statistics()
    parts = dataset.manifest.partitions
    placement = place([part.bytes for part in parts], [part.everywhere for part in parts], [0], 1)
    settings = NodeSettings(1 << 30, Verify.FIRST, 2.0)
    node = Node(dataset, Job(None), placement, None, settings, statistics, dict)
    operations = ReadOnlyOperations(node.namespace, node.reader, node.control, statistics)
    if engine == "python":
        pyfuse3.init(operations, f"/dev/fd/{connection}", set())
        await pyfuse3.main()
        return
    native = NativeEngine(dataset.index, node.namespace, node.store, node.reader, statistics, 1 << 30, workers=1)
    pyfuse3.init(operations, f"/dev/fd/{native.socket.fileno()}", set())
    native.socket.detach()
    native.start(connection)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(native.run)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()
    pyfuse3.close(unmount=False)
    assert native.stop()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    trio.run(serve, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
