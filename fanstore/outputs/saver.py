"""Outputs on their way to the shared file system: what is to be copied, what is to get which name there, and when.

Owns two lines of work. Every node copies the contents that it has under temporary names (``_copy``); the node that
decides (sequencer.py) alone changes names in ``--output`` (publisher.py), so that they change in one order. Neither
follows a list of events: each looks at what an output is and at what stands there, does one step, has it decided, and
looks again, so whoever takes over after a death goes on from any point. An error of the shared file system is tried
again, for ever, with growing pauses; what is pending stays pending. Watches the tree (replicated_tree.py) for what
there is to do. Trio thread; the shared file system in worker threads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import trio

from fanstore.outputs.copy_batcher import CopyBatcher
from fanstore.outputs.local_contents import LocalContents, Stamp
from fanstore.outputs.output import Output
from fanstore.outputs.output_dir import OutputDir, ShorterError, Wanted
from fanstore.outputs.publisher import Publisher, in_thread
from fanstore.outputs.replicated_tree import Observer, ReplicatedTree
from fanstore.outputs.rush import SMALL_BYTES, Rush
from fanstore.outputs.tree import Effect, Operation, RefusedError
from fanstore.telemetry.events import NOTABLE

log = logging.getLogger(__name__)

#: Names that are given at once, with one sync of each directory; and copies that are noted at once.
BATCH = 64
#: Seconds that a closed file must have been left alone before it is copied: one of several descriptors may have been
#: closed, as in a child process, and it is still being written. Longer than RACY_NS of local_contents.py.
QUIET_S = 0.05
#: Seconds between two attempts: first, and at most.
RETRY_S, RETRY_MOST_S = 0.1, 10.0
#: No content has this.
_NEVER = Stamp(-1, -1, -1)
#: Seconds between two looks whether this node decides by now.
_LOOK_S = 1.0


@dataclass
class Trouble:
    """What is wrong with the shared file system at the moment; ``since`` is 0 if nothing is."""

    since: float = 0.0
    reason: str = ""
    number: int = 0


class Saver(Observer):
    """The work that is to be done for ``--output``.

    Attributes:
        trouble: why something does not go on.
        _hurried: of those that are to be copied, the ones that do not wait for the end of a rush (rush.py).
        _copied: copies that are to be noted by whoever has _noting.
        _failing: outputs that could not be saved at the last attempt; _held: when they are tried again.
    """

    def __init__(self, names: ReplicatedTree, contents: LocalContents, output_dir: OutputDir, rank: int) -> None:
        self.trouble = Trouble()
        self._names = names
        self._tree = names.tree
        self._contents = contents
        self._output_dir = output_dir
        self._rank = rank
        self._publisher = Publisher(names, output_dir, rank)
        self._failing: set[int] = set()
        self._pauses_s: dict[int, float] = {}
        self._held: dict[int, tuple[float, float]] = {}
        self._stamps: dict[int, tuple[Stamp | None, float]] = {}
        self._rush = Rush()
        self._to_copy: dict[int, None] = {}
        self._hurried: set[int] = set()
        self._to_publish: dict[int, None] = {}
        self._copying: set[int] = set()
        self._copied: list[list[object]] = []
        self._noting = trio.Lock()
        self._woken = trio.Event()
        self._progress = trio.Event()
        self._named = trio.Event()
        self._batcher = CopyBatcher(output_dir)

    @property
    def saved_files(self) -> int:
        """Copies that have got their names since the start, on this node; ``saved_bytes`` those in them."""
        return self._publisher.published_files

    @property
    def saved_bytes(self) -> int:
        return self._publisher.published_bytes

    # --- what there is to do ---

    def applied(self, operation: Operation, effect: Effect) -> None:
        """Some outputs may have to be saved."""
        for inode in effect.changed:
            self._enqueue(inode)
        for place in effect.vanished:
            if place in self._tree.standing:
                self._enqueue(self._tree.standing[place])
        self._progress.set()
        self._progress = trio.Event()

    def learned(self, operation: Operation, effect: Effect, stamp: Stamp | None) -> None:
        if stamp is not None:
            self.expect(operation[1], stamp, urgent=False)
            self.applied(operation, effect)

    def _enqueue(self, inode: int) -> None:
        output = self._tree.outputs.get(inode)
        if output is None or output.is_saved():
            return
        if self._wants_copy(output):
            self._to_copy[inode] = None
            if self._is_hurried(inode):
                self._hurried.add(inode)
            self._woken.set()
            if output.standing is None and output.going is None:
                return  # there is nothing yet that could have a name
        if inode not in self._held:
            self._to_publish[inode] = None
        self._named.set()

    def _is_hurried(self, inode: int) -> bool:
        stamp, _ = self._stamps.get(inode, (None, 0.0))
        return stamp is None or stamp.size > SMALL_BYTES

    def _wants_copy(self, output: Output) -> bool:
        if output.place is None or not output.is_file or output.holder != self._rank:
            return False
        there = max(output.standing.version if output.standing else 0, output.ready[0] if output.ready else 0)
        return output.version > there

    def expect(self, inode: int, stamp: Stamp, urgent: bool) -> None:
        """This node makes a content known; ``urgent``: copy it at once, even if it changes meanwhile (fsync)."""
        now_s = time.monotonic()
        self._rush.note(now_s)
        self._stamps[inode] = (None, 0.0) if urgent else (stamp, now_s + QUIET_S)
        self._enqueue(inode)

    def touched(self, inode: int, before: Stamp, after: Stamp) -> None:
        """A content that may be waited for has another stamp, and is the same."""
        stamp, quiet_at = self._stamps.get(inode, (None, 0.0))
        if stamp == before:
            self._stamps[inode] = (after, quiet_at)

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

    @property
    def moved_bytes(self) -> int:
        """Grows while something is copied, be it a part of a large file."""
        return self._output_dir.moved_bytes

    async def wait_saved(self, inode: int, version: int) -> None:
        """Until a content stands in ``--output`` under its name, or its output has no name any more."""
        while True:
            output = self._tree.outputs.get(inode)
            if output is None or output.place is None:
                return
            if output.standing is not None and output.standing.version >= version and self._publisher.stands(inode):
                return
            await self._progress.wait()

    async def wait_names(self) -> None:
        """Until every output whose content is known now has in ``--output`` the name that it has now."""
        wanted = {output.inode: output.place for output in self._tree.unsaved() if self._lacks_name(output)}
        for inode in wanted:
            if self._wants_copy(self._tree.outputs[inode]):
                self._stamps[inode] = (None, 0.0)  # somebody waits, even if it is being written
                self._enqueue(inode)
        for inode, place in wanted.items():
            while (output := self._tree.outputs.get(inode)) is not None and output.place == place:
                if output.is_saved() or (place is not None and self._publisher.stands(inode)):
                    break
                await self._progress.wait()

    def _lacks_name(self, output: Output) -> bool:
        """Is a name in ``--output`` not as it is here? One that was given to a file not closed yet may still come."""
        standing = output.standing
        if output.place is None:
            return standing is not None and self._tree.lookup(*standing.place) is None
        if not output.is_file:
            return True
        return output.version > 0 and (standing is None or standing.place != output.place)

    async def set_times(self) -> None:
        """Give directories in ``--output`` the times that they have here: each name that came there changed them."""
        directories = [
            (self._tree.standing_path(output.standing.place), output.mtime_ns)
            for output in self._tree.outputs.values()
            if output.is_directory and output.place is not None and output.standing is not None
        ]
        try:
            await in_thread(self._output_dir.set_times, directories)
        except OSError as error:
            log.warning("directories in %s keep the times of their saving: %s", self._output_dir.directory, error)

    async def wait_progress(self) -> None:
        """Until something was done."""
        await self._progress.wait()

    # --- doing it ---

    async def run(self) -> None:
        """For as long as the outputs live."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publish_all)
            while True:
                rush_s = self._rush.left_s(time.monotonic())
                for inode in list(self._hurried if rush_s else self._to_copy):
                    if inode not in self._copying:
                        del self._to_copy[inode]
                        self._hurried.discard(inode)
                        self._copying.add(inode)
                        nursery.start_soon(self._copy, inode)
                self._woken = trio.Event()
                with trio.move_on_after(rush_s or math.inf):
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
                    self._fail(inode, f"cannot copy {self._tree.title(output)}", error)
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MOST_S)
                    continue
                self._succeed(inode)
        finally:
            self._copying.discard(inode)
            if inode in self._to_copy:
                self._woken.set()

    async def _copy_once(self, output: Output, stamp: Stamp | None) -> bool:
        """False if there is nothing to copy: the content is being changed, or is gone."""
        if stamp is not None and not self._contents.is_as(output.inode, stamp):
            return self._stamps.get(output.inode, (None, 0.0))[0] != stamp
        version, size = output.version, output.size
        name = f"{self._rank}-{output.inode:x}-{version}"
        try:
            source = self._contents.open(output.inode)
        except FileNotFoundError:
            return False  # removed in this moment
        try:
            await self._batcher.copy(Wanted(source, size, name))
        except ShorterError:
            return await self._shortened(output, stamp)
        if stamp is not None and not self._contents.is_as(output.inode, stamp):
            await in_thread(self._output_dir.discard, name)
            return self._stamps.get(output.inode, (None, 0.0))[0] != stamp
        if not await self._note_ready(output, version, name):
            await in_thread(self._output_dir.discard, name)
            await trio.sleep(RETRY_S)
        return True

    async def _note_ready(self, output: Output, version: int, name: str) -> bool:
        """A copy awaits its name; those that were made together are one change. False if it is not wanted any more."""
        self._copied.append([output.inode, version, name])
        async with self._noting:  # who is first notes those of all others as well
            rows, self._copied = self._copied[:BATCH], self._copied[BATCH:]
            if rows:
                try:
                    await self._names.decide(("ready", rows))
                except RefusedError as error:
                    log.debug("copies are not noted: %s", error)
        standing = output.standing.version if output.standing is not None else 0
        known = output.inode in self._tree.outputs
        return known and (output.ready == (version, name) or standing >= version)

    async def _shortened(self, output: Output, stamp: Stamp | None) -> bool:
        """A file was cut while it was copied: its closing will tell, unless somebody waits for it (fsync)."""
        content = self._contents.find(output.inode)
        if stamp is not None or content is None:
            return self._stamps.get(output.inode, (None, 0.0))[0] != stamp
        try:
            await self._names.decide(("commit", output.inode, content.size, content.mtime_ns, self._rank))
        except RefusedError:
            return False  # removed meanwhile
        return True

    def _fail(self, inode: int, what: str, error: OSError) -> None:
        if self.trouble.since == 0.0:
            log.warning("%s to %s: %s; it is tried again", what, self._output_dir.directory, error.strerror or error)
            self.trouble.since = time.monotonic()
        self.trouble.reason, self.trouble.number = f"{what}: {error.strerror or error}", error.errno or 0
        self._failing.add(inode)

    def _succeed(self, inode: int) -> None:
        self._pauses_s.pop(inode, None)
        self._failing.discard(inode)
        if self.trouble.since and not self._failing:
            log.info("%s can be written to again", self._output_dir.directory, extra=NOTABLE)
            self.trouble = Trouble()

    # --- names ---

    async def _publish_all(self) -> None:
        pause_s = RETRY_S
        while True:
            self._release()
            if not self._to_publish or not self._names.decides():
                self._named = trio.Event()
                with trio.move_on_after(_LOOK_S if not self._held else RETRY_S):
                    await self._named.wait()
                continue
            batch = list(self._to_publish)[:BATCH]
            for inode in batch:
                del self._to_publish[inode]
            failed = await self._publish_batch(batch)
            for inode, error in failed.items():
                self._hold(inode, error)
            if len(failed) < len(batch):
                pause_s = RETRY_S
            else:
                await trio.sleep(pause_s)  # nothing goes: not all of them must be tried as fast as possible
                pause_s = min(2 * pause_s, RETRY_MOST_S)

    async def _publish_batch(self, batch: list[int]) -> dict[int, OSError]:
        """One step for each of some outputs; which failed, and why. One that fails does not keep the others."""
        failed: dict[int, OSError] = {}
        done: list[int] = []
        try:
            done, failed = await self._publisher.publish(batch)
        except OSError as error:
            failed = dict.fromkeys(batch, error)
        except RefusedError as error:
            log.debug("outputs were changed while they were saved: %s", error)
        for inode in batch:
            if inode in failed:
                continue
            if inode not in done:
                try:
                    await self._publisher.advance(inode)
                except OSError as error:
                    failed[inode] = error
                    continue
                except RefusedError as error:
                    log.debug("output %x was changed while it was saved: %s", inode, error)
                    self._held[inode] = (time.monotonic() + RETRY_S, RETRY_S)
                    continue
            self._succeed(inode)
        return failed

    def _hold(self, inode: int, error: OSError) -> None:
        """It is tried again, later each time."""
        self._fail(inode, "cannot save outputs", error)
        pause_s = min(2 * self._pauses_s.get(inode, RETRY_S / 2), RETRY_MOST_S)
        self._pauses_s[inode] = pause_s
        self._held[inode] = (time.monotonic() + pause_s, pause_s)

    def _release(self) -> None:
        """Those whose time has come are tried again."""
        now = time.monotonic()
        for inode in [inode for inode, (due, _) in self._held.items() if due <= now]:
            del self._held[inode]
            self._enqueue(inode)
            if inode not in self._to_publish and inode not in self._to_copy:
                self._succeed(inode)  # it was removed meanwhile

    # --- after a death ---

    async def find_out(self) -> None:
        """Look what was done of what had been announced. Raises OSError."""
        await self._publisher.find_out_all()

    async def save_now(self, skipped: Collection[int], hopeless: Collection[int]) -> dict[int, OSError]:
        """All that can be done, and nothing twice: what failed, and why. Not while ``run`` runs.

        ``skipped``: outputs for which nothing is to be done; ``hopeless``: those whose content is not to be copied.
        """
        for inode in {*skipped, *hopeless}:
            self._stamps[inode] = (_NEVER, 0.0)
        self._publisher.hopeless, self._publisher.patient = hopeless, False
        failed: dict[int, OSError] = {}
        for output in list(self._tree.unsaved()):
            if self._wants_copy(output):
                try:
                    await self._copy_once(output, self._stamps.get(output.inode, (None, 0.0))[0])
                except OSError as error:
                    failed[output.inode] = error
        before: list[object] = []
        while before != (before := [replace(output) for output in self._tree.unsaved()]):
            for output in list(self._tree.unsaved()):
                if output.inode not in skipped:
                    failed.pop(output.inode, None)
                    failed |= await self._publish_batch([output.inode])
        return failed
