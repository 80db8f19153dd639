"""The native engine: C threads in front of pyfuse3 (native/fuse/engine.h), and what they need from Python.

Owns the C engine, the socket between it and pyfuse3, and the eventfd by which it asks for what it cannot do. All
meaning stays with the core: content of the dataset is the broker's (dataset/broker.py), with which the engine speaks
in C, and an output is that of ``OutputContent``. Calls come from the trio thread, but for what is said of outputs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import pyfuse3
import trio

from fanstore import _native
from fanstore.dataset.broker import Broker
from fanstore.dataset.control import CONTROL_NAME
from fanstore.dataset.memory_limit import usable_bytes
from fanstore.dataset.namespace import Attributes, Namespace
from fanstore.format.index import Index
from fanstore.fuse.helper import Helper
from fanstore.fuse.operations import CACHE_S
from fanstore.fuse.outputoperations import SHARED_DIRECTORY_S, PythonEngine
from fanstore.outputs.engine import Created
from fanstore.outputs.output import FIRST_OUTPUT
from fanstore.outputs.tree import RefusedError
from fanstore.telemetry.statistics import EngineCounters, Statistics

log = logging.getLogger(__name__)

#: Threads: each may wait for a disk, so there are more of them than cores; those that wait for the kernel cost nothing.
#: Measured on 2 cores, files of 107 KB: see docs/performance.md. Each has a buffer of 1 MiB.
WORKERS_LEAST, WORKERS_PER_CORE, WORKERS_MOST = 8, 2, 16

#: Threads that stay free for names and local files when a shared file system does not answer.
RESERVED_WORKERS = 4

#: Kernel memory for a name: an inode and what leads to it (fuse_inode and dentry of /proc/slabinfo: 896 + 192 bytes
#: on Linux 6.18, and some for pages of them that are not full). It can be taken back, but takes room from the page
#: cache until it is.
NAME_BYTES = 1300
#: Names that are listed ahead have this part of the memory at most.
MEMORY_PART = 16

#: Read requests that the kernel keeps under way at once; its default of 12 starves a node with many loader processes.
MAX_BACKGROUND = 128

#: Writes to outputs that were just brought here, at once: each holds a thread while a disk works.
RESUMED_MOST = 8

#: Largest message between the engine and pyfuse3, with some room: FSX_PASS_BYTES of native/fuse/passing.h.
PACKET_BYTES = 160 << 10

#: Milliseconds for threads to end once they are told to; only one that hangs in a read of a dead disk needs longer.
STOP_LIMIT_MS = 3000

#: Seconds that new files are the engine's alone, unless something is asked of Python meanwhile.
CREATES_S = 0.05

#: Seconds after which the kernel will have said that it has forgotten a file that was removed before.
FORGET_S = 0.02

#: Flags of the kernel's INIT message that are only reported (include/uapi/linux/fuse.h).
_FUSE_PASSTHROUGH, _FUSE_OVER_IO_URING = 1 << 37, 1 << 41


class _Kind(IntEnum):
    """What the engine asks for: enum fsx_upcall_kind of native/fuse/upcalls.h."""

    OUTPUT_READ = 0
    MAKE_LOCAL = 1
    NO_ROOM = 2


class OutputContent(Protocol):
    """What the engine needs of outputs: where their content is if it is on this node, and how to get at the rest.

    The content of an output is the file in ``directory_fd`` that has the inode number, in hexadecimal, for its name. It
    appears there under its name when it is whole, and the engine reads and writes it from then on.
    """

    @property
    def directory_fd(self) -> int: ...

    @property
    def journal_fd(self) -> int:
        """Where the engine notes what it creates; -1 for nowhere."""

    @property
    def rank(self) -> int:
        """The node that has created it then."""

    def catch_up(self) -> None:
        """The engine has created something by itself: take it over."""

    async def read(self, inode: int, offset: int, length: int) -> bytes | memoryview:
        """Bytes of an output that is not on this node; less than ``length`` only at its end. Raises RefusedError,
        OSError."""

    async def make_local(self, inode: int) -> None:
        """Bring the content to this node, because somebody writes. Several may ask at once. Raises RefusedError,
        OSError."""


class NativeEngine(PythonEngine):
    """One C engine.

    Attributes:
        socket: pyfuse3's end of the socket pair; belongs to libfuse once it was given to it.
        _outputs: None if nothing can be written.
        _creates: it creates files by itself; _awaits_creates: they are about to be taken over.
        _stopped: the C engine has ended; counters are those of that moment.
    """

    def __init__(
        self,
        index: Index,
        namespace: Namespace,
        broker: Broker,
        statistics: Statistics,
        workers: int | None = None,
        outputs: OutputContent | None = None,
        alone: bool = True,
        waits: bool = False,
        local: bool = False,
        begun: int = -1,
    ) -> None:
        """Raises OSError.

        Args:
            workers: number of threads; None for as many as suit the machine (``choose_workers``).
            outputs: None if nothing can be written.
            alone: the job has one node, so that the kernel may believe for long what it was told.
            waits: who closes an output waits until it is made known.
            local: fsync waits for the disk of this node, the only one of the job, and not for more.
            begun: an eventfd, if files that are begun to be read are to be noted; -1 if not.
        """
        self._outputs = outputs
        self._alone = alone
        self._statistics = statistics
        self.workers = workers or choose_workers()
        totals = namespace.statfs()
        self._engine = _native.Engine(
            broker.native,
            uid=namespace.uid,
            gid=namespace.gid,
            hidden=index.lookup(0, CONTROL_NAME),
            blocks=totals.blocks,
            files=totals.files,
            workers=self.workers,
            max_background=MAX_BACKGROUND,
            outputs=-1 if outputs is None else outputs.directory_fd,
            alone=alone,
            waits=waits,
            local=local,
            journal=-1 if outputs is None else outputs.journal_fd,
            rank=0 if outputs is None else outputs.rank,
            begun=begun,
        )
        self._lister = Helper("fanstore-names", "names are not listed ahead", self._list_with, self._engine.end_listing)
        self._reader = Helper(
            "fanstore-pages",
            "files are not read into the page cache ahead",
            broker.native.read_ahead_with,
            broker.native.end_reading_ahead,
        )
        self._pages_wanted = trio.Event()
        self._ours, self.socket = socket_pair()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._resumed = trio.CapacityLimiter(RESUMED_MOST)
        self._stopped = False
        self._creates = outputs is not None
        self._awaits_creates = False
        self._last: dict[str, Any] = {}
        statistics.engine = self

    # --- what the kernel is to know ahead ---

    async def list_ahead(self, point: Path) -> None:
        """Have directories of the mount listed while programs look up their names. Returns when that has ended."""
        await self._lister.run(point)

    def _list_with(self, socket: int, process: int) -> None:
        self._engine.list_with(socket, usable_bytes() // MEMORY_PART // NAME_BYTES)

    async def read_ahead(self, point: Path) -> None:
        """Once it is wanted, have what is fetched ahead read into the page cache. Returns when that has ended."""
        await self._pages_wanted.wait()
        await self._reader.run(point)

    def want_pages(self) -> bool:
        """Files shall be read into the page cache ahead: whether they are, or will be."""
        self._pages_wanted.set()
        return not self._reader.failed

    def forward_missing(self, wanted: bool) -> None:
        """Whether names that are not there come to the operations, which see who asks for them; without outputs."""
        self._engine.forward_missing(wanted)

    async def end_helpers(self) -> None:
        """The end of ``list_ahead`` and ``read_ahead``: before the mount is taken away."""
        await self._lister.end()
        await self._reader.end()

    def take_begun(self) -> tuple[list[tuple[int, int]], int]:
        """Entries and threads of files that were begun to be read, and how many were lost since. With none, the eventfd
        becomes readable for the next one."""
        return self._engine.take_begun()

    # --- outputs: as Engine has it ---

    def add_name(self, parent: int, name: bytes, directory: int) -> None:
        self._engine.add_name(parent, name, directory)

    def remove_name(self, parent: int, name: bytes) -> None:
        self._engine.remove_name(parent, name)

    def mix(self, entry: int) -> None:
        self._engine.mix(entry)

    def set_directory(self, attributes: Attributes) -> None:
        a = attributes
        valid_s = int(CACHE_S if self._alone or a.inode < FIRST_OUTPUT else SHARED_DIRECTORY_S)
        self._engine.describe(a.inode, a.mode, a.nlink, a.size, a.blocks, a.mtime_ns, a.uid, a.gid, valid_s)

    def drop_directory(self, inode: int) -> int:
        return self._engine.undescribe(inode)

    def take_told(self, inode: int) -> int:
        return self._engine.take_told(inode)

    def has_creates(self) -> bool:
        return self._engine.has_creates()

    def take_creates(self) -> Sequence[Created]:
        return self._engine.take_creates()

    def begin_turn(self) -> tuple[Sequence[Created], int]:
        return self._engine.begin_turn()

    def disown(self, inode: int) -> None:
        self._engine.disown(inode)

    def own(self, inode: int) -> None:
        self._engine.own(inode)

    def end_turn(self, next_inode: int, journal_end: int) -> None:
        self._engine.end_turn(next_inode, journal_end)

    async def _take_over_creates(self) -> None:
        """Some time after the first of them: by then most were closed, and many are taken at once."""
        assert self._outputs is not None
        await trio.sleep(CREATES_S)
        self._awaits_creates = False
        self._outputs.catch_up()

    def open(self, inode: int, flags: int) -> int:
        return self._engine.open(inode, flags)

    def drop(self, inode: int) -> None:
        self._engine.drop(inode)

    # --- life ---

    def start(self, device: int) -> None:
        """Begin to answer the kernel. Raises OSError."""
        self._engine.start(device, self._ours.fileno(), self._wake)

    async def run(self) -> None:
        """Do what the engine asks for, until the connection to the kernel has ended. Raises OSError."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(self._wake)
                os.eventfd_read(self._wake)
                ended, code = self._engine.ended()  # before the last look at the line
                if self._creates and not self._awaits_creates and self._engine.has_creates():
                    self._awaits_creates = True
                    nursery.start_soon(self._take_over_creates)
                while upcalls := self._engine.take():
                    for token, kind, number, offset, length in upcalls:
                        match kind:
                            case _Kind.OUTPUT_READ:
                                nursery.start_soon(self._read_output, token, number, offset, length)
                            case _Kind.MAKE_LOCAL:
                                nursery.start_soon(self._make_local, token, number)
                            case _Kind.NO_ROOM:
                                nursery.start_soon(self._wait_for_room, token)
                if ended:
                    break
            nursery.cancel_scope.cancel()
        # pyfuse3 would take the end of its socket for an error.
        pyfuse3.terminate()
        if code != 0:
            raise OSError(code, os.strerror(code))

    async def _read_output(self, token: int, inode: int, offset: int, length: int) -> None:
        assert self._outputs is not None
        async with self._answering("read", token):
            self._engine.answer(token, await self._outputs.read(inode, offset, length))

    async def _make_local(self, token: int, inode: int) -> None:
        assert self._outputs is not None
        async with self._answering("write", token):
            await self._outputs.make_local(inode)
            await trio.to_thread.run_sync(self._engine.resume, token, limiter=self._resumed)

    async def _wait_for_room(self, token: int) -> None:
        """The content of a removed file goes when the kernel has forgotten it, which it says after unlink returned."""
        async with self._answering("write", token):
            await trio.sleep(FORGET_S)
            await trio.to_thread.run_sync(self._engine.resume, token, limiter=self._resumed)

    @contextlib.asynccontextmanager
    async def _answering(self, operation: str, token: int) -> AsyncIterator[None]:
        """Count and time what is done for an output; if it fails, this one request does, not the daemon."""
        start_ns = time.perf_counter_ns()
        number = errno.EIO
        try:
            yield
            number = 0
        except Exception as error:  # noqa: BLE001 -- the promise
            number = _error_number(operation, error)
        finally:
            if number != 0:
                self._engine.fail(token, number)
            self._statistics.record(operation, time.perf_counter_ns() - start_ns, number != 0)

    def stop(self) -> bool:
        """End the threads, and with them the connection to the kernel. False if some hang and were left behind."""
        if self._stopped:
            return True
        try:
            self._last = self._engine.statistics()
        except ValueError:
            self._last = {}  # it was never started
        self._stopped = True
        ended = self._engine.stop(STOP_LIMIT_MS)
        self._ours.close()
        self.socket.close()  # unless libfuse has it
        os.close(self._wake)
        return ended

    # --- statistics ---

    def _raw(self) -> dict[str, Any]:
        if not self._stopped:
            try:
                return self._engine.statistics()
            except ValueError:
                return {}  # not started yet
        return self._last

    def counters(self) -> EngineCounters:
        """What the C threads have answered so far."""
        raw = self._raw()
        if not raw:
            return EngineCounters({}, {}, (0, 0))
        return EngineCounters(raw["operations"], raw["reads"]["sources"], raw["reads"]["verification"])

    def describe(self) -> Mapping[str, object]:
        """The section ``engine`` of stats.json."""
        raw = self._raw()
        operations = raw.get("operations", {})
        major, minor, flags = raw.get("kernel", (0, 0, 0))
        reads, read_bytes, writes, written_bytes = raw.get("outputs", (0, 0, 0, 0))
        listings, names, directories = raw.get("names_ahead", (0, 0, 0))
        periods, polled_ns, taken = raw.get("busy_poll", (0, 0, 0))
        forwarded, upcalls = raw.get("forwarded", 0), raw.get("upcalls", 0)
        return {
            "name": "native",
            "threads": self.workers,
            "answered_native": sum(latency[0] for latency in operations.values()),
            "answered_python": forwarded + upcalls,
            "forwarded": forwarded,
            "upcalls": upcalls,
            "interrupted": raw.get("interrupted", 0),
            "malformed": raw.get("malformed", 0),
            "direct_reads": raw.get("reads", {}).get("direct_reads", 0),
            "names_ahead": {"listings": listings, "names": names, "directories": directories},
            "busy_poll": {"times": periods, "time_ns": polled_ns, "requests": taken},
            "outputs": {
                "reads": reads,
                "read_bytes": read_bytes,
                "writes": writes,
                "written_bytes": written_bytes,
            },
            "kernel": {
                "protocol": f"{major}.{minor}",
                "passthrough": _offer(flags, _FUSE_PASSTHROUGH),
                "io_uring": _offer(flags, _FUSE_OVER_IO_URING),
            },
        }


def choose_workers() -> int:
    """As many threads as suit the machine."""
    return min(max(WORKERS_LEAST, WORKERS_PER_CORE * len(os.sched_getaffinity(0))), WORKERS_MOST)


def _error_number(operation: str, error: Exception) -> int:
    """For the process that reads or writes an output."""
    if isinstance(error, RefusedError):
        return error.number
    if isinstance(error, OSError) and error.errno:
        return error.errno
    log.error("unexpected error in %s, answered with EIO; please report it", operation, exc_info=error)
    return errno.EIO


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Between the engine and pyfuse3: a packet is a message. Raises OSError if messages would not fit."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < PACKET_BYTES:
            for other in pair:
                other.close()
            raise OSError(errno.EMSGSIZE, "net.core.wmem_max of this machine is too small for its messages")
    return pair


def _offer(flags: int, flag: int) -> str:
    """Whether the kernel offers something that is not used; see docs/performance.md for why not."""
    return "offered, not used" if flags & flag else "not offered"
