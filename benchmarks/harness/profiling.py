"""What the processors did, sampled by perf: sorted by who ran and by what the function belongs to, per file.

Used by profile_reads.py and profile_remote.py. Samples come from the clock (virtual machines often have no counters),
of the whole machine, during one pass of a reader. Needs perf (Debian: linux-perf) and root.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.command import BenchmarkError, run
from harness.record import markdown_table

#: Whoever runs when no program does.
NOBODY = "nobody"
#: Functions that are kept by name, of each profile.
_FUNCTIONS_MOST = 25
_FUNCTIONS_SHOWN = 12
#: What a function belongs to: the first pattern that is found in its name.
KINDS: tuple[tuple[str, str], ...] = (
    ("idle", r"idle|pv_native_safe_halt|^mwait|^halt"),
    ("copying bytes", r"copy_to_iter|copy_from_iter|copy_user|copy_page|memcpy|memmove|rep_movs|copyout|copyin|_copy_"),
    ("clearing pages", r"clear_page|clear_huge|rep_stos|memset|clear_user"),
    ("engine and checksum", r"_native\."),
    (
        "disk",
        r"virtio|iowrite|gup_|unpin|vring|virtqueue|vp_notify|blk_|bio_|_bio|submit_bio|mpage|iomap|ext4|dma_|sg_|nvme|elv_|dd_|disk|jbd2",
    ),
    (
        "page cache",
        r"filemap|folio|xas_|xa_|lru|page_|_page|pages|mem_cgroup|charge|readahead|workingset|rmqueue|alloc",
    ),
    ("fuse", r"fuse"),
    (
        "waking and switching",
        r"sched|wake|switch|futex|pick_next|enqueue|dequeue|_cfs|_fair|update_load|prepare_to|finish_|ttwu|rt_mutex|poll|clock|tick|timer|irq|spin_|lock",
    ),
    (
        "names",
        r"path|dentry|lookup|d_|dput|inode|namei|open|close|fput|file|stat|perm|getname|filename|fd|lockref|cred",
    ),
    (
        "entering the kernel",
        r"entry_|syscall|do_sys|vfs_|x64_sys|ksys|srso|retbleed|fsnotify|security|apparmor|audit|rw_verify",
    ),
    ("python", r"Py|_PyEval|gc_"),
)
KIND_NAMES = [kind for kind, _ in KINDS] + ["other"]


def record_argv(perf: str, data: Path, frequency: int) -> list[str]:
    """Before the command during which samples are taken, so many per second and core."""
    return [perf, "record", "-q", "-a", "-e", "cpu-clock", "-F", str(frequency), "-o", str(data), "--"]


def kind_of(symbol: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, symbol)), "other")


def _parse_report(text: str) -> list[tuple[float, int, str, str]]:
    """Share, thread, command and function of the lines of perf report; the native library has no names: its own."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"\s*([\d.]+)%\s+(\d+):(\S+)\s+(\S+)\s+\[[k.]\]\s+(.+)", line)
        if match is not None:
            symbol = match[4] if match[4].startswith("_native.") else match[5].strip()
            lines.append((float(match[1]) / 100, int(match[2]), match[3], symbol))
    if not lines:
        raise BenchmarkError("perf has taken no samples")
    return lines


def read_profile(
    perf: str, data: Path, seconds: float, files: int, who_of: Callable[[str, int], str]
) -> dict[str, dict[str, Any]]:
    """Microseconds of processor time per file by who and what, and by function; ``who_of``: command and thread."""
    report = run([perf, "report", "-i", str(data), "--stdio", "--no-children", "-s", "pid,dso,sym"], 120).stdout
    # All samples together are all cores for as long as the pass took.
    per_file_us = seconds * len(os.sched_getaffinity(0)) / files * 1e6
    parts: dict[str, dict[str, float]] = {}
    functions: dict[str, float] = {}
    for share, thread, command, symbol in _parse_report(report):
        who = who_of(command, thread)
        kind = "idle" if who == NOBODY else kind_of(symbol)
        kinds = parts.setdefault(who, {})
        kinds[kind] = kinds.get(kind, 0) + share * per_file_us
        name = f"{who}: {symbol}"
        functions[name] = functions.get(name, 0) + share * per_file_us
    top = sorted(functions.items(), key=lambda item: -item[1])[:_FUNCTIONS_MOST]
    return {"parts_us": parts, "functions_us": dict(top)}


def make_parts_table(title: str, profiles: Mapping[str, dict[str, Any]], whos: Sequence[str]) -> str:
    """A column for each profile, a row for each who and what that takes a microsecond of a file in one of them."""
    chosen = list(profiles.values())
    rows = [["files/s", *(f"{item['files_per_s']:,.0f}" for item in chosen)]]
    for who in whos:
        for kind in KIND_NAMES:
            figures = [item["parts_us"].get(who, {}).get(kind, 0.0) for item in chosen]
            if max(figures) >= 1.0:
                rows.append([f"{who}: {kind}", *(f"{figure:.1f}" for figure in figures)])
    sums = [sum(sum(kinds.values()) for kinds in item["parts_us"].values()) for item in chosen]
    rows.append(["all, with what is below 1", *(f"{figure:.1f}" for figure in sums)])
    return markdown_table([title, *profiles], rows)


def make_functions_table(title: str, profile: dict[str, Any]) -> str:
    rows = [[name, f"{figure:.1f}"] for name, figure in list(profile["functions_us"].items())[:_FUNCTIONS_SHOWN]]
    heading = f"{title}: {profile['files_per_s']:,.0f} files/s; the longest functions"
    return markdown_table([heading, "µs per file"], rows)
