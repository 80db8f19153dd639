"""What killed jobs of this user have left on this node: dead mounts, directories, outputs that are not saved.

Looks and changes nothing: the commands that it names do. Any thread.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fanstore.doctor.finding import Finding, note, ok, skipped, warning
from fanstore.errors import FanstoreError, MountError
from fanstore.fuse.mountpoint import Condition, condition
from fanstore.job.job_directory import JobDirectory
from fanstore.mounttable import read_mounts
from fanstore.units import format_age, format_bytes, format_count

#: Seconds for one mount to answer.
_ANSWER_LIMIT_S = 3.0
#: Where jobs keep the shared memory of MPI while they start (fuse/sharedmemory.py).
_SHARED_MEMORY = Path("/dev/shm")
#: Mounts that are asked, all at once: silent ones must not add up.
_MOST_MOUNTS = 100


def check_mounts() -> Iterator[Finding]:
    """FanStore mounts of this user: do they answer?"""
    own = [mount for mount in read_mounts() if mount.is_fanstore and mount.owner == os.geteuid()]
    asked = own[:_MOST_MOUNTS]
    with ThreadPoolExecutor(max_workers=max(1, len(asked))) as pool:
        conditions = list(pool.map(lambda mount: condition(mount.point, _ANSWER_LIMIT_S), asked))
    for mount, state in zip(asked, conditions, strict=True):
        match state:
            case Condition.ALIVE:
                yield note("leftover.mount", f"{mount.source} is mounted on {mount.point}, and answers")
            case Condition.STALE:
                found = f"{mount.point} is the dead mount of a daemon that was killed"
                yield warning("leftover.mount", found, f"run: fanstore-umount {mount.point}")
            case Condition.SILENT:
                found = f"the mount on {mount.point} does not answer"
                fix = f"look at the log of its daemon, then run: fanstore-umount --lazy {mount.point}"
                yield warning("leftover.mount", found, fix)
    if len(own) > _MOST_MOUNTS:
        yield note("leftover.mount", f"{len(own) - _MOST_MOUNTS} more mounts were not asked")
    if not own:
        yield ok("leftover.mount", "no mount of yours is left here")


def check_directories(local: Path | None) -> Iterator[Finding]:
    """Directories of dead jobs in --local, or where jobs without it keep their outputs."""
    base = Path(tempfile.gettempdir()) if local is None else local
    if _SHARED_MEMORY.is_dir():
        for path in JobDirectory.dead(_SHARED_MEMORY):
            found = f"a job that was killed while it started left memory in {path}"
            yield note("leftover.memory", found, "your next job of several nodes here removes it")
    if not os.path.isdir(base):
        return
    try:
        dead = JobDirectory.dead(base)
    except OSError as error:
        yield skipped("leftover.directory", f"{base} cannot be read ({error.strerror})")
        return
    for path in dead:
        try:
            output = waiting_for(path)
        except (FanstoreError, OSError) as error:
            found = f"a killed job left {path}, whose outputs cannot be listed ({error})"
            yield warning("leftover.outputs", found, f"look into {path}/outputs before anything removes it")
            continue
        if output is not None:
            fix = f"run on this node: fanstore-mount --recover --local {base}"
            yield warning("leftover.outputs", f"a killed job left outputs for {output} in {path}", fix)
        else:
            fix = "your next fanstore-mount with the same --local, or likewise without one, removes it"
            yield note("leftover.directory", f"a killed job left copies in {path}", fix)
    if not dead:
        yield ok("leftover.directory", f"no killed job has left anything in {base}")


def check_kept(local: Path | None) -> Iterator[Finding]:
    """Copies that jobs with --keep-local have left there."""
    from fanstore.dataset.kept_copies import KeptCopies

    base = Path(tempfile.gettempdir()) if local is None else local
    try:
        kept = KeptCopies(base, make=False)
    except FileNotFoundError:
        return
    except MountError as error:
        yield warning("leftover.kept", str(error), "remove what is there, if it is yours")
        return
    try:
        holdings = kept.holdings()
    finally:
        kept.close()
    now = time.time()
    for holding in holdings:
        size = format_bytes(sum(copy.identity.bytes for copy in holding.copies))
        of = "datasets that are not known any more" if holding.dataset is None else holding.dataset.dataset
        copies = format_count(len(holding.copies), "copy", "copies")
        found = f"{kept.path} keeps {copies} ({size}) of {of}, used {format_age(now - holding.used_s)}"
        fix = f"they make room by themselves; or remove them: fanstore clean --local {base} --all"
        yield note("leftover.kept", found, fix)


def waiting_for(path: Path) -> str | None:
    """Where outputs in the directory of a dead job are to go; None if there are none."""
    from fanstore.outputs import recovery

    return recovery.waiting_for(path)
