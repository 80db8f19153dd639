"""What the hook of --order hook costs a program, and how soon the daemon knows the order of a large dataset.

Example: FANSTORE_TEST_FRAMEWORKS=/path/to/python-with-torch python benchmarks/order_hook.py

In every round: a Python that does nothing is started with and without the hook in its environment (processor time), and
a program with torch goes through a DataLoader of --samples samples that are not read, with and without. It reports over
a real control socket to the daemon's part that takes reports, with an index of as many files; no mount is needed for
that. Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio
from harness import machine, record
from harness.command import BenchmarkError
from harness.namespace import synthetic
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

from fanstore.client.hooking import hook_environment
from fanstore.client.server import ControlServer
from fanstore.format.index import Index
from fanstore.order.reportedstream import ReportedStream
from fanstore.prefetch.hooked import Hooked

PROGRAM = Path(__file__).with_name("hooked_loader.py")
STARTS = 20
POINT = "/nowhere/mount"
KINDS = {"listed": "a sampler of one's own, which lists its numbers", "random": "RandomSampler"}


def start_s(variables: Mapping[str, str]) -> float:
    """Processor time of a Python that does nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(STARTS):
        subprocess.run([sys.executable, "-c", "pass"], env=variables, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / STARTS


async def report(index: Index, samples: int, work: Path, kind: str, python: str, batch: int) -> dict[str, Any]:
    """One program with the hook, and what the daemon knew when, in seconds after its first report."""
    server = ControlServer(work)
    streams: list[tuple[float, ReportedStream]] = []
    first_s: list[float] = []

    def tell(text: str, *values: object) -> None:
        first_s.append(time.perf_counter())

    hooked = Hooked(
        index,
        lambda stream: streams.append((time.perf_counter(), stream)),
        lambda: None,
        tell,
        lambda: False,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, hooked.requests())
            variables = os.environ | hook_environment(server.path, os.environ) | {"FANSTORE_MOUNT": POINT}
            command = [python, str(PROGRAM), str(work / "paths"), str(batch), kind]
            busy_s = time.process_time()
            done = await trio.run_process(command, env=variables, capture_stdout=True)
            busy_s = time.process_time() - busy_s
            nursery.cancel_scope.cancel()
    finally:
        server.close()
        server.path.unlink()
    known = [at_s for at_s, stream in streams if stream.at(samples - 1) is not None]
    if not known or not first_s:
        raise BenchmarkError("the order was not reported")
    return {"epochs": json.loads(done.stdout), "known_s": known[0] - first_s[0], "daemon_s": busy_s}


def plain(work: Path, kind: str, python: str, batch: int) -> list[dict[str, float]]:
    command = [python, str(PROGRAM), str(work / "paths"), str(batch), kind]
    told: list[dict[str, float]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return told


def measure(arguments: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    names = synthetic(arguments.samples)
    names.write_index(work / "index.fsx")
    index = Index.from_buffer((work / "index.fsx").read_bytes())
    first = len(names.names) - names.files  # directories come before
    paths = [f"{POINT}/{os.fsdecode(index.path(entry))}" for entry in range(first, len(names.names))]
    (work / "paths").write_text("\n".join(paths))
    runs = []
    for number in range(arguments.rounds):
        run: dict[str, Any] = {"round": number}
        run["start_s"] = start_s(dict(os.environ))
        run["start_hooked_s"] = start_s(
            os.environ | hook_environment(work / "control", os.environ) | {"FANSTORE_MOUNT": POINT}
        )
        for kind in KINDS:
            run[kind] = {
                "plain": plain(work, kind, arguments.python, arguments.batch),
                "hooked": trio.run(
                    functools.partial(report, index, names.files, work, kind, arguments.python, arguments.batch)
                ),
            }
        runs.append(run)
    return runs


def make_table(result: dict[str, Any]) -> str:
    runs, settings = result["runs"], result["settings"]

    def spread(values: list[float], scale: float) -> str:
        return Spread.of([value * scale for value in values]).ratio_text()

    rows = [
        [
            "start of a Python that does nothing, ms",
            spread([run["start_s"] for run in runs], 1e3),
            spread([run["start_hooked_s"] for run in runs], 1e3),
            spread([run["start_hooked_s"] - run["start_s"] for run in runs], 1e3),
        ]
    ]
    facts = []
    for kind, words in KINDS.items():
        for epoch, ordinal in enumerate(("first", "second")):
            for key, what, scale in (("first_s", "first batch, ms", 1e3), ("batch_s", "later batches, µs each", 1e6)):
                without = [run[kind]["plain"][epoch][key] for run in runs]
                own = [run[kind]["hooked"]["epochs"][epoch][key] for run in runs]
                difference = [b - a for a, b in zip(without, own, strict=True)]
                cells = [spread(values, scale) for values in (without, own, difference)]
                rows.append([f"{words}: {ordinal} epoch, {what}", *cells])
        known, busy = ([run[kind]["hooked"][key] for run in runs] for key in ("known_s", "daemon_s"))
        facts.append(
            f"{words}: all of the order is known {spread(known, 1)} s after the first report, while the program goes "
            f"on; both epochs cost the daemon {spread(busy, 1)} s of processor time."
        )
    return "\n".join(
        [
            f"# The order hook, {settings['samples']:,} samples in batches of {settings['batch']}",
            "",
            f"{settings['rounds']} interleaved rounds, median (lowest-highest). {machine.sentence(result['machine'])}.",
            "The program reads nothing, so that its batches take as little as they can.",
            "",
            markdown_table(["what", "without", "with the hook", "difference"], rows),
            "",
            *facts,
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=os.environ.get("FANSTORE_TEST_FRAMEWORKS"), help="a Python with torch")
    parser.add_argument("--work-dir", type=Path, help="for the index and a list of paths, 0.3 GB")
    parser.add_argument("--name", default="order-hook", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    if arguments.python is None:
        raise BenchmarkError("name a Python with torch: --python, or FANSTORE_TEST_FRAMEWORKS")
    with workspace(arguments.work_dir) as work:
        runs = measure(arguments, work)
    result = {
        "kind": "order_hook",
        "machine": machine.describe(Path.cwd()),
        "settings": {key: getattr(arguments, key) for key in ("samples", "batch", "rounds")},
        "runs": runs,
    }
    record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
