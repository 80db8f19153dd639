"""Does anything hang, or come out wrong, while files are put into the page cache that programs read at the same moment?

Example: python benchmarks/push_stress.py --seconds 120

Processes read files of a mount in stated orders and in others, and compare each byte; others have the kernel forget the
files, write further orders, and drop all caches (root). Every ten seconds the daemon ends: by an unmount, or killed in
the middle, and then its processes must be gone and the mount must answer with an error within seconds. With each
engine in turn; only the native one puts files into the page cache. Ends with an error at the first wrong byte or hang.
No record.
"""

import argparse
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path

from harness import dataset
from harness.command import BenchmarkError
from harness.script import run_script
from harness.workspace import unmount, workspace

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the mount is that of the tests
from mounting import Mounted, prepare

ROUND_S = 10.0
#: Seconds for what must not hang.
LIMIT_S = 20.0


def shuffled(names: Sequence[str], numbers: random.Random) -> list[str]:
    return numbers.sample(list(names), min(len(names), numbers.randrange(1, 400)))


def read(point: Path, source: Path, names: Sequence[str]) -> None:
    for name in names:
        if (point / name).read_bytes() != (source / name).read_bytes():
            raise BenchmarkError(f"wrong bytes: {name}")


def state_and_read(point: Path, source: Path, names: Sequence[str]) -> None:
    (point / ".fanstore" / "order").write_text("".join(f"{name}\n" for name in names))
    read(point, source, names)


def forget(point: Path, source: Path, names: Sequence[str]) -> None:
    for name in names:
        with open(point / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drop(point: Path, source: Path, names: Sequence[str]) -> None:
    time.sleep(0.2)
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")


Work = Callable[[Path, Path, Sequence[str]], None]
WORKS: tuple[Work, ...] = (state_and_read, state_and_read, read, read, forget, forget, drop)


def work_on(work: Work, point: Path, source: Path, names: Sequence[str], seed: int, until_s: float) -> None:
    numbers = random.Random(seed)
    try:
        while time.monotonic() < until_s:
            work(point, source, shuffled(names, numbers))
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):  # the daemon was killed
            raise


def run_round(prepared: Path, made: dataset.Dataset, work: Path, engine: str, number: int) -> int:
    """How many files came into the page cache."""
    directory = work / "round"
    (directory / "ssd").mkdir(parents=True)
    killed = number % 4 >= 2
    mounted = Mounted(prepared, directory / "m", ["--cache", "24MiB"], directory, directory / "ssd", engine)
    try:
        mounted.wait_up()
        until_s = time.monotonic() + ROUND_S
        context = get_context("fork")
        arguments = (mounted.path, made.root, made.paths)
        processes = [
            context.Process(target=work_on, args=(one, *arguments, 1000 * number + place, until_s))
            for place, one in enumerate(WORKS)
        ]
        for process in processes:
            process.start()
        time.sleep(ROUND_S / 2)
        count = int(mounted.statistics()["order"]["into_kernel"])
        if killed:
            mounted.process.kill()
            mounted.wait_end(LIMIT_S)
        for process in processes:
            process.join(ROUND_S + LIMIT_S)
            if process.exitcode is None:
                raise BenchmarkError(f"a reader hangs: {Path(f'/proc/{process.pid}/wchan').read_text()}")
            if process.exitcode != 0:
                raise BenchmarkError("a reader has failed")
        if not killed:
            mounted.process.send_signal(signal.SIGTERM)
            if mounted.wait_end(LIMIT_S) != 0:
                raise BenchmarkError(mounted.evidence())
    finally:
        mounted.process.kill()
        mounted.process.wait(LIMIT_S)
        unmount(mounted.path)
        left = subprocess.run(["pgrep", "-f", str(mounted.path)], capture_output=True, text=True, check=False)
    if left.stdout:
        raise BenchmarkError(f"processes are left: {left.stdout}")
    shutil.rmtree(directory)
    return count


def stress(arguments: argparse.Namespace) -> None:
    with workspace(arguments.work_dir) as work:
        made = dataset.make(work / "source", dataset.DatasetSpec(1500, 90_000, 8, compressible=True))
        prepared = prepare(made.root, work / "d.fan", "--codec", "auto", "--partitions", "4")
        until_s = time.monotonic() + arguments.seconds
        number = 0
        while time.monotonic() < until_s:
            engine = ("native", "python")[number % 2]
            count = run_round(prepared, made, work, engine, number)
            print(f"round {number}: {engine}, {count:,} files into the page cache by its middle", flush=True)
            if (engine == "native") != (count > 0):
                raise BenchmarkError("that is not what was to be tried")
            number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--work-dir", type=Path)
    return run_script(lambda: stress(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
