"""The job directory: locked while the job lives, swept when it is dead, safe in a world-writable directory."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fanstore.errors import MountError
from fanstore.job.job_directory import LOCK_NAME, JobDirectory

UID = os.geteuid()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Like /tmp: everybody may make something in it."""
    path = tmp_path / "base"
    path.mkdir()
    path.chmod(0o1777)
    return path


def dead_directory(base: Path, name: str = "1-dead") -> Path:
    """What a job leaves that was killed: content, and a lock file that nobody holds."""
    path = base / f"fanstore-{UID}-{name}"
    path.mkdir(mode=0o700)
    (path / LOCK_NAME).touch(mode=0o600)
    (path / "part-00000.tar").write_bytes(b"x" * 1000)
    (path / "sub").mkdir()
    (path / "sub" / "file").write_bytes(b"x")
    return path


def test_made_private_and_removed(base: Path) -> None:
    with JobDirectory(base, "42") as job:
        assert job.path.parent == base
        assert job.path.name.startswith(f"fanstore-{UID}-42-")
        assert stat.S_IMODE(job.path.stat().st_mode) == 0o700
        (job.path / "part-00000.tar").write_bytes(b"x")
        (job.path / "link").symlink_to("/")
    assert list(base.iterdir()) == []
    job.remove()  # a second time is harmless


def test_a_wide_umask_makes_no_difference(base: Path) -> None:
    before = os.umask(0)
    try:
        with JobDirectory(base) as job:
            assert stat.S_IMODE(job.path.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_several_jobs_at_once_have_directories_of_their_own(base: Path) -> None:
    with JobDirectory(base, "7") as one, JobDirectory(base, "7") as two:
        assert one.path != two.path
        assert JobDirectory.sweep(base) == []
        assert one.path.is_dir()
        assert two.path.is_dir()


def test_a_base_that_did_not_exist_goes_again(tmp_path: Path) -> None:
    with JobDirectory(tmp_path / "ssd") as job:
        assert job.path.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_the_last_of_several_removes_a_base_that_did_not_exist(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "user.fanstore.test", b"")
    except OSError:
        pytest.skip("the file system of temporary files has no extended attributes")
    first = JobDirectory(tmp_path / "ssd")
    second = JobDirectory(tmp_path / "ssd")
    first.remove()
    assert second.path.is_dir()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_the_last_component_of_a_base_is_made(tmp_path: Path) -> None:
    with pytest.raises(MountError, match=f"the directory {tmp_path}/lcoal/ssd does not exist; is the name right?"):
        JobDirectory(tmp_path / "lcoal/ssd/x")
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_was_there_stays(base: Path) -> None:
    with JobDirectory(base):
        pass
    assert base.is_dir()


def test_sweep_removes_what_dead_jobs_left(base: Path) -> None:
    dead = [dead_directory(base, "1-a"), dead_directory(base, "2-b")]
    (base / "other").mkdir()
    (base / f"fanstore-{UID}-file").write_bytes(b"not a directory")
    assert JobDirectory.sweep(base) == dead
    assert sorted(entry.name for entry in base.iterdir()) == [f"fanstore-{UID}-file", "other"]
    assert JobDirectory.sweep(base) == []


def test_sweep_removes_a_directory_without_a_lock_file(base: Path) -> None:
    path = base / f"fanstore-{UID}-1-crashed-at-once"
    path.mkdir(mode=0o700)
    assert JobDirectory.sweep(base) == [path]


def test_sweep_of_a_base_that_does_not_exist(tmp_path: Path) -> None:
    assert JobDirectory.sweep(tmp_path / "nowhere") == []


def test_sweep_follows_no_symbolic_link(base: Path, tmp_path: Path, expect_warnings: Callable[..., None]) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (precious / "file").write_bytes(b"x")
    (base / f"fanstore-{UID}-link").symlink_to(precious)
    dead = dead_directory(base)
    (dead / "inside").symlink_to(precious)
    locked_by_link = dead_directory(base, "2-lock-is-a-link")
    (locked_by_link / LOCK_NAME).unlink()
    (locked_by_link / LOCK_NAME).symlink_to(precious / "file")
    expect_warnings(r"cannot clean up .*lock-is-a-link: Too many levels of symbolic links")
    assert JobDirectory.sweep(base) == [dead]
    assert (precious / "file").read_bytes() == b"x"
    assert (base / f"fanstore-{UID}-link").is_symlink()


def test_sweep_leaves_a_directory_alone_that_others_can_write(base: Path) -> None:
    open_to_all = dead_directory(base)
    open_to_all.chmod(0o777)
    assert JobDirectory.sweep(base) == []
    assert open_to_all.is_dir()


@pytest.mark.skipif(UID != 0, reason="only root can make a directory of another user")
def test_sweep_leaves_other_users_alone(base: Path) -> None:
    under_their_name = dead_directory(base).rename(base / "fanstore-12345-1-theirs")
    os.chown(under_their_name, 12345, 12345)
    under_our_name = dead_directory(base, "2-trap")
    os.chown(under_our_name, 12345, 12345)
    assert JobDirectory.sweep(base) == []
    assert under_their_name.is_dir()
    assert (under_our_name / "part-00000.tar").exists()


CHILD = """
import sys, time
from pathlib import Path
from fanstore.job.job_directory import JobDirectory
job = JobDirectory(Path(sys.argv[1]))
(job.path / "part-00000.tar").write_bytes(b"x")
print(job.path, flush=True)
time.sleep(100)
"""


def test_a_killed_job_is_swept_and_a_living_one_is_not(base: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(base)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        assert path.is_dir()
        assert JobDirectory.sweep(base) == []
        assert (path / "part-00000.tar").exists()
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        assert JobDirectory.sweep(base) == [path]
        assert list(base.iterdir()) == []
    finally:
        child.kill()
        child.communicate(timeout=60)


def test_a_command_that_outlives_the_job_does_not_hold_its_lock(base: Path) -> None:
    """The lock must not be inherited: the training script may go on after the daemon was killed."""
    job = JobDirectory(base)
    with subprocess.Popen(["sleep", "100"], close_fds=False) as command:
        try:
            os.close(job._lock_fd)  # what the kernel does when the daemon dies
            os.close(job._fd)
            assert JobDirectory.sweep(base) == [job.path]
        finally:
            command.kill()


def test_a_sweep_cannot_take_a_starting_job_for_dead(base: Path) -> None:
    """Jobs start and end while others sweep without a pause: no job ever loses its directory."""
    done = threading.Event()
    problems: list[str] = []

    def sweep() -> None:
        while not done.is_set():
            JobDirectory.sweep(base)

    def start() -> None:
        for number in range(60):
            with JobDirectory(base) as job:
                try:
                    (job.path / "file").write_bytes(b"x")
                    if not (job.path / LOCK_NAME).exists():
                        problems.append(f"{number}: the lock file is gone")
                    if (job.path / "file").read_bytes() != b"x":
                        problems.append(f"{number}: the file changed")
                except OSError as error:
                    problems.append(f"{number}: {error}")

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    starters = [threading.Thread(target=start) for _ in range(3)]
    for thread in sweepers + starters:
        thread.start()
    for thread in starters:
        thread.join()
    done.set()
    for thread in sweepers:
        thread.join()
    JobDirectory.sweep(base)
    assert problems == []
    assert list(base.iterdir()) == []


@pytest.fixture
def ordinary_user() -> Iterator[Path]:
    """A world-writable directory, and the rights of an ordinary user."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o1777)
        if UID == 0:
            os.seteuid(65534)
        try:
            yield Path(directory)
        finally:
            os.seteuid(UID)


def test_what_cannot_be_removed_is_a_warning(ordinary_user: Path, expect_warnings: Callable[..., None]) -> None:
    job = JobDirectory(ordinary_user)
    (job.path / "stubborn").mkdir()
    (job.path / "stubborn" / "file").write_bytes(b"x")
    (job.path / "stubborn").chmod(0o500)
    expect_warnings(r"cannot remove .*/stubborn: Permission denied")
    job.remove()
    (job.path / "stubborn").chmod(0o700)
    assert JobDirectory.sweep(ordinary_user) == [job.path], "the next job tries again"


@pytest.mark.skipif(UID != 0, reason="only root can be two users")
def test_users_do_not_sweep_each_other(ordinary_user: Path) -> None:
    theirs = ordinary_user / f"fanstore-{os.geteuid()}-1-dead"
    theirs.mkdir(mode=0o700)
    os.seteuid(0)
    ours = dead_directory(ordinary_user)
    os.seteuid(65534)
    assert JobDirectory.sweep(ordinary_user) == [theirs]
    os.seteuid(0)
    assert JobDirectory.sweep(ordinary_user) == [ours]


@pytest.mark.parametrize("label", ["", "a/b", "a\0b"])
def test_a_label_that_cannot_be_a_name_is_refused(base: Path, label: str) -> None:
    with pytest.raises(MountError):
        JobDirectory(base, label)


def test_a_base_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MountError, match="cannot make a directory in"):
        JobDirectory(tmp_path / "file")
