"""The page of fanstore-plan simulate: policies in scenarios, as bars and as numbers. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fanstore.model import POLICIES, SCENARIOS, Mode, Outcome
from fanstore.report import charts
from fanstore.report.document import document, note, section, table
from fanstore.report.markup import escape, size
from fanstore.units import format_duration


@dataclass(frozen=True)
class Cell:
    """One policy in one scenario.

    Attributes:
        outcome: None if the policy refuses, and then why is in ``refused``.
        published_s: what the thesis has, where it is asked for.
    """

    scenario: str
    policy: str
    dataset_mb: float
    outcome: Outcome | None
    refused: str
    published_s: float | None

    @property
    def datasets(self) -> float:
        """Read from the PFS, in datasets."""
        return self.outcome.pfs_mb / self.dataset_mb if self.outcome else 0.0


_LEGEND = {
    "start": "loading before training begins",
    "compute": "computing",
    "waiting": "waiting for samples",
}


def simulation_page(cells: Sequence[Cell], mode: Mode) -> str:
    """The page."""
    names = list(dict.fromkeys(cell.scenario for cell in cells))
    sections = [
        section(name.lower(), _title(name), _scenario([cell for cell in cells if cell.scenario == name]))
        for name in names
    ]
    head = f"<header><h1>FanStore: policies compared</h1><p>Simulated in the {mode} mode (docs/model.md).</p></header>"
    return document("FanStore: policies compared", head + "\n".join(sections))


def _title(name: str) -> str:
    return f"{name}: {SCENARIOS[name].summary}" if name in SCENARIOS else name


def _scenario(cells: Sequence[Cell]) -> Iterator[str]:
    bound_s = min(
        (cell.outcome.seconds for cell in cells if cell.policy == "lower-bound" and cell.outcome), default=0.0
    )
    legend = _LEGEND if bound_s else {"start": _LEGEND["start"], "compute": "training"}
    yield charts.legend(list(legend.items()))
    yield charts.bar_table([(_name(cell), _parts(cell, bound_s), _text(cell)) for cell in cells])
    rows = "".join(
        f'<tr><th scope="row">{escape(_name(cell))}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in _numbers(cell))
        + "</tr>"
        for cell in cells
    )
    yield "<h3>Numbers</h3>"
    yield table(("policy", "seconds", "as published", "first epoch", "from the PFS", "datasets"), rows)
    if any(not POLICIES[cell.policy].keeps_order for cell in cells):
        yield note("* reads other samples than the job asks for, and not all of them.")
    for cell in cells:
        if cell.refused:
            yield note(escape(cell.refused))


def _name(cell: Cell) -> str:
    return cell.policy + ("" if POLICIES[cell.policy].keeps_order else " *")


def _parts(cell: Cell, bound_s: float) -> dict[str, float]:
    if cell.outcome is None:
        return {}
    training_s = cell.outcome.seconds - cell.outcome.stall_s
    computing_s = min(bound_s or training_s, training_s)
    return {"start": cell.outcome.stall_s, "compute": computing_s, "waiting": training_s - computing_s}


def _text(cell: Cell) -> str:
    return "refuses" if cell.outcome is None else format_duration(cell.outcome.seconds)


def _numbers(cell: Cell) -> list[str]:
    if cell.outcome is None:
        return ["-"] * 5
    return [
        f"{cell.outcome.seconds:,.2f}",
        "-" if cell.published_s is None else f"{cell.published_s:,.2f}",
        f"{cell.outcome.epoch_ends_s[0]:,.2f}",
        size(cell.outcome.pfs_mb * 1e6),
        f"{cell.datasets:.2f}",
    ]
