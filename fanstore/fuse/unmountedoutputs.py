"""Outputs without a mount: what preloaded programs ask, in the place of the kernel, and descriptors for them.

Owns the rows of the control socket's table that begin with ``output-``, and knows when a program has let go of a file.
What a request means is said by outputoperations.py, which answers a kernel in the same words; a name that was looked
up here is forgotten again at once, because programs remember nothing. A program reads and writes the file of the
content itself (outputs/local_contents.py). It says when it closes it; and the kernel tells (inotify) when the last
descriptor of an open is gone, by whatever way: a killed program, one that was not preloaded, a child, a map.
Trio thread.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import trio
from pyfuse3 import EntryAttributes, FUSEError, RequestContext, SetattrFields

from fanstore.client.protocol import ControlError
from fanstore.client.server import Reply, Request
from fanstore.errors import MountError
from fanstore.fuse.outputoperations import OutputOperations
from fanstore.ids import Inode
from fanstore.outputs.engine import Engine
from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.tree import RefusedError

log = logging.getLogger(__name__)

#: Flags of open that mean something for a descriptor that is handed over.
_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_DSYNC | os.O_NOATIME | os.O_DIRECT | os.O_PATH
#: Bits of ``what`` in ``output-set``, as native/preload/outputs.h has them.
_MODE, _UID, _GID, _SIZE, _MTIME = 1, 2, 4, 8, 16
#: More than a mode has, and than the kernel can say of a number.
_MODE_END, _NUMBER_END = 1 << 16, 1 << 63
#: Times that a content is brought here anew because it has changed meanwhile.
_BRING_MOST = 10
#: Flags of setxattr.
_CREATE, _REPLACE = 1, 2
#: A listed name: inode, mode, length; then its bytes.
_LISTED = struct.Struct("<QIH")

#: Of <sys/inotify.h>: a file that was open for writing is not any more; some events are lost.
_IN_CLOSE_WRITE, _IN_Q_OVERFLOW = 0x8, 0x4000
_EVENT = struct.Struct("iIII")
_EVENTS_BYTES = 65_536
_WATCH_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC

_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Reply]])


@dataclass(frozen=True)
class _Caller:
    """What a handler is told of who asks; the umask was heeded by the program."""

    umask: int = 0
    uid: int = 0
    gid: int = 0
    pid: int = 0


@dataclass(frozen=True)
class _Fields:
    """Which attributes are to be set."""

    update_mode: bool
    update_uid: bool
    update_gid: bool
    update_size: bool
    update_mtime: bool
    update_atime: bool = False
    update_ctime: bool = False


_CALLER = cast(RequestContext, _Caller())


class UnmountedEngine(Engine):
    """Programs write to the files of contents by themselves."""

    def __init__(self, contents: LocalContents) -> None:
        self._contents = contents

    def is_written(self, inode: int) -> bool:
        return self._contents.has_writer(inode)


def _refusable(function: _Handler) -> _Handler:
    """An error number becomes an error of the control socket; numbers that no kernel would pass are refused."""

    @functools.wraps(function)
    async def handle(*arguments: object, **named: object) -> Reply:
        try:
            for key, value in named.items():
                if isinstance(value, int) and not 0 <= value < (_MODE_END if key == "mode" else _NUMBER_END):
                    raise RefusedError(errno.EINVAL)
            return await function(*arguments, **named)
        except FUSEError as error:
            number = error.errno
        except RefusedError as error:
            number = error.number
        except OSError as error:
            number = error.errno or errno.EIO
        raise ControlError("failed", os.strerror(number), number)

    return cast(_Handler, handle)


class UnmountedOutputs:
    """The outputs of a job, for the programs of this node.

    Attributes:
        _watch: an inotify descriptor on the directory of contents; -1 if nobody needs to know what was written.
    """

    def __init__(self, operations: OutputOperations, outputs: Outputs) -> None:
        """Raises MountError."""
        self._operations = operations
        self._outputs = outputs
        self._watch = _watch(outputs.contents) if outputs.waits else -1
        outputs.use_engine(UnmountedEngine(outputs.contents))

    def close(self) -> None:
        if self._watch >= 0:
            os.close(self._watch)
            self._watch = -1

    def written(self) -> int:
        """How many outputs programs have open for writing. Any thread."""
        return sum(map(self._outputs.contents.has_writer, self._outputs.contents.all()))

    def requests(self) -> Mapping[str, Request]:
        """Rows for the table of the control socket."""
        place = {"parent": int, "name": bytes}
        return {
            "output-attributes": Request(self._attributes, {"inode": int}),
            "output-close": Request(self._close, {"inode": int}, waits=True),
            "output-create": Request(self._create, {**place, "mode": int, "flags": int}),
            "output-getxattr": Request(self._getxattr, {"inode": int, "name": bytes}),
            "output-list": Request(self._list, {"inode": int}),
            "output-listxattr": Request(self._listxattr, {"inode": int}),
            "output-lookup": Request(self._lookup, place),
            "output-make": Request(self._make, {**place, "mode": int, "target": bytes}),
            "output-open": Request(self._open, {"inode": int, "flags": int}, waits=True),
            "output-path": Request(self._path, {"inode": int}),
            "output-readlink": Request(self._readlink, {"inode": int}),
            "output-remove": Request(self._remove, {**place, "directory": bool}),
            "output-removexattr": Request(self._removexattr, {"inode": int, "name": bytes}),
            "output-rename": Request(self._rename, {**place, "to": int, "to_name": bytes, "flags": int}),
            "output-set": Request(
                self._set,
                {"inode": int, "what": int, "mode": int, "uid": int, "gid": int, "size": int, "mtime_ns": int},
            ),
            "output-setxattr": Request(self._setxattr, {"inode": int, "name": bytes, "value": bytes, "flags": int}),
            "output-statfs": Request(self._statfs),
            "output-sync": Request(self._sync, {"inode": int}, waits=True),
        }

    # --- names and attributes ---

    async def _known(self, entry: EntryAttributes) -> Reply:
        """What is said of an output; nobody remembers that it was."""
        await self._operations.forget([(entry.st_ino, 1)])
        return _said(entry)

    @_refusable
    async def _lookup(self, parent: int, name: bytes) -> Reply:
        """Nothing if there is no such name."""
        entry = await self._operations.lookup(Inode(parent), name, _CALLER)
        return Reply() if entry.st_ino == 0 else await self._known(entry)

    @_refusable
    async def _attributes(self, inode: int) -> Reply:
        return _said(await self._operations.getattr(Inode(inode), _CALLER))

    @_refusable
    async def _path(self, inode: int) -> Reply:
        """Where a directory or a file is, relative to MOUNTPOINT."""
        place = self._outputs.kernel.get(inode).place
        if place is None:
            raise RefusedError(errno.ENOENT)
        return Reply({"path": self._outputs.tree.path(place)})

    @_refusable
    async def _readlink(self, inode: int) -> Reply:
        return Reply({"target": await self._operations.readlink(Inode(inode), _CALLER)})

    @_refusable
    async def _list(self, inode: int) -> Reply:
        """The outputs in a directory as a memory file; without one if there are none."""
        listed = b"".join(self._listed(inode))
        if not listed:
            return Reply()
        memory = os.memfd_create("fanstore", os.MFD_CLOEXEC)
        try:
            os.write(memory, listed)
            return Reply(descriptors=[os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)])
        finally:
            os.close(memory)

    def _listed(self, directory: int) -> Iterator[bytes]:
        for child in self._outputs.children(directory, 0):
            mode = self._outputs.kernel.get(child.inode).mode
            yield _LISTED.pack(child.inode, mode, len(child.name)) + child.name

    @_refusable
    async def _set(self, inode: int, what: int, mode: int, uid: int, gid: int, size: int, mtime_ns: int) -> Reply:
        entry = EntryAttributes()
        entry.st_mode, entry.st_uid, entry.st_gid, entry.st_size, entry.st_mtime_ns = mode, uid, gid, size, mtime_ns
        bits = (bool(what & bit) for bit in (_MODE, _UID, _GID, _SIZE, _MTIME))
        fields = cast(SetattrFields, _Fields(*bits))
        await self._operations.setattr(Inode(inode), entry, fields, None, _CALLER)
        if what & _SIZE and size == 0:
            await self._operations.flush(inode)  # truncate(2), which nobody closes
        return Reply()

    @_refusable
    async def _getxattr(self, inode: int, name: bytes) -> Reply:
        return Reply({"value": await self._operations.getxattr(Inode(inode), name, _CALLER)})

    @_refusable
    async def _listxattr(self, inode: int) -> Reply:
        names = await self._operations.listxattr(Inode(inode), _CALLER)
        return Reply({"value": b"".join(name + b"\0" for name in names)})

    @_refusable
    async def _setxattr(self, inode: int, name: bytes, value: bytes, flags: int) -> Reply:
        if flags and self._outputs.is_output(inode):
            there = name in self._outputs.xattrs(inode)
            if flags == _CREATE and there:
                raise FUSEError(errno.EEXIST)
            if flags == _REPLACE and not there:
                raise FUSEError(errno.ENODATA)
        await self._operations.setxattr(Inode(inode), name, value, _CALLER)
        return Reply()

    @_refusable
    async def _removexattr(self, inode: int, name: bytes) -> Reply:
        await self._operations.removexattr(Inode(inode), name, _CALLER)
        return Reply()

    @_refusable
    async def _statfs(self) -> Reply:
        about = await self._operations.statfs(_CALLER)
        names = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")
        return Reply({name: getattr(about, name) for name in names})

    # --- changes of names ---

    @_refusable
    async def _make(self, parent: int, name: bytes, mode: int, target: bytes) -> Reply:
        """A directory, a symbolic link or an empty file, as the mode says."""
        _check_names(name)
        directory = Inode(parent)
        if stat.S_ISDIR(mode):
            return await self._known(await self._operations.mkdir(directory, name, mode, _CALLER))
        if stat.S_ISLNK(mode):
            return await self._known(await self._operations.symlink(directory, name, target, _CALLER))
        return await self._known(await self._operations.mknod(directory, name, mode, 0, _CALLER))

    @_refusable
    async def _remove(self, parent: int, name: bytes, directory: bool) -> Reply:
        _check_names(name)
        if directory:
            await self._operations.rmdir(Inode(parent), name, _CALLER)
        else:
            await self._operations.unlink(Inode(parent), name, _CALLER)
        return Reply()

    @_refusable
    async def _rename(self, parent: int, name: bytes, to: int, to_name: bytes, flags: int) -> Reply:
        _check_names(name, to_name)
        await self._operations.rename(Inode(parent), name, Inode(to), to_name, flags, _CALLER)
        return Reply()

    # --- content ---

    @_refusable
    async def _create(self, parent: int, name: bytes, mode: int, flags: int) -> Reply:
        """A new file, or one that somebody has just made, and a descriptor of its content."""
        _check_names(name)
        _, entry = await self._operations.create(Inode(parent), name, mode, flags, _CALLER)
        try:
            descriptor = await self._descriptor(entry.st_ino, flags)
        finally:
            await self._operations.forget([(entry.st_ino, 1)])
        return Reply(_said(entry).values, [descriptor])

    @_refusable
    async def _open(self, inode: int, flags: int) -> Reply:
        """A descriptor of an output's content, which is brought here if it is elsewhere."""
        if self._outputs.kernel.get(inode).place is None:  # whoever looks its name up again finds another one, or none
            raise RefusedError(errno.ENOENT)
        await self._operations.open(Inode(inode), flags, _CALLER)
        return Reply(descriptors=[await self._descriptor(inode, flags)])

    async def _descriptor(self, inode: int, flags: int) -> int:
        for left in reversed(range(_BRING_MOST)):
            try:
                await self._outputs.make_local(inode)
                return self._outputs.contents.open(inode, flags & _FLAGS)
            except FileNotFoundError:  # another node has just made a newer one known
                log.debug("the content of output %x has gone, and is brought once more", inode)
            except RefusedError as error:
                if error.number != errno.ESTALE or not left:
                    raise
        raise RefusedError(errno.ESTALE)

    @_refusable
    async def _close(self, inode: int) -> Reply:
        await self._operations.flush(inode)
        return Reply()

    @_refusable
    async def _sync(self, inode: int) -> Reply:
        """Of a directory: its names."""
        if stat.S_ISDIR((await self._operations.getattr(Inode(inode), _CALLER)).st_mode):
            await self._operations.fsyncdir(inode, False)
        else:
            await self._operations.fsync(inode, False)
        return Reply()

    # --- what programs let go of ---

    async def run(self) -> None:
        """Make known what was written, when the last descriptor of an open is gone. Until it is cancelled."""
        async with trio.open_nursery() as nursery:
            while self._watch >= 0:
                await trio.lowlevel.wait_readable(self._watch)
                for inode in _closed(os.read(self._watch, _EVENTS_BYTES), self._outputs.contents):
                    nursery.start_soon(self._release, inode)

    async def _release(self, inode: int) -> None:
        try:
            await self._outputs.release(inode)
        except (RefusedError, OSError) as error:
            log.debug("output %x: %s", inode, error)  # it is taken for changed, and made known at the end


def _check_names(*names: bytes) -> None:
    """Paths are a program's affair, and lead out of the directory of outputs. Raises RefusedError."""
    if any(name in (b"", b".", b"..") or b"/" in name or b"\0" in name for name in names):
        raise RefusedError(errno.EINVAL)


def _said(entry: EntryAttributes) -> Reply:
    return Reply(
        {
            "inode": entry.st_ino,
            "mode": entry.st_mode,
            "nlink": entry.st_nlink,
            "size": entry.st_size,
            "blocks": entry.st_blocks,
            "mtime_ns": entry.st_mtime_ns,
        }
    )


def _watch(contents: LocalContents) -> int:
    library = ctypes.CDLL(None, use_errno=True)
    watch = library.inotify_init1(_WATCH_FLAGS)
    path = os.fsencode(contents.path)
    if watch >= 0 and library.inotify_add_watch(watch, path, _IN_CLOSE_WRITE) >= 0:
        return int(watch)
    number = ctypes.get_errno()
    if watch >= 0:
        os.close(watch)
    raise MountError(
        f"programs cannot write without a mount, because changes in {contents.path} cannot be watched "
        f"({os.strerror(number)}): have fs.inotify.max_user_instances raised, or leave out --output"
    )


def _closed(events: bytes, contents: LocalContents) -> set[int]:
    """The contents that a program has let go of, which it may have changed."""
    inodes: set[int] = set()
    position = 0
    while position < len(events):
        _, what, _, length = _EVENT.unpack_from(events, position)
        name = events[position + _EVENT.size :][:length].rstrip(b"\0")
        position += _EVENT.size + length
        if what & _IN_Q_OVERFLOW:
            inodes.update(contents.all())
        elif name and b"." not in name:
            inodes.add(int(name, 16))
    return inodes
