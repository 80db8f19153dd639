"""CREATE without Python: new files of a job of one node, in the messages between the kernel, the engine and Python."""

import errno
import gc
import os
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuse_wire as wire
import pytest
from output_engine import LIMIT_S, A, B, OutputEngine, node_of, output_engine

from fanstore.outputs.journal import Journal, Owner, read_journal

pytest_plugins = ["output_engine"]

ROOT = 1
#: A directory that is an output.
FOLDER = B + 1
DAY_S = 86_400
DIRECT_IO, NO_FLUSH = 1 << 0, 1 << 5
DIRECT_HANDLE = 1 << 63


@pytest.fixture
def creating(prepared: Path, objects: Path) -> Iterator[OutputEngine]:
    """One that may create, from A on, in the root and in FOLDER."""
    with output_engine(prepared, objects, offered=wire.OFFERED | wire.DIRECT_IO_ALLOW_MMAP) as engine:
        allow(engine)
        yield engine


def allow(engine: OutputEngine, first: int = A, journal_end: int = -1) -> None:
    assert engine.engine.begin_turn() == ([], -1)
    engine.engine.mix(0)
    for inode in (ROOT, FOLDER):
        engine.engine.describe(inode, stat.S_IFDIR | 0o755, 2, 0, 0, 7, 0, 0, DAY_S)
    engine.engine.end_turn(first, journal_end)


def create(engine: OutputEngine, parent: int, name: bytes, **words: int) -> wire.Reply:
    return engine.ask(wire.CREATE, parent, wire.create_arguments(name, **words))


def is_python_asked(engine: OutputEngine, parent: int, name: bytes, **words: int) -> bool:
    return engine.is_passed_on(wire.CREATE, parent, wire.create_arguments(name, **words))


def names_of(files: list[tuple[int, int, bytes, int, int, tuple[int, int, int] | None]]) -> list[tuple[int, bytes]]:
    return [(file[1], file[2]) for file in files]


def test_a_new_file(creating: OutputEngine) -> None:
    reply = create(creating, ROOT, b"new", mode=0o100666, umask=0o027, flags=os.O_RDWR)
    assert reply.error == 0
    entry = wire.entry(reply.data)
    content = creating.object(A).stat()
    assert (entry["nodeid"], entry["generation"], entry["entry_valid"], entry["attr_valid"]) == (A, 0, DAY_S, DAY_S)
    assert (entry["ino"], entry["mode"], entry["nlink"], entry["size"]) == (A, stat.S_IFREG | 0o640, 1, 0)
    assert entry["mtime"] * 10**9 + entry["mtimensec"] == content.st_mtime_ns
    assert struct.unpack("<QII", reply.data[128:]) == (A, 0, 0)
    assert content.st_size == 0 and stat.S_IMODE(content.st_mode) == 0o600

    assert creating.write(A, 0, b"content") == 7
    assert creating.object(A).read_bytes() == b"content"
    assert creating.is_passed_on(wire.LOOKUP, ROOT, b"new\0"), "there is such a name"
    folder = wire.attributes_out(creating.ask(wire.GETATTR, ROOT, bytes(16)).data)
    assert creating.engine.has_creates()
    [(inode, parent, name, mode, mtime_ns, closed)] = creating.engine.take_creates()
    assert (inode, parent, name, mode, closed) == (A, ROOT, b"new", stat.S_IFREG | 0o640, None)
    assert folder["mtime"] * 10**9 + folder["mtimensec"] == mtime_ns, "the directory has changed then"
    assert not creating.engine.has_creates() and creating.engine.take_creates() == []


def test_who_only_writes_does_so_past_the_pages(creating: OutputEngine) -> None:
    """And does not say when it is closed: nobody wants to know."""
    reply = create(creating, ROOT, b"new", flags=os.O_WRONLY)
    assert struct.unpack("<QII", reply.data[128:]) == (A | DIRECT_HANDLE, DIRECT_IO | NO_FLUSH, 0)


def test_numbers_are_those_that_python_would_give(creating: OutputEngine) -> None:
    for number in range(10):
        reply = create(creating, (ROOT, FOLDER)[number % 2], b"%d" % number)
        assert wire.entry(reply.data)["nodeid"] == A + number
    files, _ = creating.engine.begin_turn()
    assert [file[0] for file in files] == list(range(A, A + 10))
    assert names_of(files) == [((ROOT, FOLDER)[number % 2], b"%d" % number) for number in range(10)]
    creating.engine.end_turn(A + 15, -1)
    assert wire.entry(create(creating, ROOT, b"after").data)["nodeid"] == A + 15


def test_python_is_woken_once_for_many(creating: OutputEngine) -> None:
    for number in range(10):
        create(creating, ROOT, b"%d" % number)
    assert creating.wakes() == 1
    creating.engine.take_creates()
    create(creating, ROOT, b"one more")
    assert creating.wakes() == 1


def test_what_is_pythons(creating: OutputEngine) -> None:
    creating.engine.add_name(ROOT, b"output")
    for name in (b"output", b"file", b"inner", b".fanstore", b".", b"..", b"x" * 256, b""):
        assert is_python_asked(creating, ROOT, name), name
    for bit in (stat.S_ISUID, stat.S_ISGID):
        assert is_python_asked(creating, ROOT, b"new", mode=0o100644 | bit)
    plain = node_of(creating, b"plain")
    assert is_python_asked(creating, plain, b"new"), "the first one in a directory: Python notes where that is"
    creating.engine.undescribe(FOLDER)
    assert is_python_asked(creating, FOLDER, b"new"), "it was removed"
    assert is_python_asked(creating, FOLDER + 1, b"new"), "no such directory"
    assert is_python_asked(creating, node_of(creating, b"file"), b"new"), "no directory"
    for arguments in (b"", bytes(15), bytes(16), wire.create_arguments(b"cut short")[:-1]):
        assert creating.is_passed_on(wire.CREATE, ROOT, arguments)
    creating.object(A).touch()
    assert is_python_asked(creating, ROOT, b"new"), "its file cannot be made"
    assert not creating.engine.has_creates()
    creating.object(A).unlink()
    assert create(creating, ROOT, b"new").error == 0
    assert create(creating, ROOT, b"x" * 255).error == 0


def test_not_before_python_says_so(alone: OutputEngine, prepared: Path, tmp_path: Path) -> None:
    alone.engine.mix(0)
    alone.engine.describe(ROOT, stat.S_IFDIR | 0o755, 2, 0, 0, 7, 0, 0, DAY_S)
    assert is_python_asked(alone, ROOT, b"new")
    (tmp_path / "other").mkdir()
    with output_engine(prepared, tmp_path / "other", alone=False) as together:
        together.engine.mix(0)
        together.engine.describe(ROOT, stat.S_IFDIR | 0o755, 2, 0, 0, 7, 0, 0, DAY_S)
        together.engine.begin_turn()
        together.engine.end_turn(A, -1)
        assert is_python_asked(together, ROOT, b"new"), "all nodes decide"


def test_turns(creating: OutputEngine) -> None:
    """While Python changes names nothing is created; what it has changed counts."""
    creating.engine.begin_turn()
    unique = creating.kernel.send(wire.CREATE, ROOT, wire.create_arguments(b"new"))
    creating.engine.add_name(ROOT, b"new")
    creating.engine.end_turn(A + 1, -1)
    assert creating.kernel.receive() == (unique, wire.Reply(errno.EXDEV, b""))
    assert creating.passed_on(wire.CREATE, ROOT)
    assert list(creating.objects.iterdir()) == []


def test_as_many_as_python_can_take_at_once(creating: OutputEngine) -> None:
    for number in range(4096):
        assert create(creating, FOLDER, b"%d" % number).error == 0
    assert is_python_asked(creating, FOLDER, b"too many")
    assert len(creating.engine.take_creates()) == 4096
    assert wire.entry(create(creating, FOLDER, b"too many").data)["nodeid"] == A + 4096


# --- in a job of several nodes ---


@pytest.fixture
def together(prepared: Path, objects: Path) -> Iterator[OutputEngine]:
    """One of several nodes, which has the directory FOLDER."""
    with output_engine(prepared, objects, alone=False) as engine:
        engine.engine.begin_turn()
        engine.engine.mix(0)
        for inode in (ROOT, FOLDER):
            engine.engine.describe(inode, stat.S_IFDIR | 0o755, 2, 0, 0, 7, 0, 0, 0)
        engine.engine.add_name(ROOT, b"folder", FOLDER)
        engine.engine.end_turn(A, -1)
        yield engine


def test_all_nodes_decide(together: OutputEngine) -> None:
    for parent in (ROOT, FOLDER, FOLDER + 1):
        assert is_python_asked(together, parent, b"new")
    assert together.is_passed_on(wire.FLUSH, A, bytes(24))


def test_names_that_there_are_not(together: OutputEngine) -> None:
    """The engine knows all names, but those of others come and go: the kernel must ask each time."""
    for parent in (ROOT, FOLDER):
        entry = wire.entry(together.ask(wire.LOOKUP, parent, b"nothing\0").data)
        assert (entry["nodeid"], entry["entry_valid"]) == (0, 0)
    together.engine.undescribe(FOLDER)
    assert together.is_passed_on(wire.GETATTR, FOLDER, bytes(16))
    assert together.is_passed_on(wire.LOOKUP, ROOT, b"folder\0")


def test_the_engine_tells_of_directories(together: OutputEngine) -> None:
    for _ in range(3):
        entry = wire.entry(together.ask(wire.LOOKUP, ROOT, b"folder\0").data)
        assert (entry["nodeid"], entry["ino"], entry["mode"]) == (FOLDER, FOLDER, stat.S_IFDIR | 0o755)
        assert (entry["entry_valid"], entry["attr_valid"], entry["mtime"], entry["mtimensec"]) == (0, 0, 0, 7)
    assert together.engine.take_told(FOLDER) == 3, "the kernel will forget so many look-ups"
    assert together.engine.take_told(FOLDER) == 0
    together.ask(wire.LOOKUP, ROOT, b"folder\0")
    assert together.engine.undescribe(FOLDER) == 1
    together.engine.describe(FOLDER, stat.S_IFDIR | 0o755, 2, 0, 0, 7, 0, 0, 0)
    together.engine.remove_name(ROOT, b"folder")
    assert wire.entry(together.ask(wire.LOOKUP, ROOT, b"folder\0").data)["nodeid"] == 0
    together.engine.add_name(ROOT, b"folder")
    assert together.is_passed_on(wire.LOOKUP, ROOT, b"folder\0"), "it is not a directory now"


# --- files that are made ahead ---


def numbers_in(objects: Path) -> set[int]:
    return {int(file.name, 16) for file in objects.iterdir()}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_files_are_made_ahead(creating: OutputEngine) -> None:
    """While many are created; each is as new as its output, and numbers that Python gives are left to it."""
    for number in range(10):
        assert create(creating, FOLDER, b"%d" % number).error == 0
    assert numbers_in(creating.objects) == set(range(A, A + 10)), "not before there were some"
    for number in range(10, 40):
        assert create(creating, FOLDER, b"%d" % number).error == 0
    wait_for(lambda: len(numbers_in(creating.objects)) > 100, "nothing is made ahead")
    ahead = max(numbers_in(creating.objects))
    assert all(creating.object(number).stat().st_size == 0 for number in range(A + 40, ahead + 1))

    os.utime(creating.object(A + 40), ns=(7, 7))
    entry = wire.entry(create(creating, FOLDER, b"40").data)
    assert entry["nodeid"] == A + 40
    assert entry["mtime"] * 10**9 + entry["mtimensec"] == creating.object(A + 40).stat().st_mtime_ns
    assert abs(entry["mtime"] - time.time()) < LIMIT_S, "it is as old as its file"

    assert len(creating.engine.begin_turn()[0]) == 41
    creating.engine.end_turn(A + 44, -1)
    assert not numbers_in(creating.objects) & {A + 41, A + 42, A + 43}, "Python makes its files itself"
    assert A + 44 in numbers_in(creating.objects)
    creating.engine.begin_turn()
    creating.engine.end_turn(A + 100_000, -1)
    wait_for(lambda: max(numbers_in(creating.objects)) < A + 44, "they will never be asked for")
    assert wire.entry(create(creating, FOLDER, b"far").data)["nodeid"] == A + 100_000
    assert creating.write(A + 100_000, 0, b"content") == 7


def test_files_that_nobody_asks_for_are_removed(creating: OutputEngine) -> None:
    for number in range(20):
        create(creating, FOLDER, b"%d" % number)
    wait_for(lambda: len(numbers_in(creating.objects)) > 100, "nothing is made ahead")
    wait_for(lambda: numbers_in(creating.objects) == set(range(A, A + 20)), "they stay")
    assert wire.entry(create(creating, FOLDER, b"later").data)["nodeid"] == A + 20


def test_the_end_removes_files_that_were_made_ahead(prepared: Path, objects: Path) -> None:
    with output_engine(prepared, objects) as engine:
        allow(engine)
        for number in range(20):
            create(engine, FOLDER, b"%d" % number)
        wait_for(lambda: len(numbers_in(objects)) > 100, "nothing is made ahead")
    del engine
    gc.collect()
    assert numbers_in(objects) == set(range(A, A + 20))


# --- with --output ---


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one."""
    path = tmp_path / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)], check=True, timeout=LIMIT_S)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=LIMIT_S)


def operations(journal: Path) -> list[list[Any]]:
    return [record.value for record in read_journal(journal)[2]]


def test_the_journal(prepared: Path, objects: Path, tmp_path: Path) -> None:
    """It has creations and closings as Python would have noted them, before they are answered, and between its own."""
    path = tmp_path / "journal"
    journal = Journal.make(path, Owner("job", 0, "output", "copies"))
    journal.note("op", ["removexattr", A, b"n"], must=True)
    with output_engine(prepared, objects, journal=journal.fd) as engine:
        allow(engine, journal_end=journal.end)
        assert create(engine, ROOT, b"na\xffme", mode=0o100600).error == 0
        created = ["create", ROOT, b"na\xffme", stat.S_IFREG | 0o600]
        assert [operation[:4] for operation in operations(path)[1:]] == [created]
        engine.write(A, 0, b"content")
        assert engine.ask(wire.FLUSH, A, bytes(24)) == wire.Reply(0, b"")
        content = engine.object(A).stat()
        assert operations(path)[2:] == [["commit", A, 7, content.st_mtime_ns, 0]]
        assert engine.is_passed_on(wire.FLUSH, A, bytes(24)), "once more: Python knows whether it has changed"
        [file], end = engine.engine.begin_turn()
        assert file[:4] == (A, *created[1:])
        assert operations(path)[1] == [*created, file[4], 0, True]
        assert file[5] == (7, content.st_mtime_ns, content.st_ctime_ns)
        assert end == path.stat().st_size
        journal.go_on_at(end)
        journal.note("op", ["removexattr", A, b"m"], must=True)
        journal.note("op", ["removexattr", A, b"refused"], must=True)
        journal.take_back()
        engine.engine.end_turn(A + 1, journal.end)
        assert engine.is_passed_on(wire.FLUSH, A, bytes(24)), "it was closed before"
        assert create(engine, ROOT, b"second").error == 0
        assert [operation[0] for operation in operations(path)] == [
            "removexattr",
            "create",
            "commit",
            "removexattr",
            "create",
        ]
    journal.close()


SYNC = bytes(16)


def test_syncs(prepared: Path, objects: Path, tmp_path: Path) -> None:
    """With ``--fsync local`` each sync of a file that is the engine's is noted in the journal before it is answered."""
    path = tmp_path / "journal"
    journal = Journal.make(path, Owner("job", 0, "output", "copies"))
    with output_engine(prepared, objects, journal=journal.fd, local=True) as engine:
        allow(engine, journal_end=journal.end)
        assert create(engine, ROOT, b"name").error == 0
        noted = []
        for number in range(3):
            engine.write(A, number, b"x")
            assert engine.ask(wire.FSYNC, A, SYNC) == wire.Reply(0, b"")
            content = engine.object(A).stat()
            noted.append((number + 1, content.st_mtime_ns, content.st_ctime_ns))
            assert operations(path)[1:] == [["commit", A, size, mtime_ns, 0] for size, mtime_ns, _ in noted]
        created, *later = engine.engine.take_creates()
        assert (created[2], created[5]) == (b"name", noted[0])
        assert later == [(A, 0, b"", 0, 0, content) for content in noted[1:]]
        assert engine.wakes() == 1
        assert engine.is_passed_on(wire.FLUSH, A, bytes(24)), "Python knows whether it has changed since"

        engine.engine.begin_turn()
        engine.engine.disown(A)
        engine.engine.own(B)
        engine.object(B).write_bytes(b"content")
        engine.engine.end_turn(A + 1, journal_end(path, journal))
        assert engine.is_passed_on(wire.FSYNC, A, SYNC), "Python is about to note it, or it has no name any more"
        assert engine.is_passed_on(wire.FLUSH, B, bytes(24)), "Python has noted it once"
        assert engine.ask(wire.FSYNC, B, SYNC) == wire.Reply(0, b"")
        assert operations(path)[-1][:3] == ["commit", B, 7]
        assert engine.ask(wire.FSYNC, B, bytes(8)).error == errno.EIO, "cut short"

        engine.engine.begin_turn()
        engine.engine.end_turn(A + 1, -1)
        assert engine.is_passed_on(wire.FSYNC, B, SYNC), "nothing can be noted at the moment"
        engine.object(B).unlink()
        engine.engine.drop(B)
        assert engine.is_passed_on(wire.FSYNC, B, SYNC), "there is no content"
        assert len(operations(path)) == 5
    journal.close()


def journal_end(path: Path, journal: Journal) -> int:
    """The journal goes on behind what the engine has noted."""
    journal.go_on_at(path.stat().st_size)
    return journal.end


def test_syncs_that_wait_for_more(prepared: Path, objects: Path, tmp_path: Path) -> None:
    """With ``--output`` alone each one is for Python to answer."""
    journal = Journal.make(tmp_path / "journal", Owner("job", 0, "output", "copies"))
    with output_engine(prepared, objects, journal=journal.fd) as engine:
        allow(engine, journal_end=journal.end)
        assert create(engine, ROOT, b"name").error == 0
        assert engine.is_passed_on(wire.FSYNC, A, SYNC)
    journal.close()


def test_closing_what_python_knows(prepared: Path, objects: Path, tmp_path: Path) -> None:
    """The first close is noted here, also when Python has taken over the file; but not if Python was first."""
    journal = Journal.make(tmp_path / "journal", Owner("job", 0, "output", "copies"))
    with output_engine(prepared, objects, journal=journal.fd) as engine:
        allow(engine, journal_end=journal.end)
        for name in (b"a", b"b", b"c"):
            assert create(engine, ROOT, name).error == 0
        assert len(engine.engine.take_creates()) == 3
        engine.wakes()
        engine.write(A + 1, 0, b"content")
        assert engine.ask(wire.FLUSH, A + 1, bytes(24)) == wire.Reply(0, b"")
        assert engine.wakes() == 1
        content = engine.object(A + 1).stat()
        closed = (7, content.st_mtime_ns, content.st_ctime_ns)
        assert engine.engine.take_creates() == [(A + 1, 0, b"", 0, 0, closed)]
        engine.engine.begin_turn()
        engine.engine.disown(A)
        engine.engine.disown(A + 17)
        engine.engine.end_turn(A + 3, journal.end)
        for inode in (A, A + 1, A + 17, B):
            assert engine.is_passed_on(wire.FLUSH, inode, bytes(24))
        assert engine.ask(wire.FLUSH, A + 2, bytes(24)) == wire.Reply(0, b"")
        assert create(engine, ROOT, b"d").error == 0
        assert engine.ask(wire.FLUSH, A + 3, bytes(24)) == wire.Reply(0, b"")
        files = engine.engine.take_creates()
        assert [(file[0], file[2], file[5] is not None) for file in files] == [
            (A + 2, b"", True),
            (A + 3, b"d", True),
        ]
    journal.close()


def test_a_journal_that_cannot_be_written(prepared: Path, objects: Path, disk: Path) -> None:
    """Then nothing is created: Python says why."""
    journal = Journal.make(disk / "journal", Owner("job", 0, "output", "copies"))
    before = operations(disk / "journal")
    with output_engine(prepared, objects, journal=journal.fd) as engine:
        allow(engine, journal_end=-1)
        assert is_python_asked(engine, ROOT, b"new"), "Python has something to write first"
        engine.engine.begin_turn()
        engine.engine.end_turn(A, journal.end)
        with open(disk / "fill", "wb", buffering=0) as fill:
            while True:
                try:
                    fill.write(bytes(4096))
                except OSError:
                    break
        created = 0
        while create(engine, ROOT, b"%200d" % created).error == 0:
            created += 1
        assert engine.passed_on(wire.CREATE, ROOT)
        assert created == len(engine.engine.take_creates()) == sum(n < A + created for n in numbers_in(objects))
        noted = [operation[2] for operation in operations(disk / "journal")]
        assert noted == [b"%200d" % n for n in range(created)]
        assert engine.ask(wire.LOOKUP, ROOT, b"%200d\0" % created).error == 0, "there is no such name"
        (disk / "fill").unlink()
        assert create(engine, ROOT, b"%200d" % created).error == 0
        assert len(operations(disk / "journal")) == created + 1
    assert before == []
    journal.close()
