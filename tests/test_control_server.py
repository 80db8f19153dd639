"""Both ends of the control socket without a mount: long answers, slow clients, faults, daemons of another version."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest
import trio
from control_clients import HEADER, answer, greeted, packet, raw

from fanstore.client import protocol, server
from fanstore.client.connection import ControlClient
from fanstore.client.protocol import ControlError
from fanstore.client.server import ControlServer, Reply, Request

_Result = TypeVar("_Result")


async def aside(call: Callable[[], _Result]) -> _Result:
    """What blocks, as clients do; the server runs on this thread meanwhile."""
    with trio.fail_after(60):
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)


async def gone(control: ControlServer) -> None:
    """Until the server has noticed that nobody is connected any more."""
    with trio.fail_after(60):
        while control.describe()["clients"]:  # noqa: ASYNC110  (no event: nobody but tests waits for that)
            await trio.sleep(0.001)


def descriptors() -> set[tuple[str, str]]:
    """Pipes and sockets of this process; those that earlier tests have left may be closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one with which they were listed
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return {(number, target) for number, target in found if target.startswith(("pipe:", "socket:"))}


@contextlib.asynccontextmanager
async def serving(directory: Path, requests: Mapping[str, Request]) -> AsyncIterator[ControlServer]:
    control = ControlServer(directory)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(control.run, requests)
            yield control
            nursery.cancel_scope.cancel()
    finally:
        control.close()


async def echo(text: str) -> Reply:
    return Reply({"text": text * 100_000})


def test_long_answers_come_in_pieces(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, {"echo": Request(echo, {"text": str})}) as control:

            def ask() -> None:
                with ControlClient(control.path, "test") as client:
                    for text in ("", "ab", "é", "x" * 100):
                        assert client.ask("echo", text=text).values == {"text": text * 100_000}
                    with pytest.raises(ControlError, match="longer than 65536 bytes"):
                        client.ask("echo", text="x" * 70_000)

            await aside(ask)
            await gone(control)
            assert control.describe() == {"clients": 0, "requests": 5, "refused": 0}

    trio.run(main)


def test_slow_clients_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing, and who takes no answer; nobody else waits for them."""
    # The second is shorter: the deaf one is cut off before it begins to listen.
    monkeypatch.setattr(server, "HELLO_LIMIT_S", 0.6)
    monkeypatch.setattr(server, "TAKE_LIMIT_S", 0.1)

    async def main() -> None:
        async with serving(tmp_path, {"echo": Request(echo, {"text": str})}) as control:

            def be_slow() -> None:
                with raw(control.path) as silent, greeted(control.path) as deaf:
                    deaf.send(packet(1, request="echo", text="abcdefgh"))
                    with ControlClient(control.path, "test") as client:
                        assert client.ask("echo", text="a").values == {"text": "a" * 100_000}
                    assert silent.recv(10) == b""
                    while deaf.recv(1 << 17):
                        pass

            await aside(be_slow)
            await gone(control)

    trio.run(main)


def test_fault_in_a_handler_is_the_end_of_one_client(tmp_path: Path, expect_warnings: Callable[..., None]) -> None:
    expect_warnings("unexpected error in the control socket; please report it")

    async def fail() -> Reply:
        raise KeyError("a mistake of ours")

    async def main() -> None:
        async with serving(tmp_path, {"fail": Request(fail), "echo": Request(echo, {"text": str})}) as control:

            def ask() -> None:
                with ControlClient(control.path, "test") as one, ControlClient(control.path, "test") as other:
                    with pytest.raises(ControlError) as caught:
                        one.ask("fail")
                    assert caught.value.code == "unreachable"
                    assert other.ask("echo", text="").values == {"text": ""}

            await aside(ask)

    trio.run(main)


def test_descriptors_of_an_answer(tmp_path: Path) -> None:
    """They reach the client, are closed here, also if the client has gone or the answer is an error for it."""
    given: list[int] = []

    async def hand_out() -> Reply:
        receive, send = os.pipe()
        os.write(send, b"through a pipe")
        os.close(send)
        given.append(receive)
        return Reply({"text": "x" * 200_000}, [receive])

    async def main() -> None:
        async with serving(tmp_path, {"hand_out": Request(hand_out)}) as control:

            def ask() -> None:
                with ControlClient(control.path, "test") as client:
                    (received,) = client.ask("hand_out").descriptors
                    assert os.read(received, 100) == b"through a pipe" and not os.get_inheritable(received)
                    os.close(received)
                with greeted(control.path) as gone:
                    gone.send(packet(1, request="hand_out"))

            before = descriptors()
            await aside(ask)
            await gone(control)
            assert len(given) == 2 and not descriptors() - before

    trio.run(main)


def test_requests_wait_for_each_other(tmp_path: Path) -> None:
    """No more than the limit are handled at a time, and all are answered."""
    most = now = 0

    async def count() -> Reply:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await trio.sleep(0.02)
        now -= 1
        return Reply()

    async def main() -> None:
        async with serving(tmp_path, {"count": Request(count)}) as control:

            def ask() -> None:
                with contextlib.ExitStack() as stack:
                    clients = [stack.enter_context(greeted(control.path)) for _ in range(50)]
                    for client in clients:
                        client.send(packet(3, request="count"))
                    for client in clients:
                        assert answer(client) == (3, {})

            await aside(ask)

    trio.run(main)
    assert most == server.MOST_REQUESTS


def test_last_words_are_heard(tmp_path: Path) -> None:
    """Although the client has sent more, and its next packet finds the connection closed."""

    async def main() -> None:
        async with serving(tmp_path, {}) as control:

            def talk() -> None:
                with greeted(control.path) as connection:
                    with contextlib.suppress(BrokenPipeError):
                        for _ in range(100):
                            connection.send(HEADER.pack(5, 0, 0) + b"\xc1")
                    number, values = answer(connection)
                    assert (number, values["error"]) == (5, "malformed")
                    assert connection.recv(10) == b""

            for _ in range(20):
                await aside(talk)

    trio.run(main)


# --- daemons that are not ours ---


@contextlib.contextmanager
def daemon(directory: Path, *packets: bytes) -> Iterator[Path]:
    """Answers the first packet of one client with these."""
    path = directory / "control"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(60)

        def talk() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                for each in packets:
                    connection.send(each)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            yield path
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("packets", "code", "text"),
    [
        (
            [packet(1, protocol=2, fanstore="9.0")],
            "protocol",
            "speaks protocol 2 of the control socket, this program 1",
        ),
        ([packet(1, error="protocol", message="use others")], "protocol", "use others"),
        ([packet(0, error="full", message="too many")], "full", "too many"),
        ([packet(1)], "protocol", "speaks protocol None"),
        ([packet(2, protocol=1)], "unreachable", "makes no sense"),
        ([HEADER.pack(1, 0, 0) + b"\xc1"], "unreachable", "cannot be understood"),
        ([HEADER.pack(1, 0, 0) + b"\x01"], "unreachable", "not a map"),
        ([b"short"], "unreachable", "closed the connection"),
        ([], "unreachable", "the connection|the daemon has closed"),
        ([HEADER.pack(1, protocol.MORE, 0) + b"\x81"], "unreachable", "closed the connection"),
    ],
)
def test_other_daemons(tmp_path: Path, packets: list[bytes], code: str, text: str) -> None:
    with daemon(tmp_path, *packets) as path, pytest.raises(ControlError, match=text) as caught:
        ControlClient(path, "test")
    assert caught.value.code == code


def test_nobody_there(tmp_path: Path) -> None:
    for path in (tmp_path / "control", tmp_path / "no/control"):
        with pytest.raises(ControlError, match="No such file") as caught:
            ControlClient(path, "test")
        assert caught.value.code == "unreachable"


def test_client_needs_nothing_but_msgpack() -> None:
    """It is made to be imported by programs that train: nothing of the daemon comes with it."""
    script = (
        "import sys; before = set(sys.modules); import fanstore.client.connection;"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names));"
        "print(*sorted(name for name in sys.modules if name.startswith('fanstore.')))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    others, own = result.stdout.splitlines()
    assert {name for name in others.split() if "cython" not in name} == {"fanstore", "msgpack"}
    assert own.split() == [
        "fanstore.client",
        "fanstore.client.connection",
        "fanstore.client.protocol",
        "fanstore.errors",
    ]
