"""Epochs that begin like one before, of each thread that reads: validation sets, and shuffles that are done only once.

Owns what threads have read whose order is not known. Pure; whoever sees files being read calls ``note``.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

#: Files that an epoch must have in common with one before, the first ones of both.
_PROOF = 4
#: Files of an epoch that is worth to be expected again.
_LEAST = 8
#: Files that may be left out: they were in the kernel's cache.
_STEP = 64
#: Threads, and files of all of them, that are remembered.
_THREADS_MOST = 256
_FILES_MOST = 4_000_000


@dataclass
class _Log:
    """What a thread has read since its epoch began.

    Attributes:
        like: an epoch that began with the same file, while this one goes on like it; at: behind the last file there;
            alike: files that both have.
    """

    files: array[int] = field(default_factory=lambda: array("I"))
    like: array[int] | None = None
    at: int = 0
    alike: int = 0


class Repetition:
    """What was read without being expected.

    Attributes:
        _logs: by thread, the one that has read last at the end. _begun: by the first file, the epochs of all threads.
        _count: files of all logs since everything was forgotten.
    """

    def __init__(self) -> None:
        self._logs: dict[int, _Log] = {}
        self._begun: dict[int, array[int]] = {}
        self._count = 0

    def note(self, file: int, thread: int) -> tuple[array[int], int] | None:
        """A thread has read a file: an epoch that it reads again, if that has just become sure, and where it is."""
        if self._count >= _FILES_MOST:
            self._logs.clear()
            self._begun.clear()
            self._count = 0
        self._count += 1
        log = self._logs.pop(thread, None)
        earlier = self._begun.get(file)
        if log is None or (earlier is not None and len(log.files) >= _PROOF):
            log = _Log(like=earlier)
        self._logs[thread] = log
        if len(self._logs) > _THREADS_MOST:
            del self._logs[next(iter(self._logs))]
        log.files.append(file)
        if len(log.files) == 1 and earlier is None:
            self._remember(log)
        return self._compare(log, file)

    def forget(self, epoch: array[int]) -> None:
        """It was not read again."""
        if len(epoch) and self._begun.get(epoch[0]) is epoch:
            del self._begun[epoch[0]]

    def _compare(self, log: _Log, file: int) -> tuple[array[int], int] | None:
        if log.like is None:
            return None
        try:
            log.at = log.like.index(file, log.at, log.at + _STEP) + 1
        except ValueError:
            log.like = None
            self._remember(log)
            return None
        log.alike += 1
        if log.alike != _PROOF or len(log.like) < _LEAST:
            return None
        return log.like, log.at

    def _remember(self, log: _Log) -> None:
        """The latest epoch that begins like this is the one that the next one is compared with."""
        self._begun.pop(log.files[0], None)
        self._begun[log.files[0]] = log.files
        if len(self._begun) > _THREADS_MOST:
            del self._begun[next(iter(self._begun))]
