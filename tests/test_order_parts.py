"""What our own shuffles are made of: streams of random numbers, dealing, ownership; against plain Python."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.errors import UsageError
from fanstore.order import ownership
from fanstore.order.dealing import in_turn, to_owners
from fanstore.order.groups import Groups, as_labels
from fanstore.order.importance import importance
from fanstore.order.streams import Purpose, exponentials, numbers, permutation


def test_streams_are_the_same_everywhere() -> None:
    """Recorded once: whoever computes an order must get these, on any platform, with any numpy."""
    assert numbers(7, Purpose.ORDER, 3, 3).tolist() == [980127395369309816, 10958090657380510566, 6746002740061119906]
    assert permutation(7, Purpose.ORDER, 3, 12).tolist() == [0, 2, 7, 11, 6, 4, 1, 8, 9, 5, 10, 3]
    exact = ["0x1.c57c1c538f177p-3", "0x1.6b4654eb3fbddp+1", "0x1.bf180265447f3p-2", "0x1.d6f803a42b334p+1"]
    assert [value.hex() for value in exponentials(7, Purpose.IMPORTANCE, 3, 4).tolist()] == exact


def test_streams_differ() -> None:
    chosen = [(seed, purpose, epoch) for seed in (0, 1, 2**64 - 1) for purpose in Purpose for epoch in (0, 1, 90)]
    first = [tuple(numbers(*stream, 2).tolist()) for stream in chosen]
    assert len(set(first)) == len(chosen)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 300))
def test_permutations(seed: int, epoch: int, count: int) -> None:
    assert sorted(permutation(seed, Purpose.ORDER, epoch, count).tolist()) == list(range(count))


def test_permutations_are_equally_likely() -> None:
    """All 24 of four items, 250 times each but for chance: chi squared with 23 degrees is below 60 (1 in 30,000)."""
    seen = Counter(tuple(permutation(1, Purpose.ORDER, epoch, 4).tolist()) for epoch in range(6000))
    assert len(seen) == 24
    assert sum((count - 250) ** 2 / 250 for count in seen.values()) < 60


def test_exponentials_are_logarithms() -> None:
    uniform = [((number >> 12) + 0.5) / 2**52 for number in numbers(1, Purpose.IMPORTANCE, 0, 20_000).tolist()]
    ours = exponentials(1, Purpose.IMPORTANCE, 0, 20_000)
    assert (ours > 0).all()
    assert max(abs(value + math.log(u)) for value, u in zip(ours, uniform, strict=True)) < 1e-14
    assert abs(ours.mean() - 1) < 0.03


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_dealing_in_turn(sizes: list[int]) -> None:
    expected = []
    left = list(sizes)
    while any(left):
        for rank in range(len(sizes)):
            if left[rank]:
                left[rank] -= 1
                expected.append(rank)
    assert in_turn(np.array(sizes)).tolist() == expected


@settings(deadline=None)
@given(st.data())
def test_dealing_to_owners(data: st.DataObject) -> None:
    """As few as possible go to others, and batches have the samples they would have in turn."""
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    batch = data.draw(st.none() | st.integers(1, 5))
    owners = data.draw(st.permutations([rank for rank, size in enumerate(sizes) for _ in range(size)]))
    dealt = to_owners(as_labels(np.array(owners, dtype=np.int64), len(sizes)), np.array(sizes), batch).tolist()

    begin = number = 0
    while begin < len(owners):
        steps = batch or len(owners)
        quota = [min(steps, max(0, size - number * steps)) for size in sizes]
        end = begin + sum(quota)
        assert [dealt[begin:end].count(rank) for rank in range(len(sizes))] == quota
        owned = Counter(owners[begin:end])
        stay = sum(owner == reader for owner, reader in zip(owners[begin:end], dealt[begin:end], strict=True))
        assert stay == sum(min(owned[rank], quota[rank]) for rank in range(len(sizes)))
        begin, number = end, number + 1


def test_groups() -> None:
    groups = Groups.of(np.array([5, 3, 9, 1]), as_labels(np.array([2, 0, 2, 0]), 4), 4)
    assert [groups[label].tolist() for label in range(4)] == [[3, 1], [], [5, 9], []]
    assert groups.sizes.tolist() == [2, 0, 2, 0]


def test_even_shares() -> None:
    assert ownership.even(10, 4).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert ownership.even(2, 3).tolist() == [0, 1]
    assert ownership.even(0, 3).tolist() == []
    assert ownership.even(3, 70_000).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=50), st.tuples(*[st.integers(1, 3)] * 4))
def test_shares_of_nodes(nodes: list[int], ranks: tuple[int, ...]) -> None:
    """A sample stays on its node, and a node's ranks have equally many, but for one."""
    owner = ownership.of_nodes(np.array(nodes, dtype=np.int64), ranks).tolist()
    node_of_rank = [node for node, count in enumerate(ranks) for _ in range(count)]
    assert [node_of_rank[rank] for rank in owner] == nodes
    for node in range(4):
        held = [owner.count(rank) for rank, its in enumerate(node_of_rank) if its == node]
        assert max(held) - min(held) <= 1


@pytest.mark.parametrize(
    ("nodes", "ranks", "complaint"),
    [
        ([0, 1], [1], "none of the 1 nodes"),
        ([-1], [1], "none of the 1 nodes"),
        ([0, 1], [2, 0], "node 1 holds samples"),
    ],
)
def test_shares_of_nodes_that_are_not_there(nodes: list[int], ranks: list[int], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        ownership.of_nodes(np.array(nodes), ranks)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0, 3.0, 2.0], [1, 3, 2]),
        ([1.0, math.nan, 2.0, 4.0], [1, 2, 2, 4]),
        ([1.0, math.inf, 3.0], [1, 3, 3]),
        ([-1.0, 0.0, 3.0], [4e-9, 1, 4]),
        ([-math.inf, 2.0, 3.0], [2, 2, 3]),
        ([0.0, 0.0], [1, 1]),
        ([math.nan, math.nan], [1, 1]),
        ([0.0, 10.0], [1e-8, 10]),
        ([], []),
    ],
)
def test_importance(losses: list[float], expected: list[float]) -> None:
    assert importance(np.array(losses)).tolist() == expected
