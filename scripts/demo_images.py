"""Makes a small image dataset that looks like a real one on disk: class folders, JPEGs of ImageNet's sizes.

Used by scripts/demo. Every class has its own mixture of colours and stripes, hidden under random shapes and sensor
noise, so that a simple classifier can learn it and a JPEG has about the size of a photograph's. Same seed, same bytes.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: Widths and heights that are common in ImageNet.
SIZES = ((500, 375), (500, 333), (375, 500), (400, 300), (640, 480))
#: Standard deviation of the added noise in grey levels; with quality 90 a 500 x 375 image then has about 100 KB.
NOISE = 16.0
QUALITY = 90
#: Side of the sheet that noise is cut from.
SHEET = 1024


@dataclass(frozen=True)
class Picture:
    """One file to make; everything in it follows from the seed."""

    path: Path
    label: int
    seed: int


@cache
def noise_sheet() -> NDArray[np.int16]:
    """Noise larger than any image, made once per process: drawing it anew would take half of the time."""
    return (np.random.default_rng(0).standard_normal((SHEET, SHEET, 1), dtype=np.float32) * NOISE).astype(np.int16)


def render(picture: Picture) -> int:
    """Write one image and return its size in bytes."""
    random = np.random.default_rng(picture.seed)
    width, height = SIZES[random.integers(len(SIZES))]
    style = np.random.default_rng(1000 + picture.label)  # the same for all images of a class
    colour = style.uniform(60, 195, 3)
    direction, stripes = style.uniform(0, np.pi), style.uniform(2, 6)

    y, x = np.mgrid[0:1:36j, 0:1:48j]
    phase = random.uniform(0, 2 * np.pi)
    wave = np.sin(2 * np.pi * stripes * (x * np.cos(direction) + y * np.sin(direction)) + phase)
    blobs = np.kron(random.normal(0, 55, (6, 8, 3)), np.ones((6, 6, 1)))
    sketch = np.clip(colour + 35 * wave[..., None] + blobs, 0, 255).astype(np.uint8)
    smooth = np.asarray(Image.fromarray(sketch).resize((width, height), Image.Resampling.BICUBIC))
    left, top = random.integers(SHEET - 640, size=2)
    pixels = smooth + noise_sheet()[top : top + height, left : left + width]
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(picture.path, "JPEG", quality=QUALITY)
    return picture.path.stat().st_size


def plan(directory: Path, images: int, classes: int, seed: int) -> list[Picture]:
    """Nine tenths for training, one tenth for validation, spread evenly over the classes."""
    names = [f"n{10_000_000 + 137 * label:08d}" for label in range(classes)]
    pictures = []
    for number in range(images):
        label = number % classes
        split = "val" if (number // classes) % 10 == 1 else "train"
        path = directory / split / names[label] / f"{names[label]}_{number:05d}.JPEG"
        pictures.append(Picture(path, label, seed + number))
    return pictures


def main() -> int:
    """Make the dataset and print one line about it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.images < 2 * arguments.classes:
        parser.error("each class needs at least two images, one to learn from and one to validate with")
    pictures = plan(arguments.directory, arguments.images, arguments.classes, arguments.seed)
    for folder in {picture.path.parent for picture in pictures}:
        folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        total = sum(pool.map(render, pictures, chunksize=16))
    print(f"{len(pictures):,} images, {total / 1e6:.0f} MB, {total / len(pictures) / 1e3:.0f} KB each on average")
    return 0


if __name__ == "__main__":
    sys.exit(main())
