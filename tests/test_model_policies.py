"""What every policy must keep to, and what FanStore's own decides."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_scenarios import scenarios, small

from fanstore.dataset.placement import place
from fanstore.model import MODES, POLICIES, Job, Mode, RefusedError, Scenario, run
from fanstore.model.ahead import Ordered
from fanstore.model.plan import Plan, Source
from fanstore.model.policies.fanstore import homes
from fanstore.model.simulation import lower_bound
from fanstore.order.window import Origin, Stream, Window

FITS_IN_MEMORY = small(samples=1_000, room_mb=(30, 1_400, 300))
FITS_ON_A_NODE = small(samples=1_000, room_mb=(30, 350, 1_400))
FITS_ON_ALL = small(samples=1_000, room_mb=(30, 130, 200))
FITS_NOWHERE = small(samples=1_000, room_mb=(30, 50, 85))
NOTHING_KEPT = small(samples=1_000, room_mb=(30, 0, 0))
SIZES = [FITS_IN_MEMORY, FITS_ON_A_NODE, FITS_ON_ALL, FITS_NOWHERE, NOTHING_KEPT]

#: Those that do the whole job as it is.
HONEST = [name for name, policy in POLICIES.items() if policy.keeps_order and name != "lower-bound"]


def planned(name: str, scenario: Scenario, job: Job) -> Plan | None:
    """The plan; None if the policy refuses, which must be a sentence that names it."""
    try:
        return POLICIES[name].plan(scenario.system, job)
    except RefusedError as error:
        assert str(error).startswith(f"{name} ")
        return None


def least_pfs_mb(scenario: Scenario, job: Job) -> float:
    """What no policy can do without, in whole epochs: everything once, and again what has no room."""
    read = np.unique(job.access)
    read_mb = job.sizes_mb[job.access].sum()
    once_mb = job.sizes_mb[read].sum()
    kept = min(1.0, scenario.system.nodes * scenario.system.room_mb / once_mb)
    return float(once_mb + (1 - kept) * (read_mb - once_mb))


class TestEveryPolicy:
    """What simulations, and a prefetcher, rely on."""

    @pytest.fixture(params=SIZES, ids=["memory", "node", "all nodes", "nowhere", "nothing kept"])
    def scenario(self, request: pytest.FixtureRequest) -> Scenario:
        scenario: Scenario = request.param
        return scenario

    @pytest.mark.parametrize("name", POLICIES)
    def test_plan(self, name: str, scenario: Scenario) -> None:
        job = scenario.job(1)
        plan = planned(name, scenario, job)
        if plan is None:
            return
        assert plan.access.shape == job.access.shape
        assert plan.access.min() >= 0 and plan.access.max() < job.samples
        assert np.array_equal(plan.access, job.access) == POLICIES[name].keeps_order
        assert len(plan.loads) in (0, job.nodes)
        for loads in plan.loads:
            kept = np.concatenate([load.samples for load in loads])
            classes = np.concatenate([load.storage_class for load in loads])
            assert len(np.unique(kept)) == len(kept), "a node has one copy"
            assert set(classes) <= set(scenario.system.keeping)
            used_mb = np.bincount(classes, job.sizes_mb[kept], minlength=3)
            assert all(used_mb <= [storage.capacity_mb for storage in scenario.system.classes])
            assert all(load.threads >= 1 for load in loads)

    @pytest.mark.parametrize("name", POLICIES)
    def test_is_the_same_each_time(self, name: str) -> None:
        job = FITS_IN_MEMORY.job(1)
        one, other = (POLICIES[name].plan(FITS_IN_MEMORY.system, job) for _ in range(2))
        assert np.array_equal(one.access, other.access)
        for loads, others in zip(one.loads, other.loads, strict=True):
            for a, b in zip(loads, others, strict=True):
                assert np.array_equal(a.samples, b.samples)

    @pytest.mark.parametrize("name", POLICIES)
    def test_without_a_place_for_copies(self, name: str) -> None:
        """A system may have nothing but a staging buffer."""
        scenario = small(room_mb=(30, 0, 0))
        system = scenario.system.__class__(**{**vars(scenario.system), "classes": scenario.system.classes[:1]})
        try:
            for mode in MODES:
                assert run(POLICIES[name], system, scenario.job(1), mode).seconds > 0
        except RefusedError as error:
            assert "no storage class besides the staging buffer" in str(error)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", POLICIES)
    def test_bounds(self, name: str, mode: Mode, scenario: Scenario) -> None:
        job = scenario.job(1)
        if planned(name, scenario, job) is None:
            return
        outcome = run(POLICIES[name], scenario.system, job, mode)
        assert outcome.seconds == outcome.epoch_ends_s[-1] and len(outcome.epoch_ends_s) == job.epochs
        assert 0 <= outcome.stall_s < outcome.epoch_ends_s[0]
        if POLICIES[name].keeps_order:
            assert outcome.seconds >= lower_bound(scenario.system, job).seconds * (1 - 1e-9)
        if name in HONEST:
            assert outcome.pfs_mb >= least_pfs_mb(scenario, job) * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios(), name=st.sampled_from(HONEST), mode=st.sampled_from([*MODES]), seed=st.integers(0, 99))
def test_bounds_of_anything(scenario: Scenario, name: str, mode: Mode, seed: int) -> None:
    whole = scenario.system.nodes * scenario.batch
    scenario = replace(scenario, samples=scenario.samples // whole * whole)  # nothing is left out of an epoch
    job = scenario.job(seed)
    if planned(name, scenario, job) is None:
        return
    outcome = run(POLICIES[name], scenario.system, job, mode)
    assert outcome.seconds >= lower_bound(scenario.system, job).seconds * (1 - 1e-9)
    assert outcome.pfs_mb >= least_pfs_mb(scenario, job) * (1 - 1e-9)


def test_where_only_some_change_the_order() -> None:
    changed = {name for name, policy in POLICIES.items() if not policy.keeps_order}
    assert changed == {"deepio-opportunistic", "parallel-staging"}


# --- FanStore's own ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SIZES[:4], ids=["memory", "node", "all nodes", "nowhere"])
def test_fanstore_is_not_behind_any_other(mode: Mode, scenario: Scenario) -> None:
    """Of those that do the whole job. A hundredth for what rounding to whole samples does at this size."""
    job = scenario.job(1)
    able = [name for name in HONEST if planned(name, scenario, job)]
    outcomes = {name: run(POLICIES[name], scenario.system, job, mode) for name in able}
    ours = outcomes.pop("fanstore")
    assert len(outcomes) >= 5
    assert ours.seconds <= 1.01 * min(outcome.seconds for outcome in outcomes.values())
    assert ours.pfs_mb <= 1.01 * min(outcome.pfs_mb for outcome in outcomes.values())
    assert ours.pfs_mb <= 1.01 * least_pfs_mb(scenario, job)


def test_what_fixed_homes_can_do() -> None:
    """With 16 nodes and 90 epochs 0.113 of all reads would be local at best, and 0.0625 are."""
    job = small(samples=16_000, nodes=16, batch=10, epochs=90).job(1)
    home = homes(job, room_mb=1e9)
    local = np.mean([home[access] == node for node, access in enumerate(job.access)])
    counts = np.stack([np.bincount(access, minlength=job.samples) for access in job.access])
    assert counts.max(axis=0).sum() / counts.sum() == pytest.approx(0.113, abs=0.002)
    assert local == pytest.approx(1 / 16, abs=0.001)


@pytest.mark.parametrize("room", [1000, 50])
def test_homes_are_where_a_daemon_places(room: int) -> None:
    """Partitions of one size, each with one sample."""
    job = small(samples=600, nodes=4, sigma_mb=0.0).job(1)
    placed = place([1_000_000] * 600, [False] * 600, [room * 1_000_000] * 4, 1)
    expected = [ranks[0] if ranks else -1 for ranks in placed.holders]
    assert homes(job, room_mb=float(room)).tolist() == expected


def test_what_is_read_ahead_is_what_a_daemon_reads_ahead() -> None:
    """The same window, told of files there and of batches here."""
    sizes_mb = np.random.default_rng(1).uniform(0.5, 1.5, 200)
    ahead = Ordered(sizes_mb.tolist(), capacity_mb=8.0)
    window = Window(lambda file: int(1e6 * sizes_mb[file]), 8_000_000)
    window.streams = [Stream(Origin("stated"), [np.arange(200)])]
    fetched = set(window.take(0.0))
    for batch in range(200):
        assert [ahead.has_room(other) for other in range(batch, 200)] == [
            other in fetched for other in range(batch, 200)
        ]
        assert sizes_mb[[other for other in fetched if other >= batch]].sum() <= 8
        ahead.begin(batch, float(batch))
        window.seen(batch, 7, float(batch))
        fetched.update(window.take(float(batch)))


def test_a_batch_larger_than_the_window_is_read_when_it_is_needed() -> None:
    ahead = Ordered([1.0, 1.0, 1.0, 9.0, 1.0, 1.0], capacity_mb=4.0)
    for batch in range(3):
        assert ahead.has_room(batch) and not ahead.has_room(3)
        ahead.begin(batch, float(batch))
    ahead.begin(3, 3.0)
    assert ahead.has_room(4) and ahead.has_room(5)


@pytest.mark.parametrize("name", POLICIES)
def test_who_reads_ahead_by_the_window(name: str) -> None:
    plan = POLICIES[name].plan(FITS_IN_MEMORY.system, FITS_IN_MEMORY.job(1))
    assert (plan.staging is not None and plan.staging.by_window) == (name == "fanstore")


def test_homes_are_even() -> None:
    job = small(samples=4_000, nodes=4, epochs=5).job(1)
    held_mb = np.bincount(homes(job, room_mb=1e9), job.sizes_mb, minlength=4)
    assert held_mb == pytest.approx([job.dataset_mb / 4] * 4, rel=0.02)


def test_every_sample_has_a_home_while_there_is_room() -> None:
    job = small(samples=1_001, nodes=4, epochs=3).job(1)
    assert homes(job, room_mb=1.01 * job.dataset_mb / 4).min() >= 0
    assert (homes(job, room_mb=0.5 * job.dataset_mb / 4) >= 0).mean() == pytest.approx(0.5, abs=0.02)
    assert homes(job, room_mb=0.0).max() == -1


def test_homes_load_in_the_sequence_of_first_reads() -> None:
    job = FITS_ON_ALL.job(1)
    plan = POLICIES["fanstore"].plan(FITS_ON_ALL.system, job)
    first_epoch = job.access[:, : job.epoch_iterations * job.batch]
    when = np.zeros(job.samples, dtype=int)
    for access in first_epoch:
        when[access] = np.arange(len(access))
    for (load,) in plan.loads:
        assert load.source is Source.PFS and load.threads == 4
        assert (np.diff(when[load.samples]) >= 0).all()


# --- the others ---


def test_access_counts_are_binomial() -> None:
    """Equation 3.8: with 4 nodes and 1,000 epochs, a node reads about 323 of 10,000 samples more than 275 times."""
    job = small(samples=10_000, nodes=4, batch=2_500, epochs=1_000).job(0)
    often = [int((np.bincount(access) > 275).sum()) for access in job.access]
    assert np.mean(often) == pytest.approx(323, abs=30)


def test_hdmlp_keeps_what_a_node_reads_most_often() -> None:
    scenario = small(samples=2_000, epochs=8, room_mb=(30, 200, 300))
    job = scenario.job(1)
    for access, loads in zip(job.access, POLICIES["hdmlp"].plan(scenario.system, job).loads, strict=True):
        counts = np.bincount(access, minlength=job.samples)
        kept = np.zeros(job.samples, dtype=bool)
        for load in loads:
            kept[load.samples] = True
        assert counts[kept].min() >= counts[~kept].max() - 1  # windows are sorted by first read, not by count


def test_opportunistic_reads_only_what_is_in_memory() -> None:
    job = FITS_NOWHERE.job(1)
    plan = POLICIES["deepio-opportunistic"].plan(FITS_NOWHERE.system, job)
    held = [set(loads[0].samples.tolist()) for loads in plan.loads]
    assert set(plan.access[0].tolist()) <= held[0]
    for node in range(1, job.nodes):
        read = plan.access[node].tolist()
        assert set(read) <= held[node] | held[node - 1]
        assert np.mean([sample in held[node] for sample in read]) == pytest.approx(1 / 3, abs=0.1)


def test_parallel_staging_reads_only_its_share() -> None:
    job = FITS_ON_A_NODE.job(1)
    plan = POLICIES["parallel-staging"].plan(FITS_ON_A_NODE.system, job)
    for node, (own, others) in enumerate(plan.loads):
        assert set(plan.access[node].tolist()) <= set(own.samples.tolist()) == set(job.share(node))
        assert others.source is Source.REMOTE
        assert set(others.samples.tolist()) == set(range(job.share(node).start))
