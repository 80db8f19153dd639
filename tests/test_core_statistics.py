"""Counters, latency histograms and the shape of stats.json."""

import json
import random
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fanstore.telemetry.statistics import OperationStatistics, Source, Statistics, memory


@given(st.lists(st.integers(0, 1 << 45), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_percentile_is_at_most_an_eighth_above_the_truth(times: list[int], share: float) -> None:
    counters = OperationStatistics()
    for elapsed_ns in times:
        counters.record(elapsed_ns)
    counters.validate()
    ordered = sorted(times)
    truth = next(value for number, value in enumerate(ordered, 1) if number >= share * len(times))
    found = counters.percentile_ns(share)
    if truth < 1 << 40:
        assert truth <= found <= truth * 1.125 + 1
    assert found <= ordered[-1]


def test_percentiles_of_nothing_are_zero() -> None:
    snapshot = OperationStatistics().snapshot()
    assert snapshot["count"] == 0
    assert snapshot["latency_us"] == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


def test_a_clock_that_steps_back_does_no_harm() -> None:
    counters = OperationStatistics()
    counters.record(-5)
    assert counters.percentile_ns(0.5) == 0


def test_snapshot_is_plain_json() -> None:
    statistics = Statistics()
    numbers = random.Random(1)
    for _ in range(1000):
        statistics.record("read", numbers.randrange(10_000, 10_000_000))
    statistics.record("lookup", 5_000, failed=True)
    statistics.sources[Source.LOCAL].reads += 2
    statistics.add_section("cache", lambda: {"hits": 3})
    statistics.validate()
    content = json.loads(json.dumps(statistics.snapshot()))
    assert content["version"] == 1
    assert content["operations"]["read"]["count"] == 1000
    assert content["operations"]["lookup"]["errors"] == 1
    latency = content["operations"]["read"]["latency_us"]
    assert 0 < latency["p50"] < latency["p90"] < latency["p99"] <= latency["max"] <= 10_000
    assert content["sources"]["local"]["reads"] == 2
    assert set(content["sources"]) == {"local", "remote", "shared", "cache"}
    assert content["cache"] == {"hits": 3}
    assert content["memory"]["peak_rss_bytes"] >= content["memory"]["rss_bytes"] > 1 << 20


def test_staging_counters_may_be_written_by_many_threads() -> None:
    statistics = Statistics()

    def copy() -> None:
        for _ in range(2000):
            statistics.add_staging(done_bytes=1, partitions=1)

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statistics.staging().done_bytes == 8000
    statistics.validate()


def test_memory_is_that_of_this_process() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert abs(memory()["rss_bytes"] - pages * 4096) < 64 << 20


def _keys(content: object) -> set[str]:
    if not isinstance(content, dict):
        return set()
    return {key for name, value in content.items() for key in ({name} | _keys(value))}


def test_every_key_is_documented() -> None:
    statistics = Statistics()
    statistics.record("read", 1)
    text = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    for key in _keys(statistics.snapshot()):
        assert f"`{key}`" in text, f"docs/operations.md does not explain '{key}' of stats.json"
