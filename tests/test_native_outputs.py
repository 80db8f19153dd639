"""The content of outputs in the native engine: read and written in C, unless it is on another node.

The test takes the places of the kernel, of pyfuse3 and of Python (output_engine.py). The last test has Python's side of
the engine, NativeEngine, in a process of its own (engine_peer.py).
"""

import ctypes
import errno
import gc
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fuse_wire as wire
import pytest
from core_parts import native_broker
from mounting import needs_root, wait_until
from output_engine import LAST, LIMIT_S, MAKE_LOCAL, MIB, NO_ROOM, OUTPUT_READ, A, B, OutputEngine, output_engine

from fanstore import _native
from fanstore.format.prepared import PreparedDataset

pytest_plugins = ["output_engine"]

KEEP_SIZE, PUNCH_HOLE = 1, 2


# --- content ---


def test_content_is_that_of_a_file(alone: OutputEngine) -> None:
    """Any sequence of operations has the same effect on an object as on a file."""
    numbers = random.Random(5)
    model = alone.objects.parent / "model"
    fd = os.open(model, os.O_RDWR | os.O_CREAT)
    try:
        alone.object(B).touch()
        for _ in range(1_500):
            offset, length = numbers.choice((0, numbers.randrange(300_000))), numbers.choice((0, 1, 700, 4096, 60_000))
            match numbers.randrange(5):
                case 0 | 1:
                    data = numbers.randbytes(length)
                    assert alone.write(B, offset, data) == os.pwrite(fd, data, offset) == length
                case 2:
                    assert alone.read(B, offset, length) == os.pread(fd, length, offset)
                case 3:
                    mode = numbers.choice((0, KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE))
                    reply = alone.ask(wire.FALLOCATE, B, wire.fallocate_arguments(mode, offset, length + 1))
                    assert (reply.error, reply.data) == (fallocate(fd, mode, offset, length + 1), b"")
                case 4:
                    whence = numbers.choice((os.SEEK_DATA, os.SEEK_HOLE))
                    assert alone.lseek(B, offset, whence) == lseek(fd, offset, whence)
        assert alone.object(B).read_bytes() == model.read_bytes()
    finally:
        os.close(fd)


def fallocate(fd: int, mode: int, offset: int, length: int) -> int:
    """fallocate(2), for which Python has no function with a mode; its error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length))
    return 0 if result == 0 else ctypes.get_errno()


def lseek(fd: int, offset: int, whence: int) -> int:
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        return -(error.errno or 0)


@needs_root
def test_the_largest_write_and_read(alone: OutputEngine) -> None:
    data = random.Random(1).randbytes(3 * MIB + 5)
    alone.object(LAST).touch()
    for offset in range(0, len(data), MIB):
        piece = data[offset : offset + MIB]
        assert alone.write(LAST, offset, piece) == len(piece)
    assert alone.object(LAST).read_bytes() == data
    read = b"".join(alone.read(LAST, offset, MIB) for offset in range(0, 4 * MIB, MIB))
    assert read == data
    counted = alone.statistics()
    assert counted["outputs"] == (4, len(data), 4, len(data))
    assert counted["operations"]["write"][:2] == (4, 0)
    assert counted["operations"]["read"][:2] == (4, 0)


def test_reads_at_and_beyond_the_end(alone: OutputEngine) -> None:
    alone.object(A).write_bytes(b"0123456789")
    assert alone.read(A, 8, 100) == b"89"
    assert alone.read(A, 10, 100) == alone.read(A, 1 << 50, 1) == b""


def test_errors_of_the_file_system_are_passed_on(alone: OutputEngine) -> None:
    alone.object(A).write_bytes(b"x")
    for opcode, arguments, error in (
        (wire.WRITE, wire.write_arguments(1 << 63, b"x"), errno.EINVAL),
        (wire.READ, wire.read_arguments(0, 1 << 63, 1), errno.EINVAL),
        (wire.FALLOCATE, wire.fallocate_arguments(0, 0, 0), errno.EINVAL),
        (wire.FALLOCATE, wire.fallocate_arguments(0, (1 << 63) - 1, 1), errno.EFBIG),
        (wire.FALLOCATE, wire.fallocate_arguments(PUNCH_HOLE, 0, 1), errno.EOPNOTSUPP),
        (wire.LSEEK, wire.lseek_arguments(1, os.SEEK_DATA), errno.ENXIO),
        (wire.LSEEK, wire.lseek_arguments(0, os.SEEK_SET), errno.EINVAL),
    ):
        assert alone.ask(opcode, A, arguments).error == error, opcode
    alone.object(B).symlink_to(alone.object(A))
    alone.object(LAST).mkdir()
    assert alone.ask(wire.READ, B, wire.read_arguments(0, 0, 1)).error == errno.ELOOP
    assert alone.ask(wire.WRITE, LAST, wire.write_arguments(0, b"y")).error == errno.EISDIR
    assert alone.object(A).read_bytes() == b"x"


@needs_root
def test_a_full_disk(prepared: Path, tmp_path: Path) -> None:
    """What there was room for is written and said; the next write is tried once more, and then refused."""
    disk = tmp_path / "disk"
    disk.mkdir()
    page = os.sysconf("SC_PAGESIZE")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={8 * page}", "tmpfs", str(disk)], check=True, timeout=LIMIT_S)
    try:
        with output_engine(prepared, disk) as engine:
            engine.object(A).touch()
            written = engine.write(A, 0, bytes(range(256)) * (10 * page // 256))
            assert 0 < written < 10 * page and written == engine.object(A).stat().st_size
            for opcode, arguments, offset, length in (
                (wire.WRITE, wire.write_arguments(written, bytes(page)), written, page),
                (wire.FALLOCATE, wire.fallocate_arguments(0, 0, 10 * page), 0, 10 * page),
            ):
                unique = engine.kernel.send(opcode, A, arguments)
                token, *asked = engine.take()
                assert asked == [NO_ROOM, A, offset, length]
                engine.engine.resume(token)
                assert engine.kernel.receive() == (unique, wire.Reply(errno.ENOSPC, b""))
            assert engine.read(A, 0, 10 * page) == (bytes(range(256)) * (10 * page // 256))[:written]
            assert engine.statistics()["operations"]["write"][:2] == (1, 0)
            engine.object(B).touch()
            unique = engine.kernel.send(wire.WRITE, B, wire.write_arguments(0, bytes(page)))
            token = engine.take()[0]
            engine.object(A).unlink()
            engine.engine.drop(A)
            engine.engine.resume(token)
            assert engine.kernel.receive() == (unique, wire.Reply(0, struct.pack("<II", page, 0))), "there is room now"
        del engine  # and with it the descriptors
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=LIMIT_S)


# --- content that is elsewhere ---


def test_reads_of_what_is_elsewhere(together: OutputEngine) -> None:
    unique = together.kernel.send(wire.READ, A, wire.read_arguments(0, 4096, 100))
    token, *asked = together.take()
    assert asked == [OUTPUT_READ, A, 4096, 100]
    together.engine.answer(token, b"from another node")
    together.engine.answer(token, b"again")
    assert together.kernel.receive() == (unique, wire.Reply(0, b"from another node"))
    for data, error in ((bytes(101), errno.EIO), (None, errno.EHOSTDOWN), (None, 100_000)):
        unique = together.kernel.send(wire.READ, B, wire.read_arguments(0, 0, 100))
        token = together.take()[0]
        if data is None:
            together.engine.fail(token, error)
        else:
            together.engine.answer(token, data)
        expected = error if error < 512 else errno.EIO
        assert together.kernel.receive() == (unique, wire.Reply(expected, b"")), "too much, an error, one that is none"
    assert together.lseek(A, 0, os.SEEK_DATA) == -errno.ENOSYS
    assert together.statistics()["outputs"] == (0, 0, 0, 0)


def test_writes_wait_until_the_file_is_here(together: OutputEngine) -> None:
    first = together.kernel.send(wire.WRITE, A, wire.write_arguments(3, b"written"))
    token, *asked = together.take()
    assert asked == [MAKE_LOCAL, A, 3, 7]
    second = together.kernel.send(wire.FALLOCATE, A, wire.fallocate_arguments(0, 0, 5_000_000_000))
    other, *asked = together.take()
    assert asked == [MAKE_LOCAL, A, 0, 5_000_000_000]
    assert together.ask(wire.GETATTR, 1, bytes(16)).error == 0, "others do not wait"
    together.object(A).write_bytes(b"0123456789ABC")
    together.engine.resume(token)
    assert together.kernel.receive() == (first, wire.Reply(0, struct.pack("<II", 7, 0)))
    assert together.object(A).read_bytes() == b"012writtenABC"
    os.truncate(together.object(A), 0)
    together.engine.fail(other, errno.EDQUOT)
    assert together.kernel.receive() == (second, wire.Reply(errno.EDQUOT, b""))
    for again in (token, other, 0, 1 << 32, (1 << 64) - 1):
        together.engine.resume(again)
    assert together.object(A).stat().st_size == 0, "a token means something once"
    assert together.write(A, 0, b"now it is here") == 14
    unique = together.kernel.send(wire.FALLOCATE, B, wire.fallocate_arguments(0, 0, 9_000))
    token = together.take()[0]
    together.object(B).touch()
    together.engine.resume(token)
    assert together.kernel.receive() == (unique, wire.Reply(0, b""))
    assert together.object(B).stat().st_size == 9_000
    assert together.statistics()["outputs"] == (0, 0, 2, 21)


def test_resumed_too_early_or_answered_instead(together: OutputEngine) -> None:
    for answer in (False, True):
        unique = together.kernel.send(wire.WRITE, A, wire.write_arguments(0, b"x"))
        token = together.take()[0]
        if answer:
            together.engine.answer(token, b"")
        else:
            together.engine.resume(token)
        assert together.kernel.receive() == (unique, wire.Reply(errno.EIO, b""))
    unique = together.kernel.send(wire.READ, A, wire.read_arguments(0, 0, 10))
    together.engine.resume(together.take()[0])
    assert together.kernel.receive() == (unique, wire.Reply(errno.EIO, b"")), "a read does not wait for a file"


@pytest.mark.parametrize("when", ["before", "waiting", "taken"])
def test_interrupt(together: OutputEngine, when: str) -> None:
    """Whoever is interrupted does not wait for Python, and what he wanted to write is not written."""
    messages = [(wire.READ, wire.read_arguments(0, 0, 10)), (wire.WRITE, wire.write_arguments(0, b"not written"))]
    for opcode, arguments in messages:
        unique = 1_000 + 2 * opcode
        if when == "before":
            together.interrupt(unique)
        together.kernel.send(opcode, A, arguments, unique)
        token = together.take()[0] if when == "taken" else 0
        if when != "before":
            together.interrupt(unique)
        assert together.kernel.receive() == (unique, wire.Reply(errno.EINTR, b""))
        if when == "waiting":
            token = together.take()[0]
        assert not together.engine.take()
        together.object(A).touch()
        if token:
            together.engine.resume(token)
        assert together.object(A).read_bytes() == b""
        together.object(A).unlink()
        together.engine.drop(A)
    assert together.statistics()["interrupted"] == 2


def test_the_end_while_writes_wait(prepared: Path, objects: Path) -> None:
    with output_engine(prepared, objects, alone=False) as engine:
        engine.kernel.send(wire.WRITE, A, wire.write_arguments(0, bytes(9_000)))
        token = engine.take()[0]
        for number in range(5):
            engine.kernel.send(wire.WRITE, B + number, wire.write_arguments(0, bytes(9_000)))
        engine.kernel.send(wire.FLUSH, A, bytes(24))
        engine.passed_on(wire.FLUSH, A)
    engine.engine.resume(token)  # to nobody
    engine.engine.fail(token, errno.EIO)
    engine.engine.drop(A)
    assert not any(objects.iterdir())


# --- descriptors ---


def descriptors(objects: Path) -> int:
    """How many files of the folder this process has open."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        targets.append(os.readlink(path) if os.path.lexists(path) else "")
    return sum(target.startswith(f"{objects}/") for target in targets)


def test_a_file_that_was_replaced(alone: OutputEngine) -> None:
    alone.object(A).write_bytes(b"old")
    assert alone.read(A, 0, 10) == b"old"
    new = alone.objects / "new"
    new.write_bytes(b"new one")
    new.rename(alone.object(A))
    assert alone.read(A, 0, 10) == b"old"
    alone.engine.drop(A)
    alone.engine.drop(B)
    assert alone.read(A, 0, 10) == b"new one"
    alone.object(A).unlink()
    assert descriptors(alone.objects) == 1
    alone.engine.drop(A)
    assert descriptors(alone.objects) == 0
    alone.kernel.send(wire.READ, A, wire.read_arguments(0, 0, 10))
    assert alone.take()[1] == OUTPUT_READ


def test_descriptors_are_bounded(alone: OutputEngine) -> None:
    for number in range(300):
        alone.object(A + number).write_bytes(b"%d" % number)
    for number in [*range(300), *range(300)]:
        assert alone.read(A + number, 0, 10) == b"%d" % number
    assert descriptors(alone.objects) == 128
    # The ones used last are still open: what they are called does not matter.
    for number in range(172, 300):
        alone.object(A + number).unlink()
        assert alone.read(A + number, 0, 10) == b"%d" % number


def test_no_descriptor_is_left(prepared: Path, objects: Path) -> None:
    gc.collect()  # what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    with output_engine(prepared, objects) as engine:
        engine.object(A).touch()
        assert engine.write(A, 0, b"x") == 1
    del engine
    assert len(os.listdir("/proc/self/fd")) == before
    dataset = PreparedDataset.open(prepared)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.Engine(native_broker(dataset), 0, 0, -1, 1, 1, 1, 12, outputs=1_000_000)


def test_drops_while_others_write(alone: OutputEngine) -> None:
    """A descriptor that is in use is not closed: every write arrives."""
    ended = threading.Event()

    def drop() -> None:
        while not ended.is_set():
            alone.engine.drop(A)

    alone.object(A).touch()
    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for number in range(2_000):
            assert alone.write(A, 4 * number, struct.pack("<I", number)) == 4
    finally:
        ended.set()
        thread.join(LIMIT_S)
    assert alone.object(A).read_bytes() == struct.pack("<2000I", *range(2_000))


# --- Python's side ---


@needs_root
def test_native_engine(prepared: Path, tmp_path: Path) -> None:
    for name in ("objects", "remote"):
        (tmp_path / name).mkdir()
    (tmp_path / "remote" / f"{A:x}").write_bytes(b"content on another node")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        peer = Path(__file__).parent / "engine_peer.py"
        argv = [sys.executable, str(peer), str(prepared), "outputs", str(theirs.fileno()), str(tmp_path)]
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
    try:
        kernel = wire.Kernel(ours, LIMIT_S)
        read = wire.read_arguments(0, 8, 100)
        assert kernel.ask(wire.READ, A, read) == wire.Reply(0, b"on another node")
        assert kernel.ask(wire.READ, B, read).error == errno.ESTALE, "an OSError of the core"
        for opcode, arguments in ((wire.READ, read), (wire.WRITE, wire.write_arguments(0, b"x"))):
            assert kernel.ask(opcode, LAST, arguments).error == errno.ETIMEDOUT, "what the core has refused it with"
        reply = kernel.ask(wire.WRITE, A, wire.write_arguments(8, b"on this"))
        assert reply == wire.Reply(0, struct.pack("<II", 7, 0))
        assert (tmp_path / "objects" / f"{A:x}").read_bytes() == b"content on thisher node"
        assert kernel.ask(wire.WRITE, B, wire.write_arguments(0, b"x")).error == errno.ESTALE
        # The peer has announced one name, and one mixed directory.
        for asked in (b"announced", b"taken back", b"other"):
            assert wire.entry(kernel.ask(wire.LOOKUP, A, asked + b"\0").data)["nodeid"] == 0
        for node in (1, 2):
            assert kernel.ask(wire.GETATTR, node, bytes(16)).error == 0
        for inode in (A, B):
            assert kernel.ask(wire.FLUSH, inode, bytes(24)).error == 0
        said = read_statistics(kernel)
        assert said["engine"]["forwarded"] == 5, "INIT, the name, the directory, the way to these numbers"
        assert said["engine"]["outputs"] == {"reads": 0, "read_bytes": 0, "writes": 1, "written_bytes": 7}
        # Python counts when all is done, the answer included.
        wait_until(
            lambda: read_statistics(kernel)["operations"]["write"]["count"] == 3,
            "the count of three writes",
            lambda: json.dumps(read_statistics(kernel)["operations"]),
        )
        ours.close()
        assert process.wait(LIMIT_S) == 0
    finally:
        ours.close()
        process.kill()
        process.wait(LIMIT_S)


def read_statistics(kernel: wire.Kernel) -> dict[str, Any]:
    control = wire.entry(kernel.ask(wire.LOOKUP, 1, b".fanstore\0").data)["nodeid"]
    stats = wire.entry(kernel.ask(wire.LOOKUP, control, b"stats.json\0").data)["nodeid"]
    found: dict[str, Any] = json.loads(kernel.ask(wire.READ, stats, wire.read_arguments(0, 0, 100_000)).data)
    return found
