"""An order of a job in files: the list that the program made, shuffled as the program shuffles it.

Owns the translation from samples to files. A file is any number that the caller knows it by, such as its entry in the
index.
"""

from dataclasses import dataclass

from fanstore.errors import UsageError
from fanstore.order.loader import Loader
from fanstore.order.order import Integers, Order


@dataclass(frozen=True)
class FileOrder:
    """``files[order.samples(epoch, rank)]``, whole or as a worker sees it."""

    files: Integers  #: the program's list, first to last
    order: Order
    loader: Loader | None = None

    def __post_init__(self) -> None:
        if len(self.files) != self.order.sample_count:
            raise UsageError(
                f"an order of {self.order.sample_count} samples does not fit a list of {len(self.files)} files"
            )

    def rank(self, epoch: int, rank: int = 0) -> Integers:
        """The files of a rank, in the sequence in which its program gets them."""
        samples = self.order.samples(epoch, rank)
        return self.files[samples if self.loader is None else self.loader.read(samples)]

    def worker(self, epoch: int, rank: int, worker: int) -> Integers:
        """The files that one worker process of the rank opens."""
        if self.loader is None:
            raise UsageError("this order has no loader, so nothing is known of workers")
        return self.files[self.loader.worker(self.order.samples(epoch, rank), worker)]

    def together(self, epoch: int, rank: int = 0) -> Integers:
        """The files of a rank in the sequence in which its workers open them, if they are equally fast."""
        if self.loader is None:
            return self.rank(epoch, rank)
        return self.files[self.loader.together(self.order.samples(epoch, rank))]
