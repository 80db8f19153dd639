"""fanstore-plan hardware: what it takes to keep GPUs busy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fanstore.cli.common import make_parser, suggestion
from fanstore.errors import UsageError
from fanstore.model.hardware import COMPRESSION, RATES, SETUPS, Hardware, datapath, needed, time_for

PROG = "fanstore-plan hardware"

_DESCRIPTION = """\
Say how many SSDs, hard disks, network interfaces and processor cores it takes to keep GPUs busy: the tables of NVIDIA's
talk "Large scale deep learning", with its rates or yours."""

_EPILOG = f"""\
examples:
  fanstore-plan hardware                                   the tables of the talk
  fanstore-plan hardware --gpus 32 --rate gpu=0.8 --rate ssd=3.2 --compression 1.5
  fanstore-plan hardware --gpus 8 --have storage=2 --have cores=16      what limits these?

Rates in GB/s, of one of each: {", ".join(f"{name} {rate:g}" for name, rate in RATES.items())}. A gpu computes on
uncompressed bytes; a core takes compressed bytes in and gives uncompressed ones out.

exit codes: 0 shown, 2 wrong usage."""

#: What --have can say.
_KINDS = ("storage", "interfaces", "cores")

#: What a petabyte is read with, in the talk.
_PETABYTE_GB_PER_S = (40, 30, 6.8, 5, 1)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "--gpus", metavar="N", nargs="+", type=int, help="in all; one or more numbers (default: those of the talk)"
    )
    parser.add_argument(
        "--rate", metavar="NAME=GB/S", nargs="+", action="extend", default=[], help="another rate; one or more"
    )
    parser.add_argument(
        "--compression", metavar="X", type=float, default=COMPRESSION, help="X:1 (default: %(default)g)"
    )
    parser.add_argument(
        "--have",
        metavar="NAME=COUNT",
        nargs="+",
        action="extend",
        default=[],
        help=f"what there is of {', '.join(_KINDS)}, one or more: say what it gives to one number of GPUs, and what "
        "limits it",
    )
    parser.add_argument("--json", action="store_true", help="for a program")
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    rates = {**RATES, **dict(_rate(text) for text in args.rate)}
    found = {
        name: [needed(setup, gpus, rates, args.compression) for gpus in args.gpus or setup.gpus]
        for name, setup in SETUPS.items()
    }
    if args.have:
        have = dict(_have(text) for text in args.have)
        return _show_limits(found, have, rates, args.compression, args.json)
    if args.json:
        document = {name: [vars(hardware) for hardware in rows] for name, rows in found.items()}
        print(json.dumps({"rates_gb_per_s": rates, "compression": args.compression, "needed": document}, indent=1))
        return 0
    print("\n".join(_text(found, rates)))
    return 0


def _rate(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in RATES:
        raise UsageError(
            f"there is no rate '{name}'" + (suggestion(name, list(RATES)) or f"; there are {', '.join(RATES)}")
        )
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"'{text}' is not a rate; write NAME=GB/S, such as {name}={RATES[name]:g}") from None


def _have(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in _KINDS:
        raise UsageError(f"'--have {text}' is not understood; there are {', '.join(_KINDS)}, as in --have cores=16")
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"'{text}' is not a count; write NAME=COUNT, such as {name}=2")
    return name, int(value)


def _show_limits(
    found: Mapping[str, Sequence[Hardware]],
    have: Mapping[str, int],
    rates: Mapping[str, float],
    compression: float,
    as_json: bool,
) -> int:
    """What is on the way in each setup, as many as there are, and otherwise as many as are needed."""
    limits: dict[str, dict[str, Any]] = {}
    for name, (enough, *more) in found.items():
        if more:
            raise UsageError("--have is about one number of GPUs; name it with --gpus N")
        on_the_way = {kind: count for kind, count in have.items() if getattr(enough, kind)}
        flow = datapath(SETUPS[name], replace(enough, **on_the_way), rates, compression)
        wanted = enough.gpus * rates["gpu"]
        limit = flow.cut[0][1] if flow.amount < wanted * (1 - 1e-9) else "GPUs"
        limits[name] = {"gb_per_s": flow.amount, "wanted_gb_per_s": wanted, "limited_by": limit}
    if as_json:
        print(json.dumps(limits, indent=1))
    else:
        width = max(len(setup.title) for setup in SETUPS.values())
        for name, one in limits.items():
            share = one["gb_per_s"] / one["wanted_gb_per_s"]
            given = f"{one['gb_per_s']:8.3g} GB/s, {share:4.0%}"
            print(f"{SETUPS[name].title:{width}}  {given}, limited by {one['limited_by']}")
    return 0


def _text(found: Mapping[str, Sequence[Hardware]], rates: Mapping[str, float]) -> Iterator[str]:
    for name, rows in found.items():
        setup = SETUPS[name]
        columns = {
            "GPUs": [f"{row.gpus:,}" for row in rows],
            "GB/s stored": [f"{row.stored_gb_per_s:g}" for row in rows],
            {"ssd": "SSDs"}.get(setup.storage, "disks"): [f"{row.storage:,}" for row in rows],
        }
        if setup.network:
            columns["interfaces"] = [f"{row.interfaces:,}" for row in rows]
        if setup.compressed:
            columns["cores"] = [f"{row.cores:,}" for row in rows]
        yield setup.title
        for title, texts in columns.items():
            yield f"  {title:<11}" + "".join(f"{text:>8}" for text in texts)
        yield ""
    yield "1 PB takes " + ", ".join(f"{time_for(1e6, rate)} at {rate:g} GB/s" for rate in _PETABYTE_GB_PER_S)
