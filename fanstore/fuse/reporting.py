"""The report and the metrics in the life of a mount: kept up to date while it lives, finished when it ends.

Owns when the files of ``--report`` and ``--metrics`` are written and what becomes of them; what they say is made by the
pure functions of fanstore/report. Used by session.py. Trio thread; files are written in worker threads, and at the end
in a thread of its own that is left behind if the file system does not answer. Nothing here ends a job: what goes wrong
is said once, in the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from fanstore.errors import MountError
from fanstore.job.job import Job
from fanstore.job.node import Node
from fanstore.report.ending import ending
from fanstore.report.files import replace_file
from fanstore.report.metrics import metrics_text
from fanstore.report.page import report_page
from fanstore.report.planned import Planned
from fanstore.telemetry.events import Events
from fanstore.telemetry.statistics import Statistics

log = logging.getLogger(__name__)

#: Seconds between two versions of the metrics: node_exporter is asked about as often.
METRICS_S = 15.0
#: Seconds between two versions of the report while the job runs: what is left of a job that was killed.
REPORT_S = 60.0
#: Seconds for the last account of a node to be taken; after a signal, when the launcher gives a quarter of a second.
ACCOUNT_LIMIT_S, HURRIED_LIMIT_S = 5.0, 0.05
#: Seconds for the last version of the report to be written.
END_LIMIT_S = 10.0


@dataclass(frozen=True)
class Publishing:
    """What the user asked for; absolute paths.

    Attributes:
        report: the page about the whole job, written by the lowest rank that is alive; None for none.
        metrics: the figures of this node for Prometheus; None for none.
        plan: what was planned, to stand beside it in the report.
        summary: one line about the whole job at its end, on the standard error of whoever would write the report.
    """

    report: Path | None = None
    metrics: Path | None = None
    plan: Planned | None = None
    summary: bool = False

    @property
    def of_job(self) -> bool:
        """What the other nodes did is wanted at the end."""
        return self.report is not None or self.summary


class Reporting:
    """What one daemon publishes of itself and of its job.

    Attributes:
        events: what is worth telling, from the log; installed from ``open`` on.
        code: the result of the job, once it is known.
        _node, _job: None until they are made, and before that nothing is published.
        _last: the account of this node when nothing was served any more.
        _locks: by file, held while it is put in its place, so that nothing follows the last version.
        _ended: files that have got their last version; each guarded by its lock.
        _failing: files that could not be written the last time.
    """

    def __init__(self, publishing: Publishing, statistics: Statistics) -> None:
        self._publishing = publishing
        self._statistics = statistics
        self.events = Events()
        self.code: int | None = None
        self._node: Node | None = None
        self._job: Job | None = None
        self._last: Mapping[str, Any] | None = None
        self._locks = {path: threading.Lock() for path in (publishing.report, publishing.metrics) if path is not None}
        self._ended: set[Path] = set()
        self._failing: set[Path] = set()

    # --- start ---

    def open(self) -> None:
        """Listen to the log."""
        logging.getLogger("fanstore").addHandler(self.events)

    def check(self, rank: int, success: Sequence[Path]) -> None:
        """Refuse files that cannot be written, before anything is mounted. Raises MountError. May block."""
        wanted = [("--metrics", self._publishing.metrics)]
        if rank == 0:
            wanted += [("--report", self._publishing.report), *(("--success", path) for path in success)]
        for option, path in wanted:
            if path is None:
                continue
            why = ""
            try:
                if not stat.S_ISDIR(os.stat(path.parent).st_mode) or not os.access(path.parent, os.W_OK | os.X_OK):
                    why = f"no permission to write in {path.parent}"
                elif os.path.isdir(path):
                    why = "it is a directory"
            except FileNotFoundError:
                why = f"there is no directory {path.parent}"
            except OSError as error:
                why = error.strerror or str(error)
            if why:
                raise MountError(f"cannot write {option} {path}: {why}")

    # --- life ---

    async def run(self, node: Node, job: Job) -> None:
        """Keep the history of this node, and the files up to date, until it is cancelled."""
        self._node, self._job = node, job
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guard, node.account.keep)
            if self._publishing.metrics is not None:
                nursery.start_soon(self._guard, self._keep_metrics)
            if self._publishing.report is not None:
                nursery.start_soon(self._guard, self._keep_report)

    async def _guard(self, task: Callable[[], Any]) -> None:
        """A fault in here must not take the mount down."""
        try:
            await task()
        except Exception as error:
            log.error("unexpected error while keeping the figures of the job; please report it", exc_info=error)

    async def _keep_metrics(self) -> None:
        while True:
            await trio.to_thread.run_sync(self._put_metrics, self._metrics(), abandon_on_cancel=True)
            await trio.sleep(METRICS_S)

    async def _keep_report(self) -> None:
        assert self._job is not None and self._node is not None
        while True:
            await trio.sleep(REPORT_S)
            if self._job.reporter() == self._job.rank:
                accounts = await self._job.collect_accounts(self._node.account.describe())
                report = self._node.report(accounts)
                await trio.to_thread.run_sync(self._put_report, report, abandon_on_cancel=True)

    async def give_account(self, job: Job, *, hurried: bool) -> None:
        """This node is about to be done: whoever writes the report gets its last figures."""
        if self._publishing.of_job:
            await job.give_account(HURRIED_LIMIT_S if hurried else ACCOUNT_LIMIT_S)

    async def wait_accounts(self, job: Job, *, hurried: bool) -> None:
        """All nodes end now: whoever writes the report waits for their last figures."""
        if self._publishing.of_job and not hurried and job.reporter() == job.rank:
            await job.wait_accounts(ACCOUNT_LIMIT_S)

    # --- end ---

    def take_last_figures(self) -> None:
        """Nothing is served any more, and nothing is taken down yet: these are the last figures of this node."""
        if self._node is not None and self._publishing.of_job:
            try:
                self._last = self._node.account.describe()
            except Exception as error:
                log.error("unexpected error in the last figures of this node; please report it", exc_info=error)

    def close(self) -> None:
        """When mount and copies are gone, however it came to that: the last report is written; the metrics go."""
        logging.getLogger("fanstore").removeHandler(self.events)
        thread = threading.Thread(target=self._end, name="report", daemon=True)
        thread.start()
        thread.join(END_LIMIT_S)
        if thread.is_alive():
            log.warning("the report of the job, or its metrics, could not be written within %g s", END_LIMIT_S)

    def _end(self) -> None:
        """In a thread of its own; the trio thread waits for it."""
        try:
            metrics, report = self._publishing.metrics, self._publishing.report
            if metrics is not None and self._node is not None:
                with self._locks[metrics]:
                    self._ended.add(metrics)
                    self._remove(metrics)
            if self._last is None or self._job is None or self._node is None:
                return
            if self._job.reporter() == self._job.rank:
                own = {**self._last, **self._node.account.describe_events()}
                accounts = self._job.known_accounts(own, ended=True)
                data = self._node.report(accounts, ended=True, code=self.code)
                if report is not None:
                    self._put(report, report_page(data, self._publishing.plan), last=True)
                if self._publishing.summary:
                    written = None if report in self._failing else report
                    with contextlib.suppress(OSError):  # nobody reads it
                        print(f"fanstore-mount: {ending(data, written)}", file=sys.stderr, flush=True)
        except Exception as error:
            log.error("unexpected error while writing the report; please report it", exc_info=error)

    # --- content, and files ---

    def _metrics(self) -> dict[str, Any]:
        assert self._node is not None
        return {
            "config": self._node.report([])["config"],
            "started_s": self._node.account.started_s,
            "stats": self._statistics.snapshot(),
            "local_bytes": self._node.store.local_bytes(),
            "histograms": self._node.account.histograms(),
            "events": {"warning": self.events.warnings, "error": self.events.errors},
        }

    def _remove(self, metrics: Path) -> None:
        """What is left there would be collected for ever."""
        try:
            metrics.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s, which shows old figures from now on: %s", metrics, error.strerror or error)

    def _put_report(self, report: Mapping[str, Any]) -> None:
        """From any thread."""
        assert self._publishing.report is not None
        self._put(self._publishing.report, report_page(report, self._publishing.plan))

    def _put_metrics(self, facts: Mapping[str, Any]) -> None:
        """From any thread."""
        assert self._publishing.metrics is not None
        self._put(self._publishing.metrics, metrics_text(facts), mode=0o644)

    def _put(self, path: Path, text: str, mode: int | None = None, *, last: bool = False) -> None:
        try:
            with self._locks[path]:
                if path in self._ended:
                    return
                if last:
                    self._ended.add(path)
                replace_file(path, text, mode)
        except OSError as error:
            if path not in self._failing:
                log.warning("cannot write %s: %s", path, error.strerror or error)
            self._failing.add(path)
        else:
            self._failing.discard(path)
