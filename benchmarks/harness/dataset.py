"""The data that is read: a tree of class folders, made here or taken as it is.

Owns the making and the description of the tree, not its reading. Used by the benchmark scripts.
"""

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.command import BenchmarkError

#: Text from which compressible files are cut: at least so much, and always longer than any file, so that files differ.
_POOL_BYTES = 8 << 20


@dataclass(frozen=True)
class DatasetSpec:
    """What to make. The same spec gives the same bytes on every machine.

    Attributes:
        spread: standard deviation of the sizes, as a part of ``mean_bytes``; 0 for files of one size.
    """

    files: int
    mean_bytes: int
    classes: int
    compressible: bool = False
    seed: int = 1
    spread: float = 1 / 3

    def __str__(self) -> str:
        kind = "compressible text" if self.compressible else "incompressible"
        about = "about " if self.spread else ""
        return f"{self.files:,} {kind} files of {about}{self.mean_bytes:,} bytes in {self.classes} folders"

    @property
    def pool_bytes(self) -> int:
        return max(_POOL_BYTES, 4 * self.mean_bytes)


@dataclass(frozen=True)
class Dataset:
    """A tree on disk: ``paths`` are relative to ``root``, sorted, regular files only."""

    root: Path
    paths: tuple[str, ...]
    total_bytes: int
    description: str


def _text_pool(source: random.Random, length: int) -> bytes:
    """Words with the frequencies of a natural text: LZ4 makes it about half as long."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(source.choices(letters, weights=range(26, 0, -1), k=source.randint(2, 10))) for _ in range(3000)]
    weights = [1.0 / (rank + 1) for rank in range(len(words))]
    text = " ".join(source.choices(words, weights=weights, k=length // 4))
    return text.encode()[:length]


def make(root: Path, spec: DatasetSpec) -> Dataset:
    """Write the tree below ``root``, which must not exist yet."""
    needed = spec.files * (spec.mean_bytes + 4096)
    free = shutil.disk_usage(root.parent).free
    if free < needed * 2:
        raise BenchmarkError(f"{root.parent} has {free >> 20} MiB left; the dataset and its copies need more")
    source = random.Random(spec.seed)
    pool = _text_pool(source, spec.pool_bytes) if spec.compressible else b""
    suffix = "txt" if spec.compressible else "JPEG"
    paths = []
    total_bytes = 0
    for number in range(spec.classes):
        (root / "train" / f"n{number:08d}").mkdir(parents=True)
    for number in range(spec.files):
        size = min(max(1, round(source.gauss(spec.mean_bytes, spec.mean_bytes * spec.spread))), spec.pool_bytes // 2)
        name = f"n{number % spec.classes:08d}"
        path = f"train/{name}/{name}_{number:07d}.{suffix}"
        if spec.compressible:
            start = source.randrange(len(pool) - size)
            content = pool[start : start + size]
        else:
            content = source.randbytes(size)
        (root / path).write_bytes(content)
        paths.append(path)
        total_bytes += size
    return Dataset(root, tuple(sorted(paths)), total_bytes, str(spec))


def take(root: Path) -> Dataset:
    """An existing tree, read as it is."""
    paths = []
    total_bytes = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                paths.append(str(path.relative_to(root)))
                total_bytes += path.stat().st_size
    if not paths:
        raise BenchmarkError(f"{root} holds no files")
    description = f"{len(paths):,} files of {total_bytes // len(paths):,} bytes on average, given by the user"
    return Dataset(root.resolve(), tuple(sorted(paths)), total_bytes, description)
