"""Prints the orders in which real frameworks read, as JSON; knows nothing of FanStore.

Run by test_order_frameworks.py with the Python of an environment that has the frameworks: ``framework_orders.py CASE
ARGUMENTS``, where the arguments are JSON. Files are never opened: what is recorded is which samples are asked for.
"""

import json
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Epochs = list[list[int]]


def torch_randperm(count: int, seeds: list[int]) -> Epochs:
    import torch

    return [torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]


def _read(loader: Any, epochs: int) -> Epochs:
    """What a loader of numbers gives, epoch by epoch."""
    return [[int(sample) for batch in loader for sample in batch] for _ in range(epochs)]


def torch_random_sampler(count: int, seed: int, epochs: int, drawn: int, workers: int, persistent: bool) -> Epochs:
    import torch

    torch.manual_seed(seed)
    torch.rand(drawn)  # one output each
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    numbers: Any = range(count)
    return _read(torch.utils.data.DataLoader(numbers, batch_size=8, shuffle=True, **options), epochs)


def torch_generator(
    count: int, seed: int, epochs: int, shared: bool, workers: int, persistent: bool, drop_last: bool
) -> Epochs:
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent, "drop_last": drop_last}
    numbers: Any = range(count)
    if shared:
        return _read(DataLoader(numbers, batch_size=8, shuffle=True, generator=generator, **options), epochs)
    sampler = RandomSampler(numbers, generator=generator)
    return _read(DataLoader(numbers, batch_size=8, sampler=sampler, **options), epochs)


def torch_distributed(
    count: int, ranks: int, epochs: int, set_epoch: bool, options: dict[str, Any]
) -> list[list[list[int]]]:
    from torch.utils.data.distributed import DistributedSampler

    numbers: Any = range(count)
    orders = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(numbers, num_replicas=ranks, rank=rank, **options)
        epochs_read = []
        for epoch in range(epochs):
            if set_epoch:
                sampler.set_epoch(epoch)
            epochs_read.append(list(sampler))
        orders.append(epochs_read)
    return orders


def _worker_and_sample(count: int) -> Any:
    """A dataset that says which worker was asked for which sample."""
    from torch.utils.data import Dataset, get_worker_info

    class Asked(Dataset):  # type: ignore[type-arg,misc,unused-ignore]
        def __len__(self) -> int:
            return count

        def __getitem__(self, sample: int) -> tuple[int, int]:
            info = get_worker_info()
            assert info is not None
            return info.id, sample

    return Asked()


def _by_worker(batches: Iterable[Any], workers: int) -> list[list[int]]:
    samples: list[list[int]] = [[] for _ in range(workers)]
    for batch in batches:
        for worker, sample in batch:
            samples[worker].append(sample)
    return samples


def torch_workers(count: int, batch: int, workers: int, drop_last: bool, prefetch_factor: int) -> list[list[list[int]]]:
    """By worker, the samples it was asked for, and how many batches were handed out at first."""
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {"drop_last": drop_last, "prefetch_factor": prefetch_factor, "collate_fn": list}
    iterator: Any = iter(DataLoader(_worker_and_sample(count), batch, num_workers=workers, **options))
    handed_out = [[iterator._send_idx]]
    return [_by_worker(iterator, workers), handed_out]


def torch_training(count: int, batch: int, workers: int, seed: int, epochs: int) -> list[list[list[int]]]:
    """By epoch and worker, what a usual training asks for: a model is made first, and validated after each epoch."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(seed)
    torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
    data = _worker_and_sample(count)
    training = DataLoader(data, batch, shuffle=True, num_workers=workers, collate_fn=list)
    validation = DataLoader(data, batch, num_workers=1, collate_fn=list)
    read = []
    for _ in range(epochs):
        read.append(_by_worker(training, workers))
        next(iter(validation))
    return read


def accelerate_shards(
    count: int, ranks: int, batch: int, seed: int, epochs: int, seedable: bool, options: dict[str, Any]
) -> list[list[list[int]]]:
    import torch
    from accelerate.data_loader import prepare_data_loader

    drop_last = options.pop("drop_last", False)
    orders = []
    for rank in range(ranks):
        torch.manual_seed(seed)
        numbers: Any = range(count)
        loader = torch.utils.data.DataLoader(numbers, batch_size=batch, shuffle=True, drop_last=drop_last)
        prepared = prepare_data_loader(
            loader,
            num_processes=ranks,
            process_index=rank,
            put_on_device=False,
            use_seedable_sampler=seedable,
            **options,
        )
        epochs_read = []
        for epoch in range(epochs):
            prepared.set_epoch(epoch)
            epochs_read += _read(prepared, 1)
        orders.append(epochs_read)
    return orders


def without_kernels() -> None:
    """Let torchvision be imported where its compiled part is for another build of torch: lists of files need none."""
    name = "torchvision._meta_registrations"
    sys.modules.setdefault(name, types.ModuleType(name))


def torchvision_list(root: str) -> list[str]:
    without_kernels()
    from torchvision.datasets import ImageFolder

    return [str(Path(path).relative_to(root)) for path, _ in ImageFolder(root, allow_empty=True).samples]


def timm_list(root: str) -> list[str]:
    without_kernels()
    from timm.data.readers.reader_image_folder import find_images_and_targets

    return [str(Path(path).relative_to(root)) for path, _ in find_images_and_targets(root)[0]]


def tf_data(count: int, buffer: int, seed: int, global_seed: int | None, reshuffle: bool, epochs: int) -> Epochs:
    import tensorflow as tf

    tf.random.set_seed(global_seed)  # None: as if it had never been set
    numbers = tf.data.Dataset.range(count).shuffle(buffer, seed=seed, reshuffle_each_iteration=reshuffle)
    return [[int(number) for number in numbers.as_numpy_iterator()] for _ in range(epochs)]


def keras_dataset(root: str, epochs: int, options: dict[str, Any]) -> list[list[str]]:
    """The list, then the files as they are loaded in each epoch. One at a time: the order is that of the pipeline."""
    import keras
    import tensorflow as tf

    tf.random.set_seed(None)
    listed = keras.utils.image_dataset_from_directory(root, shuffle=False, verbose=False).file_paths
    loaded: list[str] = []

    def load(path: Any, *_: Any) -> Any:
        def note(name: Any) -> Any:
            loaded.append(name.numpy().decode())
            return np.zeros((4, 4, 3), dtype=np.float32)

        image = tf.py_function(note, [path], tf.float32)
        image.set_shape((4, 4, 3))
        return image

    tf.data.experimental.enable_debug_mode()  # maps are executed one after the other
    from keras.src.utils import image_dataset_utils

    image_dataset_utils._load_image_tf = load
    dataset = keras.utils.image_dataset_from_directory(root, image_size=(4, 4), verbose=False, **options)
    orders = [listed]
    for _ in range(epochs):
        loaded.clear()
        for _ in dataset:
            pass
        orders.append(list(loaded))
    return [[str(Path(path).relative_to(root)) for path in order] for order in orders]


def keras_flow(root: str, batch: int, seed: int, epochs: int) -> list[list[str]]:
    """The list, then the files of each epoch."""
    from keras.src.legacy.preprocessing import image

    flow = image.ImageDataGenerator().flow_from_directory(root, batch_size=batch, seed=seed)
    orders = [list(flow.filenames)]
    numbers: Iterator[Any] = flow.index_generator
    for _ in range(epochs):
        read: list[str] = []
        while len(read) < flow.n:
            read += [flow.filenames[number] for number in next(numbers)]
        orders.append(read)
    return orders


CASES: list[Callable[..., Any]] = [
    torch_randperm,
    torch_random_sampler,
    torch_generator,
    torch_distributed,
    torch_workers,
    torch_training,
    accelerate_shards,
    torchvision_list,
    timm_list,
    tf_data,
    keras_dataset,
    keras_flow,
]


def main() -> None:
    """Each line that comes in is a case and its arguments; each line that goes out is its answer."""
    cases = {case.__name__: case for case in CASES}
    out = sys.stdout
    sys.stdout = sys.stderr  # frameworks print
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"answer": cases[name](**arguments)}
        except ModuleNotFoundError as error:
            answer = {"missing": error.name}
        except Exception:  # noqa: BLE001  (the test that asked fails with it)
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
