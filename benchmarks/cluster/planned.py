"""What fanstore-plan job says of jobs on a cluster in a box, beside what was measured of them.

Owns the translation of settings into a job of the planner, and the comparison. Used by cluster_series.py.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from harness.record import markdown_table

from cluster.settings import Settings
from fanstore.model.forecast import Dataset, Training, Way, forecast
from fanstore.model.machine import machine_of

WAYS = {"fanstore-off": Way.FANSTORE, "fanstore-stated": Way.ORDERED, "shared": Way.DIRECT, "copied": Way.COPY}


def compare(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per job the seconds of its epochs, and the bytes of its job from the shared file system and of its epochs over
    the network, as planned and as measured."""
    measured = {
        result["settings"]["hosts"]: machine_of(tomllib.loads(result["toml"]), name)
        for name, result in runs.items()
        if "toml" in result
    }
    lines = []
    for name, result in runs.items():
        if "epochs" not in result:
            continue
        settings = Settings.of(result["settings"])
        # With ``forget`` nothing stays in memory, as if the dataset were much larger.
        machine = measured[settings.hosts]
        machine = replace(machine, memory_mb=0.0) if settings.forget else machine
        dataset = Dataset(
            settings.files,
            result["dataset_bytes"] / 1e6,
            # A tar member has a header of 512 bytes, and is filled up to a multiple of that.
            result["dataset_bytes"] / 1e6 + settings.files * 768 / 1e6,
        )
        partition_mb = dataset.stored_mb / settings.partitions  # what is kept is whole partitions
        training = Training(
            nodes=settings.hosts,
            gpus=1,
            samples_per_s=1e6 / settings.compute_us,
            epochs=settings.epochs,
            batch=settings.batch,
            workers=settings.workers,
            room_mb=settings.room_mb // partition_mb * partition_mb if settings.room_mb else machine.disk_mb,
            stage_first="--stage-first" in settings.options,
        )
        planned = forecast(WAYS[result["way"]], machine, dataset, training)
        seconds = [epoch["seconds"] for epoch in result["epochs"]]
        remote = sum(epoch["sources"]["remote"]["fetched_bytes"] for epoch in result["epochs"])
        lines.append(
            {
                "name": name,
                "first_s": [planned.epochs[0].seconds, seconds[0]],
                "later_s": [planned.later_s, sum(seconds[1:]) / len(seconds[1:])],
                "shared_mb": [planned.shared_mb, result["total"]["shared"]["bytes"] / 1e6],
                "network_mb": [planned.network_mb, remote / 1e6],
                "weakest": planned.weakest.value,
            }
        )
    return lines


def plan_table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Planned, measured, and the ratio of the two."""
    yield (
        "Planned by fanstore-plan job from what fanstore-plan measure has measured on these hosts; what was measured "
        "of the jobs; planned over measured. Shared: read from the shared file system in the whole job; network: "
        "fetched by daemons from each other. Half: room for half of a host's share, of which whole partitions are kept."
    )
    yield ""
    titles = {
        "first_s": "first epoch s",
        "later_s": "later epochs s",
        "shared_mb": "shared MB",
        "network_mb": "network MB",
    }
    rows = [[line["name"], *(_cell(*line[key]) for key in titles), line["weakest"]] for line in lines]
    yield markdown_table(["", *titles.values(), "limited by"], rows)


def _cell(planned: float, measured: float) -> str:
    return f"{planned:.1f}, {measured:.1f}: {planned / measured:.2f}" if measured else f"{planned:.1f}, 0"
