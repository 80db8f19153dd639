"""Directories that are filled by nodes that die or end; and other kinds of jobs."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filled_jobs import RANKS, SIZE, check, fill, fill_more, filled_folder, names, new_folder, write
from jobs import LIMIT_S, ULFM, Job, StartJob, needs_jobs
from mounting import command, wait_until
from output_model import contents
from output_program import identity

pytest_plugins = ["jobs", "filled_jobs"]
pytestmark = needs_jobs


def pending(job: Job, rank: int) -> int:
    outputs = job.statistics(rank)["outputs"]
    return int(outputs["pending"]) + int(outputs["being_written"])


def lost_with(job: Job, rank: int) -> set[str]:
    """What the others have said to be lost with a dead node; announced, if it is anything."""
    told = rf"outputs were only on rank {rank} on \S+, which died before they were saved; .* They are: (.*)"
    lines = [text for living in job.living() for text in re.findall(told, job.log_text(living))]
    if lines:
        job.announced.append(told)
    return {path for text in lines for path in text.split(", ") if not re.fullmatch(r"and \d+ more", path)}


def test_the_node_that_fills_it_is_killed(start_job: StartJob, prepared: Path, out: Path) -> None:
    """All names stay; what was not saved is gone until it is recovered; the others can go on at once."""
    died = r"rank 1 on \S+ has died"
    job = start_job(prepared, SIZE, "--output", out, local=True, launcher=ULFM, announced=[died])
    folder, seen = filled_folder(job, 1)
    check(job.mount(0) / folder, seen)
    for rank in RANKS:
        wait_until(lambda rank=rank: pending(job, rank) == 0, "that all is saved", job.evidence)  # type: ignore[misc]
    unseen = fill_more(job, 1, folder, "unseen")
    fd = os.open(job.mount(1) / folder / "unclosed", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, b"half")
    unseen |= fill(job.mount(1) / folder, "last", 20)
    job.kill(1)
    with contextlib.suppress(OSError):
        os.close(fd)

    # They need not know yet that it is dead.
    listed = set(names(job.mount(2) / folder))
    assert listed == {*seen, *unseen, "unclosed"}
    told = listed - set(seen)
    job.wait_log(died)
    for rank in (0, 2):
        assert set(names(job.mount(rank) / folder)) == listed, "all that live agree"
    files = dict(seen)
    for rank, other in ((0, 2), (2, 0)):
        here, there = job.mount(rank) / folder, job.mount(other) / folder
        name = next(iter(files))
        os.unlink(here / name)
        del files[name]
        name = next(iter(files))
        os.rename(here / name, here / f"renamed-{rank}")
        files[f"renamed-{rank}"] = files.pop(name)
        os.mkdir(here / "within")
        with pytest.raises(FileExistsError):
            os.mkdir(there / "within")
        os.rmdir(there / "within")
        write(here / f"by-{rank}", b"created")
        with pytest.raises(FileExistsError):
            write(there / f"by-{rank}", b"too late")
        files[f"by-{rank}"] = b"created"
        files |= fill_more(job, rank, folder, f"after-{rank}")
        assert set(names(there)) == files.keys() | told
        for name, content in files.items():
            assert (there / name).read_bytes() == content
    contested = list(unseen)[-1]
    with contextlib.suppress(FileExistsError):
        write(job.mount(2) / folder / contested, b"of rank 2")
        files[contested] = b"of rank 2"
    assert (contested in files) == (contested not in told)

    subprocess.run(["fusermount3", "-u", job.mount(0)], check=True, timeout=LIMIT_S)
    code, lost = job.wait_end(), lost_with(job, 1)
    assert lost <= {f"{folder}/{name}" for name in told}
    assert code != 0 or not lost
    job.check_clean()
    saved = contents(out / folder)
    assert {name: saved.get(name) for name in files} == {name: identity(content) for name, content in files.items()}
    assert saved.keys() <= files.keys() | told

    # What the dead node alone had is on its disk.
    result = command("mount", "--recover", "--local", job.local(1))
    assert result.returncode == 0, result.stderr
    recovered = {f"{name}.unfinished" if name in files else name: content for name, content in unseen.items()}
    expected = {**files, **recovered, "unclosed.unfinished": b"half"}
    assert contents(out / folder) == {name: identity(content) for name, content in expected.items()}, result.stderr
    assert os.listdir(job.local(1)) == []
    assert names(out) == [folder]


def test_the_deciding_node_is_killed(start_job: StartJob, prepared: Path, out: Path) -> None:
    """Another one fills a directory meanwhile."""
    died = r"rank 0 on \S+ has died"
    job = start_job(prepared, SIZE, "--output", out, local=True, launcher=ULFM, announced=[died])
    folder = new_folder(job, 2)
    other = new_folder(job, 0)
    files = fill_more(job, 1, folder)
    others = fill_more(job, 2, other)
    fd = os.open(job.mount(1) / folder / "unclosed", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, b"some, ")
    files |= fill(job.mount(1) / folder, "before", 20)
    job.kill(0)
    files |= fill(job.mount(1) / folder, "after", 20)
    assert names(job.mount(2) / folder) == sorted([*files, "unclosed"])
    for name in list(files)[::5]:
        assert (job.mount(2) / folder / name).read_bytes() == files[name]
    os.write(fd, b"and more")
    os.close(fd)
    files["unclosed"] = b"some, and more"
    assert (job.mount(2) / folder / "unclosed").read_bytes() == files["unclosed"]
    job.wait_log(died)
    for rank, watcher in ((1, 2), (2, 1)):
        files |= fill_more(job, rank, folder, f"by-{rank}")
        check(job.mount(watcher) / folder, files, list(files)[-5:])
        with pytest.raises(FileExistsError):
            write(job.mount(watcher) / folder / list(files)[-1], b"too late")
        name = next(iter(files))
        os.unlink(job.mount(watcher) / folder / name)
        del files[name]
    others |= fill(job.mount(2) / other, "after", 20)
    check(job.mount(1) / other, others, list(others)[-5:])
    others |= fill(job.mount(2) / other, "last", 40)
    subprocess.run(["fusermount3", "-u", job.mount(1)], check=True, timeout=LIMIT_S)
    job.wait_end()
    assert lost_with(job, 0) == set()
    job.check_clean()
    for name, expected in ((folder, files), (other, others)):
        assert contents(out / name) == {path: identity(content) for path, content in expected.items()}
    assert names(out) == sorted([folder, other])


# --- the end, and other kinds of jobs ---

#: A program that creates files to its last moment, in a directory of its own and in one of all, and leaves one open.
SAVES = """
import os
rank = os.environ["FANSTORE_RANK"]
os.chdir(os.environ["FANSTORE_MOUNT"])
os.mkdir("own" + rank)
os.makedirs("all", exist_ok=True)
for folder in ("all", "own" + rank):
    for number in range(100):
        with open(f"{folder}/rank-{rank}-{number}", "xb", buffering=0) as file:
            file.write(b"%d of %s" % (number, rank.encode()))
left = os.open("own" + rank + "/left", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
os.write(left, b"open")
os._exit(0)
"""


def test_the_end_of_commands(start_job: StartJob, prepared: Path, out: Path) -> None:
    """All is saved that a node has created just before its command ended."""
    line = [sys.executable, "-S", "-E", "-c", SAVES]
    job = start_job(prepared, SIZE, "--output", out, local=True, command=line, wait=False)
    assert job.wait_end() == 0, job.evidence()
    job.check_clean()
    written = {f"rank-{rank}-{number}": b"%d of %d" % (number, rank) for rank in RANKS for number in range(100)}
    check(out / "all", written, written)
    for rank in RANKS:
        own = {name: content for name, content in written.items() if name.startswith(f"rank-{rank}-")}
        check(out / f"own{rank}", {**own, "left": b"open"}, [*own, "left"])
    assert names(out) == ["all", *(f"own{rank}" for rank in RANKS)]


@pytest.mark.parametrize(("engine_name", "is_saved"), [("native", False), ("python", True)])
def test_other_jobs(start_job: StartJob, prepared: Path, out: Path, engine_name: str, is_saved: bool) -> None:
    """With ``--scratch`` nothing is noted or saved; all else is equal, also with the engine in Python."""
    options: list[str | Path] = ["--output", out] if is_saved else ["--scratch"]
    job = start_job(prepared, SIZE, *options, "--engine", engine_name, local=True)
    assert {job.statistics(rank)["engine"]["name"] for rank in RANKS} == {engine_name}
    folder = new_folder(job)
    files = fill_more(job, 1, folder)
    for turn in range(3):
        files |= fill(job.mount(turn) / folder, f"turn-{turn}", 40)
        for rank in RANKS:
            check(job.mount(rank) / folder, files, list(files)[-3:])
        for rank in RANKS:
            with pytest.raises(FileExistsError):
                write(job.mount(rank) / folder / list(files)[-1], b"too late")
        os.unlink(job.mount((turn + 1) % SIZE) / folder / f"turn-{turn}-0")
        del files[f"turn-{turn}-0"]
        os.rename(job.mount(turn) / folder / f"turn-{turn}-1", job.mount(turn) / folder / f"renamed-{turn}")
        files[f"renamed-{turn}"] = files.pop(f"turn-{turn}-1")
    files |= fill(job.mount(1) / folder, "last", 60)
    job.stop()
    if is_saved:
        check(out / folder, files, files)
