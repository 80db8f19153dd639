"""The nodes of a job as a table, and their copies in a line, from ``nodes.json`` (docs/operations.md).

Pure functions, used by cli/stat.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fanstore.units import format_bytes, format_count

_SOURCES = ("local", "cache", "remote", "shared")

#: Columns of MB/s, and the counter in nodes.json that each comes from: what programs on that node have read, what came
#: from other nodes, what went to them.
_RATES = {"read": "read_bytes", "in": "fetched_bytes", "out": "served_bytes"}

_LONGEST_HOST = 24
_LONGEST_RANKS = 14

Node = Mapping[str, Any]


def node_table(nodes: Sequence[Node], before: Sequence[Node] | None) -> Iterator[str]:
    """One line per node, then their sum; rates since ``before``, or averages since each node's start without it.

    A node that does not answer (silent, lost, done) has only its rank, host and state.
    """
    width = max(4, min(_LONGEST_HOST, max(len(str(node["host"])) for node in nodes)))
    earlier = {} if before is None else {node["rank"]: node for node in before}
    lead = 6 + width + 2 + 8 + 10
    period = "MB/s, average" if before is None else "MB/s now"
    yield f"{'':<{lead}}{'reads from':>16}{'':<28}{period:>20}"
    yield (
        f"{'rank':>4}  {'host':<{width}}  {'state':<8}{'on disk':>10}"
        + "".join(f"{source:>11}" for source in _SOURCES)
        + "".join(f"{name:>9}" for name in _RATES)
        + f"{'errors':>8}  peers lost"
    )
    for node in nodes:
        head = f"{node['rank']:>4}  {_shorten(str(node['host']), _LONGEST_HOST):<{width}}  {node['state']:<8}"
        if "reads" in node:
            rates = _rates(node, earlier.get(node["rank"]), averages=before is None)
            yield head + _numbers(node["local_bytes"], node["reads"], rates, _errors(node)) + _ranks(node["peers_lost"])
        else:
            yield head + _numbers(None, {}, {}, None) + "-"
    answered = [node for node in nodes if "reads" in node]
    if len(nodes) > 1:
        reads = {source: sum(node["reads"].get(source, 0) for node in answered) for source in _SOURCES}
        rates = _sum(_rates(node, earlier.get(node["rank"]), averages=before is None) for node in answered)
        numbers = _numbers(
            sum(node["local_bytes"] for node in answered), reads, rates, sum(_errors(node) for node in answered)
        )
        lost = sorted(node["rank"] for node in nodes if node["state"] == "lost")
        yield f"{'all':>4}  {'':<{width}}  {f'{len(answered)} up':<8}{numbers}{_ranks(lost)}"


#: On a terminal: columns in the order in which they are given up where it is too narrow.
_DISPENSABLE = ("lost", "cache", "local", "out", "in", "remote", "on disk")
#: What needs attention comes first: how the states follow each other.
_URGENCY = {"lost": 0, "silent": 1, "up": 3, "done": 4}


def fitted_table(nodes: Sequence[Node], before: Sequence[Node] | None, columns: int, lines: int) -> list[str]:
    """The same in so much room: titles, the nodes that matter most, the sum of the others, and that of all.

    Lost and silent nodes come first, then those with failed reads, then the busiest. If there is room for all, they
    come in the order of ranks. ``MB/s``, ``in`` and ``out`` are rates as in ``node_table``.
    """
    earlier = {} if before is None else {node["rank"]: node for node in before}
    rates = {node["rank"]: _told_rates(node, earlier.get(node["rank"]), averages=before is None) for node in nodes}

    def importance(node: Node) -> tuple[int, float, int]:
        failed = "errors" in node and _errors(node) > 0
        busy = sum(rate or 0.0 for rate in rates[node["rank"]].values())
        return (2 if failed else _URGENCY.get(node["state"], 1)), -busy, node["rank"]

    several = int(len(nodes) > 1)
    shown, others = list(nodes), list[Node]()
    if len(nodes) + 1 + several > lines:
        ordered = sorted(nodes, key=importance)
        room = max(1, lines - 3)
        shown, others = ordered[:room], ordered[room:]
    rows = [
        {"rank": str(node["rank"]), "host": str(node["host"]), "state": str(node["state"])} | _cells([node], rates)
        for node in shown
    ]
    if others:
        rows.append({"rank": "", "host": f"{len(others)} others", "state": ""} | _cells(others, rates))
    if several:
        up = sum(node["state"] == "up" for node in nodes)
        rows.append({"rank": "all", "host": "", "state": f"{up} up"} | _cells(nodes, rates))
    return _fit(rows, columns)


def _fit(rows: Sequence[Mapping[str, str]], columns: int) -> list[str]:
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    widths["host"] = min(widths["host"], _LONGEST_HOST)
    for dispensable in _DISPENSABLE:
        if sum(widths[name] + 2 for name in names) - 2 <= columns:
            break
        names.remove(dispensable)
    too_much = sum(widths[name] + 2 for name in names) - 2 - columns
    widths["host"] = max(8, widths["host"] - max(0, too_much))
    lines = []
    for row in ({name: name for name in names}, *rows):
        cells = (
            f"{_shorten(row[name], widths[name]):{'<' if name in ('host', 'state') else '>'}{widths[name]}}"
            for name in names
        )
        lines.append("  ".join(cells)[:columns].rstrip())
    return lines


def _cells(nodes: Sequence[Node], rates: Mapping[int, Mapping[str, float | None]]) -> dict[str, str]:
    """What some nodes have done together; what is not known is a dash."""
    told = [node for node in nodes if "reads" in node]
    speeds = _sum(dict(rates[node["rank"]]) for node in nodes)
    lost = sorted({rank for node in told for rank in node["peers_lost"]})
    return {
        "on disk": format_bytes(sum(node["local_bytes"] for node in told)) if told else "-",
        **{name: _compact(sum(node["reads"].get(name, 0) for node in told)) if told else "-" for name in _SOURCES},
        **{"MB/s" if name == "read" else name: _megabytes(speeds[name]) for name in _RATES},
        "errors": _compact(sum(map(_errors, told))) if told else "-",
        "lost": _ranks(lost),
    }


def _told_rates(node: Node, before: Node | None, *, averages: bool) -> dict[str, float | None]:
    """``_rates``, also of a node that has told nothing."""
    return _rates(node, before, averages=averages) if "reads" in node else dict.fromkeys(_RATES, None)


def _compact(count: int) -> str:
    """At most five characters: ``9,999``, ``48.0k``, ``1.28M``."""
    value, unit = float(count), ""
    for unit in ("", "k", "M", "G", "T"):
        if value < (9_999.5 if not unit else 999.5):
            break
        value /= 1000
    return f"{value:,.0f}{unit}" if not unit or value >= 99.95 else f"{value:#.3g}{unit}"


def copies_text(told: Sequence[Mapping[str, Any] | None]) -> str:
    """What was copied again after deaths by the nodes that have told of it, and what is to do; empty for nothing.

    What all nodes have to do, each knows for itself: what most of it says counts.
    """
    known = [copies for copies in told if copies is not None]
    taken, done, taken_bytes, done_bytes, failed = (
        sum(copies[key] for copies in known)
        for key in ("partitions", "done_partitions", "bytes", "done_bytes", "failed_partitions")
    )
    missing, unplaced = (
        max((copies[key] for copies in known), default=0) for key in ("missing_copies", "unplaced_partitions")
    )
    parts = []
    if taken:
        parts.append(
            f"{done:,} of {format_count(taken, 'partition')} copied again after a death, "
            f"{format_bytes(done_bytes)} of {format_bytes(taken_bytes)}"
        )
    if failed:
        parts.append(f"{failed:,} could not be")
    if missing:
        parts.append(f"{format_count(missing, 'copy', 'copies')} to go on all nodes")
    if unplaced:
        parts.append(f"no room for those of {format_count(unplaced, 'partition')}")
    return "; ".join(parts)


def _numbers(
    local_bytes: int | None, reads: Mapping[str, int], rates: Mapping[str, float | None], errors: int | None
) -> str:
    """The columns from 'on disk' to 'errors'; what is not known is a dash."""
    disk = "-" if local_bytes is None else format_bytes(local_bytes)
    counts = "".join(f"{'-' if source not in reads else f'{reads[source]:,}':>11}" for source in _SOURCES)
    speeds = "".join(f"{_megabytes(rates.get(name)):>9}" for name in _RATES)
    return f"{disk:>10}{counts}{speeds}{'-' if errors is None else f'{errors:,}':>8}  "


def _rates(node: Node, before: Node | None, *, averages: bool) -> dict[str, float | None]:
    """Bytes per second since ``before``; since the node's start with ``averages``; None where that cannot be said.

    The clock is the node's own: how long it took to answer does not matter.
    """
    if averages:
        elapsed_s, base = float(node["uptime_s"]), dict.fromkeys(_RATES.values(), 0)
    elif before is None or "reads" not in before:
        return dict.fromkeys(_RATES, None)
    else:
        elapsed_s, base = float(node["uptime_s"]) - float(before["uptime_s"]), dict(before)
    if elapsed_s <= 0:
        return dict.fromkeys(_RATES, None)
    return {name: (node[counter] - base[counter]) / elapsed_s for name, counter in _RATES.items()}


def _sum(rates: Iterator[dict[str, float | None]]) -> dict[str, float | None]:
    total: dict[str, float | None] = dict.fromkeys(_RATES, None)
    for rate in rates:
        for name, value in rate.items():
            if value is not None:
                total[name] = (total[name] or 0.0) + value
    return total


def _errors(node: Node) -> int:
    """Reads that failed; one that another copy answered is none."""
    return int(node["errors"]["failed_reads"])


def _megabytes(rate: float | None) -> str:
    if rate is None:
        return "-"
    value = rate / 1e6
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ranks(ranks: Sequence[int]) -> str:
    """``3,5``, or only how many if there are many; a dash for none."""
    text = ",".join(map(str, ranks))
    return text if 0 < len(text) <= _LONGEST_RANKS else f"{len(ranks)} nodes" if ranks else "-"


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
