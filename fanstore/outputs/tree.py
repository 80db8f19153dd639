"""The names of outputs: what was created under the mount next to the dataset, and what stands of it in ``--output``.

Owns a tree that changes by operations only, each of which is applied as a whole or refused with an error number. It is
deterministic: every node of a job applies the same operations in the same order (sequencer.py) and has the same tree,
inode numbers included; the journal (journal.py) is a list of them. Knows nothing of content, disks, FUSE or MPI. Trio
thread only.

An operation is a tuple of plain values, its kind first, so that it travels as it is: see ``OutputTree.apply``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from fanstore.errors import FanstoreError
from fanstore.ids import Inode
from fanstore.outputs.output import FIRST_OUTPUT, SHARED, Going, Output, Place, Standing

#: The directory, in the place of something that stands, of what is out of the way for a moment: it must go from its
#: old name there and cannot have its new one yet. Only in ``--output``; its path there is PARKED_PATH (output_dir.py).
PARKED = 0
PARKED_PATH = b".fanstore-parked"

NAME_BYTES = 255
#: An extended attribute must fit into a message between nodes.
XATTR_BYTES = 32 << 10
PATH_BYTES = 4096
#: So many names are remembered of those that an output has had: the oldest, and the last ones.
TRAIL_MOST = 32

#: What an operation is: its kind, then its arguments.
Operation = Sequence[Any]


class RefusedError(FanstoreError):
    """An operation cannot be done; ``number`` is the errno that says why."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, str(number)))
        self.number = number


class Names(Protocol):
    """The dataset, as far as outputs must know it."""

    def child(self, parent: int, name: bytes) -> int | None:
        """The inode that the dataset has under this name; None if the name is free."""

    def is_directory(self, inode: int) -> bool:
        """Is this a directory of the dataset?"""

    def path(self, inode: int) -> bytes:
        """Where a directory of the dataset is, relative to the root of the mount; empty for the root."""


class Effect(NamedTuple):
    """What an operation has done.

    Attributes:
        result: the inode that it was about.
        appeared, vanished: names; changed: outputs that are to be saved anew; removed: outputs without a name now.
        altered: what has another mode or time now.
    """

    result: int
    appeared: tuple[Place, ...] = ()
    vanished: tuple[Place, ...] = ()
    changed: tuple[int, ...] = ()
    removed: tuple[Output, ...] = ()
    altered: tuple[int, ...] = ()


class OutputTree:
    """All outputs of a job.

    Attributes:
        outputs: by inode number; those that were removed stay until they are gone from ``--output``.
        standing: what stands in ``--output``, by place.
        going: outputs about which something is being done there.
    """

    def __init__(self, dataset: Names) -> None:
        self.outputs: dict[int, Output] = {}
        self.standing: dict[Place, int] = {}
        self.going: set[int] = set()
        self._standing_in: dict[int, set[int]] = {}
        self._dataset = dataset
        self._children: dict[int, dict[bytes, int]] = {}
        self._subdirectories: dict[int, int] = {}
        self._times: dict[int, int] = {}
        self._next = FIRST_OUTPUT
        self._moves = 0
        self._apply: dict[str, Callable[..., Effect]] = {
            "create": self._create,
            "symlink": self._symlink,
            "remove": self._remove,
            "rename": self._rename,
            "commit": self._commit,
            "setattr": self._setattr,
            "setxattr": self._setxattr,
            "removexattr": self._removexattr,
            "found": self._found,
            "ready": self._set_ready,
            "unready": self._unready,
            "going": self._set_going,
            "staying": self._staying,
            "saved": self._saved,
            "unsaved": self._unsaved,
        }

    # --- looking ---

    def get(self, inode: int) -> Output:
        """An output that has a name, or had one."""
        output = self.outputs.get(inode)
        if output is None:
            raise RefusedError(errno.ENOENT)
        return output

    def lookup(self, parent: int, name: bytes) -> Output | None:
        """The output with this name."""
        inode = self._children.get(parent, {}).get(name)
        return None if inode is None else self.outputs[inode]

    def is_mixed(self, directory: int) -> bool:
        """Has this directory of the dataset ever held an output?"""
        return directory in self._times

    def changed_ns(self, directory: int) -> int:
        """When names came to or went from a directory of the dataset; 0 if never."""
        return self._times.get(directory, 0)

    def children(self, directory: int) -> list[Output]:
        """The outputs in a directory, in the order of their inode numbers: new ones come last."""
        return [self.outputs[inode] for inode in sorted(self._children.get(directory, {}).values())]

    def subdirectories(self, directory: int) -> int:
        """How many of the outputs in a directory are directories."""
        return self._subdirectories.get(directory, 0)

    def path(self, place: Place) -> bytes:
        """Where a name is, relative to the root of the mount."""
        return self._path(place, lambda output: output.place)

    def title(self, output: Output) -> str:
        """What an output is called, for people."""
        try:
            return os.fsdecode(self.path(output.place)) if output.place is not None else "a removed output"
        except RefusedError:
            return "an output in a removed directory"

    def standing_path(self, place: Place) -> bytes:
        """Where a name is in ``--output``, whose directories may have other names than those of the mount by now."""
        return self._path(place, lambda output: None if output.standing is None else output.standing.place)

    def _path(self, place: Place, place_of: Callable[[Output], Place | None]) -> bytes:
        """The names from the root to a place; ``place_of`` says where a directory is."""
        parts = [place.name]
        while place.parent >= FIRST_OUTPUT:
            above = place_of(self.get(place.parent))
            if above is None:
                raise RefusedError(errno.ENOENT)
            parts.append(above.name)
            place = above
        top = PARKED_PATH if place.parent == PARKED else self._dataset.path(place.parent)
        return b"/".join(([top] if top else []) + parts[::-1])

    @property
    def next_inode(self) -> int:
        """The number that the next output will have."""
        return self._next

    def standing_in(self, directory: int) -> list[int]:
        """The outputs that stand in a directory in ``--output``, which may have left it here."""
        return sorted(self._standing_in.get(directory, ()))

    def unsaved(self) -> Iterator[Output]:
        """Outputs that do not stand in ``--output`` as they are here."""
        return (output for output in self.outputs.values() if not output.is_saved())

    # --- changing ---

    def apply(self, operation: Operation) -> Effect:
        """Do an operation; RefusedError if it cannot be done, and then nothing has changed.

        create parent name mode mtime_ns rank exclusive |
        symlink parent name target mtime_ns |
        remove parent name directory mtime_ns | rename parent name parent name replace mtime_ns |
        commit inode size mtime_ns rank | setattr inode mode mtime_ns (None: as it is) |
        setxattr inode name value | removexattr inode name |
        found parent name mode mtime_ns size target | ready [[inode version file] ...] | unready inode file |
        going [[inode parent name version meta file] ...] | staying inode |
        saved [[inode parent name version meta] ...] | unsaved inode
        """
        kind, *arguments = operation
        return self._apply[kind](*arguments)

    def _directory(self, inode: int) -> None:
        """The inode must be a directory in which names can be made."""
        if inode < FIRST_OUTPUT:
            if not self._dataset.is_directory(inode):
                raise RefusedError(errno.ENOTDIR)
            return
        output = self.get(inode)
        if not output.is_directory:
            raise RefusedError(errno.ENOTDIR)
        if output.place is None:
            raise RefusedError(errno.ENOENT)

    def _free(self, place: Place) -> None:
        """The name must be good, and neither the dataset's nor an output's."""
        self._directory(place.parent)
        if len(place.name) > NAME_BYTES:
            raise RefusedError(errno.ENAMETOOLONG)
        if self._dataset.child(place.parent, place.name) is not None or self.lookup(*place) is not None:
            raise RefusedError(errno.EEXIST)

    def _own(self, place: Place) -> Output:
        """The output with this name; a name of the dataset cannot be changed."""
        self._directory(place.parent)
        if self._dataset.child(place.parent, place.name) is not None:
            raise RefusedError(errno.EROFS)
        output = self.lookup(*place)
        if output is None:
            raise RefusedError(errno.ENOENT)
        return output

    def _touch(self, directory: int, mtime_ns: int) -> None:
        if directory < FIRST_OUTPUT:
            self._times[directory] = mtime_ns
        else:
            self.outputs[directory].mtime_ns = mtime_ns

    def _add(self, place: Place, mode: int, mtime_ns: int) -> Output:
        inode = Inode(self._next)
        self._next += 1
        output = self.outputs[inode] = Output(inode, place, mode, mtime_ns)
        self._put(output, place)
        self._touch(place.parent, mtime_ns)
        return output

    def _put(self, output: Output, place: Place) -> None:
        """The output gets a name."""
        self._move(output, place)
        output.since = output.moved
        self._children.setdefault(place.parent, {})[place.name] = output.inode
        if output.is_directory:
            self._subdirectories[place.parent] = self._subdirectories.get(place.parent, 0) + 1

    def _take_away(self, output: Output) -> Place:
        """The output loses its name."""
        place = output.place
        assert place is not None
        del self._children[place.parent][place.name]
        if output.is_directory:
            self._subdirectories[place.parent] -= 1
        self._move(output, None)
        return place

    def _move(self, output: Output, place: Place | None) -> None:
        output.place = place
        self._moves += 1
        output.moved = self._moves
        if output.trail and output.trail[-1][1] is None:
            output.trail.pop()  # it lost its old name for a new one
        if output.standing is not None or output.going is not None:
            output.trail.append((output.moved, place))
            if len(output.trail) > TRAIL_MOST:
                del output.trail[1]
        self._shorten_trail(output)

    def _shorten_trail(self, output: Output) -> None:
        """Forget what it was called before it got the name under which it stands."""
        if output.going is not None:
            return  # it may stand there in a moment
        if output.standing is None or output.standing.place == output.place:
            output.trail.clear()
            return
        for position in reversed(range(len(output.trail))):
            if output.trail[position][1] == output.standing.place:
                del output.trail[: position + 1]
                break
        if not output.trail:
            output.trail.append((output.moved, output.place))

    def _drop_unseen(self, output: Output) -> None:
        if output.place is None and output.standing is None and output.going is None:
            self.outputs.pop(output.inode, None)

    def _create(self, parent: int, name: bytes, mode: int, mtime_ns: int, rank: int, exclusive: bool) -> Effect:
        place = Place(parent, name)
        existing = self.lookup(parent, name)
        if existing is not None and not exclusive and stat.S_ISREG(mode):
            if existing.is_directory:
                raise RefusedError(errno.EISDIR)
            return Effect(existing.inode)
        self._free(place)
        output = self._add(place, mode, mtime_ns)
        output.holder = rank if output.is_file else SHARED
        return Effect(output.inode, appeared=(place,), changed=(output.inode,) if output.is_directory else ())

    def _symlink(self, parent: int, name: bytes, target: bytes, mtime_ns: int) -> Effect:
        place = Place(parent, name)
        if len(target) >= PATH_BYTES:
            raise RefusedError(errno.ENAMETOOLONG)
        self._free(place)
        output = self._add(place, stat.S_IFLNK | 0o777, mtime_ns)
        output.target, output.size = target, len(target)
        return Effect(output.inode, appeared=(place,), changed=(output.inode,))

    def _remove(self, parent: int, name: bytes, directory: bool, mtime_ns: int) -> Effect:
        place = Place(parent, name)
        output = self._own(place)
        if output.is_directory != directory:
            raise RefusedError(errno.ENOTDIR if directory else errno.EISDIR)
        if self._children.get(output.inode):
            raise RefusedError(errno.ENOTEMPTY)
        self._take_away(output)
        self._touch(parent, mtime_ns)
        self._drop_unseen(output)
        return Effect(output.inode, vanished=(place,), changed=(output.inode,), removed=(output,))

    def _rename(self, parent: int, name: bytes, to: int, to_name: bytes, replace: bool, mtime_ns: int) -> Effect:
        old, new = Place(parent, name), Place(to, to_name)
        output = self._own(old)
        self._directory(to)
        if len(to_name) > NAME_BYTES:
            raise RefusedError(errno.ENAMETOOLONG)
        if self._dataset.child(to, to_name) is not None:
            raise RefusedError(errno.EROFS if replace else errno.EEXIST)
        if output.inode in self._above(to):
            raise RefusedError(errno.EINVAL)
        victim = self.lookup(to, to_name)
        if victim is output:
            return Effect(output.inode)
        if victim is not None:
            self._check_victim(output, victim, replace)
            victim.last = self._take_away(victim)
            self._drop_unseen(victim)
        self._take_away(output)
        self._put(output, new)
        if victim is not None:
            output.since = victim.since
        self._touch(parent, mtime_ns)
        self._touch(to, mtime_ns)
        victims = () if victim is None else (victim,)
        changed = (output.inode, *(item.inode for item in victims))
        return Effect(output.inode, (new,), (old, *(new for _ in victims)), changed, victims)

    def _check_victim(self, output: Output, victim: Output, replace: bool) -> None:
        if not replace:
            raise RefusedError(errno.EEXIST)
        if victim.is_directory and not output.is_directory:
            raise RefusedError(errno.EISDIR)
        if output.is_directory and not victim.is_directory:
            raise RefusedError(errno.ENOTDIR)
        if self._children.get(victim.inode):
            raise RefusedError(errno.ENOTEMPTY)

    def _above(self, directory: int) -> Iterator[int]:
        """The directory and those that it is in, as far as they are outputs."""
        while directory >= FIRST_OUTPUT:
            yield directory
            place = self.get(directory).place
            directory = place.parent if place is not None else 0

    def _commit(self, inode: int, size: int, mtime_ns: int, rank: int) -> Effect:
        output = self.get(inode)
        if output.place is None:
            raise RefusedError(errno.ENOENT)
        output.size, output.mtime_ns, output.holder = size, mtime_ns, rank
        output.version += 1
        self._moves += 1
        output.written = self._moves
        return Effect(inode, changed=(inode,))

    def _setattr(self, inode: int, mode: int | None, mtime_ns: int | None) -> Effect:
        output = self.get(inode)
        if mode is not None:
            output.mode = stat.S_IFMT(output.mode) | stat.S_IMODE(mode)
        if mtime_ns is not None:
            output.mtime_ns = mtime_ns
        output.meta += 1
        return Effect(inode, changed=(inode,), altered=(inode,))

    def _setxattr(self, inode: int, name: bytes, value: bytes) -> Effect:
        if len(value) > XATTR_BYTES:
            raise RefusedError(errno.E2BIG)
        output = self.get(inode)
        output.xattrs[name] = value
        output.meta += 1
        return Effect(inode, changed=(inode,))

    def _removexattr(self, inode: int, name: bytes) -> Effect:
        output = self.get(inode)
        if name not in output.xattrs:
            raise RefusedError(errno.ENODATA)
        del output.xattrs[name]
        output.meta += 1
        return Effect(inode, changed=(inode,))

    def _found(self, parent: int, name: bytes, mode: int, mtime_ns: int, size: int, target: bytes) -> Effect:
        """Something that an earlier job left in ``--output``: it stands there already."""
        place = Place(parent, name)
        self._free(place)
        output = self._add(place, mode, mtime_ns)
        output.target, output.size = target, size
        output.version = int(output.is_file)
        self._stand(output, place, output.version, 0)
        return Effect(output.inode, appeared=(place,))

    # --- what stands in --output ---

    def _stand(self, output: Output, place: Place, version: int, meta: int) -> None:
        self._stand_nowhere(output)
        replaced = self.outputs.get(self.standing.get(place, 0))
        if replaced is not None:
            self._stand_nowhere(replaced)
            self._shorten_trail(replaced)
            self._drop_unseen(replaced)
        self.standing[place] = output.inode
        self._standing_in.setdefault(place.parent, set()).add(output.inode)
        output.standing = Standing(place, version, meta)
        self._shorten_trail(output)

    def _stand_nowhere(self, output: Output) -> None:
        if output.standing is None:
            return
        place = output.standing.place
        del self.standing[place]
        self._standing_in[place.parent].discard(output.inode)
        if not self._standing_in[place.parent]:
            del self._standing_in[place.parent]
        output.standing = None

    def _set_ready(self, items: Sequence[tuple[int, int, str]]) -> Effect:
        """There are copies of several outputs; of those that were removed meanwhile they are not wanted any more."""
        changed: list[int] = []
        for inode, version, file in items:
            output = self.outputs.get(inode)
            if output is not None:
                output.ready = (version, file)
                changed.append(inode)
        return Effect(items[0][0], changed=tuple(changed))

    def _unready(self, inode: int, file: str) -> Effect:
        """The copy is not there any more."""
        output = self.get(inode)
        if output.ready is not None and output.ready[1] == file:
            output.ready = None
        return Effect(inode, changed=(inode,))

    def _set_going(self, items: Sequence[tuple[int, int, bytes, int, int, str]]) -> Effect:
        """What is done for several outputs from now on; they stay known until it is done, whatever happens to them."""
        for inode, parent, name, version, meta, file in items:
            output = self.outputs.get(inode)
            if output is not None:
                output.going = Going(Standing(Place(parent, name), version, meta), file)
                self.going.add(inode)
        return Effect(items[0][0])

    def _go_nowhere(self, output: Output) -> None:
        output.going = None
        self.going.discard(output.inode)

    def _staying(self, inode: int) -> Effect:
        """It was not done."""
        output = self.get(inode)
        self._go_nowhere(output)
        self._shorten_trail(output)
        self._drop_unseen(output)
        return Effect(inode, changed=() if output.is_saved() else (inode,))

    def _saved(self, items: Sequence[tuple[int, int, bytes, int, int]]) -> Effect:
        """What was announced for several outputs is done."""
        changed: list[int] = []
        for inode, parent, name, version, meta in items:
            output = self.outputs.get(inode)
            if output is None:
                continue
            self._go_nowhere(output)
            self._stand(output, Place(parent, name), version, meta)
            if output.ready is not None and output.ready[0] <= version:
                output.ready = None
            if not output.is_saved():
                changed.append(inode)
        return Effect(items[0][0], changed=tuple(changed))

    def _unsaved(self, inode: int) -> Effect:
        """It does not stand in ``--output`` any more."""
        output = self.get(inode)
        self._stand_nowhere(output)
        self._go_nowhere(output)
        self._shorten_trail(output)
        self._drop_unseen(output)
        return Effect(inode, changed=() if output.is_saved() else (inode,))

    def validate(self) -> None:
        """Check that names, children and what stands agree; for tests."""
        for directory, names in self._children.items():
            for name, inode in names.items():
                assert self.outputs[inode].place == Place(directory, name)
                assert directory < FIRST_OUTPUT or self.outputs[directory].is_directory
            directories = sum(self.outputs[inode].is_directory for inode in names.values())
            assert directories == self.subdirectories(directory)
        named = {inode for names in self._children.values() for inode in names.values()}
        assert named == {inode for inode, output in self.outputs.items() if output.place is not None}
        for place, inode in self.standing.items():
            standing = self.outputs[inode].standing
            assert standing is not None and standing.place == place
            assert inode in self._standing_in[place.parent]
        for output in self.outputs.values():
            if output.standing is not None and output.going is None:
                assert output.trail or output.standing.place == output.place
                assert not output.trail or output.trail[-1] == (output.moved, output.place)
                assert output.standing.place not in [place for _, place in output.trail]
        assert self.going == {inode for inode, output in self.outputs.items() if output.going is not None}
        assert len(self.standing) == sum(map(len, self._standing_in.values()))
        assert len(self.standing) == sum(output.standing is not None for output in self.outputs.values())


def parents(operation: Operation) -> tuple[int, ...]:
    """The directories whose names an operation changes."""
    match operation[0]:
        case "create" | "symlink" | "remove" | "found":
            return (operation[1],)
        case "rename":
            return (operation[1], operation[3])
        case _:
            return ()
