"""Servers for tests of datasets over HTTP and in S3: nginx of Debian, moto's S3 server of PyPI, and broken ones.

Owns their processes and files; all listen on a free port of 127.0.0.1 and are gone when their test is. nginx writes
one line per request, from which tests count requests and bytes; in front of moto it is a proxy, and counts as well.
Use it with ``pytest_plugins = ["object_servers"]``. (PYTEST_DONT_REWRITE: test modules import it as well, and before
pytest could.)
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import environments
import pytest
from obstore.store import S3Store

LIMIT_S = 30.0
BUCKET = "data"

needs_nginx = pytest.mark.skipif(
    shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None, reason="needs nginx (tests/packages.py)"
)

_CONFIGURATION = """
daemon off; master_process off; pid {work}/pid; error_log {work}/errors;
{user}
events {{ worker_connections 256; }}
http {{
  client_body_temp_path {work}/t1; proxy_temp_path {work}/t2; fastcgi_temp_path {work}/t3;
  uwsgi_temp_path {work}/t4; scgi_temp_path {work}/t5;
  log_format one '$request_method $uri $status $body_bytes_sent';
  access_log {work}/access one;
  client_max_body_size 0;
  server {{
    listen 127.0.0.1:{port};
    {location}
  }}
}}
"""


@dataclass
class Request:
    """A line of the log."""

    method: str
    path: str
    status: int
    bytes: int


class Nginx:
    """A running nginx; ``root``: the directory that it serves, or ``upstream``, the address before which it is."""

    def __init__(self, work: Path, root: Path, upstream: str = "") -> None:
        work.mkdir()
        self.root = root
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._work = work
        faults = f"if (-f {work}/forbidden) {{ return 403; }} if (-f {work}/slow) {{ set $limit_rate 300k; }}"
        location = f"location / {{ root {root}; {faults} }}"
        if upstream:
            location = f"location / {{ proxy_pass {upstream}; proxy_set_header Host $http_host; }}"
        user = "user root;" if os.geteuid() == 0 else ""
        (work / "conf").write_text(_CONFIGURATION.format(work=work, port=self.port, user=user, location=location))
        self.process = start(["nginx", "-c", str(work / "conf")], self.port, work / "output")

    def forbid(self) -> None:
        """From now on the answer to everything is 403."""
        (self._work / "forbidden").touch()

    def slow_down(self) -> None:
        """From now on each answer has 300 KiB a second."""
        (self._work / "slow").touch()

    def hold(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def requests(self) -> list[Request]:
        lines = (self._work / "access").read_text().splitlines()
        return [Request(method, path, int(status), int(sent)) for method, path, status, sent in map(str.split, lines)]

    def sent(self) -> Counter[str]:
        """Bytes that were given out of each file, by its name, without those asked for to see whether it is there."""
        counter: Counter[str] = Counter()
        for request in self.requests():
            if request.method == "GET" and request.bytes > 1:
                counter[request.path.rpartition("/")[2]] += request.bytes
        return counter


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(command: list[str], port: int, output: Path) -> subprocess.Popen[bytes]:
    """Start a server, and wait until it listens."""
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with open(output, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return process
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"{command} does not listen:\n{output.read_text(errors='replace')}")
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(LIMIT_S)


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of whoever runs the tests does not lead here."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def nginx(tmp_path: Path, no_proxy: None) -> Iterator[Nginx]:
    """Serves what is in ``tmp_path``."""
    server = Nginx(tmp_path / "nginx", tmp_path)
    yield server
    end(server.process)


@dataclass
class S3:
    """moto's server behind nginx. ``is_public``: who has no credentials may read what is written from now on."""

    nginx: Nginx
    is_public: bool = False

    def write(self, path: str, data: bytes) -> None:
        """One object, past FanStore."""
        # With the usual type, moto waits for ever for the fields of a form.
        headers = {"Content-Type": "application/octet-stream"} | (
            {"x-amz-acl": "public-read"} if self.is_public else {}
        )
        request = urllib.request.Request(f"{self.nginx.url}/{BUCKET}/{path}", data, headers, method="PUT")
        urllib.request.urlopen(request, timeout=LIMIT_S).close()

    def contents(self) -> dict[str, bytes]:
        """All objects."""
        store = S3Store(BUCKET, client_options={"allow_http": True})
        return {name: bytes(store.get(name).bytes()) for name in self.names()}

    def names(self) -> set[str]:
        with urllib.request.urlopen(f"{self.nginx.url}/{BUCKET}?list-type=2", timeout=LIMIT_S) as answer:
            parts = answer.read().decode().split("<Key>")[1:]
        return {part.partition("</Key>")[0] for part in parts}


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of moto's server."""
    try:
        python = environments.ensure(environments.MOTO)
    except environments.MakeError as error:
        pytest.skip(f"moto's server cannot be installed: {error}")
    port = free_port()
    command = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = start(command, port, tmp_path_factory.mktemp("moto") / "output")
    yield f"http://127.0.0.1:{port}"
    end(process)


@pytest.fixture
def s3(moto: str, tmp_path: Path, no_proxy: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket, which the variables of this process lead to."""
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset", method="POST"), timeout=LIMIT_S).close()
    front = Nginx(tmp_path / "nginx-s3", tmp_path, upstream=moto)
    environment = {
        "AWS_ENDPOINT_URL": front.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{front.url}/{BUCKET}", method="PUT"), timeout=LIMIT_S).close()
    yield S3(front)
    end(front.process)


class Faulty(BaseHTTPRequestHandler):
    """Answers as the server's attribute ``faults`` says: that many times 503, and whole objects whatever was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, FaultyServer)
        server.asked += 1
        if server.faults:
            server.faults -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = server.content
        first, _, last = self.headers.get("Range", f"bytes=0-{len(content)}").partition("=")[2].partition("-")
        piece = content[int(first) : int(last) + 1] if server.knows_ranges else content
        self.send_response(206 if server.knows_ranges else 200)
        if server.knows_ranges:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(piece) - 1}/{len(content)}")
        self.send_header("Last-Modified", "Wed, 18 Nov 2026 12:00:00 GMT")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        if server.breaks and len(piece) > 1:
            server.breaks -= 1
            self.wfile.write(piece[: len(piece) // 2])
            self.close_connection = True
            return
        self.wfile.write(piece)

    def log_message(self, format: str, *arguments: object) -> None:
        """The test counts."""


class FaultyServer(ThreadingHTTPServer):
    """``faults``: how many requests still fail; ``breaks``: how many answers end early; ``asked``: requests so far."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Faulty)
        self.content = os.urandom(100_000)
        self.faults = 0
        self.breaks = 0
        self.asked = 0
        self.knows_ranges = True
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def faulty(no_proxy: None) -> Iterator[FaultyServer]:
    server = FaultyServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join(LIMIT_S)
    server.server_close()


@pytest.fixture
def silent(no_proxy: None) -> Iterator[str]:
    """The address of a server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def plain_http_server(tmp_path: Path, no_proxy: None) -> Iterator[str]:
    """Python's own server, which ignores byte ranges; serves ``tmp_path``."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "-d", str(tmp_path)]
    process = start(command, port, tmp_path / "http-server-output")
    yield f"http://127.0.0.1:{port}"
    end(process)
