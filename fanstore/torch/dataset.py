"""Datasets: one that says the index of each sample, and the files that a dataset reads."""

from typing import Any

from torch.utils.data import Dataset, Subset


class Indexed(Dataset):  # type: ignore[misc, type-arg, unused-ignore]  # torch is not there when types are checked
    """A dataset whose samples begin with their index, which ``record`` needs: (index, image, label)."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = self.dataset[index]
        return (index, *sample) if isinstance(sample, tuple) else (index, sample)


def file_paths(dataset: Any) -> list[str] | None:
    """The file of each sample, as ImageFolder and its like have them in ``samples``; None if they are not known."""
    if isinstance(dataset, Indexed):
        return file_paths(dataset.dataset)
    if isinstance(dataset, Subset):
        paths = file_paths(dataset.dataset)
        return None if paths is None else [paths[index] for index in dataset.indices]
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list) or len(samples) != len(dataset):
        return None
    paths = [sample[0] if isinstance(sample, tuple) and sample else sample for sample in samples]
    return paths if all(isinstance(path, str) for path in paths) else None
