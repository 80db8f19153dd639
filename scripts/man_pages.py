"""Writes man/*.1, the manual pages, from the argument parsers: ``.venv/bin/python scripts/man_pages.py [--check]``.

Owns these files. They are kept in the repository, since a build has no Python packages to import the parsers with; the
tests compare them (tests/test_man.py). To be run when an option changes. ``--check`` writes nothing, and ends with 1 if
a page is not as it should be. The same on every version of Python: nothing of argparse's own layout is used.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from fanstore import __version__
from fanstore.cli.completion import expand_help
from fanstore.cli.fanstore import COMMANDS, parsers
from fanstore.cli.plan import SUBCOMMANDS

PAGES = Path(__file__).parent.parent / "man"

#: What the line NAME says.
SUMMARIES = {"fanstore": "datasets of many small files, served from a few large ones"} | {
    f"fanstore-{name}": summary
    for name, summary in {**COMMANDS, **{f"plan-{name}": summary for name, summary in SUBCOMMANDS.items()}}.items()
}


def page(program: str, parser: argparse.ArgumentParser) -> str:
    """One manual page, in the language of man(7)."""
    return "\n".join(_lines(program, parser)) + "\n"


def _lines(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield '.\\" Made by scripts/man_pages.py from the argument parser. Do not change it here.'
    yield f'.TH {program.upper()} 1 "" "FanStore {__version__}" "FanStore"'
    yield ".SH NAME"
    yield f"{program} \\- {_escape(SUMMARIES[program])}"
    yield ".SH SYNOPSIS"
    yield from _synopsis(program, parser)
    yield ".SH DESCRIPTION"
    yield from _paragraphs(parser.description or "")
    yield from _commands(parser)
    positionals = [action for action in parser._actions if not action.option_strings and _is_argument(action)]
    if positionals:
        yield ".SH ARGUMENTS"
        for action in positionals:
            yield from _entry(f"\\fI{action.metavar}\\fR", expand_help(parser, action))
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.option_strings]
        if not actions:
            continue
        ours = group.title not in ("options", "optional arguments")
        yield f'.SH "{_escape((group.title or "").upper())}"' if ours else ".SH OPTIONS"
        for action in actions:
            yield from _entry(_option(action), _sentence(parser, action))
    yield from _epilog(parser.epilog or "")
    yield '.SH "SEE ALSO"'
    others = [name for name in SUMMARIES if name != program]
    yield ",\n".join(f".BR {_escape(name)} (1)" for name in others).replace(",\n", " ,\n")


def _is_argument(action: argparse.Action) -> bool:
    return not isinstance(action, argparse._SubParsersAction)


def _synopsis(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f".B {_escape(parser.prog)}"
    if parser.usage:
        yield _escape(parser.usage.removeprefix("%(prog)s").strip())
        return
    for action in parser._actions:
        if not action.option_strings and _is_argument(action):
            yield f"\\fI{action.metavar}\\fR" + (" ..." if action.nargs == "+" else "")
    yield "[options]"


def _option(action: argparse.Action) -> str:
    names = ", ".join(f"\\fB{_escape(name)}\\fR" for name in action.option_strings)
    if action.nargs == 0:
        return names
    value = "|".join(action.choices) if action.choices else str(action.metavar)
    value = f"\\fI{_escape(value)}\\fR" + (" ..." if action.nargs == "+" else "")
    return f"{names} [{value}]" if action.nargs == "?" else f"{names} {value}"


def _sentence(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """argparse's own words for --help and --version differ between versions of Python."""
    if isinstance(action, argparse._HelpAction):
        return "show help and end"
    if isinstance(action, argparse._VersionAction):
        return "show the version and end"
    return expand_help(parser, action)


def _entry(title: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield title
    yield from _wrapped(text)


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield ".SH COMMANDS"
            for choice in action._choices_actions:
                what = " bash|zsh" if choice.dest == "completion" else ""
                yield from _entry(f"\\fB{_escape(choice.dest)}\\fR{what}", choice.help or "")


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield from _wrapped(" ".join(paragraph.split()))


def _epilog(text: str) -> Iterator[str]:
    """The part behind the options: "examples:" and "exit codes:" become sections, the rest notes."""
    notes: list[str] = []
    endings: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        title, _, rest = block.partition("\n")
        if title == "examples:":
            yield ".SH EXAMPLES"
            yield ".EX"
            yield from _verbatim(rest.splitlines())
            yield ".EE"
        elif block.startswith("exit codes: "):
            endings.append(block.removeprefix("exit codes: "))
        else:
            notes.append(block)
    for heading, blocks in (("NOTES", notes), ("EXIT STATUS", endings)):
        if blocks:
            yield f'.SH "{heading}"'
            yield from _paragraphs("\n\n".join(blocks))


def _wrapped(text: str) -> Iterator[str]:
    """Short lines in the source, so that a change shows where it is; man fills them anew."""
    for line in textwrap.wrap(text, 72, break_long_words=False, break_on_hyphens=False):
        yield _escape(line)


def _verbatim(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield _escape(line.removeprefix("  "))


def _escape(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("…", "...")
    return f"\\&{text}" if text.startswith(".") else text


def main() -> int:
    """Write or check all pages."""
    check = sys.argv[1:] == ["--check"]
    wanted = {PAGES / f"{program}.1": page(program, parser) for program, parser in parsers().items()}
    PAGES.mkdir(exist_ok=True)
    there = {path: path.read_text() for path in PAGES.glob("*.1")}
    wrong = sorted(path.name for path in {*wanted, *there} if wanted.get(path) != there.get(path))
    if check:
        for name in wrong:
            print(f"man/{name} is not up to date: run {sys.executable} scripts/man_pages.py", file=sys.stderr)
        return 1 if wrong else 0
    for path in there.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)
    print(f"{len(wanted)} pages, {len(wrong)} of them changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
