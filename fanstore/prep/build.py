"""Prepares a dataset from beginning to end, alone or as one of several ranks.

Rank 0 scans, plans and publishes; every rank packs its share of the partitions. A failure anywhere ends the work
everywhere, with one error on rank 0 and nothing left behind, but for finished partitions of a run that was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fanstore.errors import FanstoreError, OutputError, SourceError, UsageError
from fanstore.format.codec import NONE
from fanstore.format.codec_table import parse_compression
from fanstore.format.indexwriter import write_index
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE, Manifest, Origin, SourceInfo
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import is_address
from fanstore.paths import Role, Used, is_prepared, refuse_overlaps
from fanstore.prep.assemble import Assembled, Kept, PartitionName, assemble
from fanstore.prep.chooser import choose_codec
from fanstore.prep.inplace import checksum_tars, plan_in_place
from fanstore.prep.journal import finished_in, key_of
from fanstore.prep.outdir import OutputDirectory, Sink
from fanstore.prep.outobjects import OutputObjects
from fanstore.prep.outupdate import UpdatedDirectory
from fanstore.prep.pack import Packed, Packing
from fanstore.prep.plan import Limits, PartitionPlan, has_content, make_plan
from fanstore.prep.room import estimate, free_bytes, refuse_too_little
from fanstore.prep.scan import Scan, links_that_leave, scan
from fanstore.prep.selection import Selection, select
from fanstore.prep.sources import (
    DirectorySource,
    Given,
    Source,
    TarSource,
    in_own_folder,
    looks_like_directory,
    read_name,
)
from fanstore.prep.spool import compression_of, expand, spool
from fanstore.prep.table import Table
from fanstore.prep.update import Changes, compare, unchanged_sources
from fanstore.progress import Progress
from fanstore.transport.ranks import Ranks
from fanstore.units import format_count, format_path

#: Told to the other ranks instead of work when rank 0 could not even begin.
_NO_WORK = "no work"
#: An abort kills all ranks at once; rank 0 needs a moment to remove what was written.
_ABORT_DELAY_S = 5.0
#: Exit code of ranks that are ended because another one was interrupted.
EXIT_ABORTED = 130


#: A directory, or objects: contexts with the same attributes.
Output = OutputDirectory | OutputObjects


@dataclass(frozen=True)
class Request:
    """What to prepare."""

    sources: Sequence[str]
    out: str
    limits: Limits
    codec: str  #: as in codec_table.py, or auto
    jobs: int
    index_only: bool = False
    dereference: bool = False  #: pack what symbolic links of directories point to
    force: bool = False
    force_pack: bool = False  #: also a source that is a prepared dataset
    quiet: bool = False
    selection: Selection = field(default_factory=Selection)
    shard_folders: bool = False  #: each tar file in a folder of its own
    update: bool = False  #: write only what has changed, if OUT is there
    repack: bool = False  #: with update: write all of it
    stated: frozenset[str] = frozenset()  #: options that the user has given, by name


@dataclass(frozen=True)
class Outcome:
    """What was prepared. ``problems``: path and reason of every file that is not in the dataset."""

    manifest: Manifest
    skipped: int
    problems: list[tuple[bytes, str]]
    recalled: tuple[int, int] = (0, 0)  #: partitions that an interrupted run had finished, and their bytes
    changes: Changes | None = None  #: of an update


@dataclass(frozen=True)
class _Work:
    """What rank 0 tells the others: everything needed to pack a share."""

    table: Table
    plans: list[PartitionPlan]
    sources: list[tuple[str, str, bool, bytes]]  #: path, label, is it a tar, prefix
    dereference: bool
    codec: str
    jobs: int
    sink: Sink
    index_only: bool


@dataclass
class _Share:
    """What one rank has done, or why it could not."""

    packed: Packed | None
    error: str | None


@dataclass
class _Counter:
    """Bytes and files done by this rank's threads, not yet shown."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    bytes: int = 0
    files: int = 0

    def add(self, done_bytes: int, done_files: int) -> None:
        with self.lock:
            self.bytes += done_bytes
            self.files += done_files

    def take(self) -> tuple[int, int]:
        with self.lock:
            taken = self.bytes, self.files
            self.bytes = self.files = 0
            return taken


def prepare(request: Request, ranks: Ranks, note: Callable[[str], None]) -> Outcome | None:
    """Prepare a dataset; ``note`` gets sentences for the user. Returns None on ranks other than 0."""
    try:
        if ranks.rank != 0:
            _help(ranks)
            return None
        return _lead(request, ranks, note)
    except FanstoreError:
        raise
    except BaseException as error:
        # Interrupted, or a bug: the others may be anywhere and must not wait for this rank. Rank 0 has removed what was
        # written when it comes here; the others give it the time for that.
        interrupted = isinstance(error, KeyboardInterrupt)
        if ranks.size > 1:  # nobody else will say it: an abort ends this process at once
            if interrupted:
                note(f"interrupted by {error} (rank {ranks.rank} on {os.uname().nodename})")
            else:
                traceback.print_exc()
        if ranks.rank != 0:
            time.sleep(_ABORT_DELAY_S)
        ranks.abort(EXIT_ABORTED if interrupted else 1)
        raise


def _lead(request: Request, ranks: Ranks, note: Callable[[str], None]) -> Outcome:
    """What rank 0 does."""
    with contextlib.ExitStack() as stack:
        try:
            _refuse_senseless(request)
            out = _output(request, note)
            stack.enter_context(out)
            request = _settle(request, out)
            plan = _plan(request, out, stack, note)
        except FanstoreError:
            ranks.broadcast(_NO_WORK)
            raise
        if plan.changes is not None and plan.changes.nothing:
            assert isinstance(out, UpdatedDirectory)
            ranks.broadcast(_NO_WORK)
            return Outcome(out.old.manifest, plan.found.skipped, plan.found.problems, changes=plan.changes)
        ranks.broadcast(plan.work)
        shares = _pack_and_gather(plan.work, plan.sources, ranks, request.quiet)
        assembled = _combine(plan, shares)
        for source in plan.sources:
            if isinstance(source, TarSource):
                source.check_unchanged()
        manifest = _write(request, out, plan, assembled)
        _remove_rest(out, manifest)
        out.publish()
        recalled = [number for share in shares if share.packed is not None for number in share.packed.recalled]
        recalled_bytes = sum(manifest.partitions[plan.work.sink.first + number].bytes for number in recalled)
        problems = plan.found.problems + assembled.problems
        return Outcome(manifest, plan.found.skipped, problems, (len(recalled), recalled_bytes), plan.changes)


def _output(request: Request, note: Callable[[str], None]) -> Output:
    if is_address(request.out):
        if request.update:
            raise UsageError("--update works on a dataset in a directory, and OUT is an address; use --force")
        return OutputObjects(request.out, request.force)
    if request.update and os.path.lexists(request.out):
        if not request.repack:
            return UpdatedDirectory(request.out, note)
        return OutputDirectory(request.out, True, note)
    return OutputDirectory(request.out, request.force, note)


def _settle(request: Request, out: Output) -> Request:
    """What an update takes from the dataset: all options that decide what is in it. Raises UsageError."""
    if not request.update or isinstance(out, OutputObjects) or not os.path.lexists(out.final):
        return request
    old = PreparedDataset.open(out.final).manifest
    if old.origin is None:
        raise UsageError(
            f"'{out.final}' was prepared by an earlier version, which has not noted from what; prepare it anew with "
            "--force instead of --update"
        )
    if any(part.external for part in old.partitions):
        raise UsageError(
            f"'{out.final}' was prepared with --index-only, which copies nothing; use --force instead of --update"
        )
    chosen = Selection(old.origin.include, old.origin.exclude, old.origin.sample, old.shuffle or 0)
    limits, selection = request.limits, request.selection
    options = (
        ("--codec", old.codec if request.codec == "auto" else request.codec, old.codec),
        ("--shuffle", limits.shuffle, old.shuffle),
        ("--everywhere", tuple(limits.everywhere), old.origin.everywhere),
        ("--include", tuple(selection.include), old.origin.include),
        ("--exclude", tuple(selection.exclude), old.origin.exclude),
        ("--sample", selection.sample, old.origin.sample),
        ("--dereference", request.dereference, old.origin.dereference),
    )
    for name, value, before in options:
        if name in request.stated and value != before:
            without = "without it" if before in (None, (), False) else f"with {_shown_option(name, before)}"
            raise UsageError(
                f"'{out.final}' was prepared {without}, and --update keeps that: leave {name} out, or prepare it anew "
                "with --force"
            )
    size = limits.partition_bytes if "--partition-size" in request.stated else old.origin.partition_bytes
    limits = Limits(size, None, old.origin.everywhere, old.shuffle)
    return replace(request, codec=old.codec, limits=limits, selection=chosen, dereference=old.origin.dereference)


def _shown_option(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{name} '{one}'" for one in value)
    return name if value is True else f"{name} {value}"


@dataclass(frozen=True)
class _Plan:
    """What rank 0 knows before the packing begins."""

    sources: list[Source]
    infos: list[SourceInfo]
    found: Scan
    left_out: int  #: files
    work: _Work
    changes: Changes | None


def _plan(request: Request, out: Output, stack: contextlib.ExitStack, note: Callable[[str], None]) -> _Plan:
    sources, infos = _open_sources(request, out, stack, note)
    known = _known_sources(out, infos)
    found, left_out = _select(_scan(sources, request, note), request.selection, note)
    if os.fsencode(out.path.name) in found.table.names.tobytes():  # a link has led there
        raise UsageError(f"the dataset '{out.final}' would lie inside a directory that is packed; put it elsewhere")
    codec = request.codec
    if codec == "auto":
        codec, reason = choose_codec(found.table, sources)
        note(f"codec auto: {codec}, because {reason}")
    changes = compare(out.old, found.table, known) if isinstance(out, UpdatedDirectory) else None
    if request.index_only:
        plans = plan_in_place(found.table, sources)
    else:
        plans = make_plan(found.table, request.limits, changes.wanted if changes is not None else None)
        if changes is None or not changes.nothing:
            _look_for_room(found.table, sources, plans, out, codec, note)
    before = out.old.manifest.index_checksum if isinstance(out, UpdatedDirectory) else None
    # Of an address nothing else tells that there is something else of the same lengths and times now.
    spooled = [source.spooled for source in sources if isinstance(source, TarSource)]
    out.sink.key = key_of(found.table, plans, infos, [codec, before, spooled])
    specs = [
        (source.path if isinstance(source, TarSource) else source.label, source.label, source.is_tar, source.prefix)
        for source in sources
    ]
    work = _Work(found.table, plans, specs, request.dereference, codec, request.jobs, out.sink, request.index_only)
    return _Plan(sources, infos, found, left_out, work, changes)


def _known_sources(out: Output, infos: Sequence[SourceInfo]) -> list[bool]:
    """Of an update: which sources the dataset was made from, and are as they were. Raises UsageError."""
    if not isinstance(out, UpdatedDirectory):
        return []
    origin = out.old.manifest.origin
    assert origin is not None
    named = {(source.path, source.prefix) for source in infos}
    for source in origin.sources:  # a tar file that was removed goes with all that it had
        if (source.path, source.prefix) not in named and (is_address(source.path) or os.path.lexists(source.path)):
            shown = f"{source.prefix}={source.path}" if source.prefix else source.path
            raise UsageError(
                f"'{out.final}' was made from '{shown}', which is not named now: an update needs all sources that "
                "are still there"
            )
    return unchanged_sources(origin.sources, infos)


def _select(found: Scan, chosen: Selection, note: Callable[[str], None]) -> tuple[Scan, int]:
    """What the user wants of what was found, and how many files that leaves out."""
    if not chosen:
        return found, 0
    table = select(found.table, chosen, note)
    left_out = int(has_content(found.table).sum()) - int(has_content(table).sum())
    note(f"{format_count(left_out, 'file')} of them left out")
    if len(table) == 1:
        note("warning: nothing is left to pack")
    return Scan(table, found.skipped, [(path, why) for path, why in found.problems if chosen.takes(path)]), left_out


def _look_for_room(
    table: Table,
    sources: Sequence[Source],
    plans: Sequence[PartitionPlan],
    out: Output,
    codec: str,
    note: Callable[[str], None],
) -> None:
    """Say how much will be written, and refuse what cannot fit."""
    room = estimate(table, sources, plans)
    compressed = codec != NONE.name
    if isinstance(out, OutputObjects):
        note(room.sentence(None, compressed))
        return
    free = free_bytes(out.path)
    note(room.sentence(free, compressed))
    if not compressed:  # what shrinks may fit
        taken = sum(partition.stat().st_blocks * 512 for partition in finished_in(out.path))
        refuse_too_little(room, free, taken, out.final)


def _refuse_senseless(request: Request) -> None:
    """Refuse paths that get in each other's way, and a source that is prepared already."""
    if request.index_only and is_address(request.out):
        raise UsageError(
            "--index-only leaves the tar files where they are, so that OUT must be a directory beside them"
        )
    named = [read_name(source).path for source in request.sources]
    sources = [Path(source) for source in named if not is_address(source)]
    out = [] if is_address(request.out) else [Used(Role.OUT, Path(request.out))]
    refuse_overlaps([*out, *(Used(Role.SOURCE, source) for source in sources)])
    for source in sources:
        if is_prepared(source) and not request.force_pack:
            raise UsageError(
                f"'{source}' is a prepared dataset already: mount it with 'fanstore-mount {source} MOUNTPOINT'; to "
                "pack its tar files into another dataset as they are, use --force-pack"
            )


def _open_sources(
    request: Request, out: Output, stack: contextlib.ExitStack, note: Callable[[str], None]
) -> tuple[list[Source], list[SourceInfo]]:
    sources: list[Source] = []
    infos: list[SourceInfo] = []
    expanded = (given._replace(path=path) for given in map(read_name, request.sources) for path in expand([given.path]))
    for number, given in enumerate(expanded):
        source: Source
        path = given.path
        status: os.stat_result | None = None
        if not is_address(path) and looks_like_directory(path):
            if request.index_only:
                raise UsageError(f"--index-only takes tar files, and '{path}' is a directory; leave the option out")
            source = DirectorySource(path, request.dereference, given.prefix)
        else:
            # Looked at before it is read: what is put in its place meanwhile is seen by the next update.
            status = None if is_address(path) else _status(path)
            folder = in_own_folder(given) if request.shard_folders else given
            source = _open_tar(request, folder, status, number, out, note)
        stack.callback(source.close)
        sources.append(source)
        infos.append(_source_info(path, source, status))
        if isinstance(source, TarSource):
            with Progress.counting("reading", "members", quiet=request.quiet) as progress:
                source.read_members(number, progress.set_count)
    return sources, infos


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise SourceError(f"cannot read the source '{path}': {error.strerror}") from error


def _source_info(path: str, source: Source, status: os.stat_result | None) -> SourceInfo:
    """What the manifest says of a source; ``status``: of a tar or zip file of this machine."""
    prefix = os.fsdecode(source.prefix)
    if status is None:
        return SourceInfo(path if is_address(path) else os.path.abspath(path), prefix, None, None)
    return SourceInfo(os.path.abspath(path), prefix, status.st_size, status.st_mtime_ns)


def _open_tar(
    request: Request,
    given: Given,
    status: os.stat_result | None,
    number: int,
    out: Output,
    note: Callable[[str], None],
) -> TarSource:
    """``status``: None of an address."""
    path = given.path
    if is_address(path):
        if request.index_only:
            raise UsageError(f"--index-only takes tar files of this machine, and '{path}' is an address")
        what = "fetching"
        note(f"fetching '{path}' to a temporary file in '{out.path.parent}'")
    else:
        compression = compression_of(path)
        if compression is None:
            return TarSource(os.path.abspath(path), path, given.prefix)
        if request.index_only:
            raise UsageError(f"--index-only needs plain tar files, and '{path}' is compressed with {compression}")
        what = "unpacking"
        note(f"unpacking '{path}' ({compression}) to a temporary file beside the dataset")
    plain = out.path / f"spool-{number:05d}.tar"
    with Progress.counting(what, "bytes", quiet=request.quiet) as progress:
        spooled = spool(path, plain, progress.set_count)
    if status is not None:  # directories that are not named in it get its time
        os.utime(plain, ns=(status.st_atime_ns, status.st_mtime_ns))
    return TarSource(os.fspath(plain), path, given.prefix, spooled)


def _remove_rest(out: Output, manifest: Manifest) -> None:
    """What was unpacked for a while, and partitions of an earlier run that this one does not have."""
    known = {INDEX_FILE, MANIFEST_FILE} | {part.file for part in manifest.partitions}
    for path in out.path.iterdir():
        if path.name not in known:
            path.unlink()


def _scan(sources: Sequence[Source], request: Request, note: Callable[[str], None]) -> Scan:
    with Progress.counting("scanning", "entries", quiet=request.quiet) as progress:
        found = scan(sources, progress.set_count, request.jobs)
    for source in sources:
        source.forget_names()
    files = int(has_content(found.table).sum())
    if len(found.table) == 1 and not found.problems:
        note("warning: the sources are empty")
    note(f"found {files:,} files in {len(found.table):,} entries")
    if leaving := links_that_leave(found.table):
        first = leaving[0]
        example = f"{format_path(found.table.path(first))} to {format_path(found.table.link_target(first))}"
        note(
            f"warning: {format_count(len(leaving), 'symbolic link')} out of the source will lead nowhere in the mount, "
            f"or to something else, such as {example}; --dereference packs what links in directories point to"
        )
    return found


def _help(ranks: Ranks) -> None:
    """What ranks other than 0 do."""
    work: _Work | str = ranks.broadcast(None)
    if isinstance(work, str):
        return
    with contextlib.ExitStack() as stack:
        stack.callback(work.sink.close)
        sources: list[Source] = []
        try:
            for path, label, is_tar, prefix in work.sources:
                source: Source = (
                    TarSource(path, label, prefix) if is_tar else DirectorySource(path, work.dereference, prefix)
                )
                stack.callback(source.close)
                sources.append(source)
        except FanstoreError as error:
            ranks.stop_others()
            ranks.gather(_failed_share(error, ranks))
            return
        _pack_and_gather(work, sources, ranks, quiet=True)


def _own_plans(work: _Work, ranks: Ranks) -> dict[int, PartitionPlan]:
    """This rank's partitions: the largest first, each to the rank with the least so far. All ranks compute the same."""
    loads = [0] * ranks.size
    mine: list[int] = []
    for number in sorted(range(len(work.plans)), key=lambda n: (-work.plans[n].content_bytes, n)):
        rank = loads.index(min(loads))
        loads[rank] += work.plans[number].content_bytes + 1
        if rank == ranks.rank:
            mine.append(number)
    return {number: work.plans[number] for number in sorted(mine)}


class _StopRequested(Exception):
    """Another rank has failed."""


def _pack_and_gather(work: _Work, sources: Sequence[Source], ranks: Ranks, quiet: bool) -> list[_Share]:
    """Pack this rank's share while showing (rank 0) or reporting (others) progress; all shares on rank 0."""
    counter = _Counter()
    total_bytes = sum(plan.content_bytes for plan in work.plans)
    content = has_content(work.table)
    total_files = sum(int(content[plan.order].sum()) for plan in work.plans)
    title = "indexing" if work.index_only else "packing"
    with Progress(title, total_bytes, total_files, quiet=quiet) as progress:

        def tick() -> None:
            done = counter.take()
            if ranks.rank == 0:
                others = ranks.collect_reports()
                progress.add(done[0] + others[0], done[1] + others[1])
            elif any(done):
                ranks.report(*done)
            if ranks.stop_requested():
                raise _StopRequested

        share = _Share(None, None)
        try:
            share.packed = _pack(work, sources, ranks, counter.add, tick)
        except _StopRequested:
            share.error = ""
        except FanstoreError as error:
            share = _failed_share(error, ranks)
            ranks.stop_others()
    return ranks.gather(share)


def _failed_share(error: FanstoreError, ranks: Ranks) -> _Share:
    where = f" (rank {ranks.rank} on {os.uname().nodename})" if ranks.size > 1 else ""
    return _Share(None, f"{error}{where}")


def _pack(
    work: _Work, sources: Sequence[Source], ranks: Ranks, report: Callable[[int, int], None], tick: Callable[[], None]
) -> Packed:
    plans = _own_plans(work, ranks)
    if work.index_only:
        return checksum_tars(work.table, sources, plans, work.jobs, report, tick)
    compression = parse_compression(work.codec)
    return Packing(work.table, sources, plans, work.sink, compression, work.jobs, report).run(tick)


def _combine(plan: _Plan, shares: list[_Share]) -> Assembled:
    work = plan.work
    errors = [share.error for share in shares if share.error]
    if errors:
        raise OutputError(errors[0])
    if work.index_only:
        names = [
            PartitionName(source.path, True, source.entries) for source in plan.sources if isinstance(source, TarSource)
        ]
    else:
        names = [PartitionName(work.sink.name(number), False, None) for number in range(len(work.plans))]
    kept = plan.changes.kept if plan.changes is not None else Kept()
    packed = [share.packed for share in shares if share.packed is not None]
    return assemble(work.table, work.plans, names, packed, kept)


def _origin(request: Request, plan: _Plan) -> Origin:
    chosen = request.selection
    return Origin(
        sources=tuple(plan.infos),
        partition_bytes=request.limits.partition_bytes,
        everywhere=tuple(request.limits.everywhere),
        include=tuple(chosen.include),
        exclude=tuple(chosen.exclude),
        sample=chosen.sample,
        left_out=plan.left_out,
        dereference=request.dereference,
    )


def _write(request: Request, out: Output, plan: _Plan, assembled: Assembled) -> Manifest:
    changes = plan.changes
    try:
        with open(out.path / INDEX_FILE, "xb") as file:
            length, checksum = write_index(file, assembled.columns)
            file.flush()
            os.fsync(file.fileno())
        manifest = Manifest(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            codec=plan.work.codec,
            index_bytes=length,
            index_checksum=checksum,
            totals=assembled.totals,
            partitions=assembled.partitions,
            shuffle=request.limits.shuffle,
            index_file=out.index_file if isinstance(out, UpdatedDirectory) else INDEX_FILE,
            origin=_origin(request, plan),
            garbage=changes.garbage_after(plan.found.table, assembled.codec_of) if changes is not None else None,
        )
        with open(out.path / MANIFEST_FILE, "x", encoding="utf-8") as text:
            text.write(manifest.dumps())
            text.flush()
            os.fsync(text.fileno())
    except OSError as error:
        raise OutputError(f"cannot write the dataset: {error.strerror}; nothing was left behind") from error
    return manifest
