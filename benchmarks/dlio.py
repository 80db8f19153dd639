"""DLIO's resnet50, unet3d and cosmoflow, scaled down, on a local directory, on FanStore and on a shared file system.

Example: python benchmarks/dlio.py --rounds 3

DLIO (dlio-benchmark on PyPI; `benchmarks/setup-peers --dlio` installs it) reads with PyTorch's DataLoader and sleeps
instead of computing; what it reports is the share of time in which an accelerator would have been busy (AU), and
samples/s. Each workload is DLIO's own for an A100 with the changes in WORKLOADS, in its PyTorch and npz path: one
accelerator, 4 reading processes, one sample per file. Where it reads:
local      the generated directory, on the local disk
fanstore   the mount, with --local and --stage-first; the prepared dataset lies on the shared file system
shared     the same directory on the shared file system (throttled_fs.c, a profile of harness/throttled.py)
All caches are emptied before a run; the first epoch is cold, the second finds in memory what the first has read.
Writes results/NAME.json.gz, NAME.md and NAME.png.
"""

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import drop, drop_method, files_below
from harness.command import PEERS_BIN, BenchmarkError, find_program, run
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.throttled import PROFILES, Profile, build, throttled
from harness.workspace import workspace
from shared_node import warm_servers

#: An environment of its own, beside that of the other peers.
DLIO_BIN = PEERS_BIN.parent / "dlio" / "bin"
CONTENDERS = ("local", "fanstore", "shared")
EPOCHS = 2
READERS = 4
RUN_S = 600.0
SETTLE_S = 2.0


@dataclass(frozen=True)
class Workload:
    """One of DLIO's workloads, made smaller.

    Attributes:
        config: of DLIO, on which the rest is laid.
        sample_bytes, spread_bytes: size of a sample, which is one file, and its standard deviation.
        computation_s: for a batch.
        change: what is not as in DLIO's configuration, and why.
    """

    name: str
    config: str
    files: int
    sample_bytes: int
    spread_bytes: int
    batch: int
    computation_s: float
    change: str

    def overrides(self, data: Path, output: Path, scale: float) -> list[str]:
        files = self.files_at(scale)
        return [
            f"workload={self.config}",
            f"hydra.run.dir={output}",
            f"++workload.dataset.data_folder={data}",
            "++workload.framework=pytorch",
            "++workload.dataset.format=npz",
            f"++workload.dataset.num_files_train={files}",
            "++workload.dataset.num_samples_per_file=1",
            f"++workload.dataset.record_length={self.sample_bytes}",
            f"++workload.dataset.record_length_stdev={self.spread_bytes}",
            "++workload.reader.data_loader=pytorch",
            f"++workload.reader.read_threads={READERS}",
            f"++workload.reader.batch_size={self.batch}",
            "++workload.reader.file_shuffle=seed",
            "++workload.reader.sample_shuffle=seed",
            f"++workload.train.epochs={EPOCHS}",
            f"++workload.train.computation_time={self.computation_s}",
            "++workload.workflow.checkpoint=False",
        ]

    def files_at(self, scale: float) -> int:
        return max(4 * self.batch, round(self.files * scale) // self.batch * self.batch)

    def sentence(self) -> str:
        wanted = self.batch / self.computation_s
        megabytes = self.sample_bytes / 1e6
        return (
            f"{self.files:,} files of {megabytes:.2f} MB, batches of {self.batch} in {self.computation_s * 1e3:g} ms: "
            f"at best {wanted:,.0f} samples/s, {wanted * megabytes:,.0f} MB/s. {self.change}"
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            *("resnet50", "resnet50_a100", 2000, 114_660, 0, 40, 0.0435),
            "DLIO has 1,281,024 samples of this size in 1,024 TFRecord files, and batches of 400 in 435 ms.",
        ),
        Workload(
            *("unet3d", "unet3d_a100", 60, 9_162_539, 4_271_363, 4, 0.0909),
            "DLIO has 168 files of 16 times the size, and batches of 7 in 636 ms; a fourth of its MB/s is asked for.",
        ),
        Workload(
            *("cosmoflow", "cosmoflow_a100", 240, 2_828_486, 71_311, 1, 0.01102),
            "DLIO has 524,288 TFRecord files of this size, and 5.51 ms per sample; half of its MB/s is asked for.",
        ),
    )
}


def dlio() -> list[str]:
    """One accelerator: a job of one rank, which leaves nothing in /dev/shm if it has a launcher."""
    if not (DLIO_BIN / "dlio_benchmark").exists():
        raise BenchmarkError("DLIO is missing: benchmarks/setup-peers --dlio installs it")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    launcher = [str(DLIO_BIN / "mpirun"), *root, "--bind-to", "none", "-n", "1"]
    return ["env", "OMP_NUM_THREADS=1", *launcher, str(DLIO_BIN / "dlio_benchmark")]


def program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise BenchmarkError(f"{name} is missing: scripts/setup installs it")
    return found


def generate(workload: Workload, served: Path, work: Path, scale: float) -> None:
    """DLIO's own data, and the same prepared."""
    directory = served / workload.name
    overrides = workload.overrides(directory, work / "generated", scale)
    run(
        [*dlio(), *overrides, "++workload.workflow.generate_data=True", "++workload.workflow.train=False"],
        RUN_S,
        cwd=work,
    )
    found = len(files_below(directory))
    if found != workload.files_at(scale):
        raise BenchmarkError(f"DLIO has made {found} files for {workload.name}, not {workload.files_at(scale)}")
    prep = [program("fanstore-prep"), str(directory), str(served / f"{workload.name}.fan")]
    run([*prep, "--codec", "none", "--quiet"], RUN_S)
    shutil.rmtree(work / "generated")


@contextmanager
def place(
    contender: str, workload: Workload, profile: Profile, served: Path, work: Path
) -> Iterator[tuple[Path, list[str]]]:
    """Where DLIO reads, and what runs it, on caches that were just emptied; mounts last as long as the block."""
    directory = work / "job"
    directory.mkdir()
    needed = {"shared": workload.name, "fanstore": f"{workload.name}.fan"}
    try:
        with throttled(work / "throttled_fs", profile, served, directory, 1) as shared:
            drop(files_below(served))
            time.sleep(SETTLE_S)
            if contender in needed:
                warm_servers(served / needed[contender])
            if contender == "fanstore":
                mount = directory / "mount"
                mounter = [program("fanstore-mount"), str(shared.clients[0] / needed[contender]), str(mount)]
                options = ["--local", str(directory / "local"), "--stage-first", "--engine", "native"]
                yield mount, [*mounter, *options, "--"]
            else:
                yield (served if contender == "local" else shared.clients[0]) / workload.name, []
    finally:
        shutil.rmtree(directory)


def measure(
    contender: str, workload: Workload, profile: Profile, served: Path, work: Path, scale: float
) -> dict[str, Any]:
    """One run of DLIO: its figures per epoch."""
    output = work / "output"
    try:
        with place(contender, workload, profile, served, work) as (data, under):
            overrides = workload.overrides(data, output, scale)
            train = ["++workload.workflow.generate_data=False", "++workload.workflow.train=True"]
            done = run([*under, *dlio(), *overrides, *train], RUN_S, cwd=work)
        metric = json.loads((output / "summary.json").read_text())["metric"]
        steps = json.loads((output / "0_output.json").read_text())
    finally:
        shutil.rmtree(output, ignore_errors=True)
    epochs = []
    for number in range(EPOCHS):
        # DLIO leaves the first step, in which the reading processes start, out of its AU, but not of its samples/s.
        times = steps[str(number + 1)]["proc"]["block1"]
        if len(times) != workload.files_at(scale) // workload.batch:
            raise BenchmarkError(f"DLIO has done {len(times)} steps in an epoch of {workload.name}")
        epochs.append(
            {
                "au_percent": metric["train_au_percentage"][number],
                "samples_per_s": (len(times) - 1) * workload.batch / sum(times[1:]),
                "dlio_samples_per_s": metric["train_throughput_samples_per_second"][number],
                "first_step_s": times[0],
                "steps": len(times),
            }
        )
    return {"epochs": epochs, "seconds": done.seconds}


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per workload, contender and epoch; ratios of samples/s to the local directory in the same round."""
    by_key = {(item["round"], item["workload"], item["contender"]): item for item in runs}
    summary = []
    for workload in dict.fromkeys(item["workload"] for item in runs):
        for contender in CONTENDERS:
            items = [item for item in runs if (item["workload"], item["contender"]) == (workload, contender)]
            for number in range(EPOCHS if items else 0):
                epochs = [item["epochs"][number] for item in items]
                ratios = [
                    epoch["samples_per_s"] / by_key[item["round"], workload, "local"]["epochs"][number]["samples_per_s"]
                    for epoch, item in zip(epochs, items, strict=True)
                ]
                summary.append(
                    {"workload": workload, "contender": contender, "epoch": number + 1, "ratios": ratios}
                    | {"ratio_to_local": asdict(Spread.of(ratios))}
                    | {
                        name: asdict(Spread.of([epoch[name] for epoch in epochs]))
                        for name in ("au_percent", "samples_per_s", "dlio_samples_per_s")
                    }
                )
    return summary


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    settings = result["settings"]
    lines = [
        "# DLIO on a local directory, on FanStore and on a shared file system",
        "",
        f"{settings['dlio']}, PyTorch {settings['torch']}; {settings['rounds']} interleaved rounds, one accelerator, "
        f"{READERS} reading processes, npz. {machine.sentence(result['machine'])}.",
        record.load_sentence(result["runs"]),
        f"The shared file system is throttled_fs.c, profile {settings['profile_sentence']}; its servers have "
        f"everything in memory. Caches were emptied before each run ({settings['emptied_by']}).",
        "",
        "AU: share of the time in which the accelerator has a batch, as DLIO says, without the first step, in which "
        "the reading processes start. Samples/s: likewise without it. Ratio: samples/s to the local directory in the "
        "same round: median (lowest-highest).",
    ]
    for workload in dict.fromkeys(item["workload"] for item in result["summary"]):
        rows = []
        for contender in CONTENDERS:
            cells = [contender]
            for item in result["summary"]:
                if (item["workload"], item["contender"]) == (workload, contender):
                    au, rate = Spread(**item["au_percent"]), item["samples_per_s"]["median"]
                    cells += [f"{au.median:.0f} ({au.low:.0f}-{au.high:.0f})", f"{rate:,.0f}"]
                    cells.append(Spread(**item["ratio_to_local"]).ratio_text())
            rows.append(cells)
        head = ["", "first epoch: AU %", "samples/s", "ratio", "second: AU %", "samples/s", "ratio"]
        about = settings["workloads"][workload]
        lines += ["", f"## {workload}", "", about, "", markdown_table(head, [row for row in rows if len(row) > 1])]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--profile", choices=PROFILES, default="lustre", help="of the shared file system")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the files, for a trial")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="dlio", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    profile = PROFILES[arguments.profile]
    runs: list[dict[str, Any]] = []
    dlio()
    version = "from importlib.metadata import version as v; print('DLIO', v('dlio-benchmark')); print(v('torch'))"
    versions = run([str(DLIO_BIN / "python"), "-c", version], 60).stdout.splitlines()
    with workspace(arguments.work_dir) as work:
        description = machine.describe(work)
        build(work)
        served = work / "served"
        served.mkdir()
        workloads = [WORKLOADS[name] for name in arguments.workloads]
        for workload in workloads:
            generate(workload, served, work, arguments.scale)
        for number in range(1, arguments.rounds + 1):
            for workload in workloads:
                for contender in random.Random(number).sample(CONTENDERS, len(CONTENDERS)):
                    load = os.getloadavg()[0]
                    figures = measure(contender, workload, profile, served, work, arguments.scale)
                    runs.append(
                        {"round": number, "workload": workload.name, "contender": contender, "load_average": load}
                        | figures
                    )
                    texts = [f"AU {e['au_percent']:5.1f} %, {e['samples_per_s']:7,.1f}/s" for e in figures["epochs"]]
                    print(f"round {number}: {workload.name:9} {contender:9} {'; '.join(texts)}", flush=True)
        result = {
            "kind": "dlio",
            "machine": description,
            "settings": {
                "rounds": arguments.rounds,
                "scale": arguments.scale,
                "dlio": versions[0],
                "torch": versions[1],
                "profile": asdict(profile),
                "profile_sentence": profile.sentence(),
                "emptied_by": drop_method(),
                "workloads": {workload.name: workload.sentence() for workload in workloads},
            },
            "summary": summarize(runs),
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
