"""Prepares a dataset from beginning to end, alone or as one of several ranks.

Rank 0 scans, plans and publishes; every rank packs its share of the partitions. A failure anywhere ends the work
everywhere, with one error on rank 0 and nothing left behind.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fanstore.errors import FanstoreError, OutputError, UsageError
from fanstore.format.codec_table import parse_compression
from fanstore.format.indexwriter import write_index
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE, Manifest
from fanstore.format.storage import is_address
from fanstore.paths import Role, Used, is_prepared, refuse_overlaps
from fanstore.prep.assemble import Assembled, PartitionName, assemble
from fanstore.prep.chooser import choose_codec
from fanstore.prep.inplace import checksum_tars, plan_in_place
from fanstore.prep.outdir import OutputDirectory, Sink
from fanstore.prep.outobjects import OutputObjects
from fanstore.prep.pack import Packed, Packing
from fanstore.prep.plan import Limits, PartitionPlan, has_content, make_plan
from fanstore.prep.scan import Scan, links_that_leave, scan
from fanstore.prep.sources import DirectorySource, Source, TarSource, looks_like_directory
from fanstore.prep.spool import compression_of, expand, spool
from fanstore.prep.table import Table
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


@dataclass(frozen=True)
class Outcome:
    """What was prepared. ``problems``: path and reason of every file that is not in the dataset."""

    manifest: Manifest
    skipped: int
    problems: list[tuple[bytes, str]]


@dataclass(frozen=True)
class _Work:
    """What rank 0 tells the others: everything needed to pack a share."""

    table: Table
    plans: list[PartitionPlan]
    sources: list[tuple[str, str, bool]]  #: path, label, is it a tar
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
            out = _output(request)
            stack.enter_context(out)
            sources, found, work = _plan(request, out, stack, note)
        except FanstoreError:
            ranks.broadcast(_NO_WORK)
            raise
        ranks.broadcast(work)
        assembled = _combine(work, sources, _pack_and_gather(work, sources, ranks, request.quiet))
        for source in sources:
            if isinstance(source, TarSource):
                source.check_unchanged()
        manifest = _write(out, assembled, work.codec, request.limits.shuffle)
        _remove_spools(sources, out)
        out.publish()
        return Outcome(manifest, found.skipped, found.problems + assembled.problems)


def _output(request: Request) -> Output:
    return (OutputObjects if is_address(request.out) else OutputDirectory)(request.out, request.force)


def _plan(
    request: Request, out: Output, stack: contextlib.ExitStack, note: Callable[[str], None]
) -> tuple[list[Source], Scan, _Work]:
    sources = _open_sources(request, out, stack, note)
    found = _scan(sources, request, note)
    if os.fsencode(out.path.name) in found.table.names.tobytes():  # a link has led there
        raise UsageError(f"the dataset '{out.final}' would lie inside a directory that is packed; put it elsewhere")
    codec = request.codec
    if codec == "auto":
        codec, reason = choose_codec(found.table, sources)
        note(f"codec auto: {codec}, because {reason}")
    plans = plan_in_place(found.table, sources) if request.index_only else make_plan(found.table, request.limits)
    specs = [
        (source.path if isinstance(source, TarSource) else source.label, source.label, source.is_tar)
        for source in sources
    ]
    work = _Work(found.table, plans, specs, request.dereference, codec, request.jobs, out.sink, request.index_only)
    return sources, found, work


def _refuse_senseless(request: Request) -> None:
    """Refuse paths that get in each other's way, and a source that is prepared already."""
    if request.index_only and is_address(request.out):
        raise UsageError(
            "--index-only leaves the tar files where they are, so that OUT must be a directory beside them"
        )
    sources = [Path(source) for source in request.sources if not is_address(source)]
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
) -> list[Source]:
    sources: list[Source] = []
    for number, path in enumerate(expand(request.sources)):
        source: Source
        if not is_address(path) and looks_like_directory(path):
            if request.index_only:
                raise UsageError(f"--index-only takes tar files, and '{path}' is a directory; leave the option out")
            source = DirectorySource(path, request.dereference)
        else:
            source = _open_tar(request, path, number, out, note)
        stack.callback(source.close)
        sources.append(source)
        if isinstance(source, TarSource):
            with Progress.counting("reading", "members", quiet=request.quiet) as progress:
                source.read_members(number, progress.set_count)
    return sources


def _open_tar(request: Request, path: str, number: int, out: Output, note: Callable[[str], None]) -> TarSource:
    if is_address(path):
        if request.index_only:
            raise UsageError(f"--index-only takes tar files of this machine, and '{path}' is an address")
        what = "fetching"
        note(f"fetching '{path}' to a temporary file in '{out.path.parent}'")
    else:
        compression = compression_of(path)
        if compression is None:
            return TarSource(os.path.abspath(path), path)
        if request.index_only:
            raise UsageError(f"--index-only needs plain tar files, and '{path}' is compressed with {compression}")
        what = "unpacking"
        note(f"unpacking '{path}' ({compression}) to a temporary file beside the dataset")
    plain = out.path / f"spool-{number:05d}.tar"
    with Progress.counting(what, "bytes", quiet=request.quiet) as progress:
        spool(path, plain, progress.set_count)
    return TarSource(os.fspath(plain), path)


def _remove_spools(sources: Sequence[Source], out: Output) -> None:
    for source in sources:
        if isinstance(source, TarSource) and Path(source.path).parent == out.path:
            os.unlink(source.path)


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
            for path, label, is_tar in work.sources:
                source: Source = TarSource(path, label) if is_tar else DirectorySource(path, work.dereference)
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
    total_files = int(has_content(work.table).sum())
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


def _combine(work: _Work, sources: Sequence[Source], shares: list[_Share]) -> Assembled:
    errors = [share.error for share in shares if share.error]
    if errors:
        raise OutputError(errors[0])
    if work.index_only:
        names = [
            PartitionName(source.path, True, source.entries) for source in sources if isinstance(source, TarSource)
        ]
    else:
        names = [PartitionName(work.sink.name(number), False, None) for number in range(len(work.plans))]
    return assemble(work.table, work.plans, names, [share.packed for share in shares if share.packed is not None])


def _write(out: Output, assembled: Assembled, codec: str, shuffle: int | None) -> Manifest:
    try:
        with open(out.path / INDEX_FILE, "xb") as file:
            length, checksum = write_index(file, assembled.columns)
            file.flush()
            os.fsync(file.fileno())
        manifest = Manifest(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            codec=codec,
            index_bytes=length,
            index_checksum=checksum,
            totals=assembled.totals,
            partitions=assembled.partitions,
            shuffle=shuffle,
        )
        with open(out.path / MANIFEST_FILE, "x", encoding="utf-8") as text:
            text.write(manifest.dumps())
            text.flush()
            os.fsync(text.fileno())
    except OSError as error:
        raise OutputError(f"cannot write the dataset: {error.strerror}; nothing was left behind") from error
    return manifest
