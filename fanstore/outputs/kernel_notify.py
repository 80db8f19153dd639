"""What the kernel of this node knows of outputs: it is told what has changed, and remembered for what it still knows.

Owns the look-ups that the kernel was told of and has not forgotten, outputs that lost their names meanwhile, and what
stat says. Watches the tree (replicated_tree.py), and tells the engine (engine.py) of names that have come and gone, of
directories that have changed, and of contents that are not here any more. Used by outputs.py and the fuse layer. Trio
thread only.
"""

from __future__ import annotations

from fanstore.dataset.namespace import Attributes, Namespace
from fanstore.ids import Inode
from fanstore.outputs.engine import Engine
from fanstore.outputs.local_contents import LocalContents, Stamp
from fanstore.outputs.output import FIRST_OUTPUT, Output, Place
from fanstore.outputs.path_limit import PathLimit
from fanstore.outputs.replicated_tree import Observer
from fanstore.outputs.tree import Effect, Operation, OutputTree


class KernelNotify(Observer):
    """The kernel's knowledge.

    Attributes:
        _others: nodes that change outputs, too: what they change, the kernel must be told.
        _lookups: by inode, how often the kernel was told of an output and has not forgotten.
        _nameless: outputs that were removed while the kernel knows them: somebody may have them open.
    """

    def __init__(
        self,
        tree: OutputTree,
        namespace: Namespace,
        contents: LocalContents,
        limit: PathLimit,
        rank: int,
        others: bool,
    ) -> None:
        self._tree = tree
        self._namespace = namespace
        self._contents = contents
        self._limit = limit
        self._rank = rank
        self._others = others
        self._engine = Engine()
        self._lookups: dict[int, int] = {}
        self._nameless: dict[int, Output] = {}

    def use_engine(self, engine: Engine) -> None:
        """Whom to tell from now on, and of all that there is already."""
        self._engine = engine
        for output in self._tree.outputs.values():
            if output.place is not None:
                self._appeared(output.place, output)

    # --- Observer ---

    def applied(self, operation: Operation, effect: Effect) -> None:
        for place in effect.vanished:
            self._engine.remove_name(*place)
        for place in effect.appeared:
            output = self._tree.lookup(*place)
            assert output is not None
            self._appeared(place, output)
        self._describe_directories(effect, operation)
        for output in effect.removed:
            if self._lookups.get(output.inode):
                self._nameless[output.inode] = output
            else:
                self.drop_content(output.inode)

    def learned(self, operation: Operation, effect: Effect, stamp: Stamp | None) -> None:
        if operation[0] == "create":
            self.looked_up(effect.result)

    async def settle(self, effect: Effect) -> None:
        if not self._others:
            return
        stale = {int(output.inode): False for output in effect.removed if output.inode in self._lookups}
        stale |= dict.fromkeys(effect.altered, False)
        stale |= {place.parent: True for place in (*effect.appeared, *effect.vanished)}
        for inode in effect.changed:
            output = self._tree.outputs.get(inode)
            if output is not None and output.is_file and output.holder != self._rank and inode in self._lookups:
                stale[inode] = True
        await self._engine.settle(stale)

    def _appeared(self, place: Place, output: Output) -> None:
        self._engine.add_name(place.parent, place.name, output.inode if output.is_directory else 0)
        if place.parent < FIRST_OUTPUT:
            self._engine.mix(place.parent - 1)

    def _describe_directories(self, effect: Effect, operation: Operation) -> None:
        touched = {place.parent for place in (*effect.appeared, *effect.vanished)}
        if operation[0] in ("create", "setattr", "rename"):
            touched.add(effect.result)
        for inode in touched:
            output = self._tree.outputs.get(inode)
            named = output is not None and output.is_directory and output.place is not None
            # Without room, the engine must not create files there.
            if (inode < FIRST_OUTPUT or named) and self._limit.has_room(inode):
                self._engine.set_directory(self.attributes(inode))
        for output in effect.removed:
            if output.is_directory:
                self.looked_up(output.inode, self._engine.drop_directory(output.inode))

    # --- what the kernel knows ---

    def looked_up(self, inode: int, times: int = 1) -> None:
        """The kernel was told of an output, once more or several times."""
        if times:
            self._lookups[inode] = self._lookups.get(inode, 0) + times

    def forget(self, inode: int, lookups: int) -> None:
        """The kernel has forgotten so many of its look-ups."""
        self.looked_up(inode, self._engine.take_told(inode))
        left = self._lookups.get(inode, 0) - lookups
        if left > 0:
            self._lookups[inode] = left
            return
        self._lookups.pop(inode, None)
        if self._nameless.pop(inode, None) is not None:
            self.drop_content(inode)

    def open(self, inode: int, flags: int) -> int:
        """The handle of a new output."""
        return self._engine.open(inode, flags)

    def is_written(self, inode: int) -> bool:
        """Does a program have the content of an output open that writes without asking?"""
        return self._engine.is_written(inode)

    def drop_content(self, inode: int) -> None:
        """The content of an output is not needed here any more."""
        self._contents.remove(inode)
        self._engine.drop(inode)

    # --- what it is told ---

    def get(self, inode: int) -> Output:
        """An output that has a name, or that somebody may still have open."""
        return self._nameless.get(inode) or self._tree.get(inode)

    def attributes(self, inode: int) -> Attributes:
        """What stat says of an output, or of a directory of the dataset that holds outputs."""
        if inode < FIRST_OUTPUT:
            own = self._namespace.attributes(Inode(inode))
            return own._replace(
                mtime_ns=max(own.mtime_ns, self._tree.changed_ns(inode)),
                nlink=own.nlink + self._tree.subdirectories(inode),
            )
        output = self.get(inode)
        size, mtime_ns, blocks = output.size, output.mtime_ns, (output.size + 511) >> 9
        if output.is_file:
            content = self._contents.find(output.inode)
            if content is not None:
                size, mtime_ns, blocks = content.size, content.mtime_ns, content.blocks
        nlink = 2 + self._tree.subdirectories(output.inode) if output.is_directory else 1
        if output.place is None:
            nlink = 0
        uid, gid = self._namespace.uid, self._namespace.gid
        return Attributes(output.inode, output.mode, nlink, size, mtime_ns, blocks, uid, gid)
