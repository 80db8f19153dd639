"""Sizes, durations and paths as people write and read them. Pure functions, used by every layer."""

import re

from fanstore.errors import UsageError

_FACTORS = {
    "": 1,
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Turn ``512``, ``64MiB``, ``1.5G`` or ``2 GB`` into bytes (``Ki`` is 1024, ``K`` is 1000)."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is not a size; write a number and a unit, such as 512MiB or 1GiB")
    return int(float(match[1]) * _FACTORS[(match[2] or "").lower()])


def format_bytes(count: int | float) -> str:
    """Three significant digits with a binary unit: ``1.21 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return _three_digits(value, unit)
        value /= 1024
    return _three_digits(value, "TiB")


def _three_digits(value: float, unit: str) -> str:
    # %g would turn 1000 and more into an exponent.
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 999.5 else f"{value:.3g} {unit}"


def format_count(count: int, singular: str, plural: str = "") -> str:
    """``1 file``, ``1,200 files``; ``plural`` where it is not the singular with an s."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


def format_duration(seconds: float) -> str:
    """``4.2 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_age(seconds: float) -> str:
    """``just now``, ``20 min ago``, ``5 h ago`` or ``3 days ago``."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= (2 if unit == "days" else 1) * length:
            return f"{int(seconds / length):,} {unit} ago"
    return "just now"


def format_path(path: bytes, longest: int | None = None) -> str:
    """A path in quotes for a message: readable, and one line whatever bytes it has; ``longest`` shortens its middle."""
    if longest is not None and len(path) > longest:
        path = path[: longest // 2] + b"..." + path[-(longest // 2) :]
    text = (path or b".").decode("utf-8", "backslashreplace")
    return "'" + "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text) + "'"
