"""fanstore-clean: the copies that jobs with --keep-local have left on this node, shown and removed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fanstore.cli.common import make_parser, parse, run
from fanstore.dataset.kept_copies import Holding, KeptCopies, KeptCopy
from fanstore.errors import MountError, UsageError
from fanstore.units import format_age, format_bytes, format_count

PROG = "fanstore-clean"

_DESCRIPTION = """\
Show or remove the copies that your jobs have left on this node with fanstore-mount --keep-local. Without PREPARED and
--all, nothing is removed. What a job uses now stays, and so does everything of other users."""

_EPILOG = """\
examples:
  fanstore clean --local /local/ssd                        what is kept there, how large, and when it was last used
  fanstore clean --local /local/ssd /shared/imagenet.fan   remove the copies of this dataset, in all its versions
  fanstore clean --local /local/ssd --all                  remove all of them
  srun --ntasks-per-node=1 fanstore clean --local /local/ssd --all    on all nodes of a job

exit codes: 0 shown or removed; 1 something is in use and stays, or nothing is kept of PREPARED; 2 wrong usage"""


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "prepared",
        metavar="PREPARED",
        nargs="*",
        help="remove the copies of this dataset, by the name under which jobs have mounted it; it need not exist any "
        "more. What another dataset has in common with it stays",
    )
    parser.add_argument(
        "--local",
        metavar="DIR",
        help="the directory of fanstore-mount --local on this node (default: the directory for temporary files)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="remove the copies of all datasets")
    what.add_argument("--list", action="store_true", help="only show what is kept, of PREPARED if it is given")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    return run(PROG, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    args = parse(_parser(), argv)
    if args.all and args.prepared:
        raise UsageError("--all removes the copies of all datasets: leave out either it or the names")
    logging.basicConfig(format=f"{PROG}: %(message)s", level=logging.WARNING)
    base = Path(tempfile.gettempdir() if args.local is None else args.local)
    if not base.is_dir():
        raise MountError(f"{base} is not a directory; name the one of fanstore-mount --local")
    removes = args.all or (args.prepared and not args.list)
    if removes:
        _sweep(base)
    try:
        kept = KeptCopies(base, make=False)
    except FileNotFoundError:
        hint = "" if args.local is not None else "; name another directory with --local"
        print(f"no copies are kept in {base}{hint}")
        return 1 if args.prepared else 0
    try:
        holdings = kept.holdings()
        chosen = [holding for holding in holdings if not args.prepared or _is_named(holding, args.prepared)]
        if args.prepared and not chosen:
            known = sorted({holding.dataset.dataset for holding in holdings if holding.dataset is not None})
            hint = f"; there are some of {', '.join(known)}" if known else ""
            raise MountError(f"nothing is kept of {' or '.join(args.prepared)} in {base}{hint}")
        if removes:
            return _remove(kept, holdings, chosen, base)
        sys.stdout.writelines(f"{line}\n" for line in _listed(base, chosen, args.local))
        return 0
    except OSError as error:
        raise MountError(f"cannot clean {kept.path}: {error.strerror}") from error
    finally:
        kept.close()


def _sweep(base: Path) -> None:
    """What killed jobs have left still uses copies."""
    from fanstore.fuse.deadmount import take_over
    from fanstore.job.job_directory import JobDirectory

    JobDirectory.sweep(base, take_over)


def _is_named(holding: Holding, names: Sequence[str]) -> bool:
    wanted = {form for name in names for form in (name.rstrip("/"), os.path.abspath(name))}
    return holding.dataset is not None and holding.dataset.dataset in wanted


def _copies(holdings: Sequence[Holding]) -> set[KeptCopy]:
    return {copy for holding in holdings for copy in holding.copies}


def _remove(kept: KeptCopies, holdings: Sequence[Holding], chosen: Sequence[Holding], base: Path) -> int:
    wanted = _copies(chosen) - _copies([holding for holding in holdings if holding not in chosen])
    removed = kept.remove(wanted)
    print(f"removed {_size(removed)} from {base}")
    left = [copy for copy in wanted if copy not in removed]
    if left:
        print(f"{PROG}: {_size(left)} are in use by a job, and stay", file=sys.stderr)
    kept.remove_directory()
    return 1 if left else 0


def _listed(base: Path, holdings: Sequence[Holding], local: str | None) -> Iterator[str]:
    copies = _copies(holdings)
    if not copies:
        yield f"no copies are kept in {base}"
        return
    yield f"{base} keeps {_size(list(copies))}:"
    now = time.time()
    for holding in holdings:
        used = (
            "in use now" if any(copy.in_use for copy in holding.copies) else f"used {format_age(now - holding.used_s)}"
        )
        size = format_bytes(sum(copy.identity.bytes for copy in holding.copies))
        if holding.dataset is None:
            count, name = format_count(len(holding.copies), "partition"), "of datasets that are not known any more"
        else:
            count = f"{len(holding.copies):,} of {format_count(len(holding.dataset.identities), 'partition')}"
            name = f"{holding.dataset.dataset}, prepared {holding.dataset.created}"
        yield f"  {size:>8}  {count:<22} {used:<16} {name}"
    where = "" if local is None else f" --local {local}"
    yield f"remove them with: fanstore clean{where} --all, or with the name of a dataset in place of --all"


def _size(copies: Sequence[KeptCopy]) -> str:
    return f"{format_count(len(copies), 'copy', 'copies')} ({format_bytes(sum(c.identity.bytes for c in copies))})"


if __name__ == "__main__":
    sys.exit(main())
