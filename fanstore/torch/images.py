"""``ImageFolder``: torchvision's, of whose files each is decoded where it lies in memory (``fanstore.view``).

Owns the list of images and what a decoder reads of them. Needs neither torchvision nor a mount: elsewhere files are
read. Workers of a DataLoader have a copy each.
"""

import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from fanstore.errors import UsageError
from fanstore.order.listing import image_folder
from fanstore.views.view import view


class MemoryFile:
    """Memory as a file that decoders read, so that they copy no more than the piece that they decode."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._place = 0

    def read(self, size: int | None = -1) -> bytes:
        """Up to so many bytes; all that is left by default."""
        end = len(self._memory) if size is None or size < 0 else self._place + size
        piece = bytes(self._memory[self._place : end])
        self._place += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As files have it."""
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._memory)}[whence]
        return self._place

    def tell(self) -> int:
        """As files have it."""
        return self._place


def decode_image(memory: memoryview) -> Any:
    """As torchvision's default loader has images."""
    from PIL import Image  # only here: a dataset of other files has its own decoder

    with Image.open(MemoryFile(memory)) as image:  # type: ignore[arg-type, unused-ignore]  # it needs no more of a file
        return image.convert("RGB")


class ImageFolder(Dataset):  # type: ignore[misc, type-arg, unused-ignore]  # torch is not there when types are checked
    """Images in one directory per class; the same samples in the same sequence as torchvision's class of this name.

    Args:
        transform, target_transform: called with each image, and with each number of a class.
        loader: makes an image of a path; instead of ``decode``, as in torchvision.
        is_valid_file: says of a path whether it is listed; by default its extension does.
        allow_empty: classes without images are no mistake.
        decode: makes an image of the memory in which the file is, which is read-only.

    Attributes:
        samples, imgs: path and class of all images; targets: the classes alone.
        classes: their names; class_to_idx: the number of each.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        loader: Callable[[str], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        decode: Callable[[memoryview], Any] = decode_image,
    ) -> None:
        self.root = os.fspath(root)
        self.transform, self.target_transform = transform, target_transform
        self.loader, self.decode = loader, decode
        with os.scandir(self.root) as entries:
            self.classes = sorted(entry.name for entry in entries if entry.is_dir())
        if not self.classes:
            raise UsageError(f"'{self.root}' has no directories, one for each class")
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples: list[tuple[str, int]] = []
        for name in self.classes:
            listed = self._listed(name, is_valid_file)
            if not listed and not allow_empty:
                raise UsageError(f"the class '{name}' of '{self.root}' has no images; 'allow_empty=True' allows that")
            self.samples += [(path, self.class_to_idx[name]) for path in listed]
        self.imgs = self.samples
        self.targets = [number for _, number in self.samples]

    def _listed(self, name: str, is_valid_file: Callable[[str], bool] | None) -> list[str]:
        """The images of a class."""
        walk = sorted(os.walk(os.path.join(self.root, name), followlinks=True))
        paths = [os.path.join(directory, file) for directory, _, files in walk for file in sorted(files)]
        if is_valid_file is not None:
            return [path for path in paths if is_valid_file(path)]
        below = [os.path.relpath(path, self.root) for path in paths]
        return [paths[number] for number in sorted(image_folder(below))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        image = self.decode(view(path)) if self.loader is None else self.loader(path)
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )
