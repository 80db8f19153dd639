"""FUSE requests, translated to the core, and nothing else: name space, broker and control directory have the meaning.

Owns the one table that maps exceptions of the core to error numbers. pyfuse3 calls the handlers on the trio thread;
none blocks it. A handler raises FUSEError or nothing: an exception that nobody foresaw becomes EIO for that one request
and a traceback in the log, because pyfuse3 would end the daemon for it.

Every handle is the inode number: the native engine passes requests on here for which the kernel has opened by itself,
without asking. With pyfuse3 alone OPEN cannot be spared (its read handler gets the handle, not the inode); FLUSH is, by
answering the first one with ENOSYS; READDIRPLUS is always used.
"""

import errno
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Never, Protocol, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, StatvfsData

from fanstore.dataset.broker import Broker
from fanstore.dataset.control import ControlDirectory
from fanstore.dataset.namespace import (
    BLOCK_BYTES,
    Attributes,
    Namespace,
    NoAttributeError,
    NotDirectoryError,
    NotFoundError,
    NotSymlinkError,
)
from fanstore.errors import CorruptDataError
from fanstore.fuse.refusals import Refusals
from fanstore.fuse.snapshots import Snapshots
from fanstore.ids import Inode
from fanstore.outputs.tree import RefusedError
from fanstore.telemetry.statistics import Statistics

log = logging.getLogger(__name__)

#: How long the kernel may believe what it was told about a dataset that never changes; also about names that do not
#: exist. Longer than most jobs, and short of whatever a counter in the kernel might not like.
CACHE_S = 86_400.0

#: Longest name, as in every file system that a dataset can come from.
_NAME_BYTES = 255

_ERROR_NUMBERS: dict[type[Exception], int] = {
    NotFoundError: errno.ENOENT,
    NotDirectoryError: errno.ENOTDIR,
    NotSymlinkError: errno.EINVAL,
    NoAttributeError: errno.ENODATA,
    CorruptDataError: errno.EIO,  # the sources have logged which file and which partition
}

#: Not counted as errors: success, and that there is no such thing (ls asks every file for attributes it does not have).
_ORDINARY_ANSWERS = (0, errno.ENOENT, errno.ENODATA)

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[object]])


def handler(function: _Handler) -> _Handler:
    """Count and time a handler, and let nothing but FUSEError out of it."""
    name = function.__name__

    @functools.wraps(function)
    async def handle(self: "FanstoreOperations", *arguments: object) -> object:
        start_ns = time.perf_counter_ns()
        number = 0
        try:
            self._catch_up()
            return await function(self, *arguments)
        except FUSEError as error:
            number = error.errno
            raise
        except Exception as error:  # noqa: BLE001 -- the promise of the module: one request fails, not the daemon
            number = _error_number(name, error)
            raise FUSEError(number) from None
        finally:
            self._statistics.record(name, time.perf_counter_ns() - start_ns, number not in _ORDINARY_ANSWERS)

    return cast(_Handler, handle)


def _error_number(operation: str, error: Exception) -> int:
    if isinstance(error, RefusedError):
        return error.number
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno  # of the local disk, to which an output was to be written
    number = _ERROR_NUMBERS.get(type(error))
    if number is None:
        log.error("unexpected error in %s, answered with EIO; please report it", operation, exc_info=error)
        return errno.EIO
    return number


def to_entry(attributes: Attributes, entry_s: float, attributes_s: float) -> EntryAttributes:
    """In pyfuse3's words; how long the kernel may believe the name, and the attributes."""
    entry = EntryAttributes()
    entry.st_ino = attributes.inode
    entry.st_mode = attributes.mode
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_size = attributes.size
    entry.st_blocks = attributes.blocks
    entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = attributes.mtime_ns
    entry.entry_timeout = entry_s
    entry.attr_timeout = attributes_s
    return entry


class Noted(Protocol):
    """Who is told that a thread of a program begins to read a file."""

    def note(self, entry: int, thread: int) -> None: ...


class FanstoreOperations(pyfuse3.Operations):
    """The request handlers for the dataset and the control files; what only reads.

    Look-up counts of the dataset are not kept: an inode number means the same as long as the mount lives.

    Attributes:
        begun: told of files that are opened; None if nobody wants to know.
        _snapshots: what the kernel knows of control files.
    """

    #: Look-ups of ``.`` and ``..`` would only come from an NFS server that exports the mount.
    supports_dot_lookup = False

    def __init__(self, namespace: Namespace, broker: Broker, control: ControlDirectory, statistics: Statistics) -> None:
        super().__init__()
        self._namespace = namespace
        self._broker = broker
        self._control = control
        self._snapshots = Snapshots(control)
        self._statistics = statistics
        self.begun: Noted | None = None

    def _catch_up(self) -> None:
        """Know what the native engine has done by itself before a request is handled; here, that changes nothing."""

    # --- names and attributes ---

    def _named(self, inode: int) -> Inode:
        """The inode that the name space knows: for a snapshot, a control file; all of them are alike there."""
        return Inode(inode) if self._snapshots.get(inode) is None else self._control.files

    def _entry(self, inode: Inode) -> EntryAttributes:
        snapshot = self._snapshots.get(inode)
        attributes = self._namespace.attributes(self._named(inode))
        if snapshot is not None:
            size = len(snapshot.content)
            attributes = attributes._replace(
                inode=inode, size=size, blocks=(size + 511) // 512, mtime_ns=snapshot.time_ns
            )
        # The next look-up of a control file is to make it anew; a snapshot itself never changes.
        return to_entry(attributes, CACHE_S if snapshot is None else 0, CACHE_S)

    async def _known(self, inode: Inode) -> EntryAttributes:
        """Attributes of what the kernel is about to know by this name; of a control file, a new snapshot."""
        is_file = self._namespace.is_control(inode) and inode != self._control.inode
        if is_file and self._control.link_target(inode) is None:
            inode = await self._snapshots.take(inode)
        return self._entry(inode)

    @handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return await self.look_in_dataset(parent_inode, name)

    async def look_in_dataset(self, parent_inode: int, name: bytes) -> EntryAttributes:
        """What the dataset and the control directory have under a name."""
        try:
            return await self._known(self._namespace.lookup(Inode(parent_inode), name))
        except NotFoundError:
            if len(name) > _NAME_BYTES:
                raise FUSEError(errno.ENAMETOOLONG) from None
            # Inode number 0 says that there is no such name, and that the kernel may remember it.
            nothing = EntryAttributes()
            nothing.st_ino = 0
            nothing.entry_timeout = CACHE_S
            return nothing

    @handler
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(Inode(inode))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for inode, lookups in inode_list:
            self._snapshots.forget(inode, lookups)

    @handler
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return self._namespace.readlink(self._named(inode))

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        return self._namespace.get_xattr(self._named(inode), name)

    @handler
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        return self._namespace.list_xattrs(self._named(inode))

    @handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        totals = self._namespace.statfs()
        data = StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = totals.blocks
        data.f_files = totals.files
        data.f_bfree = data.f_bavail = data.f_ffree = data.f_favail = 0
        data.f_namemax = _NAME_BYTES
        return data

    # --- directories ---

    @handler
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode  # a listing can be taken up anywhere by its cookie alone, so the handle need not remember anything

    @handler
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        await self.list_dataset(fh, start_id, token)

    async def list_dataset(self, fh: int, start_id: int, token: ReaddirToken) -> bool:
        """A directory of the dataset, or the control directory; False if the kernel's buffer is full."""
        for child in self._namespace.children(Inode(fh), start_id):
            entry = await self._known(child.inode)
            if not pyfuse3.readdir_reply(token, child.name, entry, child.cookie):
                self._snapshots.forget(entry.st_ino, 1)
                return False
        return True

    async def releasedir(self, fh: int) -> None:
        """Nothing to do: the handle is the inode number."""

    # --- files ---

    @handler
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        return await self.open_dataset(inode, flags, ctx.pid)

    async def open_dataset(self, inode: int, flags: int, thread: int) -> FileInfo:
        """A file that cannot be written to."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise FUSEError(errno.EROFS)
        if self._snapshots.get(inode) is None:
            entry = self._namespace.entry(Inode(inode))  # raises if there is no such file
            if self.begun is not None:
                self.begun.note(entry, thread)
        return FileInfo(fh=inode, keep_cache=True)

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self.read_dataset(fh, off, size)

    async def read_dataset(self, fh: int, off: int, size: int) -> bytes:
        """Bytes of a file of the dataset or of a control file."""
        snapshot = self._snapshots.get(fh)
        if snapshot is not None:
            snapshot.read = True
            return snapshot.content[off : off + size]
        return await self._broker.read(self._namespace.entry(Inode(fh)), off, size)

    @handler
    async def release(self, fh: int) -> None:
        """Nothing to do: the handle is the inode number."""


class ReadOnlyOperations(FanstoreOperations):
    """The request handlers of a mount that cannot be written to. It is mounted so, but root could remount it.

    Attributes:
        refusals: told of names that are not there; None if nobody wants to know.
    """

    refusals: Refusals | None = None

    @handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        found = await self.look_in_dataset(parent_inode, name)
        if found.st_ino == 0 and self.refusals is not None and self.refusals.wanted:
            # What is looked for now may be created next, which is to be seen.
            found.entry_timeout = 0
            self.refusals.missing(name, ctx.pid)
        return found

    async def flush(self, fh: int) -> None:
        """Nothing is ever written: say so once, and the kernel spares us one message for each close."""
        raise FUSEError(errno.ENOSYS)

    @handler
    async def refused(self, *arguments: Any, **options: Any) -> Never:
        """The answer to each attempt to write."""
        raise FUSEError(errno.EROFS)

    setattr = create = mknod = mkdir = symlink = link = rename = unlink = rmdir = refused
    write = setxattr = removexattr = refused
