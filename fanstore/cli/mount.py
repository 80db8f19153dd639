"""fanstore-mount: options, the log, foreground or background; everything else is in fuse/session.py."""

import argparse
import contextlib
import faulthandler
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Never, TextIO

from fanstore.cli.common import make_parser, parse, run
from fanstore.cli.daemon import default_log, detach_streams, in_background
from fanstore.cli.launch import READY_LINE, VARIABLE, launch
from fanstore.cli.parent import end_with_input
from fanstore.errors import FanstoreError, UsageError
from fanstore.format.storage import storage_at
from fanstore.fuse.startwatch import StartWatch
from fanstore.fuse.success import STANDARD_OUTPUT, take_back
from fanstore.fuse.supervised import Supervised
from fanstore.paths import Role, Used, refuse_overlaps
from fanstore.prefetch.specification import parse_order
from fanstore.report.planned import read_plan
from fanstore.transport.ranks import launched_rank, launched_size
from fanstore.units import format_bytes, parse_size

if TYPE_CHECKING:
    from fanstore.fuse.session import MountInfo
    from fanstore.fuse.settings import MountSettings
    from fanstore.fuse.writing import Writing

PROG = "fanstore-mount"

log = logging.getLogger(__name__)

_DESCRIPTION = """\
Mount a prepared dataset (see fanstore-prep) as an ordinary, read-only directory.

Without a COMMAND the mount stays until Ctrl-C, SIGTERM or fanstore-umount. With one, the COMMAND runs as soon as the
mount is up, its exit code becomes ours, and the mount and all local files are gone when it has ended."""

_EPILOG = """\
examples:
  run a training script on a dataset, with the bytes copied to the node's SSD first:
    fanstore-mount /shared/imagenet.fan /tmp/imagenet --local /local/ssd -- python train.py --data /tmp/imagenet
  mount for an interactive session, look around, see what was served, unmount:
    fanstore-mount /shared/imagenet.fan /tmp/imagenet --background
    ls /tmp/imagenet; fanstore-stat /tmp/imagenet; fanstore-umount /tmp/imagenet
  one mount point for each host:
    fanstore-mount /shared/imagenet.fan '/tmp/{host}/imagenet' -- ./job.sh
  on all nodes of a job, the bytes spread over their SSDs, each on two of them so that one may be lost:
    mpirun --with-ft ulfm --map-by ppr:1:node --bind-to none \\
        fanstore-mount /shared/imagenet.fan /tmp/imagenet --local /local/ssd --replicas 2 -- ./train.sh
  the same, mounted first and used by something else; unmounting on one node ends it on all:
    fanstore-mount /shared/imagenet.fan /tmp/imagenet --local /local/ssd --replicas 2 --background \\
        --launch 'mpirun --with-ft ulfm --map-by ppr:1:node --bind-to none'
    srun ./train.sh; fanstore-umount /tmp/imagenet
  a page about the job when it has ended, and figures for Prometheus while it runs:
    fanstore-mount /shared/imagenet.fan /tmp/imagenet --local /local/ssd --report /shared/run42/report.html \\
        --metrics /var/lib/prometheus/node-exporter/fanstore.prom -- ./train.sh
  from an object store, each byte once, to the SSDs of all nodes (docs/object-stores.md):
    mpirun --map-by ppr:1:node fanstore-mount s3://data/imagenet.fan /tmp/imagenet --local /local/ssd \\
        --stage-first -- ./train.sh
  the same dataset in many jobs: the first one copies it to the nodes' disks, the others find it there:
    fanstore-mount /shared/imagenet.fan /tmp/imagenet --local /local/ssd --keep-local -- ./train.sh
  try it with three ranks on one machine:
    mpirun -n 3 --oversubscribe fanstore-mount data.fan '/tmp/m{rank}' --local '/tmp/ssd{rank}' -- ./train.sh

MOUNTPOINT must be an empty directory, or a new name in an existing one: then it is created, and removed at the end.
What an earlier, killed fanstore-mount left behind (a dead mount, local files) is cleaned up.

The COMMAND finds FANSTORE_MOUNT, FANSTORE_RANK and FANSTORE_SIZE in its environment. SIGINT, SIGTERM and SIGHUP are
passed on to it, and a second one, or ten seconds, kills it; SIGUSR1 is passed on as often as it comes. SIGURG, which
mpirun passes on, too, gives it SIGTERM and all the time that it needs. On several nodes it runs once on each when all
mounts are up.
Without --bind-to none, Open MPI gives it a single core.

exit codes: that of the COMMAND (128 + N if signal N ended it, 127 not found, 126 cannot be run); otherwise
  0 unmounted, 1 error, 2 wrong usage, 128 + N stopped by signal N while starting.

If a mount seems to hang: kill -USR2 PROCESS writes the stacks of all its threads to its log (to standard error in the
foreground); the process number is in MOUNTPOINT/.fanstore/config.json."""


def main(supervisor: int = -1) -> Never:
    """The command, in the process of the daemon; ``supervisor``: the pipe to who waits for it (cli/supervisor.py)."""
    try:
        code = run(PROG, lambda: _main(sys.argv[1:], supervisor))
    except SystemExit:  # --help, --version: argparse has said all
        Supervised(supervisor).tell(ended=True)
        raise
    # Everything that must be done has been done. An ordinary exit would wait for threads that copy partitions, and if
    # the file server is dead, they never end.
    logging.shutdown()
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stdout.flush()
        sys.stderr.flush()
    Supervised(supervisor).tell(ended=True)
    os._exit(code)


def _main(argv: Sequence[str], supervisor: int = -1) -> int:
    own, command = _split(argv)
    _refuse_bare_command(own, command)
    args = parse(_parser(), own)
    if args.recover:
        return _recover(args)
    if args.prepared is None or args.mountpoint is None:
        raise UsageError("which dataset, and where? fanstore-mount PREPARED MOUNTPOINT")
    _refuse_senseless(args)
    if args.background and command:
        raise UsageError("--background returns at once, so it cannot run a COMMAND: leave out one of them")
    if args.until_eof and command:
        raise UsageError("with a COMMAND the mount ends with it: leave out --until-eof")
    log_file = Path(os.getcwd(), _fill_in(args.log)) if args.log is not None else None
    if (args.background or args.until_eof) and log_file is None:
        log_file = default_log(_host())
    if args.preload and not command:
        raise UsageError(
            "--preload is for a COMMAND, and there is none; mount without it, and run programs with "
            "fanstore-run MOUNTPOINT -- COMMAND"
        )
    if args.no_fuse:
        _refuse_without_fuse(args, command)
    request = _Request(args, tuple(command), log_file)
    if launched_rank() == 0:
        for proof in request.success():
            take_back(proof)
    if args.launch is not None:
        if log_file is not None:
            _open_log(log_file, request.mountpoint).close()
        if args.until_eof and log_file is not None:
            end_with_input(log_file)
        return launch(args.launch, _without_launch(argv), log_file if args.background else None)
    if log_file is not None and args.background:
        return in_background(lambda pipe: _serve(request, pipe, -1), log_file)
    if args.until_eof and log_file is not None:
        end_with_input(log_file)
    return _serve(request, -1, supervisor)


class _Request:
    """What was asked for, before anything heavy is imported (see ``settings``).

    Attributes:
        args: the parsed options; command: the COMMAND, perhaps empty; log_file: the log, None for standard error.
        directory: the working directory, which a daemon leaves. mountpoint: where, absolute. prepared: the dataset.
    """

    def __init__(self, args: argparse.Namespace, command: tuple[str, ...], log_file: Path | None) -> None:
        self.args = args
        self.command = command
        self.log_file = log_file
        self.directory = os.getcwd()
        self.mountpoint = Path(self.directory, _fill_in(args.mountpoint))
        self.prepared = storage_at(args.prepared)
        self.cache_bytes = parse_size(args.cache)
        self.order = parse_order(_fill_in(args.order), self.directory)
        self.plan = None if args.plan is None else read_plan(Path(self.directory, args.plan))
        self.capacity_bytes = None if args.capacity is None else parse_size(args.capacity)

    @property
    def tells(self) -> bool:
        """Whether there is a line before COMMAND and one after it."""
        return bool(self.command) and not self.args.quiet

    def _writing(self) -> "Writing | None":
        from fanstore.fuse.writing import Writing

        if self.args.output is not None:
            return Writing(Path(self.directory, self.args.output), durable=self.args.fsync == "output")
        return Writing(None) if self.args.scratch else None

    def settings(self, problem: UsageError | None) -> "MountSettings":
        from fanstore.dataset.sources import Verify
        from fanstore.fuse.reporting import Publishing
        from fanstore.fuse.settings import EngineChoice, MountSettings

        return MountSettings(
            prepared=self.prepared,
            mountpoint=self.mountpoint,
            local=None if self.args.local is None else Path(self.directory, _fill_in(self.args.local)),
            capacity_bytes=self.capacity_bytes,
            replicas=self.args.replicas,
            stage_first=self.args.stage_first,
            peer_timeout_s=self.args.peer_timeout,
            cache_bytes=self.cache_bytes,
            verify=Verify(self.args.verify),
            allow_other=self.args.allow_other,
            engine=EngineChoice(self.args.engine),
            writing=self._writing(),
            command=self.command,
            log_file=self.log_file,
            publishing=Publishing(
                self._file(self.args.report), self._file(self.args.metrics), self.plan, summary=self.tells
            ),
            success=self.success(),
            order=self.order,
            preload=self.args.preload,
            no_fuse=self.args.no_fuse,
            keep_local=self.args.keep_local,
            problem=problem,
        )

    def success(self) -> tuple[Path, ...]:
        named = map(Path, self.args.success)
        return tuple(name if name == STANDARD_OUTPUT else Path(self.directory, name) for name in named)

    def _file(self, name: str | None) -> Path | None:
        return None if name is None else Path(self.directory, _fill_in(name))


def _recover(args: argparse.Namespace) -> int:
    """Save what dead jobs left on this node, and end."""
    from fanstore.fuse.deadmount import take_over
    from fanstore.job.job_directory import JobDirectory

    logging.basicConfig(format=f"{PROG}: %(message)s", level=logging.INFO)
    base = Path(tempfile.gettempdir() if args.local is None else _fill_in(args.local))
    kept: list[Path] = []

    def save(path: Path) -> bool:
        saved = take_over(path)
        if not saved:
            kept.append(path)
        return saved

    done = JobDirectory.sweep(base, save)
    if not done and not kept:
        print(f"no dead job has left anything in {base}")
    return 1 if kept else 0


def _serve(request: _Request, pipe: int, supervisor: int) -> int:
    """Run the session to its end, in this process."""
    watch = StartWatch(request.args.start_timeout, sys.stderr, "the lines above", pipe)
    watch.begin()
    terminal = _start_log(request)
    evidence, problem = sys.stderr, None
    if request.log_file is not None:
        try:
            evidence = _add_log(request.log_file, request.mountpoint)
            watch.evidence, watch.evidence_name = evidence, str(request.log_file)
        except UsageError as error:
            request.log_file, problem = None, error  # the session tells it to the other nodes
    faulthandler.enable(file=evidence)
    faulthandler.register(signal.SIGUSR2, file=evidence, all_threads=True)
    # Not imported before the fork: numpy and its companions start threads, which a fork does not survive.
    from fanstore.fuse.session import run_session

    def body() -> int:
        try:
            supervised = Supervised(supervisor)
            return run_session(request.settings(problem), watch, supervised, _announcement(request, terminal))
        except FanstoreError as error:
            if request.log_file is not None and not error.told:
                logging.getLogger().removeHandler(terminal)  # there it comes anyway
                log.error("%s", error)
            raise

    code = run(PROG, body)
    watch.failed()  # the sentence is out; has no meaning any more if the mount was up
    return code


def _start_log(request: _Request) -> logging.Handler:
    """Warnings to standard error (everything if verbose). Returns the handler that writes there."""
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if request.args.verbose else logging.INFO)
    # pyfuse3 would tell of each of its tasks, trio-fashion, thousands of times a second.
    logging.getLogger("pyfuse3").setLevel(logging.INFO)
    terminal = logging.StreamHandler()
    terminal.setLevel(logging.DEBUG if request.args.verbose else logging.WARNING)
    terminal.setFormatter(logging.Formatter(f"{PROG}: %(levelname)s: %(message)s"))
    root.addHandler(terminal)
    return terminal


def _add_log(path: Path, mountpoint: Path) -> TextIO:
    """The whole story to the log. Returns its stream, for evidence of a hang. Raises UsageError."""
    stream = _open_log(path, mountpoint)
    file = logging.StreamHandler(stream)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(file)
    return stream


def _open_log(path: Path, mountpoint: Path) -> TextIO:
    """Open the log, once it is sure that it is none of the files that must not change.

    PREPARED is not looked at here: its file server may be dead, and how that is noticed must be in the log.
    """
    refuse_overlaps([Used(Role.LOG, path), Used(Role.MOUNTPOINT, mountpoint)])
    try:
        if os.path.isfile(path):
            with open(path, "rb") as present:
                if b"\0" in present.read(512):  # a tar file, say
                    raise UsageError(f"--log {path} holds something else than text already; name another file")
        return open(path, "a", encoding="utf-8", errors="backslashreplace", opener=_private)
    except OSError as error:
        raise UsageError(f"cannot write the log {path}: {error.strerror}") from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # names of files are in it


def _announcement(request: _Request, terminal: logging.Handler) -> "Callable[[MountInfo], None]":
    """What to do when the mount is up: say so, and in the background leave the terminal."""

    def announce(info: "MountInfo") -> None:
        size = f"{info.files:,} files, {format_bytes(info.bytes)}"
        where = "can be read by programs at" if request.args.no_fuse else "is mounted on"
        what = f"{request.args.prepared} {where} {info.mountpoint} ({size}; {info.summary})"
        how = f"end it with: fanstore-umount {info.mountpoint}"
        with contextlib.suppress(BrokenPipeError):  # nobody reads it; the mount is up all the same
            if request.args.background:
                print(f"{what}; {how}\nprocess {os.getpid()}, log {request.log_file}", flush=True)
            elif VARIABLE in os.environ and info.rank == 0:
                print(f"{what}; {how}\n{READY_LINE}", flush=True)
            elif not request.command and info.rank == 0:
                print(f"{what}; {how} or Ctrl-C", flush=True)
            elif request.tells and info.rank == 0:
                stated = "" if isinstance(request.order, str) else f"; order: {request.args.order}"
                print(f"{PROG}: {what}{stated}", file=sys.stderr, flush=True)
        if request.args.background and request.log_file is not None:
            logging.getLogger().removeHandler(terminal)
            detach_streams(request.log_file)

    return announce


# --- options ---


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.usage = "%(prog)s PREPARED MOUNTPOINT [options] [-- COMMAND ...]"
    parser.add_argument(
        "prepared",
        metavar="PREPARED",
        nargs="?",
        help="prepared dataset, made with fanstore-prep: a directory, or an address, http(s)://HOST/PATH or "
        "s3://BUCKET/PATH",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", nargs="?", help="where; {rank} and {host} are filled in")
    parser.add_argument(
        "--local",
        metavar="DIR",
        help="copy the partitions to a directory on the node's own disk first, checked, and remove them at the end; "
        "without it they are read where they are ({rank} and {host} are filled in)",
    )
    parser.add_argument(
        "--keep-local",
        action="store_true",
        help="leave the copies in --local for the next job with this option, which uses what it finds there instead of "
        "copying again, from whatever path the same partitions come; those that were not used for longest go when "
        "--capacity or the disk is full, and fanstore-clean removes them",
    )
    parser.add_argument(
        "--stage-first",
        action="store_true",
        help="mount only when everything is copied to --local; without it the copying goes on behind the first reads, "
        "and what they want is copied next",
    )
    parser.add_argument(
        "--cache",
        metavar="SIZE",
        default="1GiB",
        help="memory for data that was decompressed or came from another node, such as 512MiB or 8GiB (default: "
        "%(default)s); a daemon uses up to 128MiB more, 256MiB in a job of several nodes, and the index",
    )
    parser.add_argument(
        "--verify",
        choices=("first", "always", "never"),
        default="first",
        help="compare bytes with their checksum when they are first read (unless checked while copied to --local), "
        "on each read from disk, or never (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-other",
        action="store_true",
        help="let other users see the mount, too; an ordinary user needs user_allow_other in /etc/fuse.conf for it",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--foreground", action="store_true", help="stay until the end (default)")
    where.add_argument("--background", action="store_true", help="return when the mount is up")
    where.add_argument(
        "--until-eof",
        action="store_true",
        help="end when standard input ends, as if by fanstore-umount: for programs that start a mount and are not to "
        "leave it behind, however they end",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        help="log to this file (with --background or --until-eof, default: a new file in ~/.local/state/fanstore)",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write a page (HTML) about the whole job: throughput over time, where reads were served from, traffic "
        "between nodes, latencies, memory, outputs, events. Written by rank 0 at the end, however it ends, and every "
        "minute before",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="for --report: a plan (fanstore-plan job --json), to stand beside what the job did",
    )
    parser.add_argument(
        "--metrics",
        metavar="FILE",
        help="write the figures of this node for Prometheus every 15 s, for node_exporter's textfile collector, such "
        "as /var/lib/node_exporter/fanstore.prom; removed at the end ({rank} and {host} are filled in)",
    )
    parser.add_argument(
        "--success",
        metavar="FILE",
        action="append",
        default=[],
        help="a proof that does not depend on what a launcher makes of exit codes: rank 0 writes this file when every "
        "COMMAND has ended with 0 on every node and all outputs are saved, and removes it at the start; '-' prints a "
        "line instead. --launch asks for it by itself",
    )
    parser.add_argument("--verbose", action="store_true", help="log more, and show all of it")
    parser.add_argument(
        "--quiet",
        action="store_true",
        help="with a COMMAND: leave out the lines about the mount at its start and its end",
    )
    parser.add_argument(
        "--start-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=120.0,
        help="what one step of the start may take, apart from copying to --local; then it ends with an error, and "
        "where it hung is in the log (default: %(default)g)",
    )
    nodes = parser.add_argument_group("jobs of several nodes, under mpirun or srun")
    nodes.add_argument(
        "--replicas", metavar="R", type=int, default=1, help="nodes that keep a copy of each partition (default: 1)"
    )
    nodes.add_argument(
        "--capacity",
        metavar="SIZE",
        help="what each node may use of its disk, with --keep-local for the copies of all jobs together (default: all "
        "that is free but 1 %%)",
    )
    nodes.add_argument(
        "--peer-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=2.0,
        help="how long another node may take to answer before the next copy is asked (default: %(default)g)",
    )
    nodes.add_argument(
        "--launch",
        metavar="LAUNCHER",
        help="start the daemons of all nodes with this, such as 'mpirun -n 4 --map-by ppr:1:node'; with --background "
        "it returns when all of them are up",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "native", "python"),
        default="auto",
        help="what answers the kernel: native, C threads with Python behind them; python, Python alone, which is many "
        "times slower; auto, native unless it cannot run here (default: %(default)s)",
    )
    parser.add_argument(
        "--order",
        metavar="ORDER",
        default="auto",
        help="the order in which programs read, so that files are fetched ahead: a FILE with a path per line, a "
        "shuffle such as torch-distributed:seed=0 (see docs/orders.md), auto (recognised from what is read, "
        "or written to MOUNTPOINT/.fanstore/order), hook (the same, and COMMAND's torch DataLoaders report it), "
        "locality (hook, and the ranks of COMMAND share each global batch so that they read what their node holds), "
        "or off (default: %(default)s; {rank} and {host} are filled in)",
    )
    parser.add_argument(
        "--preload",
        action="store_true",
        help="the COMMAND and what it starts read the dataset without asking the kernel, through a preloaded library, "
        "where they can; everything else goes to the mount. fanstore-run does it on a mount that is up",
    )
    parser.add_argument(
        "--no-fuse",
        action="store_true",
        help="mount nothing: the dataset is there for the COMMAND and what it starts, and for programs of "
        "fanstore-run, through a preloaded library alone. Needs no /dev/fuse and no fusermount3; MOUNTPOINT need not "
        "exist. With --output or --scratch these programs can write there, too. What is not covered: "
        "docs/interception.md",
    )
    writing = parser.add_argument_group("outputs: what programs write under MOUNTPOINT, next to the dataset")
    where_to = writing.add_mutually_exclusive_group()
    where_to.add_argument(
        "--output",
        metavar="DIR",
        help="copy every file that was closed or synced to this directory on the shared file system, in the background "
        "and before the end; what an earlier job left there appears under MOUNTPOINT again",
    )
    where_to.add_argument(
        "--scratch", action="store_true", help="programs may write, and what they have written ends with the job"
    )
    writing.add_argument(
        "--fsync",
        choices=("output", "local"),
        default="output",
        help="what fsync waits for: that the file is safe in --output, or on the node's disk (default: %(default)s)",
    )
    writing.add_argument(
        "--recover",
        action="store_true",
        help="save what killed jobs left in --local (default: the directory for temporary files) to where it was to "
        "go, and end; every start does so too. Needs neither PREPARED nor MOUNTPOINT",
    )
    return parser


def _without_launch(argv: Sequence[str]) -> list[str]:
    """The same command line for the daemons themselves."""
    own, command = _split(argv)
    kept: list[str] = []
    words = iter(own)
    for word in words:
        if word == "--launch":
            next(words)
        elif word not in ("--background", "--until-eof") and not word.startswith("--launch="):
            kept.append(word)
    return [*kept, "--", *command] if command else kept


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the COMMAND behind ``--``."""
    if "--" not in argv:
        return list(argv), []
    position = list(argv).index("--")
    command = list(argv[position + 1 :])
    if not command:
        raise UsageError("there is no COMMAND behind --")
    return list(argv[:position]), command


def _refuse_bare_command(own: Sequence[str], command: Sequence[str]) -> None:
    """A COMMAND that stands behind MOUNTPOINT without ``--``, where its options would be taken for ours."""
    parser = _parser()
    for length in range(1, len(own) + 1):
        try:
            _, unknown = parser.parse_known_args(own[:length])
        except UsageError:
            continue  # the value of an option is still missing, or it is wrong, which is said later
        if unknown:
            if not unknown[0].startswith("-"):
                right = shlex.join([PROG, *own[: length - 1], "--", *own[length - 1 :], *command])
                raise UsageError(f"a COMMAND such as '{unknown[0]}' goes behind --, as in: {right}")
            return


def _refuse_senseless(args: argparse.Namespace) -> None:
    if args.fsync == "local" and args.output is None:
        raise UsageError("--fsync is about --output, which is not given")
    if args.plan is not None and args.report is None:
        raise UsageError("--plan is for --report, which is not given")
    if args.replicas < 1:
        raise UsageError("--replicas must be at least 1")
    if launched_size() > 1 and args.launch is not None:
        raise UsageError("--launch is for starting the daemons, and mpirun or srun has started this one already")
    if launched_size() > 1 and args.background:
        raise UsageError(
            "mpirun ends a daemon when the process that it started ends, so --background cannot be used under it; "
            "let FanStore start mpirun instead: fanstore-mount ... --background --launch 'mpirun -n N'"
        )
    if args.local is None and args.keep_local:
        raise UsageError("--keep-local needs --local, the directory on each node's own disk in which copies stay")
    if launched_size() > 1 and args.until_eof:
        raise UsageError(
            "this process is one of several that a launcher has started, and each would mount for itself: start "
            "fanstore-mount with the launcher, and the program as its COMMAND"
        )
    if args.local is None and args.replicas > 1:
        raise UsageError("--replicas needs --local, a directory on each node's own disk")
    if (
        launched_size() > 1
        and "{rank}" not in args.mountpoint
        and int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) > 1
    ):
        raise UsageError("several ranks share this machine: put {rank} into MOUNTPOINT (and into --local)")
    if args.metrics is not None and "{rank}" in args.mountpoint and "{rank}" not in args.metrics:
        raise UsageError("every rank has metrics of its own: put {rank} into --metrics, as into MOUNTPOINT")


def _refuse_without_fuse(args: argparse.Namespace, command: Sequence[str]) -> None:
    """What needs a mount. With --launch, the daemons themselves have neither a COMMAND nor --background."""
    if not command and not args.background and VARIABLE not in os.environ:
        raise UsageError(
            "with --no-fuse only programs that are started for it see the dataset: give a COMMAND, or --background and "
            "run programs with fanstore-run MOUNTPOINT -- COMMAND"
        )
    if args.allow_other:
        raise UsageError("--allow-other is about a mount, and with --no-fuse there is none")


def _fill_in(path: str) -> str:
    return path.replace("{rank}", str(launched_rank())).replace("{host}", _host())


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return value
