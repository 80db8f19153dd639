"""A synthetic name space of ImageNet's shape: as columns for the project's own index writer, and as plain rows.

Owns what is in the name space; how fast it loads is measured by index_load.py, which uses this module.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fanstore.format.index import CHUNK_RECORD, NO_PARTITION
from fanstore.format.indexwriter import write_index

CLASSES = 1000
#: Part of the files that is in train/, as in ImageNet; the rest is in val/.
_TRAIN_SHARE = 0.96
_FILE_BYTES = 107_000
_PARTITION_BYTES = 1 << 30
_MTIME_NS = 1_700_000_000_123_456_789


@dataclass(frozen=True)
class Namespace:
    """All columns of an index, and the names as a list.

    Attributes:
        names: one per entry, in entry order; empty for the root.
        columns: what ``write_index`` takes.
        files, directories: counts; the root is not counted.
    """

    names: list[bytes]
    columns: dict[str, npt.NDArray[np.generic]]
    files: int
    directories: int

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Numbers of every entry but its name: what a program would keep per file."""
        kept = [
            self.columns[tag].tolist()
            for tag in ("parent", "mode", "mtime", "size", "part", "offset", "stored", "codec", "checksum")
        ]
        return zip(*kept, strict=True)

    def write_index(self, path: Path) -> int:
        """As index.fsx; returns its length."""
        with path.open("wb") as file:
            return write_index(file, self.columns)[0]

    def write_rows(self, path: Path) -> None:
        """As lines of text: the name, then the numbers."""
        with path.open("wb") as file:
            for name, row in zip(self.names, self.rows(), strict=True):
                file.write(b"%s\t%s\n" % (name, b"\t".join(b"%d" % number for number in row)))


def _listing(files: int) -> tuple[list[bytes], list[int]]:
    """Names and parents in breadth-first order: /, train, val, their classes, the files of each class."""
    names = [b"", b"train", b"val"]
    parents = [0, 0, 0]
    for half in (1, 2):
        names += [b"n%08d" % number for number in range(CLASSES)]
        parents += [half] * CLASSES
    train_files = round(files * _TRAIN_SHARE)
    for start, total, pattern in (
        (3, train_files, b"n%08d_%06d.JPEG"),
        (3 + CLASSES, files - train_files, b"v%05d_%08d.JPEG"),
    ):
        for number in range(CLASSES):
            here = total // CLASSES + (number < total % CLASSES)
            names += [pattern % (number, item) for item in range(here)]
            parents += [start + number] * here
    return names, parents


def synthetic(files: int, seed: int = 1) -> Namespace:
    """``files`` files in 2,002 directories."""
    chance = np.random.default_rng(seed)
    names, parents = _listing(files)
    entries = len(names)
    folders = entries - files  # the root among them; they come first
    parent = np.array(parents, dtype=np.uint32)
    is_file = np.arange(entries) >= folders
    count = np.bincount(parent[1:], minlength=entries).astype(np.uint32)
    first = np.where(count > 0, np.concatenate(([1], 1 + np.cumsum(count)[:-1])), 0)
    subfolders = np.bincount(parent[1:folders], minlength=entries)
    size = np.where(is_file, np.maximum(1, chance.normal(_FILE_BYTES, _FILE_BYTES / 3, entries)), 0).astype(np.uint64)
    # Members as in a tar file: a header, the content, padding to 512 bytes; cut into partitions of about 1 GiB.
    member = np.where(is_file, 512 + (size + 511) // 512 * 512, 0).astype(np.uint64)
    end = np.cumsum(member)
    partition = (end - member) // _PARTITION_BYTES
    starts = np.zeros(int(partition[-1]) + 2, dtype=np.uint64)
    np.maximum.at(starts[1:], partition[folders:].astype(np.int64), end[folders:])
    lengths = np.diff(starts)
    offset = end - member + 512 - starts[partition.astype(np.int64)]
    columns: dict[str, npt.NDArray[np.generic]] = {
        "parent": parent,
        "nameoff": np.cumsum([0, *map(len, names)], dtype=np.uint64),
        "mode": np.where(is_file, stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755).astype(np.uint32),
        "mtime": np.full(entries, _MTIME_NS, dtype=np.int64) + np.arange(entries),
        "size": size,
        "part": np.where(is_file, partition, NO_PARTITION).astype(np.uint32),
        "offset": np.where(is_file, offset, 0).astype(np.uint64),
        "stored": size,
        "codec": np.zeros(entries, dtype=np.uint32),
        "checksum": np.where(is_file, chance.integers(1, 2**63, entries, dtype=np.uint64), 0).astype(np.uint64),
        "inode": np.arange(entries, dtype=np.uint32),
        "nlink": np.where(is_file, 1, 2 + subfolders).astype(np.uint32),
        "first": np.where(is_file, 0, first).astype(np.uint32),
        "count": np.where(is_file, 0, count).astype(np.uint32),
        "names": np.frombuffer(b"".join(names), dtype=np.uint8),
        "links": np.zeros(0, dtype=np.uint8),
        "chunks": np.zeros(0, dtype=CHUNK_RECORD),
        "parts": lengths,
    }
    return Namespace(names, columns, files, folders - 1)
