"""Epochs of a DataLoader of PyTorch over a list of files: one JSON object with the seconds of each.

Usage: loader_epochs.py LIST WORKERS EPOCHS CONTENT WORKERS_STAY
CONTENT: ``bytes`` (a file is read, and its length returned), ``picture`` (decoded by PIL). WORKERS_STAY: 0 new
workers for each epoch, 1 the same. Used by interception.py.
"""

import io
import json
import sys
import time
from pathlib import Path

from PIL import Image
from torch.utils.data import DataLoader, Dataset

BATCH = 64


class Files(Dataset):  # type: ignore[type-arg,misc,unused-ignore]  # typed only where torch is
    def __init__(self, paths: list[str], content: str) -> None:
        self._paths = paths
        self._content = content

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> int:
        with open(self._paths[number], "rb") as file:
            content = file.read()
        if self._content == "bytes":
            return len(content)
        return Image.open(io.BytesIO(content)).convert("RGB").width


def main() -> int:
    paths = Path(sys.argv[1]).read_text().split("\0")[:-1]
    workers, epochs, content, stay = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1"
    loader = DataLoader(
        Files(paths, content), batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=stay
    )
    seconds = []
    for _ in range(epochs):
        begin = time.perf_counter()
        files = sum(len(batch) for batch in loader)
        seconds.append(time.perf_counter() - begin)
        if files != len(paths):
            raise SystemExit(f"{files} files of {len(paths)} were read")
    print(json.dumps({"files": len(paths), "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
