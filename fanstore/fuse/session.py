"""The life of a mount: claim the mount point, open the dataset, stage it, mount, serve, unmount, leave nothing behind.

Owns the order in which the parts are made and taken down again, and the trio main loop, which runs in the main thread.
Does not answer requests (operations.py) and does not read options (cli/mount.py). What may block before the mount is
up or after it was taken down runs in worker threads, so that a signal is heard at any time.
"""

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Never

import pyfuse3
import trio

from fanstore.core.capacity import Disk, divide, survey
from fanstore.core.control import CONTROL_NAME
from fanstore.core.events import NOTABLE
from fanstore.core.job import Job, NodeState
from fanstore.core.joblock import JobDirectory
from fanstore.core.node import CONFIG_FILE, Node, NodeSettings
from fanstore.core.placement import Placement, place
from fanstore.core.statistics import Statistics
from fanstore.errors import FanstoreError, MountError
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.command import CommandError, check_command, run_command
from fanstore.fuse.deadmount import record_mount, take_over
from fanstore.fuse.firstread import read_first
from fanstore.fuse.kernel import MountOptions, mount_kernel, mount_native, raise_kernel_limits, woken_regularly
from fanstore.fuse.mountpoint import MountPoint, check_fuse, unmount_or_detach
from fanstore.fuse.mounttable import Mount
from fanstore.fuse.native import NativeEngine
from fanstore.fuse.operations import FanstoreOperations, ReadOnlyOperations
from fanstore.fuse.outputoperations import KernelNames, OutputOperations
from fanstore.fuse.reporting import Reporting
from fanstore.fuse.settings import EngineChoice, MountSettings, describe
from fanstore.fuse.sharedmemory import SharedMemory
from fanstore.fuse.signals import Signals, ending_signals, log_one, stopped_by
from fanstore.fuse.startwatch import StartWatch
from fanstore.fuse.writing import OutputLife
from fanstore.transport.ranks import launched_rank, launched_size
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

#: Seconds for threads that read a partition to end once nobody waits for them any more. Only a source that hangs (a
#: dead file server) needs longer, and then nothing can make them end; see ``_leave``.
END_LIMIT_S = 5.0

#: Seconds for the MPI library to end, and with it all nodes, once nothing is mounted any more.
LEAVE_LIMIT_S = 10.0

#: Seconds for the other nodes to be done when the job was told to end. They need milliseconds, unless one is dead. And
#: mpirun of Open MPI 5 sends SIGKILL 250 ms after SIGTERM, always: by then mount and local files must be gone.
TOGETHER_S = 0.12

#: Seconds for the kernel to end the session by itself after an unmount, before it is told to. Takes milliseconds if
#: nobody holds the mount, and never happens if somebody does.
DETACH_LIMIT_S = 1.0

#: Tasks of pyfuse3 that are kept waiting for the next request. With its default of 1 nearly every request starts a
#: task and ends one.
IDLE_TASKS = 8
MAX_TASKS = 128

#: With the native engine, which has a cache of its own: what Python keeps of chunks from other nodes, so that reads of
#: one file that arrive together fetch it once.
PYTHON_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class MountInfo:
    """What can be told once the mount is up."""

    mountpoint: Path
    files: int
    bytes: int
    summary: str  #: what is where
    rank: int


@dataclass(frozen=True)
class _Claim:
    """What this node has for the job: a mount point and perhaps a disk, or a problem."""

    point: MountPoint | None
    disk: Disk | None
    problem: str | None


class _Ended:
    """How serving ended: set once the kernel or we have ended the session.

    Attributes:
        event: set when pyfuse3's loop is over.
        error: why, if it was neither an unmount nor us.
    """

    def __init__(self) -> None:
        self.event = trio.Event()
        self.error: Exception | None = None


def run_session(settings: MountSettings, watch: StartWatch, on_ready: Callable[[MountInfo], None]) -> int:
    """Mount, serve until the end, and clean up; the exit code. Raises FanstoreError. From the main thread only."""
    logging.getLogger("pyfuse3").addFilter(_is_worth_logging)
    signal.signal(signal.SIGUSR1, _ignore)  # a warning for a command that does not run yet: not the end of everything
    try:
        return trio.run(_Session(settings, watch, on_ready).main)
    except BaseExceptionGroup as group:
        # Nurseries wrap what is raised in them; for the user one sentence counts.
        raise _first_expected(group) from group


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which the command would inherit."""


class _Session:
    """One mount.

    Attributes:
        _cleanup: what is to be undone, in reverse order; runs when nothing is served any more.
        _engine: the native engine; None if pyfuse3 answers alone.
    """

    def __init__(self, settings: MountSettings, watch: StartWatch, on_ready: Callable[[MountInfo], None]) -> None:
        self._settings = settings
        self._watch = watch
        self._on_ready = on_ready
        self._cleanup = contextlib.ExitStack()
        self._directory: JobDirectory | None = None
        self._statistics = Statistics()
        self._survives = True
        self._engine: NativeEngine | None = None
        self._life = None if settings.writing is None else OutputLife(settings.writing)
        self._reporting = Reporting(settings.publishing, self._statistics)

    async def main(self) -> int:
        with trio.open_signal_receiver(*ending_signals()) as received, self._cleanup:
            signals = Signals(received)
            self._reporting.open()
            async with stopped_by(signals):
                job = await self._join()
                # Runs when mount and copies are gone, and before this process leaves the job.
                self._cleanup.callback(self._reporting.close)
                claim = await self._claim(job)
                prepared = await self._open(job)
                point, placement = await self._place(job, prepared, claim)
                if self._life is not None:
                    await self._life.open(job)
                node = self._build(prepared, point, job, placement)
                if self._settings.stage_first:
                    self._watch.begin(limited=False)
                    await node.stage()
            return await self._serve(node, point, job, prepared, signals)

    # --- start ---

    async def _join(self) -> Job:
        """Find the other daemons of the job, if a launcher has started several."""
        if launched_size() == 1:
            return Job(None)
        from fanstore.transport.mpi import MpiPeers  # loads the MPI library, which only a job of several nodes needs

        self._watch.begin()
        with SharedMemory():
            peers = MpiPeers()
            self._cleanup.callback(peers.close, LEAVE_LIMIT_S)
            await peers.wait_started()
            await peers.gather_all(b"")
        self._survives = peers.survives
        if not peers.survives and peers.rank == 0:
            log.info("the loss of a node ends this job; with 'mpirun --with-ft ulfm' (Open MPI 5) the others go on")
        return Job(peers)

    async def _open(self, job: Job) -> PreparedDataset:
        """Rank 0 reads manifest and index; the others get them from it."""
        self._watch.begin()
        path = self._settings.prepared
        with trio.move_on_after(self._watch.limit_s) as scope:
            return await job.open_dataset(path)
        self._watch.give_up(scope, f"opening {path}")
        raise AssertionError("unreachable: only the limit cancels this scope and goes on")

    async def _claim(self, job: Job) -> _Claim:
        """Get what this node needs. In a job of several, a problem is kept until all nodes can be told of it."""
        self._watch.begin()
        try:
            return await trio.to_thread.run_sync(self._prepare_node)
        except FanstoreError as error:
            if job.size == 1:
                raise
            return _Claim(None, None, str(error))

    async def _place(self, job: Job, prepared: PreparedDataset, claim: _Claim) -> tuple[MountPoint, Placement]:
        """Make sure that all nodes can mount and stage, and decide which of them keeps what."""
        self._watch.begin()
        disk = None if claim.disk is None else asdict(claim.disk)
        facts = await self._agree(job, "the start", claim.problem, {"disk": disk})
        assert claim.point is not None
        room = divide([None if fact["disk"] is None else Disk(**fact["disk"]) for fact in facts])
        parts = prepared.manifest.partitions
        everywhere = [part.everywhere for part in parts]
        placement = place([part.bytes for part in parts], everywhere, room, self._settings.replicas)
        nowhere = placement.nowhere()
        if nowhere and any(room) and job.rank == 0:
            log.warning(
                "%d of %d partitions (%s) do not fit on local disks (%s free for them); they are read where they are",
                len(nowhere),
                len(parts),
                format_bytes(sum(parts[partition].bytes for partition in nowhere)),
                format_bytes(sum(room)),
            )
        return claim.point, placement

    def _prepare_node(self) -> _Claim:
        """In a thread: claim the mount point, make the directory for staging."""
        settings = self._settings
        if settings.command:
            check_command(settings.command)
        check_fuse()
        point = MountPoint(settings.mountpoint)
        self._reporting.check(point.path, launched_rank())
        if settings.local is not None and point.path in (settings.local.resolve() / "x").parents:
            raise MountError(f"--local {settings.local} lies inside the mount point, which will hide it")
        point.claim()
        self._cleanup.callback(point.remove)
        base = settings.local if settings.writing is None else settings.local or settings.writing.base
        if base is not None:
            JobDirectory.sweep(base, take_over)
            self._directory = JobDirectory(base)
            self._cleanup.callback(self._remove_directory, self._directory)
            record_mount(self._directory.path, point)
        if settings.local is None or self._directory is None:
            return _Claim(point, None, None)
        try:
            return _Claim(
                point, survey(self._directory.path, settings.capacity_bytes, outputs=self._life is not None), None
            )
        except OSError as error:
            raise MountError(f"cannot use {settings.local}: {error.strerror}") from error

    def _remove_directory(self, directory: JobDirectory) -> None:
        directory.remove(keeping=() if self._life is None else self._life.close())

    async def _agree(self, job: Job, step: str, problem: str | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
        with trio.move_on_after(self._watch.limit_s) as scope:
            return await job.agree(step, problem, facts)
        self._watch.give_up(scope, f"waiting for the other nodes ({step})")
        raise AssertionError("unreachable: only the limit cancels this scope and goes on")

    def _build(self, prepared: PreparedDataset, point: MountPoint, job: Job, placement: Placement) -> Node:
        settings = replace(self._settings, prepared=prepared.path, mountpoint=point.path)
        directory = None if self._directory is None else self._directory.path
        config = describe(settings, prepared, job, directory)
        native = settings.engine is not EngineChoice.PYTHON
        cache_bytes = min(settings.cache_bytes // 4, PYTHON_CACHE_BYTES) if native else settings.cache_bytes
        node = Node(
            prepared,
            job,
            placement,
            directory if settings.local is not None else None,
            NodeSettings(cache_bytes, settings.verify, settings.peer_timeout_s),
            self._statistics,
            lambda: config | {"engine": "python" if self._engine is None else "native"},
            self._reporting.events,
        )
        self._cleanup.callback(node.close)
        if self._life is not None and self._directory is not None:
            self._life.build(node, job, self._directory, self._statistics)
        if native:
            self._make_engine(prepared, node, settings.cache_bytes - cache_bytes)
        node.serve()
        log.info("%s", node.summary())
        return node

    def _make_engine(self, prepared: PreparedDataset, node: Node, cache_bytes: int) -> None:
        """The native engine, before anything is staged, so that it hears of every partition file."""
        outputs = None if self._life is None else self._life.outputs
        try:
            self._engine = NativeEngine(
                prepared.index,
                node.namespace,
                node.store,
                node.reader,
                self._statistics,
                cache_bytes,
                outputs=outputs,
                alone=outputs is None or outputs.alone,
                waits=outputs is not None and outputs.waits,
                remote=node.remote,
            )
        except OSError as error:
            self._without_engine(error)
            return
        self._cleanup.callback(self._stop_engine)

    def _without_engine(self, error: OSError) -> None:
        """The native engine cannot run: an error if it was asked for, otherwise pyfuse3 answers alone."""
        if self._settings.engine is EngineChoice.NATIVE:
            raise MountError(f"the native engine cannot run here: {error.strerror}") from error
        log.warning(
            "the native engine cannot run here (%s): the python engine answers, which is slower", error.strerror
        )
        self._engine = None
        self._statistics.engine = None

    def _stop_engine(self) -> None:
        if self._engine is not None and not self._engine.stop():
            log.warning("threads that hang in a read of a partition are left behind")

    # --- life ---

    def _mount(self, node: Node, point: Path) -> Mount:
        """Mount with the engine that was asked for, or that can run. Raises MountError."""
        parts = (node.namespace, node.reader, node.control, self._statistics)
        outputs = None if self._life is None else self._life.outputs
        operations: FanstoreOperations = ReadOnlyOperations(*parts)
        names: KernelNames | None = None
        if outputs is not None:
            names = KernelNames(self._engine, outputs.alone)
            operations = OutputOperations(*parts, outputs, names)
            outputs.use_kernel(names, self._engine)
        options = MountOptions(str(self._settings.prepared), self._settings.allow_other, writable=outputs is not None)
        if self._engine is not None:
            try:
                return mount_native(operations, self._engine, point, options)
            except OSError as error:
                self._stop_engine()
                self._without_engine(error)
                if outputs is not None and names is not None:
                    names.without_engine()
                    outputs.births.use(None)
        return mount_kernel(operations, point, options)

    async def _serve(self, node: Node, point: MountPoint, job: Job, prepared: PreparedDataset, signals: Signals) -> int:
        self._watch.begin()
        mount, problem = None, None
        try:
            mount = self._mount(node, point.path)
        except MountError as error:
            if job.size == 1:
                raise
            problem = str(error)
        if mount is None:
            await self._agree(job, "mounting", problem, {})
            raise AssertionError("unreachable: a problem of our own ends the agreement")
        ended = _Ended()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._loop, ended)
                nursery.start_soon(self._reporting.run, node, job)
                if self._life is not None and self._life.outputs is not None:
                    nursery.start_soon(self._life.outputs.run)
                try:
                    async with stopped_by(signals):
                        await self._come_up(mount, job)
                    point.release()
                    raise_kernel_limits(mount.device)
                    log.info("mounted %s on %s", self._settings.prepared, mount.point, extra=NOTABLE)
                    totals = prepared.manifest.totals
                    self._on_ready(MountInfo(point.path, totals.files, totals.bytes, node.summary(), job.rank))
                    self._watch.ready()
                    if self._engine is not None:
                        nursery.start_soon(self._engine.list_ahead, mount.point)
                    code = await self._use(mount, node, job, ended, signals)
                except BaseException:
                    await self._unmount(mount, ended, functools.partial(self._leave, 1))
                    raise
                await self._unmount(mount, ended, functools.partial(self._leave, code))
                code = self._reporting.code = await self._save(job, signals, code)
                nursery.cancel_scope.cancel()
        finally:
            pyfuse3.close(unmount=False)
            self._stop_engine()
            self._reporting.settle()
            self._log_summary()
        return code

    async def _come_up(self, mount: Mount, job: Job) -> None:
        """Until our mount answers, and those of all other nodes do."""
        problem = None
        try:
            path = mount.point / os.fsdecode(CONTROL_NAME) / CONFIG_FILE
            with trio.move_on_after(self._watch.limit_s) as scope:
                await read_first(mount.point, path)
            self._watch.give_up(scope, f"the first answer of the mount at {mount.point}")
        except MountError as error:
            if job.size == 1:
                raise
            problem = str(error)
        await self._agree(job, "mounting", problem, {})

    async def _loop(self, ended: _Ended) -> None:
        try:
            if self._engine is None:
                with woken_regularly():
                    await pyfuse3.main(min_tasks=IDLE_TASKS, max_tasks=MAX_TASKS)
            else:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._engine.run)
                    await pyfuse3.main(min_tasks=IDLE_TASKS, max_tasks=MAX_TASKS)
                    nursery.cancel_scope.cancel()
        except* OSError as group:
            # The connection to the kernel broke in a way that libfuse does not know as an unmount.
            log.error("the connection to the kernel failed: %s", group.exceptions[0])
            ended.error = group
        finally:
            ended.event.set()

    async def _use(self, mount: Mount, node: Node, job: Job, ended: _Ended, signals: Signals) -> int:
        """Stage, if that is not done; wait for the end: of the command, or else a signal, an unmount or the job's."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.look_after_peers)
            if not self._settings.stage_first:
                nursery.start_soon(node.stage)
            if self._settings.command:
                code = await self._run_command(mount, job, ended, signals)
            else:
                code = await self._wait_for_end(job, ended, signals)
            nursery.cancel_scope.cancel()
        return code or (1 if ended.error is not None else 0)

    async def _run_command(self, mount: Mount, job: Job, ended: _Ended, signals: Signals) -> int:
        environment = {
            **os.environ,
            "FANSTORE_MOUNT": str(mount.point),
            "FANSTORE_RANK": str(job.rank),
            "FANSTORE_SIZE": str(job.size),
        }
        try:
            code = await run_command(self._settings.command, environment, signals)
        except CommandError as error:
            if job.size > 1:
                # Not at the end as usual: the others end with our exit code as soon as they know it, and the launcher
                # kills whoever has not said its last word when the first of them has ended.
                log.error("%s", error)
                error.told = True
            await self._reporting.give_account(job, hurried=True)
            job.tell_done(error.exit_code)
            raise
        if ended.event.is_set() and ended.error is None:
            log.warning("%s was unmounted while the command was running", mount.point)
        await self._drain(job, signals)
        await self._reporting.give_account(job, hurried=signals.seen)
        if signals.seen:
            return await self._end_together(job, code, signals)
        # The others may still need what is on this node's disk; a signal ends the waiting.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_one, signals, nursery.cancel_scope)
            code = await job.finish(code)
            nursery.cancel_scope.cancel()
        return code

    async def _wait_for_end(self, job: Job, ended: _Ended, signals: Signals) -> int:
        """A daemon without a command ends by a signal or an unmount, and takes the others of its job along."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_one, signals, nursery.cancel_scope)
            nursery.start_soon(_cancel_after, ended.event, nursery.cancel_scope)
            nursery.start_soon(_cancel_after, job.ending, nursery.cancel_scope)
        job.end_all()
        await self._drain(job, signals)
        await self._reporting.give_account(job, hurried=signals.seen)
        await self._reporting.wait_accounts(job, hurried=signals.seen)
        await self._end_together(job, 0, signals)
        return 0

    async def _end_together(self, job: Job, code: int, signals: Signals) -> int:
        """The job was told to end: wait for nobody longer than a moment, and say so if a node is missing.

        Only after a signal, by which a launcher ends the others when one has died; it may come after a peer's word to
        end. An unmount is no reason for suspicion, and on a busy node the moment can be too short for an honest peer.
        """
        missing: list[NodeState] = []

        async def look() -> None:
            missing.extend(await job.find_missing(TOGETHER_S))

        async def listen() -> None:
            async for _ in signals:
                log.debug("a signal while the job ends")

        async with trio.open_nursery() as listening:
            listening.start_soon(listen)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(look)
                code = await job.finish(code, TOGETHER_S)
            listening.cancel_scope.cancel()
        speaker = next(node.rank for node in job.nodes if node not in missing)
        if missing and signals.seen and not self._survives and job.rank == speaker:
            log.warning(
                "rank %d on %s does not answer; if it has died and the launcher ends the job for that: with "
                "'mpirun --with-ft ulfm' (Open MPI 5) the other nodes go on",
                missing[0].rank,
                missing[0].host,
            )
        return code

    async def _drain(self, job: Job, signals: Signals) -> None:
        """Outputs go to where they are to stay; a signal ends the waiting, and leaves them on the local disk."""
        if self._life is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(log_one, signals, nursery.cancel_scope)
            await self._life.drain(job)
            nursery.cancel_scope.cancel()

    async def _save(self, job: Job, signals: Signals, code: int) -> int:
        """Nothing can be written any more: save what is left, and say what could not be."""
        if self._life is None:
            return code
        await self._drain(job, signals)
        return code if self._life.end(job) else code or 1

    async def _unmount(self, mount: Mount, ended: _Ended, leave: Callable[[], Never]) -> None:
        """Take the mount away and let the requests under way end; ``leave`` if they do not."""
        with trio.CancelScope(shield=True):
            if self._engine is not None:
                await self._engine.end_listing()
            try:
                busy = await trio.to_thread.run_sync(unmount_or_detach, mount)
            except MountError as error:
                log.error("%s", error)
                busy = None
            if busy is not None:
                log.warning("%s; it was detached, and what is still open there cannot be read any more", busy)
            with trio.move_on_after(DETACH_LIMIT_S if busy is None else 0):
                await ended.event.wait()
            if ended.event.is_set():
                return
            pyfuse3.terminate()
            with trio.move_on_after(END_LIMIT_S):
                await ended.event.wait()
            if not ended.event.is_set():
                leave()

    def _leave(self, code: int) -> Never:
        """End at once: threads hang in reads that never return, and an orderly end would wait for them for ever."""
        log.warning("reads that hang are left behind: the file system of %s does not answer", self._settings.prepared)
        safe = self._life is None or self._life.is_safe()
        code = self._reporting.code = code if safe else code or 1
        self._reporting.settle()
        self._cleanup.close()
        logging.shutdown()
        os._exit(code)

    def _log_summary(self) -> None:
        sources = self._statistics.totals().sources.items()
        served = ", ".join(f"{format_bytes(counters.bytes)} from {source}" for source, counters in sources)
        log.info("unmounted %s; served %s", self._settings.mountpoint, served)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _first_expected(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The FanstoreError in a group that holds nothing else; otherwise the group, which is a bug to be seen in full."""
    expected, rest = group.split(FanstoreError)
    if expected is None or rest is not None:
        return group
    leaf: BaseException = expected
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """A reply that nobody waits for (its process was killed) fails with ENOENT, which pyfuse3 takes for an error."""
    return "No such file or directory" not in record.getMessage()
