"""On which node each rank of a training program runs, and that all of them are there: agreed once per program.

Owns that agreement (docs/protocol.md, "Ranks of a training program"). A program whose samples are given to other ranks
must be sure that every rank does the same. So each daemon tells all others which ranks it knows, and the lowest of the
nodes that are alive decides, for good: where all ranks run, or, if some are still missing after a while, that nothing
is rearranged. Used by the session of a mount, and by job.py for what others say. Trio thread only.
"""

from collections.abc import Callable, Sequence

import trio

from fanstore.transport.peers import MESSAGE_BYTES, Peers

#: Seconds that the ranks of a program may come one after the other.
PATIENCE_S = 30.0
#: Programs that are known; the oldest is forgotten.
_PROGRAMS_MOST = 256

HERE, LATE, DECIDED = b"rank-here", b"rank-late", b"ranks"


class _Program:
    """One program.

    Attributes:
        nodes: by rank, where it runs, as far as that was said; ranks: how many there are.
        decided: what holds for all nodes; empty if nothing is rearranged. None so far.
        late_s: when the patience of those who wait here is over.
    """

    def __init__(self, ranks: int) -> None:
        self.nodes: dict[int, int] = {}
        self.ranks = ranks
        self.decided: Sequence[int] | None = None
        self.late_s = trio.current_time() + PATIENCE_S


class TrainingRanks:
    """The ranks of training programs, as one node knows them; ``first_present`` is the lowest node that is alive."""

    def __init__(self, peers: Peers | None, first_present: Callable[[], int]) -> None:
        self._peers = peers
        self._rank = 0 if peers is None else peers.rank
        self._first_present = first_present
        self._programs: dict[bytes, _Program] = {}

    def nodes(self, key: str, ranks: int, rank: int) -> Sequence[int] | None:
        """The node of each rank of a program, of which a rank is here; empty if it is to be left alone, None if that
        is not known yet: to be asked again soon.

        ``key``: the same on all ranks of the program, a word; another one in any other program.
        """
        name = key.encode()
        program = self._program(name, ranks)
        if program.decided is not None:
            return program.decided
        if rank not in program.nodes:
            self._say(b"%s %s %d %d" % (HERE, name, ranks, rank))
        elif trio.current_time() > program.late_s:
            program.late_s += PATIENCE_S
            self._say(b"%s %s %d" % (LATE, name, ranks))
        self._decide(name, program)  # whoever had to do it may have died
        return program.decided

    def heard(self, peer: int, word: bytes) -> bool:
        """A node has said something of a program; false if it was something else."""
        what, *values = word.split()
        if what not in (HERE, LATE, DECIDED):
            return False
        program = self._program(values[0], int(values[1]))
        if what == HERE:
            program.nodes.setdefault(int(values[2]), peer)
        elif what == DECIDED and program.decided is None:
            program.decided = [int(each) for each in values[2:]]
        if what != DECIDED and program.decided is not None and self._first_present() == self._rank:
            # That node has not heard it, because who decided died, or has forgotten it.
            self._say(_decision(values[0], program.ranks, program.decided))
        self._decide(values[0], program, late=what == LATE)
        return True

    def _decide(self, name: bytes, program: _Program, *, late: bool = False) -> None:
        if program.decided is not None or self._first_present() != self._rank:
            return
        everybody = len(program.nodes) == program.ranks
        if everybody or late:
            nodes = [program.nodes[rank] for rank in range(program.ranks)] if everybody else []
            self._say(_decision(name, program.ranks, nodes))

    def _say(self, word: bytes) -> None:
        """To all, and to ourselves."""
        if self._peers is not None:
            self._peers.tell(word)
        self.heard(self._rank, word)

    def _program(self, name: bytes, ranks: int) -> _Program:
        program = self._programs.get(name)
        if program is None:
            program = self._programs[name] = _Program(ranks)
            if len(self._programs) > _PROGRAMS_MOST:
                del self._programs[next(iter(self._programs))]
        return program


def _decision(name: bytes, ranks: int, nodes: Sequence[int]) -> bytes:
    """The word; without nodes if it would be too long for them."""
    word = b" ".join([DECIDED, name, b"%d" % ranks, *(b"%d" % node for node in nodes)])
    return word if len(word) <= MESSAGE_BYTES else b"%s %s %d" % (DECIDED, name, ranks)
