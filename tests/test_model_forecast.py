"""Forecasts of real jobs: closed forms, the simulation of the same thing, invariants, and what is advised."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.errors import UsageError
from fanstore.model import POLICIES, Curve, Scenario, StorageClass, System, run
from fanstore.model.advice import (
    Job,
    by_nodes,
    by_room,
    by_speed,
    memory_hits,
    node_counts,
    smallest_memory_mb,
    smallest_room_mb,
    verdict,
)
from fanstore.model.caching import lru_hits, next_use_hits, seen
from fanstore.model.forecast import Dataset, Forecast, Link, Training, Way, forecast
from fanstore.model.machine import ASSUMED, Machine, machine_of


def flat(value: float) -> Curve:
    return Curve.of({1: value}, "flat")


FAST = 1e12
#: A machine in which nothing is slow but what is said to be.
NOTHING_SLOW = Machine(
    measured="",
    small_mb=0.1,
    small_files_per_s=flat(FAST),
    large_mb_per_s=flat(FAST),
    disk_mb=1e9,
    disk_read=flat(FAST),
    disk_write=flat(FAST),
    memory_mb=0.0,
    memory_mb_per_s=FAST,
    network_mb_per_s=FAST,
    request_s=0.0,
    cores=4,
    decode_mb_per_s=FAST,
)
DATASET = Dataset(files=10_000, content_mb=1_000, stored_mb=1_000)
TRAINING = Training(nodes=4, gpus=1, samples_per_s=math.inf, epochs=3, batch=5, workers=1_000, room_mb=1e9)


def plan(way: Way, dataset: Dataset = DATASET, training: Training = TRAINING, **machine: Any) -> Forecast:
    return forecast(way, replace(NOTHING_SLOW, **machine), dataset, training)


# --- memory ---


@pytest.mark.parametrize(("share", "hits"), [(0.25, 0.035), (0.5, 0.154), (0.75, 0.403), (0.9, 0.670), (1.0, 1.0)])
def test_lru_of_one_stream(share: float, hits: float) -> None:
    assert lru_hits(1, share) == pytest.approx(hits, abs=0.002)


@pytest.mark.parametrize(
    ("share", "lru", "by_next_use"),
    [(0.0625, 0.031, 0.295), (0.1, 0.068, 0.372), (0.2, 0.169, 0.510), (0.5, 0.455, 0.720)],
)
def test_hits_of_one_of_16_nodes_in_90_epochs(share: float, lru: float, by_next_use: float) -> None:
    epochs = [min(lru_hits(16, share), seen(16, epoch)) for epoch in range(90)]
    assert sum(epochs) / 90 == pytest.approx(lru, abs=0.005)
    assert next_use_hits(16, share, 90) * 89 / 90 == pytest.approx(by_next_use, abs=0.005)


def test_two_and_four_hosts_as_measured() -> None:
    """Of the cluster in a box: 17 MB/s each, 3,000 files of 107 KB: MB/s in the second and third epoch."""
    for nodes, measured in ((2, (64, 133)), (4, (30, 41))):
        found = plan(
            Way.FANSTORE,
            Dataset(3_000, 321, 321),
            replace(TRAINING, nodes=nodes, stage_first=True, workers=4),
            network_mb_per_s=17.0,
            memory_mb=20_000.0,
        )
        rates = [321 / nodes / epoch.seconds for epoch in found.epochs]
        assert rates[1:] == pytest.approx(measured, rel=0.08)
        assert {epoch.weakest for epoch in found.epochs} == {Link.NETWORK}


# --- closed forms ---


@pytest.mark.parametrize("way", Way)
def test_limited_by_computing(way: Way) -> None:
    found = plan(way, training=replace(TRAINING, samples_per_s=50.0, gpus=2))
    assert [epoch.seconds for epoch in found.epochs] == pytest.approx([10_000 / 4 / 2 / 50] * 3)
    assert found.weakest is Link.COMPUTE


def test_limited_by_the_shared_file_system() -> None:
    """A file costs 1 ms, its bytes 0.1 MB / 500 MB/s: 0.2 ms of 1.2 ms."""
    speeds: dict[str, Any] = {"small_files_per_s": flat(1 / 0.0012), "large_mb_per_s": flat(500)}
    direct = plan(Way.DIRECT, **speeds)
    assert direct.epochs[1].seconds == pytest.approx(12.0) and direct.weakest is Link.SHARED
    assert direct.shared_mb == pytest.approx(3 * 1_000)
    twice = plan(Way.DIRECT, Dataset(10_000, 2_000, 2_000), **speeds)
    assert twice.epochs[1].seconds == pytest.approx(14.0)
    copy = plan(Way.COPY, **speeds)
    assert copy.start_s == pytest.approx(4 * 1_000 / 500) and copy.shared_mb == pytest.approx(4_000)
    staged = plan(Way.FANSTORE, training=replace(TRAINING, stage_first=True), **speeds)
    assert staged.start_s - 1 == pytest.approx(1_000 / 500) and staged.shared_mb == pytest.approx(1_000)


def test_limited_by_the_network() -> None:
    """Three quarters of what a node reads come from others."""
    found = plan(Way.FANSTORE, training=replace(TRAINING, stage_first=True), network_mb_per_s=10.0)
    assert found.epochs[0].seconds == pytest.approx(1_000 / 4 * 3 / 4 / 10) and found.weakest is Link.NETWORK
    assert found.network_mb == pytest.approx(3 * 750)


def test_limited_by_disks_workers_and_decompression() -> None:
    staged = replace(TRAINING, stage_first=True)
    disk = plan(Way.FANSTORE, training=staged, disk_read=flat(20))
    assert disk.epochs[0].seconds == pytest.approx(1_000 / 4 / 20) and disk.weakest is Link.DISK
    workers = plan(Way.FANSTORE, training=replace(staged, workers=2), request_s=0.004)
    assert workers.epochs[0].seconds == pytest.approx(2_500 * (0.75 * 0.004 + 1e-4) / 2)
    assert workers.weakest is Link.WORKERS
    ahead = plan(Way.ORDERED, training=replace(staged, workers=2), request_s=0.004)
    assert ahead.epochs[0].seconds == pytest.approx(2_500 * 1e-4 / 2)
    packed = plan(Way.FANSTORE, Dataset(10_000, 1_000, 250, compressed=True), staged, decode_mb_per_s=5.0)
    assert packed.epochs[0].seconds == pytest.approx(1_000 / 4 / 4 / 5) and packed.weakest is Link.DECODE
    assert packed.network_mb == pytest.approx(3 * 750 / 4)


@pytest.mark.parametrize("way", [Way.FANSTORE, Way.ORDERED])
@pytest.mark.parametrize("room_mb", [1e9, 100.0])
def test_what_is_kept_is_read_once(way: Way, room_mb: float) -> None:
    """Staging and reads take turns, and what was read is staged with that; what has no room is read in each epoch."""
    speeds: dict[str, Any] = {"small_files_per_s": flat(1_000), "large_mb_per_s": flat(200)}
    few = replace(TRAINING, workers=4, room_mb=room_mb)
    found = plan(way, training=few, **speeds)
    kept = min(1.0, 4 * room_mb / 1_000)
    assert found.shared_mb == pytest.approx(kept * 1_000 + 3 * (1 - kept) * 1_000)
    assert found.network_mb == pytest.approx(3 * kept * 1_000 * 3 / 4)
    assert found.epochs[0].seconds >= 1_000 / 200
    assert found.epochs[0].shared_mb == pytest.approx(1_000)
    first = plan(way, training=replace(few, stage_first=True), **speeds)
    assert first.shared_mb == pytest.approx(found.shared_mb)


def test_memory_at_best() -> None:
    job = Job(replace(NOTHING_SLOW, memory_mb=500.0), DATASET, replace(TRAINING, nodes=1, epochs=20))
    hits, best = memory_hits(job)
    assert hits == lru_hits(1, 0.5) and best == pytest.approx(0.5, abs=0.02)
    assert memory_hits(replace(job, machine=NOTHING_SLOW)) == (0.0, 0.0)
    assert memory_hits(replace(job, machine=replace(NOTHING_SLOW, memory_mb=1_000.0))) == (1.0, 1.0)


def test_what_has_no_room_comes_from_the_shared_file_system_each_time() -> None:
    little = replace(TRAINING, room_mb=100.0, stage_first=True)
    found = plan(Way.FANSTORE, training=little)
    assert found.room_mb == pytest.approx(100)
    assert found.shared_mb == pytest.approx(400 + 3 * 600)
    assert plan(Way.COPY, training=little).impossible == "1,000 MB do not fit into 100 MB on each node"


def test_very_many_epochs() -> None:
    """They are alike once memory is full, or as full as it gets: the same sum as one by one."""
    for memory_mb in (0.0, 300.0, 5_000.0):
        found = plan(Way.FANSTORE, training=replace(TRAINING, epochs=400), memory_mb=memory_mb, network_mb_per_s=10.0)
        hits = [min(lru_hits(4, memory_mb / 1_000), seen(4, epoch)) for epoch in range(1, 400)]
        network_s = [1_000 / 4 * 3 / 4 / 10 * (1 - hit) for hit in hits]
        assert [epoch.busy_s[Link.NETWORK] for epoch in found.epochs[1:]] == pytest.approx(network_s, abs=1e-5)
    assert len(plan(Way.DIRECT, training=replace(TRAINING, epochs=100_000), memory_mb=900.0).epochs) == 100_000


def test_staging_that_takes_very_many_epochs() -> None:
    """A disk of 0.1 MB/s: what is read in the first epoch is written to it. What no epoch reads, since batches are
    large, is staged meanwhile and afterwards."""
    few = replace(TRAINING, nodes=1, epochs=30_000, workers=4)
    found = plan(Way.FANSTORE, training=few, disk_write=flat(0.1), memory_mb=5_000.0)
    assert found.epochs[0].seconds == pytest.approx(1_000 / 0.1, rel=0.01)
    half = replace(few, batch=5_001)
    found = plan(Way.FANSTORE, training=half, disk_write=flat(0.1), memory_mb=5_000.0)
    rest_mb = found.shared_mb - found.epochs[0].shared_mb
    assert 0 < rest_mb < 499.9
    assert rest_mb == pytest.approx(0.1 * (found.seconds - found.first_end_s), rel=0.01)


# --- the simulation of the same thing ---


def simulated(policy: str, machine: Machine, training: Training, dataset: Dataset) -> tuple[float, float]:
    """Seconds of the last epoch, and MB from the shared file system, as the corrected simulation finds them."""
    classes = (
        StorageClass("staging", 60, training.workers, flat(FAST), flat(FAST)),
        StorageClass("SSD", training.room_mb, 2, machine.disk_read, machine.disk_write),
    )
    system = System(
        nodes=training.nodes,
        compute_mb_per_s=training.gpus * training.samples_per_s * dataset.content_mb / dataset.files,
        preprocess_mb_per_s=FAST,
        network_mb_per_s=machine.network_mb_per_s or FAST,
        pfs_network_mb_per_s=FAST,
        pfs=machine.large_mb_per_s,
        classes=classes,
        request_s=0.0,
    )
    mean_mb = dataset.content_mb / dataset.files
    scenario = Scenario("x", "", system, dataset.files, mean_mb, 0.1 * mean_mb, training.epochs, training.batch)
    outcome = run(POLICIES[policy], system, scenario.job(1), "corrected")
    return outcome.epoch_ends_s[-1] - outcome.epoch_ends_s[-2], outcome.pfs_mb


@pytest.mark.parametrize(
    ("way", "policy", "speeds", "samples_per_s", "room_mb"),
    [
        (Way.DIRECT, "staging-pool", {"large_mb_per_s": flat(100.0)}, 1e9, 0.0),
        (Way.DIRECT, "staging-pool", {"large_mb_per_s": flat(1_000.0)}, 100.0, 0.0),
        (Way.FANSTORE, "lbann-preload", {"network_mb_per_s": 40.0}, 1e9, 1e6),
        (Way.FANSTORE, "lbann-preload", {"disk_read": flat(50.0)}, 1e9, 1e6),
        (Way.FANSTORE, "fanstore", {"large_mb_per_s": flat(100.0)}, 150.0, 130.0),
    ],
    ids=["shared", "computing", "network", "disks", "little room"],
)
def test_agrees_with_the_simulation(
    way: Way, policy: str, speeds: dict[str, Any], samples_per_s: float, room_mb: float
) -> None:
    """Within 15 %: the simulation knows that nodes wait for the slowest in every iteration. (Like FanStore without a
    known order, LBANN's preloading has an even share on each node, whoever reads it.)"""
    machine = replace(NOTHING_SLOW, **speeds)
    dataset = Dataset(files=4_000, content_mb=1_000, stored_mb=1_000)
    training = replace(TRAINING, samples_per_s=samples_per_s, workers=4, room_mb=room_mb, stage_first=True, batch=10)
    found = forecast(way, machine, dataset, training)
    seconds, pfs_mb = simulated(policy, machine, training, dataset)
    assert found.epochs[-1].seconds == pytest.approx(seconds, rel=0.15)
    assert found.shared_mb == pytest.approx(pfs_mb, rel=0.05)


# --- invariants ---


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    speed = st.floats(1, 1e5)
    machine = Machine(
        measured="",
        small_mb=0.1,
        small_files_per_s=Curve.of({1: draw(speed), 64: draw(speed)}, "small"),
        large_mb_per_s=Curve.of({1: draw(speed), 64: draw(speed)}, "large"),
        disk_mb=1e6,
        disk_read=flat(draw(speed)),
        disk_write=flat(draw(speed)),
        memory_mb=draw(st.floats(0, 5e3)),
        memory_mb_per_s=5_000,
        network_mb_per_s=draw(speed),
        request_s=draw(st.floats(0, 1e-2)),
        cores=draw(st.integers(1, 64)),
        decode_mb_per_s=draw(speed),
    )
    content_mb = draw(st.floats(1, 1e5))
    dataset = Dataset(
        files=draw(st.integers(1_000, 10**6)),
        content_mb=content_mb,
        stored_mb=content_mb * draw(st.floats(0.1, 1)),
        index_mb=draw(st.floats(0, 100)),
        compressed=draw(st.booleans()),
    )
    training = Training(
        nodes=draw(st.integers(1, 64)),
        gpus=draw(st.integers(1, 4)),
        samples_per_s=draw(st.one_of(st.just(math.inf), st.floats(1, 1e4))),
        epochs=draw(st.integers(1, 5)),
        batch=1,
        workers=draw(st.integers(1, 16)),
        room_mb=draw(st.floats(0, 1e5)),
        stage_first=draw(st.booleans()),
    )
    return Job(machine, dataset, training)


@settings(max_examples=100, deadline=None)
@given(jobs(), st.sampled_from(Way))
def test_invariants(job: Job, way: Way) -> None:
    found = job.run(way)
    if found.impossible:
        assert way is Way.COPY and found.seconds == math.inf
        return
    computing_s = sum(epoch.busy_s[Link.COMPUTE] for epoch in found.epochs)
    assert found.seconds >= computing_s * (1 - 1e-9)
    assert len(found.epochs) == job.training.epochs
    for epoch in found.epochs:
        assert epoch.seconds >= max(epoch.busy_s.values()) * (1 - 1e-9) > 0
        assert epoch.shared_mb >= 0 and epoch.network_mb >= 0
    first = found.epochs[0]
    if way in (Way.FANSTORE, Way.ORDERED):
        # Every byte that is read comes from somewhere: in the first epoch nothing is in memory.
        read_mb = job.dataset.stored_mb / job.dataset.files * (job.dataset.files // whole(job) * whole(job))
        course_mb = sum(
            (moment.end_s - begin) * (moment.local_mb_per_s + moment.network_mb_per_s + moment.shared_mb_per_s)
            for begin, moment in zip([0.0, *(step.end_s for step in found.course)], found.course, strict=False)
        )
        if found.course:
            assert course_mb == pytest.approx(read_mb, rel=1e-6)
            assert found.course[-1].end_s == pytest.approx(first.seconds)
        kept_mb = min(job.dataset.stored_mb, job.training.nodes * job.training.room_mb)
        assert found.room_mb == pytest.approx(kept_mb / job.training.nodes)


def whole(job: Job) -> int:
    return job.training.nodes * job.training.gpus * job.training.batch


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_a_known_order_is_never_behind(job: Job) -> None:
    """Once everything is where it belongs."""
    blind, ahead = (job.run(way, stage_first=True) for way in (Way.FANSTORE, Way.ORDERED))
    assert ahead.seconds <= blind.seconds * (1 + 1e-9)
    assert ahead.network_mb <= blind.network_mb * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from([Way.DIRECT, Way.COPY, Way.FANSTORE]))
def test_a_faster_part_never_makes_a_job_slower(job: Job, way: Way) -> None:
    """Everything is staged first: with disks that are slower than the shared file system, it is better to have them
    filled late."""
    training = replace(job.training, stage_first=True)
    before = forecast(way, job.machine, job.dataset, training).seconds
    if before == math.inf:
        return
    for machine in (job.machine.scaled(network=2.0), job.machine.scaled(shared=2.0)):
        assert forecast(way, machine, job.dataset, training).seconds <= before * (1 + 1e-9)


# --- advice ---

SLOW_SHARED = Job(
    replace(ASSUMED, small_files_per_s=flat(500)),
    Dataset(files=1_281_167, content_mb=140_000, stored_mb=140_000, index_mb=150),
    Training(nodes=8, gpus=4, samples_per_s=400, epochs=10, batch=64, workers=16, room_mb=200_000),
)


def test_it_pays_where_the_shared_file_system_is_slow() -> None:
    found = verdict(SLOW_SHARED)
    assert found.use and found.pays_from == 1
    assert "limited by the shared file system" in found.why[0]
    assert found.smallest_room_mb == pytest.approx(140_000 / 8, rel=0.1)


def test_it_does_not_pay_where_the_shared_file_system_keeps_up() -> None:
    found = verdict(replace(SLOW_SHARED, training=replace(SLOW_SHARED.training, samples_per_s=2)))
    assert (found.use, found.pays_from) == (False, 0)
    assert found.why[0].startswith("The shared file system and the memory of the nodes keep up with the GPUs")
    assert found.smallest_room_mb == 0


def test_it_does_not_pay_over_a_slow_network() -> None:
    job = replace(SLOW_SHARED, machine=replace(ASSUMED, network_mb_per_s=5.0, memory_mb=0.0))
    found = verdict(job)
    assert (found.use, found.weakest) == (False, Link.NETWORK)
    assert "limited by the network" in found.why[0]
    assert "times the network interfaces in each node; then the limit is" in found.add


def test_what_to_add_where_nothing_else_takes_time() -> None:
    """One node, everything in memory."""
    job = Job(replace(NOTHING_SLOW, memory_mb=1e6), DATASET, replace(TRAINING, nodes=1))
    assert verdict(job).add == "More data loader workers: nothing else takes time."


def test_what_a_node_needs() -> None:
    """Computing takes 10 s; disks need 25 s, the network 37.5 s, and 4 workers 11 s."""
    job = Job(
        replace(NOTHING_SLOW, disk_read=flat(10.0), network_mb_per_s=5.0),
        DATASET,
        replace(TRAINING, samples_per_s=250, workers=4, stage_first=True),
    )
    found = verdict(job)
    assert found.needs == {"SSDs": 3, "network interfaces": 4, "data loader workers": 5}
    assert found.weakest is Link.NETWORK
    more = replace(job, machine=replace(job.machine, disk_read=flat(30.0), network_mb_per_s=20.0))
    enough = replace(more, training=replace(job.training, workers=5))
    assert enough.run(Way.FANSTORE).weakest is Link.COMPUTE
    assert verdict(replace(job, training=TRAINING)).needs == {}


def test_it_may_pay_later() -> None:
    """Staging takes longer than it saves in so few epochs."""
    job = Job(
        replace(NOTHING_SLOW, small_files_per_s=flat(10_000), large_mb_per_s=flat(1_000), disk_write=flat(5.0)),
        Dataset(files=10_000, content_mb=1_000, stored_mb=1_000),
        replace(TRAINING, epochs=2, stage_first=True, samples_per_s=3_000),
    )
    found = verdict(job)
    assert not found.use and found.pays_from > 2
    assert found.why[0].startswith(f"2 epochs are too few: FanStore would be ahead from epoch {found.pays_from} on")
    direct, ours = (job.run(way, epochs=found.pays_from) for way in (Way.DIRECT, Way.FANSTORE))
    assert ours.seconds < direct.seconds


def test_smallest_room_keeps_up_and_less_does_not() -> None:
    job = Job(
        replace(ASSUMED, memory_mb=0.0),
        Dataset(files=1_281_167, content_mb=140_000, stored_mb=140_000),
        Training(nodes=16, gpus=4, samples_per_s=400, epochs=10, batch=64, workers=16, room_mb=400_000),
    )
    room_mb = smallest_room_mb(job)
    best_s = job.run(Way.FANSTORE, room_mb=140_000 / 16).later_s
    assert 0 < room_mb < 140_000 / 16
    assert job.run(Way.FANSTORE, room_mb=room_mb).later_s <= 1.05 * best_s
    assert job.run(Way.FANSTORE, room_mb=0.97 * room_mb).later_s > 1.05 * best_s


def test_smallest_memory_keeps_up_and_less_does_not() -> None:
    """Over a slow network each hit counts; if computing takes longest, memory does not matter."""
    job = Job(replace(NOTHING_SLOW, memory_mb=5_000.0, network_mb_per_s=10.0), DATASET, replace(TRAINING, epochs=10))

    def later_s(memory_mb: float) -> float:
        return replace(job, machine=replace(job.machine, memory_mb=memory_mb)).run(Way.FANSTORE).later_s

    least_mb = smallest_memory_mb(job)
    assert 0 < least_mb < DATASET.content_mb
    assert later_s(least_mb) <= 1.05 * later_s(5_000.0) < later_s(0.97 * least_mb)
    slow = replace(job, training=replace(job.training, samples_per_s=1.0))
    assert smallest_memory_mb(slow) == 0


def test_what_if() -> None:
    assert node_counts(1) == [1] and node_counts(6) == [1, 2, 4, 6] and node_counts(8) == [1, 2, 4, 8]
    assert list(by_nodes(SLOW_SHARED)) == [1, 2, 4, 8]
    rooms = [found.seconds for found in by_room(SLOW_SHARED).values()]
    assert rooms == sorted(rooms, reverse=True)
    networks = [network.seconds for network, _ in by_speed(SLOW_SHARED).values()]
    assert networks == sorted(networks, reverse=True)


# --- what cannot be ---


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": 0}, "'--nodes' is 0; it must be 1 or more"),
        ({"epochs": 100_001}, "'--epochs' is 100,001; at most 100,000 are planned"),
        ({"samples_per_s": 0.0}, "'--samples-per-second' is 0; it must be above 0"),
        ({"samples_per_s": math.nan}, "'--samples-per-second' is nan; it must be above 0"),
        ({"room_mb": -1.0}, "the room on a node is -1 MB; it must be 0 or more"),
        ({"batch": 5_000}, "an epoch has 10,000 samples, and one batch of all GPUs 20,000: nothing would be read"),
    ],
)
def test_jobs_that_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(Way.DIRECT, training=replace(TRAINING, **change))
    assert str(error.value).startswith(sentence)


def test_an_empty_dataset() -> None:
    with pytest.raises(UsageError, match="the dataset has no bytes in any file"):
        Dataset(0, 0.0, 0.0)


MEASURED: dict[str, Any] = {
    "version": 1,
    "measured": "2026-11-18",
    "hosts": ["n0", "n1"],
    "shared": {
        "small_bytes": 100_000,
        "small": [{"readers": 1, "files_per_s": 300}, {"readers": 8, "files_per_s": 900.5}],
        "large": [{"readers": 1, "mb_per_s": 400}],
    },
    "local": {
        "free_mb": 1_000,
        "read": [{"threads": 1, "mb_per_s": 500}],
        "write": [{"threads": 1, "mb_per_s": 300}],
    },
    "memory": {"free_mb": 4_000, "mb_per_s": 8_000, "cores": 8},
    "network": {"mb_per_s": 110, "request_s": 2e-4},
}


def without(table: str, key: str = "") -> dict[str, Any]:
    content = {name: dict(value) if isinstance(value, dict) else value for name, value in MEASURED.items()}
    if key:
        del content[table][key]
    else:
        del content[table]
    return content


def test_measurements() -> None:
    machine = machine_of(MEASURED, "m.toml")
    assert (machine.cores, machine.network_mb_per_s, machine.decode_mb_per_s) == (8, 110, None)
    assert machine.files_per_s(0.1, 8) == pytest.approx(900.5)
    assert machine.measured == "2026-11-18 on n0, n1"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            without("version"),
            "m.toml does not say which version of measurements it has, and this program reads 1: measure again",
        ),
        (without("shared"), "m.toml has no 'small_bytes' in [shared]; measure again with fanstore-plan measure"),
        (without("shared", "small"), "m.toml has no 'small' in [shared]; measure again"),
        (without("local", "read"), "m.toml has no 'read' in [local]; measure again"),
        (without("memory", "cores"), "m.toml has no 'cores' in [memory]; measure again"),
        (MEASURED | {"network": {"mb_per_s": 0, "request_s": 0}}, "'mb_per_s' in [network] of m.toml is 0; it must be"),
        (MEASURED | {"memory": {"free_mb": "much"}}, "'free_mb' in [memory] of m.toml is 'much'; it must be a number"),
        (
            MEASURED | {"local": {"free_mb": 1, "read": 5}},
            "'read' in [local] of m.toml must be a list of { threads = NUMBER, mb_per_s = NUMBER }",
        ),
        (
            MEASURED | {"local": {"free_mb": 1, "read": [{"threads": "x", "mb_per_s": 1}]}},
            "'read' in [local] of m.toml has 'x' where a number must be",
        ),
        (
            MEASURED | {"local": {"free_mb": 1, "read": [{"threads": 1, "mb_per_s": 0}]}},
            "'read' in [local] of m.toml has a throughput of 0 MB/s; it must be above 0",
        ),
    ],
)
def test_measurements_that_are_missing_or_make_no_sense(content: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        machine_of(content, "m.toml")
    assert str(error.value).startswith(sentence)


def test_what_was_not_measured() -> None:
    machine = machine_of(without("network"), "m.toml")
    assert forecast(Way.DIRECT, machine, DATASET, TRAINING).seconds > 0
    assert forecast(Way.FANSTORE, machine, DATASET, replace(TRAINING, nodes=1)).seconds > 0
    with pytest.raises(UsageError, match="the network was not measured, because one node measured alone"):
        forecast(Way.FANSTORE, machine, DATASET, TRAINING)
    packed = replace(DATASET, compressed=True)
    with pytest.raises(UsageError, match="the dataset is compressed, and decompression was not measured"):
        forecast(Way.FANSTORE, machine_of(MEASURED, "m.toml"), packed, TRAINING)
