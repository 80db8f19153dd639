"""How many files of each partition could not be read as they should, so that the log has a few lines, not one per file.

Owns the counts; who reads says what to log. Used by sources.py, on the trio thread.
"""

from collections import Counter
from collections.abc import Iterator


class FaultyFiles:
    """Files with a fault, each counted once, by partition.

    Attributes:
        total: of all partitions.
        _seen: a byte per entry, 1 once it was counted; made when there is something to count.
        _counts: by partition.
    """

    def __init__(self, entry_count: int) -> None:
        self.total = 0
        self._entry_count = entry_count
        self._seen = bytearray()
        self._counts: Counter[int] = Counter()

    def add(self, entry: int, partition: int) -> int:
        """Count a file; how many there are of its partition now, 0 if this one is known already."""
        if not self._seen:
            self._seen = bytearray(self._entry_count)
        if self._seen[entry]:
            return 0
        self._seen[entry] = 1
        self.total += 1
        self._counts[partition] += 1
        return self._counts[partition]

    def untold(self) -> Iterator[tuple[int, int]]:
        """Partition and count of those that have more faulty files than was worth saying last."""
        return ((partition, count) for partition, count in sorted(self._counts.items()) if not is_worth_saying(count))


def is_worth_saying(count: int) -> bool:
    """The first one, then every power of ten."""
    return str(count).rstrip("0") == "1"
