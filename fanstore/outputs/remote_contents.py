"""The content of outputs that is not on this node: on the node that wrote it, or in ``--output``.

Owns the reading of it, and the giving of what other nodes want to read here. Knows which of the two to ask, and nothing
of why somebody reads (outputs.py). Trio thread; the shared file system in worker threads.
"""

from __future__ import annotations

import errno
import logging

import msgpack
import trio

from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.output import SHARED, Output
from fanstore.outputs.output_dir import OutputDir
from fanstore.outputs.publisher import in_thread
from fanstore.outputs.sequencer import OUTPUT_QUESTION
from fanstore.outputs.tree import OutputTree, RefusedError
from fanstore.transport.peers import PeerError, Peers

log = logging.getLogger(__name__)

#: Bytes of a content in one answer of another node, which is a message (MESSAGE_BYTES of transport/peers.py).
PIECE_BYTES = 56 << 10
#: Pieces that are asked for at once.
PIECES = 8
#: Seconds for another node to give a piece, before ``--output`` is read instead.
PIECE_LIMIT_S = 10.0
#: Seconds in which what stands in ``--output`` must be found: it may get another name in that moment.
SEARCH_LIMIT_S = 2.0
_AGAIN_S = 0.02

_PIECE = b"="


class RemoteContents:
    """Contents on other nodes and in ``--output`` (``output_dir``; None without it)."""

    def __init__(
        self, tree: OutputTree, contents: LocalContents, output_dir: OutputDir | None, peers: Peers | None
    ) -> None:
        self._tree = tree
        self._contents = contents
        self._output_dir = output_dir
        self._peers = peers
        self._bringing: dict[int, trio.Lock] = {}

    async def read(self, output: Output, offset: int, length: int) -> bytes:
        """Bytes of an output, short at its end. Raises RefusedError, OSError."""
        length = min(length, max(0, output.size - offset))
        if length == 0:
            return b""
        holder, peers = output.holder, self._peers
        if holder != SHARED and peers is not None and holder != peers.rank and not peers.is_lost(holder):
            try:
                return await self._ask_pieces(peers, holder, output, offset, length)
            except PeerError as error:
                log.debug("rank %d does not give an output: %s", holder, error)
        give_up_s = trio.current_time() + SEARCH_LIMIT_S
        while self._output_dir is not None and output.is_copied() and trio.current_time() < give_up_s:
            data = await self._read_saved(output, offset, length)
            if data is not None:
                return data
            await trio.sleep(_AGAIN_S)
        log.warning("the content of %s is on rank %d only, which does not give it", self._tree.title(output), holder)
        raise RefusedError(errno.EIO)

    async def bring(self, output: Output) -> None:
        """Bring all of an output to this node, unless somebody else just did. Raises OSError, RefusedError."""
        inode = output.inode
        async with self._bringing.setdefault(inode, trio.Lock()):
            if self._contents.find(inode) is not None:
                return
            version, size, mtime_ns = output.version, output.size, output.mtime_ns
            part = self._contents.part(inode)
            try:
                async with await trio.open_file(part, "wb", buffering=0) as file:
                    for offset in range(0, size, PIECE_BYTES * PIECES):
                        data = await self.read(output, offset, min(PIECE_BYTES * PIECES, size - offset))
                        await file.write(data)
                if output.version != version:
                    raise RefusedError(errno.ESTALE)
                self._contents.take_in(inode, part, mtime_ns)
            finally:
                part.unlink(missing_ok=True)
                self._bringing.pop(inode, None)

    async def _read_saved(self, output: Output, offset: int, length: int) -> bytes | None:
        """From ``--output``; None if it has got another name there in this moment."""
        assert self._output_dir is not None
        try:
            if output.standing is not None and output.standing.version == output.version:
                path = self._tree.standing_path(output.standing.place)
                return await in_thread(self._output_dir.read, path, offset, length)
            if output.ready is not None:
                return await in_thread(self._output_dir.read_copy, output.ready[1], offset, length)
        except (FileNotFoundError, RefusedError) as error:
            log.debug("an output does not stand where it did: %s", error)
        return None

    async def _ask_pieces(self, peers: Peers, holder: int, output: Output, offset: int, length: int) -> bytes:
        pieces: dict[int, bytes] = {}
        errors: list[PeerError] = []

        async def ask(start: int) -> None:
            wanted = min(PIECE_BYTES, offset + length - start)
            question = OUTPUT_QUESTION + msgpack.packb(["piece", output.inode, start, wanted])
            try:
                pieces[start] = (await peers.ask(holder, question, PIECE_LIMIT_S))[1:]
            except PeerError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for start in range(offset, offset + length, PIECE_BYTES):
                nursery.start_soon(ask, start)
        if errors:
            raise errors[0]
        return b"".join(pieces[start] for start in sorted(pieces))

    async def give_piece(self, peer: int, inode: int, offset: int, length: int) -> bytes:
        """What another node wants to read here; empty if it is not here."""
        try:
            return _PIECE + self._contents.read(inode, offset, min(length, PIECE_BYTES))
        except FileNotFoundError:
            return b""
