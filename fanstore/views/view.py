"""``fanstore.view``: a file of a mounted dataset as memory, without a copy.

Owns what this process has mapped of each mount: partitions that lie on this node, and the daemon's chunk cache. What a
program may map it is told as preloaded programs are (client/preload.py). Any thread; a child of fork goes on with what
is mapped, and asks over connections of its own.
"""

import contextlib
import fcntl
import json
import mmap
import os
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

from fanstore.client.connection import ControlClient
from fanstore.client.preload import STATE_VARIABLE, ShownState
from fanstore.client.protocol import SOCKET_NAME, ControlError
from fanstore.errors import FanstoreError
from fanstore.format.checksum import xxh3_64
from fanstore.format.index import Index
from fanstore.mounttable import mount_holding

#: File systems whose pages stay readable as long as this machine runs; as native/preload/bytes.c has them.
_OF_THIS_MACHINE = {"ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "ramfs"}
#: struct fsx_client_request and fsx_client_answer of native/format/sharedcache.h.
_REQUEST, _ANSWER = struct.Struct("<4I"), struct.Struct("<IiQQQ")
_HOLD, _FREE = 2, 3
#: Bytes of one chunk; a file of several is read.
_CHUNK_BYTES = 4 << 20
#: In the directory of a job: its daemon has it locked as long as it lives (job/job_directory.py).
_LOCK_NAME = "lock"
#: Seconds for an answer; how often a daemon that has no time is greeted.
_LIMIT_S, _ATTEMPTS = 60.0, 6


def view(path: str | os.PathLike[str]) -> memoryview:
    """All of a regular file, read-only: of a mounted dataset without a copy where that is possible, otherwise read.

    The memory is the partition's on this node, or a piece of the daemon's cache, which stays as long as there is a
    view of it. Raises OSError, as ``open`` and ``read`` do.
    """
    about = os.stat(path)
    mount = _mount_of(path, about)
    shown = None if mount is None else mount.show(about.st_ino - 1)
    if shown is not None:
        return shown
    with open(path, "rb") as file:
        return memoryview(file.read())


class _Piece(mmap.mmap):
    """A piece of the daemon's cache. An object of its own per view, so that it goes when nobody has a view of it."""


class _Mount:
    """One mount, as this process reads it.

    Attributes:
        _state: what the daemon says; _index: the names and places of files.
        _maps: by partition and number of the file: its mapping, None if it cannot be mapped.
        _idle: sockets that hold nothing, of process ``_pid``; _cache: descriptor of the chunk cache, -1 at first.
        _lock_file: what the daemon has locked.
    """

    def __init__(self, directory: Path) -> None:
        """Raises OSError, ControlError, FormatError."""
        self._state = ShownState(directory)
        with open(directory / "index", "rb") as file:
            self._index = Index.adopt(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._control = directory.parent / SOCKET_NAME
        self._lock = threading.Lock()
        self._maps: dict[tuple[int, int], mmap.mmap | None] = {}
        self._idle: list[socket.socket] = []
        self._pid = os.getpid()
        self._cache = -1
        self._lock_file = os.open(directory.parent / _LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)

    def is_served(self) -> bool:
        """Does its daemon live? The device number of a mount that has ended may be another's by now."""
        if self._state.ended or os.fstat(self._lock_file).st_nlink == 0:
            return False
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._lock_file, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Its daemon has gone. What views show stays as long as there are any."""
        os.close(self._lock_file)
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def show(self, entry: int) -> memoryview | None:
        index = self._index
        if self._state.ended or not 0 <= entry < index.entry_count or not stat.S_ISREG(index.mode[entry]):
            return None
        size = index.size[entry]
        if size == 0:
            return memoryview(b"")
        partition, number, verified = index.partition[entry], *self._state.file(index.partition[entry])
        if index.codec[entry] == 0 and number != 0:
            mapping = self._map(partition, number)
            if mapping is not None:
                content = memoryview(mapping)[index.offset[entry] : index.offset[entry] + size]
                return content if self._is_intact(entry, content, number, verified) else None
        return self._hold(entry, size) if size <= _CHUNK_BYTES else None

    # --- partitions of this node ---

    def _map(self, partition: int, number: int) -> mmap.mmap | None:
        with self._lock:
            key = (partition, number)
            if key not in self._maps:
                self._maps[key] = _map_file(self._state.path(partition, number))
            return self._maps[key]

    def _is_intact(self, entry: int, content: memoryview, number: int, verified: bool) -> bool:
        """Once per chunk and node, as --verify says."""
        state, index = self._state, self._index
        if not state.must_check(verified):
            return True
        chunks = [(entry, index.checksum[entry])]
        if len(content) > _CHUNK_BYTES:
            first = index.first[entry]
            records = index.column("chunks")[first : first + index.count[entry]]
            chunks = [(index.entry_count + first + i, int(each["checksum"])) for i, each in enumerate(records)]
        for i, (place, checksum) in enumerate(chunks):
            if state.is_marked(place, number):
                continue
            if xxh3_64(content[i * _CHUNK_BYTES : (i + 1) * _CHUNK_BYTES]) != checksum:
                return False
            state.mark(place, number)
        return True

    # --- the daemon's cache ---

    def _hold(self, entry: int, size: int) -> memoryview | None:
        """A chunk that stays in the daemon's cache as long as there is a view of it; None if it does not hold it."""
        try:
            with self._lock:
                if self._pid != os.getpid():
                    self._idle, self._pid = [], os.getpid()
                held = self._idle.pop() if self._idle else self._connect()
            held.send(_REQUEST.pack(_HOLD, 0, entry, 0))
            _, error, offset, length, _ = _ANSWER.unpack(held.recv(_ANSWER.size))
        except (OSError, ControlError, struct.error):
            return None  # whoever reads the file is told why
        if error != 0 or length != size:
            self._idle.append(held)
            return None
        piece = _Piece(self._cache, size, access=mmap.ACCESS_READ, offset=offset)
        weakref.finalize(piece, self._release, held, os.getpid()).atexit = False
        return memoryview(piece)

    def _release(self, held: socket.socket, pid: int) -> None:
        if pid != os.getpid():
            return  # the parent holds it
        try:
            held.send(_REQUEST.pack(_FREE, 0, 0, 0))
        except OSError:
            held.close()  # the daemon has gone, and nothing is held any more
            return
        self._idle.append(held)

    def _connect(self) -> socket.socket:
        with _connected(self._control) as client:
            if self._cache < 0:
                [self._cache] = client.ask("cache", _LIMIT_S).descriptors
                weakref.finalize(self, os.close, self._cache).atexit = False
            made = socket.socket(fileno=client.ask("fetcher", _LIMIT_S).descriptors[0])
        made.settimeout(_LIMIT_S)
        return made


def _connected(control: Path) -> ControlClient:
    """A connection to the daemon, also to a busy one. Raises ControlError."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(ControlError):
            return ControlClient(control, "fanstore.view")
    return ControlClient(control, "fanstore.view")


def _map_file(path: Path) -> mmap.mmap | None:
    holding = mount_holding(path)
    if holding is None or holding.kind not in _OF_THIS_MACHINE:
        return None
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


# --- which mount ---

_lock = threading.Lock()
#: By st_dev: a mount whose daemon lets this process read by itself; None for file systems that are none.
_mounts: dict[int, _Mount | None] = {}


def _mount_of(path: str | os.PathLike[str], about: os.stat_result) -> _Mount | None:
    with _lock:
        known = _mounts.get(about.st_dev)
        if known is not None and not known.is_served():
            del _mounts[about.st_dev]
            known.close()
        if about.st_dev not in _mounts:
            _mounts[about.st_dev] = _find(Path(path).absolute(), about.st_dev)
        return _mounts[about.st_dev]


def _find(path: Path, device: int) -> _Mount | None:
    """The mount that has this device, if ``path`` is below it."""
    try:
        given = os.environ.get(STATE_VARIABLE)
        if given and ShownState(Path(given)).device == device:
            return _Mount(Path(given))
        holding = mount_holding(path.resolve())
        if holding is None or not holding.is_fanstore:
            return None
        config: Mapping[str, object] = _config(holding.point)
        with _connected(Path(str(config["control_socket"]))) as client:
            return _Mount(Path(client.ask("preload", _LIMIT_S).values["state"]))
    except (OSError, ValueError, KeyError, FanstoreError):
        return None  # another user's, say: its files are read


def _config(point: Path) -> Mapping[str, object]:
    loaded: dict[str, object] = json.loads((point / ".fanstore" / "config.json").read_bytes())
    return loaded
