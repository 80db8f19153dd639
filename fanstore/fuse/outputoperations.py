"""FUSE requests of a mount that can be written to: those of outputs, and those of directories that hold some.

Translates to outputs/outputs.py and adds nothing; what concerns the dataset alone is in operations.py. Trio thread
only.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from typing import Never

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, SetattrFields, StatvfsData

from fanstore.dataset.broker import Broker
from fanstore.dataset.control import ControlDirectory
from fanstore.dataset.namespace import BLOCK_BYTES, Namespace
from fanstore.fuse.operations import CACHE_S, FanstoreOperations, handler, to_entry
from fanstore.ids import Inode
from fanstore.outputs.engine import Engine
from fanstore.outputs.output import FIRST_OUTPUT
from fanstore.outputs.outputs import Outputs
from fanstore.telemetry.statistics import Statistics

log = logging.getLogger(__name__)

#: In a job of several nodes the kernel asks for a name each time, and for what a file is: another node may have changed
#: it. What a directory is, it is told when that changes, and believes for as long as a path takes.
_SHARED_CACHE_S = 0.0
SHARED_DIRECTORY_S = 1.0

_SPECIAL = errno.EPERM


class OutputOperations(FanstoreOperations):
    """The request handlers of a mount that can be written to."""

    def __init__(
        self,
        namespace: Namespace,
        broker: Broker,
        control: ControlDirectory,
        statistics: Statistics,
        outputs: Outputs,
    ) -> None:
        super().__init__(namespace, broker, control, statistics)
        self._outputs = outputs
        self._kernel = outputs.kernel
        self._cache_s = CACHE_S if outputs.alone else _SHARED_CACHE_S
        self._directory_s = CACHE_S if outputs.alone else SHARED_DIRECTORY_S

    def _catch_up(self) -> None:
        self._outputs.catch_up()

    def _output_entry(self, inode: int) -> EntryAttributes:
        """Attributes of an output, or of a directory of the dataset that holds some."""
        attributes = self._kernel.attributes(inode)
        if inode < FIRST_OUTPUT:
            return to_entry(attributes, CACHE_S, CACHE_S)
        is_directory = stat.S_ISDIR(attributes.mode)
        return to_entry(attributes, self._cache_s, self._directory_s if is_directory else self._cache_s)

    def _known_output(self, inode: int) -> EntryAttributes:
        """The same, for a reply by which the kernel gets to know it."""
        entry = self._output_entry(inode)
        self._kernel.looked_up(inode)
        return entry

    def _entry(self, inode: Inode) -> EntryAttributes:
        if self._outputs.is_output(inode) or self._outputs.tree.is_mixed(inode):
            return self._output_entry(inode)
        return super()._entry(inode)

    def _writable(self, parent: int) -> None:
        """A directory in which something is to change."""
        if self._namespace.is_control(Inode(parent)):
            raise FUSEError(errno.EROFS)

    def _own(self, inode: int) -> None:
        """An inode that is to change."""
        if not self._outputs.is_output(inode):
            raise FUSEError(errno.EROFS)

    # --- names and attributes ---

    @handler
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        output = self._outputs.lookup(parent_inode, name)
        if output is not None:
            return self._known_output(output.inode)
        if self._outputs.is_output(parent_inode):
            if name == b".":
                return self._known_output(parent_inode)
            if name == b"..":
                parent = self._outputs.parent(parent_inode)
                return self._known_output(parent) if self._outputs.is_output(parent) else self._entry(Inode(parent))
            self._kernel.get(parent_inode)
            if len(name) > 255:
                raise FUSEError(errno.ENAMETOOLONG)
            nothing = EntryAttributes()
            nothing.st_ino = 0
        else:
            nothing = await self.look_in_dataset(parent_inode, name)
        if nothing.st_ino == 0:
            nothing.entry_timeout = self._cache_s
        return nothing

    @handler
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(Inode(inode))

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self._catch_up()
        for inode, lookups in inode_list:
            if self._outputs.is_output(inode):
                self._kernel.forget(inode, lookups)
        await super().forget(inode_list)

    @handler
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        self._own(inode)
        mine = self._kernel.attributes(inode)
        if fields.update_uid and attr.st_uid != mine.uid:
            raise FUSEError(errno.EPERM)
        if fields.update_gid and attr.st_gid != mine.gid:
            raise FUSEError(errno.EPERM)
        if fields.update_size:
            await self._outputs.resize(inode, attr.st_size)
            if fh is None and attr.st_size > 0:
                # truncate(2): nobody has opened it, so nobody will close it. To nothing it may be open(O_TRUNC), which
                # the kernel tells in the same words if the native engine answers: what is written then comes later.
                await self._outputs.close(inode)
        mode = attr.st_mode if fields.update_mode else None
        mtime_ns = attr.st_mtime_ns if fields.update_mtime else None
        if mode is not None or mtime_ns is not None:
            await self._outputs.set_attributes(inode, mode, mtime_ns)
        return self._entry(Inode(inode))

    @handler
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        if not self._outputs.is_output(inode):
            return self._namespace.readlink(self._named(inode))
        output = self._kernel.get(inode)
        if not stat.S_ISLNK(output.mode):
            raise FUSEError(errno.EINVAL)
        return output.target

    @handler
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        if self._outputs.is_output(inode):
            return self._outputs.xattr(inode, name)
        return self._namespace.get_xattr(self._named(inode), name)

    @handler
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        if self._outputs.is_output(inode):
            return self._outputs.xattrs(inode)
        return self._namespace.list_xattrs(self._named(inode))

    @handler
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self._own(inode)
        await self._outputs.set_xattr(inode, name, value)

    @handler
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        self._own(inode)
        await self._outputs.remove_xattr(inode, name)

    @handler
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        """The dataset and what is in use of the local disk; free is what is free there."""
        totals, disk = self._namespace.statfs(), self._outputs.contents.free()
        scale = disk.f_frsize / BLOCK_BYTES
        data = StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = totals.blocks + int(disk.f_blocks * scale)
        data.f_bfree, data.f_bavail = int(disk.f_bfree * scale), int(disk.f_bavail * scale)
        data.f_files = totals.files + disk.f_files
        data.f_ffree = data.f_favail = disk.f_favail
        data.f_namemax = 255
        return data

    # --- directories ---

    @handler
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        if self._outputs.is_output(fh):
            self._kernel.get(fh)
            for position, name in ((1, b"."), (2, b"..")):
                if start_id < position:
                    inode = fh if name == b"." else self._outputs.parent(fh)
                    if not self._list(token, name, inode, position):
                        return
        elif start_id < FIRST_OUTPUT and not await self.list_dataset(fh, start_id, token):
            return
        for child in self._outputs.children(fh, start_id):
            if not self._list(token, child.name, child.inode, child.cookie):
                return

    def _list(self, token: ReaddirToken, name: bytes, inode: int, cookie: int) -> bool:
        entry = self._entry(Inode(inode))
        dots = name in (b".", b"..")
        listed = pyfuse3.readdir_reply(token, name, entry, cookie)
        if listed and not dots and self._outputs.is_output(inode):
            self._kernel.looked_up(inode)
        return listed

    @handler
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        self._writable(parent_inode)
        return self._known_output(await self._outputs.make_directory(parent_inode, name, mode & ~ctx.umask))

    @handler
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._writable(parent_inode)
        await self._outputs.remove(parent_inode, name, directory=True)

    @handler
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._writable(parent_inode)
        await self._outputs.remove(parent_inode, name, directory=False)

    @handler
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        self._writable(parent_inode_old)
        self._writable(parent_inode_new)
        if flags & ~pyfuse3.RENAME_NOREPLACE:
            raise FUSEError(errno.EINVAL)
        replace = not flags & pyfuse3.RENAME_NOREPLACE
        await self._outputs.rename(parent_inode_old, name_old, parent_inode_new, name_new, replace=replace)

    @handler
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        self._writable(parent_inode)
        return self._known_output(await self._outputs.make_symlink(parent_inode, name, target))

    @handler
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> Never:
        """Hard links are not made: one output has one name."""
        raise FUSEError(errno.EPERM)

    @handler
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        self._writable(parent_inode)
        if not stat.S_ISREG(mode):
            raise FUSEError(_SPECIAL)  # pipes, sockets and devices mean nothing on another node
        inode = await self._outputs.create(parent_inode, name, mode & ~ctx.umask, exclusive=True)
        await self._outputs.close(inode)
        return self._known_output(inode)

    # --- files ---

    @handler
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        self._writable(parent_inode)
        inode = await self._outputs.create(parent_inode, name, mode & ~ctx.umask, bool(flags & os.O_EXCL))
        if flags & os.O_TRUNC and self._kernel.attributes(inode).size > 0:
            await self._outputs.resize(inode, 0)
        handle = self._kernel.open(inode, flags)
        return FileInfo(fh=handle, direct_io=handle != inode), self._known_output(inode)

    @handler
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if not self._outputs.is_output(inode):
            return await self.open_dataset(inode, flags, ctx.pid)
        if flags & os.O_TRUNC:
            await self._outputs.resize(inode, 0)
        return FileInfo(fh=inode, keep_cache=self._outputs.alone)

    @handler
    async def read(self, fh: int, off: int, size: int) -> bytes:
        if self._outputs.is_output(fh):
            return await self._outputs.read(fh, off, size)
        return await self.read_dataset(fh, off, size)

    @handler
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self._own(fh)
        return await self._outputs.write(fh, off, buf)

    @handler
    async def flush(self, fh: int) -> None:
        if self._outputs.is_output(fh):
            await self._outputs.close(fh)

    @handler
    async def fsync(self, fh: int, datasync: bool) -> None:
        if self._outputs.is_output(fh):
            await self._outputs.sync(fh)

    @handler
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Names are made known when they are made; with ``--output`` they are durable when they stand there."""
        await self._outputs.sync_names()


class PythonEngine(Engine):
    """pyfuse3 alone: each request comes to Python, and what the kernel has cached is dropped by it."""

    async def settle(self, inodes: dict[int, bool]) -> None:
        """In a thread: the kernel waits for pages that are being filled."""
        for inode, content in inodes.items():
            try:
                await trio.to_thread.run_sync(pyfuse3.invalidate_inode, pyfuse3.InodeT(inode), not content)
            except OSError as error:
                if error.errno != errno.ENOENT:  # it does not know it: so much the better
                    log.debug("the kernel keeps what it has of %d: %s", inode, error)
