"""How the cost of reading grows with readers, files in the index, file size, and threads of the native engine.

Example: python benchmarks/growth.py --parts readers files sizes threads --rounds 3

Each part changes one number and keeps the others; the source directory is read beside FanStore in every round, cold (a
fresh mount, and the kernel's caches emptied) and warm (again, in another order). Of a dataset with very many files a
random sample is read, so that what grows is the index and not the reading. Writes results/NAME.json.gz (every pass),
NAME.md and NAME.png.
"""

import argparse
import os
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, record
from harness.caches import back_memory, drop, drop_method
from harness.dataset import Dataset, DatasetSpec, make
from harness.peers import Fanstore, Peer, Source
from harness.reading import Readers
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

STATES = ("cold", "warm")
TITLES = {
    "readers": "readers at work at once",
    "files": "files in the dataset",
    "sizes": "bytes per file",
    "threads": "threads of the native engine",
}
READER_COUNTS = (1, 2, 4, 8)
FILE_COUNTS = (10**3, 10**4, 10**5, 10**6)
FILE_SIZES = (4 << 10, 16 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
THREAD_COUNTS = (2, 4, 8, 16)
#: Content of a file of the part ``files``: one sector pair of a disk, and the least that ext4 gives a file.
SMALL_BYTES = 1000
IMAGE_BYTES = 107_000


@dataclass(frozen=True)
class Case:
    """One point of a curve.

    Attributes:
        part, value: which curve, and where on it.
        spec: the dataset; ``sample`` of its files are read, or all.
    """

    part: str
    value: int
    spec: DatasetSpec
    readers: int
    peers: tuple[Peer, ...]
    sample: int | None = None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--files", type=int, default=4000, help="of the parts readers and threads, and sampled")
    parser.add_argument("--size-bytes", type=int, default=256 << 20, help="of each dataset of the part sizes, at most")
    parser.add_argument("--most-files", type=int, default=FILE_COUNTS[-1], help="of the part files; 10^6 need 8 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-passes", type=int, default=3, help="in each round; their median counts")
    parser.add_argument("--readers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pass-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    parser.add_argument("--name", default="growth", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def _usual_peers() -> tuple[Peer, ...]:
    return (Source(), Fanstore("none", "native"), Fanstore("none", "native", staged=True))


def cases(arguments: argparse.Namespace) -> Iterator[list[Case]]:
    """The points of all curves; those of one list share a dataset."""
    images = DatasetSpec(arguments.files, IMAGE_BYTES, 100)
    if "readers" in arguments.parts:
        peers = _usual_peers()
        yield [Case("readers", count, images, count, peers) for count in READER_COUNTS]
    if "threads" in arguments.parts:
        ways = {count: Fanstore("none", "native", staged=True, workers=count) for count in THREAD_COUNTS}
        yield [Case("threads", count, images, arguments.readers, (Source(), way)) for count, way in ways.items()]
    if "sizes" in arguments.parts:
        for size in FILE_SIZES:
            spec = DatasetSpec(min(arguments.files, arguments.size_bytes // size), size, 20, spread=0)
            yield [Case("sizes", size, spec, arguments.readers, _usual_peers())]
    if "files" in arguments.parts:
        for count in FILE_COUNTS:
            if count <= arguments.most_files:
                spec = DatasetSpec(count, SMALL_BYTES, max(1, count // 1000), spread=0)
                yield [Case("files", count, spec, arguments.readers, _usual_peers(), arguments.files)]


class Growth:
    """One run of the benchmark; ``passes`` are the raw results, in the order in which they were taken."""

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.passes: list[dict[str, Any]] = []
        self._arguments = arguments
        self._work = work
        self._mountpoint = work / "mount"
        self._mountpoint.mkdir()
        self._readers = {
            count: Readers(work, count, arguments.pass_timeout) for count in {*READER_COUNTS, arguments.readers}
        }

    def measure(self, together: list[Case]) -> None:
        """All rounds of cases that share a dataset, which is made before and removed afterwards."""
        directory = self._work / "case"
        directory.mkdir()
        dataset = make(directory / "source", together[0].spec)
        print(f"dataset: {dataset.description}")
        for peer in dict.fromkeys(peer for case in together for peer in case.peers):
            peer.prepare(dataset.root, directory)
        for number in range(1, self._arguments.rounds + 1):
            chance = random.Random(number)
            turn = list(together)
            chance.shuffle(turn)
            for case in turn:
                self._measure_round(case, dataset, number, chance)
        shutil.rmtree(directory)

    def _measure_round(self, case: Case, dataset: Dataset, number: int, chance: random.Random) -> None:
        paths = list(dataset.paths)
        if case.sample is not None:
            paths = chance.sample(paths, min(case.sample, len(paths)))
        total_bytes = dataset.total_bytes if case.sample is None else len(paths) * case.spec.mean_bytes
        orders = {state: chance.sample(paths, len(paths)) for state in STATES}
        peers = list(case.peers)
        chance.shuffle(peers)
        for peer in peers:
            with peer.mounted(self._mountpoint):
                drop(peer.files())
                back_memory()
                for state in ["cold"] + ["warm"] * self._arguments.warm_passes:
                    load = os.getloadavg()[0]
                    root = peer.root(self._mountpoint)
                    result = self._readers[case.readers].read("c", root, orders[state], total_bytes)
                    print(
                        f"round {number}: {case.part} {case.value:9,} {peer.name:34} {state}: "
                        f"{result.files_per_s:9,.0f} files/s, {result.bytes / result.seconds / 1e6:7,.0f} MB/s"
                    )
                    self.passes.append(
                        {"round": number, "part": case.part, "value": case.value, "peer": peer.name, "state": state}
                        | asdict(result)
                        | {"load_average": load}
                    )


def summarize(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per point, peer and state: files and bytes per second, and the ratio to the source in the same round."""
    rates: dict[tuple[str, int, str, str, int], list[float]] = {}
    mean_bytes = {}
    for item in passes:
        # The threads are a property of the engine, not another file system: one curve.
        peer = "fanstore-none-native-staged" if item["part"] == "threads" and item["peer"] != "source" else item["peer"]
        key = (item["part"], item["value"], peer, item["state"], item["round"])
        rates.setdefault(key, []).append(item["files"] / item["seconds"])
        mean_bytes[item["part"], item["value"]] = item["bytes"] / item["files"]
    middle = {key: median(values) for key, values in rates.items()}
    summary = []
    for part, value, peer, state in dict.fromkeys(key[:4] for key in middle):
        rounds = [key[4] for key in middle if key[:4] == (part, value, peer, state)]
        own = [middle[part, value, peer, state, number] for number in rounds]
        ratios = [
            middle[part, value, peer, state, number] / middle[part, value, "source", state, number] for number in rounds
        ]
        summary.append(
            {"part": part, "value": value, "peer": peer, "state": state}
            | {"files_per_s": asdict(Spread.of(own)), "mb_per_s": median(own) * mean_bytes[part, value] / 1e6}
            | {"ratio_to_source": asdict(Spread.of(ratios)), "ratios": ratios}
        )
    return summary


def make_table(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [
        "# How the cost of reading grows",
        "",
        f"{settings['readers']} readers in C unless said otherwise, {settings['rounds']} rounds. "
        f"{machine.sentence(result['machine'])}.",
        f"Cold: fresh mount, caches emptied with {settings['cold_by']}. Warm: the next {settings['warm_passes']} "
        "passes, in another order; their median counts. Staged: partitions copied to a local disk first.",
        "Ratio: files per second relative to the source directory in the same round: median (lowest-highest).",
        record.load_sentence(result["passes"]),
        "",
    ]
    for part in settings["parts"]:
        here = [item for item in result["summary"] if item["part"] == part]
        points = sorted({item["value"] for item in here})
        peers = ("source", "fanstore-none-native", "fanstore-none-native-staged")
        rows = []
        for value in points:
            for peer in peers:
                cells = {item["state"]: item for item in here if (item["value"], item["peer"]) == (value, peer)}
                if not cells:
                    continue
                row = [f"{value:,} {peer}"]
                for state in STATES:
                    item = cells[state]
                    row.append(Spread(**item["ratio_to_source"]).ratio_text())
                    row.append(f"{item['files_per_s']['median']:,.0f}")
                    row.append(f"{item['mb_per_s']:,.0f}")
                rows.append(row)
        columns = [f"{state} {what}" for state in STATES for what in ("ratio", "files/s", "MB/s")]
        lines += [f"## {TITLES[part].capitalize()}", "", result["datasets"][part], ""]
        lines += [markdown_table([TITLES[part], *columns], rows), ""]
    return "\n".join(lines)


def describe_datasets(arguments: argparse.Namespace) -> dict[str, str]:
    images = str(DatasetSpec(arguments.files, IMAGE_BYTES, 100))
    return {
        "readers": f"{images}.",
        "threads": f"{images}, staged, {arguments.readers} readers.",
        "sizes": f"At most {arguments.files:,} files and {arguments.size_bytes >> 20} MiB of one size in 20 folders.",
        "files": f"Files of {SMALL_BYTES:,} bytes, 1,000 to a folder; {arguments.files:,} drawn at random are read.",
    }


def benchmark(arguments: argparse.Namespace) -> None:
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        growth = Growth(arguments, work)
        for together in cases(arguments):
            growth.measure(together)
        result = {
            "kind": "growth",
            "machine": description,
            "versions": {"fanstore": Fanstore("none").version()},
            "settings": {
                "parts": arguments.parts,
                "readers": arguments.readers,
                "rounds": arguments.rounds,
                "warm_passes": arguments.warm_passes,
                "cold_by": drop_method(),
            },
            "titles": TITLES,
            "datasets": describe_datasets(arguments),
            "summary": summarize(growth.passes),
            "passes": growth.passes,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
