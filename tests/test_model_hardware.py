"""Max-flow, and the tables of the talk: every number."""

import itertools
import json

import pytest
from commands import run_inside
from hypothesis import given, settings
from hypothesis import strategies as st

from fanstore.errors import UsageError
from fanstore.model.flow import max_flow
from fanstore.model.hardware import RATES, SETUPS, Hardware, datapath, needed, time_for

# --- the talk's tables ---


@pytest.mark.parametrize(
    ("setup", "gpus", "storage", "interfaces", "cores"),
    [
        ("local", (1, 4, 8, 16), (1, 1, 2, 3), (0, 0, 0, 0), (3, 12, 24, 48)),
        (
            "nfs",
            (1, 4, 8, 16, 64, 256),
            (4, 15, 30, 60, 240, 960),
            (1, 1, 1, 1, 1, 4),
            (3, 12, 24, 48, 192, 768),
        ),
        (
            "nfs-uncompressed",
            (1, 4, 8, 16, 64, 256),
            (15, 60, 120, 240, 960, 3840),
            (1, 1, 1, 1, 4, 16),
            (0, 0, 0, 0, 0, 0),
        ),
        ("object-store", (1, 4, 8), (2, 6, 12), (1, 1, 1), (0, 0, 0)),
    ],
)
def test_tables(
    setup: str, gpus: tuple[int, ...], storage: tuple[int, ...], interfaces: tuple[int, ...], cores: tuple[int, ...]
) -> None:
    assert tuple(SETUPS[setup].gpus) == gpus
    found = [needed(SETUPS[setup], count) for count in gpus]
    assert tuple(hardware.storage for hardware in found) == storage
    assert tuple(hardware.interfaces for hardware in found) == interfaces
    assert tuple(hardware.cores for hardware in found) == cores


def test_compressed_input() -> None:
    found = [needed(SETUPS["local"], gpus).stored_gb_per_s for gpus in (1, 4, 8, 16)]
    assert found == pytest.approx([0.075, 0.3, 0.6, 1.2], rel=1e-12)


@pytest.mark.parametrize(
    ("gb_per_s", "text"),
    [(30, "9 h"), (40, "7 h"), (5, "2 days"), (6.8, "2 days"), (1, "2 weeks"), (1.65, "1 week")],
)
def test_reading_a_petabyte(gb_per_s: float, text: str) -> None:
    assert time_for(1e6, gb_per_s) == text


@pytest.mark.parametrize("setup", SETUPS)
def test_what_is_needed_keeps_gpus_busy_and_less_does_not(setup: str) -> None:
    """By the flow through the data path; the link that is too narrow is named."""
    for gpus in SETUPS[setup].gpus:
        enough = needed(SETUPS[setup], gpus)
        assert datapath(SETUPS[setup], enough).amount == pytest.approx(gpus * RATES["gpu"])
        for name in ("storage", "interfaces", "cores"):
            count = getattr(enough, name)
            if count > 1:
                less = datapath(SETUPS[setup], Hardware(**{**vars(enough), name: count - 1}))
                assert less.amount < gpus * RATES["gpu"] * (1 - 1e-9)
                assert [end for _, end in less.cut] == [name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"gpus": 0}, "there are 0 GPUs to be fed; there must be at least 1"),
        ({"rates": {**RATES, "ssd": 0.0}}, "the rate 'ssd' is 0.0 GB/s; it must be above 0"),
        ({"compression": 0.5}, "the compression is 0.5; it must be 1 or more"),
    ],
)
def test_what_cannot_be(change: dict[str, object], sentence: str) -> None:
    arguments: dict[str, object] = {"setup": SETUPS["local"], "gpus": 1} | change
    with pytest.raises(UsageError) as error:
        needed(**arguments)  # type: ignore[arg-type]
    assert str(error.value) == sentence


# --- the command ---


def test_command_prints_the_tables() -> None:
    result = run_inside("plan", "hardware")
    assert (result.returncode, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["disks", "4", "15", "30", "60", "240", "960"] in lines
    assert ["SSDs", "1", "1", "2", "3"] in lines and ["disks", "2", "6", "12"] in lines
    assert (
        "1 PB takes 7 h at 40 GB/s, 9 h at 30 GB/s, 2 days at 6.8 GB/s, 2 days at 5 GB/s, 2 weeks at 1" in result.stdout
    )


def test_command_with_other_rates() -> None:
    result = run_inside("plan", "hardware", "--gpus", "10", "--rate", "gpu=0.8", "--rate", "ssd=2", "--json")
    local = json.loads(result.stdout)["needed"]["local"]
    assert local == [{"gpus": 10, "stored_gb_per_s": 2.0, "storage": 1, "interfaces": 0, "cores": 80}]


def test_command_says_what_limits() -> None:
    words = ["plan", "hardware", "--gpus", "8", "--have", "storage=1", "--have", "cores=20"]
    found = json.loads(run_inside(*words, "--json").stdout)
    assert found["local"] == {"gb_per_s": pytest.approx(1.6), "wanted_gb_per_s": 2.4, "limited_by": "storage"}
    assert found["object-store"]["gb_per_s"] == pytest.approx(0.2)
    more = json.loads(run_inside(*words[:4], "--have", "storage=9", "--have", "cores=20", "--json").stdout)
    assert more["local"] == {"gb_per_s": pytest.approx(2.0), "wanted_gb_per_s": 2.4, "limited_by": "cores"}
    assert json.loads(run_inside(*words[:4], "--have", "cores=24", "--json").stdout)["local"]["limited_by"] == "GPUs"
    assert "local SSDs, compressed                1.6 GB/s,  67%, limited by storage" in run_inside(*words).stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--have storage=1", "--have is about one number of GPUs; name it with --gpus N"),
        ("--gpus 8 --have ssd=1", "'--have ssd=1' is not understood; there are storage, interfaces, cores, as in"),
        ("--gpus 8 --have cores=0", "'cores=0' is not a count; write NAME=COUNT, such as cores=2"),
        ("--rate interfaces=1", "there is no rate 'interfaces'; did you mean interface?"),
        ("--rate ssd", "'ssd' is not a rate; write NAME=GB/S, such as ssd=0.4"),
        ("--rate ssd=0", "the rate 'ssd' is 0.0 GB/s; it must be above 0"),
        ("--gpus 0", "there are 0 GPUs to be fed; there must be at least 1"),
        ("--compression nan", "the compression is nan; it must be 1 or more"),
    ],
)
def test_command_refuses(words: str, sentence: str) -> None:
    result = run_inside("plan", "hardware", *words.split())
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"fanstore-plan: error: {sentence}")


# --- max-flow ---

PLACES = ("s", "a", "b", "c", "t")


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(list(itertools.permutations(PLACES, 2))),
        st.one_of(st.integers(0, 9).map(float), st.floats(0, 10)),
        max_size=14,
    )
)
def test_max_flow_is_the_smallest_of_all_cuts(capacity: dict[tuple[str, str], float]) -> None:
    flow = max_flow(capacity, "s", "t")
    inner = PLACES[1:-1]
    cuts = []
    for count in range(len(inner) + 1):
        for near in itertools.combinations(inner, count):
            side = {"s", *near}
            cuts.append(sum(value for (a, b), value in capacity.items() if a in side and b not in side))
    assert flow.amount == pytest.approx(min(cuts), abs=1e-9)
    assert sum(capacity[link] for link in flow.cut) == pytest.approx(flow.amount, abs=1e-9)


def test_what_no_link_limits() -> None:
    assert max_flow({("s", "a"): float("inf"), ("a", "t"): 3.0}, "s", "t").amount == 3.0
    with pytest.raises(UsageError, match="nothing limits what flows from s to t"):
        max_flow({("s", "t"): float("inf")}, "s", "t")
    with pytest.raises(UsageError, match="a capacity of -1; it must be 0 or more"):
        max_flow({("s", "t"): -1}, "s", "t")
    assert max_flow({}, "s", "t").amount == 0
