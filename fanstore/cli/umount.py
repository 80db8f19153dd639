"""fanstore-umount: unmount, and wait until the daemon has cleaned up and ended."""

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fanstore.cli.common import make_parser, parse, run
from fanstore.client.connection import ControlClient, connect
from fanstore.client.protocol import ControlError
from fanstore.errors import MountError
from fanstore.fuse.holders import describe_holders
from fanstore.fuse.mountpoint import (
    FUSERMOUNT_LIMIT_S,
    Condition,
    MountBusyError,
    NotAnsweringError,
    busy_error,
    condition,
    is_mounted,
    unmount,
    unmount_patiently,
    within_limit,
)
from fanstore.fuse.unmounted import connect_to
from fanstore.mounttable import Mount, find_mount, read_mounts
from fanstore.paths import resolve
from fanstore.processes import ProcessWatch

PROG = "fanstore-umount"

#: Seconds for a daemon to unmount; it calls fusermount3, too.
UNMOUNT_LIMIT_S = FUSERMOUNT_LIMIT_S + 10.0
#: Seconds for a daemon to end.
TIMEOUT_S = 60.0
#: Seconds after which it is said what is being waited for.
TELL_S = 2.0

_DESCRIPTION = """\
Unmount a dataset that fanstore-mount has mounted. Returns when its daemon has ended and has removed its local files.

The dead mount of a killed daemon ("Transport endpoint is not connected") is removed as well."""

_EPILOG = """\
examples:
  fanstore-umount /tmp/imagenet
  fanstore-umount --lazy /tmp/imagenet      although a process still works in it

exit codes: 0 unmounted, 1 error (busy, not a FanStore mount, the daemon did not end in time), 2 wrong usage."""


def main() -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(sys.argv[1:]))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path, help="where the dataset is mounted")
    parser.add_argument(
        "--lazy",
        action="store_true",
        help="take it away even if processes use it; what they have open stays usable until they let go of it, and "
        "the daemon ends after that",
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=float,
        default=None,
        help=f"how long to wait for the daemon to end (default: {TIMEOUT_S:g}; with outputs, until they are saved or "
        "cannot be)",
    )
    return parser


def _main(argv: Sequence[str]) -> int:
    args = parse(_parser(), argv)
    point = resolve(args.mountpoint)
    if find_mount(point) is None:
        client = connect_to(point, PROG)
        if client is not None:
            return _end_unmounted(point, client, args)
    mount = _find(args.mountpoint)
    state = condition(mount.point)
    if state is Condition.ALIVE:
        _unmount_living(mount, args)
    elif state is Condition.STALE:
        unmount(mount.point, lazy=True)
        _forget(mount.point)
        print(f"removed the dead mount of {mount.source} at {mount.point}")
    elif args.lazy:
        unmount(mount.point, lazy=True)
        print(f"{PROG}: {mount.point} was detached; its daemon did not answer and may still be there", file=sys.stderr)
    else:
        raise MountError(f"the daemon of {mount.point} does not answer; --lazy takes the mount away all the same")
    return 0


def _end_unmounted(point: Path, client: ControlClient, args: argparse.Namespace) -> int:
    """The end of a dataset that is served without a mount."""
    with client:
        config = json.loads(client.ask("stat", name="config.json").values["content"])
        try:
            answer = client.ask("unmount", UNMOUNT_LIMIT_S, lazy=args.lazy)
        except ControlError as error:
            hint = f"; all the same with: {PROG} --lazy {point}" if error.code == "busy" else ""
            raise MountError(f"{error}{hint}") from None
    with contextlib.closing(ProcessWatch.adopt(config["pid"], answer.descriptors[0])) as daemon:
        if args.lazy and not daemon.wait(TELL_S):
            print(f"{point} is gone for programs; daemon {daemon.pid} ends when its COMMAND does")
            return 0
        limit_s = TIMEOUT_S if args.timeout is None else args.timeout
        if not daemon.wait(limit_s):
            raise MountError(
                f"the daemon of {point} (process {daemon.pid}) has not ended within {limit_s:g} s; look at its log"
            )
    return 0


def _forget(point: Path) -> None:
    """Remove what else a killed daemon has left for its mount alone."""
    from fanstore.fuse.deadmount import forget  # rarely needed, and brings numpy

    forget(point)


def _find(path: Path) -> Mount:
    point = resolve(path)
    mount = find_mount(point)
    if mount is not None and mount.is_fanstore:
        return mount
    if mount is not None:
        raise MountError(f"{point} is not a FanStore mount but {mount.kind}, so it is left alone")
    if not os.path.lexists(point):
        raise MountError(f"{point} does not exist")
    for other in reversed(read_mounts()):
        if other.is_fanstore and other.point in point.parents:
            raise MountError(f"{point} lies inside the mount {other.point}: unmount that one")
    raise MountError(f"nothing is mounted on {point}")


def _unmount_living(mount: Mount, args: argparse.Namespace) -> None:
    config = _config(mount)
    daemon = _daemon(config)
    saves = config.get("output") not in (None, "scratch")
    limit_s = args.timeout if args.timeout is not None else math.inf if saves else TIMEOUT_S
    try:
        holders = describe_holders(mount.point) if args.lazy else ""
        try:
            told = _ask_daemon(mount, config, args.lazy)
            if told is not None:
                if daemon is not None:
                    daemon.close()
                daemon = told
            if is_mounted(mount):  # not taken away by the daemon, or only in its own mount namespace
                if args.lazy:
                    unmount(mount.point, lazy=True)
                else:
                    unmount_patiently(mount.point)
        except MountBusyError as error:
            raise MountError(
                f"{error}; try again when that has ended, or take it away all the same with: "
                f"{PROG} --lazy {mount.point}"
            ) from None
        if daemon is None:
            return  # somebody else's, or it ends at this moment
        if holders:
            print(f"{mount.point} was detached; daemon {daemon.pid} ends when these let go: {holders}")
        elif not daemon.wait(TELL_S) and not _wait_for_outputs(daemon, config, saves, limit_s):
            raise MountError(
                f"{mount.point} is unmounted, but its daemon (process {daemon.pid}) has not ended within "
                f"{limit_s:g} s; look at its log"
            )
        if saves and os.path.exists(config.get("job_directory") or "/nonexistent"):
            raise MountError(
                f"{mount.point} is unmounted, but not all outputs could be saved to {config['output']}; they are in "
                f"{config['job_directory']}, and fanstore-mount --recover saves them; its log says more"
            )
    finally:
        if daemon is not None:
            daemon.close()


def _ask_daemon(mount: Mount, config: dict[str, Any], lazy: bool) -> ProcessWatch | None:
    """Have the daemon unmount; its process. None if it could not be asked, or could not. Raises MountBusyError."""
    if config.get("mountpoint") != str(mount.point):
        return None  # a bind mount, or seen from another mount namespace: the daemon would take away another one
    client = connect(config, PROG)
    if client is None:
        return None
    with client:
        try:
            answer = client.ask("unmount", UNMOUNT_LIMIT_S, lazy=lazy)
        except ControlError as error:
            if error.code == "busy":
                raise busy_error(mount.point) from None
            return None
    return ProcessWatch.adopt(config["pid"], answer.descriptors[0]) if answer.descriptors else None


def _wait_for_outputs(daemon: ProcessWatch, config: dict[str, Any], saves: bool, limit_s: float) -> bool:
    """Wait for the end of a daemon that takes its time; whether it came."""
    if saves:
        print(f"{PROG}: outputs are being saved to {config['output']}", file=sys.stderr, flush=True)
    deadline_s = time.monotonic() + limit_s - TELL_S
    while not daemon.wait(min(max(deadline_s - time.monotonic(), 0.0), TIMEOUT_S)):
        if time.monotonic() >= deadline_s:
            return False
    return True


def _config(mount: Mount) -> dict[str, Any]:
    """What the mount says of itself; empty when it cannot be known (another user's mount)."""
    path = mount.point / ".fanstore" / "config.json"
    try:
        config: dict[str, Any] = json.loads(within_limit(path.read_bytes))
    except (OSError, ValueError):
        return {}
    except NotAnsweringError:
        raise MountError(
            f"the daemon of {mount.point} does not answer; --lazy takes the mount away all the same"
        ) from None
    return config


def _daemon(config: dict[str, Any]) -> ProcessWatch | None:
    """The process behind a mount; None when it cannot be known or has gone."""
    try:
        return ProcessWatch(config["pid"], config["start_ticks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
