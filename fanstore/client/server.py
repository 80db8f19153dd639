"""The daemon's end of the control socket: who may come in, how much they may want, and who handles a request.

Owns the listening socket and the connections. What can be asked is a table that the caller gives (fuse/requests.py).
Trio thread; nothing here waits for a client but the task of that client. Nobody but the user of the daemon and root is
answered: the directory of the socket has mode 0700, and the kernel says who is at the other end. What a client sends
may be anything all the same; it costs it the connection, and the log a line at level DEBUG.
"""

import contextlib
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from fanstore import __version__
from fanstore.client import protocol
from fanstore.client.protocol import ControlError

log = logging.getLogger(__name__)

#: Clients at a time; fewer where few descriptors are allowed. The next one is told so.
MOST_CLIENTS = 256
#: Requests of all clients that are being handled; further ones wait.
MOST_REQUESTS = 16
#: Seconds for a client to say hello, and to take an answer.
HELLO_LIMIT_S, TAKE_LIMIT_S = 10.0, 10.0
#: Connections that the kernel accepts for us.
_BACKLOG = 128
#: Seconds until connections are accepted again if there is no descriptor or memory for one.
_SHORT_S = 0.1
_CREDENTIALS = struct.Struct("3i")
#: Characters of what a client has sent that an error repeats.
_REPEATED = 40


@dataclass(frozen=True)
class Reply:
    """What a handler answers.

    Attributes:
        values: a map that msgpack can say.
        descriptors: for the client; closed here once they are sent.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    descriptors: Sequence[int] = ()


class Client:
    """Who is connected, for handlers that keep something of it.

    Attributes:
        at_end: what is to be done when it has gone.
    """

    def __init__(self) -> None:
        self.at_end = contextlib.ExitStack()


@dataclass(frozen=True)
class Request:
    """A row of the table: what is called, with exactly these arguments. The handler may raise ControlError.

    ``client``: the handler is given the ``Client`` before them. It answers nothing if it returns None.
    ``waits``: it may take long without doing anything, and does not count among those that are handled at a time.
    """

    handler: Callable[..., Awaitable[Reply | None]]
    arguments: Mapping[str, type] = field(default_factory=dict)
    client: bool = False
    waits: bool = False


class _LastWordsError(ControlError):
    """The client is told, and cut off: it is none of ours, or of another version.

    Attributes:
        request: number of the request that this answers; 0 if there is none.
    """

    request = 0


class ControlServer:
    """The control socket of one daemon.

    Attributes:
        path: of the socket.
        _clients: those that are connected; _most_clients: how many may be.
        _requests, _refused: how many were answered so far, with what was asked for and with an error.
    """

    def __init__(self, directory: Path) -> None:
        """Make the socket; whoever connects waits until ``run``. Raises OSError. The directory removes its name."""
        self.path = directory / protocol.SOCKET_NAME
        self._clients = self._requests = self._refused = 0
        self._most_clients = min(MOST_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._slots = trio.Semaphore(MOST_REQUESTS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(self._socket.fileno(), 0o600)  # the mode that bind gives to the name
            opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # The path itself may be longer than the 107 bytes of a socket's address.
                self._socket.bind(f"/proc/self/fd/{opened}/{protocol.SOCKET_NAME}")
            finally:
                os.close(opened)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """After ``run`` has ended."""
        self._socket.close()

    def describe(self) -> dict[str, int]:
        """For the statistics."""
        return {"clients": self._clients, "requests": self._requests, "refused": self._refused}

    async def run(self, requests: Mapping[str, Request]) -> None:
        """Accept and answer clients until it is cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(self._socket)
                try:
                    connection, _ = self._socket.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        log.error("the control socket fails, and lets nobody in any more: %s", error.strerror)
                        return
                    await trio.sleep(_SHORT_S)
                    continue
                connection.setblocking(False)
                nursery.start_soon(self._serve, connection, requests)

    async def _serve(self, connection: socket.socket, requests: Mapping[str, Request]) -> None:
        """One client, to its end. Whatever happens is its end alone."""
        try:
            with connection:
                try:
                    self._admit(connection)
                    await self._talk(connection, requests)
                except _LastWordsError as error:
                    await self._refuse(connection, error.request, error)
                    _hang_up(connection)
        except (OSError, trio.TooSlowError) as error:
            log.debug("a client of the control socket was cut off: %r", error)
        except Exception as error:
            log.error("unexpected error in the control socket; please report it", exc_info=error)

    def _admit(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (os.geteuid(), 0):
            raise _LastWordsError("denied", f"this daemon is asked by user {os.geteuid()} and root only, not by {user}")
        if self._clients >= self._most_clients:
            raise _LastWordsError("full", f"{self._clients} clients are connected to this daemon, which is the limit")

    async def _talk(self, connection: socket.socket, requests: Mapping[str, Request]) -> None:
        """Answer one request after the other until the client goes. Raises _LastWordsError."""
        self._clients += 1
        greeted = False
        client = Client()
        try:
            while True:
                with trio.fail_after(float("inf") if greeted else HELLO_LIMIT_S):
                    packet = await _receive(connection)
                if not packet:
                    return
                number, body = _split(packet)
                try:
                    reply = await self._answer(body, requests, client if greeted else None)
                except _LastWordsError as error:
                    error.request = number
                    raise
                except ControlError as error:
                    await self._refuse(connection, number, error)
                else:
                    self._requests += 1
                    if reply is not None:
                        await _send(connection, number, reply)
                    greeted = True
        finally:
            self._clients -= 1
            client.at_end.close()

    async def _refuse(self, connection: socket.socket, number: int, error: ControlError) -> None:
        self._refused += 1
        log.debug("refused on the control socket: %s", error)
        values: dict[str, object] = {"error": error.code, "message": str(error)}
        await _send(connection, number, Reply(values | ({"errno": error.number} if error.number else {})))

    async def _answer(self, body: bytes, requests: Mapping[str, Request], client: Client | None) -> Reply | None:
        """``client``: None before it has said hello."""
        try:
            message = protocol.unpack_request(body)
        except ControlError as error:
            raise _LastWordsError(error.code, str(error)) from None
        name = message.pop("request")
        if name == "hello":
            return _greet(message)
        if client is None:
            raise _LastWordsError("hello", "the first request must be hello")
        request = requests.get(name)
        if request is None:
            raise ControlError(
                "unknown", f"FanStore {__version__} knows no request {name[:_REPEATED]!r}, only {', '.join(requests)}"
            )
        wanted = request.arguments
        if message.keys() != wanted.keys() or any(type(message[key]) is not wanted[key] for key in wanted):
            needs = ", ".join(f"{key} ({kind.__name__})" for key, kind in wanted.items()) or "no arguments"
            raise ControlError("arguments", f"the request {name} needs: {needs}")
        async with contextlib.nullcontext() if request.waits else self._slots:
            return await request.handler(*((client,) if request.client else ()), **message)


def _greet(message: Mapping[str, Any]) -> Reply:
    """Nothing else is looked at: the hello of another version may have more."""
    if message.get("protocol") != protocol.PROTOCOL:
        given = message.get("protocol")
        spoken = given if type(given) is int else "what the client says"
        raise _LastWordsError(
            "protocol",
            f"this daemon is FanStore {__version__} and speaks protocol {protocol.PROTOCOL} of the control socket, not "
            f"{spoken}: use the programs of the FanStore that has mounted it",
        )
    return Reply({"protocol": protocol.PROTOCOL, "fanstore": __version__})


def _split(packet: bytes) -> tuple[int, bytes]:
    """The number of the request, and its body."""
    if len(packet) < protocol.HEADER.size or len(packet) > protocol.PACKET_BYTES:
        raise _LastWordsError(
            "malformed", f"a packet has {protocol.HEADER.size} to {protocol.PACKET_BYTES} bytes, not {len(packet)}"
        )
    number, flags, rest = protocol.HEADER.unpack_from(packet)
    if flags or rest:
        raise _LastWordsError("malformed", "a request is one packet, with 0 behind its number")
    return number, packet[protocol.HEADER.size :]


async def _receive(connection: socket.socket) -> bytes:
    """The next packet, one byte more than allowed at most; nothing at the end.

    Without room for descriptors: the kernel closes those that a client sends, before anybody here could see them.
    """
    while True:
        await trio.lowlevel.wait_readable(connection)
        with contextlib.suppress(BlockingIOError):
            return connection.recv(protocol.PACKET_BYTES + 1)


async def _send(connection: socket.socket, number: int, reply: Reply) -> None:
    """Without a checkpoint while there is room: the answer to an unmount leaves although all is being cancelled."""
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(reply.descriptors)}i", *reply.descriptors))]
        ancillary = rights if reply.descriptors else []
        with trio.fail_after(TAKE_LIMIT_S):
            for packet in protocol.packets(number, dict(reply.values)):
                while True:
                    try:
                        connection.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
                        break
                    except BlockingIOError:
                        await trio.lowlevel.wait_writable(connection)
                ancillary = []
    finally:
        for descriptor in reply.descriptors:
            os.close(descriptor)


def _hang_up(connection: socket.socket) -> None:
    """Take what the client has sent and nobody will read: or it would get an error in place of our last words."""
    connection.shutdown(socket.SHUT_RD)
    while connection.recv(1):
        pass
