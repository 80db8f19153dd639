"""One training job on a cluster in a box, in one way to get at its data; and what was measured of it.

Owns the sequence: shared file system, hosts, staging if the way has one, readers, figures. Runs inside a box (box.py),
on the main thread; what it starts ends with the box at the latest.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.command import BenchmarkError, program, run
from harness.dataset import DatasetSpec, make
from harness.throttled import Profile, Throttled, build, throttled

from cluster.box import directory
from cluster.hosts import Hosts
from cluster.meeting import Meeting
from cluster.orders import Spec, order_option
from cluster.settings import Settings

HERE = Path(__file__).parent
#: A job takes no longer.
LIMIT_S = 460.0
_MEASURE_LIMIT_S = 240.0
#: Processor time of all cores as /proc/stat has it: what is work, what the host of a virtual machine took away.
_FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BUSY = ("user", "nice", "system", "irq", "softirq")
#: Everything is slower than in reality, and so requests are shorter: one that reads much does not hold up the others,
#: and what is read ahead is no second's work.
_SLICE_BYTES, _READ_AHEAD_KIB = 64 << 10, 1024
#: Threads that are named with their part of the processors' time.
_WORK_MOST = 8
#: Of what the prefetcher says, those values that are kept.
_ORDER = ("source", "predicted", "prefetched", "taken", "late", "waited_s", "files", "held_bytes", "window_bytes")


def processor_ticks() -> dict[str, int]:
    """Of all cores since the machine has started."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return dict(zip(_FIELDS, map(int, words), strict=False))


def busy_share(before: dict[str, int], after: dict[str, int]) -> float:
    """The part of the processors' time that was work between two looks."""
    spent = {name: after[name] - before[name] for name in _FIELDS}
    return sum(spent[name] for name in _BUSY) / max(1, sum(spent.values()))


def work_ticks() -> dict[str, int]:
    """Processor time so far of all threads in the box that are alive, by program and name of the thread."""
    total: dict[str, int] = {}
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        try:
            words = (task.parent.parent / "cmdline").read_bytes().decode(errors="replace").split("\0")[:2]
            name, _, numbers = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        except OSError:
            continue  # it has ended
        program_name = Path(words[-1] if "python" in words[0] else words[0]).name
        values = numbers.split()
        key = f"{program_name}/{name}"
        total[key] = total.get(key, 0) + int(values[11]) + int(values[12])
    return total


class Job:
    """One job; ``run`` once.

    Attributes:
        served: the directory behind the shared file system: ``tree`` and ``data.fan``.
    """

    def __init__(self, settings: Settings, way: str, served: Path) -> None:
        self.settings = settings
        self.way = way
        self.served = served
        self._directory = directory()

    def _profile(self) -> Profile:
        settings = self.settings
        return Profile(
            name="cluster",
            metadata_latency_us=settings.shared_latency_us,
            metadata_rate=settings.shared_metadata_per_s,
            read_latency_us=settings.shared_latency_us,
            bandwidth=settings.shared_mb_per_s * 1e6,
            timeout_s=3600.0,
            why="settings",
            slice_bytes=_SLICE_BYTES,
            read_ahead_kib=_READ_AHEAD_KIB,
        )

    def _throttled(self, writable: bool) -> Any:
        clients = self._directory / "clients"
        clients.mkdir()
        server = build(self._directory)
        return throttled(
            server,
            self._profile(),
            self.served,
            clients,
            self.settings.hosts,
            keep_data=not self.settings.forget,
            writable=writable,
        )

    # --- a job ---

    def run(self) -> dict[str, Any]:
        """The figures; BenchmarkError if it does not come to its end."""
        with self._throttled(writable=False) as shared:
            hosts = Hosts(self.settings, shared.clients)
            hosts.start()
            spec = self._spec(hosts)
            meeting = Meeting(Path(spec.meeting), self.settings.hosts, lambda: self._look(hosts, shared))
            begin = self._look(hosts, shared)
            begin_s = time.monotonic()
            copied_s = self._copy(hosts) if self.way == "copied" else 0.0
            meeting.start()
            self._run_readers(hosts, spec)
            meeting.join()
            if meeting.problem:
                raise BenchmarkError(meeting.problem)
            end = self._look(hosts, shared)
            lines = [self._lines(rank) for rank in range(self.settings.hosts)]
            started_s = max(line[0]["started_s"] for line in lines) - begin_s
            return {
                "way": self.way,
                "settings": self.settings.as_dict(),
                "startup_s": copied_s or started_s,
                "epochs": [self._epoch(number, lines, meeting.samples) for number in range(self.settings.epochs)],
                "total": self._between(begin, end),
                "peak_memory_mb": hosts.peaks_mb(),
                "dataset_bytes": sum(spec.sizes),
                **self._busy(meeting.samples),
            }

    def _busy(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        between = self._between(samples[0], samples[-1])
        return {name: between[name] for name in ("busy", "hosts_busy")}

    def _look(self, hosts: Hosts, shared: Throttled) -> dict[str, Any]:
        traffic = [asdict(each) for each in hosts.traffic()]
        look = {"ticks": processor_ticks(), "used_s": hosts.used_s(), "work": work_ticks()}
        return look | {"shared": asdict(shared.counts()), "traffic": traffic}

    def _spec(self, hosts: Hosts) -> Spec:
        settings = self.settings
        tree = self.served / "tree"
        paths = sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file())
        place = {"shared": hosts.shared / "tree", "copied": hosts.local / "tree"}.get(self.way, hosts.mount)
        names = ("hosts", "epochs", "batch", "seed", "workers", "ahead", "compute_us", "together", "forget", "shuffle")
        spec = Spec(
            root=str(place),
            mount=str(hosts.mount) if self.way.startswith("fanstore") else "",
            prepared=str(hosts.shared / "data.fan"),
            meeting=str(self._directory / "meeting"),
            figures=str(self._directory),
            paths=paths,
            sizes=[(tree / path).stat().st_size for path in paths],
            **{name: getattr(settings, name) for name in names},
        )
        spec.write(self._directory / "spec")
        return spec

    def _copy(self, hosts: Hosts) -> float:
        """All files to each host's own disk, on all hosts at once; seconds."""
        begin_s = time.monotonic()
        words = ["cp", "--recursive", str(hosts.shared / "tree"), str(hosts.local)]
        script = '"$@" && sync --file-system "$0"'  # a copy is one when it is on the disk
        self._together(
            [[*hosts.on(rank), "sh", "-c", script, str(hosts.local), *words] for rank in self._ranks()], hosts
        )
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return time.monotonic() - begin_s

    def _ranks(self) -> range:
        return range(self.settings.hosts)

    def _run_readers(self, hosts: Hosts, spec: Spec) -> None:
        reader = [sys.executable, str(HERE / "reader.py"), str(self._directory / "spec")]
        if self.way in ("shared", "copied"):
            self._together([[*hosts.on(rank), *reader, str(rank)] for rank in self._ranks()], hosts)
        elif self.way == "raw":
            raw = [sys.executable, str(HERE / "raw.py"), str(self._directory / "spec"), str(hosts.local)]
            self._together([[*hosts.mpirun(), *raw]], hosts)
        else:
            self._together([[*self._mounter(hosts, spec), "--", *reader]], hosts)

    def _mounter(self, hosts: Hosts, spec: Spec) -> list[str]:
        word = self.way.removeprefix("fanstore-")
        order = order_option(self.settings.seed) if word == "stated" else word
        options = ["--local", str(hosts.local / "fanstore"), "--order", order, *self.settings.options]
        if self.settings.room_mb:
            options += ["--capacity", str(round(self.settings.room_mb * 1e6))]
        return [*hosts.mpirun(), program("fanstore-mount"), spec.prepared, str(hosts.mount), *options]

    def _together(self, commands: Sequence[Sequence[str]], hosts: Hosts, limit_s: float = LIMIT_S) -> None:
        """Run commands at once; BenchmarkError with what they have said when one fails or they take too long."""
        logs = [self._directory / f"log-{number}" for number in range(len(commands))]
        processes = []
        for argv, log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=hosts.environment()
                    )
                )
        deadline_s = time.monotonic() + limit_s
        for process, log in zip(processes, logs, strict=True):
            try:
                code = process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise BenchmarkError(f"the job takes longer than {limit_s:.0f} s: {_last_lines(log)}") from None
            if code:
                raise BenchmarkError(f"a command of the job ended with code {code}: {_last_lines(log)}")

    # --- figures ---

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        lines = (self._directory / f"figures-{rank}").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def _between(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """What the machine has done between two looks."""
        links = [
            {way: later[way] - earlier[way] for way in later}
            for earlier, later in zip(before["traffic"], after["traffic"], strict=True)
        ]
        ticks = sum(after["ticks"].values()) - sum(before["ticks"].values())
        work = {name: value - before["work"].get(name, 0) for name, value in after["work"].items()}
        largest = sorted(work.items(), key=lambda item: -item[1])[:_WORK_MOST]
        return {
            "busy": busy_share(before["ticks"], after["ticks"]),
            "hosts_busy": (after["used_s"] - before["used_s"]) / max(0.01, ticks / _TICKS_PER_S),
            "work": {name: round(value / max(1, ticks), 4) for name, value in largest},
            "shared": {name: after["shared"][name] - before["shared"][name] for name in after["shared"]},
            "link_bytes": links,
        }

    def _epoch(self, number: int, lines: list[list[dict[str, Any]]], samples: list[dict[str, Any]]) -> dict[str, Any]:
        """One epoch of all hosts: it has ended when the slowest has."""
        own = [line[1 + number] for line in lines]
        before, after = samples[2 * number], samples[2 * number + 1]
        seconds = max(line["seconds"] for line in own)
        compute_s = max(line["files"] for line in own) * self.settings.compute_us / 1e6
        figures: dict[str, Any] = {
            "epoch": number,
            "seconds": seconds,
            "compute_s": compute_s,
            "files": sum(line["files"] for line in own),
            "bytes": sum(line["bytes"] for line in own),
            "hosts": [{key: value for key, value in line.items() if key not in ("before", "after")} for line in own],
        }
        if self.way.startswith("fanstore"):
            figures["sources"] = _sources(own)
            figures["order"] = [{key: line["after"].get("order", {}).get(key) for key in _ORDER} for line in own]
        return figures | self._between(before, after)

    # --- measuring the parameters of the planner ---

    def measure(self, file: Path) -> None:
        """fanstore-plan measure on all hosts; ``file`` gets what it writes."""
        with self._throttled(writable=True) as shared:
            hosts = Hosts(self.settings, shared.clients)
            hosts.start()
            scratch = self.served / "scratch"
            scratch.mkdir(exist_ok=True)
            written = self._directory / "measured.toml"
            words = ["measure", str(written), "--shared", str(hosts.shared / "scratch"), "--local", str(hosts.local)]
            words += ["--dataset", str(hosts.shared / "data.fan"), "--load", "512MiB"]
            self._together([[*hosts.mpirun(), program("fanstore-plan"), *words]], hosts, _MEASURE_LIMIT_S)
            file.write_text(written.read_text())


def _sources(lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Of all hosts together, by name of the source: what was read from it, and fetched."""
    total: dict[str, dict[str, int]] = {}
    for line in lines:
        for name, counters in line["after"]["sources"].items():
            sums = total.setdefault(name, {})
            for key, value in counters.items():
                sums[key] = sums.get(key, 0) + value - line["before"]["sources"][name][key]
    return total


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return " | ".join(line.strip() for line in lines[-15:] if line.strip(" -"))


def prepare(served: Path, settings: Settings) -> None:
    """The dataset of a job below a directory, unless it is there."""
    spec = DatasetSpec(settings.files, settings.file_bytes, settings.classes)
    mark = served / "made"
    text = f"{spec}, {settings.partitions} partitions\n"
    if mark.exists():
        if mark.read_text() != text:
            raise BenchmarkError(f"{served} holds another dataset: {mark.read_text().strip()}, not {text.strip()}")
        return
    if any(served.iterdir()):
        raise BenchmarkError(f"{served} is not empty and holds no dataset that was made here")
    make(served / "tree", spec)
    words = [program("fanstore-prep"), str(served / "tree"), str(served / "data.fan"), "--codec", "none"]
    run([*words, "--partitions", str(settings.partitions)], LIMIT_S)
    os.sync()
    mark.write_text(text)
