"""What the ranks of this node own, kept in memory for as long as they own it (docs/protocol.md, "What ranks own").

Owns the lists that programs have told (fanstore/torch/room.py), and the line of chunks that are to be brought. What
lies in a partition of this node needs no room. Everything else is a copy more, in the chunk broker's cache: what has
left is let go there, its partition stays where it is. Chunks come behind whatever readers wait for. Trio thread.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import trio

from fanstore.client.protocol import ControlError
from fanstore.client.server import Client, Reply, Request
from fanstore.dataset.broker import Broker
from fanstore.format.codec import CHUNK_BYTES
from fanstore.format.index import Index

#: Chunks that are asked for ahead of what has come, and seconds between two looks.
_IN_LINE, _LOOK_S = 64, 0.01
#: Bytes of paths that a program may tell for one epoch.
_TOLD_MOST = 1 << 30


class Room:
    """The room of one node.

    Attributes:
        _told: by client, the paths that it is telling; _own: the files that it has told.
        _owners: how many clients own a file that is kept. _line: chunks that are to be brought.
        _left: files that nobody owns any more; what of them was under way then will have to be let go, too.
    """

    def __init__(
        self,
        index: Index,
        broker: Broker,
        is_here: Callable[[int], bool],
        entries: Callable[[Sequence[bytes]], npt.NDArray[np.uint32]],
    ) -> None:
        """``is_here``: this node has a partition, or will have it; ``entries``: of paths, too large for none."""
        self._index = index
        self._broker = broker
        self._is_here = is_here
        self._entries = entries
        self._told: dict[Client, list[bytes]] = {}
        self._own: dict[Client, list[int]] = {}
        self._owners = Counter[int]()
        self._line = deque[tuple[int, int]]()
        self._left: list[int] = []
        self._bytes = 0
        self._wanted = trio.Event()

    def requests(self) -> Mapping[str, Request]:
        """Rows for the table of the control socket."""
        return {"own": Request(self._take, {"paths": bytes, "last": bool}, client=True)}

    async def _take(self, client: Client, paths: bytes, last: bool) -> Reply:
        """A piece of the list of what a rank owns, in the sequence of reading; it takes the place of the last list."""
        if client not in self._told:
            self._told[client] = []
            client.at_end.callback(self._forget, client)
        told = self._told[client]
        if sum(map(len, told)) + len(paths) > _TOLD_MOST:
            raise ControlError("arguments", "these are more paths than a rank can own")
        told.append(paths)
        if not last:
            return Reply()
        names = [name for piece in told for name in piece.split(b"\0")]
        self._told[client] = []
        entries = await trio.to_thread.run_sync(self._entries, names)
        elsewhere = [
            entry
            for entry in dict.fromkeys(entries.tolist())
            if entry < self._index.entry_count and not self._is_here(self._index.partition[entry])
        ]
        self._own_from_now(client, elsewhere)
        return Reply({"files": len(names), "kept": len(elsewhere)})

    def _own_from_now(self, client: Client, files: list[int]) -> None:
        before = self._own.get(client, [])
        self._own[client] = files
        new = [file for file in files if not self._owners[file]]
        self._owners.update(files)
        self._bytes += sum(self._index.size[file] for file in new)
        self._line.extend((file, number) for file in new for number in range(self._chunks(file)))
        self._owners.subtract(before)
        for file in before:
            if self._owners[file] == 0 and file in self._owners:
                del self._owners[file]
                self._bytes -= self._index.size[file]
                self._left.append(file)
        self._let_go()
        self._wanted.set()

    def _let_go(self) -> None:
        for file in self._left:
            if not self._owners[file]:
                for number in range(self._chunks(file)):
                    self._broker.forget(file, number)

    def _chunks(self, file: int) -> int:
        return -(-self._index.size[file] // CHUNK_BYTES)

    def _forget(self, client: Client) -> None:
        """A program has gone."""
        self._own_from_now(client, [])
        del self._own[client], self._told[client]

    async def run(self) -> None:
        """Bring what is to be kept, until it is cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            while self._line or self._left:
                in_line = self._broker.cache()["in_line"]
                if in_line == 0:
                    self._let_go()
                    self._left.clear()
                for _ in range(max(0, _IN_LINE - in_line)):
                    if not self._line:
                        break
                    file, number = self._line.popleft()
                    if self._owners[file] > 0 and not self._broker.keep(file, number):
                        self._line.appendleft((file, number))
                        break
                await trio.sleep(_LOOK_S)

    def describe(self) -> dict[str, int]:
        """The section ``room`` of stats.json."""
        return {"files": len(self._owners), "bytes": self._bytes, "waiting": len(self._line)}
