"""``--order locality`` on real mounts: DDP on several nodes, in a program that is not changed."""

import json
import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import StartJob, needs_jobs
from mounting import prepare
from oddities import compressible

from fanstore.order import TorchDistributedSampler

pytest_plugins = ["jobs"]
FRAMEWORKS = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")
pytestmark = [needs_jobs, pytest.mark.skipif(not FRAMEWORKS, reason="frameworks are installed by scripts/test --all")]

PROGRAMS = Path(__file__).with_name("hooked_programs.py")
FILES, BATCH, EPOCHS = 500, 32, 3


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sorted by class, in eight partitions."""
    root = tmp_path_factory.mktemp("locality") / "source"
    for number in range(FILES):
        path = root / "train" / f"class{number // 50}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(3000 + number, number))
    return prepare(root, root.parent / "d.fan", "--partitions", "8")


def torchrun(port: int) -> list[str]:
    """One rank on each of two nodes; FANSTORE_RANK says which one this is, and the other is torch's rank 0."""
    line = f"exec {FRAMEWORKS} -m torch.distributed.run --nnodes 2 --node-rank $((1 - FANSTORE_RANK))"
    line += f" --master-addr 127.0.0.1 --master-port {port} {PROGRAMS} rearranged $FANSTORE_MOUNT {EPOCHS}"
    # torch makes sockets there, whose names must be short.
    return ["env", "GLOO_SOCKET_IFNAME=lo", f"TMPDIR={tempfile.gettempdir()}", "sh", "-c", line]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_each_rank_reads_what_its_node_holds(start_job: StartJob, prepared: Path) -> None:
    """The same samples per global batch, the same gradients, and few reads of the other node."""
    job = start_job(
        prepared, 2, "--stage-first", "--order", "locality", local=True, command=torchrun(free_port()), wait=False
    )
    assert job.wait_end(120) == 0, job.evidence()
    said = [json.loads(line) for line in job.output().splitlines() if line.startswith("{")]
    ranks: list[Any] = sorted(said, key=lambda each: int(each["rank"]))
    assert len(ranks) == 2, job.evidence()
    sampler = TorchDistributedSampler(FILES, 2, seed=7)
    for rank, told in enumerate(ranks):
        *_, last = told["epochs"]
        assert flat(last["batches"]) == sampler.samples(EPOCHS - 1, rank).tolist(), "a sampler of the program's own"
        assert told["in_order"] == TorchDistributedSampler(FILES, 2, shuffle=False).samples(0, rank).tolist()
        assert told["endless"] == [[0, 1], [2, 3]]
        assert told["rearranged"]["epochs"] == EPOCHS, job.evidence()
        assert len(told["rearranged"]["left_alone"]) == 3, told["rearranged"]
    for epoch in range(EPOCHS):
        parts = [told["epochs"][epoch]["batches"] for told in ranks]
        plain = [in_batches(sampler.samples(epoch, rank).tolist()) for rank in range(2)]
        assert parts != plain
        assert [list(map(len, part)) for part in parts] == [list(map(len, part)) for part in plain]
        for ours, theirs in zip(zip(*parts, strict=True), zip(*plain, strict=True), strict=True):
            assert sorted(flat(ours)) == sorted(flat(theirs)), "the same global batch"
    rearranged, plainly = (ranks[0]["epochs"][epoch]["gradients"] for epoch in (-2, -1))
    # Of the last batch, too: it is smaller, but has as many samples on each rank.
    assert np.allclose(rearranged, plainly, rtol=1e-12, atol=1e-15) and np.abs(rearranged).max() > 1e-3
    held = sum(told["rearranged"]["held"] for told in ranks) / (EPOCHS * FILES)
    assert 0.90 < held < 1, "expected: 0.95"
    remote = np.array([[epoch["remote"] for epoch in told["epochs"]] for told in ranks]).sum(axis=0)
    *rearranged_share, plain_share = np.diff(remote) / FILES
    assert max(rearranged_share) < 0.1 and plain_share > 0.4, "expected: 0.05, and half of all"


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [each for part in lists for each in part]


def in_batches(samples: list[int]) -> list[list[int]]:
    return [samples[place : place + BATCH] for place in range(0, len(samples), BATCH)]
