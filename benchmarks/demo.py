"""What scripts/demo runs: three nodes train from a shared file system, then from FanStore, and one of them is killed.

All nodes are on this machine. The shared file system is throttled_fs.c: a FUSE view of a local directory that is as
slow as the share of a busy one that a job gets. Everything is made below --work-dir, and nothing stays mounted there.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.command import BenchmarkError, end_group, launcher, program, run
from harness.throttled import Profile, Throttled, build, throttled
from harness.workspace import workspace

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NODES = 3
EPOCHS = 3
#: The node that is killed, in its last epoch.
VICTIM = 2
LIMIT_S = 300.0
#: What a job gets of a file system that others use: a sixth of the metadata operations of a small Lustre (6,000/s), and
#: a tenth of its bytes.
SHARED = Profile("shared", 500.0, 1000, 500.0, 1.2e8, 3600.0, "a sixth of FSx, 6,000 metadata IOPS")
_EPOCH = re.compile(r"epoch (\d+): loss (\d+\.\d+), ([\d,]+) images/s")
#: A node's program: the loop on its directory, with a file of its own for what it prints.
_SHELL = (
    'exec "$0" "$1" "${FANSTORE_MOUNT:-$DIRECTORY}" --epochs "$2" --ranks "$3" --rank "$FANSTORE_RANK" '
    '>"$4-$FANSTORE_RANK"'
)


@dataclass(frozen=True)
class Trained:
    """What one way gave.

    Attributes:
        losses: of each node, epoch by epoch.
        rates: images/s of all nodes together, in each epoch that all of them have ended.
        operations: that the servers were asked, from the start to the end.
    """

    losses: list[list[str]]
    rates: list[float]
    operations: int
    megabytes: float


def step(title: str, *command: str | Path) -> None:
    print(f"\n== {title}", flush=True)
    if command:
        print("$ " + " ".join(map(str, command)), flush=True)


def epochs_in(output: Path) -> list[tuple[str, float]]:
    """Loss and images/s of each epoch that a node has told."""
    found = _EPOCH.findall(output.read_text()) if output.exists() else []
    return [(loss, float(rate.replace(",", ""))) for _, loss, rate in found]


class Nodes:
    """The processes of a job, and what its nodes have printed so far.

    Attributes:
        output: of node N in OUTPUT-N.
    """

    def __init__(self, processes: Sequence["subprocess.Popen[bytes]"], output: Path) -> None:
        self.output = output
        self._processes = processes
        self._shown = [0] * NODES

    def told(self) -> list[list[tuple[str, float]]]:
        return [epochs_in(self.output.with_name(f"{self.output.name}-{node}")) for node in range(NODES)]

    def run(self, victim: Path | None) -> None:
        """To the end, with a line for each epoch of a node; kills the daemon of a mount in its node's last epoch."""
        deadline = time.monotonic() + LIMIT_S
        try:
            while True:
                ended = all(process.poll() is not None for process in self._processes)
                for node, epochs in enumerate(self.told()):
                    for number in range(self._shown[node], len(epochs)):
                        loss, rate = epochs[number]
                        print(f"node {node}, epoch {number + 1}: loss {loss}, {rate:,.0f} images/s", flush=True)
                    self._shown[node] = len(epochs)
                if victim is not None and self._shown[VICTIM] >= EPOCHS - 1:
                    kill(victim)
                    victim = None
                if ended:
                    break
                if time.monotonic() > deadline:
                    raise BenchmarkError(f"the loop takes longer than {LIMIT_S:.0f} s")
                time.sleep(0.02)
        finally:
            for process in self._processes:
                end_group(process)
        if victim is not None:
            print(f"(it was over before node {VICTIM} could be killed: take more --images)", flush=True)

    def result(self, before: tuple[int, int], after: tuple[int, int]) -> Trained:
        told = self.told()
        whole = min(map(len, told))
        rates = [sum(epochs[number][1] for epochs in told) for number in range(whole)]
        losses = [[loss for loss, _ in epochs] for epochs in told]
        return Trained(losses, rates, after[0] - before[0], (after[1] - before[1]) / 1e6)


def kill(mountpoint: Path) -> None:
    process = int(json.loads((mountpoint / ".fanstore" / "config.json").read_text())["pid"])
    print(f"!! kill -9 {process}, the daemon of node {VICTIM}: the other nodes go on", flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def asked(shared: Throttled) -> tuple[int, int]:
    counts = shared.counts()
    return counts.metadata_operations, counts.bytes


def loop(output: Path) -> list[str]:
    """The program of a node, which finds its directory and its number in the environment."""
    return ["sh", "-c", _SHELL, sys.executable, str(SCRIPTS / "demo_train.py"), str(EPOCHS), str(NODES), str(output)]


def train_shared(shared: Throttled, work: Path) -> Trained:
    """Each node on its own client of the shared file system."""
    step("three nodes train, straight from the shared file system", "python", "demo_train.py", "/shared/images")
    output, log = work / "shared-output", work / "shared.log"
    before = asked(shared)
    processes = []
    with log.open("wb") as errors:
        for node, client in enumerate(shared.clients):
            environment = os.environ | {"FANSTORE_RANK": str(node), "DIRECTORY": str(client / "images")}
            processes.append(
                subprocess.Popen(
                    loop(output), env=environment, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True
                )
            )
    nodes = Nodes(processes, output)
    nodes.run(None)
    if any(process.returncode != 0 for process in processes):
        raise BenchmarkError(f"the loop failed: {log.read_text()[-2000:]}")
    return nodes.result(before, asked(shared))


def train_mounted(shared: Throttled, work: Path, report: Path) -> Trained:
    """One daemon per node; each node has two thirds of the bytes on its own disk."""
    options = ["--stage-first", "--replicas", "2", "--preload", "--report", str(report)]
    step(
        "the same loop, unchanged, from FanStore, with the dataset on the nodes' SSDs (here: directories)",
        *("mpirun", "-n", str(NODES), "--with-ft", "ulfm", "fanstore-mount", "/shared/images.fan", "/mnt/images"),
        *("--local", "/ssd", *options, "--order", "order-{rank}", "--", "python", "demo_train.py", "/mnt/images"),
    )
    output, log = work / "mounted-output", work / "mounted.log"
    before = asked(shared)
    with log.open("wb") as errors:
        mount = [program("fanstore-mount"), str(shared.clients[0] / "images.fan"), str(work / "mnt-{rank}")]
        places = ["--local", str(work / "ssd-{rank}"), "--order", str(work / "order-{rank}")]
        job = subprocess.Popen(
            [*launcher(NODES), "--with-ft", "ulfm", *mount, *places, *options, "--", *loop(output)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
        )
    nodes = Nodes([job], output)
    nodes.run(work / f"mnt-{VICTIM}")
    if not any(nodes.told()):
        raise BenchmarkError(f"the job failed: {log.read_text()[-2000:]}")
    return nodes.result(before, asked(shared))


def compare(plain: Trained, mounted: Trained) -> None:
    """The table at the end; BenchmarkError if they have not learned the same."""
    step("result")
    print(f"{'':32}{'shared file system':>20}{'FanStore':>12}")
    for epoch, (left, right) in enumerate(zip(plain.rates, mounted.rates, strict=False)):
        print(f"{f'epoch {epoch + 1}, images/s of all nodes':32}{left:20,.0f}{right:12,.0f}   {right / left:.1f} times")
    print(f"{'metadata operations':32}{plain.operations:20,}{mounted.operations:12,}")
    print(f"{'read from it, MB':32}{plain.megabytes:20,.0f}{mounted.megabytes:12,.0f}")
    for node, (expected, seen) in enumerate(zip(plain.losses, mounted.losses, strict=True)):
        missing = EPOCHS - len(seen)
        if seen != expected[: len(seen)] or (missing and node != VICTIM):
            raise BenchmarkError(f"node {node} has not learned the same from both: {expected} and {seen}")
    killed = len(mounted.losses[VICTIM]) < EPOCHS
    lost = f"; node {VICTIM} was killed, and cost the others nothing but its help" if killed else ""
    print(f"Same losses to the last digit{lost}.")


def demonstrate(images: int, report: Path, work: Path) -> None:
    """All steps, in a directory that is there, and gone afterwards."""
    build(work)
    served = work / "served"
    served.mkdir()
    step("a dataset: class folders of JPEGs, on the shared file system")
    made = run([sys.executable, SCRIPTS / "demo_images.py", "--images", str(images), served / "images"], LIMIT_S)
    print(made.stdout.strip())
    step("prepare it, once", "fanstore-prep", "/shared/images", "/shared/images.fan")
    prep: list[str | Path] = [
        program("fanstore-prep"),
        served / "images",
        served / "images.fan",
        "--partitions",
        str(2 * NODES),
    ]
    print(run(prep, LIMIT_S).stdout.strip())
    for node in range(NODES):
        argv: list[str | Path] = [
            sys.executable,
            SCRIPTS / "demo_train.py",
            served / "images",
            "--list",
            "--epochs",
            str(EPOCHS),
        ]
        listed = run([*argv, "--ranks", str(NODES), "--rank", str(node)], LIMIT_S)
        (work / f"order-{node}").write_text(listed.stdout)
    with throttled(work / "throttled_fs", SHARED, served, work, NODES) as shared:
        plain = train_shared(shared, work)
        mounted = train_mounted(shared, work, report)
    compare(plain, mounted)
    share = f"{SHARED.metadata_rate:,.0f} metadata operations and {SHARED.bandwidth / 1e6:,.0f} MB per second"
    print(
        f"Slowed down is the shared file system, to what a job gets of a busy one: {share},\n"
        f"{SHARED.metadata_latency_us / 1e3:g} ms each. All nodes share the cores of this machine: from FanStore, "
        "decoding JPEGs is what limits the loop."
    )
    print(f"The report of the job: file://{report}")


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--work-dir", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        with workspace(arguments.work_dir) as work:
            demonstrate(arguments.images, arguments.report.absolute(), work)
    except BenchmarkError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
