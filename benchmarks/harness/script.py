"""How a benchmark script ends: its exit code, and one sentence for a mistake. Used by the benchmark scripts."""

import sys
from collections.abc import Callable
from pathlib import Path

from harness.command import BenchmarkError


def run_script(body: Callable[[], object]) -> int:
    """Run a script's work: 0 if it came to its end, 1 if it could not be measured, 130 after Ctrl-C."""
    name = Path(sys.argv[0]).stem
    try:
        body()
    except BenchmarkError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0
