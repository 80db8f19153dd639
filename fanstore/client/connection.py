"""A program's end of the control socket: connect, ask, take the answer and the descriptors that come with it.

Owns one connection. Blocks, with limits; one thread at a time, and not across a fork: a child connects anew. Used by
fanstore-stat and fanstore-umount, and made for programs that FanStore does not own: see protocol.py for what may be
imported here.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack

from fanstore import __version__
from fanstore.client import protocol
from fanstore.client.protocol import ControlError

#: Seconds for an answer, unless more is given.
ANSWER_LIMIT_S = 5.0

_DESCRIPTOR = struct.Struct("i")
_RIGHTS_BYTES = socket.CMSG_LEN(protocol.MOST_DESCRIPTORS * _DESCRIPTOR.size)


@dataclass(frozen=True)
class Answer:
    """What the daemon has answered; the descriptors are the caller's to close."""

    values: Mapping[str, Any]
    descriptors: tuple[int, ...] = ()


class ControlClient:
    """A connection to the daemon of one mount, from construction to ``close``.

    Attributes:
        daemon: its version of FanStore.
        _number: of the last request.
    """

    def __init__(self, path: Path, program: str) -> None:
        """``path`` is ``control_socket`` in config.json; ControlError if there is nobody, or who speaks otherwise."""
        self._number = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(ANSWER_LIMIT_S)
            _connect(self._socket, path)
            values = self.ask("hello", protocol=protocol.PROTOCOL, client=f"{program} {__version__}").values
            if values.get("protocol") != protocol.PROTOCOL:
                raise ControlError(
                    "protocol",
                    f"the daemon speaks protocol {values.get('protocol')!r} of the control socket, this program "
                    f"{protocol.PROTOCOL}",
                )
            self.daemon = str(values.get("fanstore"))
        except OSError as error:
            self.close()
            raise ControlError("unreachable", f"cannot connect to {path}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def ask(self, request: str, limit_s: float = ANSWER_LIMIT_S, **arguments: object) -> Answer:
        """Ask, and wait for the answer. Raises ControlError; after ``unreachable`` the connection is of no use."""
        self._number += 1
        packet, *more = protocol.packets(self._number, {"request": request, **arguments})
        if more:
            raise ControlError("malformed", f"the request {request} is longer than {protocol.PACKET_BYTES} bytes")
        with contextlib.ExitStack() as received:
            try:
                self._socket.settimeout(limit_s)
                with contextlib.suppress(BrokenPipeError):  # why it has hung up can still be received
                    self._socket.send(packet)
                body, descriptors = self._receive(received)
                values = msgpack.unpackb(body)
            except TimeoutError:
                raise ControlError("unreachable", f"the daemon has not answered within {limit_s:g} s") from None
            except OSError as error:
                raise ControlError("unreachable", f"the connection to the daemon failed: {error.strerror}") from None
            except ValueError as error:
                raise ControlError("unreachable", f"the daemon's answer cannot be understood: {error}") from None
            if not isinstance(values, dict):
                raise ControlError("unreachable", "the daemon's answer is not a map")
            if "error" in values:
                raise ControlError(str(values["error"]), str(values.get("message")))
            received.pop_all()  # the descriptors are the caller's from now on
            return Answer(values, tuple(descriptors))

    def _receive(self, received: contextlib.ExitStack) -> tuple[bytes, list[int]]:
        """All packets of an answer, joined, and the descriptors, which ``received`` closes."""
        pieces, descriptors, length, more = list[bytes](), list[int](), 0, True
        while more:
            # Not socket.recv_fds, which leaves the flag out (CPython 3.11).
            packet, rights, _, _ = self._socket.recvmsg(protocol.PACKET_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
            added = [descriptor for _, _, data in rights for (descriptor,) in _DESCRIPTOR.iter_unpack(data)]
            for descriptor in added:
                received.callback(os.close, descriptor)
            if len(packet) < protocol.HEADER.size:
                raise ControlError("unreachable", "the daemon has closed the connection")
            number, flags, _ = protocol.HEADER.unpack_from(packet)
            descriptors += added
            pieces.append(packet[protocol.HEADER.size :])
            length += len(packet)
            if number not in (self._number, 0) or length > protocol.ANSWER_BYTES:
                raise ControlError("unreachable", "the daemon's answer makes no sense")
            more = bool(flags & protocol.MORE)
        return b"".join(pieces), descriptors

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(config: Mapping[str, Any], program: str) -> ControlClient | None:
    """A connection to the daemon that has written this config.json; None if that is not possible.

    An older daemon has no socket, one of another version speaks otherwise, and that of another user may not be asked.
    """
    path = config.get("control_socket")
    if not isinstance(path, str):
        return None
    try:
        return ControlClient(Path(path), program)
    except ControlError:
        return None


def _connect(connection: socket.socket, path: Path) -> None:
    """Through a descriptor of the directory: its own path may be longer than the 107 bytes of a socket's address."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
