"""What is made of programs' reports, without a mount: streams, the next epoch, samplers that do something else."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import trio
from mounting import prepare

from fanstore.client.protocol import ControlError
from fanstore.client.server import Client
from fanstore.format.index import Index
from fanstore.order import DistributedLocality, TorchDistributedSampler, TorchRandomSampler
from fanstore.order.order import Samples
from fanstore.order.reportedstream import ReportedStream
from fanstore.order.twister import Twister, outputs_between
from fanstore.order.window import Counts, Origin, Window, repeated
from fanstore.prefetch.arranging import Arranging
from fanstore.prefetch.hooked import Hooked

FILES = 100
BATCH = 10


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    root = tmp_path_factory.mktemp("reports") / "source"
    root.mkdir()
    for number in range(FILES):
        (root / f"{number:03d}.jpg").write_bytes(bytes([number]) * 1000)
    return Index.from_buffer((prepare(root, root.parent / "d.fan") / "index.fsx").read_bytes())


PATHS = [f"{number:03d}.jpg".encode() for number in range(FILES)]


class Reports:
    """A program that reports, and what the daemon follows."""

    def __init__(self, index: Index, arranging: Arranging | None = None) -> None:
        self.streams: list[ReportedStream] = []
        self.told: list[str] = []
        self.hooked = Hooked(index, self.streams.append, lambda: None, self.tell, lambda: False, arranging)
        self.client = Client()
        self.entries = [index.resolve(path) for path in PATHS]

    def tell(self, text: str, *values: object) -> None:
        self.told.append(text % values)

    def ask(self, name: str, client: Client | None = None, **arguments: object) -> Mapping[str, Any]:
        request = self.hooked.requests()[name]
        assert {key: type(value) for key, value in arguments.items()} == request.arguments
        ours = (client or self.client,) if request.client else ()
        reply = trio.run(functools.partial(request.handler, *ours, **arguments))
        return {} if reply is None else reply.values

    def arranging_says(self) -> Any:
        assert self.hooked._arranging is not None
        return self.hooked._arranging.describe()

    def epoch(self, number: int = 0, loader: int = 0, client: Client | None = None, **about: object) -> bool:
        told = {
            "kind": "sequential",
            "name": "SequentialSampler",
            "pid": 77,
            "base": 5,
            "samples": FILES,
            "count": FILES,
            "batch": BATCH,
            "drop_last": False,
            "workers": 2,
            "number": number,
            "persistent": False,
            "dataset": "Images",
            "program": "train.py",
            "digest": "d",
        }
        return bool(self.ask("order-epoch", client, loader=loader, about=json.dumps(told | about))["wanted"])

    def paths(self, loader: int = 0) -> None:
        for first in (0, 60):
            piece = b"\0".join(PATHS[first : first + 60])
            self.ask("order-paths", loader=loader, first=first, paths=piece)

    def read(self, samples: Samples, place: int, done: int, epoch: int = 0) -> None:
        data = samples.astype("<u4").tobytes()
        self.ask("order-read", loader=0, epoch=epoch, place=place, done=done, samples=data)

    @property
    def stream(self) -> ReportedStream:
        (stream,) = [stream for stream in self.streams if not stream.closed]
        return stream

    def files(self, begin: int, end: int) -> list[int | None]:
        """What is expected at places of the stream, as numbers of samples."""
        found = [self.stream.at(place) for place in range(begin, end)]
        return [None if file is None else self.entries.index(file) for file in found]


@pytest.fixture
def reports(index: Index) -> Reports:
    return Reports(index)


def distributed(seed: int, epoch: int, rank: int = 1) -> dict[str, Any]:
    sampler = {"ranks": 2, "rank": rank, "shuffle": True, "seed": seed, "epoch": epoch, "drop_last_samples": False}
    return {"kind": "distributed", "name": "DistributedSampler", **sampler}


def test_a_distributed_sampler_goes_on_by_itself(reports: Reports) -> None:
    """The second epoch is in the same stream, where it was expected; one that was not is a new stream."""
    sampler = TorchDistributedSampler(FILES, 2, 3)
    assert reports.epoch(0, **distributed(3, 6)), "its paths are wanted"
    assert reports.streams == []
    reports.paths()
    assert reports.files(0, 150) == np.concatenate([sampler.samples(epoch, 1) for epoch in (6, 7, 8)]).tolist()
    first = reports.stream
    assert not reports.epoch(1, **distributed(3, 7)) and reports.stream is first and first.epoch == 7
    reports.read(sampler.samples(7, 1)[:20], 0, 10, 1)
    first.settle(Counts(), 1.0)
    assert first.frontier == 60
    reports.epoch(2, **distributed(3, 7)), "set_epoch was forgotten"
    assert reports.files(0, 100) == [*sampler.samples(7, 1)] * 2
    assert first.closed and first not in [reports.stream]
    assert reports.told == ["process 77 reports its order: DistributedSampler, seed 3, 100 samples"]


def state(twister: Twister) -> dict[str, Any]:
    _, words, at, *_ = twister._state.get_state()
    return {"at": at, "words": np.asarray(words, dtype="<u4").tobytes().hex()}


def random_sampler(twister: Twister, **about: object) -> dict[str, Any]:
    return {"kind": "random", "name": "RandomSampler", "seed": 9, "own": False, **state(twister), **about}


def test_a_random_sampler_is_predicted_as_soon_as_its_stride_is_known(reports: Reports) -> None:
    """Something draws 50,001 numbers in each epoch besides; from the third epoch on that is known."""
    sampler = TorchRandomSampler(FILES, 9, drawn_before=700, drawn_per_epoch=50_001)
    generator = Twister.torch(9)
    generator.skip(702)  # the base seed is drawn before
    for epoch in range(4):
        reports.epoch(epoch, **random_sampler(generator))
        generator.skip(4 + 50_001)
        if epoch == 0:
            reports.paths()
        place = max(0, epoch - 1) * FILES
        assert reports.files(place, place + FILES) == [*sampler.samples(epoch)], "exactly"
        if epoch:
            assert reports.files(place + FILES, place + 2 * FILES) == [*sampler.samples(epoch + 1)], "as predicted"
    assert len(reports.streams) == 2, "of the first epoch, and of all others"


def test_how_far_a_generator_has_come() -> None:
    before = Twister.torch(1)
    before.skip(1000)
    for outputs in (0, 1, 623, 624, 5_000, (1 << 20) - 1, 1 << 20, 3_000_000):
        after = before.copy()
        after.skip(outputs)
        assert outputs_between(before, after, 1 << 22) == outputs
    assert outputs_between(after, before, 1 << 20) is None
    assert outputs_between(before, after, 2_999_999) is None


def test_a_sampler_that_does_something_else(reports: Reports) -> None:
    """It is called DistributedSampler, and hands out other numbers: from then on they are taken as they come."""
    reports.epoch(0, **distributed(3, 0))
    reports.paths()
    theirs = np.arange(FILES)[::-1]
    reports.read(theirs[:20], 0, 0)
    assert reports.files(0, 30) == [*theirs[:20], *[None] * 10]
    reports.read(theirs[20:30], 20, 10)
    assert reports.files(0, 30) == [*theirs[:30]]
    reports.stream.settle(Counts(), 1.0)
    assert reports.stream.frontier == 10
    assert reports.told[1:] == ["the sampler DistributedSampler does not do what is known of it"]


def test_a_list_of_the_program(reports: Reports) -> None:
    """A sampler that is not known, but goes through a list: all of the epoch is known, in pieces that come later."""
    reports.epoch(0, kind="custom", name="Mine")
    reports.paths()
    order = np.random.Generator(np.random.SFC64(4)).permutation(FILES)[:70]
    reports.read(order[:10], 0, 0)
    for place in (0, 40):
        data = order[place : place + 40].astype("<u4").tobytes()
        reports.ask("order-ahead", loader=0, epoch=0, place=place, total=70, samples=data)
    assert reports.files(0, 80) == [*order, *[None] * 10]
    reports.read(order[10:30], 10, 20)
    reports.stream.settle(Counts(), 1.0)
    assert reports.stream.frontier == 20


def test_files_that_are_learned(reports: Reports) -> None:
    """Two of each sample; the first epoch says what they are, and those that nobody has seen are left out."""
    reports.epoch(0, digest="")
    assert not reports.streams
    for first in range(0, 90, 10):
        samples = np.arange(first, first + 10, dtype="<u4").tobytes()
        paths = b"\0".join(path for number in range(first, first + 10) for path in (PATHS[number], PATHS[99 - number]))
        arguments: dict[str, Any] = {"pid": 77, "base": 5, "samples": samples, "paths": paths}
        assert reports.ask("order-learned", **arguments) == {"know": False}
        assert reports.ask("order-learned", **arguments) == {"know": True}
    reports.epoch(1, digest="", base=6)
    pairs = [each for number in range(90) for each in (number, 99 - number)]
    assert reports.files(0, 182) == [*pairs, 0, 99]
    reports.read(np.arange(20), 0, 10, 1)
    reports.stream.settle(Counts(), 1.0)
    assert reports.stream.frontier == 20, "two files of each sample"
    assert reports.ask("order-learned", pid=77, base=5, samples=b"\0" * 4, paths=PATHS[0]) == {"know": True}


def test_ranks_of_a_job_tell_their_paths_once(reports: Reports) -> None:
    others = [Client() for _ in range(3)]
    assert reports.epoch(0, **distributed(3, 0))
    assert not any(reports.epoch(0, client=other, **distributed(3, 0, 0)) for other in others)
    reports.paths()
    assert len(reports.streams) == 4
    reports.ask("order-paths", others[0], loader=0, first=0, paths=PATHS[5])  # it was not heard that they are known
    assert len(reports.streams) == 4
    for client in (reports.client, *others[:2]):
        client.at_end.close()
    assert [stream.closed for stream in reports.streams] == [True, True, True, False]
    assert not reports.epoch(0, client=Client(), **distributed(3, 0)), "they are known on"
    assert reports.hooked.last == (Origin("hooked", "DistributedSampler", 3), 0)


def test_a_program_that_dies_while_it_tells(reports: Reports) -> None:
    assert reports.epoch(0)
    reports.ask("order-paths", loader=0, first=0, paths=b"\0".join(PATHS[:50]))
    reports.client.at_end.close()
    reports.client = Client()
    assert reports.epoch(0), "the next one is asked for them"
    reports.paths()
    assert reports.files(0, 100) == [*range(100)]


@pytest.mark.parametrize(
    "about",
    [
        {"kind": "other"},
        {"kind": []},
        {"samples": -1},
        {"samples": 1 << 40},
        {"samples": 10.5},
        {"count": FILES + 1},
        {"batch": 0},
        {"batch": True},
        {"name": None},
        {"kind": "distributed"},
        distributed(3, 0, rank=2),
        {**distributed(3, 0), "count": 1 << 40},
        {**distributed(3, 0), "ranks": 0},
        {"kind": "random", "seed": 1, "own": True, "at": 0, "words": "00"},
        {"kind": "random", "seed": 1, "own": True, "at": 0, "words": "no words"},
        {"kind": "random", "seed": 1, "own": True, "at": 1 << 60, "words": "00" * 2496},
    ],
)
def test_what_makes_no_sense_is_refused(reports: Reports, about: Mapping[str, Any]) -> None:
    with pytest.raises(ControlError):
        reports.epoch(0, **about)


def test_reports_that_do_not_fit(reports: Reports) -> None:
    with pytest.raises(ControlError):
        reports.ask("order-paths", loader=0, first=0, paths=b"x")
    with pytest.raises(ControlError):
        reports.ask("order-epoch", loader=0, about="[" * 100_000)
    reports.epoch(0)
    with pytest.raises(ControlError):
        reports.ask("order-paths", loader=0, first=1, paths=PATHS[1])
    with pytest.raises(ControlError):
        reports.ask("order-paths", loader=0, first=0, paths=b"\0" * 200)
    reports.paths()
    reports.read(np.array([FILES]), 0, 0)
    reports.read(np.arange(10), 50, 40)
    reports.ask("order-ahead", loader=0, epoch=0, place=0, total=1 << 40, samples=b"")
    reports.ask("order-failed", reason="KeyError: 'x'")
    assert reports.files(0, 100) == [*range(100)]


# --- programs whose order is rearranged ---


class Arranged(Reports):
    """Two nodes, of which each has half of the files; ``nodes`` is what is known of the ranks of programs."""

    def __init__(self, index: Index) -> None:
        self.nodes: Sequence[int] | None = None
        self.keys: set[str] = set()
        partition = np.array(index.partition)
        for path in PATHS[FILES // 2 :]:
            partition[index.resolve(path)] = 1
        super().__init__(index, Arranging(partition, [(0,), (1,)], self.find, size=2))

    def find(self, key: str, ranks: int, rank: int) -> Sequence[int] | None:
        assert (ranks, rank) == (2, 1)
        self.keys.add(key)
        return self.nodes

    def arranged(self, first: Samples, epoch: int = 0, client: Client | None = None) -> Mapping[str, Any]:
        data = first[:BATCH].astype("<u4").tobytes()
        return self.ask("order-arranged", client, loader=0, epoch=epoch, samples=data)


def test_a_program_reads_what_its_node_holds(index: Index) -> None:
    """Once all ranks are known; of the next epoch, too, which goes on in the stream in which it was expected."""
    reports = Arranged(index)
    plain = TorchDistributedSampler(FILES, 2, 3)
    expected = DistributedLocality(plain, BATCH, np.arange(FILES) // 50, [1, 0])
    reports.epoch(0, **distributed(3, 0))
    assert reports.arranged(plain.samples(0, 1)) == {"wait": True}, "its paths are not known"
    assert not reports.keys
    reports.paths()
    assert reports.arranged(plain.samples(0, 1)) == {"wait": True} and not reports.streams
    reports.nodes = [1, 0]
    for epoch in range(3):
        if epoch:
            reports.epoch(epoch, **distributed(3, epoch))
        said = reports.arranged(plain.samples(epoch, 1), epoch)["samples"]
        ours = expected.samples(epoch, 1)
        assert np.frombuffer(said, "<u4").tolist() == ours.tolist() != plain.samples(epoch, 1).tolist()
        reports.read(ours[:BATCH], 0, 0, epoch)
        assert reports.files(50 * epoch, 50 * epoch + 100) == [*ours, *expected.samples(epoch + 1, 1)]
        assert (reports.stream.epoch, len(reports.streams), len(reports.keys)) == (epoch, 1, 1)
    described = reports.arranging_says()
    assert described["epochs"] == 3 and described["samples"] == 150 and 130 < described["held"] < 150
    assert reports.told[1:] == [
        "the order of DistributedSampler is rearranged, so that ranks read what their node holds"
    ]


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({}, "SequentialSampler is no DistributedSampler of torch"),
        ({**distributed(3, 0), "shuffle": False}, "its DistributedSampler does not shuffle"),
        ({**distributed(3, 0), "digest": ""}, "the dataset Images does not say which files its samples are"),
        ({**distributed(3, 0, 0), "ranks": 1}, "the program has one rank"),
    ],
)
def test_what_is_left_alone(index: Index, about: Mapping[str, Any], why: str) -> None:
    reports = Arranged(index)
    reports.nodes = [1, 0]
    for epoch in range(2):
        reports.epoch(epoch, **about)
        assert reports.arranged(np.arange(FILES), epoch) == {"samples": b""}
    assert not reports.keys and [why in line for line in reports.told] == [False, True]
    assert [each.startswith(why) for each in reports.arranging_says()["left_alone"]] == [True]


def test_left_alone_by_what_others_do(index: Index) -> None:
    """Ranks that do not come, a sampler that does something else, a program that dies before it has told its paths."""
    reports = Arranged(index)
    plain = TorchDistributedSampler(FILES, 2, 3)
    reports.nodes = []
    reports.epoch(0, **distributed(3, 0))
    other = Client()
    reports.epoch(0, client=other, **distributed(3, 0))
    assert reports.arranged(plain.samples(0, 1), client=other) == {"wait": True}
    reports.client.at_end.close()
    assert reports.arranged(plain.samples(0, 1), client=other) == {"samples": b""}
    other.at_end.close()
    reports.client = Client()
    reports.epoch(0, **distributed(3, 0))
    reports.paths()
    assert reports.arranged(plain.samples(0, 1)[::-1]) == {"samples": b""} and not reports.keys
    assert reports.arranged(plain.samples(0, 1)) == {"samples": b""} and reports.keys
    assert [why.partition(" ")[0] for why in reports.arranging_says()["left_alone"]] == ["the", "its", "not"]
    assert reports.files(0, 50) == plain.samples(0, 1).tolist(), "and fetched ahead as the sampler has it"
    reports.ask("order-alone", reason="an IterableDataset has no numbers of samples")
    assert reports.told[-1] == "an order is left as it is: an IterableDataset has no numbers of samples"


def test_without_the_option_nothing_is_rearranged(reports: Reports) -> None:
    reports.epoch(0, **distributed(3, 0))
    reports.paths()
    assert reports.ask("order-arranged", loader=0, epoch=0, samples=b"") == {"samples": b""}


# --- the policy ---


def window(files: int, total: int) -> tuple[Window, ReportedStream]:
    policy = Window(lambda file: 1000, total * 1000)
    stream = ReportedStream(Origin("hooked", "x"), [np.arange(files, dtype=np.uint32)], 0, 64)
    policy.streams = [stream]
    return policy, stream


def test_a_reader_that_nobody_sees_does_not_stop_the_window() -> None:
    """All comes from the page cache, or is read by the program itself: what is fetched follows its reports."""
    policy, stream = window(1000, 20)
    fetched = policy.take(0.0)
    for done in range(0, 1000, 8):
        stream.report(done)
        stream.settle(policy.counts, 1.0)
        fetched += policy.take(1.0)
        assert policy.held_bytes <= 20_000
    assert fetched == [*range(1000)]


def test_a_program_that_stops_gives_way_and_comes_back() -> None:
    policy, stream = window(1000, 20)
    other = ReportedStream(Origin("hooked", "y"), [np.arange(2000, 3000, dtype=np.uint32)], 0, 64)
    policy.streams.append(other)
    for each in (stream, other):
        each.report(0)
        each.settle(policy.counts, 1.0)
    policy.take(1.0)
    other.report(5)
    other.settle(policy.counts, 100.0)
    policy.give_way(100.0)
    assert stream.held_bytes == 0 and not stream.followed
    assert 2024 in policy.take(100.0), "the other one has all of the window"
    stream.report(1)
    stream.settle(policy.counts, 101.0)
    other.report(30)
    other.settle(policy.counts, 101.0)
    assert 1 in policy.take(101.0)


def test_a_program_that_reads_something_else_than_it_says() -> None:
    policy, stream = window(100_000, 20)
    fetched = 0
    said_so = 0
    for done in range(0, 20_000, 8):
        for file in range(8):
            policy.seen(200_000 + done + file, 1, 1.0)
        stream.report(done)
        said_so += not stream.settle(policy.counts, 1.0)
        fetched += len(policy.take(1.0))
    assert fetched < 2000 and said_so == 1 and policy.held_bytes == 0
    assert policy.seen(20_000, 1, 2.0) and stream.followed, "until it does"


def test_two_ranks_with_the_same_files() -> None:
    """What one reads now, the other reads in the next epoch: a read counts for the one that has handed it out."""
    halves = [[*range(50)], [*range(50, 100)]]
    epochs = [[halves[0], halves[1]], [halves[1], halves[0]]]
    streams = [
        ReportedStream(Origin("hooked", "x"), [np.array(each, dtype=np.uint32) for each in own], 0, 8) for own in epochs
    ]
    policy = Window(lambda file: 1000, 200_000)
    policy.streams = [*streams]
    policy.take(1.0)
    for place in range(100):
        for rank, stream in enumerate(streams):
            stream.report(place, place + 4)
            stream.settle(policy.counts, 1.0)
            assert policy.seen([*epochs[rank][0], *epochs[rank][1]][place], 1, 1.0)
    assert [stream.counts.predicted for stream in streams] == [100, 100]
    assert policy.counts.taken == 200


def test_files_in_the_page_cache_are_not_fetched_in_every_epoch() -> None:
    """What was fetched and not asked for is not fetched again, until somebody has asked for it."""
    policy = Window(lambda file: 1000, 20_000)
    epochs = repeated(np.arange(100, dtype=np.uint32))
    stream = ReportedStream(Origin("hooked", "x"), epochs, 0, 64, bytearray(100))
    policy.streams = [stream]
    fetched: list[list[int]] = [[], [], []]
    for epoch, asked in enumerate((range(0), range(30, 40), range(0))):
        for file in range(100):
            fetched[epoch] += policy.take(1.0)
            if file in asked:
                assert policy.seen(file, 1, 1.0)
            stream.report(epoch * 100 + file + 1)
            stream.settle(policy.counts, 1.0)
    assert fetched == [[*range(100)], [*range(30, 40)], []], "the second time for the third epoch"


def test_a_jump_costs_nothing() -> None:
    policy, stream = window(5_000_000, 20)
    policy.take(0.0)
    stream.report(4_000_000)
    stream.settle(policy.counts, 1.0)
    assert policy.take(1.0) == [*range(4_000_000, 4_000_020)]
