"""Mount points: the kernel's table, what may be mounted on, repair, who holds a mount, and what to say about each."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mounting
import pytest
from mounting import Mount, command, needs_fuse, needs_root

from fanstore.errors import MountError
from fanstore.fuse import mountpoint
from fanstore.fuse.holders import describe_holders, find_holders
from fanstore.fuse.mountpoint import (
    Condition,
    MountBusyError,
    MountPoint,
    NotAnsweringError,
    check_fuse,
    condition,
    unmount,
    within_limit,
)
from fanstore.mounttable import find_mount, mounts_below, read_mounts
from fanstore.paths import resolve
from fanstore.processes import ProcessWatch, start_ticks

pytest_plugins = ["mounting"]

NOBODY = 65534


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mountpoint")
    (directory / "source").mkdir()
    (directory / "source/file").write_text("x")
    return mounting.prepare(directory / "source", directory / "d.fan")


@contextmanager
def tmpfs(point: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "nothing", point], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", point], check=True, timeout=60)


# --- the table ---


def test_table_is_unescaped(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_bytes(
        b"27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw\n"
        b"42 27 0:39 / /tmp/a\\040b\\134c\\011\\012\xff ro,nosuid - fuse.fanstore /x\\040y ro,user_id=1000,group_id=5\n"
        b"43 27 0:40 /sub /mnt/- rw - tmpfs - rw\n"
    )
    root, ours, other = read_mounts(table)
    assert (root.point, root.device, root.kind, root.owner) == (Path("/"), "254:0", "ext4", None)
    assert os.fsencode(ours.point) == b"/tmp/a b\\c\t\n\xff"
    assert (ours.source, ours.owner, ours.is_fanstore) == ("/x y", 1000, True)
    assert (other.point, other.source, other.is_fanstore) == (Path("/mnt/-"), "-", False)


def test_table_of_this_machine() -> None:
    assert find_mount(Path("/proc")) is not None
    assert find_mount(Path("/proc/self")) is None
    assert Path("/proc") in [mount.point for mount in mounts_below(Path("/"))]


@needs_root
def test_topmost_mount_counts(tmp_path: Path) -> None:
    with tmpfs(tmp_path):
        lower = find_mount(tmp_path)
        with tmpfs(tmp_path):
            upper = find_mount(tmp_path)
    assert lower is not None and upper is not None
    assert lower.device != upper.device


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real/inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real/last").symlink_to("inner")
    monkeypatch.chdir(tmp_path / "real")
    assert resolve(Path("../link/inner")) == tmp_path / "real/inner"
    assert resolve(Path("last")) == tmp_path / "real/inner"
    assert resolve(Path("..")) == tmp_path
    assert resolve(Path(".")) == tmp_path / "real"
    assert resolve(tmp_path / "link/new") == tmp_path / "real/new"
    assert resolve(Path("/")) == Path("/")


# --- what may be mounted on ---


def problem_of(path: Path) -> str:
    point = MountPoint(path)
    with pytest.raises(MountError) as caught:
        point.claim()
    return str(caught.value)


def test_new_directory_is_made_and_removed(tmp_path: Path) -> None:
    point = MountPoint(tmp_path / "new")
    point.claim()
    assert point.created and point.path.is_dir()
    point.remove()
    point.remove()
    assert not point.path.exists()


def test_existing_directory_stays(tmp_path: Path) -> None:
    point = MountPoint(tmp_path)
    point.claim()
    point.remove()
    assert not point.created and tmp_path.is_dir()


def test_unusable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/b").mkdir()
    (tmp_path / "full/.a").mkdir()
    assert problem_of(tmp_path / "no/such") == (
        f"mount point {tmp_path}/no/such cannot be created: the directory {tmp_path}/no does not exist"
    )
    assert problem_of(tmp_path / "file") == f"mount point {tmp_path}/file is not a directory"
    assert problem_of(tmp_path / "file/below").startswith(
        f"mount point {tmp_path}/file/below cannot be created: Not a dir"
    )
    assert problem_of(tmp_path / "full") == (
        f"mount point {tmp_path}/full is not empty (it holds '.a'): name an empty or a new directory"
    )
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]


def test_two_that_start_at_once(tmp_path: Path) -> None:
    """Ranks on one machine, without {rank} in the path."""
    first = MountPoint(tmp_path)
    first.claim()
    assert problem_of(tmp_path).startswith(f"another fanstore-mount is just starting on {tmp_path}")
    first.release()
    second = MountPoint(tmp_path)
    second.claim()
    second.remove()


@needs_root
def test_something_else_is_mounted(tmp_path: Path) -> None:
    with tmpfs(tmp_path):
        assert problem_of(tmp_path) == f"something else is mounted on {tmp_path} already (tmpfs, nothing)"


@needs_root
def test_ordinary_user_needs_write_permission() -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom fanstore.fuse.mountpoint import MountPoint\n"
        "from fanstore.errors import MountError\n"
        f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        "try:\n    MountPoint(Path(sys.argv[1])).claim()\nexcept MountError as error:\n    print(error)\n"
    )
    # Not in tmp_path, which pytest keeps closed to other users.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        result = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    assert result.stdout == f"mount point {directory} is not writable for you, so fusermount3 will not mount on it\n"


@needs_fuse
def test_mounted_already(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    assert problem_of(mounted.path) == (
        f"{prepared} is mounted on {mounted.path} already: unmount it first with: fanstore-umount {mounted.path}"
    )
    again = command("mount", prepared, mounted.path, "--", "true")
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "already: unmount it first" in again.stderr
    assert (mounted.path / "file").read_text() == "x"


@needs_fuse
def test_stale_mounts_are_removed(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    point = tmp_path / "m"
    point.mkdir()
    mounted = mount(prepared, point=point)
    assert condition(point) is Condition.ALIVE
    mounted.process.kill()
    mounted.wait_end()
    assert condition(point) is Condition.STALE
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(point)
    claimed = MountPoint(point)
    claimed.claim()
    assert find_mount(point) is None
    claimed.remove()


# --- this machine ---


@contextmanager
def as_user(number: int) -> Iterator[None]:
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_fuse_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountpoint, "FUSE_DEVICE", tmp_path / "fuse")
    with pytest.raises(MountError, match=r"there is no .*/fuse on this machine: load the kernel module"):
        check_fuse()


@needs_root
def test_no_permission_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parent in (Path("/"), Path("/dev")):
        assert parent.stat().st_mode & 0o001
    device = Path("/dev/fuse")
    if device.stat().st_mode & 0o002:
        pytest.skip("everybody may open /dev/fuse here")
    with as_user(NOBODY), pytest.raises(MountError, match=r"no permission to open /dev/fuse .*its mode is crw"):
        check_fuse()


@needs_root
def test_no_fusermount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mountpoint, "FUSE_DEVICE", Path("/dev/null"))
    monkeypatch.setenv("PATH", str(tmp_path))
    check_fuse()  # root does not need it
    with as_user(NOBODY), pytest.raises(MountError, match=r"fusermount3 was not found: .* install the package fuse3"):
        check_fuse()


def test_within_limit() -> None:
    assert within_limit(lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        within_limit(lambda: os.stat("/no/such/file"))
    read, write = os.pipe()
    try:
        with pytest.raises(NotAnsweringError, match=r"no answer within 0\.1 s"):
            within_limit(lambda: os.read(read, 1), 0.1)  # nothing comes before the next line but one
    finally:
        os.write(write, b"x")  # lets the thread go
        os.close(write)


# --- the end ---


@needs_fuse
def test_holders_are_named(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    script = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1); "
        "{}print(1, flush=True); input()"
    )
    holders = []
    try:
        for text in ("", "f.close(); "):
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", script.format(text), mounted.path / "file"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            holders.append(process)
            assert process.stdout is not None
            process.stdout.readline()
        working = subprocess.Popen(["sleep", "60"], cwd=mounted.path)
        holders.append(working)
        found = {holder.pid: holder.what for holder in find_holders(mounted.path)}
        assert found == {
            holders[0].pid: f"open file {mounted.path}/file",
            holders[1].pid: f"open file {mounted.path}/file",  # the mapping keeps a descriptor of its own
            working.pid: "working directory",
        }
        assert f"sleep (process {working.pid}, working directory)" in describe_holders(mounted.path)
        with pytest.raises(MountBusyError, match=r"is busy: .*sleep"):
            unmount(mounted.path)
        busy = command("umount", mounted.path)
        assert busy.returncode == 1
        assert "sleep" in busy.stderr and "--lazy" in busy.stderr
        lazy = command("umount", mounted.path, "--lazy")
        assert lazy.returncode == 0
        assert f"daemon {mounted.process.pid} ends when these let go" in lazy.stdout
        assert find_mount(mounted.path) is None
        assert mounted.process.poll() is None
    finally:
        for process in holders:
            process.kill()
            process.communicate(timeout=60)
    assert mounted.wait_end() == 0
    mounted.check_clean()


@needs_root
@needs_fuse
def test_mounted_inside_is_named(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "source/inside").mkdir(parents=True)
    mounted = mount(mounting.prepare(tmp_path / "source", tmp_path / "d.fan"))
    with tmpfs(mounted.path / "inside"), pytest.raises(MountBusyError, match="/inside is mounted inside it"):
        unmount(mounted.path)


def test_who_was_faster_has_removed_the_directory_too(tmp_path: Path) -> None:
    """Two daemons come across the same dead mount, each by its own way."""
    unmount(tmp_path / "gone", lazy=True)
    unmount(tmp_path, lazy=True)


def test_umount_of_what_is_no_mount(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for path, message in (
        (tmp_path / "directory", f"nothing is mounted on {tmp_path}/directory"),
        (tmp_path / "absent", f"{tmp_path}/absent does not exist"),
        (Path("/proc"), "/proc is not a FanStore mount but proc, so it is left alone"),
    ):
        result = command("umount", path)
        assert (result.returncode, result.stderr) == (1, f"fanstore-umount: error: {message}\n")
    result = command("stat", tmp_path / "directory")
    assert (result.returncode, result.stderr) == (
        1,
        f"fanstore-stat: error: no FanStore dataset is mounted on {tmp_path}/directory, nor served there without a "
        "mount\n",
    )


@needs_fuse
def test_umount_of_a_path_inside(mount: Mount, tmp_path: Path) -> None:
    (tmp_path / "source/inside").mkdir(parents=True)
    mounted = mount(mounting.prepare(tmp_path / "source", tmp_path / "d.fan"))
    result = command("umount", mounted.path / "inside")
    assert result.returncode == 1
    assert f"lies inside the mount {mounted.path}: unmount that one" in result.stderr


def test_process_watch() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = start_ticks(process.pid)
        watch = ProcessWatch(process.pid, started)
        assert not watch.wait(0.05)
        with pytest.raises(ProcessLookupError):
            ProcessWatch(process.pid, started + 1)
        process.kill()
        assert watch.wait(20)
        watch.close()
        watch.close()
    finally:
        process.kill()
        process.wait(20)
    with pytest.raises(ProcessLookupError):
        ProcessWatch(process.pid, started)


def test_lock_is_on_the_directory(tmp_path: Path) -> None:
    point = MountPoint(tmp_path)
    point.claim()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        point.remove()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def test_programs_exist() -> None:
    assert shutil.which("fusermount3"), "the tests of the user's mount need it: scripts/setup"
