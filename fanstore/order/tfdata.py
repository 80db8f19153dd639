"""``tf.data.Dataset.shuffle`` with a seed: a buffer of samples from which one is taken at random and replaced.

Owns TensorFlow's seeds: the operation's seed is paired with the global one (``tf.random.set_seed``), and the pair seeds
a generator of which each iteration draws a pair of its own. Without a seed TensorFlow takes one from the machine, and
the order cannot be known.
"""

from fanstore.order.order import Order, Samples, at_least
from fanstore.order.permutation import buffer_shuffle
from fanstore.order.philox import philox_draws

#: What TensorFlow takes for the global seed where none was set.
DEFAULT_GLOBAL_SEED = 87654321
_MODULUS = 2**31 - 1


class TfDataShuffle(Order):
    """The samples 0, 1, 2, ... behind a shuffle with a buffer. ``reshuffle=False``: all iterations are alike."""

    def __init__(
        self, samples: int, buffer: int, seed: int, *, global_seed: int | None = None, reshuffle: bool = True
    ) -> None:
        super().__init__(samples)
        self.buffer = at_least(1, buffer, "buffer")
        self.seed = seed
        self.seeds = _seed_pair(DEFAULT_GLOBAL_SEED if global_seed is None else global_seed, seed)
        self.reshuffle = reshuffle

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        first, second = self.seeds
        if self.reshuffle:
            first, second = map(int, philox_draws(*self.seeds, 2 * epoch + 2)[-2:])
        return buffer_shuffle(self.sample_count, self.buffer, first, second)


def _seed_pair(global_seed: int, seed: int) -> tuple[int, int]:
    pair = (global_seed % _MODULUS, seed % _MODULUS)
    return pair if any(pair) else (0, _MODULUS)  # a pair of zeros would ask for a seed from the machine
