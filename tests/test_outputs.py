"""Each promise about outputs on one node, as a user would try it; random mixtures are in test_outputs_model.py."""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mounting
import numpy as np
import pytest
from conftest import BOTH_ENGINES
from mounting import LIMIT_S, Mount, Mounted, needs_fuse, needs_root, small_file_system, wait_until
from output_machine import rename

from fanstore.cli import stat as stat_command

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

MIB = 1 << 20
RENAME_EXCHANGE = 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("outputs")
    source = directory / "source"
    (source / "directory/inner").mkdir(parents=True)
    (source / "file").write_text("content\n")
    (source / "large").write_bytes(b"dataset." * 10_000)
    (source / "link").symlink_to("file")
    return mounting.prepare(source, directory / "d.fan")


@pytest.fixture(scope="module")
def scratch(module_mount: Mount, prepared: Path, engine: str) -> Mounted:
    """A mount that many tests write to, each under names of its own."""
    mounted = mounting.Given() if mounting.GIVEN else module_mount(prepared, "--scratch")
    assert mounted.statistics()["engine"]["name"] == engine
    return mounted


@pytest.fixture
def here(scratch: Mounted, request: pytest.FixtureRequest) -> Path:
    """A directory of the test's own in that mount."""
    path = scratch.path / f"test-{abs(hash(request.node.name)):x}"
    path.mkdir()
    return path


def wait_saved(mounted: Mounted) -> None:
    def is_saved() -> bool:
        outputs = mounted.statistics()["outputs"]
        return bool(outputs["pending"] == outputs["being_written"] == 0)

    wait_until(is_saved, "saving all outputs", mounted.evidence)


def error_of(function: Callable[[], object]) -> str:
    """The name of the error number with which it fails."""
    with pytest.raises(OSError) as caught:
        function()
    assert caught.value.errno is not None
    return errno.errorcode[caught.value.errno]


# --- the dataset ---


def _write(flags: int) -> Callable[[Path], None]:
    def attempt(root: Path) -> None:
        fd = os.open(root / "file", flags)
        try:
            os.write(fd, b"x")
        finally:
            os.close(fd)

    return attempt


def _replace(name: str) -> Callable[[Path], None]:
    def attempt(root: Path) -> None:
        (root / "mine").write_text("x")
        os.replace(root / "mine", root / name)

    return attempt


REFUSED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "write": ("EROFS", _write(os.O_WRONLY)),
    "read and write": ("EROFS", _write(os.O_RDWR)),
    "append": ("EROFS", _write(os.O_WRONLY | os.O_APPEND)),
    "create what is there": ("EROFS", _write(os.O_WRONLY | os.O_CREAT)),
    "open and truncate": ("EROFS", _write(os.O_WRONLY | os.O_TRUNC)),
    "truncate": ("EROFS", lambda root: os.truncate(root / "file", 0)),
    "rename": ("EROFS", lambda root: os.rename(root / "file", root / "new")),
    "rename a directory": ("EROFS", lambda root: os.rename(root / "directory", root / "new")),
    "replace": ("EROFS", _replace("file")),
    "replace a link": ("EROFS", _replace("link")),
    "unlink": ("EROFS", lambda root: os.unlink(root / "file")),
    "unlink a link": ("EROFS", lambda root: os.unlink(root / "link")),
    "rmdir": ("EROFS", lambda root: os.rmdir(root / "directory/inner")),
    "chmod": ("EROFS", lambda root: os.chmod(root / "file", 0o600)),
    "chmod of a directory": ("EROFS", lambda root: os.chmod(root / "directory", 0o700)),
    "chown": ("EROFS", lambda root: os.chown(root / "file", os.getuid(), os.getgid())),
    "utime": ("EROFS", lambda root: os.utime(root / "file")),
    "setxattr": ("EROFS", lambda root: os.setxattr(root / "file", "user.note", b"x")),
    "exclusive creation": ("EEXIST", lambda root: os.open(root / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "mkdir": ("EEXIST", lambda root: os.mkdir(root / "directory")),
    "symlink": ("EEXIST", lambda root: os.symlink("x", root / "file")),
    "rename without replacing": ("EEXIST", lambda root: rename(root / "file", root / "link", False)),
    "mkdir beside the control files": ("EROFS", lambda root: os.mkdir(root / ".fanstore/new")),
    "write a control file": ("EROFS", lambda root: (root / ".fanstore/stats.json").write_text("")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dataset_cannot_be_changed(scratch: Mounted, name: str) -> None:
    before = os.lstat(scratch.path / "file")
    expected, attempt = REFUSED[name]
    assert error_of(lambda: attempt(scratch.path)) == expected
    assert (scratch.path / "file").read_text() == "content\n"
    after = os.lstat(scratch.path / "file")
    assert (after.st_mode, after.st_size, after.st_mtime_ns) == (before.st_mode, before.st_size, before.st_mtime_ns)
    assert os.readlink(scratch.path / "link") == "file"


def test_dataset_cannot_be_changed_through_a_map(scratch: Mounted) -> None:
    """Whoever reads it afterwards sees what was prepared. (numpy.memmap maps for writing unless told otherwise.)"""
    with pytest.raises(OSError) as caught:
        np.memmap(scratch.path / "large", dtype=np.uint8)[:4] = 0
    assert caught.value.errno == errno.EROFS
    assert (scratch.path / "large").read_bytes() == b"dataset." * 10_000


def test_without_an_option_nothing_can_be_written(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared, announced=["'new' cannot be created in .*: without --output or --scratch"])
    assert error_of(lambda: os.mkdir(mounted.path / "new")) == "EROFS"
    assert error_of(lambda: (mounted.path / "directory/new").write_text("x")) == "EROFS"


# --- files ---


def test_unlinked_while_open(here: Path) -> None:
    with open(here / "f", "w+b", buffering=0) as file:
        file.write(b"before")
        os.unlink(here / "f")
        (here / "f").write_bytes(b"another")
        file.write(b", after")
        assert os.fstat(file.fileno()).st_nlink == 0
        assert os.pread(file.fileno(), 100, 0) == b"before, after"
        file.truncate(3)
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), 100, 0) == b"bef"
    assert (here / "f").read_bytes() == b"another"
    assert os.listdir(here) == ["f"]


def test_replaced_while_open(here: Path) -> None:
    """Who has the old file open keeps it, as with any checkpoint that is replaced while it is loaded."""
    (here / "f").write_bytes(b"old" * 100_000)
    with open(here / "f", "rb", buffering=0) as file:
        (here / "new").write_bytes(b"new")
        os.replace(here / "new", here / "f")
        assert (here / "f").read_bytes() == b"new"
        assert file.read() == b"old" * 100_000


def test_removed_directory(here: Path) -> None:
    (here / "d").mkdir()
    fd = os.open(here / "d", os.O_RDONLY)
    try:
        os.rmdir(here / "d")
        assert error_of(lambda: os.mkdir("x", dir_fd=fd)) == "ENOENT"
        assert error_of(lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd)) == "ENOENT"
    finally:
        os.close(fd)


def test_map(here: Path) -> None:
    """What is written through a map is read by everybody, and the other way round."""
    (here / "f").write_bytes(bytes(3 * mmap.PAGESIZE))
    with open(here / "f", "r+b") as file, mmap.mmap(file.fileno(), 0) as area:
        area[mmap.PAGESIZE - 2 : mmap.PAGESIZE + 2] = b"1234"
        area.flush()
        assert (here / "f").read_bytes()[mmap.PAGESIZE - 2 :][:4] == b"1234"
        os.pwrite(file.fileno(), b"abc", 7)
        assert area[7:10] == b"abc"
    content = (here / "f").read_bytes()
    assert content[7:10] == b"abc" and content[mmap.PAGESIZE - 2 :][:4] == b"1234"


def test_numpy_memmap(here: Path) -> None:
    array = np.memmap(here / "a.npy", dtype=np.float32, mode="w+", shape=(300, 1000))
    array[:] = np.arange(300_000).reshape(300, 1000)
    array.flush()
    del array
    again = np.memmap(here / "a.npy", dtype=np.float32, mode="r+", shape=(300, 1000))
    assert again[299, 999] == 299_999
    again[0, 0] = -1
    del again
    assert np.fromfile(here / "a.npy", dtype=np.float32)[:2].tolist() == [-1, 1]


_HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
getattr(fcntl, sys.argv[2])(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_locks_between_processes(here: Path, kind: str) -> None:
    """Held as long as the process lives, and free when it is killed."""
    (here / "f").write_bytes(b"x")
    lock = getattr(fcntl, kind)
    command = [sys.executable, "-c", _HOLDER, str(here / "f"), kind]
    with open(here / "f", "r+b") as file:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            try:
                assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
                taken = error_of(lambda: lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
                assert taken in ("EAGAIN", "EACCES")
            finally:
                holder.kill()
        lock(file, fcntl.LOCK_EX)
        lock(file, fcntl.LOCK_UN)


_APPENDER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(500):
    os.write(fd, f"{sys.argv[2]} {number:8}\\n".encode())
"""


def test_append_from_two_processes(here: Path) -> None:
    """No line is lost, torn or out of its writer's order."""
    path = here / "log"
    commands = [[sys.executable, "-c", _APPENDER, str(path), writer] for writer in "ab"]
    writers = [subprocess.Popen(command) for command in commands]
    assert [writer.wait(LIMIT_S) for writer in writers] == [0, 0]
    lines = path.read_text().splitlines()
    for writer in "ab":
        assert [line for line in lines if line[0] == writer] == [f"{writer} {number:8}" for number in range(500)]
    assert len(lines) == 1000


def test_large_file(here: Path) -> None:
    """In pieces that do not fit the sizes of anything, read back in others."""
    content = np.random.default_rng(1).bytes(20 * MIB + 17)
    with open(here / "f", "wb") as file:
        for start in range(0, len(content), 777_777):
            file.write(content[start : start + 777_777])
    assert (here / "f").stat().st_size == len(content)
    with open(here / "f", "rb") as file:
        assert b"".join(iter(lambda: file.read(333_333), b"")) == content


def test_sparse_file(here: Path) -> None:
    with open(here / "f", "wb") as file:
        file.seek(1 << 40)
        file.write(b"end")
    status = (here / "f").stat()
    assert status.st_size == (1 << 40) + 3
    assert status.st_blocks * 512 < MIB
    with open(here / "f", "rb") as file:
        assert os.pread(file.fileno(), 5, (1 << 40) - 2) == b"\0\0end"


# --- what is not there ---


def test_what_is_not_supported_says_so(here: Path) -> None:
    (here / "f").write_text("x")
    (here / "g").write_text("y")
    assert error_of(lambda: os.link(here / "f", here / "h")) == "EPERM"
    assert error_of(lambda: os.link(here.parent / "file", here / "h")) == "EPERM"
    assert error_of(lambda: os.mkfifo(here / "pipe")) == "EPERM"
    with socket.socket(socket.AF_UNIX) as unix:
        assert error_of(lambda: unix.bind(os.path.relpath(here / "s"))) == "EPERM"
    assert error_of(lambda: os.chmod(here / "f", 0o4755)) == "EPERM"
    assert error_of(lambda: os.open(here, os.O_TMPFILE | os.O_RDWR)) in ("EOPNOTSUPP", "ENOTSUP", "EISDIR")
    assert error_of(lambda: os.setxattr(here / "f", "trusted.x", b"")) in ("ENOTSUP", "EOPNOTSUPP", "EPERM")
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.renameat2(-100, bytes(here / "f"), -100, bytes(here / "g"), RENAME_EXCHANGE) == -1
    assert ctypes.get_errno() == errno.EINVAL
    assert ((here / "f").read_text(), (here / "g").read_text()) == ("x", "y")
    assert sorted(os.listdir(here)) == ["f", "g"]


@needs_root
def test_everything_belongs_to_who_mounts(here: Path) -> None:
    (here / "f").write_text("x")
    assert error_of(lambda: os.chown(here / "f", 12_345, -1)) == "EPERM"
    assert error_of(lambda: os.chown(here / "f", -1, 12_345)) == "EPERM"
    os.chown(here / "f", os.getuid(), os.getgid())
    assert (here / "f").stat().st_uid == os.getuid()


def test_names(here: Path) -> None:
    """As long as a name may be, and of any bytes."""
    odd = os.fsencode(here) + b"/\xff\n"
    Path(os.fsdecode(odd)).write_text("odd")
    (here / ("n" * 255)).write_text("long")
    assert sorted(os.listdir(os.fsencode(here))) == [b"n" * 255, b"\xff\n"]
    assert error_of(lambda: (here / ("n" * 256)).write_text("")) == "ENAMETOOLONG"
    assert error_of(lambda: os.mkdir(here / ("n" * 256))) == "ENAMETOOLONG"
    assert error_of(lambda: os.symlink("t" * 4096, here / "l")) == "ENAMETOOLONG"


def test_statfs(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """What is free is what is free on the local disk."""
    mounted = mount(prepared, "--scratch", local=tmp_path / "local")
    mine, disk = os.statvfs(mounted.path), os.statvfs(tmp_path)
    assert mine.f_namemax == 255
    assert mine.f_blocks * mine.f_frsize >= disk.f_blocks * disk.f_frsize
    free, there = mine.f_bavail * mine.f_frsize, disk.f_bavail * disk.f_frsize
    assert abs(free - there) < max(there // 10, 64 * MIB), "others use the disk at the same time"
    assert 0 < mine.f_favail <= disk.f_files


# --- what stays ---


def test_scratch_leaves_nothing(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """Not in --local, nor, without it, in the directory for temporary files (leftovers.py looks there in the end)."""
    mounted = mount(prepared, "--scratch", local=tmp_path / "local")
    (mounted.path / "directory/f").write_bytes(bytes(MIB))
    with open(mounted.path / "still open", "wb") as file:
        file.write(b"x")
        file.flush()
        assert any((tmp_path / "local").rglob("outputs/*"))
    mounted.stop()  # looks that --local is empty


def test_resumed_job(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """A second job finds what the first has left, and can change it."""
    output = tmp_path / "output"
    first = mount(prepared, "--output", str(output), local=tmp_path / "local")
    (first.path / "directory/run/deep").mkdir(parents=True)
    (first.path / "directory/run/deep/log").write_text("one\n")
    (first.path / "directory/run/last").symlink_to("deep/log")
    (first.path / "old").write_text("old")
    (first.path / "gone").write_text("gone")
    os.chmod(first.path / "old", 0o640)
    os.utime(first.path / "old", ns=(5, 1_234_567_890_123_456_789))
    first.stop()

    second = mount(prepared, "--output", str(output), local=tmp_path / "local")
    run = second.path / "directory/run"
    assert (run / "last").read_text() == "one\n"
    assert sorted(os.listdir(second.path)) == ["directory", "file", "gone", "large", "link", "old"]
    status = (second.path / "old").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, 1_234_567_890_123_456_789)
    with open(run / "deep/log", "a") as file:
        file.write("two\n")
    os.rename(second.path / "old", run / "renamed")
    os.unlink(second.path / "gone")
    os.rename(run / "deep", run / "deeper")
    second.stop()
    assert sorted(str(path.relative_to(output)) for path in output.rglob("*")) == [
        "directory",
        "directory/run",
        "directory/run/deeper",
        "directory/run/deeper/log",
        "directory/run/last",
        "directory/run/renamed",
    ]
    assert (output / "directory/run/deeper/log").read_text() == "one\ntwo\n"
    assert (output / "directory/run/renamed").read_text() == "old"


def test_fsync_means_safe(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """The content stands in --output when fsync returns, while the file stays open; so do names after a directory's."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output))
    with open(mounted.path / "log", "w") as file:
        for number in range(3):
            file.write(f"{number}\n")
            file.flush()
            os.fsync(file.fileno())
            assert (output / "log").read_text() == "".join(f"{n}\n" for n in range(number + 1))
    (mounted.path / "d").mkdir()
    (mounted.path / "d/f").write_text("x")
    os.rename(mounted.path / "log", mounted.path / "d/log")
    fd = os.open(mounted.path / "d", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert sorted(os.listdir(output / "d")) == ["f", "log"]
    assert not (output / "log").exists()


def test_what_no_close_tells_of_is_saved(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """truncate by name, and utime right after the close: soon. A map that is written to after the close: in the end."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output))
    for name in ("cut", "emptied", "mapped", "dated"):
        (mounted.path / name).write_bytes(b"x" * 5000)
    os.utime(mounted.path / "dated", ns=(7, 7))
    wait_saved(mounted)
    assert (output / "dated").stat().st_mtime_ns == 7
    os.truncate(mounted.path / "cut", 100)
    wait_until(lambda: (output / "cut").stat().st_size == 100, "saving what was truncated", mounted.evidence)
    os.truncate(mounted.path / "emptied", 0)
    _write_mapped_after_close(mounted.path / "mapped")
    assert (mounted.path / "mapped").read_bytes() == b"later" + b"x" * 4995
    mounted.stop()
    assert (output / "mapped").read_bytes() == b"later" + b"x" * 4995
    assert (output / "emptied").read_bytes() == b""


def test_nothing_unfinished_is_saved(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """A file that is opened anew to be written stands in ``--output`` as it was, until it is closed."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output))
    whole = {b"whole"}
    (mounted.path / "f").write_bytes(b"whole")
    wait_saved(mounted)
    for number in range(5):
        with open(mounted.path / "f", "wb", buffering=0) as file:
            (mounted.path / f"{number}").write_bytes(b"another")
            wait_until((output / f"{number}").exists, "saving of another one", mounted.evidence)
            assert (output / "f").read_bytes() in whole
            file.write(b"whole %d" % number)
            whole.add(b"whole %d" % number)
    wait_saved(mounted)
    assert (output / "f").read_bytes() == b"whole 4"


def _write_mapped_after_close(path: Path) -> None:
    """As a C program may: open, mmap, close, write, munmap. (Python's mmap keeps a descriptor of its own.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.open(path, os.O_RDWR)
    address = libc.mmap(None, 5000, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    assert address not in (None, ctypes.c_void_p(-1).value)
    ctypes.memmove(address, b"later", 5)
    assert libc.munmap(address, 5000) == 0


Shown = Callable[[Mounted], str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """What fanstore-stat says of outputs. In this process: a child would close its copies of what is open here."""

    def show(mounted: Mounted) -> str:
        monkeypatch.setattr(sys, "argv", ["fanstore-stat", str(mounted.path)])
        assert stat_command.main() == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("outputs "))
        return line

    return show


def test_statistics(mount: Mount, prepared: Path, tmp_path: Path, shown: Shown) -> None:
    """fanstore-stat and stats.json say what there is, what is pending, and why."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output))
    assert shown(mounted) == f"outputs     0 files, 0 B; nothing pending for {output}"
    (mounted.path / "f").write_bytes(bytes(MIB))
    wait_saved(mounted)
    assert shown(mounted) == f"outputs     1 files, 1 MiB; nothing pending for {output}"
    with open(mounted.path / "g", "wb", buffering=0) as file:
        file.write(bytes(1024))
        assert shown(mounted) == f"outputs     2 files, 1 MiB, 1 being written; pending 1, 0 B, for {output}"
    outputs = mounted.statistics()["outputs"]
    assert (outputs["files"], outputs["bytes"], outputs["directory"]) == (2, MIB + 1024, str(output))


def test_statistics_of_trouble(mount: Mount, prepared: Path, tmp_path: Path, shown: Shown) -> None:
    """The directory is gone for a while: why nothing goes on is shown, and it goes on by itself."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), announced=[r"cannot .* to .*/output: .*; it is tried again"])
    os.rename(output, tmp_path / "away")
    output.write_text("in the way")
    (mounted.path / "f").write_bytes(bytes(2048))
    wait_until(lambda: mounted.statistics()["outputs"]["trouble"] is not None, "trouble", mounted.evidence)
    line = shown(mounted)
    assert line.startswith(f"outputs     1 files, 2 KiB; pending 1, 2 KiB, for {output} (cannot ")
    assert line.endswith("; it is tried again)")
    output.unlink()
    os.rename(tmp_path / "away", output)
    wait_saved(mounted)
    assert shown(mounted) == f"outputs     1 files, 2 KiB; nothing pending for {output}"
    assert (output / "f").read_bytes() == bytes(2048)


def test_statistics_of_scratch(scratch: Mounted, shown: Shown) -> None:
    assert shown(scratch).endswith("; they end with the job (--scratch)")


# --- a full disk ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", "16m") as path:
        yield path


def fill(path: Path) -> int:
    """Write until the disk is full; how much was written before it said so."""
    done = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while done < 64 * MIB:
            done += os.write(fd, b"f" * 100_000)
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        return done
    finally:
        os.close(fd)
    pytest.fail("the disk was never full")


@needs_root
def test_full_local_disk(mount: Mount, prepared: Path, tmp_path: Path, small_disk: Path) -> None:
    """ENOSPC for the writer; other files are whole, and are saved; there is room again when something goes."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=small_disk, announced=["do not fit on local disks"])
    (mounted.path / "before").write_bytes(b"b" * 100_000)
    written = fill(mounted.path / "large file")
    assert 4 * MIB < written < 16 * MIB
    assert (mounted.path / "before").read_bytes() == b"b" * 100_000
    assert (mounted.path / "file").read_text() == "content\n", "the dataset is read as ever"
    content = (mounted.path / "large file").read_bytes()
    assert content == b"f" * len(content) and len(content) >= written
    wait_saved(mounted)
    assert (output / "before").read_bytes() == b"b" * 100_000
    assert (output / "large file").read_bytes() == content
    os.unlink(mounted.path / "large file")
    (mounted.path / "after").write_bytes(b"a" * 100_000)
    mounted.stop()
    assert sorted(os.listdir(output)) == ["after", "before"]
    assert (output / "after").read_bytes() == b"a" * 100_000
