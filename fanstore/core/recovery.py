"""What a killed job left on this node's disk goes to where it belongs.

Owns the second half of a life that ended too early: reads the journal of a dead job (journal.py), finds the contents
that do not stand in its ``--output`` yet, and copies them there. Content that was being written when the job died gets
UNFINISHED behind its name, since nobody has closed it; so does content whose name has something newer by now. Used
before the directory of a dead job is removed (joblock.py), in a worker thread: blocks.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from fanstore.core.journal import JOURNAL_NAME, read_journal
from fanstore.core.objects import name_of
from fanstore.core.outputtree import Output, OutputTree, RefusedError
from fanstore.core.shelf import Shelf
from fanstore.errors import FanstoreError
from fanstore.units import format_bytes

log = logging.getLogger(__name__)

#: The directory of contents, in that of a job.
OBJECTS_NAME = "outputs"
#: Behind the name of a file that was not closed when its job died.
UNFINISHED = ".unfinished"


class _Dataset:
    """The directories of the dataset that the journal mentions; all that is needed of it."""

    def __init__(self) -> None:
        self.paths: dict[int, bytes] = {}

    def child(self, parent: int, name: bytes) -> int | None:
        return None

    def is_directory(self, inode: int) -> bool:
        return inode in self.paths

    def path(self, inode: int) -> bytes:
        return self.paths[inode]


@dataclass
class Recovered:
    """What was done for one dead job: files and bytes that stand in ``--output`` now, and what could not be."""

    files: int = 0
    bytes: int = 0
    unfinished: int = 0
    failed: int = 0


def salvage(directory: Path) -> bool:
    """Save what the dead job of this directory has not; whether the directory may be removed."""
    journal = directory / JOURNAL_NAME
    if not journal.exists():
        return True
    try:
        result = _recover(directory, journal)
    except (FanstoreError, OSError) as error:
        log.warning("outputs of a dead job stay in %s: %s", directory / OBJECTS_NAME, error)
        return False
    if result.files or result.unfinished:
        log.info(
            "saved %d outputs (%s) of a dead job, and %d more that it had not closed ('%s' behind the name)",
            result.files,
            format_bytes(result.bytes),
            result.unfinished,
            UNFINISHED,
        )
    if result.failed:
        log.warning("%d outputs of a dead job could not be saved and stay in %s", result.failed, directory)
    return result.failed == 0


def _recover(directory: Path, journal: Path) -> Recovered:
    owner, records = read_journal(journal)
    result = Recovered()
    if not owner.output:
        return result  # --scratch: they were to end with their job
    dataset = _Dataset()
    tree = OutputTree(dataset)
    for kind, value in records:
        if kind == "dir":
            dataset.paths[value[0]] = value[1]
        elif kind == "op":
            try:
                tree.apply(value)
            except RefusedError as error:
                log.debug("an operation of the journal cannot be done again: %s", error)
    shelf = Shelf(Path(owner.output), owner.copies)
    unsaved = [output for output in tree.unsaved() if output.place is not None]
    if not unsaved and not any((directory / OBJECTS_NAME).iterdir()):
        return result
    shelf.open()
    for output in sorted(unsaved, key=lambda item: len(tree.path(item.place)) if item.place else 0):
        if output.is_directory:
            shelf.make_parents(tree.path(output.place) + b"/x" if output.place else b"x")
        elif not output.is_file and output.place is not None:
            path = tree.path(output.place)
            shelf.make_parents(path)
            shelf.make_symlink(output.target, path, output.mtime_ns, f"{output.inode:x}-recovered")
    for output in list(tree.outputs.values()):
        if output.is_file and output.place is not None and output.holder == owner.rank:
            _recover_file(directory / OBJECTS_NAME, tree, shelf, output, result)
    _remove_old_names(tree, shelf)
    shelf.close()
    return result


def _recover_file(objects: Path, tree: OutputTree, shelf: Shelf, output: Output, result: Recovered) -> None:
    """Copy one content, unless it stands already just as it is."""
    assert output.place is not None
    try:
        status = os.stat(objects / name_of(output.inode))
    except FileNotFoundError:
        return
    as_known = output.version > 0 and (status.st_size, status.st_mtime_ns) == (output.size, output.mtime_ns)
    stands = output.standing is not None and output.standing.version == output.version
    if (as_known and stands and output.is_saved()) or (status.st_size == 0 and not as_known):
        return
    path = tree.path(output.place)
    name = f"{output.inode:x}-recovered"
    try:
        if as_known and _has_newer(shelf, path, output.mtime_ns, stands):
            as_known = False
        if not as_known:
            path += os.fsencode(UNFINISHED)
        shelf.make_parents(path)
        source = os.open(objects / name_of(output.inode), os.O_RDONLY | os.O_CLOEXEC)
        try:
            shelf.copy_in(source, status.st_size, name)
        finally:
            os.close(source)
        shelf.publish(name, path, output.mode, status.st_mtime_ns, output.xattrs)
        shelf.sync([path])
    except OSError as error:
        log.warning("cannot save %s: %s", os.fsdecode(shelf.path(path)), error.strerror or error)
        result.failed += 1
        return
    if as_known:
        result.files += 1
        result.bytes += status.st_size
    else:
        result.unfinished += 1


def _has_newer(shelf: Shelf, path: bytes, mtime_ns: int, stands: bool) -> bool:
    """Has somebody else put something newer there since?"""
    try:
        return not stands and os.lstat(shelf.path(path)).st_mtime_ns > mtime_ns
    except OSError:
        return False


def _remove_old_names(tree: OutputTree, shelf: Shelf) -> None:
    """Names in ``--output`` of what was renamed or removed before the job died."""
    for place, inode in list(tree.standing.items()):
        output = tree.outputs[inode]
        if output.place == place or output.is_directory:
            continue
        path = tree.standing_path(place)
        if output.place is not None and shelf.exists(path):
            new = tree.path(output.place)
            if not shelf.exists(new):
                shelf.make_parents(new)
                shelf.rename(path, new)
                continue
        if tree.lookup(*place) is None:
            shelf.remove(path, directory=False)
