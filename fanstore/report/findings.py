"""What stands out in the figures of a job, in sentences: the first thing that a reader of the report should see.

A pure function, used by report/page.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fanstore.report import figures
from fanstore.report.figures import Node
from fanstore.report.markup import ranks_text, share, size
from fanstore.units import format_count

#: A share of bytes from the shared file system that is worth a remark, in a job that has local copies.
_MUCH_SHARED = 0.2

#: How many times the mean a node must have given to others to be called busy, and of how many nodes.
_BUSY, _BUSY_NODES = 2.0, 3


def findings(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Level (``good``, ``plain``, ``warning`` or ``error``) and sentence of each."""
    nodes: Sequence[Node] = data["nodes"]
    yield from _life(data, nodes)
    yield from _reads(nodes)
    yield from _staging(data, nodes)
    yield from _copies(nodes)
    yield from _balance(nodes)
    yield from _saved(data, nodes)


def _life(data: Mapping[str, Any], nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    if data["ended"] and data["code"] is None:
        yield "error", "The job ended by an error of FanStore; the log has it."
    elif data["ended"] and data["code"]:
        yield "warning", f"The job ended with exit code {data['code']}."
    for state, level, meaning in (
        ("lost", "error", "died; what only their disks had came from other copies or from the shared file system"),
        ("silent", "warning", "did not answer when the figures were collected"),
    ):
        ranks = [int(node["rank"]) for node in nodes if node["state"] == state]
        if ranks:
            text = ranks_text(ranks)
            yield level, f"{text[0].upper()}{text[1:]} {meaning}."


def _reads(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    failed, damaged = figures.total(nodes, "errors", "failed_reads"), figures.total(nodes, "errors", "damaged_files")
    fallbacks = figures.total(nodes, "errors", "fallbacks")
    if failed:
        yield (
            "error",
            (
                f"{format_count(failed, 'read')} failed, in {format_count(damaged, 'damaged file')}: no copy was good. "
                "fanstore-verify lists what is damaged in the dataset."
            ),
        )
    elif sum(figures.by_source(nodes, "reads").values()):
        yield "good", "No read failed."
    else:
        yield "plain", "No program has read anything through FanStore."
    if fallbacks:
        yield "warning", f"{format_count(fallbacks, 'time')} a damaged or unreadable copy was replaced by another one."


def _staging(data: Mapping[str, Any], nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    read = figures.by_source(nodes, "bytes")
    whole = sum(read.values())
    storage = data["config"]["storage"]
    if data["config"]["local"] is None:
        yield "plain", f"Nothing was copied to local disks (no --local), so the {storage} serves every file."
        return
    counts = {
        key: figures.total(nodes, "staging", f"{key}_partitions") for key in ("done", "unverified", "failed", "skipped")
    }
    wanted = figures.total(nodes, "staging", "partitions")
    here = counts["done"] + counts["unverified"]
    reused = figures.total(nodes, "staging", "reused_partitions")
    if reused:
        again = "copy of a partition was" if reused == 1 else "copies of partitions were"
        reused_bytes = figures.total(nodes, "staging", "reused_bytes")
        yield "plain", f"{reused:,} {again} there already, kept by earlier jobs ({size(reused_bytes)})."
    copied = size(sum(int(node["local_bytes"]) for node in figures.has_told(nodes)))
    if counts["failed"] or counts["skipped"]:
        yield (
            "warning",
            (
                f"{format_count(counts['failed'] + counts['skipped'], 'copy', 'copies')} of partitions could not be "
                "made (no room, or an error): they are read from elsewhere."
            ),
        )
    elif here < wanted:
        yield "plain", f"{here:,} of {format_count(wanted, 'copy', 'copies')} of partitions are on local disks so far."
    elif here:
        each = "copy of a partition was" if here == 1 else "copies of partitions were"
        total = f"; with those of earlier jobs {copied}" if reused else f" ({copied})"
        yield "good", f"All {here:,} {each} made on local disks{total}."
    if whole and read["shared"] > _MUCH_SHARED * whole:
        yield (
            "warning",
            (
                f"{share(read['shared'], whole)} of the bytes came from the {storage}, not through a copy on a node: "
                "no --local, no room on local disks, or lost nodes."
            ),
        )


def _copies(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """What was copied again after deaths; what is to do each node knows for all, so that the highest number counts."""
    told = [node["copies"] for node in figures.has_told(nodes) if node.get("copies") is not None]
    done, done_bytes = (sum(int(copies[key]) for copies in told) for key in ("done_partitions", "done_bytes"))
    missing, unplaced = (
        max((int(copies[key]) for copies in told), default=0) for key in ("missing_copies", "unplaced_partitions")
    )
    if missing:
        yield (
            "plain",
            f"{format_count(missing, 'copy', 'copies')} of partitions of lost nodes had still to be made again.",
        )
    elif done:
        each = "copy of a partition was" if done == 1 else "copies of partitions were"
        yield "good", f"{done:,} {each} made again on other nodes after a loss ({size(done_bytes)})."
    if unplaced:
        yield (
            "warning",
            f"{format_count(unplaced, 'partition')} of lost nodes had no room elsewhere: another loss may leave only "
            "the shared file system for them.",
        )


def _balance(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    served = {int(node["rank"]): int(node["served_bytes"]) for node in figures.has_told(nodes)}
    if len(served) < _BUSY_NODES or not any(served.values()):
        return
    mean = sum(served.values()) / len(served)
    rank = max(served, key=lambda each: served[each])
    if served[rank] > _BUSY * mean:
        yield (
            "warning",
            (
                f"Rank {rank} gave {served[rank] / mean:.1f} times as much to others as the mean of all nodes; with "
                "more --replicas the load is spread."
            ),
        )


def _saved(data: Mapping[str, Any], nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    told = figures.outputs(nodes)
    if not told or "pending" not in told[0]:
        return
    pending, trouble = int(told[0]["pending"]), told[0]["trouble"]
    if pending and data["ended"]:
        yield "error", f"{format_count(pending, 'output')} could not be saved and stay on the nodes' disks."
    elif pending:
        yield "plain", f"{format_count(pending, 'output')} wait to be saved."
    elif told[0]["files"]:
        yield "good", "All outputs are saved."
    if trouble:
        yield "error", f"Outputs could not be saved the last time: {trouble}."
