"""fanstore-plan measure, alone and under mpirun: what it writes, that the planner reads it, bounds and errors."""

import json
import os
import signal
import subprocess
import threading
import time
import tomllib
from pathlib import Path

import pytest
from commands import BIN, LIMIT_S, assert_one_error, mpirun, run_fanstore, run_inside
from hypothesis import given
from hypothesis import strategies as st

from fanstore.cli.plan_measure import _make_plan, _toml
from fanstore.doctor.speeds import PREFIX, disk_write
from fanstore.errors import UsageError
from fanstore.model.machine import machine_of


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    return path


def measure(*words: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    return run_fanstore("plan", "measure", *words, prefix=mpirun(ranks) if ranks > 1 else (), limit_s=2 * LIMIT_S)


def test_one_node(shared: Path, tmp_path: Path) -> None:
    """With a compressed dataset; the planner reads what was written."""
    source, prepared, file = tmp_path / "source", tmp_path / "d.fan", tmp_path / "site.toml"
    source.mkdir()
    for number in range(50):
        (source / str(number)).write_bytes(bytes([number]) * 30_000)
    assert run_inside("prep", "--quiet", "--codec", "lz4", source, prepared).returncode == 0
    result = measure(file, "--shared", shared, "--local", tmp_path, "--dataset", prepared, "--load", "64MiB")
    assert result.returncode == 0, result.stderr
    assert "on 1 node, this will\n  write 505 files, " in result.stderr
    assert f"written: {file}" in result.stdout
    found = tomllib.loads(file.read_text())
    assert found["shared"]["small_bytes"] == 30_000
    assert [point["readers"] for point in found["shared"]["small"]] == [1, 4]
    assert [point["threads"] for point in found["local"]["read"]] == [1, 4]
    assert found["memory"]["cores"] == len(os.sched_getaffinity(0))
    assert found["decode"]["mb_per_s"] > 1 and "network" not in found
    machine = machine_of(found, "it")
    assert 0.5 * machine.memory_mb < 1e-6 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert os.listdir(shared) == [], "nothing is left"
    assert sorted(os.listdir(tmp_path)) == ["d.fan", "shared", "site.toml", "source"]
    plan = json.loads(run_inside("plan", "job", prepared, "--measured", file, "--json").stdout)
    assert " on " in plan["measured"] and "decompression" in plan["nodes"]["1"]["fanstore"]["busy_s"]
    several = run_inside("plan", "job", prepared, "--measured", file, "--nodes", "2", "--batch", "1")
    assert several.returncode == 2 and "the network was not measured, because one node measured alone" in several.stderr
    again = measure(file, "--shared", shared, "--local", tmp_path, "--load", "64MiB", "--dry-run")
    assert again.returncode == 0 and found == tomllib.loads(file.read_text()), "a dry run measures nothing"


def test_three_nodes(shared: Path, tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    result = measure(file, "--shared", shared, "--local", tmp_path, "--load", "200MiB", ranks=3)
    assert result.returncode == 0, result.stderr
    assert "send between all nodes" in result.stderr and "1 machine for 3 processes" in result.stderr
    found = tomllib.loads(file.read_text())
    assert [point["readers"] for point in found["shared"]["large"]] == [1, 2, 3, 12]
    assert found["processes"] == 3 and 0 < found["network"]["request_s"] < 1
    pairs = {(pair["from"], pair["to"]) for pair in found["network"]["slowest_pairs"]}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert machine_of(found, "it").network_mb_per_s == pytest.approx(found["network"]["mb_per_s"])
    assert os.listdir(shared) == [] and sorted(os.listdir(tmp_path)) == ["shared", "site.toml"]


def test_what_fails_on_one_node_ends_all(shared: Path, tmp_path: Path) -> None:
    """Rank 1 has no such directory: one sentence, and nothing is left."""
    script = tmp_path / "one.sh"
    script.write_text(
        f'#!/bin/sh\nif [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then set -- "$@" --local {tmp_path}/none; fi\nexec "$@"\n'
    )
    script.chmod(0o755)
    result = run_fanstore(
        "plan",
        "measure",
        tmp_path / "site.toml",
        "--shared",
        shared,
        prefix=[*mpirun(2), script],
        limit_s=2 * LIMIT_S,
    )
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("fanstore-plan: error: ")]
    assert errors == [f"fanstore-plan: error: {os.uname().nodename}: {tmp_path}/none is not a directory"]
    assert os.listdir(shared) == [] and not (tmp_path / "site.toml").exists()


def test_interrupted(shared: Path, tmp_path: Path) -> None:
    """As soon as there is something to be removed."""
    words = ["measure", tmp_path / "site.toml", "--shared", shared, "--local", tmp_path]
    command = [str(word) for word in (BIN / "fanstore-plan", *words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            end_s = time.monotonic() + LIMIT_S
            while not list(tmp_path.glob(f"{PREFIX}*")) and time.monotonic() < end_s:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert process.returncode == 130 and errors.endswith("fanstore-plan: interrupted\n")
    assert os.listdir(tmp_path) == ["shared"] and os.listdir(shared) == []


@pytest.mark.parametrize("begun", [True, False])
def test_interrupted_while_threads_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """The signal comes before or after the third thread is under way: who waits for it is let go."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def interrupted_start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) < 3 or begun:
            start(thread)
        if len(started) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        disk_write(tmp_path, 4, 1000)
    assert len(started) == 3 and not any(thread.is_alive() for thread in started)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("site.toml", "name a directory on the shared file system in which you may write: --shared DIR"),
        ("site.toml --shared nothing", "nothing is not a directory"),
        ("site.toml --shared SHARED --local nothing", "nothing is not a directory"),
        ("site.toml --shared SHARED --load 1MB", "--load is too little for 1 node; it must be "),
        ("site.toml --shared SHARED --load much", "'much' is not a size"),
        ("nowhere/site.toml --shared SHARED", "cannot write nowhere/site.toml: there is no such directory"),
        ("other.txt --shared SHARED", "'other.txt' is not a TOML file"),
        ("other.toml --shared SHARED", "other.toml exists and is not a measurement; name another file"),
        ("site.toml --shared SHARED --dataset nothing", "the prepared dataset 'nothing' does not exist"),
        ("site.toml --shared d.fan", "d.fan is a prepared dataset; name another directory"),
    ],
)
def test_what_cannot_be(
    words: str, sentence: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("precious")
    (tmp_path / "other.toml").write_text("precious = true")
    (tmp_path / "d.fan").mkdir()
    for name in ("manifest.json", "index.fsx"):
        (tmp_path / "d.fan" / name).touch()
    result = run_inside("plan", "measure", *words.replace("SHARED", str(shared)).split())
    assert sentence in assert_one_error(result, "plan", result.returncode or 1) and result.stdout == ""
    assert os.listdir(shared) == [] and not (tmp_path / "site.toml").exists()
    assert (tmp_path / "other.txt").read_text() == "precious"


@given(
    nodes=st.integers(1, 5_000),
    small_bytes=st.integers(1, 8 << 20),
    load_bytes=st.integers(1 << 20, 1 << 40),
)
def test_load_is_bounded(nodes: int, small_bytes: int, load_bytes: int) -> None:
    try:
        plan = _make_plan(nodes, small_bytes, load_bytes)
    except UsageError:
        return
    assert plan.load_bytes <= load_bytes
    readers = [step.readers for step in plan.steps]
    assert readers[0] == 1 and readers[-1] == 4 * nodes and readers == sorted(readers)


def test_names_are_written_as_toml_has_them() -> None:
    content = {"hosts": ['a "b" \\ c', "d\ne"], "shared": {"path": "/ü", "x": [{"a": 1, "b": 0.000123456789}]}}
    found = tomllib.loads("\n".join(_toml(content)))
    assert found["hosts"] == content["hosts"] and found["shared"]["path"] == "/ü"
    assert found["shared"]["x"] == [{"a": 1, "b": pytest.approx(0.000123457)}]
