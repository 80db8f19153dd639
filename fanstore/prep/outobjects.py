"""OUT in an object store: partitions are written there as they are finished, the manifest last.

A dataset is there when its manifest is. Until then partitions lie in a temporary directory of the rank that packs them
(``TMPDIR``), one for each thread, and in the store under names that no manifest has: a dataset that is replaced keeps
its own until the new one is complete, because the new partitions have other names. What a run that was killed has left
is overwritten or removed by the next one for the same address.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from fanstore.errors import FormatError, OutputError, UsageError
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE, Manifest, is_index_name
from fanstore.format.objects import Objects
from fanstore.prep.journal import Finished
from fanstore.prep.outdir import Sink

#: Written first of all, so that what may not be written is known before anything is packed; removed at the end.
_MARK = ".fanstore-prep"
#: That of a rank which has none yet.
_NO_DIRECTORY = Path()
#: Seconds for what is being written when all is to end.
_STOP_S = 5.0
#: What a run writes, and may remove.
_OURS = re.compile(rf"part-([0-9a-f]{{8}}-)?\d{{5,}}\.tar|{re.escape(_MARK)}")


class ObjectSink(Sink):
    """Partitions go to the store as soon as they are finished.

    Attributes:
        _directory: for what is being written; another rank makes its own when it is needed first.
        _tag: tells names of this run from those of a dataset that it replaces; "" if there is none.
        _writing: how many are being written to the store; _stopped: no more are begun. Guarded by ``_changed``.
    """

    def __init__(self, address: str, directory: Path, tag: str) -> None:
        super().__init__(directory)
        self._address = address
        self._tag = tag
        self._changed = threading.Condition()
        self._writing = 0
        self._stopped = False

    def __reduce__(self) -> tuple[type[ObjectSink], tuple[str, Path, str]]:
        return ObjectSink, (self._address, _NO_DIRECTORY, self._tag)

    def name(self, number: int) -> str:
        return f"part-{self._tag}{number:05d}.tar"

    def path(self, number: int) -> Path:
        with self._changed:
            if self._directory == _NO_DIRECTORY:
                self._directory = Path(tempfile.mkdtemp(prefix="fanstore-prep-"))
        return super().path(number)

    def recall(self, number: int) -> Finished | None:
        return None  # what a killed run has written is written again

    def finished(self, number: int, what: Finished) -> None:
        path = self.path(number)
        with self._changed:
            if self._stopped:
                return
            self._writing += 1
        try:
            Objects(self._address).write(path.name, path)
        except OSError as error:
            raise OutputError(f"cannot write '{self._address}/{path.name}': {error.strerror}") from error
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()
        path.unlink()

    def stop(self) -> None:
        """Write no more, and wait for what is being written, but not for long: we may be killed any moment."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: self._writing == 0, _STOP_S)

    def close(self) -> None:
        if self._directory != _NO_DIRECTORY:
            shutil.rmtree(self._directory, ignore_errors=True)


class OutputObjects:
    """A context, as OutputDirectory: left without publish(), there is no new dataset, and an old one is as it was.

    Attributes:
        final: the address. path: for files that are not in the store yet. sink: for partitions.
    """

    def __init__(self, final: str, force: bool) -> None:
        self.final = final.rstrip("/")
        self._objects = Objects(final)
        self._force = force
        self.path = Path(tempfile.gettempdir(), f"fanstore-prep-{os.urandom(4).hex()}")
        self.sink = ObjectSink(self.final, self.path, "")
        self._replaced = False

    def check(self) -> None:
        """Refuse what cannot work, before any work is done."""
        if not self._objects.is_writable:
            raise UsageError(f"'{self.final}' can only be read; OUT is a directory, or s3://BUCKET/PATH")
        try:
            names = self._objects.names()
            if MANIFEST_FILE in names:
                self._check_old()
            elif others := sorted(name for name in names if not _is_ours(name)):
                raise OutputError(
                    f"'{self.final}' holds other objects already, such as {others[0]}; name another place"
                )
        except OSError as error:
            raise OutputError(f"cannot write to '{self.final}': {error.strerror}") from error

    def _check_old(self) -> None:
        if not self._force:
            raise OutputError(f"'{self.final}' exists already; use --force to replace it")
        try:
            Manifest.loads(self._objects.read(MANIFEST_FILE))
        except FormatError as error:
            raise OutputError(
                f"'{self.final}' is not a prepared dataset, so --force does not replace it; remove it yourself"
            ) from error
        self._replaced = True
        self.sink = ObjectSink(self.final, self.path, f"{os.urandom(4).hex()}-")

    def __enter__(self) -> Self:
        self.check()
        try:
            self.path.mkdir(0o700)
        except OSError as error:
            raise OutputError(f"cannot write to '{self.path.parent}': {error.strerror}") from error
        try:
            self._objects.write(_MARK, b"")
        except OSError as error:
            self.path.rmdir()
            raise OutputError(f"cannot write to '{self.final}': {error.strerror}") from error
        return self

    def publish(self) -> None:
        """The index, then the manifest; what was there before is removed when the context is left."""
        try:
            # The index of a copy of a dataset that was updated has another name, and is not in the way.
            replaced = {INDEX_FILE, MANIFEST_FILE} & set(self._objects.names()) if self._replaced else set()
            old = {name: self._objects.read(name) for name in replaced}
            try:
                # The index has one name: the old manifest must not be there with the new one.
                self._objects.remove(old.keys() & {MANIFEST_FILE})
                self._objects.write(INDEX_FILE, self.path / INDEX_FILE)
                self._objects.write(MANIFEST_FILE, self.path / MANIFEST_FILE)
            except BaseException:
                for name in sorted(old):  # the index first
                    self._objects.write(name, old[name])
                raise
        except OSError as error:
            raise OutputError(f"cannot complete '{self.final}': {error.strerror}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.sink.stop()
            self._sweep()
        except OSError as problem:
            if kind is None:
                raise OutputError(
                    f"'{self.final}' is complete, but what was there before could not be removed: {problem.strerror}"
                ) from problem
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what belongs to no dataset: ours if it has failed, else what was there before."""
        names = self._objects.names()
        kept = set()
        if MANIFEST_FILE in names:
            manifest = Manifest.loads(self._objects.read(MANIFEST_FILE))
            kept = {manifest.index_file} | {part.file for part in manifest.partitions}
        self._objects.remove(name for name in names - kept if _is_ours(name))


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name) is not None or is_index_name(name)
