"""Metrics for Prometheus, read with Prometheus' own parser: their form, their values, and when the file is written."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from conftest import MakePrepared
from mounting import Mount, command, needs_fuse, wait_until
from prometheus_client.parser import text_string_to_metric_families
from publishing import follow

from fanstore.fuse.reporting import METRICS_S, Publishing, Reporting
from fanstore.report.metrics import metrics_text
from fanstore.telemetry.statistics import Source, Statistics

pytest_plugins = ["mounting"]

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Values:
    """All samples by name and labels, without the mount point; checks the form of the whole."""
    assert text.endswith("\n")
    values: Values = {}
    names = []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family
        assert re.fullmatch(r"fanstore_[a-z0-9_]+", family.name)
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("mountpoint")
            key = (sample.name, frozenset(labels.items()))
            assert key not in values, f"twice: {key}"
            values[key] = sample.value
            if family.type == "counter":
                assert sample.name.endswith("_total")
    assert len(names) == len(set(names)), "the lines of a metric stand together"
    assert len(re.findall("^# HELP ", text, re.M)) == len(re.findall("^# TYPE ", text, re.M)) == len(names)
    return values


def value(values: Values, name: str, **labels: str) -> float:
    return values[f"fanstore_{name}", frozenset(labels.items())]


def check_histogram(values: Values, name: str) -> int:
    """Buckets grow, and end with the count; returns it."""
    found = {dict(labels)["le"]: count for (key, labels), count in values.items() if key == f"{name}_bucket"}
    bounds = sorted(found, key=float)
    assert bounds[-1] == "+Inf" and 20 <= len(bounds) <= 40
    counts = [found[bound] for bound in bounds]
    assert counts == sorted(counts) and counts[-1] == values[f"{name}_count", frozenset()]
    assert float(bounds[0]) < 2e-6 and float(bounds[-2]) > 10
    assert values[f"{name}_sum", frozenset()] >= 0
    return int(counts[-1])


def facts(**changes: Any) -> dict[str, Any]:
    """Of a daemon in a job of three nodes, with outputs."""
    statistics = Statistics()
    for elapsed_ns in (900, 70_000, 70_000, 3_000_000, 40_000_000_000):
        statistics.record("read", elapsed_ns)
    statistics.record("lookup", 5_000, failed=True)
    statistics.sources[Source.REMOTE].reads, statistics.sources[Source.REMOTE].bytes = 5, 600_000
    peer = {"host": "x", "fetches": 1, "fetched_bytes": 2, "refused": 3, "timeouts": 4, "lost": 0, "damaged": 6}
    cache = {"used_bytes": 10, "capacity_bytes": 20, "hits": 30, "misses": 40}
    peers = [{"rank": 1, "state": "alive", **peer}, {"rank": 2, "state": "lost", **peer}]
    outputs = {
        "files": 2,
        "bytes": 7,
        "pending": 1,
        "pending_bytes": 5,
        "saved": 1,
        "saved_bytes": 2,
        "trouble": "full",
    }
    order = {"source": "hooked", "sampler": "RandomSampler", "seed": 7, "epoch": 2, "files": 9, "predicted": 8}
    order |= {"prefetched": 11, "late": 1, "waited_s": 0.25}
    statistics.add_section("cache", lambda: cache)
    statistics.add_section("order", lambda: order)
    statistics.add_section("peers", lambda: {"nodes": peers, "transport": {"served_bytes": 77}})
    statistics.add_section("copies", lambda: {"missing_copies": 6, "done_partitions": 4, "done_bytes": 55})
    statistics.add_section("outputs", lambda: outputs)
    read = statistics.totals().operations["read"].histogram()
    return {
        "config": {"fanstore": "1.2", "mountpoint": "/m", "prepared": "/d.fan", "rank": 0, "size": 3},
        "started_s": 1.5e9,
        "stats": statistics.snapshot(),
        "local_bytes": 99,
        "histograms": {"read": read, "fetch": read},
        "events": {"warning": 3, "error": 1},
        **changes,
    }


def test_values_and_their_names() -> None:
    values = parse(metrics_text(facts()))
    assert value(values, "build_info", version="1.2", engine="python") == 1
    assert value(values, "job_info", dataset="/d.fan", rank="0", size="3") == 1
    assert value(values, "start_time_seconds") == 1.5e9
    assert value(values, "read_bytes_total", source="remote") == 600_000
    assert value(values, "reads_total", source="remote") == 5
    assert value(values, "read_bytes_total", source="shared") == 0, "all sources are there from the start"
    assert value(values, "operations_total", operation="read") == 5
    assert value(values, "operation_errors_total", operation="lookup") == 1
    assert value(values, "peers", state="alive") == value(values, "peers", state="lost") == 1
    assert value(values, "peers", state="silent") == 0
    assert value(values, "served_bytes_total") == 77
    assert value(values, "peer_timeouts_total") == 8 and value(values, "peer_damaged_total") == 12
    assert value(values, "copies_missing") == 6
    assert value(values, "restored_partitions_total") == 4 and value(values, "restored_bytes_total") == 55
    assert value(values, "outputs_pending") == 1 and value(values, "outputs_failing") == 1
    assert value(values, "cache_bytes") == 10 and value(values, "cache_hits_total") == 30
    assert value(values, "order_info", source="hooked", sampler="RandomSampler", seed="7") == 1
    assert value(values, "order_files_total") == 9 and value(values, "order_predicted_files_total") == 8
    assert value(values, "order_prefetched_chunks_total") == 11 and value(values, "order_late_chunks_total") == 1
    assert value(values, "read_wait_seconds_total") == 0.25
    assert value(values, "memory_bytes") > 1 << 20
    assert value(values, "log_messages_total", level="warning") == 3
    assert check_histogram(values, "fanstore_read_latency_seconds") == 5
    assert check_histogram(values, "fanstore_fetch_latency_seconds") == 5

    def below(bound: str) -> float:
        return value(values, "read_latency_seconds_bucket", le=bound)

    assert (below("1.024e-06"), below("6.5536e-05"), below("0.000131072")) == (1, 1, 3)
    assert below("17.179869184") == 4, "one took longer than all bounds"


def test_every_metric_is_documented() -> None:
    text = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    for name in re.findall(r"^# TYPE (\S+)", metrics_text(facts()), re.M):
        assert f"`{name}`" in text, f"docs/operations.md does not explain {name}"


def test_a_lone_daemon_has_no_peers_and_no_outputs() -> None:
    text = metrics_text(facts())
    lone = facts()
    del lone["stats"]["peers"], lone["stats"]["copies"], lone["stats"]["outputs"], lone["histograms"]["fetch"]
    names = {name for name, _ in parse(metrics_text(lone))}
    assert not [name for name in names if "peer" in name or "output" in name or "fetch_latency" in name]
    assert names < {name for name, _ in parse(text)}


def test_labels_may_hold_anything() -> None:
    """Quotes, backslashes, newlines, and bytes that are no UTF-8, as paths may have them."""
    nasty = 'a"b\\c\nd{e}=\udcff,# HELP x'
    config = {**facts()["config"], "mountpoint": nasty, "prepared": nasty}
    text = metrics_text(facts(config=config))
    values = parse(text.encode().decode())
    expected = nasty.replace("\udcff", "\\udcff")
    assert value(values, "job_info", dataset=expected, rank="0", size="3") == 1
    assert all(
        sample.labels["mountpoint"] == expected
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


@pytest.fixture
def small(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        (source / f"file-{number}").write_bytes(os.urandom(40_000))
    return make_prepared(source, partitions=2, quiet=True)


#: Turns of waiting for a file; each takes a millisecond, and on the clock that jumps a second.
TURNS = 60_000


def reads_in(path: Path) -> float | None:
    """What the file says of reads from local disks; None if there is none."""
    return value(parse(path.read_text()), "reads_total", source="local") if path.exists() else None


async def wait_reads(path: Path, wanted: float) -> None:
    """Until the file says so."""
    for _ in range(TURNS):
        if reads_in(path) == wanted:
            return
        await trio.sleep(1)
    pytest.fail(f"{path} never said {wanted}, but {reads_in(path)}")


def test_the_file_is_written_again_and_again_and_goes_at_the_end(tmp_path: Path, small: Path) -> None:
    target = tmp_path / "node.prom"
    seen: list[set[str]] = []

    def look() -> None:
        seen.append({path.name for path in tmp_path.iterdir() if path.name.endswith(".prom")})
        assert target.stat().st_mode & 0o777 == 0o644, "node_exporter is another user"

    async def scenario(reporting: Reporting, statistics: Statistics) -> None:
        for count in (0, 7, 9):
            statistics.sources[Source.LOCAL].reads = count
            await wait_reads(target, count)
            look()

    follow(small, Publishing(metrics=target), scenario)
    assert seen == [{"node.prom"}] * 3, "nothing else that a collector could take for metrics"
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir() if "prom" in path.name] == []


def test_a_file_that_cannot_be_written_is_said_once(
    tmp_path: Path, small: Path, expect_warnings: Callable[..., None]
) -> None:
    folder = tmp_path / "folder"
    target = folder / "node.prom"
    folder.mkdir()
    expect_warnings(r"cannot write .*node.prom: No such file or directory")

    async def scenario(reporting: Reporting, statistics: Statistics) -> None:
        await wait_reads(target, 0)
        folder.rename(tmp_path / "away")
        for _ in range(TURNS):
            if reporting.events.warnings:
                break
            await trio.sleep(1)
        await trio.sleep(10 * METRICS_S)
        folder.mkdir()  # it comes back by itself
        statistics.sources[Source.LOCAL].reads = 4
        await wait_reads(target, 4)

    reporting = follow(small, Publishing(metrics=target), scenario)
    assert reporting.events.warnings == 1


@needs_fuse
def test_of_a_real_mount(tmp_path: Path, small: Path, mount: Mount) -> None:
    """The names are filled in; what it says is what stats.json says; a signal ends it and the file is gone."""
    mounted = mount(small, "--metrics", str(tmp_path / "{rank}.prom"))
    target = tmp_path / "0.prom"
    wait_until(target.exists, "metrics", mounted.evidence)
    values = parse(target.read_text())
    config = json.loads((mounted.path / ".fanstore/config.json").read_bytes())
    assert value(values, "build_info", version=config["fanstore"], engine="native") == 1
    assert value(values, "job_info", dataset=str(small), rank="0", size="1") == 1
    check_histogram(values, "fanstore_read_latency_seconds")
    text = target.read_text()
    assert f'mountpoint="{mounted.path}"' in text
    mounted.stop()
    assert not target.exists()


@needs_fuse
def test_refused_places(tmp_path: Path, small: Path) -> None:
    point = tmp_path / "m"
    for option in ("--metrics", "--report"):
        for place_, reason in (
            (point / "x", "lies inside the mount point"),
            (tmp_path / "none" / "x", "there is no directory"),
            (tmp_path, "it is a directory"),
        ):
            result = command("mount", small, point, option, place_, "--", "true")
            assert result.returncode == (2 if place_ == point / "x" else 1), result.stderr
            assert reason in result.stderr and result.stderr.count("\n") == 1, result.stderr
            assert not point.exists()
    result = command("mount", small, tmp_path / "m{rank}", "--metrics", tmp_path / "x.prom", "--", "true")
    assert result.returncode == 2 and "put {rank} into --metrics" in result.stderr
