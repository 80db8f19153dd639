"""What all commands share: one way to run, to fail and to log. Used by the modules of fanstore.cli only."""

import argparse
import contextlib
import difflib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Never

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


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, on one rank of a job, and what was probably meant."""

    def error(self, message: str) -> Never:
        wrong = re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message)
        meant = suggestion(wrong[1], re.findall(r"[\w.-]+", wrong[2])) if wrong is not None else ""
        raise UsageError(message + (meant or f"; see {self.prog} --help"))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed arguments, None for those of this process. Raises UsageError."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = [option for action in parser._actions for option in action.option_strings]
    # First of all: what a mistyped option leaves behind (its value, say) is only the consequence.
    for word in itertools.takewhile(lambda word: word != "--", words):
        name = word.partition("=")[0]
        if name.startswith("--") and name not in options:
            raise UsageError(
                f"there is no option {name}" + (suggestion(name, options) or f"; see {parser.prog} --help")
            )
    args, unknown = parser.parse_known_args(words)
    if unknown:
        what = (
            f"there is no option {unknown[0]}" if unknown[0][0] == "-" else f"'{unknown[0]}' is one argument too many"
        )
        raise UsageError(f"{what}; see {parser.prog} --help")
    return args


def suggestion(word: str, known: Sequence[str]) -> str:
    """ "; did you mean ...?", if something known is similar, or the word is the beginning of one."""
    begun = [name for name in known if name.startswith(word)] if len(word) > 2 else []
    close = begun or difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(close[:2])}?" if close else ""


def make_parser(
    prog: str, description: str, epilog: str, version: type[argparse.Action] | None = None
) -> argparse.ArgumentParser:
    """The parser every command starts from; ``version`` is what --version does if it is more than to name it."""
    # Without abbreviations: with the next new option that begins alike, they would mean something else, or nothing.
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if version is None:
        parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    else:
        parser.add_argument(
            "--version", action=version, nargs=0, help="show the versions of everything that is in use, and end"
        )
    return parser


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
