"""One engine thread that asks the device instead of sleeping (native/fuse/busy_poll.h), through the kernel.

Nothing is said of time. Where there is one processor nobody polls, and there is nothing to test.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mounting
import pytest
from mounting import LIMIT_S, Mount, Mounted, needs_fuse, needs_root, wait_until

pytest_plugins = ["mounting"]
ENGINES = ["native"]
pytestmark = [
    needs_fuse,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="nobody polls on one processor"),
]

#: Names of the dataset; each is asked for once.
FILES = 40
#: Files of a program for which busy polling is sure to begin, unless others have the processors all the time.
BURST = 400
FREEZE, THAW = 0xC0045877, 0xC0045878

#: Writes small files, each named by its number; says so in a file outside of the mount.
WRITER = """
import os, sys
with open(sys.argv[2], "wb", buffering=0) as said:
    number = 0
    while True:
        with open(f"{sys.argv[1]}/{number}", "wb", buffering=0) as file:
            file.write(b"%d" % number * 100)
        said.write(b".")
        number += 1
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("polling") / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"{number}").write_bytes(b"%d" % number * 5_000)
    return mounting.prepare(source, source.parent / "d.fan")


def polling(mounted: Mounted) -> dict[str, int]:
    """Of which there is none while this is asked: Python answers it."""
    said: dict[str, int] = mounted.statistics()["engine"]["busy_poll"]
    return said


def wait_polling(mounted: Mounted) -> None:
    wait_until(lambda: polling(mounted)["times"] > 0, "busy polling", mounted.evidence)


@contextlib.contextmanager
def writer(mounted: Mounted, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes files to ``run`` as long as it can."""
    (mounted.path / "run").mkdir()
    arguments = [sys.executable, "-c", WRITER, str(mounted.path / "run"), str(said)]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)


def wait_written(mounted: Mounted, said: Path, more: int) -> None:
    before = said.stat().st_size if said.exists() else 0
    wait_until(lambda: said.exists() and said.stat().st_size >= before + more, "writing", mounted.evidence)


def test_begins_and_ends(mount: Mount, prepared: Path) -> None:
    """With whoever writes small files, and whoever opens files that the kernel has; it is over when they are."""
    mounted = mount(prepared, "--scratch")
    (mounted.path / "run").mkdir()
    written = 0

    def write_some() -> bool:
        nonlocal written
        for number in range(written, written + BURST):
            (mounted.path / "run" / f"{number}").write_bytes(b"%d" % number * 100)
        written += BURST
        return polling(mounted)["requests"] > 500

    wait_until(write_some, "busy polling", mounted.evidence)
    before = polling(mounted)
    assert 0 < before["times"] <= before["requests"] and before["time_ns"] > 0
    for number in range(written):
        assert (mounted.path / "run" / f"{number}").read_bytes() == b"%d" % number * 100

    def open_some() -> bool:
        for _ in range(BURST):
            assert (mounted.path / "0").read_bytes() == b"0" * 5_000
        return polling(mounted)["times"] > before["times"]

    wait_until(open_some, "polling for whoever reads", mounted.evidence)
    first, second = polling(mounted), polling(mounted)
    assert first["time_ns"] == second["time_ns"], "somebody still polls"


def test_the_end_comes_while_one_polls(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    for number in range(3):
        mounted = mount(prepared, "--scratch")
        said = tmp_path / f"said-{number}"
        with writer(mounted, said) as program:
            wait_polling(mounted)
            wait_written(mounted, said, BURST)
            mounted.signal(signal.SIGTERM)
            assert mounted.wait_end() == 0, mounted.evidence()
            assert program.wait(LIMIT_S) != 0, "it is told"


@pytest.fixture
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One that can be stopped, and that outlives the mount."""
    directory = tmp_path_factory.mktemp("disk")
    image, path = directory / "image", directory / "disk"
    path.mkdir()
    with open(image, "wb") as file:
        file.truncate(200 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=LIMIT_S)
    subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True, timeout=LIMIT_S)
    (path / "local").mkdir()
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=LIMIT_S)


@contextlib.contextmanager
def stopped(disk: Path) -> Iterator[None]:
    """Whoever writes to it waits."""
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(fd, THAW, 0)
    finally:
        os.close(fd)


@needs_root
def test_others_do_not_wait_for_a_disk_that_hangs(disk: Path, mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """The one that polls is held up in a write, and everybody else was parked."""
    mounted = mount(prepared, "--scratch", local=disk / "local")
    said = tmp_path / "said"
    names = iter(range(FILES))
    with writer(mounted, said) as program:
        wait_polling(mounted)
        for _ in range(8):
            wait_written(mounted, said, BURST)
            with stopped(disk):
                for _ in range(4):
                    number = next(names)
                    read = ["cat", str(mounted.path / f"{number}")]
                    content = subprocess.run(read, capture_output=True, check=True, timeout=LIMIT_S).stdout
                    assert content == b"%d" % number * 5_000
        wait_written(mounted, said, BURST)
        assert program.poll() is None
    for number in range(said.stat().st_size):
        assert (mounted.path / "run" / f"{number}").read_bytes() == b"%d" % number * 100
    mounted.stop()
