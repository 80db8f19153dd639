"""The value of ``--order``: a word, a file, or the specification of a shuffle that a framework does.

A specification is ``NAME:key=value,key=value``, such as ``torch-distributed:seed=0,list=imagefolder,root=train``. Owns
its grammar (docs/orders.md); what it means is in statement.py. Imports nothing heavy: the command reads its options
with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fanstore.errors import UsageError

Mode = Literal["auto", "hook", "locality", "off"]
MODES: tuple[Mode, ...] = ("auto", "hook", "locality", "off")
#: Those with which programs report what they read.
HOOKED_MODES: tuple[Mode, ...] = ("hook", "locality")

_FLAG = ("yes", "no")
#: What a key may be: one of these words; a number if there are none.
_CHOICES: dict[str, tuple[str, ...]] = {
    "drop-last": _FLAG,
    "set-epoch": _FLAG,
    "persistent-workers": _FLAG,
    "epochs": ("same", "permuted", "shuffled"),
    "list": ("imagefolder", "natural", "sorted", "readdir", "keras-dataset", "keras-flow"),
}
#: The shuffles, and which keys each has besides those of all.
KINDS: dict[str, tuple[str, ...]] = {
    "torch-distributed": ("seed", "drop-last", "set-epoch"),
    "torch-random": ("seed", "persistent-workers", "drawn-before", "drawn-per-epoch"),
    "numpy": ("seed", "epochs"),
    "numpy-default-rng": ("seed", "epochs"),
    "python-random": ("seed", "epochs"),
    "sequential": ("drop-last",),
}
#: How the program lists files, where, how many of its ranks are on a node, and with which epoch it begins.
_COMMON = ("list", "root", "ranks-per-node", "epoch")
LISTS = _CHOICES["list"]


@dataclass(frozen=True)
class Specification:
    """What was asked for: the name of a shuffle, and its values, which were looked at."""

    name: str
    values: Mapping[str, str]

    def number(self, key: str, default: int) -> int:
        return int(self.values.get(key, default))

    def word(self, key: str) -> str:
        """One of the words of the key, by default the first."""
        return self.values.get(key, _CHOICES[key][0])

    def flag(self, key: str, default: bool) -> bool:
        return self.values[key] == "yes" if key in self.values else default


def parse_order(text: str, directory: str) -> Mode | Path | Specification:
    """The value of ``--order``; ``directory``: where a relative file is. Raises UsageError."""
    for mode in MODES:
        if text == mode:
            return mode
    name, colon, rest = text.partition(":")
    if name not in KINDS:
        path = Path(directory, text)
        if not path.is_file():
            raise UsageError(
                f"--order {text} is neither auto, hook, locality nor off, nor a file, nor one of {', '.join(KINDS)} "
                "(with values: NAME:key=value,key=value)"
            )
        return path
    values: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        known = (*KINDS[name], *_COMMON)
        if key not in known or not equals or key in values:
            raise UsageError(f"--order {text}: '{part}' is not one of {', '.join(f'{each}=...' for each in known)}")
        _check(text, key, value)
        values[key] = value
    return Specification(name, values)


def _check(text: str, key: str, value: str) -> None:
    if key == "root":
        return
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise UsageError(f"--order {text}: '{key}' must be one of {', '.join(_CHOICES[key])}, not '{value}'")
        return
    least = 1 if key == "ranks-per-node" else 0
    if not (value.isascii() and value.isdigit() and least <= int(value) < 1 << 32):
        raise UsageError(f"--order {text}: '{key}' must be a number from {least} to 4294967295, not '{value}'")
