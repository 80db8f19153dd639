"""Outputs of jobs of several nodes: who sees what, one winner, deaths, stops, a shared file system in trouble."""

import errno
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BOTH_ENGINES
from jobs import LIMIT_S, ULFM, Job, StartJob, in_threads, needs_jobs
from mounting import command, needs_root, prepare, small_file_system, wait_until
from output_model import Model, contents
from output_program import identity

pytest_plugins = ["jobs"]
pytestmark = needs_jobs

ENGINES = BOTH_ENGINES

PROGRAM = Path(__file__).with_name("output_program.py")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("outputs")
    (base / "source" / "folder").mkdir(parents=True)
    (base / "source" / "folder" / "file").write_bytes(b"of the dataset")
    return prepare(base / "source", base / "data.fan")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


# --- seeing ---


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_closed_is_seen_everywhere(start_job: StartJob, prepared: Path, out: Path, size: int) -> None:
    job = start_job(prepared, size, "--output", out, local=True)
    for turn in range(2 * size):
        writer, others = turn % size, [rank for rank in range(size) if rank != turn % size]
        mine, folder = job.mount(writer), f"folder/{turn}"
        content = os.urandom(300_000)
        (mine / folder).mkdir()
        (mine / folder / "new").write_bytes(content)
        (mine / folder / "temporary").write_bytes(b"first")
        os.rename(mine / folder / "temporary", mine / folder / "checkpoint")
        for rank in others:
            there = job.mount(rank) / folder
            assert names(there) == ["checkpoint", "new"]
            assert (there / "new").stat().st_size == len(content)
            assert (there / "new").read_bytes() == content
            assert (there / "checkpoint").read_bytes() == b"first"
            assert not (there / "temporary").exists()
        (mine / folder / "temporary").write_bytes(b"the second one")
        os.rename(mine / folder / "temporary", mine / folder / "checkpoint")
        for rank in others:
            there = job.mount(rank) / folder
            assert (there / "checkpoint").read_bytes() == b"the second one", "the kernel there had read the first"
            with open(there / "new", "ab") as file:
                file.write(b"%d" % rank)
            content += b"%d" % rank
            for reader in range(size):
                assert (job.mount(reader) / folder / "new").read_bytes() == content, f"appended by {rank}"
        os.utime(job.mount(others[0]) / folder / "new", ns=(1, 5_000_000_007))
        os.chmod(job.mount(others[0]) / folder / "new", 0o600)
        os.unlink(job.mount(others[0]) / folder / "checkpoint")
        os.rename(mine / folder, mine / f"moved-{turn}")
        for rank in range(size):
            there = job.mount(rank)
            assert not (there / folder).exists()
            assert names(there / f"moved-{turn}") == ["new"]
            status = (there / f"moved-{turn}" / "new").stat()
            assert (status.st_mtime_ns, status.st_mode & 0o777) == (5_000_000_007, 0o600)
    expected = contents(job.mount(0))
    del expected["folder/file"]
    job.stop()
    assert contents(out) == expected
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


def test_growing_log(start_job: StartJob, prepared: Path, out: Path) -> None:
    """Each fsync of a file that stays open shows the others what it has by then."""
    job = start_job(prepared, 2, "--output", out, local=True)
    text = b""
    with open(job.mount(1) / "log", "wb", buffering=0) as log:
        for number in range(20):
            text += b"line %d\n" % number
            log.write(b"line %d\n" % number)
            os.fsync(log)
            assert (job.mount(0) / "log").read_bytes() == text
            assert (out / "log").read_bytes() == text
    job.stop()


def test_one_winner(start_job: StartJob, prepared: Path, out: Path) -> None:
    job = start_job(prepared, 3, "--output", out, local=True)
    won: list[list[str]] = [[], [], []]

    def race(rank: int) -> None:
        for number in range(40):
            try:
                fd = os.open(job.mount(rank) / f"file-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                os.write(fd, b"%d" % rank)
                os.close(fd)
                won[rank].append(f"file-{number}")
            except FileExistsError:
                assert (job.mount(rank) / f"file-{number}").exists()
            try:
                os.mkdir(job.mount(rank) / f"folder-{number}")
                won[rank].append(f"folder-{number}")
            except FileExistsError:
                assert (job.mount(rank) / f"folder-{number}").is_dir()

    in_threads(*(functools.partial(race, rank) for rank in range(3)))
    everything = sorted(won[0] + won[1] + won[2])
    assert everything == sorted(f"{kind}-{number}" for kind in ("file", "folder") for number in range(40))
    for rank in range(3):
        for name in won[rank]:
            if name.startswith("file"):
                assert (job.mount((rank + 1) % 3) / name).read_bytes() == b"%d" % rank
    job.stop()


# --- death and silence ---


class Programs:
    """A program on each node, which writes until it is told to end."""

    def __init__(self, job: Job, ranks: range) -> None:
        self.job = job
        self.models = {rank: Model() for rank in ranks}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in ranks:
            arguments = [PROGRAM, job.mount(rank) / f"w{rank}", self.ledger(rank), rank, LIMIT_S]
            line = [sys.executable, "-S", "-E", *map(str, arguments)]
            self.processes[rank] = subprocess.Popen(line, stdin=subprocess.DEVNULL)

    def ledger(self, rank: int) -> Path:
        return self.job.directory / f"ledger{rank}"

    def lines(self, rank: int) -> int:
        return self.ledger(rank).read_bytes().count(b"\n") if self.ledger(rank).exists() else 0

    def wait_more(self, rank: int, count: int) -> None:
        goal = self.lines(rank) + count
        wait_until(
            lambda: self.lines(rank) >= goal or self.processes[rank].poll() is not None,
            f"{count} more calls on rank {rank}",
            self.job.evidence,
        )

    def wait_end(self) -> None:
        for rank, process in self.processes.items():
            self.ledger(rank).with_suffix(".end").touch()
            process.wait(LIMIT_S)
            self.models[rank].read(self.ledger(rank))

    def destroy(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(LIMIT_S)


@pytest.fixture
def run_programs() -> Iterator[Callable[[Job, range], Programs]]:
    running: list[Programs] = []

    def start(job: Job, ranks: range) -> Programs:
        running.append(Programs(job, ranks))
        return running[-1]

    yield start
    for programs in running:
        programs.destroy()


def read_or_error(path: Path) -> bytes | int:
    try:
        return path.read_bytes()
    except OSError as error:
        return error.errno or 0


def test_the_deciding_node_is_killed(
    start_job: StartJob, prepared: Path, out: Path, run_programs: Callable[[Job, range], Programs]
) -> None:
    died = r"rank 0 on \S+ has died"
    job = start_job(prepared, 3, "--output", out, local=True, launcher=ULFM, announced=[died])
    programs = run_programs(job, range(3))
    for rank in range(3):
        programs.wait_more(rank, 60)
    job.kill(0)
    job.wait_log(died)
    for rank in (1, 2):
        programs.wait_more(rank, 60)
    programs.wait_end()
    assert programs.models[0].errors
    for rank in (1, 2):
        assert programs.models[rank].errors == [], "others go on"

    # No name is lost, and what was synced can be read.
    orphans = programs.models[0]
    there = job.mount(1) / "w0"
    lost: set[str] = set()
    for path, file in orphans.files.items():
        if path in orphans.unsure:
            continue
        assert (there / path).exists(), f"{path}\n{job.evidence()}"
        content = read_or_error(there / path)
        if isinstance(content, bytes):
            assert file.is_open or identity(content) in file.closed, path
            continue
        assert content == errno.EIO
        lost.add(path)
        synced = any(promise.contents == file.closed and not promise.bound for promise in file.promises)
        assert file.is_open or not synced, f"{path} was synced, but cannot be read"
    (job.mount(2) / "afterwards").write_bytes(b"created")
    assert (job.mount(1) / "afterwards").read_bytes() == b"created"
    subprocess.run(["fusermount3", "-u", job.mount(1)], check=True, timeout=LIMIT_S)
    code = job.wait_end()
    if lost:
        assert code != 0
        job.announced.append(r"the content of \S+ is on rank 0 only")
    # All that is lost is named. Of what was under way when the node died nobody knows how far it came.
    died_with_it = r"outputs were only on rank 0 on \S+, which died before they were saved; .* They are: (.*)"
    told = [
        path for rank in (1, 2) for text in re.findall(died_with_it, job.log_text(rank)) for path in text.split(", ")
    ]
    under_way = orphans.unsure | {path for path, file in orphans.files.items() if file.is_open}
    assert lost <= {path.removeprefix("w0/") for path in told} <= lost | under_way, job.evidence()
    if told:
        assert code != 0
        job.announced.append(died_with_it)
    job.check_clean()
    for rank in (1, 2):
        model = programs.models[rank]
        assert contents(out / f"w{rank}") == {path: next(iter(file.closed)) for path, file in model.files.items()}
    assert orphans.check_killed(out / "w0") == []

    # What the dead node alone had is on its disk.
    result = command("mount", "--recover", "--local", job.local(0))
    assert result.returncode == 0, result.stderr
    assert orphans.check_recovered(out / "w0", last=0) == [], result.stderr
    assert names(job.local(0)) == []
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []
    for rank in (1, 2):
        model = programs.models[rank]
        assert contents(out / f"w{rank}") == {path: next(iter(file.closed)) for path, file in model.files.items()}


def test_a_stopped_node_catches_up(start_job: StartJob, prepared: Path, out: Path) -> None:
    job = start_job(prepared, 3, "--output", out, local=True, launcher=ULFM)
    (job.mount(2) / "before").write_bytes(b"by 2")
    job.kill(2, signal.SIGSTOP)
    for number in range(30):
        (job.mount(number % 2) / f"name-{number}").write_bytes(b"%d" % number)
    os.rename(job.mount(0) / "name-7", job.mount(0) / "renamed")
    os.unlink(job.mount(1) / "name-8")
    expected = names(job.mount(0))
    job.kill(2, signal.SIGCONT)
    wait_until(lambda: names(job.mount(2)) == expected, "that rank 2 knows all names", job.evidence)
    assert (job.mount(2) / "renamed").read_bytes() == b"7"
    (job.mount(2) / "after").write_bytes(b"by 2")
    assert (job.mount(0) / "after").read_bytes() == b"by 2"
    job.stop()
    assert names(out) == sorted({*expected, "after"} - {"folder"})


# --- the shared file system in trouble ---


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", "1m") as path:
        yield path


def pending(job: Job, rank: int) -> int:
    return int(job.statistics(rank)["outputs"]["pending"])


@needs_root
def test_the_shared_file_system_is_full_for_a_while(start_job: StartJob, prepared: Path, small: Path) -> None:
    # A small file may come in the moment in which half of a large one takes all the room.
    full = r"cannot copy (large\d?|small|synced) to .*: No space left on device; it is tried again"
    job = start_job(prepared, 2, "--output", small, local=True, announced=[full])
    large = os.urandom(3 << 20)
    (job.mount(1) / "large").write_bytes(large)
    job.wait_log(full, ranks=[1])
    (job.mount(1) / "large2").write_bytes(large[::-1])
    (job.mount(0) / "small").write_bytes(b"fits")
    with open(job.mount(0) / "synced", "wb") as file:
        file.write(b"fits, too")
        file.flush()
        os.fsync(file)
    assert (small / "synced").read_bytes() == b"fits, too", "others are not kept by it"
    wait_until(lambda: (small / "small").exists(), "a small file", job.evidence)
    wait_until(lambda: pending(job, 0) == pending(job, 1) == 2, "that both nodes know of it", job.evidence)
    assert "No space left" in str(job.statistics(1)["outputs"]["trouble"])
    assert names(small) == [*[name for name in names(small) if name.startswith(".")], "small", "synced"]
    subprocess.run(["mount", "-o", "remount,size=32m", small], check=True, timeout=LIMIT_S)
    wait_until(lambda: pending(job, 0) == 0, "the end of the trouble", job.evidence)
    job.wait_log(r"can be written to again", ranks=[1])
    assert (small / "large").read_bytes() == large
    assert (small / "large2").read_bytes() == large[::-1]
    job.stop()
    assert names(small) == ["large", "large2", "small", "synced"]


def test_the_shared_file_system_is_gone_at_the_end(
    start_job: StartJob, prepared: Path, out: Path, tmp_path: Path
) -> None:
    """The exit code and the message say so, and the next job saves what was left."""
    script = f'cd "$FANSTORE_MOUNT"; while [ ! -e {tmp_path}/gone ]; do sleep 0.02; done; echo $FANSTORE_RANK > late'
    script += f"$FANSTORE_RANK; mkdir folder$FANSTORE_RANK; touch {tmp_path}/wrote$FANSTORE_RANK"
    job = start_job(prepared, 2, "--output", out, local=True, command=["sh", "-c", script])
    os.rename(out, tmp_path / "hidden")
    (tmp_path / "gone").touch()
    trouble = r"cannot (copy|save) .* to .*: No such file or directory; it is tried again"
    job.announced += [trouble, r"outputs could not be saved to .*late\d \(2 B, in outputs/[0-9a-f]+\)"]
    wait_until(lambda: all((tmp_path / f"wrote{rank}").exists() for rank in range(2)), "the end", job.evidence)
    job.wait_log(trouble)
    end_s = time.monotonic() + LIMIT_S
    while job.process.poll() is None:
        assert time.monotonic() < end_s, job.evidence()
        for pid in job.pids:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        time.sleep(0.3)
    assert job.process.returncode != 0
    job.check_logs()
    for rank in range(2):
        assert f"late{rank}" in job.output(), "said where the user looks"
        if not job.local(rank).exists():  # the launcher killed the daemon first, and its supervisor has saved them
            assert (out / f"late{rank}").read_text() == f"{rank}\n"
            continue
        (left,) = job.local(rank).iterdir()
        assert str(left) in job.output()
    if out.exists():
        return  # made anew by a supervisor
    os.rename(tmp_path / "hidden", out)
    again = start_job(prepared, 2, "--output", out, local=job.local_pattern)
    for rank in range(2):
        for reader in range(2):
            assert (again.mount(reader) / f"late{rank}").read_text() == f"{rank}\n"
    again.stop()
    assert names(out) == ["folder0", "folder1", "late0", "late1"]
