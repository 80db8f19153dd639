"""The sampler of importance exchange: takes losses from the training loop, and brings those of all ranks together.

Owns the losses that were recorded in this epoch. What they decide is in ``fanstore.order.importance``.
"""

from typing import Any

import numpy as np
import torch

from fanstore.errors import UsageError
from fanstore.order import ImportanceExchange
from fanstore.torch.ranks import can_gather, gather
from fanstore.torch.sampler import ShuffleSampler


class ImportanceExchangeSampler(ShuffleSampler):
    """Partial local shuffling in which the samples that matter most are exchanged; ``record`` tells what matters.

    ``fraction``, ``pairing`` and ``lagging`` are those of ``ImportanceExchange``. ``set_epoch`` is collective: it
    brings together the losses of the epoch that has ended.
    """

    shuffle = ImportanceExchange
    reads_own = True
    order: ImportanceExchange

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recorded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(self, indices: Any, losses: Any) -> None:
        """The loss of each of these samples in this epoch; of a sample that comes twice the last one counts.

        Losses stay on their device until the epoch ends, so that training is not held up.
        """
        where = torch.as_tensor(indices).reshape(-1).cpu()
        values = torch.as_tensor(losses).detach().reshape(-1)
        if len(where) != len(values):
            raise UsageError(
                f"there are {len(values)} losses for {len(where)} samples; record the loss of each (reduction='none')"
            )
        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < self.order.sample_count:
            raise UsageError(f"losses are of samples 0 to {self.order.sample_count - 1}; other indices were recorded")
        self._recorded.append((where, values))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.share_losses()
        super().set_epoch(epoch)

    def share_losses(self) -> None:
        """Give the losses that all ranks have recorded in this epoch to the order. Collective; set_epoch does it."""
        mine = []
        if self._recorded:  # from the device at once
            where, values = map(torch.cat, zip(*self._recorded, strict=True))
            mine = [(where.numpy(), values.double().cpu().numpy())]
        if self.num_replicas == 1:
            parts = mine
        elif can_gather(self.num_replicas, self.group):
            parts = [part for told in gather(mine, self.group) for part in told]
        elif mine:
            raise UsageError(
                f"the losses of {self.num_replicas} ranks are brought together by torch.distributed: call "
                "init_process_group first, with as many processes"
            )
        else:
            return
        self._recorded.clear()
        if parts:
            losses = np.full(self.order.sample_count, np.nan)
            for where, values in parts:
                losses[where] = values
            self.order.record(self.epoch, losses)
