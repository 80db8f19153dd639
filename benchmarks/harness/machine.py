"""A description of the machine, for the record: without it a figure means nothing a year later."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def _output_lines(argv: list[str]) -> list[str]:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"unknown ({error})"]
    return [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def _first_line(argv: list[str]) -> str:
    return next(iter(_output_lines(argv)), "unknown")


def program_version(*argv: str) -> str:
    """The first line with something like a version number that a program prints, whatever its exit code."""
    return next((line for line in _output_lines(list(argv)) if re.search(r"\d\.\d", line)), "unknown")


def _proc_field(file: str, field: str) -> str:
    for line in Path(file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return "unknown"


def file_system(path: Path) -> str:
    """Type and device of the file system that holds ``path``."""
    return _first_line(["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(path)])


def _revision() -> str:
    here = str(Path(__file__).parent)
    revision = _first_line(["git", "-C", here, "rev-parse", "--short=12", "HEAD"])
    if re.fullmatch("[0-9a-f]{12}", revision) is None:
        return "unknown"  # not a clone
    # Only what is measured counts: notes and results may be uncommitted.
    source = [":/fanstore", ":/native", ":/benchmarks/*.py", ":/benchmarks/*.c", ":/benchmarks/harness"]
    changed = _first_line(["git", "-C", here, "status", "--porcelain", "--", *source])
    return revision if changed == "unknown" else f"{revision} with local changes"


def describe(work: Path) -> dict[str, Any]:
    """Machine, system and date; ``work`` is the directory in which the benchmark reads and writes."""
    memory_kib = int(_proc_field("/proc/meminfo", "MemTotal").split()[0])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _proc_field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "virtual_machine": "hypervisor" in _proc_field("/proc/cpuinfo", "flags").split(),
        "memory_bytes": memory_kib << 10,
        "kernel": platform.release(),
        "file_system": file_system(work),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "python": platform.python_version(),
        "fanstore_revision": _revision(),
        "load_average_at_start": os.getloadavg()[0],
    }


def sentence(machine: dict[str, Any]) -> str:
    """The description in one line, for tables and pictures."""
    where = "virtual machine, " if machine["virtual_machine"] else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {where}"
        f"Linux {machine['kernel']}, {' on '.join(machine['file_system'].split())}, {machine['date']}, "
        f"FanStore {machine['fanstore_revision']}"
    )
