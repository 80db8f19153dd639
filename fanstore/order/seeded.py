"""Lists that a script shuffles itself: numpy's ``RandomState`` and ``default_rng``, Python's ``random``.

Owns what happens from epoch to epoch. The numbers are those of the libraries themselves; the streams of ``RandomState``
and ``random`` are frozen, that of ``default_rng`` is the one of the numpy that is installed here.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from fanstore.errors import UsageError
from fanstore.order.order import Order, Samples
from fanstore.order.permutation import python_shuffle
from fanstore.order.twister import Twister

Library: TypeAlias = Literal["RandomState", "default_rng", "random"]
Epochs: TypeAlias = Literal["same", "permuted", "shuffled"]


def _random_state(count: int, seed: int) -> Callable[[], Samples]:
    state = np.random.RandomState(seed)
    return lambda: state.permutation(count)


def _default_rng(count: int, seed: int) -> Callable[[], Samples]:
    generator = np.random.default_rng(seed)
    return lambda: generator.permutation(count)


def _random(count: int, seed: int) -> Callable[[], Samples]:
    twister = Twister.python(seed)
    return lambda: python_shuffle(count, twister)


#: How each library permutes ``range(count)``, again and again.
_PERMUTE: dict[Library, Callable[[int, int], Callable[[], Samples]]] = {
    "RandomState": _random_state,
    "default_rng": _default_rng,
    "random": _random,
}


class SeededShuffle(Order):
    """A list shuffled after the library was seeded.

    ``epochs``: "same", shuffled once and read alike in all epochs; "permuted", ``permutation(n)`` in each epoch, or the
    sorted list shuffled anew; "shuffled", the list of the epoch before is shuffled again.
    """

    def __init__(self, samples: int, seed: int, library: Library, epochs: Epochs = "same") -> None:
        super().__init__(samples)
        if library not in _PERMUTE:
            raise UsageError(f"'library' is {library!r}; it must be one of {', '.join(_PERMUTE)}")
        if seed < 0 or (library == "RandomState" and seed >= 1 << 32):
            raise UsageError(f"'seed' is {seed}; {library} takes no such seed")
        self.seed = seed
        self.library = library
        self.epochs = epochs
        self._begin()

    def __reduce__(self) -> tuple[type["SeededShuffle"], tuple[int, int, Library, Epochs]]:
        """Generators are made anew where it is unpickled."""
        return SeededShuffle, (self.sample_count, self.seed, self.library, self.epochs)

    def _begin(self) -> None:
        self._permute = _PERMUTE[self.library](self.sample_count, self.seed)
        self._last = (0, self._permute())  # the epoch that was made last

    def samples(self, epoch: int, rank: int = 0) -> Samples:
        self.check(epoch, rank)
        if self.epochs == "same":
            return self._last[1]
        if epoch < self._last[0]:
            self._begin()
        while self._last[0] < epoch:
            made, order = self._last
            again = self._permute()
            self._last = (made + 1, again if self.epochs == "permuted" else order[again])
        return self._last[1]
