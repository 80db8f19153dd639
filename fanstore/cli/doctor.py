"""fanstore-doctor: check this node, and say for each thing whether it is right and otherwise what to do.

Owns the list of checks and the report; the checks themselves are in fanstore.doctor. Main thread.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from fanstore import DISTRIBUTION, __version__
from fanstore.cli.common import make_parser, parse, run
from fanstore.doctor import fuse, leftovers, limits, testmount, versions
from fanstore.doctor.disks import SharedChecks, check_local
from fanstore.doctor.finding import Check, Finding, Result, Status, perform
from fanstore.doctor.mpi import START_LIMIT_S, MpiChecks
from fanstore.doctor.programs import GRACE_S, Programs
from fanstore.units import format_count

PROG = "fanstore-doctor"

#: Seconds for checks that ask the kernel or a healthy file system, and for those that start a program.
_SHORT_S, _LONG_S = 15.0, 60.0
#: A program that does not end costs its limit, then twice the time that it has to clean up.
_STOP_S = 2 * GRACE_S + 5.0

_DESCRIPTION = """\
Check whether this node can run FanStore: FUSE, the native engine, Python packages, MPI, the node's own disk, the
shared path, limits, what killed jobs have left; and mount a tiny dataset for a moment. Whatever is not right comes
with what to do about it. Nothing is changed, and every check has a time limit."""

_EPILOG = """\
examples:
  fanstore-doctor                                       this node, as you are
  fanstore-doctor --local /local/ssd --shared /shared/imagenet.fan --mpi      all that a job of several nodes needs
  srun --ntasks-per-node=1 fanstore-doctor --json       on all nodes of an allocation, for a script

Marks: ok; note, good to know; WARN, it works, but could be better; WRONG, something that is needed does not work;
skip, not looked at. Without --mpi a missing MPI is only a warning: one node alone does not need it.

exit codes: 0 everything that is needed works, 1 something does not, 2 wrong usage, 130 interrupted."""

_MARKS = {
    Status.OK: ("ok", "32"),
    Status.NOTE: ("note", "36"),
    Status.WARNING: ("WARN", "33"),
    Status.ERROR: ("WRONG", "31"),
    Status.SKIPPED: ("skip", "2"),
}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument("--local", metavar="DIR", type=Path, help="the directory on the node's own disk to be used")
    parser.add_argument(
        "--shared", metavar="PATH", help="a prepared dataset (a directory or an address), or where it is to be"
    )
    parser.add_argument("--mpi", action="store_true", help="MPI is needed: what is wrong with it fails")
    parser.add_argument("--json", action="store_true", help="for scripts (docs/commands.md)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _main(argv: Sequence[str] | None) -> int:
    args = parse(_parser(), argv)
    programs = Programs()
    before = signal.signal(signal.SIGTERM, _interrupt)  # a batch system's; clean up as after Ctrl-C
    results: list[Result] = []
    try:
        if not args.json:
            print(f"FanStore {__version__} on {socket.gethostname()}, user {os.geteuid()}")
        for result in perform(_checks(args, programs), programs.stop, _STOP_S):
            if not args.json:
                group_is_new = not results or results[-1].group != result.group
                _show(result, group_is_new, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
            results.append(result)
    finally:
        signal.signal(signal.SIGTERM, before)
    findings = [finding for result in results for finding in result.findings]
    works = all(finding.status is not Status.ERROR for finding in findings)
    if args.json:
        print(json.dumps(_document(results, works), indent=2))
    else:
        print(f"\n{_summary(findings)}")
    return 0 if works else 1


def _checks(args: argparse.Namespace, programs: Programs) -> Iterator[Check]:
    """In the order in which people would look. A generator: later ones use what earlier ones have found."""
    yield Check("FUSE", "kernel", _SHORT_S, fuse.check_kernel)
    yield Check("FUSE", "fuse.device", _SHORT_S, fuse.check_fuse_device)
    yield Check("FUSE", "fuse.fusermount3", _SHORT_S, lambda: fuse.check_fusermount3(programs))
    yield Check("FUSE", "fuse.allow_other", _SHORT_S, fuse.check_configuration)

    seen: list[versions.Packages] = []

    def packages() -> Iterable[Finding]:
        seen.append(versions.look_at_packages(programs))
        return versions.check_packages(seen[0])

    yield Check("Python", "python", _LONG_S, packages)
    native_error = seen[0].errors[DISTRIBUTION] if seen else "packages could not be looked at"
    yield Check("Python", "engine.native", _SHORT_S, lambda: fuse.check_engine(native_error))
    mpi = MpiChecks(programs, args.mpi)
    yield Check("MPI", "mpi.library", _LONG_S, mpi.check_library)
    yield Check("MPI", "mpi.launcher", _LONG_S, mpi.check_launcher)
    yield Check("MPI", "mpi.start", 2 * (START_LIMIT_S + _STOP_S), mpi.check_start)
    shared = SharedChecks(args.shared)
    yield Check("Disks", "local", _SHORT_S, lambda: check_local(args.local))
    yield Check("Disks", "shared", _LONG_S, shared.check)
    yield Check("Limits", "limit.files", _SHORT_S, lambda: limits.check_files(shared.partitions))
    yield Check("Limits", "limit.memlock", _SHORT_S, limits.check_locked_memory)
    yield Check("Limits", "limit.memory", _SHORT_S, lambda: limits.check_memory(shared.index_bytes))
    yield Check("Limits", "limit.cores", _SHORT_S, limits.check_cores)
    yield Check("Left behind", "leftover.mount", _LONG_S, leftovers.check_mounts)
    yield Check("Left behind", "leftover.directory", _SHORT_S, lambda: leftovers.check_directories(args.local))
    yield Check("Left behind", "leftover.kept", _SHORT_S, lambda: leftovers.check_kept(args.local))
    limit_s = 3 * (testmount.COMMAND_LIMIT_S + _STOP_S)
    yield Check("Test mount", "mount", limit_s, lambda: testmount.check_mount(programs, args.local))


def _show(result: Result, group_is_new: bool, colours: bool) -> None:
    if group_is_new:
        print(f"\n{result.group}")
    for finding in result.findings:
        mark, colour = _MARKS[finding.status]
        shown = f"\x1b[{colour}m{mark:<5}\x1b[0m" if colours else f"{mark:<5}"
        print(f"  {shown}  {finding.found}", flush=True)
        if finding.fix:
            print(f"         → {finding.fix}", flush=True)


def _summary(findings: Sequence[Finding]) -> str:
    wrong = sum(finding.status is Status.ERROR for finding in findings)
    warnings = sum(finding.status is Status.WARNING for finding in findings)
    also = f"; {format_count(warnings, 'warning')}" if warnings else ""
    if wrong:
        return f"{format_count(wrong, 'thing')} that FanStore needs {'does' if wrong == 1 else 'do'} not work{also}."
    return f"Everything that is needed works{also}."


def _document(results: Sequence[Result], works: bool) -> dict[str, object]:
    return {
        "version": 1,
        "fanstore": __version__,
        "host": socket.gethostname(),
        "works": works,
        "checks": [
            {
                "group": result.group,
                "name": finding.name,
                "status": str(finding.status),
                "found": finding.found,
                "fix": finding.fix or None,
            }
            for result in results
            for finding in result.findings
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
