"""A record of the samples that a run has read, in the order in which it has read them.

Two runs with the same record have seen the same data. Used by the training scripts next to it; the file is JSON:
``{"epochs": [{"epoch", "loss", "seconds", "digest", "samples": [name, ...]}, ...]}``.
"""

import hashlib
import json
import os
from pathlib import Path


class SampleLog:
    """Collects the names and contents of samples, epoch by epoch."""

    def __init__(self):
        self.epochs = []
        self.begin_epoch()

    def begin_epoch(self):
        self._names = []
        self._hash = hashlib.sha256()

    def add(self, name, content):
        """One sample: its name, and its bytes or a digest of them."""
        self._names.append(name)
        self._hash.update(name.encode() + b"\0")
        self._hash.update(content.encode() if isinstance(content, str) else content)

    def end_epoch(self, epoch, loss, seconds):
        self.epochs.append(
            {
                "epoch": epoch,
                "loss": loss,
                "seconds": seconds,
                "digest": self._hash.hexdigest(),
                "samples": self._names,
            }
        )
        self.begin_epoch()

    def save(self, path):
        """Write it under a temporary name first, so that nobody reads half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps({"epochs": self.epochs}))
        os.replace(temporary, path)
