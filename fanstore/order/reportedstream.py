"""The policy for a program that says what it reads and how far it is: a stream whose reader is told of.

Pure, as window.py, whose ``Stream`` this is: what differs is that nobody is looked for. Threads that read may be seen
or not: what comes from the kernel's page cache, or is read by the program itself, does not stop the window.
"""

from collections.abc import Iterable

from fanstore.order.order import Integers
from fanstore.order.window import HORIZON, Counts, Origin, Stream

#: Places between two looks at whether a program really reads what it says.
_TRIAL = 512


class ReportedStream(Stream):
    """The files of one loader of a program.

    Attributes:
        number: of the epoch, as the program counts. closed: it ends.
        _unasked: by file, not 0 if it was fetched in vain the last time: whoever read it did not ask for it, because it
            was in the kernel's page cache. Shared with other streams.
        _told, _handed: the places before which everything was read, and was handed out, by the last report.
        _trial: of the last look: its place, and what had been counted then.
    """

    def __init__(
        self, origin: Origin, epochs: Iterable[Integers], number: int, ahead: int, unasked: bytearray | None = None
    ) -> None:
        """``ahead``: places that are handed out to workers at a time.

        ``unasked``: None if programs that do not ask have another reason: they read by themselves.
        """
        super().__init__(origin, epochs)
        self.number = number
        self.closed = False
        self._unasked = unasked
        self.horizon = HORIZON + ahead
        self._reader = self.readers[None]
        self._told = self._handed = 0
        self._told_s = 0.0
        self._trial = (0, 0, Counts())
        self._is_wrong = False

    @property
    def epoch(self) -> int:
        return self.number

    def finished(self, now_s: float) -> bool:
        return self.closed

    def report(self, place: int, handed: int | None = None) -> None:
        """All before a place was read; to be settled when all is known that was read until now.

        ``handed``: all before this place was handed out, which is what may be being read.
        """
        self._told = max(self._told, place)
        self._handed = max(self._handed, self._told if handed is None else handed)
        self._told_s = -1.0

    def settle(self, total: Counts, now_s: float) -> bool:
        """Go on to where the program is. ``total``: of all streams. False when it turns out not to read these files."""
        if self._told_s < 0:
            self._told_s = self._reader.seen_s = now_s
            if not self._is_wrong:
                self.followed = True
        if self._told > self.frontier:
            self.go_on(self._told, now_s)
        is_new = False
        begin, own, then = self._trial
        if self.frontier - begin >= _TRIAL:
            unexpected = total.seen - total.predicted - (then.seen - then.predicted)
            read = self.counts.predicted - own
            if read * 8 < _TRIAL and unexpected * 2 > self.frontier - begin:
                is_new, self._is_wrong = not self._is_wrong, True
                self.pause()
            self._trial = (self.frontier, self.counts.predicted, Counts(total.seen, total.predicted))
        return not is_new

    def seen(self, file: int, thread: int, now_s: float) -> bool:
        self._extend()
        place = self._place_of(file, None)
        if place is None or place < self.frontier - self.horizon:
            return False
        self._forget(file, place)
        if place in self.held:
            self.counts.taken += 1
            self._release(place)
        if self._unasked is not None:
            self._unasked[file] = 0
        self._reader.seen_s = now_s
        if self._is_wrong:
            self._is_wrong, self.followed = False, True
        return True

    def go_on(self, place: int, now_s: float) -> None:
        if self._unasked is not None:
            for file in [self.at(each) for each in self.held if each < place]:
                if file is not None:
                    self._unasked[file] = 1
        super().go_on(place, now_s)

    def wants(self, file: int) -> bool:
        return self._unasked is None or not self._unasked[file]

    def passed(self, count: int, now_s: float) -> None:
        """The program itself says how far it is."""

    def distance(self, file: int) -> int:
        """0 if it was handed out. Of several programs with the same files each reads what it has handed out itself."""
        place = self._place_of(file, None)
        return 1 << 62 if place is None else max(0, place + 1 - self._handed)

    def is_reader(self, thread: int) -> bool:
        """Any thread may be; so this stream is asked first."""
        return True

    def missed(self, thread: int) -> None:
        """Other files are read, too; what matters is whether those of this stream are."""

    def pause(self) -> None:
        self.followed = False
        for place in list(self.held):
            self._release(place)
        self._reader.cursor = self.frontier
