"""A real mount of a tiny dataset: prepared, mounted, read once, compared, unmounted; and once more without a mount.

Owns a temporary directory with everything in it, and removes it. The commands are those that users run, in processes of
their own with limits; the daemon unmounts by itself when the program that reads has ended, and what it leaves behind
nevertheless is unmounted here. Runs in the thread of its check.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fanstore.doctor.disks import misplaced
from fanstore.doctor.finding import Finding, note, ok, warning, wrong
from fanstore.doctor.interception import check_interception
from fanstore.doctor.programs import PYTHON, Programs, alone
from fanstore.errors import MountError
from fanstore.fuse.mountpoint import unmount
from fanstore.mounttable import find_mount

#: Seconds for each of the two commands; they take one or two.
COMMAND_LIMIT_S = 40.0
#: Bytes of the files; the last is larger than a page and than what the kernel reads ahead at first.
_SIZES = (0, 1, 4097, 300_000)

_COMMAND = "import sys; from fanstore.cli.{name} import main; sys.argv[0] = 'fanstore-{name}'; sys.exit(main())"

# Runs while mounted: compares all files with the originals; prints the statistics of the daemon.
_READER = """
import os, sys
mount, source = os.environ["FANSTORE_MOUNT"], sys.argv[1]
names = sorted(os.listdir(source))
assert sorted(os.listdir(mount)) == names, "the names differ"
for name in names:
    with open(f"{mount}/{name}", "rb") as one, open(f"{source}/{name}", "rb") as other:
        assert one.read() == other.read(), f"the content of {name} differs"
print(open(f"{mount}/.fanstore/stats.json").read())
"""


def check_mount(programs: Programs, local: Path | None) -> Iterator[Finding]:
    """In --local if that is there, so that staging is tried as well; otherwise among temporary files."""
    usable = local is not None and os.path.isdir(local) and os.access(local, os.W_OK) and not misplaced(local)
    base = local if usable else None
    try:
        # A directory of its own as --local, too: a start cleans up what dead jobs left there, and we only look.
        directory = Path(os.path.realpath(tempfile.mkdtemp(prefix="fanstore-doctor-", dir=base)))
    except OSError as error:
        fix = "make room there, or set TMPDIR to a directory that can be written to"
        yield wrong("mount", f"no directory can be made for a test ({error})", fix)
        return
    try:
        yield from _try(programs, directory)
    finally:
        _clean_up(directory)


def _try(programs: Programs, directory: Path) -> Iterator[Finding]:
    source, prepared, point = directory / "source", directory / "test.fan", directory / "mount"
    source.mkdir()
    for size in _SIZES:
        (source / f"{size}").write_bytes(bytes(number * 7 & 255 for number in range(size)))
    environment = alone(os.environ)
    command = [*PYTHON, "-c", _COMMAND.format(name="prep"), str(source), str(prepared), "--quiet"]
    ended = programs.run(command, COMMAND_LIMIT_S, environment)
    if ended.code != 0:
        reason = f"no end within {COMMAND_LIMIT_S:g} s" if ended.code is None else ended.said
        yield wrong("mount.prep", f"fanstore-prep fails: {reason}", "see the lines above; otherwise please report it")
        return
    mount = [*PYTHON, "-c", _COMMAND.format(name="mount"), str(prepared), str(point), "--cache", "16MiB"]
    reader = ["--", sys.executable, "-c", _READER, str(source)]
    yield from _try_mount(programs, [*mount, "--local", str(directory / "local"), "--stage-first", *reader])
    yield from check_interception(
        programs, [*mount, "--local", str(directory / "again"), "--no-fuse", *reader], COMMAND_LIMIT_S
    )


def _try_mount(programs: Programs, command: Sequence[str]) -> Iterator[Finding]:
    ended = programs.run(command, COMMAND_LIMIT_S, alone(os.environ))
    if ended.code is None:
        yield wrong(
            "mount",
            f"a test mount did not end within {COMMAND_LIMIT_S:g} s: {ended.said}",
            "look for processes in state D (ps) and for messages of fuse in dmesg, and please report it",
        )
    elif ended.code != 0:
        yield wrong("mount", f"a test mount fails: {ended.said}", "see the lines above; otherwise please report it")
    else:
        yield ok("mount", f"a test mount of {len(_SIZES)} files was read, compared and unmounted")
        yield from _look_at_engine(json.loads(ended.out)["engine"])


def _look_at_engine(engine: dict[str, dict[str, str]]) -> Iterator[Finding]:
    if str(engine["name"]) != "native":
        fix = "fanstore-mount --engine native says why it cannot run"
        yield warning("mount.engine", "Python alone answered, which is many times slower", fix)
        return
    yield ok("mount.engine", "the native engine answered")
    kernel = engine["kernel"]
    features = f"passthrough {kernel['passthrough']}, io_uring {kernel['io_uring']}"
    yield note("kernel.fuse", f"FUSE protocol {kernel['protocol']}; {features} (neither is needed)")


def _clean_up(directory: Path) -> None:
    if find_mount(directory / "mount") is not None:
        try:
            unmount(directory / "mount", lazy=True)
        except MountError:
            return  # it stays, and shows up among the leftovers
    shutil.rmtree(directory, ignore_errors=True)
