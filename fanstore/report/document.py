"""What all pages are made of: one HTML file that needs nothing but itself. Pure functions, used by the modules of
pages (page.py, simulationpage.py); looks are in page.css."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fanstore.report.markup import escape


def document(title: str, body: str) -> str:
    """The page."""
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        # Nothing is fetched from anywhere and nothing runs, whatever a name in here might say.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
        f"<title>{escape(title)}</title><style>\n{_style()}</style></head><body><main>\n"
        f"{body}\n</main></body></html>\n"
    )


@functools.cache
def _style() -> str:
    return (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def section(name: str, title: str, parts: Iterable[str]) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{"".join(parts)}</section>'


def note(text: str) -> str:
    """The sentence under a picture; our own words only."""
    return f'<p class="note">{text}</p>'


def nothing(text: str) -> str:
    return f'<p class="nothing">{text}</p>'


def tiles(values: Mapping[str, str]) -> str:
    """Large figures side by side: what each is (our own words), and its value."""
    shown = "".join(f"<div><b>{escape(value)}</b><span>{label}</span></div>" for label, value in values.items())
    return f'<div class="tiles">{shown}</div>'


def table(titles: Sequence[str], rows: str, style: str = "") -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    return (
        f'<div class="scroll"><table class="{style}"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )
