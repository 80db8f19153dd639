"""Can this user mount FUSE file systems here? The device, fusermount3 and its rights, fuse.conf, the C engine.

Looks only; whether it really works is shown by testmount.py. Any thread.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fanstore.doctor.finding import Finding, note, ok, split_error, warning, wrong
from fanstore.doctor.programs import Programs
from fanstore.errors import MountError
from fanstore.fuse.mountpoint import FUSE_DEVICE, FUSERMOUNT, check_device, check_fusermount

_CONFIGURATION = Path("/etc/fuse.conf")
_LIMIT_S = 10.0
#: What else can be done where nothing can be mounted.
_WITHOUT = "or do without a mount: fanstore-mount --no-fuse"

#: CAP_SYS_ADMIN of <linux/capability.h>, with which root mounts.
_CAP_SYS_ADMIN = 21
#: The first with everything that is used: pidfd_open, with which fanstore-umount waits for a daemon, is the newest.
_OLDEST_KERNEL = (5, 3)


def check_kernel() -> Iterator[Finding]:
    """Its version; which FUSE features it offers is known when something was mounted."""
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None or (int(match[1]), int(match[2])) >= _OLDEST_KERNEL:
        yield ok("kernel", f"Linux {release}")
    else:
        oldest = ".".join(map(str, _OLDEST_KERNEL))
        yield warning("kernel", f"Linux {release} is older than {oldest}", "fanstore-umount needs a newer kernel")


def check_fuse_device() -> Iterator[Finding]:
    """Is it there, and may we?"""
    try:
        check_device()
    except MountError as error:
        found, fix = split_error(error)
        yield wrong("fuse.device", found, f"{fix}; {_WITHOUT}")
        return
    yield ok("fuse.device", f"{FUSE_DEVICE} can be opened")


def check_fusermount3(programs: Programs) -> Iterator[Finding]:
    """Is it there, and may it mount for an ordinary user? Root needs it only without the capability to mount."""
    name = "fuse.fusermount3"
    if os.geteuid() == 0:
        yield from _check_root(name)
        return
    try:
        check_fusermount()
    except MountError as error:
        found, fix = split_error(error)
        yield wrong(name, found, f"{fix}; {_WITHOUT}")
        return
    program = shutil.which(FUSERMOUNT)
    assert program is not None
    obstacle = _setuid_obstacle(program)
    if obstacle is not None:
        yield wrong(name, *obstacle)
        return
    version = fusermount_version(programs) or "of unknown version"
    yield ok(name, f"{program} {version}, setuid root: an ordinary user can mount")


def _check_root(name: str) -> Iterator[Finding]:
    if _has_capability():
        yield ok(name, "root mounts without fusermount3")
    elif shutil.which(FUSERMOUNT) is None:
        yield wrong(
            name,
            "root may not mount here (no CAP_SYS_ADMIN), and fusermount3 is not there",
            "start the container with --device /dev/fuse --cap-add SYS_ADMIN",
        )
    else:
        yield warning(
            name,
            "root may not mount here (no CAP_SYS_ADMIN); fusermount3 is tried instead",
            "start the container with --device /dev/fuse --cap-add SYS_ADMIN if the test mount below fails",
        )


def _has_capability() -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", _own_status(), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_SYS_ADMIN & 1)


def _own_status() -> str:
    return Path("/proc/self/status").read_text()


def _setuid_obstacle(program: str) -> tuple[str, str] | None:
    """Why the program does not run with the rights of root, and what to do; None if it does."""
    status = os.stat(program)
    if not status.st_mode & stat.S_ISUID or status.st_uid != 0:
        if _has_file_capability(program):
            return None
        return (
            f"{program} is not setuid root, so it cannot mount for you",
            f"ask the administrator for: chown root {program} && chmod u+s {program} (or to install fuse3 again)",
        )
    if os.statvfs(program).f_flag & os.ST_NOSUID:
        return (
            f"{program} lies on a file system that is mounted nosuid, so it cannot mount for you",
            "use the fusermount3 of the system, ahead in PATH, or ask the administrator for a mount without nosuid",
        )
    if re.search(r"^NoNewPrivs:\s*1$", _own_status(), re.MULTILINE):
        return (
            f"this process may not gain rights (no_new_privs), so {program} cannot mount for you",
            "start the container without no-new-privileges, or as root with --cap-add SYS_ADMIN",
        )
    return None


def _has_file_capability(program: str) -> bool:
    try:
        return bool(os.getxattr(program, "security.capability"))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def fusermount_version(programs: Programs) -> str:
    """Such as ``3.14.0``; empty if there is none, or it does not say."""
    program = shutil.which(FUSERMOUNT)
    if program is None:
        return ""
    match = re.search(r"\d+\.\d+\S*", programs.run([program, "--version"], _LIMIT_S).out)
    return match[0] if match else ""


def check_configuration() -> Iterator[Finding]:
    """user_allow_other: only for those who want --allow-other."""
    if os.geteuid() == 0:
        return  # root needs nobody's permission
    try:
        lines = [line.strip() for line in _CONFIGURATION.read_text().splitlines()]
    except OSError:
        lines = []
    if "user_allow_other" in lines:
        yield ok("fuse.allow_other", f"--allow-other can be used (user_allow_other is in {_CONFIGURATION})")
    else:
        yield note(
            "fuse.allow_other",
            "--allow-other cannot be used; nothing else needs it",
            f"if others must see the mount, ask the administrator for the line user_allow_other in {_CONFIGURATION}",
        )


def check_engine(native_error: str) -> Iterator[Finding]:
    """Can the C part be loaded, and may its socket be as large as it must? ``native_error``: why not, from packages."""
    name = "engine.native"
    if native_error:
        yield wrong(
            name, f"the C part of FanStore cannot be loaded ({native_error})", "install FanStore again: scripts/setup"
        )
        return
    from fanstore.fuse.native import socket_pair

    try:
        for end in socket_pair():
            end.close()
    except OSError as error:
        yield warning(
            name,
            f"the native engine cannot run here ({error.strerror}); Python alone answers, many times slower",
            "ask the administrator for: sysctl net.core.wmem_max=212992",
        )
        return
    yield ok(name, "the native engine can be loaded")
