"""An order that was recognised. Owns what is known of it, and what a later epoch tells."""

from dataclasses import dataclass, replace

from fanstore.order.order import Order
from fanstore.order.sightings import Seating, Sightings, inverse, stride


@dataclass(frozen=True)
class Finding:
    """The epoch that was seen is epoch 0 of the orders."""

    listing: str  #: the list order
    sampler: str  #: what the shuffle is called in its framework
    seed: int | None  #: None if nothing is shuffled
    orders: tuple[Order, ...]  #: alike in the epoch that was seen; the likeliest first
    seating: Seating

    @property
    def order(self) -> Order:
        return self.orders[0]

    def narrow(self, epoch: int, sightings: Sightings) -> "Finding | None":
        """What is left when the beginning of a later epoch was seen: the orders that readers follow there, too."""
        left = tuple(order for order in self.orders if self._followed(order, epoch, sightings))
        return replace(self, orders=left) if left else None

    def _followed(self, order: Order, epoch: int, sightings: Sightings) -> bool:
        """By a worker of one of the ranks that were seen, or by a pool of threads."""
        tries = float(len(self.orders) * order.ranks)
        begun = sightings.begun(sightings.needed(tries, 1))
        for rank in {seat.rank for seat in self.seating.seats}:
            place_of = inverse(order.samples(epoch, rank), order.sample_count)
            if any(stride(place_of[seen]) == 1 for seen in begun.values()):
                return True
        if self.seating.seats:
            return False
        return sightings.pool(inverse(order.samples(epoch), order.sample_count), tries) is not None
