"""Reading with the preloaded library beside the mount, through the mount alone, and from a local directory.

Example: python benchmarks/interception.py --rounds 3

The readers of read_peers.py (reader.c and python_reader.py, page-aligned buffers, whole files, shuffled), one at a
time, as one process that reads all files once (an epoch with new workers) or four times (workers that stay). Cold: the
page cache was emptied before. Every round has all contenders, so that ratios are of one moment. Beside files/s the
processor time of the reader per file, which other people's work on the machine changes less; what the daemon spends for
the mount is not in it. Then a DataLoader of PyTorch with two workers (loader_epochs.py), by the Python that
FANSTORE_BENCH_TORCH names, new workers each epoch or the same, bytes or pictures; and the start of ``python -c pass``.
Writes results/NAME.json.gz (every run) and NAME.md.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import caches, machine, record
from harness.command import BenchmarkError, program, run
from harness.dataset import Dataset, DatasetSpec, make, take
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace
from PIL import Image

from fanstore.client.preload import STATE_VARIABLE

RUN_S = 600.0
HERE = Path(__file__).parent
BUFFER_BYTES = 1 << 20
DISK, MOUNT, PRELOAD, VIEW = "directory", "mount", "preload", "view"
CONTENDERS = (DISK, MOUNT, PRELOAD)
READERS = ("C", "Python")
#: Cold or warm, and how often one process reads all files.
PASSES = (("cold", 1), ("warm", 1), ("warm", 4))
#: DataLoaders: name, state, epochs (the last one counts), whether workers stay, content.
LOADERS = (
    ("new workers, bytes", "cold", 1, False, "bytes"),
    ("new workers, bytes", "warm", 2, False, "bytes"),
    ("workers that stay, bytes", "warm", 4, True, "bytes"),
    ("workers that stay, pictures", "warm", 3, True, "picture"),
)
WORKERS = 2
TORCH_VARIABLE = "FANSTORE_BENCH_TORCH"
#: How often ``python -c pass`` is started, in turns.
STARTS = 25


def make_pictures(root: Path, count: int) -> None:
    """JPEGs of the size of ImageNet's, some 100 KB each."""
    root.mkdir()
    noise = np.random.default_rng(1)
    for number in range(count):
        small = Image.fromarray(noise.integers(0, 256, (125, 94, 3), dtype=np.uint8))
        small.resize((500, 375), Image.Resampling.BICUBIC).save(root / f"{number:05d}.JPEG", quality=92)


class Bench:
    """The data and the readers of one run.

    Attributes:
        dataset: the directory; point: where it is mounted; stored: files that hold the prepared bytes.
    """

    def __init__(self, work: Path, spec: DatasetSpec, readers: int, codec: str) -> None:
        made = make(work / "images", spec)
        make_pictures(made.root / "pictures", spec.files // 6)
        self.dataset: Dataset = take(made.root)
        self._work = work
        self._readers = readers
        self.point = work / "mount"
        run([program("fanstore-prep"), self.dataset.root, work / "d.fan", "--codec", codec, "--quiet"], RUN_S)
        self._reader = work / "reader"
        run(["cc", "-O2", "-pthread", HERE / "reader.c", "-o", self._reader], RUN_S)
        caches.sync_tree(work)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        local = self._work / "local"
        run(
            [
                *(program("fanstore-mount"), self._work / "d.fan", self.point, "--local", local, "--stage-first"),
                *("--background", "--log", self._work / "log"),
            ],
            RUN_S,
        )
        try:
            shown = run([program("fanstore-run"), self.point, "--", "env", "-0"], RUN_S).stdout.split("\0")
            pairs = [pair.partition("=") for pair in shown]
            self.variables = {name: value for name, _, value in pairs if name in ("LD_PRELOAD", STATE_VARIABLE)}
            self.stored = [path for path in caches.files_below(local) if path.suffix == ".tar"]
            yield
        finally:
            run([program("fanstore-umount"), self.point], RUN_S)

    def files(self, where: str) -> list[Path]:
        """What a cold run must not find in memory."""
        if where == DISK:
            return [self.dataset.root / path for path in self.dataset.paths]
        opened = [self.point / path for path in self.dataset.paths] if where == MOUNT else []
        return [*self.stored, *opened]

    def measure(self, where: str, reader: str, state: str, times: int, seed: int) -> dict[str, float]:
        root = self.dataset.root if where == DISK else self.point
        paths = list(self.dataset.paths)
        random.Random(seed).shuffle(paths)
        listed = self._work / "list"
        listed.write_bytes(b"".join(os.fsencode(root / path) + b"\0" for path in paths) * times)
        if state == "cold":
            caches.drop(self.files(where))
        argv: list[str | Path] = [self._reader] if reader == "C" else [sys.executable, HERE / "python_reader.py"]
        command = [*argv, listed, str(self._readers), str(BUFFER_BYTES)]
        variables = self._under(where)
        if state == "warm":  # the contender before may have left nothing of what this one reads in memory
            run([*variables, *command], RUN_S)
        before, opened = resource.getrusage(resource.RUSAGE_CHILDREN), self._opens()
        figures = json.loads(run([*variables, *command], RUN_S).stdout)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        intercepted = self._opens() - opened
        if intercepted < (len(paths) * times if variables else 0):
            raise BenchmarkError(f"only {intercepted} opens were intercepted: this is not what is to be measured")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {
            "files_per_s": figures["files"] / figures["seconds"],
            "cpu_us_per_file": 1e6 * (cpu_s - self.start_cpu_s.get((reader, bool(variables)), 0)) / figures["files"],
        }

    def _under(self, where: str) -> list[str | Path]:
        return [program("fanstore-run"), self.point, "--"] if where == PRELOAD else []

    def load(self, where: str, python: str, case: tuple[str, str, int, bool, str]) -> dict[str, float]:
        """The last epoch of a DataLoader."""
        _, state, epochs, stay, content = case
        listed, paths = self._list(where, content == "picture")
        if state == "cold":
            caches.drop(self.files(where))
        opened = self._opens()
        arguments: list[str | Path] = [listed, str(WORKERS), str(epochs), content, str(int(stay))]
        told = json.loads(run([*self._under(where), python, HERE / "loader_epochs.py", *arguments], RUN_S).stdout)
        if where == PRELOAD and self._opens() - opened < len(paths) * epochs:
            raise BenchmarkError("not all opens were intercepted: this is not what is to be measured")
        return {"files_per_s": told["files"] / told["seconds"][-1]}

    def _list(self, where: str, pictures: bool) -> tuple[Path, list[str]]:
        root = self.dataset.root if where == DISK else self.point
        paths = [path for path in self.dataset.paths if path.startswith("pictures/") == pictures]
        listed = self._work / "list"
        listed.write_bytes(b"".join(os.fsencode(root / path) + b"\0" for path in paths))
        return listed, paths

    def look_at(self, where: str, decoded: bool) -> dict[str, float]:
        """The second look of one process at all files, read or as views; without the library for views."""
        listed, _ = self._list(where, decoded)
        under = self._under(where) if where == PRELOAD else []
        way = "view" if where == VIEW else "read"
        told = json.loads(
            run([*under, sys.executable, HERE / "views.py", listed, way, str(int(decoded))], RUN_S).stdout
        )
        return {"files_per_s": told["files"] / told["seconds"][-1]}

    def start(self, where: str) -> float:
        """Milliseconds that ``python -c pass`` takes; the variables are set as fanstore-run sets them."""
        argv = [sys.executable, "-S", "-c", "pass"]
        environment = os.environ | (self.variables if where == PRELOAD else {})
        begin = time.perf_counter()
        subprocess.run(argv, env=environment, check=True, timeout=RUN_S)
        return 1e3 * (time.perf_counter() - begin)

    #: Processor time of a reader that reads one file: of its start, and with fanstore-run in front of it.
    start_cpu_s: dict[tuple[str, bool], float] = {}  # noqa: RUF012

    def measure_start(self) -> None:
        all_paths, self.start_cpu_s = self.dataset.paths, {}
        self.dataset = Dataset(self.dataset.root, all_paths[:1], 0, "")
        found = {
            (reader, intercepted): self.measure(PRELOAD if intercepted else DISK, reader, "warm", 1, 1)[
                "cpu_us_per_file"
            ]
            for reader in READERS
            for intercepted in (False, True)
        }
        self.dataset = Dataset(self.dataset.root, all_paths, 0, "")
        self.start_cpu_s = {key: value / 1e6 for key, value in found.items()}

    def _opens(self) -> int:
        stats = json.loads((self.point / ".fanstore" / "stats.json").read_bytes())
        return int(stats["intercepted"]["opens"])


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per case and contender: files/s and processor time, and both relative to the directory in the same round."""
    summary = []
    cases = dict.fromkeys((item["reader"], item["state"], item["times"]) for item in runs)
    for case in cases:
        own = [item for item in runs if (item["reader"], item["state"], item["times"]) == case]
        disk = {item["round"]: item["figures"] for item in own if item["where"] == DISK}
        for where in dict.fromkeys(item["where"] for item in own):
            items = [item for item in own if item["where"] == where]
            speed = [item["figures"]["files_per_s"] for item in items]
            cpu = [item["figures"]["cpu_us_per_file"] for item in items]
            summary.append(
                {
                    "reader": case[0],
                    "state": case[1],
                    "times": case[2],
                    "where": where,
                    "files_per_s": asdict(Spread.of(speed)),
                    "cpu_us_per_file": asdict(Spread.of(cpu)),
                    "ratio": asdict(
                        Spread.of(
                            [each / disk[i["round"]]["files_per_s"] for each, i in zip(speed, items, strict=True)]
                        )
                    ),
                    "cpu_ratio": asdict(
                        Spread.of(
                            [disk[i["round"]]["cpu_us_per_file"] / each for each, i in zip(cpu, items, strict=True)]
                        )
                    ),
                }
            )
    return summary


def load_epochs(bench: Bench, number: int) -> list[dict[str, Any]]:
    """One round of all DataLoaders, if there is a Python with PyTorch, and of views."""
    python = os.environ.get(TORCH_VARIABLE)
    found = []
    for case in LOADERS if python else ():
        shift = number % len(CONTENDERS)
        for where in CONTENDERS[shift:] + CONTENDERS[:shift]:
            figures = bench.load(where, str(python), case)
            print(f"round {number}: {case[0]}, {case[1]}, {where}: {figures['files_per_s']:,.0f} files/s", flush=True)
            found.append({"round": number, "case": case[0], "state": case[1], "where": where, "figures": figures})
    for name, decoded in (("one process, pictures", True), ("one process, checksums", False)):
        for where in (DISK, PRELOAD, VIEW):
            figures = bench.look_at(where, decoded)
            print(f"round {number}: {name}, warm, {where}: {figures['files_per_s']:,.0f} files/s", flush=True)
            found.append({"round": number, "case": name, "state": "warm", "where": where, "figures": figures})
    return found


def summarize_loaders(loaded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    summary = []
    for case, state, where in dict.fromkeys((item["case"], item["state"], item["where"]) for item in loaded):
        own = [item for item in loaded if (item["case"], item["state"]) == (case, state)]
        speed = {(item["round"], item["where"]): item["figures"]["files_per_s"] for item in own}
        mine = {number: value for (number, which), value in speed.items() if which == where}
        ratios = [value / speed[number, DISK] for number, value in mine.items()]
        figures = {"files_per_s": asdict(Spread.of([*mine.values()])), "ratio": asdict(Spread.of(ratios))}
        summary.append({"case": case, "state": state, "where": where, **figures})
    return summary


def loader_lines(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            f"{item['case']}, {item['state']}",
            item["where"],
            f"{item['files_per_s']['median']:,.0f}",
            Spread(**item["ratio"]).ratio_text(),
        ]
        for item in result["loaders"]
    ]
    start = {where: value["median"] for where, value in result["start_ms"].items()}
    return [
        *(["", markdown_table(["DataLoader", "", "files/s", "of the directory"], rows)] if rows else []),
        "",
        f"`python -S -c pass`: {start[DISK]:.2f} ms, with the library {start[PRELOAD]:.2f} ms (medians of {STARTS}).",
    ]


def make_table(result: dict[str, Any]) -> str:
    rows = [
        [
            f"{item['reader']}, {item['state']}, {item['times']} x",
            item["where"],
            f"{item['files_per_s']['median']:,.0f}",
            Spread(**item["ratio"]).ratio_text(),
            f"{item['cpu_us_per_file']['median']:.1f}",
            Spread(**item["cpu_ratio"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    settings = result["settings"]
    header = ["reader", "", "files/s", "of the directory", "processor us/file", "of the directory"]
    return "\n".join(
        [
            "# Interception",
            "",
            f"{settings['dataset']}, {settings['rounds']} rounds, {settings['readers']} reader(s). "
            f"{machine.sentence(result['machine'])}.",
            record.load_sentence(result["runs"]),
            f"Caches before cold runs: {settings['drop']}. Ratios: speed relative to the directory in the same round, "
            "by the clock, and by the processor time of the reader alone (directory / contender): median "
            "(lowest-highest).",
            "",
            markdown_table(header, rows),
            *loader_lines(result),
        ]
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=6000)
    parser.add_argument("--mean-bytes", type=int, default=107_000)
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--codec", default="none", help="of the prepared dataset; the files are text unless it is none")
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="interception", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    spec = DatasetSpec(arguments.files, arguments.mean_bytes, 100, compressible=arguments.codec != "none")
    runs: list[dict[str, Any]] = []
    loaded: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        bench = Bench(work, spec, arguments.readers, arguments.codec)
        with bench.mounted():
            bench.measure_start()
            for number in range(1, arguments.rounds + 1):
                for reader in READERS:
                    for state, times in PASSES:
                        shift = number % len(CONTENDERS)
                        for where in CONTENDERS[shift:] + CONTENDERS[:shift]:
                            figures = bench.measure(where, reader, state, times, number)
                            print(
                                f"round {number}: {reader}, {state}, {times} x, {where}: "
                                + ", ".join(f"{key} {value:,.1f}" for key, value in figures.items()),
                                flush=True,
                            )
                            item = {"round": number, "reader": reader, "state": state, "times": times, "where": where}
                            runs.append(item | {"figures": figures, "load_average": os.getloadavg()[0]})
                loaded += load_epochs(bench, number)
            started = {where: [bench.start(where) for _ in range(STARTS)] for where in (DISK, PRELOAD, DISK, PRELOAD)}
        settings = {
            "rounds": arguments.rounds,
            "readers": arguments.readers,
            "dataset": f"{spec}, --codec {arguments.codec}",
            "drop": caches.drop_method(),
        }
        result = {
            "kind": "interception",
            "machine": machine.describe(work),
            "settings": settings,
            "summary": summarize(runs),
            "loaders": summarize_loaders(loaded),
            "start_ms": {where: asdict(Spread.of(values)) for where, values in started.items()},
            "runs": runs,
            "loaded": loaded,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
