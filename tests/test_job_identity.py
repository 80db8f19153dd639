"""A dataset mounted by the ranks of a job is its source, byte for byte, on every one of them, from whatever source.

Staging is held up with strace, which delays the first read() of a partition by each thread: staging reads that way,
and nothing else does.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import oddities
import pytest
from jobs import Job, StartJob, end_tracer, needs_jobs, needs_strace
from load import forget
from mounting import prepare

pytest_plugins = ["jobs"]
pytestmark = needs_jobs

RANKS = 4


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = oddities.build(tmp_path_factory.mktemp("identity") / "tree")
    yield root
    oddities.remove_tree(root)


@pytest.fixture(scope="module")
def prepared(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("prepared")
    return {
        codec: prepare(tree, base / f"{codec}.fan", "--codec", codec, "--partitions", "9") for codec in ("none", "lz4")
    }


def all_differences(tree: Path, job: Job) -> list[str]:
    """Of all mounts, which are read at the same time."""
    with ThreadPoolExecutor(job.size) as pool:
        found = pool.map(lambda rank: oddities.compare_trees(tree, job.mount(rank)), range(job.size))
        return [f"rank {rank}: {line}" for rank, lines in enumerate(found) for line in lines]


def sources(job: Job) -> set[str]:
    """Where any rank has read from."""
    return {source for rank in range(job.size) for source in ("local", "remote", "shared") if job.reads(rank, source)}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_staged(start_job: StartJob, prepared: dict[str, Path], tree: Path, codec: str, replicas: int) -> None:
    job = start_job(prepared[codec], RANKS, "--replicas", str(replicas), "--stage-first", local=True)
    assert all_differences(tree, job) == []
    assert sources(job) == {"local", "remote"}, "nothing came from the shared file system"
    for rank in range(RANKS):
        assert job.nodes(rank)[rank]["partitions"]["local"], "every node keeps something"
    copies = [p for node in job.nodes(0) for p in node["partitions"]["local"]]
    assert sorted(copies) == sorted(list(range(9)) * replicas)
    for rank in range(RANKS):
        cache = job.statistics(rank)["cache"]
        assert cache["used_bytes"] <= cache["capacity_bytes"] and cache["upcalls"] == 0, "Python had nothing to bring"
    job.stop()


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_without_local(start_job: StartJob, prepared: dict[str, Path], tree: Path, codec: str) -> None:
    """Nothing is copied, so there is nothing to stage, and ``--replicas`` is refused."""
    job = start_job(prepared[codec], RANKS)
    assert all_differences(tree, job) == []
    assert sources(job) == {"shared"}
    job.stop()


@needs_strace
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_while_staging(start_job: StartJob, prepared: dict[str, Path], tree: Path, codec: str, replicas: int) -> None:
    parts = [word for path in sorted(prepared[codec].glob("part-*.tar")) for word in ("-P", path)]
    # Not with --seccomp-bpf, whose filter stays when strace has gone.
    held = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", *parts]
    held += ["-e", "trace=preadv", "-e", "inject=preadv:delay_enter=1s:when=1"]
    job = start_job(prepared[codec], RANKS, "--replicas", str(replicas), local=True, wrapper=held)
    staged = [rank for rank in range(RANKS) if "staged" in job.log_text(rank)]
    assert not staged, "this was meant to be read while staging goes on"
    assert all_differences(tree, job) == []
    assert sources(job) == {"local", "remote"}, "what is not here yet is brought by the node that copies it"
    for pid in job.pids:
        end_tracer(pid)
    job.wait_staged()

    for mount in job.mounts():
        forget(mount)
    assert all_differences(tree, job) == []
    assert sources(job) == {"local", "remote"}
    job.stop()
