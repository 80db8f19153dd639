"""The end of a mount with outputs: what is pending is saved first, or stays where the message says."""

import os
import re
import signal
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES
from mounting import Mount, Mounted, command, needs_fuse, wait_until

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("end")
    (directory / "source").mkdir()
    (directory / "source/file").write_text("content")
    return mounting.prepare(directory / "source", directory / "d.fan")


def wait_saved(mounted: Mounted) -> None:
    wait_until(lambda: mounted.statistics()["outputs"]["pending"] == 0, "saving", mounted.evidence)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_with_pending_outputs(mount: Mount, prepared: Path, tmp_path: Path, number: int) -> None:
    """The end of a job saves what is pending first."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=tmp_path / "local")
    for name in range(100):
        (mounted.path / f"{name}").write_bytes(b"%d" % name * 1000)
    assert mounted.statistics()["outputs"]["pending"] > 0, "the last ones cannot be there yet"
    mounted.signal(number)
    assert mounted.wait_end() == 0
    mounted.check_clean()
    assert sorted(os.listdir(output), key=int) == [str(name) for name in range(100)]
    assert all((output / f"{name}").read_bytes() == b"%d" % name * 1000 for name in range(100))


def test_interrupt_while_outputs_cannot_be_saved(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """The first Ctrl-C is answered, the second one leaves them, and the message says where each is."""
    output, local = tmp_path / "output", tmp_path / "local"
    mounted = mount(
        prepared, "--output", str(output), "--local", str(local), announced=["cannot .* to .*; it is tried again"]
    )
    (mounted.path / "held").write_bytes(b"x" * 2000)
    wait_saved(mounted)
    output.rename(tmp_path / "away")
    (mounted.path / "first").write_bytes(b"x" * 3000)
    wait_until(lambda: "it is tried again" in mounted.log_text(), "the trouble", mounted.evidence)
    mounted.signal(signal.SIGINT)  # the end
    wait_until(lambda: "SIGINT: ending" in mounted.log_text(), "the end", mounted.evidence)
    mounted.signal(signal.SIGURG)  # not a reason to hurry
    answer = r"1 outputs are not yet saved to \S+.*; press Ctrl-C again to leave them in (\S+)"
    mounted.announced += [answer, r"1 outputs could not be saved to .*: first \(2.93 KiB, in outputs/[0-9a-f]+\)$"]
    mounted.signal(signal.SIGINT)
    wait_until(lambda: re.search(answer, mounted.log_text()) is not None, "an answer", mounted.evidence)
    assert mounted.process.poll() is None
    mounted.signal(signal.SIGINT)
    assert mounted.wait_end() == 1
    found = re.search(answer, mounted.output())
    assert found is not None, "said where the user looks"
    assert list(local.iterdir()) == [Path(found[1])]
    mounted.check_clean()
    (tmp_path / "away").rename(output)
    assert command("mount", "--recover", "--local", local).returncode == 0
    assert (output / "first").read_bytes() == b"x" * 3000
