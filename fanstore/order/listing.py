"""List orders: how programs number the files of a directory before they shuffle the numbers.

Owns one function per way of listing. Each takes paths relative to the program's root directory, with "/" between names,
in the sequence of a readdir walk, and returns which of them are listed, first to last, as numbers into the paths given.
Links to directories are to be followed by whoever makes the paths. Text sorts by code point, as in Python.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fanstore.order.order import Samples

#: What torchvision, timm and the two loaders of Keras take for an image (the last one asks for no dot).
TORCHVISION = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
TIMM = (".png", ".jpg", ".jpeg")
KERAS_DATASET = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
KERAS_FLOW = ("png", "jpg", "jpeg", "bmp", "ppm", "tif", "tiff")

_DIGITS = re.compile(r"(\d+)")


def image_folder(paths: Sequence[str], extensions: tuple[str, ...] = TORCHVISION) -> Samples:
    """torchvision's ImageFolder: classes sorted, in a class the directories of a walk sorted, in these the names."""
    return _by_class(paths, extensions, lambda name: True)


def keras_dataset(paths: Sequence[str]) -> Samples:
    """``keras.utils.image_dataset_from_directory``: as ImageFolder, without hidden classes."""
    return _by_class(paths, KERAS_DATASET, lambda name: not name.startswith("."))


def keras_flow(paths: Sequence[str]) -> Samples:
    """``ImageDataGenerator.flow_from_directory``."""
    return _by_class(paths, KERAS_FLOW, lambda name: True)


def timm_folder(paths: Sequence[str]) -> Samples:
    """timm's ReaderImageFolder: all paths sorted by their natural key; what is equal stays as the walk had it."""
    images = [number for number, path in enumerate(paths) if _extension(path).lower() in TIMM]
    return _numbers(sorted(images, key=lambda number: natural_key(paths[number])))


def sorted_paths(paths: Sequence[str]) -> Samples:
    """``sorted(glob(...))``: by the whole path."""
    return _numbers(sorted(range(len(paths)), key=paths.__getitem__))


def readdir(paths: Sequence[str]) -> Samples:
    """As the file system lists them: ``os.walk``, a directory's files before its subdirectories."""
    root = _Directory()
    for number, path in enumerate(paths):
        *parents, _ = path.split("/")
        directory = root
        for name in parents:
            directory = directory.children[name]
        directory.files.append(number)
    return _numbers(root.walk())


def natural_key(path: str) -> list[str | int]:
    """Numbers in a name count as numbers: img2 comes before img10. Upper case counts as lower."""
    parts: list[str | int] = list(_DIGITS.split(path.lower()))
    parts[1::2] = map(int, parts[1::2])
    return parts


#: The list orders that are tried when a program's order is to be recognised.
LISTINGS: dict[str, Callable[[Sequence[str]], Samples]] = {
    "ImageFolder": image_folder,
    "natural": timm_folder,
    "sorted": sorted_paths,
    "readdir": readdir,
    "Keras dataset": keras_dataset,
    "Keras flow": keras_flow,
}


class _Directory:
    """Files (as numbers) and subdirectories (by name), each in the sequence in which they were met."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.children: defaultdict[str, _Directory] = defaultdict(_Directory)

    def walk(self) -> Iterable[int]:
        yield from self.files
        for child in self.children.values():
            yield from child.walk()


def _by_class(paths: Sequence[str], extensions: tuple[str, ...], is_class: Callable[[str], bool]) -> Samples:
    directories: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, path in enumerate(paths):
        directory, slash, name = path.rpartition("/")
        if slash and name.lower().endswith(extensions) and is_class(directory.partition("/")[0]):
            directories[directory].append((name, number))
    in_order = sorted(directories, key=lambda directory: (directory.partition("/")[0], directory))
    return _numbers(number for directory in in_order for _, number in sorted(directories[directory]))


def _extension(path: str) -> str:
    """As ``os.path.splitext``: the dots at the beginning of a name begin no extension."""
    name = path.rpartition("/")[2]
    stem, dot, extension = name.rpartition(".")
    return dot + extension if stem.strip(".") else ""


def _numbers(numbers: Iterable[int]) -> Samples:
    return np.fromiter(numbers, dtype=np.int64)
