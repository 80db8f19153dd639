"""Partial local shuffling with the names of its publication: ``ImageFolder`` and ``Scheduler``.

    from fanstore.torch import pls

    dataset = pls.ImageFolder(directory, class_file, transforms)
    scheduler = pls.Scheduler(dataset, batch_size, fraction)
    loader = DataLoader(dataset, batch_size, shuffle=True)
    for epoch in range(epochs):
        scheduler.scheduling(epoch)
        for images, labels in loader:
            ...
            scheduler.communicate()
        scheduler.synchronize()
        scheduler.clean_local_storage()

Owns what the dataset shows of itself, and the hints to the kernel; who reads what is decided by
``PartialLocalShuffleSampler``. One thread.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fanstore.errors import UsageError
from fanstore.order.listing import image_folder
from fanstore.order.order import at_least
from fanstore.torch.sampler import PartialLocalShuffleSampler


def open_image(path: str) -> Any:
    """As torchvision opens images."""
    from PIL import Image  # only here: a dataset of other files has its own loader

    with open(path, "rb") as file, Image.open(file) as image:
        return image.convert("RGB")


class ImageFolder(Dataset):  # type: ignore[misc, type-arg, unused-ignore]  # torch is not there when types are checked
    """Images in one directory per class, of which it has those that this rank reads in the epoch.

    Before a Scheduler is made for it, it has all.

    Args:
        class_file: a text file whose lines begin with the names of classes, which then count in that sequence; by
            default they count in the order of their names.
        transforms: called with each image.
        loader: opens a file.

    Attributes:
        samples: path and class of all images, as torchvision's ImageFolder lists them.
        classes: their names.
        _shown: numbers of those that this rank reads; in memory that workers share, which live longer than an epoch.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        class_file: str | os.PathLike[str] | None = None,
        transforms: Callable[[Any], Any] | None = None,
        loader: Callable[[str], Any] = open_image,
    ) -> None:
        self._transforms = transforms
        self._loader = loader
        root = os.fspath(root)
        found = [
            os.path.relpath(os.path.join(directory, name), root)
            for directory, _, names in os.walk(root, followlinks=True)
            for name in names
        ]
        paths = [found[number] for number in image_folder(found)]
        if not paths:
            raise UsageError(f"'{root}' has no images in directories of classes")
        if class_file is None:
            self.classes = sorted({path.partition("/")[0] for path in paths})
        else:
            lines = Path(class_file).read_text(encoding="utf-8").splitlines()
            self.classes = [line.split()[0] for line in lines if line.strip()]
        number_of = {name: number for number, name in enumerate(self.classes)}
        for path in paths:
            if path.partition("/")[0] not in number_of:
                raise UsageError(f"the class of '{path}' is not in '{class_file}'; add it there")
        self.samples = [(os.path.join(root, path), number_of[path.partition("/")[0]]) for path in paths]
        self._shown = torch.arange(len(paths)).share_memory_()

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[int(self._shown[index])]
        image = self._loader(path)
        return (image if self._transforms is None else self._transforms(image)), label

    def show(self, numbers: Any) -> None:
        """Have these samples from now on, in this sequence."""
        if len(numbers) != len(self._shown):
            self._shown = torch.empty(len(numbers), dtype=torch.int64).share_memory_()
        self._shown.copy_(torch.from_numpy(np.asarray(numbers, dtype=np.int64)))


class Scheduler:
    """The exchange of a ``fraction`` of this rank's samples in each epoch. ``options`` are those of the sampler.

    Nothing is sent: all files are in the mount, and the kernel is asked to have those ready that this rank will read
    in the next epoch.

    Attributes:
        sampler: decides; also keeps the state for a checkpoint.
        _arriving, _leaving: samples that this rank gets and gives away in this epoch.
        _portion: how many arrive at each step.
    """

    def __init__(self, dataset: ImageFolder, batch_size: int, fraction: float, **options: Any) -> None:
        self.dataset = dataset
        self.batch_size = at_least(1, batch_size, "batch_size")
        files = [path for path, _ in dataset.samples]
        self.sampler = PartialLocalShuffleSampler(files, files=files, fraction=fraction, **options)
        self.scheduling(0)

    def scheduling(self, epoch: int) -> None:
        """To be called before each epoch: the dataset has what this rank reads in it."""
        self.sampler.set_epoch(epoch)
        self.dataset.show(self.sampler.samples())
        exchange = self.sampler.order.exchange(epoch, self.sampler.rank)
        self._arriving: list[int] = exchange.received.tolist()
        self._leaving: list[int] = exchange.sent.tolist()
        steps = -(-self.sampler.num_samples // self.batch_size)
        self._portion = -(-len(self._arriving) // max(1, steps))

    def communicate(self) -> None:
        """After each step: the next part of what arrives begins to be read; does not wait for it."""
        now, self._arriving = self._arriving[: self._portion], self._arriving[self._portion :]
        self._advise(now, os.POSIX_FADV_WILLNEED)

    def synchronize(self) -> None:
        """After the last step: whatever has not arrived yet begins to be read. A later read waits for it."""
        self._advise(self._arriving, os.POSIX_FADV_WILLNEED)
        self._arriving = []

    def clean_local_storage(self) -> None:
        """The memory of what has left is given back. The partitions stay where they are."""
        self._advise(self._leaving, os.POSIX_FADV_DONTNEED)
        self._leaving = []

    def _advise(self, samples: Iterable[int], advice: int) -> None:
        for sample in samples:
            file = os.open(self.dataset.samples[sample][0], os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(file, 0, 0, advice)
            finally:
                os.close(file)
