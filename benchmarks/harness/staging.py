"""Staging beside a program that copies the same files: one copy with each, and what came out. Used by staging_speed.py
and object_staging.py."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fanstore.dataset.staging import stage
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from harness.command import BenchmarkError
from harness.record import Spread


def copy_with_staging(prepared: PreparedDataset, target: Path) -> None:
    store = PartitionStore(prepared)
    try:
        result = stage(prepared, store, target)
        if len(result.verified) != len(prepared.manifest.partitions):
            raise BenchmarkError(f"staging did not copy everything: {result}")
    finally:
        store.close()


def summarize(
    runs: Sequence[dict[str, Any]], total_bytes: int, case: str, contenders: Sequence[str], times: Sequence[str]
) -> list[dict[str, Any]]:
    """Per case and contender: speed, and relative to the first contender in the same round."""
    reference = contenders[0]
    by_key = {(item[case], item["round"], item["contender"]): item for item in runs}
    summary = []
    for value in dict.fromkeys(item[case] for item in runs):
        for contender in contenders:
            items = [item for item in runs if (item[case], item["contender"]) == (value, contender)]
            line: dict[str, Any] = {case: value, "contender": contender, "rounds": len(items)}
            for name in times:
                ratios = [by_key[value, item["round"], reference][name] / item[name] for item in items]
                line[f"{name} ratio to {reference}"] = asdict(Spread.of(ratios))
                line[f"{name} MB/s"] = asdict(Spread.of([total_bytes / item[name] / 1e6 for item in items]))
            summary.append(line)
    return summary
