"""Outputs on their way to the shared file system: what is to be copied, what is to get which name there, and when.

Owns two lines of work. Every node copies the contents that it has under temporary names (``_copy``); the node that
decides (council.py) alone changes names in ``--output`` (``_place``), so that they change in one order. Neither follows
a list of events: each looks at what an output is and at what stands there, does one step, has it decided, and looks
again, so whoever takes over after a death goes on from any point. An error of the shared file system is tried again,
for ever, with growing pauses; what is pending stays pending. Trio thread; the shared file system in worker threads.

A name is never missing meanwhile: what is replaced stands until its successor is complete and takes its place.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from fanstore.core.objects import Objects, Stamp
from fanstore.core.outputtree import (
    FIRST_OUTPUT,
    PARKED,
    Effect,
    Operation,
    Output,
    OutputTree,
    Place,
    RefusedError,
)
from fanstore.core.shelf import Shelf, ShorterError

log = logging.getLogger(__name__)

#: Contents that are copied at once: shared file systems dislike many open files.
COPIERS = 4
#: Names that are given at once, with one sync of each directory.
BATCH = 64
#: Seconds that a closed file must have been left alone before it is copied: one of several descriptors may have been
#: closed, as in a child process, and it is still being written. Longer than RACY_NS of objects.py.
QUIET_S = 0.05
#: Seconds between two attempts: first, and at most.
RETRY_S, RETRY_MOST_S = 0.1, 10.0
#: Seconds between two looks whether this node decides by now.
_LOOK_S = 1.0

Decide = Callable[[Operation], Awaitable[int]]


@dataclass
class Trouble:
    """What is wrong with the shared file system at the moment; ``since`` is 0 if nothing is."""

    since: float = 0.0
    reason: str = ""
    number: int = 0


class Saver:
    """The work that is to be done for ``--output``.

    Attributes:
        saved_files, saved_bytes: copies that have got their names, since the start, on this node.
        trouble: why nothing goes on.
        _to_copy, _to_place: outputs to look at, in order. _blocked: those that must wait for another one's step.
        _orphans: paths of what was removed while it got its name, and whether it is a directory.
    """

    def __init__(
        self, tree: OutputTree, objects: Objects, shelf: Shelf, rank: int, leads: Callable[[], bool], decide: Decide
    ) -> None:
        self.saved_files = 0
        self.saved_bytes = 0
        self.trouble = Trouble()
        self._tree = tree
        self._objects = objects
        self._shelf = shelf
        self._rank = rank
        self._leads = leads
        self._decide = decide
        self._stamps: dict[int, tuple[Stamp | None, float]] = {}
        self._to_copy: dict[int, None] = {}
        self._to_place: dict[int, None] = {}
        self._copying: set[int] = set()
        self._blocked: set[int] = set()
        self._orphans: dict[bytes, bool] = {}
        self._woken = trio.Event()
        self._progress = trio.Event()
        self._named = trio.Event()
        self._copiers = trio.CapacityLimiter(COPIERS)

    # --- what there is to do ---

    def notice(self, effect: Effect) -> None:
        """An operation was applied: some outputs may have to be saved."""
        for inode in effect.changed:
            self._enqueue(inode)
        for place in effect.vanished:
            if place in self._tree.standing:
                self._enqueue(self._tree.standing[place])
        while self._blocked:
            self._enqueue(self._blocked.pop())
        self._progress.set()
        self._progress = trio.Event()

    def _enqueue(self, inode: int) -> None:
        output = self._tree.outputs.get(inode)
        if output is None or output.is_saved():
            return
        if self._wants_copy(output):
            self._to_copy[inode] = None
        self._to_place[inode] = None
        self._woken.set()
        self._named.set()

    def _wants_copy(self, output: Output) -> bool:
        if output.place is None or not output.is_file or output.holder != self._rank:
            return False
        there = max(output.standing.version if output.standing else 0, output.ready[0] if output.ready else 0)
        return output.version > there

    def expect(self, inode: int, stamp: Stamp, urgent: bool) -> None:
        """This node makes a content known; ``urgent``: copy it at once, even if it changes meanwhile (fsync)."""
        self._stamps[inode] = (None, 0.0) if urgent else (stamp, time.monotonic() + QUIET_S)
        self._enqueue(inode)

    def wake(self) -> None:
        """Look at everything again: this node decides now, or another one is gone."""
        for output in list(self._tree.unsaved()):
            self._enqueue(output.inode)

    def pending(self) -> tuple[int, int]:
        """Outputs that do not stand in ``--output`` as they are here, and the bytes that are to be copied for them."""
        files = size = 0
        for output in self._tree.unsaved():
            files += 1
            if output.is_file and output.place is not None:
                there = output.standing.version if output.standing is not None else 0
                size += output.size if output.version > there else 0
        return files, size

    async def wait_saved(self, inode: int, version: int) -> None:
        """Until a content stands in ``--output``, or its output has no name any more."""
        while True:
            output = self._tree.outputs.get(inode)
            if output is None or output.place is None:
                return
            if output.standing is not None and output.standing.version >= version:
                return
            await self._progress.wait()

    async def wait_names(self) -> None:
        """Until every output whose content is known has its name in ``--output``."""
        while any(not output.is_file or output.version > 0 for output in self._tree.unsaved()):
            await self._progress.wait()

    async def set_times(self) -> None:
        """Give directories in ``--output`` the times that they have here: each name that came there changed them."""
        directories = [
            (self._tree.standing_path(output.standing.place), output.mtime_ns)
            for output in self._tree.outputs.values()
            if output.is_directory and output.place is not None and output.standing is not None
        ]
        try:
            await trio.to_thread.run_sync(self._shelf.set_times, directories)
        except OSError as error:
            log.warning("directories in %s keep the times of their saving: %s", self._shelf.directory, error)

    async def wait_progress(self) -> None:
        """Until something was done."""
        await self._progress.wait()

    # --- doing it ---

    async def run(self) -> None:
        """For as long as the outputs live."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._place_all)
            while True:
                for inode in list(self._to_copy):
                    if inode not in self._copying:
                        del self._to_copy[inode]
                        self._copying.add(inode)
                        nursery.start_soon(self._copy, inode)
                self._woken = trio.Event()
                await self._woken.wait()

    async def _copy(self, inode: int) -> None:
        """Copy one content, until it is copied or need not be."""
        pause_s = RETRY_S
        try:
            while (output := self._tree.outputs.get(inode)) is not None and self._wants_copy(output):
                stamp, quiet_at = self._stamps.get(inode, (None, 0.0))
                await trio.sleep(max(0.0, quiet_at - time.monotonic()))
                try:
                    if not await self._copy_once(output, stamp):
                        return  # it changes: whoever writes it will close it again
                    pause_s = RETRY_S
                except OSError as error:
                    self._fail(f"cannot copy {self._name(output)}", error)
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MOST_S)
        finally:
            self._copying.discard(inode)
            if inode in self._to_copy:
                self._woken.set()

    async def _copy_once(self, output: Output, stamp: Stamp | None) -> bool:
        """False if there is nothing to copy: the content is being changed, or is gone."""
        if stamp is not None and not self._objects.is_as(output.inode, stamp):
            return self._stamps.get(output.inode, (None, 0.0))[0] != stamp
        version, size = output.version, output.size
        name = f"{output.inode:x}-{version}"
        try:
            source = self._objects.open(output.inode)
        except FileNotFoundError:
            return False  # removed in this moment
        try:
            await trio.to_thread.run_sync(
                self._shelf.copy_in, source, size, name, abandon_on_cancel=False, limiter=self._copiers
            )
        except ShorterError:
            return await self._shortened(output, stamp)
        finally:
            os.close(source)
        if stamp is not None and not self._objects.is_as(output.inode, stamp):
            await trio.to_thread.run_sync(self._shelf.discard, name)
            return self._stamps.get(output.inode, (None, 0.0))[0] != stamp
        try:
            await self._decide(("ready", output.inode, version, name))
        except RefusedError:
            await trio.to_thread.run_sync(self._shelf.discard, name)  # it was removed meanwhile
        return True

    async def _shortened(self, output: Output, stamp: Stamp | None) -> bool:
        """A file was cut while it was copied: its closing will tell, unless somebody waits for it (fsync)."""
        content = self._objects.find(output.inode)
        if stamp is not None or content is None:
            return self._stamps.get(output.inode, (None, 0.0))[0] != stamp
        try:
            await self._decide(("commit", output.inode, content.size, content.mtime_ns, self._rank))
        except RefusedError:
            return False  # removed meanwhile
        return True

    def _name(self, output: Output) -> str:
        try:
            return os.fsdecode(self._tree.path(output.place)) if output.place is not None else "a removed output"
        except RefusedError:
            return "an output in a removed directory"

    def _fail(self, what: str, error: OSError) -> None:
        if self.trouble.since == 0.0:
            log.warning("%s to %s: %s; it is tried again", what, self._shelf.directory, error.strerror or error)
            self.trouble.since = time.monotonic()
        self.trouble.reason, self.trouble.number = f"{what}: {error.strerror or error}", error.errno or 0

    def _went_well(self) -> None:
        if self.trouble.since:
            log.info("%s can be written to again", self._shelf.directory)
        self.trouble = Trouble()

    # --- names ---

    async def _place_all(self) -> None:
        pause_s = RETRY_S
        while True:
            if not (self._to_place or self._orphans) or not self._leads():
                self._named = trio.Event()
                with trio.move_on_after(_LOOK_S):
                    await self._named.wait()
                continue
            if await self._place_some():
                self._went_well()
                pause_s = RETRY_S
            else:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)

    async def _place_some(self) -> bool:
        """A step for each of the next outputs; False if one was not possible, and is to be tried again after a pause.

        Each is taken from the line before anything is done: what changes meanwhile puts it there again.
        """
        batch = list(self._to_place)[:BATCH]
        for inode in batch:
            del self._to_place[inode]
        well = await self._try(self._remove_orphans, ())
        if not await self._try(partial(self._publish_ready, batch), batch):
            return False
        for inode in batch:
            well = await self._try(partial(self._place, inode), (inode,)) and well
        return well

    async def _try(self, step: Callable[[], Awaitable[None]], inodes: Sequence[int]) -> bool:
        """Do a step; False if it failed, and these outputs are in the line again."""
        try:
            await step()
            return True
        except OSError as error:
            self._fail("cannot save outputs", error)
        except RefusedError as error:
            log.debug("an output was changed while it was saved: %s", error)
        for inode in inodes:
            self._enqueue(inode)
        return False

    def _is_simple(self, output: Output) -> bool:
        """A copy that can have its name at once: nothing else must be moved for it."""
        if output.place is None or output.ready is None or output.ready[0] != output.version or not output.is_file:
            return False
        if output.standing is not None and output.standing.place != output.place:
            return False
        return self._stands(output.place.parent) and not self._is_in_the_way(output, output.place)

    def _stands(self, directory: int) -> bool:
        while directory >= FIRST_OUTPUT:
            output = self._tree.get(directory)
            if output.standing is None or output.standing.place != output.place:
                return False
            directory = output.standing.place.parent
        return True

    def _occupant(self, place: Place, other_than: Output) -> Output | None:
        inode = self._tree.standing.get(place)
        return None if inode is None or inode == other_than.inode else self._tree.outputs[inode]

    def _is_in_the_way(self, output: Output, place: Place) -> bool:
        """Does something stand at a place that must go before the output comes? A file that was removed is replaced."""
        occupant = self._occupant(place, output)
        return occupant is not None and (occupant.place is not None or occupant.is_directory or output.is_directory)

    async def _publish_ready(self, inodes: Sequence[int]) -> None:
        """Give many copies their names with few syncs."""
        jobs = []
        for output in (self._tree.outputs.get(inode) for inode in inodes):
            if output is not None and self._is_simple(output):
                assert output.place is not None and output.ready is not None
                path = self._tree.standing_path(output.place)
                arguments = (output.ready[1], path, output.mode, output.mtime_ns, dict(output.xattrs))
                jobs.append((output, output.place, output.ready[0], output.meta, arguments))
        if not jobs:
            return

        def publish() -> None:
            for *_, arguments in jobs:
                self._shelf.make_parents(arguments[1])
                self._shelf.publish(*arguments)
            self._shelf.sync(arguments[1] for *_, arguments in jobs)

        await trio.to_thread.run_sync(publish)
        for output, place, version, meta, arguments in jobs:
            await self._is_there(output, place, arguments[1], version, meta)

    async def _is_there(self, output: Output, place: Place, path: bytes, version: int, meta: int) -> None:
        """Something stands at a place now; unless it was removed in this moment, and nobody knows that it stands."""
        before = output.standing.version if output.standing is not None else 0
        if output.inode in self._tree.outputs:
            try:
                await self._decide(("saved", output.inode, place.parent, place.name, version, meta))
            except RefusedError:
                if output.inode in self._tree.outputs:
                    raise
        if output.inode not in self._tree.outputs:
            self._orphans[path] = output.is_directory
        elif output.is_file and version > before:
            self.saved_files += 1
            self.saved_bytes += output.size

    async def _remove_orphans(self) -> None:
        """What was removed in the moment in which it got its name. Before anything else: the names may be needed."""
        while self._orphans:
            path, is_directory = next(iter(self._orphans.items()))
            await trio.to_thread.run_sync(self._shelf.remove, path, is_directory)
            del self._orphans[path]

    async def _place(self, inode: int) -> None:
        """One step for one output."""
        output = self._tree.outputs.get(inode)
        if output is None or output.is_saved():
            return
        if output.place is None:
            await self._bury(output)
            return
        if output.is_file and output.standing is None and output.ready is None:
            return  # it is being written, or copied
        place = output.place
        await self._place_parents(place.parent)
        await self._make_room(output, place)
        if output.place != place or not self._stands(place.parent) or self._is_in_the_way(output, place):
            self._enqueue(inode)  # changed meanwhile: look again
            return
        await self._put(output, place)

    async def _put(self, output: Output, place: Place) -> None:
        """Nothing is in the way: an output comes to its place."""
        path = self._tree.standing_path(place)
        version, meta, standing, shelf = output.version, output.meta, output.standing, self._shelf
        attributes = (output.mode, output.mtime_ns, dict(output.xattrs))
        old = None
        if standing is not None and standing.place != place:
            old = self._tree.standing_path(standing.place)
        ready = output.ready[1] if output.ready is not None and output.ready[0] == version else None
        if ready is None and output.is_file and (standing is None or standing.version != version):
            return  # its new content is being copied; what stands stays until then
        renews = standing is None or standing.meta != meta

        def put() -> None:
            shelf.make_parents(path)
            if ready is not None:
                shelf.publish(ready, path, *attributes)
                shelf.sync([path])
                if old is not None:
                    shelf.remove(old, False)
            elif standing is not None:
                if old is not None:
                    shelf.rename(old, path)
                if renews:
                    shelf.set_attributes(path, *attributes)
            elif output.is_directory:
                shelf.make_directory(path, *attributes)
            else:
                shelf.make_symlink(output.target, path, attributes[1], f"{output.inode:x}-link")

        await trio.to_thread.run_sync(put)
        await self._is_there(output, place, path, version, meta)

    async def _place_parents(self, directory: int) -> None:
        """See that a directory stands where it belongs."""
        above = []
        while directory >= FIRST_OUTPUT:
            above.append(directory)
            place = self._tree.get(directory).place
            if place is None:
                raise RefusedError(errno.ENOENT)
            directory = place.parent
        for parent in reversed(above):
            if not self._stands(parent):
                await self._place(parent)

    async def _make_room(self, output: Output, place: Place) -> None:
        """What is in the way is parked: it gets its own name, or goes, in its own turn."""
        occupant = self._occupant(place, output)
        if occupant is None or not self._is_in_the_way(output, place):
            return
        assert occupant.standing is not None
        version, meta = occupant.standing.version, occupant.standing.meta
        parked = Place(PARKED, b"%x-parked" % occupant.inode)
        paths = (self._tree.standing_path(place), self._tree.standing_path(parked))
        await trio.to_thread.run_sync(self._shelf.rename, *paths)
        await self._is_there(occupant, parked, paths[1], version, meta)

    async def _bury(self, output: Output) -> None:
        """An output without a name goes from ``--output``, unless a successor is about to take its place there."""
        standing = output.standing
        if standing is None:
            return
        heir = self._tree.lookup(*standing.place)
        if heir is not None and not heir.is_saved() and not heir.is_directory and not output.is_directory:
            self._to_place.setdefault(heir.inode)
            return  # its coming buries this one
        if output.is_directory:
            for inode in self._tree.standing_in(output.inode):
                await self._place(inode)
            if self._tree.standing_in(output.inode):
                self._blocked.add(output.inode)  # the new content of something in it is being copied
                return
        path = self._tree.standing_path(standing.place)
        try:
            await trio.to_thread.run_sync(self._shelf.remove, path, output.is_directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            log.warning("%s was removed, but something else is in it in %s", os.fsdecode(path), self._shelf.directory)
        await self._decide(("unsaved", output.inode))
