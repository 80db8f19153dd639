"""The page of fanstore-plan job: what a job will do, with pictures. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fanstore.model.advice import (
    Job,
    Verdict,
    by_exchanged,
    by_nodes,
    by_room,
    by_shuffle,
    by_speed,
    memory_hits,
    smallest_memory_mb,
)
from fanstore.model.forecast import Forecast, Link, Way
from fanstore.report import charts
from fanstore.report.charts import Band
from fanstore.report.document import document, note, nothing, section, table, tiles
from fanstore.report.markup import binary_ticks, decimal_ticks, escape, moment, rate_on_axis, size, span
from fanstore.units import format_count

#: The colour of each way.
_STYLES = {Way.DIRECT: "shared", Way.COPY: "remote", Way.FANSTORE: "local", Way.ORDERED: "cache"}
_PARTS = {"start": "before the first sample", "waiting": "first epoch", "compute": "later epochs"}
#: Steps of the first epoch that are drawn.
_POINTS = 100


def plan_page(name: str, job: Job, found: Verdict) -> str:
    """The page."""
    nodes = by_nodes(job)
    ways = nodes[job.training.nodes]
    sections = [
        section("glance", "At a glance", _glance(ways, found)),
        section("ways", "Four ways to get at the data", _ways(ways)),
        section("course", "The first epoch", _course(ways)),
        section("nodes", "On more and fewer nodes", _nodes(nodes)),
        section("room", "With less room, and other speeds", _what_if(job)),
        section("shuffles", "If ranks shuffle so that reads stay local", _shuffles(job)),
        section("links", "How long each link is busy in the last epoch", _links(ways)),
        section("about", "About these figures", _about(job)),
    ]
    return document(f"FanStore plan: {name}", _head(name, job) + "\n".join(sections))


def _head(name: str, job: Job) -> str:
    dataset, training = job.dataset, job.training
    speed = "takes no time" if training.samples_per_s == math.inf else f"{training.samples_per_s:g} samples/s on a GPU"
    facts = {
        "dataset": name,
        "content": f"{format_count(dataset.files, 'file')}, {size(dataset.content_mb * 1e6)}",
        "nodes": f"{training.nodes:,} with {format_count(training.gpus, 'GPU')} and "
        f"{format_count(training.workers, 'data loader worker')} each",
        "epochs": f"{training.epochs:,}, batch {training.batch:,} on a GPU",
        "computing": speed,
        "room": f"{size(training.room_mb * 1e6)} on each node",
        "measured": job.machine.measured or "no: figures of a usual cluster",
    }
    listed = "".join(f"<div><dt>{key}</dt><dd>{escape(value)}</dd></div>" for key, value in facts.items())
    return f"<header><h1>FanStore plan</h1><dl>{listed}</dl></header>\n"


def _glance(ways: Mapping[Way, Forecast], found: Verdict) -> Iterator[str]:
    ours, direct = ways[Way.FANSTORE], ways[Way.DIRECT]
    yield tiles(
        {
            "the job with FanStore": moment(ours.seconds),
            "from the shared file system": moment(direct.seconds),
            "pays from epoch": f"{found.pays_from:,}" if found.pays_from else "never",
            "weakest link with FanStore": found.weakest.value,
            "room on each node": size(ours.room_mb * 1e6),
            "smallest room that keeps up": size(found.smallest_room_mb * 1e6),
        }
    )
    told = "Use FanStore for this job." if found.use else "Do not use FanStore for this job."
    style = "good" if found.use else "warning"
    texts = [*found.why, f"To get further: {found.add}"]
    if found.needs:
        texts.append(f"To keep its GPUs busy a node needs: {needs_text(found.needs)}.")
    rest = "".join(f"<li>{escape(text)}</li>" for text in texts)
    yield f'<ul class="findings"><li class="{style}">{told}</li>{rest}</ul>'


def needs_text(needs: Mapping[str, int]) -> str:
    """``2 SSDs, 1 network interface, as fast as these``: as those that the plan is made with."""
    parts = [f"{count:,} {name if count > 1 else _singular(name)}" for name, count in needs.items()]
    return f"{', '.join(parts)}, as fast as these"


def _singular(name: str) -> str:
    first, _, rest = name.partition(" for ")
    return first.removesuffix("s") + (f" for {rest}" if rest else "")


def _ways(ways: Mapping[Way, Forecast]) -> Iterator[str]:
    yield charts.legend(list(_PARTS.items()))
    rows: list[tuple[str, dict[str, float], str]] = []
    for way, one in ways.items():
        if one.impossible:
            rows.append((way.value, {}, "not possible"))
            continue
        first_s = one.epochs[0].seconds
        parts = {"start": one.start_s, "waiting": first_s, "compute": one.seconds - one.start_s - first_s}
        rows.append((way.value, parts, moment(one.seconds)))
    yield charts.bar_table(rows)
    yield table(
        (
            "way",
            "start",
            "first epoch",
            "later epochs",
            "from the shared file system",
            "over the network",
            "room",
            "limited by",
        ),
        "".join(
            f'<tr><th scope="row">{escape(way.value)}</th>'
            + "".join(f"<td>{escape(text)}</td>" for text in _cells(one))
            + "</tr>"
            for way, one in ways.items()
        ),
    )
    yield note(
        "The whole job. Bytes are those of all nodes and all epochs, room is that on each node's own disk. "
        "<i>Order known</i>: FanStore knows what will be read next, and fetches it ahead."
    )


def _cells(one: Forecast) -> list[str]:
    if one.impossible:
        return ["-"] * 7
    return [
        moment(one.start_s),
        moment(one.epochs[0].seconds),
        moment(one.later_s) if len(one.epochs) > 1 else "-",
        size(one.shared_mb * 1e6),
        size(one.network_mb * 1e6),
        size(one.room_mb * 1e6),
        one.weakest.value,
    ]


def _course(ways: Mapping[Way, Forecast]) -> Iterator[str]:
    words = {
        "local": "the node's own disk",
        "remote": "other nodes",
        "shared": "shared file system, read",
        "cache": "shared file system, staged",
    }
    drawn = [ways[way] for way in (Way.FANSTORE, Way.ORDERED) if ways[way].course]
    if not drawn:
        yield nothing("Everything is staged before the first epoch begins: all of it is like the later ones.")
        return
    yield charts.legend(list(words.items()))
    yield '<div class="pair">'
    for one in drawn:
        steps = one.course[:: max(1, len(one.course) // _POINTS)]
        rates = {
            "local": [step.local_mb_per_s * 1e6 for step in steps],
            "remote": [step.network_mb_per_s * 1e6 for step in steps],
            "shared": [step.shared_mb_per_s * 1e6 for step in steps],
            "cache": [step.staging_mb_per_s * 1e6 for step in steps],
        }
        bands = [Band(style, words[style], values) for style, values in rates.items()]
        ticks = charts.rate_ticks([sum(values) for values in zip(*rates.values(), strict=True)])
        picture = charts.stacked(one.way.value, [step.end_s for step in steps], bands, ticks, rate_on_axis(ticks[-1]))
        yield f"<div><h3>{escape(one.way.value)}</h3>{picture}</div>"
    yield "</div>"
    yield note(
        "MB/s of all nodes together, from the first sample on. While partitions are copied to the nodes, what is "
        "wanted of them is copied next. <code>--stage-first</code> copies before the first sample is read."
    )


def _nodes(nodes: Mapping[int, Mapping[Way, Forecast]]) -> Iterator[str]:
    if len(nodes) < 2:
        yield nothing("One node was asked for.")
        return
    bands = [Band(style, way.value, [ways[way].seconds for ways in nodes.values()]) for way, style in _STYLES.items()]
    yield charts.legend([(band.style, band.label) for band in bands])
    yield charts.curves(
        "the job by the number of nodes", [f"{count:,}" for count in nodes], bands, _ticks(bands), moment
    )
    yield note("How long the job takes, by the number of nodes; a way that is not possible there has a gap.")


def _what_if(job: Job) -> Iterator[str]:
    rooms, speeds = by_room(job), by_speed(job)
    room = Band("local", "FanStore", [one.seconds for one in rooms.values()])
    network = Band("remote", "another network", [one.seconds for one, _ in speeds.values()])
    shared = Band("shared", "another shared file system", [one.seconds for _, one in speeds.values()])
    pictures = {
        "By the part of the dataset that the nodes have room for": ([f"{share:.0%}" for share in rooms], [room]),
        "By the speed of network and shared file system": ([_factor(factor) for factor in speeds], [network, shared]),
    }
    yield charts.legend([(band.style, band.label) for band in (room, network, shared)])
    yield '<div class="pair">'
    for title, (places, bands) in pictures.items():
        yield f"<div><h3>{title}</h3>{charts.curves(title, places, bands, _ticks(bands), moment)}</div>"
    yield "</div>"
    yield note("How long the job takes with FanStore. Where a line is flat, more of it does not help.")


def _shuffles(job: Job) -> Iterator[str]:
    found = by_shuffle(job)
    if not found:
        yield nothing("On one node all reads are local, whatever the shuffle.")
        return
    share_mb = job.dataset.content_mb / job.training.nodes
    rows = "".join(
        f'<tr><th scope="row">{escape(one.name)}</th>'
        + "".join(
            f"<td>{escape(text)}</td>"
            for text in (
                f"{one.remote:.1%}",
                size(one.share * share_mb * 1e6),
                size(ways[Way.FANSTORE].later_network_mb * 1e6),
                *(moment(each.later_s) for each in ways.values()),
                ways[Way.FANSTORE].weakest.value,
            )
        )
        + "</tr>"
        for one, ways in found.items()
    )
    titles = ("from others", "held by a node", "over the network", "FanStore", "order known", "limited by")
    yield table(("shuffle", *titles), rows)
    curve = by_exchanged(job)
    everywhere = [1] * len(curve)
    plain = next(iter(found.values()))  # global shuffling
    seconds = [
        Band("local", "partial", [ways[Way.FANSTORE].later_s for ways in curve.values()]),
        Band("cache", "partial, order known", [ways[Way.ORDERED].later_s for ways in curve.values()]),
        Band("shared", "global", [each * plain[Way.FANSTORE].later_s for each in everywhere]),
    ]
    moved = [
        Band("local", "partial", [1e6 * ways[Way.FANSTORE].later_network_mb for ways in curve.values()]),
        Band("shared", "global", [1e6 * each * plain[Way.FANSTORE].later_network_mb for each in everywhere]),
    ]
    places = [f"{fraction:g}" for fraction in curve]
    yield charts.legend([(band.style, band.label) for band in seconds])
    yield '<div class="pair">'
    title = "A later epoch, by the fraction Q that is exchanged"
    yield f"<div><h3>{title}</h3>{charts.curves(title, places, seconds, _ticks(seconds), moment)}</div>"
    title = "Over the network in it"
    ticks = binary_ticks(max(*(value for band in moved for value in band.values), 1.0))
    yield f"<div><h3>{title}</h3>{charts.curves(title, places, moved, ticks, size)}</div>"
    yield "</div>"
    yield note(
        "Samplers of <code>fanstore.torch</code> (docs/shuffling.md): a later epoch with FanStore. <i>From others</i> "
        "is the part of an epoch's samples that comes from another node than the one that had it before; what memory "
        "has no room for is read again, wherever its partition is. How well a model learns from each is another "
        "question."
    )


def _factor(factor: float) -> str:
    return "as it is" if factor == 1 else f"{factor:g} times"


def _ticks(bands: Sequence[Band]) -> list[float]:
    values = [value for band in bands for value in band.values if math.isfinite(value)]
    return decimal_ticks(max(*values, 1.0))


def _links(ways: Mapping[Way, Forecast]) -> Iterator[str]:
    possible = [one for one in ways.values() if one.epochs]
    links = list(dict.fromkeys(link for one in possible for link in one.epochs[-1].busy_s))
    rows = "".join(
        f'<tr><th scope="row">{escape(link.value)}</th>' + "".join(_busy(one, link) for one in possible) + "</tr>"
        for link in links
    )
    yield table(("link", *(one.way.value for one in possible)), rows)
    yield note("The longest one decides how long the epoch takes; the others wait for it.")


def _busy(one: Forecast, link: Link) -> str:
    seconds = one.epochs[-1].busy_s.get(link, 0.0)
    text = escape(span(1e9 * seconds)) if seconds else "-"
    return f"<td><b>{text}</b></td>" if one.weakest is link else f"<td>{text}</td>"


def _about(job: Job) -> Iterator[str]:
    machine = job.machine
    hits, best = memory_hits(job)
    lines = [
        "An epoch takes as long as its busiest link. What is not in the model: other jobs, nodes that differ, and "
        "waiting for the slowest node in each iteration, which takes some percent more.",
        "Memory of the nodes keeps what was read, as far as it goes: "
        f"{escape(size(machine.memory_mb * 1e6))} on each node. Once it is full it answers {hits:.0%} of reads; "
        f"keeping what is wanted next, it could at best answer {best:.0%}. "
        f"{escape(size(smallest_memory_mb(job) * 1e6))} on each node still keep up.",
        f"The shared file system gives {machine.files_per_s(machine.small_mb, 1):,.0f} files/s of "
        f"{escape(size(machine.small_mb * 1e6))} to one reader and "
        f"{float(machine.small_files_per_s.at(1e9)):,.0f} to many, and up to "
        f"{float(machine.large_mb_per_s.at(1e9)):,.0f} MB/s in large reads.",
        f"A node's disk reads {float(machine.disk_read.at(1e9)):,.0f} MB/s and writes "
        f"{float(machine.disk_write.at(1e9)):,.0f}; its network has "
        + (f"{machine.network_mb_per_s:,.0f} MB/s." if machine.network_mb_per_s else "not been measured."),
    ]
    yield "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"
