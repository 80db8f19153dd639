"""Which processes keep a mount busy: they work in it, run from it, map or hold open a file of it.

Best effort, for a message only: processes of other users are hidden from an ordinary user. Reads nothing but links and
text below ``/proc``, never the mounted file system itself, which may not answer. Used by mountpoint.py, on any thread.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: A message names this many processes; the rest is a number.
_NAMED = 5


@dataclass(frozen=True)
class Holder:
    """One process, and one example of what it holds."""

    pid: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}, {self.what})"


def find_holders(point: Path) -> list[Holder]:
    """Processes that hold the file system at this absolute path, without the calling one."""
    root = os.fsencode(point)
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            what = next(_held(entry.path, root), None)
            name = Path(entry.path, "comm").read_text(errors="replace").strip() if what else ""
        except OSError:
            continue  # it has just ended, or belongs to somebody else
        if what:
            found.append(Holder(int(entry.name), name, what))
    return sorted(found, key=lambda holder: holder.pid)


def describe_holders(point: Path) -> str:
    """A list for a message, such as ``bash (process 77, working directory)``; "" when none was found."""
    holders = find_holders(point)
    text = ", ".join(map(str, holders[:_NAMED]))
    return f"{text} and {len(holders) - _NAMED} more" if len(holders) > _NAMED else text


def _held(process: str, root: bytes) -> Iterator[str]:
    """What the process holds below root. The links are text made by the kernel: following them would ask the daemon."""
    for link, what in (("cwd", "working directory"), ("root", "root directory"), ("exe", "program")):
        if _inside(os.readlink(os.fsencode(f"{process}/{link}")), root):
            yield what
    for descriptor in os.listdir(f"{process}/fd"):
        try:
            target = os.readlink(os.fsencode(f"{process}/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # closed meanwhile
        if _inside(target, root):
            yield f"open file {os.fsdecode(target)}"
    for line in Path(process, "maps").read_bytes().splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6 and _inside(fields[5], root):
            yield f"mapped file {os.fsdecode(fields[5])}"


def _inside(path: bytes, root: bytes) -> bool:
    return path == root or path.startswith(root.rstrip(b"/") + b"/")
