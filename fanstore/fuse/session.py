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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Never

import numpy as np
import pyfuse3
import trio

from fanstore.allocator import bound_freed_memory
from fanstore.client.hooking import hook_environment
from fanstore.client.preload import PreloadError
from fanstore.client.preload import environment as preloaded
from fanstore.client.server import ControlServer
from fanstore.dataset.cache_bound import bound_cache
from fanstore.dataset.capacity import Disk, divide, survey
from fanstore.dataset.control import CONTROL_NAME
from fanstore.dataset.kept_copies import Keeping, KeptCopies
from fanstore.dataset.placement import Placement, place
from fanstore.dataset.registration import DatasetUse
from fanstore.errors import FanstoreError, MountError, first_expected
from fanstore.format.prepared import PreparedDataset
from fanstore.fuse.begun import Begun
from fanstore.fuse.claim import Claim, check_paths, check_shards, claim_node
from fanstore.fuse.command import CommandError, run_command
from fanstore.fuse.ending import Ending
from fanstore.fuse.firstread import read_first
from fanstore.fuse.interception import Interception
from fanstore.fuse.kernel import MountOptions, mount_kernel, mount_native, raise_kernel_limits, woken_regularly
from fanstore.fuse.mountpoint import (
    MountBusyError,
    MountPoint,
    is_mounted,
    unmount,
    unmount_or_detach,
    unmount_patiently,
)
from fanstore.fuse.native import RESERVED_WORKERS, NativeEngine, choose_workers
from fanstore.fuse.operations import FanstoreOperations, ReadOnlyOperations
from fanstore.fuse.outputoperations import OutputOperations, PythonEngine
from fanstore.fuse.refusals import Refusals
from fanstore.fuse.reporting import Reporting
from fanstore.fuse.requests import requests
from fanstore.fuse.settings import EngineChoice, MountSettings, describe
from fanstore.fuse.sharedmemory import SharedMemory
from fanstore.fuse.signals import Signals, ending_signals, log_one, stopped_by
from fanstore.fuse.startwatch import StartWatch
from fanstore.fuse.supervised import Supervised
from fanstore.fuse.unmounted import describe_unmounted
from fanstore.fuse.unmountedoutputs import UnmountedOutputs
from fanstore.fuse.writing import OutputLife
from fanstore.job.job import Job, NodeState
from fanstore.job.job_directory import JobDirectory
from fanstore.job.node import CONFIG_FILE, Node, NodeSettings
from fanstore.mounttable import Mount
from fanstore.prefetch.arranging import Arranging
from fanstore.prefetch.orderfile import OrderFile
from fanstore.prefetch.prefetcher import Prefetcher
from fanstore.prefetch.specification import HOOKED_MODES
from fanstore.telemetry.events import NOTABLE
from fanstore.telemetry.statistics import Statistics
from fanstore.transport.ranks import launched_size
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

#: Threads of the broker that read for those who may not block: with the Python engine all reads are such.
PYTHON_LOADERS = 16


@dataclass(frozen=True)
class MountInfo:
    """What can be told once the mount is up."""

    mountpoint: Path
    files: int
    bytes: int
    summary: str  #: what is where
    rank: int


class _Ended:
    """How serving ended: set once the kernel or we have ended the session.

    Attributes:
        event: set when pyfuse3's loop is over.
        wanted: without a mount: it is to be over.
        error: why, if it was neither an unmount nor us.
    """

    def __init__(self) -> None:
        self.event = trio.Event()
        self.wanted = trio.Event()
        self.error: Exception | None = None


def run_session(
    settings: MountSettings, watch: StartWatch, supervised: Supervised, on_ready: Callable[[MountInfo], None]
) -> int:
    """Mount, serve until the end, and clean up; the exit code. Raises FanstoreError. From the main thread only."""
    bound_freed_memory()
    logging.getLogger("pyfuse3").addFilter(_is_worth_logging)
    signal.signal(signal.SIGUSR1, _ignore)  # a warning for a command that does not run yet: not the end of everything
    try:
        return trio.run(_Session(settings, watch, supervised, on_ready).main)
    except BaseExceptionGroup as group:
        # Nurseries wrap what is raised in them; for the user one sentence counts.
        raise first_expected(group) from group


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which the command would inherit."""


class _Session:
    """One mount.

    Attributes:
        _cleanup: what is to be undone, in reverse order; runs when nothing is served any more.
        _engine: the native engine; None if pyfuse3 answers alone.
        _control: the control socket; None if there can be none.
        _begun, _prefetcher: which files are read, and what is fetched ahead; None with ``--order off``.
        _interception: programs that read by themselves.
        _bound: of the memory cache.
        _unmounted: outputs of programs without a mount; None with one, or if they cannot write.
    """

    def __init__(
        self,
        settings: MountSettings,
        watch: StartWatch,
        supervised: Supervised,
        on_ready: Callable[[MountInfo], None],
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._supervised = supervised
        self._on_ready = on_ready
        self._cleanup = contextlib.ExitStack()
        self._directory: JobDirectory | None = None
        self._statistics = Statistics()
        self._survives = True
        self._engine: NativeEngine | None = None
        self._control: ControlServer | None = None
        self._begun: Begun | None = None
        self._prefetcher: Prefetcher | None = None
        self._life = None if settings.writing is None else OutputLife(settings.writing)
        self._unmounted: UnmountedOutputs | None = None
        self._ending = Ending(self._life, settings.success)
        self._reporting = Reporting(settings.publishing, self._statistics)
        self._dataset_use = DatasetUse(settings.prepared.directory, settings.mountpoint)

    async def main(self) -> int:
        with trio.open_signal_receiver(*ending_signals()) as received, self._cleanup:
            signals = Signals(received)
            self._reporting.open()
            async with stopped_by(signals):
                job = await self._join()
                # These run when mount and copies are gone, and before this process leaves the job.
                self._cleanup.callback(self._dataset_use.end)
                self._cleanup.callback(self._reporting.close)
                claim = await self._claim(job)
                self._directory = claim.directory
                prepared = await self._open(job)
                point, placement, keeping = await self._place(job, prepared, claim)
                if self._life is not None:
                    await self._life.open(job, prepared.index)
                node = self._build(prepared, point, job, placement, keeping)
                await node.reuse()
                if self._settings.stage_first:
                    self._watch.begin(limited=False)
                    await node.stage()
            return await self._serve(node, point, job, prepared, signals)

    # --- start ---

    async def _join(self) -> Job:
        """Find the other daemons of the job, if a launcher has started several."""
        if launched_size() == 1:
            self._supervised.tell(alone=True)
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
        storage = self._settings.prepared
        with trio.move_on_after(self._watch.limit_s) as scope:
            if job.rank == 0:
                await trio.to_thread.run_sync(self._dataset_use.register, job.host, job.size, abandon_on_cancel=True)
            return await job.open_dataset(storage)
        self._watch.give_up(scope, f"opening {storage}")
        raise AssertionError("unreachable: only the limit cancels this scope and goes on")

    async def _claim(self, job: Job) -> Claim:
        """Get what this node needs. In a job of several, a problem is kept until all nodes can be told of it."""
        self._watch.begin()
        try:
            await check_paths(self._settings, self._watch)
            parts = (self._settings, self._reporting, self._supervised, self._cleanup, self._remove_directory)
            return await trio.to_thread.run_sync(claim_node, *parts)
        except FanstoreError as error:
            if job.size == 1:
                raise
            return Claim(problem=str(error), code=error.exit_code)

    async def _place(
        self, job: Job, prepared: PreparedDataset, claim: Claim
    ) -> tuple[MountPoint, Placement, Keeping | None]:
        """Make sure that all nodes can mount and stage, and decide which of them keeps what."""
        self._watch.begin()
        if claim.problem is None:
            try:
                await check_shards(self._settings, self._watch, prepared)
            except FanstoreError as error:
                claim = replace(claim, problem=str(error), code=error.exit_code)
        disk, held = claim.disk, 0
        if claim.problem is None and claim.kept is not None:
            try:
                disk, held = await trio.to_thread.run_sync(self._look_at_kept, prepared, claim.kept)
            except OSError as error:
                claim = replace(claim, problem=f"cannot use {claim.kept.path}: {error.strerror}")
        own = {
            "disk": None if disk is None else asdict(disk),
            "held": f"{held:x}",
            "code": claim.code,
            "use": self._dataset_use.name,
        }
        facts = await self._agree(job, "the start", claim.problem, own)
        self._dataset_use.keep(facts[0]["use"], job.host, job.size, lambda: job.first_present() == job.rank)
        assert claim.point is not None
        disks = [None if fact["disk"] is None else Disk(**fact["disk"]) for fact in facts]
        room = divide(disks)
        parts = prepared.manifest.partitions
        everywhere = [part.everywhere for part in parts]
        held_by: list[list[int]] = [[] for _ in parts]
        for rank, fact in enumerate(facts):
            for number, bit in enumerate(reversed(f"{int(fact['held'], 16):b}")):
                if bit == "1":
                    held_by[number].append(rank)
        placement = place([part.bytes for part in parts], everywhere, room, self._settings.replicas, held_by)
        if placement.nowhere() and self._settings.local is not None and job.rank == 0:
            log.warning(
                "%s (%s free for them); they are read where they are, which loads the %s: free space "
                "in --local %s, name a larger disk, or use more nodes",
                placement.describe_nowhere(),
                format_bytes(sum(room)),
                prepared.storage.words,
                self._settings.local,
            )
        if claim.kept is None or disk is None:
            return claim.point, placement, None
        keeping = Keeping(
            claim.kept,
            self._settings.keep_local,
            self._settings.capacity_bytes,
            self._settings.writing is not None,
            sum(other is not None and other.name == disk.name for other in disks),
            sum(other is not None and other.directory == disk.directory for other in disks),
        )
        return claim.point, placement, keeping

    def _look_at_kept(self, prepared: PreparedDataset, kept: KeptCopies) -> tuple[Disk, int]:
        """In a thread: the disk with the room that kept copies give, and which partitions are among them, as bits."""
        found = kept.find(prepared.manifest.partitions) if self._settings.keep_local else {}
        outputs = self._settings.writing is not None
        room = kept.room(found.values())
        disk = survey(kept.path, self._settings.capacity_bytes, outputs=outputs, kept_bytes=room)
        return disk, sum(1 << number for number in found)

    def _remove_directory(self, directory: JobDirectory) -> None:
        directory.remove(keeping=() if self._life is None else self._life.close())

    async def _agree(self, job: Job, step: str, problem: str | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
        with trio.move_on_after(self._watch.limit_s) as scope:
            return await job.agree(step, problem, facts)
        self._watch.give_up(scope, f"waiting for the other nodes ({step})")
        raise AssertionError("unreachable: only the limit cancels this scope and goes on")

    def _build(
        self, prepared: PreparedDataset, point: MountPoint, job: Job, placement: Placement, keeping: Keeping | None
    ) -> Node:
        settings = replace(self._settings, mountpoint=point.path)
        directory = None if self._directory is None else self._directory.path
        control = self._open_control(directory)
        config = describe(settings, prepared, job, directory, control)
        order_file = self._open_order_file(directory)
        native = settings.engine is not EngineChoice.PYTHON
        node = Node(
            prepared,
            job,
            placement,
            directory if settings.local is not None else None,
            NodeSettings(
                settings.cache_bytes,
                settings.verify,
                settings.peer_timeout_s,
                loaders=4 if native else PYTHON_LOADERS,
                # A shared file system that does not answer must not take all threads: names are served by the others.
                shared_readers=max(1, choose_workers() - RESERVED_WORKERS) if native else PYTHON_LOADERS,
            ),
            self._statistics,
            lambda: config | {"engine": self._engine_name()},
            self._reporting.events,
            None if order_file is None else {"order": order_file.path},
            keeping,
        )
        self._cleanup.callback(node.close)
        if settings.order != "off":
            self._make_prefetcher(prepared, node, job, point, order_file)
        if self._life is not None and self._directory is not None:
            outputs = self._life.build(node, job, self._directory, self._statistics)
            if settings.no_fuse:
                operations = OutputOperations(node.namespace, node.broker, node.control, self._statistics, outputs)
                self._unmounted = UnmountedOutputs(operations, outputs)
                self._cleanup.callback(self._unmounted.close)
        if settings.no_fuse:
            self._statistics.without_engine = "none"
        elif native:
            self._make_engine(prepared, node)
        self._bound = bound_cache(settings.cache_bytes, node.broker, self._statistics, alone=job.size == 1)
        self._interception = Interception(prepared, node, directory, self._statistics)
        node.serve()
        log.info("%s", node.summary())
        return node

    def _engine_name(self) -> str:
        if self._settings.no_fuse:
            return "none"
        return "python" if self._engine is None else "native"

    def _open_control(self, directory: Path | None) -> Path | None:
        """Make the control socket; without one, the mount is asked through its files only."""
        if directory is None:
            return None
        try:
            self._control = ControlServer(directory)
        except OSError as error:
            log.warning(
                "no control socket can be made in %s (%s): fanstore-stat and fanstore-umount do without it",
                directory,
                error.strerror or error,
            )
            return None
        self._cleanup.callback(self._control.close)
        self._statistics.add_section("control", self._control.describe)
        return self._control.path

    def _open_order_file(self, directory: Path | None) -> OrderFile | None:
        """Make the file to which programs write what they will read; without one, they cannot."""
        if directory is None or self._settings.order == "off":
            return None
        try:
            order_file = OrderFile(directory)
        except OSError as error:
            log.info("programs cannot write to .fanstore/order: %s: %s", directory, error.strerror or error)
            return None
        self._cleanup.callback(order_file.close)
        return order_file

    def _make_prefetcher(
        self, prepared: PreparedDataset, node: Node, job: Job, point: MountPoint, order_file: OrderFile | None
    ) -> None:
        self._begun = Begun()
        self._cleanup.callback(self._begun.close)
        points = {self._settings.mountpoint, point.path}
        arranging = None
        if self._settings.order == "locality":
            holders = node.placement.holders
            arranging = Arranging(np.asarray(prepared.index.partition), holders, job.training.nodes, size=job.size)
        self._prefetcher = Prefetcher(
            prepared.index,
            node.broker,
            sorted(points),
            order_file,
            lambda: self._interception.opens(),
            rank=job.rank,
            size=job.size,
            is_here=frozenset(node.placement.of_rank(job.rank)).__contains__,
            arranging=arranging,
        )
        self._statistics.add_section("order", self._prefetcher.describe)
        self._statistics.add_section("room", self._prefetcher.room.describe)

    def _make_engine(self, prepared: PreparedDataset, node: Node) -> None:
        outputs = None if self._life is None else self._life.outputs
        try:
            self._engine = NativeEngine(
                prepared.index,
                node.namespace,
                node.broker,
                self._statistics,
                outputs=outputs,
                alone=outputs is None or outputs.alone,
                waits=outputs is not None and outputs.waits,
                local=outputs is not None and outputs.local,
                begun=-1 if self._begun is None else self._begun.wake,
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
        if self._settings.no_fuse:
            return describe_unmounted(point, str(self._settings.prepared))
        parts = (node.namespace, node.broker, node.control, self._statistics)
        outputs = None if self._life is None else self._life.outputs
        operations: FanstoreOperations = ReadOnlyOperations(*parts)
        if outputs is not None:
            operations = OutputOperations(*parts, outputs)
            outputs.use_engine(self._engine or PythonEngine())
        operations.begun = self._begun
        if isinstance(operations, ReadOnlyOperations):
            operations.refusals = Refusals(point, functools.partial(self._forward_missing, False))
        options = MountOptions(str(self._settings.prepared), self._settings.allow_other, writable=outputs is not None)
        if self._engine is not None:
            try:
                mounted = mount_native(operations, self._engine, point, options)
                self._forward_missing(outputs is None)
                return mounted
            except OSError as error:
                self._stop_engine()
                self._without_engine(error)
                if outputs is not None:
                    outputs.use_engine(PythonEngine())
        return mount_kernel(operations, point, options)

    def _forward_missing(self, wanted: bool) -> None:
        if self._engine is not None:
            self._engine.forward_missing(wanted)

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
                nursery.start_soon(self._loop, node, ended)
                nursery.start_soon(self._bound.run)
                nursery.start_soon(self._reporting.run, node, job)
                nursery.start_soon(self._tell_alone, job)
                if self._control is not None:
                    end = functools.partial(self._take_away, mount, ended, trio.lowlevel.current_trio_token())
                    orders = {} if self._prefetcher is None else self._prefetcher.requests()
                    intercept = functools.partial(self._intercept, mount)
                    writes = {} if self._unmounted is None else self._unmounted.requests()
                    table = requests(node.control, end, self._interception, intercept, {**orders, **writes})
                    nursery.start_soon(self._control.run, table)
                if self._unmounted is not None:
                    nursery.start_soon(self._unmounted.run)
                if self._life is not None and self._life.outputs is not None:
                    nursery.start_soon(self._life.outputs.run)
                if self._prefetcher is not None and self._begun is not None:
                    self._begun.use(self._engine)
                    nursery.start_soon(self._prefetcher.run, self._settings.order, self._begun)
                try:
                    async with stopped_by(signals):
                        await self._come_up(mount, job)
                    point.release()
                    if mount.is_fanstore:
                        raise_kernel_limits(mount.device)
                        log.info("mounted %s on %s", self._settings.prepared, mount.point, extra=NOTABLE)
                    else:
                        log.info(
                            "serving %s at %s, without a mount", self._settings.prepared, mount.point, extra=NOTABLE
                        )
                    totals = prepared.manifest.totals
                    self._on_ready(MountInfo(point.path, totals.files, totals.bytes, node.summary(), job.rank))
                    self._watch.ready()
                    if self._engine is not None:
                        nursery.start_soon(self._engine.list_ahead, mount.point)
                        nursery.start_soon(self._engine.read_ahead, mount.point)
                    code = await self._use(mount, node, job, ended, signals)
                except BaseException:
                    await self._unmount(mount, ended, functools.partial(self._leave, 1, job))
                    raise
                await self._unmount(mount, ended, functools.partial(self._leave, code, job))
                code = self._reporting.code = await self._ending.end(job, signals, code)
                nursery.cancel_scope.cancel()
        finally:
            if mount.is_fanstore:
                pyfuse3.close(unmount=False)
            self._stop_engine()
            node.broker.log_damage()
            self._reporting.take_last_figures()
            self._log_summary()
        return code

    async def _come_up(self, mount: Mount, job: Job) -> None:
        """Until our mount answers, and those of all other nodes do."""
        problem = None
        try:
            path = mount.point / os.fsdecode(CONTROL_NAME) / CONFIG_FILE
            with trio.move_on_after(self._watch.limit_s) as scope:
                await (read_first(mount.point, path) if mount.is_fanstore else self._intercept(mount))
            self._watch.give_up(scope, f"the first answer of the mount at {mount.point}")
        except PreloadError as error:
            if job.size == 1:
                raise
            problem = str(error)
        except MountError as error:
            if job.size == 1:
                raise
            problem = str(error)
        await self._agree(job, "mounting", problem, {})

    async def _loop(self, node: Node, ended: _Ended) -> None:
        """Answer the kernel until the end; with what the broker asks of Python, because readers wait for that."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.broker.run)
                if self._engine is not None:
                    nursery.start_soon(self._engine.run)
                if self._settings.no_fuse:
                    await ended.wanted.wait()
                else:
                    with woken_regularly() if self._engine is None else contextlib.nullcontext():
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
        return code or (1 if ended.error is not None or self._supervised.is_orphan else 0)

    async def _intercept(self, mount: Mount) -> Path:
        settings = self._settings
        outputs = None if self._life is None else self._life.outputs
        return await self._interception.open(
            mount,
            settings.mountpoint,
            settings.verify,
            writable=outputs is not None,
            waits=outputs is not None and outputs.waits,
        )

    def _take_away(self, mount: Mount, ended: _Ended, token: trio.lowlevel.TrioToken, lazy: bool) -> None:
        """For a client. In a thread. Raises MountError."""
        if mount.is_fanstore:
            if is_mounted(mount):
                unmount(mount.point, lazy=True) if lazy else unmount_patiently(mount.point)
        elif self._settings.command and not lazy:
            raise MountBusyError(f"{mount.point} is busy: the COMMAND of its fanstore-mount runs")
        elif self._unmounted is not None and not lazy and (written := self._unmounted.written()):
            raise MountBusyError(f"{mount.point} is busy: programs have {written} outputs open for writing")
        else:
            self._interception.end()
            token.run_sync_soon(ended.wanted.set)

    async def _environment(self, mount: Mount, job: Job) -> Mapping[str, str]:
        """That of the command. Raises CommandError."""
        environment = {
            **os.environ,
            "FANSTORE_MOUNT": str(mount.point),
            "FANSTORE_RANK": str(job.rank),
            "FANSTORE_SIZE": str(job.size),
        }
        order = self._settings.order
        if order in HOOKED_MODES and self._control is not None:
            environment |= hook_environment(self._control.path, environment, arranges=order == "locality")
        elif order in HOOKED_MODES:
            log.warning("--order %s: without a control socket no program can report its order", order)
        if not self._settings.preload and not self._settings.no_fuse:
            return environment
        try:
            return environment | preloaded(await self._intercept(mount), environment)
        except PreloadError as error:
            raise CommandError(str(error), error.exit_code) from None

    def _argv(self, mount: Mount) -> Sequence[str]:
        """The command; what lies in a dataset without a mount is there for programs that are intercepted only."""
        command = self._settings.command
        points = {mount.point, self._settings.mountpoint}
        within = "/" in command[0] and not points.isdisjoint(Path(os.path.abspath(command[0])).parents)
        return ("env", *command) if within and not mount.is_fanstore else command

    async def _run_command(self, mount: Mount, job: Job, ended: _Ended, signals: Signals) -> int:
        try:
            environment = await self._environment(mount, job)
            code = await run_command(self._argv(mount), environment, signals)
        except CommandError as error:
            if job.size > 1:
                # Not at the end as usual: the others end with our exit code as soon as they know it, and the launcher
                # kills whoever has not said its last word when the first of them has ended.
                log.error("%s", error)
                error.told = True
                self._dataset_use.leave()
            await self._reporting.give_account(job, hurried=True)
            job.tell_done(error.exit_code)
            raise
        if ended.event.is_set() and ended.error is None:
            log.warning("%s was unmounted while the command was running", mount.point)
        await self._ending.drain(job, signals)
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
        if not self._supervised.is_orphan:
            job.end_all()
        await self._ending.drain(job, signals)
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

    async def _tell_alone(self, job: Job) -> None:
        await job.alone.wait()
        self._supervised.tell(alone=True)

    async def _unmount(self, mount: Mount, ended: _Ended, leave: Callable[[], Never]) -> None:
        """Take the mount away and let the requests under way end; ``leave`` if they do not."""
        with trio.CancelScope(shield=True):
            self._interception.end()
            if not mount.is_fanstore:
                ended.wanted.set()
                await ended.event.wait()
                return
            if self._engine is not None:
                await self._engine.end_helpers()
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

    def _leave(self, code: int, job: Job) -> Never:
        """End at once: threads hang in reads that never return, and an orderly end would wait for them for ever."""
        log.warning("reads that hang are left behind: %s does not answer", self._settings.prepared)
        code = self._reporting.code = self._ending.end_at_once(job, code)
        self._reporting.take_last_figures()
        self._cleanup.close()
        logging.shutdown()
        self._supervised.tell(ended=True)
        os._exit(code)

    def _log_summary(self) -> None:
        sources = self._statistics.totals().sources.items()
        served = ", ".join(f"{format_bytes(counters.bytes)} from {source}" for source, counters in sources)
        what = "end of" if self._settings.no_fuse else "unmounted"
        log.info("%s %s; served %s", what, self._settings.mountpoint, served)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """A reply that nobody waits for (its process was killed) fails with ENOENT, which pyfuse3 takes for an error."""
    return "No such file or directory" not in record.getMessage()
