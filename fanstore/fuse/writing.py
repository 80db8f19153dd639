"""The outputs in the life of a mount: made at the start, saved at the end, kept on the disk if that was not possible.

Owns the order in which the parts that outputs need are made (outputs/outputs.py) and what is said at the end.
Used by session.py. Trio thread; what may block runs in worker threads.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack
import trio

from fanstore.errors import MountError, UsageError
from fanstore.format.index import Index
from fanstore.job.job import Job
from fanstore.job.job_directory import JobDirectory
from fanstore.job.node import Node
from fanstore.outputs.journal import JOURNAL_NAME, Journal, Owner
from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.output import Output
from fanstore.outputs.output_dir import COPIES_PREFIX, Found, OutputDir
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.recovery import CONTENTS_NAME
from fanstore.outputs.saver import Saver
from fanstore.progress import Progress
from fanstore.telemetry.statistics import Statistics
from fanstore.units import format_bytes, format_path

log = logging.getLogger(__name__)

#: Seconds without any progress after which the end of a job does not wait for ``--output`` any longer.
STUCK_LIMIT_S = 120.0
#: Outputs that are named when they could not be saved.
NAMED_MOST = 10
_LOOK_S = 0.25


def _listed(names: Iterable[str]) -> str:
    """The first of them, and how many more there are."""
    every = list(names)
    more = [f"and {len(every) - NAMED_MOST} more"] if len(every) > NAMED_MOST else []
    return ", ".join(every[:NAMED_MOST] + more)


@dataclass(frozen=True)
class Writing:
    """What the user asked for.

    Attributes:
        output: the directory on the shared file system in which outputs are to stand; None with ``--scratch``.
        durable: fsync waits until the content stands there.
    """

    output: Path | None
    durable: bool = True


class OutputLife:
    """The outputs of one mount, from the start to the end.

    Attributes:
        outputs: set by ``build``.
        _found: what an earlier job left; set by ``open``, like ``_token``, which names the job.
        _told: it was said what could not be saved.
        _left_s: seconds for which the end still waits without any progress; 0 when it waits no longer.
    """

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._output_dir: OutputDir | None = None
        self._found: list[Found] = []
        self._token = ""
        self._directory: Path | None = None
        self.outputs: Outputs | None = None
        self._job: Job | None = None
        self._told = False
        self._left_s = STUCK_LIMIT_S

    # --- start ---

    async def open(self, job: Job, index: Index) -> None:
        """Rank 0 looks at what there is in ``--output``; the others get to know it. Collective. Raises MountError.

        After every node has claimed what it needs, and so has saved there what dead jobs had left on its disk.
        """
        message, problem = b"", None
        if job.rank == 0:
            look = functools.partial(self._look, index)
            try:
                message = msgpack.packb(["", *await trio.to_thread.run_sync(look, abandon_on_cancel=True)])
            except OSError as error:
                message = msgpack.packb([self._problem(error), MountError.exit_code])
            except UsageError as error:
                message = msgpack.packb([str(error), error.exit_code])
        refusal, *rest = msgpack.unpackb(await job.share(message))
        if refusal:
            refused = MountError(refusal)
            (refused.exit_code,) = rest
            refused.told_elsewhere = job.rank != 0
            raise refused
        self._token, found = rest
        self._found = [Found(*item) for item in found]
        if self._writing.output is None:
            return
        self._output_dir = OutputDir(self._writing.output, COPIES_PREFIX + self._token, job.rank)
        try:
            await trio.to_thread.run_sync(self._output_dir.join, abandon_on_cancel=True)
        except OSError as error:
            problem = self._problem(error)
        await job.agree("opening --output", problem, {})

    def _problem(self, error: OSError) -> str:
        return f"cannot use --output {self._writing.output}: {error.strerror or error}"

    def _look(self, index: Index) -> tuple[str, list[Found]]:
        """A name for the job, and what an earlier one left. Raises OSError, UsageError."""
        token = secrets.token_hex(6)
        found: list[Found] = []
        if self._writing.output is None:
            return token, []
        output_dir = OutputDir(self._writing.output, COPIES_PREFIX + token, 0)
        if os.path.lexists(self._writing.output):
            for item in output_dir.scan():
                self._refuse_source(item, index)
                found.append(item)
        output_dir.open()
        return token, found

    def _refuse_source(self, item: Found, index: Index) -> None:
        """No output has a name of the dataset: where one stands, the files are those from which it was prepared.

        Directories of the dataset are there where programs have written into them.
        """
        entry = index.resolve(item.path)
        if entry >= 0 and not (stat.S_ISDIR(item.mode) and stat.S_ISDIR(int(index.mode[entry]))):
            raise UsageError(
                f"--output {self._writing.output} holds files of the dataset, such as {format_path(item.path)}: is it "
                "the directory from which it was prepared? Name a directory for outputs alone"
            )

    def build(self, node: Node, job: Job, directory: JobDirectory, statistics: Statistics) -> Outputs:
        """The outputs of this node. Raises MountError."""
        self._directory = directory.path
        self._job = job
        output = "" if self._writing.output is None else str(self._writing.output)
        owner = Owner(self._token, job.rank, output, COPIES_PREFIX + self._token)
        try:
            contents = LocalContents(directory.path / CONTENTS_NAME)
            journal = Journal.make(directory.path / JOURNAL_NAME, owner)
        except OSError as error:
            raise MountError(f"cannot keep outputs in {directory.path}: {error.strerror}") from error
        outputs = self.outputs = Outputs(
            node.namespace, job.peers, contents, journal, self._output_dir, self._writing.durable
        )
        outputs.adopt(self._found)
        self._found = []
        job.outputs = outputs
        statistics.add_section("outputs", outputs.describe)
        return outputs

    # --- end ---

    def _mine(self, job: Job) -> list[Output]:
        """What this node has to wait for: its own contents; on the node that decides, all others, too."""
        assert self.outputs is not None
        leads = self.outputs.decides()
        return [
            output
            for output in self.outputs.tree.unsaved()
            if (output.is_file and output.holder == job.rank) or (leads and not self._is_lost(output, job))
        ]

    def _is_lost(self, output: Output, job: Job) -> bool:
        """Only a node that is gone has it, or that which replaces it."""
        if output.place is None:
            assert self.outputs is not None
            successor = None if output.standing is None else self.outputs.tree.lookup(*output.standing.place)
            return successor is not None and self._is_lost(successor, job)
        if not output.is_file or output.holder < 0 or not job.nodes[output.holder].lost:
            return False
        return not output.is_copied()

    async def drain(self, job: Job) -> None:
        """Until all outputs are safe, or nothing has moved for STUCK_LIMIT_S. Cancelling it leaves the rest pending.

        What was waited in vain counts for the next call, too.
        """
        outputs = self.outputs
        if outputs is None:
            return
        await outputs.close_all()
        if outputs.saver is None:
            return
        files, size = outputs.saver.pending()
        moved_s, before = time.monotonic(), (files, size, outputs.saver.moved_bytes)
        limit_s = self._left_s
        with Progress("saving outputs", size, files, quiet=job.rank != 0 or files == 0) as progress:
            while self._mine(job):
                with trio.move_on_after(min(_LOOK_S, limit_s)):
                    await outputs.saver.wait_progress()
                now = (*outputs.saver.pending(), outputs.saver.moved_bytes)
                copies = now[2] != before[2] and not outputs.saver.trouble.since  # not again and again the same
                if now[0] < before[0] or now[1] < before[1] or copies:
                    moved_s, limit_s = time.monotonic(), STUCK_LIMIT_S
                    done_files, done_bytes = files - now[0], size - now[1]
                    progress.add(max(0, done_bytes - progress.done_bytes), max(0, done_files - progress.done_files))
                before = now
                self._left_s = max(0.0, limit_s - (time.monotonic() - moved_s))
                if self._left_s == 0.0:
                    return
        if outputs.decides():
            await outputs.saver.set_times()

    def leave(self) -> None:
        """What is not saved by now is not waited for any longer."""
        self._left_s = 0.0

    def waits_for(self) -> str:
        """What the end waits for, for people; "" for nothing."""
        unsaved, saver = self._unsaved(), self.outputs.saver if self.outputs is not None else None
        if not unsaved or saver is None:
            return ""
        why = f" ({saver.trouble.reason})" if saver.trouble.reason else ""
        return f"{len(unsaved)} outputs are not yet saved to {self._writing.output}{why}"

    @property
    def directory(self) -> Path | None:
        """Where contents are until then; None before ``build``."""
        return self._directory

    def end(self, job: Job) -> bool:
        """Say what could not be saved; whether everything could."""
        outputs = self.outputs
        if outputs is None or outputs.saver is None:
            return True
        unsaved = self._unsaved()
        lost = [output for output in outputs.tree.unsaved() if output.place is not None and self._is_lost(output, job)]
        if lost and outputs.decides():
            holders = sorted({f"rank {output.holder} on {job.nodes[output.holder].host}" for output in lost})
            log.error(
                "%d outputs were only on %s, which died before they were saved; if its disk is still there, run on "
                "that node, with DIR as in this job: fanstore-mount --recover --local DIR. They are: %s",
                len(lost),
                ", ".join(holders),
                _listed(map(outputs.tree.title, lost)),
            )
        if not unsaved:
            return not lost
        self._tell(outputs, outputs.saver, unsaved)
        return False

    def _unsaved(self) -> list[Output]:
        """What is not safe and would be lost with the directory of the job; of the end's making, or of an error's."""
        outputs, job = self.outputs, self._job
        if outputs is None or outputs.saver is None or job is None:
            return []
        unsaved: dict[int, Output] = {output.inode: output for output in self._mine(job)}
        for inode in outputs.contents.all():
            output = outputs.tree.outputs.get(inode)
            if output is not None and output.place is not None and not outputs.contents.is_known(inode):
                unsaved[inode] = output  # it was written to, and nobody has closed it
        return list(unsaved.values())

    def is_safe(self) -> bool:
        """Would nothing be lost with the directory of the job?"""
        return not self._unsaved()

    def _tell(self, outputs: Outputs, saver: Saver, unsaved: list[Output]) -> None:
        assert self._directory is not None
        self._told = True
        log.error(
            "%d outputs could not be saved to %s%s; they stay in %s. When it can be written to again, run on this "
            "node: fanstore-mount --recover --local %s (the next job with this --local does so, too). They are: %s",
            len(unsaved),
            self._writing.output,
            f" ({saver.trouble.reason})" if saver.trouble.reason else "",
            self._directory,
            self._directory.parent,
            _listed(self._describe(outputs, output) for output in unsaved if output.place is not None),
        )

    def _describe(self, outputs: Outputs, output: Output) -> str:
        """Its name; and where its content is, if it is here."""
        content = outputs.contents.find(output.inode) if output.is_file else None
        if content is None:
            return outputs.tree.title(output)
        where = f"{CONTENTS_NAME}/{outputs.contents.file(output.inode).name}"
        return f"{outputs.tree.title(output)} ({format_bytes(content.size)}, in {where})"

    def close(self) -> tuple[str, ...]:
        """When nothing runs any more, however it came to that: what must stay in the directory of the job."""
        outputs, unsaved = self.outputs, self._unsaved()
        if outputs is not None:
            if unsaved and not self._told and outputs.saver is not None:
                self._tell(outputs, outputs.saver, unsaved)
            outputs.contents.close()
        if unsaved:
            return (CONTENTS_NAME, JOURNAL_NAME)
        if self._output_dir is not None:
            try:
                self._output_dir.close()
            except OSError as error:
                log.warning("temporary files stay in %s: %s", self._writing.output, error.strerror)
        return ()

    def summary(self) -> str:
        """One line for the log."""
        if self.outputs is None:
            return "nothing can be written"
        if self.outputs.saver is None:
            return "outputs end with the job (--scratch)"
        saver = self.outputs.saver
        return f"saved {saver.saved_files} files, {format_bytes(saver.saved_bytes)}, to {self._writing.output}"
