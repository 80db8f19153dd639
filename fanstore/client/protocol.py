"""What is said over the control socket: packets, limits and errors, for both ends.

Owns the bytes, which are described in docs/protocol.md ("The control socket"); knows nothing of requests. Imported by
programs that FanStore does not own, too: nothing here, nor in connection.py, needs more than the standard library and
msgpack.
"""

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from fanstore.errors import FanstoreError

#: Version of the protocol. Packets, ``hello`` and errors stay as they are in all versions.
PROTOCOL = 1
#: Name of the socket in the directory of the job.
SOCKET_NAME = "control"

#: Number of the request, flags, and 0.
HEADER = struct.Struct("<IHH")
#: Flag: another packet of the same answer follows.
MORE = 1
#: Bytes of one packet with its header; a request is one packet. The kernel lets a socket have 212,992 bytes under way.
PACKET_BYTES = 65_536
#: Bytes of an answer that a client takes.
ANSWER_BYTES = 64 << 20
#: Descriptors that an answer may have.
MOST_DESCRIPTORS = 8

#: Elements of a list and of a map in a request: what is announced there is allocated before it is seen.
_MOST_LISTED, _MOST_MAPPED = 4096, 64


class ControlError(FanstoreError):
    """Something that was asked over the control socket was not done; the message is one sentence.

    Attributes:
        code: why, for programs (docs/protocol.md).
        number: the error number that a call of a program is to fail with; 0 if there is none that says more.
    """

    def __init__(self, code: str, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.number = number


def packets(number: int, message: dict[str, Any]) -> Iterator[bytes]:
    """A message as the packets in which it is sent."""
    body, room = msgpack.packb(message), PACKET_BYTES - HEADER.size
    for start in range(0, len(body), room):
        more = MORE if start + room < len(body) else 0
        yield HEADER.pack(number, more, 0) + body[start : start + room]


def unpack_request(body: bytes) -> dict[str, Any]:
    """The map that a request is. Raises ControlError; the bytes may be anything."""
    try:
        message = msgpack.unpackb(
            body, max_array_len=_MOST_LISTED, max_map_len=_MOST_MAPPED, max_ext_len=0, strict_map_key=True
        )
    except ValueError as error:  # all that msgpack raises for what is not msgpack, or not UTF-8
        raise ControlError("malformed", f"the request is not msgpack within the limits ({error})") from None
    if not isinstance(message, dict) or not isinstance(message.get("request"), str):
        raise ControlError("malformed", "the request is not a map that names a request")
    return message
