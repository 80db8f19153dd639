"""The last steps of a daemon: its outputs are saved, and it is proved that all nodes have ended well.

Owns how long the end waits, and what a signal does to that; what saves is OutputLife (writing.py), what is proved is
said in success.py. Used by session.py, on the trio thread.
"""

import functools
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

import trio

from fanstore.fuse.signals import SIGNAL_WITHOUT_HURRY, Signals, log_one
from fanstore.fuse.success import give
from fanstore.fuse.writing import OutputLife
from fanstore.job.job import Job
from fanstore.telemetry.events import NOTABLE

log = logging.getLogger(__name__)


class Ending:
    """The end of one daemon; ``life`` is None if nothing can be written; ``proofs``: where one is to be given."""

    def __init__(self, life: OutputLife | None, proofs: Sequence[Path]) -> None:
        self._life = life
        self._proofs = proofs

    async def drain(self, job: Job, signals: Signals) -> None:
        """Outputs go to where they are to stay; a signal ends the waiting, and leaves them on the local disk.

        Ctrl-C is often meant for the command, and pressed once more than was necessary: that is only answered.
        """
        life = self._life
        if life is None:
            return

        async def listen() -> None:
            told = False
            async for number in signals:
                if number == SIGNAL_WITHOUT_HURRY:
                    continue  # to wait is what it asks for
                if number != signal.SIGINT or told or not (what := life.waits_for()):
                    break
                log.warning("%s; press Ctrl-C again to leave them in %s", what, life.directory)
                told = True
            log.info("%s: ending", signal.Signals(number).name, extra=NOTABLE)
            life.leave()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await life.drain(job)
            nursery.cancel_scope.cancel()

    async def end(self, job: Job, signals: Signals, code: int) -> int:
        """Nothing can be written any more: save what is left, and say what could not be. The exit code."""
        if self._life is not None:
            await self.drain(job, signals)
            code = code if self._life.end(job) else code or 1
        if not self._proofs:
            return code
        job.tell_ended(code)
        if job.rank != 0:
            return code
        well = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(functools.partial(log_one, signals, nursery.cancel_scope, hurried=True))
            well = await job.ends_well()
            nursery.cancel_scope.cancel()
        return self._prove(job) if well else code

    def end_at_once(self, job: Job, code: int) -> int:
        """The same, if nothing can be waited for."""
        if self._life is not None and not self._life.is_safe():
            code = code or 1
        if self._proofs:
            job.tell_ended(code)
            if job.size == 1 and code == 0:
                code = self._prove(job)
        return code

    def _prove(self, job: Job) -> int:
        for proof in self._proofs:
            try:
                give(proof, job.size)
            except OSError as error:
                log.error("all has ended well, but --success %s cannot be written: %s", proof, error.strerror or error)
                return 1
        return 0
