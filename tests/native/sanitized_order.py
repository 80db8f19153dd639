"""Replays shuffles and searches seeds with an extension module that was built with sanitizers; started by
test_native_sanitized.py.

    python sanitized_order.py MODULE TESTS

Runs the tests of these functions in a process of its own, because the address sanitizer must be loaded before Python.
"""

import sys

import sanitized_module


def main() -> int:
    module, *tests = sys.argv[1:]
    sanitized_module.use(module)

    import pytest

    failed = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])
    return failed if failed else 0 if sanitized_module.is_the_only_one(module) else 5


if __name__ == "__main__":
    sys.exit(main())
