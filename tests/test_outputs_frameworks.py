"""Outputs of real frameworks (PyTorch, TensorFlow, Keras, TensorBoard, numpy) in scripts that know nothing of FanStore.

They are large, so they come from another environment: FANSTORE_TEST_FRAMEWORKS=/path/to/venv/bin/python, with torch,
tensorboard and tensorflow-cpu in it, as environments.py makes it for scripts/test. What they do is in
frameworks_writer.py.
"""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import BOTH_ENGINES, fanstore_command
from jobs import StartJob, needs_jobs
from mounting import needs_fuse, prepare

pytest_plugins = ["mounting", "jobs"]

PYTHON = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")
WRITER = Path(__file__).parent / "frameworks_writer.py"
LIMIT_S = 150

pytestmark = [
    needs_fuse,
    pytest.mark.skipif(not PYTHON, reason="frameworks are installed by scripts/test --all"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("frameworks")
    (directory / "source").mkdir()
    (directory / "source" / "sample").write_bytes(b"data")
    return prepare(directory / "source", directory / "prepared.fan")


def run_step(prepared: Path, directory: Path, step: str, name: str, engine: str) -> Path:
    """One script in a mount of its own; where its outputs stand afterwards."""
    output = directory / "output"
    command = [fanstore_command("mount"), str(prepared), str(directory / "m"), "--engine", engine]
    command += ["--local", str(directory / "ssd"), "--output", str(output), "--", PYTHON, str(WRITER), step, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{step} done" in done.stdout
    assert not (directory / "ssd").exists() or not list((directory / "ssd").iterdir())
    return output / name


@pytest.mark.parametrize("engine", BOTH_ENGINES)
def test_torch_checkpoints(prepared: Path, tmp_path: Path, engine: str) -> None:
    """Saved by write-to-temporary-and-rename, and loaded by a later job from the same --output."""
    saved = run_step(prepared, tmp_path, "torch_save", "checkpoints", engine)
    assert sorted(path.name for path in saved.iterdir()) == ["final.pt", "last.pt"]
    run_step(prepared, tmp_path, "torch_load", "checkpoints", engine)


def test_numpy_memmap(prepared: Path, tmp_path: Path, engine: str) -> None:
    saved = run_step(prepared, tmp_path, "numpy_memmap", "maps", engine)
    assert (saved / "features").stat().st_size == 1000 * 256 * 4


def test_keras_checkpoints(prepared: Path, tmp_path: Path, engine: str) -> None:
    saved = run_step(prepared, tmp_path, "keras_checkpoints", "keras", engine)
    names = {path.name for path in saved.iterdir()}
    assert {"epoch1.weights.h5", "epoch2.weights.h5", "tf", "whole.keras"} <= names


@needs_jobs
def test_growing_event_file_on_another_node(prepared: Path, start_job: StartJob, tmp_path: Path) -> None:
    """Rank 0 writes a TensorBoard event file that stays open; rank 1 reads each step."""
    output = tmp_path / "output"
    command: list[str | Path] = [PYTHON, WRITER, "tensorboard", "logs"]
    running = start_job(prepared, 2, "--output", output, local=True, command=command, wait=False)
    assert running.wait_end(LIMIT_S) == 0, running.evidence()
    assert len(list((output / "logs").glob("events*"))) == 1
