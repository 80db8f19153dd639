"""The native engine: C threads in front of pyfuse3 (native/engine.h), and what they need from Python.

Owns the C engine, the socket between it and pyfuse3, and the eventfd by which it asks for what it cannot do. All
meaning stays with the core: a read that crosses over here is the reader's, an output is that of ``OutputContent``, and
whom the engine asks for chunks of other nodes is decided by ``Remote``. Calls come from the trio thread, but for
``_publish``, which the store makes on any, and for what is said of outputs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import pyfuse3
import trio

from fanstore import _native
from fanstore.core.births import Birth
from fanstore.core.control import CONTROL_NAME
from fanstore.core.namespace import Attributes, Namespace
from fanstore.core.reader import Reader, Verify
from fanstore.core.remote import Failure, Remote
from fanstore.core.statistics import EngineCounters, Source, Statistics
from fanstore.core.store import PartitionFile, PartitionStore
from fanstore.errors import CorruptDataError, FanstoreError
from fanstore.format.index import Index
from fanstore.fuse.lister import Lister

log = logging.getLogger(__name__)

#: Threads: each may wait for a disk, so there are more of them than cores; those that wait for the kernel cost nothing.
#: Measured on 2 cores, files of 107 KB: see docs/performance.md.
WORKERS_LEAST, WORKERS_PER_CORE, WORKERS_MOST = 8, 2, 32

#: Threads that stay free for names and local files when a shared file system does not answer.
RESERVED_WORKERS = 4

#: Read requests that the kernel keeps under way at once; its default of 12 starves a node with many loader processes.
MAX_BACKGROUND = 128

#: Writes to outputs that were just brought here, at once: each holds a thread while a disk works.
RESUMED_MOST = 8

#: Largest message between the engine and pyfuse3, with some room: FSX_PASS_BYTES of native/passing.h.
PACKET_BYTES = 160 << 10

#: Milliseconds for threads to end once they are told to; only one that hangs in a read of a dead disk needs longer.
STOP_LIMIT_MS = 3000

#: Seconds that new files are the engine's alone, unless something is asked of Python meanwhile.
BIRTHS_S = 0.05

#: Seconds after which the kernel will have said that it has forgotten a file that was removed before.
FORGET_S = 0.02

#: Flags of the kernel's INIT message that are only reported (include/uapi/linux/fuse.h).
_FUSE_PASSTHROUGH, _FUSE_OVER_IO_URING = 1 << 37, 1 << 41

_VERIFY = {Verify.FIRST: 0, Verify.ALWAYS: 1, Verify.NEVER: 2}


class _Kind(IntEnum):
    """What the engine asks for: enum fsx_crossing_kind of native/crossings.h."""

    READ = 0
    OUTPUT_READ = 1
    MAKE_LOCAL = 2
    NO_ROOM = 3


class Heir(Protocol):
    """Takes over what the engine has created."""

    def take_over(self) -> None: ...


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

    @property
    def births(self) -> Heir:
        """Whom to tell that it has created something."""

    async def read(self, inode: int, offset: int, length: int) -> bytes | memoryview:
        """Bytes of an output that is not on this node; less than ``length`` only at its end. Raises FanstoreError or
        OSError."""

    async def make_local(self, inode: int) -> None:
        """Bring the content to this node, because somebody writes. Several may ask at once. Raises OSError with the
        error number for the writer."""


class NativeEngine:
    """One C engine.

    Attributes:
        socket: pyfuse3's end of the socket pair; belongs to libfuse once it was given to it.
        _outputs: None if nothing can be written.
        _remote: None if the engine does not fetch from other nodes.
        _budget: descriptors that may still be published; guarded by ``_lock``.
        _creates: it creates files by itself; _awaits_births: they are about to be taken over.
        _stopped: the C engine has ended; counters are those of that moment.
    """

    def __init__(
        self,
        index: Index,
        namespace: Namespace,
        store: PartitionStore,
        reader: Reader,
        statistics: Statistics,
        cache_bytes: int,
        workers: int | None = None,
        outputs: OutputContent | None = None,
        alone: bool = True,
        waits: bool = False,
        remote: Remote | None = None,
    ) -> None:
        """Raises OSError.

        Args:
            workers: number of threads; None for as many as suit the machine.
            outputs: None if nothing can be written.
            alone: the job has one node, so that the kernel may believe for long what it was told.
            waits: who closes an output waits until it is made known.
            remote: the other nodes, from which the engine fetches by itself as long as all goes well; None for none.
        """
        self._reader = reader
        self._outputs = outputs
        self._statistics = statistics
        cores = len(os.sched_getaffinity(0))
        self.workers = workers or min(max(WORKERS_LEAST, WORKERS_PER_CORE * cores), WORKERS_MOST)
        totals = namespace.statfs()
        self._engine = _native.Engine(
            index.native,
            reader.marks,
            uid=namespace.uid,
            gid=namespace.gid,
            hidden=index.lookup(0, CONTROL_NAME),
            blocks=totals.blocks,
            files=totals.files,
            verify=_VERIFY[reader.verify],
            cache_bytes=cache_bytes,
            workers=self.workers,
            shared_readers=max(1, self.workers - RESERVED_WORKERS),
            max_background=MAX_BACKGROUND,
            outputs=-1 if outputs is None else outputs.directory_fd,
            alone=alone,
            waits=waits,
            journal=-1 if outputs is None else outputs.journal_fd,
            rank=0 if outputs is None else outputs.rank,
        )
        self._lister = Lister(self._engine)
        self._ours, self.socket = socket_pair()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        # Two descriptors per file, one of them for direct I/O; the store itself may use half of all.
        self._budget = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8
        self._resumed = trio.CapacityLimiter(RESUMED_MOST)
        self._stopped = False
        self._creates = outputs is not None
        self._awaits_births = False
        self._remote: Remote | None = None
        if remote is not None and remote.exchange is not None:
            self._engine.fetch_with(remote.exchange, remote.rank, remote.timeout_s)
            self._remote = remote
            remote.share_with(self)
        self._last: dict[str, Any] = {}
        statistics.engine = self
        store.tell_of_files(self._publish)

    # --- files ---

    def _publish(self, file: PartitionFile) -> None:
        """A file that the store has opened: the engine reads from it as well. From any thread."""
        if file.source is Source.SHARED and self._reader.asks_peers(file.partition):
            return  # other nodes come first
        with self._lock:
            if self._budget == 0 or self._stopped:
                return
            self._budget -= 1
        used = False
        try:
            used = self._engine.use(file.partition, file.fd, file.number, file.verified)
        except OSError as error:
            log.warning("%s is read without the native engine: %s", file.path, error.strerror)
        if not used:  # the store has opened it once more, or a local copy was faster
            with self._lock:
                self._budget += 1

    # --- other nodes ---

    def route(self, partition: int, ranks: Sequence[int]) -> None:
        """As Fetcher has it; after the end there is nobody to tell."""
        if not self._stopped:
            self._engine.route(partition, ranks)

    def fetched(self) -> tuple[Sequence[tuple[int, int]], tuple[int, int, int, int, bytes]]:
        """As Fetcher has it."""
        if not self._stopped:
            self._last_fetched = self._engine.fetched()
        return self._last_fetched

    def _note_failures(self) -> None:
        """What has not worked out: before the reads that cross over because of it."""
        if self._remote is not None:
            while failures := self._engine.take_failures():
                for failure, peer, partition in failures:
                    self._remote.note_failure(Failure(failure), peer, partition)

    # --- names ---

    async def list_ahead(self, point: Path) -> None:
        """Have directories of the mount listed while programs look up their names. Returns when that has ended."""
        await self._lister.run(point)

    async def end_listing(self) -> None:
        """The end of ``list_ahead``: before the mount is taken away."""
        await self._lister.end()

    # --- outputs ---

    def add_name(self, parent: int, name: bytes, folder: int) -> None:
        """There is an output of this name; counted. Before the kernel is told so. From any thread, as all of these.

        ``folder``: its inode if it is a directory, 0 otherwise.
        """
        self._engine.add_name(parent, name, folder)

    def remove_name(self, parent: int, name: bytes) -> None:
        """The opposite of ``add_name``."""
        self._engine.remove_name(parent, name)

    def mix(self, entry: int) -> None:
        """This directory of the dataset has outputs in it: from now on Python answers for it."""
        self._engine.mix(entry)

    def set_directory(self, attributes: Attributes, valid_s: int) -> None:
        """What stat says of a directory that is an output or holds some, until it is said anew."""
        a = attributes
        self._engine.describe(a.inode, a.mode, a.nlink, a.size, a.blocks, a.mtime_ns, a.uid, a.gid, valid_s)

    def drop_directory(self, inode: int) -> int:
        """The directory has no name any more, or another node has borrowed it; as ``take_told``."""
        return self._engine.undescribe(inode)

    def take_told(self, inode: int) -> int:
        """How often the engine has told the kernel of a directory by itself since this was last asked."""
        return self._engine.take_told(inode)

    def has_births(self) -> bool:
        """As Creator has it, and so the next five."""
        return self._engine.has_births()

    def take_births(self) -> Sequence[Birth]:
        return self._engine.take_births()

    def begin_turn(self) -> tuple[Sequence[Birth], int]:
        return self._engine.begin_turn()

    def disown(self, inode: int) -> None:
        self._engine.disown(inode)

    def lend(self, directory: int, lent: bool) -> None:
        self._engine.lend(directory, lent)

    def end_turn(self, next_inode: int, end_inode: int, journal_end: int) -> None:
        self._engine.end_turn(next_inode, end_inode, journal_end)

    async def _take_over_births(self) -> None:
        """Some time after the first of them: by then most were closed, and many are taken at once."""
        assert self._outputs is not None
        await trio.sleep(BIRTHS_S)
        self._awaits_births = False
        self._outputs.births.take_over()

    def open(self, inode: int, flags: int) -> int:
        """A new output is open; its handle. That is not the inode if it is written past the pages of the mount."""
        return self._engine.open(inode, flags)

    def drop(self, inode: int) -> None:
        """The file of this output has no name any more, or is another one: to be called after that, not before."""
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
                if self._creates and not self._awaits_births and self._engine.has_births():
                    self._awaits_births = True
                    nursery.start_soon(self._take_over_births)
                while crossings := self._take():
                    for token, kind, number, offset, length in crossings:
                        match kind:
                            case _Kind.READ:
                                nursery.start_soon(self._read, token, number, offset, length)
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

    def _take(self) -> list[tuple[int, int, int, int, int]]:
        crossings = self._engine.take()
        self._note_failures()  # after it: what makes a read cross over is noted before it does
        return crossings

    async def _read(self, token: int, entry: int, offset: int, length: int) -> None:
        start_ns = time.perf_counter_ns()
        number = errno.EIO
        try:
            data, chunk = await self._reader.read_with_chunk(entry, offset, length)
            if chunk is not None:
                self._engine.keep(entry, chunk.number, chunk.content)
            self._engine.answer(token, data)
            self._reader.let_go(entry)
            number = 0
        except CorruptDataError as error:
            log.debug("answered with EIO: %s", error)  # the reader has logged it, once per file
        except Exception as error:
            log.error("unexpected error in read, answered with EIO; please report it", exc_info=error)
        finally:
            if number != 0:
                self._engine.fail(token, number)
            self._statistics.record("read", time.perf_counter_ns() - start_ns, number != 0)

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
        if self._remote is not None:
            self.fetched()  # for the last time
        with self._lock:
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
        return EngineCounters(raw["operations"], raw["sources"], raw["verification"])

    def describe(self) -> Mapping[str, object]:
        """The section ``engine`` of stats.json."""
        raw = self._raw()
        operations = raw.get("operations", {})
        major, minor, flags = raw.get("kernel", (0, 0, 0))
        reads, read_bytes, writes, written_bytes = raw.get("outputs", (0, 0, 0, 0))
        read_ahead, wanted = raw.get("read_ahead", (0, 0))
        listings, names, directories = raw.get("names_ahead", (0, 0, 0))
        watches, watch_ns, watched = raw.get("watch", (0, 0, 0))
        forwarded, crossings = raw.get("forwarded", 0), raw.get("crossings", 0)
        return {
            "name": "native",
            "threads": self.workers,
            "answered_native": sum(latency[0] for latency in operations.values()),
            "answered_python": forwarded + crossings,
            "forwarded": forwarded,
            "crossings": crossings,
            "interrupted": raw.get("interrupted", 0),
            "malformed": raw.get("malformed", 0),
            "direct_reads": raw.get("direct_reads", 0),
            "read_ahead": {"files": read_ahead, "wanted": wanted},
            "names_ahead": {"listings": listings, "names": names, "directories": directories},
            "watch": {"times": watches, "time_ns": watch_ns, "requests": watched},
            "cache": raw.get("cache", {}),
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


def _error_number(operation: str, error: Exception) -> int:
    """For the process that reads or writes an output."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if isinstance(error, FanstoreError):
        log.debug("%s of an output answered with EIO: %s", operation, error)
    else:
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
