"""The report of a job: one HTML page that needs nothing but itself, from the figures of all nodes.

A pure function from the data of ``report.json`` (docs/operations.md) to text, used by fuse/reporting.py and
cli/stat.py, in any thread. What the figures add up to is in figures.py, pictures in charts.py, looks in page.css.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fanstore.report import charts, figures
from fanstore.report.charts import Band
from fanstore.report.document import document, note, nothing, section, table, tiles
from fanstore.report.figures import SOURCES, Course, Node
from fanstore.report.findings import findings
from fanstore.report.markup import (
    binary_ticks,
    decimal_ticks,
    escape,
    moment,
    ranks_text,
    rate,
    rate_on_axis,
    share,
    size,
    span,
)
from fanstore.report.planbeside import beside
from fanstore.report.planned import Planned
from fanstore.units import format_count, format_duration

#: What the sources are, in words; the one that is not here, the storage of the dataset, says it itself (``_words``).
SOURCE_WORDS = {"local": "the node's own disk", "cache": "memory cache", "remote": "another node"}

#: Rows of tables, at most; a page of thousands of rows helps nobody.
_EVENTS_MOST = 200
_NODES_MOST = 256
_FLOWS_MOST = 10


def report_page(data: Mapping[str, Any], planned: Planned | None = None) -> str:
    """The page; with what was planned beside, if that is known."""
    nodes: Sequence[Node] = data["nodes"]
    course = figures.course(nodes)
    words = _words(data)
    sections = [
        section("throughput", "Throughput over time", _throughput(course, words)),
        *([] if planned is None else [section("plan", "As planned?", beside(planned, data, course))]),
        section("sources", "Where reads were served from", _sources(nodes, words)),
        section("order", "What was fetched ahead", _order(nodes)),
        section("traffic", "Traffic between nodes", _traffic(nodes)),
        section("latency", "How long reads took", _latency(nodes, course)),
        section("memory", "Cache and memory over time", _memory(nodes, course)),
        section("outputs", "Outputs that wait to be saved", _outputs(data, course)),
        section("events", "Events", _events(nodes)),
        section("nodes", "Nodes", _nodes(nodes, words)),
        section("about", "About these figures", _about(data)),
    ]
    title = f"FanStore job report: {_last_part(str(data['config']['prepared']))}"
    return document(title, _head(data, course) + "\n".join(sections))


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _words(data: Mapping[str, Any]) -> dict[str, str]:
    return SOURCE_WORDS | {"shared": escape(data["config"]["storage"])}


# --- head ---


def _head(data: Mapping[str, Any], course: Course) -> str:
    nodes, config = data["nodes"], data["config"]
    read = sum(figures.by_source(nodes, "bytes").values())
    duration_s = figures.duration_s(nodes)
    started_s = min((node["started_s"] for node in figures.has_told(nodes)), default=None)
    facts = {
        "dataset": config["prepared"],
        "content": f"{format_count(config['totals']['files'], 'file')}, {size(config['totals']['bytes'])}, "
        f"{format_count(config['partitions'], 'partition')}, codec {config['codec']}",
        "nodes": _node_states(nodes),
        "started": "-" if started_s is None else _date(started_s),
        "duration": format_duration(duration_s) if duration_s < 86_400 else moment(duration_s),
        "state": _state(data),
        "copies": _copies(config, figures.places(nodes)),
        "version": f"FanStore {config['fanstore']}, {config['engine']} engine",
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    rates = course.total_rates()
    reading_s, speed = figures.reading(course)
    metadata = figures.metadata(nodes)
    figured = {
        "read by programs": size(read),
        f"on average, in {format_duration(reading_s)} with reads": rate(speed),
        "at most": rate(max(rates, default=0.0)),
        f"not from the {_words(data)['shared']}": share(read - figures.by_source(nodes, "bytes")["shared"], read),
        "waited by all readers together": format_duration(figures.waited_s(nodes)),
        **({} if metadata is None else {f"metadata operations spared the {_words(data)['shared']}": f"{metadata:,}"}),
        "failed reads": f"{figures.total(nodes, 'errors', 'failed_reads'):,}",
    }
    told = "".join(f'<li class="{level}">{escape(text)}</li>' for level, text in findings(data))
    return (
        f"<header><h1>FanStore job report</h1><dl>{listed}</dl></header>"
        f'<section id="glance"><h2>At a glance</h2>{tiles(figured)}<ul class="findings">{told}</ul>'
        "</section>\n"
    )


def _node_states(nodes: Sequence[Node]) -> str:
    counts: dict[str, int] = {}
    for node in nodes:
        counts[str(node["state"])] = counts.get(str(node["state"]), 0) + 1
    odd = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()) if state in ("silent", "lost"))
    return f"{len(nodes)}" + (f" ({odd})" if odd else "")


def _state(data: Mapping[str, Any]) -> str:
    made = _date(data["made_s"])
    if not data["ended"]:
        return f"running, as of {made}"
    if data["code"] is None:
        return f"ended by an error, {made}"
    return f"ended with exit code {data['code']}, {made}"


def _copies(config: Mapping[str, Any], differ: bool) -> str:
    if config["local"] is None:
        return "none: partitions are read where they are"
    return f"{config['replicas']} of each partition, in {'--local of each node' if differ else config['local']}"


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


# --- pictures ---


def _throughput(course: Course, words: Mapping[str, str]) -> Iterator[str]:
    rates = course.total_rates()
    if not any(rates):
        yield nothing("No program has read anything through FanStore so far.")
    else:
        bands = [Band(name, words[name], course.rates[name]) for name in SOURCES]
        used = [band for band in bands if any(band.values)]
        yield charts.legend([(band.style, band.label) for band in used])
        ticks = charts.rate_ticks(rates)
        yield charts.stacked("throughput over time", course.ends_s, used, ticks, rate_on_axis(ticks[-1]))
    yield note(
        "Bytes of the dataset per second that programs on all nodes read through FanStore (1 MB is 10<sup>6</sup> "
        "bytes), against the time since the start, by where they came from. <b>Bad</b> would be gaps while the program "
        f"should be reading, a level that sinks from epoch to epoch, or much from the {words['shared']} after staging "
        "has ended. Not in it: what the kernel answered from its page cache. A second epoch that fits in free memory "
        "can look like silence here, and is the fastest of all; the average at the top leaves such times out."
    )


def _sources(nodes: Sequence[Node], words: Mapping[str, str]) -> Iterator[str]:
    counts, reads, fetched = (figures.by_source(nodes, key) for key in ("bytes", "reads", "fetched_bytes"))
    whole = sum(counts.values())
    if whole:
        yield charts.bar(counts)
    rows = "".join(
        f'<tr><th scope="row"><i class="swatch {name}"></i>{words[name]}</th><td>{escape(size(counts[name]))}'
        f"</td><td>{share(counts[name], whole)}</td><td>{reads[name]:,}</td>"
        f"<td>{'-' if name == 'cache' else escape(size(fetched[name]))}</td></tr>"
        for name in SOURCES
    )
    yield table(("served from", "bytes read", "share", "answers", "fetched for it"), rows)
    yield note(
        "All reads of the dataset since the start, on all nodes. <i>Fetched</i> are stored bytes that had to be read "
        "or sent for it. Good is much from the node's own disk, the cache and other nodes. <b>Bad</b> would be a large "
        f"share from the {words['shared']} once staging is through (no room on local disks, or nodes were lost), or "
        "much more fetched than read (small reads in large files)."
    )


def _order(nodes: Sequence[Node]) -> Iterator[str]:
    told = figures.orders(nodes)
    if not told:
        yield nothing("The order of reads was not asked for (--order off).")
    else:
        rows = "".join(
            f'<tr><th scope="row">{escape(ranks_text(each.ranks))}</th><td>{escape(each.words)}</td>'
            f"<td>{each.files:,}</td><td>{share(each.predicted, each.files)}</td><td>{each.prefetched:,}</td>"
            f"<td>{each.late:,}</td><td>{escape(format_duration(each.waited_s))}</td></tr>"
            for each in told
        )
        heads = ("nodes", "order", "files read", "as predicted", "chunks fetched ahead", "late", "readers waited")
        yield table(heads, rows)
    yield note(
        "How the order of reads was known, nodes that are alike together: <i>hooked</i> (the program reports it), "
        "<i>stated</i>, <i>recognised</i>, <i>repeated</i>, or not. Files that the kernel had in its page cache, and "
        "those of programs that are intercepted, are not among those that were read here. <i>Waited</i> is the time "
        "that all readers together waited for chunks. <b>Bad</b> would be a small share that was predicted, or long "
        "waiting although it is large: then links or disks are the limit, or the cache is too small for what is "
        "fetched ahead."
    )


def _traffic(nodes: Sequence[Node]) -> Iterator[str]:
    matrix = figures.matrix(nodes)
    if len(nodes) == 1:
        yield nothing("A job of one node: nothing travels between nodes.")
    elif not matrix.most():
        yield nothing("No node has fetched anything from another one so far.")
    else:
        yield charts.shades(matrix.most())
        yield charts.heat_map("bytes that each rank fetched from each other rank", matrix)
        if len(nodes) > charts.WRITTEN_MOST:
            yield _largest_flows(nodes)
    yield note(
        "Each row is a rank that fetched, each column the rank it fetched from; the stronger the colour, the more. "
        "Partitions are spread evenly, so that all squares should be about alike, but for nodes that keep copies of "
        "the same partitions and need little from each other. <b>Bad</b> would be a column that stands out (one node "
        "serves all the others: too few copies, see <code>--replicas</code>) or an empty row or column (a node that is "
        "lost, or whose copying failed)."
    )


def _largest_flows(nodes: Sequence[Node]) -> str:
    hosts = {int(node["rank"]): escape(node["host"]) for node in nodes}
    rows = "".join(
        f"<tr><td>{escape(size(count))}</td><td>{rank} ({hosts[rank]})</td>"
        f"<td>{peer} ({hosts.get(peer, '?')})</td></tr>"
        for count, rank, peer in figures.flows(nodes, _FLOWS_MOST)
    )
    return f"<h3>Largest flows</h3>{table(('bytes', 'got by rank', 'from rank'), rows, style='flows')}"


def _latency(nodes: Sequence[Node], course: Course) -> Iterator[str]:
    words = {
        "read": ("Reads", "from the arrival of a read in the daemon to its answer", "local"),
        "fetch": ("Fetches from other nodes", "from asking another node to the arrival of the bytes", "remote"),
    }
    for name, (title, what, style) in words.items():
        bounds, counts = figures.histogram(nodes, name)
        if not counts:
            continue
        yield f"<h3>{title}: {what}</h3>"
        if not sum(counts):
            yield nothing("None so far.")
            continue
        yield charts.bars(f"histogram of {what}", bounds, counts, style)
        yield tiles(_percentiles(nodes, name, bounds, counts))
    if any(course.waiting):
        title = "Readers that waited for bytes to come, on average over time"
        yield f"<h3>{title}</h3>"
        ticks = decimal_ticks(max(course.waiting))
        yield charts.lines(title, course.ends_s, [Band("most", "readers", course.waiting)], ticks, "{:g}".format)
    yield note(
        "How many (upwards) took how long (to the right); every line is ten times as many (1 k is 1,000), every bar "
        "twice as long a time. From disk or memory some 10 to 1,000 µs are usual, from another node some more. "
        "<b>Bad</b> would be a second hill far to the right: a disk or a network that is slow now and then, or reads "
        "that wait for the shared file system. Where the order of reads is known (docs/orders.md), hardly anybody "
        "should wait from then on."
    )


def _percentiles(nodes: Sequence[Node], name: str, bounds: Sequence[int], counts: Sequence[int]) -> dict[str, str]:
    longest_ns = figures.longest_us(nodes, name) * 1e3
    values = {"counted": f"{sum(counts):,}"}
    for part, label in ((0.5, "half took at most"), (0.9, "90 % at most"), (0.99, "99 % at most")):
        bound_ns = figures.percentile_ns(bounds, counts, part)
        values[label] = span(longest_ns if bound_ns is None else min(bound_ns, longest_ns))
    values["the longest"] = span(longest_ns)
    return values


def _memory(nodes: Sequence[Node], course: Course) -> Iterator[str]:
    if course.ends_s:
        yield from _memory_pictures(nodes, course)
    else:
        yield nothing("No node has told its figures over time.")
    yield note(
        "Resident memory of the daemon (index, caches, and pages of local copies that other nodes have read, which the "
        "kernel takes back when it needs them) and what is in its caches. <b>Bad</b> would be memory that grows "
        "without end: a limit of the batch system would end the job. A cache that is full is no fault; it then lets go "
        "of what was not read for longest. The kernel's page cache is not in it."
    )


def _memory_pictures(nodes: Sequence[Node], course: Course) -> Iterator[str]:
    capacity = max((int(node["cache_capacity_bytes"]) for node in figures.has_told(nodes)), default=0)
    several = len(nodes) > 1
    pictures = {
        "Memory of the daemon": (course.memory_most, course.memory_mean, None),
        "Used of the memory cache (--cache)": (course.cache_most, course.cache_mean, capacity),
    }
    yield charts.legend(
        [("most", "node with the most" if several else "this node")] + [("mean", "mean of all nodes")] * several
    )
    yield '<div class="pair">'
    for title, (most, mean, limit) in pictures.items():
        bands = [Band("most", "most" if several else "bytes", most)]
        bands += [Band("mean", "mean", mean)] * several
        ticks = binary_ticks(max(*most, 1.0))
        bound = f", of {size(limit)}" if limit is not None else ""
        yield f"<div><h3>{escape(title + bound)}</h3>"
        empty = nothing("Nothing was in it: the kernel keeps what programs have read.")
        yield charts.lines(title, course.ends_s, bands, ticks, size, limit) if any(most) else empty
        yield "</div>"
    yield "</div>"


def _outputs(data: Mapping[str, Any], course: Course) -> Iterator[str]:
    told = figures.outputs(data["nodes"])
    if not told:
        yield nothing("This job can write nothing under the mount (neither --output nor --scratch was given).")
        return
    now = told[0]
    if "pending" not in now:
        text = f"{format_count(now['files'], 'file')}, {size(now['bytes'])}, written so far"
        yield nothing(f"{escape(text)}; they end with the job (--scratch).")
        return
    values = {
        "files": f"{now['files']:,}",
        "their bytes": size(now["bytes"]),
        "copied to --output": f"{format_count(sum(each['saved'] for each in told), 'time')}, "
        f"{size(sum(each['saved_bytes'] for each in told))}",
        "not saved at the end"
        if data["ended"]
        else "not saved yet": f"{now['pending']:,}, {size(now['pending_bytes'])}",
    }
    yield tiles(values)
    pictures: tuple[tuple[str, Sequence[float], Callable[[float], list[float]], Callable[[float], str]], ...] = (
        ("Files that wait", course.pending, lambda most: decimal_ticks(max(most, 4)), lambda value: f"{value:,.0f}"),
        ("Bytes that wait", course.pending_bytes, binary_ticks, size),
    )
    yield '<div class="pair">'
    for title, values_, make_ticks, write in pictures if course.ends_s else ():
        band = Band("pending", "waiting", values_)
        ticks = make_ticks(max(*values_, 1.0))
        yield f"<div><h3>{title}</h3>{charts.stacked(title, course.ends_s, [band], ticks, write)}</div>"
    yield "</div>"
    yield note(
        f"Files that programs have written and that do not stand in {escape(data['config']['output'])} yet; the "
        "highest number in each interval. Hills that go down again are checkpoints on their way. <b>Bad</b> would be a "
        "level that only rises (the shared file system is full, or slower than the job writes) or that is not 0 at the "
        "end: these files are on the nodes' disks, and the next fanstore-mount there, or <code>--recover</code>, saves "
        "them."
    )


# --- tables ---


def _events(nodes: Sequence[Node]) -> Iterator[str]:
    happened, left_out = figures.happenings(nodes, _EVENTS_MOST)
    if not happened:
        yield nothing("Nothing worth telling has happened.")
    else:
        rows = []
        for event in happened:
            when = moment(event.first_s)
            if event.last_s - event.first_s >= 1:
                when += f" to {moment(event.last_s)}"
            times = f" ({event.count} times)" if event.count > len(event.ranks) else ""
            rows.append(
                f'<tr class="{escape(event.level)}"><td>{escape(when)}</td><td>{escape(ranks_text(event.ranks))}</td>'
                f"<td>{escape(event.level)}</td><td>{escape(event.kind)}</td><td>{escape(event.text + times)}</td></tr>"
            )
        yield table(("since the start", "where", "level", "about", "what"), "".join(rows), style="events")
    if left_out:
        yield nothing(f"{left_out:,} more are left out; the logs of the daemons have all.")
    yield note(
        "Warnings and errors of all daemons, and what explains the pictures: staging, the start, the end. <b>Bad</b> "
        "are errors: damaged files, lost nodes, outputs that could not be saved. A warning says what was done instead."
    )


def _nodes(nodes: Sequence[Node], words: Mapping[str, str]) -> Iterator[str]:
    rows, places = [], figures.places(nodes)
    for node in nodes[:_NODES_MOST]:
        head = (
            f'<th scope="row">{int(node["rank"])}</th><td>{escape(node["host"])}</td><td>{escape(node["state"])}</td>'
        )
        if "sources" not in node:
            rows.append(f'<tr class="warning">{head}<td colspan="{7 + places}">has told nothing</td></tr>')
            continue
        read = {name: node["sources"][name]["bytes"] for name in SOURCES}
        numbers = (
            size(node["local_bytes"]),
            size(sum(read.values())),
            None,
            size(sum(node.get("fetched", {}).values())),
            size(node["served_bytes"]),
            f"{node['errors']['failed_reads']:,}",
            f"{node['warnings']:,}",
        )
        bar = charts.bar(read) if any(read.values()) else "-"
        cells = "".join(f"<td>{bar if text is None else escape(text)}</td>" for text in numbers)
        if places:
            where = [str(node[key]) for key in ("mountpoint", "local") if node.get(key) is not None]
            cells += f"<td>{escape(', '.join(where) or '-')}</td>"
        style = "warning" if node["state"] in ("silent", "lost") else ""
        rows.append(f'<tr class="{style}">{head}{cells}</tr>')
    yield charts.legend([(name, words[name]) for name in SOURCES])
    titles: tuple[str, ...] = (
        "rank",
        "host",
        "state",
        "on disk",
        "read",
        "read from",
        "got",
        "gave",
        "failed reads",
        "warnings",
    )
    titles += ("mounted at, copies in",) if places else ()
    yield table(titles, "".join(rows), style="nodes")
    if len(nodes) > _NODES_MOST:
        yield nothing(f"{len(nodes) - _NODES_MOST:,} more nodes are not listed; they are in all sums.")
    yield note(
        "One line per node. <i>On disk</i>: partitions copied there; <i>read</i>: by its programs; <i>got</i> and "
        "<i>gave</i>: from and to other nodes. State <i>up</i>, <i>done</i> (ended orderly), <i>silent</i> (did not "
        "answer) or <i>lost</i> (dead). <b>Bad</b> would be failed reads, or one node that is very different from the "
        "others."
    )


def _step(duration_s: float) -> str:
    """How much time a value of a picture stands for."""
    step_s = max(duration_s / figures.POINTS_MOST, 0.25)
    return f"{step_s:.2g} s" if step_s < 60 else format_duration(step_s)


def _about(data: Mapping[str, Any]) -> Iterator[str]:
    nodes = data["nodes"]
    steps = [
        samples["at_s"][-1] - samples["at_s"][-2]
        for node in nodes
        if (samples := node.get("samples")) and len(samples["at_s"]) > 2
    ]
    silent = [int(node["rank"]) for node in nodes if "sources" not in node]
    old = [int(node["rank"]) for node in nodes if "sources" in node and node["state"] in ("silent", "lost")]
    lines = [
        "Reads that the kernel answers from its page cache never reach FanStore, so they are in none of these figures.",
        "Reads of files that programs have written themselves are counted under operations in stats.json, not here.",
        "KiB, MiB and GiB are powers of 1024; MB/s are 10<sup>6</sup> bytes per second. Times are those of each node's "
        "own clock since its start, and all nodes start together.",
    ]
    if steps:
        lines.append(
            f"Each node keeps at most 240 samples, four a second at first; the interval doubles as a job gets longer. "
            f"A picture has about one value per {escape(_step(figures.duration_s(nodes)))}, "
            "the mean or the highest of it."
        )
    if silent:
        lines.append(f"Missing in all figures: {escape(ranks_text(silent))}, which told nothing.")
    if old:
        lines.append(f"As of some time before: {escape(ranks_text(old))}; what they told last is in the figures.")
    yield "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"
