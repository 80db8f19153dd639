"""Which file serves a partition: the prepared one, where it is, or a copy on this node; and its descriptor.

Owns the descriptors of all partition files, opened when first needed and bounded in number, the maps of the copies on
this node, from which peers are served, and whether the bytes of a file were verified as a whole. Used by the sources
(trio thread and its worker threads), by staging (its own threads) and by the transport (``mapped``, on the MPI thread);
everything below ``_lock`` may be called from any thread, and the lock is never held during a system call that can
block. The prepared dataset need not consist of files: then only copies on this node are.
"""

import logging
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

from fanstore.dataset.mapping import map_file
from fanstore.dataset.partial_copies import PartialCopy
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import advise, pread_exactly
from fanstore.telemetry.statistics import Source

log = logging.getLogger(__name__)

#: Value of ``PartitionFile.nowait_flags`` where no read is sure not to wait.
CANNOT = -1

#: File systems in memory. They refuse RWF_NOWAIT (Linux 6.18: EOPNOTSUPP), but have nothing to wait for anyway.
_MEMORY_FILE_SYSTEMS = (b"tmpfs", b"ramfs")


class PartitionFile:
    """One file that holds a partition. The fields below the line are guarded by the lock of the store.

    Attributes:
        partition: number of the partition.
        path: the file; of a prepared partition that is no file, nothing opens it.
        source: local or shared.
        number: 1 for the prepared file, 2 for its staged copy. The reader marks checked chunks with it, so that what
            was checked in one file does not count for the other.
        verified: all of its bytes were compared with the checksum in the manifest.
        nowait_flags: flags for a preadv that never waits for a disk, or CANNOT. Set before the file is first acquired,
            later changed on the trio thread only.
        ----
        fd: descriptor, -1 while it is not open. Stays the same and open as long as somebody has acquired the file.
        users: how many have acquired it.
        last_use: tick of the store when it was last acquired.
        superseded: no longer the first choice: closed as soon as nobody uses it.
    """

    __slots__ = (
        "fd",
        "last_use",
        "nowait_flags",
        "number",
        "partition",
        "path",
        "source",
        "superseded",
        "users",
        "verified",
    )

    def __init__(self, partition: int, path: Path, source: Source, verified: bool) -> None:
        self.partition = partition
        self.path = path
        self.source = source
        self.number = 2 if source is Source.LOCAL else 1
        self.verified = verified
        self.nowait_flags = os.RWF_NOWAIT
        self.fd = -1
        self.users = 0
        self.last_use = 0
        self.superseded = False


class PartitionStore:
    """The files of all partitions of one prepared dataset.

    Attributes:
        prepared: the dataset. partition_count: how many partitions it has.
        _shared: the prepared file of each partition.
        _local: the staged copies, by partition. Changed with the lock held; a single look-up needs none.
        _partial: copies that are being made, by partition; likewise.
        _maps: memory maps of the staged copies, by partition; likewise. Empty after ``close``; who still has a view
            of a map keeps it alive.
        _open: number of files that are open; at most ``_open_limit`` unless more are in use at once.
        _tick: counts acquisitions, to find the file that was not used for longest.
    """

    def __init__(self, prepared: PreparedDataset, open_limit: int | None = None) -> None:
        self.prepared = prepared
        self._lock = threading.Lock()
        self._bytes = [info.bytes for info in prepared.manifest.partitions]
        self.partition_count = len(self._bytes)
        self._shared = [
            PartitionFile(p, Path(prepared.partition_label(p)), Source.SHARED, verified=False)
            for p in range(self.partition_count)
        ]
        self._local: dict[int, PartitionFile] = {}
        self._partial: dict[int, PartialCopy] = {}
        self._maps: dict[int, memoryview] = {}
        # A dataset of terabytes has more partitions than a process may have descriptors (often 1024).
        self._open_limit = open_limit if open_limit is not None else resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._open = 0
        self._tick = 0
        self._closed = False
        self._listeners: list[Callable[[PartitionFile], None]] = []

    def tell_of_files(self, listener: Callable[[PartitionFile], None]) -> None:
        """Call ``listener`` as well with each best file of a partition when it is opened, and with those that are open.

        From any thread; the file stays open during the call.
        """
        self._listeners.append(listener)
        for partition in range(self.partition_count):
            file = self.acquire_nowait(partition)
            if file is not None:
                listener(file)
                self.release(file)

    def acquire_nowait(self, partition: int) -> PartitionFile | None:
        """The best file of a partition if it is open already. To be given back with ``release``."""
        with self._lock:
            file = self._local.get(partition)
            if file is None:
                file = self._shared[partition]
            if file.fd < 0 or self._closed:
                return None
            self._tick += 1
            file.last_use = self._tick
            file.users += 1
            return file

    def acquire(self, partition: int, *, prepared: bool = False) -> PartitionFile:
        """The best file of a partition, or with ``prepared`` the prepared one; opened if necessary, so this may block.

        To be given back with ``release``. Raises OSError.
        """
        file = self._shared[partition] if prepared else self.best(partition)
        fd, flags, opened = -1, CANNOT, False
        while True:
            with self._lock:
                if self._closed:
                    if fd >= 0:
                        os.close(fd)
                    raise ValueError("the partition store is closed")
                if file.fd < 0 and fd >= 0:
                    self._make_room()
                    file.fd, fd = fd, -1
                    file.nowait_flags = flags
                    self._open += 1
                    opened = not file.superseded
                if file.fd >= 0:
                    self._tick += 1
                    file.last_use = self._tick
                    file.users += 1
                    if fd >= 0:
                        os.close(fd)  # somebody else opened it meanwhile
                    break
            fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            flags = _nowait_flags(fd)
            if file.source is Source.SHARED and file.partition in self._partial:
                advise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # what is behind a range comes with staging, or is here
        if opened:
            self._tell(file)
        return file

    def release(self, file: PartitionFile) -> None:
        """Give back what ``acquire`` gave."""
        with self._lock:
            file.users -= 1
            if file.users == 0 and (file.superseded or self._closed or self._open > self._open_limit):
                self._close_file(file)

    def read(self, partition: int, offset: int, length: int, *, prepared: bool) -> bytes:
        """A range of the file that ``acquire`` gives; blocks. Raises OSError, CorruptDataError."""
        file = self.acquire(partition, prepared=prepared)
        try:
            return pread_exactly(file.fd, offset, length)
        finally:
            self.release(file)

    def use_local(self, partition: int, path: Path, verified: bool) -> None:
        """Serve a partition from a copy on this node from now on. Reads under way end on the file they began with."""
        file = PartitionFile(partition, path, Source.LOCAL, verified)
        file.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file.nowait_flags = _nowait_flags(file.fd)
        view = _map(file)
        with self._lock:
            if self._closed or partition in self._local:
                os.close(file.fd)
                raise ValueError(f"partition {partition} has a local copy already, or the store is closed")
            self._make_room()
            self._open += 1
            self._tick += 1
            file.last_use = self._tick
            file.users = 1
            self._local[partition] = file
            partial = self._partial.pop(partition, None)
            if view is not None:
                self._maps[partition] = view
            original = self._shared[partition]
            original.superseded = True
            if original.users == 0:
                self._close_file(original)
        if partial is not None and not partial.is_finished:
            partial.end()  # a copy came from elsewhere
        self._tell(file)
        self.release(file)

    def is_local(self, partition: int) -> bool:
        """Does this node have a copy of its own?"""
        return partition in self._local

    def begin_copy(self, copy: PartialCopy) -> None:
        """From now on bytes of this partition are read through the copy that is being made of it."""
        self._partial[copy.partition] = copy

    def partial(self, partition: int) -> PartialCopy | None:
        """The copy of it that is being made here, or will be."""
        return self._partial.get(partition)

    def end_copy(self, partition: int) -> None:
        """No copy is made of it: it is read where it is."""
        copy = self._partial.pop(partition, None)
        if copy is None:
            return
        copy.end()
        with self._lock:
            if self._shared[partition].users == 0:
                self._close_file(
                    self._shared[partition]
                )  # opened anew by the next one who reads: perhaps this descriptor is the fault
        file = self.acquire_nowait(partition)  # which nobody was told of while there was the copy
        if file is not None:
            advise(file.fd, 0, 0, os.POSIX_FADV_NORMAL)
            self._tell(file)
            self.release(file)

    def mapped(self, partition: int) -> memoryview | None:
        """The copy on this node, in memory that stays valid as long as it is used; None if it is not here.

        Never blocks and takes no lock: for the MPI thread. The bytes may be damaged, whoever asked for them checks
        them, and the pages need not be in memory. A truncated copy is shorter than its partition.
        """
        return self._maps.get(partition)

    def source(self, partition: int) -> Source:
        """Where the bytes of this partition come from now."""
        return self.best(partition).source

    def verified(self, partition: int) -> bool:
        """Were all bytes of the file that serves this partition verified?"""
        return self.best(partition).verified

    def path(self, partition: int) -> Path:
        """The file that serves this partition now."""
        return self.best(partition).path

    def local_bytes(self) -> int:
        """Bytes of all partitions that are on this node."""
        with self._lock:
            return sum(self._bytes[partition] for partition in self._local)

    def close(self) -> None:
        """Close all files; those that a worker thread is reading at this moment, when it is done."""
        with self._lock:
            self._closed = True
            self._maps.clear()
            for file in (*self._shared, *self._local.values()):
                if file.users == 0:
                    self._close_file(file)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        with self._lock:
            files = [*self._shared, *self._local.values()]
            assert self._open == sum(file.fd >= 0 for file in files)
            assert all(file.users >= 0 for file in files)
            assert all(file.fd >= 0 for file in files if file.users)
            assert self._open <= max(self._open_limit, sum(file.users > 0 for file in files))
            assert all(self._shared[partition].superseded for partition in self._local)
            assert self._maps.keys() <= self._local.keys()
            assert not self._partial.keys() & self._local.keys()
            if self._closed:
                assert all(file.users for file in files if file.fd >= 0)

    def _tell(self, file: PartitionFile) -> None:
        for listener in self._listeners:
            listener(file)

    def best(self, partition: int) -> PartitionFile:
        """The file that serves this partition now, open or not."""
        with self._lock:
            return self._local.get(partition) or self._shared[partition]

    def _make_room(self) -> None:
        """Close the file that was not used for longest if there are too many. With the lock held."""
        if self._open < self._open_limit:
            return
        idle = [file for file in (*self._shared, *self._local.values()) if file.fd >= 0 and file.users == 0]
        if idle:
            self._close_file(min(idle, key=lambda file: file.last_use))

    def _close_file(self, file: PartitionFile) -> None:
        """With the lock held. Closing a file that was only read does not block."""
        if file.fd >= 0:
            os.close(file.fd)
            file.fd = -1
            self._open -= 1


def _map(file: PartitionFile) -> memoryview | None:
    """The file in memory, as long as it is now: a truncated copy is still good for what is before its end."""
    length = os.fstat(file.fd).st_size
    if length == 0:
        return None
    try:
        return map_file(file.fd, length)
    except OSError as error:  # a limit on the address space (ulimit -v), most likely
        log.warning("%s cannot be mapped, so that other nodes cannot read it here: %s", file.path, error.strerror)
        return None


def _nowait_flags(fd: int) -> int:
    """Which flags make reads of this file return at once, as far as its file system tells. May block."""
    device = os.fstat(fd).st_dev
    number = b"%d:%d" % (os.major(device), os.minor(device))
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            fields = line.split(b" ")
            if fields[2] == number:
                return 0 if fields[fields.index(b"-", 6) + 1] in _MEMORY_FILE_SYSTEMS else os.RWF_NOWAIT
    return os.RWF_NOWAIT
