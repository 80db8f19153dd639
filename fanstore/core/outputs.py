"""Outputs: what programs write under the mount, on this node and on all others.

Owns what happens when a program creates, writes, closes, syncs, renames, removes or reads an output; the parts do the
rest: names and their meaning (outputtree.py), the order of changes (council.py), contents on this node (objects.py),
the way to ``--output`` (saver.py), what a later start must know (journal.py). Knows nothing of FUSE. Trio thread only.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
import trio

from fanstore.core.births import Births, Creator
from fanstore.core.council import DONE, NOT_ME, OUTPUT_QUESTION, Council
from fanstore.core.elsewhere import Elsewhere
from fanstore.core.journal import Journal
from fanstore.core.kernel import Kernel
from fanstore.core.leases import Leases
from fanstore.core.namespace import Attributes, Child, Namespace
from fanstore.core.objects import RACY_NS, Objects
from fanstore.core.output import END_OUTPUT, FIRST_OUTPUT, Output
from fanstore.core.outputtree import Effect, Operation, OutputTree, RefusedError, parents
from fanstore.core.saver import Saver
from fanstore.core.shelf import Found, Shelf
from fanstore.ids import Inode
from fanstore.transport.peers import Peers

log = logging.getLogger(__name__)

#: Seconds that fsync waits for ``--output``; then it fails with what is wrong there.
SYNC_LIMIT_S = 60.0

#: Not for files: the mount is nosuid, and to take them away at each write, as POSIX wants, would cost a message.
_SPECIAL_BITS = stat.S_ISUID | stat.S_ISGID
_USER = b"user."
#: Answers of a node that has ended, and has not said so to all: ask another one; do not wait for this one.
_AFTER_END: dict[str, list[object]] = {"decide": [NOT_ME, 0, 0], "apply": [DONE, 0], "give": [False, 0]}
_AGAIN_S = 0.1
#: Operations that are refused when they cannot be noted; others must be possible on a full disk, too.
_NEED_ROOM = ("create", "symlink", "setxattr")


@dataclass(frozen=True)
class OutputSettings:
    """What the user asked for.

    Attributes:
        durable: fsync waits until the content stands in ``--output``; otherwise, until it is on the local disk.
    """

    durable: bool = True


class Outputs:
    """The outputs of a job, as this node has them.

    Attributes:
        tree: their names. objects: contents on this node.
        saver: the way to ``--output``; None with ``--scratch``, where outputs end with the job.
        _lookups: by inode, how often the kernel was told of an output and has not forgotten.
        _nameless: outputs that were removed while the kernel knows them: somebody may have them open.
    """

    def __init__(
        self,
        namespace: Namespace,
        peers: Peers | None,
        objects: Objects,
        journal: Journal,
        shelf: Shelf | None,
        settings: OutputSettings,
    ) -> None:
        self.tree = OutputTree(namespace)
        self.objects = objects
        self.directory_fd = objects.directory_fd
        self._kernel: Kernel | None = None
        self._namespace = namespace
        self._peers = peers
        self.rank = peers.rank if peers is not None else 0
        self.alone = peers is None
        #: With ``--scratch`` nobody will want to know what there was.
        self._journal = None if shelf is None else journal
        self._shelf = shelf
        self._settings = settings
        self._council = Council(peers, self)
        self.saver: Saver | None = None
        if shelf is not None:
            self.saver = Saver(self.tree, objects, shelf, self.rank, self.decides, self._decide)
        self._elsewhere = Elsewhere(self.tree, objects, shelf, peers)
        self._lookups: dict[int, int] = {}
        self.births = Births(self.tree, objects, self._journal, self.saver, self.rank, self.looked_up, self.alone)
        self.leases = Leases(self.tree, self._council, self.births, peers)
        self._nameless: dict[int, Output] = {}
        self._closing: dict[int, trio.Lock] = {}
        self._noted: set[int] = set()
        self._short = trio.Event()
        self._handlers: dict[str, Callable[..., Any]] = {
            **self._council.handlers(),
            **self.leases.handlers(),
            "piece": self._elsewhere.give_piece,
        }

    # --- life ---

    def adopt(self, found: list[Found]) -> None:
        """What an earlier job left in ``--output`` appears under the mount. First of all, and on all nodes."""
        clashes = 0
        for item in found:
            directory, _, name = item.path.rpartition(b"/")
            parent = self._resolve(directory)
            if parent is None:
                clashes += 1
                continue
            taken = self._namespace.child(parent, name)
            if taken is not None:
                clashes += not (stat.S_ISDIR(item.mode) and self._namespace.is_directory(taken))
                continue
            self.apply(("found", parent, name, item.mode, item.mtime_ns, item.size, item.target))
        if clashes and self.rank == 0:
            log.warning(
                "%d names in %s are hidden by the dataset's own", clashes, self._shelf.directory if self._shelf else "-"
            )

    def use_kernel(self, kernel: Kernel, creator: Creator | None) -> None:
        """Whom to tell of names from now on, and of all that there are already; and who creates files by itself."""
        self._kernel = kernel
        for output in self.tree.outputs.values():
            if output.place is not None:
                kernel.appeared(output.place, output)
        self.births.use(creator)

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
            nursery.start_soon(self._council.run)
            nursery.start_soon(self.leases.run)
            if self.saver is not None:
                nursery.start_soon(self.saver.run)
            nursery.start_soon(self._keep_spares)

    async def _keep_spares(self) -> None:
        """Make files ahead, from the first one that is created."""
        while True:
            await self._short.wait()
            self._short = trio.Event()
            try:
                await trio.to_thread.run_sync(self.objects.restock)
            except OSError as error:
                log.debug("no files are made ahead: %s", error)  # who creates one is told

    @property
    def waits(self) -> bool:
        """Must who closes an output wait? If other nodes are to see it, or if it is to be saved as it was then."""
        return not self.alone or self.saver is not None

    def decides(self) -> bool:
        """Is this the node that decides, and that changes names in ``--output``?"""
        return self.alone or self._council.leads

    def lost(self, peer: int) -> None:
        """Another node has died."""
        if self.saver is not None:
            self.saver.wake()

    def describe(self) -> dict[str, object]:
        """The section ``outputs`` of stats.json."""
        self.births.take_over()
        named = [output for output in self.tree.outputs.values() if output.place is not None]
        files = [output for output in named if output.is_file]
        result: dict[str, object] = {
            "files": len(files),
            "directories": sum(output.is_directory for output in named),
            "bytes": sum(self._attributes_of(output).size for output in files),
            "being_written": self._count_changed() if self.waits else 0,
            "directory": None if self._shelf is None else str(self._shelf.directory),
            "lent": sum(rank == self.rank for rank in self.tree.lent.values()),
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
        return sum(inode in self.tree.outputs and self.objects.is_changed(inode) for inode in self.objects.all())

    async def _decide(self, operation: Operation) -> int:
        return await self.leases.decide(operation)

    # --- Follower: operations, in the order that all nodes have ---

    def admit(self, rank: int, operation: Operation) -> None:
        self.leases.admit(rank, operation)

    def apply(self, operation: Operation) -> Effect:
        if operation[0] == "born" and operation[1] == self.rank:
            return Effect(self.rank)  # it is in our tree since it was created (births.py)
        with self.births:
            return self._apply(operation)

    def _apply(self, operation: Operation) -> Effect:
        effect = self._note_and_apply(operation)
        for place in effect.vanished:
            if self._kernel is not None:
                self._kernel.vanished(place)
        for place in effect.appeared:
            if self._kernel is not None:
                output = self.tree.lookup(*place)
                assert output is not None
                self._kernel.appeared(place, output)
        self._describe_directories(effect, operation)
        self.births.disown(output.inode for output in effect.removed)
        for output in effect.removed:
            if self._lookups.get(output.inode):
                self._nameless[output.inode] = output
            else:
                self._forget_content(output.inode)
        if operation[0] == "rename":
            self.births.disown((effect.result,))  # where it is now, others may look at it without asking us
        elif operation[0] == "commit":
            self.births.disown((operation[1],))
            if operation[4] != self.rank:
                self._supersede(operation[1])
        elif operation[0] == "setattr" and operation[3] is not None:
            self._set_time(operation[1], operation[3])
        if self.saver is not None:
            self.saver.notice(effect)
        return effect

    def _note_and_apply(self, operation: Operation) -> Effect:
        """In the journal before it happens. A full disk refuses what needs room, and only where it is decided on."""
        if self._journal is None:
            return self.tree.apply(operation)
        must = operation[0] in _NEED_ROOM and self.decides()
        try:
            for directory in parents(operation):
                if (
                    directory < FIRST_OUTPUT
                    and directory not in self._noted
                    and self._namespace.is_directory(directory)
                ):
                    self._journal.note("dir", (directory, self._namespace.path(directory)), must=must)
                    self._noted.add(directory)
            self._journal.note("op", operation, must=must)
        except OSError as error:
            raise RefusedError(error.errno or errno.EIO) from error
        try:
            return self.tree.apply(operation)
        except RefusedError:
            self._journal.take_back()
            raise

    def _describe_directories(self, effect: Effect, operation: Operation) -> None:
        if self._kernel is None:
            return
        touched = {place.parent for place in (*effect.appeared, *effect.vanished)} | set(effect.lent)
        if operation[0] in ("create", "setattr", "rename"):
            touched.add(effect.result)
        for inode in touched:
            output = self.tree.outputs.get(inode)
            if self.tree.lent.get(inode, self.rank) != self.rank:
                self.looked_up(inode, self._kernel.removed(inode))  # another node knows more of it: Python asks first
            elif inode < FIRST_OUTPUT or (output is not None and output.is_directory and output.place is not None):
                self._kernel.changed(self.attributes(inode))
        for output in effect.removed:
            if output.is_directory:
                self.looked_up(output.inode, self._kernel.removed(output.inode))

    async def settle(self, effect: Effect) -> None:
        if self._kernel is None or self.alone:
            return
        stale = {int(output.inode): False for output in effect.removed if output.inode in self._lookups}
        stale |= dict.fromkeys(effect.altered, False)
        stale |= {place.parent: True for place in (*effect.appeared, *effect.vanished)} | dict.fromkeys(
            effect.lent, True
        )
        for inode in effect.changed:
            output = self.tree.outputs.get(inode)
            if output is not None and output.is_file and output.holder != self.rank and inode in self._lookups:
                stale[inode] = True
        await self._kernel.settle(stale)

    def _supersede(self, inode: int) -> None:
        """Another node has made a newer content known: ours is old, unless it was changed here as well."""
        if self.objects.is_known(inode):
            self._forget_content(inode)

    def _set_time(self, inode: int, mtime_ns: int) -> None:
        """The content that is here gets another time, which does not make it another content."""
        before, known = self.objects.find(inode), self.objects.is_known(inode)
        if before is None:
            return
        self.objects.set_time(inode, mtime_ns)
        after = self.objects.find(inode)
        if after is None:
            return
        if known:
            self.objects.set_clean(inode, after.stamp)
        if self.saver is not None:
            self.saver.touched(inode, before.stamp, after.stamp)

    def _forget_content(self, inode: int) -> None:
        self.objects.remove(inode)
        if self._kernel is not None:
            self._kernel.dropped(inode)

    # --- names ---

    def is_output(self, inode: int) -> bool:
        """Is this the number of an output?"""
        return FIRST_OUTPUT <= inode < END_OUTPUT

    def lookup(self, parent: int, name: bytes) -> Output | None:
        """The output with this name."""
        return self.tree.lookup(parent, name)

    def get(self, inode: int) -> Output:
        """An output that has a name, or that somebody may still have open."""
        return self._nameless.get(inode) or self.tree.get(inode)

    def looked_up(self, inode: int, times: int = 1) -> None:
        """The kernel was told of an output, once more or several times."""
        if times:
            self._lookups[inode] = self._lookups.get(inode, 0) + times

    def forget(self, inode: int, lookups: int) -> None:
        """The kernel has forgotten so many of its look-ups."""
        if self._kernel is not None:
            self.looked_up(inode, self._kernel.told(inode))
        left = self._lookups.get(inode, 0) - lookups
        if left > 0:
            self._lookups[inode] = left
            return
        self._lookups.pop(inode, None)
        if self._nameless.pop(inode, None) is not None:
            self._forget_content(inode)

    def attributes(self, inode: int) -> Attributes:
        """What stat says of an output, or of a directory of the dataset that holds outputs."""
        if inode < FIRST_OUTPUT:
            own = self._namespace.attributes(Inode(inode))
            return own._replace(
                mtime_ns=max(own.mtime_ns, self.tree.changed_ns(inode)),
                nlink=own.nlink + self.tree.subdirectories(inode),
            )
        return self._attributes_of(self.get(inode))

    def _attributes_of(self, output: Output) -> Attributes:
        size, mtime_ns, blocks = output.size, output.mtime_ns, (output.size + 511) >> 9
        if output.is_file:
            content = self.objects.find(output.inode)
            if content is not None:
                size, mtime_ns, blocks = content.size, content.mtime_ns, content.blocks
        nlink = 2 + self.tree.subdirectories(output.inode) if output.is_directory else 1
        if output.place is None:
            nlink = 0
        uid, gid = self._namespace.uid, self._namespace.gid
        return Attributes(output.inode, output.mode, nlink, size, mtime_ns, blocks, uid, gid)

    def children(self, directory: int, cookie: int) -> Iterator[Child]:
        """The outputs in a directory, after a cookie, which is the inode number of the one before."""
        for output in self.tree.children(directory):
            if output.inode > cookie and output.place is not None:
                yield Child(output.place.name, output.inode, output.inode)

    def parent(self, directory: int) -> int:
        """What ``..`` means in a directory that is an output."""
        place = self.get(directory).place
        return directory if place is None else place.parent

    # --- changes of names and attributes ---

    async def create(self, parent: int, name: bytes, mode: int, exclusive: bool) -> int:
        """A new, empty file, or with ``exclusive`` off one that another node has just made. Raises RefusedError."""
        if mode & _SPECIAL_BITS:
            raise RefusedError(errno.EPERM)
        wanted = ("create", parent, name, stat.S_IFREG | stat.S_IMODE(mode), time.time_ns(), self.rank, exclusive)
        inode = await self._decide(wanted)
        output = self.tree.outputs.get(inode)
        if output is not None and output.version == 0 and output.holder == self.rank:
            try:
                self.objects.make(inode)
                if self.objects.is_short():
                    self._short.set()
            except FileExistsError:
                log.debug("output %x was made by this node a moment ago", inode)
            except OSError as error:
                await self._decide(("remove", parent, name, False, time.time_ns()))
                raise RefusedError(error.errno or errno.EIO) from error
            await self.leases.created(parent)
        return inode

    async def make_directory(self, parent: int, name: bytes, mode: int) -> int:
        wanted = ("create", parent, name, stat.S_IFDIR | stat.S_IMODE(mode), time.time_ns(), self.rank, True)
        return await self._decide(wanted)

    async def make_symlink(self, parent: int, name: bytes, target: bytes) -> int:
        return await self._decide(("symlink", parent, name, target, time.time_ns()))

    async def remove(self, parent: int, name: bytes, *, directory: bool) -> None:
        await self._decide(("remove", parent, name, directory, time.time_ns()))

    async def rename(self, parent: int, name: bytes, to: int, to_name: bytes, *, replace: bool) -> None:
        await self._decide(("rename", parent, name, to, to_name, replace, time.time_ns()))

    async def set_attributes(self, inode: int, mode: int | None, mtime_ns: int | None) -> None:
        """chmod and utimensat."""
        output = self.get(inode)
        if mode is not None and output.is_file and mode & _SPECIAL_BITS:
            raise RefusedError(errno.EPERM)
        if output.place is None:
            if mtime_ns is not None and output.is_file:
                self._set_time(inode, mtime_ns)
            output.mode = output.mode if mode is None else stat.S_IFMT(output.mode) | stat.S_IMODE(mode)
            return
        await self._decide(("setattr", inode, mode, mtime_ns))

    async def resize(self, inode: int, size: int) -> None:
        """truncate. Raises RefusedError, OSError."""
        output = self.get(inode)
        if output.is_directory:
            raise RefusedError(errno.EISDIR)
        if size == 0 and self.objects.find(inode) is None:
            self.objects.make(inode)
        else:
            await self.make_local(inode)
        self.objects.resize(inode, size)

    def xattr(self, inode: int, name: bytes) -> bytes:
        value = self.get(inode).xattrs.get(name)
        if value is None:
            raise RefusedError(errno.ENODATA)
        return value

    def xattrs(self, inode: int) -> tuple[bytes, ...]:
        return tuple(self.get(inode).xattrs)

    async def set_xattr(self, inode: int, name: bytes, value: bytes) -> None:
        if not name.startswith(_USER):
            raise RefusedError(errno.ENOTSUP)
        if not self.get(inode).is_file and not self.get(inode).is_directory:
            raise RefusedError(errno.EPERM)
        output = self.get(inode)
        if output.place is None:
            output.xattrs[name] = value
            return
        await self._decide(("setxattr", inode, name, value))

    async def remove_xattr(self, inode: int, name: bytes) -> None:
        output = self.get(inode)
        if output.place is None:
            if output.xattrs.pop(name, None) is None:
                raise RefusedError(errno.ENODATA)
            return
        await self._decide(("removexattr", inode, name))

    # --- content ---

    async def read(self, inode: int, offset: int, length: int) -> bytes:
        """Bytes of an output, short at its end. Raises RefusedError, OSError."""
        self.births.take_over()
        try:
            return self.objects.read(inode, offset, length)
        except FileNotFoundError:
            return await self._elsewhere.read(self.get(inode), offset, length)

    async def write(self, inode: int, offset: int, data: bytes) -> int:
        """Write into an output; how much of it. Raises RefusedError, OSError."""
        try:
            return self.objects.write(inode, offset, data)
        except FileNotFoundError:
            await self.make_local(inode)
            return self.objects.write(inode, offset, data)

    async def make_local(self, inode: int) -> None:
        """Bring the content of an output to this node, where it is about to change. Raises OSError, RefusedError."""
        if self.objects.find(inode) is None:
            await self._elsewhere.bring(self.get(inode))

    # --- making known ---

    async def close(self, inode: int) -> None:
        """A program has closed an output. Until all nodes know it; if nobody waits for that, nobody needs to know."""
        if self.waits:
            await self._make_known(inode, urgent=False)

    async def sync(self, inode: int) -> None:
        """fsync: the content is safe when this returns. Raises RefusedError, OSError."""
        if self.objects.find(inode) is None:
            return  # nothing was written here
        await trio.to_thread.run_sync(self.objects.sync, inode)
        if self._settings.durable:
            # Then a close right after it, as usual, sees that nothing has changed since, and there is no second copy.
            await trio.sleep(self.objects.racy_s(inode))
        await self._make_known(inode, urgent=True)
        output = self.tree.outputs.get(inode)
        if self.saver is None or output is None or not self._settings.durable:
            return
        with trio.move_on_after(SYNC_LIMIT_S):
            await self.saver.wait_saved(inode, output.version)
            return
        log.error("fsync failed: %s", self.saver.trouble.reason or f"not copied within {SYNC_LIMIT_S:g} s")
        raise RefusedError(self.saver.trouble.number or errno.EIO)

    async def sync_names(self) -> None:
        """fsync of a directory: names that were given stand in ``--output`` when this returns."""
        if self.saver is None or not self._settings.durable:
            return
        with trio.move_on_after(SYNC_LIMIT_S):
            while not await self.leases.hear():  # noqa: ASYNC110 -- of other nodes, no event
                await trio.sleep(_AGAIN_S)
            await self.saver.wait_names()
            return
        log.error("fsync of a directory failed: %s", self.saver.trouble.reason or f"not done within {SYNC_LIMIT_S:g} s")
        raise RefusedError(self.saver.trouble.number or errno.EIO)

    async def _make_known(self, inode: int, urgent: bool) -> None:
        """All nodes get to know the content as it is now; who comes while another is at it does so after that one."""
        lock = self._closing.setdefault(inode, trio.Lock())
        async with lock:
            output, content = self.tree.outputs.get(inode), self.objects.find(inode)
            if output is not None and output.place is not None and output.is_file and content is not None:
                if output.version == 0 or self.objects.is_changed(inode):
                    if self.saver is not None:
                        self.saver.expect(inode, content.stamp, urgent)
                    await self._decide(("commit", inode, content.size, content.mtime_ns, self.rank))
                    self.objects.set_clean(inode, content.stamp)
                elif urgent and self.saver is not None:
                    self.saver.expect(inode, content.stamp, urgent)
        if not lock.locked():
            self._closing.pop(inode, None)

    async def close_all(self) -> None:
        """The mount has ended: what is still open counts as closed."""
        await self._tell_last()
        await trio.sleep(RACY_NS / 1e9)  # then what was just closed is seen to be as it was, and is not closed again
        for inode in list(self.objects.all()):
            try:
                await self._make_known(inode, urgent=True)
            except RefusedError as error:
                log.debug("output %x: %s", inode, error)

    async def _tell_last(self) -> None:
        try:
            await self.leases.tell()
        except RefusedError as error:
            log.error("other nodes do not know what was created here at the end: %s", error)

    # --- questions of other nodes ---

    async def answer(self, peer: int, question: bytes) -> bytes:
        """The answer to a question that begins with OUTPUT_QUESTION."""
        word, *arguments = msgpack.unpackb(question[len(OUTPUT_QUESTION) :])
        if self.objects.is_closed and word in _AFTER_END:
            return bytes(msgpack.packb(_AFTER_END[word]))
        answer = await self._handlers[word](peer, *arguments)
        return answer if isinstance(answer, bytes) else msgpack.packb(answer)
