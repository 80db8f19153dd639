"""--update: what of a prepared dataset still is as its sources have it, and what must be written. Reads no content.

A file is as it was if its source is, and it has the same path, type, mode, size, modification time and further names.
Of a tar file, only one that was not written to since then counts: members often have no times of their own. Used by
build.py; arithmetic on the scanned table and the index of the dataset.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fanstore.format.codec import CHUNK_BYTES, NONE
from fanstore.format.index import CHUNK_RECORD
from fanstore.format.manifest import Garbage, SourceInfo
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import is_address
from fanstore.prep.assemble import Kept
from fanstore.prep.pack import PACKED
from fanstore.prep.plan import has_content
from fanstore.prep.table import Table

_TAR_BLOCK = 512
_I8 = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Changes:
    """What an update does.

    Attributes:
        kept: what stays where it is. wanted: which entries of the table are to be packed, directories left aside.
        added, changed, removed: files and links. directories: whether one of them is new, gone, or has other
        attributes. kept_files, kept_bytes: content that is not read again.
        garbage: as it will be, but for ``misleading``. former: codec of what a changed name stood for, -1 a directory.
    """

    kept: Kept
    wanted: _Mask
    added: int
    changed: int
    removed: int
    directories: bool
    kept_files: int
    kept_bytes: int
    garbage: Garbage
    former: dict[int, int]

    @property
    def nothing(self) -> bool:
        """The dataset is as the sources are."""
        return not (self.added or self.changed or self.removed or self.directories)

    def garbage_after(self, table: Table, codec_of: npt.NDArray[np.uint32]) -> Garbage:
        """The garbage, now that it is known which codec each entry of the table got.

        Unpacked in order, a member takes the place of an earlier one of its name. Not so if the name was that of a
        directory, or the other way round, or if the old member is compressed, so that its name has a suffix, and the
        new one is not.
        """
        misled = self.garbage.misleading
        for entry, former in self.former.items():
            is_directory = stat.S_ISDIR(int(table.mode[entry]))
            misled += is_directory != (former < 0) or former not in (-1, NONE.number, int(codec_of[entry]))
        return Garbage(self.garbage.members, self.garbage.bytes, misled)


def unchanged_sources(old: Sequence[SourceInfo], new: Sequence[SourceInfo]) -> list[bool]:
    """Which of the new sources the dataset was made from, and may have kept what they have."""
    return [source in old and not is_address(source.path) for source in new]


def compare(old: PreparedDataset, table: Table, known: Sequence[bool]) -> Changes:
    """What has changed since; ``known`` says it of each source, as unchanged_sources does."""
    match, directories, former = _match_names(old, table)
    same = _same_entries(old, table, match) & np.array(known, np.bool_)[table.source]
    reused = _whole_groups(old, table, match, same)
    is_directory = table.is_type(stat.S_IFDIR)
    matched = (match >= 0) & ~is_directory
    kept_entries = np.flatnonzero(has_content(table) & reused)
    changed = np.flatnonzero(matched & ~reused)
    for entry in changed.tolist():
        former[entry] = old.index.codec[int(match[entry])]
    old_rest = np.ones(old.index.entry_count, np.bool_)
    old_rest[match[reused]] = False
    removed = ~_is_directory(old)
    removed[match[matched]] = False
    replaced = sum(1 for codec in former.values() if codec < 0)
    return Changes(
        kept=_kept(old, kept_entries, match),
        wanted=~is_directory & ~reused,
        added=int((~is_directory & (match < 0)).sum()) - replaced,
        changed=len(changed) + replaced,
        removed=int(removed.sum()),
        directories=directories,
        kept_files=len(kept_entries),
        kept_bytes=int(table.size[kept_entries].sum()),
        garbage=_garbage(old, old_rest),
        former=former,
    )


def _match_names(old: PreparedDataset, table: Table) -> tuple[_I8, bool, dict[int, int]]:
    """Of each entry, the old one of the same path (-1: none, or one is a directory and the other is not); whether
    directories differ; and the entries that are a file where a directory was (-1), or the other way round.
    """
    index = old.index
    match = np.full(len(table), -1, np.int64)
    match[0] = 0
    counts = np.bincount(table.parent[1:], minlength=len(table))
    firsts = 1 + np.cumsum(counts) - counts
    modes = table.mode.tolist()
    former: dict[int, int] = {}
    differ = modes[0] != index.mode[0] or int(table.mtime[0]) != index.mtime_ns[0]
    pending = [(0, 0)]
    seen = 1
    while pending:
        directory, before = pending.pop()
        names = {index.name(child): child for child in index.children(before)}
        for entry in range(int(firsts[directory]), int(firsts[directory] + counts[directory])):
            other = names.get(table.name(entry))
            is_directory = stat.S_ISDIR(modes[entry])
            if other is None:
                differ |= is_directory
            elif is_directory != stat.S_ISDIR(index.mode[other]):
                former[entry] = index.codec[other] if is_directory else -1
                differ = True
            else:
                match[entry] = other
                if is_directory:
                    seen += 1
                    differ |= modes[entry] != index.mode[other] or int(table.mtime[entry]) != index.mtime_ns[other]
                    pending.append((entry, other))
    return match, differ or seen != int(_is_directory(old).sum()), former


def _is_directory(old: PreparedDataset) -> _Mask:
    mask: _Mask = (old.index.column("mode").astype(np.uint32) & 0o170000) == stat.S_IFDIR
    return mask


def _same_entries(old: PreparedDataset, table: Table, match: _I8) -> _Mask:
    """Which files and links are like the old entry of their name, each by itself."""
    same = (match >= 0) & ~table.is_type(stat.S_IFDIR)
    for tag, column in (("mode", table.mode), ("mtime", table.mtime), ("size", table.size)):
        same &= old.index.column(tag)[match] == column
    for entry in np.flatnonzero(same & table.is_type(stat.S_IFLNK)).tolist():
        same[entry] = old.index.link_target(int(match[entry])) == table.link_target(entry)
    return same


def _whole_groups(old: PreparedDataset, table: Table, match: _I8, same: _Mask) -> _Mask:
    """Of those, the ones whose further names are the same ones, too."""
    own = table.inode
    inode = old.index.column("inode")[match].astype(np.int64)
    count = np.bincount(own, weights=same, minlength=len(table))
    lowest, highest = np.full(len(table), len(inode) + old.index.entry_count), np.full(len(table), -1)
    np.minimum.at(lowest, own, inode)
    np.maximum.at(highest, own, inode)
    names = old.index.column("nlink")[match].astype(np.int64)
    alike: _Mask = (lowest == highest)[own] & (count == np.bincount(own, minlength=len(table)))[own]
    whole: _Mask = same & alike & (count[own] == names)
    return whole


def _kept(old: PreparedDataset, entries: npt.NDArray[np.intp], match: _I8) -> Kept:
    index = old.index
    before = match[entries]
    results = np.zeros(len(entries), PACKED)
    for tag in ("codec", "offset", "stored", "checksum"):
        results[tag] = index.column(tag)[before]
    records: npt.NDArray[np.void] = index.column("chunks").view(CHUNK_RECORD)
    several = index.column("size").astype(np.int64)[before] > CHUNK_BYTES
    chunks = {
        int(entry): records[index.first[other] : index.first[other] + index.count[other]]
        for entry, other in zip(entries[several].tolist(), before[several].tolist(), strict=True)
    }
    part = index.column("part")[before].astype(np.uint32)
    return Kept(old.manifest.partitions, entries.astype(np.uint32), results, part, chunks)


def _garbage(old: PreparedDataset, rest: _Mask) -> Garbage:
    """What the partitions have for nobody when these old entries are gone; directories are always written again."""
    index = old.index
    mode, inode = index.column("mode").astype(np.uint32), index.column("inode")
    content = rest & ((mode & 0o170000) == stat.S_IFREG) & (inode == np.arange(index.entry_count))
    stored = index.column("stored")[content].astype(np.int64)
    blocks = int(rest.sum()) + int((-(-stored // _TAR_BLOCK)).sum())
    before = old.manifest.garbage or Garbage(0, 0, 0)
    return Garbage(before.members + int(rest.sum()), before.bytes + blocks * _TAR_BLOCK, before.misleading)
