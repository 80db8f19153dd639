"""The parts of the performance model: curves, systems, jobs, scenarios, and scenarios from files."""

import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from model_scenarios import small

from fanstore.errors import UsageError
from fanstore.model import MODES, POLICIES, SCENARIOS, Curve, Job, run, scenario_of
from fanstore.model.equations import Times
from fanstore.order import GlobalShuffle, TorchEpochSeed


def test_curve_is_straight_between_points_and_constant_outside() -> None:
    curve = Curve.of({4: 146, 1: 66, 2: 86}, "PFS")
    assert curve.at([0.5, 1, 1.5, 2, 3, 4, 100]).tolist() == [66, 66, 76, 86, 116, 146, 146]
    assert curve.each([0, 1, 2, 8]).tolist() == [66, 66, 43, 146 / 8]


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ({}, "PFS has no measured point; give at least one"),
        ({0: 5.0}, "PFS has a throughput for 0; it begins with 1"),
        ({1: 0.0}, "PFS has a throughput of 0.0 MB/s; it must be above 0"),
        ({1: float("nan")}, "PFS has a throughput of nan MB/s; it must be above 0"),
    ],
)
def test_curve_that_cannot_be(points: dict[int, float], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        Curve.of(points, "PFS")
    assert str(error.value) == sentence


def test_equations_of_the_thesis() -> None:
    times = Times.of(SCENARIOS["S2"].system)
    assert times.compute == 1 / 100
    assert times.write == 1 / 200  # preprocessing decides
    assert times.fetch_pfs[1:] == pytest.approx([1 / 66, 2 / 86, 3 / 129, 4 / 146])
    assert times.fetch_remote[1:] == pytest.approx([1 / 10_000, 1 / 86])
    assert times.fetch_local[1:] == pytest.approx([1 / 21_164, 1 / 86])


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 0},
        {"compute_mb_per_s": 0.0},
        {"network_mb_per_s": float("inf")},
        {"classes": ()},
        {"request_s": -1.0},
    ],
)
def test_system_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(SCENARIOS["S2"].system, **changes)


# --- jobs ---


def test_nodes_take_turns_of_a_batch() -> None:
    """Node i takes places [5 i, 5 (i + 1)) of each batch of all nodes; the last incomplete one is dropped."""
    job = small(samples=47, nodes=3, batch=5, epochs=2).job(7)
    assert (job.epoch_iterations, job.iterations) == (3, 6)
    for epoch in range(2):
        permutation = TorchEpochSeed(47, 7).samples(epoch)[:45].reshape(3, 3, 5)
        assert np.array_equal(job.access.reshape(3, 2, 3, 5)[:, epoch], permutation.swapaxes(0, 1))
    assert not np.array_equal(job.access[:, :15], job.access[:, 15:])


def test_any_order_is_a_job() -> None:
    order = GlobalShuffle(samples=101, ranks=4, seed=3)
    job = Job(order, np.ones(101), epochs=2, batch=5)
    assert job.access.shape == (4, 50)
    assert job.access[2, 25:].tolist() == order.samples(1, 2)[:25].tolist()
    assert run(POLICIES["fanstore"], SCENARIOS["S2"].system, job, "published").seconds > 0


def test_the_order_must_be_for_these_nodes() -> None:
    job = Job(GlobalShuffle(samples=100, ranks=5), np.ones(100), epochs=1, batch=5)
    with pytest.raises(UsageError, match="the order is for 5 nodes, and the system has 4"):
        run(POLICIES["naive"], SCENARIOS["S2"].system, job, "published")


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes_mb": np.ones(99)},
        {"sizes_mb": np.full(100, -1.0)},
        {"sizes_mb": np.full(100, np.nan)},
        {"epochs": 0},
        {"batch": 0},
        {"batch": 26},
    ],
    ids=["number of sizes", "negative", "no number", "epochs", "batch", "batch too large"],
)
def test_job_that_cannot_be(changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"sizes_mb": np.ones(100), "epochs": 1, "batch": 25} | changes
    with pytest.raises(UsageError):
        Job(GlobalShuffle(samples=100, ranks=4), **settings)


def test_samples_may_be_empty() -> None:
    job = replace_sizes(small(samples=200).job(1), np.zeros(200))
    for policy in ("naive", "hdmlp", "fanstore"):
        for mode in MODES:
            outcome = run(POLICIES[policy], small().system, job, mode)
            assert 0 <= outcome.seconds < 1


def replace_sizes(job: Job, sizes_mb: np.ndarray[Any, Any]) -> Job:
    return Job(job.order, sizes_mb, job.epochs, job.batch, job.seed)


# --- scenarios ---


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_is_what_it_says(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.name == name
    small_one = replace(scenario, samples=scenario.system.nodes * scenario.batch * 3)
    job = small_one.job(0)
    assert job.nodes == scenario.system.nodes and job.epoch_iterations == 3
    assert job.sizes_mb.min() >= 0


def test_sizes_are_normal_and_not_negative() -> None:
    job = replace(SCENARIOS["imagenet-1k"], samples=200_000).job(4)
    assert job.sizes_mb.min() >= 0
    # Mean of a normal distribution that is cut at 0.
    assert job.sizes_mb.mean() == pytest.approx(0.1077 + 0.1 * 0.2234 / 0.8593, rel=0.01)
    assert replace(SCENARIOS["mnist"], samples=500).job(0).sizes_mb.tolist() == [748e-6] * 500


def test_seeds_differ_and_repeat() -> None:
    one, again, other = (small().job(seed) for seed in (1, 1, 2))
    assert np.array_equal(one.access, again.access) and np.array_equal(one.sizes_mb, again.sizes_mb)
    assert not np.array_equal(one.access, other.access) and not np.array_equal(one.sizes_mb, other.sizes_mb)


# --- scenarios from files ---

OWN = """
nodes = 8
c = 50
beta = 400.0
b_c = 5000          # the keys of HDMLP
b_fs = 1000
distributed_threads = 2
checkpoint = false
request_s = 0
samples = 1000
mean_mb = 0.1
sigma_mb = 0
epochs = 3
batch = 16
pfs_bandwidth = [{ processes = 1, bw = 66 }, { processes = 8, bw = 326 }]

[[storage_classes]]
capacity = 512
threads = 4
bandwidth = [{ threads = 1, bw = 16550 }, { threads = 4, bw = 21415 }]

[[storage_classes]]
name = "NVMe"
capacity = 2048
threads = 2
backend = "filesystem"
backend_options = { path = "/tmp/x" }
bandwidth = [{ threads = 2, bw = 399 }]
write_bandwidth = [{ threads = 2, bw = 200 }]
"""


def test_scenario_of_ones_own() -> None:
    scenario = scenario_of("mine", tomllib.loads(OWN))
    system = scenario.system
    assert (scenario.name, scenario.samples, scenario.mean_mb, scenario.epochs, scenario.batch) == (
        "mine",
        1000,
        0.1,
        3,
        16,
    )
    assert (system.nodes, system.compute_mb_per_s, system.preprocess_mb_per_s) == (8, 50, 400)
    assert (system.network_mb_per_s, system.pfs_network_mb_per_s, system.request_s) == (5000, 1000, 0)
    assert float(system.pfs.at(8)) == 326
    staging, nvme = system.classes
    assert (staging.name, staging.capacity_mb, staging.threads) == ("staging", 512, 4)
    assert (nvme.name, float(nvme.read.at(2)), float(nvme.write.at(2))) == ("NVMe", 399, 200)
    assert run(POLICIES["fanstore"], system, scenario.job(0), "corrected").pfs_mb == pytest.approx(100, rel=0.11)


def test_scenario_based_on_another() -> None:
    scenario = scenario_of("more", {"based_on": "S3", "nodes": 8})
    assert scenario.system == replace(SCENARIOS["S3"].system, nodes=8)
    assert (scenario.samples, scenario.summary) == (300_000, "based on S3")
    assert scenario_of("empty", {}).system == SCENARIOS["S2"].system


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('based_on = "S9"', "'based_on' is 'S9'; there are the scenarios S1, S2, "),
        ("bandwidth = 5", "a scenario has no setting 'bandwidth'; there are b_c, "),
        ("nodes = 2.5", "'nodes' is 2.5; it must be a whole number"),
        ("nodes = true", "'nodes' is True; it must be a whole number"),
        ('c = "fast"', "'c' is 'fast'; it must be a number"),
        ("nodes = 0", "a system of 0 nodes cannot run anything"),
        ("c = 0", "'c' is 0 MB/s; it must be above 0"),
        ("c = nan", "'c' is nan MB/s; it must be above 0"),
        ("samples = 0", "'samples' is 0; it must be 1 or more"),
        ("mean_mb = -1", "'mean_mb' must be above 0"),
        ("pfs_bandwidth = 66", "pfs_bandwidth must be a list of tables"),
        ("pfs_bandwidth = []", "pfs_bandwidth has no measured point"),
        (
            "pfs_bandwidth = [{ threads = 1, bw = 66 }]",
            "pfs_bandwidth has an entry {'threads': 1, 'bw': 66}; it must be",
        ),
        ("storage_classes = []", "there is no storage class"),
        ("storage_classes = [{ capacity = 5, threads = 2 }]", "storage class 'staging' has no 'bandwidth'"),
        (
            "storage_classes = [{ capacity = -5, threads = 2, bandwidth = [{ threads = 1, bw = 1 }] }]",
            "storage class 'staging' has a capacity of -5 MB; it must be 0 or more",
        ),
        (
            "storage_classes = [{ capacity = 5, threads = 0, bandwidth = [{ threads = 1, bw = 1 }] }]",
            "storage class 'staging' has 0 threads; it needs at least 1",
        ),
        ("storage_classes = [{ size = 5 }]", "storage class 'staging' has no setting 'size'; there are backend, "),
    ],
)
def test_scenario_file_that_makes_no_sense(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        scenario_of("wrong", tomllib.loads(text))
    assert str(error.value).startswith(sentence)
