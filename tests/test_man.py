"""The manual pages: made from the argument parsers, up to date, without mistakes of their language, and installed."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fanstore.cli.fanstore import parsers

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "man_pages.py"
PAGES = sorted((ROOT / "man").glob("*.1"))


def man_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man_pages", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date() -> None:
    result = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_new_option_is_missed() -> None:
    parser = parsers()["fanstore-stat"]
    parser.add_argument("--new-thing", metavar="SIZE", help="does 100 %% more: 'it' is new")
    before, after = (ROOT / "man" / "fanstore-stat.1").read_text(), man_pages().page("fanstore-stat", parser)
    assert before != after
    assert "\\fB\\-\\-new\\-thing\\fR \\fISIZE\\fR\ndoes 100 % more: \\(aqit\\(aq is new\n" in after


def test_every_command_has_its_page_with_all_options() -> None:
    assert {path.stem for path in PAGES} == set(parsers())
    for program, parser in parsers().items():
        text = (ROOT / "man" / f"{program}.1").read_text().replace("\\-", "-")
        for action in parser._actions:
            for option in action.option_strings:
                assert f"\\fB{option}\\fR" in text, program


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_page_has_no_mistakes(page: Path) -> None:
    """By whichever reader of manual pages is there: groff below man, mandoc."""
    tried = 0
    if shutil.which("man") and shutil.which("groff"):
        shown = subprocess.run(
            ["man", "--warnings", "-l", page],
            capture_output=True,
            text=True,
            timeout=60,
            env={"MANWIDTH": "100", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
        )
        assert (shown.returncode, shown.stderr) == (0, "")
        assert re.search(rf"^NAME\n +{page.stem} - \w", shown.stdout, re.MULTILINE)
        assert "\\" not in shown.stdout.replace("\\\n", ""), "an escape that was not understood"
        tried += 1
    if shutil.which("mandoc"):
        lint = subprocess.run(["mandoc", "-T", "lint", page], capture_output=True, text=True, timeout=60)
        # A date would have to be changed by hand; the version is there.
        mistakes = [line for line in lint.stdout.splitlines() if "missing date" not in line]
        assert mistakes == []
        tried += 1
    if not tried:
        pytest.skip("neither man with groff nor mandoc is there")


def test_pages_are_installed() -> None:
    """Next to the commands, where man looks for the pages of what is on PATH."""
    files = [str(file) for file in importlib.metadata.files("fanstore-fs") or ()]
    installed = {Path(file).name for file in files if "share/man/man1/" in file}
    assert installed == {page.name for page in PAGES}
