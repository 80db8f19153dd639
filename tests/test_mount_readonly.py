"""Every way to change something is refused with EROFS: by the kernel on a read-only mount, and by us if it asks."""

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES
from mounting import Mount, Mounted, needs_fuse, needs_root, opened

from fanstore.fuse.refusals import _LOOKS

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse


@pytest.fixture(scope="module")
def mounted(module_mount: Mount, tmp_path_factory: pytest.TempPathFactory) -> Mounted:
    directory = tmp_path_factory.mktemp("readonly")
    source = directory / "source"
    (source / "directory/inner").mkdir(parents=True)
    (source / "file").write_text("content\n")
    (source / "link").symlink_to("file")
    announced = ["cannot be created in .*: without --output"]
    mounted = module_mount(mounting.prepare(source, directory / "d.fan"), announced=announced)
    with pytest.raises(OSError, match="Read-only file system"):  # whichever tests run: it is told now
        (mounted.path / "first").mkdir()
    return mounted


def _open(flags: int) -> Callable[[Path], None]:
    def attempt(root: Path) -> None:
        # If the kernel opens by itself (native engine, made writable by root), the write is refused.
        with opened(root / "file", flags) as fd:
            os.write(fd, b"x")

    return attempt


def _create(root: Path) -> None:
    with opened(root / "new", os.O_WRONLY | os.O_CREAT):
        pass


def _temporary(root: Path) -> None:
    with opened(root, os.O_RDWR | os.O_TMPFILE):
        pass


ATTEMPTS: dict[str, Callable[[Path], object]] = {
    "open for writing": _open(os.O_WRONLY),
    "open for reading and writing": _open(os.O_RDWR),
    "open for appending": _open(os.O_WRONLY | os.O_APPEND),
    "open and truncate": _open(os.O_WRONLY | os.O_TRUNC),
    "create": _create,
    "mkdir": lambda root: os.mkdir(root / "new"),
    "mknod": lambda root: os.mknod(root / "new", 0o644),
    "mkfifo": lambda root: os.mkfifo(root / "new"),
    "symlink": lambda root: os.symlink("x", root / "new"),
    "link": lambda root: os.link(root / "file", root / "new"),
    "unlink": lambda root: os.unlink(root / "file"),
    "unlink a symlink": lambda root: os.unlink(root / "link"),
    "rmdir": lambda root: os.rmdir(root / "directory/inner"),
    "rename": lambda root: os.rename(root / "file", root / "new"),
    "replace": lambda root: os.replace(root / "file", root / "link"),
    "chmod": lambda root: os.chmod(root / "file", 0o600),
    "chown": lambda root: os.chown(root / "file", os.getuid(), os.getgid()),
    "utime": lambda root: os.utime(root / "file"),
    "truncate": lambda root: os.truncate(root / "file", 0),
    "setxattr": lambda root: os.setxattr(root / "file", "user.note", b"x"),
    "setxattr of ours": lambda root: os.setxattr(root / "file", "user.fanstore.codec", b"x"),
    "removexattr": lambda root: os.removexattr(root / "file", "user.fanstore.codec"),
    "create beside the control files": lambda root: os.mkdir(root / ".fanstore/new"),
    "write a control file": lambda root: (root / ".fanstore/stats.json").write_text(""),
}


@pytest.mark.parametrize("name", [*ATTEMPTS, "temporary file"])
def test_refused_by_the_kernel(mounted: Mounted, name: str) -> None:
    with pytest.raises(OSError) as caught:
        (ATTEMPTS | {"temporary file": _temporary})[name](mounted.path)
    assert caught.value.errno == errno.EROFS


@needs_root
def test_refused_by_us(mounted: Mounted) -> None:
    """Root can make the mount writable for the kernel; then the requests reach us."""

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-i", "-o", f"remount,{mode}", mounted.path], check=True, timeout=60)

    remount("rw")
    try:
        outcome = {}
        for name, attempt in ATTEMPTS.items():
            try:
                attempt(mounted.path)
                outcome[name] = 0
            except OSError as error:
                outcome[name] = error.errno or 0
        assert outcome == dict.fromkeys(ATTEMPTS, errno.EROFS)
        assert mounted.count("refused") >= 15, "they did not reach us"
        assert (mounted.path / "file").read_text() == "content\n"
    finally:
        remount("ro")


def test_what_is_missing_is_said_once(mount: Mount, mounted: Mounted) -> None:
    """When a program wants to create something, and not when it only looks; also if it has looked before."""
    mounted = mount(mounted.prepared, announced=[r"'\S+' cannot be created in \S+/m: without --output or --scratch"])
    assert not (mounted.path / "name").exists() and not (mounted.path / "directory/name").exists()
    with pytest.raises(FileNotFoundError):
        (mounted.path / "name").read_bytes()
    assert "cannot be created" not in mounted.log_text()
    for _ in range(3):
        with pytest.raises(OSError, match="Read-only file system"):
            (mounted.path / "directory/name").write_bytes(b"")
        with pytest.raises(OSError, match="Read-only file system"):
            (mounted.path / "new").mkdir()
    assert mounted.log_text().count("cannot be created") == mounted.output().count("cannot be created") == 1
    assert "'name' cannot be created" in mounted.log_text()


def test_only_the_first_names_are_looked_at(mount: Mount, mounted: Mounted) -> None:
    """A program that looks for a thousand names and never writes costs nothing after that: the engine answers again."""
    mounted = mount(mounted.prepared)
    for number in range(_LOOKS + 1):
        assert not (mounted.path / f"none-{number}").exists()
    before = mounted.statistics()["engine"]["answered_python"]
    for number in range(200):
        assert not (mounted.path / f"more-{number}").exists()
    python = mounted.statistics()["engine"]["answered_python"] - before
    assert python < 100 if mounted.engine == "native" else python >= 200
    with pytest.raises(OSError, match="Read-only file system"):
        (mounted.path / "new").mkdir()
