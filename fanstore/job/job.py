"""The daemons of one job as one of them sees it: how they start together, what they tell each other, how they end.

Owns the agreement at the start (all mounts are up, or none), the words between daemons (docs/protocol.md), the end, and
what is known about each node. Does not know what is mounted, and of MPI only the interface (transport/peers.py). Used
by the session of a mount. Trio thread only, but for ``mapped_partition``, which the transport calls on its own thread.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from fanstore.dataset.partial_copies import Bringer
from fanstore.dataset.store import PartitionStore
from fanstore.errors import FanstoreError, MountError
from fanstore.format.prepared import PreparedDataset, read_parts
from fanstore.format.storage import Storage, Stored
from fanstore.job.account import unpack
from fanstore.job.copies import Copies
from fanstore.job.training_ranks import TrainingRanks
from fanstore.outputs.outputs import Outputs
from fanstore.outputs.sequencer import OUTPUT_QUESTION
from fanstore.telemetry.events import NOTABLE
from fanstore.transport.peers import MESSAGE_BYTES, PeerError, Peers, PeerTimeoutError

log = logging.getLogger(__name__)

#: Instead of the length of a manifest.
_ERROR_FOLLOWS = (1 << 64) - 1
#: A question: how are you? The answer is what nodes.json says of a node.
ASK_NODE = b"node"
#: A question: what is your account of the job (job/account.py)?
ASK_ACCOUNT = b"account"
#: A question that is none: here is my last account. What comes after it is the account.
GIVE_ACCOUNT = b"account="
#: Seconds for a peer to say how it is; nodes.json must not hang because one node does.
NODE_LIMIT_S = 1.0
#: Seconds between two looks for nodes that have left the job, of which the transport does not tell.
_LOOK_S = 1.0


class NodeFailedError(MountError):
    """One node cannot start, so none does. The message names host and reason."""


@dataclass
class NodeState:
    """What is known about one daemon of the job.

    Attributes:
        host: its name. code: exit code of its command once it is done.
        ended: its own exit code, once nothing is left for it to do; only told with ``--success``.
        staged_bytes, staged_entries: its progress. staging_ended: it copies nothing any more, well or not.
    """

    rank: int
    host: str
    code: int | None = None
    ended: int | None = None
    lost: bool = False
    staged_bytes: int = 0
    staged_entries: int = 0
    staging_ended: bool = False

    @property
    def is_done(self) -> bool:
        """It needs nothing of us any more."""
        return self.lost or self.code is not None


class Job:
    """This daemon among those of its job; ``peers`` is None in a job of one node.

    Attributes:
        rank, size: number of this daemon, and how many there are.
        nodes: all daemons, by rank.
        outputs: what can be written on this node; None if nothing can.
        copies: which node has which partition; None in a job of one node.
        training: on which node each rank of a training program runs.
        accounts: by rank, what others have last told of themselves for the report; last: who will tell no more.
        ending: set when some daemon wants the whole job to end (a signal or an unmount, in a job without a command).
        alone: set when all others are dead.
    """

    def __init__(self, peers: Peers | None) -> None:
        self.peers = peers
        self.rank = peers.rank if peers is not None else 0
        self.size = peers.size if peers is not None else 1
        self.host = socket.gethostname().partition(".")[0]
        self.nodes = [NodeState(rank, self.host) for rank in range(self.size)]
        self.ending = trio.Event()
        self.alone = trio.Event()
        self._store: PartitionStore | None = None
        self._bringer: Bringer | None = None
        self._describe: Callable[[], Mapping[str, object]] = dict
        self._account: Callable[[], bytes] = bytes
        self.accounts: dict[int, Mapping[str, Any]] = {}
        self.last: set[int] = set()
        self._changed = trio.Event()
        self.outputs: Outputs | None = None
        self.copies: Copies | None = None
        self.training = TrainingRanks(peers, self.first_present)

    # --- start ---

    async def agree(self, step: str, problem: str | None, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange facts with all nodes; NodeFailedError on every one of them if any has a problem. Collective.

        ``code`` among the facts is the exit code of a problem that is not an ordinary one.
        """
        own = {"host": self.host, "problem": problem, **facts}
        if self.peers is None:
            answers = [own]
        else:
            texts = await self.peers.gather_all(json.dumps(own).encode())
            answers = [json.loads(text) for text in texts]
        for rank, answer in enumerate(answers):
            self.nodes[rank].host = answer["host"]
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer["problem"] is not None]
        if failed:
            error = NodeFailedError(self._blame(step, failed))
            error.exit_code = failed[0][1].get("code", error.exit_code)
            raise self._once(error)
        return answers

    def _once(self, error: MountError) -> MountError:
        """What all ranks raise, rank 0 alone says."""
        error.told_elsewhere = self.rank != 0
        return error

    def _blame(self, step: str, failed: list[tuple[int, dict[str, Any]]]) -> str:
        rank, answer = failed[0]
        if self.size == 1:
            return str(answer["problem"])
        more = f" ({len(failed) - 1} more nodes failed as well)" if len(failed) > 1 else ""
        return f"{step} failed on {answer['host']} (rank {rank}), so no node is mounted: {answer['problem']}{more}"

    async def open_dataset(self, storage: Storage) -> PreparedDataset:
        """The dataset on every rank, for which only rank 0 reads manifest and index, and looks for the partitions.

        Collective.

        One message: the length of the manifest (8 bytes; all ones says that an error text follows), the manifest, zeros
        up to a multiple of 8, the index.
        """
        if self.peers is None:
            prepared = await trio.to_thread.run_sync(PreparedDataset.open, storage, abandon_on_cancel=True)
            await trio.to_thread.run_sync(prepared.check_partitions, abandon_on_cancel=True)
            return prepared
        if self.rank != 0:
            memory = await self.peers.broadcast(None)
            length = int.from_bytes(memory[:8], "little")
            if length == _ERROR_FOLLOWS:
                raise self._once(MountError(bytes(memory[8:]).decode()))
            start = 8 + length + -length % 8
            return PreparedDataset.from_parts(storage, bytes(memory[8 : 8 + length]), memory[start:])
        try:
            manifest, index = await trio.to_thread.run_sync(read_parts, storage, abandon_on_cancel=True)
            prepared = PreparedDataset.from_parts(storage, manifest, memoryview(index))
            await trio.to_thread.run_sync(prepared.check_partitions, abandon_on_cancel=True)
        except FanstoreError as error:
            text = str(error).encode(errors="backslashreplace")
            await self.peers.broadcast(_ERROR_FOLLOWS.to_bytes(8, "little") + text)
            raise
        head = len(manifest).to_bytes(8, "little") + manifest + bytes(-len(manifest) % 8)
        await self.peers.broadcast(b"".join((head, index)))
        return prepared

    async def share(self, value: bytes | None) -> bytes:
        """Rank 0's bytes on every rank. Collective; only before ``serve``."""
        if self.peers is None:
            return value or b""
        return bytes(await self.peers.broadcast(value))

    def serve(
        self,
        store: PartitionStore,
        bringer: Bringer,
        describe: Callable[[], Mapping[str, object]],
        account: Callable[[], bytes] = bytes,
    ) -> None:
        """From now on answer the peers.

        ``bringer`` has bytes of partitions that are being copied; ``describe`` says how this node is, for nodes.json;
        ``account`` what it has done, for the report.
        """
        self._store = store
        self._bringer = bringer
        self._describe = describe
        self._account = account
        if self.peers is not None:
            self.peers.serve(self)

    # --- Host: what the transport calls ---

    def mapped_partition(self, partition: int) -> memoryview | None:
        """On the transport's thread."""
        store = self._store
        return store.mapped(partition) if store is not None else None

    async def bring(self, partition: int, offset: int, length: int) -> Stored:
        return await self._bringer.bring(partition, offset, length) if self._bringer is not None else b""

    async def answer(self, peer: int, question: bytes) -> bytes:
        if question[:1] == OUTPUT_QUESTION and self.outputs is not None:
            return await self.outputs.answer(peer, question)
        if question == ASK_ACCOUNT:
            return self._account()
        if question.startswith(GIVE_ACCOUNT):
            self._take_account(peer, question[len(GIVE_ACCOUNT) :])
            self.last.add(peer)
            self._notify()
            return b"thanks"
        if question != ASK_NODE:
            return b""
        text = json.dumps(self._describe()).encode()
        if len(text) <= MESSAGE_BYTES:
            return text
        # A dataset of many thousands of partitions: how many there are must do.
        return json.dumps({**self._describe(), "partitions": None}).encode()

    def _take_account(self, peer: int, message: bytes) -> None:
        try:
            self.accounts[peer] = unpack(message)
        except ValueError as error:
            host = self.nodes[peer].host
            log.warning("the account of rank %d on %s is not in the report: %s", peer, host, error)

    def heard(self, peer: int, word: bytes) -> None:
        what, *numbers = word.split()
        node = self.nodes[peer]
        if what == b"done":
            node.code = int(numbers[0])
        elif what == b"ended":
            node.ended = int(numbers[0])
        elif what == b"staged":
            node.staged_bytes, node.staged_entries = int(numbers[0]), int(numbers[1])
            node.staging_ended = numbers[2] == b"1"
        elif what == b"end":
            log.info("rank %d on %s ends the job", peer, node.host, extra=NOTABLE)
            self.ending.set()
        elif not self.training.heard(peer, word) and (self.copies is None or not self.copies.heard(peer, word)):
            log.warning(
                "rank %d on %s said what this version does not know; are all nodes of one version?", peer, node.host
            )
        self._notify()

    def lost(self, peer: int) -> None:
        node = self.nodes[peer]
        node.lost = True
        if node.code is None:
            log.warning(
                "rank %d on %s has died; what it had is read from other copies or from the shared file system",
                peer,
                node.host,
            )
        if self.outputs is not None:
            self.outputs.lost(peer)
        if self.copies is not None:
            self.copies.lost(peer)
        if all(other.lost for other in self.nodes if other.rank != self.rank):
            self.alone.set()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- life ---

    def report_staged(self, done_bytes: int, done_entries: int, ended: bool) -> None:
        """Tell rank 0 how far staging has got here."""
        own = self.nodes[self.rank]
        own.staged_bytes, own.staged_entries, own.staging_ended = done_bytes, done_entries, ended
        if self.peers is not None and self.rank != 0:
            self.peers.tell(b"staged %d %d %d" % (done_bytes, done_entries, ended))

    def has_staged(self) -> bool:
        """Whether no node copies anything any more, as far as is known here."""
        return all(node.staging_ended or self._needs_nothing(node) for node in self.nodes)

    def staged(self) -> tuple[int, int]:
        """Bytes and entries staged on all nodes so far, as far as is known here."""
        return sum(node.staged_bytes for node in self.nodes), sum(node.staged_entries for node in self.nodes)

    async def describe_nodes(self) -> list[Mapping[str, object]]:
        """What nodes.json says: every node about itself, those that do not answer as we know them."""
        told = {rank: json.loads(answer) for rank, answer in (await self._ask_all(ASK_NODE)).items()}
        told[self.rank] = self._describe()
        return [{**self._known(node, node.rank in told), **told.get(node.rank, {})} for node in self.nodes]

    async def collect_accounts(self, own: Mapping[str, object]) -> list[Mapping[str, object]]:
        """What report.json says of all nodes; of those that do not answer, what they have told last."""
        told = await self._ask_all(ASK_ACCOUNT)
        for rank, answer in told.items():
            self._take_account(rank, answer)
            await trio.lowlevel.checkpoint()  # it takes a millisecond each, and there may be many
        return self.known_accounts(own, told)

    def known_accounts(
        self, own: Mapping[str, object], alive: Collection[int] = (), *, ended: bool = False
    ) -> list[Mapping[str, object]]:
        """The accounts of all nodes as far as they are here; ``alive`` have answered just now; ``ended``: nobody is up.

        A node that has told its last account, and is not lost, is done.
        """
        accounts = {**self.accounts, self.rank: own}
        alive = set(alive) if ended else {self.rank, *alive}
        return [{**accounts.get(node.rank, {}), **self._known(node, node.rank in alive)} for node in self.nodes]

    def _known(self, node: NodeState, up: bool) -> dict[str, object]:
        """Rank, host and state of a node that has answered just now, or has not."""
        done = node.is_done or node.rank in (*self.last, self.rank)
        state = "lost" if node.lost else "up" if up else "done" if done else "silent"
        return {"rank": node.rank, "host": node.host, "state": state}

    async def _ask_all(self, question: bytes) -> dict[int, bytes]:
        """The answers of all that give one in time, by rank."""
        answers: dict[int, bytes] = {}
        peers = self.peers
        if peers is None:
            return answers

        async def ask(rank: int) -> None:
            try:
                answers[rank] = await peers.ask(rank, question, NODE_LIMIT_S)
            except PeerError as error:
                log.debug("rank %d: %s", rank, error)  # its state says so

        async with trio.open_nursery() as nursery:
            for node in self.nodes:
                if node.rank != self.rank and not node.lost:
                    nursery.start_soon(ask, node.rank)
        return answers

    def first_present(self) -> int:
        """The lowest rank that has neither died nor left. From any thread."""
        peers = self.peers
        return next(n for n in range(self.size) if n == self.rank or peers is None or not peers.is_lost(n))

    def reporter(self) -> int:
        """Who writes the report of the job: the lowest rank that is alive."""
        return next(node.rank for node in self.nodes if not node.lost)

    async def give_account(self, limit_s: float) -> None:
        """Tell the last one to whoever writes the report, without waiting longer than that for its thanks."""
        reporter = self.reporter()
        if self.peers is None or reporter == self.rank:
            return
        try:
            await self.peers.ask(reporter, GIVE_ACCOUNT + self._account(), limit_s)
        except PeerError as error:
            log.debug("rank %d has not taken our account: %s", reporter, error)

    async def wait_accounts(self, limit_s: float) -> None:
        """Until all others have told their last account, as far as they can."""
        with trio.move_on_after(limit_s):
            while not all(
                node.rank == self.rank or node.rank in self.last or self._needs_nothing(node) for node in self.nodes
            ):
                with trio.move_on_after(_LOOK_S):
                    await self._changed.wait()

    def _needs_nothing(self, node: NodeState) -> bool:
        """It is done, or dead, or has left without a word of how it went: it could not start its command."""
        return node.is_done or (self.peers is not None and node.rank != self.rank and self.peers.is_lost(node.rank))

    # --- end ---

    def end_all(self) -> None:
        """Let every daemon of the job end."""
        if self.peers is not None and not self.ending.is_set():
            self.peers.tell(b"end")
        self.ending.set()

    def tell_done(self, code: int) -> None:
        """The others learn how it went here, and do not wait for us."""
        self.nodes[self.rank].code = code
        if self.peers is not None:
            self.peers.tell(b"done %d" % code)

    async def finish(self, code: int, limit_s: float = math.inf) -> int:
        """This node is done; go on serving until all others are done or dead. The exit code of the whole job.

        The first that is not zero counts, in the order of ranks; so does a node of which nothing is known.
        """
        self.tell_done(code)
        if self.peers is None:
            return code
        with trio.move_on_after(limit_s):
            while not all(map(self._needs_nothing, self.nodes)):
                with trio.move_on_after(_LOOK_S):
                    await self._changed.wait()
        codes = [1 if node.code is None else node.code for node in self.nodes]
        return next((value for value in codes if value), 0)

    def tell_ended(self, code: int) -> None:
        """Nothing is left to do here: outputs are saved, or could not be."""
        self.nodes[self.rank].ended = code
        if self.peers is not None:
            self.peers.tell(b"ended %d" % code)

    async def ends_well(self) -> bool:
        """When all others have ended, too, or are gone: has every one of them ended with 0? After ``tell_ended``."""
        peers = self.peers

        def is_over(node: NodeState) -> bool:
            gone = node.lost or (peers is not None and node.rank != self.rank and peers.is_lost(node.rank))
            return node.ended is not None or gone

        while not all(map(is_over, self.nodes)):
            with trio.move_on_after(_LOOK_S):
                await self._changed.wait()
        return all(node.ended == 0 for node in self.nodes)

    async def find_missing(self, limit_s: float) -> list[NodeState]:
        """Nodes that are not known to be done or dead, and yet do not answer; by rank."""
        missing: list[NodeState] = []
        peers = self.peers
        if peers is None:
            return missing

        async def ask(node: NodeState) -> None:
            try:
                await peers.ask(node.rank, ASK_NODE, limit_s)
            except PeerTimeoutError:
                missing.append(node)
            except PeerError as error:
                log.debug("rank %d: %s", node.rank, error)  # it has left: an orderly end

        async with trio.open_nursery() as nursery:
            for node in self.nodes:
                if not self._needs_nothing(node):
                    nursery.start_soon(ask, node)
        return [node for node in self.nodes if node in missing and not self._needs_nothing(node)]
