"""The same random read of the same files on the source directory, on FanStore, and on its peers, in one run.

Example: python benchmarks/read_peers.py --files 6000 --readers 2 --rounds 3

In every round each peer in turn is mounted afresh, the kernel's caches are emptied, and all files are read once in
random order (cold) and then several times in another one (warm). Then it is mounted once more, the bytes of its image
are brought into the page cache, and all files are read once (first: the first epoch, without the disk). The order of
the peers changes from round to round, so that a noisy neighbour on the machine does not always hit the same one.
Figures are ratios to the source within a round, and of FanStore's engines to each other. Writes results/NAME.json.gz
(every pass), NAME.md (the table) and NAME.png. Needs nothing but a C compiler; peers that are not installed are named
and left out (benchmarks/setup-peers installs them).
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, record
from harness.builds import add_build_option, builds_of
from harness.caches import back_memory, drop, drop_method, files_below
from harness.command import BenchmarkError
from harness.dataset import Dataset, DatasetSpec, make, take
from harness.peers import Peer, all_peers
from harness.reading import READER_NAMES, Readers
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.workspace import workspace

STATES = ("cold", "warm", "first")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("what is read")
    data.add_argument("--dataset", type=Path, help="an existing tree, read as it is (default: a tree is made)")
    data.add_argument("--files", type=int, default=6000)
    data.add_argument("--mean-bytes", type=int, default=107_000, help="as ImageNet's JPEGs")
    data.add_argument("--classes", type=int, default=100)
    data.add_argument("--compressible", action="store_true", help="text in place of bytes that do not shrink")
    how = parser.add_argument_group("how")
    how.add_argument("--peers", nargs="+", metavar="NAME", help="only these (default: all that are installed)")
    how.add_argument("--engine", action="append", default=[], help="FanStore's engine; may be given several times")
    add_build_option(how)
    how.add_argument("--rounds", type=int, default=3)
    how.add_argument("--warm-passes", type=int, default=3, help="in each round; their median counts")
    how.add_argument("--readers", type=int, default=len(os.sched_getaffinity(0)))
    how.add_argument("--reader", nargs="+", choices=READER_NAMES, default=["c"])
    how.add_argument("--pass-timeout", type=float, default=300.0, metavar="SECONDS")
    how.add_argument("--work-dir", type=Path, help="where data and images are made (a disk, not tmpfs)")
    how.add_argument("--name", default="read-peers", help="of the files in results/")
    how.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def choose_peers(arguments: argparse.Namespace) -> tuple[list[Peer], dict[str, str]]:
    """The peers that take part, and why the others do not."""
    known = all_peers(arguments.engine, builds_of(arguments))
    wanted = set(arguments.peers or [peer.name for peer in known]) | {"source"}
    unknown = wanted - {peer.name for peer in known}
    if unknown:
        raise BenchmarkError(f"no such peer: {', '.join(unknown)}; there are {', '.join(peer.name for peer in known)}")
    chosen = []
    missing = {}
    for peer in known:
        reason = peer.missing()
        if peer.name in wanted and reason is None:
            chosen.append(peer)
        elif peer.name in wanted and reason is not None:
            missing[peer.name] = reason
            print(f"missing: {peer.name} ({reason}); benchmarks/setup-peers installs peers")
    return chosen, missing


def resident_bytes(pid: int | None) -> int | None:
    """Memory of the process that serves the mount."""
    if pid is None:
        return None
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return None


class Comparison:
    """One run of the benchmark.

    Attributes:
        peers: those still taking part; a peer that fails is moved to ``failed`` with the reason and not tried again.
        prepared: per peer the seconds and bytes of its preparation.
        passes: the raw results, one per pass, in the order in which they were taken.
    """

    def __init__(
        self, peers: list[Peer], dataset: Dataset, readers: Readers, warm_passes: int, directory: Path
    ) -> None:
        self.peers = peers
        self.failed: dict[str, str] = {}
        self.prepared: dict[str, dict[str, float]] = {}
        self.passes: list[dict[str, Any]] = []
        self._dataset = dataset
        self._readers = readers
        self._warm_passes = warm_passes
        self._directory = directory
        self._mountpoint = directory / "mount"
        self._mountpoint.mkdir()

    def _give_up(self, peer: Peer, error: BenchmarkError | OSError) -> None:
        if peer.name == "source":
            raise BenchmarkError(f"the source itself cannot be read: {error}") from error
        print(f"failed: {peer.name}: {error}")
        self.failed[peer.name] = str(error)
        self.peers.remove(peer)

    def prepare(self) -> None:
        """Make every peer's image and compare all bytes with the source, once."""
        expected = self._readers.digests(self._dataset.root, self._dataset.paths)
        for peer in list(self.peers):
            try:
                begin = time.monotonic()
                peer.prepare(self._dataset.root, self._directory)
                seconds = time.monotonic() - begin
                size = sum(path.stat().st_size for path in files_below(peer.image))
                self.prepared[peer.name] = {"seconds": round(seconds, 3), "bytes": size}
                with peer.mounted(self._mountpoint):
                    self._readers.check_same(peer.root(self._mountpoint), self._dataset, expected)
            except (BenchmarkError, OSError) as error:
                self._give_up(peer, error)
            else:
                print(f"prepared: {peer.name} in {seconds:.1f} s, {size >> 20} MiB, same bytes as the source")

    def measure(self, round_number: int, reader: str) -> None:
        """One round: every peer cold, then warm several times (a warm pass can be over in a twentieth of a second)."""
        chance = random.Random(round_number)
        turn = list(self.peers)
        chance.shuffle(turn)
        orders = {state: list(self._dataset.paths) for state in STATES}
        for order in orders.values():
            chance.shuffle(order)  # the same for every peer of this round
        for peer in turn:
            try:
                self._measure_peer(peer, round_number, reader, orders)
            except (BenchmarkError, OSError) as error:
                self._give_up(peer, error)

    def _measure_peer(self, peer: Peer, round_number: int, reader: str, orders: dict[str, list[str]]) -> None:
        cold_and_warm = ["cold"] + ["warm"] * self._warm_passes
        # After mounting: a cold mount, and nothing that mounting has brought into memory.
        self._measure_mount(peer, round_number, reader, orders, cold_and_warm, lambda: drop(peer.files()))
        self._measure_mount(peer, round_number, reader, orders, ["first"], peer.warm_up)

    def _measure_mount(
        self,
        peer: Peer,
        round_number: int,
        reader: str,
        orders: dict[str, list[str]],
        states: list[str],
        make_ready: Callable[[], None],
    ) -> None:
        """Passes over one fresh mount."""
        begin = time.monotonic()
        with peer.mounted(self._mountpoint) as pid:
            mount_seconds = time.monotonic() - begin
            served_by = peer.served_by(self._mountpoint)
            make_ready()
            back_memory()
            for state in states:
                load = os.getloadavg()[0]
                root = peer.root(self._mountpoint)
                under = peer.under(self._mountpoint)
                result = self._readers.read(reader, root, orders[state], self._dataset.total_bytes, under)
                print(
                    f"round {round_number}: {peer.name:27} {reader:6} {state:5}: {result.files_per_s:9,.0f} files/s, "
                    f"{result.bytes / result.seconds / 1e6:7,.0f} MB/s, p99 {result.latency_us['p99']:8,.0f} µs"
                )
                self.passes.append(
                    {"round": round_number, "peer": peer.name, "reader": reader, "state": state}
                    | asdict(result)
                    | {
                        "served_by": served_by,
                        "mount_seconds": round(mount_seconds, 4),
                        "daemon_rss_bytes": resident_bytes(pid),
                        "load_average": load,
                    }
                )


def summarize(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per reader, peer and state: files per second of each round, and the ratios to the source in the same round."""
    groups: dict[tuple[str, str, str], dict[int, list[dict[str, Any]]]] = {}
    for item in passes:
        rounds = groups.setdefault((item["reader"], item["peer"], item["state"]), {})
        rounds.setdefault(item["round"], []).append(item)
    rates = {
        key: {number: median(item["files"] / item["seconds"] for item in items) for number, items in rounds.items()}
        for key, rounds in groups.items()
    }
    summary = []
    for (reader, peer, state), rounds in groups.items():
        own = rates[reader, peer, state]
        source = rates[reader, "source", state]
        ratios = [own[number] / source[number] for number in rounds]
        everything = [item for items in rounds.values() for item in items]
        summary.append(
            {"reader": reader, "peer": peer, "state": state}
            | {"files_per_s": asdict(Spread.of(list(own.values()))), "ratio_to_source": asdict(Spread.of(ratios))}
            | {f"{share}_us": median(item["latency_us"][share] for item in everything) for share in ("p50", "p99")}
            | {"ratios": ratios}
        )
    return summary


def compare_engines(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files per second of the native engine relative to the Python engine, per dataset, reader and state."""
    rates: dict[tuple[str, str, str, int], list[float]] = {}
    for item in passes:
        key = (item["peer"], item["reader"], item["state"], item["round"])
        rates.setdefault(key, []).append(item["files"] / item["seconds"])
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for (peer, reader, state, number), values in rates.items():
        reference = rates.get((peer.replace("-native", "-python"), reader, state, number))
        if "-native" in peer and reference is not None:
            ratios.setdefault((peer, reader, state), []).append(median(values) / median(reference))
    return [
        {"peer": peer, "reader": reader, "state": state, "ratios": values, "ratio": asdict(Spread.of(values))}
        for (peer, reader, state), values in ratios.items()
    ]


def make_engines_table(engines: list[dict[str, Any]], reader: str) -> list[str]:
    cells = {(item["peer"], item["state"]): Spread(**item["ratio"]) for item in engines if item["reader"] == reader}
    peers = list(dict.fromkeys(peer for peer, _ in cells))
    rows = [[peer, *(cells[peer, state].ratio_text() for state in STATES)] for peer in peers]
    if not rows:
        return []
    header = [f"native to python engine, {reader} reader", *STATES]
    return [markdown_table(header, rows), ""]


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    settings = result["settings"]
    lines = [
        f"# Random whole-file reads: {result['dataset']['description']}",
        "",
        f"{settings['readers']} readers, {settings['rounds']} rounds. {machine.sentence(result['machine'])}.",
        f"Cold: fresh mount, caches emptied with {settings['cold_by']}. Warm: the next "
        f"{settings['warm_passes']} passes, in another order; their median counts. First: fresh mount, the image "
        "in the page cache (of a staged dataset: what staging left there); for the source that is warm.",
        "Ratio: files per second relative to the source directory in the same round: median (lowest-highest).",
        record.load_sentence(result["passes"]),
        "",
    ]
    for reader in settings["reader"]:
        rows = []
        for peer in [item["peer"] for item in result["prepared"]]:
            cells = {
                item["state"]: item for item in result["summary"] if (item["peer"], item["reader"]) == (peer, reader)
            }
            if not cells:
                continue
            row = [peer]
            for state in STATES:
                item = cells.get(state)
                if item is None:
                    row += ["failed", "", ""]
                    continue
                row.append(Spread(**item["ratio_to_source"]).ratio_text())
                row.append(f"{item['files_per_s']['median']:,.0f}")
                row.append(f"{item['p50_us']:,.0f} / {item['p99_us']:,.0f}")
            rows.append(row)
        columns = [f"{state} {what}" for state in STATES for what in ("ratio", "files/s", "p50 / p99 µs")]
        lines += [f"Reader: {reader}", "", markdown_table([f"{reader} reader", *columns], rows), ""]
        lines += make_engines_table(result["engines"], reader)
    prepared = [
        [item["peer"], f"{item['seconds']:.1f}", f"{item['bytes'] / 1e6:,.0f}", result["versions"][item["peer"]]]
        for item in result["prepared"]
    ]
    lines += [markdown_table(["peer", "prepared in s", "size MB", "version"], prepared), ""]
    lines += [f"Missing: {name} ({reason})." for name, reason in result["missing"].items()]
    lines += [f"Failed: {name} ({reason})." for name, reason in result["failed"].items()]
    return "\n".join(lines)


def benchmark(arguments: argparse.Namespace) -> None:
    peers, missing = choose_peers(arguments)
    versions = {peer.name: peer.version() for peer in peers}
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        if description["file_system"].startswith("tmpfs"):
            print(f"note: {work} is in memory, so that cold is not cold; choose a disk with --work-dir")
        if arguments.dataset is not None:
            dataset = take(arguments.dataset)
        else:
            spec = DatasetSpec(arguments.files, arguments.mean_bytes, arguments.classes, arguments.compressible)
            dataset = make(work / "source", spec)
        print(f"dataset: {dataset.description}, {dataset.total_bytes >> 20} MiB")
        readers = Readers(work, arguments.readers, arguments.pass_timeout)
        comparison = Comparison(peers, dataset, readers, arguments.warm_passes, work)
        comparison.prepare()
        for round_number in range(1, arguments.rounds + 1):
            for reader in arguments.reader:
                comparison.measure(round_number, reader)
        result = {
            "kind": "read_peers",
            "machine": description,
            "versions": versions,
            "dataset": {"description": dataset.description, "files": len(dataset.paths), "bytes": dataset.total_bytes},
            "settings": {
                "readers": arguments.readers,
                "reader": arguments.reader,
                "rounds": arguments.rounds,
                "warm_passes": arguments.warm_passes,
                "cold_by": drop_method(),
            },
            "missing": missing,
            "failed": comparison.failed,
            "prepared": [{"peer": name} | figures for name, figures in comparison.prepared.items()],
            "summary": summarize(comparison.passes),
            "engines": compare_engines(comparison.passes),
            "passes": comparison.passes,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
