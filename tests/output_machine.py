"""A random user of two directories: a mount that can be written to, and a plain directory that shows what is right.

Owns the rules (hypothesis draws which, and with what), the model of what differs on purpose, and the comparison of both
directories. What differs: the dataset cannot be changed (EROFS), hard links and pipes cannot be made (EPERM). The plain
directory holds a copy of the dataset, so everything else must end alike there: results, error numbers, attributes,
contents. Knows nothing of daemons; used by test_outputs_model.py.
"""

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

#: What an attempt came to: a value, or the name of an error number.
Outcome = tuple[str, object]

NAMES = ("a", "b", "c", "f", "data", "file")
TARGETS = ("a", "f", "a/b", "data/sub", "sub", "file", "no/where")
ACCESS = (os.O_RDWR, os.O_RDWR, os.O_WRONLY, os.O_RDONLY)
FLAGS = (os.O_CREAT, os.O_CREAT | os.O_EXCL, os.O_CREAT | os.O_APPEND, os.O_CREAT | os.O_TRUNC, os.O_TRUNC, 0)
MODES = (0o644, 0o600, 0o664, 0o700, 0o755, 0o777, 0o1777)
BLOCKS = (b"x" * 4096, b"y" * 5000, b"z" * 140_000)
EDGES = (4095, 4096, 4097, 131_072, 300_000)
XATTRS = ("user.one", "user.two")
RENAME_NOREPLACE = 1

#: Somewhere: a number that picks one of what there is now, and a name for something new there, or None for the thing.
Drawn = tuple[int, str | None]
places = st.tuples(st.integers(0, 60), st.sampled_from((None, None, *NAMES)))
handles = st.integers(0, 20)
modes = st.sampled_from(MODES)
offsets = st.one_of(st.integers(0, 300), st.sampled_from(EDGES))
contents = st.one_of(st.binary(max_size=64), st.sampled_from(BLOCKS))
#: Times that no clock shows, so that one which was set can be told from one which is kept.
LAST_SET_NS = 1_500_000_000_000_000_000
times_ns = st.integers(0, LAST_SET_NS)

_libc = ctypes.CDLL(None, use_errno=True)


def attempt(function: Callable[..., object], *arguments: Any, **options: Any) -> Outcome:
    """Do it; its result, or the name of its error."""
    try:
        return ("value", function(*arguments, **options))
    except OSError as error:
        assert error.errno is not None
        return ("error", errno.errorcode[error.errno])


def refused(number: int) -> Outcome:
    return ("error", errno.errorcode[number])


def rename(old: Path, new: Path, replace: bool) -> None:
    """rename(2), or renameat2(2) with RENAME_NOREPLACE, which Python does not have."""
    if replace:
        os.rename(old, new)
    elif _libc.renameat2(-100, bytes(old), -100, bytes(new), RENAME_NOREPLACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write_mapped(fd: int, offset: int, data: bytes) -> int:
    """Write through a shared map, within the size of the file."""
    with mmap.mmap(fd, 0) as area:
        part = data[: max(0, len(area) - offset)]
        area[offset : offset + len(part)] = part
        area.flush()
        return len(part)


@dataclass
class Handle:
    """A file that is open in both directories."""

    plain: int
    mount: int

    def close(self) -> None:
        os.close(self.plain)
        os.close(self.mount)


class FileMachine(RuleBasedStateMachine):
    """The random user.

    Attributes:
        plain, mount: the two directories. dataset: paths of the dataset in them.
        set_ns: times that were set on purpose; a file has one of them in both directories or in none.
        _failed: a difference was found, and the rest means nothing.
    """

    def __init__(self, plain: Path, mount: Path, dataset: frozenset[str]) -> None:
        super().__init__()
        self.plain, self.mount, self.dataset = plain, mount, dataset
        self.handles: list[Handle] = []
        self._failed = False
        found_ns = {os.lstat(plain / path).st_mtime_ns for path in self.dataset}
        self.set_ns = {time_ns for time_ns in found_ns if time_ns <= LAST_SET_NS}

    # --- what there is ---

    @staticmethod
    def walk(root: Path) -> Iterator[str]:
        """The paths of everything below a directory, but for what FanStore keeps there."""
        for directory, directories, files in os.walk(root):
            directories[:] = sorted(name for name in directories if not name.startswith(".fanstore"))
            for name in [*directories, *files]:
                yield os.path.relpath(os.path.join(directory, name), root)

    def place(self, place: Drawn) -> str:
        """What a drawn place means now."""
        number, name = place
        found = sorted(self.walk(self.plain))
        if name is None:
            made = [path for path in found if path not in self.dataset]
            choice = made * 3 + sorted(self.dataset)
            return choice[number % len(choice)]
        directories = ["", *(path for path in found if (self.plain / path).is_dir())]
        return os.path.join(directories[number % len(directories)], name)

    def is_dataset(self, path: str, *, follow: bool) -> bool:
        """Does a path lead to something of the dataset?"""
        full = os.path.join(self.plain, path)
        if not follow:
            full = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
        real = os.path.relpath(os.path.realpath(full) if follow else full, os.path.realpath(self.plain))
        return real in self.dataset

    # --- doing it twice ---

    def check(self, what: str, found: Outcome, expected: Outcome) -> None:
        if found != expected:
            self._failed = True
            raise AssertionError(f"{what}: {found}, and should be {expected}")

    def both(self, function: Callable[..., object], path: str, *arguments: Any, **options: Any) -> Outcome:
        """The same in both directories, with the same outcome."""
        expected = attempt(function, self.plain / path, *arguments, **options)
        found = attempt(function, self.mount / path, *arguments, **options)
        self.check(f"{function.__name__} {path!r} {arguments}", found, expected)
        return found

    def on_mount(self, expected: Outcome, function: Callable[..., object], *arguments: Any) -> None:
        """Only in the mount, where it must be refused."""
        found = attempt(function, *arguments)
        self.check(f"{function.__name__} {arguments}", found, expected)

    def change(self, function: Callable[..., object], path: str, *arguments: Any, follow: bool = True) -> None:
        """A change of something that exists: refused if it is of the dataset."""
        if self.is_dataset(path, follow=follow):
            number = errno.EROFS
            if function is os.truncate and (self.plain / path).is_dir():
                number = errno.EISDIR  # says the kernel, before it asks
            self.on_mount(refused(number), function, self.mount / path, *arguments)
        else:
            self.both(function, path, *arguments, **({} if follow else {"follow_symlinks": False}))

    def by_handle(self, number: int, function: Callable[..., object], *arguments: Any) -> None:
        handle = self.handles[number % len(self.handles)]
        expected = attempt(function, handle.plain, *arguments)
        found = attempt(function, handle.mount, *arguments)
        self.check(f"{function.__name__} {arguments}", found, expected)

    # --- names ---

    @rule(place=places, mode=modes)
    def mkdir(self, place: Drawn, mode: int) -> None:
        self.both(os.mkdir, self.place(place), mode)

    @rule(place=places, properly=st.sampled_from((True, True, False)))
    def remove(self, place: Drawn, properly: bool) -> None:
        """Properly: a directory with rmdir, all else with unlink."""
        path = self.place(place)
        is_directory = (self.plain / path).is_dir() and not (self.plain / path).is_symlink()
        self.rmdir(path) if is_directory == properly else self.unlink(path)

    def rmdir(self, path: str) -> None:
        if self.is_dataset(path, follow=False):
            is_directory = stat.S_ISDIR(os.lstat(self.plain / path).st_mode)
            number = errno.EROFS if is_directory else errno.ENOTDIR
            self.on_mount(refused(number), os.rmdir, self.mount / path)
        else:
            self.both(os.rmdir, path)

    def unlink(self, path: str) -> None:
        if self.is_dataset(path, follow=False):
            is_directory = stat.S_ISDIR(os.lstat(self.plain / path).st_mode)
            number = errno.EISDIR if is_directory else errno.EROFS
            self.on_mount(refused(number), os.unlink, self.mount / path)
        else:
            self.both(os.unlink, path)

    @rule(place=places, to=st.sampled_from(TARGETS))
    def symlink(self, place: Drawn, to: str) -> None:
        def make(path: Path) -> None:
            os.symlink(to, path)

        self.both(make, self.place(place))

    @rule(old=places, new=places, replace=st.booleans())
    def rename(self, old: Drawn, new: Drawn, replace: bool) -> None:
        source, target = self.place(old), self.place(new)
        expected: Outcome | None = None
        if os.path.lexists(self.plain / source):
            changes = [path for path in (source, target) if self.is_dataset(path, follow=False)]
            expected = self._rename_refused(source, target, replace) if changes else None
        if expected is None:
            expected = attempt(rename, self.plain / source, self.plain / target, replace)
        found = attempt(rename, self.mount / source, self.mount / target, replace)
        self.check(f"rename {source!r} {target!r} {replace}", found, expected)

    def _rename_refused(self, source: str, target: str, replace: bool) -> Outcome:
        """What is said to a rename that concerns the dataset: what the kernel finds itself comes before EROFS."""
        old, new = (os.path.realpath((self.plain / path).parent) for path in (source, target))
        if not os.path.isdir(new):
            return attempt(os.rename, self.plain / source, self.plain / target)  # fails, whatever is there
        old, new = (os.path.join(at, Path(path).name) for at, path in ((old, source), (new, target)))
        exists = os.path.lexists(new)
        source_is_directory = stat.S_ISDIR(os.lstat(old).st_mode)
        if exists and not replace:
            return refused(errno.EEXIST)
        if new.startswith(f"{old}/"):
            return refused(errno.EINVAL)
        if old.startswith(f"{new}/"):
            return refused(errno.ENOTEMPTY)
        if old == new:
            return ("value", None)
        if exists and source_is_directory != stat.S_ISDIR(os.lstat(new).st_mode):
            return refused(errno.ENOTDIR if source_is_directory else errno.EISDIR)
        return refused(errno.EROFS)

    @rule(old=places, new=places, function=st.sampled_from((os.link, os.mkfifo)))
    def never(self, old: Drawn, new: Drawn, function: Callable[..., None]) -> None:
        """Hard links and pipes: EPERM, unless something else is wrong as well."""
        source, target = self.place(old), self.place(new)
        paths = (source, target) if function is os.link else (target,)
        expected = self._never(target, function, *(self.plain / path for path in paths))
        self.on_mount(expected, function, *(self.mount / path for path in paths))

    def _never(self, path: str, function: Callable[..., object], *arguments: Any) -> Outcome:
        """What the mount must say to an attempt to make something that it does not have: what is wrong, or EPERM."""
        parent = (self.plain / path).parent
        before_ns = os.stat(parent).st_mtime_ns if parent.is_dir() else 0
        outcome = attempt(function, *arguments)
        if outcome[0] == "error":
            return outcome
        os.unlink(self.plain / path)
        os.utime(parent, ns=(before_ns, before_ns))
        return refused(errno.EPERM)

    # --- attributes ---

    @rule(place=places, mode=modes)
    def chmod(self, place: Drawn, mode: int) -> None:
        self.change(os.chmod, self.place(place), mode)

    @rule(place=places, time_ns=times_ns, follow=st.booleans())
    def utime(self, place: Drawn, time_ns: int, follow: bool) -> None:
        self.set_ns.add(time_ns)

        def set_time(path: Path, follow_symlinks: bool = True) -> None:
            os.utime(path, ns=(time_ns, time_ns), follow_symlinks=follow_symlinks)

        path = self.place(place)
        if not follow and self.is_dataset(path, follow=False):
            self.on_mount(refused(errno.EROFS), set_time, self.mount / path, False)
        else:
            self.change(set_time, path, follow=follow)

    @rule(place=places, size=offsets)
    def truncate(self, place: Drawn, size: int) -> None:
        path = self.place(place)
        if attempt(os.path.getsize, self.plain / path) != ("value", size):  # file systems differ in what that does
            self.change(os.truncate, path, size)

    @rule(place=places, name=st.sampled_from(XATTRS), value=st.binary(max_size=50), flags=st.sampled_from((0, 0, 1, 2)))
    def xattrs(self, place: Drawn, name: str, value: bytes, flags: int) -> None:
        """Set an extended attribute; a short value means: remove it."""
        path = self.place(place)
        if len(value) < 3:
            self.change(os.removexattr, path, name)
        else:
            # With a flag, the question whether it is there comes first.
            self.change(os.setxattr, path, name, value, 0 if self.is_dataset(path, follow=True) else flags)
        if not self.is_dataset(path, follow=True):
            self.both(lambda path: sorted(os.listxattr(path)), path)
            self.both(os.getxattr, path, name)

    @rule(place=places, follow=st.booleans())
    def look(self, place: Drawn, follow: bool) -> None:
        path = self.place(place)
        self.both(lambda path: self.describe(os.stat(path, follow_symlinks=follow)), path)
        self.both(lambda path: sorted(os.listdir(path)), path)
        self.both(os.readlink, path)
        self.both(Path.read_bytes, path)

    def describe(self, status: os.stat_result) -> tuple[object, ...]:
        """What must be alike of two files."""
        mine = status.st_mtime_ns if status.st_mtime_ns in self.set_ns else "kept by the clock"
        if stat.S_ISDIR(status.st_mode):
            return (status.st_mode, mine)
        return (status.st_mode, mine, status.st_size, status.st_nlink)

    # --- files ---

    @rule(place=places, data=contents)
    def save(self, place: Drawn, data: bytes) -> None:
        """What programs do most: make a file anew, or write over one."""
        path = self.place(place)
        if self.is_dataset(path, follow=True) and not (self.plain / path).is_dir():
            self.on_mount(refused(errno.EROFS), Path.write_bytes, self.mount / path, data)
        else:
            self.both(Path.write_bytes, path, data)

    @rule(place=places, access=st.sampled_from(ACCESS), flags=st.sampled_from(FLAGS), mode=modes)
    def open(self, place: Drawn, access: int, flags: int, mode: int) -> None:
        path = self.place(place)
        wanted = access | flags
        exclusive = wanted & os.O_EXCL
        if self.is_dataset(path, follow=not exclusive) and not exclusive:
            changes = access != os.O_RDONLY or flags & os.O_TRUNC
            is_file = not (self.plain / path).is_dir()
            if changes and is_file:
                self.on_mount(refused(errno.EROFS), os.open, self.mount / path, wanted)
                return
        expected = attempt(os.open, self.plain / path, wanted, mode)
        found = attempt(os.open, self.mount / path, wanted, mode)
        if expected[0] == found[0] == "value":
            assert isinstance(expected[1], int) and isinstance(found[1], int)
            self.handles.append(Handle(expected[1], found[1]))
            return
        self.check(f"open {path!r} {wanted:o}", found, expected)

    @precondition(lambda self: self.handles)
    @rule(number=handles)
    def close(self, number: int) -> None:
        self.handles.pop(number % len(self.handles)).close()

    @precondition(lambda self: self.handles)
    @rule(number=handles, data=contents, offset=st.none() | offsets)
    def write(self, number: int, data: bytes, offset: int | None) -> None:
        self.by_handle(number, os.write, data) if offset is None else self.by_handle(number, os.pwrite, data, offset)

    @precondition(lambda self: self.handles)
    @rule(number=handles, data=contents, offset=offsets)
    def write_mapped(self, number: int, data: bytes, offset: int) -> None:
        status = os.fstat(self.handles[number % len(self.handles)].plain)
        if stat.S_ISREG(status.st_mode) and status.st_size > 0:
            self.by_handle(number, write_mapped, offset, data)

    @precondition(lambda self: self.handles)
    @rule(
        number=handles, length=offsets, offset=offsets, whence=st.sampled_from((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END))
    )
    def read(self, number: int, length: int, offset: int, whence: int) -> None:
        self.by_handle(number, os.pread, length, offset)
        if not stat.S_ISDIR(os.fstat(self.handles[number % len(self.handles)].plain).st_mode):
            self.by_handle(number, os.lseek, offset - 100, whence)
            self.by_handle(number, os.read, length)
            self.by_handle(number, lambda fd: self.describe(os.fstat(fd)))

    @precondition(lambda self: self.handles)
    @rule(number=handles, size=offsets)
    def ftruncate(self, number: int, size: int) -> None:
        self.by_handle(number, os.ftruncate, size)

    @precondition(lambda self: self.handles)
    @rule(number=handles)
    def fsync(self, number: int) -> None:
        self.by_handle(number, os.fsync)

    @precondition(lambda self: self.handles)
    @rule(number=handles, mode=modes, time_ns=times_ns, name=st.sampled_from(XATTRS), value=st.binary(max_size=50))
    def change_by_handle(self, number: int, mode: int, time_ns: int, name: str, value: bytes) -> None:
        """Attributes through a descriptor: also of what has no name any more."""
        handle = self.handles[number % len(self.handles)]
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{handle.plain}"), os.path.realpath(self.plain))
        self.set_ns.add(time_ns)

        def set_time(fd: int) -> None:
            os.utime(fd, ns=(time_ns, time_ns))

        changes: tuple[tuple[Callable[..., object], tuple[object, ...]], ...] = (
            (os.fchmod, (mode,)),
            (set_time, ()),
            (os.setxattr, (name, value)),
            (os.removexattr, (name,)),
        )
        for function, arguments in changes:
            if path in self.dataset:
                self.on_mount(refused(errno.EROFS), function, handle.mount, *arguments)
            else:
                self.by_handle(number, function, *arguments)

    # --- all of it ---

    def compare(self) -> None:
        """Both directories are alike, down to the bytes."""
        paths = sorted(self.walk(self.plain))
        self.check("names", ("value", sorted(self.walk(self.mount))), ("value", paths))
        for path in paths:
            self.both(lambda path: self.describe(os.lstat(path)), path)
            if (self.plain / path).is_symlink():
                self.both(os.readlink, path)
            elif (self.plain / path).is_file():
                self.both(Path.read_bytes, path)
            if path not in self.dataset and not (self.plain / path).is_symlink():
                self.both(lambda path: {name: os.getxattr(path, name) for name in os.listxattr(path)}, path)

    def close_all(self) -> None:
        while self.handles:
            self.handles.pop().close()

    def remove_all(self, root: Path) -> None:
        """Back to the dataset."""
        for path in sorted(set(self.walk(root)) - self.dataset, reverse=True):
            is_directory = stat.S_ISDIR(os.lstat(root / path).st_mode)
            (os.rmdir if is_directory else os.unlink)(root / path)

    def finish(self) -> None:
        """Called when everything is closed and compared; for more looks at what there is."""

    def teardown(self) -> None:
        try:
            if not self._failed:
                self.compare()
                self.close_all()
                self.compare()
                self.finish()
        finally:
            self.close_all()
            self.remove_all(self.plain)
            self.remove_all(self.mount)


def churn(machine: FileMachine, random: Random, steps: int) -> None:
    """Many steps without hypothesis: evenly drawn, faster, and the same for the same generator of random numbers."""

    def place() -> Drawn:
        return (random.randrange(61), random.choice((None, None, *NAMES)))

    def offset() -> int:
        return random.choice((random.randrange(300), random.choice(EDGES)))

    def data() -> bytes:
        return random.choice((random.randbytes(random.randrange(64)), random.choice(BLOCKS)))

    def xattr() -> tuple[str, bytes]:
        return random.choice(XATTRS), random.randbytes(random.randrange(50))

    def mode() -> int:
        return random.choice(MODES)

    def time_ns() -> int:
        return random.randrange(LAST_SET_NS)

    def maybe() -> bool:
        return random.random() < 0.5

    names: list[Callable[[], None]] = [
        lambda: machine.mkdir(place(), mode()),
        lambda: machine.remove(place(), random.random() < 0.8),
        lambda: machine.symlink(place(), random.choice(TARGETS)),
        lambda: machine.rename(place(), place(), maybe()),
        lambda: machine.rename(place(), place(), True),
        lambda: machine.never(place(), place(), random.choice((os.link, os.mkfifo))),
        lambda: machine.chmod(place(), mode()),
        lambda: machine.utime(place(), time_ns(), maybe()),
        lambda: machine.truncate(place(), offset()),
        lambda: machine.xattrs(place(), *xattr(), random.choice((0, 0, 1, 2))),
        lambda: machine.look(place(), maybe()),
        lambda: machine.save(place(), data()),
        lambda: machine.save(place(), data()),
        lambda: machine.open(place(), random.choice(ACCESS), random.choice(FLAGS), mode()),
        lambda: machine.open(place(), random.choice(ACCESS), random.choice(FLAGS), mode()),
    ]
    files: list[Callable[[int], None]] = [
        machine.close,
        machine.close,
        lambda number: machine.write(number, data(), random.choice((None, offset()))),
        lambda number: machine.write_mapped(number, data(), offset()),
        lambda number: machine.read(number, offset(), offset(), random.choice((0, 1, 2))),
        lambda number: machine.ftruncate(number, offset()),
        machine.fsync,
        lambda number: machine.change_by_handle(number, mode(), time_ns(), *xattr()),
    ]
    for _ in range(steps):
        if machine.handles and random.random() < 0.35:
            random.choice(files)(random.randrange(21))
        else:
            random.choice(names)()


def new_entries(root: Path, dataset: frozenset[str], *, in_the_end: bool) -> dict[str, tuple[object, ...]]:
    """What was made in a directory, for comparison with where it was saved.

    Directories get their times there only in the end.
    """
    result: dict[str, tuple[object, ...]] = {}
    for path in FileMachine.walk(root):
        full = root / path
        status = os.lstat(full)
        if path in dataset:
            continue
        if stat.S_ISDIR(status.st_mode):
            # Directories are saved with rights enough to save something in them.
            time_ns = status.st_mtime_ns if in_the_end else 0
            result[path] = (status.st_mode | stat.S_IRWXU, time_ns, _xattrs(full))
        elif stat.S_ISLNK(status.st_mode):
            result[path] = (status.st_mode, status.st_mtime_ns, os.readlink(full))
        else:
            result[path] = (status.st_mode, status.st_mtime_ns, full.read_bytes(), _xattrs(full))
    return result


def _xattrs(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}
