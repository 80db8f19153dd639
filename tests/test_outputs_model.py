"""Random sequences of file operations end alike on a mount and on a plain directory, and what was saved is the same.

The rules, and what differs on purpose, are in output_machine.py.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import mounting
import pytest
from conftest import BOTH_ENGINES
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from mounting import Mount, Mounted, needs_fuse, wait_until
from output_machine import FileMachine, churn, new_entries

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

#: A few thousand operations: some 20 s per mount on two slow cores.
BOUNDS = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.reuse, Phase.generate, Phase.shrink),  # without the explanations, which trace every line
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("model") / "source"
    (source / "data/sub").mkdir(parents=True)
    (source / "data/empty").mkdir()
    (source / "file").write_bytes(b"of the dataset\n")
    (source / "data/file").write_bytes(b"x" * 10_000)
    (source / "data/sub/file").write_bytes(b"")
    (source / "data/link").symlink_to("file")
    (source / "data/way").symlink_to("sub")
    for number, path in enumerate(sorted(source.rglob("*"), reverse=True)):
        os.utime(path, ns=(10**18 + number,) * 2, follow_symlinks=False)
    return source


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    return mounting.prepare(source, source.parent / "model.fan")


@pytest.fixture
def plain(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "plain", symlinks=True))


@pytest.fixture
def dataset(plain: Path) -> frozenset[str]:
    return frozenset(FileMachine.walk(plain))


class SavedMachine(FileMachine):
    """The random user of a mount with ``--output``, who looks there as well."""

    def __init__(self, plain: Path, mounted: Mounted, dataset: frozenset[str], output: Path) -> None:
        super().__init__(plain, mounted.path, dataset)
        self._mounted, self._output = mounted, output

    def finish(self) -> None:
        def is_saved() -> bool:
            return bool(self._mounted.statistics()["outputs"]["pending"] == 0)

        wait_until(is_saved, "saving all outputs", self.evidence, limit_s=10)
        expected = new_entries(self.mount, self.dataset, in_the_end=False)
        assert new_entries(self._output, self.dataset, in_the_end=False) == expected

    def evidence(self) -> str:
        names = "\n".join(sorted(self.walk(self.mount)))
        there = "\n".join(sorted(self.walk(self._output)))
        numbers = self._mounted.statistics()["outputs"]
        return f"{numbers}\n--- mount\n{names}\n--- output\n{there}\n{self._mounted.evidence()}"


def run(make: Callable[[], FileMachine]) -> None:
    # It is annotated with a class, and calls whatever it is given.
    run_state_machine_as_test(make, settings=BOUNDS)  # type: ignore[arg-type]


def test_scratch(mount: Mount, prepared: Path, plain: Path, dataset: frozenset[str], tmp_path: Path) -> None:
    mounted = mount(prepared, "--scratch", local=tmp_path / "local")
    run(lambda: FileMachine(plain, mounted.path, dataset))
    assert mounted.statistics()["outputs"]["files"] == 0


def test_output(mount: Mount, prepared: Path, plain: Path, dataset: frozenset[str], tmp_path: Path) -> None:
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=tmp_path / "local")
    run(lambda: SavedMachine(plain, mounted, dataset, output))


@pytest.mark.parametrize("seed", range(4))
def test_end(mount: Mount, prepared: Path, plain: Path, dataset: frozenset[str], tmp_path: Path, seed: int) -> None:
    """The mount ends amid all this; what was there then stands in ``--output``."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=tmp_path / "local")
    machine = FileMachine(plain, mounted.path, dataset)
    churn(machine, Random(seed), 600)
    machine.close_all()
    machine.compare()
    expected = new_entries(mounted.path, dataset, in_the_end=True)
    mounted.stop()
    assert expected
    assert new_entries(output, dataset, in_the_end=True) == expected
    assert not list(output.glob(".fanstore*"))
