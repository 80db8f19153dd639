"""What all commands share: one way to run, to fail and to log. Used by the modules of fanstore.cli only."""

import argparse
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable

from fanstore import __version__
from fanstore.errors import FanstoreError, UsageError
from fanstore.transport.ranks import launched_rank

# numpy's linear algebra starts a thread per core that spins for a while: useless here, and a core lost at every start.
# The variable is taken back at once, because a COMMAND inherits the environment.
_own = "OPENBLAS_NUM_THREADS" not in os.environ
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
with contextlib.suppress(ImportError):  # who needs it says so; fanstore-doctor says what to do
    import numpy  # noqa: F401

if _own:
    del os.environ["OPENBLAS_NUM_THREADS"]

#: Conventional exit code of a program ended by Ctrl-C.
EXIT_INTERRUPTED = 130

#: Seconds that the other ranks leave to rank 0 to say why all end. A launcher ends all processes as soon as one has
#: ended with an error: those that wait here when rank 0 has ended, but also rank 0 if it were not the first.
LAST_WORD_S = 3.0


def make_parser(
    prog: str, description: str, epilog: str, version: type[argparse.Action] | None = None
) -> argparse.ArgumentParser:
    """The parser every command starts from; ``version`` is what --version does if it is more than to name it."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if version is None:
        parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    else:
        parser.add_argument(
            "--version", action=version, nargs=0, help="show the versions of everything that is in use, and end"
        )
    return parser


def setup_logging(verbose: bool) -> None:
    """Log to standard error: warnings, or with ``verbose`` everything."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def run(prog: str, body: Callable[[], int]) -> int:
    """Run a command; expected errors become one sentence and an exit code, Ctrl-C becomes 130."""
    try:
        return body()
    except FanstoreError as error:
        # What concerns all ranks of a job alike is said once.
        if error.told_elsewhere or (isinstance(error, UsageError) and launched_rank() > 0):
            time.sleep(LAST_WORD_S)
        elif not error.told:
            print(f"{prog}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone (| head): not worth a message, and there is nobody to read it.
        sys.stderr.close()
        return 1
