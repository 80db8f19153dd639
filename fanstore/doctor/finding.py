"""What a check says, and how checks are run: each in a thread of its own, with a limit of its own.

Owns the time limit: a check that hangs (a dead file server, most likely) is a finding like any other, and the thread in
which it hangs is left behind. Nothing but the standard library is imported here, nor by the modules of checks before
they run: what is missing on a machine is to be reported, not to be an ImportError. Called from the main thread.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How it is."""

    OK = "ok"
    NOTE = "note"  #: nothing is wrong, and it is good to know
    WARNING = "warning"  #: it works, but not as well as it could, or something else does not
    ERROR = "error"  #: something that is needed does not work
    SKIPPED = "skipped"  #: could not be looked at, for the reason given


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: for scripts; does not change between versions.
        found: what was seen, as one sentence without a full stop.
        fix: what to do, one sentence; empty if there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """Something to look at.

    Attributes:
        group: heading in the report. name: of the finding if the check itself fails.
        limit_s: how long it may take.
        body: looks, and says what it has found.
    """

    group: str
    name: str
    limit_s: float
    body: Callable[[], Iterable[Finding]]


@dataclass(frozen=True)
class Result:
    """What a check has found, and in which time."""

    group: str
    findings: tuple[Finding, ...]
    seconds: float


def ok(name: str, found: str) -> Finding:
    return Finding(name, Status.OK, found)


def note(name: str, found: str, fix: str = "") -> Finding:
    return Finding(name, Status.NOTE, found, fix)


def warning(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Status.WARNING, found, fix)


def wrong(name: str, found: str, fix: str) -> Finding:
    return Finding(name, Status.ERROR, found, fix)


def skipped(name: str, found: str) -> Finding:
    return Finding(name, Status.SKIPPED, found)


def split_error(error: Exception) -> tuple[str, str]:
    """What is wrong and what to do, of an error of ours that says both: "this is so: do that"."""
    found, _, fix = str(error).partition(": ")
    return found, fix


def perform(checks: Iterable[Check], stop: Callable[[], None], stop_limit_s: float) -> Iterator[Result]:
    """Run the checks one after the other.

    After Ctrl-C, ``stop`` is called, and the check that is under way gets so long to clean up.
    """
    for check in checks:
        begin = time.monotonic()
        findings = _within_limit(check, stop, stop_limit_s)
        yield Result(check.group, findings, time.monotonic() - begin)


def _within_limit(check: Check, stop: Callable[[], None], stop_limit_s: float) -> tuple[Finding, ...]:
    # Not Thread.join: interrupted, it takes the thread for ended (Python 3.11), and nobody could wait for it again.
    ended = threading.Event()
    findings: list[Finding] = []

    def body() -> None:
        try:
            findings.extend(check.body())
        except Exception as error:  # noqa: BLE001 -- one check that fails must not hide what the others find
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            findings.append(wrong(check.name, f"this could not be checked ({what})", "please report it"))
        finally:
            ended.set()

    threading.Thread(target=body, name=f"doctor-{check.name}", daemon=True).start()
    try:
        in_time = ended.wait(check.limit_s)
    except KeyboardInterrupt:
        stop()
        ended.wait(stop_limit_s)
        raise
    if in_time:
        return tuple(findings)
    late = wrong(
        check.name,
        f"no answer within {check.limit_s:g} s",
        "something below it hangs, a file server most likely: try ls on the paths concerned; tell the administrator",
    )
    return (*findings, late)
