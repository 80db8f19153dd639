"""The control socket on real mounts: what it answers, whom, what the commands make of it, and what cannot harm it."""

import contextlib
import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BOTH_ENGINES, fanstore_command
from control_clients import answer, assail, greeted, packet, raw
from mounting import LIMIT_S, Mount, Mounted, command, needs_fuse, needs_root, prepare, wait_until
from users import account, prefix_of

from fanstore.client.connection import ControlClient
from fanstore.client.protocol import ControlError
from fanstore.mounttable import find_mount

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

ENGINES = BOTH_ENGINES


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("control")
    (directory / "source").mkdir()
    for number in range(3):
        (directory / "source" / str(number)).write_bytes(bytes([number]) * 10_000)
    return prepare(directory / "source", directory / "d.fan")


@pytest.fixture(scope="module")
def mounted(module_mount: Mount, prepared: Path) -> Mounted:
    """One that all tests share which do not end it."""
    mounted = module_mount(prepared)
    for number in range(3):  # so that what is opened once is open
        assert (mounted.path / str(number)).read_bytes() == bytes([number]) * 10_000
    return mounted


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that other users can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="control-user-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def config_of(point: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((point / ".fanstore/config.json").read_bytes())
    return loaded


def socket_of(mounted: Mounted) -> Path:
    return Path(config_of(mounted.path)["control_socket"])


def counters(mounted: Mounted) -> dict[str, int]:
    section: dict[str, int] = mounted.statistics()["control"]
    return section


def descriptors(mounted: Mounted) -> int:
    return len(os.listdir(f"/proc/{mounted.process.pid}/fd"))


def resident_bytes(mounted: Mounted) -> int:
    return int(Path(f"/proc/{mounted.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def wait_idle(mounted: Mounted, opened: int | None = None) -> None:
    """Until the daemon has noticed that all clients are gone, and has as many descriptors as before."""
    wait_until(lambda: counters(mounted)["clients"] == 0, "end of all clients", mounted.evidence)
    if opened is not None:
        wait_until(lambda: descriptors(mounted) == opened, f"return to {opened} descriptors", mounted.evidence)


# --- what it answers ---


def test_stat_says_what_the_files_say(mounted: Mounted) -> None:
    files = mounted.path / ".fanstore"
    with ControlClient(socket_of(mounted), "test") as client:
        assert client.ask("stat", name="config.json").values["content"] == (files / "config.json").read_bytes()
        for name in ("stats.json", "nodes.json", "report.json"):
            told = json.loads(client.ask("stat", name=name).values["content"])
            assert told.keys() == json.loads((files / name).read_bytes()).keys()
        with pytest.raises(ControlError, match=r"no such file; there are stats\.json, nodes\.json"):
            client.ask("stat", name="../secret")


def test_place_and_modes(mounted: Mounted) -> None:
    path = socket_of(mounted)
    assert path == Path(config_of(mounted.path)["job_directory"], "control")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def test_requests_that_are_not_known(mounted: Mounted) -> None:
    """Each is answered as such, with its own number, and the connection lives on."""
    cases: tuple[tuple[dict[str, object], str, str], ...] = (
        ({"request": "prefetch"}, "unknown", "no request 'prefetch', only attribute, cache, control, content, fetcher"),
        ({"request": "stat"}, "arguments", "stat needs: name (str)"),
        ({"request": "stat", "name": b"x"}, "arguments", "stat needs: name (str)"),
        ({"request": "stat", "name": "config.json", "more": 1}, "arguments", "stat needs: name (str)"),
        ({"request": "unmount", "lazy": 1}, "arguments", "unmount needs: lazy (bool)"),
    )
    with greeted(socket_of(mounted)) as connection:
        for number, (message, code, text) in enumerate(cases):
            connection.send(packet(number, **message))
            got, values = answer(connection)
            assert (got, values["error"]) == (number, code) and text in values["message"]
        connection.send(packet(99, request="stat", name="config.json"))
        assert answer(connection)[1].keys() == {"content"}


@pytest.mark.parametrize("spoken", [0, 2, "1", None])
def test_client_of_another_version(mounted: Mounted, spoken: object) -> None:
    """Told in words which daemon it is and what to do, whatever else its hello says; then cut off."""
    with raw(socket_of(mounted)) as connection:
        connection.send(packet(1, request="hello", protocol=spoken, client="fanstore-stat 9", news={"a": [1]}))
        number, values = answer(connection)
        assert (number, values["error"]) == (1, "protocol")
        assert "speaks protocol 1 of the control socket, not" in values["message"]
        assert "use the programs of the FanStore that has mounted it" in values["message"]
        assert connection.recv(10) == b""


def test_hello_comes_first(mounted: Mounted) -> None:
    with raw(socket_of(mounted)) as connection:
        connection.send(packet(3, request="stat", name="config.json"))
        assert answer(connection)[1]["error"] == "hello"
        assert connection.recv(10) == b""


# --- the commands ---


def test_stat_asks_the_socket_and_does_without_it(mounted: Mounted) -> None:
    wait_idle(mounted)
    before, looked_up = counters(mounted)["requests"], mounted.count("lookup")
    asked = command("stat", mounted.path, "--json")
    assert counters(mounted)["requests"] == before + 3, "hello, config.json, stats.json"
    told = json.loads(asked.stdout)
    assert told["control"]["clients"] == 1
    path = socket_of(mounted)
    path.rename(path.with_name("away"))
    try:
        read = command("stat", mounted.path, "--json")
        assert counters(mounted)["requests"] == before + 3
    finally:
        path.with_name("away").rename(path)
    assert (asked.returncode, read.returncode, asked.stderr, read.stderr) == (0, 0, "", "")
    assert json.loads(read.stdout).keys() == told.keys()
    assert told["operations"]["lookup"]["count"] <= looked_up + 4, "only those of the first config.json"


_OTHER_VERSION = """
import sys
from fanstore.client import protocol
protocol.PROTOCOL = 2
from fanstore.cli.{name} import main
sys.argv[0] = "fanstore-{name}"
sys.exit(main())
"""


def run_other_version(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command of a FanStore that speaks another protocol."""
    line = [sys.executable, "-c", _OTHER_VERSION.format(name=name), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)


def test_commands_of_another_version_use_the_mount(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    shown = run_other_version("stat", mounted.path, "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads(shown.stdout)["control"] == {"clients": 0, "requests": 0, "refused": 1}
    ended = run_other_version("umount", mounted.path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert mounted.wait_end(0.0) == 0
    mounted.check_clean()


@needs_root
def test_umount_is_done_by_the_daemon(mount: Mount, prepared: Path) -> None:
    """From another mount namespace, in which unmounting means nothing to the daemon; nor does it know its process."""
    mounted = mount(prepared)
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc"]
    line = [*unshare, fanstore_command("umount"), str(mounted.path), "--timeout", "20"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert mounted.wait_end(0.0) == 0, "fanstore-umount has waited for it"
    mounted.check_clean()


def test_umount_while_busy(mount: Mount, prepared: Path) -> None:
    """The same words and codes, by the socket and without it; --lazy detaches, and waits for nobody."""
    mounted = mount(prepared)
    holder = subprocess.Popen(["sleep", "60"], cwd=mounted.path)
    try:
        expected = (
            f"fanstore-umount: error: {mounted.path} is busy: sleep (process {holder.pid}, working directory); try "
            f"again when that has ended, or take it away all the same with: fanstore-umount --lazy {mounted.path}\n"
        )
        refused = counters(mounted)["refused"]
        asked = command("umount", mounted.path)
        assert counters(mounted)["refused"] == refused + 1
        for busy in (asked, run_other_version("umount", mounted.path)):
            assert (busy.returncode, busy.stdout, busy.stderr) == (1, "", expected)
        lazy = command("umount", mounted.path, "--lazy")
        assert (lazy.returncode, lazy.stderr) == (0, "")
        assert f"daemon {mounted.process.pid} ends when these let go: sleep (process {holder.pid}" in lazy.stdout
    finally:
        holder.kill()
        holder.wait(LIMIT_S)
    assert mounted.wait_end() == 0
    mounted.check_clean()


@needs_root
def test_umount_of_a_bind_mount_takes_nothing_else_away(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    subprocess.run(["mount", "--bind", mounted.path, tmp_path / "bound"], check=True, timeout=LIMIT_S)
    ended = command("umount", tmp_path / "bound", "--timeout", "0")
    assert ended.returncode == 1 and "has not ended within 0 s" in ended.stderr
    assert find_mount(tmp_path / "bound") is None
    assert find_mount(mounted.path) is not None and (mounted.path / "0").read_bytes() == bytes(10_000)


def test_answer_with_a_descriptor(mount: Mount, prepared: Path) -> None:
    """The answer to unmount has a descriptor of the daemon's process, which tells its end."""
    mounted = mount(prepared)
    with ControlClient(socket_of(mounted), "test") as client:
        (process,) = client.ask("unmount", lazy=False).descriptors
        try:
            assert not os.get_inheritable(process)
            assert find_mount(mounted.path) is None, "unmounted when it is said"
            poll = select.poll()
            poll.register(process, select.POLLIN)
            assert poll.poll(LIMIT_S * 1000)
        finally:
            os.close(process)
    assert mounted.wait_end() == 0
    mounted.check_clean()


# --- where it is ---


def test_long_path_and_several_mounts(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """In a directory whose path is longer than a socket's address; with another mount of the same user beside it."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    both = mount(prepared, local=deep), mount(prepared)
    assert len(str(socket_of(both[0]))) > 150
    for one in both:
        shown = command("stat", one.path)
        assert shown.returncode == 0 and counters(one)["requests"] > 1
        assert shown.stdout.startswith(f"{prepared} on {one.path}\n")
    assert command("umount", both[0].path).returncode == 0
    assert (both[1].path / "1").read_bytes() == b"\1" * 10_000


def test_background(prepared: Path, tmp_path: Path, engine: str) -> None:
    point = tmp_path / "m"
    started = command("mount", prepared, point, "--background", "--engine", engine, "--log", tmp_path / "log")
    assert started.returncode == 0, started.stderr
    config = config_of(point)
    try:
        shown = json.loads(command("stat", point, "--json").stdout)
        assert shown["control"]["requests"] == 2 and shown["engine"]["name"] == engine
    finally:
        ended = command("umount", point)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not os.path.exists(config["job_directory"]) and not point.exists()


def test_nothing_stays_after_a_crash(mount: Mount, prepared: Path) -> None:
    """Without --local, too: the next mount removes what the killed one left, its dead mount included."""
    killed = mount(prepared)
    directory = socket_of(killed).parent
    killed.signal(signal.SIGKILL)
    killed.wait_end()
    with pytest.raises(ConnectionRefusedError):
        raw(directory / "control")
    following = mount(prepared)
    assert not directory.exists() and find_mount(killed.path) is None
    following.stop()
    assert not list(Path(tempfile.gettempdir()).glob(f"fanstore-*-{following.process.pid}-*"))


def test_nothing_stays_after_a_crash_and_an_umount(mount: Mount, prepared: Path) -> None:
    """Nor does it after fanstore-umount alone; that of another mount is left to others."""
    killed, other = mount(prepared), mount(prepared)
    directories = [socket_of(one).parent for one in (killed, other)]
    for one in (killed, other):
        one.signal(signal.SIGKILL)
        one.wait_end()
    ended = command("umount", killed.path)
    assert (ended.returncode, ended.stdout) == (0, f"removed the dead mount of {prepared} at {killed.path}\n")
    assert [directory.exists() for directory in directories] == [False, True]


@needs_root
def test_without_any_directory(prepared: Path, tmp_path: Path, engine: str) -> None:
    """A node on which nothing can be written: the mount works, and says that it has no socket."""
    (tmp_path / "m").mkdir()
    places = {"/tmp", "/var/tmp", "/usr/tmp", tempfile.gettempdir()}
    script = "; ".join(
        f"mount --bind {shlex.quote(place)} {shlex.quote(place)}; mount -o remount,ro,bind {shlex.quote(place)}"
        for place in sorted(filter(os.path.isdir, places))
    )
    line = ["unshare", "--mount", "sh", "-ec", f'{script}; cd /proc; exec "$@"', "sh", fanstore_command("mount")]
    line += [
        str(prepared),
        str(tmp_path / "m"),
        "--engine",
        engine,
        "--",
        "cat",
        str(tmp_path / "m/.fanstore/config.json"),
    ]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    config = json.loads(ended.stdout)
    assert config["control_socket"] is None and config["job_directory"] is None


# --- who may ask ---


@needs_root
def test_other_users(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """The directory keeps them out; and if it were open, the daemon asks the kernel who they are."""
    mounted = mount(prepared)
    path = socket_of(mounted)
    with account("s") as user:
        script = (
            "import contextlib, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "s.settimeout(30); s.connect(sys.argv[1])\n"
            "with contextlib.suppress(BrokenPipeError): s.send(bytes.fromhex(sys.argv[2]))\n"
            "print(s.recv(1000)); print(s.recv(1000))"
        )
        hello = packet(1, request="hello", protocol=1).hex()
        line = [*prefix_of(user), sys.executable, "-c", script, str(path), hello]

        def ask() -> subprocess.CompletedProcess[str]:
            return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)

        assert "PermissionError" in ask().stderr
        os.chmod(path.parent, 0o755)
        os.chmod(path, 0o666)
        told = ask()
        assert f"is asked by user 0 and root only, not by {user.pw_uid}" in told.stdout, told.stderr
        assert told.stdout.endswith("b''\n"), "and hangs up"
        assert counters(mounted) == {"clients": 0, "requests": 0, "refused": 1}


@needs_root
def test_commands_of_other_users(mount: Mount, prepared: Path, directory: Path) -> None:
    """They may look at the files of a mount that is open to all, as before, and may not end it."""
    mounted = mount(prepared, "--allow-other", point=directory / "m")
    with account("c") as user:

        def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            line = [*prefix_of(user), fanstore_command(name), str(mounted.path), *arguments]
            return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)

        shown = run("stat", "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["control"] == {"clients": 0, "requests": 0, "refused": 0}
        ended = run("umount")
        assert ended.returncode == 1 and ended.stderr.startswith(
            f"fanstore-umount: error: cannot unmount {mounted.path}"
        )
    assert (mounted.path / "0").read_bytes() == bytes(10_000)
    mounted.stop()


@needs_root
def test_ordinary_user(prepared: Path, engine: str, directory: Path) -> None:
    """Mount, stat and umount by the socket; root may ask as well."""
    with account("o") as user:
        shutil.copytree(prepared, directory / "d.fan")
        for path in (directory, *directory.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid)
        mount, stat, umount = (shlex.quote(fanstore_command(name)) for name in ("mount", "stat", "umount"))
        script = f"""
            set -e
            {mount} d.fan m --background --engine {engine} --log log >started
            {stat} m --json >stats.json
            cat m/.fanstore/config.json | tr -d '\\n'; echo
            read -r _
            {umount} m
            test ! -e m
        """
        line = [*prefix_of(user), "env", f"HOME={directory}", f"TMPDIR={directory}", "sh", "-c", script]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=directory) as process:
            assert process.stdin is not None and process.stdout is not None
            config = json.loads(process.stdout.readline())
            with ControlClient(Path(config["control_socket"]), "test") as client:
                told = json.loads(client.ask("stat", name="config.json").values["content"])
            process.communicate("\n", timeout=LIMIT_S)
        assert process.returncode == 0, (directory / "log").read_text()
        assert told == config and Path(config["control_socket"]).parent.parent == directory
        shown = json.loads((directory / "stats.json").read_bytes())
        assert shown["control"] == {"clients": 1, "requests": 2, "refused": 0}
        assert not list(directory.glob("fanstore-*")), "nothing is left"


# --- hostile clients ---


def test_hostile_input(mounted: Mounted) -> None:
    """Thousands of packets that make no sense: the daemon answers others meanwhile, and keeps nothing of them."""
    path = socket_of(mounted)
    with ControlClient(path, "test") as client:
        os.close(client.ask("cache").descriptors[0])  # what is made once is made: the same with what is allocated
    assail(path, 1, 100)
    wait_idle(mounted)
    before = descriptors(mounted), resident_bytes(mounted)
    for seed in range(2, 6):
        assail(path, seed, 300)
        with ControlClient(path, "test") as client:
            assert json.loads(client.ask("stat", name="config.json").values["content"]) == config_of(mounted.path)
    wait_idle(mounted, before[0])
    assert resident_bytes(mounted) < before[1] + (16 << 20)
    assert (mounted.path / "2").read_bytes() == b"\2" * 10_000


def test_descriptors_of_a_client_are_closed(mounted: Mounted) -> None:
    path = socket_of(mounted)
    wait_idle(mounted)
    before = descriptors(mounted)
    with greeted(path) as connection:
        receive, send = os.pipe()
        socket.send_fds(connection, [packet(1, request="stat", name="config.json")], [send] * 100)
        os.close(send)
        assert "content" in answer(connection)[1]
        assert select.select([receive], [], [], LIMIT_S)[0] and os.read(receive, 1) == b"", "the other end is closed"
        os.close(receive)
    wait_idle(mounted, before)


def test_many_clients(mounted: Mounted) -> None:
    """Up to the limit; the next is told so, and the commands do without the socket; then there is room again."""
    path = socket_of(mounted)
    wait_idle(mounted)
    before = descriptors(mounted)
    limit = min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
    with contextlib.ExitStack() as stack:
        for _ in range(limit):
            stack.enter_context(greeted(path))
        for _ in range(50):
            connection = stack.enter_context(raw(path))
            assert (
                answer(connection)[1]["message"] == f"{limit} clients are connected to this daemon, which is the limit"
            )
        with pytest.raises(ControlError, match="which is the limit"):
            ControlClient(path, "test")
        assert command("stat", mounted.path).returncode == 0
        assert counters(mounted)["clients"] == limit and (mounted.path / "0").read_bytes() == bytes(10_000)
    wait_idle(mounted, before)
    ControlClient(path, "test").close()


def test_clients_that_never_read(mounted: Mounted) -> None:
    """They ask until nothing more can be sent, and take no answer: all others are served as if they were not there."""
    path = socket_of(mounted)
    before = resident_bytes(mounted)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            connection = stack.enter_context(greeted(path))
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for number in range(5000):
                    connection.send(packet(number, request="stat", name="stats.json"))
        with ControlClient(path, "test") as client:
            for _ in range(20):
                assert client.ask("stat", name="stats.json").values["content"]
        assert (mounted.path / "1").read_bytes() == b"\1" * 10_000
        assert resident_bytes(mounted) < before + (16 << 20)
    wait_idle(mounted)


def test_clients_that_are_killed(mounted: Mounted) -> None:
    """In the middle of anything."""
    path = socket_of(mounted)
    wait_idle(mounted)
    before = descriptors(mounted)
    script = """
import sys
from pathlib import Path
from fanstore.client.connection import ControlClient
client = ControlClient(Path(sys.argv[1]), "test")
print("connected", flush=True)
while True:
    client.ask("stat", name="report.json")
"""
    line = [sys.executable, "-c", script, str(path)]
    clients = [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(4)]
    for client in clients:
        assert client.stdout is not None and client.stdout.readline() == b"connected\n"
    for client in clients:
        client.kill()
        client.communicate(timeout=LIMIT_S)
    wait_idle(mounted, before)


def test_clients_at_the_end(mount: Mount, prepared: Path) -> None:
    """Whatever clients do, the daemon ends when it is told to."""
    mounted = mount(prepared)
    path = socket_of(mounted)
    stop = threading.Event()

    def ask() -> None:
        with contextlib.suppress(OSError):
            for seed in range(1000):
                if stop.is_set():
                    return
                assail(path, seed, 10)

    thread = threading.Thread(target=ask)
    with greeted(path) as idle:
        thread.start()
        try:
            time.sleep(0.1)  # not to wait for anything: some of it is to happen meanwhile
            mounted.stop()
        finally:
            stop.set()
            thread.join(LIMIT_S)
        assert idle.recv(10) == b""
