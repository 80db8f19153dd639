"""Puts an extension module that was built with sanitizers in the place of fanstore._native; for programs next to it."""

import importlib.util
import sys
from pathlib import Path


def use(module: str) -> None:
    """Before any other module of the package is imported."""
    import fanstore

    spec = importlib.util.spec_from_file_location("fanstore._native", module)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["fanstore._native"] = native
    vars(fanstore)["_native"] = native


def is_the_only_one(module: str) -> bool:
    """The sanitized module must be the one that was used."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {path for path in loaded if "fanstore/_native" in path or path == module} == {module}
