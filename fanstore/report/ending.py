"""What a job has done, in one line: for the terminal, when its COMMAND has ended.

A pure function from the data of ``report.json`` (docs/operations.md), used by fuse/reporting.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fanstore.report import figures
from fanstore.report.figures import SOURCES, Node
from fanstore.report.markup import share
from fanstore.units import format_bytes, format_count

_WORDS = {
    "local": "local disks",
    "cache": "memory",
    "remote": "other nodes",
    "own": "files that programs read themselves",
}


def ending(data: Mapping[str, Any], report: Path | None) -> str:
    """``read 1,281,167 files, 140 GiB: 96 % from local disks, ...; 2 outputs saved to ...; report: ...``."""
    parts = [_reads(data), *_outputs(data["nodes"])]
    failed = figures.total(data["nodes"], "errors", "failed_reads")
    if failed:
        parts.append(f"{format_count(failed, 'read')} FAILED")
    silent = len(data["nodes"]) - len(figures.has_told(data["nodes"]))
    if silent:
        parts.append(f"without what {format_count(silent, 'node')} did, which told nothing")
    if report is not None:
        parts.append(f"report: {report}")
    return "; ".join(parts)


def _reads(data: Mapping[str, Any]) -> str:
    nodes: Sequence[Node] = data["nodes"]
    read = figures.by_source(nodes, "bytes")
    read["own"] = figures.intercepted(nodes, "bytes")
    whole = sum(read.values())
    if not whole:
        return "read nothing"
    words = _WORDS | {"shared": f"the {data['config']['storage']}"}
    where = ", ".join(f"{share(read[name], whole)} from {words[name]}" for name in (*SOURCES, "own") if read[name])
    files = sum(order.files for order in figures.orders(nodes))
    return f"read {format_count(files, 'file') + ', ' if files else ''}{format_bytes(whole)}: {where}"


def _outputs(nodes: Sequence[Node]) -> list[str]:
    told = figures.outputs(nodes)
    if not told:
        return []
    if told[0]["directory"] is None:
        return [f"{format_count(told[0]['files'], 'output')}, which ended with the job"] if told[0]["files"] else []
    saved, pending = sum(int(each["saved"]) for each in told), int(told[0]["pending"])
    text = f"{format_count(saved, 'output')} saved to {told[0]['directory']}"
    return [f"{text}, {pending:,} NOT saved" if pending else text]
