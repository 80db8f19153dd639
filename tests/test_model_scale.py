"""Very many nodes: counts against a slow count of the same thing, placement against FanStore's own, and the command."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from commands import run_inside
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.dataset.placement import place
from fanstore.errors import UsageError
from fanstore.model import scale as module
from fanstore.model.scale import Scale, bare_per_hour, simulate

SMALL = Scale(nodes=8, files=4_000, file_mb=0.1, epochs=3, batch=5, partition_mb=10.0, window=4)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("nodes", "partitions"), [(8, 40), (8, 5), (7, 30), (3, 100)])
def test_placement_is_fanstores_own(nodes: int, partitions: int, replicas: int) -> None:
    scale = replace(SMALL, nodes=nodes, partition_mb=SMALL.dataset_mb / partitions, replicas=replicas)
    size = 1 << 20
    own = place([size] * partitions, [False] * partitions, [1 << 40] * nodes, replicas)
    theirs = [sorted(scale.holder(partition, np.arange(replicas)).tolist()) for partition in range(partitions)]
    held = Counter(rank for ranks in own.holders for rank in ranks)
    ours = Counter(rank for ranks in theirs for rank in ranks)
    assert sorted(held.values()) == sorted(ours.values())
    assert all(len(set(ranks)) == replicas for ranks in theirs)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 9),
    batch=st.integers(1, 6),
    replicas=st.integers(1, 3),
    partitions=st.integers(1, 40),
    window=st.integers(1, 8),
    samples_per_s=st.sampled_from([math.inf, 1e3, 50.0]),
)
def test_counts_are_those_of_a_slow_count(
    nodes: int, batch: int, replicas: int, partitions: int, window: int, samples_per_s: float
) -> None:
    scale = replace(
        SMALL,
        nodes=nodes,
        files=max(300, nodes * batch),
        batch=batch,
        replicas=min(replicas, nodes),
        window=window,
        epochs=1,
        samples_per_s=samples_per_s,
    )
    scale = replace(scale, partition_mb=scale.dataset_mb / partitions)
    found = simulate(scale, seed=5)
    order = np.random.default_rng(5).permutation(np.arange(scale.files, dtype=np.int32)).tolist()
    served = [Counter[int]() for _ in range(scale.iterations)]
    fetched = [Counter[int]() for _ in range(scale.iterations)]
    place_ = 0
    for iteration in range(scale.iterations):
        for reader in range(nodes):
            for _ in range(batch):
                partition = order[place_] * scale.partitions // scale.files
                holders = [(partition * scale.replicas + copy) % nodes for copy in range(scale.replicas)]
                if reader not in holders:
                    served[iteration][holders[place_ % scale.replicas]] += 1
                    fetched[iteration][reader] += 1
                place_ += 1
    remote = sum(sum(counter.values()) for counter in served)
    assert found.exact and found.iterations == scale.iterations
    assert found.remote == pytest.approx(remote / place_)
    most = [max(counter.values(), default=0) for counter in served]
    assert found.asked_most == pytest.approx(np.mean(most))
    transfer_s = scale.file_mb / scale.network_mb_per_s
    compute_s = batch / samples_per_s
    busiest = [max(one, max(counter.values(), default=0)) for one, counter in zip(most, fetched, strict=True)]
    assert found.epoch_s == pytest.approx(sum(max(count * transfer_s, compute_s) for count in busiest))
    windows = 0.0
    for begin in range(0, scale.iterations, window):
        rows = range(begin, min(begin + window, scale.iterations))
        sums = [sum((rows_of[row] for row in rows), Counter()) for rows_of in (served, fetched)]
        busy = max(max(one.values(), default=0) for one in sums)
        windows += max(busy * transfer_s, len(rows) * compute_s)
    assert found.ordered_s == pytest.approx(windows)
    assert found.even_s <= found.ordered_s * (1 + 1e-9) and found.ordered_s <= found.epoch_s * (1 + 1e-9)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_remote_share(replicas: int) -> None:
    found = simulate(replace(SMALL, replicas=replicas, epochs=20))
    assert found.remote == pytest.approx(1 - replicas / 8, abs=0.01)
    assert found.asked_mean == pytest.approx(5 * found.remote)


def test_drawn_is_like_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replace(SMALL, nodes=20, files=100_000, epochs=4, batch=20, partition_mb=50.0, samples_per_s=1e5)
    counted = simulate(scale)
    monkeypatch.setattr(module, "EXACT_FILES", 10)
    drawn = simulate(scale)
    assert counted.exact and not drawn.exact
    for name in ("remote", "asked_mean", "asked_most", "window_most", "epoch_s", "ordered_s", "even_s"):
        assert getattr(drawn, name) == pytest.approx(getattr(counted, name), rel=0.04), name
    monkeypatch.setattr(module, "_DRAWS", 20 * 64)
    fewer = simulate(scale)
    assert fewer.iterations == 64 and fewer.epoch_s == pytest.approx(counted.epoch_s, rel=0.1)


def test_few_partitions_are_on_few_nodes() -> None:
    """What limits FanStore on many nodes first: partitions of 1 GiB. Small ones do not."""
    scale = Scale(nodes=1_000, files=1_281_167, file_mb=0.107, epochs=1)
    large, small = (simulate(replace(scale, partition_mb=size_mb)) for size_mb in (1_074.0, 10.0))
    assert large.holding == scale.partitions == 128
    assert large.asked_most / large.asked_mean > 7
    assert small.holding == 1_000
    assert small.asked_most / small.asked_mean < 2 and small.window_most / small.window_mean < 1.3


def test_loss_of_nodes_as_drawn() -> None:
    """Two and three copies: as often as in a long random history of nodes that fail and are restored."""
    random = np.random.default_rng(3)
    nodes, rate, restore_s, hours = 12, 0.05, 3600.0, 100_000.0
    for replicas in (2, 3):
        scale = replace(SMALL, nodes=nodes, replicas=replicas, failures_per_node_hour=rate, partition_mb=400 / nodes)
        expected = bare_per_hour(scale, partitions_of_node=replicas, restore_s=restore_s) * hours
        count = random.poisson(nodes * rate * hours)
        when, which = np.sort(random.random(count) * hours), random.integers(0, nodes, count)
        holders = [set(scale.holder(partition, np.arange(replicas)).tolist()) for partition in range(nodes)]
        bare, recent = 0, [-math.inf] * nodes
        for now, node in zip(when.tolist(), which.tolist(), strict=True):
            recent[node] = now
            for ranks in holders:
                if node in ranks and all(now - recent[rank] <= restore_s / 3600 for rank in ranks):
                    bare += 1
        assert bare == pytest.approx(expected, rel=0.2)


def test_what_grows() -> None:
    found = [simulate(replace(SMALL, nodes=nodes, files=200_000, epochs=1)) for nodes in (10, 100, 1_000)]
    assert [one.failures_per_hour for one in found] == pytest.approx([1.6e-3, 1.6e-2, 0.16])
    starts = [one.start_s for one in found]
    assert starts == sorted(starts) and starts[2] - starts[1] == pytest.approx(8 * 900 * 16e-6)
    assert {one.index_mb for one in found} == {200_000 * 104 / 1e6}
    assert simulate(replace(SMALL, nodes=1)).remote == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": 0}, "'nodes' is 0; it must be 1 or more"),
        ({"file_mb": 0.0}, "'file_mb' is 0.0; it must be above 0"),
        ({"network_mb_per_s": math.nan}, "'network_mb_per_s' is nan; it must be above 0"),
        ({"failures_per_node_hour": -1.0}, "'failures_per_node_hour' is -1.0; it must be 0 or more"),
        ({"replicas": 9}, "9 copies of each partition do not fit on 8 nodes"),
        ({"batch": 501}, "an epoch has 4,000 samples, and one batch of all nodes 4,008: nothing would be read"),
    ],
)
def test_what_cannot_be(change: dict[str, float], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        replace(SMALL, **change)  # type: ignore[arg-type]
    assert str(error.value).startswith(sentence)


def test_command() -> None:
    words = ["--nodes", "4", "8", "--files", "5000", "--epochs", "2", "--partition-size", "10MB", "--replicas", "2"]
    result = run_inside("plan", "scale", *words)
    assert (result.returncode, result.stderr) == (0, "")
    rows = {line[:38].strip(): line[38:].split() for line in result.stdout.splitlines()}
    assert rows["nodes"] == ["4", "8"] and rows["every read counted"] == ["yes", "yes"]
    found = json.loads(run_inside("plan", "scale", *words, "--json").stdout)
    assert list(found["nodes"]) == ["4", "8"]
    assert found["nodes"]["4"]["remote"] == pytest.approx(0.5, abs=0.02)
    assert run_inside("plan", "scale", "--nodes", "0").stderr == (
        "fanstore-plan: error: 'nodes' is 0; it must be 1 or more\n"
    )
    assert (
        "more than 200,000 nodes" in run_inside("plan", "scale", "--nodes", "300000", "--files", "10000000000").stderr
    )
