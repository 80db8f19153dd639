"""Records: raw rounds as compressed JSON, a table of ratios as Markdown beside it, and a picture drawn from the JSON.

Owns the files in results/, one record of each name: the newest, those before it are in the history of the repository.
Used by the benchmark scripts; picture.py reads what is written here.
"""

import gzip
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.command import PEERS_BIN, BenchmarkError, run

RESULTS = Path(__file__).parent.parent / "results"
_PICTURE = Path(__file__).parent.parent / "picture.py"


@dataclass(frozen=True)
class Spread:
    """A figure that was taken several times."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def ratio_text(self) -> str:
        """``0.83 (0.79-0.91)``"""
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose other columns are figures; also readable as plain text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2)] + ["-" * (width + 1) + ":" for width in widths[1:]]) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def load_sentence(runs: Sequence[dict[str, Any]]) -> str:
    """How busy the machine was: a load far above the number of readers or jobs means that others were at work."""
    loads = [run["load_average"] for run in runs]
    return f"Load average during the run: {min(loads):.1f} to {max(loads):.1f}."


def write(name: str, record: dict[str, Any], table: str, directory: Path = RESULTS, *, picture: bool = True) -> Path:
    """Write ``name``.json.gz, .md and .png; returns the path of the first."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), mtime=0))
    (directory / f"{name}.md").write_text(table.rstrip() + (f"\n\n![picture]({name}.png)\n" if picture else "\n"))
    print(f"\n{table}\n\nwritten: {path} and {name}.md")
    if picture:
        _draw(path)
    return path


def _draw(path: Path) -> None:
    """Draw in a process of its own: matplotlib may be installed only where setup-peers put it."""
    own = importlib.util.find_spec("matplotlib") is not None
    python = sys.executable if own else str(PEERS_BIN / "python")
    if not os.access(python, os.X_OK):
        print("no picture: matplotlib is missing; benchmarks/setup-peers installs it")
        return
    try:
        run([python, str(_PICTURE), str(path)], 120)
        print(f"picture: {path.with_suffix('').with_suffix('.png')}")
    except BenchmarkError as error:
        print(f"no picture: {error}")
