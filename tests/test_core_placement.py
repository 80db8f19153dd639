"""Placement: the same on every node, balanced, within each node's room; and the room itself."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fanstore.dataset.capacity import RESERVE_BYTES, Disk, divide, room_for, survey
from fanstore.dataset.placement import Placement, place, restore

PLENTY = 1 << 62

#: Length and whether it belongs on every node.
Partition = tuple[int, bool]

sizes = st.one_of(st.integers(0, 20), st.integers(1, 1 << 40))
partition_lists = st.lists(st.tuples(sizes, st.booleans()), max_size=30)
room_lists = st.lists(st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 1 << 41), st.just(PLENTY)), max_size=9)


def placed(partitions: list[Partition], room: list[int], replicas: int) -> Placement:
    return place([size for size, _ in partitions], [everywhere for _, everywhere in partitions], room, replicas)


def loads(placement: Placement, ranks: int) -> list[int]:
    return [placement.bytes_of_rank(rank) for rank in range(ranks)]


@given(partition_lists, room_lists, st.integers(1, 5))
def test_what_always_holds(partitions: list[Partition], room: list[int], replicas: int) -> None:
    placement = placed(partitions, room, replicas)
    assert placement == placed(partitions, room, replicas), "every node computes the same"
    assert len(placement.holders) == len(partitions)
    for (_, everywhere), holders in zip(partitions, placement.holders, strict=True):
        assert list(holders) == sorted(set(holders)), "at most one copy per rank, ascending"
        assert everywhere or len(holders) <= replicas
        assert all(room[rank] > 0 for rank in holders)
    assert all(load <= limit for load, limit in zip(loads(placement, len(room)), room, strict=True))
    nowhere = set(placement.nowhere())
    everything = [partition for rank in range(len(room)) for partition in placement.of_rank(rank)]
    assert set(everything) | nowhere == set(range(len(partitions)))
    assert not nowhere & set(everything)
    assert len(everything) == sum(map(len, placement.holders))
    for rank in range(len(room)):
        assert sorted(placement.staging_order(rank)) == list(placement.of_rank(rank))


@given(partition_lists, room_lists, st.integers(1, 5))
def test_nothing_is_left_out_that_fits(partitions: list[Partition], room: list[int], replicas: int) -> None:
    """A copy that is missing would not fit on any rank that does not have one; not even where others could go first."""
    placement = placed(partitions, room, replicas)
    load = loads(placement, len(room))
    for partition, (size, everywhere) in enumerate(partitions):
        holders = placement.holders[partition]
        if everywhere or len(holders) < replicas:
            for rank, limit in enumerate(room):
                if rank not in holders and limit > 0:
                    assert load[rank] + size > limit


@given(partition_lists, st.integers(1, 9), st.integers(1, 5))
def test_replicas_where_there_is_room(partitions: list[Partition], ranks: int, replicas: int) -> None:
    placement = placed(partitions, [PLENTY] * ranks, replicas)
    for (_, everywhere), holders in zip(partitions, placement.holders, strict=True):
        assert len(holders) == (ranks if everywhere else min(replicas, ranks))


@given(partition_lists, st.lists(st.sampled_from([0, PLENTY]), min_size=1, max_size=9), st.integers(1, 5))
def test_balance(partitions: list[Partition], room: list[int], replicas: int) -> None:
    """Two ranks differ by no more than the largest partition."""
    placement = placed(partitions, room, replicas)
    used = [load for load, limit in zip(loads(placement, len(room)), room, strict=True) if limit]
    if used:
        assert max(used) - min(used) <= max((size for size, everywhere in partitions if not everywhere), default=0)


def test_copies_of_equal_partitions_are_spread_evenly() -> None:
    placement = place([5, 5, 5], [False] * 3, [PLENTY] * 3, 2)
    assert loads(placement, 3) == [10, 10, 10]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(2, 6), st.integers(2, 4))
def test_first_copies_come_before_second_ones(sizes: list[int], ranks: int, replicas: int) -> None:
    """Where there is room for one copy of everything, no second copy takes the place of a first one."""
    room = [sum(sizes)] + [max(sizes)] * (ranks - 1)
    once = place(sizes, [False] * len(sizes), room, 1)
    several = place(sizes, [False] * len(sizes), room, replicas)
    assert set(several.nowhere()) <= set(once.nowhere())


def with_held(
    partitions: list[Partition], room: list[int], replicas: int, held: Sequence[Collection[int]]
) -> Placement:
    return place([size for size, _ in partitions], [everywhere for _, everywhere in partitions], room, replicas, held)


@given(partition_lists, st.lists(st.sampled_from([0, PLENTY]), min_size=1, max_size=9), st.integers(1, 5), st.data())
def test_the_same_job_finds_everything_where_it_was(
    partitions: list[Partition], room: list[int], replicas: int, data: st.DataObject
) -> None:
    """On the same nodes in any order."""
    first = placed(partitions, room, replicas)
    now = data.draw(st.permutations(range(len(room))))
    held = [{now[rank] for rank in ranks} for ranks in first.holders]
    again = with_held(partitions, [room[now.index(rank)] for rank in range(len(room))], replicas, held)
    assert [set(ranks) for ranks in again.holders] == held
    assert again.held == again.holders
    assert all(again.to_copy(rank) == () for rank in range(len(room)))


@given(partition_lists, room_lists, st.integers(1, 5), st.data())
def test_what_always_holds_with_held_copies(
    partitions: list[Partition], room: list[int], replicas: int, data: st.DataObject
) -> None:
    ranks = st.sets(st.integers(0, len(room) - 1)) if room else st.just(set[int]())
    held = data.draw(st.lists(ranks, min_size=len(partitions), max_size=len(partitions)))
    placement = with_held(partitions, room, replicas, held)
    used = loads(placement, len(room))
    assert all(load <= limit for load, limit in zip(used, room, strict=True))
    for partition, ((size, everywhere), holders) in enumerate(zip(partitions, placement.holders, strict=True)):
        assert everywhere or len(holders) <= replicas
        assert set(placement.held[partition]) == set(holders) & held[partition]
        if everywhere or len(holders) < replicas:
            assert all(used[r] + size > limit for r, limit in enumerate(room) if r not in holders and limit > 0)
    for rank in range(len(room)):
        assert set(placement.to_copy(rank)) == {p for p in placement.of_rank(rank) if rank not in held[p]}


@given(partition_lists, st.integers(1, 9), st.integers(1, 5))
def test_a_job_on_more_nodes_is_balanced_again(partitions: list[Partition], ranks: int, replicas: int) -> None:
    """All copies are on rank 0, from a job of one node."""
    placement = with_held(partitions, [PLENTY] * ranks, replicas, [[0]] * len(partitions))
    used = loads(placement, ranks)
    assert max(used) - min(used) <= 2 * max((size for size, everywhere in partitions if not everywhere), default=0)


def test_room_that_kept_copies_give() -> None:
    disks = [Disk("a", 100, None, 60, "a:1"), Disk("a", 100, None, 60, "a:1"), Disk("a", 100, 40, 30, "a:2")]
    assert divide(disks) == (33 + 30, 33 + 30, 40)


def test_fewer_partitions_than_nodes() -> None:
    placement = place([10, 20], [False, False], [PLENTY] * 4, 1)
    assert placement.holders == ((1,), (0,))
    assert [placement.of_rank(rank) for rank in range(4)] == [(1,), (0,), (), ()]


def test_one_node_with_too_little_room() -> None:
    placement = place([10, 30, 5], [False, False, True], [16], 3)
    assert placement.holders == ((0,), (), (0,))
    assert placement.nowhere() == (1,)
    assert placement.bytes_of_rank(0) == 15


def test_without_local_everything_stays_where_it_is() -> None:
    placement = place([10, 0], [False, True], [0, 0], 2)
    assert placement.nowhere() == (0, 1)
    assert placement.staging_order(0) == ()


def test_the_first_half_of_staging_has_each_partition_somewhere() -> None:
    placement = place([100] * 40, [False] * 40, [PLENTY] * 2, 2)
    early = {partition for rank in range(2) for partition in placement.staging_order(rank)[:20]}
    assert early == set(range(40))


@pytest.mark.timeout(30)
def test_many_partitions_on_many_nodes() -> None:
    placement = place([1 << 30] * 5000, [number < 5 for number in range(5000)], [1 << 35] * 1000, 3)
    assert not placement.nowhere()
    assert max(loads(placement, 3)) <= 1 << 35


def test_ranks_on_one_disk_share_it() -> None:
    disks = [Disk("a", 100), None, Disk("a", 90), Disk("b", 100), Disk("a", 100, capacity_bytes=10)]
    assert divide(disks) == (33, 0, 30, 100, 10)


def test_room_is_what_is_free_without_the_reserve(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    room = room_for(tmp_path)
    assert 0 <= room <= max(0, usage.f_bavail * usage.f_frsize - RESERVE_BYTES) + (64 << 20)
    assert room_for(tmp_path, 1000) == min(1000, room)
    assert survey(tmp_path).name == survey(tmp_path / "..").name
    assert survey(tmp_path).name != survey(Path("/proc")).name
    assert room_for(Path("/proc")) == 0


# --- after deaths ---


def left(placement: Placement, lost: set[int]) -> list[set[int]]:
    return [set(ranks) - lost for ranks in placement.holders]


def with_more(
    copies: list[set[int]], more: tuple[tuple[int, ...], ...], ranks: set[int] | None = None
) -> list[set[int]]:
    """With what falls to these ranks, or to all."""
    return [
        now | {rank for rank in new if ranks is None or rank in ranks} for now, new in zip(copies, more, strict=True)
    ]


@given(partition_lists, room_lists, st.integers(1, 5), st.sets(st.integers(0, 8)), st.data())
def test_what_always_holds_after_deaths(
    partitions: list[Partition], room: list[int], replicas: int, lost: set[int], data: st.DataObject
) -> None:
    placement = placed(partitions, room, replicas)
    barred = data.draw(st.sets(st.tuples(st.integers(0, 8), st.integers(0, 30)), max_size=10))
    copies = left(placement, lost)
    more = restore(placement, copies, lost, barred)
    assert more == restore(placement, copies, lost, barred), "every node computes the same"
    final = with_more(copies, more)
    able = sum(limit > 0 and rank not in lost for rank, limit in enumerate(room))
    load = [
        sum(size for (size, _), ranks in zip(partitions, final, strict=True) if rank in ranks)
        for rank in range(len(room))
    ]
    assert all(used <= limit for used, limit in zip(load, room, strict=True))
    for partition, ((size, everywhere), now, new) in enumerate(zip(partitions, copies, more, strict=True)):
        assert not now & set(new) and not lost & set(new), "where it is not, and somebody lives"
        assert not any((rank, partition) in barred for rank in new)
        assert everywhere or len(now) + len(new) <= max(len(now), replicas)
        if len(final[partition]) < (able if everywhere else min(replicas, able)):
            for rank, limit in enumerate(room):
                if rank not in lost and rank not in final[partition] and limit > 0 and (rank, partition) not in barred:
                    assert load[rank] + size > limit, "what is missing does not fit"
    assert not any(restore(placement, final, lost, barred)), "then nothing is left to do"


@given(st.lists(st.tuples(sizes, st.booleans()), max_size=30), st.integers(1, 9), st.integers(1, 4), st.data())
def test_who_hears_first_what_others_have_taken_agrees_with_them(
    partitions: list[Partition], ranks: int, replicas: int, data: st.DataObject
) -> None:
    """With room for all: what falls to each is the same, whoever has said already what it takes upon itself."""
    placement = placed(partitions, [PLENTY] * ranks, replicas)
    lost = data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    copies = left(placement, lost)
    more = restore(placement, copies, lost, ())
    early = data.draw(st.sets(st.integers(0, ranks - 1)))
    later = restore(placement, with_more(copies, more, early), lost, ())
    assert later == tuple(tuple(rank for rank in new if rank not in early) for new in more)


def test_copies_are_restored_evenly() -> None:
    placement = placed([(10, False)] * 60, [PLENTY] * 6, 2)
    more = restore(placement, left(placement, {3}), {3}, ())
    taken = [sum(rank in new for new in more) for rank in range(6)]
    assert sum(taken) == len(placement.of_rank(3)) == 20
    assert taken[3] == 0 and max(taken) <= 6
