"""A native engine with outputs, of which the test is the kernel, pyfuse3, and Python, all in one process.

Owns the sockets, the directory of objects and one thread: pyfuse3, which answers INIT and keeps every other message for
the test to look at, with EXDEV for an answer, which the engine itself never gives. Used by test_native_outputs.py,
test_native_output_messages.py and test_native_creates.py, with its fixtures. (PYTEST_DONT_REWRITE: they import it
before pytest could.)
"""

import contextlib
import errno
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuse_wire as wire
import mounting
import pytest
from core_parts import native_broker
from fuse_wire import Kernel, Reply

from fanstore import _native
from fanstore.format.prepared import PreparedDataset

LIMIT_S = 30.0
MIB = 1 << 20
#: Inode numbers of outputs; the first and the last there can be.
A, B, LAST = 1 << 40, (1 << 40) + 0xABC, (1 << 48) - 1
FORWARDED = errno.EXDEV
OUTPUT_READ, MAKE_LOCAL, NO_ROOM = range(3)

_IN = struct.Struct("<IIQQIIII")
_NO_ANSWER = (wire.FORGET, wire.BATCH_FORGET, wire.INTERRUPT)


class OutputEngine:
    """One engine, running.

    Attributes:
        kernel: the kernel's end; engine: the door to C; index: of the dataset; objects: where content is.
    """

    def __init__(
        self,
        prepared: Path,
        objects: Path,
        *,
        alone: bool,
        outputs: bool,
        offered: int,
        journal: int = -1,
        local: bool = False,
    ) -> None:
        """``journal``: of a job with ``--output``; -1 with ``--scratch``. ``local``: with ``--fsync local``."""
        self._dataset = PreparedDataset.open(prepared)  # the engine reads its memory
        self.index = self._dataset.index
        self.objects = objects
        directory = os.open(objects, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.engine = _native.Engine(
                native_broker(self._dataset),
                0,
                0,
                -1,
                1,
                1,
                1,
                12,
                directory if outputs else -1,
                alone,
                not alone or journal >= 0,
                local,
                journal,
            )
        finally:
            os.close(directory)
        device, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket_, self._python = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ends = [device, ours, socket_, self._python]
        with contextlib.suppress(PermissionError):  # not root: then messages are small
            for end in (device, ours):
                for force in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE
                    end.setsockopt(socket.SOL_SOCKET, force, 4 * MIB)
        for end in (socket_, self._python):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 160 << 10)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._passed_on: queue.Queue[tuple[int, int, bytes]] = queue.Queue()
        self._pyfuse3 = threading.Thread(target=self._play_pyfuse3)
        self._pyfuse3.start()
        self.engine.start(device.fileno(), socket_.fileno(), self._wake)
        self.kernel = Kernel(ours, LIMIT_S, offered)

    def _play_pyfuse3(self) -> None:
        with contextlib.suppress(ConnectionError):  # the engine may end in the middle of an answer
            self._answer_messages()

    def _answer_messages(self) -> None:
        while packet := self._python.recv(MIB):
            length, opcode, unique, node, *_ = _IN.unpack_from(packet)
            assert length == len(packet)
            if opcode == wire.INIT:
                (flags,) = struct.unpack_from("<I", packet, _IN.size + 12)
                out = struct.pack("<IIIIHHIIHH32x", 7, 31, MIB, flags, 12, 9, 132 << 10, 1, 33, 0)
                self._python.send(struct.pack("<IiQ", 16 + len(out), 0, unique) + out)
                continue
            self._passed_on.put((opcode, node, packet[_IN.size :]))
            if opcode not in _NO_ANSWER:
                self._python.send(struct.pack("<IiQ", 16, -FORWARDED, unique))

    def close(self) -> None:
        assert self.engine.stop(5_000)
        for end in self._ends:
            end.close()
        self._pyfuse3.join(LIMIT_S)
        assert not self._pyfuse3.is_alive()
        os.close(self._wake)

    # --- the kernel ---

    def ask(self, opcode: int, node: int, arguments: bytes = b"") -> Reply:
        return self.kernel.ask(opcode, node, arguments)

    def write(self, inode: int, offset: int, data: bytes) -> int:
        """How many bytes were written."""
        reply = self.ask(wire.WRITE, inode, wire.write_arguments(offset, data))
        assert reply.error == 0 and len(reply.data) == 8
        size: int = struct.unpack("<II", reply.data)[0]
        return size

    def read(self, inode: int, offset: int, length: int) -> bytes:
        reply = self.ask(wire.READ, inode, wire.read_arguments(0, offset, length))
        assert reply.error == 0
        return reply.data

    def lseek(self, inode: int, offset: int, whence: int) -> int:
        """Where; or an error number below zero."""
        reply = self.ask(wire.LSEEK, inode, wire.lseek_arguments(offset, whence))
        return -reply.error if reply.error else struct.unpack("<q", reply.data)[0]

    def interrupt(self, unique: int) -> None:
        self.kernel.send(wire.INTERRUPT, 0, struct.pack("<Q", unique), unique | 1)

    # --- Python ---

    def passed_on(self, opcode: int, node: int) -> bytes:
        """The arguments of the next message that pyfuse3 got, which must be this one."""
        message = self._passed_on.get(timeout=LIMIT_S)
        assert message[:2] == (opcode, node)
        return message[2]

    def is_passed_on(self, opcode: int, node: int, arguments: bytes = b"") -> bool:
        """Ask; whether it was pyfuse3 that got the question."""
        if self.ask(opcode, node, arguments).error != FORWARDED:
            return False
        self.passed_on(opcode, node)
        return True

    def take(self) -> tuple[int, int, int, int, int]:
        """The next thing that is asked of Python; there must be one."""
        while not (taken := self.engine.take()):
            assert select.select([self._wake], [], [], LIMIT_S)[0], "nothing is asked"
            os.eventfd_read(self._wake)
        assert len(taken) == 1
        return taken[0]

    def wakes(self) -> int:
        """How often Python was woken since the last time."""
        return os.eventfd_read(self._wake)

    def statistics(self) -> dict[str, Any]:
        """Counters, with all that was asked before: a request is counted when it was answered."""
        assert self.ask(wire.GETATTR, 1, bytes(16)).error == 0
        return self.engine.statistics()

    def object(self, inode: int) -> Path:
        """The file that holds the content."""
        return self.objects / f"{inode:x}"


@contextlib.contextmanager
def output_engine(
    prepared: Path,
    objects: Path,
    *,
    alone: bool = True,
    outputs: bool = True,
    offered: int = wire.OFFERED,
    journal: int = -1,
    local: bool = False,
) -> Iterator[OutputEngine]:
    """An engine that is stopped in the end, which must work."""
    engine = OutputEngine(
        prepared, objects, alone=alone, outputs=outputs, offered=offered, journal=journal, local=local
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("outputs") / "source"
    (source / "inner" / "deeper").mkdir(parents=True)
    (source / "plain").mkdir()
    (source / "file").write_bytes(b"content of the dataset")
    (source / "inner" / "empty").write_bytes(b"")
    return mounting.prepare(source, source.parent / "d.fan")


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    (tmp_path / "objects").mkdir()
    return tmp_path / "objects"


@pytest.fixture
def alone(prepared: Path, objects: Path) -> Iterator[OutputEngine]:
    with output_engine(prepared, objects) as engine:
        yield engine


@pytest.fixture
def together(prepared: Path, objects: Path) -> Iterator[OutputEngine]:
    with output_engine(prepared, objects, alone=False) as engine:
        yield engine


def node_of(engine: OutputEngine, *names: bytes) -> int:
    entry = 0
    for name in names:
        entry = engine.index.lookup(entry, name)
        assert entry >= 0
    return entry + 1
