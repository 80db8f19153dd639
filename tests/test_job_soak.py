"""The soak of benchmarks/soak.py for a few seconds: no failed read, no wrong byte, memory flat."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import needs_jobs

pytestmark = [needs_jobs, pytest.mark.timeout(100)]

SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"


def test_short_soak(tmp_path: Path) -> None:
    line = [sys.executable, SOAK, "--seconds", "15", "--files", "100", "--work-dir", tmp_path, "--results", tmp_path]
    done = subprocess.run([*map(str, line), "--name", "soak"], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(gzip.decompress((tmp_path / "soak.json.gz").read_bytes()))
    assert [event["what"] for event in result["events"]] == ["killed", "stopped", "continued"]
    assert result["failures"] == [] and min(result["reads"]) > 20
    assert {path.name for path in tmp_path.iterdir()} == {"soak.json.gz", "soak.md"}, "and nothing is left"
