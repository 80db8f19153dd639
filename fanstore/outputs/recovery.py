"""What a killed job left on this node's disk goes to where it belongs.

Owns the second half of a life that ended too early: reads the journal of a dead job (journal.py), and goes on where its
saver stopped (saver.py), alone: contents that were closed are copied to ``--output``, and names follow. Each step is
noted in the journal, so a recovery that is killed is gone on with, too. Content that was being written when the job
died gets UNFINISHED behind its name, since nobody has closed it; so does content in whose place somebody else has put
something newer. Nothing is removed or renamed there but what this job has put there, and is as it was.

Other nodes of the job have journals and contents of their own, and may even live: what is theirs is theirs to save.
Used before the directory of a dead job is removed (job_directory.py), in a thread without a trio loop: blocks.
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import trio

from fanstore.errors import FanstoreError
from fanstore.outputs.journal import JOURNAL_NAME, Journal, Owner, read_journal, read_owner
from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.output import Output
from fanstore.outputs.output_dir import OutputDir, Wanted
from fanstore.outputs.replicated_tree import ReplicatedTree
from fanstore.outputs.saver import Saver
from fanstore.outputs.tree import NAME_BYTES, Operation, OutputTree, RefusedError
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

#: The directory of contents, in that of a job.
CONTENTS_NAME = "outputs"
#: Behind the name of a file that was not closed when its job died.
UNFINISHED = ".unfinished"

#: Precisions of the times that file systems keep, in nanoseconds.
_PRECISIONS_NS = (1, 100, 1000, 1_000_000, 1_000_000_000, 2_000_000_000)


class Remembered:
    """The directories of the dataset that the journal mentions; all that is needed of it."""

    def __init__(self) -> None:
        self.paths: dict[int, bytes] = {}

    def child(self, parent: int, name: bytes) -> int | None:
        return None

    def is_directory(self, inode: int) -> bool:
        return inode in self.paths

    def path(self, inode: int) -> bytes:
        return self.paths[inode]


@dataclass
class Recovered:
    """What was done for one dead job: files and bytes that stand in ``--output`` now, and what could not be."""

    files: int = 0
    bytes: int = 0
    unfinished: int = 0
    failed: int = 0


@dataclass
class _Memory:
    """What the journal says.

    Attributes:
        known: by inode, sizes and times that a file has had since it was first closed.
        times: by inode, the times that its last content has had.
        made: the inodes of all files that it tells of.
        end: where the last good record ends.
    """

    owner: Owner
    dataset: Remembered
    tree: OutputTree
    end: int
    known: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    times: dict[int, set[int]] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)

    def apply(self, operation: Operation) -> None:
        """Do an operation again."""
        inode = self.tree.apply(operation).result
        if operation[0] in ("create", "found"):
            self.made.add(inode)
        self._note(operation[0], inode)

    def _note(self, kind: str, inode: int) -> None:
        output = self.tree.outputs.get(inode)
        if kind in ("commit", "found"):
            self.times[inode] = set()
        elif kind != "setattr":
            return
        if output is not None and output.is_file:
            self.times.setdefault(inode, set()).add(output.mtime_ns)
            self.known.setdefault(inode, set()).add((output.size, output.mtime_ns))


def waiting_for(directory: Path) -> str | None:
    """Where outputs of this dead job are to go, if any are left here; None if there is nothing to recover.

    Changes nothing, and does not look at ``--output``: they may stand there already. Raises FormatError, OSError.
    """
    journal, contents = directory / JOURNAL_NAME, directory / CONTENTS_NAME
    if not journal.exists() or not contents.exists() or not any(contents.iterdir()):
        return None
    return read_owner(journal).output or None


def salvage(directory: Path) -> bool:
    """Save what the dead job of this directory has not; whether the directory may be removed."""
    journal, contents = directory / JOURNAL_NAME, directory / CONTENTS_NAME
    try:
        if not journal.exists() or (journal.stat().st_size == 0 and not any(contents.iterdir())):
            return True
        memory = _replay(journal)
        if not memory.owner.output:
            return True  # --scratch: they were to end with their job
        result = _Recovery(directory, memory).run()
    except (FanstoreError, OSError) as error:
        log.warning("outputs of a dead job stay in %s: %s", contents, error)
        return False
    if result.files or result.unfinished:
        log.info(
            "saved %d outputs (%s) of a dead job, and %d more that it had not closed ('%s' behind the name)",
            result.files,
            format_bytes(result.bytes),
            result.unfinished,
            UNFINISHED,
        )
    if result.failed:
        log.warning("%d outputs of a dead job could not be saved and stay in %s", result.failed, directory)
    return result.failed == 0


def _replay(journal: Path) -> _Memory:
    owner, start, records = read_journal(journal)
    dataset = Remembered()
    memory = _Memory(owner, dataset, OutputTree(dataset), start)
    for kind, value, end in records:
        memory.end = end
        if kind == "dir":
            dataset.paths[value[0]] = value[1]
            continue
        try:
            memory.apply(value)
        except RefusedError as error:
            log.debug("an operation of the journal cannot be done again: %s", error)
    return memory


class _Recovery:
    """The recovery of one directory.

    Attributes:
        _unfinished: outputs whose content is to be saved under another name.
    """

    def __init__(self, directory: Path, memory: _Memory) -> None:
        self._directory = directory
        self._memory = memory
        self._tree = memory.tree
        self._contents = LocalContents(directory / CONTENTS_NAME, existing=True)
        self._output_dir = OutputDir(Path(memory.owner.output), memory.owner.copies, memory.owner.rank)
        self._journal = Journal.resume(directory / JOURNAL_NAME, memory.end)
        #: This node is alone: what it wants is done.
        self._names = ReplicatedTree(memory.tree, memory.dataset, self._journal)
        self._result = Recovered()
        self._unfinished: dict[int, Output] = {}

    def run(self) -> Recovered:
        """Raises OSError if nothing can be done at all."""
        try:
            self._sort()
            if self._unfinished or any(map(self._is_work, self._tree.unsaved())):
                self._output_dir.open(parents=False)
                trio.run(self._save)
                for output in self._unfinished.values():
                    self._save_unfinished(output)
            if self._result.failed == 0:
                self._output_dir.close()
        finally:
            self._journal.close()
            self._contents.close()
        return self._result

    def _sort(self) -> None:
        """Look at the contents on this disk: were they closed as they are?"""
        nameless = 0
        for inode in self._contents.all():
            output = self._tree.outputs.get(inode)
            if inode not in self._memory.made:
                content = self._contents.find(inode)  # an empty one was about to be noted by the native engine
                nameless += content is not None and content.size > 0
            elif output is not None and output.place is not None and not self._is_closed(output):
                self._unfinished[inode] = output
        if nameless:
            log.warning("%d contents in %s have no name: the journal there is damaged", nameless, self._directory)
            self._result.failed += nameless

    def _is_closed(self, output: Output) -> bool:
        content = self._contents.find(output.inode)
        assert content is not None
        if output.version == 0:
            return content.size == 0  # nothing was written: nothing is to be saved
        times = self._memory.times.get(output.inode, ())
        return content.size == output.size and (
            content.mtime_ns in times or any(_is_same_time(content.mtime_ns, time - 1) for time in times)  # marked
        )

    def _is_work(self, output: Output) -> bool:
        """Is there anything that this node can do for an output that does not stand as it should?"""
        if output.place is None or not output.is_file or output.standing is not None or output.ready is not None:
            return True
        return output.version > 0 and self._contents.find(output.inode) is not None

    # --- what was closed ---

    async def _save(self) -> None:
        saver = Saver(self._names, self._contents, self._output_dir, self._memory.owner.rank)
        await saver.find_out()
        left = await self._look_around()
        failed = await saver.save_now(left, self._unfinished)
        self._result.files, self._result.bytes = saver.saved_files, saver.saved_bytes
        for output in list(self._tree.unsaved()):
            error = failed.get(output.inode)
            if error is None and (output.inode in {*left, *self._unfinished} or not self._is_due(output)):
                continue
            log.warning("cannot save %s: %s", self._tree.title(output), "it is in the way" if error is None else error)
            self._result.failed += 1

    def _is_due(self, output: Output) -> bool:
        """Should it stand now as it is?"""
        if output.place is not None:
            mine = output.holder == self._memory.owner.rank and output.version > 0
            return not output.is_file or mine or output.is_copied()
        # What was removed stays where something is to come that is not complete.
        return output.standing is None or self._tree.lookup(*output.standing.place) is None

    async def _look_around(self) -> set[int]:
        """Find what somebody else has changed in ``--output`` since; the outputs that are left alone."""
        left: set[int] = set()
        for output in list(self._tree.unsaved()):
            standing = output.standing
            if standing is not None and not self._is_ours(output):
                await self._names.decide(("unsaved", output.inode))
                if standing.version == output.version and output.ready is None:
                    left.add(output.inode)  # it was saved; who has changed it since knows why
        for output in list(self._tree.unsaved()):
            if output.is_file and output.place is not None and output.version > 0 and self._has_newer(output):
                left.add(output.inode)
                if output.ready is not None:
                    await self._names.decide(("unready", output.inode, output.ready[1]))
                stands = output.standing is not None and output.standing.version == output.version
                if not stands and self._contents.find(output.inode) is not None:
                    self._unfinished[output.inode] = output
        return left

    def _is_ours(self, output: Output) -> bool:
        """Is what stands in ``--output`` what the journal says?"""
        assert output.standing is not None
        try:
            there = self._output_dir.look(self._tree.standing_path(output.standing.place))
        except RefusedError:
            return False
        if there is None or stat.S_IFMT(there.st_mode) != stat.S_IFMT(output.mode):
            return False
        known = self._memory.known.get(output.inode, ())
        return not output.is_file or any(
            there.st_size == size and _is_same_time(there.st_mtime_ns, mtime_ns) for size, mtime_ns in known
        )

    def _has_newer(self, output: Output) -> bool:
        """Has somebody else put something there that is newer, or no file?"""
        assert output.place is not None
        if output.place in self._tree.standing:
            return False
        there = self._output_dir.look(self._tree.path(output.place))
        if there is None:
            return False
        newer = there.st_mtime_ns > output.mtime_ns and not _is_same_time(output.mtime_ns, there.st_mtime_ns)
        return newer or not stat.S_ISREG(there.st_mode)

    # --- what was not ---

    def _save_unfinished(self, output: Output) -> None:
        """Under a name of its own; never in place of another one."""
        assert output.place is not None
        content = self._contents.find(output.inode)
        assert content is not None
        file = f"{self._memory.owner.rank}-{output.inode:x}-unfinished"
        try:
            path = self._free_name(output, content.size, content.mtime_ns)
            self._output_dir.copy_in(Wanted(self._contents.open(output.inode), content.size, file))
            self._output_dir.make_parents(path)
            self._output_dir.publish(file, path, output.mode, content.mtime_ns, output.xattrs)
            self._output_dir.sync([path])
        except OSError as error:
            log.warning("cannot save what there is of %s: %s", self._tree.title(output), error.strerror or error)
            self._result.failed += 1
            return
        self._result.unfinished += 1

    def _free_name(self, output: Output, size: int, mtime_ns: int) -> bytes:
        assert output.place is not None
        name = output.place.name[: NAME_BYTES - len(UNFINISHED) - 4]
        number = 1
        while True:
            ending = UNFINISHED if number == 1 else f"{UNFINISHED}-{number}"
            path = self._tree.path(output.place._replace(name=name + os.fsencode(ending)))
            there = self._output_dir.look(path)
            if there is None or (there.st_size == size and _is_same_time(there.st_mtime_ns, mtime_ns)):
                return path  # free, or what an interrupted recovery has saved
            number += 1


def _is_same_time(found_ns: int, known_ns: int) -> bool:
    """Can a file system that was given one time have made the other of it?"""
    return any(found_ns == known_ns - known_ns % unit for unit in _PRECISIONS_NS)
