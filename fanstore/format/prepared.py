"""A prepared dataset as a whole: manifest and index that belong together, and where the partitions are.

Does not open partitions; core.store and prep.verify do. Immutable after open(), any thread.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from fanstore.errors import FormatError
from fanstore.format.checksum import to_hex
from fanstore.format.index import Index
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE, Manifest


@dataclass(frozen=True)
class PreparedDataset:
    """Manifest and index of the dataset in directory ``path``."""

    path: Path
    manifest: Manifest
    index: Index

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "PreparedDataset":
        """Read and check manifest and index; FormatError says what is wrong."""
        directory = _existing(path)
        return cls._checked(directory, Manifest.load(directory / MANIFEST_FILE), Index.load(directory / INDEX_FILE))

    @classmethod
    def from_parts(
        cls, path: str | os.PathLike[str], manifest: bytes, index: mmap.mmap | memoryview
    ) -> "PreparedDataset":
        """The dataset from what ``read_parts`` read, on any node; touches no file. The same checks as open().

        ``index`` is used where it is, without a copy: nobody may change that memory from now on.
        """
        return cls._checked(Path(path), Manifest.loads(manifest), Index.adopt(index))

    @classmethod
    def _checked(cls, directory: Path, manifest: Manifest, index: Index) -> "PreparedDataset":
        """The dataset, if the two belong together."""
        if index.nbytes != manifest.index_bytes or index.file_checksum() != manifest.index_checksum:
            raise FormatError(
                f"'{directory}' is refused: its index (checksum {to_hex(index.file_checksum())}) is not the one that "
                f"its manifest describes; prepare the dataset again"
            )
        if [part.bytes for part in manifest.partitions] != list(index.partition_bytes):
            raise FormatError(f"'{directory}' is refused: its manifest and its index disagree about the partitions")
        return cls(directory.absolute(), manifest, index)

    def partition_path(self, partition: int) -> Path:
        """The file that holds a partition's bytes."""
        info = self.manifest.partitions[partition]
        return Path(info.file) if info.external else self.path / info.file


def read_parts(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """Manifest and index as they are, for ``PreparedDataset.from_parts`` on all nodes; FormatError if not readable."""
    directory = _existing(path)
    try:
        return (directory / MANIFEST_FILE).read_bytes(), (directory / INDEX_FILE).read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read '{error.filename}': {error.strerror}") from error


def _existing(path: str | os.PathLike[str]) -> Path:
    directory = Path(path)
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise FormatError(f"the prepared dataset '{directory}' {what}; make one with fanstore-prep")
    if not (directory / MANIFEST_FILE).exists():
        raise FormatError(f"'{directory}' is not a prepared dataset: it has no {MANIFEST_FILE}; use fanstore-prep")
    return directory
