"""Orders: which rank of a training job reads which sample when. Pure functions of seeds: numpy, no I/O, no threads.

Used by the daemon (what to fetch ahead), by samplers in the training program and by models of both. docs/orders.md has
every rule. What an order is: ``order.py``. Then, each in a module of its own:

- replays of frameworks: ``pytorch``, ``accelerate``, ``tfdata``, ``keras``, ``seeded``, with the generators behind them
  (``twister``, ``philox``, ``permutation``); how they list files (``listing``) and read with workers (``loader``,
  ``files``);
- recognising them from the first files that are read: usual ones (``recognition``, ``seeds``), any seed of torch
  (``torchsearch``, ``seedsearch``), with what was seen (``sightings``) and what is known then (``finding``);
- shuffles of our own, which keep reads local (``shuffle``): ``globalshuffle``, ``localshuffle``, ``partial``,
  ``importance``, ``locality``, ``shards``, made of ``streams`` of random numbers, ``ownership``, ``dealing`` and
  ``groups``; what they send is in ``exchange``.

``window`` is the policy of what is fetched ahead of those who read an order; the daemon and the simulation drive it.
"""

from fanstore.order.accelerate import AccelerateShards
from fanstore.order.exchange import Exchange, Traffic
from fanstore.order.files import FileOrder
from fanstore.order.finding import Finding
from fanstore.order.globalshuffle import GlobalShuffle
from fanstore.order.importance import ImportanceExchange
from fanstore.order.keras import KerasFlow, KerasImageDataset
from fanstore.order.loader import Loader
from fanstore.order.locality import DistributedLocality, LocalityAware
from fanstore.order.localshuffle import LocalShuffle
from fanstore.order.order import Order
from fanstore.order.partial import PartialLocalShuffle
from fanstore.order.pytorch import (
    TorchDistributedSampler,
    TorchEpochSeed,
    TorchGeneratorSampler,
    TorchRandomSampler,
)
from fanstore.order.recognition import recognise
from fanstore.order.seeded import SeededShuffle
from fanstore.order.shards import ShardShuffle
from fanstore.order.shuffle import Shuffle
from fanstore.order.sightings import Sightings
from fanstore.order.tfdata import TfDataShuffle
from fanstore.order.torchsearch import TorchSearch

__all__ = [
    "AccelerateShards",
    "DistributedLocality",
    "Exchange",
    "FileOrder",
    "Finding",
    "GlobalShuffle",
    "ImportanceExchange",
    "KerasFlow",
    "KerasImageDataset",
    "Loader",
    "LocalShuffle",
    "LocalityAware",
    "Order",
    "PartialLocalShuffle",
    "SeededShuffle",
    "ShardShuffle",
    "Shuffle",
    "Sightings",
    "TfDataShuffle",
    "TorchDistributedSampler",
    "TorchEpochSeed",
    "TorchGeneratorSampler",
    "TorchRandomSampler",
    "TorchSearch",
    "Traffic",
    "recognise",
]
