"""Jobs that read files from other nodes: the tree they read, and how one is started.

Used by remote_reads.py and profile_remote.py. What each rank does is in remote_raw.py, remote_core.py, remote_mount.py.
"""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.builds import commands_of
from harness.command import BenchmarkError, launcher, program, run
from harness.reading import Readers
from harness.remote import Case, Spec, total

_PROGRAMS = Path(__file__).parent.parent
_MOUNT_CACHE = "32MiB"
#: Each folder becomes about one partition, and has files of all sizes.
_FOLDERS = 8
#: Never fewer files of a size: several times what is under way at once.
_FILES_LEAST = 64


def _make_tree(root: Path, sizes: list[int], bytes_per_size: int) -> None:
    """Files of random bytes."""
    bytes_of = np.random.default_rng(1).bytes
    for size in sizes:
        count = max(bytes_per_size // size, _FILES_LEAST) // _FOLDERS
        for folder in range(_FOLDERS):
            (root / f"{folder}").mkdir(parents=True, exist_ok=True)
            for number in range(count):
                (root / f"{folder}" / f"{size}-{number:05}.bin").write_bytes(bytes_of(size))


def prepare(work: Path, sizes: list[int], bytes_per_size: int, seconds: float) -> Spec:
    """The tree, prepared below ``work``, and a compiled reader; what all jobs that read it have in common."""
    _make_tree(work / "tree", sizes, bytes_per_size)
    argv = [program("fanstore-prep"), str(work / "tree"), str(work / "prepared")]
    run([*argv, "--partitions", str(_FOLDERS), "--codec", "none"], 300)
    shutil.rmtree(work / "tree")
    Readers(work, 1, 60)  # compiles the reader
    return Spec(str(work / "prepared"), "", "", str(work / "reader"), 0, seconds, ())


def _launch(ranks: int, way: str) -> list[str]:
    """The launcher; FanStore alone needs none. Open MPI without one leaves its shared memory in /dev/shm."""
    if ranks == 1 and way != "raw":
        return []
    return launcher(ranks)


def run_job(
    way: str,
    engine: str,
    ranks: int,
    cases: list[Case],
    base: Spec,
    work: Path,
    daemons: dict[int, int] | None = None,
    clone: Path | None = None,
) -> list[dict[str, Any]]:
    """One job; a line of figures per case.

    ``engine``: of the mount; ``daemons`` gets the rank of each thread; ``clone``: whose core or mount it is.
    """
    directory = work / f"{way}-{ranks}"
    directory.mkdir()
    places = {"local": f"{directory}/local-{{rank}}", "mount": f"{directory}/mount-{{rank}}"}
    spec = Spec(**{**asdict(base), **places, "ranks": ranks, "cases": tuple(cases)})
    path = directory / "spec"
    spec.write(path)
    python, programs = sys.executable, _PROGRAMS
    if clone is not None and way == "core":  # which it puts together itself
        python, programs = str(commands_of(clone) / "python"), clone / "benchmarks"
    mounted = way in ("mount", "preload")
    argv = [*_launch(ranks, way), python, str(programs / f"remote_{'mount' if mounted else way}.py"), str(path)]
    if mounted:
        # A cache smaller than the files of one size, so that each pass fetches them again.
        options = ["--local", spec.local, "--stage-first", "--engine", engine, "--cache", _MOUNT_CACHE]
        options += ["--preload"] if way == "preload" else []
        mounter = program("fanstore-mount") if clone is None else str(commands_of(clone) / "fanstore-mount")
        argv = [*_launch(ranks, way), mounter, spec.prepared, spec.mount, *options, "--", *argv[-3:]]
    done = run(argv, 120 + 5 * spec.seconds * len(cases))
    if mounted:
        texts = [(directory / f"figures-{rank}").read_text().splitlines() for rank in range(ranks)]
        if daemons is not None:
            for rank in range(ranks):
                daemons.update(dict.fromkeys(map(int, (directory / f"daemon-{rank}").read_text().split()), rank))
        lines = [total(case, [json.loads(text[number]) for text in texts]) for number, case in enumerate(cases)]
    else:
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    shutil.rmtree(directory)
    if len(lines) != len(cases):
        raise BenchmarkError(f"{way} on {ranks} ranks did not report every case: {done.stdout} {done.stderr}")
    return lines
