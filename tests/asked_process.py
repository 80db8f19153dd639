"""A process of another environment that answers: one line of JSON for each question. Used by tests of frameworks."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Ask: TypeAlias = Callable[..., Any]
END_S = 20.0


@contextmanager
def asked_process(python: str, script: Path, environment: Mapping[str, str], directory: Path) -> Iterator[Ask]:
    """ask(case, **arguments) is what the script did; a framework that is missing there skips the test."""
    said = directory / "stderr"
    with (
        said.open("wb") as stderr,
        subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def ask(case: str, **arguments: Any) -> Any:
            requests.write(json.dumps([case, arguments]) + "\n")
            requests.flush()
            line = answers.readline()
            assert line, f"{case} failed:\n{said.read_text()}"
            reply = json.loads(line)
            if "missing" in reply:
                pytest.skip(f"no {reply['missing']} in the environment of FANSTORE_TEST_FRAMEWORKS")
            assert "failed" not in reply, reply["failed"]
            return reply["answer"]

        try:
            yield ask
            requests.close()
            assert process.wait(END_S) == 0
        finally:
            process.kill()
