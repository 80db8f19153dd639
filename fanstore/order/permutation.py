"""How frameworks turn random numbers into a permutation, bit for bit.

Owns one function per shuffle; who draws which numbers when is in the modules of the frameworks (``pytorch.py``,
``tfdata.py``, ``seeded.py``). The loops are C (``native/order/swaps.c``); 1.3 million samples take 6 to 16 ms.
"""

import numpy as np

from fanstore import _native
from fanstore.errors import UsageError
from fanstore.order.order import Samples
from fanstore.order.philox import philox_draws
from fanstore.order.twister import Draws, Twister

#: From this many on, torch.randperm draws numbers of 64 bits and shuffles in another way.
RANDPERM_LIMIT = 0xFFFF_FFFF // 20


def seeded_randperm(count: int, seed: int) -> Samples:
    """``torch.randperm(count, generator=torch.Generator().manual_seed(seed))``."""
    return randperm(count, Twister.torch(seed).draw(randperm_draws(count)))


def randperm_draws(count: int) -> int:
    """How many outputs ``torch.randperm(count)`` draws from its generator."""
    if count >= RANDPERM_LIMIT:
        raise UsageError(f"the order of torch.randperm is known for fewer than {RANDPERM_LIMIT:,} samples")
    return max(0, count - 1)


def randperm(count: int, draws: Draws) -> Samples:
    """``torch.randperm(count)``, with what it draws."""
    order = np.arange(count)
    _native.swap_forward(draws, order)
    return order


class LeadingPlaces:
    """The first places of ``randperm``, for many seeds in turn: 40 µs each, however many samples there are."""

    def __init__(self, count: int, places: int) -> None:
        self._places = np.arange(min(count, places))
        self._order = np.arange(count)  # between two calls

    def __call__(self, draws: Draws) -> Samples:
        """The places after swaps with these draws, as many as there are places."""
        _native.swap_forward(draws[: len(self._places)], self._order)
        leading = self._order[: len(self._places)].copy()
        # What was brought to the front has left its own place, and no other place was touched.
        self._order[leading] = leading
        self._order[: len(self._places)] = self._places
        return leading


def python_shuffle(count: int, twister: Twister) -> Samples:
    """What ``random.shuffle(list(range(count)))`` leaves."""
    ahead = twister.copy()
    draws = ahead.draw(2 * count)  # at least every second one is good, on average
    while (used := _native.swap_backward(draws, order := np.arange(count))) < 0:
        draws = np.concatenate([draws, ahead.draw(count)])
    twister.skip(used)
    return order


def buffer_shuffle(count: int, buffer: int, seed: int, seed2: int) -> Samples:
    """What TensorFlow's shuffle dataset makes of ``range(count)``, with the seeds of one iteration."""
    order = np.empty(count, dtype=np.int64)
    _native.swap_buffer(philox_draws(seed, seed2, count), order, buffer)
    return order
