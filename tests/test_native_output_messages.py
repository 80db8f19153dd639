"""Outputs in the native engine: names, directories, closes, and what is passed on to Python, and how.

The test takes the places of the kernel, of pyfuse3 and of Python (output_engine.py).
"""

import errno
import itertools
import os
import random
import stat
import struct
from pathlib import Path

import fuse_wire as wire
import pytest
from mounting import needs_root
from output_engine import FORWARDED, LAST, MIB, A, B, OutputEngine, node_of, output_engine

#: Of <linux/fuse.h>.
DIRECT_IO, KEEP_CACHE, NO_FLUSH = 1 << 0, 1 << 1, 1 << 5
#: Of native/outputs/opens.h.
DIRECT_HANDLE = 1 << 63

pytest_plugins = ["output_engine"]

CACHE_S = 86_400


# --- INIT ---


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("offers_all", [True, False])
def test_init(prepared: Path, objects: Path, is_alone: bool, offers_all: bool) -> None:
    fields = struct.Struct("<IIIIHHIIHH")
    offered = wire.OFFERED if offers_all else wire.OFFERED & ~(wire.AUTO_INVAL_DATA | wire.MAX_PAGES | wire.BIG_WRITES)
    with output_engine(prepared, objects, alone=is_alone, offered=offered) as engine:
        *_, flags, _, _, max_write, _, max_pages, _ = fields.unpack_from(engine.kernel.init.data)
    assert flags & ~offered == 0, "nothing is wanted that was not offered"
    assert flags & (wire.ATOMIC_O_TRUNC | wire.WRITEBACK_CACHE) == 0
    assert bool(flags & wire.AUTO_INVAL_DATA) == (offers_all and not is_alone)
    assert bool(flags & wire.MAX_PAGES) == bool(flags & wire.BIG_WRITES) == offers_all
    assert (max_write, max_pages) == (MIB, 256)


def test_without_outputs_nothing_is_different(prepared: Path, objects: Path) -> None:
    with output_engine(prepared, objects, outputs=False) as engine:
        *_, flags, _, _, max_write, _, max_pages, _ = struct.unpack_from("<IIIIHHIIHH", engine.kernel.init.data)
        assert max_write == 128 << 10 and max_pages == 33 and not flags & wire.AUTO_INVAL_DATA
        node = node_of(engine, b"file")
        assert engine.ask(wire.FLUSH, node, bytes(24)).error == errno.ENOSYS
        assert engine.ask(wire.STATFS, 1).error == 0
        assert engine.ask(wire.OPEN, node, struct.pack("<II", os.O_WRONLY, 0)).error == errno.EROFS
        for opcode in (wire.WRITE, wire.FALLOCATE, wire.LSEEK):
            assert engine.is_passed_on(opcode, node, bytes(40))
            assert engine.is_passed_on(opcode, A, bytes(40))
        for call, arguments in (
            ("add_name", (1, b"x")),
            ("remove_name", (1, b"x")),
            ("mix", (0,)),
            ("drop", (A,)),
            ("open", (A, 1)),
        ):
            with pytest.raises(ValueError, match="without outputs"):
                getattr(engine.engine, call)(*arguments)


# --- names and directories ---


def look_up(engine: OutputEngine, node: int, name: bytes) -> dict[str, int] | None:
    """The entry; None if pyfuse3 was asked."""
    reply = engine.ask(wire.LOOKUP, node, name + b"\0")
    if reply.error == FORWARDED:
        engine.passed_on(wire.LOOKUP, node)
        return None
    assert reply.error == 0
    return wire.entry(reply.data)


@pytest.mark.parametrize("is_alone", [True, False])
def test_names(prepared: Path, objects: Path, is_alone: bool) -> None:
    nothing = {"nodeid": 0, "entry_valid": CACHE_S if is_alone else 0, "entry_valid_nsec": 0}
    with output_engine(prepared, objects, alone=is_alone) as engine:
        inner = node_of(engine, b"inner")
        for node in (A, LAST):
            engine.engine.describe(node, stat.S_IFDIR | 0o755, 2, 0, 0, 7, 0, 0, 0)
        for node in (1, inner, A, LAST):
            assert look_up(engine, node, b"new") == nothing
            engine.engine.add_name(node, b"new")
            assert look_up(engine, node, b"new") is None
            assert look_up(engine, node, b"new2") == look_up(engine, node, b"ne") == nothing
            engine.engine.add_name(node, b"new")
            assert engine.engine.remove_name(node, b"new"), "a name that is said twice is one name"
            assert look_up(engine, node, b"new") == nothing
            assert not engine.engine.remove_name(node, b"new")
        # The dataset comes first, whatever is said.
        engine.engine.add_name(1, b"file")
        known = look_up(engine, 1, b"file")
        assert known is not None and known["nodeid"] == node_of(engine, b"file")
        for node, name in ((1, b".fanstore"), (1, b"."), (1, b".."), (A, b"."), (A, b".."), (A, b"x" * 256)):
            assert look_up(engine, node, name) is None
        assert engine.ask(wire.LOOKUP, 1, b"x" * 256 + b"\0").error == errno.ENAMETOOLONG
        assert engine.ask(wire.LOOKUP, node_of(engine, b"file"), b"x\0").error == errno.ENOTDIR


def test_many_names(alone: OutputEngine) -> None:
    """As a table of a few thousand names grows and shrinks, it says of each whether it is there."""
    numbers = random.Random(9)
    names = [(numbers.choice((1, A, B)), b"%x" % numbers.getrandbits(40)) for _ in range(4_000)]
    there: set[tuple[int, bytes]] = set()
    for number in range(20_000):
        name = numbers.choice(names)
        growing = number < 8_000 or numbers.random() < 0.2
        if name in there and not growing:
            assert alone.engine.remove_name(*name)
            there.remove(name)
        elif name not in there and growing:
            alone.engine.add_name(*name)
            there.add(name)
    for name in names:
        assert (look_up(alone, *name) is None) == (name in there), name


def test_mixed_directories(alone: OutputEngine) -> None:
    """Python answers for a directory of the dataset that has outputs in it, and for no other."""
    inner = node_of(alone, b"inner")
    listing = wire.read_arguments(0, 0, 4096)
    questions = [(wire.GETATTR, bytes(16)), (wire.READDIR, listing), (wire.READDIRPLUS, listing)]
    assert not any(alone.is_passed_on(opcode, inner, arguments) for opcode, arguments in questions)
    alone.engine.mix(inner - 1)
    alone.engine.mix(inner - 1)
    for opcode, arguments in questions:
        assert alone.is_passed_on(opcode, inner, arguments)
        assert not alone.is_passed_on(opcode, 1, arguments)
    # Nor does its parent say what its attributes are.
    assert look_up(alone, 1, b"inner") is None
    assert look_up(alone, 1, b"plain") is not None
    found = {name: known for name, _, _, _, known in wire.dirents(alone.ask(wire.READDIRPLUS, 1, listing).data, True)}
    assert found[b"inner"]["nodeid"] == 0 and found[b"plain"]["nodeid"] == node_of(alone, b"plain")
    # What is in it is still the dataset's.
    assert look_up(alone, inner, b"empty") is not None
    with pytest.raises(ValueError, match="no such entry"):
        alone.engine.mix(alone.index.entry_count)


def test_directories_that_python_has_described(alone: OutputEngine) -> None:
    """GETATTR of a directory is answered as Python has last said, until it takes that back; many of them."""
    inner = node_of(alone, b"inner")
    alone.engine.mix(inner - 1)
    inodes = [inner, *range(A, A + 500)]
    for inode in inodes:
        assert alone.is_passed_on(wire.GETATTR, inode, bytes(16))
        alone.engine.describe(inode, 0o40755, 2, 0, 0, 5_000_000_007, 1, 2, 60)
        alone.engine.describe(inode, 0o40700, 3, 11, 1, -1, 1, 2, inode % 100)
    for inode in inodes:
        answer = alone.ask(wire.GETATTR, inode, bytes(16))
        valid_s, _, _, number, size, blocks, *seconds = struct.unpack_from("<QIIQQQQQQ", answer.data)
        nanoseconds = struct.unpack_from("<III", answer.data, 64)
        mode, nlink, uid, gid = struct.unpack_from("<IIII", answer.data, 76)
        assert (valid_s, number, size, blocks) == (inode % 100, inode, 11, 1)
        assert seconds == [(1 << 64) - 1] * 3 and nanoseconds == (999_999_999,) * 3
        assert (mode, nlink, uid, gid) == (0o40700, 3, 1, 2)
    for inode in inodes[::2]:
        alone.engine.undescribe(inode)
    for position, inode in enumerate(inodes):
        assert alone.is_passed_on(wire.GETATTR, inode, bytes(16)) == (position % 2 == 0)
    alone.engine.undescribe(A + 10_000)
    with pytest.raises(ValueError, match="0 is no inode"):
        alone.engine.describe(0, 0, 0, 0, 0, 0, 0, 0, 0)


# --- the rest ---


def test_closes_that_nobody_wants_to_know(alone: OutputEngine) -> None:
    for inode in (A, B, 1, node_of(alone, b"file"), alone.index.entry_count + 3, 1 << 48, (1 << 64) - 1):
        assert alone.ask(wire.FLUSH, inode, bytes(24)) == wire.Reply(0, b"")
        assert not alone.engine.take()


def test_closes_are_for_python_to_answer(together: OutputEngine) -> None:
    assert together.is_passed_on(wire.FLUSH, A, bytes(24))
    assert together.ask(wire.FLUSH, 1, bytes(24)) == wire.Reply(0, b"")
    assert not together.engine.take()


def test_fsync_is_the_disks_if_nobody_else_wants_to_know(alone: OutputEngine, together: OutputEngine) -> None:
    alone.object(A).write_bytes(b"x")
    for flags in (0, 1):  # 1: fdatasync
        assert alone.ask(wire.FSYNC, A, struct.pack("<QII", 0, flags, 0)) == wire.Reply(0, b"")
        assert together.is_passed_on(wire.FSYNC, A, struct.pack("<QII", 0, flags, 0))
    assert alone.ask(wire.FSYNC, A, bytes(8)).error == errno.EIO, "cut short"
    assert alone.is_passed_on(wire.FSYNC, 1, bytes(16))


def test_handles_are_inode_numbers(together: OutputEngine) -> None:
    with_handle, without = struct.pack("<II80x", 1 << 6 | 1 << 3, 0), struct.pack("<II80x", 1 << 3, 0)
    for opcode, arguments, place in (
        (wire.FLUSH, bytes(24), 0),
        (wire.FSYNC, bytes(16), 0),
        (wire.FSYNCDIR, bytes(16), 0),
        (wire.SETATTR, with_handle, 8),
        (wire.READDIR, wire.read_arguments(0, 0, 4096), 0),
        (wire.READDIRPLUS, wire.read_arguments(7, 0, 4096), 0),
    ):
        assert together.ask(opcode, B, arguments).error == FORWARDED
        expected = arguments[:place] + struct.pack("<Q", B) + arguments[place + 8 :]
        assert together.passed_on(opcode, B) == expected
    for opcode, arguments in ((wire.SETATTR, without), (wire.GETATTR, bytes(16)), (wire.SETATTR, with_handle[:80])):
        assert together.ask(opcode, B, arguments).error == FORWARDED
        assert together.passed_on(opcode, B) == arguments
    assert together.ask(wire.RELEASE, B, bytes(24)) == wire.Reply(0, b"")


def test_capabilities_are_not_asked_for_in_python(alone: OutputEngine) -> None:
    """The kernel wants to know before each write."""
    capability = wire.getxattr_arguments(b"security.capability", 24)
    assert alone.ask(wire.GETXATTR, A, capability) == wire.Reply(errno.ENODATA, b"")
    for node, arguments in (
        (A, capability[:-1]),
        (A, bytes(8)),
        (A, wire.getxattr_arguments(b"security.capabilit", 24)),
        (A, wire.getxattr_arguments(b"user.mine", 24)),
        (1 << 48, capability),
    ):
        assert alone.is_passed_on(wire.GETXATTR, node, arguments)


def test_the_dataset_is_not_written_to(alone: OutputEngine) -> None:
    node = node_of(alone, b"file")
    for inode in (1, node, alone.index.entry_count + 1, 1 << 48):
        assert alone.ask(wire.WRITE, inode, wire.write_arguments(0, b"x")).error == errno.EROFS
        assert alone.ask(wire.FALLOCATE, inode, wire.fallocate_arguments(0, 0, 9)).error == errno.EROFS
    assert alone.lseek(node, 0, os.SEEK_DATA) == 0 and alone.lseek(node, 5, os.SEEK_HOLE) == 22
    assert alone.lseek(node, 22, os.SEEK_DATA) == alone.lseek(node, 1 << 62, os.SEEK_HOLE) == -errno.ENXIO
    assert alone.lseek(node, 0, os.SEEK_SET) == alone.lseek(1, 0, os.SEEK_DATA) == -errno.EINVAL
    assert alone.is_passed_on(wire.STATFS, 1)
    assert alone.is_passed_on(wire.LSEEK, 1 << 48, bytes(24))


@pytest.mark.parametrize("is_alone", [True, False])
def test_open(prepared: Path, objects: Path, is_alone: bool) -> None:
    """Files of the dataset cannot be opened for writing, and nobody is told when they are closed."""
    flags = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC)
    for offered in (wire.OFFERED, wire.OFFERED & ~wire.NO_OPEN_SUPPORT):
        with output_engine(prepared, objects, alone=is_alone, offered=offered) as engine:
            for node, flag in itertools.product((node_of(engine, b"file"), 1 << 48), flags):
                reply = engine.ask(wire.OPEN, node, struct.pack("<II", flag, 0))
                opened = struct.pack("<QII", node, KEEP_CACHE | NO_FLUSH, 0)
                assert reply == (wire.Reply(0, opened) if flag == os.O_RDONLY else wire.Reply(errno.EROFS, b""))
            for flag in flags:
                reply = engine.ask(wire.OPEN, A, struct.pack("<II", flag, 0))
                assert reply == wire.Reply(0, struct.pack("<QII", A, KEEP_CACHE if is_alone else 0, 0))


@pytest.mark.parametrize("is_alone", [True, False])
def test_who_only_writes_does_so_past_the_pages(prepared: Path, objects: Path, is_alone: bool) -> None:
    """But nobody does while another one uses them, and old ones go."""
    keep = KEEP_CACHE if is_alone else 0
    direct = DIRECT_IO | (NO_FLUSH if is_alone else 0)  # alone, nobody wants to know of a close

    def opened(flags: int, node: int = A) -> tuple[int, int]:
        """The handle and the flags of the answer."""
        reply = engine.ask(wire.OPEN, node, struct.pack("<II", flags, 0))
        assert reply.error == 0
        handle, answer, _ = struct.unpack("<QII", reply.data)
        assert handle == node | (DIRECT_HANDLE if answer & DIRECT_IO else 0)
        return handle, answer

    def close(handle: int, node: int = A) -> None:
        assert engine.ask(wire.RELEASE, node, struct.pack("<QIIQ", handle, 0, 0, 0)) == wire.Reply(0, b"")

    with output_engine(prepared, objects, alone=is_alone, offered=wire.OFFERED | wire.DIRECT_IO_ALLOW_MMAP) as engine:
        fields = struct.unpack_from("<IIIIHHIIHHI", engine.kernel.init.data)
        assert fields[3] & 1 << 30 and fields[-1] == wire.DIRECT_IO_ALLOW_MMAP >> 32
        writer, answer = opened(os.O_WRONLY)
        assert answer == keep | direct
        assert opened(os.O_RDONLY, B) == (B, keep), "another file"
        second, answer = opened(os.O_WRONLY | os.O_APPEND)
        assert answer == keep | direct
        close(writer)
        close(second)
        reader, answer = opened(os.O_RDONLY)
        assert answer == keep, "nobody has mapped it"
        writer, answer = opened(os.O_WRONLY)
        assert answer == keep, "somebody uses the pages"
        close(reader)
        close(writer)
        writer = opened(os.O_WRONLY)[0]
        for flags in (os.O_RDONLY, os.O_RDWR):
            reader, answer = opened(flags)
            assert answer == keep | direct, "somebody writes with direct I/O"
        close(writer)
        assert opened(os.O_RDONLY)[1] == keep | direct, "two more have it open like that"
        for _ in range(3):
            close(reader)
        reader, answer = opened(os.O_RDONLY)
        assert answer == 0, "there may be old pages of a map"
        assert opened(os.O_RDONLY)[1] == keep
        close(reader)
        close(reader)
        close(reader)  # more often than it was opened
        assert engine.engine.open(A, os.O_RDWR) == A, "as Python does for one that is created"
        close(A)
        assert engine.engine.open(A, os.O_WRONLY) == A | DIRECT_HANDLE
        assert engine.ask(wire.RELEASE, A, bytes(8)) == wire.Reply(0, b"")
        assert opened(os.O_RDONLY)[1] == keep | direct, "too short a message closes nothing"


def test_messages_that_are_cut_short(alone: OutputEngine) -> None:
    alone.object(A).write_bytes(b"as it was")
    for opcode, arguments in (
        (wire.WRITE, wire.write_arguments(0, b"xyz")),
        (wire.FALLOCATE, wire.fallocate_arguments(0, 0, 100)),
        (wire.LSEEK, wire.lseek_arguments(0, os.SEEK_DATA)),
        (wire.READ, wire.read_arguments(0, 0, 1)),
    ):
        for length in range(len(arguments)):
            assert alone.ask(opcode, A, arguments[:length]).error == errno.EIO
    for said in (4, 4096, 0xFFFFFFFF):
        assert alone.ask(wire.WRITE, A, wire.write_arguments(0, b"xyz", said)).error == errno.EIO
    assert alone.ask(wire.READ, A, wire.read_arguments(0, 0, MIB + 1)).error == errno.EIO
    assert alone.write(A, 0, b"") == 0
    assert alone.ask(wire.WRITE, A, wire.write_arguments(0, b"AS and more", 2)).error == 0, (
        "what is too much is not read"
    )
    assert alone.read(A, 0, 100) == b"AS it was"
    alone.interrupt(0)
    assert alone.ask(wire.LOOKUP, A, b"without an end").error == FORWARDED
    assert alone.ask(wire.FLUSH, A).error == 0


@needs_root
def test_a_long_list_of_the_forgotten(alone: OutputEngine) -> None:
    """The kernel sends as many at once as the request buffer takes; pyfuse3's socket does not."""
    outputs = [A + number for number in range(20_000)]
    everything = [number for pair in zip(outputs, [1] * len(outputs), strict=True) for number in pair]
    forgets = b"".join(struct.pack("<QQ", inode, 3) for inode in everything)
    alone.kernel.send(wire.BATCH_FORGET, 0, struct.pack("<II", len(everything), 0) + forgets)
    told: list[int] = []
    while len(told) < len(outputs):
        arguments = alone.passed_on(wire.BATCH_FORGET, 0)
        count, _ = struct.unpack_from("<II", arguments)
        assert len(arguments) == 8 + 16 * count and count > 0
        told += [inode for inode, lookups in struct.iter_unpack("<QQ", arguments[8:]) if lookups == 3]
    assert told == outputs
    alone.kernel.send(wire.BATCH_FORGET, 0, struct.pack("<II", len(everything) + 1, 0) + forgets)
    assert alone.is_passed_on(wire.GETATTR, A, bytes(16)), "what says more than it has is not passed on"
