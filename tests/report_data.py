"""Made-up data for the report page: jobs of any size and length, as ``report.json`` has them. Used by tests of the
report, and with ``python tests/report_data.py 64 page.html`` to look at the page."""

import math
import random
import sys
from pathlib import Path
from typing import Any

BOUNDS_NS = [1 << power for power in range(10, 35)]

#: Sections of the page, in order.
SECTIONS = [
    "glance",
    "throughput",
    "sources",
    "order",
    "traffic",
    "latency",
    "memory",
    "outputs",
    "events",
    "nodes",
    "about",
]

#: A name that wants to be more than text.
HOSTILE = '<script>alert("x")</script>\' onload=alert(1) \u202e\x1b[31m\udcff&amp;'

SOURCES = ("local", "remote", "shared", "cache")


def make_job(
    size: int, duration_s: float = 600.0, *, seed: int = 1, samples: int = 200, **changes: Any
) -> dict[str, Any]:
    """A job that reads three epochs from copies on two nodes each, and writes a checkpoint now and then."""
    numbers = random.Random(seed)
    job: dict[str, Any] = {
        "version": 1,
        "made_s": 1_800_000_000.0 + duration_s,
        "ended": True,
        "code": 0,
        "config": {
            "storage": "shared file system",
            "fanstore": "0.1.0",
            "prepared": "/shared/datasets/imagenet.fan",
            "mountpoint": "/tmp/imagenet",
            "codec": "none",
            "partitions": 4 * size,
            "totals": {"files": 1_281_167, "bytes": 147_900_000_000, "entries": 1_282_168},
            "rank": 0,
            "size": size,
            "replicas": min(2, size),
            "local": "/local/ssd",
            "cache_bytes": 1 << 30,
            "output": "/shared/run42",
            "engine": "native",
        },
        "nodes": [make_node(rank, size, duration_s, samples, numbers) for rank in range(size)],
    }
    return {**job, **changes}


def make_node(rank: int, size: int, duration_s: float, samples: int, numbers: random.Random) -> dict[str, Any]:
    times = [round(duration_s * number / samples, 3) for number in range(samples + 1)]
    columns: dict[str, list[float]] = {"at_s": list(times)}
    for name in (*SOURCES, "cached_bytes", "memory_bytes", "pending", "pending_bytes", "waited_ms"):
        columns[name] = [0]
    for number in range(1, samples + 1):
        part = number / samples
        epoch = part * 3 % 1
        speed = 0 if epoch > 0.93 else 220e6 * (0.8 + 0.2 * math.sin(40 * part) + 0.1 * numbers.random())
        staged = min(1.0, part * 8)
        remote = speed * staged * (1 - min(2, size) / size)
        shared = speed * (1 - staged)
        step_s = duration_s / samples
        columns["remote"].append(int(remote * step_s * 0.92))
        columns["cache"].append(int(remote * step_s * 0.08))
        columns["shared"].append(int(shared * step_s))
        columns["local"].append(int((speed - remote - shared) * step_s))
        columns["cached_bytes"].append(int((1 << 30) * min(1.0, 2 * part)))
        columns["memory_bytes"].append(int(3e8 + 9e8 * min(1.0, 2 * part) + 5e7 * numbers.random()))
        waiting = max(0.0, 1 - (epoch - 0.93) * 12) if epoch > 0.93 else 0
        columns["pending"].append(round(3 * waiting))
        columns["pending_bytes"].append(int(2.4e9 * waiting))
        columns["waited_ms"].append(int(300 * step_s * staged * (part < 0.5)))
    totals = {name: int(sum(columns[name])) for name in SOURCES}
    others = [peer for peer in range(size) if peer != rank]
    weights = {peer: 0.7 + 0.6 * numbers.random() for peer in others}
    whole = sum(weights.values()) or 1.0
    fetched = {str(peer): int(totals["remote"] * weight / whole) for peer, weight in weights.items()}
    reads = sum(totals.values()) // 115_000
    return {
        "rank": rank,
        "host": f"node{rank + 101:04d}",
        "state": "done",
        "pid": 4000 + rank,
        "started_s": 1_800_000_000.0,
        "uptime_s": duration_s,
        "engine": "native",
        "local_bytes": 147_900_000_000 * min(2, size) // size,
        "sources": {
            name: {
                "reads": totals[name] // 115_000,
                "bytes": totals[name],
                "fetches": totals[name] // 115_000 if name != "cache" else 0,
                "fetched_bytes": int(totals[name] * 1.02) if name != "cache" else 0,
            }
            for name in SOURCES
        },
        "errors": {"damaged_files": 0, "failed_reads": 0, "fallbacks": 0},
        "staging": {
            "partitions": 8,
            "bytes": 10**10,
            "done_partitions": 8,
            "unverified_partitions": 0,
            "failed_partitions": 0,
            "skipped_partitions": 0,
            "done_bytes": 10**10,
            "reused_partitions": 0,
            "reused_bytes": 0,
        },
        "memory": {"rss_bytes": int(columns["memory_bytes"][-1]), "peak_rss_bytes": int(max(columns["memory_bytes"]))},
        "cache_capacity_bytes": 1 << 30,
        "order": {
            "source": "hooked",
            "sampler": "DistributedSampler",
            "seed": 7,
            "epoch": 2,
            "files": reads,
            "predicted": reads - reads // 100,
            "prefetched": reads // 2,
            "late": 12,
            "waited_s": 1.5,
        },
        "outputs": {
            "files": 9,
            "directories": 1,
            "bytes": 7_200_000_000,
            "being_written": 0,
            "directory": "/shared/run42",
            "pending": 0,
            "pending_bytes": 0,
            "saved": 9 if rank == 0 else 0,
            "saved_bytes": 7_200_000_000 if rank == 0 else 0,
            "trouble": None,
        },
        "latency": {
            "read": make_histogram(reads, 120e3, numbers),
            **({"fetch": make_histogram(reads // 2, 260e3, numbers)} if size > 1 else {}),
        },
        "served_bytes": totals["remote"],
        "fetched": fetched,
        "samples": columns,
        "warnings": 0,
        "events": [
            [0.2, "info", "staging", "staging began: 8 partitions, 9.31 GiB"],
            [0.9, "info", "mount", "mounted /shared/datasets/imagenet.fan on /tmp/imagenet"],
            [round(duration_s / 8, 1), "info", "staging", "staging ended: 8 of 8 partitions are on this node's disk"],
        ],
        "events_left_out": 0,
    }


def make_histogram(count: int, typical_ns: float, numbers: random.Random) -> dict[str, Any]:
    """Around a typical time, with a thin tail of slow ones."""
    weights = []
    for power in (*range(10, 35), 35):
        distance = power - math.log2(typical_ns)
        weights.append(math.exp(-(distance**2) / 1.5) + (1e-5 * numbers.random() if 0 < distance < 9 else 0))
    whole = sum(weights)
    counts = [int(count * weight / whole) for weight in weights]
    longest = max((number for number, each in enumerate(counts) if each), default=0)
    return {
        "count": sum(counts),
        "sum_s": sum(counts) * typical_ns / 1e9,
        "bounds_ns": BOUNDS_NS,
        "octaves": counts,
        "latency_us": {"mean": 0, "p50": 0, "p90": 0, "p99": 0, "max": [*BOUNDS_NS, 1 << 35][longest] * 0.9 / 1e3},
    }


def make_idle_node(rank: int = 0) -> dict[str, Any]:
    """A node that has served nothing yet."""
    node = make_node(rank, 1, 1.0, 4, random.Random(0))
    columns = {name: [0] * 5 for name in node["samples"]}
    columns["at_s"] = node["samples"]["at_s"]
    sources = {name: dict.fromkeys(numbers, 0) for name, numbers in node["sources"].items()}
    return {
        **node,
        "samples": columns,
        "sources": sources,
        "latency": {"read": make_histogram(0, 1e5, random.Random(0))},
        "fetched": {},
        "served_bytes": 0,
    }


if __name__ == "__main__":
    from fanstore.report.page import report_page

    Path(sys.argv[2]).write_text(report_page(make_job(int(sys.argv[1]))), encoding="utf-8")
