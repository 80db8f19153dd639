"""Pictures as inline SVG with labels in HTML around them. Pure functions, used by report/page.py.

The drawing is stretched to the width of the page; labels are HTML, at percentages, so that they keep their size on a
telephone and on paper. Colours are classes of page.css. No script: what the pointer shows are titles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fanstore.report.figures import Matrix
from fanstore.report.markup import decimal_ticks, escape, moment, short_count, size, span, time_label, time_ticks

#: Of a drawing, in its own units.
_WIDTH, _HEIGHT = 1000.0, 200.0

#: Up to so many nodes the numbers are written in the squares of the matrix: with more there is no room.
WRITTEN_MOST = 4
_SHADES = 10


@dataclass(frozen=True)
class Band:
    """Values over time: the name of its class and of its colour, and what it is for people."""

    style: str
    label: str
    values: Sequence[float]


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What the colours mean: class and text of each."""
    items = "".join(f'<li><i class="swatch {style}"></i>{escape(label)}</li>' for style, label in entries)
    return f'<ul class="legend">{items}</ul>'


def stacked(
    name: str, ends_s: Sequence[float], bands: Sequence[Band], ticks: Sequence[float], write: Callable[[float], str]
) -> str:
    """Bands on top of each other, as steps: each value is the mean of its interval."""
    top = ticks[-1]
    base = [0.0] * len(ends_s)
    shapes = []
    for band in bands:
        if any(band.values):
            upper = [low + value for low, value in zip(base, band.values, strict=True)]
            shapes.append(f'<path class="area {band.style}" d="{_area(ends_s, base, upper, top)}"/>')
            base = upper
    return _plot(name, ends_s, "".join(shapes), ticks, write, _titles(ends_s, bands, write, together=True))


def lines(
    name: str,
    ends_s: Sequence[float],
    bands: Sequence[Band],
    ticks: Sequence[float],
    write: Callable[[float], str],
    limit: float | None = None,
) -> str:
    """One line per band, as steps; ``limit`` is drawn across."""
    top = ticks[-1]
    shapes = "".join(f'<path class="line {band.style}" d="{_line(ends_s, band.values, top)}"/>' for band in bands)
    if limit is not None and limit <= top:
        y = _y(limit, top)
        shapes += f'<path class="line limit" d="M0 {y:.1f}H{_WIDTH:g}"/>'
    return _plot(name, ends_s, shapes, ticks, write, _titles(ends_s, bands, write, together=False))


def bars(name: str, bounds_ns: Sequence[int], counts: Sequence[int], style: str) -> str:
    """A histogram of times; both axes are logarithmic, so that the few slow ones are seen beside the many fast ones."""
    used = [number for number, count in enumerate(counts) if count]
    first, last = max(0, used[0] - 1), min(len(counts) - 1, used[-1] + 1)
    shown = range(first, last + 1)
    decades = max(1, math.ceil(math.log10(max(counts)) - 1e-9))
    width = _WIDTH / len(shown)
    shapes = []
    for place, number in enumerate(shown):
        if counts[number]:
            height = _HEIGHT * (math.log10(counts[number]) + 0.3) / (decades + 0.3)
            text = f"{_between(bounds_ns, number)}: {counts[number]:,} of {sum(counts):,}"
            shapes.append(
                f'<rect class="area {style}" x="{place * width + 0.06 * width:.1f}" y="{_HEIGHT - height:.1f}" '
                f'width="{0.88 * width:.1f}" height="{height:.1f}"><title>{escape(text)}</title></rect>'
            )
    step = max(1, math.ceil(len(shown) / 5))
    x_labels = [
        (100 * (place + 1) / len(shown), span(bounds_ns[number]))
        for place, number in enumerate(shown)
        if place % step == step - 1 and number < len(bounds_ns)
    ]
    y_labels = [(100 * (power + 0.3) / (decades + 0.3), short_count(10**power)) for power in range(decades + 1)]
    return _frame(name, "".join(shapes), x_labels, y_labels)


def _between(bounds_ns: Sequence[int], number: int) -> str:
    if number == len(bounds_ns):
        return f"longer than {span(bounds_ns[-1])}"
    if number == 0:
        return f"up to {span(bounds_ns[0])}"
    return f"{span(bounds_ns[number - 1])} to {span(bounds_ns[number])}"


def bar(parts: Mapping[str, float], whole: float | None = None) -> str:
    """Parts side by side, by class: shares of their sum, or of ``whole``."""
    whole = whole or sum(parts.values())
    pieces, start = [], 0.0
    for style, value in parts.items():
        if value:
            width = 100 * value / whole
            pieces.append(f'<rect class="area {style}" x="{start:.2f}" y="0" width="{width:.2f}" height="10"/>')
            start += width
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none">{"".join(pieces)}</svg>'


def bar_table(rows: Sequence[tuple[str, Mapping[str, float], str]]) -> str:
    """A row for each thing that is compared: its name, its parts by class, all on one scale, and its value in words."""
    longest = max((sum(parts.values()) for _, parts, _ in rows), default=0.0)
    lines = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{bar(parts, longest) if longest else ""}</td>'
        f"<td>{escape(text)}</td></tr>"
        for label, parts, text in rows
    )
    return f'<div class="scroll"><table class="bars"><tbody>{lines}</tbody></table></div>'


def curves(
    name: str, places: Sequence[str], bands: Sequence[Band], ticks: Sequence[float], write: Callable[[float], str]
) -> str:
    """One line per band through its values at named places, evenly apart; a value that is not finite is a gap."""
    steps = max(len(places) - 1, 1)
    top = ticks[-1]
    shapes = []
    for band in bands:
        path, pen_down = [], False
        for number, value in enumerate(band.values):
            if not math.isfinite(value):
                pen_down = False
                continue
            x, y = _WIDTH * number / steps, _y(min(value, top), top)
            path.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
            pen_down = True
        shapes.append(f'<path class="line {band.style}" d="{"".join(path)}"/>')
    for number, place in enumerate(places):
        said = ", ".join(
            f"{band.label}: {write(band.values[number])}" for band in bands if math.isfinite(band.values[number])
        )
        x, width = _WIDTH * (number - 0.5) / steps, _WIDTH / steps
        shapes.append(
            f'<rect class="touch" x="{x:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT:g}">'
            f"<title>{escape(place)}: {escape(said)}</title></rect>"
        )
    x_labels = [(100 * number / steps, place) for number, place in enumerate(places)]
    y_labels = [(100 * tick / top, write(tick)) for tick in ticks]
    return _frame(name, "".join(shapes), x_labels, y_labels)


def heat_map(name: str, matrix: Matrix) -> str:
    """A square of squares; the darker, the more."""
    count, most = len(matrix.labels), matrix.most()
    cell = 88 if count <= WRITTEN_MOST else 10
    shapes = []
    for row, values in enumerate(matrix.cells):
        for column, value in enumerate(values):
            place = f'x="{column * cell}" y="{row * cell}" width="{cell}" height="{cell}"'
            if not value:
                shapes.append(f'<rect class="{"self" if row == column else "none"}" {place}/>')
                continue
            shade = min(_SHADES, 1 + int(value / most * _SHADES * 0.999))
            text = f"rank {matrix.labels[row]} got {size(value)} from rank {matrix.labels[column]}"
            shapes.append(f'<rect class="h{shade}" {place}><title>{escape(text)}</title></rect>')
            if count <= WRITTEN_MOST:
                middle = f'x="{(column + 0.5) * cell:g}" y="{(row + 0.5) * cell + 5:g}"'
                shapes.append(f'<text class="t{shade}" {middle}>{escape(size(value))}</text>')
    step = next(step for step in (1, 2, 4, 8, 16) if count / step <= 9)
    labels = [(100 * (number + 0.5) / count, escape(matrix.labels[number])) for number in range(0, count, step)]
    across = "".join(f'<span style="left:{place:.2f}%">{text}</span>' for place, text in labels)
    down = "".join(f'<span style="top:{place:.2f}%">{text}</span>' for place, text in labels)
    side = count * cell if count <= WRITTEN_MOST else min(count * 34, 640)
    title = "→ from rank &nbsp; ↓ fetched by rank"
    return (
        f'<div class="heat" style="max-width:{side + 40}px"><p class="axis-title">{title}</p><div class="square">'
        f'<div class="x">{across}</div><div class="y">{down}</div>'
        f'<svg viewBox="0 0 {count * cell} {count * cell}" role="img" aria-label="{escape(name)}">'
        f"{''.join(shapes)}</svg></div></div>"
    )


def shades(most: float) -> str:
    """The legend of a heat map."""
    squares = "".join(f'<i class="swatch h{shade}"></i>' for shade in range(1, _SHADES + 1))
    return f'<p class="shades">little {squares} {escape(size(most))}</p>'


# --- parts ---


def _x(at_s: float, end_s: float) -> float:
    return _WIDTH * at_s / end_s


def _y(value: float, top: float) -> float:
    return _HEIGHT * (1 - value / top)


def _line(ends_s: Sequence[float], values: Sequence[float], top: float) -> str:
    parts, before = [], None
    for number, (end_s, value) in enumerate(zip(ends_s, values, strict=True)):
        if value != before:
            parts.append(f"{'V' if number else 'M0 '}{_y(value, top):.1f}")
            before = value
        if number + 1 == len(values) or values[number + 1] != value:
            parts.append(f"H{_x(end_s, ends_s[-1]):.1f}")
    return "".join(parts)


def _area(ends_s: Sequence[float], lower: Sequence[float], upper: Sequence[float], top: float) -> str:
    """Between two lines of steps: along the upper one, and back along the lower one."""
    back = []
    starts = [0.0, *ends_s[:-1]]
    for start_s, value in zip(reversed(starts), reversed(lower), strict=True):
        back.append(f"V{_y(value, top):.1f}H{_x(start_s, ends_s[-1]):.1f}")
    return f"{_line(ends_s, upper, top)}{''.join(back)}Z"


def _titles(
    ends_s: Sequence[float], bands: Sequence[Band], write: Callable[[float], str], *, together: bool
) -> Iterator[str]:
    """What the pointer shows in each interval."""
    start_s = 0.0
    for number, end_s in enumerate(ends_s):
        values = [(band.label, band.values[number]) for band in bands]
        said = ", ".join(f"{label}: {write(value)}" for label, value in values if value or not together)
        whole = f"{write(sum(value for _, value in values))} in all. " if together and len(bands) > 1 else ""
        x, width = _x(start_s, ends_s[-1]), _x(end_s - start_s, ends_s[-1])
        yield (
            f'<rect class="touch" x="{x:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT:g}">'
            f"<title>{escape(moment(end_s))}: {escape(whole + said)}</title></rect>"
        )
        start_s = end_s


def _plot(
    name: str,
    ends_s: Sequence[float],
    shapes: str,
    ticks: Sequence[float],
    write: Callable[[float], str],
    titles: Iterator[str],
) -> str:
    times = time_ticks(ends_s[-1])
    step = times[1] - times[0] if len(times) > 1 else ends_s[-1]
    x_labels = [(100 * at_s / ends_s[-1], time_label(at_s, step)) for at_s in times]
    y_labels = [(100 * tick / ticks[-1], write(tick)) for tick in ticks]
    return _frame(name, shapes + "".join(titles), x_labels, y_labels)


def _frame(name: str, shapes: str, x_labels: list[tuple[float, str]], y_labels: list[tuple[float, str]]) -> str:
    grid = "".join(f'<path class="grid" d="M0 {_HEIGHT * (1 - place / 100):.1f}H{_WIDTH:g}"/>' for place, _ in y_labels)
    across = "".join(f'<span style="left:{place:.2f}%">{escape(text)}</span>' for place, text in x_labels)
    up = "".join(f'<span style="bottom:{place:.2f}%">{escape(text)}</span>' for place, text in y_labels)
    return (
        f'<div class="plot"><div class="y">{up}</div><div class="x">{across}</div>'
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(name)}">{grid}{shapes}</svg></div>'
    )


def rate_ticks(values: Sequence[float]) -> list[float]:
    """For bytes per second, in steps of round MB/s."""
    return [tick * 1e6 for tick in decimal_ticks(max(max(values, default=0.0), 1e3) / 1e6)]
