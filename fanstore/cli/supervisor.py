"""What a launcher starts instead of the daemon: a small process that waits for it, and cleans up if it was killed.

Owns the daemon's process. Under a launcher nobody else would see how a daemon ends: ``mpirun --with-ft ulfm`` says
nothing of one that was killed, out of memory say, and ends with 0 if none is left. Here that becomes one sentence; the
COMMAND gets SIGTERM, the dead mount and the local files are removed, outputs are saved as far as possible. Signals are
passed on. Imports almost nothing before it forks; what the daemon tells it comes through a pipe (fuse/supervised.py).

It then ends as the launcher needs it. As long as other nodes live it dies by the signal that the daemon died by: only
that is announced to them (PRRTE 3.0: a process that exits with a code is not, and counts twice, so that the launcher
ends the job while others still run). They go on, and end with a code that is not 0. If there are none, it ends with 128
plus the number of the signal. Only if all daemons are killed within a fraction of a second nobody is left to say so;
then there is no proof of success (``--success``).
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any, Never

#: Passed on; SIGUSR1 and SIGUSR2 have a meaning for the daemon, too.
PASSED_ON = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGURG, signal.SIGUSR1, signal.SIGUSR2))
#: Seconds that a COMMAND has to end after SIGTERM, as in fuse/command.py; and after SIGKILL.
_TERM_S, _KILL_S = 10.0, 2.0
_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1
#: Of siginfo: sent by the kernel, such as Ctrl-C, which the terminal gives to the whole process group.
_SI_KERNEL = 0x80


def main() -> Never:
    """Entry point of the command fanstore-mount."""
    # A launcher that knows PMIx makes each of its processes the leader of a process group, and signals that.
    if "PMIX_RANK" not in os.environ or os.getpgrp() != os.getpid():
        _run_daemon(-1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    receive, send = os.pipe()
    own = os.getpid()
    daemon = os.fork()
    if daemon == 0:
        os.close(receive)
        _end_with(own)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _run_daemon(send)
    os.close(send)
    for number in signal.sigpending() & PASSED_ON:  # before there was a daemon that could get them
        os.kill(daemon, number)
    status, got = wait_passing_signals_on(daemon, sender=os.getppid())
    facts, code = _read_facts(receive), os.waitstatus_to_exitcode(status)
    if code >= 0 and "ended" in facts:
        os._exit(code)
    if -code not in got:  # otherwise it was asked for
        _tell(code)
    _clean_up_and_end(code, facts)


def _run_daemon(pipe: int) -> Never:
    from fanstore.cli.mount import main as mount

    mount(pipe)


def _end_with(parent: int) -> None:
    """Without its supervisor the launcher takes the daemon for dead: it must not go on."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def wait_passing_signals_on(child: int, sender: int) -> tuple[int, set[int]]:
    """Until a child has ended; its status, and the signals that came. They must be blocked.

    Those that it gets itself are not passed on: from a terminal, and from ``sender``, which signals process groups.
    """
    got: set[int] = set()
    while True:
        info = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                return status, got
            continue
        got.add(info.si_signo)
        if info.si_code != _SI_KERNEL and info.si_pid != sender:
            os.kill(child, info.si_signo)


def _read_facts(pipe: int) -> dict[str, Any]:
    """What the daemon has told."""
    facts: dict[str, Any] = {}
    os.set_blocking(pipe, False)
    with open(pipe, "rb", buffering=0) as file:
        for line in (file.read() or b"").splitlines():
            facts |= json.loads(line)
    return facts


def _tell(code: int) -> None:
    rank, host = os.environ["PMIX_RANK"], socket.gethostname().partition(".")[0]
    how = f"ended in the middle of its work with code {code}"  # the MPI library does that when the launcher is gone
    advice = ""
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        advice = "; if there was too little memory (see dmesg or sacct), ask for more or lower --cache"
    with contextlib.suppress(OSError):  # nobody reads it any more
        sys.stderr.write(
            f"fanstore-mount: error: the daemon of rank {rank} on {host} {how}; its COMMAND is ended, outputs that "
            f"were closed are saved, and its mount and local copies are removed{advice}\n"
        )
        sys.stderr.flush()


def _clean_up_and_end(code: int, facts: dict[str, Any]) -> Never:
    group, own = os.getpgrp(), os.getpid()
    cleaner = os.fork()
    if cleaner == 0:
        os.setsid()  # what ends the process group does not end this
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _end_group(group, own)
        _clean_up(facts)
        os._exit(0)
    if "alone" in facts:
        os.waitpid(cleaner, 0)
    if "alone" in facts or code >= 0:
        os._exit(128 - code if code < 0 else code or 1)
    import resource

    number = -code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the daemon has left one, if at all
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(own, number)
    os._exit(128 + number)


# --- cleaning up, in a process of its own ---


def _end_group(group: int, without: int) -> None:
    """COMMAND, and what it has started, as far as it has stayed in the process group."""
    for number, limit_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        deadline_s = time.monotonic() + limit_s
        for pid in _members(group, without):
            _kill(pid, number)
            _kill(pid, signal.SIGCONT)  # or a stopped one would not hear of it
        while _members(group, without):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_S)
        else:
            return


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has just ended


def _members(group: int, without: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == without:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, own, *_ = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(own) == group and state not in (b"Z", b"X"):
            found.append(int(name))
    return found


def _clean_up(facts: dict[str, Any]) -> None:
    import logging

    logging.basicConfig(format="fanstore-mount: %(levelname)s: %(message)s", level=logging.WARNING)
    from fanstore.fuse.deadmount import clean_up

    clean_up(**{key: facts.get(key) for key in ("mount", "created", "directory", "made_base")})
