"""Copies are restored when daemons die: real signals, real disks, and what programs read meanwhile."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from commands import run_fanstore
from jobs import ULFM, Job, StartJob, needs_jobs, once_per_rank
from load import Source, load, make_files
from mounting import needs_root, prepare, wait_until

pytest_plugins = ["jobs"]
pytestmark = needs_jobs

OPTIONS = ("--cache", "1MiB", "--stage-first")
PARTITIONS = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("copies") / "source", 40)


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return Source(root)


@pytest.fixture
def prepared(root: Path, tmp_path: Path) -> Path:
    return prepare(root, tmp_path / "d.fan", "--partitions", str(PARTITIONS))


def hide_partitions(prepared: Path) -> None:
    """The shared file system has nothing to give from now on."""
    for path in prepared.glob("part-*.tar"):
        path.rename(path.with_suffix(".gone"))


def kill_one(job: Job, rank: int) -> None:
    job.announced.append(rf"rank {rank} on \S+ has died")
    job.kill(rank)


def wait_restored(job: Job, times: int = 1, *, copies: str = r"\d+ cop(y|ies)") -> None:
    """Until the logs of all that live have told so often that there are enough copies."""
    for rank in job.living():
        wait_until(
            lambda rank=rank: len(re.findall(rf"all partitions have {copies} again", job.log_text(rank))) >= times,  # type: ignore[misc]
            f"restored copies in the log of rank {rank}",
            job.evidence,
        )


def on_disk(job: Job) -> dict[int, list[int]]:
    """By partition, the living ranks that have it on their disk: whole files, as the directories show them."""
    found: dict[int, list[int]] = {}
    for rank in job.living():
        for path in job.local(rank).glob("*/part-*.tar"):
            found.setdefault(int(path.stem.removeprefix("part-")), []).append(rank)
    return found


def test_death_after_death_costs_nothing(start_job: StartJob, prepared: Path, source: Source) -> None:
    """With two copies of each, three of four nodes die one after the other, and the shared file system is not read."""
    job = start_job(prepared, 4, "--replicas", "2", *OPTIONS, local=True, launcher=ULFM)
    hide_partitions(prepared)
    for deaths, victim in enumerate((1, 0, 3), 1):
        with load(source, [job.mount(rank) for rank in job.living() if rank != victim]) as reading:
            reading.wait_reads(5)
            kill_one(job, victim)
            reading.wait_reads(5)
            if deaths < 3:
                wait_restored(job, deaths, copies="2 copies")
            reading.wait_reads(5)
        if deaths < 3:
            copies = on_disk(job)
            assert sorted(copies) == list(range(PARTITIONS))
            assert all(len(ranks) >= 2 for ranks in copies.values()), copies
        for rank in job.living():
            source.check(job.mount(rank))
            assert job.reads(rank, "shared") == 0
            assert job.statistics(rank)["copies"]["shared_bytes"] == 0
    said = run_fanstore("stat", job.mount(2)).stdout
    assert re.search(r"copies: \d+ of \d+ partitions copied again after a death, ", said), said
    assert re.search(r"copies      (\d+) of \1 partitions copied again after a death, (.*) of \2", said), said
    copies = job.nodes(2)[2]["copies"]
    assert copies["done_partitions"] == copies["partitions"] > 0 and copies["missing_copies"] == 0
    page = run_fanstore("stat", "--html", "-", job.mount(2)).stdout
    assert re.search(r"\d partitions \(.*\) of rank 1 on \S+ are copied again, to 2 nodes", page)
    assert "copies of partitions were made again on other nodes after a loss" in page
    assert job.living() == [2]
    assert sorted(on_disk(job)) == list(range(PARTITIONS))
    before = job.statistics(2)
    source.check(job.mount(2))
    after = job.statistics(2)
    assert after["sources"]["local"]["reads"] - before["sources"]["local"]["reads"] >= len(source.contents)
    assert after["cache"]["upcalls"] == before["cache"]["upcalls"], "C reads the new copies, too"
    job.stop()


def test_one_copy_comes_back_from_the_shared_file_system(start_job: StartJob, prepared: Path, source: Source) -> None:
    job = start_job(prepared, 3, *OPTIONS, local=True, launcher=ULFM)
    kill_one(job, 1)
    wait_restored(job, copies="1 copy")
    copies = [job.statistics(rank)["copies"] for rank in job.living()]
    assert sorted(on_disk(job)) == list(range(PARTITIONS))
    assert sum(item["shared_bytes"] for item in copies) == sum(item["done_bytes"] for item in copies) > 0
    hide_partitions(prepared)
    for rank in job.living():
        source.check(job.mount(rank))
        assert job.reads(rank, "shared") == 0, "nobody has read before"
    job.stop()


@needs_root
def test_disk_that_is_full_by_then(start_job: StartJob, prepared: Path, source: Source, tmp_path: Path) -> None:
    """Rank 2 had room at the start; then somebody has used it. Others take what falls to it, and it says so once."""
    small = tmp_path / "job" / "ssd2"
    small.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", small], check=True, timeout=60)
    try:
        full = "there is no room on the disk of this node to copy partitions again"
        job = start_job(
            prepared,
            4,
            "--replicas",
            "2",
            *OPTIONS,
            local=True,
            launcher=ULFM,
            directory=tmp_path / "job",
            announced=[full],
        )
        usage = os.statvfs(small)
        with open(small / "other", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, usage.f_bavail * usage.f_frsize)
        kill_one(job, 0)
        wait_restored(job, copies="2 copies")
        once_per_rank(job, full, [2])
        copies = job.statistics(2)["copies"]
        assert copies["failed_partitions"] == copies["partitions"] > 1
        assert not list(job.local(2).glob("*/*.partial"))
        for rank in job.living():
            source.check(job.mount(rank))
            assert job.reads(rank, "shared") == 0
        (small / "other").unlink()
        job.stop()
    finally:
        subprocess.run(["umount", "-l", small], check=True, timeout=60)
