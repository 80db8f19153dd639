"""What a daemon remembers of its job: samples and events in bounded memory, and an account that fits in a message."""

import itertools
import logging
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from conftest import MakePrepared
from core_parts import opened
from hypothesis import given
from hypothesis import strategies as st
from report_data import make_job

from fanstore.job.account import Account, pack, unpack
from fanstore.job.job import Job
from fanstore.telemetry.events import FIRST_KEPT, LAST_KEPT, LONGEST_TEXT, NOTABLE, Events
from fanstore.telemetry.history import FIRST_INTERVAL_S, SAMPLES_MOST, History, Sample
from fanstore.telemetry.statistics import OCTAVES, OperationStatistics
from fanstore.transport.peers import MESSAGE_BYTES

# --- samples ---


@given(st.integers(0, 5000))
def test_any_number_of_samples_is_kept_in_bounded_memory(count: int) -> None:
    history = History()
    for number in range(1, count + 1):
        history.add(Sample(float(number), local=100 * number, pending=number % 7))
        assert len(history.samples()) <= SAMPLES_MOST
    history.validate()
    last = history.samples()[-1]
    assert (last.at_s, last.local) == (float(count), 100 * count), "sums are exact to the end"
    if count > SAMPLES_MOST:
        assert history.interval_s > FIRST_INTERVAL_S
        assert len(history.samples()) > SAMPLES_MOST // 2 - 1


def test_a_peak_is_not_lost_when_samples_are_merged() -> None:
    history = History()
    peak = random.Random(3).randrange(1, 4000)
    at_s, highest_seen = 0.0, False
    while at_s < 4000:
        at_s += history.interval_s
        is_peak = at_s >= peak and not highest_seen
        highest_seen |= is_peak
        history.add(Sample(at_s, pending_bytes=10**9 if is_peak else 5))
    found = [sample for sample in history.samples() if sample.pending_bytes == 10**9]
    assert len(found) == 1
    assert 0 <= found[0].at_s - peak <= 2 * history.interval_s


def test_a_job_of_days_has_as_many_samples_as_one_of_a_minute() -> None:
    """On a clock of its own: five days in a moment."""
    history = History()
    taken: list[float] = []

    def take() -> Sample:
        taken.append(trio.current_time())
        return Sample(taken[-1] - taken[0])

    async def main() -> None:
        with trio.move_on_after(5 * 86_400):
            await history.run(take)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    history.validate()
    assert SAMPLES_MOST // 2 <= len(history.samples()) <= SAMPLES_MOST
    assert taken[1] - taken[0] < 1 and taken[-1] - taken[-2] > 1000
    assert len(taken) < 15 * SAMPLES_MOST, "and it was not asked much more often"


def test_a_costly_sample_is_taken_less_often() -> None:
    """A sample that takes long must not cost more than its share of the time."""
    history = History()
    starts: list[float] = []

    def take() -> Sample:
        starts.append(trio.current_time())
        end = threading.Event()
        end.wait(0.02)  # a busy node, not a wait for something
        return Sample(float(len(starts)))

    async def main() -> None:
        with trio.move_on_after(60):
            await history.run(take)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert all(later - earlier >= 4.0 for earlier, later in itertools.pairwise(starts)), starts


# --- events ---


@pytest.fixture
def events() -> Iterator[Events]:
    """On a logger of its own: warnings of ``fanstore`` fail a test."""
    logger = logging.getLogger("events-under-test.remote")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    handler = Events()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def log() -> logging.Logger:
    return logging.getLogger("events-under-test.remote")


def test_warnings_and_what_is_notable_are_events(events: Events) -> None:
    log().debug("a detail", extra=NOTABLE)
    log().info("ordinary")
    log().info("staged %d", 3, extra=NOTABLE)
    log().warning("rank %d is silent", 4)
    log().error("damaged")
    assert [(event.level, event.kind, event.text) for event in events.snapshot()] == [
        ("info", "nodes", "staged 3"),
        ("warning", "nodes", "rank 4 is silent"),
        ("error", "nodes", "damaged"),
    ]
    assert (events.warnings, events.errors, events.left_out) == (1, 1, 0)


def test_the_first_and_the_last_events_are_kept(events: Events) -> None:
    for number in range(1000):
        log().warning("%d %s", number, "x" * 1000)
    kept = events.snapshot()
    assert len(kept) == FIRST_KEPT + LAST_KEPT
    numbers = [int(event.text.split()[0]) for event in kept]
    assert numbers == [*range(FIRST_KEPT), *range(1000 - LAST_KEPT, 1000)]
    assert events.left_out == 1000 - len(kept)
    assert events.warnings == 1000
    assert all(len(event.text) == LONGEST_TEXT for event in kept)


def test_events_come_from_many_threads(events: Events) -> None:
    def complain() -> None:
        for number in range(500):
            log().warning("%d", number)
            events.snapshot()

    threads = [threading.Thread(target=complain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.warnings == 2000 == events.left_out + len(events.snapshot())


# --- histograms ---


@given(st.lists(st.integers(0, 1 << 41), max_size=60))
def test_octaves_are_the_times_between_powers_of_two(times: list[int]) -> None:
    counters = OperationStatistics()
    for elapsed_ns in times:
        counters.record(elapsed_ns)
    bounds = [0, *(1 << power for power in OCTAVES), 1 << 60]
    truth = [sum(low <= each < high for each in times) for low, high in itertools.pairwise(bounds)]
    assert counters.octaves() == truth


# --- accounts ---


def test_an_account_of_a_real_node(tmp_path: Path, make_prepared: MakePrepared) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_bytes(b"x" * 30_000)
    with opened(make_prepared(source)) as parts:
        account = Account(Job(None), parts.store, parts.broker, None, parts.statistics, Events(), dict)
        account.history.add(account.sample())
        parts.read("file")
        parts.statistics.record("read", 70_000)
        told = unpack(account.pack())
    assert told["sources"]["shared"]["bytes"] == 30_000
    assert told["samples"]["shared"] == [0, 0, 30_000], "increments; the last sample is of now"
    assert told["samples"]["memory_bytes"][-1] > 10 << 20
    assert told["latency"]["read"]["count"] == 1 == sum(told["latency"]["read"]["octaves"])
    assert "fetch" not in told["latency"] and told["outputs"] is None and told["fetched"] == {}


def test_an_account_always_fits_in_a_message() -> None:
    """Words that cannot be compressed, and a thousand peers: what can be spared is left out, the sums never."""
    numbers = random.Random(5)
    account = make_job(2)["nodes"][0]
    assert unpack(pack(account)) == account
    noise = "".join(chr(numbers.randrange(0x4E00, 0x9FFF)) for _ in range(LONGEST_TEXT))
    account["events"] = [[1.0, "error", "data", "".join(numbers.sample(noise, len(noise)))] for _ in range(150)]
    message = pack(account)
    assert len(message) < MESSAGE_BYTES
    assert "events" not in unpack(message) and unpack(message)["fetched"] == account["fetched"]
    account["fetched"] = {str(peer): numbers.randrange(1 << 60) for peer in range(8000)}
    assert len(pack(account)) < MESSAGE_BYTES
    assert unpack(pack(account))["sources"] == account["sources"]


def test_what_is_no_account_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="not an account"):
        unpack(b"node")
