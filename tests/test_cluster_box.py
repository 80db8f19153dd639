"""The cluster in a box of the benchmarks: a job on two hosts, and nothing of it is left when its driver is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import needs_jobs
from leftovers import mounts_below
from mounting import needs_fuse

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # a package of the benchmarks alone
from cluster import box

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = [
    needs_fuse,
    needs_jobs,
    pytest.mark.timeout(150),
    pytest.mark.skipif(bool(reason := box.problem()), reason=reason),
]

#: Seconds for anything to happen; a few are enough.
LIMIT_S = 60.0
FILES, HOSTS, EPOCHS = 48, 2, 2
SMALL = [f"hosts={HOSTS}", f"epochs={EPOCHS}", f"files={FILES}", "file_bytes=20000", "classes=3", "partitions=4"]
SMALL += ["batch=4", "compute_us=2000"]


def driver(temporary: Path, *words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, BENCHMARKS / "cluster_job.py", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )


def left_of(pid: int, temporary: Path) -> list[str]:
    """Of a driver's box: directories, control groups, mounts, loop devices, processes."""
    name = f"fanstore-cluster-{pid}-"
    found = [str(path) for top in (temporary, *box.GROUPS.values()) for path in top.glob(f"{name}*")]
    found += mounts_below(temporary)
    loops = subprocess.run(["losetup", "--all"], capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    found += [line for line in loops.splitlines() if name in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{box.INSIDE}={temporary}/".encode() in (process / "environ").read_bytes():
                found.append(f"process {process.name}: {(process / 'cmdline').read_bytes()!r}")
        except OSError:
            continue  # it has ended
    return found


def wait(condition: Callable[[], object], what: str, process: subprocess.Popen[str] | None = None) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline_s:
            said = process.communicate()[0] if ended and process is not None else ""
            pytest.fail(f"waited for {what}: {said}")
        time.sleep(0.02)


def test_job_on_two_hosts(tmp_path: Path) -> None:
    """All files in each epoch, from both hosts, with the order known; then nothing is left."""
    temporary, figures = tmp_path / "t", tmp_path / "figures"
    temporary.mkdir()
    process = driver(
        temporary, "--way", "fanstore-stated", "--json", figures, "--set", *SMALL, "options=['--stage-first']"
    )
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    result = json.loads(figures.read_text())
    whole = (FILES, result["dataset_bytes"])
    assert [(epoch["files"], epoch["bytes"]) for epoch in result["epochs"]] == [whole] * EPOCHS
    for epoch in result["epochs"]:
        assert epoch["seconds"] >= epoch["compute_s"] == FILES / HOSTS * 0.002
    order = result["epochs"][-1]["order"][0]
    assert order["source"] == "stated" and order["predicted"] > 0
    sources = [epoch["sources"] for epoch in result["epochs"]]
    moved = {name: sum(one[name]["bytes"] + one[name]["fetched_bytes"] for one in sources) for name in sources[0]}
    assert moved["shared"] == 0 and moved["local"] > 0 and moved["remote"] > 0, moved
    assert result["total"]["shared"]["bytes"] >= result["dataset_bytes"]
    assert all(link["received"] > 0 for link in result["total"]["link_bytes"])
    assert left_of(process.pid, temporary) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left(number: signal.Signals, tmp_path: Path) -> None:
    """Whatever ends the driver in the middle of an epoch."""
    process = driver(tmp_path, "--way", "fanstore-off", "--set", *SMALL, "compute_us=3600000000")
    try:
        reading = f"fanstore-cluster-{process.pid}-*/figures-1"
        wait(lambda: list(tmp_path.glob(reading)), "readers", process)
        kinds = [text.split()[0] for text in left_of(process.pid, tmp_path)]
        assert "process" in kinds and any(kind.startswith("/dev/loop") for kind in kinds)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == (-signal.SIGKILL if number == signal.SIGKILL else 130)
        wait(lambda: left_of(process.pid, tmp_path) == [], f"the end of {left_of(process.pid, tmp_path)}")
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_wrong_settings(tmp_path: Path) -> None:
    for word, sentence in (
        ("hosts=17", "there can be 1 to 16"),
        ("hots=2", "unknown settings: hots"),
        ("hosts='two'", "it must be of type int"),
        ("hosts", "NAME=VALUE"),
        ("compute_us=-1", "0 or more"),
    ):
        process = driver(tmp_path, "--set", word)
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1 and sentence in said, said
    assert list(tmp_path.iterdir()) == []
