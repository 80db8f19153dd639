"""``DataLoader``: torch's, which tells the daemon of a mount what it reads, as the hook of ``--order hook`` does.

Owns whether there is anybody to be told. What is told, and how, is the hook's (fanstore/client/hook/); here it is made
for loaders of this class only, and nothing of torch is replaced. Main process of a rank.
"""

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import dataloader as torchs

from fanstore.client.hooking import DIRECTORY
from fanstore.torch.dataset import file_paths
from fanstore.torch.placement import find_mount, mount_config

_NAME = "fanstore_order_hook"


class DataLoader(torchs.DataLoader):  # type: ignore[misc, type-arg, unused-ignore]  # torch is not there when types are checked
    """torch's DataLoader, with the same batches. Files of a FanStore mount are fetched ahead in exactly its order.

    With ``--order locality`` its DistributedSampler is rearranged, as for programs that are not changed.
    """

    def _get_iterator(self) -> Any:
        hook = _hook_of(self.dataset)
        if hook is None:
            return super()._get_iterator()
        if self.num_workers == 0:
            return _SingleProcess(self, hook)
        self.check_worker_number_rationality()
        return _MultiProcessing(self, hook)


class _Reporting:
    """An iterator that says what it hands out."""

    def __init__(self, loader: DataLoader, hook: Any) -> None:
        self._hook = hook
        self._unattached: DataLoader | None = loader
        super().__init__(loader)  # type: ignore[call-arg]  # the iterator of torch that comes next

    def _next_index(self) -> Any:
        if self._unattached is not None:
            self._hook.call(self._hook.attach, self, self._unattached)
            self._unattached = None
        return self._hook.next_index(self, super()._next_index)  # type: ignore[misc]  # as above


class _SingleProcess(_Reporting, torchs._SingleProcessDataLoaderIter):  # type: ignore[misc, unused-ignore]
    pass


class _MultiProcessing(_Reporting, torchs._MultiProcessingDataLoaderIter):  # type: ignore[misc, unused-ignore]
    pass


def _hook_of(dataset: Any) -> Any:
    """What tells the daemon of the mount that has the dataset's files; None if nobody needs to be told."""
    if torchs._BaseDataLoaderIter._next_index.__module__ == _NAME:
        return None  # the mount has brought the hook, which reports all loaders
    paths = file_paths(dataset)
    mount = find_mount(paths[0]) if paths else None
    return None if mount is None else _hook(mount)


@cache
def _hook(mount: Path) -> Any:
    config = mount_config(mount)
    socket = config.get("control_socket")
    if not socket or config.get("order") == "off":
        return None
    made = _hook_module().Hook(torchs, socket, str(mount), config.get("order") == "locality")
    os.register_at_fork(after_in_child=made.forked)
    return made


@cache
def _hook_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, DIRECTORY / f"{_NAME}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module
