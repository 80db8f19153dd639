"""How many lines of production code each room has, and had before the rooms and the chunk broker.

Example: python benchmarks/code_lines.py

Lines as wc counts them, in fanstore/ and native/, of two commits. Files of the earlier one are counted in the room in
which their content is now. What came since as a feature is counted apart where it has files of its own; what it has
added to other files is in their rooms, so the last table counts the commits of the redesign alone. Needs the history of
the repository. Writes results/NAME.json.gz and NAME.md.
"""

import argparse
import fnmatch
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness import record
from harness.command import BenchmarkError
from harness.record import markdown_table
from harness.script import run_script

ROOT = Path(__file__).parent.parent
BEFORE = "20a07eb"
#: Where modules of the one room ``fanstore/core``, and files of the one folder ``native``, belong now.
CORE = {
    "dataset": "cache capacity control mapping memorylimit namespace placement reader remote singleflight staging "
    "store",
    "outputs": "births council courier elsewhere journal kernel leases objects output outputs outputtree placer "
    "recovery rush saver shelf",
    "job": "__init__ account job joblock node",
    "telemetry": "events history statistics",
}
NATIVE = {
    "base": "latency nanoseconds pages pool",
    "chunks": "chunkcache content fetching flights landing",
    "format": "chunk index",
    "fuse": "ahead answers crossings device engine nameorder namesahead operations outputcards passing request sending "
    "watch",
    "mpi": "exchange slots",
    "outputs": "outputbirths outputfiles outputfolders outputjournal outputnames outputopens outputs outputstock "
    "writers",
    "prep": "listing pack tarhead",
    "python": "exchange_type module module_engine module_outputs",
}
#: What was in the package for tests alone.
FOR_TESTS = "fanstore/transport/inprocess"
#: Features with files of their own: what the redesign was to bring, and what came beside it.
REDESIGN = {
    "zstd": ["*/codec_zstd.*"],
    "object store": [
        "fanstore/format/objects.py",
        "fanstore/format/storage.py",
        "fanstore/dataset/object_store.py",
        "fanstore/prep/outobjects.py",
    ],
    "control socket": [
        "fanstore/client/__init__.py",
        "fanstore/client/connection.py",
        "fanstore/client/protocol.py",
        "fanstore/client/server.py",
        "fanstore/fuse/requests.py",
    ],
}
LATER = {
    "interception": ["native/preload/*", "fanstore/client/*", "fanstore/fuse/interception.py", "fanstore/cli/run.py"],
    "orders, prefetching, samplers": [
        *("fanstore/order/*", "native/order/*", "fanstore/prefetch/*", "fanstore/torch/*", "fanstore/fuse/begun.py"),
        *("native/fuse/begun.*", "native/chunks/prefetch.*", "native/python/module_order.c"),
    ],
    "model and plans": [
        *("fanstore/model/*", "fanstore/cli/plan*.py", "fanstore/cli/tomlfile.py", "fanstore/report/plan*.py"),
        "fanstore/report/simulationpage.py",
    ],
    "safety of jobs and paths": [
        *("fanstore/cli/supervisor.py", "fanstore/fuse/supervised.py", "fanstore/fuse/success.py", "fanstore/paths.py"),
        *("fanstore/dataset/registration.py", "fanstore/format/users.py", "fanstore/outputs/path_limit.py"),
        *("fanstore/job/copies.py", "fanstore/dataset/restoring.py"),
    ],
    "bound of memory": ["fanstore/dataset/cache_bound.py", "fanstore/allocator.py"],
}
#: The commits of the redesign, by what they are about.
COMMITS = {
    "codecs in tables; auto measures": "b442280 e1698db fac07f6 13adabe 7b4a29c 0602ca8",
    "zstd": "4ec8e52",
    "chunk broker": "0f028b6 6f01894 215fe51 ca68307",
    "rooms": "9b1998f 5ea0644",
    "sources": "818416f",
    "outputs": "239da24 f7d2482 92132c5 51e264f 1ab3dd0",
    "control socket": "b267212 ba17e59 afff07f",
    "object store": "d8ad851 4ae4537 02df338 8e6a3e7 acededf 895a617 2711d94",
}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def lines_of(commit: str) -> dict[str, int]:
    """Lines of each file of production code."""
    empty = git("hash-object", "-t", "tree", "/dev/null").strip()
    numbers = git("diff", "--numstat", "--no-renames", empty, commit, "--", "fanstore", "native")
    files = {path: int(added) for added, _, path in (line.split("\t") for line in numbers.splitlines())}
    return {path: count for path, count in files.items() if path.removesuffix(".py") != FOR_TESTS}


def group_of(path: str, groups: dict[str, list[str]]) -> str | None:
    return next((name for name, globs in groups.items() if any(fnmatch.fnmatch(path, glob) for glob in globs)), None)


def room_of(path: str) -> str:
    top, *rest = path.split("/")
    if path.removesuffix(".py") in ("fanstore/fuse/mounttable", "fanstore/fuse/processes"):
        return "fanstore"
    table = NATIVE if top == "native" and len(rest) == 1 else CORE if rest[0] == "core" else None
    if table is not None:
        name = rest[-1].rsplit(".", 1)[0]
        return next(f"{top}/{room}" for room, names in table.items() if name in names.split())
    return top if len(rest) == 1 else f"{top}/{rest[0]}"


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    before, now = result["before"], result["now"]
    rows = [[room, *cells(before.get(room, 0), now.get(room, 0))] for room in sorted({*before, *now})]
    rows.append(["together", *cells(sum(before.values()), sum(now.values()))])
    own = [[name, f"{count:,}"] for name, count in {**result["redesign"], **result["later"]}.items()]
    commits = [[name, f"{net:+,}"] for name, net in result["commits"].items()]
    commits.append(["together", f"{sum(result['commits'].values()):+,}"])
    return "\n".join(
        [
            "# Lines of production code, before and after the rooms and the chunk broker",
            "",
            f"fanstore/ and native/, {BEFORE} and {result['commit']}. The earlier files are in the rooms of today.",
            "Without files that belong to a feature which was not there before (below), and without the transport for "
            "tests, which was in fanstore/. What later features have added to other files is in this table.",
            "",
            markdown_table(["room", "before", "now", "difference"], rows),
            "",
            markdown_table(["files of their own", "now"], own),
            "",
            "What the commits of the redesign have added and removed:",
            "",
            markdown_table(["", "net"], commits),
        ]
    )


def cells(before: int, now: int) -> list[str]:
    return [f"{before:,}", f"{now:,}", f"{now - before:+,}"]


def benchmark(arguments: argparse.Namespace) -> None:
    before: Counter[str] = Counter()
    for path, count in lines_of(BEFORE).items():
        before[room_of(path)] += count
    now: Counter[str] = Counter()
    redesign: Counter[str] = Counter()
    later: Counter[str] = Counter()
    for path, count in lines_of("HEAD").items():
        if (name := group_of(path, REDESIGN)) is not None:
            redesign[name] += count
        elif (name := group_of(path, LATER)) is not None:
            later[name] += count
        else:
            now[room_of(path)] += count
    commits = {}
    for name, hashes in COMMITS.items():
        numbers = git("show", "--numstat", "--format=", *hashes.split(), "--", "fanstore", "native").splitlines()
        pairs = [line.split("\t")[:2] for line in numbers if line]
        commits[name] = sum(int(added) - int(removed) for added, removed in pairs)
    result = {
        "kind": "code_lines",
        "commit": git("rev-parse", "--short", "HEAD").strip(),
        "before": before,
        "now": now,
        "redesign": redesign,
        "later": later,
        "commits": commits,
    }
    record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="code-lines", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
