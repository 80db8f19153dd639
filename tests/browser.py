"""A real browser for tests: headless Chromium, driven over the pipe of its own DevTools protocol.

Owns the process and its profile directory; both are gone at the end. No library and no open port: messages are JSON
texts that end in a NUL byte, on descriptors 3 and 4 of the browser (--remote-debugging-pipe). Used by the tests of the
report. Every wait has a limit.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Seconds for one answer of the browser. It takes milliseconds, and its start a second or two.
LIMIT_S = 60.0

#: Set to 1 where the browser must be there: then its absence is a failure and not a reason to skip.
REQUIRED_VARIABLE = "FANSTORE_TEST_BROWSER"

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)


def find_browser() -> str | None:
    """The program; None if there is none, and that is allowed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and os.environ.get(REQUIRED_VARIABLE) == "1":
        pytest.fail(f"{REQUIRED_VARIABLE}=1, but there is no chromium: apt-get install chromium")
    return found


class Browser:
    """One Chromium with one tab.

    Attributes:
        events: what the tab has told without being asked, since the last ``open``: (method, parameters).
    """

    def __init__(self, program: str, profile: Path) -> None:
        self._log = profile.with_suffix(".log")
        user = f"--user-data-dir={profile}"
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        to_read, to_write = _moved_up(to_read), _moved_up(to_write)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                # The shell puts the pipes where the browser expects them.
                ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', program, *_FLAGS, user, "about:blank"],
                pass_fds=(to_read, to_write),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(to_read)
        os.close(to_write)
        self._pending = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[tuple[str, dict[str, Any]]] = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                pytest.fail(f"the browser gave no answer to {what}:\n{self._log.read_text(errors='replace')[-4000:]}")
            self._pending += data
        text, _, self._pending = self._pending.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message and message.get("sessionId") == self._session:
            self.events.append((message["method"], message["params"]))
        return message

    def open(self, page: Path, width: int, height: int = 900, *, dark: bool = False, media: str = "") -> None:
        """Load a page at a width of the window, in light or dark; until it is complete."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._receive("loading")
        self.evaluate("document.fonts.ready.then(() => 0)")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """What the console says, and exceptions, since ``open``."""
        methods = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(parameters) for method, parameters in self.events if method in methods]

    def requests(self) -> list[str]:
        """Addresses that the page asked for, since ``open``; the page itself is the first."""
        return [
            parameters["request"]["url"] for method, parameters in self.events if method == "Network.requestWillBeSent"
        ]

    def screenshot(self, target: Path) -> None:
        """The whole page as a PNG."""
        box = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        target.write_bytes(base64.b64decode(answer["data"]))

    def print(self, target: Path) -> int:
        """The page as a PDF; how many sheets it has."""
        data = base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
        target.write_bytes(data)
        return data.count(b"/Type /Page\n") + data.count(b"/Type /Page ") + data.count(b"/Type/Page/")

    def close(self) -> None:
        """End it with all its processes."""
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(5)  # it ends when the pipe does
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: nobody else is in it
            self._process.wait(LIMIT_S)


def _moved_up(descriptor: int) -> int:
    """The same under a number that is none of those that the browser expects."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 20)
    os.close(descriptor)
    return moved


@contextmanager
def browser_in(directory: Path) -> Iterator[Browser]:
    """A browser with its profile in a new directory below this one; skips the test if there is none."""
    program = find_browser()
    if program is None:
        pytest.skip("no chromium on this machine (apt-get install chromium); FANSTORE_TEST_BROWSER=1 makes it an error")
    profile = directory / "profile"
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
        shutil.rmtree(profile, ignore_errors=True)
