"""Two jobs on one node at the same time, of one user and of two: neither sees or disturbs the other.

The other user runs the programs of this environment, which need not be readable for others: the capability to read
everything is given to that job, and not to the processes that try to look at somebody else's things.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import leftovers
import pytest
from jobs import Job, StartJob, needs_jobs
from load import Source, make_files
from mounting import needs_root, prepare, wait_until
from users import account

pytest_plugins = ["jobs"]
pytestmark = needs_jobs


@dataclass
class User:
    """Somebody without rights; home is a directory of theirs."""

    number: int
    group: int
    home: Path

    def prefix(self, *capabilities: str) -> list[str | Path]:
        line: list[str | Path] = ["env", f"HOME={self.home}", "setpriv", f"--reuid={self.number}", "--clear-groups"]
        return [*line, f"--regid={self.group}", *capabilities]

    def job_prefix(self) -> list[str | Path]:
        return self.prefix("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        line = [*self.prefix("--inh-caps=-all"), *command]
        return subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=60, cwd="/")


@pytest.fixture
def directory() -> Iterator[Path]:
    """Readable for everybody, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="fanstore-neighbours-test-"))
    path.chmod(0o755)
    try:
        yield path
        assert leftovers.mounts_below(path) == []
    finally:
        for line in leftovers.mounts_below(path):
            subprocess.run(["umount", "-l", line.split()[1]], check=False, timeout=60)
        shutil.rmtree(path)


@pytest.fixture
def user(directory: Path) -> Iterator[User]:
    with account("n") as entry:
        home = directory / "home"
        home.mkdir(mode=0o755)
        os.chown(home, entry.pw_uid, entry.pw_gid)
        yield User(entry.pw_uid, entry.pw_gid, home)


@pytest.fixture
def source(directory: Path) -> Path:
    root = make_files(directory / "source", 20)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return root


@pytest.fixture
def prepared(directory: Path, source: Path) -> Path:
    made = prepare(source, directory / "d.fan", "--partitions", "4")
    for path in [made, *made.iterdir()]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return made


def test_two_jobs_of_one_user(start_job: StartJob, prepared: Path, source: Path, tmp_path: Path) -> None:
    base = tmp_path / "ssd"
    base.mkdir()
    contents = Source(source)
    first = start_job(prepared, 2, "--stage-first", "--cache", "1MiB", local=str(base))
    second = start_job(prepared, 2, "--stage-first", "--cache", "1MiB", local=str(base))
    for mount in [*first.mounts(), *second.mounts()]:
        contents.check(mount)
    assert len(list(base.iterdir())) == 4
    first.end()
    wait_until(lambda: len(list(base.iterdir())) == 2, "end of the first job", first.evidence)
    for mount in second.mounts():
        contents.check(mount)
    assert all(second.reads(rank, "shared") == 0 for rank in range(2))
    assert all(node["state"] == "up" for node in second.nodes(0))
    second.stop()
    first.check_clean()


@needs_root
def test_two_users(start_job: StartJob, prepared: Path, source: Path, user: User, directory: Path) -> None:
    base = directory / "ssd"
    base.mkdir()
    base.chmod(0o1777)
    ours = start_job(prepared, 2, "--stage-first", local=str(base))
    ours_there = set(base.iterdir())
    script = (
        'diff -r "$0" "$FANSTORE_MOUNT" && touch "$1/right$FANSTORE_RANK"; while [ ! -e "$1/go" ]; do sleep 0.1; done'
    )
    theirs = Job(
        prepared,
        user.home,
        2,
        ["--stage-first"],
        local=str(base),
        command=["sh", "-c", script, source, user.home],
        prefix=user.job_prefix(),
    )
    try:
        wait_until(
            lambda: len(list(user.home.glob("right*"))) == 2 or theirs.process.poll() is not None,
            "reads of the other user",
            theirs.evidence,
        )
        assert theirs.process.poll() is None, theirs.evidence()
        theirs_there = set(base.iterdir()) - ours_there
        assert len(theirs_there) == 2
        for path in ours_there | theirs_there:
            status = path.stat()
            assert stat.S_IMODE(status.st_mode) == 0o700
            assert status.st_uid == (0 if path in ours_there else user.number)
            assert path.name.startswith(f"fanstore-{status.st_uid}-")
            assert all(stat.S_IMODE(inner.stat().st_mode) & 0o077 == 0 for inner in path.iterdir())
        for path in [*ours_there, *ours.mounts()]:
            assert "Permission denied" in user.run("ls", path).stderr, path
        for line in leftovers.mounts_below(user.home):
            with pytest.raises(PermissionError):  # not even root looks into somebody's mount
                os.listdir(line.split()[1])
        for log in user.home.glob("log*"):
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
        Source(source).check(ours.mount(1))
        (user.home / "go").touch()
        assert theirs.wait_end() == 0, theirs.evidence()
        theirs.check_clean()
    finally:
        theirs.destroy()
    assert set(base.iterdir()) == ours_there
    Source(source).check(ours.mount(0))
    ours.stop()
    assert list(base.iterdir()) == []
