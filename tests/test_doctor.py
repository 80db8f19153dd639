"""fanstore-doctor: what it says of a node that is well, and of one that is not; that it ends, and leaves nothing.

What only an ordinary user can see is in test_mount_user.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leftovers as left
import pytest
from commands import BIN, LIMIT_S
from conftest import fanstore_command
from mounting import Mount, command, needs_fuse, needs_root, prepare, small_file_system, wait_until
from terminals import on_terminal

from fanstore.dataset import memory_limit as memorylimit
from fanstore.doctor import disks, interception, leftovers, limits, mpi, testmount, versions
from fanstore.doctor.finding import Check, Finding, Status, ok, perform
from fanstore.doctor.programs import GRACE_S, Programs
from fanstore.mounttable import find_mount, mount_holding

pytest_plugins = ["mounting"]

Findings = dict[str, tuple[str, str, str | None]]


def doctor(*arguments: str | Path, **environment: str) -> tuple[int, Findings]:
    """The exit code, and by name: status, what was found, what to do. Of several of a name, the last."""
    result = subprocess.run(
        [fanstore_command("doctor"), "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        env=os.environ | environment,
    )
    assert result.stderr == ""
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["works"] == (result.returncode == 0)
    assert document["version"] == 1
    found = {check["name"]: (check["status"], check["found"], check["fix"]) for check in document["checks"]}
    return result.returncode, found


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("doctor")
    (directory / "source").mkdir()
    (directory / "source" / "file").write_bytes(b"content")
    return prepare(directory / "source", directory / "d.fan")


@needs_fuse
def test_a_node_that_is_well(tmp_path: Path, prepared: Path) -> None:
    """Everything is looked at, and nothing is left behind."""
    pytest.importorskip("mpi4py")
    local, temporary = tmp_path / "ssd", tmp_path / "temporary"
    local.mkdir()
    temporary.mkdir()
    code, found = doctor("--local", local, "--shared", prepared, "--mpi", TMPDIR=str(temporary))
    assert code == 0, found
    errors = {name: finding for name, finding in found.items() if finding[0] == "error"}
    assert not errors
    must_be_well = ["fuse.device", "fuse.fusermount3", "python.packages", "engine.native", "mpi.library", "mpi.start"]
    must_be_well += ["mpi.ulfm", "local", "local.space", "shared", "shared.dataset", "leftover.directory"]
    must_be_well += ["mount", "mount.engine", "preload"]
    assert {name: found[name][0] for name in must_be_well} == dict.fromkeys(must_be_well, "ok")
    assert found["mpi.start"][1].endswith("mpirun -n 2 works; thread level funneled (funneled is enough)")
    assert found["shared.dataset"][1] == "a prepared dataset: 1 files, 7 B, 1 partitions"
    assert found["kernel.fuse"][1].startswith("FUSE protocol 7.")
    assert list(local.iterdir()) == []
    assert [path for path in temporary.iterdir() if path.name.startswith("fanstore")] == []
    assert left.mounts_below(tmp_path) == []


@needs_fuse
def test_on_a_terminal(tmp_path: Path) -> None:
    """In colours, and every complaint with what to do."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [fanstore_command("doctor"), "--shared", str(tmp_path / "nothing")]
    with on_terminal(command, environment) as terminal:
        shown = terminal.read_all()
    assert "\x1b[31mWRONG\x1b[0m" in shown and "\x1b[32mok   \x1b[0m" in shown
    lines = re.sub(r"\x1b\[\d+m", "", shown).splitlines()
    number = lines.index(f"  WRONG  {tmp_path}/nothing cannot be read (No such file or directory)")
    assert lines[number + 1] == "         → check the path and its rights with ls -ld"
    assert "  ok     /dev/fuse can be opened" in lines
    assert lines[-1].startswith("1 thing that FanStore needs does not work")


# --- what can be wrong ---


@needs_fuse
def test_broken_package(tmp_path: Path) -> None:
    """No traceback: what is broken is what it is there to say. In a pipe, without colours."""
    for name in ("pyfuse3", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} today')\n")
    result = subprocess.run(
        [fanstore_command("doctor")],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert (result.returncode, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    number = next(number for number, line in enumerate(lines) if "ImportError: no pyfuse3 today" in line)
    assert lines[number].startswith("  WRONG  pyfuse3 ")
    assert lines[number + 1] == f"         → run: {sys.executable} -m pip install --force-reinstall pyfuse3"
    assert any("ImportError: no numpy today" in line for line in lines)
    assert "  ok     /dev/fuse can be opened" in lines, "the rest is still looked at"
    mount = lines.index("Test mount")
    assert lines[mount + 1].startswith("  WRONG  ")
    assert "\x1b" not in result.stdout


def test_namesake(tmp_path: Path) -> None:
    """Whoever ran ``pip install fanstore`` has another program, over or under this one."""
    assert "python.fanstore" not in by_name(versions.check_packages(versions.look_at_packages(Programs())))
    foreign = tmp_path / "fanstore-0.0.1.dist-info"
    foreign.mkdir()
    (foreign / "METADATA").write_text("Metadata-Version: 2.1\nName: fanstore\nVersion: 0.0.1\n")
    _, found = doctor(PYTHONPATH=str(tmp_path))
    status, text, fix = found["python.fanstore"]
    assert status == "warning" and "fanstore 0.0.1 is installed, too: another program" in text
    assert fix is not None and "pip uninstall fanstore, and install fanstore-fs again" in fix


@needs_fuse
def test_without_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error for those who need it; one node alone does not."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no MPI today')\n")
    code, found = doctor("--mpi", PYTHONPATH=str(tmp_path))
    assert code == 1
    status, text, fix = found["mpi.library"]
    assert status == "error" and "no MPI today" in text
    assert fix is not None and "pip install 'fanstore-fs[mpi]'" in fix
    assert found["mpi.start"][0] == "skipped"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert by_name(mpi.MpiChecks(Programs(), needed=False).check_library())["mpi.library"].status is Status.WARNING


def launcher(directory: Path, text: str) -> str:
    """A PATH on which this mpirun is the first."""
    program = directory / "mpirun"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def checked_start(monkeypatch: pytest.MonkeyPatch, path: str) -> dict[str, Finding]:
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("PATH", path)
    checks = mpi.MpiChecks(Programs(), needed=True)
    found = by_name(checks.check_library()) | by_name(checks.check_launcher())
    return found | by_name(checks.check_start())


def test_launcher_of_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts two processes that know nothing of each other, as a foreign mpirun does."""
    script = 'case $1 in --*) exit 0;; esac; export PMI_SIZE=2 PMI_RANK=0; shift 2; exec "$@"'
    found = checked_start(monkeypatch, launcher(tmp_path, script))
    assert found["mpi.launcher"].status is Status.NOTE
    start = found["mpi.start"]
    assert start.status is Status.ERROR
    assert "the MPI launcher started 2 processes, but the MPI library of this environment sees 1" in start.found
    assert start.fix == f"use the mpirun that belongs to mpi4py's library, such as {BIN / 'mpirun'}"


def test_launcher_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked_start(monkeypatch, launcher(tmp_path, "echo 'no slots, says the error' >&2; exit 3"))
    assert found["mpi.start"].status is Status.ERROR
    assert found["mpi.start"].found == f"{tmp_path}/mpirun -n 2 fails: no slots, says the error"


def test_launcher_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, with what it has started."""
    monkeypatch.setattr(mpi, "START_LIMIT_S", 0.5)
    path = launcher(tmp_path, f"case $1 in --version) echo mpirun; exit 0;; esac; tail -f {tmp_path}/mpirun; exit 1")
    monkeypatch.setattr("fanstore.doctor.programs.GRACE_S", 0.5)
    found = checked_start(monkeypatch, path)
    assert found["mpi.start"].status is Status.ERROR
    assert found["mpi.start"].found == f"{tmp_path}/mpirun -n 2 did not end within 0.5 s"
    assert not left.processes_of(None, tmp_path)


def test_local_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = by_name(disks.check_local(file))
    assert found["local"].status is Status.ERROR and found["local"].found == f"{file} is not a directory"
    found = by_name(disks.check_local(tmp_path / "new"))
    assert found["local"].status is Status.OK  # the parent, which is said before
    found = by_name(disks.check_local(tmp_path / "new" / "one"))
    assert (
        found["local"].status is Status.ERROR
        and found["local"].found == f"neither {tmp_path}/new/one nor {tmp_path}/new exists"
    )
    found = by_name(disks.check_local(Path("/proc/sys")))
    assert found["local"].status is Status.ERROR and found["local"].fix


@needs_root
def test_local_in_memory_and_without_room(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "memory", "16m") as local:
        found = by_name(disks.check_local(local))
        assert list(local.iterdir()) == []
    assert found["local.type"].status is Status.WARNING and "is on tmpfs" in found["local.type"].found
    assert found["local.space"].status is Status.WARNING
    assert found["local"].status is Status.OK


def test_shared(tmp_path: Path, prepared: Path) -> None:
    checks = disks.SharedChecks(tmp_path)
    assert by_name(checks.check())["shared.dataset"].status is Status.NOTE
    copy = tmp_path / "copy.fan"
    shutil.copytree(prepared, copy)
    checks = disks.SharedChecks(copy)
    assert by_name(checks.check())["shared.dataset"].status is Status.OK
    assert checks.partitions == 1 and checks.index_bytes > 0
    with open(copy / "part-00000.tar", "ab") as file:
        file.truncate(100)
    found = by_name(disks.SharedChecks(copy).check())["shared.dataset"]
    assert found.status is Status.ERROR and " has 100 bytes instead of " in found.found
    (copy / "part-00000.tar").unlink()
    found = by_name(disks.SharedChecks(copy).check())["shared.dataset"]
    assert found.status is Status.ERROR and "part-00000.tar' is missing" in found.found
    (copy / "index.fsx").write_bytes(b"nonsense")
    found = by_name(disks.SharedChecks(copy).check())["shared.dataset"]
    assert found.status is Status.ERROR and "index.fsx" in found.found


def test_limits() -> None:
    assert by_name(limits.check_files(10))["limit.files"].status is Status.OK
    few = by_name(limits.check_files(10_000_000))["limit.files"]
    assert few.status is Status.WARNING and "for 10,000,000 partitions" in few.found and "80000000" in few.fix
    assert by_name(limits.check_memory(0))["limit.memory"].found.endswith("free") or memorylimit.group_limit()
    much = by_name(limits.check_memory(1 << 50))["limit.memory"]
    assert much.status is Status.WARNING and "--cache" in much.fix


def test_limit_of_the_control_group(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    (tmp_path / "job/step").mkdir(parents=True)
    own.write_text("0::/job/step\n")
    assert memorylimit.group_limit(own, tmp_path) is None
    (tmp_path / "job/step/memory.max").write_text("max\n")
    (tmp_path / "job/memory.max").write_text("5000\n")
    assert memorylimit.group_limit(own, tmp_path) == 5000, "that of the job counts for the step"
    (tmp_path / "memory/slurm/step").mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (tmp_path / "memory/slurm/step/memory.limit_in_bytes").write_text("700\n")
    own.write_text("5:cpu:/x\n4:memory:/slurm/step\n")
    assert memorylimit.group_limit(own, tmp_path) == 700


def test_what_is_left_of_the_control_group(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"

    def group(path: str, stat: str, **files: int) -> None:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / path / "memory.stat").write_text(stat)
        for name, value in files.items():
            (tmp_path / path / f"memory.{name}").write_text(f"{value}\n")

    own.write_text("0::/job/step\n")
    group("job", "anon 500\nactive_file 100\ninactive_file 200\nslab_reclaimable 50\n", max=1000, current=900)
    group("job/step", "anon 10\nactive_file 0\ninactive_file 0\n", max=900, current=100)
    assert memorylimit.group_memory(own, tmp_path) == (1000, 550), "the one that is fuller; without pages of files"
    group("job/step", "anon 10\nactive_file 0\ninactive_file 0\n", max=900, current=600)
    found = memorylimit.group_memory(own, tmp_path)
    assert found == (900, 600) and found is not None and found.room_bytes == 300
    own.write_text("5:cpu:/x\n4:memory:/slurm/step\n")
    assert memorylimit.group_memory(own, tmp_path) is None
    stat = "active_file 1\ninactive_file 2\ntotal_active_file 30\ntotal_inactive_file 40\n"
    group("memory/slurm/step", stat, limit_in_bytes=700, usage_in_bytes=300)
    assert memorylimit.group_memory(own, tmp_path) == (700, 230)
    (tmp_path / "memory/slurm/step/memory.usage_in_bytes").unlink()
    assert memorylimit.group_memory(own, tmp_path) is None, "what cannot be read bounds nothing"


def test_one_core() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is only one")
    os.sched_setaffinity(0, {min(before)})
    try:
        found = by_name(limits.check_cores())["limit.cores"]
    finally:
        os.sched_setaffinity(0, before)
    assert found.status is Status.WARNING and "--bind-to none" in found.fix


# --- containers, as far as there can be one here ---


def contained(*prefix: str) -> tuple[int, Findings]:
    """The doctor behind a program that takes rights away."""
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"{prefix[0]} is not there")
    result = subprocess.run(
        [*prefix, fanstore_command("doctor"), "--json"], capture_output=True, text=True, timeout=2 * LIMIT_S
    )
    assert result.stderr == ""
    checks = json.loads(result.stdout)["checks"]
    return result.returncode, {check["name"]: (check["status"], check["found"], check["fix"]) for check in checks}


@needs_fuse
@needs_root
def test_root_of_a_user_namespace_can_mount() -> None:
    """What a rootless container is."""
    code, found = contained("unshare", "--user", "--map-root-user", "--mount")
    assert code == 0, found
    assert found["mount"][0] == "ok" and found["mount.engine"][0] == "ok"


@needs_fuse
@needs_root
def test_root_without_the_capability() -> None:
    """What a container without --cap-add is."""
    code, found = contained("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")
    assert code == 1
    status, text, fix = found["fuse.fusermount3"]
    assert status == "warning" and text.startswith("root may not mount here (no CAP_SYS_ADMIN)")
    assert fix is not None and "--device /dev/fuse --cap-add SYS_ADMIN" in fix
    assert found["mount"][0] == "error" and "Operation not permitted" in found["mount"][1]
    assert found["preload"][0] == "ok", "which needs no mount"


def test_programs_that_the_library_does_not_see(tmp_path: Path) -> None:
    assert interception.obstacle(Path(sys.executable)) == ""
    assert interception.obstacle(Path(__file__)) == "", "a script"
    (tmp_path / "own").write_bytes(Path(shutil.which("cat") or "").read_bytes())
    (tmp_path / "own").chmod(0o4755)
    assert interception.obstacle(tmp_path / "own") == "set-user-ID"
    source = (tmp_path / "static").with_suffix(".c")
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["cc", "-static", "-nostdlib", "-Wl,-emain", "-o", tmp_path / "static", source], check=True)
    assert interception.obstacle(tmp_path / "static") == "static"


# --- what killed jobs leave ---


@needs_fuse
def test_leftovers_are_named_and_left_alone(prepared: Path, mount: Mount, tmp_path: Path) -> None:
    """A dead mount, and an output that was being written; then the commands that are named do help."""
    local, output = tmp_path / "ssd", tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=local)
    file = os.open(mounted.path / "checkpoint", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"precious")
    mounted.process.kill()
    mounted.process.wait(LIMIT_S)
    with pytest.raises(OSError, match="not connected"):
        os.close(file)
    code, found = doctor("--local", local)
    assert code == 0, "warnings do not fail"
    dead = [finding for finding in leftovers.check_mounts() if str(mounted.path) in finding.found]
    assert [(finding.status, finding.fix) for finding in dead] == [
        (Status.WARNING, f"run: fanstore-umount {mounted.path}")
    ]
    status, text, fix = found["leftover.outputs"]
    assert status == "warning" and text.startswith(f"a killed job left outputs for {output} in {local}/fanstore-")
    assert fix == f"run on this node: fanstore-mount --recover --local {local}"
    assert find_mount(mounted.path) is not None and len(list(local.iterdir())) == 1, "it only looks"
    assert found["mount"][0] == "ok"
    assert command("umount", mounted.path).returncode == 0
    assert command("mount", "--recover", "--local", local).returncode == 0
    assert (output / "checkpoint.unfinished").read_bytes() == b"precious"
    assert not mounted.path.exists(), "which removes the mount point, too"


@needs_fuse
def test_silent_mount(prepared: Path, mount: Mount) -> None:
    mounted = mount(prepared)
    mounted.signal(signal.SIGSTOP)
    state = Path(f"/proc/{mounted.process.pid}/stat")
    wait_until(lambda: ") T " in state.read_text(), "that it has stopped", state.read_text)
    try:
        found = [finding for finding in leftovers.check_mounts() if str(mounted.path) in finding.found]
    finally:
        mounted.signal(signal.SIGCONT)
    assert [finding.status for finding in found] == [Status.WARNING]
    assert found[0].found == f"the mount on {mounted.path} does not answer"
    assert found[0].fix.endswith(f"fanstore-umount --lazy {mounted.path}")


# --- ending ---


def test_a_check_that_hangs_is_a_finding() -> None:
    forever = threading.Event()

    def hangs() -> Iterator[Finding]:
        yield ok("first", "well")
        forever.wait()

    def fails() -> Iterator[Finding]:
        raise KeyError("what")

    checks = [Check("A", "slow", 0.1, hangs), Check("B", "broken", 5.0, fails)]
    results = list(perform(checks, forever.set, 5.0))
    forever.set()
    assert [finding.status for finding in results[0].findings] == [Status.OK, Status.ERROR]
    assert results[0].findings[1].found == "no answer within 0.1 s"
    assert results[1].findings[0].found == "this could not be checked (KeyError: 'what')"


@needs_fuse
def test_test_mount_that_hangs_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that reads never ends: the daemon is told to, and unmounts."""
    monkeypatch.setattr(testmount, "COMMAND_LIMIT_S", 4.0)
    monkeypatch.setattr(testmount, "_READER", "import time; time.sleep(600)")
    found = by_name(testmount.check_mount(Programs(), tmp_path))
    assert found["mount"].status is Status.ERROR
    assert found["mount"].found.startswith("a test mount did not end within 4 s")
    assert list(tmp_path.iterdir()) == []
    assert left.mounts_below(tmp_path) == []


@needs_fuse
def test_interrupted_while_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the program that reads hangs: unmounted and removed before it comes through."""
    monkeypatch.setattr(testmount, "_READER", "import time; time.sleep(600)")
    programs = Programs()

    def interrupt() -> None:
        wait_until(lambda: bool(left.mounts_below(tmp_path)), "the test mount", lambda: "there was none")
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    check = Check("Test mount", "mount", LIMIT_S, lambda: testmount.check_mount(programs, tmp_path))
    with pytest.raises(KeyboardInterrupt):
        list(perform([check], programs.stop, LIMIT_S))
    watcher.join(LIMIT_S)
    assert list(tmp_path.iterdir()) == []
    assert left.mounts_below(tmp_path) == []
    assert not left.processes_of(None, tmp_path)


@needs_fuse
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """While a program runs: it is ended, and so is the doctor."""
    pytest.importorskip("mpi4py")
    started = tmp_path / "started"
    text = f"case $1 in --version) echo mpirun; exit 0;; esac; touch {started}; exec tail -f {tmp_path}/mpirun"
    environment = os.environ | {"PATH": launcher(tmp_path, text)}
    process = subprocess.Popen(
        [fanstore_command("doctor")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        wait_until(started.exists, "start of mpirun", lambda: "it was not reached")
        process.send_signal(number)
        # Not the time that a program gets which does not listen: this one is told, and ends at once.
        _, error = process.communicate(timeout=2 * GRACE_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, error) == (130, "fanstore-doctor: interrupted\n")
    assert not left.processes_of(None, tmp_path)


def test_mount_holding(tmp_path: Path) -> None:
    root, there = mount_holding(Path("/")), mount_holding(tmp_path)
    assert root is not None and root.point == Path("/")
    assert there is not None and (there.point == tmp_path or there.point in tmp_path.parents)
    processes = mount_holding(Path("/proc/self"))
    assert processes is not None and processes.kind == "proc"


def test_wrong_usage() -> None:
    result = subprocess.run([fanstore_command("doctor"), "--nonsense"], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 2 and "--nonsense" in result.stderr
