"""Does MPI work on this node? The library, the launcher, and a real start of two processes.

One node alone needs no MPI: what is missing is a warning, unless the user asks for it (``--mpi``). Any thread.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fanstore import DISTRIBUTION
from fanstore.doctor.finding import Finding, note, ok, skipped, warning, wrong
from fanstore.doctor.programs import PYTHON, Ended, Programs, alone
from fanstore.doctor.versions import look_at_mpi, trial_answer

#: Seconds for one start of two processes; it takes one or two.
START_LIMIT_S = 45.0
_VERSION_LIMIT_S = 15.0
_LAUNCHERS = ("mpirun", "mpiexec")

#: So that two processes may run on a small machine, and as root in a container. Other launchers do not look at these.
_LENIENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_PYTHON_BIN = Path(sys.executable).parent


class MpiChecks:
    """The checks, and what the later ones know from the earlier ones.

    Attributes:
        _needed: whether what is wrong is an error.
        _library: title of the library, empty if there is none. _launcher: the program, empty if there is none.
    """

    def __init__(self, programs: Programs, needed: bool) -> None:
        self._programs = programs
        self._needed = needed
        self._library = ""
        self._launcher = ""

    def _bad(self, name: str, found: str, fix: str) -> Finding:
        if self._needed:
            return wrong(name, found, fix)
        return warning(name, f"{found}; one node alone does not need it", fix)

    def check_library(self) -> Iterator[Finding]:
        """Can mpi4py and its library be loaded?"""
        mpi = look_at_mpi(self._programs)
        if mpi.error:
            fix = f"run: {sys.executable} -m pip install '{DISTRIBUTION}[mpi]', or load the MPI that mpi4py needs"
            yield self._bad("mpi.library", f"the MPI library cannot be loaded ({mpi.error})", fix)
            return
        self._library = mpi.title
        yield ok("mpi.library", f"{mpi.title}, mpi4py {mpi.mpi4py}")

    def check_launcher(self) -> Iterator[Finding]:
        """Which launcher does a user get who types mpirun?"""
        on_path = next(filter(None, map(shutil.which, _LAUNCHERS)), None)
        own = next((str(_PYTHON_BIN / name) for name in _LAUNCHERS if os.access(_PYTHON_BIN / name, os.X_OK)), None)
        launcher = on_path or own
        if launcher is None:
            fix = f"run: {sys.executable} -m pip install '{DISTRIBUTION}[mpi]', or load the cluster's MPI module"
            yield self._bad("mpi.launcher", "there is no mpirun or mpiexec", fix)
            return
        self._launcher = launcher
        said = self._programs.run([launcher, "--version"], _VERSION_LIMIT_S)
        lines = [line.strip() for line in (said.out or said.err).splitlines() if line.strip()]
        found = f"{launcher}: {lines[0]}" if lines else launcher
        if on_path is None:
            yield note(
                "mpi.launcher", f"{found}; it is not on PATH", f"activate the environment: . {_PYTHON_BIN}/activate"
            )
        elif own is not None and not os.path.samefile(own, launcher):
            yield note(
                "mpi.launcher", f"{found}; the one of this environment is {own}", f"use {own} if the start fails"
            )
        else:
            yield ok("mpi.launcher", found)

    def check_start(self) -> Iterator[Finding]:
        """Start two processes, with the option that survives the loss of one where there is such an option."""
        name = "mpi.start"
        if not self._library or not self._launcher:
            yield skipped(name, "no start was tried: the library or the launcher is missing")
            return
        ulfm = "Open MPI" in self._library
        if ulfm:
            answer, ended = self._start("--with-ft", "ulfm")
            if answer is not None:
                yield from self._judge(answer)
                return
        answer, ended = self._start()
        if answer is None:
            yield self._bad(name, *self._explain(ended))
            return
        yield from self._judge(answer)

    def _start(self, *options: str) -> tuple[dict[str, Any] | None, Ended]:
        command = [self._launcher, *options, "-n", "2", *PYTHON, "-m", "fanstore.transport.trial"]
        ended = self._programs.run(command, START_LIMIT_S, alone(os.environ) | _LENIENT)
        answer = trial_answer(ended.out)
        good = ended.code == 0 and answer is not None and "ranks" in answer
        return (answer if good else None), ended

    def _judge(self, answer: dict[str, Any]) -> Iterator[Finding]:
        ranks = answer["ranks"]
        level = ranks[0]["thread_level"]
        if len(ranks) != 2:
            yield self._bad("mpi.start", f"{self._launcher} -n 2 made a job of {len(ranks)}", self._use_own())
            return
        yield ok("mpi.start", f"{self._launcher} -n 2 works; thread level {level} (funneled is enough)")
        if ranks[0]["survives"]:
            yield ok("mpi.ulfm", "with --with-ft ulfm a job survives the loss of a node")
        else:
            yield note(
                "mpi.ulfm",
                f"a job ends when a node is lost: {self._library} has no fault tolerance (ULFM)",
                f"if that matters, use Open MPI 5 (pip install '{DISTRIBUTION}[mpi]') and mpirun --with-ft ulfm",
            )

    def _explain(self, ended: Ended) -> tuple[str, str]:
        command = f"{self._launcher} -n 2"
        if ended.code is None:
            fix = "try mpirun -n 2 hostname; if that hangs too, show it to the administrator"
            return f"{command} did not end within {START_LIMIT_S:g} s", fix
        answer = trial_answer(ended.out) or {}
        said = answer.get("error") or ended.said
        if re.search(r"sees 1|thread level", said):
            return f"{command} fails: {said}", self._use_own()
        return f"{command} fails: {said}", "try mpirun -n 2 hostname; if that fails too, show it to the administrator"

    def _use_own(self) -> str:
        return f"use the mpirun that belongs to mpi4py's library, such as {_PYTHON_BIN / 'mpirun'}"
