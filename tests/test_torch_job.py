"""Samplers of fanstore.torch on real mounts: each rank begins with what its node holds."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Job, StartJob, needs_jobs
from mounting import prepare, wait_until
from test_torch_samplers import LIMIT_S, PYTHON, SCRIPT, environment, flat

from fanstore.format.prepared import PreparedDataset

pytest_plugins = ["jobs"]
pytestmark = [needs_jobs, pytest.mark.skipif(not PYTHON, reason="frameworks are installed by scripts/test --all")]

FILES = 48


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight partitions of six files each."""
    directory = tmp_path_factory.mktemp("torch")
    for number in range(FILES):
        path = directory / "source" / f"class{number // 12}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * (20_000 + number))
    return prepare(directory / "source", directory / "d.fan", "--partitions", "8")


def start(job: Job, rank: int, ranks: int, port: int, node: int, case: str = "mounted") -> "subprocess.Popen[str]":
    """A rank that reads on a node; without a port it cannot talk to others."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), case, str(rank), str(ranks), str(port), job.mount(node)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
    )


def said_by(started: "list[subprocess.Popen[str]]") -> list[tuple[str, str]]:
    try:
        return [process.communicate(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def read(job: Job, node_of_rank: list[int], port: int) -> list[list[str]]:
    """What each rank has read in one epoch."""
    started = [start(job, rank, len(node_of_rank), port, node) for rank, node in enumerate(node_of_rank)]
    said = said_by(started)
    assert [process.returncode for process in started] == [0] * len(started), said
    return [json.loads(out) for out, _ in said]


def test_ranks_read_what_their_node_holds(start_job: StartJob, prepared: Path) -> None:
    """Two nodes, two ranks, which are numbered otherwise than the nodes; then ranks that cannot talk to each other."""
    job = start_job(prepared, 2, "--stage-first", "--order", "off", local=True)
    placed = [set(node["partitions"]["placed"]) for node in job.nodes(0)]
    assert placed[0] | placed[1] == set(range(8)) and not placed[0] & placed[1]
    everything = sorted(f"class{number // 12}/{number:03d}.png" for number in range(FILES))
    index = PreparedDataset.open(prepared).index
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free_port = probe.getsockname()[1]
    node_of_rank = [1, 0]
    parts = read(job, node_of_rank, free_port)
    assert sorted(flat(parts)) == everything
    for rank, part in enumerate(parts):
        assert len(part) == FILES // 2
        assert {index.partition[index.resolve(path.encode())] for path in part} <= placed[node_of_rank[rank]]
    assert [job.reads(node, "remote") for node in (0, 1)] == [0, 0]
    assert all(job.reads(node, "local") > 0 for node in (0, 1))
    ((_, refused),) = said_by([start(job, 0, 2, 0, 1)])  # a rank that is not where it is taken to be
    assert "UsageError: on which node each of 2 ranks runs is not known: call torch.distributed" in refused
    check_scheduler(job)
    manifest = prepared / "manifest.json"
    manifest.rename(prepared / "hidden")
    ((everything_read, warned),) = said_by([start(job, 0, 1, free_port, 0)])
    (prepared / "hidden").rename(manifest)
    assert "which node holds which file cannot be seen, shares are even: " in warned
    assert sorted(json.loads(everything_read)) == everything
    job.stop()


def test_what_ranks_own_is_on_their_node_when_it_is_read(start_job: StartJob, prepared: Path) -> None:
    """No reader fetches anything, in any epoch: what arrives is fetched once, kept, and let go when it has left."""
    job = start_job(prepared, 2, "--stage-first", local=True)
    placed = [set(node["partitions"]["placed"]) for node in job.nodes(0)]
    index = PreparedDataset.open(prepared).index
    names = sorted(f"class{number // 12}/{number:03d}.png" for number in range(FILES))
    partition = [index.partition[index.resolve(name.encode())] for name in names]
    size = [index.size[index.resolve(name.encode())] for name in names]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    said = said_by([start(job, rank, 2, port, rank, "owned") for rank in range(2)])
    ranks = [json.loads(out) for out, _ in said]
    for kind in range(2):
        for rank, told in enumerate(ranks):
            seen, counted = told[kind]["epochs"], told[kind]["counted"]
            away = [{sample for sample in epoch if partition[sample] not in placed[rank]} for epoch in seen]
            assert not away[0] and all(len(away[epoch]) > 0 for epoch in range(1, 5))
            for epoch in range(5):
                assert counted[epoch]["fetched_by_readers"] == counted[0]["fetched_by_readers"], "all reads are local"
                assert counted[epoch]["room"]["waiting"] == 0
            for epoch in range(4):
                # What is owned in this epoch and the next one, and nothing else, is held.
                held = away[epoch] | away[epoch + 1]
                assert counted[epoch]["room"]["files"] == counted[epoch]["kept"] == len(held)
                assert counted[epoch]["room"]["bytes"] == sum(size[sample] for sample in held)
                # One that was away for an epoch was still there when it came back.
                known = away[epoch] | away[max(0, epoch - 1)]
                arrived = sum(size[sample] for sample in away[epoch + 1] - known)
                assert counted[epoch + 1]["remote"] - counted[epoch]["remote"] == arrived, "each arrival once"
    for node in (0, 1):
        wait_until(lambda node=node: job.statistics(node)["room"]["files"] == 0, "that nothing is held", job.evidence)  # type: ignore[misc]
        wait_until(lambda node=node: job.statistics(node)["cache"]["chunks"] == 0, "that it is let go", job.evidence)  # type: ignore[misc]
    job.stop()


def check_scheduler(job: Job) -> None:
    """pls.Scheduler on the same mounts: what arrives is read before it is used, and what has left is let go."""
    started = [start(job, rank, 2, 0, rank, "pls") for rank in range(2)]
    said = said_by(started)
    assert [process.returncode for process in started] == [0, 0], said
    ranks = [json.loads(out) for out, _ in said]
    for epoch in range(2):
        parts = [rank["seen"][epoch] for rank in ranks]
        assert sorted(flat(parts)) == list(range(FILES)) and len(parts[0]) == FILES // 2
    for rank in ranks:
        assert rank["everything"] == FILES and rank["classes"] == [f"class{number}" for number in range(4)]
        assert all(label == number // 12 for number, label in rank["labels"])
        assert 0 < rank["received"] == rank["sent"]
        assert rank["read"]["remote"] == 0
        assert 0 < rank["after_one"] < rank["received"] == rank["after_all"]
        # Somebody else may have the machine's page cache dropped: some are then read again, but hardly all.
        assert rank["again"]["local"] < rank["before_again"]["local"] + rank["sent"]
        assert rank["cleaned"]["local"] == rank["again"]["local"] + rank["sent"]
        assert rank["end"]["remote"] < 2 * rank["received"], "what had arrived was read again"
