"""Which paths of a command line get in each other's way, and must be refused before anything is written.

Owns the one table of all pairs (``RULES``) for all commands, and the comparison: by device and inode, and by the place
within its file system, so that symbolic links and bind mounts lead nobody astray. Used by the session of a mount, by
fanstore-prep and by the command line. The calls look at the paths, and block as long as their file systems like; any
thread. Paths that are not in the table are only read (``fanstore-verify PREPARED --against SRC``), or stand alone
(``fanstore-umount MOUNTPOINT``).
"""

import enum
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fanstore.errors import UsageError
from fanstore.mounttable import Mount, mount_holding, topmost

#: What makes a directory a prepared dataset (docs/format.md).
DATASET_FILES = ("manifest.json", "index.fsx")
#: What the index is called in a dataset that was updated.
UPDATED_INDEX = "index-????????.fsx"


class Role(enum.Enum):
    """What a path is for; the value is how a sentence calls it."""

    PREPARED = "the prepared dataset"
    SHARDS = "the directory of the dataset's tar files"  #: of ``--index-only``: they are elsewhere
    SHARD = "the tar file"
    MOUNTPOINT = "the mount point"
    OUTPUT = "--output"
    LOCAL = "--local"
    TEMPORARY = "the directory for temporary files"  #: in place of ``--local``, if programs may write
    REPORT = "--report"
    METRICS = "--metrics"
    SUCCESS = "--success"
    LOG = "--log"
    PAGE = "--html"
    SOURCE = "the source"
    OUT = "OUT"


class Relation(enum.Flag):
    """How one path lies to another."""

    SAME = enum.auto()
    INSIDE = enum.auto()
    AROUND = enum.auto()


_WORDS = {Relation.SAME: "is", Relation.INSIDE: "lies inside", Relation.AROUND: "contains"}
_ANY = Relation.SAME | Relation.INSIDE | Relation.AROUND
_IN = Relation.SAME | Relation.INSIDE

_CHANGED = "what programs write or remove there would damage the dataset"
_FOREIGN = "nothing but fanstore-prep may write there"
_HIDDEN = "the mount will hide it"


class Rule(NamedTuple):
    """Refuse ``first`` if it lies so to ``second``."""

    first: Role
    second: Role
    refused: Relation
    why: str


#: Files that a command writes.
_FILES = (Role.REPORT, Role.METRICS, Role.SUCCESS, Role.LOG, Role.PAGE)

RULES: Sequence[Rule] = (
    Rule(Role.OUTPUT, Role.PREPARED, _ANY, _CHANGED),
    Rule(Role.OUTPUT, Role.SHARDS, _ANY, _CHANGED),
    Rule(Role.OUTPUT, Role.MOUNTPOINT, _ANY, "outputs would be saved into the mount that they come from"),
    Rule(Role.LOCAL, Role.OUTPUT, _ANY, "files of the job and outputs would mix"),
    Rule(Role.LOCAL, Role.PREPARED, _IN, _FOREIGN),
    Rule(Role.LOCAL, Role.SHARDS, _IN, _FOREIGN),
    Rule(Role.LOCAL, Role.MOUNTPOINT, _IN, _HIDDEN),
    Rule(Role.TEMPORARY, Role.OUTPUT, _IN, "files of the job and outputs would mix, unless you name a --local"),
    Rule(Role.TEMPORARY, Role.MOUNTPOINT, _IN, _HIDDEN),
    Rule(Role.MOUNTPOINT, Role.PREPARED, _IN, _FOREIGN),
    Rule(Role.PREPARED, Role.MOUNTPOINT, _IN, _HIDDEN),
    Rule(Role.SHARDS, Role.MOUNTPOINT, _IN, _HIDDEN),
    *(Rule(file, Role.MOUNTPOINT, _IN, _HIDDEN) for file in _FILES),
    *(Rule(file, Role.PREPARED, _IN, _FOREIGN) for file in _FILES),
    *(Rule(file, Role.SHARD, Relation.SAME, "it would be overwritten") for file in _FILES),
    Rule(Role.PAGE, Role.SOURCE, _IN, "it would become a part of the dataset"),
    *(Rule(*pair, Relation.SAME, "each needs a file of its own") for pair in itertools.combinations(_FILES, 2)),
    Rule(Role.OUT, Role.SOURCE, _IN, "it would be packed into itself"),
    Rule(Role.SOURCE, Role.OUT, _IN, "it would be replaced by the result"),
)

#: Where something is written or made, which must not be in any prepared dataset, used by this command or not.
WRITTEN = (Role.OUTPUT, Role.LOCAL, Role.MOUNTPOINT, Role.OUT, *_FILES)


@dataclass(frozen=True)
class Used:
    """A path of the command line, absolute or not, and what it is for."""

    role: Role
    path: Path


def refuse_overlaps(paths: Iterable[Used]) -> None:
    """UsageError with one sentence if two of these get in each other's way, or one lies in a prepared dataset."""
    table = topmost()
    located: dict[Role, list[tuple[Used, _Location]]] = {role: [] for role in Role}
    for used in paths:
        located[used.role].append((used, _Location(used.path, table)))
    for rule in RULES:
        for (first, here), (second, there) in itertools.product(located[rule.first], located[rule.second]):
            relation = here.relation(there)
            if relation is not None and relation in rule.refused:
                raise UsageError(_sentence(first, relation, second, rule.why))
    for used, here in itertools.chain.from_iterable(located[role] for role in WRITTEN):
        # OUT itself may be replaced with --force. A mount point must be empty, and must not be asked: it may hang.
        itself = [] if used.role in (Role.OUT, Role.MOUNTPOINT) else [here.path]
        for directory in (*itself, *here.path.parents):
            if is_prepared(directory):
                relation = Relation.SAME if directory == here.path else Relation.INSIDE
                raise UsageError(_sentence(used, relation, Used(Role.PREPARED, directory), _FOREIGN))


def _sentence(first: Used, relation: Relation, second: Used, why: str) -> str:
    this, other = (f"{used.role.value} {used.path}" for used in (first, second))
    return f"{this} {_WORDS[relation]} {other}: {why}; name another path"


def is_prepared(directory: Path) -> bool:
    """Whether this is a prepared dataset, as far as can be seen from outside. May block."""
    manifest, index = (os.path.lexists(directory / name) for name in DATASET_FILES)
    return manifest and (index or any(directory.glob(UPDATED_INDEX)))


def resolve(path: Path, table: Mapping[Path, Mount] | None = None) -> Path:
    """Absolute path without symbolic links.

    The last component is not touched when it is a mount point: one look at a dead mount fails, at a silent one hangs.
    ``table`` is what mounttable.topmost() has returned.
    """
    joined = Path(os.getcwd(), path)
    if joined.name in ("", ".."):
        return Path(os.path.realpath(joined))
    candidate = Path(os.path.realpath(joined.parent), joined.name)
    return candidate if candidate in (topmost() if table is None else table) else Path(os.path.realpath(candidate))


#: Device and inode of something that exists, and the names below it of what does not exist yet.
_Inode = tuple[int, int, tuple[str, ...]]
#: A super block, and the path within its file system: the same wherever and however often it is mounted.
_Tree = tuple[str, Path]


class _Location:
    """Where a path leads.

    Attributes:
        path: absolute, without symbolic links.
        own: what identifies it. A directory can be known by either only: a bind mount of a directory has its device and
            inode, but what is above it can be told only by the path within the file system; and that path differs where
            a file system has several names for a directory, as one that does not tell upper from lower case.
        around: the same of itself and of all directories that it lies in.
        below: what is mounted inside it.
    """

    def __init__(self, path: Path, table: Mapping[Path, Mount]) -> None:
        self.path = resolve(path, table)
        self.own: set[_Inode | _Tree] = {_inode(self.path, table), _tree(self.path, table)}
        self.around: set[_Inode | _Tree] = set()
        for each in (self.path, *self.path.parents):
            device, within = _tree(each, table)
            self.around |= {_inode(each, table), *((device, up) for up in (within, *within.parents))}
        self.below = {(mount.device, mount.root) for mount in table.values() if self.path in mount.point.parents}

    def relation(self, other: "_Location") -> Relation | None:
        if self.own & other.own:
            return Relation.SAME
        if self.around & (other.own | other.below):
            return Relation.INSIDE
        if other.around & (self.own | self.below):
            return Relation.AROUND
        return None


def _inode(path: Path, table: Mapping[Path, Mount]) -> _Inode:
    missing: list[str] = []
    for each in (path, *path.parents):
        if each not in table or not table[each].is_fanstore:  # a silent one would not answer
            try:
                status = os.stat(each, follow_symlinks=False)
                return status.st_dev, status.st_ino, tuple(reversed(missing))
            except OSError:
                pass  # not there, or not to be seen: known by its name in what can be seen
        missing.append(each.name)
    raise AssertionError("unreachable: the root directory is always there")


def _tree(path: Path, table: Mapping[Path, Mount]) -> _Tree:
    mount = mount_holding(path, table)
    if mount is None:
        return "", path  # the root of a chroot need not be in the table
    return mount.device, mount.root / path.relative_to(mount.point)
