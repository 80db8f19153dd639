"""Shuffles of frameworks in plain Python, as their sources have them: what native/order/swaps.c and philox.py equal.

Written for reading, not for speed. Used by test_order_replay.py and test_order_search.py.
"""

from collections.abc import Iterator, Sequence

LOW_32 = 0xFFFF_FFFF


def mersenne(seed: int) -> Iterator[int]:
    """MT19937 after init_genrand(seed): its 32-bit outputs."""
    words = [seed & LOW_32]
    for i in range(1, 624):
        words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) & LOW_32)
    while True:
        for i in range(624):
            mixed = (words[i] & 0x80000000) | (words[(i + 1) % 624] & 0x7FFFFFFF)
            words[i] = words[(i + 397) % 624] ^ (mixed >> 1) ^ (0x9908B0DF if mixed & 1 else 0)
        for word in words:
            word ^= word >> 11
            word ^= (word << 7) & 0x9D2C5680
            word ^= (word << 15) & 0xEFC60000
            yield word ^ (word >> 18)


def randperm(count: int, draws: Iterator[int]) -> list[int]:
    """torch.randperm on the CPU."""
    order = list(range(count))
    for i in range(count - 1):
        j = i + next(draws) % (count - i)
        order[i], order[j] = order[j], order[i]
    return order


def python_shuffle(count: int, draws: Iterator[int]) -> list[int]:
    """random.shuffle, for fewer than 2^32 items."""
    order = list(range(count))
    for i in reversed(range(1, count)):
        bits = (i + 1).bit_length()
        while (j := next(draws) >> (32 - bits)) > i:
            pass
        order[i], order[j] = order[j], order[i]
    return order


def buffer_shuffle(count: int, buffer: int, draws: Sequence[int]) -> list[int]:
    """tf.data.Dataset.shuffle: a queue from which any item can be taken; the oldest moves into its place."""
    order = []
    held: list[int] = []
    coming = iter(range(count))
    for i in range(count):
        while len(held) < buffer and (item := next(coming, None)) is not None:
            held.append(item)
        j = draws[i] % len(held)
        order.append(held[j])
        held[j] = held[0]
        held.pop(0)
    return order


def philox(seed: int, seed2: int, count: int) -> list[int]:
    """Philox 4x32-10 with a key of two words (seed) and a counter whose upper half is seed2."""
    outputs: list[int] = []
    for counter in range(-(-count // 4)):
        words = [counter & LOW_32, counter >> 32, seed2 & LOW_32, seed2 >> 32]
        keys = [seed & LOW_32, seed >> 32]
        for _ in range(10):
            first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
            words = [
                (second >> 32) ^ words[1] ^ keys[0],
                second & LOW_32,
                (first >> 32) ^ words[3] ^ keys[1],
                first & LOW_32,
            ]
            keys = [(keys[0] + 0x9E3779B9) & LOW_32, (keys[1] + 0xBB67AE85) & LOW_32]
        outputs += words
    return outputs[:count]
