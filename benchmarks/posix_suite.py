"""What of a file system's behaviour outputs have: public suites, run on the mount and on the disk underneath.

Example: python benchmarks/posix_suite.py

stress-ng's stressors that use files, each for some seconds with --verify, and fio with verification of every byte that
it reads back; both are Debian packages (benchmarks/setup-peers). A stressor that the disk
fails, too, says nothing about FanStore. With --pjdfstest DIR, a built pjdfstest (github.com/pjd/pjdfstest, not in any
package registry) is run as well: its assertions are counted, and those that fail are sorted by what they need.
With --nodes 2 also in a job of two nodes, both on this machine, on the second one, which does not decide on names.
A record, not a test. Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.command import BenchmarkError, find_program, launcher, only_on, run
from harness.dataset import DatasetSpec, make
from harness.record import markdown_table
from harness.script import run_script
from harness.workspace import workspace

#: Those that work on files of a directory; not those of /proc, of pipes, or of mounting.
# fmt: off
STRESSORS = (
    "access", "chattr", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep", "dirmany", "dnotify",
    "fallocate", "fcntl", "fiemap", "file-ioctl", "filename", "flock", "fpunch", "fsize", "fstat", "getdent", "hdd",
    "inode-flags", "inotify", "io", "iomix", "lease", "link", "locka", "lockf", "lockofd", "mknod", "open",
    "rename", "seek", "sendfile", "symlink", "sync-file", "touch", "utime", "verity", "xattr",
)
# fmt: on

FIO_JOBS = {
    "sequential, 1 MiB": ["--rw=write", "--bs=1M"],
    "random, 4 KiB": ["--rw=randwrite", "--bs=4k"],
    "random, 3,000 bytes": ["--rw=randwrite", "--bs=3000"],
    "mmap, 4 KiB": ["--rw=randwrite", "--bs=4k", "--ioengine=mmap"],
    "append and fsync": ["--rw=write", "--bs=16k", "--fsync=16"],
}
#: Exit codes of stress-ng.
VERDICTS = {0: "passes", 2: "fails", 3: "no resources", 4: "not possible here"}
LIMIT_S = 120.0

#: What an assertion of pjdfstest that fails needed; the first that fits.
NEEDS = (
    ("pipes, sockets and devices", r"mkfifo|mknod|bind"),
    ("hard links", r"tried 'link |\bnlink"),
    ("owners", r"chown|uid|gid|-u 6553"),
    ("atime", r"atime"),
    ("set-user-ID and set-group-ID", r"chmod \S+ 0?[2-7]\d\d\d|mode', expected 0?[2-7]\d\d\d"),
)


def stress(name: str, directory: Path, seconds: int) -> tuple[int, str]:
    """One stressor; its exit code and the first thing it complains about."""
    argv = ["stress-ng", f"--{name}", "1", "--timeout", f"{seconds}", "--verify", "--temp-path", str(directory)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False)
    complaints = re.findall(r"stress-ng: (?:fail|error): +\[\d+\] (.*)", done.stdout + done.stderr)
    complaints = [text for text in complaints if "unsuccessful run" not in text]
    return done.returncode, re.sub(r"\S*/\S+", "…", complaints[0]) if complaints else ""


def verify_with_fio(name: str, directory: Path) -> tuple[int, str]:
    argv = ["fio", "--name=job", f"--directory={directory}", "--size=64M", "--verify=crc32c", "--do_verify=1"]
    argv.append("--verify_state_save=0")  # it would leave a file where we are
    argv += ["--verify_fatal=1", "--fallocate=none", *FIO_JOBS[name]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False)
    for path in directory.glob("job*"):
        path.unlink()
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return (2 if done.returncode else 0), lines[0] if lines and done.returncode else ""


def run_pjdfstest(source: Path, directory: Path) -> dict[str, Any]:
    """All tests; assertions per group, and what those that failed needed."""
    groups: dict[str, Any] = {}
    for script in sorted(source.glob("tests/*/*.t")):
        group = groups.setdefault(script.parent.name, {"passed": 0, "failed": 0, "needs": Counter()})
        done = subprocess.run(
            ["bash", str(script)], cwd=directory, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        needed = ""
        for line in done.stdout.splitlines():
            if line.startswith("ok"):
                group["passed"] += 1
            elif line.startswith("not ok") and "# TODO" not in line:  # pjdfstest's mark of what Linux does not do
                group["failed"] += 1
                # What follows a step that was refused fails because of it.
                needed = next((what for what, pattern in NEEDS if re.search(pattern, line)), needed)
                group["needs"][needed or "other"] += 1
                if not needed:
                    group.setdefault("others", []).append(f"{script.parent.name}/{script.name}: {line}")
    return groups


def run_all(directory: Path, seconds: int, pjdfstest: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in STRESSORS:
        found[f"stress-ng {name}"] = stress(name, directory, seconds)
        print(f"{directory}: {name}: {found[f'stress-ng {name}']}", flush=True)
    for name in FIO_JOBS:
        found[f"fio {name}"] = verify_with_fio(name, directory)
        print(f"{directory}: fio {name}: {found[f'fio {name}']}", flush=True)
    if pjdfstest is not None:
        found["pjdfstest"] = run_pjdfstest(pjdfstest, directory)
    return found


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    runs = result["runs"]
    disk, mounts = runs["disk"], [name for name in runs if name != "disk"]
    rows = []
    for name in [*(f"stress-ng {name}" for name in STRESSORS), *(f"fio {name}" for name in FIO_JOBS)]:
        verdicts = [VERDICTS.get(run[name][0], f"ends with {run[name][0]}") for run in runs.values()]
        says = next((runs[mount][name][1] for mount in mounts if runs[mount][name][0]), "")
        rows.append([name, *verdicts, says[:90]])
    same = [f"{sum(row[1] == row[2 + number] for row in rows)}" for number in range(len(mounts))]
    lines = [
        "# Public suites on outputs",
        "",
        f"`--scratch`, engine {result['settings']['engine']}, {result['settings']['seconds']} s for each stressor, "
        f"with --verify. {machine.sentence(result['machine'])}. {' and '.join(same)} of {len(rows)} as on the disk.",
        "",
        markdown_table(["", *runs, "what it says"], rows),
    ]
    for mount in mounts:
        if "pjdfstest" in runs[mount]:
            lines += ["", f"## pjdfstest, {mount}: assertions", "", *pjdfstest_lines(disk, runs[mount])]
    return "\n".join(lines)


def pjdfstest_lines(disk: dict[str, Any], mount: dict[str, Any]) -> list[str]:
    """A table of its groups, and the assertions that fail for no known reason."""
    rows = []
    for group, counts in sorted(mount["pjdfstest"].items()):
        needs = ", ".join(f"{what} {count}" for what, count in counts["needs"].items())
        on_disk = disk["pjdfstest"][group]
        rows.append([group, f"{counts['passed']}", f"{counts['failed']}", f"{on_disk['failed']}", needs])
    head = ["", "passed", "failed", "failed on the disk", "what those that failed needed"]
    others = [line for counts in mount["pjdfstest"].values() for line in counts.get("others", [])]
    return [markdown_table(head, rows), *([""] if others else []), *(f"- {line}" for line in others)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=2, help="for each stressor")
    parser.add_argument("--engine", choices=("native", "python"), default="native")
    parser.add_argument("--nodes", nargs="+", type=int, default=[1], help="of the jobs")
    parser.add_argument("--pjdfstest", type=Path, metavar="DIR", help="a built pjdfstest; root only")
    parser.add_argument("--work-dir", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="posix-suite", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    if arguments.inside is not None:  # the command of the mount
        directory = Path(os.environ["FANSTORE_MOUNT"], "suite")
        directory.mkdir(mode=0o777)
        arguments.inside.write_text(json.dumps(run_all(directory, arguments.seconds, arguments.pjdfstest)))
        return
    prep, mounter = find_program("fanstore-prep"), find_program("fanstore-mount")
    if prep is None or mounter is None or shutil.which("stress-ng") is None or shutil.which("fio") is None:
        raise BenchmarkError("fanstore-prep, fanstore-mount, stress-ng and fio are needed: benchmarks/setup-peers")
    with workspace(arguments.work_dir) as work:
        make(work / "images", DatasetSpec(100, 10_000, 10))
        run([prep, str(work / "images"), str(work / "d.fan")], LIMIT_S)
        (work / "disk").mkdir()
        runs = {"disk": run_all(work / "disk", arguments.seconds, arguments.pjdfstest)}
        for nodes in arguments.nodes:
            runs["mount" if nodes == 1 else f"mount, {nodes} nodes"] = run_mounted(mounter, work, nodes, arguments)
        result = {
            "kind": "posix_suite",
            "machine": machine.describe(work),
            "settings": {"seconds": arguments.seconds, "engine": arguments.engine},
            "runs": runs,
        }
        record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


def run_mounted(mounter: str, work: Path, nodes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it in a job of so many nodes, on the last one."""
    found = work / f"found-{nodes}"
    places = [str(work / "mount-{rank}"), "--local", str(work / "local-{rank}")]
    argv = [mounter, str(work / "d.fan"), *places, "--scratch", "--engine", arguments.engine]
    argv += ["--allow-other"] if arguments.pjdfstest else []  # it acts as several users
    argv += ["--", *only_on(nodes - 1), sys.executable, __file__, "--inside", str(found)]
    argv += ["--seconds", str(arguments.seconds)]
    argv += ["--pjdfstest", str(arguments.pjdfstest)] if arguments.pjdfstest else []
    run([*(launcher(nodes) if nodes > 1 else []), *argv], 3600)
    return dict(json.loads(found.read_text()))


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
