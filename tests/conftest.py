"""Hygiene of the whole suite, and the fixtures that every layer of tests uses.

- A WARNING or worse from a logger under ``fanstore`` fails the test that did not announce it (``expect_warnings``).
- A session fails that leaves a mount, a process or a job directory behind (leftovers.py).
- A hang is ended by pytest-timeout, with the stacks of all threads; the limits are in pyproject.toml.
- What was skipped is named at the end, with the reasons.
"""

import collections
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import leftovers
import pytest
from fast import is_fast

#: Seconds that a daemon may take to end after the last test: an unmount is asynchronous for whoever asked for it.
GRACE_S = 20.0

MakePrepared = Callable[..., Path]

#: For ``ENGINES`` of a test module.
BOTH_ENGINES = ("native", "python")


class LogGuard(logging.Handler):
    """Collects warnings of one test from setup to teardown, and compares them with what the test announced.

    Attributes:
        seen: records of level WARNING or above, in order of arrival, from any thread.
        announced: patterns of the messages that must come, each at least once.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.seen: list[logging.LogRecord] = []
        self.announced: list[re.Pattern[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)

    def check_unannounced(self) -> None:
        """Fail the test if something was logged that no announced pattern matches."""
        surprises = [
            f"{record.levelname} {record.name}: {record.getMessage()}"
            for record in self.seen
            if not any(pattern.search(record.getMessage()) for pattern in self.announced)
        ]
        if surprises:
            pytest.fail(
                "logged, but not announced with the fixture expect_warnings:\n" + "\n".join(surprises), pytrace=False
            )

    def check_missing(self) -> None:
        """Fail the test if an announced message never came."""
        messages = [record.getMessage() for record in self.seen]
        missing = [p.pattern for p in self.announced if not any(p.search(message) for message in messages)]
        if missing:
            pytest.fail("announced with expect_warnings, but never logged: " + ", ".join(missing), pytrace=False)


class Running:
    """The tests that have begun and not ended, for the report of a run that was interrupted (scripts/test has a limit).

    Attributes:
        since_s: by name, when it has begun; of all workers.
    """

    def __init__(self) -> None:
        self.since_s: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.since_s[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.since_s.pop(nodeid, None)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for nodeid, since_s in self.since_s.items():
            terminalreporter.write_line(f"INTERRUPTED {nodeid} after {time.monotonic() - since_s:.0f} s", red=True)


class Skipped:
    """Names the tests that were skipped, by reason; pytest itself names only lines of source."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reports = terminalreporter.stats.get("skipped", [])
        names: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for report in reports:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            names[reason.removeprefix("Skipped: ")][report.nodeid.partition("[")[0]] += 1
        if not reports:
            terminalreporter.write_line("no test was skipped")
        for reason, counts in names.items():
            terminalreporter.write_line(f"{counts.total()} skipped, {reason}:", yellow=True)
            for name, count in counts.items():
                terminalreporter.write_line(f"    {name}" + (f" ({count})" if count > 1 else ""))


_GUARD = pytest.StashKey[LogGuard]()
_START_S = pytest.StashKey[float]()


@pytest.fixture(scope="module")
def engine() -> str:
    """The engine of all mounts and jobs of a module; one with ``ENGINES = BOTH_ENGINES`` runs with each."""
    return "native"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    engines = getattr(metafunc.module, "ENGINES", ())
    if engines and "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", engines, scope="module")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only the tests of tests/fast.py, less than two minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[item for item in items if not is_fast(item.nodeid)])
        items[:] = [item for item in items if is_fast(item.nodeid)]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_START_S] = time.time()
    config.pluginmanager.register(Running())
    config.pluginmanager.register(Skipped())
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        # Workers must not meet in the directories that programs (mpirun) make in TMPDIR under names of their own.
        own = Path(tempfile.gettempdir()) / worker
        own.mkdir(exist_ok=True)
        own.chmod(0o1777)
        os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    # A mark of its own for each session, unless scripts/test has given one that it checks itself afterwards.
    os.environ.setdefault(leftovers.MARK_VARIABLE, uuid.uuid4().hex)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    guard = LogGuard()
    item.stash[_GUARD] = guard
    logging.getLogger("fanstore").addHandler(guard)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield  # a failure of the test itself goes up from here and hides nothing
    item.stash[_GUARD].check_unannounced()
    item.stash[_GUARD].check_missing()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    guard = item.stash[_GUARD]
    seen_in_call = len(guard.seen)
    try:
        yield
    finally:
        logging.getLogger("fanstore").removeHandler(guard)
    del guard.seen[:seen_in_call]  # judged after the call already
    guard.check_unannounced()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Look for what was left behind; give daemons that are just ending a moment."""
    if hasattr(session.config, "workerinput"):
        return  # one of several, whose daemons may live: whoever has started the workers looks when all have ended
    # Hooks of a session get no fixtures; this attribute is what tmp_path_factory itself returns.
    base: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    deadline = time.monotonic() + GRACE_S
    while found := _left_behind(session.config, base):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)  # polling with a limit: there is nothing to wait on for somebody else's process
    if found:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("")
            for line in found:
                reporter.write_line(f"left behind by the tests: {line}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind(config: pytest.Config, base: Path) -> list[str]:
    temporary = Path(tempfile.gettempdir())
    places = [temporary, *(path for path in temporary.glob("gw*") if path.is_dir())]
    return [
        *leftovers.mounts_below(base),
        *leftovers.processes_of(os.environ[leftovers.MARK_VARIABLE], base),
        *(line for place in places for line in leftovers.job_directories(place, config.stash[_START_S])),
    ]


@pytest.fixture(scope="session", autouse=True)
def _own_state_directory(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Logs of background mounts go to the session's directory, not to the developer's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def expect_warnings(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Announce log messages: ``expect_warnings(r"partition 3 .* checksum", ...)``; each pattern must be logged.

    Patterns are searched in messages of level WARNING and above of loggers under ``fanstore``. May be called at any
    time before the test ends.
    """
    guard: LogGuard = request.node.stash[_GUARD]

    def announce(*patterns: str) -> None:
        guard.announced.extend(re.compile(pattern) for pattern in patterns)

    return announce


@pytest.fixture
def make_prepared(tmp_path: Path) -> MakePrepared:
    """``make_prepared(src, codec="lz4", partition_size="1MiB", force=True)`` runs fanstore-prep; the way to its result.

    ``src`` is a path or a list of paths; ``out`` names the result (default: a new name in tmp_path); every other
    keyword is an option of the command: ``True`` a flag, a list a repeated option, anything else its value.
    """
    made = 0

    def make(src: Path | str | Sequence[Path | str], *, out: Path | None = None, **options: object) -> Path:
        nonlocal made
        made += 1
        target = out if out is not None else tmp_path / f"prepared-{made}.fan"
        sources = [src] if isinstance(src, Path | str) else list(src)
        command = [fanstore_command("prep"), *map(str, sources), str(target), *_flags(options)]
        result = subprocess.run(command, capture_output=True, timeout=100, errors="surrogateescape")
        if result.returncode != 0:
            pytest.fail(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return target

    return make


def fanstore_command(name: str) -> str:
    """The installed ``fanstore-<name>`` that belongs to the Python that runs the tests."""
    path = Path(sys.executable).parent / f"fanstore-{name}"
    assert path.exists(), f"{path} is missing: run scripts/setup"
    return str(path)


def _flags(options: dict[str, object]) -> list[str]:
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list | tuple):
            flags.extend(part for item in value for part in (flag, str(item)))
        elif value is not False and value is not None:
            flags.extend((flag, str(value)))
    return flags
