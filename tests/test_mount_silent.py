"""A source that does not answer: the partitions lie on another mount, whose daemon is stopped.

Nothing is faked: the inner mount reads its partitions through the kernel from the outer one, as it would from a file
server that has died. Reads hang as long as they must; everything else goes on, and ending is possible all the time.
"""

import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES
from mounting import LIMIT_S, Mount, Mounted, command, needs_fuse, needs_root, wait_until
from oddities import incompressible

from fanstore.mounttable import find_mount

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset with a prepared dataset in it."""
    directory = tmp_path_factory.mktemp("nested")
    source = directory / "source"
    source.mkdir()
    for number in range(8):
        (source / f"file-{number}").write_bytes(incompressible(3 << 20, number))
    (directory / "outer").mkdir()
    mounting.prepare(source, directory / "outer" / "inner.fan", "--codec", "none", "--partition-size", "6MiB")
    return mounting.prepare(directory / "outer", directory / "outer.fan", "--codec", "none")


@pytest.fixture
def outer(mount: Mount, nested: Path) -> Mounted:
    return mount(nested)


@pytest.fixture
def mounted_in_turn(outer: Mounted) -> Mounted:
    """The same, of which a dataset is mounted in turn: that mount cannot register in it."""
    outer.announced.append("cannot be created in .*: without --output or --scratch")
    return outer


def start_reader(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["cat", path], stdout=subprocess.DEVNULL)


def hangs_in_kernel(pid: int) -> bool:
    """Whether a thread of the process waits for a FUSE file system, or for a page that one is to fill."""
    waits = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/wchan")]
    # A daemon that waits for requests is in fuse_dev_do_read, if it is not in epoll.
    return any(
        name in wait and "fuse_dev" not in wait for name in ("fuse", "request_wait_answer", "folio") for wait in waits
    )


def wait_reading(mounted: Mounted, reader: subprocess.Popen[bytes]) -> None:
    """Until the reader hangs in the kernel, waiting for the mount, and its daemon for the one that is stopped."""
    wait_until(lambda: hangs_in_kernel(reader.pid), "hanging read", mounted.evidence)
    wait_until(lambda: hangs_in_kernel(mounted.process.pid), "hanging read of the daemon", mounted.evidence)


def test_slow_read_does_not_hold_up_the_rest(mount: Mount, mounted_in_turn: Mounted) -> None:
    outer = mounted_in_turn
    inner = mount(outer.path / "inner.fan")
    assert (inner.path / "file-0").read_bytes() == incompressible(3 << 20, 0)
    outer.signal(signal.SIGSTOP)
    readers = [start_reader(inner.path / f"file-{number}") for number in range(4, 8)]
    try:
        for reader in readers:
            wait_reading(inner, reader)
        for _ in range(20):  # if one of them waited for the outer mount, it would do so for ever
            inner.statistics()  # opened, made and read by the daemon each time
            assert sorted(os.listdir(inner.path)) == [f"file-{number}" for number in range(8)]
        assert all(reader.poll() is None for reader in readers)
        outer.signal(signal.SIGCONT)
        assert [reader.wait(LIMIT_S) for reader in readers] == [0] * 4
    finally:
        outer.signal(signal.SIGCONT)
        for reader in readers:
            reader.kill()
            reader.wait(LIMIT_S)


@pytest.mark.parametrize("held", [False, True], ids=["reader killed", "reader waits"])
def test_ends_although_reads_hang(mount: Mount, mounted_in_turn: Mounted, held: bool) -> None:
    outer = mounted_in_turn
    inner = mount(outer.path / "inner.fan", announced=["reads that hang are left behind"])
    outer.signal(signal.SIGSTOP)
    reader = start_reader(inner.path / "file-5")
    try:
        wait_reading(inner, reader)
        if held:
            inner.announced.append("is busy: cat .* it was detached")
        else:
            reader.kill()
            reader.wait(LIMIT_S)
        inner.signal(signal.SIGTERM)
        assert inner.wait_end() == 0
        inner.check_clean()
        if held:
            assert reader.wait(LIMIT_S) == 1, "it was told that its file is gone"
    finally:
        outer.signal(signal.SIGCONT)
        reader.kill()
        reader.wait(LIMIT_S)


def test_a_partition_that_cannot_be_looked_at(outer: Mounted, tmp_path: Path) -> None:
    """Its file system does not answer: the start ends with evidence, not the first read with a hang."""
    dataset = tmp_path / "linked.fan"
    shutil.copytree(outer.path / "inner.fan", dataset)
    dataset.chmod(0o755)
    (dataset / "part-00001.tar").unlink()
    (dataset / "part-00001.tar").symlink_to(outer.path / "not looked up before")
    log = tmp_path / "log"
    outer.signal(signal.SIGSTOP)
    try:
        result = command("mount", dataset, tmp_path / "m", "--start-timeout", "2", "--log", log)
    finally:
        outer.signal(signal.SIGCONT)
    sentence = f"opening {dataset} took longer than 2.0 s; where it hangs is in {log}"
    assert (result.returncode, result.stderr) == (1, f"fanstore-mount: error: {sentence}\n")
    assert 'prepared.py", line' in log.read_text(), "the stacks of the threads that hang"
    assert not (tmp_path / "m").exists()


def test_outputs_are_kept_although_reads_hang(mount: Mount, mounted_in_turn: Mounted, tmp_path: Path) -> None:
    """``--output`` is gone, and there is no orderly end: what was written stays on the disk, and is saved later."""
    outer = mounted_in_turn
    local, output = tmp_path / "ssd", tmp_path / "output"
    options = ["--local", str(local), "--capacity", "1KiB", "--output", str(output)]
    inner = mount(outer.path / "inner.fan", *options)
    inner.announced += [
        "do not fit on local disks",
        "cannot .* to .*: .*; it is tried again",
        "reads that hang are left behind",
        r"2 outputs could not be saved to \S+ .*closed.*open|2 outputs could not be saved to \S+ .*open.*closed",
        "is busy: .* it was detached",
    ]
    output.rename(tmp_path / "away")
    outer.signal(signal.SIGSTOP)
    reader = start_reader(inner.path / "file-5")
    try:
        wait_reading(inner, reader)
        (inner.path / "closed").write_bytes(b"was closed")
        descriptor = os.open(inner.path / "open", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"is open")
        inner.signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM: ending" in inner.log_text(), "the first signal", inner.evidence)
        inner.signal(signal.SIGTERM)
        assert inner.wait_end() == 1, inner.evidence()
        with pytest.raises(OSError):  # there is nobody to tell
            os.close(descriptor)
        inner.check_clean()
    finally:
        outer.signal(signal.SIGCONT)
        reader.kill()
        reader.wait(LIMIT_S)
    (tmp_path / "away").rename(output)
    recovered = command("mount", "--recover", "--local", local)
    assert recovered.returncode == 0, recovered.stderr
    assert (output / "closed").read_bytes() == b"was closed"
    assert b"is open" in {path.read_bytes() for path in output.glob("open*")}
    assert not list(local.iterdir()) and sorted(path.name for path in output.iterdir())[0] == "closed"


def test_signal_while_staging_hangs(mount: Mount, outer: Mounted, tmp_path: Path) -> None:
    """Manifest and index can be read, the partitions cannot."""
    prepared, local = tmp_path / "d.fan", tmp_path / "ssd"
    prepared.mkdir()
    local.mkdir()
    for path in (outer.path / "inner.fan").glob("[!.]*"):
        if path.suffix == ".tar":
            (prepared / path.name).symlink_to(path)
            path.stat()  # the kernel remembers it, as it does of a file server
        else:
            (prepared / path.name).write_bytes(path.read_bytes())
    outer.signal(signal.SIGSTOP)
    try:
        inner = mount(prepared, local=local, wait=False)
        inner.announced += ["staging hangs in a read", "stopped by SIGTERM before the mount was up"]
        wait_until(
            lambda: bool(list(local.glob("fanstore-*/lock"))) and hangs_in_kernel(inner.process.pid),
            "hanging read",
            inner.evidence,
        )
        inner.signal(signal.SIGTERM)
        assert inner.wait_end() == 143
        inner.check_clean()
    finally:
        outer.signal(signal.SIGCONT)


@needs_root
def test_commands_on_a_silent_mount(mount: Mount, nested: Path) -> None:
    """They say that it does not answer instead of hanging with it; --lazy takes it away."""
    mounted = mount(nested)
    mounted.signal(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:  # at once: each waits for an answer for some seconds
        commands = (("umount", mounted.path), ("stat", mounted.path), ("mount", nested, mounted.path))
        umount, stat, again = pool.map(lambda arguments: command(*arguments), commands)
    assert umount.returncode == 1
    assert umount.stderr == (
        f"fanstore-umount: error: the daemon of {mounted.path} does not answer; "
        "--lazy takes the mount away all the same\n"
    )
    assert stat.returncode == 1
    assert stat.stderr.startswith(f"fanstore-stat: error: the mount {mounted.path} does not answer")
    assert again.returncode == 1
    assert f"a FanStore mount of {nested} at {mounted.path} does not answer" in again.stderr
    lazy = command("umount", "--lazy", mounted.path)
    assert lazy.returncode == 0
    assert find_mount(mounted.path) is None
    mounted.signal(signal.SIGCONT)
    assert mounted.wait_end() == 0
    mounted.check_clean()
