"""Who reads what: the order of torch's DistributedSampler over the sorted list of files, for readers and for raw MPI.

Owns the spec that a job gives to its readers as a file.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fanstore.order import TorchDistributedSampler


@dataclass(frozen=True)
class Spec:
    """One job, for its readers.

    Attributes:
        root: below which the files are found; mount: of FanStore, or "".
        meeting: the socket; figures: a directory in which each reader leaves its figures.
        paths: of the files, sorted; sizes: in bytes.
        The others as in Settings.
    """

    root: str
    mount: str
    prepared: str
    meeting: str
    figures: str
    paths: list[str]
    sizes: list[int]
    hosts: int
    epochs: int
    batch: int
    seed: int
    workers: int
    ahead: int
    compute_us: float
    together: bool
    forget: bool
    shuffle: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> "Spec":
        return cls(**json.loads(Path(path).read_text()))

    def order(self, epoch: int, rank: int) -> list[int]:
        """Numbers of files, in the sequence in which this rank reads them."""
        sampler = TorchDistributedSampler(len(self.paths), self.hosts, self.seed)
        numbers: list[int] = sampler.samples(epoch, rank).tolist()
        return numbers


def order_option(seed: int) -> str:
    """What ``--order`` says of it."""
    return f"torch-distributed:seed={seed},list=sorted"
