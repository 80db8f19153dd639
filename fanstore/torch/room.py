"""Tells the daemon of a mount what this rank owns, so that it is on this node when it is read.

Owns the connection and the words; what is done with them is the daemon's (fanstore/prefetch/room.py). Main process of
a rank. What cannot be told costs time only, and is said once.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence

from fanstore.client.connection import ControlClient, connect
from fanstore.client.protocol import ControlError
from fanstore.order.order import Samples
from fanstore.torch.placement import find_mount, mount_config

#: Bytes of paths in one message, which must fit in a packet.
_MESSAGE_BYTES = 60_000


class Room:
    """The room of one rank on its node.

    Attributes:
        _paths: by sample, as the program says them, below ``_mount``.
        _client: None before it is needed; _pid: the process that has made it.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self._paths = paths
        self._mount = find_mount(paths[0]) if paths else None
        if self._mount is not None and mount_config(self._mount).get("order") == "off":
            self._mount = None
        self._client: ControlClient | None = None
        self._pid = 0

    def own(self, samples: Samples) -> None:
        """From now on the rank owns these, which are wanted in this sequence, and nothing else."""
        if self._mount is None:
            return
        try:
            client = self._connect()
            pieces = list(_pieces(self._names(samples.tolist())))
            for number, piece in enumerate(pieces):
                client.ask("own", paths=piece, last=number == len(pieces) - 1)
        except (ControlError, OSError, ValueError) as error:
            warnings.warn(f"what this rank owns is not kept on its node, and may be read again: {error}", stacklevel=2)
            self._mount = None

    def _connect(self) -> ControlClient:
        if self._client is None or self._pid != os.getpid():
            assert self._mount is not None
            made = connect(mount_config(self._mount), "fanstore.torch")
            if made is None:
                raise ControlError("unreachable", f"the daemon of {self._mount} cannot be asked")
            self._client, self._pid = made, os.getpid()
        return self._client

    def _names(self, samples: Iterable[int]) -> Iterator[bytes]:
        directories: dict[str, str] = {}
        for sample in samples:
            directory, name = os.path.split(os.fspath(self._paths[sample]))
            below = directories.get(directory)
            if below is None:
                below = directories[directory] = os.path.relpath(os.path.realpath(directory), self._mount)
            yield os.fsencode(os.path.normpath(os.path.join(below, name)))


def _pieces(names: Iterable[bytes]) -> Iterator[bytes]:
    """Names with a zero byte between them, in messages; at least one."""
    piece: list[bytes] = []
    length = 0
    for name in names:
        if piece and length + len(name) >= _MESSAGE_BYTES:
            yield b"\0".join(piece)
            piece, length = [], 0
        piece.append(name)
        length += len(name) + 1
    yield b"\0".join(piece)
