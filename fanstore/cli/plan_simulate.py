"""fanstore-plan simulate: policies of the performance model, compared in scenarios.

Owns reading scenario files, and what is shown. Simulations run in processes of their own, one per core.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from fanstore.cli.common import make_parser, suggestion
from fanstore.cli.pages import check_page, write_page
from fanstore.cli.tomlfile import read_toml
from fanstore.errors import UsageError
from fanstore.model import MODES, POLICIES, SCENARIOS, THESIS, Mode, RefusedError, Scenario, run, scenario_of
from fanstore.model.thesis import PUBLISHED_S
from fanstore.progress import Progress
from fanstore.report.simulationpage import Cell, simulation_page

PROG = "fanstore-plan simulate"

_PR_SET_PDEATHSIG = 1

_DESCRIPTION = """\
Simulate training jobs with different policies: which samples each node keeps, and where it reads the others from. Shows
how long each takes, and how much it reads from the parallel file system (PFS)."""

_EPILOG = f"""\
examples:
  fanstore-plan simulate                                     all policies in S1 to S4, as published
  fanstore-plan simulate --scenario S3 --mode corrected      with everything shared that nodes share: to plan with
  fanstore-plan simulate --scenario mine.toml --policy fanstore hdmlp --json
  fanstore-plan simulate --scenario S2 S4 --html out.html    with a picture, for a browser

Scenarios: {", ".join(SCENARIOS)}, or a TOML file (docs/model.md).

Policies: {", ".join(POLICIES)}. The lower bound is the time for computing alone. Two policies (marked *) read other
samples than the job asks for, and not all.

exit codes: 0 simulated, 2 wrong usage (also a scenario file that makes no sense), 130 interrupted."""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--scenario",
        metavar="NAME|FILE",
        nargs="+",
        action="extend",
        help="the job and the machine; names and files see below (default: S1 to S4)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        nargs="+",
        action="extend",
        choices=list(POLICIES),
        help="one or more (default: all)",
    )
    parser.add_argument(
        "--mode",
        choices=list(MODES),
        default="published",
        help="as the thesis simulates, or with shared resources really shared (default: %(default)s)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of orders and sizes (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="for a program: seconds and bytes by scenario and policy")
    parser.add_argument("--html", metavar="FILE", help="write a page with a picture; - for standard output")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    if args.html == "-" and args.json:
        raise UsageError("--json and --html - both write to standard output: name a file for one of them")
    check_page(args.html)
    if args.seed < 0:
        raise UsageError(f"'--seed' is {args.seed}; it must be 0 or more")
    scenarios = [_scenario(name) for name in args.scenario or THESIS]
    names = [scenario.name for scenario in scenarios]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"scenario '{min(twice)}' is asked for twice; a file has the name that it has without .toml")
    policies = list(dict.fromkeys(args.policy or POLICIES))
    cells = _simulate(scenarios, policies, args.mode, args.seed)
    if args.json:
        print(json.dumps(_document(cells), indent=1))
    elif args.html != "-":
        print("\n".join(_tables(cells, args.mode)))
    if args.html is not None:
        write_page(args.html, simulation_page(cells, args.mode))
    return 0


# --- scenarios ---


def _scenario(name: str) -> Scenario:
    if name in SCENARIOS:
        return SCENARIOS[name]
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        close = suggestion(name, list(SCENARIOS))
        raise UsageError(
            f"there is no scenario '{name}'" + (close or f"; there are {', '.join(SCENARIOS)}, and TOML files")
        )
    return scenario_of(path.stem, read_toml(path))


# --- simulations ---


def _simulate(scenarios: Sequence[Scenario], policies: Sequence[str], mode: Mode, seed: int) -> list[Cell]:
    asked = [(scenario, policy, mode, seed) for scenario in scenarios for policy in policies]
    for scenario in scenarios:
        scenario.job(seed)  # what cannot be is said before the first simulation
    processes = min(len(os.sched_getaffinity(0)), len(asked))
    if processes == 1:
        return [_cell(*question) for question in asked]
    fork = multiprocessing.get_context("fork")  # so that they are our own children, whatever this Python prefers
    pool = ProcessPoolExecutor(processes, fork, initializer=_begin_process, initargs=(os.getpid(),))
    try:
        # The longest first, so that no core waits for a long one at the end.
        longest_first = sorted(range(len(asked)), key=lambda number: -asked[number][0].reads)
        futures = {number: pool.submit(_cell, *asked[number]) for number in longest_first}
        with Progress.counting("simulating", f"of {len(asked)} cells") as progress:
            for done, _ in enumerate(as_completed(futures.values()), 1):
                progress.set_count(done)
        return [futures[number].result() for number in range(len(asked))]
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process(parent: int) -> None:
    """Ctrl-C reaches all processes; the one that the user started says so, once. When that one is killed, nobody waits
    for the others, which would go on for minutes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def _cell(scenario: Scenario, policy: str, mode: Mode, seed: int) -> Cell:
    job = scenario.job(seed)
    published_s = PUBLISHED_S.get(scenario.name, {}).get(policy) if mode == "published" else None
    try:
        outcome = run(POLICIES[policy], scenario.system, job, mode)
    except RefusedError as refusal:
        return Cell(scenario.name, policy, job.dataset_mb, None, str(refusal), published_s)
    return Cell(scenario.name, policy, job.dataset_mb, outcome, "", published_s)


# --- what is shown ---


def _document(cells: Sequence[Cell]) -> dict[str, dict[str, object]]:
    document: dict[str, dict[str, object]] = {}
    for cell in cells:
        outcome = cell.outcome
        document.setdefault(cell.scenario, {})[cell.policy] = (
            {"refused": cell.refused}
            if outcome is None
            else {
                "seconds": outcome.seconds,
                "pfs_bytes": round(outcome.pfs_mb * 1e6),
                "stall_s": outcome.stall_s,
                "epoch_ends_s": list(outcome.epoch_ends_s),
                "dataset_bytes": round(cell.dataset_mb * 1e6),
                "keeps_order": POLICIES[cell.policy].keeps_order,
            }
        )
    return document


def _tables(cells: Sequence[Cell], mode: Mode) -> Iterator[str]:
    brackets = "; in brackets: as published" if any(cell.published_s for cell in cells) else ""
    yield from _table(f"seconds, {mode} mode{brackets}", cells, _seconds)
    yield ""
    yield from _table("read from the PFS, in datasets", cells, lambda cell: f"{cell.datasets:.2f}")
    if any(not POLICIES[cell.policy].keeps_order for cell in cells):
        yield "\n* reads other samples than the job asks for, and not all of them"
    for sentence in dict.fromkeys(cell.refused for cell in cells if cell.refused):
        yield f"- {sentence}"


def _seconds(cell: Cell) -> str:
    assert cell.outcome is not None
    text = _short(cell.outcome.seconds)
    return text if cell.published_s is None else f"{text} ({_short(cell.published_s)})"


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 1000 else f"{seconds:.2f}"


def _table(title: str, cells: Sequence[Cell], show: Callable[[Cell], str]) -> Iterator[str]:
    columns = list(dict.fromkeys(cell.scenario for cell in cells))
    rows: dict[str, list[str]] = {}
    for cell in cells:
        mark = "" if POLICIES[cell.policy].keeps_order else " *"
        rows.setdefault(cell.policy + mark, []).append("-" if cell.outcome is None else show(cell))
    widths = [max(map(len, column)) for column in zip(columns, *rows.values(), strict=True)]
    first = max(map(len, rows))
    yield title
    for name, texts in {"": columns, **rows}.items():
        yield f"{name:{first}}  " + "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
