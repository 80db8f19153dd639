"""Outputs: what programs write under the mount, on this node and on all others.

Owns what happens when a program creates, writes, closes, syncs, renames, removes or reads an output; the parts do the
rest: names, which change on all nodes alike (replicated_tree.py), contents on this node and on others
(local_contents.py, remote_contents.py), and two that watch the names: what the kernel knows (kernel_notify.py) and the
way to ``--output`` (saver.py). Knows nothing of FUSE. Trio thread only.

Where is what: a content lies on the node that wrote it last. Its size and time are made known to all nodes when it is
closed or synced (``closed``, ``synced``), and who closes it waits for that; other nodes read it from there, or from
``--output`` once it stands there and its node is gone. A node that writes to a content that another one has fetches it
first. Who closes last wins.
"""

from __future__ import annotations

import errno
import logging
import stat
import time
from collections.abc import Iterator

import msgpack
import trio

from fanstore.dataset.namespace import Child, Namespace
from fanstore.outputs.engine import Engine
from fanstore.outputs.journal import Journal
from fanstore.outputs.kernel_notify import KernelNotify
from fanstore.outputs.local_contents import RACY_NS, LocalContents, Stamp
from fanstore.outputs.output import END_OUTPUT, FIRST_OUTPUT, SHARED, Output
from fanstore.outputs.output_dir import Found, OutputDir
from fanstore.outputs.path_limit import PathLimit
from fanstore.outputs.remote_contents import RemoteContents
from fanstore.outputs.replicated_tree import Observer, ReplicatedTree
from fanstore.outputs.saver import Saver
from fanstore.outputs.sequencer import DONE, NOT_ME, OUTPUT_QUESTION
from fanstore.outputs.tree import Effect, Operation, OutputTree, RefusedError
from fanstore.transport.peers import Peers

log = logging.getLogger(__name__)

#: Seconds that fsync waits for ``--output``; then it fails with what is wrong there.
SYNC_LIMIT_S = 60.0

#: Not for files: the mount is nosuid, and to take them away at each write, as POSIX wants, would cost a message.
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID
_USER = b"user."
#: Answers of a node that has ended, and has not said so to all: ask another one; do not wait for this one.
_AFTER_END: dict[str, list[object]] = {"decide": [NOT_ME, 0, 0], "apply": [DONE, 0]}


class Outputs(Observer):
    """The outputs of a job, as this node has them.

    Attributes:
        tree: their names. contents: those on this node. kernel: what the kernel knows of them.
        saver: the way to ``--output``; None with ``--scratch``, where outputs end with the job.
        _names: how names change. _closing: by inode, one who makes a content known at a time.
        _durable: fsync waits until the content stands in ``--output``; otherwise, until it is on the local disk.
    """

    def __init__(
        self,
        namespace: Namespace,
        peers: Peers | None,
        contents: LocalContents,
        journal: Journal,
        output_dir: OutputDir | None,
        durable: bool = True,
    ) -> None:
        self.tree = OutputTree(namespace)
        self.contents = contents
        self.directory_fd = contents.directory_fd
        self.rank = peers.rank if peers is not None else 0
        self.alone = peers is None
        self._namespace = namespace
        #: With ``--scratch`` nobody will want to know what there was.
        self._journal = None if output_dir is None else journal
        self._output_dir = output_dir
        self._durable = durable
        self._closing: dict[int, trio.Lock] = {}
        limit = PathLimit(self.tree, namespace, None if output_dir is None else output_dir.directory)
        names = self._names = ReplicatedTree(self.tree, namespace, self._journal, peers, limit)
        self.kernel = KernelNotify(self.tree, namespace, contents, limit, self.rank, others=not self.alone)
        self.saver = None if output_dir is None else Saver(names, contents, output_dir, self.rank)
        self._remote = RemoteContents(self.tree, contents, output_dir, peers)
        self._handlers = {**names.handlers(), "piece": self._remote.give_piece}
        names.observers = (self.kernel, self) if self.saver is None else (self.kernel, self, self.saver)

    # --- life ---

    def adopt(self, found: list[Found]) -> None:
        """What an earlier job left in ``--output`` appears under the mount. First of all, and on all nodes.

        Of the dataset's names it may have directories only (fuse/writing.py), and these are there already.
        """
        for item in found:
            directory, _, name = item.path.rpartition(b"/")
            parent = self._resolve(directory)
            if parent is not None and self._namespace.child(parent, name) is None:
                self._names.apply(("found", parent, name, item.mode, item.mtime_ns, item.size, item.target))

    def use_engine(self, engine: Engine) -> None:
        """Whom to tell of names from now on; and who creates files by itself, in a job of one node."""
        self.kernel.use_engine(engine)
        self._names.use_engine(engine if self.alone else Engine())

    def catch_up(self) -> None:
        """Know what the engine has created by itself up to now."""
        self._names.catch_up()

    @property
    def journal_fd(self) -> int:
        """Of the journal; -1 if nothing is noted."""
        return -1 if self._journal is None else self._journal.fd

    def _resolve(self, path: bytes) -> int | None:
        """The directory with this path."""
        inode = 1
        for name in path.split(b"/") if path else ():
            child = self._namespace.child(inode, name) if inode < FIRST_OUTPUT else None
            if child is None:
                output = self.tree.lookup(inode, name)
                if output is None or not output.is_directory:
                    return None
                child = output.inode
            elif not self._namespace.is_directory(child):
                return None
            inode = child
        return inode

    async def run(self) -> None:
        """For as long as the outputs live: have changes decided, and save them."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._names.run)
            if self.saver is not None:
                nursery.start_soon(self.saver.run)

    @property
    def waits(self) -> bool:
        """Must who closes an output wait? If other nodes are to see it, or if it is to be saved as it was then."""
        return not self.alone or self.saver is not None

    @property
    def local(self) -> bool:
        """Does fsync wait for the disk of this node, the only one of the job, and not for more?"""
        return self.alone and not (self.saver is not None and self._durable)

    def decides(self) -> bool:
        """Is this the node that decides, and that changes names in ``--output``?"""
        return self._names.decides()

    def lost(self, peer: int) -> None:
        """Another node has died."""
        if self.saver is not None:
            self.saver.wake()

    def describe(self) -> dict[str, object]:
        """The section ``outputs`` of stats.json."""
        self.catch_up()
        named = [output for output in self.tree.outputs.values() if output.place is not None]
        files = [output for output in named if output.is_file]
        result: dict[str, object] = {
            "files": len(files),
            "directories": sum(output.is_directory for output in named),
            "bytes": sum(self.kernel.attributes(output.inode).size for output in files),
            "being_written": self._count_changed() if self.waits else 0,
            "directory": None if self._output_dir is None else str(self._output_dir.directory),
        }
        if self.saver is not None:
            pending_files, pending_bytes = self.saver.pending()
            result |= {
                "pending": pending_files,
                "pending_bytes": pending_bytes,
                "saved": self.saver.saved_files,
                "saved_bytes": self.saver.saved_bytes,
                "trouble": self.saver.trouble.reason or None,
            }
        return result

    def _count_changed(self) -> int:
        """Contents here that were not made known as they are; files that were made ahead are no contents yet."""
        return sum(inode in self.tree.outputs and self.contents.is_changed(inode) for inode in self.contents.all())

    # --- Observer: contents here, when others change them, or their times ---

    def applied(self, operation: Operation, effect: Effect) -> None:
        if operation[0] == "commit" and operation[4] != self.rank:
            self._supersede(operation[1])
        elif operation[0] == "setattr" and operation[3] is not None:
            self._set_time(operation[1], operation[3])

    def learned(self, operation: Operation, effect: Effect, stamp: Stamp | None) -> None:
        if stamp is not None:
            self.contents.set_clean(operation[1], stamp)

    def _supersede(self, inode: int) -> None:
        """Another node has made a newer content known: ours is old, unless it was changed here as well, or will be."""
        if self.contents.is_known(inode) and not self.kernel.is_written(inode):
            self.kernel.drop_content(inode)

    def _set_time(self, inode: int, mtime_ns: int) -> None:
        """The content that is here gets another time, which does not make it another content."""
        before, known = self.contents.find(inode), self.contents.is_known(inode)
        if before is None:
            return
        self.contents.set_time(inode, mtime_ns)
        after = self.contents.find(inode)
        if after is None:
            return
        if known:
            self.contents.set_clean(inode, after.stamp)
        if self.saver is not None:
            self.saver.touched(inode, before.stamp, after.stamp)

    # --- names ---

    def is_output(self, inode: int) -> bool:
        """Is this the number of an output?"""
        return FIRST_OUTPUT <= inode < END_OUTPUT

    def lookup(self, parent: int, name: bytes) -> Output | None:
        """The output with this name."""
        return self.tree.lookup(parent, name)

    def children(self, directory: int, cookie: int) -> Iterator[Child]:
        """The outputs in a directory, after a cookie, which is the inode number of the one before."""
        for output in self.tree.children(directory):
            if output.inode > cookie and output.place is not None:
                yield Child(output.place.name, output.inode, output.inode)

    def parent(self, directory: int) -> int:
        """What ``..`` means in a directory that is an output."""
        place = self.kernel.get(directory).place
        return directory if place is None else place.parent

    # --- changes of names and attributes ---

    async def create(self, parent: int, name: bytes, mode: int, exclusive: bool) -> int:
        """A new, empty file, or with ``exclusive`` off one that another node has just made. Raises RefusedError."""
        if mode & _SPECIAL_BITS:
            raise RefusedError(errno.EPERM)
        wanted = ("create", parent, name, stat.S_IFREG | stat.S_IMODE(mode), time.time_ns(), self.rank, exclusive)
        inode = await self._names.decide(wanted)
        output = self.tree.outputs.get(inode)
        if output is not None and output.version == 0 and output.holder == self.rank:
            try:
                self.contents.make(inode)
            except FileExistsError:
                log.debug("output %x was made by this node a moment ago", inode)
            except OSError as error:
                await self._names.decide(("remove", parent, name, False, time.time_ns()))
                raise RefusedError(error.errno or errno.EIO) from error
        return inode

    async def make_directory(self, parent: int, name: bytes, mode: int) -> int:
        wanted = ("create", parent, name, stat.S_IFDIR | stat.S_IMODE(mode), time.time_ns(), self.rank, True)
        return await self._names.decide(wanted)

    async def make_symlink(self, parent: int, name: bytes, target: bytes) -> int:
        return await self._names.decide(("symlink", parent, name, target, time.time_ns()))

    async def remove(self, parent: int, name: bytes, *, directory: bool) -> None:
        await self._names.decide(("remove", parent, name, directory, time.time_ns()))

    async def rename(self, parent: int, name: bytes, to: int, to_name: bytes, *, replace: bool) -> None:
        await self._names.decide(("rename", parent, name, to, to_name, replace, time.time_ns()))

    async def set_attributes(self, inode: int, mode: int | None, mtime_ns: int | None) -> None:
        """chmod and utimensat."""
        output = self.kernel.get(inode)
        if mode is not None and output.is_file and mode & _SPECIAL_BITS:
            raise RefusedError(errno.EPERM)
        if output.place is None:
            if mtime_ns is not None and output.is_file:
                self._set_time(inode, mtime_ns)
            output.mode = output.mode if mode is None else stat.S_IFMT(output.mode) | stat.S_IMODE(mode)
            return
        await self._names.decide(("setattr", inode, mode, mtime_ns))

    async def resize(self, inode: int, size: int) -> None:
        """truncate. Raises RefusedError, OSError."""
        output = self.kernel.get(inode)
        if output.is_directory:
            raise RefusedError(errno.EISDIR)
        if size == 0 and self.contents.find(inode) is None:
            self.contents.make(inode)
        else:
            await self.make_local(inode)
        self.contents.resize(inode, size)

    def xattr(self, inode: int, name: bytes) -> bytes:
        value = self.kernel.get(inode).xattrs.get(name)
        if value is None:
            raise RefusedError(errno.ENODATA)
        return value

    def xattrs(self, inode: int) -> tuple[bytes, ...]:
        return tuple(self.kernel.get(inode).xattrs)

    async def set_xattr(self, inode: int, name: bytes, value: bytes) -> None:
        if not name.startswith(_USER):
            raise RefusedError(errno.ENOTSUP)
        if not self.kernel.get(inode).is_file and not self.kernel.get(inode).is_directory:
            raise RefusedError(errno.EPERM)
        output = self.kernel.get(inode)
        if output.place is None:
            output.xattrs[name] = value
            return
        await self._names.decide(("setxattr", inode, name, value))

    async def remove_xattr(self, inode: int, name: bytes) -> None:
        output = self.kernel.get(inode)
        if output.place is None:
            if output.xattrs.pop(name, None) is None:
                raise RefusedError(errno.ENODATA)
            return
        await self._names.decide(("removexattr", inode, name))

    # --- content ---

    async def read(self, inode: int, offset: int, length: int) -> bytes:
        """Bytes of an output, short at its end. Raises RefusedError, OSError."""
        self.catch_up()
        try:
            return self.contents.read(inode, offset, length)
        except FileNotFoundError:
            return await self._remote.read(self.kernel.get(inode), offset, length)

    async def write(self, inode: int, offset: int, data: bytes) -> int:
        """Write into an output; how much of it. Raises RefusedError, OSError."""
        try:
            return self.contents.write(inode, offset, data)
        except FileNotFoundError:
            await self.make_local(inode)
            return self.contents.write(inode, offset, data)

    async def make_local(self, inode: int) -> None:
        """Bring the content of an output to this node, where it is about to change. Raises OSError, RefusedError."""
        if self.contents.find(inode) is None:
            await self._remote.bring(self.kernel.get(inode))

    # --- making known ---

    async def close(self, inode: int) -> None:
        """A program has closed an output. Until all nodes know it; if nobody waits for that, nobody needs to know."""
        if self.waits:
            await self._make_known(inode, urgent=False)

    async def release(self, inode: int) -> None:
        """The same when a program has let go of an output and may not have said so; it mostly has. Raises RefusedError.

        What it has written so shortly after closing that the content looks the same is seen here and copied.
        """
        if not self.waits or self.contents.find(inode) is None or self.kernel.is_written(inode):
            return
        output = self.tree.outputs.get(inode)
        if not self.contents.is_known(inode):
            await self._make_known(inode, urgent=False)
        elif output is not None and output.version > 0 and output.holder not in (self.rank, SHARED):
            self._supersede(inode)  # which had to wait, unless it was brought here to be read

    async def sync(self, inode: int) -> None:
        """fsync: the content is safe when this returns. Raises RefusedError, OSError."""
        if self.contents.find(inode) is None:
            return  # nothing was written here
        await trio.to_thread.run_sync(self.contents.sync, inode)
        if not self.waits:
            return
        durable = self.saver is not None and self._durable
        if durable:
            # Then a close right after it, as usual, sees that nothing has changed since, and there is no second copy.
            self.contents.mark(inode)
        await self._make_known(inode, urgent=durable)
        output = self.tree.outputs.get(inode)
        if self.saver is None or output is None or not durable:
            return
        with trio.move_on_after(SYNC_LIMIT_S):
            await self.saver.wait_saved(inode, output.version)
            return
        log.error("fsync failed: %s", self.saver.trouble.reason or f"not copied within {SYNC_LIMIT_S:g} s")
        raise RefusedError(self.saver.trouble.number or errno.EIO)

    async def sync_names(self) -> None:
        """fsync of a directory: names that were given stand in ``--output`` when this returns."""
        if self.saver is None or not self._durable:
            return
        with trio.move_on_after(SYNC_LIMIT_S):
            await self.saver.wait_names()
            return
        log.error("fsync of a directory failed: %s", self.saver.trouble.reason or f"not done within {SYNC_LIMIT_S:g} s")
        raise RefusedError(self.saver.trouble.number or errno.EIO)

    async def _make_known(self, inode: int, urgent: bool) -> None:
        """All nodes get to know the content as it is now; who comes while another is at it does so after that one."""
        lock = self._closing.setdefault(inode, trio.Lock())
        async with lock:
            self._names.take_back(inode)  # or the engine might note a newer content before we note this one
            output, content = self.tree.outputs.get(inode), self.contents.find(inode)
            if output is not None and output.place is not None and output.is_file and content is not None:
                if output.version == 0 or self.contents.is_changed(inode):
                    if self.saver is not None:
                        self.saver.expect(inode, content.stamp, urgent)
                    await self._names.decide(("commit", inode, content.size, content.mtime_ns, self.rank))
                    self.contents.set_clean(inode, content.stamp)
                elif urgent and self.saver is not None:
                    self.saver.expect(inode, content.stamp, urgent)
        if not lock.locked():
            self._closing.pop(inode, None)

    async def close_all(self) -> None:
        """The mount has ended: what is still open counts as closed."""
        await trio.sleep(RACY_NS / 1e9)  # then what was just closed is seen to be as it was, and is not closed again
        for inode in list(self.contents.all()):
            try:
                await self._make_known(inode, urgent=True)
            except RefusedError as error:
                log.debug("output %x: %s", inode, error)

    # --- questions of other nodes ---

    async def answer(self, peer: int, question: bytes) -> bytes:
        """The answer to a question that begins with OUTPUT_QUESTION."""
        word, *arguments = msgpack.unpackb(question[len(OUTPUT_QUESTION) :])
        if self.contents.is_closed and word in _AFTER_END:
            return bytes(msgpack.packb(_AFTER_END[word]))
        answer = await self._handlers[word](peer, *arguments)
        return answer if isinstance(answer, bytes) else msgpack.packb(answer)
