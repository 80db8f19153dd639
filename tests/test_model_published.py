"""The published simulation: the same as a slow one written straight from its rules, and the published figures."""

import random
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_reference import Reference, load_all
from model_scenarios import scenarios, small

from fanstore.model import POLICIES, SCENARIOS, Outcome, RefusedError, Scenario, published, run
from fanstore.model.pfsclients import PfsClients
from fanstore.model.thesis import PUBLISHED_S, PUBLISHED_STORES_S, with_stores

REAL = [name for name in POLICIES if name != "lower-bound"]


def both(scenario: Scenario, name: str, seed: int) -> tuple[Outcome, Reference, float]:
    """What the simulation and the reference find."""
    job = scenario.job(seed)
    plan = POLICIES[name].plan(scenario.system, job)
    strings = [access.tolist() for access in plan.access]
    reference = Reference(scenario.system, job.sizes_mb.tolist(), strings, job.batch, name)
    if name == "fanstore":  # where its copies are is tested elsewhere (test_model_policies.py)
        for node, loads in enumerate(plan.loads):
            for load in loads:
                reference.load(node, load.samples.tolist(), load.storage_class.tolist(), load.threads, waits=False)
    else:
        load_all(reference)
    return published.simulate(scenario.system, job, plan), reference, reference.run()


def compare(scenario: Scenario, name: str, seed: int) -> None:
    outcome, reference, seconds = both(scenario, name, seed)
    assert outcome.seconds == pytest.approx(seconds, rel=1e-9)
    assert outcome.pfs_mb == pytest.approx(reference.pfs_mb, rel=1e-9)
    assert outcome.stall_s == pytest.approx(reference.stall_s, rel=1e-9)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize(
    "scenario",
    [
        small(room_mb=(30, 400, 0), epochs=4),
        small(room_mb=(30, 120, 200)),
        small(room_mb=(20, 40, 60), nodes=3),
        small(room_mb=(15, 20, 45), epochs=4),
        small(room_mb=(2, 20, 45)),  # a batch does not fit into the staging buffer
        small(room_mb=(1000, 1000, 1000), nodes=1),
        small(mean_mb=0.03, sigma_mb=0.02, batch=25, samples=1000, room_mb=(4, 6, 3)),
    ],
    ids=["memory", "node", "nodes", "nowhere", "staging too small", "one node", "tiny samples"],
)
def test_is_what_the_rules_say(scenario: Scenario, name: str) -> None:
    try:
        POLICIES[name].plan(scenario.system, scenario.job(3))
    except RefusedError:
        return
    compare(scenario, name, seed=3)


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios(), name=st.sampled_from(REAL), seed=st.integers(0, 1000))
def test_is_what_the_rules_say_of_anything(scenario: Scenario, name: str, seed: int) -> None:
    try:
        POLICIES[name].plan(scenario.system, scenario.job(seed))
    except RefusedError:
        return
    compare(scenario, name, seed)


# --- gamma ---


def test_gamma_is_what_bisection_in_whole_lists_finds() -> None:
    chance = random.Random(5)
    clients = PfsClients(3)
    reads: list[list[float]] = [[], [], []]
    planned: list[list[float]] = [[], [], []]
    missed = 0
    for _ in range(3000):
        node, now_s = chance.randrange(3), chance.random() * 100
        if chance.random() < 0.3:
            now_s = max([now_s / 10, *reads[node]])
            reads[node].append(now_s)
            clients.last_read_s[node] = now_s
        else:
            planned[node].append(now_s)
            clients.plan(node, now_s)
        at_s = chance.choice(planned[node] or [now_s]) + chance.choice([-0.05, 0.0, 0.05])
        wanted = 1
        for other in range(3):
            lists = [stamps for stamps in (reads[other], planned[other]) if stamps and stamps[-1] > at_s - 0.1]
            wanted += other != node and any(bisect_left(stamps, at_s) < len(stamps) for stamps in lists)
            missed += any(max(stamps) >= at_s for stamps in lists)
        assert clients.count(node, at_s) == wanted
    assert missed > 100, "the lists are so unsorted that something is overlooked"


# --- published figures ---


@pytest.mark.parametrize("name", PUBLISHED_S["S1"])
def test_published_figures_of_s1(name: str) -> None:
    scenario = SCENARIOS["S1"]
    outcome = run(POLICIES[name], scenario.system, scenario.job(0), "published")
    assert outcome.seconds == pytest.approx(PUBLISHED_S["S1"][name], rel=0.01)


@pytest.mark.parametrize(("scenario", "name"), [("S2", "naive"), ("S2", "hdmlp"), ("S3", "deepio-opportunistic")])
def test_some_published_figures_at_full_size(scenario: str, name: str) -> None:
    """All of them: benchmarks/published_cells.py."""
    whole = SCENARIOS[scenario]
    outcome = run(POLICIES[name], whole.system, whole.job(0), "published")
    assert outcome.seconds == pytest.approx(PUBLISHED_S[scenario][name], rel=0.002)


def test_a_published_figure_of_hdmlp_with_other_stores() -> None:
    scenario = with_stores(memory_gb=40, other_gb=80)
    outcome = run(POLICIES["hdmlp"], scenario.system, scenario.job(0), "published")
    assert outcome.seconds == pytest.approx(PUBLISHED_STORES_S[80][40], rel=0.002)


@pytest.mark.parametrize("name", ["lbann-dynamic", "lbann-preload"])
def test_what_refused_refuses(name: str) -> None:
    scenario = SCENARIOS["S3"]
    with pytest.raises(RefusedError, match="600,020 MB do not fit into 204,800 MB of 4 nodes"):
        run(POLICIES[name], scenario.system, scenario.job(0), "published")
