"""The box: PID, mount and network namespaces in which a cluster lives, and which vanish with the process that made
them.

Owns the life: whoever calls ``run`` is the driver. It starts this program again as the second process of new namespaces
(the first one is a shell that collects orphans). When the driver ends, however it ends, the kernel ends all processes
in there (PR_SET_PDEATHSIG, and the end of a PID namespace), and with them mounts, loop devices, links and addresses go.
What outlives namespaces are control groups and the directory of the box: a guardian, a process of its own that has
waited for the end of the driver, removes them; should it have been killed as well, the next box does. Main thread.
Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.command import BenchmarkError

#: Programs without which there is no box.
PROGRAMS = ("unshare", "nsenter", "setpriv", "ip", "tc", "mkfs.ext4", "mount", "losetup", "pkg-config", "cc")
#: In the environment of what runs inside: the directory of the box.
INSIDE = "FANSTORE_CLUSTER_BOX"
GROUPS = {name: Path("/sys/fs/cgroup", name) for name in ("blkio", "memory", "cpuacct")}
#: The exit code of a box that was ended by Ctrl-C or SIGTERM.
INTERRUPTED = 130
_PREFIX = "fanstore-cluster-"
_LIMIT_S = 30.0

# Waits until its standard input ends, which is when the driver has; then removes groups and the directory.
_GUARDIAN = r"""
trap '' INT TERM HUP
directory=$1
shift
cat >/dev/null
for _ in $(seq 200); do
    left=
    for group in "$@"; do
        [ -d "$group" ] || continue
        find "$group" -depth -mindepth 1 -type d -exec rmdir {} \; 2>/dev/null
        rmdir "$group" 2>/dev/null || left=1
    done
    [ -z "$left" ] && break
    sleep 0.05
done
rm -rf --one-file-system "$directory"
"""


def problem() -> str:
    """Why there can be no cluster here; "" if there can."""
    if os.geteuid() != 0:
        return "only root can make namespaces and throttle disks"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not there"
    for name, group in GROUPS.items():
        if not (group / "cgroup.procs").exists():
            return f"there is no control group {name} of version 1"
    probe = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1mbit burst 64kb latency 50ms"
    tried = subprocess.run(
        [*_unshare(), "sh", "-c", f"{probe} && losetup --find"], capture_output=True, text=True, timeout=_LIMIT_S
    )
    return f"no namespaces, links or loop devices here: {tried.stderr.strip()}" if tried.returncode else ""


def _unshare() -> list[str]:
    flags = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["setpriv", "--pdeathsig=KILL", "unshare", *flags, "--"]


def is_inside() -> bool:
    return INSIDE in os.environ


def directory() -> Path:
    """Of the box; only inside."""
    return Path(os.environ[INSIDE])


def group_name() -> str:
    """Of the control groups of this box."""
    return directory().name


def run(argv: Sequence[str], parent: Path | None = None) -> int:
    """Run a command in a new box; its exit code. All is gone when this returns."""
    _remove_dead()
    # The name has the driver's number: as long as that process lives, the box is in use.
    path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)).resolve()
    groups = [str(group / path.name) for group in GROUPS.values()]
    guardian = subprocess.Popen(
        ["sh", "-c", _GUARDIAN, "guardian", str(path), *groups], stdin=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    code = 1
    try:
        collect_orphans = ["bash", "-c", '"$@"; exit $?', "init"]
        inside = subprocess.Popen([*_unshare(), *collect_orphans, *argv], env=os.environ | {INSIDE: str(path)})
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            code = inside.wait()
        except KeyboardInterrupt:
            inside.kill()  # and with it all that is inside
            inside.wait()
            code = INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, previous)
    finally:
        assert guardian.stdin is not None
        guardian.stdin.close()
        guardian.wait(_LIMIT_S)
    return code


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _remove_dead() -> None:
    """Control groups and directories of boxes whose driver and guardian were both killed."""
    for top in (*GROUPS.values(), Path(tempfile.gettempdir())):
        for path in top.glob(f"{_PREFIX}*-*"):
            driver = path.name.removeprefix(_PREFIX).partition("-")[0]
            if not driver.isdigit() or Path("/proc", driver).exists():
                continue
            if top in GROUPS.values():
                for group, _, _ in os.walk(path, topdown=False):
                    with contextlib.suppress(OSError):  # somebody else is faster, or a process still ends
                        os.rmdir(group)
            else:
                shutil.rmtree(path, ignore_errors=True)


def enter(argv: Sequence[str]) -> int:
    """The same command again, inside; what a script does that finds itself outside."""
    reason = problem()
    if reason:
        raise BenchmarkError(f"no cluster here: {reason}")
    return run([sys.executable, *argv])
