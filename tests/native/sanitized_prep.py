"""Prepares trees with an extension module that was built with sanitizers; started by test_native_sanitized.py.

    python sanitized_prep.py MODULE SOURCE OUT-PREFIX

Runs in a process of its own, because the address sanitizer must be loaded before Python.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    module, source, prefix = sys.argv[1:]
    import fanstore

    spec = importlib.util.spec_from_file_location("fanstore._native", module)
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["fanstore._native"] = native
    fanstore._native = native  # before any other module imports it

    from fanstore.cli.prep import main as prepare
    from fanstore.cli.verify import main as verify

    for codec, jobs in (("none", "1"), ("none", "4"), ("lz4", "1"), ("lz4", "4"), ("lz4hc", "4")):
        out = f"{prefix}-{codec}-{jobs}.fan"
        if prepare([source, out, "--codec", codec, "--partition-size", "8MiB", "--jobs", jobs, "--quiet"]) != 0:
            return 3
        if verify([out, "--against", source, "--quiet"]) != 0:
            return 4
    # The sanitized module must be the one that was used, and the only one.
    loaded = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "_native" in line]
    return 0 if set(loaded) == {module} else 5


if __name__ == "__main__":
    sys.exit(main())
