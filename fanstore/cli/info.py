"""fanstore-info: what a prepared dataset is, and how much room it needs on the nodes of a job."""

from __future__ import annotations

import argparse
import json
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fanstore.cli.common import make_parser, parse, run
from fanstore.dataset.placement import place
from fanstore.errors import UsageError
from fanstore.format.codec_table import CODECS
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.format.users import users_of
from fanstore.units import format_bytes, format_count

PROG = "fanstore-info"

#: Numbers of nodes whose room is shown if none is asked for.
NODES = (1, 2, 4, 8, 16)

_DESCRIPTION = """\
Say what is in a prepared dataset: files and their sizes, how they are stored, partitions, when it was made, and the
room that its partitions take on each node of a job. Reads the manifest and the index only."""

_EPILOG = """\
examples:
  fanstore info /data/imagenet.fan
  fanstore info s3://data/imagenet.fan --nodes 12 --replicas 2
  fanstore info /data/imagenet.fan --json

exit codes: 0 said; 1 the dataset cannot be read; 2 wrong usage"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "prepared", metavar="PREPARED", help="a dataset made by fanstore-prep: a directory or an address"
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help=f"room on each of N nodes (default: {', '.join(map(str, NODES))})"
    )
    parser.add_argument("--replicas", type=int, default=1, metavar="R", help="with R copies of everything (default 1)")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    arguments = parse(_parser(), argv)
    for name in ("nodes", "replicas"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be 1 or more")
    prepared = PreparedDataset.open(arguments.prepared)
    nodes = NODES if arguments.nodes is None else (arguments.nodes,)
    facts = describe(prepared, nodes, arguments.replicas)
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join(_lines(facts)))
    return 0


def describe(prepared: PreparedDataset, nodes: tuple[int, ...], replicas: int) -> dict[str, Any]:
    """All that is said, as plain values; units in names."""
    manifest, index = prepared.manifest, prepared.index
    totals, partitions = manifest.totals, manifest.partitions
    sizes = [part.bytes for part in partitions]
    directory = prepared.storage.directory
    return {
        "dataset": str(prepared.storage),
        "format_version": manifest.version,
        "created": manifest.created,
        "files": totals.files,
        "directories": totals.directories,
        "symlinks": totals.symlinks,
        "hardlinks": totals.hardlinks,
        "bytes": totals.bytes,
        "stored_bytes": totals.stored_bytes,
        "codec": manifest.codec,
        "file_bytes": _file_sizes(index),
        "stored_as": _stored_as(index),
        "shuffled_with_seed": manifest.shuffle,
        "partitions": {
            "count": len(partitions),
            "bytes": sum(sizes),
            "smallest_bytes": min(sizes, default=0),
            "largest_bytes": max(sizes, default=0),
            "everywhere": sum(part.everywhere for part in partitions),
            "everywhere_bytes": sum(part.bytes for part in partitions if part.everywhere),
            "external": sum(part.external for part in partitions),
        },
        "made_from": [one.path for one in manifest.origin.sources] if manifest.origin is not None else None,
        "left_out_files": manifest.origin.left_out if manifest.origin is not None else 0,
        "garbage_bytes": manifest.garbage.bytes if manifest.garbage is not None else 0,
        "garbage_misleading": manifest.garbage.misleading if manifest.garbage is not None else 0,
        "index_bytes": manifest.index_bytes,
        "replicas": replicas,
        "room_bytes_per_node": {str(count): _room(prepared, count, replicas) for count in nodes},
        "in_use_by": None if directory is None else _users(directory),
    }


def _users(directory: Path) -> list[str] | None:
    """The jobs that have it mounted; None if that cannot be seen from here."""
    try:
        return [str(user) for user in users_of(directory)]
    except OSError:
        return None


def _integers(index: Index, tag: str) -> Any:
    return index.column(tag).astype(np.int64)


def _regular(index: Index) -> Any:
    """Which entries are regular files, each once."""
    own = _integers(index, "inode") == np.arange(index.entry_count)
    return own & ((_integers(index, "mode") & 0o170000) == stat.S_IFREG)


def _file_sizes(index: Index) -> dict[str, int]:
    sizes = _integers(index, "size")[_regular(index)]
    if not len(sizes):
        return {}
    middle, most = (int(value) for value in np.percentile(sizes, [50, 90], method="lower"))
    return {"smallest": int(sizes.min()), "median": middle, "percentile_90": most, "largest": int(sizes.max())}


def _stored_as(index: Index) -> dict[str, dict[str, int]]:
    """By codec: how many files, of how many bytes, in how many."""
    chosen = _regular(index) & (_integers(index, "size") > 0)
    codec, size, stored = (_integers(index, tag)[chosen] for tag in ("codec", "size", "stored"))
    return {
        CODECS[number].name: {
            "files": int((codec == number).sum()),
            "bytes": int(size[codec == number].sum()),
            "stored_bytes": int(stored[codec == number].sum()),
        }
        for number in map(int, np.unique(codec))
    }


def _room(prepared: PreparedDataset, nodes: int, replicas: int) -> int:
    """Bytes of partitions on the node that has most, if there is room for all."""
    partitions = prepared.manifest.partitions
    sizes = [part.bytes for part in partitions]
    everywhere = [part.everywhere for part in partitions]
    placed = place(sizes, everywhere, [max(1, replicas * sum(sizes))] * nodes, replicas)
    held = [0] * nodes
    for size, ranks in zip(sizes, placed.holders, strict=True):
        for rank in ranks:
            held[rank] += size
    return max(held)


def _lines(facts: dict[str, Any]) -> list[str]:
    parts, sizes = facts["partitions"], facts["file_bytes"]
    rows = [
        ("made", f"{facts['created']}, format {facts['format_version']}{_made_from(facts['made_from'])}"),
        ("content", _content(facts)),
        *([("left out", f"{facts['left_out_files']:,} files")] if facts["left_out_files"] else []),
        *([("sizes", _sizes(sizes))] if sizes else []),
        ("stored", _stored(facts)),
        ("partitions", _partitions(parts)),
        *([("garbage", _garbage(facts))] if facts["garbage_bytes"] else []),
        ("order", _order(facts["shuffled_with_seed"])),
        ("index", f"{format_bytes(facts['index_bytes'])}, in the memory of each node"),
        ("room", _rooms(facts)),
    ]
    if facts["in_use_by"]:
        rows.append(("in use", "; ".join(facts["in_use_by"])))
    return [facts["dataset"], *(f"  {name:<11} {text}" for name, text in rows)]


def _made_from(paths: list[str] | None) -> str:
    if not paths:
        return ""
    return f", from {paths[0]}" + (f" and {format_count(len(paths) - 1, 'other')}" if len(paths) > 1 else "")


def _garbage(facts: dict[str, Any]) -> str:
    share = facts["garbage_bytes"] / max(1, facts["partitions"]["bytes"])
    text = f"{format_bytes(facts['garbage_bytes'])} ({share:.0%} of the partitions) since updates"
    advice = "; --update --repack writes them anew"
    return text + (f"{advice}, needed before unpacking with tar" if facts["garbage_misleading"] else advice)


def _content(facts: dict[str, Any]) -> str:
    more = [
        format_count(facts[key], singular)
        for key, singular in (("symlinks", "symbolic link"), ("hardlinks", "further hard link"))
        if facts[key]
    ]
    files = format_count(facts["files"], "file")
    directories = format_count(facts["directories"], "directory", "directories")
    extra = f"; {', '.join(more)}" if more else ""
    return f"{files} in {directories}, {format_bytes(facts['bytes'])}{extra}"


def _sizes(sizes: dict[str, int]) -> str:
    words = {key: format_bytes(value) for key, value in sizes.items()}
    return (
        f"of files: median {words['median']}, nine in ten up to {words['percentile_90']}, "
        f"from {words['smallest']} to {words['largest']}"
    )


def _stored(facts: dict[str, Any]) -> str:
    each = [
        f"{format_count(row['files'], 'file')} "
        + ("uncompressed" if name == "none" else f"with {name}, {row['bytes'] / max(1, row['stored_bytes']):.2f} : 1")
        for name, row in facts["stored_as"].items()
    ]
    return f"{format_bytes(facts['stored_bytes'])} (--codec {facts['codec']}): {', '.join(each) or 'no content'}"


def _partitions(parts: dict[str, Any]) -> str:
    text = f"{parts['count']:,}, {format_bytes(parts['bytes'])} in all"
    if parts["count"] > 1:
        text += f", {format_bytes(parts['smallest_bytes'])} to {format_bytes(parts['largest_bytes'])} each"
    if parts["everywhere"]:
        text += f"; {parts['everywhere']:,} of them for every node ({format_bytes(parts['everywhere_bytes'])})"
    if parts["external"]:
        text += f"; {parts['external']:,} are tar files elsewhere, which must stay there"
    return text


def _order(seed: int | None) -> str:
    return "files in the order of names" if seed is None else f"files in random order, seed {seed}"


def _rooms(facts: dict[str, Any]) -> str:
    copies = "" if facts["replicas"] == 1 else f", {facts['replicas']} copies"
    each = [
        f"{format_bytes(size)} on {format_count(int(nodes), 'node')}"
        for nodes, size in facts["room_bytes_per_node"].items()
    ]
    return f"per node (--local){copies}: {', '.join(each)}"


if __name__ == "__main__":
    sys.exit(main())
