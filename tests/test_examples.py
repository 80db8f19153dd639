"""The training scripts of examples/ read the same samples from a mount as from a directory, and learn the same.

What needs a framework runs only with FANSTORE_TEST_FRAMEWORKS=/path/to/venv/bin/python, an environment with torch,
tensorflow-cpu, webdataset and h5py, as environments.py makes it for scripts/test. example_runs.py runs the scripts.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import example_runs
import leftovers
import pytest
from example_runs import EPOCHS, EXAMPLES, HDF5, KERAS, NPY, SHARDS, TORCH, Example, RunError, Workbench, counted
from jobs import needs_jobs
from mounting import needs_fuse, wait_until

PYTHON = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")

needs_frameworks = pytest.mark.skipif(not PYTHON, reason="frameworks are installed by scripts/test --all")


def ended(bench: Workbench) -> Iterator[Workbench]:
    try:
        yield bench
    finally:
        bench.end()
        assert leftovers.mounts_below(bench.work) == []


@pytest.fixture
def arrays(tmp_path: Path) -> Iterator[Workbench]:
    """Data for the example that needs only numpy."""
    bench = Workbench(tmp_path / "bench", sys.executable)
    bench.make("--parts", "npy")
    bench.prepare("--codec", "none")
    yield from ended(bench)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    bench = Workbench(tmp_path_factory.mktemp("examples"), PYTHON)
    bench.make("--images", "400", "--rows", "8000")
    bench.prepare("--partitions", "8", "--codec", "none")
    yield from ended(bench)


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Workbench]:
    """Only images, so that each of two nodes has a part of them."""
    bench = Workbench(tmp_path / "bench", PYTHON)
    bench.make("--images", "400", "--parts", "images")
    bench.prepare("--partitions", "8", "--codec", "none")
    yield from ended(bench)


def assert_same(bench: Workbench, example: Example) -> None:
    plain, mounted = bench.run_plain(example), bench.run_mounted(example)
    assert mounted.losses == plain.losses
    assert len(plain.losses) == 3 and plain.loss < plain.losses[1], "it has learned something"
    assert mounted.samples() == plain.samples()
    assert mounted.same_as(plain), "the contents of the samples differ"
    (statistics,) = mounted.statistics
    assert statistics["engine"]["name"] == "native"
    assert statistics["sources"]["local"]["bytes"] > 0, "read from the mount"
    assert example_runs.has_checkpoint(bench, example)


# --- without frameworks ---


def test_examples_know_nothing_of_us() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 7
    for script in scripts:
        assert "fanstore" not in script.read_text().lower(), script


def test_data_is_repeatable(tmp_path: Path) -> None:
    digests = []
    for number in range(2):
        bench = Workbench(tmp_path / str(number), sys.executable)
        bench.make("--images", "40", "--rows", "100", "--parts", "images", "shards", "npy")
        files = sorted(path for path in bench.plain.rglob("*") if path.is_file())
        assert len(files) == 40 + 4 + 2
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert digests[0] == digests[1]


@needs_fuse
def test_npy_from_directory_and_mount(arrays: Workbench) -> None:
    assert_same(arrays, NPY)


@needs_fuse
def test_npy_resumes_from_what_an_earlier_job_saved(arrays: Workbench) -> None:
    plain = arrays.run_plain(NPY)
    arrays.run_mounted(NPY, "--epochs", "2")
    resumed = arrays.run_mounted(NPY, "--resume")
    assert list(resumed.losses) == [3]
    assert resumed.same_as(plain)


@needs_fuse
def test_difference_is_noticed(arrays: Workbench, capsys: pytest.CaptureFixture[str]) -> None:
    """One byte of the plain data is changed after it was prepared."""
    with open(arrays.plain / "arrays" / "features.npy", "r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    assert not example_runs.side_by_side(arrays, [NPY], 1)
    assert "| DIFFERENT |" in capsys.readouterr().out


def test_failing_script_is_an_error_with_its_output(tmp_path: Path) -> None:
    bench = Workbench(tmp_path, sys.executable)
    bench.plain.mkdir()
    with pytest.raises(RunError, match=r"ended with 1:(.|\n)*No such file or directory: 'arrays/features\.npy'"):
        bench.run_plain(NPY)
    bench.end()


def interrupt(log: Path, number: signal.Signals, mounts: int, *arguments: str) -> None:
    """End the program while so many mounts are there, and look for what it leaves."""
    directory = Path(tempfile.mkdtemp(prefix="ex"))  # a short name, for the sockets below it
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            [sys.executable, example_runs.__file__, *arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(directory)},
        ) as program,
    ):
        try:
            wait_until(lambda: len(leftovers.mounts_below(directory)) == mounts, f"{mounts} mounts", log.read_text, 100)
        finally:
            program.send_signal(number)
            code = program.wait(60)
    assert code == 128 + number, log.read_text()
    assert "left behind" not in log.read_text()
    assert leftovers.mounts_below(directory) == []
    assert leftovers.processes_of(None, directory) == []
    directory.rmdir()  # empty


@needs_fuse
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_program_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    interrupt(tmp_path / "log", number, 1, "--only", "npy_mmap", "--repeat", "1000")


# --- with frameworks ---


@needs_fuse
@needs_frameworks
@pytest.mark.parametrize("example", [TORCH, KERAS, SHARDS, NPY, HDF5], ids=lambda example: example.name)
def test_same_from_directory_and_mount(everything: Workbench, example: Example) -> None:
    assert_same(everything, example)


@needs_fuse
@needs_frameworks
def test_tensorboard_logs_are_saved(everything: Workbench) -> None:
    everything.run_mounted(KERAS)
    assert list((everything.output / "run" / KERAS.name / "logs" / "train").glob("events*"))


@needs_frameworks
def test_partitions_are_shards(everything: Workbench) -> None:
    """WebDataset finds every image for training in the partitions, which nothing has mounted."""
    assert example_runs.partitions_as_shards(everything)
    assert len(everything.run_plain(SHARDS, "--epochs", "1", data=everything.prepared).samples()) == 320


@needs_jobs
@needs_frameworks
def test_two_nodes_read_what_placement_predicts(images: Workbench) -> None:
    plain = images.run_plain(TORCH, "--epochs", "1", size=2)
    mounted = example_runs.run_to_count(images)
    assert mounted.same_as(plain)
    training = [{name for name in mounted.samples(rank) if name.startswith("train/")} for rank in range(2)]
    assert [len(names) for names in training] == [160, 160] and not training[0] & training[1], "half of the data each"
    for rank in range(2):
        predicted = images.predicted(mounted, TORCH, rank)
        assert counted(mounted, rank) == predicted
        assert predicted.local > 0 and predicted.remote > 0, "a prediction that says something"


@needs_jobs
@needs_frameworks
def test_killed_and_resumed_on_two_nodes(images: Workbench) -> None:
    plain = images.run_plain(TORCH, *EPOCHS, size=2)
    images.output.mkdir()
    resumed = example_runs.kill_and_resume(images)
    assert min(resumed.losses) > 1, "not from the beginning"
    assert resumed.same_as(plain)


@needs_jobs
@needs_frameworks
def test_interrupted_job_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("--only", "torch_images", "--images", "40", "--repeat", "1", "--python", PYTHON)
    interrupt(tmp_path / "log", signal.SIGINT, 2, *arguments)
