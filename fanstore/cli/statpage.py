"""The figures of one mount as tables for people, from ``stats.json`` (docs/operations.md): the whole page, and what
of it fits on a terminal.

Pure functions, used by cli/stat.py; the table of nodes is made in nodetable.py.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fanstore.cli.nodetable import Node, copies_text, fitted_table
from fanstore.units import format_bytes, format_count, format_duration

_TIMES = ("p50", "p90", "p99", "max")
#: What is counted together, in stats.json and here.
_OTHER, _OTHERS = "other", "all others"
#: Kinds of operations that are always shown; columns in front of what a detail says.
_LEAST_ROWS, _NAMED = 4, 12
#: Details on a terminal, in the order of importance; there, copies are told of with the nodes.
_IMPORTANCE = [
    "fallbacks",
    "outputs",
    "staged",
    "reused",
    "order",
    "rearranged",
    "cache",
    "memory",
    "intercepted",
    "damaged",
    "engine",
    "verified",
]


def head(stats: Mapping[str, Any], config: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[str]:
    """How long it is up; with ``before``, what it has done since."""
    yield f"up {format_duration(stats['uptime_s'])}, process {config['pid']} on {config['host']}"
    if before is not None:
        yield _rates(stats, before)


def page(stats: Mapping[str, Any]) -> Iterator[str]:
    """Everything about this node."""
    yield from ("", *operations(stats), "", *sources(stats), "")
    yield from (f"{name:<{_NAMED}}{text}" for name, text in details(stats))


def screen(
    top: Sequence[str],
    stats: Mapping[str, Any] | None,
    nodes: tuple[Sequence[Node], Sequence[Node] | None],
    columns: int,
    lines: int,
) -> list[str]:
    """What matters most, on fewer than so many lines, none longer than that.

    ``top`` comes first, then the nodes of a job (now and before), if there are several or ``stats`` is None.
    """
    room = lines - 1  # the cursor is in the last one
    shown = [line if len(line) <= columns else f"{line[: columns - 1]}…" for line in top]
    if stats is None or len(nodes[0]) > 1:
        # Beside other things, a third of the screen will do.
        shown += fitted_table(*nodes, columns, room - len(shown) if stats is None else max(5, room // 3))
    if stats is None:
        return shown[:room]
    told = sorted(
        (detail for detail in details(stats) if detail[0] in _IMPORTANCE),
        key=lambda detail: _IMPORTANCE.index(detail[0]),
    )
    rest = [
        line
        for name, text in told
        for line in textwrap.wrap(f"{name:<{_NAMED}}{text}", columns, subsequent_indent=" " * _NAMED)
    ]
    left = room - len(shown) - len(bytes_read := sources(stats)) - 3
    rows = max(_LEAST_ROWS, left - 1 - len(rest))
    for block in (bytes_read, operations(stats, rows), rest):
        if room - len(shown) > 1:
            shown += ["", *block][: room - len(shown)]
    return shown


def operations(stats: Mapping[str, Any], most: int | None = None) -> list[str]:
    """What the kernel asked for; with ``most`` rows, the most frequent, and in the last row the sum of the rest."""
    counted = dict(sorted(stats["operations"].items(), key=lambda each: each[0] == _OTHER))
    names = list(counted)
    if most is not None and len(names) > most:
        names = sorted((name for name in names if name != _OTHER), key=lambda name: -counted[name]["count"])[: most - 1]
    lines = [f"{'operation':<12}{'count':>12}{'errors':>9}" + "".join(f"{key:>10}" for key in _TIMES)]
    for name in names:
        each = counted[name]
        times = "".join(f"{_microseconds(each['latency_us'][key]):>10}" for key in _TIMES)
        lines.append(f"{_OTHERS if name == _OTHER else name:<12}{each['count']:>12,}{each['errors']:>9,}{times}")
    if rest := [each for name, each in counted.items() if name not in names]:
        count, errors = (sum(each[key] for each in rest) for key in ("count", "errors"))
        lines.append(f"{_OTHERS:<12}{count:>12,}{errors:>9,}" + f"{'-':>10}" * len(_TIMES))
    return lines


def sources(stats: Mapping[str, Any]) -> list[str]:
    """Where bytes came from."""
    lines = [f"{'read from':<12}{'reads':>12}{'bytes':>12}{'share':>8}{'fetched':>12}"]
    total = sum(source["bytes"] for source in stats["sources"].values())
    for name, source in stats["sources"].items():
        share = f"{source['bytes'] / total:.1%}" if total else "-"
        fetched = format_bytes(source["fetched_bytes"]) if source["fetches"] else "-"
        lines.append(f"{name:<12}{source['reads']:>12,}{format_bytes(source['bytes']):>12}{share:>8}{fetched:>12}")
    return lines


def details(stats: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Everything else: name and sentence."""
    staging, errors, memory, engine = stats["staging"], stats["errors"], stats["memory"], stats["engine"]
    cache = stats["cache"]
    answered = f"{engine['answered_python']:,} requests answered by Python"
    if engine["name"] == "native":
        answered = f"{engine['answered_native']:,} requests answered natively, {engine['answered_python']:,} by Python"
    if engine["name"] == "none":
        answered = "nothing is mounted, programs read by themselves"
    yield "engine", f"{engine['name']}: {answered}"
    asked = cache["hits"] + cache["misses"]
    hits = f"{cache['hits'] / asked:.1%} of {asked:,} look-ups hit" if asked else "not used so far"
    withheld = memory.get("cache_withheld_bytes", 0)
    less = f" ({format_bytes(withheld)} less than --cache: memory is short)" if withheld else ""
    yield "cache", f"{format_bytes(cache['used_bytes'])} of {format_bytes(cache['capacity_bytes'])}{less}, {hits}"
    if "order" in stats:
        yield "order", f"{_order(stats['order'])}"
        if stats["order"].get("rearranged") is not None:  # an older daemon does not say
            yield "rearranged", _rearranged(stats["order"]["rearranged"])
    yield "memory", f"{format_bytes(memory['rss_bytes'])}, at most {format_bytes(memory['peak_rss_bytes'])} so far"
    intercepted = stats["intercepted"]
    if any(intercepted.values()):
        yield (
            "intercepted",
            (
                f"{intercepted['opens']:,} opens, {intercepted['reads']:,} reads, "
                f"{format_bytes(intercepted['bytes'])}, {intercepted['stats']:,} stats, {intercepted['listings']:,} "
                f"listings; {intercepted['promotions']:,} "
                f"promoted, {intercepted['passed']:,} calls passed to the mount"
            ),
        )
    if reused := staging["reused_partitions"]:
        kept = f"{format_count(reused, 'partition')}, {format_bytes(staging['reused_bytes'])}"
        yield "reused", f"{kept}, from copies that earlier jobs have kept"
    if staging["partitions"] or staging["skipped_partitions"]:
        here = staging["done_partitions"] + staging["unverified_partitions"]
        wanted = staging["partitions"] + staging["skipped_partitions"]
        yield "staged", f"{here:,} of {wanted:,} partitions, {format_bytes(staging['done_bytes'])}"
    if text := copies_text([stats.get("copies")]):
        yield "copies", f"{text}"
    if "outputs" in stats:
        yield "outputs", f"{_outputs(stats['outputs'])}"
    verification = stats["verification"]
    yield "verified", f"{verification['chunks']:,} chunks, {format_bytes(verification['bytes'])}, while reading"
    yield "damaged", f"{errors['damaged_files']:,} files, {errors['failed_reads']:,} failed reads"
    if errors["fallbacks"]:
        yield "fallbacks", f"{errors['fallbacks']:,} reads were answered by another copy"


def _order(order: Mapping[str, Any]) -> str:
    """How the order of reads is known, and what that was good for."""
    if order["source"] == "none":
        text = "not known"
    else:
        known = [] if order["sampler"] is None else [order["sampler"]]
        known += [f"{key} {order[key]}" for key in ("seed", "epoch") if order[key] is not None]
        text = f"{order['source']}: {', '.join(known)}"
    text += f"; {order['predicted']:,} of {order['files']:,} files read as predicted"
    text += f"; {order['prefetched']:,} chunks fetched ahead, {order['late']:,} late"
    if order["into_kernel"]:
        text += f"; {order['into_kernel']:,} files put into the page cache"
    return f"{text}; readers waited {format_duration(order['waited_s'])}"


def _rearranged(rearranged: Mapping[str, Any]) -> str:
    """What programs read of their global batches with ``--order locality``."""
    held, samples = rearranged["held"], rearranged["samples"]
    text = f"{format_count(rearranged['epochs'], 'epoch')}; {held:,} of {samples:,} samples were on this node"
    return "; ".join([text, *(f"left as it is: {why}" for why in rearranged["left_alone"])])


def _outputs(outputs: Mapping[str, Any]) -> str:
    """How many there are, and which of them are not where they are to stay."""
    text = f"{outputs['files']:,} files, {format_bytes(outputs['bytes'])}"
    if outputs["being_written"]:
        text += f", {outputs['being_written']:,} being written"
    if outputs["directory"] is None:
        return f"{text}; they end with the job (--scratch)"
    if not outputs["pending"]:
        return f"{text}; nothing pending for {outputs['directory']}"
    text += f"; pending {outputs['pending']:,}, {format_bytes(outputs['pending_bytes'])}, for {outputs['directory']}"
    return f"{text} ({outputs['trouble']}; it is tried again)" if outputs["trouble"] else text


def _rates(stats: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    elapsed_s = max(stats["uptime_s"] - before["uptime_s"], 1e-3)

    def total(snapshot: Mapping[str, Any], section: str, key: str) -> int:
        return sum(item[key] for item in snapshot[section].values())

    operations = (total(stats, "operations", "count") - total(before, "operations", "count")) / elapsed_s
    rate = (total(stats, "sources", "bytes") - total(before, "sources", "bytes")) / elapsed_s
    return f"in the last {elapsed_s:.1f} s: {operations:,.0f} operations/s, {format_bytes(rate)}/s"


def _microseconds(value: float) -> str:
    if value < 1000:
        return f"{value:.3g} µs"
    return f"{value / 1000:.3g} ms" if value < 1e6 else f"{value / 1e6:.3g} s"
