"""The report of real jobs: what a mount and what several ranks under mpirun write, however they end."""

import html
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import MakePrepared
from jobs import ULFM, Job, StartJob, needs_jobs, needs_strace
from mounting import Mount, command, needs_fuse, wait_until
from publishing import follow
from report_data import SECTIONS

from fanstore.fuse.reporting import REPORT_S, Publishing, Reporting
from fanstore.report import figures
from fanstore.telemetry.statistics import Source, Statistics
from fanstore.units import format_bytes

pytest_plugins = ["mounting", "jobs"]
pytestmark = needs_fuse

FILES, FILE_BYTES = 12, 60_000


@pytest.fixture
def prepared(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"file-{number}").write_bytes(os.urandom(FILE_BYTES))
    return make_prepared(source, partitions=4, quiet=True)


def sections(page: Path) -> dict[str, str]:
    """The words of each section; the head is the first."""
    text = page.read_text()
    parts = re.split(r'<section id="(\w+)">', text.partition("<body>")[2])
    assert parts[1::2] == SECTIONS and text.endswith("</html>\n")
    words = [html.unescape(" ".join(re.sub(r"<[^>]*>", " ", part).split())) for part in parts]
    return {"head": words[0], **dict(zip(words[1::2], words[2::2], strict=True))}


def report(mountpoint: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((mountpoint / ".fanstore/report.json").read_bytes())
    return loaded


def read_all(mountpoint: Path) -> None:
    for number in range(FILES):
        assert len((mountpoint / f"file-{number}").read_bytes()) == FILE_BYTES


def test_of_one_node(tmp_path: Path, prepared: Path, mount: Mount) -> None:
    """Live with fanstore-stat, and at the end, after a signal."""
    page, live = tmp_path / "report.html", tmp_path / "live.html"
    (tmp_path / "out").mkdir()
    options = ("--report", str(page), "--output", str(tmp_path / "out"))
    mounted = mount(prepared, *options, local=tmp_path / "ssd")
    read_all(mounted.path)
    (mounted.path / "checkpoint").write_bytes(b"x" * 5000)
    data = report(mounted.path)
    assert data["version"] == 1 and not data["ended"]
    assert sum(figures.by_source(data["nodes"], "bytes").values()) == FILES * FILE_BYTES
    shown = command("stat", mounted.path, "--html", live)
    assert (shown.returncode, shown.stdout) == (0, ""), shown.stderr
    words = sections(live)
    assert "running" in words["head"] and str(prepared) in words["head"]
    assert format_bytes(FILES * FILE_BYTES) in words["glance"]
    standard = command("stat", mounted.path, "--html", "-")
    assert standard.stdout.startswith("<!DOCTYPE html>") and standard.stdout.endswith("</html>\n")
    for wrong, reason in (
        (("--html", mounted.path / "x"), "lies inside the mount point"),
        (("--html", tmp_path / "none/x"), "cannot write"),
        (("--html", live, "--json"), "leave out"),
    ):
        refused = command("stat", mounted.path, *wrong)
        assert refused.returncode == 2 and reason in refused.stderr and refused.stderr.count("\n") == 1
    mounted.stop()
    words = sections(page)
    assert "ended with exit code 0" in words["head"]
    assert "No read failed. All 4 copies of partitions were made" in words["glance"]
    assert "All outputs are saved." in words["glance"]
    for event in ("mounted ", "staging began: 4 partitions", "staging ended: 4 of 4 partitions", "SIGTERM: ending"):
        assert event in words["events"]
    assert f"the node's own disk {format_bytes(FILES * FILE_BYTES)} 100 %" in words["sources"]
    assert oct(page.stat().st_mode & 0o777) == oct(0o666 & ~umask())


def umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def test_of_a_command_that_fails_on_damaged_data(tmp_path: Path, prepared: Path, mount: Mount) -> None:
    partition = prepared / "part-00000.tar"
    content = bytearray(partition.read_bytes())
    content[1500:1600] = bytes(100)
    partition.write_bytes(content)
    page = tmp_path / "report.html"
    mounted = mount(
        prepared,
        *("--report", str(page), "--", "sh", "-c", 'cat "$FANSTORE_MOUNT"/*; exit 5'),
        wait=False,
        announced=["cannot read 'file-"],
    )
    assert mounted.wait_end() == 5
    mounted.check_clean()
    words = sections(page)
    assert "ended with exit code 5" in words["head"]
    assert "failed, in 1 damaged file" in words["glance"] and "The job ended with exit code 5." in words["glance"]
    assert "error data cannot read 'file-" in words["events"] and "the command ended with 5" in words["events"]


def test_of_a_command_that_cannot_be_run(tmp_path: Path, prepared: Path, mount: Mount) -> None:
    page = tmp_path / "report.html"
    mounted = mount(prepared, "--report", str(page), "--", str(prepared / "manifest.json"), wait=False)
    mounted.announced.append("cannot be started: Permission denied")
    assert mounted.wait_end() == 126
    mounted.check_clean()
    assert "ended by an error" in sections(page)["head"]


def test_while_the_job_runs_and_if_it_cannot_be_written(
    tmp_path: Path, prepared: Path, expect_warnings: Callable[..., None]
) -> None:
    """Every minute; what is there is replaced as a whole; a full disk is said once and ends nothing."""
    folder = tmp_path / "folder"
    folder.mkdir()
    page = folder / "report.html"
    expect_warnings(r"cannot write .*report.html: No such file or directory")

    def state() -> str:
        return sections(page)["head"] if page.exists() else "none"

    async def wait_for(condition: Callable[[], bool]) -> None:
        for _ in range(60_000):  # a millisecond each
            if condition():
                return
            await trio.sleep(1)
        pytest.fail(f"it never came to that: {state()}")

    async def scenario(reporting: Reporting, statistics: Statistics) -> None:
        await wait_for(page.exists)
        assert "running" in state()
        statistics.sources[Source.SHARED].bytes = 123 << 20
        await wait_for(lambda: "123 MiB" in sections(page)["glance"])
        folder.rename(tmp_path / "away")
        await wait_for(lambda: reporting.events.warnings == 1)
        await trio.sleep(10 * REPORT_S)
        folder.mkdir()
        await wait_for(page.exists)
        reporting.code = 0

    reporting = follow(prepared, Publishing(report=page), scenario)
    assert reporting.events.warnings == 1
    assert "ended with exit code 0" in state() and "cannot write" in sections(page)["events"]
    assert [path.name for path in folder.iterdir()] == ["report.html"]


def check_traffic(job: Job, pages: list[Path]) -> None:
    """What every page says of the whole job is what the ranks say of themselves."""
    data = report(job.mount(0))
    read = format_bytes(len(data["nodes"]) * FILES * FILE_BYTES)
    matrix = figures.matrix(data["nodes"])
    assert matrix.cells[0][1] > 0 and matrix.cells[1][0] > 0
    for rank in range(job.size):
        assert sum(matrix.cells[rank]) == job.statistics(rank)["sources"]["remote"]["fetched_bytes"]
        assert matrix.cells[rank][rank] == 0
    for page in pages:
        words = sections(page)
        assert read in words["glance"], page
        assert format_bytes(matrix.most()) in words["traffic"]


@needs_jobs
@pytest.mark.timeout(120)
def test_of_two_ranks(tmp_path: Path, prepared: Path, start_job: StartJob) -> None:
    """Each rank can show the whole job; at the end rank 0 writes it; each has metrics of its own meanwhile."""
    page = tmp_path / "report.html"
    job = start_job(
        prepared, 2, "--stage-first", "--report", page, "--metrics", tmp_path / "node-{rank}.prom", local=True
    )
    pages = [tmp_path / f"live-{rank}.html" for rank in range(2)]
    for rank in range(2):
        read_all(job.mount(rank))
        wait_until((tmp_path / f"node-{rank}.prom").exists, "metrics", job.evidence)

    def has_shown(rank: int) -> bool:
        """Again if the other node has not answered within its second: the machine may be busy."""
        result = command("stat", job.mount(rank), "--html", pages[rank])
        assert result.returncode == 0, result.stderr
        return "silent)" not in sections(pages[rank])["head"]

    for rank in range(2):
        wait_until(lambda rank=rank: has_shown(rank), "a page of both", job.evidence)  # type: ignore[misc]
    check_traffic(job, pages)
    before = {rank: job.statistics(rank)["sources"]["remote"]["bytes"] for rank in range(2)}
    job.stop()
    words = sections(page)
    assert "nodes 2 started" in words["head"] and "ended with exit code 0" in words["head"]
    assert format_bytes(sum(before.values())) in words["sources"], "both ranks are in it"
    assert words["nodes"].count(" done ") >= 2
    for rank in range(2):
        assert f"{job.mount(rank)}, {job.local(rank)}" in words["nodes"], "paths are those of the rank"
    spared = re.search(r"([\d,]+) metadata operations spared", words["glance"])
    assert spared is not None and int(spared[1].replace(",", "")) >= 2 * FILES
    assert "ranks 0, 1 info staging staging ended: 2 of 2 partitions" in words["events"]
    assert list(tmp_path.glob("*.prom")) == []


@needs_jobs
@pytest.mark.timeout(120)
def test_a_lost_rank_0_has_an_heir(tmp_path: Path, prepared: Path, start_job: StartJob) -> None:
    """The lowest rank that is alive writes the report, and says who died."""
    page = tmp_path / "report.html"
    job = start_job(
        prepared,
        3,
        *("--stage-first", "--replicas", "2", "--report", page),
        local=True,
        launcher=ULFM,
        announced=[r"rank 0 on \S+ has died"],
    )
    for rank in (1, 2):
        read_all(job.mount(rank))
    job.kill(0)
    job.wait_log(r"rank 0 on \S+ has died", [1, 2])
    job.stop()
    words = sections(page)
    assert "nodes 3 (1 lost)" in words["head"]
    assert "Rank 0 died" in words["glance"]
    assert "has told nothing" in words["nodes"]
    assert re.search(r"ranks 1, 2 warning nodes rank 0 on \S+ has died", words["events"])
    assert format_bytes(2 * FILES * FILE_BYTES) in words["glance"], "what ranks 1 and 2 read"


@needs_jobs
@pytest.mark.timeout(120)
def test_of_commands_that_end_at_different_times(tmp_path: Path, prepared: Path, start_job: StartJob) -> None:
    """Rank 1 ends first and is in the report; the exit code is that of the job."""
    page = tmp_path / "report.html"
    script = f"""
        cat "$FANSTORE_MOUNT"/file-* > /dev/null
        if [ $FANSTORE_RANK = 1 ]; then exit 3; fi
        until grep -q 'ended with 3' {shlex.quote(str(tmp_path))}/job-0/log1; do sleep 0.05; done
    """
    job = start_job(prepared, 2, "--report", page, command=["sh", "-c", script], wait=False)
    assert job.wait_end() == 3, job.evidence()
    job.check_clean()
    words = sections(page)
    assert "ended with exit code 3" in words["head"]
    assert format_bytes(2 * FILES * FILE_BYTES) in words["glance"]
    assert "the command ended with 3" in words["events"] and "the command ended with 0" in words["events"]


@needs_jobs
@needs_strace
@pytest.mark.timeout(120)
def test_of_a_job_that_was_told_to_end(tmp_path: Path, prepared: Path, start_job: StartJob) -> None:
    """The launcher gives a quarter of a second: mount and copies go first, and the report is written all the same."""
    page = tmp_path / "report.html"
    job = start_job(prepared, 2, "--report", page, local=True, merciful=2)
    for rank in range(2):
        read_all(job.mount(rank))
    job.wait_staged()
    job.signal_launcher(signal.SIGTERM)
    job.wait_end()
    job.check_clean()
    words = sections(page)
    assert "SIGTERM: ending" in words["events"]
    # Whoever could not tell in that time is missing, and that is said.
    told = 2 if "Missing in all figures" not in words["about"] else 1
    assert format_bytes(told * FILES * FILE_BYTES) in words["glance"]
