"""Text for the page: escaped, and numbers with units as people read them. Pure functions, used by report/page.py and
report/charts.py.

Whatever comes from outside (names of files, hosts and paths, words of the log) goes through ``escape``.
"""

import html
import math
from collections.abc import Callable, Sequence

from fanstore.units import format_bytes, format_duration


def escape(value: object) -> str:
    """Safe as text and in an attribute; what cannot be seen, or turns the direction of writing, is an escape."""
    text = str(value)
    if not text.isprintable():
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return html.escape(text)


def rate(bytes_per_s: float) -> str:
    """As fanstore-stat has it: MB/s, of 10^6 bytes; GB/s where that is much shorter."""
    value = bytes_per_s / 1e6
    if value == 0:
        return "0 MB/s"
    if value >= 9999.5:
        return f"{value / 1e3:.3g} GB/s" if value < 999_500 else f"{value / 1e3:,.0f} GB/s"
    if value >= 9.95:
        return f"{value:,.0f} MB/s"
    return f"{value:.1f} MB/s" if value >= 0.05 else f"{value:.2g} MB/s"


def rate_on_axis(top: float) -> Callable[[float], str]:
    """How rates are written on an axis that ends at ``top``: all in one unit."""
    return (lambda value: f"{value / 1e9:.3g} GB/s") if top >= 9999.5e6 else rate


def short_count(count: int) -> str:
    """A power of ten, short enough for an axis: ``100``, ``10 k``, ``100 M``."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count // factor} {unit}"
    return str(count)


def share(part: float, whole: float) -> str:
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "below 0.1 %"
    return f"{percent:.0f} %" if percent >= 99.95 or percent == 0 else f"{percent:.1f} %"


def span(nanoseconds: float) -> str:
    """A time between nanoseconds and minutes, with two or three digits."""
    for unit, size in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if nanoseconds < 999.5 * size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e9:.3g} s" if nanoseconds < 60e9 else format_duration(nanoseconds / 1e9)


def moment(seconds: float) -> str:
    """A time since the start: ``4.2 s``, ``3 min 20 s``, ``2 h 05 min``, ``3 d 04 h``."""
    if seconds < 0:
        return "before the start"
    if seconds < 86_400:
        return format_duration(seconds)
    days, rest = divmod(round(seconds / 3600), 24)
    return f"{days} d {rest:02d} h"


def ranks_text(ranks: Sequence[int], longest: int = 4) -> str:
    """``rank 3``, ``ranks 0-63``, ``ranks 1, 4, 7``, or how many there are and which is the first."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) <= longest:
        return "ranks " + ", ".join(map(str, ranks))
    return f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"


def size(count: float) -> str:
    return format_bytes(count)


# --- ticks of axes ---

_DECIMAL_STEPS = (1, 2, 5)
_TIME_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60 * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(3600 * hours for hours in (1, 2, 3, 6, 12)),
    *(86_400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500)),
)


def decimal_ticks(most: float, count: int = 4) -> list[float]:
    """From 0 to a round number that is not below ``most``, in about so many round steps."""
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * factor for factor in (*_DECIMAL_STEPS, 10) if power * factor * count >= most * 0.999)
    return _steps(step, most)


def binary_ticks(most: float, count: int = 4) -> list[float]:
    """The same for bytes: steps are powers of two."""
    step = 1.0
    while step * count < most:
        step *= 2
    return _steps(step, most)


def _steps(step: float, most: float) -> list[float]:
    ticks = [0.0]
    while ticks[-1] < most * 0.999 or len(ticks) == 1:
        ticks.append(round(len(ticks) * step, 9))
    return ticks


def time_ticks(end_s: float, count: int = 6) -> list[float]:
    """Round times from 0 up to ``end_s``, at most so many steps."""
    step = next((step for step in _TIME_STEPS_S if end_s / step <= count), 1000 * 86_400)
    return [round(number * step, 3) for number in range(int(end_s / step + 1e-9) + 1)]


def time_label(seconds: float, step: float) -> str:
    """Short enough to stand under an axis; ``step`` is the distance of two ticks."""
    if seconds == 0:
        return "0"
    if step >= 86_400:
        return f"{seconds / 86_400:g} d"
    if step >= 3600 and seconds >= 3600:
        days, rest = divmod(seconds, 86_400)
        return f"{rest / 3600:g} h" if not days else f"{days:g} d" + (f" {rest / 3600:g} h" if rest else "")
    if step >= 60 and seconds >= 60:
        hours, rest = divmod(seconds, 3600)
        return f"{rest / 60:g} min" if not hours else f"{hours:g} h" + (f" {rest / 60:g}" if rest else "")
    minutes, rest = divmod(seconds, 60)
    return f"{rest:g} s" if not minutes else f"{minutes:g} min" + (f" {rest:g}" if rest else "")
