"""Scenarios: systems and datasets that policies are compared on.

Owns those of the thesis (S1 to S4) and of the SC'21 paper; ``settings.py`` makes others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fanstore.errors import UsageError
from fanstore.model.curve import Curve
from fanstore.model.job import Job, Sizes
from fanstore.model.system import StorageClass, System
from fanstore.order import AccelerateShards, TorchEpochSeed

#: Reads in all, and samples by node, up to which a simulation takes less than an hour and some 10 GB.
_MOST = 10**9


@dataclass(frozen=True)
class Scenario:
    """A system, and a job of which only the seed is open.

    Attributes:
        samples: F.
        mean_mb, sigma_mb: sizes are normally distributed; negative ones are drawn again.
        epochs: E.
        batch: samples of one node in an iteration.
    """

    name: str
    summary: str
    system: System
    samples: int
    mean_mb: float
    sigma_mb: float
    epochs: int
    batch: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError(f"'samples' is {self.samples}; it must be 1 or more")
        if not (0 < self.mean_mb < float("inf") and 0 <= self.sigma_mb < float("inf")):
            raise UsageError("'mean_mb' must be above 0, and 'sigma_mb' 0 or more")
        if max(self.samples * self.epochs, self.samples * self.system.nodes) > _MOST:
            raise UsageError(
                f"{self.samples:,} samples, {self.epochs:,} epochs and {self.system.nodes:,} nodes are too many for a "
                f"simulation of every read; samples times epochs, and samples times nodes, may be {_MOST:,}"
            )

    def job(self, seed: int) -> Job:
        """The order is an independent permutation for each epoch, of which every node in turn gets a batch: that of the
        thesis, and of Hugging Face Accelerate."""
        order = AccelerateShards(TorchEpochSeed(self.samples, seed), self.system.nodes, self.batch, drop_last=True)
        return Job(order, self._sizes_mb(seed), self.epochs, self.batch, seed)

    def _sizes_mb(self, seed: int) -> Sizes:
        random = np.random.default_rng([seed, 0])
        sizes_mb = np.full(self.samples, self.mean_mb, dtype=np.float64)
        if self.sigma_mb > 0:
            missing = np.arange(self.samples)
            while len(missing):
                sizes_mb[missing] = random.normal(self.mean_mb, self.sigma_mb, len(missing))
                missing = missing[sizes_mb[missing] < 0]
        return sizes_mb

    @property
    def reads(self) -> int:
        """How many reads a simulation has to do: a measure of its time."""
        return self.samples * self.epochs


_MEMORY = Curve.of({1: 16_550, 2: 21_164, 3: 21_186, 4: 21_415}, "memory")
_SSD = Curve.of({1: 66, 2: 86, 3: 129, 4: 146}, "SSD")
_THESIS = System(
    nodes=4,
    compute_mb_per_s=100,
    preprocess_mb_per_s=200,
    network_mb_per_s=10_000,
    pfs_network_mb_per_s=2_000,
    pfs=Curve.of({1: 66, 2: 86, 3: 129, 4: 146}, "PFS"),
    classes=(
        StorageClass("staging", 1_024, 2, _MEMORY, _MEMORY),
        StorageClass("memory", 51_200, 2, _MEMORY, _MEMORY),
        StorageClass("SSD", 102_400, 2, _SSD, _SSD),
    ),
)

_SC21_MEMORY = Curve.of({1: 28_000, 2: 50_450, 4: 85_800, 8: 111_300, 16: 123_700}, "memory")
_SC21_SSD = Curve.of({1: 627, 2: 1_168, 4: 2_048, 8: 3_136, 16: 4_425, 32: 5_338}, "SSD")
_SC21 = System(
    nodes=4,
    compute_mb_per_s=64,
    preprocess_mb_per_s=200,
    network_mb_per_s=24_000,
    pfs_network_mb_per_s=24_000,
    pfs=Curve.of({1: 338, 2: 727, 4: 1_540, 8: 2_871, 16: 4_787, 32: 5_266}, "PFS"),
    classes=(
        StorageClass("staging", 5_120, 8, _SC21_MEMORY, _SC21_MEMORY),
        StorageClass("memory", 133_120, 4, _SC21_MEMORY, _SC21_MEMORY),
        StorageClass("SSD", 1_048_576, 2, _SC21_SSD, _SC21_SSD),
    ),
)

#: The scenarios of the thesis: where the dataset fits.
THESIS = {
    scenario.name: scenario
    for scenario in (
        Scenario("S1", "fits into the memory of a node", _THESIS, 10_000, 0.027, 0.01, 10, 25),
        Scenario("S2", "fits into memory and SSD of a node", _THESIS, 150_000, 1, 0.1, 10, 25),
        Scenario("S3", "fits into memory and SSD of all nodes", _THESIS, 300_000, 2, 0.2, 5, 25),
        Scenario("S4", "fits nowhere", _THESIS, 400_000, 3, 0.2, 5, 25),
    )
}

#: The second set of parameters, with the datasets of the SC'21 paper.
SC21 = {
    scenario.name: scenario
    for scenario in (
        Scenario("mnist", "MNIST, 0.04 GB", _SC21, 50_000, 748e-6, 0, 5, 32),
        Scenario("imagenet-1k", "ImageNet-1k, 160 GB", _SC21, 1_281_167, 0.1077, 0.1, 5, 32),
        Scenario("openimages", "OpenImages, 540 GB", _SC21, 1_743_042, 0.2937, 0.2, 5, 32),
        Scenario("places", "Places, 1.5 TB", _SC21, 8_000_000, 0.0595, 0.2, 5, 32),
        Scenario("imagenet-22k", "ImageNet-22k, 1.8 TB", _SC21, 14_197_103, 0.1077, 0.1, 5, 32),
        Scenario("cosmoflow-128", "CosmoFlow, 2.1 TB", _SC21, 262_144, 8, 0, 5, 16),
        Scenario("cosmoflow-512", "CosmoFlow 512, 5.1 TB, 32 nodes", replace(_SC21, nodes=32), 10_018, 512, 0, 5, 1),
    )
}

SCENARIOS = THESIS | SC21
