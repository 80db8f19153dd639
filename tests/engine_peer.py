"""One engine, served on a socket instead of /dev/fuse: ``python tests/engine_peer.py PREPARED native|python FD``.

Started by test_engines.py, which takes the kernel's place. Everything but the mount is the real thing: the core, the
handlers, pyfuse3, the C engine with one thread. Ends with its parent.

With ``outputs FD FOLDER`` the native engine has outputs, for test_native_outputs.py: FOLDER/objects has their content,
FOLDER/remote that of another node.
"""

import ctypes
import errno
import os
import signal
import sys
from pathlib import Path

import pyfuse3
import trio

from fanstore.dataset.placement import place
from fanstore.dataset.sources import Verify
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.native import NativeEngine
from fanstore.fuse.operations import ReadOnlyOperations
from fanstore.job.job import Job
from fanstore.job.node import Node, NodeSettings
from fanstore.outputs.tree import RefusedError
from fanstore.telemetry.statistics import Statistics

_PR_SET_PDEATHSIG = 1


class Outputs:
    """Another node is a folder. An inode that it does not have is a stale one; the last of all is refused."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.directory_fd = os.open(folder / "objects", os.O_RDONLY | os.O_DIRECTORY)

    @property
    def journal_fd(self) -> int:
        return -1

    @property
    def rank(self) -> int:
        return 0

    def catch_up(self) -> None:
        raise AssertionError("nobody has said that the engine may create anything")

    def _content(self, inode: int) -> bytes:
        if inode == (1 << 48) - 1:
            raise RefusedError(errno.ETIMEDOUT)
        try:
            return (self._folder / "remote" / f"{inode:x}").read_bytes()
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "no such file there") from None

    async def read(self, inode: int, offset: int, length: int) -> memoryview:
        return memoryview(self._content(inode))[offset : offset + length]

    async def make_local(self, inode: int) -> None:
        partial = self._folder / "objects" / "partial"
        partial.write_bytes(self._content(inode))
        partial.rename(self._folder / "objects" / f"{inode:x}")


async def serve(prepared: Path, engine: str, connection: int, folder: Path | None) -> None:
    dataset = PreparedDataset.open(prepared)
    statistics = Statistics()
    parts = dataset.manifest.partitions
    placement = place([part.bytes for part in parts], [part.everywhere for part in parts], [0], 1)
    settings = NodeSettings(1 << 30, Verify.FIRST, 2.0)
    node = Node(dataset, Job(None), placement, None, settings, statistics, dict)
    operations = ReadOnlyOperations(node.namespace, node.broker, node.control, statistics)
    if engine == "python":
        pyfuse3.init(operations, f"/dev/fd/{connection}", set())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.broker.run)
            await pyfuse3.main()
            nursery.cancel_scope.cancel()
        return
    outputs = Outputs(folder) if folder is not None else None
    native = NativeEngine(dataset.index, node.namespace, node.broker, statistics, workers=1, outputs=outputs)
    if outputs is not None:
        native.add_name(1 << 40, b"announced", 0)
        native.add_name(1 << 40, b"taken back", 0)
        native.remove_name(1 << 40, b"taken back")
        native.mix(0)
        native.drop(1 << 40)
    pyfuse3.init(operations, f"/dev/fd/{native.socket.fileno()}", set())
    native.socket.detach()
    native.start(connection)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(native.run)
        nursery.start_soon(node.broker.run)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()
    pyfuse3.close(unmount=False)
    assert native.stop()
    node.close()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    trio.run(serve, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]) if sys.argv[4:] else None)
