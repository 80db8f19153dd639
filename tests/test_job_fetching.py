"""What the native engine fetches from other nodes without Python: all of it, as long as all is well; in real jobs.

What happens when it is not well is in test_job_survival.py, and, below the daemon, in tests/native/drive_fetch.c.
"""

from pathlib import Path

import pytest
from jobs import Job, StartJob, end_tracer, needs_jobs, needs_strace
from load import Source
from mounting import prepare, wait_until
from oddities import compressible, incompressible

pytest_plugins = ["jobs"]
pytestmark = needs_jobs

MIB = 1 << 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of one read, of many reads, and of several chunks."""
    root = tmp_path_factory.mktemp("fetching") / "source"
    root.mkdir()
    for number in range(24):
        make = compressible if number % 2 else incompressible
        (root / f"small-{number:02d}").write_bytes(make(1 + 10_007 * number, number))
        if number < 6:
            (root / f"medium-{number}").write_bytes(make(1_500_000 + number, number))
        if number < 4:
            (root / f"large-{number}").write_bytes(make(9 * MIB + number, number))
    return root


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return Source(root)


@pytest.fixture(scope="module")
def prepared(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("prepared")
    return {
        codec: prepare(root, base / f"{codec}.fan", "--codec", codec, "--partitions", "6")
        for codec in ("none", "lz4", "zstd")
    }


def upcalls(job: Job, rank: int) -> int:
    return int(job.statistics(rank)["cache"]["upcalls"])


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_python_is_not_asked(start_job: StartJob, prepared: dict[str, Path], source: Source, codec: str) -> None:
    job = start_job(prepared[codec], 3, "--stage-first", local=True)
    for rank in range(3):
        source.check(job.mount(rank))
        statistics = job.statistics(rank)
        remote = statistics["sources"]["remote"]
        assert statistics["cache"]["upcalls"] == 0
        assert statistics["sources"]["shared"]["reads"] == 0
        assert remote["reads"] > 0
        given = [(node["fetches"], node["fetched_bytes"]) for node in statistics["peers"]["nodes"]]
        assert (sum(n for n, _ in given), sum(n for _, n in given)) == (remote["fetches"], remote["fetched_bytes"])
        assert all(fetches for fetches, _ in given), "both are asked"
        assert statistics["verification"]["chunks"] >= remote["fetches"], "what comes is checked"
        assert statistics["peers"]["latency_us"]["max"] > 0
        assert statistics["peers"]["transport"]["fetches"] == remote["fetches"]
    job.stop()


@needs_strace
def test_asked_again_while_staging(start_job: StartJob, prepared: dict[str, Path], source: Source) -> None:
    """A node that is copying slowly what it is asked for says so, is not taken for dead, and has it then."""
    parts = [word for path in sorted(prepared["none"].glob("part-*.tar")) for word in ("-P", path)]
    held = ["strace", "-D", "-f", "-qq", "-o", "/dev/null", *parts]
    held += ["-e", "trace=preadv", "-e", "inject=preadv:delay_enter=4s:when=1"]
    job = start_job(prepared["none"], 2, local=True, wrapper=held)
    source.check(job.mount(0))
    peer = job.peer(0, 1)
    assert (peer["refused"], peer["timeouts"], peer["state"]) == (0, 0, "alive")
    assert job.reads(0, "shared") == 0
    assert job.reads(0, "remote") > 0
    for pid in job.pids:
        end_tracer(pid)
    job.wait_staged()

    def stays_in_the_engine() -> bool:
        before = upcalls(job, 0)
        source.check(job.mount(0))
        return upcalls(job, 0) == before

    wait_until(stays_in_the_engine, "that the engine fetches again", job.evidence)
    assert job.peer(0, 1)["fetches"] > 0
    job.stop()
