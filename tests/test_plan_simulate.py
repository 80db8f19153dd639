"""fanstore-plan simulate as a user calls it: tables, JSON, the page, scenario files that are right and wrong."""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from commands import BIN, run_fanstore, run_inside

from fanstore.model import POLICIES
from fanstore.model.thesis import PUBLISHED_S
from fanstore.processes import ProcessWatch, start_ticks

#: A scenario of a few milliseconds, with the keys of HDMLP.
TINY = """
nodes = 2
c = 50
b_c = 5000
b_fs = 1000
distributed_threads = 2
samples = 400
mean_mb = 0.5
epochs = 2
batch = 10
pfs_bandwidth = [{ processes = 1, bw = 66 }, { processes = 2, bw = 86 }]
[[storage_classes]]
capacity = 20
threads = 2
bandwidth = [{ threads = 2, bw = 20000 }]
[[storage_classes]]
capacity = 60
threads = 2
backend = "ram"
bandwidth = [{ threads = 2, bw = 20000 }]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_json_of_the_installed_command() -> None:
    result = run_fanstore("plan", "simulate", "--scenario", "S1", "--policy", "naive", "hdmlp", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert list(found) == ["S1"] and list(found["S1"]) == ["naive", "hdmlp"]
    for policy, cell in found["S1"].items():
        assert cell["seconds"] == pytest.approx(PUBLISHED_S["S1"][policy], rel=0.01)
    assert found["S1"]["naive"]["pfs_bytes"] == pytest.approx(10 * 270e6, rel=0.01)


def test_tables_of_all_policies(tiny: Path) -> None:
    result = run_inside("plan", "simulate", "--scenario", tiny, "--mode", "corrected")
    assert (result.returncode, result.stderr) == (0, "")
    seconds, datasets = result.stdout.split("\n\n")[:2]
    assert seconds.startswith("seconds, corrected mode\n")
    names = [re.match(r"[\w-]+", line) for line in seconds.splitlines()[2:]]
    assert [name[0] for name in names if name] == list(POLICIES)
    assert re.search(r"^naive +2\.00$", datasets, re.MULTILINE)
    assert re.search(r"^lbann-preload +-$", seconds, re.MULTILINE)
    assert "lbann-preload needs memory for the whole dataset" in result.stdout
    assert "* reads other samples" in result.stdout


def test_nothing_goes_on_when_it_is_killed() -> None:
    """Processes of its own simulate; each would need a minute."""
    command = [str(BIN / "fanstore-plan"), "simulate", "--scenario", "places", "--policy", "naive", "hdmlp"]
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core nothing is simulated in another process")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            deadline = time.monotonic() + 60
            while len(found := children.read_text().split()) < 2:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            watched = [ProcessWatch(int(child), start_ticks(int(child))) for child in found]
        finally:
            process.kill()
    for watch in watched:
        assert watch.wait(20.0), f"{watch.pid} goes on"
        watch.close()


def test_seconds_stand_beside_those_that_were_published() -> None:
    result = run_inside("plan", "simulate", "--scenario", "S1", "--policy", "lower-bound", "fanstore")
    assert re.search(r"^lower-bound +7\.29 \(7\.30\)$", result.stdout, re.MULTILINE)
    assert re.search(r"^fanstore +7\.\d\d$", result.stdout, re.MULTILINE)


def test_seeds_and_modes_differ(tiny: Path) -> None:
    def seconds(*options: str) -> float:
        result = run_inside("plan", "simulate", "--scenario", tiny, "--policy", "staging-pool", "--json", *options)
        return float(json.loads(result.stdout)["tiny"]["staging-pool"]["seconds"])

    assert seconds() == seconds("--seed", "0") == seconds("--mode", "published")
    assert len({seconds(), seconds("--seed", "1"), seconds("--mode", "corrected")}) == 3


def test_page(tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run_inside("plan", "simulate", "--scenario", tiny, "--html", page)
    assert result.returncode == 0 and "seconds, published mode" in result.stdout
    text = page.read_text()
    assert text.count("<svg class=") == len(POLICIES) and "refuses" in text
    assert "src=" not in text and "<script" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--scenario S9", "there is no scenario 'S9'; there are S1, S2, "),
        ("--scenario imagenet1k", "there is no scenario 'imagenet1k'; did you mean imagenet-1k"),
        ("--scenario no.toml", "cannot read 'no.toml': No such file or directory"),
        ("--scenario .", "cannot read '.': Is a directory"),
        ("--scenario S1 S1", "scenario 'S1' is asked for twice"),
        ("--policy hdmpl", "argument --policy: invalid choice: 'hdmpl'"),
        ("--mode right", "argument --mode: invalid choice: 'right'"),
        ("--seed -1", "'--seed' is -1; it must be 0 or more"),
        ("--html /nowhere/x.html", "cannot write /nowhere/x.html: there is no such directory"),
        ("--html - --json", "--json and --html - both write to standard output"),
    ],
)
def test_what_cannot_be(words: str, sentence: str) -> None:
    refused(words.split(), sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nodes = ", "is not a TOML file: "),
        ("nodes = 0", "a system of 0 nodes cannot run anything"),
        ("pfs_bandwidth = [{ processes = 1, bw = 0 }]", "pfs_bandwidth has a throughput of 0 MB/s; it must be above 0"),
        ("pfs_bandwidth = []", "pfs_bandwidth has no measured point"),
        ("storage_classes = [{ capacity = 5, threads = 2 }]", "storage class 'staging' has no 'bandwidth'"),
        (
            "storage_classes = [{ capacity = -5, threads = 2, bandwidth = [{ threads = 1, bw = 1 }] }]",
            "storage class 'staging' has a capacity of -5 MB; it must be 0 or more",
        ),
        ("samples = 10", "an epoch has fewer samples than one batch of all nodes"),
        ("samples = 1_000_000_000_000", "1,000,000,000,000 samples, 10 epochs and 4 nodes are too many"),
    ],
)
def test_scenario_files_that_make_no_sense(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    refused(["--scenario", str(path)], sentence)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_bytes(b"\xff\xfe")
    refused(["--scenario", str(path)], "is not a TOML file: ")


def refused(words: list[str], sentence: str) -> None:
    result = run_inside("plan", "simulate", *words)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("fanstore-plan: error: ") and sentence in result.stderr
    assert result.stderr.count("\n") == 1
