"""A dataset that is updated where it is: new partitions and a new index are put beside the old ones, then the manifest
is replaced, in one step. Nothing that the old manifest names is changed or removed, so that mounts which have read it
go on; an index that no manifest has named since the last update goes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fanstore.errors import FormatError, OutputError, UsageError
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE, is_index_name
from fanstore.format.prepared import PreparedDataset
from fanstore.prep import journal
from fanstore.prep.outdir import OutputDirectory, Sink, sync


class UpdatedDirectory(OutputDirectory):
    """A context as OutputDirectory. It holds the dataset for itself, so that there are no two updates at once.

    Attributes:
        old: the dataset as it was when the context was entered.
    """

    old: PreparedDataset

    def __init__(self, final: str, note: Callable[[str], None]) -> None:
        super().__init__(final, False, note)
        self.index_file = f"index-{os.urandom(4).hex()}.fsx"
        self._held = -1
        self._manifest = b""

    def check(self) -> None:
        if self.final.is_symlink():
            raise UsageError(f"'{self.final}' is a symbolic link; name the directory that it leads to")
        if not self.final.is_dir():
            raise UsageError(f"'{self.final}' is not a directory, so that it cannot be updated")
        try:
            self._held = os.open(self.final, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._manifest = (self.final / MANIFEST_FILE).read_bytes()
            if not os.access(self.final, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"'{self.final}' is being updated by another fanstore-prep; try again later") from None
        except FileNotFoundError:
            raise OutputError(
                f"'{self.final}' is not a prepared dataset, so that --update cannot go on from it"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # no locks: publish() looks again
                raise OutputError(f"cannot update '{self.final}': {error.strerror}") from error
        self.old = PreparedDataset.open(self.final)
        try:
            self.old.check_partitions()
        except FormatError as error:
            raise OutputError(f"cannot update '{self.final}': {error}") from error
        self.sink = Sink(self.path, len(self.old.manifest.partitions))

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except BaseException:
            self._release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._release()

    def _release(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def publish(self) -> None:
        """Put everything in its place, the manifest last."""
        try:
            journal.remove_notes(self.path)
            if (self.final / MANIFEST_FILE).read_bytes() != self._manifest:
                raise OutputError(f"'{self.final}' was changed by somebody else meanwhile; nothing was updated")
            names = sorted(os.listdir(self.path), key=lambda name: (name == MANIFEST_FILE, name))
            os.rename(self.path / INDEX_FILE, self.path / self.index_file)
            names[names.index(INDEX_FILE)] = self.index_file
            sync(self.path)
            for name in names:
                if name == MANIFEST_FILE:
                    sync(self.final)
                os.rename(self.path / name, self.final / name)
            sync(self.final)
            current = {self.index_file, self.old.manifest.index_file}
            for name in os.listdir(self.final):
                if is_index_name(name) and name not in current:
                    os.unlink(self.final / name)
        except OSError as error:
            raise OutputError(f"cannot complete the update of '{self.final}': {error.strerror}") from error
