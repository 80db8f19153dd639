"""Other users of this machine, for tests that root runs: an account for a while, /dev/fuse open for it, our programs.

Owns both, and shares them with other runs of the tests on the same machine. Used by the tests of several users.
"""

import contextlib
import fcntl
import os
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FUSE = Path("/dev/fuse")
#: Python, the packages, and this clone.
_ENVIRONMENT = sorted(
    {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), Path(__file__).resolve().parent.parent}
)
#: Holds the mode of /dev/fuse that the first of several runs has found; the last one restores it.
_FOUND_MODE = Path("/tmp/fanstore-test-fuse-mode")
_PROGRAMS = ("useradd", "userdel", "fusermount3", "setpriv", "unshare")


@contextmanager
def account(letter: str) -> Iterator[pwd.struct_passwd]:
    """An ordinary user with a group of their own and no home, who may mount; skips the test if there can be none.

    ``letter`` tells users of one process apart.
    """
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not there")
    name = f"fanstore-{letter}{os.getpid()}"
    _change_accounts("useradd", "--system", "--user-group", "--no-create-home", "--shell", "/bin/sh", name)
    try:
        with _fuse_for_everybody():
            yield pwd.getpwnam(name)
    finally:
        _change_accounts("userdel", name)


def _change_accounts(*command: str) -> None:
    """One at a time: these programs do not wait for each other but fail."""
    directory = os.open("/etc", os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        subprocess.run(command, check=True, timeout=60)
    finally:
        os.close(directory)


@contextmanager
def _fuse_for_everybody() -> Iterator[None]:
    """Let ordinary users mount, as nearly every distribution does, as long as anybody needs it."""
    with open(_FOUND_MODE, "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        mode = stat.S_IMODE(FUSE.stat().st_mode)
        if mode != 0o666:
            lock.write(f"{mode:o}\n")
            lock.flush()
            FUSE.chmod(0o666)
        try:
            yield
        finally:
            with contextlib.suppress(BlockingIOError):  # somebody else still needs it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.seek(0)
                found = lock.read().split()
                if found:
                    FUSE.chmod(int(found[0], 8))
                _FOUND_MODE.unlink()


def prefix_of(user: pwd.struct_passwd) -> list[str]:
    """Before a command: runs it as this user, with the programs of this environment, wherever they are.

    In a mount namespace of its own, in which a directory that only root may enter (as /root, with a Python in it) holds
    nothing but this environment, and can be entered by everybody.
    """
    needed = {path: top for path in _ENVIRONMENT if (top := _closed_above(path)) is not None}
    script = ["set -e", "umask 022", "aside=$(mktemp -d)", "mount -t tmpfs none $aside"]
    for number, path in enumerate(needed):
        script.append(f"mkdir $aside/{number}; mount --bind {shlex.quote(str(path))} $aside/{number}")
    script += [f"mount -t tmpfs -o mode=755 none {shlex.quote(str(top))}" for top in set(needed.values())]
    for number, path in enumerate(needed):
        script.append(f"mkdir -p {shlex.quote(str(path))}; mount --move $aside/{number} {shlex.quote(str(path))}")
    script += ["umount $aside", "rmdir $aside"]
    script.append(f'exec setpriv --reuid={user.pw_uid} --regid={user.pw_gid} --clear-groups --inh-caps=-all "$@"')
    return ["unshare", "--mount", "sh", "-c", "; ".join(script), "sh"]


def _closed_above(path: Path) -> Path | None:
    """The topmost directory on the way that others than its owner cannot enter."""
    closed = [each for each in path.parents if stat.S_IMODE(each.stat().st_mode) & 0o005 != 0o005]
    return closed[-1] if closed else None
