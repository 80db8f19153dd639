"""The process between Slurm and Open MPI's daemon. That a cancelled job needs it is shown by test_slurm.py."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounting import wait_until

AGENT = [sys.executable, "-m", "fanstore.transport.agent"]


@pytest.mark.parametrize(("last", "code"), [("exit 3", 3), ("kill -KILL $$", 137)])
def test_keeps_sigterm_from_the_command(tmp_path: Path, last: str, code: int) -> None:
    """And gives its exit code. The command itself gets what is sent to it: nothing is ignored by inheritance."""
    ready, done = tmp_path / "ready", tmp_path / "done"
    script = f"sleep 60 & touch {ready}; while [ ! -e {done} ]; do sleep 0.02; done; kill $!; wait $! ; {last}"
    with subprocess.Popen([*AGENT, "sh", "-c", script]) as agent:
        wait_until(ready.exists, "start of the command", lambda: "")
        agent.send_signal(signal.SIGTERM)
        done.touch()
        assert agent.wait(30) == code
