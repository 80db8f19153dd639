"""A DataLoader of PyTorch with workers of each kind, on files of a dataset; says what they have read.

Run by test_preload_unmounted.py with the Python of FANSTORE_TEST_FRAMEWORKS. Argument: MOUNTPOINT.
"""

import hashlib
import os
import sys

from torch.utils.data import DataLoader


class Files:
    """What is in the files, and what stat says."""

    def __init__(self, root: str) -> None:
        self.paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
        self.first = open(self.paths[0], "rb")  # noqa: SIM115 -- workers inherit it

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> str:
        path = self.paths[number]
        if os.path.islink(path):
            return path
        with open(path, "rb") as file:
            return f"{path} {hashlib.sha256(file.read()).hexdigest()} {os.stat(path).st_mtime_ns}"

    def __getstate__(self) -> dict[str, object]:
        return {"paths": self.paths}


def main() -> None:
    files = Files(sys.argv[1])
    for context in ("fork", "spawn", "forkserver"):
        kept = context == "fork"
        loader = DataLoader(
            files, 4, num_workers=2 if kept else 1, multiprocessing_context=context, persistent_workers=kept
        )
        for _ in range(2 if kept else 1):
            print(context, *(line for batch in loader for line in batch), sep="\n")
    print(len(files.first.read()))


if __name__ == "__main__":
    main()
