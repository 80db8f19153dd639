"""What must stand in ``--output`` after a crash, by the ledger of a program (output_program.py).

Owns the meaning of the promises: what was synced is there, what is there is whole, what was closed comes with the
recovery. Knows nothing of mounts. Paths are relative to the program's directory.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from output_program import identity

UNFINISHED = ".unfinished"


@dataclass
class Promise:
    """One of these contents must stand under one of these names.

    ``bound``: it is about what another file had there that was replaced, and ends when the file gets another name.
    """

    names: set[str]
    contents: set[str]
    bound: bool = False


@dataclass
class File:
    """A file of the program.

    Attributes:
        closed: what it may contain once recovered; more than one if a call was under way. Empty: never closed.
        is_open: it was being written: its name may still have what it had before, or nothing.
        promises: what fsync has promised.
        history: all contents that were ever closed or synced.
    """

    closed: set[str] = field(default_factory=set)
    is_open: bool = False
    promises: list[Promise] = field(default_factory=list)
    history: set[str] = field(default_factory=set)

    def had(self) -> set[str]:
        return self.closed | {content for promise in self.promises for content in promise.contents}


class Model:
    """All files and directories of a program, as far as its ledger tells.

    Attributes:
        files, folders: by path. unsure: paths that may be there or not, since a call was under way.
        ever: by path, all contents that were closed or synced under it.
        recent: the contents that were closed last, the last one last. errors: when (time.monotonic), and what.
    """

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.folders: set[str] = set()
        self.unsure: set[str] = set()
        self.ever: dict[str, set[str]] = {}
        self.recent: list[str] = []
        self.errors: list[tuple[float, str]] = []

    # --- the ledger ---

    def read(self, ledger: Path) -> int:
        """Take note of what was done; how many calls."""
        lines = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
        for position, (state, *words) in enumerate(lines):
            if state == "error":
                self.errors.append((words[0], words[1]))
            elif state == "end":
                getattr(self, "_" + words[0])(*words[1:])
            elif not any(line == ["end", *words] for line in lines[position + 1 : position + 2]):
                getattr(self, "_begun_" + words[0])(*words[1:])
        return len(lines)

    def _start(self) -> None:
        """The directory of the program is there."""

    def _all(self) -> None:
        """The program had done all that it wanted."""

    def _create(self, name: str) -> None:
        self.files.setdefault(name, File()).is_open = True

    def _begun_create(self, name: str) -> None:
        if name not in self.files:
            self.unsure.add(name)
        self._create(name)

    def _known(self, name: str, content: str) -> File:
        file = self.files[name]
        self.ever.setdefault(name, set()).add(content)
        file.history.add(content)
        for promise in file.promises:
            promise.contents.add(content)
        return file

    def _sync(self, name: str, content: str) -> None:
        file = self._known(name, content)
        file.closed = {content}
        file.promises = [Promise({name}, {content})]

    def _begun_sync(self, name: str, content: str) -> None:
        file = self._known(name, content)
        file.closed = file.closed | {content}

    def _close(self, name: str, content: str) -> None:
        file = self._known(name, content)
        file.closed = {content}
        file.is_open = False
        self.recent.append(content)

    def _begun_close(self, name: str, content: str) -> None:
        file = self._known(name, content)
        file.closed = file.closed | {content}

    def _utime(self, name: str) -> None:
        """Changes no content."""

    _begun_utime = _utime

    def _unlink(self, name: str) -> None:
        del self.files[name]

    def _begun_unlink(self, name: str) -> None:
        self.unsure.add(name)
        self.files[name].promises = []

    def _mkdir(self, name: str) -> None:
        self.folders.add(name)

    def _begun_mkdir(self, name: str) -> None:
        self.unsure.add(name)

    def _rmdir(self, name: str) -> None:
        self.folders.remove(name)

    def _begun_rmdir(self, name: str) -> None:
        self.folders.remove(name)
        self.unsure.add(name)

    def _moves(self, old: str, new: str) -> dict[str, str]:
        """Files that get another path by a rename."""
        return {path: new + path[len(old) :] for path in self.files if path == old or path.startswith(old + "/")}

    def _note_move(self, path: str, target: str, by_directory: bool) -> None:
        """A file may stand under a new name, in place of another one; perhaps because its directory was renamed."""
        file, victim = self.files[path], self.files.get(target)
        if not by_directory:
            file.promises = [promise for promise in file.promises if not promise.bound]
        for promise in file.promises:
            promise.names.add(target)
        # ``--output`` follows later: what the file had before may have been moved there as well.
        self.ever.setdefault(target, set()).update(file.history)
        if by_directory:
            self.ever[target] |= self.ever.get(path, set())
        if victim is not None and victim.promises:
            names = {target}.union(*(promise.names for promise in victim.promises))
            file.promises.append(Promise(names, victim.had() | file.had(), bound=True))

    def _rename(self, old: str, new: str) -> None:
        moves = self._moves(old, new)
        for path, target in moves.items():
            self._note_move(path, target, path != old)
        moved = {target: self.files.pop(path) for path, target in moves.items()}
        self.files.update(moved)
        folders = {path for path in self.folders if path == old or path.startswith(old + "/")}
        self.folders = (self.folders - folders) | {new + path[len(old) :] for path in folders}

    def _begun_rename(self, old: str, new: str) -> None:
        """All that is certain is that one of the two is there: nothing is asked of either but to be whole."""
        for path, target in self._moves(old, new).items():
            victim = self.files.get(target)
            self._note_move(path, target, path != old)
            self.unsure |= {path, target}
            if victim is not None:
                victim.closed |= self.files[path].closed
                names = {target}.union(*(promise.names for promise in victim.promises))
                victim.promises = [Promise(names, victim.had() | self.files[path].had())] if victim.promises else []
        folders = {path for path in self.folders if path == old or path.startswith(old + "/")}
        self.unsure |= folders | {new + path[len(old) :] for path in folders}
        self.folders -= folders

    # --- the promises ---

    def check_killed(self, directory: Path) -> list[str]:
        """What is wrong in ``--output`` right after the kill."""
        there = contents(directory)
        wrong = [
            f"{path} in {directory} is {content}, which it never was: {sorted(self.ever.get(path, ()))}"
            for path, content in there.items()
            if content not in self.ever.get(path, ()) and not path.endswith(UNFINISHED)
        ]
        for path, file in self.files.items():
            for promise in file.promises:
                if not any(there.get(name) in promise.contents for name in promise.names):
                    wrong.append(f"{path} was synced, but {promise} is not kept: {there.get(path)}")
        return wrong

    def check_recovered(self, directory: Path, last: int) -> list[str]:
        """What is wrong after the recovery; ``last``: how many of the last closes may not have been heard of."""
        there, folders = contents(directory), folders_of(directory)
        wrong = self.check_killed(directory)
        unheard = set(self.recent[-last:]) if last else set()
        for path, file in self.files.items():
            found = there.get(path)
            rescued = there.get(path + UNFINISHED)
            if not file.closed or path in self.unsure or found in file.closed:
                continue
            if file.is_open and found in {None, *self.ever.get(path, ())}:
                continue  # what it had is overwritten
            if rescued in file.closed & unheard:
                continue
            wrong.append(f"{path} must be {sorted(file.closed)}, but is {found} (unfinished: {rescued})")
        for path in there.keys() - self.files.keys() - self.unsure:
            name = path.removesuffix(UNFINISHED)
            file = self.files.get(name, File(is_open=name in self.unsure))
            if name == path:
                wrong.append(f"{path} should not be there")
            elif not file.is_open and name not in self.unsure and there[path] not in unheard:
                wrong.append(f"{path} should not be there: {name} was closed")
        if missing := self.folders - self.unsure - folders:
            wrong.append(f"directories are missing: {missing}")
        if extra := folders - self.folders - self.unsure:
            wrong.append(f"directories should not be there: {extra}")
        return wrong

    def begin_again(self, directory: Path) -> None:
        """What stands there now is the state from which another program begins."""
        self.__init__()  # type: ignore[misc]
        self.folders = folders_of(directory)
        for path, content in contents(directory).items():
            self.files[path] = File({content}, False, [Promise({path}, {content})], {content})
            self.ever[path] = {content}


def contents(directory: Path) -> dict[str, str]:
    """All files below a directory, and what is in them."""
    return {
        os.path.relpath(os.path.join(base, name), directory): identity(Path(base, name).read_bytes())
        for base, _, names in os.walk(directory)
        for name in names
    }


def folders_of(directory: Path) -> set[str]:
    """All directories below a directory."""
    walk = os.walk(directory)
    return {os.path.relpath(os.path.join(base, name), directory) for base, names, _ in walk for name in names}
