"""A real Slurm cluster on this machine: munged, slurmctld and a slurmd per node, each host in namespaces of its own.

Owns all of it: namespaces, processes, the cgroups of the nodes, and a directory for keys, configuration, spools and
logs. Nothing outside is changed, and the machine's own munge or Slurm, if there is one, is neither used nor disturbed.
Every host has its own name and address (veth pairs on a bridge), its own /tmp and /dev/shm, its own processes and
mounts, so that a job finds what it finds on a cluster: the same path is another disk on another node, a mount of one
node is not seen by another, and what a node has left behind can be told. The directory of the cluster is the same on
all hosts: it is their shared file system. All is ended with the first process of each host.

Needs root, and Debian's packages PACKAGES, which packages.py installs. Used by test_slurm.py, on the test's thread.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import leftovers

#: What ``apt-get install --no-install-recommends`` must have been given.
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "setpriv", "unshare", "nsenter")

#: Seconds for a daemon to come up, or for a command to end. A second is enough; it is only there to end a hang.
LIMIT_S = 30.0

#: What a node claims to have, so that jobs can ask for what they ask for on a cluster.
CPUS, GPUS = 32, 4

#: Seconds between SIGTERM and SIGKILL for a job that is cancelled; Slurm's default.
KILL_WAIT_S = 30

_FREEZER = Path("/sys/fs/cgroup/freezer")

# The first process of a host: it makes the host's own file systems, says so, and collects orphans until it is killed.
# Mounts of this machine's other users, which it has got a copy of, go first: nobody could end them while it has them.
# Its /tmp is its own. What all hosts share is put back on top of it, and of directories that only root may enter.
_INIT = r"""
set -eu
base=$1 name=$2 closed=$3
shift 3
awk '$5 ~ "^/tmp/" || / - fuse/ { print $5 }' /proc/self/mountinfo | sort -r |
    while read -r point; do umount --lazy "$(printf '%b' "$point")"; done
hostname "$name"
mount --bind "$base/etc/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
number=0
for path in "$base" "$@"; do
    mkdir "/mnt/$((++number))"
    mount --bind "$path" "/mnt/$number"
done
mount --bind "/mnt/1/hosts/$name/tmp" /tmp
for path in $closed; do mount -t tmpfs -o mode=755 tmpfs "$path"; done
number=0
for path in "$base" "$@"; do
    mkdir -p -m 755 "$path"
    mount --bind "/mnt/$((++number))" "$path"
done
touch "$base/hosts/$name/ready"
while :; do sleep 1000 & wait; done
"""

_SLURM_CONF = """
ClusterName=fanstore
SlurmctldHost={head}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/hosts/%n/slurmd.pid
SlurmdSpoolDir={base}/hosts/%n/spool
StateSaveLocation={base}/state
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait={kill_wait}
ReturnToService=2
SlurmdDebug=debug
NodeName={nodes} CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


class ClusterError(Exception):
    """The cluster could not be started, or something of it did not happen in time; says what, with the logs."""


def problem() -> str:
    """Why no cluster can be started here; "" if one can."""
    if os.geteuid() != 0:
        return "only root can start slurmd and make namespaces"
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not there: apt-get install {' '.join(PACKAGES)}"
    probe = "ip link add fst0 type veth peer name fst1 && ip link add fst2 type bridge"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def proctrack() -> str:
    """The plugin that finds the processes of a job: cgroup, as nearly all clusters have it, or what works without."""
    return "cgroup" if os.access(_FREEZER / "cgroup.procs", os.W_OK) else "linuxproc"


@dataclass
class Host:
    """One machine of the cluster.

    Attributes:
        name, address: in the cluster; directory: of its own, with ``tmp``, which is its /tmp.
        init: the program that holds its namespaces; pid: of its first process, as seen from here.
    """

    name: str
    address: str
    directory: Path
    init: subprocess.Popen[bytes]
    pid: int

    @property
    def tmp(self) -> Path:
        return self.directory / "tmp"

    def enter(self, *namespaces: str) -> list[str]:
        """What runs a command there; in all of its namespaces, unless some are named."""
        return ["nsenter", "--target", str(self.pid), *(namespaces or ["--all"]), "--"]

    def mounts(self) -> list[str]:
        """What is mounted there by FUSE."""
        lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        return [line for line in lines if " - fuse" in line]

    def processes(self, user: int) -> list[str]:
        """What runs there as the user."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if not process.name.isdigit() or process.stat().st_uid != user:
                    continue
                if os.stat(process / "ns/pid").st_ino == own:
                    found.append(f"{process.name}: {(process / 'cmdline').read_bytes().replace(bytes(1), b' ')!r}")
        return found

    def shared_memory(self) -> list[str]:
        return sorted(os.listdir(f"/proc/{self.pid}/root/dev/shm"))


class SlurmCluster:
    """A running cluster; see ``slurm_cluster``.

    Attributes:
        directory: of everything, at the same path on all hosts; readable for everybody.
        _shared: other directories of which the same is true.
        head: where slurmctld and munged run and jobs are submitted; nodes: where jobs run.
        proctrack: the plugin that finds the processes of a job.
        _names: of the hosts, the head's first. _daemons: by name, in the order of their start.
    """

    def __init__(self, directory: Path, nodes: int, proctrack: str, shared: Sequence[Path]) -> None:
        self.directory = directory
        self.proctrack = proctrack
        self._shared = shared
        # Cgroups are named after nodes: no two clusters of this machine may have one of the same name.
        mark = f"s{os.getpid()}{secrets.token_hex(2)}"
        self._names = [f"{mark}h", *(f"{mark}n{number + 1}" for number in range(nodes))]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts: list[Host] = []

    @property
    def head(self) -> Host:
        return self._hosts[0]

    @property
    def nodes(self) -> list[Host]:
        return self._hosts[1:]

    # --- start ---

    def start(self) -> None:
        """Bring everything up, and wait until all nodes are ready for jobs."""
        self._write_configuration()
        for number, name in enumerate(self._names):
            self._start_host(name, f"10.97.0.{number + 1}")
        self._connect()
        key = self.directory / "munge/key"
        names = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={key.parent / name}" for option, name in names.items()]
        self._start_daemon("munged", self.head, "munged", "--foreground", *options)
        self.wait(lambda: (key.parent / "socket").exists(), "the socket of munged")
        self._start_daemon("slurmctld", self.head, "slurmctld", "-D")
        for node in self.nodes:
            self._start_daemon(f"slurmd-{node.name}", node, "slurmd", "-D", "-N", node.name)
        self.wait(self._is_ready, "nodes that are ready for jobs")

    def _write_configuration(self) -> None:
        base = self.directory
        for path in ("etc", "state", "hosts", "munge", "log", *(f"hosts/{name}" for name in self._names)):
            (base / path).mkdir()
            (base / path).chmod(0o755)
        for name in self._names:
            (base / "hosts" / name / "tmp").mkdir()
            (base / "hosts" / name / "tmp").chmod(0o1777)
            (base / "hosts" / name / "spool").mkdir()
        key = base / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        lines = [f"10.97.0.{number + 1} {name}" for number, name in enumerate(self._names)]
        (base / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        text = _SLURM_CONF.format(
            head=self._names[0],
            nodes=",".join(self._names[1:]),
            base=base,
            proctrack=self.proctrack,
            kill_wait=KILL_WAIT_S,
            cpus=CPUS,
            gpus=GPUS,
        )
        (base / "etc/slurm.conf").write_text(text)
        (base / "etc/cgroup.conf").write_text("CgroupAutomount=no\n")
        for number in range(GPUS):
            (base / f"etc/gpu{number}").touch()  # Slurm wants to see a file for each
        (base / "etc/gres.conf").write_text(f"AutoDetect=off\nName=gpu File={base}/etc/gpu[0-{GPUS - 1}]\n")

    def mounted_in(self) -> set[Path]:
        """The directories that all hosts share, and those above them."""
        return {parent for path in (self.directory, *self._shared) for parent in (path, *path.parents)}

    def _start_host(self, name: str, address: str) -> None:
        """Make the namespaces of a host, and wait until its file systems are there."""
        flags = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        closed = " ".join(str(path) for path in sorted(self.mounted_in()) if not path.stat().st_mode & stat.S_IXOTH)
        with open(self.directory / f"log/init-{name}", "wb") as log:
            init = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig=KILL",
                    "unshare",
                    *flags,
                    "bash",
                    "-c",
                    _INIT,
                    "init",
                    self.directory,
                    name,
                    closed,
                    *self._shared,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        host = Host(name, address, self.directory / "hosts" / name, init, 0)
        self._hosts.append(host)
        ready = host.directory / "ready"
        self.wait(lambda: ready.exists() or init.poll() is not None, f"the namespaces of {name}")
        if init.poll() is not None:
            raise ClusterError(f"the namespaces of {name} cannot be made\n{self.evidence()}")
        host.pid = int(Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()[0])

    def _connect(self) -> None:
        """One Ethernet: a bridge on the head, and a cable from it to each node."""
        self._ip(self.head, "link", "add", "br0", "type", "bridge")
        self._ip(self.head, "addr", "add", f"{self.head.address}/24", "dev", "br0")
        self._ip(self.head, "link", "set", "lo", "up")
        self._ip(self.head, "link", "set", "br0", "up")
        for number, node in enumerate(self.nodes):
            cable = f"port{number}"
            self._ip(self.head, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
            self._ip(self.head, "link", "set", cable, "master", "br0", "up")
            self._ip(node, "addr", "add", f"{node.address}/24", "dev", "eth0")
            self._ip(node, "link", "set", "lo", "up")
            self._ip(node, "link", "set", "eth0", "up")

    def _ip(self, host: Host, *words: str) -> None:
        subprocess.run([*host.enter("--net"), "ip", *words], check=True, timeout=LIMIT_S)

    def _start_daemon(self, name: str, host: Host, *command: str) -> None:
        with open(self.directory / "log" / name, "wb") as log:
            self._daemons[name] = subprocess.Popen(
                [*host.enter(), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self._environment(),
            )

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "SLURM_CONF": str(self.directory / "etc/slurm.conf"),
            leftovers.MARK_VARIABLE: os.environ.get(leftovers.MARK_VARIABLE, ""),
        }

    def _is_ready(self) -> bool:
        dead = [name for name, process in self._daemons.items() if process.poll() is not None]
        if dead:
            raise ClusterError(f"{', '.join(dead)} ended at once\n{self.evidence()}")
        shown = self.run("sinfo", "--noheader", "--Node", "--format=%T", check=False)
        return shown.stdout.split() == ["idle"] * len(self.nodes)

    # --- use ---

    def run(
        self,
        *command: str | Path,
        user: tuple[int, int] = (0, 0),
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        host: Host | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, on the head unless a host is named, as a user and group."""
        words: Sequence[str | Path] = [
            *(host or self.head).enter()[:-1],
            *(["--setuid", str(user[0]), "--setgid", str(user[1])] if user != (0, 0) else []),
            f"--wd={cwd or '/'}",
            "--",
            *command,
        ]
        result = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            env=self._environment() | dict(environment or {}),
        )
        if check and result.returncode:
            raise ClusterError(f"{command} ended with {result.returncode}: {result.stderr}\n{self.evidence()}")
        return result

    def job(self, number: int) -> dict[str, str]:
        """What Slurm knows of a job: ``JobState``, ``ExitCode``, …"""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(number)).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S, every_s: float = 0.05) -> None:
        """Until the condition holds; ClusterError with all logs if it does not within the limit."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise ClusterError(f"waited {limit_s:g} s for {what}\n{self.evidence()}")
            time.sleep(every_s)  # polling with a limit: there is nothing to wait on

    def evidence(self) -> str:
        """All logs, and what Slurm says of its jobs and nodes."""
        logs = sorted((self.directory / "log").iterdir())
        parts = [f"--- {log.name}\n{log.read_text(errors='replace')[-8000:]}" for log in logs]
        if "slurmctld" in self._daemons:
            for command in ("sinfo --Node --long", "scontrol show job"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    shown = self.run(*command.split(), check=False)
                    parts.append(f"--- {command}\n{shown.stdout}{shown.stderr}")
        return "\n".join(parts)

    # --- end ---

    def stop(self) -> None:
        """End everything, whatever has happened: the daemons, then all else with the first process of each host."""
        for process in reversed(self._daemons.values()):
            if process.poll() is None:
                _kill_children(process.pid, signal.SIGKILL)
        for host in reversed(self._hosts):
            host.init.kill()  # its child, the first process of the host, goes with it, and so do all others
            host.init.wait(LIMIT_S)
        for process in self._daemons.values():
            process.wait(LIMIT_S)
        for name in self._names[1:]:
            self._remove_cgroups(_FREEZER / f"slurm_{name}")

    def _remove_cgroups(self, top: Path) -> None:
        """Directories of the kernel: they can be removed, deepest first, once their processes have ended."""
        for directory, _, _ in os.walk(top, topdown=False):
            self.wait(lambda directory=directory: _rmdir(directory), f"the end of {directory}")  # type: ignore[misc]


def _rmdir(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except OSError:
        return False
    return True


def _kill_children(pid: int, number: int) -> None:
    """nsenter waits for the daemon, which is its child; it ends when the daemon has."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), number)


@contextmanager
def slurm_cluster(
    directory: Path, nodes: int = 2, *, shared: Sequence[Path] = (), kind: str = ""
) -> Iterator[SlurmCluster]:
    """A cluster in an existing empty directory that everybody may enter.

    ``shared``: other directories that all hosts and users see; ``kind``: another proctrack plugin than usual.
    """
    cluster = SlurmCluster(directory, nodes, kind or proctrack(), shared)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
