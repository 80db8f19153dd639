"""What shuffles do to a job: shares against expectations, forecasts against counts of the shuffles themselves."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_model_forecast import DATASET, NOTHING_SLOW, TRAINING

from fanstore.errors import UsageError
from fanstore.model.advice import Job, by_exchanged, by_shuffle
from fanstore.model.forecast import Link, Way
from fanstore.model.shuffling import Shuffling, by_fraction, shufflings
from fanstore.order import PartialLocalShuffle

SLOW_NETWORK = replace(NOTHING_SLOW, network_mb_per_s=10.0)


def named(nodes: int, gpus: int = 1, batch: int = 32, files: int = 200_000) -> dict[str, Shuffling]:
    return {one.name: one for one in shufflings(nodes, gpus, batch, files)}


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_shares_are_those_of_the_table(nodes: int) -> None:
    """docs/shuffling.md has them; N = 2, 8 and 64."""
    found = named(nodes)
    away = 1 - 1 / nodes
    assert found["global"].remote == away
    assert found["locality-aware"].remote == pytest.approx(math.sqrt(away / (2 * math.pi * 32)), rel=0.08)
    for fraction in (0.1, 0.3, 0.5, 0.9):
        one = found[f"partial, Q = {fraction:g}"]
        assert one.remote == pytest.approx(fraction * away, rel=0.02)
        assert one.share == pytest.approx(1 + fraction, rel=0.01)
    assert found["importance, pairs, Q = 0.1"].remote == pytest.approx(0.1, rel=0.02)
    assert found["local"].remote == 0 and found["local"].share == 1
    assert found["shards"].remote == pytest.approx(away, rel=0.15)


def test_ranks_on_one_node_exchange_within_it() -> None:
    found = named(nodes=4, gpus=8)
    assert found["partial, Q = 0.5"].remote == pytest.approx(0.5 * 3 / 4, rel=0.02)
    assert found["partial, Q = 0.5"].share == pytest.approx(1.5, rel=0.01)
    assert found["locality-aware"].remote < named(nodes=4)["locality-aware"].remote


def test_foreign_partitions_as_the_shuffle_moves_them() -> None:
    """With each exchange a node owns more that lies in partitions of others."""
    nodes, fraction = 4, 0.3
    order = PartialLocalShuffle(samples=8_000, ranks=nodes, fraction=fraction)
    (one,) = by_fraction(nodes, (fraction,))
    home = order.ownership(0)
    for epoch in range(6):
        foreign = float(np.mean(order.ownership(epoch) != home))
        assert one.foreign(nodes, epoch) == pytest.approx(foreign, abs=0.015)


def test_bytes_over_the_network() -> None:
    """Without memory everything foreign is read from its partition each time; with enough for what a node holds, only
    what comes."""
    nodes = TRAINING.nodes
    for memory_mb, share in ((0.0, None), (1.4 * DATASET.content_mb / nodes, 0.3 * (1 - 1 / nodes))):
        machine = replace(NOTHING_SLOW, memory_mb=memory_mb)
        job = Job(machine, DATASET, replace(TRAINING, epochs=4))
        (one,) = by_fraction(nodes, (0.3,))
        found = job.run(Way.FANSTORE, shuffling=one)
        for number, epoch in enumerate(found.epochs[1:], 1):
            expected = one.foreign(nodes, number) if share is None else share
            # A little of what comes was on the node before, and is still in its memory.
            assert epoch.network_mb == pytest.approx(expected * DATASET.content_mb, rel=0.06), (memory_mb, number)


def test_an_epoch_by_the_fraction() -> None:
    """Where the network is the limit, an epoch takes as long as what crosses it, and Q = 0 is local shuffling."""
    machine = replace(SLOW_NETWORK, memory_mb=2 * DATASET.content_mb / TRAINING.nodes)
    curve = by_exchanged(Job(machine, DATASET, TRAINING))
    seconds = [ways[Way.FANSTORE].later_s for ways in curve.values()]
    assert seconds == sorted(seconds) and seconds[0] < 0.01 * seconds[-1]
    assert curve[0.0][Way.FANSTORE].later_network_mb == 0
    assert curve[0.3][Way.FANSTORE].weakest is Link.NETWORK
    moved_mb = curve[0.3][Way.FANSTORE].later_network_mb / TRAINING.nodes
    assert curve[0.3][Way.FANSTORE].later_s == pytest.approx(moved_mb / 10, rel=1e-6)


def test_beside_global_shuffling() -> None:
    job = Job(SLOW_NETWORK, DATASET, TRAINING)
    found = {one.name: ways for one, ways in by_shuffle(job).items()}
    plain = job.run(Way.FANSTORE)
    assert found["global"][Way.FANSTORE] == plain
    assert found["local"][Way.FANSTORE].later_network_mb == 0
    assert found["locality-aware"][Way.FANSTORE].later_s < 0.5 * plain.later_s
    assert by_shuffle(replace(job, training=replace(TRAINING, nodes=1))) == {}


def test_less_than_a_batch() -> None:
    with pytest.raises(UsageError, match="an epoch has 100 samples, and one batch of all GPUs 128"):
        shufflings(nodes=4, gpus=1, batch=32, files=100)
