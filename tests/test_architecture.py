"""Rules of the source tree that no tool checks: which way imports go, how long a file may be, how a file begins."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fanstore"

#: A file longer than this holds more than one thing.
MAX_LINES = 900

#: Height of each part; a module imports from parts below its own, or from its own. ``outputs`` and ``prefetch`` are
#: neighbours, ``dataset``, ``prep``, ``report`` and ``torch``, ``transport``, ``views`` and ``model``, ``format``
#: and ``order`` too: they share what is below them, not each other.
HEIGHT = {
    "cli": 8,
    "doctor": 7,
    "fuse": 6,
    "job": 5,
    "outputs": 4,
    "prefetch": 4,
    "dataset": 3,
    "prep": 3,
    "report": 3,
    "torch": 3,
    "transport": 2,
    "views": 2,
    "model": 2,
    "client": 1,
    "telemetry": 1,
    "format": 1,
    "order": 1,
}
#: The small modules at the bottom, which may use each other.
BASE = {"allocator", "errors", "ids", "units", "progress", "processes", "mounttable", "paths", "_native"}

#: The only parts that may know of a library that has a meaning of its own: FUSE and MPI are translated in one place.
KEPT_IN = {
    "pyfuse3": {"fuse", "cli"},
    "mpi4py": {"transport"},
    "trio": {"client", "transport", "telemetry", "dataset", "outputs", "prefetch", "job", "fuse", "cli"},
    "torch": {"torch"},
    "obstore": {"format"},
    "tarfile": {"prep", "format"},
}

#: Height of each folder of native/: a file includes what is below it, or in its own folder. ``programs`` are built
#: alone, and share only the messages that they exchange.
NATIVE_HEIGHT = {
    "python": 5,
    "fuse": 4,
    "clients": 4,
    "outputs": 3,
    "chunks": 3,
    "prep": 3,
    "preload": 3,
    "mpi": 2,
    "format": 2,
    "order": 1,
    "base": 1,
}

#: What programs may include.
MESSAGES = {"fuse/nameorder.h", "chunks/pageorder.h"}

#: Parts without I/O, and what they may import besides themselves.
PURE = ("order", "model")
PURE_BASE = {"errors", "units", "_native"}
PURE_LIBRARIES = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "numpy",
    "random",
    "re",
    "typing",
}


def sources(*suffixes: str) -> list[Path]:
    """Our own files with these suffixes; nothing in hidden folders, which hold environments and caches."""
    folders = ("fanstore", "tests", "benchmarks", "scripts", "native")
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
        and path.is_file()
        and not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(ROOT).parts)
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of all modules that are imported anywhere in the tree; ``package`` is where the module lives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # "from fanstore import core" imports a part, "from fanstore.core import x" names it in the base.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(source: str, module: str) -> list[str]:
    """What the module (``fanstore.dataset.broker``) imports and may not."""
    part = module.split(".")[1] if "." in module else ""
    found = []
    for name in imported_names(ast.parse(source), module.rpartition(".")[0]):
        top, _, rest = name.partition(".")
        if top == "fanstore":
            target = rest.split(".")[0]
            if not allowed(part, target):
                found.append(f"{module} imports {name}")
        elif top in KEPT_IN and part not in KEPT_IN[top]:
            found.append(f"{module} imports {top}, which belongs to {' and '.join(sorted(KEPT_IN[top]))}")
    return found


def allowed(part: str, target: str) -> bool:
    if part == target or target in BASE:
        return True
    if part == "__init__":  # fanstore's own, which hands out what programs call when they do
        return target in ("views", "client")
    if target in HEIGHT:
        return HEIGHT.get(part, 0) > HEIGHT[target]
    return target in ("__version__", "DISTRIBUTION")


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    # A package's __init__ counts as a module inside the package, so that relative imports resolve alike.
    return ".".join(parts)


def test_imports_only_go_down() -> None:
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in violations(path.read_text(), module_name(path))]
    assert not found, "imports only go down (fanstore/__init__.py):\n" + "\n".join(found)


@pytest.mark.parametrize("part", PURE)
def test_a_pure_part_does_no_io(part: str) -> None:
    for path in sorted((PACKAGE / part).rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = [name.split(".") for name in imported_names(tree, f"fanstore.{part}")]
        assert {name[0] for name in names} <= PURE_LIBRARIES | {"fanstore"}, f"{relative(path)} is to do no I/O"
        assert {name[1] for name in names if name[0] == "fanstore"} <= {*PURE_BASE, *PURE}, f"{relative(path)}"
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in ("open", "print")]


def include_violations(source: str, name: str) -> list[str]:
    """What the file of native/ (``chunks/broker.c``) includes and may not."""
    room = name.split("/")[0]
    found = []
    for included in re.findall(r'^#include "([^"]+)"', source, re.MULTILINE):
        target = included.split("/")[0]
        own = room == target or (room == "programs" and included in MESSAGES)
        if not own and NATIVE_HEIGHT.get(room, 0) <= NATIVE_HEIGHT.get(target, 9):
            found.append(f"{name} includes {included}")
    if room != "python" and re.search(r"^#include <(Python|structmember)\.h>", source, re.MULTILINE):
        found.append(f"{name} knows of Python, which belongs to native/python")
    return found


def test_includes_only_go_down() -> None:
    native = ROOT / "native"
    files = [path for suffix in ("c", "h") for path in sorted(native.rglob(f"*.{suffix}"))]
    found = [line for path in files for line in include_violations(path.read_text(), str(path.relative_to(native)))]
    assert not found, "includes only go down (docs/architecture.md):\n" + "\n".join(found)
    rooms = {path.parent.name for path in files} - {"programs"}
    assert rooms == set(NATIVE_HEIGHT), "a new folder of native/ needs its place in NATIVE_HEIGHT and in the map"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("format/index.c", '#include "chunks/broker.h"'),
        ("chunks/broker.c", '#include "outputs/outputs.h"'),
        ("chunks/broker.c", '#include "broker.h"'),
        ("fuse/engine.c", "#include <Python.h>"),
        ("programs/names.c", '#include "format/index.h"'),
    ],
)
def test_an_include_that_goes_up_is_seen(name: str, source: str) -> None:
    assert len(include_violations(source, name)) == 1


def test_every_part_has_a_height() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert packages == set(HEIGHT), "a new package needs its place in HEIGHT and in fanstore/__init__.py"
    assert modules <= BASE, "a new module at the bottom needs its place in BASE and in fanstore/__init__.py"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fanstore.format.index", "from fanstore.dataset import sources"),
        ("fanstore.format.index", "import fanstore.prep.plan"),
        ("fanstore.dataset.sources", "def late():\n    from fanstore import prep"),
        ("fanstore.dataset.sources", "from ..fuse import operations"),
        ("fanstore.prep.build", "from fanstore.dataset.store import PartitionStore"),
        ("fanstore.units", "from fanstore.format.codec import Codec"),
        ("fanstore.dataset.broker", "import pyfuse3"),
        ("fanstore.prep.build", "from mpi4py import MPI"),
    ],
)
def test_a_violation_is_seen(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fanstore.cli.mount", "from fanstore import __version__\nfrom fanstore.fuse.session import run"),
        ("fanstore.dataset.sources", "from fanstore.errors import FanstoreError\nfrom . import broker\nimport trio"),
        ("fanstore.units", "from fanstore.errors import UsageError"),
        ("fanstore.format.index", "from fanstore import _native"),
    ],
)
def test_what_is_allowed_is_not_reported(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_files_are_short() -> None:
    lengths = {relative(path): path.read_bytes().count(b"\n") for path in sources(".py", ".c", ".h", ".sh", "")}
    long = {name: length for name, length in lengths.items() if length >= MAX_LINES}
    assert "scripts/setup" in lengths and "fanstore/errors.py" in lengths  # the net is not empty
    assert not long, "a file this long holds more than one thing: split it"


def test_modules_say_what_they_are() -> None:
    silent = [relative(path) for path in sources(".py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, "a module begins with a docstring: what it owns, who uses it, on which thread"


def test_c_files_say_what_they_are() -> None:
    silent = [relative(path) for path in sources(".c", ".h") if not path.read_text().startswith("/*")]
    assert not silent, "a C file begins with a comment: what it owns and who uses it"


def test_records_are_the_newest_only() -> None:
    records = [path for path in (ROOT / "benchmarks" / "results").iterdir() if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in records) < 2_000_000, "raw passes are compressed"
    dated = [path.name for path in records if re.search(r"\d{4}-\d\d-\d\d", path.name)]
    assert not dated, "one record of each name, the newest: the date is in it, the others are in the history"
