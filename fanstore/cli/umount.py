"""fanstore-umount: unmount, and wait until the daemon has cleaned up and ended."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fanstore.cli.common import make_parser, run
from fanstore.errors import MountError
from fanstore.fuse.holders import describe_holders
from fanstore.fuse.mountpoint import (
    Condition,
    MountBusyError,
    NotAnsweringError,
    condition,
    resolve,
    unmount,
    within_limit,
)
from fanstore.fuse.mounttable import Mount, find_mount, read_mounts
from fanstore.fuse.processes import ProcessWatch

PROG = "fanstore-umount"

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


def _main(argv: Sequence[str]) -> int:
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
        default=60.0,
        help="how long to wait for the daemon to end (default: %(default)g)",
    )
    args = parser.parse_args(argv)
    mount = _find(args.mountpoint)
    state = condition(mount.point)
    if state is Condition.ALIVE:
        _unmount_living(mount, args)
    elif state is Condition.STALE:
        unmount(mount.point, lazy=True)
        print(f"removed the dead mount of {mount.source} at {mount.point}")
    elif args.lazy:
        unmount(mount.point, lazy=True)
        print(f"{PROG}: {mount.point} was detached; its daemon did not answer and may still be there", file=sys.stderr)
    else:
        raise MountError(f"the daemon of {mount.point} does not answer; --lazy takes the mount away all the same")
    return 0


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
    daemon = _daemon(mount)
    try:
        holders = describe_holders(mount.point) if args.lazy else ""
        try:
            unmount(mount.point, lazy=args.lazy)
        except MountBusyError as error:
            raise MountError(
                f"{error}; try again when that has ended, or take it away all the same with: "
                f"{PROG} --lazy {mount.point}"
            ) from None
        if daemon is None:
            return  # somebody else's, or it ends at this moment
        if holders:
            print(f"{mount.point} was detached; daemon {daemon.pid} ends when these let go: {holders}")
        elif not daemon.wait(args.timeout):
            raise MountError(
                f"{mount.point} is unmounted, but its daemon (process {daemon.pid}) has not ended within "
                f"{args.timeout:g} s; look at its log"
            )
    finally:
        if daemon is not None:
            daemon.close()


def _daemon(mount: Mount) -> ProcessWatch | None:
    """The process behind a mount; None when it cannot be known (another user's mount) or has gone."""
    path = mount.point / ".fanstore" / "config.json"
    try:
        config = json.loads(within_limit(path.read_bytes))
        return ProcessWatch(config["pid"], config["start_ticks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    except NotAnsweringError:
        raise MountError(
            f"the daemon of {mount.point} does not answer; --lazy takes the mount away all the same"
        ) from None
