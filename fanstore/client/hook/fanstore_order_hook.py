"""What a program with torch tells the daemon of a mount: the order in which its DataLoaders read, and how far they are.

Loaded by sitecustomize.py, which lies beside it, when the program imports torch's DataLoader, into the program's own
interpreter: any Python from 3.8 on, in which FanStore need not be installed, so nothing but the standard library. The
messages are those of docs/protocol.md ("What an order's hook reports"); fanstore/prefetch/hooked.py takes them.

With ``--order locality`` it also has the DataLoaders of a DistributedSampler read other samples of the same global
batches, as the daemon says, which holds for all ranks or for none; for that it waits until the daemon knows.

What else it may do to the program: nothing. It raises nothing, starts no thread, waits for the daemon for a few
hundredths of a second when a loader is first used and never again, draws no random number (it copies the state of a
generator), and keeps no object of the program alive. What fails ends the hook for this process. Runs on whatever thread
iterates a DataLoader; ``Hook.lock`` guards all of it.
"""

import collections
import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import select
import socket
import struct
import sys
import threading
import time
import types
import weakref
from array import array

#: Of the control socket (docs/protocol.md): number of the request, flags, 0; and version.
_HEADER = struct.Struct("<IHH")
_PROTOCOL = 1
_MORE = 1
#: Bytes of data in one message, which must fit in a packet.
_DATA_BYTES = 60000
#: Seconds that a loader may wait when it is first used, for the daemon to take the paths of its files.
_FIRST_WAIT_S = 0.05
#: Seconds between two reports of progress, while the daemon knows what comes.
_PROGRESS_S = 0.005
#: Seconds between two questions how an epoch is rearranged.
_ASK_S = 0.02
#: By which ranks of one program know each other.
_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
#: Batches in a row of which no files are seen, until nobody looks any more.
_UNSEEN_MOST = 16
#: Datasets in datasets.
_DEPTH_MOST = 8
#: What the state of torch's generator on the CPU begins with: seed, left, seeded, next; 624 words of 64 bits follow.
_STATE = struct.Struct("<QiiQ624Q")
_ATTRIBUTE = "_fanstore_order"
_ARRANGED = "_fanstore_arranged"


class _Connection:
    """The control socket, to which is said what it takes at the moment; the rest waits here."""

    def __init__(self, path):
        self.answers = {}  # by number of the request
        self._begun = b""  # an answer of which more is to come
        self._urgent = collections.deque()
        self._lists = collections.deque()
        self._number = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._socket.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        finally:
            os.close(directory)
        self.say({"request": "hello", "protocol": _PROTOCOL, "client": "order-hook"})

    def say(self, message):
        """Send it as soon as there is room; its number."""
        self._number += 1
        self._urgent.append(_HEADER.pack(self._number, 0, 0) + _pack(message))
        return self._number

    def say_later(self, messages):
        """Send all of an iterator, whenever there is nothing else."""
        self._lists.append(iter(messages))

    def pump(self, wait_s=0.0):
        """Send what is taken, and hear what is answered. Raises OSError."""
        end_s = time.monotonic() + wait_s
        while True:
            self._hear()
            while self._urgent or self._lists:
                if not self._urgent:
                    message = next(self._lists[0], None)
                    if message is None:
                        self._lists.popleft()
                        continue
                    self.say(message)
                try:
                    self._socket.send(self._urgent[0], socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    break
                self._urgent.popleft()
            else:
                return
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([], [self._socket], [], left_s)[1]:
                return

    def wait_answer(self, number, wait_s):
        """What is answered to a request; None if that takes longer."""
        end_s = time.monotonic() + wait_s
        while number not in self.answers:
            self.pump(max(0.0, end_s - time.monotonic()))
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not select.select([self._socket], [], [], left_s)[0]:
                break
        self._hear()
        return self.answers.get(number)

    def _hear(self):
        while True:
            try:
                packet = self._socket.recv(65536)
            except BlockingIOError:
                return
            if not packet:
                raise OSError("the daemon has hung up")
            number, flags, _ = _HEADER.unpack_from(packet)
            body, self._begun = self._begun + packet[_HEADER.size :], b""
            if body[1:7] == b"\xa5error":
                raise OSError(f"the daemon has refused: {body!r}")
            if flags & _MORE:
                self._begun = body
            else:
                self.answers[number] = body

    def flush(self):
        """Wait until everything is sent."""
        while self._urgent or self._lists:
            self.pump(1.0)

    def close(self):
        self._socket.close()


def _pack(message):
    """msgpack of a map of texts to texts, bytes and numbers."""
    packed = [bytes([0x80 | len(message)])]
    for key, value in message.items():
        packed.append(_pack_text(key))
        if isinstance(value, str):
            packed.append(_pack_text(value))
        elif isinstance(value, bytes):
            packed.append(b"\xc5" + struct.pack(">H", len(value)) + value)
        else:
            packed.append(b"\xcf" + struct.pack(">Q", value))
    return b"".join(packed)


def _pack_text(text):
    data = text.encode()
    head = bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xda" + struct.pack(">H", len(data))
    return head + data


# --- the files of a dataset ---


class _Below:
    """Which paths are below the mount point, and their names there."""

    def __init__(self, mount):
        self._mount = mount.rstrip("/")
        self._prefixes = {}  # by directory from the root of which a path begins, as the program says it

    def name(self, path):
        """The path below the mount point; None if it is not there. A program may use symbolic links to it."""
        if isinstance(path, int):
            return None
        path = os.fsdecode(path)
        if not path.startswith("/"):
            path = os.path.join(os.getcwd(), path)
        for prefix in self._prefixes:
            if path.startswith(prefix):
                return self._named(prefix, path)
        prefix = self._prefix(path)
        return None if prefix is None else self._named(prefix, path)

    def names(self, paths):
        """Names of many, with a zero byte between them, empty for those elsewhere; None if the first one is there."""
        if not paths or self.name(paths[0]) is None:
            return None
        with contextlib.suppress(TypeError):  # not all are texts
            listed = "\0" + "\0".join(paths)
            for prefix, instead in self._prefixes.items():
                if listed.count("\0" + prefix) == len(paths) and "/." not in listed and "//" not in listed:
                    return listed.replace("\0" + prefix, "\0" + instead)[1:]
        return "\0".join(self.name(path) or "" for path in paths)

    def _named(self, prefix, path):
        name = self._prefixes[prefix] + path[len(prefix) :]
        return os.path.normpath(name) if "/." in name or "//" in name else name

    def _prefix(self, path):
        """The shortest directory above the path that is at or below the mount point."""
        if path.startswith(self._mount + "/"):
            self._prefixes[self._mount + "/"] = ""
            return self._mount + "/"
        if len(self._prefixes) > 64:
            return None
        at = path.find("/", 1)
        while at > 0:
            real = os.path.realpath(path[:at])
            if real == self._mount or real.startswith(self._mount + "/"):
                below = real[len(self._mount) + 1 :]
                self._prefixes[path[: at + 1]] = below + "/" if below else ""
                return path[: at + 1]
            at = path.find("/", at + 1)
        return None


def _namer(dataset, classes, depth=0):
    """What makes the list of a dataset's paths, by sample; None if the dataset does not say them."""
    own = getattr(dataset, "__dict__", {})
    if depth > _DEPTH_MOST:
        return None
    if isinstance(dataset, classes.ConcatDataset):
        parts = [_namer(part, classes, depth + 1) for part in own.get("datasets", ())]
        if not parts or None in parts:
            return None
        return lambda: [path for part in parts for path in part()]
    inner = own.get("dataset")
    if isinstance(dataset, classes.Subset):
        make, chosen = _namer(inner, classes, depth + 1), own.get("indices")
        return None if make is None else lambda: _choose(make(), chosen)
    count = len(dataset)
    for name in ("samples", "imgs"):
        listed = own.get(name)
        if isinstance(listed, (list, tuple)) and len(listed) == count > 0:
            first = listed[0]
            if isinstance(first, (str, os.PathLike)):
                return lambda: list(listed)
            if isinstance(first, (list, tuple)) and first and isinstance(first[0], (str, os.PathLike)):
                return lambda: [each[0] for each in listed]
    if inner is not None and hasattr(inner, "__len__") and len(inner) == count:
        return _namer(inner, classes, depth + 1)
    return None


def _choose(paths, chosen):
    return [paths[number] for number in chosen]


# --- samplers ---


def _generator_state(generator):
    """Seed and state of a generator of torch on the CPU, as 624 words and the next one; None of another kind."""
    if generator.device.type != "cpu":
        return None
    raw = bytes(generator.get_state().tolist())
    if len(raw) < _STATE.size:
        return None
    seed, left, _, at, *words = _STATE.unpack_from(raw)
    return {"seed": seed, "at": 624 if left == 1 else at, "words": struct.pack("<624I", *words).hex()}


def _rest(batches, collated, is_batch_sampler):
    """What an iterator will give that goes through a list of numbers, without taking anything; None of others."""
    inner = batches
    if collated:
        frame = getattr(inner, "gi_frame", None) if is_batch_sampler else None
        inner = None if frame is None else frame.f_locals.get("sampler_iter")
    while isinstance(inner, types.GeneratorType):
        inner = inner.gi_yieldfrom
    if not isinstance(inner, type(iter([]))):
        return None
    _, (listed, *_), *at = inner.__reduce__()
    return array("I", listed[at[0] :] if at else ())


class _Loader:
    """A DataLoader of the program.

    Attributes:
        number: by which the daemon knows it. epochs: that were begun.
        refused: it reads nothing of this mount, or numbers its samples in a way of its own.
        digest: of the paths of its samples; None if they are not known.
    """

    def __init__(self, number):
        self.number = number
        self.epochs = 0
        self.refused = False
        self.digest = None


class _Reading:
    """One iterator of a DataLoader, epoch by epoch.

    Attributes:
        batches: the iterator over batches of the epoch. known: the daemon can tell what comes.
        epoch: its number. calls: how often a batch was asked for. ahead: batches that workers have at a time.
        place: samples that were handed out; ends: the same behind each batch that may not be read yet; done: read.
        pending: handed out and not told; told_s: when something was.
    """

    def __init__(self, hook, loader):
        self._hook = hook
        self.loader = loader
        self.batches = None
        self.base = 0

    def before(self, iterator):
        """A batch is asked for."""
        if self.loader.refused or self.batches is iterator._sampler_iter:
            return
        self.batches = iterator._sampler_iter
        self.base = iterator._base_seed & (1 << 64) - 1
        self.workers = iterator._num_workers
        self.ahead = max(1, (getattr(iterator, "_prefetch_factor", None) or 2) * self.workers)
        self.calls = self.place = self.done = 0
        self.ends = collections.deque()
        self.pending = array("I")
        self.told_s = 0.0
        self.epoch = self.loader.epochs
        self.loader.epochs += 1
        self._collated = iterator._auto_collation
        self._begin(iterator)

    def _begin(self, iterator):
        hook, dataset = self._hook, iterator._dataset
        make = _namer(dataset, hook.classes)
        first = self.epoch == 0
        listed = None
        if first and make is not None:
            listed = hook.below.names(make())
            if listed is None:
                self.loader.refused = True
                return
        about = self._sampler(iterator._index_sampler, len(dataset))
        self.known = about["kind"] != "custom"
        self.arrangeable = hook.arranges and about["kind"] == "distributed"
        self._is_batch_sampler = type(iterator._index_sampler) is hook.module.BatchSampler
        about.update(
            pid=os.getpid(),
            base=self.base,
            samples=len(dataset),
            workers=self.workers,
            number=self.epoch,
            persistent=bool(getattr(iterator, "_persistent_workers", False)),
            named=make is not None,
            dataset=type(dataset).__qualname__,
            program=sys.argv[0] if getattr(sys, "argv", None) else "",
            run=" ".join(os.environ.get(name, "") for name in _RUN),
        )
        data = None
        if listed is not None:
            data = listed.encode(errors="surrogateescape")
            self.loader.digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        if self.loader.digest is not None:
            about["digest"] = self.loader.digest
        connection = hook.connection()
        asked = connection.say({"request": "order-epoch", "loader": self.loader.number, "about": json.dumps(about)})
        if data is not None:
            answer = connection.wait_answer(asked, _FIRST_WAIT_S)
            if answer is None or b"\xa6wanted\xc3" in answer:
                connection.say_later(_path_messages(self.loader.number, data))
            connection.pump(_FIRST_WAIT_S)

    def _sampler(self, batches, samples):
        """The kind of the sampler of so many samples, and what its order follows from; nothing is drawn from it."""
        module = self._hook.module
        sampler, about = batches, {"batch": 1, "drop_last": False}
        if type(batches) is module.BatchSampler:
            sampler, about = batches.sampler, {"batch": batches.batch_size, "drop_last": bool(batches.drop_last)}
        about.update(kind="custom", name=type(sampler).__name__)
        distributed = sys.modules.get("torch.utils.data.distributed")
        if type(sampler) is module.SequentialSampler:
            about.update(kind="sequential", count=len(sampler.data_source))
        elif type(sampler) is module.RandomSampler:
            count = len(sampler.data_source)
            if not sampler.replacement and sampler.num_samples == count:
                own = sampler.generator is not None
                state = _generator_state(sampler.generator if own else module.torch.default_generator)
                if state is not None:
                    about.update(state, kind="random", count=count, own=own)
        elif distributed is not None and type(sampler) is distributed.DistributedSampler:
            about.update(
                kind="distributed",
                count=len(sampler.dataset),
                ranks=sampler.num_replicas,
                rank=sampler.rank,
                shuffle=bool(sampler.shuffle),
                seed=int(sampler.seed),
                epoch=int(sampler.epoch),
                drop_last_samples=bool(sampler.drop_last),
            )
        if about.get("count", 0) > samples:
            about["kind"] = "custom"  # it counts in another way than the dataset
        return about

    def arrange(self, iterator, index):
        """What is to be read in this epoch instead of what the sampler gives, whose first batch this is."""
        if self.loader.refused or self.batches is None or self.calls or not self.arrangeable:
            return
        first = array("I", index if self._collated else [index])
        connection = self._hook.connection()
        connection.flush()
        message = {"request": "order-arranged", "loader": self.loader.number, "epoch": self.epoch}
        message["samples"] = first.tobytes()[: _DATA_BYTES // 4 * 4]
        while True:
            asked, answer = connection.say(message), None
            while answer is None:  # or the daemon hangs up, and its mount is gone
                answer = connection.wait_answer(asked, 1.0)
            del connection.answers[asked]
            if b"\xa4wait\xc3" not in answer[:16]:
                break
            time.sleep(_ASK_S)
        samples = array("I", _unpack_samples(answer))
        if samples:
            setattr(iterator, _ARRANGED, _Arranged(self.batches, samples))

    def after(self, index):
        """A batch is handed out."""
        if self.loader.refused or self.batches is None:
            return
        try:
            numbers = array("I", index if self._collated else [index])
        except (TypeError, ValueError, OverflowError):
            self.loader.refused = True  # not numbers of samples
            return
        first = self.calls == 0
        self.pending.extend(numbers)
        self.place += len(numbers)
        self.ends.append(self.place)
        self._called()
        connection = self._hook.connection()
        if first and not self.known:
            rest = _rest(self.batches, self._collated, self._is_batch_sampler)
            if rest is not None:
                self.known = True
                connection.say_later(self._ahead_messages(numbers + rest))
        now_s = time.monotonic()
        if not self.known or now_s - self.told_s > _PROGRESS_S:
            self._tell(connection, now_s)
        connection.pump()

    def exhausted(self):
        """There is no further batch; workers still have some."""
        if not self.loader.refused and self.batches is not None:
            self._called()
            connection = self._hook.connection()
            self._tell(connection, time.monotonic())
            connection.pump()

    def _called(self):
        self.calls += 1
        if self.calls > self.ahead and self.ends:
            self.done = self.ends.popleft()

    def _tell(self, connection, now_s):
        self.told_s = now_s
        place = self.place - len(self.pending)
        data, self.pending = self.pending.tobytes(), array("I")
        step = _DATA_BYTES // 4 * 4
        for start in range(0, len(data) or 1, step):
            connection.say(
                {
                    "request": "order-read",
                    "loader": self.loader.number,
                    "epoch": self.epoch,
                    "place": place + start // 4,
                    "done": self.done,
                    "samples": data[start : start + step],
                }
            )

    def _ahead_messages(self, numbers):
        data, step = numbers.tobytes(), _DATA_BYTES // 4 * 4
        for start in range(0, len(data), step):
            yield {
                "request": "order-ahead",
                "loader": self.loader.number,
                "epoch": self.epoch,
                "place": start // 4,
                "total": len(numbers),
                "samples": data[start : start + step],
            }


def _unpack_samples(answer):
    """The bytes of an answer that has nothing else."""
    start = len(b"\x81\xa7samples")
    head = {0xC4: ">xB", 0xC5: ">xH", 0xC6: ">xI"}[answer[start]]
    return answer[start + struct.calcsize(head) :]


class _Arranged:
    """What is read in an epoch instead of what its iterator over batches gives. Never fails."""

    def __init__(self, batches, samples):
        self.batches = batches
        self._samples = samples
        self._place = 0

    def instead(self, index):
        """As many samples."""
        if not isinstance(index, list):
            index, single = [index], True
        else:
            single = False
        chosen = self._samples[self._place : self._place + len(index)].tolist()
        self._place += len(chosen)
        chosen += index[len(chosen) :]
        return chosen[0] if single else chosen


def _instead(iterator, index):
    arranged = iterator.__dict__.get(_ARRANGED)
    return index if arranged is None or arranged.batches is not iterator._sampler_iter else arranged.instead(index)


def _path_messages(number, data):
    """The paths of all samples, in whole paths."""
    start = first = 0
    while start < len(data):
        end = len(data) if len(data) - start <= _DATA_BYTES else data.rfind(b"\0", start, start + _DATA_BYTES)
        if end < 0:
            return  # a path that no file can have
        piece = data[start:end]
        yield {"request": "order-paths", "loader": number, "first": first, "paths": piece}
        first += piece.count(b"\0") + 1
        start = end + 1


# --- datasets that do not say their paths ---


class _Learner:
    """Which files a dataset opens for which samples, seen from within the process that reads them."""

    def __init__(self, hook, pid, base):
        self._hook = hook
        self._pid = pid
        self._base = base
        self._unseen = 0
        self._asked = []

    def read(self, index, collated, opened):
        """These files were opened for a batch; whether to go on looking."""
        numbers = array("I", index if collated else [index])
        names = [name for path in opened for name in [self._hook.below.name(path)] if name]
        if not numbers or not names or len(names) % len(numbers):
            self._unseen += 1
            return self._unseen < _UNSEEN_MOST
        self._unseen = 0
        connection = self._hook.connection()
        each = len(names) // len(numbers)
        for start in range(0, len(numbers), 64):
            part = "\0".join(names[start * each : (start + 64) * each]).encode(errors="surrogateescape")
            if len(part) <= _DATA_BYTES:
                samples = numbers[start : start + 64].tobytes()
                message = {"request": "order-learned", "pid": self._pid, "base": self._base}
                self._asked.append(connection.say(dict(message, samples=samples, paths=part)))
        connection.pump()
        return not self._all_known(connection)

    def _all_known(self, connection):
        """The daemon knew of all that a message told, and of some that it needs no more."""
        answers = [connection.answers.pop(asked) for asked in self._asked if asked in connection.answers]
        return any(b"\xa4know\xc3" in answer for answer in answers)


# --- the hook ---


class Hook:
    """The hook of this process; a program that has FanStore may make one for its own loaders (fanstore/torch).

    Attributes:
        module: torch's dataloader; classes: of its datasets. below: names of paths.
        lock: guards everything; a signal's handler, or a finalizer, may come back to us on the same thread.
        opened: files that the program opens, while that is looked at. arranges: other samples may be read.
    """

    def __init__(self, module, path, mount, arranges):
        self.module = module
        self.classes = sys.modules["torch.utils.data.dataset"]
        self.below = _Below(mount)
        self.arranges = arranges
        self.opened = None
        self.is_off = False
        self._path = path
        self._audits = False
        self._reset()

    def _reset(self):
        self.lock = threading.RLock()
        self._connection = None
        self._loaders = weakref.WeakKeyDictionary()
        self._numbers = 0
        self._latest = None

    def forked(self):
        """In a child: what the parent says is its own affair."""
        connection = self._connection
        self._reset()
        if connection is not None:
            connection.close()

    def connection(self):
        if self._connection is None:
            self._connection = _Connection(self._path)
        return self._connection

    def call(self, function, *arguments):
        """Do it, and give up if it cannot be done; what it returns, or None."""
        if self.is_off:
            return None
        try:
            with self.lock:
                return function(*arguments)
        except Exception as error:  # noqa: BLE001  -- the program is not to notice
            self._give_up(error)
        return None

    def _give_up(self, error):
        self.is_off = True
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(OSError):  # nobody is there to be told
            connection.say({"request": "order-failed", "reason": f"{type(error).__name__}: {error}"[:200]})
            connection.pump()
        connection.close()

    def attach(self, iterator, loader):
        """An iterator over a DataLoader is made."""
        if iterator._dataset_kind != self.module._DatasetKind.Map:
            if self.arranges:
                connection = self.connection()
                connection.say({"request": "order-alone", "reason": "an IterableDataset has no numbers of samples"})
                connection.pump()
            return
        record = self._loaders.get(loader)
        if record is None:
            record = self._loaders[loader] = _Loader(self._numbers)
            self._numbers += 1
        setattr(iterator, _ATTRIBUTE, (os.getpid(), _Reading(self, record)))

    def reading(self, iterator):
        """What is known of an iterator; None if nothing is, or of one of the parent."""
        pid, reading = iterator.__dict__.get(_ATTRIBUTE, (0, None))
        if pid != os.getpid():
            return None
        self._latest = reading
        return reading

    def next_index(self, iterator, plain):
        """The next batch of an iterator: what ``plain`` gives, or what is to be read instead."""
        reading = self.call(self.reading, iterator)
        if reading is None:
            return _instead(iterator, plain())
        self.call(reading.before, iterator)
        try:
            index = plain()
        except StopIteration:
            self.call(reading.exhausted)
            raise
        self.call(reading.arrange, iterator, index)
        index = _instead(iterator, index)
        self.call(reading.after, index)
        return index

    def learner(self, fetcher):
        """Whoever looks which files are opened for the batches of a fetcher; None if that need not be known."""
        pid, learner = fetcher.__dict__.get(_ATTRIBUTE, (0, None))
        if pid == os.getpid():
            return learner
        learner, info = None, self.module.get_worker_info()
        if _namer(fetcher.dataset, self.classes) is None:
            if info is not None:
                parent = multiprocessing.parent_process()
                base = info.seed - info.id & (1 << 64) - 1
                learner = None if parent is None else _Learner(self, parent.pid, base)
            elif self._latest is not None:
                learner = _Learner(self, os.getpid(), self._latest.base)
        if learner is not None and not self._audits:
            sys.addaudithook(self._audit)
            self._audits = True
        setattr(fetcher, _ATTRIBUTE, (os.getpid(), learner))
        return learner

    def _audit(self, event, arguments):
        if event == "open" and self.opened is not None:
            self.opened.append(arguments[0])

    def looked(self, fetcher, learner, index):
        """A batch was fetched, while it was looked which files are opened."""
        opened, self.opened = self.opened, None
        if not learner.read(index, fetcher.auto_collation, opened or ()):
            setattr(fetcher, _ATTRIBUTE, (os.getpid(), None))


class _DataLoaderModule:
    """The loader of torch's module, and what is to be done after it."""

    def __init__(self, loader, waiting):
        self.create_module = loader.create_module
        self._loader = loader
        self._waiting = waiting

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._waiting]
        try:
            install(module)
        except Exception as error:  # noqa: BLE001  -- the program goes on without us
            if sys.flags.verbose:
                sys.stderr.write(f"FanStore's order hook: {error!r}\n")


def find(name, waiting):
    """Where the module with the DataLoader is; importing it installs the hook. ``waiting``: who asks, and is done."""
    spec = importlib.util.find_spec(name)
    if spec is not None and hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "create_module"):
        spec.loader = _DataLoaderModule(spec.loader, waiting)
    return spec


def install(module):
    """Have the DataLoaders of this process tell what they read; ``module`` is torch's dataloader."""
    variables, arranges = os.environ, bool(os.environ.get("FANSTORE_ORDER_LOCALITY"))
    hook = Hook(module, variables["FANSTORE_ORDER_SOCKET"], variables["FANSTORE_MOUNT"], arranges)
    iterator_class, fetcher_class = module._BaseDataLoaderIter, module._utils.fetch._MapDatasetFetcher
    make, next_index, fetch = iterator_class.__init__, iterator_class._next_index, fetcher_class.fetch

    def hooked_make(self, loader, *arguments, **options):
        make(self, loader, *arguments, **options)
        hook.call(hook.attach, self, loader)

    def hooked_next_index(self):
        return hook.next_index(self, lambda: next_index(self))

    def hooked_fetch(self, index):
        learner = hook.call(hook.learner, self)
        if learner is None:
            return fetch(self, index)
        hook.opened = []
        try:
            return fetch(self, index)
        finally:
            hook.call(hook.looked, self, learner, index)

    for function, original in ((hooked_make, make), (hooked_next_index, next_index), (hooked_fetch, fetch)):
        function.__name__, function.__qualname__, function.__doc__ = (
            original.__name__,
            original.__qualname__,
            original.__doc__,
        )
    iterator_class.__init__, iterator_class._next_index = hooked_make, hooked_next_index
    fetcher_class.fetch = hooked_fetch
    os.register_at_fork(after_in_child=hook.forked)
