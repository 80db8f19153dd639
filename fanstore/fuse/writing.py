"""The outputs in the life of a mount: made at the start, saved at the end, kept on the disk if that was not possible.

Owns the order in which the parts of the core that outputs need are made (core/outputs.py) and what is said at the end.
Used by session.py. Trio thread; what may block runs in worker threads.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgpack
import trio

from fanstore.core.job import Job
from fanstore.core.joblock import JobDirectory
from fanstore.core.journal import JOURNAL_NAME, Journal, Owner
from fanstore.core.node import Node
from fanstore.core.objects import Objects
from fanstore.core.output import Output
from fanstore.core.outputs import Outputs, OutputSettings
from fanstore.core.recovery import OBJECTS_NAME
from fanstore.core.saver import Saver
from fanstore.core.shelf import COPIES_PREFIX, Found, Shelf
from fanstore.core.statistics import Statistics
from fanstore.errors import MountError
from fanstore.progress import Progress
from fanstore.units import format_bytes

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
        base: where contents are until then, if there is no ``--local``.
    """

    output: Path | None
    durable: bool = True

    @property
    def base(self) -> Path:
        return Path(tempfile.gettempdir())


class OutputLife:
    """The outputs of one mount, from the start to the end.

    Attributes:
        outputs: set by ``build``.
        _found: what an earlier job left; set by ``open``, like ``_token``, which names the job.
        _told: it was said what could not be saved.
    """

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._shelf: Shelf | None = None
        self._found: list[Found] = []
        self._token = ""
        self._directory: Path | None = None
        self.outputs: Outputs | None = None
        self._job: Job | None = None
        self._told = False

    # --- start ---

    async def open(self, job: Job) -> None:
        """Rank 0 looks at what there is in ``--output``; the others get to know it. Collective. Raises MountError.

        After every node has claimed what it needs, and so has saved there what dead jobs had left on its disk.
        """
        message, problem = b"", None
        if job.rank == 0:
            try:
                message = msgpack.packb(["", *await trio.to_thread.run_sync(self._look, abandon_on_cancel=True)])
            except OSError as error:
                message = msgpack.packb([self._problem(error)])
        refusal, *rest = msgpack.unpackb(await job.share(message))
        if refusal:
            refused = MountError(refusal)
            refused.told_elsewhere = job.rank != 0
            raise refused
        self._token, found = rest
        self._found = [Found(*item) for item in found]
        if self._writing.output is None:
            return
        self._shelf = Shelf(self._writing.output, COPIES_PREFIX + self._token, job.rank)
        try:
            await trio.to_thread.run_sync(self._shelf.join, abandon_on_cancel=True)
        except OSError as error:
            problem = self._problem(error)
        await job.agree("opening --output", problem, {})

    def _problem(self, error: OSError) -> str:
        return f"cannot use --output {self._writing.output}: {error.strerror or error}"

    def _look(self) -> tuple[str, list[Found]]:
        token = secrets.token_hex(6)
        if self._writing.output is None:
            return token, []
        shelf = Shelf(self._writing.output, COPIES_PREFIX + token, 0)
        shelf.open()
        return token, list(shelf.scan())

    def build(self, node: Node, job: Job, directory: JobDirectory, statistics: Statistics) -> Outputs:
        """The outputs of this node. Raises MountError."""
        self._directory = directory.path
        self._job = job
        output = "" if self._writing.output is None else str(self._writing.output)
        owner = Owner(self._token, job.rank, output, COPIES_PREFIX + self._token)
        try:
            objects = Objects(directory.path / OBJECTS_NAME)
            journal = Journal.make(directory.path / JOURNAL_NAME, owner)
        except OSError as error:
            raise MountError(f"cannot keep outputs in {directory.path}: {error.strerror}") from error
        settings = OutputSettings(self._writing.durable)
        outputs = self.outputs = Outputs(node.namespace, job.peers, objects, journal, self._shelf, settings)
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
            heir = None if output.standing is None else self.outputs.tree.lookup(*output.standing.place)
            return heir is not None and self._is_lost(heir, job)
        if not output.is_file or output.holder < 0 or not job.nodes[output.holder].lost:
            return False
        return not output.is_copied()

    async def drain(self, job: Job) -> None:
        """Until all outputs are safe, or nothing has moved for STUCK_LIMIT_S. Cancelling it leaves the rest pending."""
        outputs = self.outputs
        if outputs is None:
            return
        await outputs.close_all()
        if outputs.saver is None:
            return
        files, size = outputs.saver.pending()
        moved_s, before = time.monotonic(), (files, size)
        with Progress("saving outputs", size, files, quiet=job.rank != 0 or files == 0) as progress:
            while self._mine(job):
                with trio.move_on_after(_LOOK_S):
                    await outputs.saver.wait_progress()
                now = outputs.saver.pending()
                if now != before:
                    moved_s, before = time.monotonic(), now
                    done_files, done_bytes = files - now[0], size - now[1]
                    progress.add(max(0, done_bytes - progress.done_bytes), max(0, done_files - progress.done_files))
                elif time.monotonic() - moved_s > STUCK_LIMIT_S:
                    return
        if outputs.decides():
            await outputs.saver.set_times()

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
        for inode in outputs.objects.all():
            output = outputs.tree.outputs.get(inode)
            if output is not None and output.place is not None and not outputs.objects.is_known(inode):
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
            _listed(
                f"{outputs.tree.title(output)} ({outputs.objects.file(output.inode).name})"
                for output in unsaved
                if output.place is not None
            ),
        )

    def close(self) -> tuple[str, ...]:
        """When nothing runs any more, however it came to that: what must stay in the directory of the job."""
        outputs, unsaved = self.outputs, self._unsaved()
        if outputs is not None:
            if unsaved and not self._told and outputs.saver is not None:
                self._tell(outputs, outputs.saver, unsaved)
            outputs.objects.close()
        if unsaved:
            return (OBJECTS_NAME, JOURNAL_NAME)
        if self._shelf is not None:
            try:
                self._shelf.close()
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
