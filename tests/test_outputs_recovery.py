"""Recovery after a death (outputs/recovery.py), of directories that are made as a killed daemon leaves them.

``Dead`` writes a journal, contents and ``--output`` in any state, one call each; what random kills seldom hit is here.
"""

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from fanstore.outputs.journal import JOURNAL_NAME, Journal, Owner, read_journal
from fanstore.outputs.recovery import CONTENTS_NAME, salvage
from fanstore.outputs.tree import PARKED, OutputTree

COPIES = ".fanstore-dead"
ROOT = 1
FILE, FOLDER = stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755

Expect = Callable[..., None]


class Names:
    """A dataset without anything in it but the root."""

    def child(self, parent: int, name: bytes) -> int | None:
        return None

    def is_directory(self, inode: int) -> bool:
        return inode == ROOT

    def path(self, inode: int) -> bytes:
        return b""


class Dead:
    """What a daemon has left: ``did`` is an operation in its journal."""

    def __init__(self, base: Path, rank: int = 0) -> None:
        self.out = base / "out"
        self.directory = base / f"job{rank}"
        self.copies = self.out / COPIES
        self.rank = rank
        (self.directory / CONTENTS_NAME).mkdir(parents=True)
        self.copies.mkdir(parents=True, exist_ok=True)
        self.tree = OutputTree(Names())
        self.journal = Journal.make(self.directory / JOURNAL_NAME, Owner("dead", rank, str(self.out), COPIES))
        self.journal.note("dir", (ROOT, b""), must=True)

    def did(self, *operation: object) -> int:
        self.journal.note("op", operation, must=True)
        return self.tree.apply(operation).result

    def create(self, name: bytes, parent: int = ROOT) -> int:
        return self.did("create", parent, name, FILE, 1, self.rank, False)

    def object(self, inode: int) -> Path:
        return self.directory / CONTENTS_NAME / f"{inode:x}"

    def close(self, inode: int, content: bytes, mtime_ns: int = 1_000_000_000) -> None:
        """The program closes a file with this content."""
        self.object(inode).write_bytes(content)
        os.utime(self.object(inode), ns=(mtime_ns, mtime_ns))
        self.did("commit", inode, len(content), mtime_ns, self.rank)

    def copy(self, inode: int) -> str:
        """The saver has copied it, but has not given it its name."""
        output = self.tree.outputs[inode]
        name = f"{self.rank}-{inode:x}-{output.version}"
        (self.copies / name).write_bytes(self.object(inode).read_bytes())
        os.utime(self.copies / name, ns=(output.mtime_ns, output.mtime_ns))
        self.did("ready", [[inode, output.version, name]])
        return name

    def announce(self, inode: int, parent: int, name: bytes, version: int, file: str) -> None:
        self.did("going", [[inode, parent, name, version, 0, file]])

    def save(self, inode: int, path: str) -> None:
        """The saver has saved it, and noted so."""
        output = self.tree.outputs[inode]
        assert output.place is not None
        os.rename(self.copies / self.copy(inode), self.out / path)
        self.did("saved", [[inode, *output.place, output.version, 0]])

    def found(self, name: bytes, content: bytes, mtime_ns: int = 900_000_000) -> int:
        """An earlier job had left it in ``--output``."""
        (self.out / os.fsdecode(name)).write_bytes(content)
        os.utime(self.out / os.fsdecode(name), ns=(mtime_ns, mtime_ns))
        return self.did("found", ROOT, name, FILE, mtime_ns, len(content), b"")

    def recover(self) -> dict[str, bytes]:
        """What stands in ``--output`` after the recovery, which must be complete."""
        self.journal.close()
        assert salvage(self.directory)
        assert not self.copies.exists()
        return self.standing()

    def standing(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.out)): path.read_bytes()
            for path in sorted(self.out.rglob("*"))
            if path.is_file() and path.parent != self.copies
        }


@pytest.fixture
def dead(tmp_path: Path) -> Dead:
    return Dead(tmp_path)


# --- what was done, and not noted ---


def test_closed_and_unfinished(dead: Dead) -> None:
    closed, growing, new = dead.create(b"closed"), dead.create(b"growing"), dead.create(b"new")
    dead.close(closed, b"whole")
    dead.close(growing, b"first")
    dead.object(growing).write_bytes(b"first and more")
    dead.object(new).write_bytes(b"begun")
    dead.object(dead.create(b"empty")).touch()
    expected = {"closed": b"whole", "growing.unfinished": b"first and more", "new.unfinished": b"begun"}
    assert dead.recover() == expected


@pytest.mark.parametrize("noted", ["copied", "announced", "published"])
def test_killed_while_it_got_its_name(dead: Dead, noted: str) -> None:
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    file = dead.copy(inode)
    if noted != "copied":
        dead.announce(inode, ROOT, b"name", 1, file)
    if noted == "published":
        os.rename(dead.copies / file, dead.out / "name")
    assert dead.recover() == {"name": b"content"}


@pytest.mark.parametrize("then", ["renamed", "removed", "replaced"])
def test_changed_after_it_got_its_name(dead: Dead, then: str) -> None:
    """It was published under its first name, which was not noted, and the program went on."""
    inode = dead.create(b"temporary")
    dead.close(inode, b"content")
    file = dead.copy(inode)
    dead.announce(inode, ROOT, b"temporary", 1, file)
    os.rename(dead.copies / file, dead.out / "temporary")
    if then == "renamed":
        dead.did("rename", ROOT, b"temporary", ROOT, b"name", True, 2)
        assert dead.recover() == {"name": b"content"}
    elif then == "removed":
        dead.did("remove", ROOT, b"temporary", False, 2)
        dead.object(inode).unlink()
        assert dead.recover() == {}
    else:
        other = dead.create(b"other")
        dead.close(other, b"other content")
        dead.did("rename", ROOT, b"other", ROOT, b"temporary", True, 2)
        dead.object(inode).unlink()
        assert dead.recover() == {"temporary": b"other content"}


@pytest.mark.parametrize("done", [False, True])
def test_killed_while_a_checkpoint_replaced_another(dead: Dead, done: bool) -> None:
    dead.found(b"checkpoint", b"old")
    inode = dead.create(b"temporary")
    dead.close(inode, b"new")
    dead.save(inode, "temporary")
    dead.did("rename", ROOT, b"temporary", ROOT, b"checkpoint", True, 2)
    dead.announce(inode, ROOT, b"checkpoint", 1, "")
    if done:
        os.rename(dead.out / "temporary", dead.out / "checkpoint")
    assert dead.recover() == {"checkpoint": b"new"}


def test_rename_then_renamed_again(dead: Dead) -> None:
    inode = dead.create(b"a")
    dead.close(inode, b"content")
    dead.save(inode, "a")
    dead.did("rename", ROOT, b"a", ROOT, b"b", True, 2)
    dead.announce(inode, ROOT, b"b", 1, "")
    os.rename(dead.out / "a", dead.out / "b")
    dead.did("rename", ROOT, b"b", ROOT, b"c", True, 3)
    assert dead.recover() == {"c": b"content"}


def test_what_an_earlier_job_left_is_not_lost(dead: Dead) -> None:
    """Only ``--output`` has it; it was renamed, and another file got its name."""
    dead.found(b"checkpoint", b"of an earlier job")
    dead.did("rename", ROOT, b"checkpoint", ROOT, b"kept", True, 2)
    inode = dead.create(b"checkpoint")
    dead.close(inode, b"new")
    assert dead.recover() == {"checkpoint": b"new", "kept": b"of an earlier job"}


def test_rename_of_what_an_earlier_job_left_over_another(dead: Dead) -> None:
    dead.found(b"a", b"first")
    dead.found(b"b", b"second")
    dead.did("rename", ROOT, b"a", ROOT, b"b", True, 2)
    assert dead.recover() == {"b": b"first"}


@pytest.mark.parametrize("stage", ["before", "announced", "parked", "noted"])
def test_two_that_changed_places(dead: Dead, stage: str) -> None:
    a, _ = dead.found(b"a", b"of a"), dead.found(b"b", b"of b")
    for old, new in ((b"a", b"t"), (b"b", b"a"), (b"t", b"b")):
        dead.did("rename", ROOT, old, ROOT, new, True, 2)
    if stage != "before":
        dead.announce(a, PARKED, b"0-x-parked", 1, "")
    if stage in ("parked", "noted"):
        os.rename(dead.out / "a", dead.copies / "0-x-parked")
    if stage == "noted":
        dead.did("saved", [[a, PARKED, b"0-x-parked", 1, 0]])
    assert dead.recover() == {"a": b"of b", "b": b"of a"}


def test_a_directory_where_a_file_was(dead: Dead) -> None:
    dead.found(b"name", b"a file")
    dead.did("remove", ROOT, b"name", False, 2)
    folder = dead.did("create", ROOT, b"name", FOLDER, 3, 0, True)
    inode = dead.create(b"inside", folder)
    dead.close(inode, b"content")
    assert dead.recover() == {"name/inside": b"content"}


def test_a_renamed_directory(dead: Dead) -> None:
    """What is in it stands already, and moves with it."""
    folder = dead.did("create", ROOT, b"old", FOLDER, 1, 0, True)
    (dead.out / "old").mkdir()
    dead.did("saved", [[folder, ROOT, b"old", 0, 0]])
    inode = dead.create(b"inside", folder)
    dead.close(inode, b"content")
    dead.save(inode, "old/inside")
    dead.did("rename", ROOT, b"old", ROOT, b"new", True, 2)
    dead.did("symlink", folder, b"link", b"inside", 3)
    assert dead.recover() == {"new/inside": b"content", "new/link": b"content"}
    assert os.readlink(dead.out / "new" / "link") == "inside"
    assert not (dead.out / "old").exists()


def test_time_set_just_before(dead: Dead) -> None:
    """utimes is noted before it is done."""
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    dead.did("setattr", inode, None, 5_000_000_000)
    assert dead.recover() == {"name": b"content"}


def test_killed_in_fsync(dead: Dead) -> None:
    """Its time on the disk was set back by a nanosecond, so that the next change is seen (local_contents.py)."""
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    os.utime(dead.object(inode), ns=(999_999_999, 999_999_999))
    assert dead.recover() == {"name": b"content"}


def test_renamed_and_being_written(dead: Dead) -> None:
    """What it has now is not complete; what it had before stands under a name that it has not any more."""
    inode = dead.create(b"old")
    dead.close(inode, b"first")
    dead.save(inode, "old")
    dead.close(inode, b"second")
    dead.did("rename", ROOT, b"old", ROOT, b"new", True, 2)
    dead.object(inode).write_bytes(b"thi")
    assert dead.recover() == {"new": b"first", "new.unfinished": b"thi"}


# --- journal and disk do not agree ---


def test_end_of_the_journal_is_torn(dead: Dead) -> None:
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    dead.journal.close()
    path = dead.directory / JOURNAL_NAME
    with open(path, "ab") as journal:
        journal.write(struct.pack("<II", 100, 12345) + b"torn")
    assert dead.recover() == {"name": b"content"}


def test_contents_that_the_journal_does_not_know(dead: Dead, expect_warnings: Expect) -> None:
    """They are not removed: the journal has lost its end."""
    expect_warnings(r"1 contents in .* have no name", r"1 outputs of a dead job could not be saved")
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    dead.object(inode + 1).write_bytes(b"precious")
    dead.journal.close()
    assert not salvage(dead.directory)
    assert dead.standing() == {"name": b"content"}, "the others are saved all the same"
    assert dead.object(inode + 1).read_bytes() == b"precious"


def test_killed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "job" / CONTENTS_NAME).mkdir(parents=True)
    assert salvage(tmp_path / "job")
    (tmp_path / "job" / JOURNAL_NAME).touch()
    assert salvage(tmp_path / "job")


def test_journal_without_a_head(tmp_path: Path, expect_warnings: Expect) -> None:
    expect_warnings("is not a journal of outputs")
    (tmp_path / "job" / CONTENTS_NAME).mkdir(parents=True)
    (tmp_path / "job" / CONTENTS_NAME / "10000000000").write_bytes(b"precious")
    (tmp_path / "job" / JOURNAL_NAME).write_bytes(b"nonsense\n")
    assert not salvage(tmp_path / "job")


# --- somebody else was there since ---


def test_somebody_has_put_something_newer_there(dead: Dead) -> None:
    inode = dead.create(b"name")
    dead.close(inode, b"ours")
    (dead.out / "name").write_bytes(b"theirs")
    assert dead.recover() == {"name": b"theirs", "name.unfinished": b"ours"}


def test_what_is_removed_is_what_we_put_there(dead: Dead) -> None:
    """We had removed and renamed files; somebody has replaced them."""
    inode, other = dead.create(b"removed"), dead.create(b"renamed")
    for number, name in ((inode, "removed"), (other, "renamed")):
        dead.close(number, b"ours")
        dead.save(number, name)
    dead.did("remove", ROOT, b"removed", False, 2)
    dead.did("rename", ROOT, b"renamed", ROOT, b"elsewhere", True, 2)
    for name in ("removed", "renamed"):
        (dead.out / name).unlink()
        (dead.out / name).write_bytes(b"theirs")
    assert dead.recover() == {"removed": b"theirs", "renamed": b"theirs"}


def test_what_was_saved_is_not_saved_again(dead: Dead) -> None:
    """Somebody has edited it, or removed it."""
    for name in ("edited", "gone"):
        inode = dead.create(name.encode())
        dead.close(inode, b"ours")
        dead.save(inode, name)
    pending = dead.create(b"pending")
    dead.close(pending, b"content")
    (dead.out / "edited").write_bytes(b"by hand")
    (dead.out / "gone").unlink()
    assert dead.recover() == {"edited": b"by hand", "pending": b"content"}


def test_an_older_time_is_not_somebody_elses(dead: Dead) -> None:
    """A file with an old time (tar, rsync) replaces a newer one of this job."""
    inode = dead.create(b"name")
    dead.close(inode, b"first", 9_000_000_000)
    dead.save(inode, "name")
    dead.close(inode, b"second", 1_000_000_000)
    assert dead.recover() == {"name": b"second"}


def test_unfinished_never_replaces_unfinished(dead: Dead) -> None:
    (dead.out / "name.unfinished").write_bytes(b"of the day before")
    dead.object(dead.create(b"name")).write_bytes(b"begun")
    assert dead.recover() == {"name.unfinished": b"of the day before", "name.unfinished-2": b"begun"}


# --- more than one node, more than one recovery ---


def test_each_node_saves_its_own(tmp_path: Path) -> None:
    dead = [Dead(tmp_path, rank) for rank in range(2)]
    for rank in range(2):
        inode = dead[rank].create(b"by %d" % rank)
        dead[1 - rank].did("create", ROOT, b"by %d" % rank, FILE, 1, rank, False)
        dead[rank].close(inode, b"%d" % rank)
        dead[1 - rank].did("commit", inode, 1, 1_000_000_000, rank)
    file = dead[1].copy(inode)  # which the other one knows, too
    dead[0].did("ready", [[inode, 1, file]])
    for one in dead:
        one.journal.close()
    assert salvage(dead[1].directory)
    assert dead[1].standing() == {"by 1": b"1"}
    assert salvage(dead[0].directory)
    assert dead[0].standing() == {"by 0": b"0", "by 1": b"1"}
    assert not dead[0].copies.exists()


def test_copies_of_a_living_node_are_left_alone(tmp_path: Path) -> None:
    dead = Dead(tmp_path)
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    (dead.copies / "1-10000000001-1").write_bytes(b"half")
    dead.journal.close()
    assert salvage(dead.directory)
    assert dead.standing() == {"name": b"content"}
    assert (dead.copies / "1-10000000001-1").exists()


def test_recovery_is_noted(dead: Dead) -> None:
    """A second one, after a kill, has nothing to do again."""
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    dead.recover()
    (dead.out / "name").unlink()  # by somebody, in between
    assert salvage(dead.directory)
    assert dead.standing() == {}
    kinds = [record.value[0] for record in read_journal(dead.directory / JOURNAL_NAME)[2] if record.kind == "op"]
    assert kinds == ["create", "commit", "ready", "going", "saved"]


def test_output_is_gone(dead: Dead, expect_warnings: Expect) -> None:
    """Nothing is made in a place where a file system is not mounted."""
    expect_warnings("outputs of a dead job stay in ")
    inode = dead.create(b"name")
    dead.close(inode, b"content")
    dead.journal.close()
    base = dead.out.parent / "shared"
    owner, _, records = read_journal(dead.directory / JOURNAL_NAME)
    kept = list(records)
    (dead.directory / JOURNAL_NAME).unlink()
    journal = Journal.make(dead.directory / JOURNAL_NAME, Owner("dead", 0, str(base / "run"), owner.copies))
    for record in kept:
        journal.note(record.kind, record.value, must=True)
    journal.close()
    assert not salvage(dead.directory)
    assert not base.exists()
    base.mkdir()
    assert salvage(dead.directory)
    assert (base / "run" / "name").read_bytes() == b"content"


# --- files that the native engine has created (native/outputs/engine_creates.h) ---


def test_files_that_the_engine_has_created(dead: Dead) -> None:
    """Closed, unclosed and empty ones, and one that it was about to note."""
    folder = dead.did("create", ROOT, b"folder", FOLDER, 1, 0, True)
    closed, left, empty = (
        dead.did("create", folder, name, FILE, 1, 0, True) for name in (b"closed", b"open", b"empty")
    )
    for inode in (closed, left, empty, empty + 1):
        dead.object(inode).touch()
    dead.close(closed, b"content")
    dead.object(left).write_bytes(b"half")
    assert dead.recover() == {"folder/closed": b"content", "folder/open.unfinished": b"half"}


def test_content_with_a_number_that_nobody_tells_of(dead: Dead, expect_warnings: Expect) -> None:
    """The end of the journal is lost: what it told of stays."""
    expect_warnings(r"1 contents in .* have no name", r"1 outputs of a dead job could not be saved")
    folder = dead.did("create", ROOT, b"folder", FOLDER, 1, 0, True)
    dead.object(folder + 1).write_bytes(b"whose?")
    dead.journal.close()
    assert not salvage(dead.directory)
    assert dead.object(folder + 1).read_bytes() == b"whose?"


def test_what_another_node_has_closed_is_renamed(dead: Dead) -> None:
    """It stands in ``--output`` as that node has said: the deciding node, which gave it its name, gives it the next."""
    folder = dead.did("create", ROOT, b"folder", FOLDER, 1, 0, True)
    (dead.out / "folder").mkdir()
    dead.did("saved", [[folder, ROOT, b"folder", 0, 0]])
    file = dead.did("create", folder, b"old", FILE, 1, 1, True)
    dead.did("commit", file, 7, 2_000_000_000, 1)
    (dead.out / "folder/old").write_bytes(b"content")
    os.utime(dead.out / "folder/old", ns=(2_000_000_000, 2_000_000_000))
    dead.did("saved", [[file, folder, b"old", 1, 0]])
    dead.did("rename", folder, b"old", folder, b"new", True, 3)
    assert dead.recover() == {"folder/new": b"content"}


def test_a_journal_of_another_version(dead: Dead, expect_warnings: Expect) -> None:
    """It is not guessed at: what it tells of stays where it is."""
    expect_warnings(r"outputs of a dead job stay in .* was written by another version of FanStore")
    dead.object(dead.did("create", ROOT, b"name", FILE, 1, 0, True)).write_bytes(b"content")
    dead.journal.close()
    journal = dead.directory / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes().replace(b'"format": 2', b'"format": 1', 1))
    assert not salvage(dead.directory)
    assert [path.read_bytes() for path in (dead.directory / CONTENTS_NAME).iterdir()] == [b"content"]
