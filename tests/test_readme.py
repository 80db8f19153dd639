"""The README says what is so: its links lead somewhere, its messages are real, its figures stand in the records.

That the reference has all options is in test_scripts.py, that its two commands work as well.
"""

import argparse
import ast
import re
import shlex
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from fanstore.cli.fanstore import parsers

#: Files that are named, and are not ours: those of readers, of the kernel, of libraries, and what tests make.
OTHERS = re.compile(
    r"sitecustomize\.py|tiny\.py|(tests/)?test_(core_small|slow)\.py|"
    r"train\.py|NAME\.md|soak\.md|llite_internal\.h|(include/uapi/)?(linux|sys)/\w+\.h|Python\.h|mpi4py\.py|program\.py"
)

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: Said by the kernel or by others, not by us.
FOREIGN = {"Transport endpoint is not connected", "Input/output error", "Read-only file system", "NAME.unfinished"}
FOREIGN |= {"mount failed: Operation not permitted"}
#: What the sources fill in: dots, N, HOST, times that are defaults, and names that are constants.
FILLED_IN = re.compile(r"…|\bN\b|\bHOST\b|\b\d+ (?:min \d\d )?s\b|/dev/fuse|fusermount3")
#: More lines than this nobody reads.
MAX_LINES = 260


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"<!--.*?-->|```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text()), target


def sentences() -> Iterator[str]:
    """All texts in the sources; what is filled in is a line break."""
    for path in (ROOT / "fanstore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\n" for part in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]", "\n", node.value)


def messages() -> list[str]:
    table = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def test_messages_are_real() -> None:
    said = list(sentences())
    found = messages()
    assert len(found) > 20
    for message in found:
        if message in FOREIGN:
            continue
        fragments = [part.strip(" ';:") for part in FILLED_IN.split(message)]
        for fragment in filter(None, fragments):
            assert any(fragment in sentence for sentence in said), f"nobody says '{fragment}' of '{message}'"


@pytest.mark.parametrize("document", ["README.md", "docs/comparison.md"])
def test_figures_stand_in_the_records(document: str) -> None:
    """Each row of the comparison that has figures: the same, in this order, in the records that it names."""
    table = (ROOT / document).read_text().partition("Compared with others\n\n")[2].partition("\n## ")[0]
    results = ROOT / "benchmarks" / "results"
    reads, walks = ((results / f"{name}.md").read_text() for name in ("read-peers", "walk-tree"))
    names = {
        "**FanStore**, staged": ("fanstore-none-native-staged", "fanstore-none-native"),
        "squashfuse": ("squashfuse-none", "squashfuse-none"),
        "ratarmount": ("ratarmount", "ratarmount"),
        "squashfs in the kernel": ("squashfs-none", "squashfs-none"),
        "erofs in the kernel": ("erofs-none", "erofs-none"),
    }
    compared = 0
    for line in table.splitlines():
        cells = [re.sub(r" [¹²³⁴]$", "", cell.strip()) for cell in line.split("|")]
        if len(cells) < 8 or not re.match(r"\d", cells[5]):
            continue
        read, walk = names[cells[1]]
        figures = row(reads, read)
        # Per state of the cache a ratio, files/s and latencies.
        assert [figures[0], figures[3], row(walks, walk)[0]] == cells[5:8], cells[1]
        compared += 1
    assert compared == len(names)


def row(record: str, name: str) -> list[str]:
    match = re.search(rf"^\| {re.escape(name)} +\|(.*)\|$", record, re.MULTILINE)
    assert match is not None, name
    return [cell.strip() for cell in match[1].split("|")]


def commands() -> Iterator[list[str]]:
    """Every command line of FanStore in README's blocks, without what runs it and what it runs."""
    for block in re.findall(r"```\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"(?:^|[ /])(fanstore-\w+ .*|fanstore-doctor.*)", line.partition("   #")[0])
            if match is not None:
                yield shlex.split(match[1].partition(" -- ")[0].partition(" | ")[0])


def test_commands_are_right() -> None:
    """The parsers accept them as they stand."""
    found = list(commands())
    assert {words[0] for words in found} >= {
        f"fanstore-{name}" for name in ("prep", "mount", "umount", "stat", "verify")
    }
    known = parsers()
    for words in found:
        depth = 2 if "-".join(words[:2]) in known else 1  # fanstore-plan has subcommands
        parser = known["-".join(words[:depth])]
        parser.exit_on_error = False
        try:
            parser.parse_args(words[depth:])
        except (argparse.ArgumentError, SystemExit) as error:
            pytest.fail(f"{words}: {error}")


def test_it_stays_readable() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_picture_is_for_light_and_dark() -> None:
    text = (ROOT / "docs" / "idea.svg").read_text()
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag.endswith("svg") and "prefers-color-scheme: dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it needs nothing from elsewhere"


def test_files_that_are_named_exist() -> None:
    """In the documents, and in what the sources say of each other."""
    tops = ("fanstore", "native", "tests", "benchmarks", "docs", "scripts", "examples", "packaging")
    files = {"/" + path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.*")}
    files |= {f"/{path.name}" for path in ROOT.glob("*.md")}
    sources = [ROOT / name[1:] for name in sorted(files) if re.search(r"\.(py|c|h|md)$", name)]
    missing = set()
    for source in sources:
        if "results" in source.parts:
            continue
        text = re.sub(r"^ *# *include .*$", "", source.read_text(errors="replace"), flags=re.MULTILINE)
        for name in re.findall(r"(?<![\w./{}-])((?:[\w-]+/)*[\w-]+\.(?:py|c|h|md))\b(?![(/])", text):
            if not OTHERS.fullmatch(name) and not any(file.endswith(f"/{name}") for file in files):
                missing.add(f"{name} in {source.relative_to(ROOT)}")
    assert not missing
