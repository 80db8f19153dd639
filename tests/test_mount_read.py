"""Everything that reads, through the kernel: attributes, listings, bytes, mappings, links, control files, caches."""

import errno
import json
import mmap
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES, fanstore_command
from mounting import Mount, Mounted, needs_fuse, needs_root
from oddities import compare_trees, compressible, incompressible

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "tree"
    for name in ("train/cat", "train/dog", "empty"):
        (root / name).mkdir(parents=True)
    for number in range(200):
        (root / f"train/cat/{number:04d}.jpg").write_bytes(incompressible(500 + 37 * number, number))
    (root / "train/dog/labels.txt").write_bytes(compressible(300_000))
    (root / "train/dog/nothing").write_bytes(b"")
    (root / "big-noise").write_bytes(incompressible(17 * MIB + 123))
    (root / "big-text").write_bytes(compressible(17 * MIB + 123))
    (root / "script.sh").write_text("#!/bin/sh\necho run from the mount: $1\n")
    (root / "script.sh").chmod(0o755)
    (root / "secret").write_text("for the owner only\n")
    (root / "secret").chmod(0o600)
    (root / "train/link").symlink_to("dog/labels.txt")
    (root / "train/nowhere").symlink_to("/does/not/exist")
    os.link(root / "big-text", root / "train/again")
    return root


@pytest.fixture(scope="module", params=["none", "lz4", "zstd"])
def mounted(
    request: pytest.FixtureRequest, source: Path, module_mount: Mount, tmp_path_factory: pytest.TempPathFactory
) -> Mounted:
    directory = tmp_path_factory.mktemp(request.param)
    prepared = mounting.prepare(source, directory / "d.fan", "--codec", request.param, "--partition-size", "8MiB")
    return module_mount(prepared, "--allow-other") if os.geteuid() == 0 else module_mount(prepared)


def test_is_the_same_tree(source: Path, mounted: Mounted) -> None:
    assert compare_trees(source, mounted.path) == []


def test_attributes(source: Path, mounted: Mounted) -> None:
    status = (mounted.path / "train/cat/0007.jpg").stat()
    original = (source / "train/cat/0007.jpg").stat()
    assert status.st_size == original.st_size
    assert status.st_mode == original.st_mode
    assert status.st_mtime_ns == original.st_mtime_ns == status.st_ctime_ns
    assert (status.st_uid, status.st_gid) == (os.geteuid(), os.getegid())
    assert status.st_blocks == (status.st_size + 511) // 512
    assert (mounted.path / "big-text").stat().st_nlink == 2
    assert (mounted.path / "big-text").stat().st_ino == (mounted.path / "train/again").stat().st_ino
    assert mounted.path.stat().st_ino == 1


def test_listing_has_inodes_and_types(mounted: Mounted) -> None:
    for entry in os.scandir(mounted.path / "train"):
        status = entry.stat(follow_symlinks=False)
        assert entry.inode() == status.st_ino
        assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)
        assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)


def test_names_that_do_not_exist(mounted: Mounted) -> None:
    with pytest.raises(FileNotFoundError):
        (mounted.path / "train/absent").stat()
    with pytest.raises(NotADirectoryError):
        (mounted.path / "script.sh/inside").stat()
    with pytest.raises(OSError, match="too long"):
        (mounted.path / ("n" * 256)).stat()


@pytest.mark.parametrize("name", ["big-noise", "big-text", "train/dog/labels.txt", "train/cat/0199.jpg"])
def test_read_at_any_offset(source: Path, mounted: Mounted, name: str) -> None:
    content = (source / name).read_bytes()
    numbers = random.Random(name)
    size = len(content)
    chunk = 4 * MIB
    places = [0, 1, size - 1, size, size + 1, size + 10**9, chunk - 1, chunk, chunk + 1, 2 * chunk - 5]
    places += [numbers.randrange(size) for _ in range(100)]
    fd = os.open(mounted.path / name, os.O_RDONLY)
    try:
        for place in places:
            length = numbers.choice([0, 1, 511, 4096, 4097, 131_072, MIB + 1, chunk + 1])
            assert os.pread(fd, length, place) == content[place : place + length], (place, length)
    finally:
        os.close(fd)


def test_unbuffered_by_the_kernel(source: Path, mounted: Mounted) -> None:
    """O_DIRECT passes by the page cache, so each read is a request of exactly this place."""
    content = (source / "big-text").read_bytes()
    fd = os.open(mounted.path / "big-text", os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, MIB) as buffer:
            for place in (0, 4096, 4 * MIB - 4096, 17 * MIB - 4096, 17 * MIB):
                got = os.preadv(fd, [buffer], place)
                assert buffer[:got] == content[place : place + MIB]
                assert got == min(MIB, len(content) - place)
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["big-noise", "big-text"])
def test_mmap(source: Path, mounted: Mounted, name: str) -> None:
    content = (source / name).read_bytes()
    with (
        open(mounted.path / name, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as mapping,
    ):
        numbers = random.Random(3)
        for _ in range(50):
            place = numbers.randrange(len(content))
            assert mapping[place : place + 5000] == content[place : place + 5000]
        assert mapping[:] == content


def test_execute(mounted: Mounted) -> None:
    result = subprocess.run([mounted.path / "script.sh", "yes"], capture_output=True, text=True, timeout=60)
    assert result.stdout == "run from the mount: yes\n"


def test_symlinks(source: Path, mounted: Mounted) -> None:
    assert os.readlink(mounted.path / "train/link") == "dog/labels.txt"
    assert os.readlink(mounted.path / "train/nowhere") == "/does/not/exist"
    assert (mounted.path / "train/link").read_bytes() == (source / "train/link").read_bytes()
    with pytest.raises(OSError) as caught:
        os.readlink(mounted.path / "script.sh")
    assert caught.value.errno == errno.EINVAL


def test_statfs(source: Path, mounted: Mounted) -> None:
    status = os.statvfs(mounted.path)
    content = sum(path.lstat().st_size for path in source.rglob("*") if path.is_file() and not path.is_symlink())
    content -= (source / "big-text").stat().st_size  # has two names
    assert content <= status.f_blocks * status.f_frsize <= content + 4096 * 210
    assert status.f_files == 1 + len(list(source.rglob("*"))) - 1
    assert (status.f_bfree, status.f_bavail, status.f_ffree) == (0, 0, 0)
    assert status.f_namemax == 255
    assert status.f_flag & os.ST_RDONLY


def test_extended_attributes(mounted: Mounted) -> None:
    path = mounted.path / "big-text"
    wanted = [f"user.fanstore.{name}" for name in ("partition", "codec", "stored_size", "checksum")]
    assert sorted(os.listxattr(path)) == sorted(wanted)
    assert (mounted.prepared / os.fsdecode(os.getxattr(path, "user.fanstore.partition"))).is_file()
    codec = os.getxattr(path, "user.fanstore.codec")
    stored = int(os.getxattr(path, "user.fanstore.stored_size"))
    assert (codec, stored < path.stat().st_size) in ((b"none", False), (b"lz4", True), (b"zstd", True))
    assert len(os.getxattr(path, "user.fanstore.checksum")) == 16
    assert os.listxattr(mounted.path / "train") == []
    for name in ("user.other", "security.selinux", "user.fanstore.nonsense"):
        with pytest.raises(OSError) as caught:
            os.getxattr(path, name)
        assert caught.value.errno == errno.ENODATA


def as_nobody(code: str, *arguments: str | Path) -> str:
    """Run Python as the user nobody; what it prints. The program is started as root, since nobody cannot reach it."""
    drop = "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)"
    script = f"import os, sys\n{drop}\n{code}"
    result = subprocess.run(
        [sys.executable, "-S", "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@needs_root
def test_access_by_mode(mounted: Mounted, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in (base, base.parent)}
    parents = [parent for parent in mounted.path.parents if parent.stat().st_mode & 0o001 == 0]
    modes = {parent: stat.S_IMODE(parent.stat().st_mode) for parent in parents} | before
    try:
        for parent, mode in modes.items():
            parent.chmod(mode | 0o001)
        check = "print(*(int(os.access(path, os.R_OK)) for path in sys.argv[1:]))"
        assert as_nobody(check, mounted.path / "script.sh", mounted.path / "secret") == "1 0"
        assert as_nobody("print(open(sys.argv[1]).read())", mounted.path / "script.sh").startswith("#!/bin/sh")
        with pytest.raises(AssertionError, match="PermissionError"):
            as_nobody("open(sys.argv[1])", mounted.path / "secret")
        executable = "print(*(int(os.access(path, os.X_OK)) for path in sys.argv[1:]))"
        assert as_nobody(executable, mounted.path / "script.sh", mounted.path / "big-text") == "1 0"
    finally:
        for parent, mode in modes.items():
            parent.chmod(mode)


def test_control_directory(mounted: Mounted, tmp_path: Path) -> None:
    assert ".fanstore" not in os.listdir(mounted.path)
    control = mounted.path / ".fanstore"
    assert sorted(os.listdir(control)) == ["config.json", "nodes.json", "order", "report.json", "stats.json"]
    config = json.loads((control / "config.json").read_bytes())
    assert config["pid"] == mounted.process.pid
    assert config["engine"] == mounted.engine
    assert config["prepared"] == str(mounted.prepared)
    assert config["mountpoint"] == str(mounted.path)
    nodes = json.loads((control / "nodes.json").read_bytes())["nodes"]
    assert [node["rank"] for node in nodes] == [0]
    with open(control / "config.json", "rb") as file:
        assert os.fstat(file.fileno()).st_size == len(file.read())
    assert {(control / name).stat().st_nlink for name in os.listdir(control)} == {1}
    subprocess.run(["cp", "-a", control, tmp_path / "copy"], check=True, timeout=mounting.LIMIT_S)
    assert json.loads((tmp_path / "copy/config.json").read_bytes()) == config
    with pytest.raises(FileNotFoundError):
        (control / "absent").stat()
    first = mounted.statistics()["uptime_s"]
    with open(control / "stats.json", "rb") as file:
        held = file.read()
        assert mounted.statistics()["uptime_s"] > first
        file.seek(0)
        assert file.read() == held  # the same as long as it is open
        assert os.pread(file.fileno(), 20, 5) == held[5:25]


def test_kernel_caches(mounted: Mounted) -> None:
    """The dataset never changes, so what the kernel was told once it is not told again."""
    path = mounted.path / "train/cat/0100.jpg"
    content = path.read_bytes()
    (mounted.path / "train/cat/absent").exists()
    before = mounted.statistics()["operations"]
    for _ in range(5):
        assert path.read_bytes() == content
        path.stat()
        assert not (mounted.path / "train/cat/absent").exists()
    after = mounted.statistics()["operations"]

    def more(operation: str) -> int:
        return int(after.get(operation, {"count": 0})["count"] - before.get(operation, {"count": 0})["count"])

    # Look-ups (one when the name is checked, one when it is made anew), a read and some getattr are those of stats.json
    # itself. The five of the dataset are opened, no more; and the native engine is not even asked for that. The first
    # names that are not there are asked for each time (fuse/refusals.py).
    assert more("lookup") <= 4 + 5
    assert more("open") == (0 if mounted.engine == "native" else 6)
    assert more("read") <= 2
    assert more("getattr") <= 4
    assert "flush" not in after
    if mounted.engine == "native":  # what else Python's open() asks for is answered there, too
        engines = [mounted.statistics()["engine"]]
        for _ in range(20):
            path.read_bytes()
        engines.append(mounted.statistics()["engine"])
        assert engines[1]["answered_python"] - engines[0]["answered_python"] < 10


@needs_root
def test_large_requests(mounted: Mounted) -> None:
    """Sequential reads arrive as requests of 1 MiB; only root may raise the kernel's read-ahead."""
    path = mounted.path / "big-noise"
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        before = mounted.count("read")
        while os.read(fd, MIB):
            pass
        assert 17 <= mounted.count("read") - before <= 17 + 8
    finally:
        os.close(fd)


def test_mount_options(mounted: Mounted) -> None:
    line = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {mounted.path} " in line)
    fields = line.split()
    assert fields[fields.index("-") + 1 :][:2] == ["fuse.fanstore", str(mounted.prepared)]
    options = set(fields[5].split(",")) | set(fields[-1].split(","))
    assert {"ro", "nosuid", "nodev", "default_permissions"} <= options


def test_statistics_command(mounted: Mounted) -> None:
    (mounted.path / "train/dog/labels.txt").read_bytes()
    shown = mounting.command("stat", mounted.path)
    assert shown.returncode == 0, shown.stderr
    assert str(mounted.prepared) in shown.stdout
    for word in ("lookup", "read from", "shared", "cache", "memory", "p99"):
        assert word in shown.stdout
    raw = mounting.command("stat", mounted.path, "--json")
    assert json.loads(raw.stdout)["version"] == 1


def test_readers_end_while_watched(mounted: Mounted) -> None:
    process = subprocess.Popen(
        [fanstore_command("stat"), str(mounted.path), "--watch", "0.1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = (line for line in process.stdout)
        assert any("in the last" in line for line in lines)
    finally:
        process.terminate()
        process.communicate(timeout=60)
