"""Both engines give the same answers, field by field: this test takes the kernel's place and asks both the same.

What differs on purpose is said at each comparison. The sequences are random with fixed seeds; a failure names the
request. The dataset has all oddities, with the codec lz4, so that plain, compressed and chunked files are among them.
"""

import errno
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fuse_wire as wire
import mounting
import oddities
import pytest
from fuse_wire import Kernel, Reply

from fanstore.format.index import Index

#: Packets of 1 MiB through a socket are for root alone.
pytestmark = mounting.needs_root

PEER = Path(__file__).parent / "engine_peer.py"
LIMIT_S = 60.0
REQUESTS = 4_000
MIB = 1 << 20
XATTRS = [b"user.fanstore." + name for name in (b"codec", b"stored_size", b"checksum", b"partition", b"no", b"")]
XATTRS += [b"security.capability", b"user.x", b"user.fanstore.codec.x", b""]


class Engines:
    """Both engines on one dataset."""

    def __init__(self, native: Kernel, python: Kernel, index: Index) -> None:
        self.native = native
        self.python = python
        self.index = index

    def ask(self, opcode: int, node: int, arguments: bytes = b"") -> tuple[Reply, Reply]:
        return self.native.ask(opcode, node, arguments), self.python.ask(opcode, node, arguments)

    def compare(
        self, opcode: int, node: int, arguments: bytes = b"", parse: Callable[[bytes], object] = bytes
    ) -> Reply:
        """Ask both; the answer, which must be the same."""
        native, python = self.ask(opcode, node, arguments)
        what = f"opcode {opcode}, node {node}, {arguments!r}"
        assert native.error == python.error, f"{what}: native {native.error}, python {python.error}"
        if not native.error:
            assert parse(native.data) == parse(python.data), what
        return native


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("engines")
    source = oddities.build(directory / "tree", specials=False)
    prepared = mounting.prepare(source, directory / "d.fan", "--codec", "lz4", "--partition-size", "16MiB")
    oddities.remove_tree(source)
    processes: list[subprocess.Popen[bytes]] = []
    kernels: list[Kernel] = []
    try:
        for engine in ("native", "python"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                for end in (ours, theirs):
                    for force in (32, 33):  # SO_SNDBUFFORCE, SO_RCVBUFFORCE: answers of 1 MiB
                        end.setsockopt(socket.SOL_SOCKET, force, 4 * MIB)
                argv = [sys.executable, str(PEER), str(prepared), engine, str(theirs.fileno())]
                processes.append(subprocess.Popen(argv, pass_fds=[theirs.fileno()]))
            kernels.append(Kernel(ours, LIMIT_S))
        yield Engines(kernels[0], kernels[1], Index.adopt(memoryview((prepared / "index.fsx").read_bytes())))
        kernels[0].close()
        assert processes[0].wait(LIMIT_S) == 0, "the native engine ends in order when the kernel has gone"
    finally:
        for kernel in kernels:
            kernel.close()
        for process in processes:
            process.kill()
            process.wait(LIMIT_S)


def test_init(engines: Engines) -> None:
    """The native engine completes pyfuse3's answer."""
    fields = struct.Struct("<IIIIHHIIHH")
    native = fields.unpack_from(engines.native.init.data)
    python = fields.unpack_from(engines.python.init.data)
    assert native[:3] == python[:3]
    assert native[3] & (1 << 12 | 1 << 3) == 0, "no AUTO_INVAL_DATA, no ATOMIC_O_TRUNC"
    assert native[3] & 1 << 23 and native[3] & 1 << 13, "CACHE_SYMLINKS, DO_READDIRPLUS"
    assert native[4] == 128 and native[6] == 128 << 10, "requests in the background, largest write"


def test_every_entry(engines: Engines) -> None:
    """Attributes, look-up, listings in one piece, targets and extended attributes of everything there is."""
    index = engines.index
    for number in range(index.entry_count):
        node = number + 1
        # A further hard link has no inode of its own; asked for all the same, both say the same.
        engines.compare(wire.GETATTR, node, bytes(16), wire.attributes_out)
        if number:
            name = index.name(number) + b"\0"
            engines.compare(wire.LOOKUP, index.parent[number] + 1, name, wire.entry)
        engines.compare(wire.READLINK, node)
        engines.compare(wire.READDIRPLUS, node, wire.read_arguments(node, 0, MIB), lambda d: wire.dirents(d, True))
        engines.compare(wire.GETXATTR, node, wire.getxattr_arguments(XATTRS[number % len(XATTRS)], 100))
        engines.compare(wire.LISTXATTR, node, struct.pack("<II", 1000, 0))


def test_plain_listings_name_the_same(engines: Engines) -> None:
    """pyfuse3 knows only READDIRPLUS; the kernel may also ask the native engine for names alone."""
    for node in (1, *(entry + 1 for entry in range(50))):
        arguments = wire.read_arguments(node, 0, MIB)
        plain, plus = (
            engines.native.ask(wire.READDIR, node, arguments),
            engines.python.ask(wire.READDIRPLUS, node, arguments),
        )
        assert plain.error == plus.error
        names = [found[:4] for found in wire.dirents(plain.data, False)]
        assert names == [found[:4] for found in wire.dirents(plus.data, True)]


def test_every_byte(engines: Engines) -> None:
    """All files, in pieces of the largest size; the python engine wants them opened."""
    index = engines.index
    for entry in range(index.entry_count):
        if index.mode[entry] & 0o170000 != 0o100000 or index.inode[entry] != entry:
            continue
        node = entry + 1
        assert engines.python.ask(wire.OPEN, node, bytes(8)).error == 0
        for offset in range(0, min(index.size[entry], 20 * MIB) + 1, MIB):
            engines.compare(wire.READ, node, wire.read_arguments(node, offset, MIB))
        assert engines.python.ask(wire.RELEASE, node, struct.pack("<QIIQ", node, 0, 0, 0)).error == 0


def test_no_open(engines: Engines) -> None:
    """The native engine tells the kernel that it need not ask; both refuse to open for writing."""
    assert engines.native.ask(wire.OPEN, 5, bytes(8)).error == errno.ENOSYS
    assert engines.native.ask(wire.OPENDIR, 1, bytes(8)).error == errno.ENOSYS
    for flags in (1, 2, 0o1000):
        for reply in engines.ask(wire.OPEN, 5, struct.pack("<II", flags, 0)):
            assert reply.error == errno.EROFS
    for opcode, arguments in ((wire.FLUSH, bytes(24)), (wire.ACCESS, bytes(8))):
        assert engines.native.ask(opcode, 5, arguments).error == errno.ENOSYS


def test_control_directory(engines: Engines) -> None:
    """Passed on to Python, by whoever looks it up; forgotten by the kernel's count."""
    for kernel in (engines.native, engines.python):
        control = wire.entry(kernel.ask(wire.LOOKUP, 1, b".fanstore\0").data)["nodeid"]
        first = wire.entry(kernel.ask(wire.LOOKUP, control, b"stats.json\0").data)
        assert first["entry_valid"] == 0 and first["attr_valid"] > 3600
        content = kernel.ask(wire.READ, first["nodeid"], wire.read_arguments(first["nodeid"], 0, 100_000)).data
        assert len(content) == first["size"] and content.startswith(b"{")
        second = wire.entry(kernel.ask(wire.LOOKUP, control, b"stats.json\0").data)
        assert first["nodeid"] != second["nodeid"], "it was read, so it is made anew"
        listing = kernel.ask(wire.READDIRPLUS, control, wire.read_arguments(control, 0, 100_000)).data
        assert [found[0] for found in wire.dirents(listing, True)] == [
            b".",
            b"..",
            b"stats.json",
            b"nodes.json",
            b"config.json",
            b"report.json",
        ]
        # One alone, and one in a batch beside an inode of the dataset.
        kernel.send(wire.FORGET, first["nodeid"], struct.pack("<Q", 1))
        batch = struct.pack("<IIQQQQ", 2, 0, 1, 1, second["nodeid"], 2)  # looked up, and listed
        kernel.send(wire.BATCH_FORGET, 0, batch)
        for node in (first["nodeid"], second["nodeid"]):
            assert kernel.ask(wire.GETATTR, node, bytes(16)).error == errno.ENOENT


def random_request(numbers: random.Random, index: Index) -> tuple[int, int, bytes, Callable[[bytes], object]]:
    entries = index.entry_count
    node = numbers.choice([numbers.randrange(1, entries + 1)] * 8 + [1, entries, entries + 1000, 1 << 40, 0])
    kind = numbers.randrange(9)
    if kind <= 1:
        names = [index.name(numbers.randrange(entries)), b"absent", b"x" * 255, b"x" * 256, b"a\xff", b".fanstor"]
        parent = index.parent[numbers.randrange(entries)] + 1
        return wire.LOOKUP, numbers.choice([node, parent]), numbers.choice(names[:1] * 6 + names) + b"\0", wire.entry
    if kind == 2:
        return wire.GETATTR, node, bytes(16), wire.attributes_out
    if kind == 3:
        return wire.READLINK, node, b"", bytes
    if kind == 4:
        return wire.STATFS, numbers.choice([1, node]), b"", bytes
    if kind == 5:
        size = numbers.choice((0, 0, 1, 4, 5, 16, 200))
        return wire.GETXATTR, node, wire.getxattr_arguments(numbers.choice(XATTRS), size), bytes
    if kind == 6:
        return wire.LISTXATTR, node, struct.pack("<II", numbers.choice((0, 10, 1000)), 0), bytes
    offset = numbers.choice((0, 1, 2, 3, 10, 1000, 1 << 40))
    size = numbers.choice((24, 152, 160, 400, 4096, 100_000))
    return wire.READDIRPLUS, node, wire.read_arguments(node, offset, size), lambda d: wire.dirents(d, True)


@pytest.mark.parametrize("seed", range(4))
def test_random_questions(engines: Engines, seed: int) -> None:
    numbers = random.Random(seed)
    errors = set()
    for _ in range(REQUESTS):
        errors.add(engines.compare(*random_request(numbers, engines.index)).error)
    assert {0, errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENODATA, errno.ERANGE} <= errors


@pytest.mark.parametrize("seed", range(4))
def test_random_reads(engines: Engines, seed: int) -> None:
    """Any offset, any length, also beyond the end."""
    numbers = random.Random(seed)
    index = engines.index
    files = [n for n in range(index.entry_count) if index.mode[n] & 0o170000 == 0o100000 and index.inode[n] == n]
    for entry in numbers.sample(files, min(60, len(files))):
        node, size = entry + 1, index.size[entry]
        assert engines.python.ask(wire.OPEN, node, bytes(8)).error == 0
        for _ in range(12):
            offset = numbers.choice((0, numbers.randrange(size + 1), max(0, size - 10), size, size + 5, 4 * MIB - 7))
            length = numbers.choice((0, 1, 511, 4096, 131_072, MIB))
            engines.compare(wire.READ, node, wire.read_arguments(node, offset, length))
        assert engines.python.ask(wire.RELEASE, node, struct.pack("<QIIQ", node, 0, 0, 0)).error == 0


def test_what_makes_no_sense(engines: Engines) -> None:
    """Messages that are cut short or unknown: libfuse answers them with an error, and so does the engine by it."""
    for opcode in (wire.LSEEK, wire.IOCTL, 99, 4242):
        assert {reply.error for reply in engines.ask(opcode, 1, bytes(24))} == {errno.ENOSYS}
    engines.compare(wire.GETATTR, 1, bytes(16), wire.attributes_out)
