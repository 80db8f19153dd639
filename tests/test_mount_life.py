"""How a mount begins and ends: COMMAND, signals, unmounting in every way, crash and repair; nothing stays behind."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mounting
import pytest
from conftest import fanstore_command
from mounting import LIMIT_S, Mount, Mounted, command, needs_fuse, wait_until

from fanstore.fuse.command import SAME_SIGNAL_S
from fanstore.mounttable import find_mount

pytest_plugins = ["mounting"]
pytestmark = needs_fuse


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("life")
    source = directory / "source"
    (source / "train").mkdir(parents=True)
    for number in range(20):
        (source / f"train/{number}").write_bytes(os.urandom(10_000))
    return mounting.prepare(source, directory / "d.fan", "--partitions", "3")


def nothing_left(point: Path, local: Path | None = None) -> None:
    assert find_mount(point) is None
    assert not point.exists()
    assert local is None or list(local.iterdir()) == []


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended; init may not have looked after an orphan yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- COMMAND ---


def test_command_sees_the_mount(prepared: Path, tmp_path: Path) -> None:
    point, local = tmp_path / "m", tmp_path / "ssd"
    local.mkdir()
    script = 'ls "$FANSTORE_MOUNT/train" | wc -l; echo $FANSTORE_RANK $FANSTORE_SIZE; ls $0 | wc -l; cat'
    result = subprocess.run(
        [
            fanstore_command("mount"),
            prepared,
            point,
            "--local",
            local,
            "--stage-first",
            "--",
            "sh",
            "-c",
            script,
            local,
        ],
        input="from standard input\n",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.stdout.split("\n") == ["20", "0 1", "1", "from standard input", ""]
    assert result.returncode == 0
    before, after = result.stderr.splitlines()
    assert before.startswith(f"fanstore-mount: {prepared} is mounted on {point} (")
    assert re.search(r"; 1 node, \d of \d partitions on local disks ", before)
    assert after.startswith("fanstore-mount: read ")
    nothing_left(point, local)


def test_what_is_said_of_a_command(prepared: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    options: list[str | Path] = [
        "--output",
        tmp_path / "out",
        "--report",
        tmp_path / "r.html",
        "--order",
        "sequential:list=sorted",
    ]
    script = 'cat "$FANSTORE_MOUNT"/train/*; echo x > "$FANSTORE_MOUNT/a"'
    result = command("mount", prepared, tmp_path / "m", *options, "--", "sh", "-c", script)
    assert len(result.stdout) > 20_000
    before, after = result.stderr.splitlines()
    assert before.endswith("all 3 partitions are read where they are); order: sequential:list=sorted")
    assert after == (
        "fanstore-mount: read 20 files, 195 KiB: 100 % from the shared file system; "
        f"1 output saved to {tmp_path}/out; report: {tmp_path}/r.html"
    )


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_code_of_the_command(prepared: Path, tmp_path: Path, script: str, code: int) -> None:
    result = command("mount", prepared, tmp_path / "m", "--quiet", "--", "sh", "-c", script)
    assert result.returncode == code
    assert result.stderr == ""
    nothing_left(tmp_path / "m")


def test_command_that_cannot_be_started(prepared: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("not a program\n")
    absent = command("mount", prepared, tmp_path / "m", "--", "no-such-program-anywhere")
    assert (absent.returncode, absent.stderr) == (
        127,
        "fanstore-mount: error: command 'no-such-program-anywhere' was not found\n",
    )
    assert command("mount", prepared, tmp_path / "m", "--", tmp_path / "absent").returncode == 127
    forbidden = command("mount", prepared, tmp_path / "m", "--quiet", "--", text)
    assert forbidden.returncode == 126
    assert forbidden.stderr.startswith(f"fanstore-mount: error: command '{text}' cannot be started: ")
    nothing_left(tmp_path / "m")


def start_command(mount: Mount, prepared: Path, script: str) -> Mounted:
    """Run a shell script that says 'ready' when its traps are set."""
    mounted = mount(prepared, "--", "sh", "-c", script)
    wait_until(lambda: "ready\n" in mounted.output(), "start of the command", mounted.evidence)
    return mounted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_passed_on(mount: Mount, prepared: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f'trap "echo got {name}; ls $FANSTORE_MOUNT; exit 5" {name}; echo ready; while :; do sleep 0.05; done'
    mounted = start_command(mount, prepared, script)
    mounted.signal(number)
    assert mounted.wait_end() == 5
    assert mounted.output() == f"ready\ngot {name}\ntrain\n"
    mounted.check_clean()


def test_warning_of_a_batch_system_is_passed_on_each_time(mount: Mount, prepared: Path) -> None:
    """SIGUSR1 is for the command alone: neither it nor the mount ends of it."""
    script = (
        'n=0; trap "n=\\$((n+1)); echo saved \\$n" USR1; echo ready; while [ $n -lt 2 ]; do sleep 0.05; done; exit 4'
    )
    mounted = start_command(mount, prepared, script)
    mounted.signal(signal.SIGUSR1)
    wait_until(lambda: "saved 1\n" in mounted.output(), "the first warning", mounted.evidence)
    mounted.signal(signal.SIGUSR1)
    assert mounted.wait_end() == 4
    assert mounted.output() == "ready\nsaved 1\nsaved 2\n"
    mounted.check_clean()


def test_command_ended_by_a_signal_passed_on(mount: Mount, prepared: Path) -> None:
    mounted = start_command(mount, prepared, "echo ready; exec sleep 60")
    mounted.signal(signal.SIGTERM)
    assert mounted.wait_end() == 143
    mounted.check_clean()


def test_second_signal_kills(mount: Mount, prepared: Path) -> None:
    mounted = start_command(mount, prepared, 'trap "" TERM; echo ready; while :; do sleep 0.05; done')
    mounted.announced.append("the command got a second signal and is killed")
    mounted.signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM is passed on" in mounted.log_text(), "first signal", mounted.evidence)
    passed_on_s = time.monotonic()
    mounted.signal(signal.SIGTERM)  # at once: a batch system and mpirun both signal, and mean it once
    wait_until(lambda: time.monotonic() > passed_on_s + SAME_SIGNAL_S, "time to pass", mounted.evidence)
    assert mounted.process.poll() is None
    mounted.signal(signal.SIGTERM)
    assert mounted.wait_end() == 137
    mounted.check_clean()


def test_end_without_hurry(mount: Mount, prepared: Path) -> None:
    """SIGURG, which mpirun passes on to all nodes: SIGTERM for the command, which is killed only by another one."""
    mounted = start_command(mount, prepared, 'trap "echo once" TERM; echo ready; while :; do sleep 0.05; done')
    mounted.announced.append("the command got a second signal and is killed")
    mounted.signal(signal.SIGURG)
    wait_until(lambda: "once\n" in mounted.output(), "SIGTERM in the command", mounted.evidence)
    passed_on_s = time.monotonic()
    wait_until(lambda: time.monotonic() > passed_on_s + SAME_SIGNAL_S, "time to pass", mounted.evidence)
    mounted.signal(signal.SIGURG)
    assert mounted.wait_end() == 137
    mounted.check_clean()


def test_end_without_hurry_of_a_mount_without_a_command(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    mounted.signal(signal.SIGURG)
    assert mounted.wait_end() == 0
    mounted.check_clean()


def test_command_that_does_not_listen_is_killed(mount: Mount, prepared: Path) -> None:
    mounted = start_command(mount, prepared, 'trap "" TERM; echo ready; while :; do sleep 0.05; done')
    mounted.announced.append("did not end within 10 s of SIGTERM and is killed")
    start = time.monotonic()
    mounted.signal(signal.SIGTERM)
    assert mounted.wait_end() == 137
    assert time.monotonic() - start >= 10
    mounted.check_clean()


@pytest.mark.skipif(shutil.which("script") is None, reason="needs a terminal, from script(1)")
def test_terminal_interrupts_the_command_once(prepared: Path, tmp_path: Path) -> None:
    """Ctrl-C goes to all processes in the foreground; a second SIGINT from us would break the command's clean-up."""
    program = tmp_path / "program.py"
    program.write_text(
        "import signal, time\ncount = 0\n"
        "def more(*_):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGINT, more)\nprint('ready', flush=True)\n"
        "while not count: time.sleep(0.01)\n"
        "time.sleep(0.5)\nprint('interrupted', count, flush=True)\n"
    )
    # exec: script(1) starts a shell, which would get the Ctrl-C as well and end with a code of its own.
    line = "exec " + shlex.join(
        [fanstore_command("mount"), str(prepared), str(tmp_path / "m"), "--quiet", "--", sys.executable, str(program)]
    )
    with subprocess.Popen(
        ["script", "-q", "-e", "-c", line, "/dev/null"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as terminal:
        try:
            assert terminal.stdin is not None and terminal.stdout is not None
            assert terminal.stdout.readline() == b"ready\r\n"
            terminal.stdin.write(b"\x03")
            terminal.stdin.flush()
            assert terminal.stdout.readline().endswith(b"interrupted 1\r\n")
            assert terminal.wait(LIMIT_S) == 0
        finally:
            terminal.kill()
    nothing_left(tmp_path / "m")


def test_what_the_command_left_running_does_not_keep_the_mount(mount: Mount, prepared: Path) -> None:
    """A grandchild works in the mount when the command has ended: detached, with a note that names it."""
    script = (
        "cd $FANSTORE_MOUNT; sleep 30 & until [ $(cat /proc/$!/comm) = sleep ]; do :; done; echo $! >&2; echo ready"
    )
    mounted = mount(prepared, "--", "sh", "-c", script, wait=False)
    mounted.announced.append(r"is busy: sleep \(process \d+, working directory\); it was detached")
    try:
        assert mounted.wait_end() == 0
        mounted.check_clean()
    finally:
        os.kill(int(mounted.output().split()[0]), signal.SIGKILL)


def test_unmounted_under_the_command(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    script = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; exit 9"
    mounted = start_command(mount, prepared, script)
    mounted.announced.append("was unmounted while the command was running")
    subprocess.run(["fusermount3", "-u", mounted.path], check=True, timeout=LIMIT_S)
    (tmp_path / "go").touch()
    assert mounted.wait_end() == 9
    mounted.check_clean()


# --- ends ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_mount(mount: Mount, prepared: Path, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "ssd").mkdir()
    mounted = mount(prepared, local=tmp_path / "ssd")
    assert len(list((tmp_path / "ssd").glob("fanstore-*/part-*.tar"))) == 3
    (mounted.path / "train/3").read_bytes()
    mounted.signal(number)
    assert mounted.wait_end() == 0
    mounted.check_clean()


@pytest.mark.parametrize("program", [["fusermount3", "-u"], ["umount"]])
def test_unmount_by_hand(mount: Mount, prepared: Path, tmp_path: Path, program: list[str]) -> None:
    if program == ["umount"] and os.geteuid() != 0:
        pytest.skip("umount is for root")
    mounted = mount(prepared, local=tmp_path / "ssd")
    subprocess.run([*program, mounted.path], check=True, timeout=LIMIT_S)
    assert mounted.wait_end() == 0
    mounted.check_clean()
    assert not (tmp_path / "ssd").exists()


def test_busy_mount_is_detached_at_the_end(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    mounted.announced.append(r"is busy: sleep \(process \d+, working directory\); it was detached")
    with subprocess.Popen(["sleep", "60"], cwd=mounted.path / "train") as holder:
        try:
            mounted.signal(signal.SIGTERM)
            assert mounted.wait_end() == 0
            mounted.check_clean()
        finally:
            holder.kill()


def test_existing_mount_point_stays(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    point = tmp_path / "here"
    point.mkdir(mode=0o750)
    mounted = mount(prepared, point=point)
    mounted.stop()
    assert point.is_dir() and point.stat().st_mode & 0o777 == 0o750


def test_odd_paths(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """Commas separate mount options, backslashes escape, and the mount table writes blanks in octal."""
    directory = tmp_path / "a, b\\c é\n\t"
    directory.mkdir()
    alias = directory / "d,x=y \\,.fan"
    alias.symlink_to(prepared)
    mounted = mount(alias, point=directory / "mount, point \\")
    assert len(os.listdir(mounted.path / "train")) == 20
    listed = find_mount(mounted.path)
    assert listed is not None
    assert listed.source == str(alias)
    mounted.process.kill()  # the repair must find it, too
    mounted.wait_end()
    again = mount(alias, point=mounted.path)
    again.stop()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_daemon_does_not_use_its_own_mount(prepared: Path, tmp_path: Path) -> None:
    """Killed while it waits for itself, it could not end, and its mount would hang for ever."""
    point, trace = tmp_path / "m", tmp_path / "trace"
    calls = "trace=openat,open,stat,lstat,newfstatat,statx,statfs,access,readlink,execve"
    line = ["strace", "-f", "-qq", "-e", calls, "-o", str(trace), fanstore_command("mount"), str(prepared), str(point)]
    subprocess.run([*line, "--", "true"], check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    lines = trace.read_text(errors="replace").splitlines()
    inside = {entry.split()[0] for entry in lines if f'"{point}/' in entry}
    programs = {entry.split()[0] for entry in lines if " execve(" in entry}
    daemon = lines[0].split()[0]
    assert inside, "the first answer was waited for"
    assert inside <= programs - {daemon}, "only by programs that it has started"
    nothing_left(point)


def test_native_engine_that_cannot_run(prepared: Path, tmp_path: Path) -> None:
    """Too few descriptors for its threads: an error if it was asked for by name, otherwise a warning and Python."""

    def mount_with(descriptors: int, *options: str) -> subprocess.CompletedProcess[str]:
        line = ["prlimit", f"--nofile={descriptors}", fanstore_command("mount"), str(prepared), str(tmp_path / "m")]
        line += [*options, "--", "grep", "-h", "engine", str(tmp_path / "m/.fanstore/config.json")]
        return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)

    sentence = "the native engine cannot run here: Too many open files"
    # How many the rest of the daemon needs depends on libraries: so few that the engine fails, and not one less. With a
    # few more it runs, but no program can be started beside it, which is told as well.
    for descriptors in range(44, 12, -1):
        asked = mount_with(descriptors, "--engine", "native")
        if sentence in asked.stderr:
            break
        told = re.search(r"cannot be (tried out|started): Too many open files\n$", asked.stderr)
        assert '"native"' in asked.stdout or told is not None
    assert (asked.returncode, asked.stderr) == (1, f"fanstore-mount: error: {sentence}\n")
    chosen = mount_with(descriptors)
    assert chosen.returncode == 0 and '"python"' in chosen.stdout
    assert chosen.stderr.count("WARNING") == 1 and "the python engine answers" in chosen.stderr
    nothing_left(tmp_path / "m")


def test_names_are_filled_in(prepared: Path, tmp_path: Path) -> None:
    host = os.uname().nodename.partition(".")[0]
    (tmp_path / f"{host}-0").mkdir()
    point = f"{tmp_path}/{{host}}-{{rank}}/m"
    script = 'echo "$FANSTORE_MOUNT"; ls "$0"'
    base = tmp_path / "ssd{rank}"
    result = command(
        "mount", prepared, point, "--local", base, "--stage-first", "--", "sh", "-c", script, tmp_path / "ssd0"
    )
    mountpoint, job = result.stdout.splitlines()
    assert mountpoint == f"{tmp_path}/{host}-0/m"
    assert job.startswith(f"fanstore-{os.geteuid()}-")
    assert not (tmp_path / "ssd0").exists(), "made by us, so it goes"


def test_relative_paths(prepared: Path, tmp_path: Path) -> None:
    os.symlink(prepared, tmp_path / "d.fan")
    (tmp_path / "sub").mkdir()
    result = subprocess.run(
        [
            fanstore_command("mount"),
            "../d.fan",
            "../sub/m",
            "--local",
            ".",
            "--stage-first",
            "--background",
            "--log",
            "log",
        ],
        cwd=tmp_path / "sub",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    ended = subprocess.run([fanstore_command("umount"), "m"], cwd=tmp_path / "sub", timeout=LIMIT_S)
    assert ended.returncode == 0
    assert os.listdir(tmp_path / "sub") == ["log"]


def test_background_and_umount(prepared: Path, tmp_path: Path) -> None:
    point, local = tmp_path / "m", tmp_path / "ssd"
    local.mkdir()
    started = command(
        "mount",
        prepared,
        point,
        "--local",
        local,
        "--stage-first",
        "--background",
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    assert started.returncode == 0, started.stderr
    try:
        config = json.loads((point / ".fanstore/config.json").read_bytes())
        log = Path(config["log"])
        assert log.parent == tmp_path / "state" / "fanstore"
        assert log.parent.stat().st_mode & 0o777 == 0o700
        assert started.stdout == (
            f"{prepared} is mounted on {point} (20 files, 195 KiB; 1 node, 3 of 3 partitions on "
            f"local disks (3 copies, 236 KiB)); end it with: fanstore-umount {point}\n"
            f"process {config['pid']}, log {log}\n"
        )
        assert os.getsid(config["pid"]) == config["pid"], "a session of its own"
        assert os.readlink(f"/proc/{config['pid']}/cwd") == "/"
        streams = [os.readlink(f"/proc/{config['pid']}/fd/{fd}") for fd in range(3)]
        assert streams == ["/dev/null", str(log), str(log)]
        assert len(os.listdir(point / "train")) == 20
    finally:
        ended = command("umount", point)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not is_running(config["pid"]), "umount returns when the daemon has ended"
    nothing_left(point, local)
    assert "INFO fanstore.fuse.session: unmounted" in log.read_text()
    assert "WARNING" not in log.read_text()


def test_background_error_is_told(tmp_path: Path) -> None:
    result = command("mount", tmp_path / "absent.fan", tmp_path / "m", "--background", "--log", tmp_path / "log")
    assert result.returncode == 1
    assert result.stderr.startswith("fanstore-mount: error: the prepared dataset")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert "ERROR" in (tmp_path / "log").read_text()
    nothing_left(tmp_path / "m")


# --- crash ---


def test_repair_after_kill(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """SIGKILL leaves a dead mount and local files; the next mount at the same place removes both."""
    point, local = tmp_path / "m", tmp_path / "ssd"
    local.mkdir()
    first = mount(prepared, point=point, local=local)
    left = list(local.iterdir())
    assert len(left) == 1
    first.process.kill()
    first.wait_end()
    mounted = find_mount(point)
    assert mounted is not None and mounted.is_fanstore
    with pytest.raises(OSError, match="not connected"):
        os.statvfs(point)
    second = mount(prepared, point=point, local=local)
    assert len(os.listdir(point / "train")) == 20
    assert not left[0].exists()
    assert "unmounted the dead mount" in second.log_text()
    assert "which a dead job had left" in second.log_text()
    second.stop()
    assert list(local.iterdir()) == []


@pytest.mark.parametrize("how", ["mount", "recover"])
def test_repair_at_another_place(mount: Mount, prepared: Path, tmp_path: Path, how: str) -> None:
    """Mount points with the number of the job in their name: the directory in --local says where the dead one is."""
    local = tmp_path / "ssd"
    local.mkdir()
    killed = [mount(prepared, point=tmp_path / name, local=local) for name in ("a b", "kept")]
    for mounted in killed:
        mounted.process.kill()
        mounted.wait_end()
    command("umount", killed[1].path)  # a new job is there by now, which is none of the dead one's business
    other = mount(prepared, point=killed[1].path)
    if how == "recover":
        assert command("mount", "--recover", "--local", local).returncode == 0
    else:
        mount(prepared, local=local).stop()
    assert list(local.iterdir()) == []
    assert not os.path.lexists(killed[0].path)
    assert len(os.listdir(other.path / "train")) == 20
    other.stop()


def test_umount_repairs_after_kill(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    os.listdir(mounted.path)  # so that the kernel has attributes of the root in its cache, valid for a day
    mounted.process.kill()
    mounted.wait_end()
    stat = command("stat", mounted.path)
    assert stat.returncode == 1
    assert stat.stderr.startswith(f"fanstore-stat: error: the daemon of {mounted.path} is dead")
    result = command("umount", mounted.path)
    assert result.returncode == 0
    assert result.stdout == f"removed the dead mount of {prepared} at {mounted.path}\n"
    assert find_mount(mounted.path) is None
    mounted.path.rmdir()


def test_hang_at_start_ends_with_evidence(prepared: Path, tmp_path: Path) -> None:
    """A manifest that is a pipe nobody writes to: opening it blocks for ever, as a dead file server does."""
    fake = tmp_path / "fake.fan"
    fake.mkdir()
    os.mkfifo(fake / "manifest.json")
    for mode in ("--background", "--foreground"):
        log = tmp_path / f"log{mode}"
        result = command("mount", fake, tmp_path / "m", mode, "--start-timeout", "2", "--log", log)
        assert result.returncode == 1
        assert result.stderr == (
            f"fanstore-mount: error: opening {fake} took longer than 2.0 s; where it hangs is in {log}\n"
        )
        assert 'storage.py", line' in log.read_text(), "the stack of the thread that hangs"
        nothing_left(tmp_path / "m")


def test_signal_while_starting(mount: Mount, tmp_path: Path) -> None:
    fake = tmp_path / "fake.fan"
    fake.mkdir()
    os.mkfifo(fake / "manifest.json")
    mounted = mount(fake, wait=False)
    mounted.announced.append("stopped by SIGTERM before the mount was up")
    wait_until(mounted.path.exists, "start", mounted.evidence)
    mounted.signal(signal.SIGTERM)
    assert mounted.wait_end() == 143
    assert mounted.output() == "fanstore-mount: error: stopped by SIGTERM before the mount was up\n"
    mounted.check_clean()


def test_interrupt_while_starting_in_the_background(tmp_path: Path) -> None:
    """Ctrl-C reaches only the parent; it passes it on and returns when the daemon has cleaned up."""
    fake = tmp_path / "fake.fan"
    fake.mkdir()
    os.mkfifo(fake / "manifest.json")
    line = [fanstore_command("mount"), str(fake), str(tmp_path / "m"), "--background", "--log", str(tmp_path / "log")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until((tmp_path / "m").exists, "start", (tmp_path / "log").read_text)
            process.send_signal(signal.SIGINT)
            output, error = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert (process.returncode, output) == (130, "")
    assert error == "fanstore-mount: error: stopped by SIGINT before the mount was up\n"
    nothing_left(tmp_path / "m")


def test_stacks_on_demand(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared)
    mounted.signal(signal.SIGUSR2)
    wait_until(lambda: "Current thread" in mounted.log_text(), "stacks", mounted.output)
    assert "session.py" in mounted.log_text()
    assert (mounted.path / "train/1").stat().st_size == 10_000, "and the mount goes on"
