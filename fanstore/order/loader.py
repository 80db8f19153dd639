"""How a torch DataLoader spreads a rank's samples over its worker processes.

Batch k goes to worker k mod W, which reads its samples one after the other; ``prefetch_factor`` batches per worker are
handed out before the first is asked for. Owns these rules, for any order.
"""

import numpy as np

from fanstore.order.dealing import in_blocks
from fanstore.order.order import Samples, at_least

#: torch's default, in batches per worker.
PREFETCH_FACTOR = 2


class Loader:
    """A DataLoader. ``workers`` 0 is the training process itself, which then reads as one worker would."""

    def __init__(
        self, batch: int, workers: int = 0, *, drop_last: bool = False, prefetch_factor: int = PREFETCH_FACTOR
    ) -> None:
        self.batch = at_least(1, batch, "batch")
        self.workers = at_least(0, workers, "workers")
        self.drop_last = drop_last
        self.prefetch_factor = at_least(1, prefetch_factor, "prefetch_factor")

    @property
    def readers(self) -> int:
        return max(1, self.workers)

    def read(self, samples: Samples) -> Samples:
        """What is read of a rank's samples: all, or whole batches only."""
        return samples[: len(samples) // self.batch * self.batch] if self.drop_last else samples

    def worker(self, samples: Samples, worker: int) -> Samples:
        """What one worker reads, first to last."""
        return in_blocks(self.read(samples), self.batch, self.readers, worker)

    def together(self, samples: Samples) -> Samples:
        """What all workers read, if equally fast: the first sample of each one's batch, then the second of each,
        and so on."""
        read = self.read(samples)
        places = np.arange(len(read))
        batches = places // self.batch
        return read[np.lexsort((batches % self.readers, places % self.batch, batches // self.readers))]

    def ahead(self) -> int:
        """Samples that are handed out to workers before the program asks for its first batch."""
        return self.batch * (self.prefetch_factor * self.workers if self.workers else 1)
