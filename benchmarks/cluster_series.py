"""Several jobs on a cluster in a box, and the record of them: ``cluster_series.py NAME --runs DIR``

epochs    4 hosts that compute a tenth longer than raw MPI needs for what is remote, in each way to get at the data
scaling   1 to 16 hosts with as many files each, a link, a disk and a part of the shared file system for each host
plan      1, 2, 4 and 8 hosts, with and without order, and with too little room, beside what fanstore-plan job says
          from what fanstore-plan measure has measured on the same hosts
gain      1, 2, 4 and 8 hosts on a shared file system that stays as it is, with and without FanStore (for the README)
shuffles  8 hosts with half as many files, each shuffle of fanstore.order: what crosses the network, and for how long
retention 8 hosts with memory for a tenth of the data: what is read from there, beside the most that is possible
Each job is a box of its own (cluster_job.py). DIR keeps what each has measured; jobs that are in it are not run again,
so that a series can be measured in pieces (--pieces: so many jobs now). When all are there,
results/cluster-NAME.json.gz (of plan plan-cluster), .md and, of some, .png are written. Root only.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.nextuse import local_share
from cluster.planned import compare, plan_table
from cluster.settings import Settings
from cluster.shuffles import SHUFFLES, expected
from harness import machine, record
from harness.command import BenchmarkError, run
from harness.record import markdown_table
from harness.script import run_script

HERE = Path(__file__).parent
_LIMIT_S = 470.0

#: The shared file system is as fast as raw MPI needs it to be: 12 MB/s and 125 metadata operations/s for each host, the
#: smallest FSx for Lustre (harness/throttled.py), to scale.
SHARED_MB_PER_S, SHARED_METADATA_PER_S, FILES = 11.75, 125.0, 400
#: Of the dataset: memory of a host for what comes from others, in the series retention.
ROOM = 0.1


def of_hosts(hosts: int, **changes: Any) -> Settings:
    """A cluster in which each host brings a part of everything."""
    values: dict[str, Any] = {
        "hosts": hosts,
        "files": FILES * hosts,
        "partitions": 4 * hosts,
        "shared_mb_per_s": SHARED_MB_PER_S * hosts,
        "shared_metadata_per_s": SHARED_METADATA_PER_S * hosts,
    }
    return Settings(**values | changes)


@dataclass(frozen=True)
class Run:
    """One job of a series; without a way, fanstore-plan measure."""

    name: str
    way: str
    settings: Settings


def _epochs() -> Iterator[Run]:
    for way in ("raw", "shared", "copied", "fanstore-off", "fanstore-auto"):
        yield Run(way, way, of_hosts(4, epochs=4))
    yield Run("fanstore-stated", "fanstore-stated", of_hosts(4, epochs=10))
    yield Run("fanstore-stated, staged", "fanstore-stated", of_hosts(4, epochs=10, options=("--stage-first",)))


def _scaling() -> Iterator[Run]:
    """Half as fast as the others, so that two cores suffice for 16 hosts; a link is a quarter faster than they need."""
    for hosts in (1, 4, 16):
        half = {"files": FILES * hosts // 2, "compute_us": 20_000.0, "link_mbit_per_s": 75.0}
        settings = of_hosts(hosts, **half, shared_mb_per_s=SHARED_MB_PER_S * hosts / 2)
        for way in ("fanstore-off", "fanstore-stated"):
            yield Run(f"{way}-{hosts}", way, settings)


def _plan() -> Iterator[Run]:
    for hosts in (1, 2, 4, 8):
        yield Run(f"measured-{hosts}", "", of_hosts(hosts, files=100 * hosts))
        for way in ("fanstore-off", "fanstore-stated"):
            yield Run(f"{way}-{hosts}", way, of_hosts(hosts))
    for way in ("fanstore-off", "fanstore-stated"):
        settings = of_hosts(4)
        yield Run(f"{way}-4-half", way, settings.changed(room_mb=settings.dataset_mb / 4 / 2))


def _retention() -> Iterator[Run]:
    settings = of_hosts(8, epochs=6)
    settings = settings.changed(options=("--cache", str(round(ROOM * settings.dataset_mb * 1e6)), "--stage-first"))
    for way in ("fanstore-off", "fanstore-stated"):
        yield Run(way, way, settings)


def _gain() -> Iterator[Run]:
    """More hosts for the same dataset, as a user adds them; the shared file system is that of four hosts."""
    for hosts in (1, 2, 4, 8):
        settings = of_hosts(hosts, files=4 * FILES, partitions=16)
        settings = settings.changed(
            shared_mb_per_s=SHARED_MB_PER_S * 4, shared_metadata_per_s=SHARED_METADATA_PER_S * 4
        )
        for way in ("shared", "fanstore-stated"):
            yield Run(f"{way}-{hosts}", way, settings.changed(epochs=3, options=("--stage-first",)))


def _shuffles() -> Iterator[Run]:
    """A fifth of the links is free with global shuffling; half as fast as others, so that two cores suffice."""
    for name in SHUFFLES:
        settings = of_hosts(8, files=FILES * 4, compute_us=20_000.0, link_mbit_per_s=60.0, epochs=4, shuffle=name)
        yield Run(name, "fanstore-auto", settings.changed(options=("--stage-first",)))


SERIES = {
    "gain": _gain,
    "epochs": _epochs,
    "scaling": _scaling,
    "plan": _plan,
    "retention": _retention,
    "shuffles": _shuffles,
}
TITLES = {
    "shuffles": "What shuffles read from other nodes, and how long their epochs are",
    "gain": "The same dataset on more hosts, from the shared file system and from FanStore",
    "epochs": "An epoch on a cluster that is bound by computing, in each way to get at the data",
    "scaling": "From 1 to 16 hosts",
    "plan": "What fanstore-plan job says, and what happens",
    "retention": "What 8 hosts keep in memory with room for a tenth of the data",
}


def measure(one: Run, runs: Path) -> None:
    """One job, unless it was measured before."""
    file = runs / f"{one.name}.json"
    if file.exists():
        return
    settings = runs / "settings.toml"
    settings.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in one.settings.as_dict().items()))
    words = [sys.executable, str(HERE / "cluster_job.py"), str(settings)]
    made = runs / "made"
    begin_s = time.monotonic()
    words += ["--way", one.way, "--json", str(made)] if one.way else ["--measure", str(made)]
    done = run(words, _LIMIT_S)
    print(f"{one.name}: {time.monotonic() - begin_s:.0f} s\n{done.stdout}", flush=True)
    text = made.read_text()
    file.write_text(text if one.way else json.dumps({"toml": text, "settings": one.settings.as_dict()}))
    made.unlink()


def ratio(epoch: dict[str, Any]) -> float:
    return float(epoch["seconds"] / epoch["compute_s"])


def _row(name: str, result: dict[str, Any]) -> list[str]:
    epochs = result["epochs"]
    later = epochs[1:] or epochs
    fetched = dict.fromkeys(("local", "remote", "shared"), 0)
    for epoch in epochs:
        for source in fetched:
            fetched[source] += epoch.get("sources", {}).get(source, {}).get("fetched_bytes", 0)
    size = result["dataset_bytes"]
    links = sum(link["received"] for epoch in later for link in epoch["link_bytes"]) / len(later)
    return [
        name,
        f"{result['startup_s']:.1f}",
        f"{ratio(epochs[0]):.3f}",
        f"{sum(map(ratio, later)) / len(later):.3f}",
        f"{max(map(ratio, later)):.3f}",
        f"{result['total']['shared']['bytes'] / size:.3f}",
        f"{links / size:.2f}",
        f"{result['hosts_busy']:.0%}, {result['busy']:.0%}",
    ]


_HEAD = ["", "start-up s", "first epoch", "later, mean", "later, most", "from shared, job", "links, later", "busy"]


def make_table(name: str, result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    runs = result["runs"]
    jobs = {key: value for key, value in runs.items() if "epochs" in value}
    first = Settings.of(next(iter(jobs.values()))["settings"])
    lines = [
        f"# {TITLES[name]}",
        "",
        f"A cluster in a box. {first.sentence()} (in the first row). {first.files // first.hosts} files of about "
        f"{first.file_bytes:,} bytes "
        f"for each host, {first.compute_us / 1e3:g} ms of computing for each, batches of {first.batch}, hosts wait for "
        "each other after each batch; what was read is dropped from the kernel's memory. "
        f"{machine.sentence(result['machine'])}.",
        "",
        "Epochs: seconds over those of computing. From shared: bytes of the whole job, of the dataset; the links, "
        "received by all hosts in an epoch behind the first, likewise. Busy: of this machine's processors, during "
        "the epochs, by what runs on the hosts, and by all (others may have used the machine); above 70 % a figure "
        "says more of them than of the cluster. Staged: with --stage-first. Raw computes nothing: its figure is what "
        "moving alone takes.",
        "",
        markdown_table(_HEAD, [_row(key, value) for key, value in jobs.items()]),
    ]
    if name == "scaling":
        lines += ["", *_efficiency(jobs)]
    if name == "shuffles":
        lines += ["", *_traffic(jobs)]
    if name == "gain":
        lines += ["", *_metadata(jobs)]
    if name == "retention":
        lines += ["", *_kept(jobs)]
    if name == "plan":
        lines += ["", *plan_table(result["compared"])]
    return "\n".join(lines)


def _efficiency(jobs: dict[str, Any]) -> Iterator[str]:
    yield "Efficiency: the time of an epoch on one host over that on so many (epochs behind the first)."
    yield ""
    rows = []
    for way in ("fanstore-off", "fanstore-stated"):
        means = {}
        for key, value in jobs.items():
            if key.startswith(way):
                later = value["epochs"][1:]
                means[value["settings"]["hosts"]] = sum(map(ratio, later)) / len(later)
        rows.append([way, *(f"{means[1] / mean:.3f}" for mean in means.values())])
    yield markdown_table(["hosts", *map(str, means)], rows)


def _traffic(jobs: dict[str, Any]) -> Iterator[str]:
    yield (
        "Epochs behind the first. Remote: bytes read for the first time after they had come from another node, of all "
        "bytes read; expected: samples that cross, as the shuffle itself says, those included that come back to where "
        "their partition is. Nobody says what will be read, but for what hosts own: each remote read of global "
        "shuffling, locality-aware loading and shards is waited for. What is fetched between two epochs, as they are "
        "told, is in no epoch's links. Waited: of the time of an epoch, the host that "
        "waited longest for its files."
    )
    yield ""
    rows = []
    local = jobs["local"]["epochs"][1:]
    shortest = sum(epoch["seconds"] for epoch in local) / len(local)
    for key, value in jobs.items():
        later = value["epochs"][1:]
        remote = [epoch["sources"]["remote"]["bytes"] / epoch["bytes"] for epoch in later]
        waited = [max(host["waited_s"] for host in epoch["hosts"]) / epoch["seconds"] for epoch in later]
        seconds = sum(epoch["seconds"] for epoch in later) / len(later)
        rows.append(
            [
                key,
                f"{sum(remote) / len(remote):.3f}",
                f"{expected(Settings.of(value['settings'])):.3f}",
                f"{seconds:.2f}",
                f"{seconds / shortest:.3f}",
                f"{sum(waited) / len(waited):.3f}",
            ]
        )
    yield markdown_table(["", "remote", "expected", "epoch s", "over local", "waited"], rows)


def _metadata(jobs: dict[str, Any]) -> Iterator[str]:
    yield "Seconds of an epoch, and metadata operations that the shared file system saw in the whole job."
    yield ""
    rows = []
    for key, value in jobs.items():
        seconds = [epoch["seconds"] for epoch in value["epochs"]]
        operations = value["total"]["shared"]["metadata_operations"]
        rows.append([key, f"{seconds[0]:.1f}", f"{sum(seconds[1:]) / len(seconds[1:]):.1f}", f"{operations:,}"])
    yield markdown_table(["", "first", "later", "metadata operations"], rows)


def _kept(jobs: dict[str, Any]) -> Iterator[str]:
    yield (
        "Local: reads that did not come over the network, in epochs behind the first; bound: the most that is possible "
        "with the home share and as much room, by next use (cluster/nextuse.py)."
    )
    yield ""
    rows = []
    for key, value in jobs.items():
        later = value["epochs"][1:]
        remote = sum(epoch["sources"]["remote"]["fetched_bytes"] for epoch in later)
        share = 1 - remote / sum(epoch["bytes"] for epoch in later)
        rows.append([key, f"{share:.3f}", f"{local_share(Settings.of(value['settings']), ROOM):.3f}"])
    yield markdown_table(["", "local", "bound"], rows)


def series(arguments: argparse.Namespace) -> None:
    name, runs = arguments.series, arguments.runs
    if arguments.pieces < 1:
        raise BenchmarkError("--pieces is 1 or more")
    runs.mkdir(exist_ok=True)
    todo = list(SERIES[name]())
    missing = [one for one in todo if not (runs / f"{one.name}.json").exists()]
    for one in missing[: arguments.pieces]:
        measure(one, runs)
    if missing[arguments.pieces :]:
        print(f"{len(missing) - arguments.pieces} jobs are left")
        return
    results = {one.name: json.loads((runs / f"{one.name}.json").read_text()) for one in todo}
    result = {"kind": "cluster", "series": name, "machine": machine.describe(runs), "runs": results}
    if name == "plan":
        result["compared"] = compare(results)
    drawn = name in ("gain", "epochs", "scaling")
    record.write(
        "plan-cluster" if name == "plan" else f"cluster-{name}",
        result,
        make_table(name, result),
        arguments.results,
        picture=drawn,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", choices=SERIES)
    parser.add_argument("--runs", type=Path, required=True, help="a directory for what each job has measured")
    parser.add_argument("--pieces", type=int, default=99, help="jobs that are run now (default: all)")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the job that runs is ended as after Ctrl-C
    return run_script(lambda: series(arguments))


if __name__ == "__main__":
    sys.exit(main())
