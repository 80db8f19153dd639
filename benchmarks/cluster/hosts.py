"""The hosts of a cluster: a bridge, a link and a disk for each, control groups, and the way onto a host.

Owns what is made inside a box (box.py) and ends nothing: all of it goes with the box. A host has a name, an address, a
mount namespace in which ``shared``, ``local`` and ``tmp`` of the box's directory are its own (so that paths are the
same on all hosts, as on a cluster), and its own /dev/shm. All hosts share one space of process numbers, so that a host
can be entered from any other: that is what the agent does which mpirun takes for ssh. Main thread.
"""

import json
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.command import BenchmarkError, program, run

from cluster.box import GROUPS, directory, group_name
from cluster.settings import Settings

NETWORK = "10.98.0.0/24"
_LIMIT_S = 60.0
#: Size of a disk: room for two datasets, and what fanstore-plan measure and FanStore want to be left free.
_DISK_DATASETS, _DISK_LEAST_MB = 2, 2000

# The first process of a host: makes its file systems, says so, and holds its namespaces.
_INIT = r"""
set -eu
cd "$1"
name=$2 client=$3 image=$4
hostname "$name"
mount --bind etc/hosts /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs tmp
mkdir tmp/mount
mount --bind "$client" shared
mount -o loop "$image" local
findmnt --noheadings --output MAJ:MIN --target "$1/local" > "hosts/$name.device"
touch "hosts/$name.ready"
exec sleep infinity
"""

# Runs a command on a host: enter HOST COMMAND...
_ENTER = """#!/bin/sh
host=$1
shift
for group in {groups}; do echo $$ > "$group/$host/cgroup.procs"; done
exec nsenter --target "$(cat {hosts}/"$host".pid)" --mount --uts --ipc --net --wd=/ -- "$@"
"""

# What mpirun takes for ssh: options, a host, and a command of one or more words for a shell.
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec {enter} "$host" sh -c "$*"
"""


@dataclass(frozen=True)
class Traffic:
    """Bytes on a host's link so far, headers included."""

    sent: int
    received: int


class Hosts:
    """All hosts; made by ``start``.

    Attributes:
        names: of the hosts, by rank. clients: of the shared file system, one mount point for each.
        shared, local, mount: the same paths on all hosts: the shared file system, the own disk, a place for a mount.
    """

    def __init__(self, settings: Settings, clients: Sequence[Path]) -> None:
        self._settings = settings
        self._clients = clients
        self._directory = directory()
        self.names = [f"n{number + 1}" for number in range(settings.hosts)]
        self.shared, self.local = self._directory / "shared", self._directory / "local"
        self.mount = self._directory / "tmp/mount"
        self._hosts = self._directory / "hosts"
        self._groups = [group / group_name() for group in GROUPS.values()]

    def start(self) -> None:
        """Everything; BenchmarkError if something of it does not work here."""
        for name in ("shared", "local", "tmp", "hosts", "etc", "disks"):
            (self._directory / name).mkdir()
        run(["mount", "-t", "tmpfs", "tmpfs", self._directory / "disks"], _LIMIT_S)
        lines = [f"10.98.0.{number + 1} {name}" for number, name in enumerate(self.names)]
        (self._directory / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._write_scripts()
        self._ip("link", "add", "br0", "type", "bridge")
        self._ip("link", "set", "br0", "up")
        for number, name in enumerate(self.names):
            self._start_host(number, name)

    def _write_scripts(self) -> None:
        for group in self._groups:
            group.mkdir()
        hosts, groups = shlex.quote(str(self._hosts)), shlex.join(map(str, self._groups))
        for name, text in (("enter", _ENTER), ("agent", _AGENT)):
            path = self._directory / name
            path.write_text(text.format(groups=groups, hosts=hosts, enter=shlex.quote(str(self._directory / "enter"))))
            path.chmod(0o755)
        (self._directory / "hostfile").write_text("".join(f"{name} slots=1\n" for name in self.names))

    @staticmethod
    def _ip(*words: str) -> None:
        run(["ip", *words], _LIMIT_S)

    def _start_host(self, number: int, name: str) -> None:
        image = self._directory / "disks" / name
        size_mb = self._settings.dataset_mb * _DISK_DATASETS + _DISK_LEAST_MB
        with image.open("wb") as file:
            file.truncate(round(size_mb) << 20)  # in memory, but only what is written
        run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image], _LIMIT_S)
        for group in self._groups:
            (group / name).mkdir()
        if self._settings.memory_mb:
            limit = GROUPS["memory"] / group_name() / name / "memory.limit_in_bytes"
            limit.write_text(str(round(self._settings.memory_mb * 1e6)))
        namespaces = ["unshare", "--mount", "--uts", "--ipc", "--net", "--"]
        words = ["bash", "-c", _INIT, "init", *map(str, (self._directory, name, self._clients[number], image))]
        log = self._hosts / f"{name}.log"
        with log.open("wb") as output:
            init = subprocess.Popen([*namespaces, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        (self._hosts / f"{name}.pid").write_text(str(init.pid))
        deadline_s = time.monotonic() + _LIMIT_S
        while not (self._hosts / f"{name}.ready").exists():
            if init.poll() is not None or time.monotonic() > deadline_s:
                raise BenchmarkError(f"host {name} does not start: {log.read_text().strip()}")
            time.sleep(0.002)
        self._link(number, name, init.pid)
        self._throttle_disk(name)

    def _link(self, number: int, name: str, pid: int) -> None:
        port = f"port{number}"
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._ip("link", "set", port, "master", "br0", "up")
        inside = ["nsenter", "--target", str(pid), "--net", "--"]
        run([*inside, "ip", "addr", "add", f"10.98.0.{number + 1}/24", "dev", "eth0"], _LIMIT_S)
        for device in ("lo", "eth0"):
            run([*inside, "ip", "link", "set", device, "up"], _LIMIT_S)
        if self._settings.link_mbit_per_s:
            limit = ["root", "tbf", "rate", f"{self._settings.link_mbit_per_s:g}mbit"]
            limit += ["burst", "64kb", "latency", "50ms"]
            run(["tc", "qdisc", "add", "dev", port, *limit], _LIMIT_S)
            run([*inside, "tc", "qdisc", "add", "dev", "eth0", *limit], _LIMIT_S)

    def _throttle_disk(self, name: str) -> None:
        device = (self._hosts / f"{name}.device").read_text().strip()
        if self._settings.disk_mb_per_s:
            for way in ("read", "write"):
                rule = GROUPS["blkio"] / group_name() / name / f"blkio.throttle.{way}_bps_device"
                rule.write_text(f"{device} {round(self._settings.disk_mb_per_s * 1e6)}")

    # --- use ---

    def on(self, rank: int) -> list[str]:
        """In front of a command: it runs on that host."""
        return [str(self._directory / "enter"), self.names[rank]]

    def mpirun(self) -> list[str]:
        """In front of a command: it runs on every host, once, over TCP; started on the first host."""
        options = ["--mca", "plm", "ssh", "--prtemca", "plm_ssh_agent", str(self._directory / "agent")]
        options += ["--hostfile", str(self._directory / "hostfile"), "--map-by", "ppr:1:node", "--bind-to", "none"]
        options += ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", NETWORK]
        return [*self.on(0), program("mpirun"), "--allow-run-as-root", *options]

    def environment(self) -> dict[str, str]:
        """Of everything that runs on a host."""
        return os.environ | {"TMPDIR": str(self._directory / "tmp")}

    def traffic(self) -> list[Traffic]:
        """Of each host, as the bridge has seen it."""
        found = {}
        for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
            name, _, values = line.partition(":")
            numbers = values.split()
            found[name.strip()] = Traffic(sent=int(numbers[0]), received=int(numbers[8]))
        return [found[f"port{number}"] for number in range(len(self.names))]

    def used_s(self) -> float:
        """Processor time of all hosts so far; the kernel's own for their links and disks is not in it."""
        return int((GROUPS["cpuacct"] / group_name() / "cpuacct.usage").read_text()) / 1e9

    def peaks_mb(self) -> list[float]:
        """Most memory that a host had in use at a time, page cache included."""
        top = GROUPS["memory"] / group_name()
        return [int((top / name / "memory.max_usage_in_bytes").read_text()) / 1e6 for name in self.names]


def statistics(mount: Path) -> dict[str, object]:
    """What the daemon of a mount says of itself; of other places nothing."""
    path = mount / ".fanstore" / "stats.json"
    return json.loads(path.read_text()) if path.exists() else {}
