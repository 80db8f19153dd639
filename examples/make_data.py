"""Makes small datasets for the training scripts next to it.

    python make_data.py DATA

    DATA/images/{train,val}/CLASS/*.{png,jpeg}    coloured shapes on a noisy ground; the shape is the class
    DATA/shards/*.tar                             the same images for training, in tar files
    DATA/arrays/features.npy, targets.npy         a linear regression
    DATA/arrays/data.h5                           small images and their labels (needs h5py)

Same arguments, same bytes.
"""

import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIDE = 64
SHAPES = ("circle", "cross", "square", "triangle")
PARTS = ("images", "shards", "npy", "hdf5")


def draw(shape, seed):
    """One picture."""
    random = np.random.default_rng(seed)
    ground = random.integers(0, 90, 3) + random.integers(0, 60, (SIDE, SIDE, 3))
    image = Image.fromarray(ground.astype(np.uint8))
    pen = ImageDraw.Draw(image)
    radius = int(random.integers(10, 26))
    x, y = (int(value) for value in random.integers(radius, SIDE - radius, 2))
    left, top, right, bottom = x - radius, y - radius, x + radius, y + radius
    colour = tuple(int(value) for value in random.integers(150, 256, 3))
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, top), (right, bottom), (left, bottom)], fill=colour)
    else:
        pen.line((left, top, right, bottom), fill=colour, width=6)
        pen.line((left, bottom, right, top), fill=colour, width=6)
    return image


def make_images(directory, count, seed):
    """Four fifths for training, every other one a PNG."""
    for number in range(count):
        shape = SHAPES[number % len(SHAPES)]
        split = "val" if number // len(SHAPES) % 5 == 4 else "train"
        folder = directory / split / shape
        folder.mkdir(parents=True, exist_ok=True)
        kind = ("png", "jpeg")[number // len(SHAPES) % 2]
        draw(shape, [seed, number]).save(folder / f"{number:06d}.{kind}")


def make_shards(images, directory, count):
    """The images for training, dealt out to tar files."""
    directory.mkdir(parents=True)
    paths = sorted((images / "train").rglob("*.*"))
    for shard in range(count):
        with tarfile.open(directory / f"shard-{shard:04d}.tar", "w") as archive:
            for path in paths[shard::count]:
                member = tarfile.TarInfo(path.relative_to(images).as_posix())
                content = path.read_bytes()
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


def make_arrays(directory, rows, columns, seed):
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, columns)).astype(np.float32)
    noise = random.normal(scale=0.1, size=rows)
    directory.mkdir(parents=True, exist_ok=True)
    np.save(directory / "features.npy", features)
    np.save(directory / "targets.npy", (features @ random.normal(size=columns) + noise).astype(np.float32))


def make_hdf5(directory, count, seed):
    import h5py

    random = np.random.default_rng(seed)
    labels = random.integers(0, len(SHAPES), count)
    images = [
        np.asarray(draw(SHAPES[label], [seed, row]).convert("L").resize((28, 28))) for row, label in enumerate(labels)
    ]
    directory.mkdir(parents=True, exist_ok=True)
    with h5py.File(directory / "data.h5", "w") as file:
        file.create_dataset("images", data=np.stack(images), chunks=(32, 28, 28), compression="gzip", track_times=False)
        file.create_dataset("labels", data=labels, track_times=False).attrs["classes"] = len(SHAPES)


def main():
    parser = argparse.ArgumentParser(description="Make small datasets for the training scripts.")
    parser.add_argument("data", type=Path, help="directory to make them in")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rows", type=int, default=40_000, help="of the arrays")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to make (default: everything)")
    arguments = parser.parse_args()
    images, arrays = arguments.data / "images", arguments.data / "arrays"
    if "images" in arguments.parts:
        make_images(images, arguments.images, arguments.seed)
    if "shards" in arguments.parts:
        make_shards(images, arguments.data / "shards", arguments.shards)
    if "npy" in arguments.parts:
        make_arrays(arrays, arguments.rows, 128, arguments.seed)
    if "hdf5" in arguments.parts:
        make_hdf5(arrays, arguments.rows // 10, arguments.seed)
    files = [path for path in arguments.data.rglob("*") if path.is_file()]
    print(f"{len(files):,} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB in {arguments.data}")


if __name__ == "__main__":
    main()
