"""Shuffles that keep reads local, for training programs with PyTorch; the only package that imports torch.

Samplers that stand in for DistributedSampler: ``sampler.py``, ``importance.py``; which rank has what at the beginning:
``placement.py``, from the files of a dataset (``dataset.py``); what ranks tell each other: ``ranks.py``. Partial
local shuffling with the names of its publication, a module to import by itself: ``pls.py``. Classes that stand in for
torchvision's and torch's own: ``images.py``, ``loader.py``.
docs/shuffling.md says which to choose. Used by training programs, never by a daemon.
"""

from fanstore.torch.dataset import Indexed
from fanstore.torch.images import ImageFolder
from fanstore.torch.importance import ImportanceExchangeSampler
from fanstore.torch.loader import DataLoader
from fanstore.torch.sampler import (
    GlobalShuffleSampler,
    LocalityAwareSampler,
    LocalShuffleSampler,
    PartialLocalShuffleSampler,
    ShardShuffleSampler,
    ShuffleSampler,
)

__all__ = [
    "DataLoader",
    "GlobalShuffleSampler",
    "ImageFolder",
    "ImportanceExchangeSampler",
    "Indexed",
    "LocalShuffleSampler",
    "LocalityAwareSampler",
    "PartialLocalShuffleSampler",
    "ShardShuffleSampler",
    "ShuffleSampler",
]
