"""Walks all sources at once and fills the table in index order: breadth first, children sorted by name.

Owns the merging of sources and the recognition of hard links. Nothing is read but directories and tar headers.
"""

from __future__ import annotations

import stat
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fanstore.errors import SourceError
from fanstore.prep.sources import Columns, DirectorySource, Listing, Node, Source
from fanstore.prep.table import Table, TableBuilder
from fanstore.units import format_path

#: More entries than this cannot be numbered in 32 bits.
MAX_ENTRIES = 0xFFFFFFFE
NAME_MAX = 255
_SUFFIX = b".lz4"


@dataclass
class Scan:
    """What was found."""

    table: Table
    skipped: int = 0  #: sockets, pipes and devices
    problems: list[tuple[bytes, str]] = field(default_factory=list)  #: path and reason


def scan(sources: Sequence[Source], tick: Callable[[int], None]) -> Scan:
    """Scan and merge the sources; ``tick`` is called with the number of entries found so far, now and then.

    The same directory in several sources is merged (the first source's attributes win); any other clash is a
    SourceError that names both sources.
    """
    builder = TableBuilder()
    links: dict[tuple[int, int], int] = {}
    problems: list[tuple[bytes, str]] = []
    skipped = 0
    root = sources[0].root()
    builder.add(0, b"", root.mode, root.mtime_ns, 0, root.uid, root.gid, 0, 0, None, True)
    pending: deque[tuple[int, bytes, list[int]]] = deque([(0, b"", list(range(len(sources))))])
    while pending:
        directory, path, holders = pending.popleft()
        only = sources[holders[0]] if len(holders) == 1 else None
        if isinstance(only, DirectorySource):
            columns = only.list_columns(path)
            listed: Listing | Columns = columns
            below = _take_columns(builder, links, directory, holders, columns)
        else:
            listed, below = _take_nodes(builder, links, directory, holders, path, sources)
        skipped += listed.skipped
        problems += [(_join(path, name), reason) for name, reason in listed.problems]
        pending.extend((entry, _join(path, name), held) for entry, name, held in below)
        if len(builder) > MAX_ENTRIES:
            raise SourceError("the sources have more than 4,294,967,294 entries, which is the limit of one dataset")
        tick(len(builder))
    return Scan(builder.freeze(), skipped, problems)


#: A directory to be scanned: its entry, its name, and the sources that have it.
_Below = tuple[int, bytes, list[int]]


def _take_columns(
    builder: TableBuilder, links: dict[tuple[int, int], int], directory: int, holders: list[int], listed: Columns
) -> list[_Below]:
    """The quick way, for a directory of one source: rows are copied as a whole, and only the special ones looked at."""
    if listed.columns is None:
        return []
    base = builder.add_columns(directory, holders[0], listed.columns)
    below: list[_Below] = []
    for number, node in zip(listed.special, listed.nodes(listed.special), strict=True):
        entry = base + number
        if stat.S_ISDIR(node.mode):
            below.append((entry, node.name, holders))
            continue
        first = links.setdefault(node.key, entry) if node.key is not None else entry
        builder.inode[entry] = first
        if first != entry:
            builder.origin[entry] = builder.origin[first]
        elif stat.S_ISLNK(node.mode):
            builder.origin[entry] = builder.add_link(node.target)
    return below


def _take_nodes(
    builder: TableBuilder,
    links: dict[tuple[int, int], int],
    directory: int,
    holders: list[int],
    path: bytes,
    sources: Sequence[Source],
) -> tuple[Listing, list[_Below]]:
    """The general way: the directory's entries come from several sources, or from a tar file."""
    found: list[tuple[Node, int]] = []
    together = Listing([], 0, [])
    for number in holders:
        listing = sources[number].list_directory(path)
        together = Listing([], together.skipped + listing.skipped, together.problems + listing.problems)
        found += [(node, number) for node in listing.nodes]
    found.sort(key=lambda item: item[0].name)
    shared = _merge(found, path, sources) if len(holders) > 1 else {}
    suffixed = {node.name for node, _ in found if node.name.endswith(_SUFFIX)}
    below: list[_Below] = []
    for node, number in found:
        entry = _add(builder, links, directory, node, number, node.name + _SUFFIX in suffixed)
        if stat.S_ISDIR(node.mode):
            below.append((entry, node.name, shared.get(node.name, [number])))
    return together, below


def _join(path: bytes, name: bytes) -> bytes:
    return path + b"/" + name if path and name else path or name


def _merge(found: list[tuple[Node, int]], path: bytes, sources: Sequence[Source]) -> dict[bytes, list[int]]:
    """Keep one node per name of the sorted list ``found``; returns which sources hold each directory."""
    kept: list[tuple[Node, int]] = []
    holders: dict[bytes, list[int]] = {}
    for node, number in found:
        is_directory = stat.S_ISDIR(node.mode)
        if kept and kept[-1][0].name == node.name:
            first, first_number = kept[-1]
            if not (is_directory and stat.S_ISDIR(first.mode)):
                raise SourceError(
                    f"{format_path(_join(path, node.name))} is in both '{sources[first_number].label}' and "
                    f"'{sources[number].label}'; rename one, or leave it out"
                )
            holders[node.name].append(number)
            continue
        kept.append((node, number))
        if is_directory:
            holders[node.name] = [number]
    found[:] = kept
    return holders


def _add(
    builder: TableBuilder, links: dict[tuple[int, int], int], parent: int, node: Node, number: int, suffix_taken: bool
) -> int:
    first = links.get(node.key) if node.key is not None else None
    if first is not None:
        origin = builder.origin[first]
    elif stat.S_ISLNK(node.mode):
        origin = builder.add_link(node.target)
    else:
        origin = node.origin
    plain = suffix_taken or len(node.name) + len(_SUFFIX) > NAME_MAX
    entry = builder.add(
        parent, node.name, node.mode, node.mtime_ns, node.size, node.uid, node.gid, number, origin, first, plain
    )
    if node.key is not None and first is None:
        links[node.key] = entry
    return entry
