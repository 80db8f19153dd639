"""How many nodes read from the PFS at a time: gamma, as published."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable

_NEVER = float("-inf")


class PfsClients:
    """When each node reads from the PFS, and how many clients a node takes the others for.

    As published, nodes are simulated one after the other, and a node counts as a client until its last known read. So
    the first node sees little of what the others do in this iteration, and mostly gamma = 1; the last one sees all.

    Attributes:
        last_read_s: of each node, when it was last handed a sample that came from the PFS.
        planned_s: of each node, when reads ahead begin; not quite ascending, since threads take turns.
    """

    def __init__(self, nodes: int) -> None:
        self.last_read_s = [_NEVER] * nodes
        self.planned_s = [array("d") for _ in range(nodes)]
        self._latest_planned_s = [_NEVER] * nodes

    def plan(self, node: int, at_s: float) -> None:
        """A read ahead will begin."""
        self.planned_s[node].append(at_s)
        if at_s > self._latest_planned_s[node]:
            self._latest_planned_s[node] = at_s

    def plan_all(self, node: int, at_s: Iterable[float]) -> None:
        self.planned_s[node].extend(at_s)
        self._latest_planned_s[node] = max(self.planned_s[node], default=_NEVER)

    def count(self, node: int, at_s: float) -> int:
        """gamma at that time, for this node: itself, and all others that read then or later."""
        clients = 1
        for other, last_s in enumerate(self.last_read_s):
            if other != node and (last_s >= at_s or self._plans(other, at_s)):
                clients += 1
        return clients

    def _plans(self, node: int, at_s: float) -> bool:
        """Whether the node will read then or later. As published this is looked up by bisection, although the list is
        not sorted: the end may be reached in spite of later reads before it."""
        if self._latest_planned_s[node] < at_s:
            return False
        planned_s = self.planned_s[node]
        last_s = planned_s[-1]
        return last_s >= at_s or (last_s > at_s - 0.1 and bisect_left(planned_s, at_s) < len(planned_s))
