"""Mounts with an extension module that was built with sanitizers; started by test_native_engine.py.

    python sanitized_mount.py MODULE ARGUMENTS-OF-FANSTORE-MOUNT...

Runs in a process of its own, because the address sanitizer must be loaded before Python.
"""

import gc
import sys

import sanitized_module


def main() -> int:
    module, *arguments = sys.argv[1:]
    sanitized_module.use(module)

    # Not main(), which ends the process at once: what is freed last is to be seen as well.
    from fanstore.cli.mount import _main as mount

    code = mount(arguments)
    gc.collect()
    return code if sanitized_module.is_the_only_one(module) else 5


if __name__ == "__main__":
    sys.exit(main())
