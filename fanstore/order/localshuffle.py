"""Local shuffling: each rank shuffles what it owns. Nothing crosses. Enough at small scale, if shares are mixed."""

from fanstore.order.dealing import to_owners
from fanstore.order.groups import Labels
from fanstore.order.order import Integers
from fanstore.order.shuffle import Shuffle


class LocalShuffle(Shuffle):
    """A rank reads its own samples, in the sequence in which they stand in the epoch's permutation.

    After a restart in the middle of an epoch, what is left is not spread evenly over the owners: for the rest of that
    epoch, ranks that would read less take from those that would read more.
    """

    def _deal(self, owner_of_place: Labels, sizes: Integers, whole: bool) -> Labels:
        return owner_of_place if whole else to_owners(owner_of_place, sizes, None)
