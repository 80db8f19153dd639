"""A crash of the native engine under load: nobody hangs, everybody is told, and the next mount repairs what is left."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mounting
import pytest
from mounting import LIMIT_S, Mount, Mounted, needs_fuse, wait_until
from oddities import compressible, incompressible

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

READERS = 6

#: MOUNT SEED: reads and asks past the caches of the kernel until an error; prints a dot, and then the error's number.
READER = """
import mmap, os, random, sys
root, numbers, page = sys.argv[1], random.Random(int(sys.argv[2])), mmap.mmap(-1, 1 << 20)
names, first = os.listdir(root), True
try:
    while True:
        fd = os.open(os.path.join(root, numbers.choice(names)), os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [page], numbers.randrange(0, 8 << 20, 4096))
        os.close(fd)
        os.path.exists(os.path.join(root, f"no-{numbers.random()}"))
        os.listxattr(root)
        if first:
            os.write(1, b".")
            first = False
except OSError as error:
    print(error.errno)
"""

#: Errors of a mount without a daemon.
TOLD = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.ENODEV}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    (folder / "source").mkdir()
    for number in range(8):
        make = compressible if number % 2 else incompressible
        (folder / "source" / f"file-{number}").write_bytes(make(5_000_000, number))
    return mounting.prepare(folder / "source", folder / "d.fan", "--codec", "lz4", "--partition-size", "8MiB")


def send_to_process(mounted: Mounted, number: int) -> None:
    mounted.signal(number)


def send_to_worker(mounted: Mounted, number: int) -> None:
    """To one of the C threads, as if it had gone wrong itself."""
    library = ctypes.CDLL(None, use_errno=True)
    pid = mounted.process.pid
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    # C threads block the signals that are for Python.
    blocked = [task for task in tasks if is_blocked(task, signal.SIGTERM) and not is_blocked(task, number)]
    assert blocked, "the signal would not arrive: no C thread takes it"
    assert library.tgkill(pid, int(blocked[-1].name), number) == 0, os.strerror(ctypes.get_errno())


def is_blocked(task: Path, number: int) -> bool:
    mask = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGKILL, send_to_process), (signal.SIGSEGV, send_to_process), (signal.SIGSEGV, send_to_worker)],
    ids=["killed", "crash in Python", "crash in C"],
)
def test_crash_leaves_no_hung_mount(mount: Mount, prepared: Path, tmp_path: Path, number: int, send: object) -> None:
    assert callable(send)
    point = tmp_path / "m"
    mounted = mount(prepared, point=point)
    readers = [
        subprocess.Popen([sys.executable, "-S", "-c", READER, str(point), str(seed)], stdout=subprocess.PIPE)
        for seed in range(READERS)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.read(1) == b".", mounted.evidence()
        send(mounted, number)
        assert mounted.wait_end() == -number
        begin = time.monotonic()
        told = [int(reader.communicate(timeout=LIMIT_S)[0]) for reader in readers]
        assert time.monotonic() - begin < 10, "readers are told at once, not when something gives up"
        assert set(told) <= TOLD, told
        with pytest.raises(OSError) as caught:
            os.statvfs(point)
        assert caught.value.errno in TOLD
    finally:
        for reader in readers:
            reader.kill()
            reader.wait(LIMIT_S)
    if number == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in mounted.log_text()
    again = mount(prepared, point=point)
    wait_until(lambda: len(os.listdir(point)) == 8, "listing", again.evidence)
    assert "unmounted the dead mount" in again.log_text()
    again.stop()
