"""What a test run must not leave behind: FUSE mounts, processes, job directories.

Owns the recognition only, and ends nothing. A process is known by a mark in its environment, which children inherit
across double forks and new sessions, or by a command line that names the run's temporary directory (for children
started with a clean environment). Several runs can therefore go on at once on one machine without seeing each other.
Used by conftest.py at the end of a session, and by scripts/test and scripts/demo as ``python tests/leftovers.py DIR``.
"""

import fcntl
import os
import re
import sys
from pathlib import Path

#: Environment variable with the mark of a run; set by whoever starts one.
MARK_VARIABLE = "FANSTORE_TEST_RUN"

_JOB_DIRECTORY = re.compile(r"fanstore-\d+-.+")
_OCTAL = re.compile(rb"\\([0-7]{3})")


def mounts_below(directory: Path) -> list[str]:
    """Mount points below the directory, of any kind: nobody but a test mounts there."""
    prefix = os.fsencode(directory.resolve()).rstrip(b"/") + b"/"
    found = []
    with open("/proc/self/mountinfo", "rb") as lines:
        for line in lines:
            fields = line.split(b" ")
            point = _OCTAL.sub(lambda match: bytes([int(match[1], 8)]), fields[4])
            if point.startswith(prefix):
                kind = fields[fields.index(b"-", 6) + 1]
                found.append(f"mount {os.fsdecode(point)} ({os.fsdecode(kind)})")
    return found


def processes_of(mark: str | None, directory: Path) -> list[str]:
    """Processes that carry the mark, or whose command line names the directory; without ourselves and our parents."""
    needles = [os.fsencode(directory.resolve()) + b"/"]
    mark_needle = f"{MARK_VARIABLE}={mark}\0".encode() if mark else None
    own = _ancestors()
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in own:
            continue
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes() + b"\0"
            state = (process / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
        if state in b"ZX":
            continue  # ended; only its parent has not looked yet
        if any(needle in command for needle in needles) or (mark_needle is not None and mark_needle in environment):
            text = os.fsdecode(command.replace(b"\0", b" ")).strip()
            found.append(f"process {process.name}: {text[:200]}")
    return found


def job_directories(directory: Path, newer_than_s: float = 0.0) -> list[str]:
    """Job directories (``fanstore-<uid>-<job>``) of dead jobs directly in the directory, made after the given time.

    Directories of live jobs are not reported: they are somebody else's, or their process is found by processes_of.
    """
    found = []
    for entry in directory.iterdir():
        if not _JOB_DIRECTORY.fullmatch(entry.name):
            continue
        try:
            made_s = entry.lstat().st_mtime
        except FileNotFoundError:
            continue  # somebody else's job, which has just ended
        if made_s >= newer_than_s and not is_live(entry):
            found.append(f"job directory {entry}")
    return found


def is_kept(directory: Path) -> bool:
    """Whether this is where jobs with ``--keep-local`` leave copies; the others do not make it."""
    return re.fullmatch(r"fanstore-kept-\d+", directory.name) is not None


def is_live(job_directory: Path) -> bool:
    """Whether a process holds the lock of the job directory (job/job_directory.py says how it works)."""
    try:
        with open(job_directory / "lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no lock file, or not ours to open: then nobody of ours lives there
    return False


def _ancestors() -> set[int]:
    """Process numbers of ourselves and of everything above us: the test command and its shells."""
    chain = set()
    number = os.getpid()
    while number > 0:
        chain.add(number)
        try:
            stat = Path(f"/proc/{number}/stat").read_bytes()
        except OSError:
            break  # hidden from us (hidepid), so nothing above can be seen either
        number = int(stat.rsplit(b")", 1)[1].split()[1])
    return chain


def main() -> int:
    """Print what a run with the temporary directory DIR left behind; 1 if there is anything."""
    directory = Path(sys.argv[1])
    found = mounts_below(directory) + processes_of(os.environ.get(MARK_VARIABLE), directory)
    for line in found:
        print(f"left behind: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
