"""Global shuffling: any sample may go to any rank. With M ranks a share of (M - 1) / M of all reads is remote."""

from fanstore.order.dealing import in_turn
from fanstore.order.groups import Labels
from fanstore.order.order import Integers
from fanstore.order.shuffle import Shuffle


class GlobalShuffle(Shuffle):
    """Each epoch's permutation is dealt to the ranks in turn."""

    def _deal(self, owner_of_place: Labels, sizes: Integers, whole: bool) -> Labels:
        return in_turn(sizes)
