"""The figures of one daemon in the text format of Prometheus, for node_exporter's textfile collector.

A pure function, used by fuse/reporting.py, in any thread. All metrics have the label ``mountpoint``, like those of
node_exporter about file systems: two mounts on one machine are two files, and must not give the same series.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_STAGED = {
    "done": "done_partitions",
    "unverified": "unverified_partitions",
    "failed": "failed_partitions",
    "skipped": "skipped_partitions",
    "reused": "reused_partitions",
}


class _Metric(NamedTuple):
    """A metric with all its series: labels beside the mount point, and value."""

    name: str
    kind: str
    help: str
    series: Sequence[tuple[Mapping[str, str], float]]


def metrics_text(facts: Mapping[str, Any]) -> str:
    """The whole file.

    Args:
        facts: ``config`` and ``stats`` as in config.json and stats.json, ``started_s``, ``local_bytes``, ``histograms``
            by name (OperationStatistics.histogram), ``events`` by level.
    """
    common = {"mountpoint": str(facts["config"]["mountpoint"])}
    lines: list[str] = []
    for metric in _metrics(facts):
        lines += _head(metric.name, metric.kind, metric.help)
        lines += [_line(metric.name, {**common, **labels}, value) for labels, value in metric.series]
    for name, text in _HISTOGRAMS.items():
        if name in facts["histograms"]:
            lines += _histogram(f"fanstore_{name}_latency_seconds", text, facts["histograms"][name], common)
    return "\n".join(lines) + "\n"


_HISTOGRAMS = {
    "read": "Time from the arrival of a read in the daemon to its answer.",
    "fetch": "Time from asking another node for a chunk to the arrival of its bytes, or to the failure.",
}


def _metrics(facts: Mapping[str, Any]) -> Iterator[_Metric]:
    config, stats = facts["config"], facts["stats"]
    yield _one(
        "build_info",
        "gauge",
        "Version and engine of the daemon; always 1.",
        1,
        version=config["fanstore"],
        engine=stats["engine"]["name"],
    )
    yield _one(
        "job_info",
        "gauge",
        "What is mounted, and which of how many daemons of its job this is; always 1.",
        1,
        dataset=config["prepared"],
        rank=config["rank"],
        size=config["size"],
    )
    yield _one("start_time_seconds", "gauge", "When the daemon started, in Unix time.", facts["started_s"])
    yield from _reading(stats)
    cache = stats["cache"]
    yield _one("cache_bytes", "gauge", "Bytes in the memory cache.", cache["used_bytes"])
    yield _one("cache_capacity_bytes", "gauge", "Bound of the memory cache.", cache["capacity_bytes"])
    yield _one("cache_hits_total", "counter", "Look-ups in the memory cache that found a chunk.", cache["hits"])
    yield _one("cache_misses_total", "counter", "Look-ups in the memory cache that did not.", cache["misses"])
    if "order" in stats:
        yield from _order(stats["order"])
    intercepted = dict(stats.get("intercepted", {}))
    if intercepted:
        text = "Bytes of the dataset that preloaded programs have read by themselves."
        yield _one("intercepted_bytes_total", "counter", text, intercepted.pop("bytes"))
        text = (
            "Calls of preloaded programs: answered by the library, promoted to files of the mount, passed to the mount."
        )
        yield _by("intercepted_calls_total", "counter", text, "call", intercepted)
    yield _one("memory_bytes", "gauge", "Resident memory of the daemon.", stats["memory"]["rss_bytes"])
    yield from _storing(facts)
    if "peers" in stats:
        yield from _peers(stats["peers"])
    if "copies" in stats:
        yield from _copies(stats["copies"])
    if "outputs" in stats:
        yield from _outputs(stats["outputs"])
    yield _by(
        "log_messages_total", "counter", "Warnings and errors in the log of the daemon.", "level", facts["events"]
    )


def _reading(stats: Mapping[str, Any]) -> Iterator[_Metric]:
    sources, operations = stats["sources"], stats["operations"]

    def by_source(key: str) -> dict[str, float]:
        return {name: numbers[key] for name, numbers in sources.items()}

    text = "Bytes of the dataset that programs read, by where they came from; without the kernel's page cache."
    yield _by("read_bytes_total", "counter", text, "source", by_source("bytes"))
    yield _by("reads_total", "counter", "Answers to reads, by where they came from.", "source", by_source("reads"))
    text = "Bytes read from partition files, or received from other nodes, to answer reads."
    yield _by("fetched_bytes_total", "counter", text, "source", by_source("fetched_bytes"))
    counts = {name: numbers["count"] for name, numbers in operations.items()}
    yield _by("operations_total", "counter", "Requests of the kernel that were answered.", "operation", counts)
    errors = {name: numbers["errors"] for name, numbers in operations.items()}
    text = "Requests that were answered with an error; that there is no such file is none."
    yield _by("operation_errors_total", "counter", text, "operation", errors)
    failed = stats["errors"]
    yield _one("failed_reads_total", "counter", "Reads for which no copy was good.", failed["failed_reads"])
    yield _one("damaged_files_total", "counter", "Files with at least one failed read.", failed["damaged_files"])
    text = "Chunks that another copy had to give, because the first one was damaged or unreadable."
    yield _one("fallbacks_total", "counter", text, failed["fallbacks"])
    text = "Stored bytes that were compared with their checksum while reading."
    yield _one("verified_bytes_total", "counter", text, stats["verification"]["bytes"])


def _order(order: Mapping[str, Any]) -> Iterator[_Metric]:
    known = {key: "" if order[key] is None else str(order[key]) for key in ("source", "sampler", "seed")}
    yield _one("order_info", "gauge", "How the order of reads is known, and what it is; always 1.", 1, **known)
    for key, name, text in (
        ("files", "order_files_total", "Files that programs began to read, as far as the kernel asked for them."),
        ("predicted", "order_predicted_files_total", "Of these, files that were read where they were expected."),
        ("prefetched", "order_prefetched_chunks_total", "Chunks that were fetched before they were wanted."),
        ("late", "order_late_chunks_total", "Chunks that were wanted while they were being fetched ahead."),
        ("waited_s", "read_wait_seconds_total", "Time that readers have waited for chunks, all of them together."),
    ):
        yield _one(name, "counter", text, order[key])


def _storing(facts: Mapping[str, Any]) -> Iterator[_Metric]:
    staging = facts["stats"]["staging"]
    yield _one("local_bytes", "gauge", "Bytes of partitions on the disk of this node.", facts["local_bytes"])
    yield _one("staging_bytes", "gauge", "Bytes of partitions that are to be copied to this node.", staging["bytes"])
    yield _one("staged_bytes_total", "counter", "Bytes copied to this node so far.", staging["done_bytes"])
    states = {state: staging[key] for state, key in _STAGED.items()}
    yield _by("staged_partitions", "gauge", "Partitions by what became of their copying.", "state", states)


def _peers(peers: Mapping[str, Any]) -> Iterator[_Metric]:
    counts = {state: sum(peer["state"] == state for peer in peers["nodes"]) for state in ("alive", "silent", "lost")}
    text = (
        "Other nodes of the job by state: alive; silent, which do not answer now; lost, which are dead or have ended."
    )
    yield _by("peers", "gauge", text, "state", counts)
    served = peers["transport"].get("served_bytes", 0)
    yield _one("served_bytes_total", "counter", "Bytes sent to other nodes.", served)
    for key, text in (
        ("timeouts", "Questions that another node did not answer in time."),
        ("refused", "Questions for what another node did not have; normal while it is still copying."),
        ("damaged", "Chunks from other nodes that did not match their checksum."),
    ):
        yield _one(f"peer_{key}_total", "counter", text, sum(peer[key] for peer in peers["nodes"]))


def _copies(copies: Mapping[str, Any]) -> Iterator[_Metric]:
    text = "Copies of partitions that are to be made again after a death, on all nodes, as far as this one knows."
    yield _one("copies_missing", "gauge", text, copies["missing_copies"])
    text = "Partitions that this node has copied again after a death."
    yield _one("restored_partitions_total", "counter", text, copies["done_partitions"])
    yield _one("restored_bytes_total", "counter", "Bytes copied for that so far.", copies["done_bytes"])


def _outputs(outputs: Mapping[str, Any]) -> Iterator[_Metric]:
    yield _one("outputs", "gauge", "Files that programs have written, on all nodes.", outputs["files"])
    yield _one("outputs_bytes", "gauge", "Their bytes.", outputs["bytes"])
    if "pending" in outputs:
        text = "Outputs that do not stand in the output directory yet."
        yield _one("outputs_pending", "gauge", text, outputs["pending"])
        yield _one("outputs_pending_bytes", "gauge", "Bytes to be copied for them.", outputs["pending_bytes"])
        yield _one("outputs_saved_total", "counter", "Copies made by this node.", outputs["saved"])
        yield _one("outputs_saved_bytes_total", "counter", "Bytes of these.", outputs["saved_bytes"])
        text = "1 if the output directory could not be written to the last time, else 0."
        yield _one("outputs_failing", "gauge", text, outputs["trouble"] is not None)


def _one(name: str, kind: str, text: str, value: float, **labels: object) -> _Metric:
    return _Metric(f"fanstore_{name}", kind, text, [({key: str(label) for key, label in labels.items()}, value)])


def _by(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> _Metric:
    return _Metric(f"fanstore_{name}", kind, text, [({label: key}, value) for key, value in values.items()])


def _histogram(name: str, text: str, histogram: Mapping[str, Any], common: Mapping[str, str]) -> Iterator[str]:
    yield from _head(name, "histogram", text)
    below = 0
    for bound_ns, count in zip(histogram["bounds_ns"], histogram["octaves"], strict=False):
        below += count
        # Times are whole nanoseconds below the bound, so "at most" is off by the one that is exactly as long.
        yield _line(f"{name}_bucket", {**common, "le": repr(bound_ns / 1e9)}, below)
    yield _line(f"{name}_bucket", {**common, "le": "+Inf"}, histogram["count"])
    yield _line(f"{name}_sum", common, histogram["sum_s"])
    yield _line(f"{name}_count", common, histogram["count"])


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
    number = repr(float(value)) if isinstance(value, float) else str(int(value))
    return f"{name}{{{inner}}} {number}"


def _escape(text: str) -> str:
    """A label's value; what is not Unicode (names of files are bytes) is written as escapes."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return clean.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
