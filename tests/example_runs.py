"""Runs the training scripts of examples/ in a plain directory and in a mount of the same data, and compares.

Owns the processes that it starts and one working directory; the scripts know nothing of all this. The data is made in
``plain``, and ``data.fan`` is prepared from it; a script is given the same arguments in both places, relative to the
directory that it runs in, and writes its checkpoints next to the data (in the mount: with --output). Used by
test_examples.py, and by scripts/examples as a program that prints tables. Single-threaded.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import leftovers
from commands import BIN, mpirun

EXAMPLES = Path(__file__).parent.parent / "examples"

#: Seconds for one training run; the slowest takes fifteen. It is only there to end a hang.
LIMIT_S = 150.0
#: Seconds for a job to end when it was asked to.
GRACE_S = 30.0
#: Peers may take so long to answer: on a busy machine the default is too short for an honest one.
PEER_TIMEOUT_S = 60.0

#: Bytes of TMPDIR: the paths of sockets are limited to 107, and PyTorch waits for ever when it cannot make one.
MAX_TMPDIR = 45

#: How long two nodes train: long enough to be killed in the middle.
EPOCHS = ("--epochs", "4")

#: The COMMAND of a mount: a training process in the mount, with what PyTorch wants to know of its rank. It leaves its
#: process number, which is that of its process group, and afterwards what the daemon has counted, in the directory $0.
RANK = """
pid= stopped=
end_training() {
    stopped=1
    [ -z "$pid" ] || { kill -TERM $pid; kill -TERM -- -$pid; } 2>/dev/null
}
trap end_training TERM INT HUP
(cd "$FANSTORE_MOUNT" && RANK=$FANSTORE_RANK WORLD_SIZE=$FANSTORE_SIZE exec setsid "$@") &
pid=$!
[ -z "$stopped" ] || end_training
echo $pid >"$0/pid$FANSTORE_RANK.tmp" && mv "$0/pid$FANSTORE_RANK.tmp" "$0/pid$FANSTORE_RANK"
wait $pid
code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
for name in stats nodes; do cat "$FANSTORE_MOUNT/.fanstore/$name.json" >"$0/$name$FANSTORE_RANK.json"; done
exit $code
"""


class RunError(Exception):
    """A script or a command failed; the message holds what it has printed."""


class Interrupted(Exception):
    """The program was asked to end."""


@dataclass(frozen=True)
class Example:
    """One script.

    Attributes:
        data: the directory that it is given; checkpoint: what it leaves in its output directory.
        parts: what make_data.py must make for it.
    """

    name: str
    data: str
    checkpoint: str
    parts: tuple[str, ...]


TORCH = Example("torch_images", "images", "checkpoint.pt", ("images",))
KERAS = Example("keras_images", "images", "epoch03.weights.h5", ("images",))
SHARDS = Example("webdataset_shards", "shards", "model.pt", ("images", "shards"))
NPY = Example("npy_mmap", "arrays", "checkpoint.npz", ("npy",))
HDF5 = Example("hdf5", "arrays", "checkpoint.npz", ("hdf5",))
ALL = (TORCH, KERAS, SHARDS, NPY, HDF5)


@dataclass(frozen=True)
class Run:
    """What a training run has logged, and what the daemons below it have counted.

    Attributes:
        logs: by rank, the epochs of its log of samples; empty if it was killed.
        statistics, nodes: by rank, stats.json and nodes.json at its end; empty outside a mount.
    """

    logs: list[list[dict[str, Any]]]
    statistics: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        """By epoch; all ranks have logged the same."""
        (losses,) = {tuple((int(epoch["epoch"]), float(epoch["loss"])) for epoch in log) for log in self.logs}
        return dict(losses)

    @property
    def loss(self) -> float:
        return max(self.losses.items())[1]

    def samples(self, rank: int = 0) -> list[str]:
        return [name for epoch in self.logs[rank] for name in epoch["samples"]]

    @property
    def count(self) -> int:
        return sum(len(self.samples(rank)) for rank in range(len(self.logs)))

    @property
    def digest(self) -> str:
        """Of all that all ranks have read, in order."""
        parts = [epoch["digest"] for log in self.logs for epoch in log]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:12]

    @property
    def speed(self) -> float:
        """Samples per second of all ranks together."""
        return self.count / sum(float(epoch["seconds"]) for epoch in self.logs[0])

    def same_as(self, other: "Run") -> bool:
        """Of the epochs of this run: the same samples in the same order, the same contents, the same loss as there."""
        epochs = set(self.losses)
        return bool(epochs) and [
            [(epoch["epoch"], epoch["loss"], epoch["samples"], epoch["digest"]) for epoch in log] for log in self.logs
        ] == [
            [
                (epoch["epoch"], epoch["loss"], epoch["samples"], epoch["digest"])
                for epoch in log
                if epoch["epoch"] in epochs
            ]
            for log in other.logs
        ]


@dataclass(frozen=True)
class Reads:
    """Reads of dataset files that a daemon has answered, by where the bytes came from."""

    local: int
    remote: int
    other: int = 0

    def __str__(self) -> str:
        return f"{self.local} local, {self.remote} remote, {self.other} other"


class Workbench:
    """A working directory with the data, plain and prepared, and the runs on it.

    Attributes:
        python: the interpreter for the scripts; work: the directory, which whoever made it removes.
        plain, prepared, output: the data, its prepared form, and what the mount saves of the scripts' outputs.
        _runs: how many there were, for names; _running: processes that were started and not waited for, a launcher
        with the directory where its ranks leave their process numbers, or a script with None.
        _check: called while it waits; may raise.
    """

    def __init__(self, work: Path, python: str, check: Callable[[], None] = lambda: None) -> None:
        self.python = python
        self._check = check
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.plain, self.prepared, self.output = work / "plain", work / "data.fan", work / "output"
        self._runs = 0
        self._running: list[tuple[subprocess.Popen[bytes], Path | None]] = []

    # --- the data ---

    def make(self, *arguments: str) -> str:
        """The plain data; what make_data.py says of it."""
        return self._call([self.python, EXAMPLES / "make_data.py", self.plain, *arguments])

    def prepare(self, *options: str) -> str:
        return self._call([BIN / "fanstore-prep", self.plain, self.prepared, *options])

    def partitions(self) -> dict[str, int]:
        """The number of the partition of each file; from the tar files themselves, not from our index."""
        found = {}
        for number, path in enumerate(sorted(self.prepared.glob("part-*.tar"))):
            with tarfile.open(path) as archive:
                found.update(dict.fromkeys(archive.getnames(), number))
        return found

    # --- runs ---

    def run_plain(self, example: Example, *arguments: str, size: int = 1, data: Path | None = None) -> Run:
        """In the plain directory, or on other data; with several ranks as torchrun would start them."""
        own = self._new_directory()
        command = [*self._script(example, own, data), *arguments]
        environment = self._environment()
        outputs = [own / f"output{rank}" for rank in range(size)]
        for rank in range(size):
            self._start(command, outputs[rank], self.plain, environment | {"RANK": str(rank), "WORLD_SIZE": str(size)})
        for output in outputs:
            self._wait(output)
        return Run(self._logs(own, size))

    def run_mounted(
        self, example: Example, *arguments: str, size: int = 1, kill_after: str = "", options: Sequence[str] = ()
    ) -> Run:
        """In a mount of its own; with several ranks, each in its own mount under mpirun, with its share of the data.

        ``kill_after``: when rank 0 has printed this, the last rank's training is killed; the logs are then empty.
        """
        own = self._new_directory()
        command: list[str | Path] = []
        if size > 1:
            command += [*mpirun(size), "--bind-to", "none"]
        command += [BIN / "fanstore-mount", self.prepared, own / "m{rank}", "--log", own / "log{rank}"]
        command += ["--local", own / "ssd{rank}", "--stage-first", "--output", self.output]
        command += ["--peer-timeout", str(PEER_TIMEOUT_S), *options, "--", "sh", "-c", RANK, own]
        command += [*self._script(example, own), *arguments]
        output = own / "output0"
        self._start(command, output, own, self._environment(), ranks_in=own)
        if kill_after:
            self._poll(lambda: kill_after in output.read_text(), f"'{kill_after}'", output)
            os.killpg(int((own / f"pid{size - 1}").read_text()), signal.SIGKILL)
        self._wait(output, is_killed=bool(kill_after))
        statistics = [json.loads((own / f"stats{rank}.json").read_bytes()) for rank in range(size)]
        nodes = [json.loads((own / f"nodes{rank}.json").read_bytes())["nodes"] for rank in range(size)]
        if left := [*own.glob("m?"), *own.glob("ssd?/*")]:
            raise RunError(f"left behind: {left}")
        return Run([] if kill_after else self._logs(own, size), statistics, nodes)

    def predicted(self, run: Run, example: Example, rank: int) -> Reads:
        """Reads of a run of one epoch, from what this rank has read and from which partitions are on its node.

        In one epoch every file is read once. In later ones the kernel has it, unless it needed the memory meanwhile.
        """
        (node,) = (node for node in run.nodes[rank] if node["rank"] == rank)
        on_node, partition_of = set(node["partitions"]["local"]), self.partitions()
        names = run.samples(rank)
        local = sum(partition_of[f"{example.data}/{name}"] in on_node for name in names)
        return Reads(local, len(names) - local)

    # --- processes ---

    def end(self) -> None:
        """Whatever has happened: no process and no mount is left. Training is ended first, and its mount follows."""
        for process, ranks_in in self._running:
            if not _signal_training(ranks_in, signal.SIGTERM):
                process.terminate()
        for process, ranks_in in self._running:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                _signal_training(ranks_in, signal.SIGKILL)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()
        for line in leftovers.mounts_below(self.work):
            subprocess.run(["fusermount3", "-u", "-z", line.split()[1]], check=False, timeout=GRACE_S)

    def _call(self, command: Sequence[str | Path]) -> str:
        output = self._new_directory() / "output"
        self._start(command, output, self.work, dict(os.environ))
        self._wait(output)
        return output.read_text()

    def _new_directory(self) -> Path:
        self._runs += 1
        own = self.work / f"run{self._runs}"
        own.mkdir()
        return own

    def _script(self, example: Example, own: Path, data: Path | None = None) -> list[str | Path]:
        """The command line of a script; the same wherever it runs."""
        command: list[str | Path] = [self.python, EXAMPLES / f"{example.name}.py", data or example.data]
        return [*command, "--output-dir", f"run/{example.name}", "--sample-log", own / "samples"]

    def _environment(self) -> dict[str, str]:
        """For a run: where the ranks of PyTorch meet."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        return {**os.environ, **meeting}

    def _start(
        self,
        command: Sequence[str | Path],
        output: Path,
        directory: Path,
        environment: dict[str, str],
        ranks_in: Path | None = None,
    ) -> None:
        """In a session of its own: Ctrl-C comes to us, and we end it in the right order."""
        with open(output, "wb") as stream:
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )
        self._running.append((process, ranks_in))

    def _wait(self, output: Path, *, is_killed: bool = False) -> None:
        """Until the process that was started first has ended well (or, if it was killed, badly)."""
        process, _ = self._running[0]
        self._poll(lambda: process.poll() is not None, "the end of the run", output)
        del self._running[0]
        if (process.returncode != 0) != is_killed:
            raise RunError(f"{process.args!r}\nended with {process.returncode}:\n{self._evidence(output)}")

    def _poll(self, condition: Callable[[], bool], what: str, output: Path) -> None:
        process, _ = self._running[0]
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self._check()
            if time.monotonic() > deadline or (process.poll() is not None and not condition()):
                raise RunError(f"{what} has not come (limit: {LIMIT_S:g} s):\n{self._evidence(output)}")
            time.sleep(0.02)

    def _evidence(self, output: Path) -> str:
        logs = sorted(output.parent.glob("log*"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in [output, *logs])

    def _logs(self, own: Path, size: int) -> list[list[dict[str, Any]]]:
        return [json.loads((own / "samples" / f"{rank}.json").read_bytes())["epochs"] for rank in range(size)]


def left_in(work: Path) -> list[str]:
    """Mounts and processes that do not go. mpirun does not always wait for its daemons: they may be about to end."""
    deadline = time.monotonic() + GRACE_S
    while left := leftovers.mounts_below(work) + leftovers.processes_of(os.environ[leftovers.MARK_VARIABLE], work):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


def _signal_training(ranks_in: Path | None, number: int) -> bool:
    """To the training processes of all ranks that have left their number; whether there was one alive."""
    is_alive = False
    for path in ranks_in.glob("pid?") if ranks_in is not None else ():
        for send in (os.killpg, os.kill):  # for an instant it has no process group of its own yet
            with contextlib.suppress(ProcessLookupError):
                send(int(path.read_text()), number)
                is_alive = True
    return is_alive


def counted(run: Run, rank: int) -> Reads:
    """Reads that the daemon of this rank has counted."""
    sources = {name: int(source["reads"]) for name, source in run.statistics[rank]["sources"].items()}
    local, remote = sources.pop("local"), sources.pop("remote")
    return Reads(local, remote, sum(sources.values()))


# --- the program ---


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def verdict(is_equal: bool) -> str:
    return "equal" if is_equal else "DIFFERENT"


def side_by_side(bench: Workbench, examples: Sequence[Example], repeat: int) -> bool:
    """Each script in both places, by turns; whether all gave the same. Of the speeds the best of each place counts."""
    row("example", "samples read", "loss, directory", "loss, mount", "digest, directory", "digest, mount",
        "samples/s, directory", "samples/s, mount", "MB served by the mount", "result")  # fmt: skip
    row("---", *["--:"] * 8, "---")
    all_equal = True
    for example in examples:
        runs = [(bench.run_plain(example), bench.run_mounted(example)) for _ in range(repeat)]
        plain, mounted = runs[0]
        is_equal = all(run.same_as(plain) for pair in runs for run in pair) and has_checkpoint(bench, example)
        speeds = [f"{max(run.speed for run in place):.0f}" for place in zip(*runs, strict=True)]
        served = sum(source["bytes"] for source in mounted.statistics[0]["sources"].values())
        row(example.name, plain.count, f"{plain.loss:.9f}", f"{mounted.loss:.9f}", plain.digest, mounted.digest,
            *speeds, f"{served / 1e6:.1f}", verdict(is_equal))  # fmt: skip
        all_equal &= is_equal and served > 0
    return all_equal


def has_checkpoint(bench: Workbench, example: Example) -> bool:
    """In the plain directory, and in --output."""
    name = f"run/{example.name}/{example.checkpoint}"
    return (bench.plain / name).is_file() and (bench.output / name).is_file()


def partitions_as_shards(bench: Workbench) -> bool:
    """The partitions themselves are tar shards: without a mount, the same samples in another order."""
    original = bench.run_plain(SHARDS, "--epochs", "1")
    partitions = bench.run_plain(SHARDS, "--epochs", "1", data=bench.prepared)
    # The names in the partitions begin at the root of the dataset.
    found = sorted(name.removeprefix("images/") for name in partitions.samples())
    is_equal = found == sorted(original.samples())
    print(f"{original.count} samples in the shards, {partitions.count} in the partitions: {verdict(is_equal)}")
    return is_equal


def two_nodes(bench: Workbench) -> bool:
    """Two daemons, two training ranks: where the bytes came from; then killed and resumed."""
    plain = bench.run_plain(TORCH, *EPOCHS, size=2)
    mounted = run_to_count(bench)
    all_equal = mounted.same_as(plain)
    row("rank", "samples read", "predicted reads", "counted reads", "result")
    row("---", "--:", "---", "---", "---")
    for rank in range(2):
        predicted, seen = bench.predicted(mounted, TORCH, rank), counted(mounted, rank)
        row(rank, len(mounted.samples(rank)), predicted, seen, verdict(predicted == seen))
        all_equal &= predicted == seen
    print(
        f"\nepoch 1: loss {plain.losses[1]:.9f} in the directory, {mounted.losses[1]:.9f} in the mounts, "
        f"samples and loss {verdict(mounted.same_as(plain))}"
    )
    step("the same, one rank killed (SIGKILL) after epoch 1, then a new job with --resume")
    resumed = kill_and_resume(bench)
    print(
        f"killed, and resumed with epoch {min(resumed.losses)} from the checkpoint in --output\n"
        f"epoch {max(plain.losses)}: loss {plain.loss:.9f} in the directory, {resumed.loss:.9f} in the mounts, "
        f"samples and loss {verdict(resumed.same_as(plain))}"
    )
    return all_equal and resumed.same_as(plain)


def run_to_count(bench: Workbench) -> Run:
    """One epoch on two nodes, if possible while nobody drops the page cache of the machine, as benchmarks do.

    What is dropped before it was used is read again, and counted again. Tried three times; then the last run counts.
    """
    for _ in range(3):
        before = cache_drops()
        # What is fetched ahead of the next epoch would be counted, too.
        run = bench.run_mounted(TORCH, "--epochs", "1", size=2, options=["--order", "off"])
        if cache_drops() == before:
            break
    return run


def cache_drops() -> int:
    """How often somebody has written to /proc/sys/vm/drop_caches since the machine was started."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("drop_pagecache "))


def kill_and_resume(bench: Workbench) -> Run:
    """Train on two nodes until one rank is killed, then resume in a new job that finds only --output."""
    shutil.rmtree(bench.output)
    bench.run_mounted(TORCH, *EPOCHS, size=2, kill_after="epoch 1:")
    return bench.run_mounted(TORCH, *EPOCHS, "--resume", size=2)


def show(bench: Workbench, pair: Workbench, examples: Sequence[Example], images: int, repeat: int) -> bool:
    """Everything; whether all was equal. ``pair``, for two nodes, has only images: each node gets some of them."""
    step("data")
    parts = sorted({part for example in examples for part in example.parts})
    print(bench.make("--images", str(images), "--parts", *parts), end="")
    step("prepared, in 8 partitions")
    print(bench.prepare("--partitions", "8", "--codec", "none"), end="")
    step("each example in the directory and in the mount, same arguments, same seed")
    is_equal = side_by_side(bench, examples, repeat)
    if SHARDS in examples:
        step("the partitions as shards of WebDataset, without a mount")
        is_equal &= partitions_as_shards(bench)
    if TORCH in examples:
        step("torch_images on two nodes (two daemons on this machine), half of the data each")
        pair.make("--images", str(images), "--parts", "images")
        pair.prepare("--partitions", "8", "--codec", "none")
        is_equal &= two_nodes(pair)
    return is_equal


class Interruption:
    """Takes SIGINT, SIGTERM and SIGHUP from now on, and tells of them when it is asked: never in the middle of a step.

    Attributes:
        number: of the first that has come; 0 before.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def check(self) -> None:
        if self.number:
            raise Interrupted


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/examples", description="Run the examples side by side.")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has what the examples import")
    parser.add_argument("--only", nargs="+", choices=[example.name for example in ALL], help="these examples only")
    parser.add_argument("--images", type=int, default=1000, help="number of images (default: 1000)")
    parser.add_argument("--repeat", type=int, default=2, help="runs in each place, for the speed (default: 2)")
    arguments = parser.parse_args()
    if len(tempfile.gettempdir()) > MAX_TMPDIR:
        parser.error(f"TMPDIR is too long for the sockets that PyTorch makes there (at most {MAX_TMPDIR} bytes)")
    chosen = [example for example in ALL if not arguments.only or example.name in arguments.only]
    interruption = Interruption()
    os.environ[leftovers.MARK_VARIABLE] = f"examples-{os.getpid()}"  # ours, whatever else runs beside it
    work = Path(tempfile.mkdtemp(prefix="fanstore-examples.")).resolve()
    os.environ["TMPDIR"] = str(work)  # mpirun leaves files there when it is killed
    one, two = (Workbench(work / name, arguments.python, interruption.check) for name in ("one", "two"))
    code = 1
    try:
        code = 0 if show(one, two, chosen, arguments.images, arguments.repeat) else 1
        print("\nall equal" if code == 0 else "\nsomething is DIFFERENT", flush=True)
    except Interrupted:
        code = 128 + interruption.number
    except RunError as error:
        print(f"examples: error: {error}", file=sys.stderr)
    finally:
        one.end()
        two.end()
        for line in left_in(work):
            print(f"left behind: {line}", file=sys.stderr)
            code = 1
        if not leftovers.mounts_below(work):
            shutil.rmtree(work)
    return code


if __name__ == "__main__":
    sys.exit(main())
