"""A prepared dataset as a whole: manifest and index that belong together, and where the partitions are.

Does not read partitions; the sources of the dataset package and prep.verify do. Immutable after open(), any thread.
"""

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fanstore.errors import FormatError
from fanstore.format.checksum import to_hex
from fanstore.format.index import Index
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE, Manifest
from fanstore.format.storage import Storage, storage_at

#: Partitions that are looked at at once: on a network file system each costs a round trip or two.
_CHECK_THREADS = 32


@dataclass(frozen=True)
class PreparedDataset:
    """Manifest and index of the dataset in ``storage``."""

    storage: Storage
    manifest: Manifest
    index: Index

    @classmethod
    def open(cls, where: str | os.PathLike[str] | Storage) -> "PreparedDataset":
        """Read and check manifest and index; FormatError says what is wrong."""
        storage = _storage(where)
        manifest, index = read_parts(storage)
        return cls.from_parts(storage, manifest, memoryview(index))

    @classmethod
    def from_parts(
        cls, where: str | os.PathLike[str] | Storage, manifest: bytes, index: mmap.mmap | memoryview
    ) -> "PreparedDataset":
        """The dataset from what ``read_parts`` read, on any node; touches no file. The same checks as open().

        ``index`` is used where it is, without a copy: nobody may change that memory from now on.
        """
        storage = _storage(where)
        checked = Manifest.loads(manifest, f"'{storage.label(MANIFEST_FILE)}'")
        return cls._checked(storage, checked, Index.adopt(index, f"'{storage.label(checked.index_file)}'"))

    @classmethod
    def _checked(cls, storage: Storage, manifest: Manifest, index: Index) -> "PreparedDataset":
        """The dataset, if the two belong together."""
        if index.nbytes != manifest.index_bytes or index.file_checksum() != manifest.index_checksum:
            raise FormatError(
                f"'{storage}' is refused: its index (checksum {to_hex(index.file_checksum())}) is not the one that "
                f"its manifest describes; prepare the dataset again"
            )
        if [part.bytes for part in manifest.partitions] != list(index.partition_bytes):
            raise FormatError(f"'{storage}' is refused: its manifest and its index disagree about the partitions")
        if storage.directory is None and any(part.external for part in manifest.partitions):
            raise FormatError(
                f"'{storage}' is refused: it was prepared with --index-only, and its tar files are elsewhere; prepare "
                "it again without that option"
            )
        return cls(storage, manifest, index)

    def partition_path(self, partition: int) -> Path:
        """The file that holds a partition's bytes, of a dataset in a directory."""
        assert self.storage.directory is not None
        return self.storage.directory / self.manifest.partitions[partition].file

    def partition_label(self, partition: int) -> str:
        """What sentences call the file of a partition."""
        return self.storage.label(self.manifest.partitions[partition].file)

    def check_partitions(self) -> None:
        """FormatError if a partition is not there, cannot be read, or is not as long as it was. May block."""
        numbers = range(len(self.manifest.partitions))
        with ThreadPoolExecutor(_CHECK_THREADS, "partitions") as pool:
            found = [(number, what) for number, what in enumerate(pool.map(self._problem, numbers)) if what]
        if not found:
            return
        number, what = found[0]
        others = f", and {len(found) - 1} more of {len(numbers)} partitions are not right" if len(found) > 1 else ""
        if self.manifest.partitions[number].external:
            advice = "tar files that were indexed with --index-only must stay where they are, unchanged: put them back"
        else:
            advice = "copy the dataset again"
        label = self.partition_label(number)
        raise FormatError(f"partition file '{label}' {what}{others}; {advice}, or prepare the dataset again")

    def _problem(self, partition: int) -> str:
        """What is wrong with a partition's file, without reading it; "" if nothing is."""
        info = self.manifest.partitions[partition]
        try:
            length = self.storage.length(info.file)
        except OSError as error:
            return "is missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
        return "" if length == info.bytes else f"has {length:,} bytes instead of {info.bytes:,}"


def read_parts(where: str | os.PathLike[str] | Storage) -> tuple[bytes, bytes]:
    """Manifest and index as they are, for ``PreparedDataset.from_parts`` on all nodes; FormatError if not readable."""
    storage = _storage(where)
    storage.check()
    manifest = _read(storage, MANIFEST_FILE)
    while True:
        try:
            return manifest, _read(storage, _index_name(manifest))
        except FormatError:
            # An update may have removed it a moment ago: then there is another manifest by now.
            before, manifest = manifest, _read(storage, MANIFEST_FILE)
            if manifest == before:
                raise


def _index_name(manifest: bytes) -> str:
    """The file that has the index; the manifest itself is refused later, by whoever parses it, if it is not sound."""
    try:
        return Manifest.loads(manifest).index_file
    except FormatError:
        return INDEX_FILE


def _read(storage: Storage, name: str) -> bytes:
    try:
        return storage.read(name)
    except OSError as error:
        raise FormatError(f"cannot read '{storage.label(name)}': {error.strerror}") from error
    except MemoryError as error:
        raise FormatError(f"cannot read '{storage.label(name)}': {os.strerror(errno.ENOMEM)}") from error


def _storage(where: str | os.PathLike[str] | Storage) -> Storage:
    return storage_at(where) if isinstance(where, str | os.PathLike) else where
