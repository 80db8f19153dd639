"""One node of a job without its mount: the parts of the core, put together, and the staging of what belongs here.

Owns the making and closing of the parts and the job's one progress bar; each part has its own module. Knows nothing of
FUSE. Used by the session of a mount, on the trio thread; staging copies in threads of its own.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from fanstore.dataset.broker import Broker
from fanstore.dataset.control import Content, ControlDirectory
from fanstore.dataset.kept_copies import Keeping
from fanstore.dataset.namespace import Namespace
from fanstore.dataset.partial_copies import Bringer
from fanstore.dataset.placement import Placement
from fanstore.dataset.remote import Remote
from fanstore.dataset.restoring import Copier
from fanstore.dataset.sources import Sources, Verify
from fanstore.dataset.staging import begin_copies, reuse, stage
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.job.account import REPORT_VERSION, Account
from fanstore.job.copies import Copies
from fanstore.job.job import Job
from fanstore.progress import Progress
from fanstore.telemetry.events import NOTABLE, Events
from fanstore.telemetry.statistics import Source, Statistics
from fanstore.units import format_bytes, format_count

log = logging.getLogger(__name__)

STATISTICS_FILE = "stats.json"
NODES_FILE = "nodes.json"
CONFIG_FILE = "config.json"
REPORT_FILE = "report.json"

#: Seconds for threads that copy a partition to end once they are told to. Only a source that hangs (a dead file server)
#: needs longer, and then nothing can make them end.
STAGING_END_LIMIT_S = 5.0
#: Seconds between two reports of staging progress to rank 0.
_REPORT_INTERVAL_S = 0.25


@dataclass(frozen=True)
class NodeSettings:
    """What the user asked for, as far as the core is concerned."""

    cache_bytes: int
    verify: Verify
    peer_timeout_s: float
    loaders: int = 4  #: threads of the broker that read for those who may not block
    shared_readers: int = 4  #: threads that may wait for the shared file system at a time


class Node:
    """The parts of the core on one node.

    Attributes:
        namespace, broker, control: what the fuse layer translates to; store: the partition files here.
        remote: those of the other nodes; None if this one is alone.
        placement: which node keeps what; directory: where this one keeps it, None without ``--local``.
        _keeping: copies that earlier jobs have kept there; None if there are none, and none are to stay.
        account: what it tells of itself for the report of the job.
        _staged: set when staging has ended; _lacking: what it could not copy, from then on.
    """

    def __init__(
        self,
        prepared: PreparedDataset,
        job: Job,
        placement: Placement,
        directory: Path | None,
        settings: NodeSettings,
        statistics: Statistics,
        config: Callable[[], Mapping[str, object]],
        events: Events | None = None,
        links: Mapping[str, Path] | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        """``links``: symbolic links in the control directory."""
        self.placement = placement
        self.directory = directory
        self._keeping = keeping
        self._prepared = prepared
        self.store = PartitionStore(prepared)
        if directory is not None:
            kept = keeping.copies if keeping is not None and keeping.keeps else None
            begin_copies(prepared, self.store, directory, placement.of_rank(job.rank), kept)
        self._bringer = Bringer(self.store, settings.peer_timeout_s)
        self._job = job
        self._statistics = statistics
        self._start_s = time.monotonic()
        remote: Remote | None = None
        if job.peers is not None:
            hosts = [node.host for node in job.nodes]
            remote = Remote(job.peers, placement, hosts, statistics, settings.peer_timeout_s)
            copier = None
            if directory is not None:
                copier = Copier(prepared, self.store, directory, lambda: job.outputs is not None, statistics, keeping)
            job.copies = Copies(job.peers, remote, placement, hosts, copier)
            statistics.add_section("copies", job.copies.statistics)
        self.remote = remote
        self._staged = trio.Event()
        self._lacking: tuple[int, ...] = ()
        index = prepared.index
        sources = Sources(index, self.store, statistics, remote, settings.verify, self._discard)
        self.broker = Broker(
            index,
            self.store,
            sources,
            statistics,
            capacity_bytes=settings.cache_bytes,
            loaders=settings.loaders,
            shared_readers=settings.shared_readers,
            remote=remote,
        )
        self.account = Account(job, self.store, self.broker, remote, statistics, events or Events(), config)
        self._config = config
        files: dict[str, Content] = {
            STATISTICS_FILE: statistics.snapshot,
            NODES_FILE: self._describe_nodes,
            CONFIG_FILE: config,
            REPORT_FILE: self._describe_job,
        }
        self.control = ControlDirectory(index.entry_count, files, links)
        names = [part.file for part in prepared.manifest.partitions]
        self.namespace = Namespace(index, names, os.geteuid(), os.getegid(), self.control)

    def serve(self) -> None:
        """From now on answer the other nodes."""
        self._job.serve(self.store, self._bringer, self.describe, self.account.pack)

    def close(self) -> None:
        """End the threads of the broker, and close the partitions."""
        if not self.broker.stop():
            log.warning("threads that hang in a read of a partition are left behind")
        self.store.close()

    def describe(self) -> dict[str, object]:
        """What nodes.json says of this node."""
        sources = [self.store.source(partition) for partition in range(self.store.partition_count)]
        totals = self._statistics.totals().sources
        reads = {str(source): counters.reads for source, counters in totals.items()}
        out = self._job.peers.statistics() if self._job.peers is not None else {}
        return {
            "rank": self._job.rank,
            "host": self._job.host,
            "pid": os.getpid(),
            "partitions": {
                str(wanted): [partition for partition, source in enumerate(sources) if source is wanted]
                for wanted in (Source.LOCAL, Source.SHARED)
            }
            | {"placed": list(self.placement.of_rank(self._job.rank))},
            "local_bytes": self.store.local_bytes(),
            "reads": reads,
            "read_bytes": sum(counters.bytes for counters in totals.values()),
            "fetched_bytes": out.get("fetched_bytes", 0),
            "served_bytes": out.get("served_bytes", 0),
            "errors": asdict(self._statistics.errors),
            "peers_lost": out.get("peers_lost", []),
            "copies": None if self._job.copies is None else self._job.copies.statistics(),
            "uptime_s": round(time.monotonic() - self._start_s, 3),
        }

    async def _describe_nodes(self) -> Mapping[str, object]:
        return {"nodes": await self._job.describe_nodes()}

    async def _describe_job(self) -> bytes:
        # Without indentation: with it, the figures of 64 nodes would keep the trio thread for half a second.
        return json.dumps(self.report(await self._job.collect_accounts(self.account.describe()))).encode() + b"\n"

    def report(
        self, accounts: Sequence[Mapping[str, object]], *, ended: bool = False, code: int | None = None
    ) -> dict[str, object]:
        """The content of report.json; ``code`` is the job's result if it has ended, None if that was by an error."""
        return {
            "version": REPORT_VERSION,
            "made_s": round(time.time(), 3),
            "ended": ended,
            "code": code,
            "config": self._config(),
            "nodes": accounts,
        }

    def summary(self) -> str:
        """One line for the start: what is where."""
        parts = len(self.placement.holders)
        nowhere = self.placement.nowhere()
        nodes = f"{self._job.size} node{'s' if self._job.size > 1 else ''}"
        if len(nowhere) == parts:
            return f"{nodes}, all {parts} partitions are read where they are"
        copies = sum(map(len, self.placement.holders))
        size = format_bytes(sum(map(self.placement.bytes_of_rank, range(self._job.size))))
        where = "on" if self._staged.is_set() else "go to"
        line = f"{nodes}, {parts - len(nowhere)} of {parts} partitions {where} local disks ({copies} copies, {size})"
        if nowhere:
            rest = format_bytes(sum(self.placement.partition_bytes[partition] for partition in nowhere))
            line += f", {len(nowhere)} do not fit and are read where they are ({rest})"
        held = sum(map(len, self.placement.held))
        return line if not held else f"{line}; {held} of {format_count(copies, 'copy', 'copies')} kept by earlier jobs"

    async def look_after_peers(self) -> None:
        """For as long as the mount lives: notice when a node that was silent answers again, and restore copies of those
        that have died."""
        remote, copies = self.remote, self._job.copies
        if remote is None or copies is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(remote.watch)
            await self._staged.wait()
            try:
                await copies.run(self._lacking)
            except Exception as error:  # a fault in here must not take the mount down
                log.error("unexpected error while partitions are copied again; please report it", exc_info=error)

    async def reuse(self) -> None:
        """Serve what earlier jobs have kept here. Before the mount is up, so that nothing of it is read elsewhere."""
        keeping, directory = self._keeping, self.directory
        if keeping is None or not keeping.keeps or directory is None:
            return
        own = self.placement.of_rank(self._job.rank)

        def use() -> int:
            keeping.copies.record(self._prepared)
            return reuse(self.store, directory, keeping.copies, own, self._statistics)

        used = await trio.to_thread.run_sync(use)
        size = format_bytes(self.store.local_bytes())
        where = keeping.copies.path.parent
        # For the report without the directory, so that all nodes say the same.
        log.info("reused %d of %s (%s)", used, format_count(len(own), "partition"), size, extra=NOTABLE)
        log.info("copies that earlier jobs have kept are in %s, and those of this job stay there", where)

    def _discard(self, partition: int) -> None:
        """The copy here is damaged: later jobs do not get it."""
        if self._keeping is not None and self._keeping.keeps:
            try:
                self._keeping.copies.discard(self._prepared.manifest.partitions[partition])
            except OSError as error:
                log.warning("the damaged copy of partition %d stays: %s", partition, error.strerror)

    async def stage(self) -> None:
        """Copy this node's partitions to its disk; reads go on meanwhile. Cancelling it stops the copying."""
        if self.directory is None:
            self._job.report_staged(0, 0, ended=True)
            self._staged.set()
            return
        own = self.placement.staging_order(self._job.rank)
        wanted = [partition for partition in own if not self.store.is_local(partition)]
        wanted_bytes = sum(self.placement.partition_bytes[partition] for partition in wanted)
        stop, ended = threading.Event(), threading.Event()
        done = _Done()
        if wanted or not own:
            size = format_bytes(wanted_bytes)
            log.info("staging began: %s, %s", format_count(len(wanted), "partition"), size, extra=NOTABLE)
        keeping = self._keeping

        def copy() -> None:
            try:
                if keeping is not None:
                    self._make_room(keeping, wanted_bytes)
                result = stage(
                    self._prepared,
                    self.store,
                    self.directory or Path(),
                    report=done.add,
                    partitions=wanted,
                    stop=stop,
                    statistics=self._statistics,
                    kept=keeping.copies if keeping is not None and keeping.keeps else None,
                )
                self._lacking = result.failed + result.skipped
            finally:
                ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_progress, done)
            try:
                await trio.to_thread.run_sync(copy, abandon_on_cancel=True)
            except trio.Cancelled:
                stop.set()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(ended.wait, STAGING_END_LIMIT_S)
                if not ended.is_set():
                    log.warning("staging hangs in a read and is left behind")
                raise
            done.finished = True
        here = sum(map(self.store.is_local, own))
        log.info("staged %d of %d partitions in %s", here, len(own), self.directory)
        # For the report without the directory, so that all nodes say the same.
        log.info("staging ended: %d of %d partitions are on this node's disk", here, len(own), extra=NOTABLE)
        self._staged.set()

    def _make_room(self, keeping: Keeping, wanted_bytes: int) -> None:
        try:
            keeping.make_room(wanted_bytes)
        except OSError as error:
            log.warning("kept copies in %s cannot make room: %s", keeping.copies.path, error.strerror)

    async def _show_progress(self, done: _Done) -> None:
        """Report what this node has copied; on rank 0 show what all have, until they are through."""
        entries = [part.entries for part in self._prepared.manifest.partitions]
        to_copy = [partition for rank in range(self._job.size) for partition in self.placement.to_copy(rank)]
        total_bytes = sum(self.placement.partition_bytes[partition] for partition in to_copy)
        total_entries = sum(entries[partition] for partition in to_copy)
        title = "staging" if self._job.size == 1 else f"staging on {self._job.size} nodes"
        quiet = self._job.rank != 0 or not total_bytes
        with Progress(title, total_bytes, total_entries, quiet=quiet) as progress:
            while True:
                finished = done.finished  # before the counts are taken, so that none is missed
                self._job.report_staged(done.bytes, done.entries, finished)
                staged_bytes, staged_entries = self._job.staged()
                progress.add(staged_bytes - progress.done_bytes, staged_entries - progress.done_files)
                # Not: until all bytes are there. Partitions that could not be copied never are.
                others_ended = self._job.rank != 0 or self._job.has_staged() or self._job.ending.is_set()
                if finished and others_ended:
                    return
                await trio.sleep(_REPORT_INTERVAL_S)


class _Done:
    """What this node's copying threads have done. ``add`` from any thread; the sums are read without the lock."""

    def __init__(self) -> None:
        self.bytes = 0
        self.entries = 0
        self.finished = False
        self._lock = threading.Lock()

    def add(self, done_bytes: int, done_entries: int = 0) -> None:
        """Count work as done."""
        with self._lock:
            self.bytes += done_bytes
            self.entries += done_entries
