"""Prepares trees with an extension module that was built with sanitizers; started by test_native_sanitized.py.

    python sanitized_prep.py MODULE SOURCE OUT-PREFIX

Runs in a process of its own, because the address sanitizer must be loaded before Python.
"""

import sys

import sanitized_module


def main() -> int:
    module, source, prefix = sys.argv[1:]
    sanitized_module.use(module)

    from fanstore.cli.prep import main as prepare
    from fanstore.cli.verify import main as verify

    for codec, jobs in (("none", "1"), ("none", "4"), ("lz4", "1"), ("lz4", "4"), ("lz4hc", "4"), ("zstd", "4")):
        out = f"{prefix}-{codec}-{jobs}.fan"
        if prepare([source, out, "--codec", codec, "--partition-size", "8MiB", "--jobs", jobs, "--quiet"]) != 0:
            return 3
        if verify([out, "--against", source, "--quiet"]) != 0:
            return 4
    return 0 if sanitized_module.is_the_only_one(module) else 5


if __name__ == "__main__":
    sys.exit(main())
