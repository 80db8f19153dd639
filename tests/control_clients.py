"""Clients of a control socket that keep to nothing: raw packets, hostile ones too. Used by test_control_*.py."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

HEADER = struct.Struct("<IHH")
#: Seconds for an answer that must come.
LIMIT_S = 30.0


def raw(path: Path) -> socket.socket:
    """A connection that has said nothing."""
    directory = os.open(path.parent, os.O_PATH)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(LIMIT_S)
        connection.connect(f"/proc/self/fd/{directory}/{path.name}")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(directory)
    return connection


def packet(number: int, **message: object) -> bytes:
    packed: bytes = msgpack.packb(message)
    return HEADER.pack(number, 0, 0) + packed


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """The next answer of one packet."""
    received = connection.recv(1 << 17)
    assert received, "the daemon has hung up"
    number, flags, rest = HEADER.unpack_from(received)
    assert flags == rest == 0
    return number, msgpack.unpackb(received[HEADER.size :])


@contextlib.contextmanager
def greeted(path: Path) -> Iterator[socket.socket]:
    """A connection that has said hello."""
    with raw(path) as connection:
        connection.send(packet(7, request="hello", protocol=1, client="test"))
        number, values = answer(connection)
        assert number == 7 and values["protocol"] == 1
        yield connection


def hostile(generator: random.Random) -> bytes:
    """Something that a client of ours would not send."""
    request = generator.choice(
        ("hello", "stat", "stat", "content", "cache", "fetcher", "nothing", "stat\0", "é" * 1000)
    )
    arguments: dict[str, object] = {
        "entry": generator.choice((0, 1, 2, 3, -1, 2**32, 2**63, 1.5, None)),
        "name": generator.choice(("config.json", "../config.json", "", "x" * 60_000, 5, None, [1] * 5000)),
        "protocol": generator.choice((1, 1, 1, 2, -1, 2**63, "1", [[]], None)),
    }
    given = generator.sample(sorted(arguments), generator.choice((1, 1, 1, 0, 3)))
    good = packet(generator.randrange(1 << 32), request=request, **{name: arguments[name] for name in given})
    body = generator.choice(
        (
            generator.randbytes(generator.randrange(200)),
            generator.randbytes(generator.randrange(70_000)),
            b"\x91" * generator.randrange(60_000),  # lists in lists
            b"\x81\xa1a" * generator.randrange(20_000),
            b"\xdd\x00\x00\x0f\xff" * generator.randrange(10_000),  # lists that announce 4,095 elements each
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\xdb\xff\xff\xff\xff" + b"x" * 100,
            b"\xc6\xff\xff\xff\xff",
            b"\xc7\x08\xff" + bytes(8),  # a time stamp
            b"\x81\xa7request\xa4\xff\xff\xff\xff",  # not UTF-8
            b"\x82\xa7request\xa5hello\xa8protocol" + b"\x91" * 500 + b"\x01",
            msgpack.packb({"request": ["stat"]}),
            msgpack.packb({1: 2}),
            msgpack.packb([]),
        )
    )
    match generator.randrange(4):
        case 0:
            return HEADER.pack(generator.randrange(1 << 32), 0, 0) + body
        case 1:
            return generator.randbytes(generator.randrange(12))
        case 2:
            return good[: generator.randrange(len(good) + 1)]
        case _:
            spoiled = bytearray(good)
            for _ in range(generator.randrange(4)):
                spoiled[generator.randrange(len(spoiled))] = generator.randrange(256)
            return bytes(spoiled)


def assail(path: Path, seed: int, rounds: int) -> None:
    """Send such things, with and without a hello, with and without descriptors, and go at any moment."""
    generator = random.Random(seed)
    for _ in range(rounds):
        with greeted(path) if generator.random() < 0.5 else raw(path) as connection:
            connection.setblocking(False)
            with contextlib.suppress(BrokenPipeError, BlockingIOError, ConnectionResetError):
                for _ in range(generator.randrange(1, 5)):
                    given = [connection.fileno()] * generator.randrange(1, 20) if generator.random() < 0.2 else []
                    socket.send_fds(connection, [hostile(generator)], given)
                if generator.random() < 0.3:
                    connection.setblocking(True)
                    while connection.recv(1 << 17):
                        if generator.random() < 0.3:
                            break
                        connection.setblocking(False)
