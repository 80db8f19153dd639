"""Who has which sample at the beginning, from the FanStore mount that the files are read from.

Owns the look at a mount: which node this rank is on (``config.json``), which partitions the nodes hold
(``nodes.json``), and which file is in which partition (the index of the prepared dataset). The ranks must agree: where
torch.distributed connects them, the first one decides for all.
"""

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fanstore.errors import FanstoreError, UsageError
from fanstore.format.index import Index
from fanstore.format.prepared import PreparedDataset
from fanstore.order import ownership as owners
from fanstore.order.groups import Labels
from fanstore.order.order import Samples
from fanstore.torch.ranks import can_gather, from_first, gather

_CONTROL = ".fanstore"


def job_ownership(
    paths: Sequence[str | os.PathLike[str]] | None, ranks: int, rank: int, group: Any = None
) -> Labels | None:
    """The rank of each file, on a node that holds it; None if they are not in a mount. Collective, if it can be."""
    mount = find_mount(paths[0]) if paths else None
    node = mount_config(mount)["rank"] if mount is not None else None
    if not can_gather(ranks, group):
        if not paths or mount is None:
            return None
        return _ownership(paths, mount, _assumed_nodes(mount_config(mount), ranks, rank))
    nodes = gather(node, group)
    if None in nodes:
        return None
    decided: Labels | None = None
    if rank == 0 and paths and mount is not None:
        try:
            decided = _ownership(paths, mount, nodes)
        except (FanstoreError, OSError) as error:
            warnings.warn(f"which node holds which file cannot be seen, shares are even: {error}", stacklevel=2)
    found: Labels | None = from_first(decided, group)
    return found


def find_mount(path: str | os.PathLike[str]) -> Path | None:
    """The FanStore mount that the file is in; links on the way to it are followed."""
    real = Path(os.path.realpath(path))
    return next((parent for parent in real.parents if (parent / _CONTROL / "config.json").exists()), None)


def mount_config(mount: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((mount / _CONTROL / "config.json").read_bytes())
    return config


def _assumed_nodes(config: dict[str, Any], ranks: int, rank: int) -> list[int]:
    """The node of each rank, if ranks cannot be asked: equally many on each, in the sequence of the nodes."""
    nodes = [each * config["size"] // ranks for each in range(ranks)]
    if config["size"] > 1 and (ranks % config["size"] or nodes[rank] != config["rank"]):
        raise UsageError(
            f"on which node each of {ranks} ranks runs is not known: call torch.distributed.init_process_group before "
            "the sampler is made, or give it 'ownership'"
        )
    return nodes


def _ownership(paths: Sequence[str | os.PathLike[str]], mount: Path, node_of_rank: list[int]) -> Labels:
    config = mount_config(mount)
    described = json.loads((mount / _CONTROL / "nodes.json").read_bytes())["nodes"]
    holders: list[list[int]] = [[] for _ in range(config["partitions"])]
    for node in described:
        for partition in node.get("partitions", {}).get("placed", []):  # a node that does not answer has none
            holders[partition].append(node["rank"])
    index = PreparedDataset.open(config["prepared"]).index
    if index.partition_count != len(holders):
        raise UsageError(f"'{config['prepared']}' is no longer the dataset that is mounted at '{mount}'")
    return owners.of_holders(partitions_of(paths, mount, index), holders, node_of_rank)


def partitions_of(paths: Sequence[str | os.PathLike[str]], mount: Path, index: Index) -> Samples:
    """The partition of each file; -1 of one that is not in the dataset."""
    root = os.path.realpath(mount)
    directories: dict[str, int] = {}  # entry of each; looked up once, since many files are in one
    found = np.full(len(paths), -1)
    for number, path in enumerate(paths):
        directory, name = os.path.split(path)
        entry = directories.get(directory)
        if entry is None:
            relative = os.path.relpath(os.path.realpath(directory), root)
            entry = index.resolve(b"" if relative == "." else os.fsencode(relative))
            directories[directory] = entry
        file = index.lookup(entry, os.fsencode(name)) if entry >= 0 else -1
        if file >= 0:
            found[number] = index.partition[index.inode[file]]
    return np.where(found < index.partition_count, found, -1)  # links and directories are in none
