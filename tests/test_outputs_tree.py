"""The tree of outputs against a model that is too simple to be wrong, and against its own journal. No mount, no disk.

The model knows paths only: a dictionary from path to kind. It says which error number is due, by the rules of POSIX and
by those of the dataset, in the order in which the tree checks them; where two are due, either is right.
"""

import errno
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from fanstore.outputs.journal import Journal, Owner, read_journal
from fanstore.outputs.output import Place
from fanstore.outputs.recovery import Remembered
from fanstore.outputs.tree import OutputTree, RefusedError, parents

T = TypeVar("T")
Model = dict[tuple[bytes, ...], str]

FILE, DIRECTORY, LINK = 0o100644, 0o040755, "link"
NAMES = (b"a", b"b", b"c", b"data", b"file", b"n" * 255)
LONG = b"n" * 256


class Dataset:
    """``data`` (inode 2) with ``file`` (inode 3) and ``sub`` (4) in it."""

    names = {(1, b"data"): 2, (2, b"file"): 3, (2, b"sub"): 4}  # noqa: RUF012 -- never changed
    paths = {1: b"", 2: b"data", 4: b"data/sub"}  # noqa: RUF012 -- never changed

    def child(self, parent: int, name: bytes) -> int | None:
        return self.names.get((parent, name))

    def is_directory(self, inode: int) -> bool:
        return inode in self.paths

    def path(self, inode: int) -> bytes:
        return self.paths[inode]


def fresh() -> Model:
    return {
        (): "dataset directory",
        (b"data",): "dataset directory",
        (b"data", b"file"): "dataset file",
        (b"data", b"sub"): "dataset directory",
    }


def is_directory(kind: str | None) -> bool:
    return kind is not None and kind.endswith("directory")


def _move(table: dict[tuple[bytes, ...], T], old: tuple[bytes, ...], new: tuple[bytes, ...]) -> None:
    """A path, and all below it."""
    for path in [path for path in table if path[: len(old)] == old]:
        table[new + path[len(old) :]] = table.pop(path)


class Pair:
    """The tree and the model, changed together.

    Attributes:
        inodes: by path, of directories.
        journal: notes what was done, as outputs/outputs.py does.
    """

    def __init__(self, journal: Journal) -> None:
        self.tree = OutputTree(Dataset())
        self.model = fresh()
        self.inodes: dict[tuple[bytes, ...], int] = {(): 1, (b"data",): 2, (b"data", b"sub"): 4}
        self.journal = journal
        self._noted: set[int] = set()
        self.done = self.refused = 0

    def apply(self, *operation: Any) -> int:
        """To the tree; its result, or minus the error number."""
        try:
            effect = self.tree.apply(operation)
        except RefusedError as error:
            self.refused += 1
            self.tree.validate()
            return -error.number
        for directory in parents(operation):
            if directory in Dataset.paths and directory not in self._noted:
                self.journal.note("dir", (directory, Dataset.paths[directory]), must=True)
                self._noted.add(directory)
        self.journal.note("op", operation, must=True)
        self.done += 1
        self.tree.validate()
        return effect.result

    def make(self, path: tuple[bytes, ...], mode: int | str, exclusive: bool) -> None:
        kind = self.model.get(path)
        due: set[int] = set()
        if len(path[-1]) > 255:
            due.add(errno.ENAMETOOLONG)
        if kind is not None and (exclusive or mode != FILE or kind.startswith("dataset")):
            due.add(errno.EEXIST)
        elif is_directory(kind):
            due.add(errno.EISDIR)
        parent = self.inodes[path[:-1]]
        if mode == LINK:
            result = self.apply("symlink", parent, path[-1], b"target", 1)
        else:
            result = self.apply("create", parent, path[-1], mode, 1, 0, exclusive)
        self.check(result, due)
        if result > 0 and kind is None:
            self.model[path] = {FILE: "file", DIRECTORY: "directory", LINK: "link"}[mode]
            if mode == DIRECTORY:
                self.inodes[path] = result

    def remove(self, path: tuple[bytes, ...], directory: bool) -> None:
        kind = self.model.get(path)
        due: set[int] = set()
        if kind is None:
            due.add(errno.ENOENT)
        elif kind.startswith("dataset"):
            due.add(errno.EROFS)
        elif is_directory(kind) != directory:
            due.add(errno.ENOTDIR if directory else errno.EISDIR)
        elif any(other[: len(path)] == path for other in self.model if other != path):
            due.add(errno.ENOTEMPTY)
        result = self.apply("remove", self.inodes[path[:-1]], path[-1], directory, 2)
        self.check(result, due)
        if result > 0:
            del self.model[path]
            self.inodes.pop(path, None)

    def rename(self, old: tuple[bytes, ...], new: tuple[bytes, ...], replace: bool) -> None:
        kind, victim = self.model.get(old), self.model.get(new)
        due: set[int] = set()
        if kind is None:
            due.add(errno.ENOENT)
        elif kind.startswith("dataset"):
            due.add(errno.EROFS)
        if len(new[-1]) > 255:
            due.add(errno.ENAMETOOLONG)
        if new[: len(old)] == old and new != old:
            due.add(errno.EINVAL)
        if victim is not None and old != new:
            if not replace:
                due.add(errno.EEXIST)
            elif victim.startswith("dataset"):
                due.add(errno.EROFS)
            if is_directory(victim) and not is_directory(kind):
                due.add(errno.EISDIR)
            if is_directory(kind) and not is_directory(victim):
                due.add(errno.ENOTDIR)
            if any(other[: len(new)] == new for other in self.model if other != new):
                due.add(errno.ENOTEMPTY)
        result = self.apply("rename", self.inodes[old[:-1]], old[-1], self.inodes[new[:-1]], new[-1], replace, 3)
        self.check(result, due)
        if result > 0 and old != new:
            self.model.pop(new, None)
            self.inodes.pop(new, None)
            _move(self.model, old, new)
            _move(self.inodes, old, new)

    def check(self, result: int, due: set[int]) -> None:
        """Refused for one of the reasons that there are, and for none if there is none."""
        if due:
            assert -result in due, f"{result}, and due is {[errno.errorcode[number] for number in due]}"
        else:
            assert result > 0, errno.errorcode[-result]

    def compare(self) -> None:
        """The names of the tree are those of the model."""
        found = {}
        for output in self.tree.outputs.values():
            if output.place is not None:
                kind = "directory" if output.is_directory else "file" if output.is_file else "link"
                found[tuple(self.tree.path(output.place).split(b"/"))] = kind
        assert found == {path: kind for path, kind in self.model.items() if not kind.startswith("dataset")}
        for path, inode in self.inodes.items():
            below = {name[-1] for name, kind in self.model.items() if name[:-1] == path and name}
            names = {output.place.name for output in self.tree.children(inode) if output.place is not None}
            assert names == {name for name in below if Dataset.names.get((inode, name)) is None}
            count = sum(is_directory(kind) for name, kind in self.model.items() if name and name[:-1] == path)
            own = sum(parent == inode and child in Dataset.paths for (parent, _), child in Dataset.names.items())
            assert self.tree.subdirectories(inode) == count - own


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.make(tmp_path / "journal", Owner("job", 0, "/output", ".fanstore-job"))


def step(pair: Pair, random: Random) -> None:
    """One random operation."""

    def path() -> tuple[bytes, ...]:
        paths = [path for path in pair.model if path]
        if random.random() < 0.5:
            return random.choice(paths)
        directories = [path for path, kind in pair.model.items() if is_directory(kind)]
        return (*random.choice(directories), random.choice((*NAMES, *NAMES, LONG)))

    inode = random.choice(list(pair.tree.outputs) or [1 << 40])
    known = pair.tree.outputs.get(inode)
    place = random.choice([Place(1, random.choice(NAMES)), known.place if known and known.place else Place(2, b"a")])
    version, meta = random.randrange(5), random.randrange(5)
    attribute = random.choice((b"user.a", b"user.b"))
    match random.randrange(16):
        case 0 | 1 | 2:
            pair.make(path(), random.choice((FILE, DIRECTORY, LINK)), random.random() < 0.5)
        case 3 | 4:
            pair.remove(path(), random.random() < 0.5)
        case 5 | 6 | 7:
            pair.rename(path(), path(), random.random() < 0.7)
        case 8:
            pair.apply("commit", inode, random.randrange(100), random.randrange(100), random.randrange(3))
        case 9:
            pair.apply("setattr", inode, random.choice((None, 0o600)), random.choice((None, 7)))
        case 10:
            pair.apply("setxattr", inode, attribute, random.randbytes(3))
        case 11:
            pair.apply("removexattr", inode, attribute)
        case 12:
            pair.apply("ready", [[inode, version, f"{inode:x}-{version}"]])
        case 14:
            pair.apply("going", [[inode, *place, version, meta, random.choice(("", f"{inode:x}-{version}"))]])
        case 15:
            pair.apply(*random.choice((("staying", inode), ("unready", inode, f"{inode:x}-{version}"))))
        case 13 if random.random() < 0.7:
            pair.apply("saved", [[inode, *place, version, meta]])
        case _:
            pair.apply("unsaved", inode)


@pytest.mark.parametrize("seed", range(5))
def test_tree_and_model(journal: Journal, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    pair = Pair(journal)
    for _ in range(1500):
        step(pair, random)
        pair.compare()
    journal.close()
    assert pair.done > 400 and pair.refused > 200, "too little of both was tried"

    _, _, records = read_journal(tmp_path / "journal")
    dataset = Remembered()
    again = OutputTree(dataset)
    for kind, value, _ in records:
        if kind == "dir":
            dataset.paths[value[0]] = value[1]
        else:
            again.apply(value)  # nothing is refused that was done once
    again.validate()
    assert again.outputs == pair.tree.outputs
    assert again.standing == pair.tree.standing
    for output in again.outputs.values():
        assert output.place is None or again.path(output.place) == pair.tree.path(output.place)


def test_what_is_refused_changes_nothing(journal: Journal) -> None:
    """In particular, no inode number is used up: the nodes of a job must agree on the next one."""
    with_refusals, without = Pair(journal), OutputTree(Dataset())
    with_refusals.make((b"a",), FILE, exclusive=True)
    with_refusals.make((b"a",), FILE, exclusive=True)
    with_refusals.make((b"data", b"file"), FILE, exclusive=True)
    with_refusals.make((LONG,), DIRECTORY, exclusive=True)
    with_refusals.make((b"b",), FILE, exclusive=True)
    assert with_refusals.refused == 3
    without.apply(("create", 1, b"a", FILE, 1, 0, True))
    without.apply(("create", 1, b"b", FILE, 1, 0, True))
    assert with_refusals.tree.outputs == without.outputs
    journal.close()


def test_end_of_a_journal_that_was_being_written(journal: Journal, tmp_path: Path) -> None:
    """Cut anywhere, it gives the operations that are whole."""
    pair = Pair(journal)
    for name in (b"a", b"b", b"c"):
        pair.make((name,), FILE, exclusive=True)
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    _, start, records = read_journal(tmp_path / "journal")
    ends = [end for kind, _, end in records if kind == "op"]
    assert len(ends) == 3 and ends[-1] == len(whole)
    for length in range(start, len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        _, _, records = read_journal(tmp_path / "cut")
        assert len([kind for kind, _, _ in records if kind == "op"]) == sum(end <= length for end in ends)
