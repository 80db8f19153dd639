"""Stated orders on real mounts and in real jobs: bytes right, files fetched ahead and counted, whatever is stated."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import BOTH_ENGINES, fanstore_command
from jobs import ULFM, Job, StartJob, needs_jobs
from mounting import Mount, needs_fuse, prepare, wait_until
from ordered import FILES, check, fetched, forget, shuffled, until

pytest_plugins = ["mounting", "jobs", "ordered"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

DIED = r"rank 1 on \S+ has died"


def test_a_list_is_fetched_ahead(mount: Mount, prepared: Path, root: Path, tmp_path: Path) -> None:
    paths = shuffled(root, 1)
    (tmp_path / "list").write_text("\n".join([*paths, "no such file", ""]))
    mounted = mount(prepared, "--order", str(tmp_path / "list"), announced=["1 line names no file of the dataset"])
    until(mounted, fetched(FILES), "that all is fetched, which fits the window")
    check(mounted.path, root, paths)
    now = until(mounted, lambda now: now["predicted"] == FILES, "that all was seen")
    assert (now["source"], now["sampler"], now["bad_lines"], now["files"]) == ("stated", "list", 1, FILES)
    assert now["taken"] == FILES and now["late"] == 0 and now["waited_s"] == 0


def test_nothing_is_done_if_it_is_off(mount: Mount, prepared: Path, root: Path) -> None:
    mounted = mount(prepared, "--order", "off")
    check(mounted.path, root, shuffled(root, 1))
    assert "order" not in mounted.statistics() and mounted.statistics()["cache"]["prefetched"] <= FILES
    assert not os.path.lexists(mounted.path / ".fanstore/order")
    assert mounted.statistics()["cache"]["waited_ns"] > 0


def test_a_specification(mount: Mount, prepared: Path, root: Path) -> None:
    from fanstore.order import TorchRandomSampler

    listed = sorted(str(path.relative_to(root)) for path in root.rglob("*.jpg"))
    mounted = mount(prepared, "--order", "torch-random:seed=11,list=imagefolder")
    until(mounted, fetched(FILES), "that the first epoch is fetched")
    check(mounted.path, root, [listed[sample] for sample in TorchRandomSampler(FILES, 11).samples(0)])
    now = until(mounted, lambda now: now["predicted"] == FILES, "that all was seen")
    assert (now["source"], now["sampler"], now["seed"], now["epoch"]) == ("stated", "torch-random", 11, 0)
    assert "torch-random:seed=11,list=imagefolder" in (mounted.path / ".fanstore/config.json").read_text()
    shown = subprocess.run([fanstore_command("stat"), mounted.path], capture_output=True, text=True, timeout=60)
    assert "order       stated: torch-random, seed 11, epoch 0; 240 of 240 files read as predicted" in shown.stdout


def test_a_shell_loop_is_enough(mount: Mount, prepared: Path, root: Path) -> None:
    """Relative, absolute and bad paths, in one opening and in many; the mount is read-only all the same."""
    mounted = mount(prepared, announced=["2 lines name no file of the dataset", "'new' cannot be created"])
    half = FILES // 2
    paths = shuffled(root, 2)
    script = 'for f in "$@"; do echo "$f"; done > .fanstore/order'
    lines = [*paths[:half], *(str(mounted.path / path) for path in paths[half:]), "nothing", "/etc/passwd"]
    subprocess.run(["sh", "-c", script, "sh", *lines], cwd=mounted.path, check=True, timeout=60)
    now = until(mounted, lambda now: fetched(FILES)(now) and now["bad_lines"] == 2, "that the list is fetched")
    assert now["source"] == "stated"
    check(mounted.path, root, paths)
    now = until(mounted, lambda now: now["predicted"] == FILES, "that all was seen")
    assert now["taken"] == FILES
    until(mounted, lambda now: now["source"] == "none", "the end of the list")
    with pytest.raises(OSError, match="Read-only file system"):
        (mounted.path / "new").write_text("")


def test_lines_one_by_one(mount: Mount, prepared: Path, root: Path) -> None:
    """A file that is opened for each line, as ``echo >>`` in a loop does."""
    mounted = mount(prepared)
    paths = shuffled(root, 3)[:20]
    script = 'for f in "$@"; do echo "$f" >> .fanstore/order; done'
    subprocess.run(["sh", "-c", script, "sh", *paths], cwd=mounted.path, check=True, timeout=60)
    until(mounted, fetched(20), "that all are fetched")
    check(mounted.path, root, paths)
    until(mounted, lambda now: now["taken"] == 20, "that all were found")


def test_a_wrong_statement(mount: Mount, prepared: Path, root: Path, tmp_path: Path) -> None:
    """Files of class 3 are stated, others are read: the bytes are right, and nothing is expected that is not read."""
    paths = shuffled(root, 4)
    (tmp_path / "list").write_text("\n".join(path for path in paths if path.startswith("class3")))
    mounted = mount(prepared, "--order", str(tmp_path / "list"))
    until(mounted, fetched(FILES // 4), "that what is stated is fetched")
    others = [path for path in paths if not path.startswith("class3")]
    check(mounted.path, root, others)
    now = until(mounted, lambda now: now["files"] == len(others), "that all was seen")
    assert (now["predicted"], now["taken"]) == (0, 0)


def test_a_reader_that_leaves_the_order(mount: Mount, prepared: Path, root: Path, tmp_path: Path) -> None:
    """Two files that were not expected, and nothing more is fetched; it is said in the log."""
    first = [path for path in shuffled(root, 5) if not path.startswith("class0")]
    others = [path for path in shuffled(root, 5) if path.startswith("class0")]
    (tmp_path / "list").write_text("\n".join(first))
    mounted = mount(prepared, "--order", str(tmp_path / "list"))
    check(mounted.path, root, first[:40])
    until(mounted, lambda now: now["predicted"] >= 30, "that the order is followed")
    check(mounted.path, root, others[:40])
    now = until(mounted, lambda now: now["source"] == "none", "that it is left")
    assert now["held_bytes"] == 0
    assert "programs do not follow the order" in mounted.log_text()
    forget(mounted.path, first)
    check(mounted.path, root, first[40:100])
    until(mounted, lambda now: now["source"] == "stated" and now["predicted"] >= 50, "that it is followed again")


def test_two_programs_with_different_orders(mount: Mount, prepared: Path, root: Path) -> None:
    mounted = mount(prepared)
    paths = shuffled(root, 6)
    halves = [paths[: FILES // 2], paths[FILES // 2 :]]
    for half in halves:
        (mounted.path / ".fanstore/order").write_text("\n".join(half))
        until(mounted, fetched(FILES // 2), "that a list is fetched")
    until(mounted, fetched(FILES), "that both lists are fetched")
    threads = [threading.Thread(target=check, args=(mounted.path, root, half)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = until(mounted, lambda now: now["predicted"] == FILES, "that both were followed")
    assert now["taken"] == FILES


@pytest.mark.parametrize("cache", ["0", "1MiB"])
def test_a_cache_that_is_too_small(mount: Mount, prepared: Path, root: Path, tmp_path: Path, cache: str) -> None:
    paths = shuffled(root, 7)
    (tmp_path / "list").write_text("\n".join(paths))
    mounted = mount(prepared, "--order", str(tmp_path / "list"), "--cache", cache)
    check(mounted.path, root, paths)
    now = until(mounted, lambda now: now["predicted"] == FILES or not now["window_bytes"], "that all was seen")
    assert now["window_bytes"] == (0 if cache == "0" else 1 << 19) and now["held_bytes"] <= now["window_bytes"]
    statistics = mounted.statistics()["cache"]
    assert statistics["used_bytes"] <= statistics["capacity_bytes"]


def test_a_list_that_cannot_be_read(mount: Mount, prepared: Path, root: Path, tmp_path: Path) -> None:
    """Found too late to refuse the mount: it is a warning, and all is as without a list."""
    (tmp_path / "list").write_text("")
    mounted = mount(prepared, "--order", str(tmp_path / "list"))
    check(mounted.path, root, shuffled(root, 1)[:10])
    assert until(mounted, lambda now: now["files"] == 10, "that all was seen")["source"] == "none"
    assert "0 files to be read" in mounted.log_text()


def test_programs_that_are_intercepted_move_the_window(mount: Mount, root: Path, tmp_path: Path) -> None:
    """Nobody sees what they read, only how many files they have opened."""
    mounted = mount(prepare(root, tmp_path / "d.fan"), "--order", "sequential")
    until(mounted, lambda now: now["source"] == "stated", "that the order is known")
    script = "import sys\nfor path in sys.argv[1:] * 2: open(path, 'rb').read()"
    paths = sorted(str(mounted.path / path.relative_to(root)) for path in root.rglob("*.jpg"))
    program = [fanstore_command("run"), str(mounted.path), "--", sys.executable, "-c", script, *paths]
    subprocess.run(program, check=True, timeout=60)
    assert mounted.statistics()["intercepted"]["opens"] == 2 * FILES
    now = until(mounted, lambda now: now["epoch"] == 1, "that they are in the second epoch")
    assert now["files"] == 0


# --- jobs of two nodes ---


def job_order(job: Job, rank: int) -> dict[str, Any]:
    section: dict[str, Any] = job.statistics(rank)["order"]
    return section


@needs_jobs
def test_files_of_another_node_come_before_they_are_read(
    start_job: StartJob, prepared: Path, root: Path, tmp_path: Path
) -> None:
    """Each rank with a list of its own; what is remote is fetched ahead, and no reader waits for it."""
    for rank in range(2):
        (tmp_path / f"list{rank}").write_text("\n".join(shuffled(root, 20 + rank)))
    job = start_job(prepared, 2, "--stage-first", "--order", str(tmp_path / "list{rank}"), local=True)
    for rank in range(2):
        wait_until(lambda rank=rank: fetched(FILES)(job_order(job, rank)), "that all is fetched", job.evidence)  # type: ignore[misc]
        check(job.mount(rank), root, shuffled(root, 20 + rank))
        wait_until(lambda rank=rank: job_order(job, rank)["predicted"] == FILES, "that all was seen", job.evidence)  # type: ignore[misc]
        now = job_order(job, rank)
        assert (now["taken"], now["waited_s"]) == (FILES, 0)
        assert job.statistics(rank)["sources"]["remote"]["fetches"] >= FILES // 4
    job.stop()


@needs_jobs
def test_a_node_dies_while_its_files_are_fetched_ahead(
    start_job: StartJob, prepared: Path, root: Path, tmp_path: Path
) -> None:
    paths = shuffled(root, 30)
    (tmp_path / "list").write_text("\n".join(paths))
    job = start_job(prepared, 2, "--stage-first", "--order", tmp_path / "list", local=True, launcher=ULFM)
    check(job.mount(0), root, paths[:100])
    job.announced.append(DIED)
    job.kill(1)
    check(job.mount(0), root, paths[100:])
    wait_until(lambda: job_order(job, 0)["predicted"] >= FILES - 4, "that the order is followed on", job.evidence)
    job.wait_log(DIED, ranks=[0])  # nothing may be left that it would have to be asked for
    job.stop()


def test_a_reader_in_another_process_is_seen(mount: Mount, prepared: Path, root: Path) -> None:
    """Several processes at different places of one list, as workers of a DataLoader are."""
    mounted = mount(prepared)
    paths = shuffled(root, 8)
    (mounted.path / ".fanstore/order").write_text("\n".join(paths))
    until(mounted, fetched(FILES), "that the list is fetched")
    script = "import sys\nfor path in sys.argv[1:]: open(path, 'rb').read()"
    workers = [
        subprocess.Popen([sys.executable, "-c", script, *paths[start : start + 60]], cwd=mounted.path)
        for start in range(0, FILES, 60)
    ]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    now = until(mounted, lambda now: now["files"] == FILES, "that all was seen")
    assert (now["predicted"], now["taken"]) == (FILES, FILES)
