"""The section of the report that has what was planned beside what happened. Pure functions; used by page.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fanstore.report import charts, figures
from fanstore.report.charts import Band
from fanstore.report.document import note, nothing, table
from fanstore.report.figures import Course, Node
from fanstore.report.markup import escape, moment, rate_on_axis, share, size
from fanstore.report.planned import Planned, PlannedWay
from fanstore.units import format_count

#: The ways of a plan, in words.
_WORDS = {"fanstore": "planned", "ordered": "planned, order known"}
#: Class, and what it stands for, of what was planned for the first epoch.
_BANDS = {
    "local": ("local", "the node's own disk"),
    "network": ("remote", "other nodes"),
    "shared": ("shared", "shared file system, read"),
    "staging": ("cache", "shared file system, staged"),
}


def beside(planned: Planned, data: Mapping[str, Any], course: Course) -> Iterator[str]:
    """The content of the section."""
    nodes: Sequence[Node] = data["nodes"]
    files = int(data["config"]["totals"]["files"])
    if files != planned.files:
        yield nothing(
            f"The plan is for another dataset: that has {format_count(planned.files, 'file')}, and this one {files:,}."
        )
        return
    ways = planned.by_nodes.get(len(nodes))
    if not ways:
        known = ", ".join(f"{count:,}" for count in planned.by_nodes)
        yield nothing(f"The plan is for {known} nodes, and this job has {len(nodes):,}.")
        return
    happened = _happened(nodes)
    yield from _bars(ways, happened)
    yield table(("", *(_WORDS[name] for name in ways), "this job", "of planned"), "".join(_rows(ways, happened)))
    if planned.asked == len(nodes) and planned.first_epoch:
        yield from _first_epoch(planned, course)
    epochs = format_count(len(next(iter(ways.values())).epochs_s), "epoch")
    yield note(
        f"The plan is for {epochs} and what belongs to them; this job is everything from the start of its daemons to "
        "their end, and the picture of its first epoch does not have what was staged. What the kernel answers from "
        "memory is in no count of bytes. <b>Bad</b> would be many more bytes from the shared file system than planned "
        "(no room, lost nodes, or files that were read before they were staged), or a job that takes much longer "
        "although its bytes are as planned: then something else limits it, or the figures that the plan was made with "
        "are not those of these nodes."
    )


def _happened(nodes: Sequence[Node]) -> PlannedWay:
    told = figures.has_told(nodes)
    staged = sum(int(node["staging"]["done_bytes"]) for node in told if "staging" in node)
    return PlannedWay(
        seconds=figures.duration_s(nodes),
        start_s=0.0,
        epochs_s=(),
        shared_bytes=staged + figures.by_source(nodes, "fetched_bytes")["shared"],
        network_bytes=sum(sum(node.get("fetched", {}).values()) for node in told),
        room_bytes=max((int(node["local_bytes"]) for node in told), default=0),
    )


def _bars(ways: Mapping[str, PlannedWay], happened: PlannedWay) -> Iterator[str]:
    shown = {**{_WORDS[name]: way for name, way in ways.items()}, "this job": happened}
    yield charts.legend([("remote", "planned"), ("local", "this job")])
    kinds = {"Time": "seconds", "From the shared file system": "shared_bytes", "Between nodes": "network_bytes"}
    for title, key in kinds.items():
        yield f"<h3>{title}</h3>"
        rows = []
        for name, way in shown.items():
            value = float(getattr(way, key))
            style = "local" if way is happened else "remote"
            rows.append((name, {style: value}, moment(value) if key == "seconds" else size(value)))
        yield charts.bar_table(rows)


def _rows(ways: Mapping[str, PlannedWay], happened: PlannedWay) -> Iterator[str]:
    kinds = {
        "the whole job": ("seconds", moment),
        "from the shared file system": ("shared_bytes", size),
        "over the network": ("network_bytes", size),
        "room on a node": ("room_bytes", size),
    }
    for title, (key, write) in kinds.items():
        values = [float(getattr(way, key)) for way in ways.values()]
        mine = float(getattr(happened, key))
        part = share(mine, values[0])
        cells = "".join(f"<td>{escape(text)}</td>" for text in (*map(write, values), write(mine), part))
        yield f'<tr><th scope="row">{title}</th>{cells}</tr>'


def _first_epoch(planned: Planned, course: Course) -> Iterator[str]:
    ends_s = max(each["ends_s"][-1] for each in planned.first_epoch.values() if each["ends_s"])
    ways = planned.by_nodes[planned.asked]
    shown: dict[str, tuple[Sequence[float], list[Band]]] = {}
    for name, each in planned.first_epoch.items():
        if name in ways and each["ends_s"]:
            bands = [Band(style, words, each[key]) for key, (style, words) in _BANDS.items()]
            shown[_WORDS[name]] = (each["ends_s"], bands)
    until = sum(end_s <= ends_s + ways[next(iter(ways))].start_s for end_s in course.ends_s)
    if until:
        measured = {"local": "local", "network": "remote", "shared": "shared"}
        bands = [Band(_BANDS[key][0], _BANDS[key][1], course.rates[source][:until]) for key, source in measured.items()]
        shown["this job"] = (course.ends_s[:until], bands)
    if not shown:
        return
    yield "<h3>The first epoch</h3>"
    yield charts.legend(list(_BANDS.values()))
    yield '<div class="pair">'
    tops = [sum(values) for _, bands in shown.values() for values in zip(*(band.values for band in bands), strict=True)]
    ticks = charts.rate_ticks(tops)
    for title, (ends, bands) in shown.items():
        picture = charts.stacked(title, ends, bands, ticks, rate_on_axis(ticks[-1]))
        yield f"<div><h3>{escape(title)}</h3>{picture}</div>"
    yield "</div>"
