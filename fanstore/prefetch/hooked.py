"""Orders that programs report themselves, by the hook in their interpreter (client/hook/): as streams of files.

Owns what programs have said (docs/protocol.md, "What an order's hook reports"): their loaders, the files of their
samples, and the stream of each loader. An order is replayed if the sampler is a known one (fanstore.order), so that
later epochs are known, too, and checked with what is handed out; otherwise it is what the program has listed, or hands
out. What is reported is not trusted beyond that: at worst what nobody reads is fetched ahead. Trio thread.
"""

import itertools
import json
import logging
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from fanstore.client.protocol import ControlError
from fanstore.client.server import Client, Reply, Request
from fanstore.errors import UsageError
from fanstore.format.index import Index
from fanstore.order import Loader, Order, TorchDistributedSampler
from fanstore.order.order import Integers, Samples
from fanstore.order.pytorch import TorchResumedSampler
from fanstore.order.reportedstream import ReportedStream
from fanstore.order.twister import Twister, outputs_between
from fanstore.order.window import Origin
from fanstore.prefetch.arranging import Arranging, incomplete

log = logging.getLogger(__name__)

Entries: TypeAlias = npt.NDArray[np.uint32]

#: Of a sample whose file is not known, or is none of the dataset.
_NONE = 0xFFFF_FFFF
#: Files of one sample.
_EACH_MOST = 16
#: Tables of files that are kept after their programs have ended, for those that come next.
_TABLES_MOST = 16
#: Loaders of one program.
_LOADERS_MOST = 64
#: Outputs of torch's generator from one epoch to the next that are looked through: some 0.1 s.
_OUTPUTS_MOST = 1 << 25
#: Samples of a dataset, and of what is handed out at a time.
_SAMPLES_MOST = 1 << 27
#: Batches of a sampler that is not known whose places are remembered.
_BATCHES_MOST = 4096


class _Table:
    """The files of a dataset's samples.

    Attributes:
        files: by sample; _NONE where none is known. known: samples whose files are.
        teller: the client that tells them; None if nobody does. complete: all were told.
    """

    def __init__(self, samples: int) -> None:
        self.files: Entries = np.full((samples, 1), _NONE, dtype=np.uint32)
        self.known = 0
        self.told = 0
        self.teller: Client | None = None
        self.complete = False

    def put(self, samples: Integers, files: Entries) -> bool:
        """Files of samples, a row each; whether all were known."""
        each = files.shape[1]
        if each != self.files.shape[1]:
            if self.known:
                return False
            self.files = np.full((len(self.files), each), _NONE, dtype=np.uint32)
        if np.array_equal(self.files[samples], files):
            return True
        self.known += int(np.count_nonzero((self.files[samples] == _NONE).all(axis=1)))
        self.files[samples] = files
        return False


@dataclass
class _Segment:
    """Samples that follow each other in the sampler's order and in a stream.

    Attributes:
        first, start: their first place in the order of the epoch, and in the stream.
        kept: of the files of all samples, those that are known; None if all are, and there is one of each sample.
    """

    samples: Samples
    first: int
    start: int
    each: int
    kept: Integers | None

    def place(self, at: int) -> int:
        """The place in the stream of a place in the order."""
        within = min(max(at - self.first, 0), len(self.samples)) * self.each
        return self.start + (within if self.kept is None else int(np.searchsorted(self.kept, within)))


class _Sequence(Iterator[Integers]):
    """Samples, as they are said, to files.

    Attributes:
        segments: those that were taken, oldest first. current: the one that the program reads.
        _whole: what is said is an epoch each time, not a batch.
    """

    def __init__(self, table: _Table, said: Iterator[Samples], first: int, *, whole: bool) -> None:
        """``first``: the place in the epoch of what is said first."""
        self.segments: deque[_Segment] = deque(maxlen=8 if whole else _BATCHES_MOST)
        self._table = table
        self._said = said
        self._whole = whole
        self._first = first
        self._start = 0
        self._ended = False

    def __next__(self) -> Integers:
        if self._ended:
            raise StopIteration
        samples = next(self._said)
        files = self._table.files[samples]
        each = files.shape[1]
        flat = files.reshape(-1)
        is_known = flat != _NONE
        kept = None if each == 1 and is_known.all() else np.flatnonzero(is_known)
        self.segments.append(_Segment(samples, self._first, self._start, each, kept))
        found = flat if kept is None else flat[kept]
        self._ended = self._whole and not len(found)
        self._first += 0 if self._whole else len(samples)
        self._start += len(found)
        return found


@dataclass(frozen=True)
class _Replay:
    """A sampler that is known, from an epoch on.

    Attributes:
        order: what it does; epoch: the number of the epoch there, and step: from one to the next. rank: whose part.
        state: that of a RandomSampler's generator.
    """

    order: Order
    loader: Loader
    epoch: int = 0
    step: int = 1
    rank: int = 0
    state: Twister | None = None

    def epochs(self) -> Iterator[Samples]:
        """What is read, epoch by epoch."""
        return (
            self.loader.read(self.order.samples(epoch, self.rank)) for epoch in itertools.count(self.epoch, self.step)
        )


@dataclass
class _Loader:
    """A DataLoader of a program, and the epoch that it is in.

    Attributes:
        about: of the epoch, as reported; origin: how its order is known.
        replay: of its sampler from this epoch on; None if that is not known, or does not do what is known of it.
        samples: of this epoch, first to last; None if they are known only when they are handed out.
        sequence: what the stream is made of; current: the segment in which the program is; None if they are batches.
        handed: what was handed out and is not in the stream so far; listed: what the program lists for the epoch.
        place, done: samples that were handed out, and that were read.
        undecided: the epoch may be rearranged, or not.
    """

    table: _Table
    about: Mapping[str, Any]
    origin: Origin
    replay: "_Replay | None" = None
    samples: Samples | None = None
    stream: ReportedStream | None = None
    sequence: _Sequence | None = None
    current: _Segment | None = None
    handed: deque[Samples] = field(default_factory=deque)
    listed: Samples | None = None
    place: int = 0
    done: int = 0
    undecided: bool = False


class Hooked:
    """What programs report to the daemon of this node.

    Attributes:
        last: how the order of a program is known that has ended, and its epoch.
        _programs: by client, its loaders by number; _bases: the loader of an iterator, by process and base seed.
        _tables: by what tells a dataset from others. _unasked: see ReportedStream.
        _arranging: which loaders are rearranged; None if none is.
    """

    def __init__(
        self,
        index: Index,
        add: Callable[[ReportedStream], None],
        wake: Callable[[], None],
        tell: Callable[..., None],
        intercepts: Callable[[], bool],
        arranging: Arranging | None = None,
    ) -> None:
        """``add``: a stream is to be followed; ``wake``: something has changed; ``tell``: write to the log;
        ``intercepts``: programs may read by themselves."""
        self.last: tuple[Origin, int] | None = None
        self._index = index
        self._add = add
        self._wake = wake
        self._tell = tell
        self._intercepts = intercepts
        self._arranging = arranging
        self._unasked = bytearray(index.entry_count)
        self._programs: dict[Client, dict[int, _Loader]] = {}
        self._bases: dict[tuple[int, int], _Loader] = {}
        self._tables: dict[str, _Table] = {}

    def requests(self) -> Mapping[str, Request]:
        """Rows for the table of the control socket."""
        numbers = {"loader": int, "epoch": int, "place": int}
        return {
            "order-epoch": Request(self._epoch, {"loader": int, "about": str}, client=True),
            "order-paths": Request(self._paths, {"loader": int, "first": int, "paths": bytes}, client=True),
            "order-read": Request(self._read, {**numbers, "done": int, "samples": bytes}, client=True),
            "order-ahead": Request(self._ahead, {**numbers, "total": int, "samples": bytes}, client=True),
            "order-learned": Request(self._learned, {"pid": int, "base": int, "samples": bytes, "paths": bytes}),
            "order-failed": Request(self._failed, {"reason": str}),
            "order-arranged": Request(self._arranged, {"loader": int, "epoch": int, "samples": bytes}, client=True),
            "order-alone": Request(self._alone, {"reason": str}),
        }

    # --- reports ---

    async def _epoch(self, client: Client, loader: int, about: str) -> Reply:
        """An epoch of a loader begins. Answers whether the paths of its samples are wanted."""
        told = _parse(about)
        program = self._programs.get(client)
        if program is None:
            program = self._programs[client] = {}
            client.at_end.callback(self._forget, client)
        known = program.get(loader)
        if known is not None and len(known.table.files) != told["samples"]:
            self._end(known)
            known = None
        if known is None and len(program) >= _LOADERS_MOST:
            raise ControlError("arguments", f"a program has {_LOADERS_MOST} loaders at most")
        origin = Origin("hooked", told["name"], told["seed"])
        if known is None:
            known = program[loader] = _Loader(self._table(loader, told), told, origin)
            sampler = told["name"] if told["seed"] is None else f"{told['name']}, seed {told['seed']}"
            self._tell("process %d reports its order: %s, %d samples", told["pid"], sampler, told["samples"])
        for key in [key for key, other in self._bases.items() if other is known]:
            del self._bases[key]
        self._bases[told["pid"], told["base"]] = known
        previous, before = known.about, known.replay
        known.about, known.origin = told, origin
        known.handed.clear()
        known.place = known.done = 0
        known.listed = None
        try:
            # In a thread: an order of a million samples takes some 10 ms, and a search for its stride 100.
            known.replay, known.samples = await trio.to_thread.run_sync(_replay, told, previous, before)
        except UsageError as error:
            raise ControlError("arguments", f"there is no such order: {error}") from None
        objection = None if self._arranging is None else self._arranging.objection(told)
        known.undecided = self._arranging is not None and objection is None
        if objection is not None:
            self._leave_alone(known, objection)
        elif not known.undecided:
            self._begin(known)
        is_first = told["number"] == 0  # of its loader: then the program has its paths at hand
        wanted = is_first and bool(told["digest"]) and not known.table.complete and known.table.teller is None
        if wanted:
            known.table.teller = client
        return Reply({"wanted": wanted})

    async def _paths(self, client: Client, loader: int, first: int, paths: bytes) -> None:
        """Paths of samples, one after the other."""
        known = self._loader(client, loader)
        table = known.table
        names = paths.split(b"\0")
        if table.teller is not client:
            return  # it did not hear in time that nobody wants them
        if first != table.told or first + len(names) > len(table.files):
            raise ControlError("arguments", "these paths do not follow those that were told before")
        files = self.entries(names)
        table.put(np.arange(first, first + len(names)), files.reshape(-1, 1))
        table.told = first + len(names)
        if table.told == len(table.files):
            table.complete, table.teller = True, None
            for other in self._all_loaders():
                if other.table is table and not other.undecided:
                    self._restart(other)

    async def _read(self, client: Client, loader: int, epoch: int, place: int, done: int, samples: bytes) -> None:
        """Samples were handed out to be read, and others have been read."""
        known = self._loader(client, loader)
        numbers = _numbers(samples)
        if (
            epoch != known.about["number"]
            or place != known.place
            or int(numbers.max(initial=0)) >= len(known.table.files)
        ):
            return
        known.place, known.done = place + len(numbers), min(done, place + len(numbers))
        if known.samples is not None and not np.array_equal(known.samples[place : known.place], numbers):
            self._tell("the sampler %s does not do what is known of it", known.origin.sampler)
            known.replay = known.samples = None
            self._end(known)
        if known.samples is None and len(numbers) and known.table.known:
            known.handed.append(numbers)
            if known.stream is None:
                self._restart(known, place)
        self._progress(known)

    async def _ahead(self, client: Client, loader: int, epoch: int, place: int, total: int, samples: bytes) -> None:
        """The samples of the whole epoch, of a sampler that is not known."""
        known = self._loader(client, loader)
        numbers = _numbers(samples)
        is_good = place + len(numbers) <= total <= _SAMPLES_MOST and int(numbers.max(initial=0)) < len(
            known.table.files
        )
        if epoch != known.about["number"] or not is_good:
            return
        if known.listed is None or len(known.listed) != total:
            known.listed = np.zeros(total, dtype=np.int64)
        known.listed[place : place + len(numbers)] = numbers
        if place + len(numbers) == total:
            known.samples = known.listed
            known.handed.clear()
            self._restart(known)

    async def _learned(self, pid: int, base: int, samples: bytes, paths: bytes) -> Reply:
        """A process has opened these files for these samples. Answers whether that was known."""
        known = self._bases.get((pid, base))
        numbers, names = _numbers(samples), paths.split(b"\0")
        each = len(names) // max(1, len(numbers))
        if known is None or not 0 < each <= _EACH_MOST or len(names) != each * len(numbers):
            return Reply({"know": known is None})
        if int(numbers.max(initial=0)) >= len(known.table.files):
            return Reply({"know": True})
        return Reply({"know": known.table.put(numbers, self.entries(names).reshape(-1, each))})

    async def _failed(self, reason: str) -> None:
        """The hook of a program has given up."""
        self._tell("a program reports its order no more: %s", reason[:200])

    async def _arranged(self, client: Client, loader: int, epoch: int, samples: bytes) -> Reply:
        """What is to be read in the epoch instead of what the sampler gives; none if that is to be read.

        ``samples``: of the sampler's first batch. ``wait``: ask again soon.
        """
        known = self._loader(client, loader)
        arranging, told = self._arranging, known.about
        if arranging is None or arranging.objection(told) or epoch != told["number"]:
            return Reply({"samples": b""})
        first = _numbers(samples)
        if known.samples is None or not np.array_equal(known.samples[: len(first)], first):
            return self._leave_alone(known, "its DistributedSampler does not do what is known of it")
        if not known.table.complete and known.table.teller is None:
            return self._leave_alone(known, "the program that told which files its samples are has ended")
        nodes = arranging.nodes(told) if known.table.complete else None
        if nodes is None:
            return Reply({"wait": True})
        replay = known.replay
        if not nodes or replay is None or not isinstance(replay.order, TorchDistributedSampler):
            return self._leave_alone(known, incomplete(told))
        order = arranging.order(told, replay.order, nodes, known.table.files[:, 0])
        every = await trio.to_thread.run_sync(arranging.compute, order, replay.epoch, replay.rank)
        if known.about is not told:
            return Reply({"samples": b""})  # the program has gone on meanwhile
        if not arranging.epochs:
            self._tell("the order of %s is rearranged, so that ranks read what their node holds", told["name"])
        arranging.count(order, replay.epoch, replay.rank)
        known.undecided = False
        known.replay, known.samples = replace(replay, order=order), replay.loader.read(every)
        self._begin(known)
        return Reply({"samples": known.samples.astype("<u4").tobytes()})

    async def _alone(self, reason: str) -> None:
        """A program has a loader whose order is no matter of samples."""
        if self._arranging is not None and self._arranging.leave_alone(reason[:200]):
            self._tell("an order is left as it is: %s", reason[:200])

    def _leave_alone(self, known: _Loader, why: str) -> Reply:
        """Go on with what the sampler gives."""
        if self._arranging is not None and self._arranging.leave_alone(why):
            self._tell("the order of process %d is left as it is: %s", known.about["pid"], why)
        known.undecided = False
        self._begin(known)
        return Reply({"samples": b""})

    # --- streams ---

    def _begin(self, known: _Loader) -> None:
        """Another epoch: go on in its stream, if it is what was expected, or in a new one."""
        if known.samples is not None and known.stream is not None and known.sequence is not None and known.current:
            upcoming = [each for each in known.sequence.segments if each.start > known.current.start]
            if upcoming and np.array_equal(upcoming[0].samples, known.samples):
                known.current = upcoming[0]
                known.stream.number = _epoch_of(known.about)
                self._progress(known)
                return
        self._restart(known)

    def _end(self, known: _Loader) -> None:
        """Nothing is expected of a loader any more."""
        if known.stream is not None:
            known.stream.closed = True
            known.stream = known.sequence = known.current = None

    def _restart(self, known: _Loader, place: int = 0) -> None:
        """A stream of what is known now; ``place``: where in the epoch what was handed out begins."""
        self._end(known)
        if not known.table.known:
            return
        about = known.about
        said: Iterator[Samples]
        if known.samples is None:
            said = _Queue(known.handed)
        elif known.replay is None:
            said = iter([known.samples])
        else:
            said = known.replay.epochs()
        known.sequence = _Sequence(known.table, said, place, whole=known.samples is not None)
        ahead = about["batch"] * max(1, 2 * about["workers"]) * known.table.files.shape[1]
        unasked = None if self._intercepts() else self._unasked
        known.stream = ReportedStream(known.origin, known.sequence, _epoch_of(about), ahead, unasked)
        known.stream.at(0)
        if known.samples is not None and known.sequence.segments:
            known.current = known.sequence.segments[0]
        self._add(known.stream)
        self._progress(known)

    def _progress(self, known: _Loader) -> None:
        if known.stream is None or known.sequence is None:
            return
        segment = known.current
        if segment is None:
            segments = known.sequence.segments
            segment = next((each for each in reversed(segments) if each.first <= known.done), None)
        if segment is not None:
            known.stream.report(segment.place(known.done), segment.place(known.place))
        self.last = (known.origin, _epoch_of(known.about))
        self._wake()

    def _forget(self, client: Client) -> None:
        """A program has gone."""
        for known in self._programs.pop(client, {}).values():
            self._end(known)
            self._bases = {key: other for key, other in self._bases.items() if other is not known}
        for table in self._tables.values():
            if table.teller is client:
                table.teller, table.told = None, 0
        self._wake()

    # --- what is known ---

    def _all_loaders(self) -> Iterator[_Loader]:
        return itertools.chain.from_iterable(program.values() for program in list(self._programs.values()))

    def _loader(self, client: Client, number: int) -> _Loader:
        known = self._programs.get(client, {}).get(number)
        if known is None:
            raise ControlError("arguments", "nothing is known of this loader")
        return known

    def _table(self, number: int, about: Mapping[str, Any]) -> _Table:
        """Ranks of one job, and a program that runs again, have the same files for the same samples."""
        samples = about["samples"]
        key = about["digest"] or f"{about['program']}\0{about['dataset']}\0{number}"
        key = f"{key}\0{samples}"
        table = self._tables.pop(key, None) or _Table(samples)
        self._tables[key] = table
        used = {id(known.table) for known in self._all_loaders()}
        for old in [each for each, other in self._tables.items() if id(other) not in used and each != key]:
            if len(self._tables) <= _TABLES_MOST:
                break
            del self._tables[old]
        return table

    def entries(self, names: Sequence[bytes]) -> Entries:
        """Regular files of the dataset by their paths; _NONE for all others."""
        index, lookup, directories = self._index, self._index.lookup, dict[bytes, int]()
        entries = np.full(len(names), _NONE, dtype=np.uint32)
        for number, name in enumerate(names):
            above, _, last = name.rpartition(b"/")
            directory = directories.get(above)
            if directory is None:
                directory = directories[above] = index.resolve(above)
            entry = lookup(directory, last) if directory >= 0 and last else -1
            if entry >= 0 and stat.S_ISREG(index.mode[entry]):
                entries[number] = index.inode[entry]
        return entries


# --- what a report says ---

#: What is said of every loader. JSON has no other numbers than these in Python.
_FIELDS: Mapping[str, type] = {
    "kind": str,
    "name": str,
    "pid": int,
    "base": int,
    "samples": int,
    "batch": int,
    "drop_last": bool,
    "workers": int,
    "number": int,
    "persistent": bool,
    "dataset": str,
    "program": str,
}
#: And of the samplers that are known, besides.
_KINDS: Mapping[str, Mapping[str, type]] = {
    "custom": {},
    "sequential": {"count": int},
    "random": {"count": int, "own": bool, "seed": int, "at": int, "words": str},
    "distributed": {
        "count": int,
        "ranks": int,
        "rank": int,
        "shuffle": bool,
        "seed": int,
        "epoch": int,
        "drop_last_samples": bool,
    },
}


def _parse(text: str) -> dict[str, Any]:
    """What a program says of a loader. Raises ControlError."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise ControlError("arguments", "what is said of a loader is not JSON") from None
    if not isinstance(told, dict):
        raise ControlError("arguments", "what is said of a loader is not a map")
    fields = {**_FIELDS, **_KINDS.get(str(told.get("kind")), {"a known kind": str})}
    for name, kind in fields.items():
        is_kind = type(told.get(name)) is kind
        if not is_kind or (kind is int and name != "seed" and not 0 <= told[name] < 1 << 64):
            raise ControlError("arguments", f"what is said of a loader has no proper '{name}'")
    digest = told.get("digest")
    sizes = [told["samples"], told.get("count", 0), told["batch"] * max(1, told["workers"])]
    if told.get("count", 0) > told["samples"]:
        raise ControlError("arguments", "what is said of a loader shuffles more samples than there are")
    if max(sizes) > _SAMPLES_MOST or not told["batch"] or told.get("ranks", 1) > _SAMPLES_MOST:
        raise ControlError("arguments", f"what is said of a loader is beyond {_SAMPLES_MOST} samples")
    return {"seed": None, "run": "", **told, "digest": digest if isinstance(digest, str) else ""}


def _epoch_of(told: Mapping[str, Any]) -> int:
    """The epoch that was set; of other samplers the loader's count."""
    return int(told.get("epoch", told["number"]))


def _replay(
    told: Mapping[str, Any], previous: Mapping[str, Any], before: _Replay | None
) -> tuple[_Replay | None, Samples | None]:
    """What the sampler does, and what it gives in this epoch; nothing if it is not known. Raises UsageError."""
    kind, loader = told["kind"], Loader(told["batch"], drop_last=told["drop_last"])
    is_next = told["number"] == previous["number"] + 1
    if kind == "sequential":
        made = _Replay(TorchDistributedSampler(told["count"], 1, shuffle=False), loader)
    elif kind == "distributed":
        order = TorchDistributedSampler(
            told["count"], told["ranks"], told["seed"], shuffle=told["shuffle"], drop_last=told["drop_last_samples"]
        )
        # Whoever forgets set_epoch forgets it in every epoch.
        forgets = is_next and previous.get("epoch") == told["epoch"]
        made = _Replay(order, loader, told["epoch"], 0 if forgets else 1, told["rank"])
    elif kind == "random":
        state = _state(told)
        stride = None
        if is_next and before is not None and before.state is not None:
            stride = outputs_between(before.state, state, _OUTPUTS_MOST)
        made = _Replay(
            TorchResumedSampler(
                told["count"], state, own=told["own"], persistent_workers=told["persistent"], stride=stride
            ),
            loader,
            state=state,
        )
    else:
        return None, None
    return made, next(made.epochs())


def _state(told: Mapping[str, Any]) -> Twister:
    try:
        words = np.frombuffer(bytes.fromhex(told["words"]), dtype="<u4")
        return Twister.resumed(words.astype(np.uint32), told["at"])
    except (ValueError, OverflowError) as error:
        raise UsageError(f"its generator has no such state: {error}") from None


def _numbers(samples: bytes) -> Samples:
    """Numbers of samples, as they are sent."""
    return np.frombuffer(samples[: len(samples) // 4 * 4], dtype="<u4").astype(np.int64)


class _Queue(Iterator[Samples]):
    """What is in a queue, and later what was added to it since."""

    def __init__(self, queue: deque[Samples]) -> None:
        self._queue = queue

    def __next__(self) -> Samples:
        if not self._queue:
            raise StopIteration
        return self._queue.popleft()
