"""The directory loaders of Keras (Keras 2 and 3); what they list is in ``listing.py``.

Owns which seeds they give to numpy and to tf.data. Without a seed, ``image_dataset_from_directory`` takes one of 10^6
from numpy's global generator, and ``flow_from_directory`` shuffles with that generator, whose state is not known.
"""

import numpy as np

from fanstore.errors import UsageError
from fanstore.order.order import Order, Samples, as_fraction, at_least
from fanstore.order.tfdata import TfDataShuffle

#: Keras shuffles with a buffer of this many batches; without batches, of this many samples.
_BUFFER_BATCHES = 8
_BUFFER_UNBATCHED = 1024


class KerasImageDataset(Order):
    """``image_dataset_from_directory``: the list is shuffled once; tf.data shuffles again in each epoch.

    In Keras 3 that second shuffle is of paths, before they are read. In Keras 2 (``shuffles_paths=False``) it was of
    decoded images, and files were read as the list stands. With a ``validation_split``, ``subset`` is "training" or
    "validation".
    """

    def __init__(
        self,
        samples: int,
        seed: int,
        batch: int | None = 32,
        *,
        shuffles_paths: bool = True,
        validation_split: float = 0.0,
        subset: str | None = None,
        global_seed: int | None = None,
    ) -> None:
        super().__init__(samples)
        self.seed = seed
        listed = legacy_permutation(samples, seed)
        if validation_split:
            held_back = int(as_fraction(validation_split, "validation_split") * samples)
            if subset not in ("training", "validation"):
                raise UsageError(f"'subset' is {subset!r}; with a 'validation_split' it is 'training' or 'validation'")
            listed = listed[:-held_back] if subset == "training" else listed[-held_back:]
        self._listed = listed
        self._shuffle: TfDataShuffle | None = None
        if shuffles_paths:
            buffer = _BUFFER_UNBATCHED if batch is None else _BUFFER_BATCHES * at_least(1, batch, "batch")
            self._shuffle = TfDataShuffle(len(listed), buffer, seed, global_seed=global_seed)

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        return self._listed if self._shuffle is None else self._listed[self._shuffle.samples(epoch)]


class KerasFlow(Order):
    """``ImageDataGenerator.flow_from_directory``, iterated: seeded again before each batch, permuted at each epoch's
    first. (With ``fit`` of Keras 3 the permutation depends on what augmentation drew before, and is not known.)"""

    def __init__(self, samples: int, seed: int, batch: int = 32) -> None:
        super().__init__(samples)
        self.seed = seed
        self.batches = -(-samples // at_least(1, batch, "batch"))

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        return legacy_permutation(self.sample_count, self.seed + epoch * self.batches)


def legacy_permutation(count: int, seed: int) -> Samples:
    """``numpy.random.RandomState(seed).permutation(count)``, which is also what its ``shuffle`` makes of a list."""
    if not 0 <= seed < 1 << 32:
        raise UsageError(f"'seed' is {seed}; numpy takes seeds from 0 to 2^32 - 1")
    return np.random.RandomState(seed).permutation(count)
