"""Which rank of a training job this process is, and what the ranks tell each other, by torch.distributed.

Owns every use of torch.distributed. What is collective must be called by all ranks, in the same sequence.
"""

import os
from typing import Any

import torch.distributed as dist

from fanstore.errors import UsageError


def is_connected() -> bool:
    """Whether the program has called init_process_group."""
    return bool(dist.is_available() and dist.is_initialized())


def find_rank(num_replicas: int | None, rank: int | None, group: Any = None) -> tuple[int, int]:
    """Number of ranks and this one: as given, else of torch.distributed, else as torchrun says, else one process."""
    if num_replicas is None:
        num_replicas = int(dist.get_world_size(group) if is_connected() else os.environ.get("WORLD_SIZE", 1))
    if rank is None:
        rank = int(dist.get_rank(group) if is_connected() else os.environ.get("RANK", 0))
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank {rank} is not among {num_replicas} ranks, which count from 0")
    return num_replicas, rank


def can_gather(ranks: int, group: Any = None) -> bool:
    """Whether the processes that can be asked are exactly the ranks of a sampler."""
    return is_connected() and dist.get_world_size(group) == ranks


def gather(value: Any, group: Any = None) -> list[Any]:
    """What each rank has given, by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_first(value: Any, group: Any = None) -> Any:
    """What the first rank has given. Collective."""
    values = [value]
    dist.broadcast_object_list(values, dist.get_global_rank(group, 0) if group is not None else 0, group)
    return values[0]
