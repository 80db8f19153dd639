"""MT19937, the random number generator behind torch (CPU), Python's ``random`` and numpy's legacy functions.

Owns the ways in which they seed it, and a position in its 32-bit outputs. numpy does the work: the stream of
``RandomState`` is frozen, and an integer over the full range of 32 bits is an output as it is.
"""

import random
from typing import Self

import numpy as np
import numpy.typing as npt

Draws = npt.NDArray[np.uint32]

_LOW_32 = 0xFFFF_FFFF
#: Outputs that are drawn at once to be thrown away: 4 MiB.
_SKIP = 1 << 20
#: Outputs by which a state is known: 256 bits.
_CERTAIN = 8


class Twister:
    """The outputs of an MT19937, one after the other."""

    def __init__(self, state: np.random.RandomState) -> None:
        self._state = state

    @classmethod
    def torch(cls, seed: int) -> Self:
        """As ``torch.Generator().manual_seed(seed)``: only the low 32 bits of a seed matter."""
        return cls(np.random.RandomState(seed & _LOW_32))

    @classmethod
    def resumed(cls, words: npt.NDArray[np.uint32], at: int) -> Self:
        """From its 624 words, of which the next output is made of word ``at``; 624: of new ones."""
        state = np.random.RandomState(0)
        state.set_state(("MT19937", words, at, 0, 0.0))
        return cls(state)

    def seed_torch(self, seed: int) -> None:
        """As ``torch.Generator.manual_seed``: the same as a new one, in a fiftieth of the time."""
        self._state.seed(seed & _LOW_32)

    @classmethod
    def python(cls, seed: int | str | bytes) -> Self:
        """As ``random.seed(seed)``."""
        _, (*words, position), _ = random.Random(seed).getstate()
        state = np.random.RandomState(0)
        state.set_state(("MT19937", np.array(words, dtype=np.uint32), position, 0, 0.0))
        return cls(state)

    def draw(self, count: int) -> Draws:
        return self._state.randint(0, 1 << 32, size=count, dtype=np.uint32)

    def skip(self, count: int) -> None:
        for done in range(0, count, _SKIP):
            self.draw(min(_SKIP, count - done))

    def copy(self) -> Self:
        state = np.random.RandomState(0)
        state.set_state(self._state.get_state())
        return type(self)(state)


class TorchOutputs:
    """Outputs of a generator of torch by number. To go forward costs 1.5 ns per output, to go back begins anew.

    ``origin``: its seed, or its state before the first output.
    """

    def __init__(self, origin: int | Twister) -> None:
        self._origin = origin
        self._begin()

    def _begin(self) -> None:
        self._at = 0  # the number of the next output
        self._twister = self._origin.copy() if isinstance(self._origin, Twister) else Twister.torch(self._origin)

    def draw(self, first: int, count: int) -> Draws:
        if first < self._at:
            self._begin()
        self._twister.skip(first - self._at)
        self._at = first + count
        return self._twister.draw(count)


def outputs_between(before: Twister, after: Twister, most: int) -> int | None:
    """How many outputs a generator has given from one state to another; None if it was more than ``most``, or never."""
    wanted = after.copy().draw(_CERTAIN)
    ahead = before.copy()
    window = ahead.draw(_CERTAIN - 1)
    for done in range(0, most + 1, _SKIP):
        window = np.concatenate([window[1 - _CERTAIN :], ahead.draw(min(_SKIP, most + 1 - done))])
        for place in np.flatnonzero(window[: 1 - _CERTAIN] == wanted[0]):
            if np.array_equal(window[place : place + _CERTAIN], wanted):
                return done + int(place)
    return None
