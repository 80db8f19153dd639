"""Importance exchange: partial local shuffling that exchanges the samples that matter most, and in pairs.

Nguyen et al., the poster after the paper of ``partial.py``. What a rank sends is drawn without replacement with
probabilities in proportion to importance, which is the loss (IS). With ``pairing``, ranks are sorted by importance and
the highest exchanges with the lowest, in one message instead of all-to-all (IS-Pair). With ``lagging``, the losses are
those of the epoch before, which training has anyway, instead of an extra pass of inference (ILag-Pair).
"""

from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from fanstore.errors import UsageError
from fanstore.order.groups import Groups, Labels, as_labels
from fanstore.order.order import Samples, at_least
from fanstore.order.partial import PartialLocalShuffle
from fanstore.order.shuffle import State
from fanstore.order.streams import Purpose, exponentials, permutation

#: The least importance of a sample, of the greatest: what was learned perfectly is exchanged at times, too.
_LEAST = 1e-9


class ImportanceExchange(PartialLocalShuffle):
    """Losses are told by ``record``; before any are, all samples are equally important.

    The plan is a function of seed and losses. Losses are forgotten once they were used, so epochs are asked for in
    ascending order; to go on after a restart, save ``state(epoch)``, which has the losses that are still needed.
    """

    def __init__(
        self,
        *,
        samples: int,
        ranks: int,
        fraction: float,
        pairing: bool = True,
        lagging: bool = True,
        seed: int = 0,
        ownership: npt.ArrayLike | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.pairing = pairing
        self.lagging = lagging
        self._losses: dict[int, npt.NDArray[np.float64]] = {}
        super().__init__(
            samples=samples,
            ranks=ranks,
            fraction=fraction,
            seed=seed,
            ownership=ownership,
            first_epoch=first_epoch,
        )

    def _begin(self, ranks: int, ownership: npt.ArrayLike | None, epoch: int, unread: Samples | None) -> None:
        super()._begin(ranks, ownership, epoch, unread)
        self._losses = dict(self._losses)  # a restart has its own

    def record(self, epoch: int, losses: npt.ArrayLike) -> None:
        """The loss of each sample in the epoch; NaN where it is not known.

        All ranks record the same array. With ``lagging`` it decides the exchange in the next epoch, otherwise the one
        in this epoch, and comes from a pass of inference at its beginning.
        """
        values = np.asarray(losses, dtype=np.float64)
        if values.shape != (self.sample_count,):
            raise UsageError(f"losses must be an array of {self.sample_count} numbers, one for each sample")
        used_in = at_least(0, epoch, "epoch") + self.lagging
        if max(self._owners) > used_in:
            raise UsageError(f"losses of epoch {epoch} come too late: the exchange in epoch {used_in} is decided")
        self._losses[epoch] = importance(values)

    def decided(self, epoch: int) -> bool:
        return self.lagging or epoch in self._losses

    def state(self, epoch: int) -> State:
        return replace(super().state(epoch), importance=dict(self._losses))

    def resumed(self, state: State) -> Self:
        again = super().resumed(state)
        again._losses = dict(state.importance)
        return again

    def _weights(self, epoch: int) -> npt.NDArray[np.float64]:
        """Importance for the exchange in the epoch: of the latest losses that may be used."""
        usable = [past for past in self._losses if past <= epoch - self.lagging]
        for old in sorted(usable)[:-1]:
            del self._losses[old]
        return self._losses[max(usable)] if usable else np.ones(self.sample_count)

    def _go_back(self, epoch: int) -> None:
        raise UsageError(f"epoch {epoch} follows from losses that were forgotten; ask for epochs in ascending order")

    def _leaving(self, epoch: int, owner: Labels) -> Groups:
        """By exponential race (Efraimidis, Spirakis): the first to arrive are a draw by weight, without replacement."""
        arrivals = exponentials(self.seed, Purpose.IMPORTANCE, epoch, self.sample_count) / self._weights(epoch)
        sequence = np.argsort(arrivals, kind="stable")
        return Groups.of(sequence, owner[sequence], self.ranks)

    def _receivers(self, epoch: int, owner: Labels) -> tuple[Samples, Labels]:
        if not self.pairing:
            return super()._receivers(epoch, owner)
        partners = self.partners(epoch, owner)
        sizes = np.minimum(self.slots, self.slots[partners])
        sizes[partners == np.arange(self.ranks)] = 0
        return sizes, as_labels(np.repeat(partners, sizes), self.ranks)

    def partners(self, epoch: int, owner: Labels) -> Samples:
        """With whom each rank exchanges: the most important with the least, and so on; itself if it is left over."""
        total = np.bincount(
            owner, self._weights(epoch), minlength=self.ranks
        )  # added up in sequence: same bits everywhere
        mean = total / np.maximum(self._sizes, 1)
        ranked = permutation(self.seed, Purpose.PAIRS, epoch, self.ranks)  # decides where importance is equal
        ranked = ranked[np.argsort(-mean[ranked], kind="stable")]
        partners = np.empty_like(ranked)
        partners[ranked] = ranked[::-1]
        return partners


def importance(losses: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Importance of samples with these losses; always above 0.

    What is not known counts as the median of what is. Infinite losses count as the greatest finite one. If losses are
    negative, the smallest one counts as 0 and the others by their distance from it.
    """
    known = losses[np.isfinite(losses)]
    if len(known) == 0:
        return np.ones(len(losses))
    least, greatest = known.min(), known.max()
    values = np.where(np.isnan(losses), np.median(known), np.clip(losses, least, greatest))
    if least < 0:
        values -= least
        greatest -= least
    return np.maximum(values, greatest * _LEAST) if greatest > 0 else np.ones(len(losses))
