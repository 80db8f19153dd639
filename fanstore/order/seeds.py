"""Seeds that people choose. Owns the lists; ``recognition.py`` tries them."""

#: Above the small numbers, which are all tried.
_FAVOURITES = (
    5678, 9999, 10_000, 12_345, 31_337, 31_415, 65_535, 100_000, 123_123, 123_456, 271_828, 314_159, 1_000_000,
    1_234_567, 8_675_309, 12_345_678, 20_200_101, 42_424_242, 87_654_321, 123_456_789, 314_159_265, 987_654_321,
    1_234_567_890, 0xC0FFEE, 0xDEADBEEF, 2**31 - 1, 2**32 - 1,
)  # fmt: skip
#: Favourites among the small numbers.
_SMALL = (123, 1000, 1024, 1111, 1234, 1337, 2048, 3407, 4242, 4321, *range(2015, 2031))

#: Where a seed is tried in a fraction of a millisecond: also with the number of an epoch added.
MANY_SEEDS: tuple[int, ...] = (*range(5_000), *(seed + epoch for seed in _FAVOURITES for epoch in range(100)))
#: Where it takes a whole permutation.
FEW_SEEDS: tuple[int, ...] = (*range(100), *_SMALL, *_FAVOURITES)
