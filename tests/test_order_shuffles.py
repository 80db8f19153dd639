"""Shuffles that keep reads local: each sample once per epoch, balanced, deterministic, elastic, resumable."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.errors import UsageError
from fanstore.order import (
    DistributedLocality,
    GlobalShuffle,
    ImportanceExchange,
    LocalityAware,
    LocalShuffle,
    PartialLocalShuffle,
    ShardShuffle,
    Shuffle,
    TorchDistributedSampler,
    streams,
)
from fanstore.order import ownership as owners

FRACTIONS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
#: Every kind of shuffle, with the options that are its own.
KINDS: list[st.SearchStrategy[tuple[type[Shuffle], dict[str, Any]]]] = [
    st.tuples(st.just(GlobalShuffle), st.just({})),
    st.tuples(st.just(LocalShuffle), st.just({})),
    st.tuples(st.just(PartialLocalShuffle), st.fixed_dictionaries({"fraction": FRACTIONS})),
    st.tuples(
        st.just(ImportanceExchange),
        st.fixed_dictionaries({"fraction": FRACTIONS, "pairing": st.booleans(), "lagging": st.booleans()}),
    ),
    st.tuples(st.just(LocalityAware), st.fixed_dictionaries({"batch": st.integers(1, 9)})),
    st.tuples(
        st.just(ShardShuffle),
        st.fixed_dictionaries({"buffer": st.integers(1, 40), "shards": st.none() | st.integers(1, 9)}),
    ),
]
STAYING = (LocalShuffle, PartialLocalShuffle, ImportanceExchange)
EPOCHS = 4
SEED = 20_261_118
OPTIONS: dict[type[Shuffle], dict[str, Any]] = {
    GlobalShuffle: {},
    LocalShuffle: {},
    PartialLocalShuffle: {"fraction": 0.3},
    ImportanceExchange: {"fraction": 0.3},
    LocalityAware: {"batch": 4},
    ShardShuffle: {"buffer": 8, "shards": 10},
}
each_kind = pytest.mark.parametrize("kind", OPTIONS)


@st.composite
def shuffles(draw: st.DrawFn) -> Callable[[], Shuffle]:
    """How to make one; called twice, it makes equal ones."""
    kind, options = draw(st.one_of(KINDS))
    samples, ranks = draw(st.integers(0, 120)), draw(st.integers(1, 12))
    given = draw(st.none() | st.lists(st.integers(0, ranks - 1), min_size=samples, max_size=samples))
    return lambda: kind(samples=samples, ranks=ranks, seed=SEED, ownership=given, **options)


def record(order: Shuffle, epoch: int) -> None:
    """Losses as training would tell them: some are missing."""
    if isinstance(order, ImportanceExchange):
        losses = np.random.RandomState(epoch).exponential(size=order.sample_count)
        losses[::7] = math.nan
        order.record(epoch, losses)


def flat(parts: list[list[int]]) -> list[int]:
    return [sample for part in parts for sample in part]


def read(order: Shuffle, epoch: int) -> list[list[int]]:
    return [order.samples(epoch, rank).tolist() for rank in range(order.ranks)]


@settings(deadline=None)
@given(shuffles())
def test_each_sample_once_and_as_many_sent_as_received(make: Callable[[], Shuffle]) -> None:
    order = make()
    shares = np.bincount(order.ownership(0), minlength=order.ranks)
    for epoch in range(EPOCHS):
        owner = order.ownership(epoch)
        by_rank = read(order, epoch)
        assert sorted(flat(by_rank)) == list(range(order.sample_count))
        assert [len(samples) for samples in by_rank] == shares.tolist()
        assert np.bincount(owner, minlength=order.ranks).tolist() == shares.tolist()
        if isinstance(order, STAYING):
            assert all((owner[samples] == rank).all() for rank, samples in enumerate(by_rank) if samples)
        record(order, epoch)
        after = order.ownership(epoch + 1)
        traffic = order.traffic(epoch)
        for rank in range(order.ranks):
            exchange = order.exchange(epoch, rank)
            assert len(exchange.sent) == len(exchange.received) == traffic.sent[rank] == traffic.received[rank]
            assert (owner[exchange.sent] == rank).all() and (owner[exchange.received] == exchange.origin).all()
            assert (exchange.to != rank).all() and (exchange.origin != rank).all()
            if isinstance(order, STAYING):
                assert (after[exchange.received] == rank).all() and (after[exchange.sent] == exchange.to).all()
                assert shares[rank] + len(exchange.received) <= order.room(rank)
            else:
                mine = set(by_rank[rank])
                assert set(exchange.received.tolist()) == {s for s in mine if owner[s] != rank}
                assert set(exchange.sent.tolist()) == {
                    s for s in np.flatnonzero(owner == rank).tolist() if s not in mine
                }


@settings(deadline=None)
@given(shuffles())
def test_deterministic(make: Callable[[], Shuffle]) -> None:
    """Another process gets the same, whatever was asked for before, as far as it may be asked for."""
    first, second = make(), make()
    orders = []
    for epoch in range(EPOCHS):
        orders.append(read(first, epoch))
        record(first, epoch)
        first.exchange(epoch, 0)
    for epoch in range(EPOCHS - 1):
        record(second, epoch)
    assert read(second, EPOCHS - 1) == orders[-1]
    if not isinstance(second, ImportanceExchange):
        assert [read(second, epoch) for epoch in range(EPOCHS)] == orders


@settings(deadline=None)
@given(shuffles(), st.integers(0, 3), st.integers(0, 40), st.integers(1, 12), st.integers(0, 10))
def test_elastic(make: Callable[[], Shuffle], epoch: int, position: int, ranks: int, again: int) -> None:
    """Stopped in the middle of an epoch, started with other ranks, and once more."""
    order = make()
    for past in range(epoch):
        record(order, past)
    done: list[int] = []
    for begun, stopped_at in ((order, position), (order.restart(epoch, position, ranks=ranks), again)):
        done += flat([samples[:stopped_at] for samples in read(begun, epoch)])
        assert sorted(done + begun.remaining(epoch, stopped_at).tolist()) == list(range(order.sample_count))
        last = begun
    rest = read(last.restart(epoch, again, ranks=3), epoch)
    assert sorted(done + flat(rest)) == list(range(order.sample_count))
    lengths = [len(samples) for samples in rest]
    assert max(lengths) - min(lengths) <= 1

    restarted = order.restart(epoch, position, ranks=ranks)
    assert restarted.ranks == ranks and len(flat(read(restarted, epoch + 1))) == order.sample_count


@each_kind
def test_a_restart_goes_on_with_the_same_seed(kind: type[Shuffle]) -> None:
    """The epochs after it are those of a job that began there with these ranks; nothing of epoch 0 comes again."""
    order = kind(samples=1000, ranks=8, seed=5, **OPTIONS[kind])
    restarted = order.restart(3, 60, ranks=5)
    begun = kind(samples=1000, ranks=5, seed=5, first_epoch=3, **OPTIONS[kind])
    assert read(restarted, 4) == read(begun, 4)
    assert read(restarted, 3) != read(begun, 3)
    assert read(begun, 3) != read(kind(samples=1000, ranks=5, seed=5, **OPTIONS[kind]), 0)
    with pytest.raises(UsageError, match="this order begins with epoch 3; there is no epoch 2"):
        restarted.samples(2, 0)


@each_kind
def test_a_restart_with_what_was_owned(kind: type[Shuffle]) -> None:
    """A job that saved its ownership goes on as if it had never stopped."""
    order = kind(samples=200, ranks=4, seed=5, **OPTIONS[kind])
    for epoch in range(2):
        record(order, epoch)
    saved = order.ownership(2)
    again = kind(samples=200, ranks=4, seed=5, first_epoch=2, ownership=saved, **OPTIONS[kind])
    assert read(order, 2) == read(again, 2)
    for epoch in (1, 2, 3) if isinstance(again, ImportanceExchange) else ():
        record(again, epoch)
    record(order, 2)
    record(order, 3)
    assert read(order, 4) == read(again, 4)


@each_kind
def test_seeds_and_epochs_differ(kind: type[Shuffle]) -> None:
    first, second = (kind(samples=400, ranks=4, seed=seed, **OPTIONS[kind]) for seed in (0, 1))
    orders = [read(order, epoch) for order in (first, second) for epoch in range(3)]
    assert all(one != other for i, one in enumerate(orders) for other in orders[:i])


#: Recorded once: seed 7, 20 samples, 3 ranks, epoch 2, rank 1. They stay, or a job that goes on reads something else.
GOLDEN: dict[type[Shuffle], list[int]] = {
    GlobalShuffle: [16, 3, 6, 8, 19, 18, 7],
    LocalShuffle: [13, 12, 8, 10, 9, 11, 7],
    PartialLocalShuffle: [13, 17, 8, 10, 15, 18, 7],
    ImportanceExchange: [14, 16, 12, 8, 9, 11, 7],
    LocalityAware: [13, 6, 12, 8, 10, 9, 11],
    ShardShuffle: [19, 1, 6, 18, 0, 7, 11],
}


@each_kind
def test_golden(kind: type[Shuffle]) -> None:
    order = kind(samples=20, ranks=3, seed=7, **OPTIONS[kind])
    if isinstance(order, ImportanceExchange):
        order.record(0, np.arange(20))
    assert order.samples(2, 1).tolist() == GOLDEN[kind]


# ---- Partial local shuffling ---------------------------------------------------------------------------------------


def test_fractions_from_local_to_everything() -> None:
    local = LocalShuffle(samples=120, ranks=4, seed=3)
    none = PartialLocalShuffle(samples=120, ranks=4, fraction=0, seed=3)
    assert [read(none, epoch) for epoch in range(3)] == [read(local, epoch) for epoch in range(3)]
    assert (none.room(0), none.traffic(1).share) == (30, 0.0)
    everything = PartialLocalShuffle(samples=120, ranks=4, fraction=1, seed=3)
    assert everything.room(0) == 60
    assert everything.slots.tolist() == [30] * 4


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_what_crosses_is_the_fraction(fraction: float, ranks: int) -> None:
    """Q (1 - 1/M) of the samples: what stays where it is by chance does not cross. Room: (1 + Q) N/M."""
    samples = 64_000
    order = PartialLocalShuffle(samples=samples, ranks=ranks, fraction=fraction, seed=1)
    share = np.mean([order.traffic(epoch).share for epoch in range(10)])
    assert share == pytest.approx(fraction * (1 - 1 / ranks), rel=0.02)
    assert order.room(0) == round((1 + fraction) * samples / ranks)


def test_each_slot_sends_one_and_receives_one() -> None:
    """A rank has as many partners as slots allow, not one: all-to-all."""
    order = PartialLocalShuffle(samples=6400, ranks=64, fraction=0.5, seed=1)
    partners = order.traffic(0).partners
    assert partners.min() > 25 and partners.max() <= 50


def test_samples_spread_over_all_ranks() -> None:
    """After some epochs with Q = 0.3 the samples of rank 0 are everywhere."""
    order = PartialLocalShuffle(samples=8000, ranks=8, fraction=0.3, seed=2)
    now = order.ownership(30)[:1000]
    assert np.bincount(now, minlength=8).min() > 80


def test_bytes_that_cross() -> None:
    order = PartialLocalShuffle(samples=100, ranks=4, fraction=0.4, seed=2)
    sizes = np.arange(100) * 1000
    traffic = order.traffic(0, sizes)
    assert traffic.sent_bytes is not None and traffic.received_bytes is not None
    for rank in range(4):
        exchange = order.exchange(0, rank)
        assert traffic.sent_bytes[rank] == sizes[exchange.sent].sum()
        assert traffic.received_bytes[rank] == sizes[exchange.received].sum()
    assert order.traffic(0).sent_bytes is None


# ---- Importance ----------------------------------------------------------------------------------------------------


def test_important_samples_are_exchanged() -> None:
    """Ten times the loss, and they are nearly all exchanged; the others hardly."""
    order = ImportanceExchange(samples=8000, ranks=8, fraction=0.1, pairing=False, lagging=False, seed=1)
    losses = np.ones(8000)
    important = np.arange(0, 8000, 20)
    losses[important] = 1000
    order.record(0, losses)
    sent = order.transfers(0).samples
    assert len(sent) == pytest.approx(700, abs=40)
    assert np.isin(important, sent).mean() > 0.8


def test_draws_are_in_proportion_to_importance() -> None:
    """One of four samples, with losses 1, 2, 3, 4: a tenth of them each."""
    counts = np.zeros(4)
    for seed in range(3000):
        order = ImportanceExchange(samples=8, ranks=2, fraction=0.25, lagging=False, seed=seed)
        order.record(0, [1, 2, 3, 4, 1, 1, 1, 1])
        counts[order.exchange(0, 0).sent[0]] += 1
    assert np.allclose(counts / 3000, [0.1, 0.2, 0.3, 0.4], atol=0.03)


def test_pairs_are_the_most_and_the_least_important() -> None:
    order = ImportanceExchange(samples=50, ranks=5, fraction=0.5, lagging=False, seed=1)
    order.record(0, np.repeat([5.0, 1.0, 3.0, 4.0, 2.0], 10))
    exchanges = [order.exchange(0, rank) for rank in range(5)]
    assert [set(exchange.to.tolist()) for exchange in exchanges] == [{1}, {0}, set(), {4}, {3}]
    assert [len(exchange.sent) for exchange in exchanges] == [5, 5, 0, 5, 5]
    assert order.traffic(0).partners.tolist() == [1, 1, 0, 1, 1]


def test_without_losses_pairs_change_by_chance() -> None:
    order = ImportanceExchange(samples=80, ranks=8, fraction=0.5, seed=1)
    pairs = {tuple(order.partners(epoch, order.ownership(epoch)).tolist()) for epoch in range(5)}
    assert len(pairs) == 5


@pytest.mark.parametrize("lagging", [False, True])
def test_which_losses_count(lagging: bool) -> None:
    """Lagging: those of the epoch before. The latest that are there, if one was not told."""

    def exchanged(*recorded: int) -> list[int]:
        order = ImportanceExchange(samples=80, ranks=2, fraction=0.2, lagging=lagging, seed=1)
        for epoch in recorded:
            order.record(epoch, np.random.RandomState(epoch).exponential(size=80))
        sent: list[int] = order.exchange(2, 0).sent.tolist()
        return sent

    decides = 1 if lagging else 2
    assert exchanged(decides) != exchanged()
    assert exchanged(decides) != exchanged(decides - 1)
    if lagging:
        assert exchanged(1, 2) == exchanged(1)  # of this epoch: too new


def test_losses_that_come_too_late() -> None:
    order = ImportanceExchange(samples=8, ranks=2, fraction=0.5)
    order.record(0, np.ones(8))
    order.exchange(1, 0)
    order.record(1, np.ones(8))
    with pytest.raises(UsageError, match="losses of epoch 0 come too late: the exchange in epoch 1 is decided"):
        order.record(0, np.ones(8))
    order.exchange(6, 0)
    with pytest.raises(UsageError, match="epoch 1 follows from losses that were forgotten"):
        order.samples(1, 0)


@pytest.mark.parametrize("losses", [[math.nan] * 12, [-5.0] * 12, [math.inf] * 6 + [-math.inf] * 6, [0.0] * 12])
def test_strange_losses(losses: list[float]) -> None:
    order = ImportanceExchange(samples=12, ranks=3, fraction=0.5, lagging=False)
    order.record(0, losses)
    assert sorted(flat(read(order, 1))) == list(range(12))


# ---- Locality ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 8), st.integers(1, 7), st.integers(0, 3))
def test_global_batches_are_those_of_global_shuffling(samples: int, ranks: int, batch: int, epoch: int) -> None:
    """So the gradient of each step is the same."""
    plain = GlobalShuffle(samples=samples, ranks=ranks, seed=9)
    local = LocalityAware(samples=samples, ranks=ranks, batch=batch, seed=9)
    for step in range(-(-samples // (ranks * batch))):
        batches = []
        for order in (plain, local):
            parts = [part[step * batch : (step + 1) * batch] for part in read(order, epoch)]
            batches.append((sorted(flat(parts)), [len(part) for part in parts]))
        assert batches[0] == batches[1]


def expected_remote(ranks: int, batch: int) -> float:
    """What a rank owns of a global batch is binomial; what is above its own batch is read by others."""
    trials = ranks * batch
    excess = 0.0
    for owned in range(batch + 1, trials + 1):
        log = math.lgamma(trials + 1) - math.lgamma(owned + 1) - math.lgamma(trials - owned + 1)
        excess += (owned - batch) * math.exp(log - owned * math.log(ranks) + (trials - owned) * math.log(1 - 1 / ranks))
    return excess / batch


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_remote_reads_are_as_few_as_expected(ranks: int) -> None:
    order = LocalityAware(samples=ranks * 32 * 100, ranks=ranks, batch=32, seed=4)
    share = np.mean([order.traffic(epoch).share for epoch in range(3)])
    assert share == pytest.approx(expected_remote(ranks, 32), rel=0.1)
    assert GlobalShuffle(samples=ranks * 3200, ranks=ranks).traffic(0).share == pytest.approx(1 - 1 / ranks, abs=0.02)


def test_remote_reads_with_8_ranks() -> None:
    assert expected_remote(8, 32) == pytest.approx(0.066, abs=0.001)
    assert LocalityAware(samples=1_281_167, ranks=8, batch=32).traffic(0).share < 0.075


@settings(deadline=None)
@given(st.data(), st.integers(0, 90), st.integers(1, 8), st.integers(1, 7), st.booleans())
def test_global_batches_of_torch_in_another_way(
    data: st.DataObject, samples: int, ranks: int, batch: int, drop_last: bool
) -> None:
    """DistributedSampler with padding or without: the same samples per global batch, as many for each rank."""
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    held = data.draw(st.lists(st.sampled_from(nodes), min_size=samples, max_size=samples))
    plain = TorchDistributedSampler(samples, ranks, 5, drop_last=drop_last)
    node_of_sample = np.array(held, dtype=np.int64)
    local, again = (DistributedLocality(plain, batch, node_of_sample, nodes) for _ in range(2))
    for epoch in (0, 3, 1):
        ours = [local.samples(epoch, rank).tolist() for rank in range(ranks)]
        theirs = [plain.samples(epoch, rank).tolist() for rank in range(ranks)]
        assert ours == [again.samples(epoch, rank).tolist() for rank in range(ranks)]
        assert [len(part) for part in ours] == [len(part) for part in theirs]
        for start in range(0, len(theirs[0]), batch):
            batches = [[part[start : start + batch] for part in parts] for parts in (ours, theirs)]
            assert sorted(flat(batches[0])) == sorted(flat(batches[1]))
        # No other dealing of a batch leaves more of its samples where they are.
        place = np.arange(len(ours[0]) * ranks) // (batch * ranks)
        most = 0
        for step in range(-(-len(ours[0]) // batch)):
            there = np.bincount(node_of_sample[plain.sequence(epoch)[place == step]], minlength=4)
            each = len(ours[0][step * batch : (step + 1) * batch])
            most += int(np.minimum(there, np.bincount(nodes, minlength=4) * each).sum())
        assert sum(local.held(epoch, rank) for rank in range(ranks)) == most


class LikeOurs(TorchDistributedSampler):
    """The permutations of our own shuffles instead of torch's."""

    def sequence(self, epoch: int) -> Any:
        return streams.permutation(self.seed, streams.Purpose.ORDER, epoch, self.sample_count)


def test_what_programs_read_is_what_the_sampler_would_give() -> None:
    """With one rank on each node, an unchanged program reads as with LocalityAware, but for torch's permutation."""
    samples, ranks, batch = 640, 8, 10
    owner = owners.even(samples, ranks)
    changed = LocalityAware(samples=samples, ranks=ranks, batch=batch, seed=4)
    unchanged = DistributedLocality(LikeOurs(samples, ranks, 4), batch, owner.astype(np.int64), range(ranks))
    for rank in range(ranks):
        assert unchanged.samples(2, rank).tolist() == changed.samples(2, rank).tolist()


# ---- Shards --------------------------------------------------------------------------------------------------------


def test_shards_are_read_in_sequence() -> None:
    """With a buffer of one sample nothing is mixed: whole shards, ascending, each once."""
    order = ShardShuffle(samples=100, ranks=3, buffer=1, shards=[10, 20, 30, 40], seed=1)
    together = np.array(flat(read(order, 0)))
    begins = together[np.diff(together, prepend=-99) != 1]  # shards that follow each other by chance are one piece
    assert 1 < len(begins) <= 4 and set(begins.tolist()) <= {0, 10, 30, 60}


def test_the_buffer_mixes_no_further_than_it_is_long() -> None:
    order = ShardShuffle(samples=2000, ranks=1, buffer=50, shards=1, seed=1)
    samples = order.samples(0, 0)
    ahead = samples - np.arange(2000)
    assert ahead.max() <= 49 and ahead.min() < -100  # never early by more, but late by chance
    assert order.room(0) == 2050


# ---- Bad input, large input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: GlobalShuffle(samples=-1, ranks=1), "'samples' is -1"),
        (lambda: GlobalShuffle(samples=1, ranks=0), "'ranks' is 0"),
        (lambda: GlobalShuffle(samples=1, ranks=1, seed=-1), "'seed' is -1; it must be between 0 and 2^64 - 1"),
        (lambda: GlobalShuffle(samples=3, ranks=1, ownership=[0, 0]), "must be an array of 3 integers"),
        (lambda: GlobalShuffle(samples=2, ranks=1, ownership=[0.0, 0.5]), "must be an array of 2 integers"),
        (lambda: GlobalShuffle(samples=2, ranks=2, ownership=[0, 2]), "not among the 2 ranks"),
        (lambda: GlobalShuffle(samples=2, ranks=2, ownership=[0, -1]), "not among the 2 ranks"),
        (lambda: GlobalShuffle(samples=2, ranks=2).samples(0, 2), "there is no rank 2"),
        (lambda: GlobalShuffle(samples=2, ranks=2).samples(-1, 0), "'epoch' is -1"),
        (lambda: GlobalShuffle(samples=2, ranks=2).remaining(0, -1), "'position' is -1"),
        (lambda: GlobalShuffle(samples=2, ranks=2).restart(0, 0, ranks=0), "'ranks' is 0"),
        (
            lambda: PartialLocalShuffle(samples=2, ranks=2, fraction=1.1),
            "'fraction' is 1.1; it must be between 0 and 1",
        ),
        (lambda: PartialLocalShuffle(samples=2, ranks=2, fraction=math.nan), "'fraction' is nan"),
        (lambda: LocalityAware(samples=2, ranks=2, batch=0), "'batch' is 0"),
        (lambda: ShardShuffle(samples=2, ranks=2, buffer=0), "'buffer' is 0"),
        (lambda: ShardShuffle(samples=2, ranks=2, buffer=1, shards=[1]), "2 together"),
        (lambda: ShardShuffle(samples=2, ranks=2, buffer=1, shards=0), "'shards' is 0"),
        (lambda: ImportanceExchange(samples=2, ranks=2, fraction=1).record(0, [1]), "an array of 2 numbers"),
    ],
)
def test_bad_input(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@each_kind
def test_more_ranks_than_samples(kind: type[Shuffle]) -> None:
    order = kind(samples=3, ranks=8, **{**OPTIONS[kind], **({"shards": 2} if kind is ShardShuffle else {})})
    for epoch in range(3):
        assert sorted(flat(read(order, epoch))) == [0, 1, 2]
        assert (order.traffic(epoch).sent == order.traffic(epoch).received).all()


LARGE = """
import sys
import numpy as np
from fanstore import order

kind, options = getattr(order, sys.argv[1]), eval(sys.argv[2])
shuffle = kind(samples=1_300_000, ranks=2_048, seed=1, **options)
for epoch in range(2):
    assert len(shuffle.samples(epoch, 1_000)) in (634, 635)
    if kind is order.ImportanceExchange:
        shuffle.record(epoch, np.ones(1_300_000, dtype=np.float32))
    exchange = shuffle.exchange(epoch, 1_000)
    assert len(exchange.sent) == len(exchange.received)
assert (np.bincount(shuffle.plan(1).items) == 1).all()
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM")))
"""


@each_kind
def test_a_plan_for_a_large_job_is_small(kind: type[Shuffle]) -> None:
    """1.3 million samples on 2,048 ranks: whole epochs, with the exchange, in less than 200 MB of memory."""
    command = [sys.executable, "-c", LARGE, kind.__name__, repr(OPTIONS[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200


@settings(deadline=None)
@given(data=st.data())
def test_samples_go_to_ranks_of_nodes_that_hold_them(data: st.DataObject) -> None:
    nodes, partitions = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    holders = [data.draw(st.sets(st.integers(0, nodes - 1), max_size=3)) for _ in range(partitions)]
    node_of_rank = data.draw(st.lists(st.integers(0, nodes - 1), min_size=1, max_size=7))
    partition = np.array(data.draw(st.lists(st.integers(-1, partitions - 1), max_size=60)), dtype=np.int64)
    owner = owners.of_holders(partition, holders, node_of_rank)
    assert owner.shape == partition.shape and all(0 <= rank < len(node_of_rank) for rank in owner)
    free = 0
    for sample, rank in enumerate(owner):
        able = holders[partition[sample]] & set(node_of_rank) if partition[sample] >= 0 else set()
        assert not able or node_of_rank[rank] in able
        free += not able
    assert owner.tolist() == owners.of_holders(partition, holders, node_of_rank).tolist()
    shares = np.bincount(owner, minlength=len(node_of_rank))
    for node in set(node_of_rank):  # what a node holds is shared evenly; the rest is for those who have little
        on_node = [int(shares[rank]) for rank, where in enumerate(node_of_rank) if where == node]
        assert max(on_node) - min(on_node) <= 1 + free
    even = np.bincount(owners.balanced(owner, len(node_of_rank)), minlength=len(node_of_rank))
    assert even.max() - even.min() <= 1
    moved = int((owners.balanced(owner, len(node_of_rank)) != owner).sum())
    assert moved == int(np.maximum(shares - owners.even_sizes(len(owner), len(node_of_rank)), 0).sum())


def test_copies_are_used_to_even_out_shares() -> None:
    """Two nodes hold everything: each gets half of it."""
    owner = owners.of_holders(np.repeat(np.arange(8), 5), [[0, 1]] * 8, [0, 1])
    assert np.bincount(owner).tolist() == [20, 20]
