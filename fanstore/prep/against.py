"""Compares a prepared dataset with the source it was made from: names, types, attributes, links and bytes.

Owns the comparison; sources are listed by sources.py, as preparation does. The tree is walked in one thread, contents
are read and compared in several.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from fanstore.errors import CorruptDataError, UsageError
from fanstore.format.codec import CHUNK_BYTES
from fanstore.format.codec_table import CODECS
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import StoredFile, is_address
from fanstore.prep.selection import Selection
from fanstore.prep.sources import (
    DirectorySource,
    Node,
    Source,
    TarSource,
    in_own_folder,
    looks_like_directory,
    read_name,
)
from fanstore.prep.spool import compression_of
from fanstore.progress import Progress
from fanstore.units import format_path

#: Files compared by one task: enough for the cost of a task to vanish among small files.
_FILES_PER_TASK = 64
_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}


@dataclass(frozen=True)
class Difference:
    """``kind`` is 'missing' (only in the source), 'extra' (only in the dataset) or 'different'."""

    kind: str
    path: bytes
    reason: str


@contextmanager
def opened_sources(
    named: Sequence[str], dereference: bool = False, shard_folders: bool = False
) -> Iterator[list[Source]]:
    """The sources of a comparison: directories, perhaps with their links followed, and plain tar files."""
    with ExitStack() as stack:
        sources: list[Source] = []
        for number, given in enumerate(map(read_name, named)):
            path = given.path
            if is_address(path):
                raise UsageError(
                    f"--against takes directories and tar files of this machine, and '{path}' is an address"
                )
            if looks_like_directory(path):
                source: Source = DirectorySource(path, dereference, given.prefix)
            else:
                compression = compression_of(path)
                if compression is not None:
                    raise UsageError(f"'{path}' is compressed with {compression}; unpack it to compare with it")
                source = TarSource(path, path, (in_own_folder(given) if shard_folders else given).prefix)
            stack.callback(source.close)
            if isinstance(source, TarSource):
                source.read_members(number)
            sources.append(source)
        yield sources


def compare(prepared: PreparedDataset, sources: Sequence[Source], jobs: int, progress: Progress) -> list[Difference]:
    """All differences, sorted by path. ``progress`` counts content bytes and files of the dataset."""
    return _Comparison(prepared, sources, progress).run(jobs)


@dataclass
class _Contents:
    """Files whose bytes are to be compared: entry, node and number of the source."""

    files: list[tuple[int, Node, int, bytes]] = field(default_factory=list)


class _Comparison:
    """One run of ``compare``.

    Attributes:
        _differences: appended to by all threads (appending to a list is atomic).
        _inode_of: for each hard-link key of the source, the dataset's inode; _key_of: the other way round.
    """

    def __init__(self, prepared: PreparedDataset, sources: Sequence[Source], progress: Progress) -> None:
        self._prepared = prepared
        self._index: Index = prepared.index
        self._sources = sources
        self._progress = progress
        self._differences: list[Difference] = []
        self._inode_of: dict[tuple[int, int], int] = {}
        self._key_of: dict[int, tuple[int, int] | None] = {}
        self._stop = threading.Event()
        self._partitions = _Partitions(prepared)
        origin = prepared.manifest.origin
        self._chosen = Selection(origin.include, origin.exclude, origin.sample) if origin is not None else Selection()

    def run(self, jobs: int) -> list[Difference]:
        room = threading.BoundedSemaphore(4 * jobs)
        tasks: list[Future[None]] = []
        try:
            with ThreadPoolExecutor(jobs, "compare") as pool:
                try:
                    for batch in self._walk():
                        room.acquire()
                        task = pool.submit(self._compare_contents, batch)
                        task.add_done_callback(lambda _: room.release())
                        tasks = [*(one for one in tasks if not one.done() or one.exception() is not None), task]
                    for one in tasks:
                        one.result()
                except BaseException:
                    self._stop.set()
                    raise
        finally:
            self._partitions.close()
        return sorted(self._differences, key=lambda one: (one.path, one.kind))

    def _note(self, kind: str, path: bytes, reason: str) -> None:
        self._differences.append(Difference(kind, path, reason))

    def _walk(self) -> Iterator[_Contents]:
        """Compare all directories and attributes; what is left to do is read and compared by others."""
        batch = _Contents()
        self._compare_attributes(0, b"", self._sources[0].root())
        pending: deque[tuple[int, bytes, list[int]]] = deque([(0, b"", list(range(len(self._sources))))])
        while pending:
            entry, path, holders = pending.popleft()
            nodes = self._list(path, holders)
            children = {self._index.name(child): child for child in self._index.children(entry)}
            for name in sorted(nodes.keys() | children.keys()):
                below = path + b"/" + name if path else name
                if name not in children and self._left_out(below, nodes[name][0]):
                    continue
                if name not in children:
                    what = " with all below it" if stat.S_ISDIR(nodes[name][0].mode) else ""
                    self._note("missing", below, f"in the source, not in the dataset{what}")
                elif name not in nodes:
                    self._note("extra", below, f"in the dataset, not in the source{self._below(children[name])}")
                else:
                    node, numbers = nodes[name]
                    child = children[name]
                    if not self._compare_attributes(child, below, node):
                        continue
                    if stat.S_ISDIR(node.mode):
                        pending.append((child, below, numbers))
                    elif stat.S_ISREG(node.mode) and self._index.inode[child] == child:
                        batch.files.append((child, node, numbers[0], below))
                        if len(batch.files) >= _FILES_PER_TASK:
                            yield batch
                            batch = _Contents()
        if batch.files:
            yield batch

    def _left_out(self, path: bytes, node: Node) -> bool:
        """Whether something was left out when the dataset was made, or is a directory that may have been left empty."""
        sampled = self._chosen.sample is not None
        return sampled or not self._chosen.takes(path) or (stat.S_ISDIR(node.mode) and bool(self._chosen.include))

    def _list(self, path: bytes, holders: list[int]) -> dict[bytes, tuple[Node, list[int]]]:
        """Entries of one directory in all sources that have it: the first node of a name, and who has it."""
        found: dict[bytes, tuple[Node, list[int]]] = {}
        for number in holders:
            listing = self._sources[number].list_directory(path)
            for name, reason in listing.problems:
                self._note(
                    "different", (path + b"/" + name if path else name) if name else path, f"the source {reason}"
                )
            for node in listing.nodes:
                found.setdefault(node.name, (node, []))[1].append(number)
        return found

    def _below(self, entry: int) -> str:
        """How much an extra directory holds."""
        count, pending = 0, deque([entry])
        while pending:
            one = pending.popleft()
            if stat.S_ISDIR(self._index.mode[one]):
                children = self._index.children(one)
                count += len(children)
                pending.extend(children)
        return f", with {count:,} entries below it" if count else ""

    def _compare_attributes(self, entry: int, path: bytes, node: Node) -> bool:
        """Everything but content; False if there is nothing more to compare."""
        index = self._index
        mode = index.mode[entry]
        if stat.S_IFMT(mode) != stat.S_IFMT(node.mode):
            self._note("different", path, f"{_kind(node.mode)} in the source, {_kind(mode)} in the dataset")
            return False
        if mode != node.mode:
            self._note("different", path, f"mode {node.mode & 0o7777:04o}, in the dataset {mode & 0o7777:04o}")
        if index.mtime_ns[entry] != node.mtime_ns:
            self._note("different", path, f"time {node.mtime_ns} ns, in the dataset {index.mtime_ns[entry]} ns")
        if stat.S_ISDIR(mode):
            return True
        self._compare_links(entry, path, node)
        if stat.S_ISLNK(mode):
            if index.link_target(entry) != node.target:
                self._note("different", path, "another target")
        elif index.size[entry] != node.size:
            self._note("different", path, f"{node.size:,} bytes, in the dataset {index.size[entry]:,}")
            return False
        return True

    def _compare_links(self, entry: int, path: bytes, node: Node) -> None:
        """Two names are one file in the source exactly if they are in the dataset."""
        inode = self._index.inode[entry]
        if node.key is not None:
            other = self._inode_of.setdefault(node.key, inode)
            if other != inode:
                self._note(
                    "different", path, f"not a hard link of {format_path(self._index.path(other))}, as in the source"
                )
        if self._key_of.setdefault(inode, node.key) != node.key or (node.key is None and inode != entry):
            self._note(
                "different", path, f"a hard link of {format_path(self._index.path(inode))}, not so in the source"
            )
        if self._index.nlink[entry] == 1:
            del self._key_of[inode]  # never asked for again: memory for linked files only

    def _compare_contents(self, batch: _Contents) -> None:
        for entry, node, number, path in batch.files:
            if self._stop.is_set():
                return
            try:
                same = self._same_content(entry, node, self._sources[number], path)
            except CorruptDataError as error:
                self._note("different", path, f"damaged in the dataset: {error}")
            except OSError as error:
                self._note("different", path, f"cannot be read: {error.strerror}")
            else:
                if not same:
                    self._note("different", path, "other content")
            self._progress.add(node.size, 1)

    def _same_content(self, entry: int, node: Node, source: Source, path: bytes) -> bool:
        if node.size == 0:
            return True
        with _opened(source, path) as fd:
            base = node.origin if source.is_tar else 0
            for number in range(self._index.chunk_count(entry)):
                if self._stop.is_set():
                    return True
                expected = _read(fd, base + number * CHUNK_BYTES, min(CHUNK_BYTES, node.size - number * CHUNK_BYTES))
                if self._partitions.chunk(entry, number) != expected:
                    return False
        return True


class _Partitions:
    """The partition files, opened when first needed. Any thread; ``_lock`` guards ``_files``."""

    def __init__(self, prepared: PreparedDataset) -> None:
        self._prepared = prepared
        self._files: dict[int, StoredFile] = {}
        self._lock = threading.Lock()

    def chunk(self, entry: int, number: int) -> bytes:
        """Decoded content of one chunk."""
        index = self._prepared.index
        chunk = index.chunk(entry, number)
        stored = self._file(chunk.partition).read(chunk.offset, chunk.stored_bytes)
        return CODECS[index.codec[entry]].decode_chunk(stored, chunk.content_bytes, chunk.first)

    def _file(self, partition: int) -> StoredFile:
        with self._lock:
            if partition not in self._files:
                name = self._prepared.manifest.partitions[partition].file
                self._files[partition] = self._prepared.storage.open(name)
            return self._files[partition]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


@contextmanager
def _opened(source: Source, path: bytes) -> Iterator[int]:
    """A descriptor to read a file of a source from."""
    if not isinstance(source, DirectorySource):
        yield source.fd
        return
    parent, _, name = path.rpartition(b"/")
    directory = source.open_directory(parent)
    try:
        fd = os.open(name, os.O_RDONLY | source.nofollow | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, offset: int, count: int) -> bytes:
    """Up to ``count`` bytes; fewer only at the end of the file."""
    data = os.pread(fd, count, offset)
    while len(data) < count and (more := os.pread(fd, count - len(data), offset + len(data))):
        data += more
    return data


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")
