"""Runs the commands of FanStore as a user does. Used by the tests of the command line.

``run_fanstore`` starts the installed program, with a time limit; ``run_inside`` calls its entry point in this process,
which saves most of a second for each of the many tests that look at the result only.
"""

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent
#: Seconds after which a command that should be quick is taken for hung.
LIMIT_S = 60.0

Argument = str | Path


def run_fanstore(
    name: str,
    *arguments: Argument,
    prefix: Sequence[Argument] = (),
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run ``fanstore-<name>``; ``prefix`` goes before it (mpirun)."""
    command = [*map(str, prefix), str(BIN / f"fanstore-{name}"), *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=limit_s,
        env=None if env is None else {**os.environ, **env},
    )


def run_inside(name: str, *arguments: Argument) -> subprocess.CompletedProcess[str]:
    """Run ``fanstore-<name>`` in this process: the same arguments, output and exit code."""
    main = importlib.import_module(f"fanstore.cli.{name}").main
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*map(str, arguments)])
    except SystemExit as end:  # argparse ends the program itself
        code = end.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess([name, *map(str, arguments)], code, out.getvalue(), err.getvalue())


def run_inside_as(user: int, name: str, *arguments: Argument) -> subprocess.CompletedProcess[str]:
    """``run_inside`` in a child that is an ordinary user. Needs root, and no right to enter the virtual environment."""
    importlib.import_module(f"fanstore.cli.{name}")
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_end)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            result = run_inside(name, *arguments)
            with open(write_end, "w") as pipe:
                json.dump([result.returncode, result.stdout, result.stderr], pipe)
            code = 0
        finally:
            os._exit(code)  # not through pytest, which belongs to the parent
    os.close(write_end)
    with open(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    code, out, err = json.loads(text)
    return subprocess.CompletedProcess([name, *map(str, arguments)], code, out, err)


def assert_one_error(result: subprocess.CompletedProcess[str], name: str, code: int = 1) -> str:
    """The command ended with ``code`` and one sentence, not a traceback; returns the sentence."""
    assert result.returncode == code, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith(f"fanstore-{name}: error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return errors[0].removeprefix(f"fanstore-{name}: error: ")


def mpirun(ranks: int) -> list[str]:
    """The launcher of this environment, for several ranks on one machine of few cores."""
    command = [str(BIN / "mpirun"), "--oversubscribe", "-n", str(ranks)]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    return command
