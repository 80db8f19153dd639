"""Names in ``--output``: how an output that was copied, renamed or removed comes to stand there as it is here.

Owns the steps by which the node that decides (sequencer.py) changes names in ``--output``; when and how often is for
saver.py, and for recovery.py after a death. Each step looks at what an output is and at what stands there, and has the
outcome decided. What is done there is announced before ("going"), so whoever goes on after a death looks whether it was
done, whatever has become of the output meanwhile. One task at a time. Trio thread; the shared file system in worker
threads. Raises OSError if that fails, RefusedError if an output was changed meanwhile: then try again.

A name is never missing meanwhile: what is replaced stands until its successor is complete and takes its place.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import trio

from fanstore.outputs.output import FIRST_OUTPUT, Going, Output, Place, Standing
from fanstore.outputs.output_dir import PARKED_ENDING, OutputDir
from fanstore.outputs.replicated_tree import ReplicatedTree
from fanstore.outputs.tree import PARKED, RefusedError

log = logging.getLogger(__name__)

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: Any, limiter: trio.CapacityLimiter | None = None) -> T:
    """Call something that blocks, perhaps for ever; who is cancelled leaves it behind."""
    return await trio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True, limiter=limiter)


class Publisher:
    """Changes names in ``--output``.

    Attributes:
        published_files, published_bytes: copies that have got their names.
        hopeless: outputs whose content of now will never be copied: what stands of them gets their names.
        patient: whatever else is closed will be copied.
        _active: outputs that wait for a step of another one; if that one waits for them, it is a circle.
        _moving: directories that wait for what must leave them before they get another name; the same.
        _circles: how many were met so far.
    """

    def __init__(self, names: ReplicatedTree, output_dir: OutputDir, rank: int) -> None:
        self.published_files = 0
        self.published_bytes = 0
        self._tree = names.tree
        self._output_dir = output_dir
        self._rank = rank
        self._names = names
        self.hopeless: Collection[int] = ()
        self.patient = True
        self._active: set[int] = set()
        self._moving: set[int] = set()
        self._circles = 0

    # --- what stands ---

    def stands(self, inode: int) -> bool:
        """Does something stand at its place, and do all directories above it?"""
        while inode >= FIRST_OUTPUT:
            output = self._tree.outputs.get(inode)
            if output is None or output.standing is None or output.standing.place != output.place:
                return False
            inode = output.standing.place.parent
        return True

    def _occupant(self, place: Place, other_than: Output) -> Output | None:
        inode = self._tree.standing.get(place)
        return None if inode is None or inode == other_than.inode else self._tree.outputs[inode]

    # --- many at once ---

    def _is_simple(self, output: Output) -> bool:
        """A copy that can have its name at once: nothing else must be moved for it."""
        if output.place is None or output.ready is None or output.ready[0] != output.version or not output.is_file:
            return False
        if output.going is not None or (output.standing is not None and output.standing.place != output.place):
            return False
        moment = max(output.moved, output.written)
        if any(self._must_precede(parent, moment) for parent in self._above(output.place.parent)):
            return False
        return not self._is_in_the_way(output, output.place)

    def _is_in_the_way(self, output: Output, place: Place) -> bool:
        """Does something stand at a place that must go before the output comes? A file that was removed is replaced."""
        occupant = self._occupant(place, output)
        if occupant is None:
            return False
        return occupant.place is not None or occupant.is_directory or output.is_directory or self._must_move(occupant)

    async def publish(self, inodes: Sequence[int]) -> tuple[list[int], dict[int, OSError]]:
        """Give those copies their names that can have them at once, with few syncs: which have them, which failed."""
        await self.find_out_all()
        outputs = [self._tree.outputs[inode] for inode in inodes if inode in self._tree.outputs]
        jobs: list[tuple[Output, Standing, str, bytes, tuple[Any, ...]]] = []
        for output in outputs:
            if self._is_simple(output):
                assert output.place is not None and output.ready is not None
                path = self._tree.standing_path(output.place)
                standing = Standing(output.place, output.ready[0], output.meta)
                attributes = (output.mode, output.mtime_ns, dict(output.xattrs))
                jobs.append((output, standing, output.ready[1], path, attributes))
        if not jobs:
            return [], {}
        await self._announce([(output, standing, file) for output, standing, file, *_ in jobs])
        jobs = [job for job in jobs if job[0].going is not None]  # others were removed in this moment

        def work() -> dict[int, OSError]:
            failed: dict[int, OSError] = {}
            for output, _, file, path, attributes in jobs:
                try:
                    self._output_dir.make_parents(path)
                    self._output_dir.publish(file, path, *attributes)
                except OSError as error:
                    failed[output.inode] = error
            self._output_dir.sync(path for output, _, _, path, _ in jobs if output.inode not in failed)
            return failed

        failed = await in_thread(work)
        done = [(output, standing) for output, standing, *_ in jobs if output.inode not in failed]
        self.published_files += len(done)
        self.published_bytes += sum(output.size for output, _ in done)
        if done:
            await self._note(done)
        return [output.inode for output, _ in done], failed

    async def _announce(self, items: Sequence[tuple[Output, Standing, str]]) -> None:
        """Say what will be done."""
        rows = [
            [output.inode, standing.place.parent, standing.place.name, standing.version, standing.meta, file]
            for output, standing, file in items
        ]
        await self._names.decide(("going", rows))
        if len(items) == 1 and items[0][0].going is None:
            raise RefusedError(errno.ENOENT)  # removed in this moment: nobody would know that it stands

    async def _note(self, items: Sequence[tuple[Output, Standing]]) -> None:
        """Say that it was done."""
        rows = [
            [output.inode, standing.place.parent, standing.place.name, standing.version, standing.meta]
            for output, standing in items
        ]
        await self._names.decide(("saved", rows))

    # --- one ---

    async def advance(self, inode: int) -> None:
        """One step, or several, for one output."""
        if inode in self._active or inode in self._moving:
            self._circles += 1
            return  # a circle: who needs it must do without
        if not self._active:
            await self.find_out_all()
        self._active.add(inode)
        try:
            await self._advance(inode)
        finally:
            self._active.discard(inode)

    async def _advance(self, inode: int) -> None:
        output = self._tree.outputs.get(inode)
        if output is None or output.is_saved():
            return
        if output.place is None:
            await self._withdraw(output)
            return
        if output.standing is None and output.is_file and not _is_ready(output):
            return  # it is being written, or copied
        place = output.place
        if output.is_directory:
            await self._follow(output, output.moved)
        await self._advance_parents(place.parent, max(output.moved, output.written))
        await self._make_room(output, place)
        if output.place != place or output.going is not None or self._is_in_the_way(output, place):
            raise RefusedError(errno.EAGAIN)  # changed meanwhile
        await self._step(output, place, self._tree.standing_path(place))

    async def _step(self, output: Output, place: Place, path: bytes) -> None:
        """Directories stand, and nothing is in the way."""
        standing, output_dir = output.standing, self._output_dir
        attributes = (output.mode, output.mtime_ns, dict(output.xattrs))
        wanted = Standing(place, output.version, output.meta)
        if _is_ready(output):
            assert output.ready is not None
            file = output.ready[1]
            await self._announce([(output, wanted, file)])
            await in_thread(output_dir.make_parents, path)
            await in_thread(output_dir.publish, file, path, *attributes)
            await in_thread(output_dir.sync, [path])
            await self._leave(output, place)
            self.published_files += output.is_file
            self.published_bytes += output.size if output.is_file else 0
        elif standing is not None and (
            standing.version == output.version or not output.is_file or output.inode in self.hopeless
        ):
            if standing.place != place:
                await self._move(output, standing, place, path)
                return
            if output.inode in self.hopeless:
                return
            try:
                await in_thread(output_dir.set_attributes, path, *attributes)
            except FileNotFoundError:
                await self._names.decide(("unsaved", output.inode))  # somebody has removed it
                return
        elif standing is None and not output.is_file:
            await self._announce([(output, wanted, "")])
            await in_thread(output_dir.make_parents, path)
            if output.is_directory:
                await in_thread(output_dir.make_directory, path, *attributes)
            else:
                copy = f"{self._rank}-{output.inode:x}-link"
                await in_thread(output_dir.make_symlink, output.target, path, output.mtime_ns, copy)
        else:
            return  # its new content is being copied; what stands stays until then
        await self._note([(output, wanted)])

    async def _move(self, output: Output, standing: Standing, place: Place, path: bytes) -> None:
        """What stands of an output gets its new name."""
        if output.is_directory and place.parent != PARKED:
            self._moving.add(output.inode)
            try:
                await self._advance_content(output, place)
            finally:
                self._moving.discard(output.inode)
            if output.standing is not standing:
                raise RefusedError(errno.EAGAIN)
        old = self._tree.standing_path(standing.place)
        moved = Standing(place, standing.version, standing.meta)
        await self._announce([(output, moved, "")])
        await in_thread(self._output_dir.make_parents, path)
        try:
            await in_thread(self._output_dir.rename, old, path)
        except FileNotFoundError:
            if await in_thread(self._output_dir.exists, old):
                raise
            await self._names.decide(("unsaved", output.inode))  # somebody has removed it: it is copied anew
            return
        await self._note([(output, moved)])

    async def _leave(self, output: Output, place: Place) -> None:
        """New content stands at a new place; what stood elsewhere goes."""
        if output.standing is not None and output.standing.place != place:
            old = self._tree.standing_path(output.standing.place)
            await in_thread(self._output_dir.remove, old, output.is_directory)

    async def find_out_all(self) -> None:
        """What was announced, by us before an error or by another node before its death: was it done?

        Before anything else is: whose place it was, and whose it is, must be known.
        """
        pending = sorted(self._tree.going, key=lambda inode: not self._tree.outputs[inode].is_directory)
        for inode in pending:  # directories first: where is what stands in them?
            output = self._tree.outputs[inode]
            if output.going is not None:
                await self._find_out(output, output.going)

    async def _find_out(self, output: Output, going: Going) -> None:
        done, path = False, b""
        try:
            path = self._tree.standing_path(going.standing.place)
            old = None if output.standing is None else self._tree.standing_path(output.standing.place)
            size = output.size if output.is_file and output.version == going.standing.version else None
            done = await in_thread(self._was_done, output, going, path, old, size)
        except RefusedError:
            log.debug("the directory of an announced name does not stand: nothing was done")
        if done:
            await in_thread(self._output_dir.sync, [path])
            if going.file:
                await self._leave(output, going.standing.place)
            await self._note([(output, going.standing)])
            return
        if going.file and not await in_thread(self._output_dir.has_copy, going.file):
            await self._names.decide(("unready", output.inode, going.file))  # it is copied anew
        await self._names.decide(("staying", output.inode))

    def _was_done(self, output: Output, going: Going, path: bytes, old: bytes | None, size: int | None) -> bool:
        """In a thread."""
        there = self._output_dir.look(path)
        if there is None or stat.S_IFMT(there.st_mode) != stat.S_IFMT(output.mode):
            return False
        if stat.S_ISLNK(output.mode) and self._output_dir.target(path) != output.target:
            return False  # the one that it was to replace
        if going.file:
            return not self._output_dir.has_copy(going.file) and size in (None, there.st_size)
        return old is None or old == path or not self._output_dir.exists(old)

    def _above(self, directory: int) -> list[Output]:
        """The directory and those that it is in, as far as they are outputs, the lowest first."""
        above = []
        while directory >= FIRST_OUTPUT:
            output = self._tree.get(directory)
            if output.place is None:
                raise RefusedError(errno.ENOENT)
            above.append(output)
            directory = output.place.parent
        return above

    # --- names change in ``--output`` as they did here, and no path stands there that there never was ---

    def _must_precede(self, directory: Output, moment: int) -> bool:
        """Must something be done about a directory before an output that got its name in it at a moment?"""
        return directory.standing is None or directory.going is not None or _has_left(directory, moment)

    async def _advance_parents(self, directory: int, moment: int) -> None:
        """See that a directory stands where it was at a moment, or later."""
        for parent in reversed(self._above(directory)):
            if parent.standing is not None and parent.going is None:
                await self._follow(parent, moment)
            if self._must_precede(parent, moment):
                await self.advance(parent.inode)
            if parent.standing is None or parent.going is not None:
                raise RefusedError(errno.EAGAIN)

    async def _follow(self, output: Output, moment: int) -> None:
        """What stands of an output gets, one after the other, the names that it got before a moment.

        A file need not have them all: nothing is in it. Those that cannot be given any more are passed over.
        """
        if output.inode in self._moving:
            self._circles += 1
            return
        earlier = [step for step in output.trail if step[0] < moment]
        for when, place in earlier if output.is_directory else earlier[-1:]:
            if place is None or (when, place) not in output.trail or output.standing is None:
                continue
            circles = self._circles
            try:
                await self._advance_parents(place.parent, when)
                occupant = self._occupant(place, output)
                if occupant is not None and _has_left(occupant, when):
                    await self._leave_before(occupant, when)
                if self._is_in_the_way(output, place):
                    continue
                if output.standing is not None and (when, place) in output.trail:
                    await self._move(output, output.standing, place, self._tree.standing_path(place))
            except RefusedError as error:
                if self._circles == circles and error.number != errno.ENOENT:
                    raise

    async def _leave_before(self, output: Output, moment: int) -> None:
        """An output that had left the place at which it stands before a moment leaves it."""
        is_as_it_was = max(output.moved, output.written) < moment
        if output.last is not None or (output.place is not None and not is_as_it_was):
            await self._follow(output, moment)
        if output.place is None and _has_left(output, moment) and output.inode not in self._active:
            await self._withdraw(output, moment)
        elif output.place is not None and is_as_it_was:
            await self.advance(output.inode)
            if output.place is not None and output.moved < moment and _has_left(output, moment):
                await self._send_ahead(output, output.place)

    async def _advance_content(self, directory: Output, place: Place) -> None:
        """What was changed in a directory before it got a name."""
        moment = next((when for when, name in reversed(directory.trail) if name == place), directory.moved)
        inside: list[Output] = []
        pending = [directory.inode]
        while pending:
            for output in map(self._tree.outputs.__getitem__, self._tree.standing_in(pending.pop())):
                if output.is_directory:
                    pending.append(output.inode)
                if _has_left(output, moment):
                    inside.append(output)
        for output in sorted(inside, key=lambda output: output.trail[0][0]):
            if _has_left(output, moment):
                await self._leave_before(output, moment)

    async def _make_room(self, output: Output, place: Place) -> None:
        """What stands at the place and belongs elsewhere goes there; what was removed and is in the way goes."""
        occupant = self._occupant(place, output)
        if occupant is None or not self._is_in_the_way(output, place):
            return
        assert occupant.standing is not None
        if occupant.inode in self._active:
            await self._park(occupant, occupant.standing)
            return
        circles = self._circles
        try:
            await self.advance(occupant.inode)
            if self._occupant(place, output) is occupant and occupant.place is not None:
                await self._send_ahead(occupant, occupant.place)
        except RefusedError:
            if self._circles == circles or occupant.standing is None:
                raise
            # It, or something in it, is to come into the very directory that it is in the way of.
            await self._park(occupant, occupant.standing)

    async def _send_ahead(self, output: Output, place: Place) -> None:
        """An output is in the way, and its content of now is still being copied: what stands of it moves, if it can."""
        standing = output.standing
        if standing is None or standing.place == place or place in self._tree.standing:
            raise RefusedError(errno.EAGAIN)
        await self._move(output, standing, place, self._tree.standing_path(place))

    async def _park(self, output: Output, standing: Standing) -> None:
        """Two outputs stand at each other's place: one of them goes out of the way for a moment."""
        place = Place(PARKED, os.fsencode(f"{self._rank}-{output.inode:x}{PARKED_ENDING}"))
        await self._move(output, standing, place, self._tree.standing_path(place))

    async def _withdraw(self, output: Output, moment: int | None = None) -> None:
        """An output without a name goes from ``--output``, unless a successor is about to take its place there, and was
        before a moment at which a directory above got another name.
        """
        standing = output.standing
        if standing is None:
            return
        if self._must_move(output):
            assert output.last is not None
            if moment is None and len(self._active) == 1 and self._is_stale(output, standing, output.last):
                raise RefusedError(errno.EAGAIN)
            await self._follow(output, output.moved)
            if output.standing is not None and output.standing.place == output.last:
                return
            await self._advance_parents(output.last.parent, output.moved)
            await self._make_room(output, output.last)
            in_the_way = self._is_in_the_way(output, output.last)
            if output.standing != standing or in_the_way or not self._must_move(output):
                raise RefusedError(errno.EAGAIN)  # changed meanwhile
            await self._move(output, standing, output.last, self._tree.standing_path(output.last))
            return
        successor = self._tree.lookup(*standing.place)
        if (
            successor is not None
            and not successor.is_saved()
            and not successor.is_directory
            and not output.is_directory
            and (moment is None or successor.since < moment)
        ):
            return  # which replaces this one when it comes
        if output.is_directory:
            for inode in self._tree.standing_in(output.inode):
                await self.advance(inode)
            if self._tree.standing_in(output.inode):
                raise RefusedError(errno.EAGAIN)  # the new content of something in it is being copied
        path = self._tree.standing_path(standing.place)
        try:
            await in_thread(self._output_dir.remove, path, output.is_directory)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            log.warning(
                "%s was removed, but something else is in it in %s", os.fsdecode(path), self._output_dir.directory
            )
        await self._names.decide(("unsaved", output.inode))

    def _is_stale(self, output: Output, standing: Standing, last: Place) -> bool:
        """Should what stands of an output not replace what stands at its last place, since it had newer content there?

        Then both stay until the successor is complete, if that is coming: one of the two was safe, perhaps.
        """
        successor = self._tree.lookup(*last)
        is_coming = successor is not None and successor.version > 0 and self.patient
        return is_coming and last in self._tree.standing and standing.version < output.version

    def _must_move(self, output: Output) -> bool:
        """Another output took its name before it stood there: it must, as long as that one does not."""
        standing, place = output.standing, output.last
        if output.place is not None or standing is None or place is None or standing.place == place:
            return False
        successor, occupant = self._tree.lookup(*place), self._occupant(place, output)
        if output.is_directory or successor is None or successor.is_directory or self.stands(successor.inode):
            return False
        if occupant is not None and (occupant.place is not None or occupant.is_directory):
            came = [when for when, name in output.trail if name == place]
            if occupant.is_directory or not came or not _has_left(occupant, came[-1]):
                return False
        elif occupant is not None and occupant.trail and occupant.trail[0][0] > output.moved:
            return False  # it was there after this one
        try:
            self._above(place.parent)
        except RefusedError:
            return False  # in a directory that was removed
        return True


def _has_left(output: Output, moment: int) -> bool:
    """Had it left the place at which it stands before a moment?"""
    return bool(output.trail) and output.trail[0][0] < moment


def _is_ready(output: Output) -> bool:
    """Is there a copy of its content, complete, which awaits its name?"""
    return output.ready is not None and output.ready[0] == output.version
