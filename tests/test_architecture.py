"""Rules of the source tree that no tool checks: which way imports go, how long a file may be, how a file begins."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fanstore"

#: A file longer than this holds more than one thing.
MAX_LINES = 600

#: Height of each part; a module imports from parts below its own, or from its own. ``core``, ``prep`` and
#: ``report`` are neighbours: they share what is below them, not each other.
HEIGHT = {"cli": 6, "doctor": 5, "fuse": 4, "core": 3, "prep": 3, "report": 3, "transport": 2, "format": 1}
#: The small modules at the bottom, which may use each other.
BASE = {"errors", "ids", "units", "progress", "_native"}

#: The only parts that may know of a library that has a meaning of its own: FUSE and MPI are translated in one place.
KEPT_IN = {
    "pyfuse3": {"fuse", "cli"},
    "mpi4py": {"transport"},
    "trio": {"transport", "core", "fuse", "cli"},
    "tqdm": {"progress"},
    "tarfile": {"prep", "format"},
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
    """What the module (``fanstore.core.reader``) imports and may not."""
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
    if target in HEIGHT:
        return HEIGHT.get(part, 0) > HEIGHT[target]
    return target == "__version__"


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    # A package's __init__ counts as a module inside the package, so that relative imports resolve alike.
    return ".".join(parts)


def test_imports_only_go_down() -> None:
    found = [line for path in sorted(PACKAGE.rglob("*.py")) for line in violations(path.read_text(), module_name(path))]
    assert not found, "imports only go down (fanstore/__init__.py):\n" + "\n".join(found)


def test_every_part_has_a_height() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert packages == set(HEIGHT), "a new package needs its place in HEIGHT and in fanstore/__init__.py"
    assert modules <= BASE, "a new module at the bottom needs its place in BASE and in fanstore/__init__.py"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fanstore.format.index", "from fanstore.core import cache"),
        ("fanstore.format.index", "import fanstore.prep.plan"),
        ("fanstore.core.cache", "def late():\n    from fanstore import prep"),
        ("fanstore.core.cache", "from ..fuse import operations"),
        ("fanstore.prep.build", "from fanstore.core.store import PartitionStore"),
        ("fanstore.units", "from fanstore.format.codec import Codec"),
        ("fanstore.core.reader", "import pyfuse3"),
        ("fanstore.prep.build", "from mpi4py import MPI"),
    ],
)
def test_a_violation_is_seen(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fanstore.cli.mount", "from fanstore import __version__\nfrom fanstore.fuse.session import run"),
        ("fanstore.core.cache", "from fanstore.errors import FanstoreError\nfrom . import reader\nimport trio"),
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
