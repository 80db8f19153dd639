"""Can programs be intercepted here, and which cannot: the library that is loaded into them, tried without a mount.

The trial is the tiny dataset of testmount.py, read by this Python with ``--no-fuse``, which needs nothing of FUSE. What
the library does not see is told from the programs' own files. Runs in the thread of its check.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fanstore.doctor.finding import Finding, note, ok, warning
from fanstore.doctor.programs import Programs, alone

#: Programs that jobs start, beside this Python.
_PROGRAMS = ("sh", "bash", "cp", "tar", "rsync", "find", "git", "busybox", "apptainer", "mpirun", "srun")

_ELF_HEADER = struct.Struct("<4sBBB9xHHIQQQIHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQ")
_INTERPRETER = 3


def check_interception(programs: Programs, command: Sequence[str], limit_s: float) -> Iterator[Finding]:
    """``command``: fanstore-mount with --no-fuse, and a program that compares all files and prints stats.json."""
    ended = programs.run(command, limit_s, alone(os.environ))
    if ended.code == 0 and json.loads(ended.out)["intercepted"]["opens"] > 0:
        yield ok("preload", "programs can be intercepted: this Python read the same without any mount (--no-fuse)")
        yield from _look_at_programs()
        return
    reason = f"no end within {limit_s:g} s" if ended.code is None else ended.said
    if ended.code == 0:
        reason = "the library was not called"
    yield warning(
        "preload",
        f"programs cannot be intercepted, so that --preload and --no-fuse do not work here: {reason}",
        "nothing else needs it; install FanStore again, and use a Python of the GNU C library that is not static",
    )


def _look_at_programs() -> Iterator[Finding]:
    unseen = []
    for name in (sys.executable, *_PROGRAMS):
        path = shutil.which(name)
        if path is not None and (why := obstacle(Path(path))):
            unseen.append(f"{os.path.basename(name)} ({why})")
    if unseen:
        found = f"the library does not see these programs: {', '.join(unseen)}"
        yield note("preload.programs", found, "let others read the dataset, or mount it")


def obstacle(program: Path) -> str:
    """Why a program does not take LD_PRELOAD with a library for the GNU C library; empty if it does."""
    try:
        if program.stat().st_mode & (stat.S_ISUID | stat.S_ISGID):
            return "set-user-ID"
        with open(program, "rb") as file:
            header = file.read(_ELF_HEADER.size)
            if len(header) < _ELF_HEADER.size or header[:4] != b"\x7fELF":
                return ""  # a script: its interpreter counts
            fields = _ELF_HEADER.unpack(header)
            start, size, count = fields[8], fields[12], fields[13]
            for number in range(count):
                file.seek(start + number * size)
                kind, _, offset, _, _, length = _PROGRAM_HEADER.unpack(file.read(_PROGRAM_HEADER.size))
                if kind == _INTERPRETER:
                    file.seek(offset)
                    return "of musl" if b"musl" in file.read(length) else ""
    except (OSError, struct.error):
        return ""  # it cannot be looked at, nor run perhaps
    return "static"
