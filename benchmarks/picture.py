"""Draws the picture of a record: python benchmarks/picture.py results/NAME.json.gz [...] writes results/NAME.png.

Reads only the JSON, so that a picture can be drawn again at any time, by any interpreter that has matplotlib
(setup-peers puts one into benchmarks/.peers). Takes no part in measuring.
"""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from harness.machine import sentence
from matplotlib import pyplot
from matplotlib.lines import Line2D
from PIL import Image

OWN = "#1f77b4"
OWN_PYTHON = "#8fbbda"
OTHER = "#b8bec6"
REFERENCE = "#3c4148"
TEXT = "#3c4148"


def _colour(name: str) -> str:
    if name in ("source", "tar", "shared"):  # what the others are compared with
        return REFERENCE
    if name.startswith("fanstore") and "python" in name:
        return OWN_PYTHON
    return OWN if name.startswith("fanstore") else OTHER


def _bars(
    axes: Any, names: list[str], medians: list[float], rounds: list[list[float]], notes: list[str], title: str
) -> None:
    """Horizontal bars with a dot for every round, the first name on top, and a note behind each bar."""
    places = range(len(names))
    axes.barh(places, medians, color=[_colour(name) for name in names], height=0.68)
    for place, values in zip(places, rounds, strict=True):
        axes.plot(values, [place] * len(values), "o", color="white", markeredgecolor=TEXT, markersize=3.5)
    limit = max(max(values) for values in rounds)
    for place, values, note in zip(places, rounds, notes, strict=True):
        axes.text(max(values) + limit * 0.02, place, note, va="center", fontsize=8, color=TEXT)
    axes.set_xlim(0, limit * 1.5)
    axes.set_yticks(list(places), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#e6e8eb")


def _finish(figure: Any, title: str, subtitle: str, record: dict[str, Any], path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=TEXT)
    figure.supxlabel(f"{subtitle}\n{sentence(record['machine'])}", x=0.01, ha="left", fontsize=7.5, color="#6b727b")
    figure.savefig(path, dpi=110)
    with Image.open(path) as picture:  # a palette is enough for lines and bars: a quarter of the bytes
        picture.convert("RGB").quantize(96).save(path, optimize=True)
    pyplot.close(figure)


def draw_read_peers(record: dict[str, Any], path: Path) -> None:
    readers = record["settings"]["reader"]
    peers = [item["peer"] for item in record["prepared"] if item["peer"] not in record["failed"]]
    height = len(readers) * (0.36 * len(peers) + 0.7) + 1.1
    states = list(dict.fromkeys(item["state"] for item in record["summary"]))
    figure, grid = pyplot.subplots(
        len(readers), len(states), figsize=(5.5 * len(states), height), squeeze=False, layout="constrained"
    )
    for row, reader in zip(grid, readers, strict=True):
        for axes, state in zip(row, states, strict=True):
            chosen = {
                item["peer"]: item for item in record["summary"] if (item["reader"], item["state"]) == (reader, state)
            }
            names = [peer for peer in peers if peer in chosen]
            rounds = [chosen[name]["ratios"] for name in names]
            medians = [chosen[name]["ratio_to_source"]["median"] for name in names]
            notes = [
                f"{median:.2f} x, {chosen[name]['files_per_s']['median']:,.0f} files/s"
                for name, median in zip(names, medians, strict=True)
            ]
            _bars(axes, names, medians, rounds, notes, f"{state}, {reader} reader: speed relative to the source")
            axes.axvline(1, color=REFERENCE, linewidth=0.8, linestyle=":")
    settings = record["settings"]
    subtitle = (
        f"{settings['readers']} readers, {settings['rounds']} interleaved rounds (dots); bar: median; "
        f"cold: fresh mount and {settings['cold_by']}; warm: again; first: fresh mount, image in the page cache"
    )
    _finish(figure, f"Random whole-file reads, {record['dataset']['description']}", subtitle, record, path)


def draw_prep_speed(record: dict[str, Any], path: Path) -> None:
    datasets = list(record["datasets"])
    states = list(dict.fromkeys(item["state"] for item in record["runs"]))
    names = list(dict.fromkeys(item["contender"] for item in record["summary"]))
    height = len(datasets) * (0.36 * len(names) + 0.7) + 1.1
    figure, grid = pyplot.subplots(
        len(datasets), len(states), figsize=(5.5 * len(states), height), squeeze=False, layout="constrained"
    )
    for row, dataset in zip(grid, datasets, strict=True):
        for axes, state in zip(row, states, strict=True):
            chosen = {
                item["contender"]: item
                for item in record["summary"]
                if (item["dataset"], item["state"]) == (dataset, state)
            }
            seconds = {
                (item["round"], item["contender"]): item["on_disk_s"]
                for item in record["runs"]
                if (item["dataset"], item["state"]) == (dataset, state)
            }
            here = list(chosen)
            title = f"{state}: {record['datasets'][dataset].partition(' in ')[0]}"
            rounds = [
                [seconds[number, "tar"] / seconds[number, name] for number, other in seconds if other == name]
                for name in here
            ]
            medians = [chosen[name]["on_disk_s ratio to tar"]["median"] for name in here]
            notes = [
                f"{median:.2f} x, {chosen[name]['on_disk_s']['median']:.1f} s"
                for name, median in zip(here, medians, strict=True)
            ]
            _bars(axes, here, medians, rounds, notes, title)
            axes.axvline(1, color=REFERENCE, linewidth=0.8, linestyle=":")
    subtitle = f"{record['settings']['rounds']} interleaved rounds (dots); bar: median; until all output is on disk"
    _finish(figure, "Packing a tree: speed relative to tar -cf (longer is faster)", subtitle, record, path)


def draw_index_load(record: dict[str, Any], path: Path) -> None:
    panels = [
        ("load_s", "seconds to load", 1.0, "{:.3g} s"),
        ("added_rss_bytes", "added memory, MB", 1e6, "{:,.0f} MB"),
        ("lookup_ns", "lookup of one name, ns", 1.0, "{:,.0f} ns"),
        ("path_ns", "lookup of a path, ns", 1.0, "{:,.0f} ns"),
    ]
    labels = {"index": "fanstore\nindex.fsx", "objects": "objects\nfrom rows", "pickle": "objects\nfrom a pickle"}
    ways = [item["way"] for item in record["summary"]]
    figure, grid = pyplot.subplots(2, 2, figsize=(11, 5), squeeze=False, layout="constrained")
    for axes, (name, title, unit, form) in zip(grid.flat, panels, strict=True):
        rounds = [[item[name] / unit for item in record["rounds"] if item["way"] == way] for way in ways]
        medians = [item[name]["median"] / unit for item in record["summary"]]
        notes = [
            f"{form.format(median)}, {item[f'{name} ratio to index.fsx']['median']:.3g} x"
            for median, item in zip(medians, record["summary"], strict=True)
        ]
        _bars(axes, [labels[way] for way in ways], medians, rounds, notes, title)
    sizes = record["namespace"]
    subtitle = f"{record['settings']['rounds']} fresh processes each (dots); bar: median; shorter is better"
    title = f"Loading a name space of {sizes['files']:,} files in {sizes['directories']:,} directories"
    _finish(figure, title, subtitle, record, path)


def draw_prep_memory(record: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 3.6), layout="constrained")
    samples = record["samples"]
    times = [item["seconds"] for item in samples]
    axes.plot(times, [item["rss_bytes"] / 2**20 for item in samples], color=OWN, label="sum of resident sets")
    axes.plot(times, [item["pss_bytes"] / 2**20 for item in samples], color=OTHER, label="shared pages counted once")
    limit = record["settings"]["limit_bytes"] / 2**20
    axes.axhline(limit, color=REFERENCE, linewidth=0.8, linestyle=":")
    axes.text(0, limit, " limit in the specification", va="bottom", fontsize=8, color=TEXT)
    axes.set_ylim(0, limit * 1.15)
    axes.set_xlim(0)
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_ylabel("MiB", fontsize=8)
    axes.legend(frameon=False, fontsize=8, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    settings = record["settings"]
    peak = record["peak"]["rss_bytes"] / 2**20
    subtitle = f"codec {settings['codec']}, {settings['jobs']} jobs; all processes of the command; peak {peak:,.0f} MiB"
    _finish(figure, f"Memory of fanstore-prep for {settings['files']:,} files", subtitle, record, path)


def draw_memory(record: dict[str, Any], path: Path) -> None:
    courses = record["courses"]
    figure, grid = pyplot.subplots(
        1, len(courses), figsize=(5.5 * len(courses), 3.6), squeeze=False, layout="constrained"
    )
    for axes, course in zip(grid.flat, courses, strict=True):
        times = [sample["at_s"] / 60 for sample in course["samples"]]
        for kind, colour, label in (("VmRSS", OWN, "resident"), ("RssAnon", OTHER, "of it anonymous")):
            for rank in range(course["ranks"]):
                values = [sample["memory"][rank][kind] / 2**20 for sample in course["samples"]]
                axes.plot(times, values, color=colour, linewidth=0.9, label=label if rank == 0 else None)
        bound = course["bound_bytes"] / 2**20
        axes.axhline(bound, color=REFERENCE, linewidth=0.8, linestyle=":")
        axes.text(0, bound, " promised", va="bottom", fontsize=8, color=TEXT)
        axes.set_ylim(0, bound * 1.15)
        axes.set_xlim(0)
        axes.set_xlabel("minutes", fontsize=8)
        axes.set_ylabel("MiB", fontsize=8)
        nodes = "one node" if course["ranks"] == 1 else f"{course['ranks']} nodes, a line for each"
        axes.set_title(nodes, fontsize=10, loc="left", color=TEXT)
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    settings = record["settings"]
    subtitle = (
        f"{settings['readers']} readers for each mount, --cache {settings['cache_mib']}MiB, {settings['codec']}, "
        f"engine {settings['engine']}; {record['dataset']}"
    )
    _finish(figure, "Memory of daemons over time", subtitle, record, path)


def draw_staging_speed(record: dict[str, Any], path: Path) -> None:
    figure, grid = pyplot.subplots(1, 2, figsize=(11, 2.4), squeeze=False, layout="constrained")
    for axes, state in zip(grid.flat, ("cold", "warm"), strict=True):
        chosen = [item for item in record["summary"] if item["state"] == state]
        names = [item["contender"] for item in chosen]
        seconds = {
            (run["round"], run["contender"]): run["on_disk_s"] for run in record["runs"] if run["state"] == state
        }
        rounds = [
            [seconds[number, "cp"] / seconds[number, name] for number, other in seconds if other == name]
            for name in names
        ]
        medians = [item["on_disk_s ratio to cp"]["median"] for item in chosen]
        notes = [
            f"{median:.2f} x, {item['on_disk_s MB/s']['median']:,.0f} MB/s"
            for median, item in zip(medians, chosen, strict=True)
        ]
        _bars(axes, names, medians, rounds, notes, f"{state}: speed relative to cp, until on disk")
        axes.axvline(0.9, color=REFERENCE, linewidth=0.8, linestyle=":")
    settings = record["settings"]
    subtitle = (
        f"{settings['bytes'] / 1e6:,.0f} MB, {settings['rounds']} interleaved rounds (dots); dotted: the aim, 0.9"
    )
    _finish(figure, "Copying partitions to a local disk", subtitle, record, path)


def draw_write_speed(record: dict[str, Any], path: Path) -> None:
    known = {item["kind"] for item in record["summary"]}
    panels = [
        panel
        for panel in (
            ("large", "synced_s", "1 GiB, until on the disk", 0.8),
            ("small", "closed_s", "10,000 files of 10 KB", 0.3),
        )
        if panel[0] in known
    ]
    figure, grid = pyplot.subplots(1, len(panels), figsize=(12, 3.2), squeeze=False, layout="constrained")
    for axes, (kind, name, title, aim) in zip(grid.flat, panels, strict=True):
        chosen = [item for item in record["summary"] if item["kind"] == kind]
        names = [item["contender"] for item in chosen]
        seconds = {(run["round"], run["contender"]): run[name] for run in record["runs"] if run["kind"] == kind}
        rounds = [
            [seconds[number, "disk"] / seconds[number, name] for number, other in seconds if other == name]
            for name in names
        ]
        medians = [item[f"{name} ratio"]["median"] for item in chosen]
        notes = [f"{median:.2f} x, {item[name]['median']:.2f} s" for median, item in zip(medians, chosen, strict=True)]
        _bars(axes, names, medians, rounds, notes, f"{title}: speed relative to the disk")
        axes.axvline(aim, color=REFERENCE, linewidth=0.8, linestyle=":")
    subtitle = f"{record['settings']['rounds']} interleaved rounds (dots); dotted: the aim"
    _finish(figure, "Writing through the mount", subtitle, record, path)


def draw_remote_reads(record: dict[str, Any], path: Path) -> None:
    summary = [item for item in record["summary"] if item["way"] != "raw"]
    pair = [item for item in summary if item["askers"] < item["ranks"]]
    aggregate = [item for item in summary if item["askers"] == item["ranks"]]
    panels: list[tuple[str, list[dict[str, Any]], Callable[[dict[str, Any]], str]]] = [
        (
            f"one of two ranks reads, {window} under way: {way}",
            [item for item in pair if (item["window"], item["way"]) == (window, way)],
            lambda item: f"fanstore {item['size'] / 1024:,.0f} KiB",
        )
        for way in ("core", "mount")
        for window in dict.fromkeys(item["window"] for item in pair)
    ]
    panels += [
        (
            f"all ranks read 107 KiB, 16 under way: {way}",
            [item for item in aggregate if item["way"] == way],
            lambda item: f"fanstore {item['ranks']} rank{'s' * (item['ranks'] > 1)}, {item['share']}",
        )
        for way in ("core", "mount")
    ]
    panels = [panel for panel in panels if panel[1]]
    figure, grid = pyplot.subplots(len(panels), 1, figsize=(8, 2.1 * len(panels)), squeeze=False, layout="constrained")
    for axes, (title, chosen, name) in zip(grid.flat, panels, strict=True):
        medians = [item["ratio_to_raw"]["median"] for item in chosen]
        notes = [
            f"{median:.2f} x, {item['mb_per_s']['median']:,.0f} MB/s, {item['p50_us']['median']:,.0f} us"
            for median, item in zip(medians, chosen, strict=True)
        ]
        _bars(axes, [name(item) for item in chosen], medians, [item["ratios"] for item in chosen], notes, title)
        axes.axvline(0.7, color=REFERENCE, linewidth=0.8, linestyle=":")
    settings = record["settings"]
    subtitle = f"{settings['mpi']}, {settings['rounds']} interleaved rounds (dots); bar: median; dotted: the aim, 0.7"
    _finish(figure, "Reading from other nodes: files/s relative to raw mpi4py", subtitle, record, path)


def draw_shared_fs(record: dict[str, Any], path: Path) -> None:
    counts = sorted({item["nodes"] for item in record["summary"]})
    figures = {
        "first": "first epoch",
        "emptied": "again, caches emptied",
        "second": "again, from memory",
        "with start-up": "first epoch with start-up",
    }
    figure, grid = pyplot.subplots(
        len(counts),
        len(figures),
        figsize=(4.6 * len(figures), 2.0 * len(counts) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for row, nodes in zip(grid, counts, strict=True):
        chosen = [item for item in record["summary"] if item["nodes"] == nodes]
        names = [item["contender"] for item in chosen]
        for axes, (name, title) in zip(row, figures.items(), strict=True):
            rounds = [item[name]["ratios"] for item in chosen]
            medians = [item[name]["ratio_to_shared"]["median"] for item in chosen]
            notes = [
                f"{median:.2f} x, {item[name]['files_per_s']['median']:,.0f}/s"
                for median, item in zip(medians, chosen, strict=True)
            ]
            _bars(axes, names, medians, rounds, notes, f"{nodes} node{'s' * (nodes > 1)}: {title}")
            axes.axvline(1, color=REFERENCE, linewidth=0.8, linestyle=":")
    settings = record["settings"]
    subtitle = (
        f"shared: {settings['profile_sentence']}; {settings['readers']} readers per node, all nodes on this machine; "
        f"{settings['rounds']} interleaved rounds (dots); bar: median"
    )
    title = f"Files/s relative to a shared file system, {record['dataset']['description']}"
    _finish(figure, title, subtitle, record, path)


def draw_dlio(record: dict[str, Any], path: Path) -> None:
    workloads = list(record["settings"]["workloads"])
    figure, grid = pyplot.subplots(
        len(workloads), 2, figsize=(11, 1.5 * len(workloads) + 0.8), squeeze=False, layout="constrained"
    )
    for row, workload in zip(grid, workloads, strict=True):
        for axes, epoch in zip(row, (1, 2), strict=True):
            chosen = [item for item in record["summary"] if (item["workload"], item["epoch"]) == (workload, epoch)]
            names = [item["contender"] for item in chosen]
            rounds = [
                [
                    run["epochs"][epoch - 1]["au_percent"]
                    for run in record["runs"]
                    if (run["workload"], run["contender"]) == (workload, name)
                ]
                for name in names
            ]
            medians = [item["au_percent"]["median"] for item in chosen]
            notes = [
                f"{median:.0f} %, {item['samples_per_s']['median']:,.0f} samples/s"
                for median, item in zip(medians, chosen, strict=True)
            ]
            title = f"{workload}, {'first epoch, cold' if epoch == 1 else 'second epoch'}: AU"
            _bars(axes, names, medians, rounds, notes, title)
    settings = record["settings"]
    subtitle = (
        f"{settings['dlio']}, PyTorch {settings['torch']}; shared: {settings['profile_sentence']}; "
        f"{settings['rounds']} interleaved rounds (dots); bar: median"
    )
    _finish(figure, "DLIO: accelerator utilisation", subtitle, record, path)


def draw_cluster(record: dict[str, Any], path: Path) -> None:
    """Each epoch over its computing; in a series over numbers of hosts, the mean of those behind the first."""
    if record["series"] == "gain":
        draw_gain(record, path)
        return
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, result in record["runs"].items():
        ratios = [epoch["seconds"] / epoch["compute_s"] for epoch in result["epochs"]]
        if record["series"] == "scaling":
            later = ratios[1:]
            lines.setdefault(result["way"], []).append((result["settings"]["hosts"], sum(later) / len(later)))
        else:
            lines[name] = [(number + 1, ratio) for number, ratio in enumerate(ratios)]
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", label=name, markersize=4)
    axes.axhline(1.0, color=REFERENCE, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("hosts" if record["series"] == "scaling" else "epoch", fontsize=9)
    axes.set_ylabel("epoch over its computing", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _finish(figure, "A cluster in a box", "raw computes nothing: what moving alone takes", record, path)


def draw_gain(record: dict[str, Any], path: Path) -> None:
    """Seconds of an epoch and metadata operations, over the number of hosts: the picture at the top of the README."""
    figure, (times, operations) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    ways = {"shared": ("shared file system", REFERENCE), "fanstore-stated": ("FanStore", OWN)}
    hosts = sorted({result["settings"]["hosts"] for result in record["runs"].values()})
    places = range(len(hosts))
    for number, (way, (label, colour)) in enumerate(ways.items()):
        results = [record["runs"][f"{way}-{count}"] for count in hosts]
        later = [mean(epoch["seconds"] for epoch in result["epochs"][1:]) for result in results]
        asked = [result["total"]["shared"]["metadata_operations"] for result in results]
        for axes, values, text in ((times, later, "{:.1f}"), (operations, asked, "{:,}")):
            bars = axes.bar([place + (number - 0.5) * 0.4 for place in places], values, 0.38, color=colour, label=label)
            axes.bar_label(bars, [text.format(value) for value in values], fontsize=7, padding=1)
    computing = [record["runs"][f"shared-{count}"]["epochs"][-1]["compute_s"] for count in hosts]
    for place, seconds in zip(places, computing, strict=True):
        times.plot([place - 0.42, place + 0.42], [seconds, seconds], color="black", linewidth=1)
    times.set_ylabel("seconds of an epoch", fontsize=9)
    operations.set_ylabel("metadata operations of the job", fontsize=9)
    operations.set_yscale("log")
    for axes in (times, operations):
        axes.set_xticks(places, [f"{count} node{'s' * (count > 1)}" for count in hosts], fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    times.lines[0].set_label("computing alone")
    times.legend(frameon=False, fontsize=8)
    subtitle = "nodes, links, disks and a shared file system of this machine, slowed down; lower is better"
    _finish(figure, "The same dataset on more nodes", subtitle, record, path)


def draw_walk_tree(record: dict[str, Any], path: Path) -> None:
    peers = list(dict.fromkeys(item["peer"] for item in record["summary"]))
    order = [peer for peer in ("source", "fanstore-none-native", "fanstore-none-python") if peer in peers]
    names = order + [peer for peer in peers if peer not in order]
    figure, grid = pyplot.subplots(1, 2, figsize=(11, 0.36 * len(names) + 1.7), squeeze=False, layout="constrained")
    for axes, state in zip(grid.flat, ("cold", "warm"), strict=True):
        chosen = {item["peer"]: item for item in record["summary"] if item["state"] == state}
        ratios = [chosen[name]["ratio_to_erofs-none"] for name in names]
        notes = [
            f"{ratio['median']:.2f} x, {chosen[name]['entries_per_s']['median']:,.0f}/s"
            for name, ratio in zip(names, ratios, strict=True)
        ]
        medians = [ratio["median"] for ratio in ratios]
        _bars(axes, names, medians, [ratio["ratios"] for ratio in ratios], notes, f"{state}: speed relative to erofs")
        axes.axvline(1, color=REFERENCE, linewidth=0.8, linestyle=":")
    settings = record["settings"]
    subtitle = (
        f"{settings['rounds']} interleaved rounds (dots); bar: median; readdir and lstat by one thread; "
        f"cold: fresh mount and {settings['cold_by']}"
    )
    _finish(figure, f"Walk with lstat, {record['dataset']}", subtitle, record, path)


def draw_growth(record: dict[str, Any], path: Path) -> None:
    parts = record["settings"]["parts"]
    lines = {
        "source": (REFERENCE, ":", "source (ext4 or what is below)"),
        "fanstore-none-native": (OWN_PYTHON, "-", "fanstore, partitions read where they are"),
        "fanstore-none-native-staged": (OWN, "-", "fanstore, staged"),
    }
    figure, grid = pyplot.subplots(
        len(parts), 2, figsize=(11, 2.5 * len(parts) + 0.8), squeeze=False, layout="constrained"
    )
    for row, part in zip(grid, parts, strict=True):
        for axes, state in zip(row, ("cold", "warm"), strict=True):
            for peer, (colour, style, label) in lines.items():
                chosen = sorted(
                    (item["value"], item["files_per_s"], item["ratio_to_source"]["median"])
                    for item in record["summary"]
                    if (item["part"], item["peer"], item["state"]) == (part, peer, state)
                )
                if not chosen:
                    continue
                values = [value for value, _, _ in chosen]
                medians = [rate["median"] for _, rate, _ in chosen]
                axes.plot(values, medians, style, marker="o", markersize=3.5, color=colour, label=label)
                axes.fill_between(
                    values,
                    [rate["low"] for _, rate, _ in chosen],
                    [rate["high"] for _, rate, _ in chosen],
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
                if peer == "fanstore-none-native-staged":
                    for value, rate, ratio in chosen:
                        axes.annotate(
                            f"{ratio:.2f} x",
                            (value, rate["median"]),
                            (0, -11),
                            textcoords="offset points",
                            ha="center",
                            fontsize=7,
                            color=TEXT,
                        )
            axes.set_xscale("log", base=10 if part == "files" else 2)
            ticks = sorted({item["value"] for item in record["summary"] if item["part"] == part})
            axes.set_xticks(ticks, [_short(value, part) for value in ticks], fontsize=8)
            axes.minorticks_off()
            top = max(
                item["files_per_s"]["high"]
                for item in record["summary"]
                if (item["part"], item["state"]) == (part, state)
            )
            if part == "sizes":
                axes.set_yscale("log")
            else:
                axes.set_ylim(0, top * 1.15)
            axes.set_title(f"{state}: files/s by {record['titles'][part]}", fontsize=10, loc="left", color=TEXT)
            axes.tick_params(axis="y", labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#e6e8eb")
    grid[0][0].legend(frameon=False, fontsize=8)
    settings = record["settings"]
    subtitle = (
        f"{settings['rounds']} rounds, median, shaded: lowest to highest; figures: staged relative to the source in "
        f"the same round; cold: fresh mount and {settings['cold_by']}"
    )
    _finish(figure, "How the cost of reading grows", subtitle, record, path)


def _short(value: int, part: str) -> str:
    if part == "files":
        return f"{value:,}"
    return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB" if value >= 1 << 10 else str(value)


def draw_cached_once(record: dict[str, Any], path: Path) -> None:
    names = list(dict.fromkeys(item["peer"] for item in record["epochs"]))
    epochs = sorted({item["epoch"] for item in record["epochs"]})
    dataset_bytes = record["dataset"]["bytes"]
    figure, axes = pyplot.subplots(figsize=(9, 0.2 * len(names) * len(epochs) + 1.9), layout="constrained")
    shades = ["#c9ced4", "#8fbbda", "#1f77b4"]
    for epoch in epochs:
        chosen = {item["peer"]: item for item in record["epochs"] if item["epoch"] == epoch}
        places = [number + (epoch - 1 - (len(epochs) - 1) / 2) * 0.25 for number in range(len(names))]
        shares = [chosen[name]["disk_read_bytes"] / dataset_bytes for name in names]
        axes.barh(places, shares, height=0.23, color=shades[(epoch - 1) % len(shades)], label=f"epoch {epoch}")
        for place, share, name in zip(places, shares, names, strict=True):
            requests = chosen[name]["read_requests"]
            note = f"{share:.2f}" + ("" if requests is None else f", {requests:,} READ requests")
            axes.text(share + 0.01, place, note, va="center", fontsize=7, color=TEXT)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.25)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(
        "bytes read from the disk in each epoch, relative to the dataset", fontsize=10, loc="left", color=TEXT
    )
    settings = record["settings"]
    subtitle = (
        f"{dataset_bytes / 2**20:,.0f} MiB of files in a memory cgroup of {settings['limit_bytes'] / 2**20:,.0f} MiB, "
        f"daemon and {settings['readers']} readers in it; random order"
    )
    _finish(figure, "Does a dataset of 60 % of memory stay in memory?", subtitle, record, path)


def draw_profile_reads(record: dict[str, Any], path: Path) -> None:
    states = list(dict.fromkeys(item["state"] for item in record["profiles"]))
    shades = [pyplot.get_cmap("tab20")(number) for number in range(20)]
    figure, grid = pyplot.subplots(1, len(states), figsize=(13, 3.4), squeeze=False, layout="constrained")
    drawn: dict[str, Any] = {}
    for axes, state in zip(grid.flat, states, strict=True):
        chosen = [item for item in record["profiles"] if item["state"] == state]
        for place, item in enumerate(chosen):
            left = 0.0
            for number, kind in enumerate(record["kinds"]):
                width = sum(kinds.get(kind, 0.0) for kinds in item["parts_us"].values())
                colour = "#eceef0" if kind == "idle" else shades[number % len(shades)]
                bar = axes.barh(place, width, left=left, color=colour, height=0.6)
                if width > 0.3:
                    drawn.setdefault(kind, bar)
                left += width
            axes.text(left, place, f" {left:.0f}", va="center", fontsize=8, color=TEXT)
        axes.set_yticks(range(len(chosen)), [item["peer"] for item in chosen], fontsize=8)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.1)
        axes.invert_yaxis()
        axes.set_title(f"{state}: µs of both cores per file", fontsize=10, loc="left", color=TEXT)
        axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = [kind for kind in record["kinds"] if kind in drawn]
    figure.legend([drawn[kind] for kind in kinds], kinds, loc="outside right center", frameon=False, fontsize=8)
    subtitle = "reader, daemon and kernel together, sampled by perf; idle: a core waits for the disk"
    _finish(figure, f"Where the time of a read goes, {record['dataset']}", subtitle, record, path)


def draw_shuffle_accuracy(record: dict[str, Any], path: Path) -> None:
    """By number of workers: accuracy of each order, sorted and shuffled shares side by side, a dot for every seed."""
    shares = {"sorted": OWN, "shuffled": OTHER}
    figure, panels = pyplot.subplots(1, len(record["workers"]), figsize=(11, 5.2), sharey=True, layout="constrained")
    for axes, workers in zip(panels, record["workers"], strict=True):
        for number, (share, colour) in enumerate(shares.items()):
            for place, order in enumerate(record["orders"]):
                values = [
                    trial["final"]
                    for trial in record["trials"]
                    if (trial["order"], trial["workers"], trial["share"]) == (order, workers, share)
                ]
                height = place + 0.2 - 0.4 * number
                axes.plot([sum(values) / len(values)], [height], "|", color=colour, markersize=11, markeredgewidth=3)
                axes.plot(values, [height] * len(values), "o", color=colour, markersize=3, alpha=0.6)
        axes.set_yticks(range(len(record["orders"])), record["orders"], fontsize=9)
        axes.set_title(f"{workers} workers", fontsize=10, loc="left", color=TEXT)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", color="#e6e8eb")
        axes.set_axisbelow(True)
    panels[0].invert_yaxis()
    handles = [Line2D([], [], color=colour, marker="o", linestyle="") for colour in shares.values()]
    names = [f"shares {share}{' by class' * (share == 'sorted')}" for share in shares]
    figure.legend(handles, names, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    subtitle = "validation accuracy; a dot for every seed, a line for their mean; the number is the fraction exchanged"
    _finish(figure, "Shuffles that keep reads local: what they learn", subtitle, record, path)


DRAWINGS = {
    "shuffle_accuracy": draw_shuffle_accuracy,
    "profile_reads": draw_profile_reads,
    "cached_once": draw_cached_once,
    "growth": draw_growth,
    "cluster": draw_cluster,
    "shared_fs": draw_shared_fs,
    "dlio": draw_dlio,
    "walk_tree": draw_walk_tree,
    "remote_reads": draw_remote_reads,
    "read_peers": draw_read_peers,
    "prep_speed": draw_prep_speed,
    "index_load": draw_index_load,
    "memory": draw_memory,
    "prep_memory": draw_prep_memory,
    "staging_speed": draw_staging_speed,
    "write_speed": draw_write_speed,
}


def main() -> int:
    for argument in sys.argv[1:]:
        path = Path(argument)
        record = json.loads(gzip.decompress(path.read_bytes()))
        DRAWINGS[record["kind"]](record, path.with_suffix("").with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
