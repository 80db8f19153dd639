"""Mounting as an ordinary user, through fusermount3: what people on a cluster do.

Needs root to make such a user for the time of the tests, and to open /dev/fuse to everybody (its mode comes back at
the end). The user gets a virtual environment of the system's Python, since neither the one that runs the tests nor
this clone can be expected to be readable for others.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import leftovers
import pytest
from mounting import LIMIT_S, lister_of, needs_fuse, wait_until
from users import FUSE, account

from fanstore.mounttable import find_mount

ROOT = Path(__file__).parent.parent
PYTHON = "/usr/bin/python3"


def obstacle() -> str:
    """Why these tests cannot run here."""
    if os.geteuid() != 0:
        return "only root can make a user to mount as"
    if shutil.which(PYTHON) is None:
        return f"{PYTHON} is not there"
    check = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([PYTHON, "-c", check], capture_output=True, timeout=60).returncode:
        return f"{PYTHON} is older than 3.11, or the package python3-venv is not installed"
    return ""


pytestmark = [
    needs_fuse,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "-"),
    pytest.mark.timeout(300),  # the environment is made within the first test
]


@dataclass
class User:
    """Somebody without rights.

    Attributes:
        number: of the user and of the group; home: a directory of theirs; programs: where the commands are.
    """

    number: int
    group: int
    home: Path
    programs: Path

    def popen(self, *command: str | Path, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(map(str, command)),
            user=self.number,
            group=self.group,
            extra_groups=[],
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PATH": f"{self.programs}:/usr/bin:/bin",
                "HOME": str(self.home),
                leftovers.MARK_VARIABLE: os.environ[leftovers.MARK_VARIABLE],
                **environment,
            },
        )

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.popen(*command, **environment)
        try:
            output, error = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output, error)

    def fanstore(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(self.programs / f"fanstore-{name}", *arguments)


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Readable for everybody, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="fanstore-user-test-"))
    path.chmod(0o755)
    try:
        yield path
        assert leftovers.mounts_below(path) == []
        wait_until(
            lambda: not leftovers.processes_of(None, path),
            "end of all daemons",
            lambda: "\n".join(leftovers.processes_of(None, path)),
        )
    finally:
        for line in leftovers.mounts_below(path):
            subprocess.run(["umount", "-l", line.split()[1]], check=False, timeout=60)
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def programs(directory: Path) -> Path:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> None:
        result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, umask=0o022)
        assert result.returncode == 0, result.stdout + result.stderr

    run(PYTHON, "-m", "venv", "--without-pip", directory / "venv")  # to unpack another pip takes half of the time
    run(sys.executable, "-m", "pip", "--python", directory / "venv/bin/python", "install", "-q", ROOT)
    return directory / "venv/bin"


@pytest.fixture(scope="module")
def user(directory: Path, programs: Path) -> Iterator[User]:
    with account("t") as entry:
        home = directory / "home"
        home.mkdir(mode=0o700)
        os.chown(home, entry.pw_uid, entry.pw_gid)
        yield User(entry.pw_uid, entry.pw_gid, home, programs)


@pytest.fixture(scope="module")
def prepared(user: User, directory: Path) -> Path:
    source = directory / "source"
    (source / "train").mkdir(parents=True)
    for number in range(10):
        (source / f"train/{number}").write_bytes(os.urandom(300_000))
        (source / f"train/{number}").chmod(0o644)
    (source / "closed").mkdir()
    (source / "closed").chmod(0o755)
    (source / "locked").mkdir(mode=0o555)
    result = user.fanstore("prep", source, user.home / "d.fan", "--partitions", "2")
    assert result.returncode == 0, result.stderr
    return user.home / "d.fan"


def test_command(user: User, prepared: Path, directory: Path) -> None:
    point, local = user.home / "m", user.home / "ssd"
    script = 'diff -r "$0" "$FANSTORE_MOUNT" && stat -c "%u %g" "$FANSTORE_MOUNT/train/3"; ls "$1"; exit 4'
    result = user.fanstore(
        "mount",
        prepared,
        point,
        "--local",
        local,
        "--stage-first",
        "--",
        "sh",
        "-c",
        script,
        directory / "source",
        local,
    )
    assert result.returncode == 4, result.stderr
    owner, job = result.stdout.splitlines()
    assert owner == f"{user.number} {user.group}", "everything belongs to whoever mounts"
    assert job.startswith(f"fanstore-{user.number}-")
    assert "ERROR" not in result.stderr and "WARNING" not in result.stderr
    assert find_mount(point) is None
    assert sorted(os.listdir(user.home)) == ["d.fan"]


def test_background_and_umount(user: User, prepared: Path) -> None:
    point = user.home / "m"
    started = user.fanstore("mount", prepared, point, "--background")
    assert started.returncode == 0, started.stderr
    log = Path(started.stdout.rpartition("log ")[2].strip())
    assert log.parent == user.home / ".local/state/fanstore"
    try:
        mount = find_mount(point)
        assert mount is not None and mount.is_fanstore and mount.owner == user.number
        with pytest.raises(PermissionError):  # not even root may look, unless the user wants it
            os.listdir(point)
        wait_until(lambda: lister_of(point) is not None, "start of the lister", log.read_text)
        read = user.run("cksum", *(point / f"train/{number}" for number in range(5)))
        assert read.returncode == 0, read.stderr

        def names_ahead() -> int:
            said = json.loads(user.fanstore("stat", point, "--json").stdout)
            return int(said["engine"]["names_ahead"]["names"])

        wait_until(lambda: names_ahead() == 10, "listing ahead", log.read_text)
        assert user.run("ls", point / "train").stdout.split() == [str(number) for number in range(10)]
        assert user.fanstore("stat", point).stdout.startswith(f"{prepared} on {point}\n")
    finally:
        ended = user.fanstore("umount", point)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not point.exists()
    assert "WARNING" not in log.read_text() and "ERROR" not in log.read_text()
    shutil.rmtree(user.home / ".local")


_WRITES = """
import os, sys
root, output = os.environ["FANSTORE_MOUNT"], sys.argv[1]
os.mkdir(f"{root}/train/run")
with open(f"{root}/train/run/log", "w") as file:
    file.write("one")
    file.flush()
    os.fsync(file.fileno())
    assert open(f"{output}/train/run/log").read() == "one"
os.chmod(f"{root}/train/run/log", 0o400)
for function in (lambda: open(f"{root}/train/run/log", "a"), lambda: os.mkdir(f"{root}/locked/new")):
    try:
        function()
    except PermissionError:
        continue
    raise AssertionError("the modes mean nothing")
os.rename(f"{root}/train/run/log", f"{root}/log")
"""


def test_outputs(user: User, prepared: Path) -> None:
    """Everything that is written belongs to the user, here and in ``--output``; modes hold for them as anywhere."""
    output, local = user.home / "output", user.home / "ssd"
    result = user.fanstore(
        "mount", prepared, user.home / "m", "--local", local, "--output", output, "--", PYTHON, "-c", _WRITES, output
    )
    assert result.returncode == 0, result.stderr
    assert f"; 1 output saved to {output}\n" in result.stderr
    assert sorted(str(path.relative_to(output)) for path in output.rglob("*")) == ["log", "train", "train/run"]
    status = (output / "log").stat()
    assert (status.st_uid, status.st_gid) == (user.number, user.group)
    assert stat.S_IMODE(status.st_mode) == 0o400
    assert (output / "log").read_text() == "one"
    shutil.rmtree(output)
    assert sorted(os.listdir(user.home)) == ["d.fan"]


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "fusermount3", "root"])
def test_every_end(user: User, prepared: Path, end: str) -> None:
    point, local = user.home / "m", user.home / "ssd"
    process = user.popen(user.programs / "fanstore-mount", prepared, point, "--local", local, "--stage-first")
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"{prepared} is mounted on {point} (10 files, ")
        assert (local / os.listdir(local)[0] / "part-00000.tar").is_file()
        if end == "fusermount3":
            assert user.run("fusermount3", "-u", point).returncode == 0
        elif end == "root":
            subprocess.run(["umount", point], check=True, timeout=60)
        else:
            process.send_signal(signal.Signals[end])
        output, error = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert (process.returncode, output, error) == (0, "", "")
    assert sorted(os.listdir(user.home)) == ["d.fan"]


def test_repair_after_kill(user: User, prepared: Path) -> None:
    point, local = user.home / "m", user.home / "ssd"
    local.mkdir()
    os.chown(local, user.number, user.group)
    process = user.popen(user.programs / "fanstore-mount", prepared, point, "--local", local, "--stage-first")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=LIMIT_S)
    mount = find_mount(point)
    assert mount is not None and mount.is_fanstore
    assert len(os.listdir(local)) == 1
    again = user.fanstore("mount", prepared, point, "--local", local, "--stage-first", "--quiet", "--", "ls", point)
    assert (again.returncode, again.stdout, again.stderr) == (0, "closed\nlocked\ntrain\n", "")
    assert find_mount(point) is None
    assert os.listdir(local) == []
    local.rmdir()
    point.rmdir()  # it was there when the second mount began


def test_dead_mount_is_removed_by_umount(user: User, prepared: Path) -> None:
    point = user.home / "m"
    process = user.popen(user.programs / "fanstore-mount", prepared, point)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=LIMIT_S)
    result = user.fanstore("umount", point)
    assert (result.returncode, result.stdout) == (0, f"removed the dead mount of {prepared} at {point}\n")
    assert find_mount(point) is None
    point.rmdir()


def test_busy(user: User, prepared: Path) -> None:
    point = user.home / "m"
    daemon = user.popen(user.programs / "fanstore-mount", prepared, point)
    assert daemon.stdout is not None
    daemon.stdout.readline()
    holder = user.popen("sh", "-c", f"cd {point}/train && echo there && exec sleep 60")
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        wait_until(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n", "sleep", lambda: "still sh")
        busy = user.fanstore("umount", point)
        assert busy.returncode == 1
        assert f"{point} is busy: sleep (process {holder.pid}, working directory)" in busy.stderr
        lazy = user.fanstore("umount", "--lazy", point)
        assert lazy.returncode == 0
        assert find_mount(point) is None
    finally:
        holder.kill()
        holder.communicate(timeout=LIMIT_S)
    assert daemon.wait(LIMIT_S) == 0
    daemon.communicate()


def without_fuse(user: User, directory: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a user who sees a /dev/fuse that is for root only. For others it stays as it is."""
    closed = directory / "fuse"
    os.mknod(closed, stat.S_IFCHR | 0o600, FUSE.stat().st_rdev)
    line = (
        f'mount --bind {closed} {FUSE} && exec setpriv --reuid={user.number} --regid={user.group} --clear-groups "$@"'
    )
    try:
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", line, "sh", *map(str, command)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    finally:
        closed.unlink()


def test_doctor(user: User, directory: Path) -> None:
    """What only an ordinary user meets: fusermount3 with its rights, /dev/fuse closed, no_new_privs."""

    def findings(result: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str, str]]:
        assert result.stderr == ""
        checks = json.loads(result.stdout)["checks"]
        return {check["name"]: (check["status"], check["found"], check["fix"]) for check in checks}

    doctor, before = user.programs / "fanstore-doctor", os.listdir(user.home)
    result = user.run(doctor, "--json", "--local", user.home)
    found = findings(result)
    assert result.returncode == 0, found
    assert found["fuse.fusermount3"][0] == "ok" and "setuid root" in found["fuse.fusermount3"][1]
    assert found["mount"][0] == "ok" and found["mount.engine"][0] == "ok"
    assert found["fuse.allow_other"][0] in ("ok", "note")
    assert found["mpi.library"][0] == "warning", "this environment was made without the extra"
    assert os.listdir(user.home) == before

    closed = without_fuse(user, directory, doctor, "--json")
    assert closed.returncode == 1
    status, text, fix = findings(closed)["fuse.device"]
    assert (status, text) == ("error", "no permission to open /dev/fuse (its mode is crw-------)")
    assert fix == "ask the administrator to give it mode 0666; or do without a mount: fanstore-mount --no-fuse"
    assert findings(closed)["preload"][0] == "ok"
    assert findings(closed)["mount"][0] == "error", closed.stdout

    barred = findings(user.run("setpriv", "--no-new-privs", doctor, "--json"))["fuse.fusermount3"]
    assert barred[0] == "error" and "no_new_privs" in barred[1] and "no-new-privileges" in barred[2]

    plain = user.home / "bin"
    plain.mkdir()
    shutil.copy(shutil.which("fusermount3") or "", plain / "fusermount3")
    (plain / "fusermount3").chmod(0o755)
    bare = user.run(doctor, "--json", PATH=f"{plain}:/usr/bin:/bin")
    status, text, fix = findings(bare)["fuse.fusermount3"]
    assert (bare.returncode, status) == (1, "error")
    assert text == f"{plain}/fusermount3 is not setuid root, so it cannot mount for you"
    assert f"chmod u+s {plain}/fusermount3" in fix
    shutil.rmtree(plain)
    assert (user.programs.parent / "share/man/man1/fanstore-mount.1").is_file(), "a wheel brings the manual"


def test_seen_from_a_container(user: User, prepared: Path) -> None:
    """Mounted outside and bound into a mount namespace of the same user's: as Apptainer without setuid does it."""
    point, script = user.home / "m", 'mount --rbind "$FANSTORE_MOUNT" /mnt && ls /mnt && cmp /mnt/train/3 "$0"'
    result = user.fanstore(
        "mount",
        prepared,
        point,
        "--quiet",
        "--",
        *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, user.home.parent / "source/train/3"),
    )
    if "unshare failed" in result.stderr:
        pytest.skip("ordinary users have no user namespaces here")
    assert (result.returncode, result.stdout, result.stderr) == (0, "closed\nlocked\ntrain\n", "")


def test_refusals(user: User, prepared: Path, directory: Path) -> None:
    """One sentence each, from whoever knows: us, the kernel, or fusermount3."""

    def refused(*arguments: str | Path) -> str:
        result = user.fanstore("mount", prepared, *arguments)
        assert result.returncode == 1
        assert result.stderr.startswith("fanstore-mount: error: ")
        assert result.stderr.count("\n") == 1
        return result.stderr.removeprefix("fanstore-mount: error: ").strip()

    theirs = directory / "theirs"
    theirs.mkdir(mode=0o755)
    assert refused(theirs) == f"mount point {theirs} is not writable for you, so fusermount3 will not mount on it"
    assert refused(theirs / "new") == f"mount point {theirs}/new cannot be created: Permission denied"
    if "\nuser_allow_other" not in Path("/etc/fuse.conf").read_text():
        text = refused(user.home / "m", "--allow-other")
        assert text.startswith(f"cannot mount on {user.home}/m: ") and "user_allow_other" in text
    result = without_fuse(user, directory, user.programs / "fanstore-mount", prepared, user.home / "m")
    assert "no permission to open /dev/fuse" in result.stderr
    assert not (user.home / "m").exists()


def test_root_unmounts_what_a_user_has_mounted(user: User, prepared: Path) -> None:
    """Root cannot look into it, and so not learn the process, but can take it away."""
    point = user.home / "m"
    started = user.fanstore("mount", prepared, point, "--background", "--log", user.home / "log")
    assert started.returncode == 0, started.stderr
    number = int(started.stdout.rpartition("process ")[2].split(",")[0])
    result = user.run("cat", point / ".fanstore/config.json")
    assert json.loads(result.stdout)["pid"] == number
    command = [user.programs / "fanstore-umount", point]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == 0
    assert find_mount(point) is None
    wait_until(lambda: not point.exists(), "end of the daemon", (user.home / "log").read_text)
    (user.home / "log").unlink()
