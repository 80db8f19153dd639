"""Interception, beside a mount or without one: what preloaded programs need, made when the first of them is to start.

Owns the state of client/preload.py and what is published in it: which file of this node serves which partition. The
programs read there by themselves; nothing is asked of the daemon. Used by session.py and by the request ``preload`` of
the control socket; trio thread, but for ``_publish``.
"""

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path

import trio

from fanstore.client.preload import COUNTERS, Described, PreloadError, PreloadState
from fanstore.dataset.broker import PIECE_BYTES
from fanstore.dataset.control import CONTROL_NAME
from fanstore.dataset.copy_readahead import CopyReadahead
from fanstore.dataset.namespace import NamespaceError
from fanstore.dataset.sources import Verify
from fanstore.dataset.store import PartitionFile
from fanstore.format.prepared import PreparedDataset
from fanstore.ids import Inode
from fanstore.job.node import Node
from fanstore.mounttable import Mount
from fanstore.telemetry.statistics import Source, Statistics

log = logging.getLogger(__name__)

#: What a program gets of a file does not change any more.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_VERIFY = {Verify.FIRST: 0, Verify.ALWAYS: 1, Verify.NEVER: 2}


class Interception:
    """Programs that read the dataset of one mount by themselves.

    Attributes:
        _directory: that of the job; None if there is none, and then nothing can be intercepted.
        _state: what they are told; None until the first of them is to start.
        _device: ``st_dev`` for them.
    """

    def __init__(self, prepared: PreparedDataset, node: Node, directory: Path | None, statistics: Statistics) -> None:
        self._prepared = prepared
        self._node = node
        self._directory = directory
        self._state: PreloadState | None = None
        self._device = 0
        self._lock = trio.Lock()
        self._readahead = CopyReadahead(self._copies)
        statistics.add_section("intercepted", self._statistics)

    async def open(self, mount: Mount, given: Path, verify: Verify, *, writable: bool, waits: bool) -> Path:
        """The directory that a program is to be told of; made if it is the first. Raises PreloadError."""
        self._readahead.begin()
        async with self._lock:
            if self._state is None:
                if self._directory is None:
                    raise PreloadError("programs cannot be intercepted: the job has no directory on this node")
                totals = self._node.namespace.statfs()
                points = [mount.point]
                if given != mount.point and ".." not in given.parts:
                    points.append(given)
                index = self._prepared.index
                self._device = _device(mount)
                described = Described(
                    device=self._device,
                    uid=os.geteuid(),
                    gid=os.getegid(),
                    verify=_VERIFY[verify],
                    writable=writable,
                    waits=waits,
                    hidden=index.lookup(0, CONTROL_NAME),
                    points=points,
                    entries=index.entry_count,
                    partitions=index.partition_count,
                    marks=len(self._node.broker.marks),
                    unmounted=not mount.is_fanstore,
                    blocks=totals.blocks,
                    files=totals.files,
                    shares=True,
                )
                try:
                    made = await trio.to_thread.run_sync(PreloadState, self._directory, index.data, described)
                except OSError as error:
                    raise PreloadError(
                        f"programs cannot be intercepted: cannot write to {self._directory}: {error.strerror}"
                    ) from error
                self._state = made
                self._publish_all()
                log.info("programs can be intercepted: %s", made.path)
            return self._state.path

    def _copies(self) -> list[Path]:
        """The copies on this node. From any thread."""
        store = self._node.store
        best = (store.best(partition) for partition in range(store.partition_count))
        return [file.path for file in best if file.source is Source.LOCAL]

    def _publish_all(self) -> None:
        self._node.store.tell_of_files(self._publish)
        if self._prepared.storage.directory is None:
            return  # in an object store: only copies on this node are files
        for partition in range(self._node.store.partition_count):
            self._publish(self._node.store.best(partition))  # also those that nobody has opened so far

    def _publish(self, file: PartitionFile) -> None:
        """From any thread."""
        is_file = file.source is Source.LOCAL or self._prepared.storage.directory is not None
        if self._state is not None and is_file and self._node.broker.publishes(file):
            self._state.use(file.partition, file.number, file.path, file.verified)

    def cache(self) -> int:
        """A descriptor of this node's chunk cache, for reading; the caller closes it. Raises PreloadError."""
        try:
            return self._node.broker.share()
        except OSError as error:
            raise PreloadError(f"the chunk cache cannot be shared: {error.strerror}") from error

    def fetcher(self) -> int:
        """A descriptor of a socket over which a program asks for chunks; the caller closes it. Raises PreloadError."""
        try:
            return self._node.broker.add_fetcher()
        except (OSError, ValueError) as error:
            raise PreloadError(f"no more programs can ask for chunks: {error}") from error

    async def content(self, entry: int) -> int:
        """A descriptor, for reading, of a sealed memory file with all of a regular file; the caller closes it.

        Raises PreloadError, CorruptDataError.
        """
        index = self._prepared.index
        if not 0 <= entry < index.entry_count or not stat.S_ISREG(index.mode[entry]):
            raise PreloadError(f"entry {entry} is not a regular file of this dataset")
        size = index.size[entry]
        try:
            with contextlib.ExitStack() as stack:
                file = os.memfd_create(f"fanstore-{entry}-{self._device:x}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                stack.callback(os.close, file)
                for offset in range(0, size, PIECE_BYTES):
                    piece = await self._node.broker.read(entry, offset, PIECE_BYTES)
                    if os.pwrite(file, piece, offset) != len(piece):
                        raise PreloadError("there is not enough memory for the content of a file")
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
                return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PreloadError(f"a file's content cannot be put into memory: {error.strerror}") from error

    async def control(self, name: str) -> int:
        """The same with the content of a file of the control directory, made now. Raises PreloadError."""
        control = self._node.control
        file = control.lookup(name.encode())
        if file is None or control.link_target(file) is not None:
            raise PreloadError("there is no such file")
        content = await control.open(file)
        try:
            with contextlib.ExitStack() as stack:
                opened = os.memfd_create("fanstore", os.MFD_CLOEXEC)
                stack.callback(os.close, opened)
                if os.write(opened, content) != len(content):
                    raise PreloadError("there is not enough memory for a control file")
                return os.open(f"/proc/self/fd/{opened}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PreloadError(f"a control file cannot be put into memory: {error.strerror}") from error

    def attribute(self, entry: int, name: str) -> bytes:
        """The value of an extended attribute. Raises PreloadError."""
        if not 0 <= entry < self._prepared.index.entry_count:
            raise PreloadError("there is no such entry")
        try:
            return self._node.namespace.get_xattr(Inode(entry + 1), name.encode(errors="surrogateescape"))
        except NamespaceError as error:
            raise PreloadError(str(error)) from None

    def end(self) -> None:
        """The mount ends: programs open nothing more of it here."""
        self._readahead.end()
        if self._state is not None:
            self._state.end()

    def opens(self) -> int | None:
        """Files that programs have opened by themselves so far; None if none can."""
        return None if self._state is None else self._state.opens()

    def _statistics(self) -> dict[str, int]:
        return dict.fromkeys(COUNTERS, 0) if self._state is None else self._state.counters()


def _device(mount: Mount) -> int:
    major, minor = mount.device.split(":")
    return os.makedev(int(major), int(minor))
