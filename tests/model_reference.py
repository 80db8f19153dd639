"""The published simulation once more, slow and straight from its rules: what fanstore.model.published is compared with.

Nothing of fanstore.model is used but the numbers of a system. One dictionary per node, one step per sample, all sources
looked at each time. Also written down once more: what each policy loads where.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fanstore.model import System

INFINITY = float("inf")

#: What may fill the staging buffer besides local copies: other nodes, the PFS; and whether copies are waited for, even
#: so. None: there is no staging buffer.
RULES: dict[str, tuple[bool, bool, bool] | None] = {
    "naive": None,
    "staging-pool": (False, True, False),
    "hdmlp": (False, True, False),
    "deepio-ordered": (True, False, False),
    "deepio-opportunistic": (True, False, False),
    "parallel-staging": (False, False, False),
    "lbann-dynamic": (True, False, False),
    "lbann-preload": (True, False, False),
    "locality-aware": (True, True, False),
    "fanstore": (True, True, True),
}


@dataclass
class Reference:
    """Attributes:
    strings: the samples that each node reads.
    copies: of each node, by sample: storage class, and when it is ready.
    reads, planned: of each node, when it read and when it will read from the PFS.
    """

    system: System
    sizes_mb: Sequence[float]
    strings: list[list[int]]
    batch: int
    policy: str
    copies: list[dict[int, tuple[int, float]]] = field(default_factory=list)
    stall_s: float = 0.0
    pfs_mb: float = 0.0

    def __post_init__(self) -> None:
        nodes = range(self.system.nodes)
        self.copies = [{} for _ in nodes]
        self.reads: list[list[float]] = [[] for _ in nodes]
        self.planned: list[list[float]] = [[] for _ in nodes]
        self.staged: list[dict[int, tuple[float, bool]]] = [{} for _ in nodes]  # by place: ready, from the PFS
        self.ever_staged: list[set[int]] = [set() for _ in nodes]
        self.used_mb = [0.0 for _ in nodes]
        self.dropped = [0 for _ in nodes]
        self.place = [0 for _ in nodes]  # the next one to plan
        self.free_s = [[0.0] * self.system.staging.threads for _ in nodes]
        self.thread = 0

    # --- the equations ---

    def write_s(self, sample: int) -> float:
        staging = self.system.staging
        speed = min(self.system.preprocess_mb_per_s, float(staging.write.at(staging.threads)) / staging.threads)
        return self.sizes_mb[sample] / speed

    def pfs_s(self, sample: int, clients: int) -> float:
        share = float(self.system.pfs.at(clients)) / clients
        return self.sizes_mb[sample] / min(self.system.pfs_network_mb_per_s, share)

    def copy_s(self, sample: int, j: int, local: bool) -> float:
        storage = self.system.classes[j]
        speed = float(storage.read.at(storage.threads))
        return self.sizes_mb[sample] / (speed if local else min(self.system.network_mb_per_s, speed))

    def clients(self, node: int, at_s: float) -> int:
        count = 1
        for other in range(self.system.nodes):
            for stamps in (self.reads[other], self.planned[other]):
                if other != node and stamps and stamps[-1] > at_s - 0.1 and bisect_left(stamps, at_s) < len(stamps):
                    count += 1
                    break
        return count

    # --- loading ---

    def load(self, node: int, samples: Iterable[int], classes: Iterable[int], threads: int, waits: bool) -> float:
        """From the PFS; ``waits``: training does. Returns how long it took."""
        free_s = [0.0] * threads
        for turn, (sample, j) in enumerate(zip(samples, classes, strict=True)):
            thread = turn % threads
            if not waits:
                self.planned[node].append(free_s[thread])
            free_s[thread] += self.pfs_s(sample, self.system.nodes) + self.write_s(sample)
            self.copies[node][sample] = (j, 0.0 if waits else free_s[thread])
            self.pfs_mb += self.sizes_mb[sample]
        return max(free_s)

    def copy_from_others(self, node: int, samples: Iterable[int], j: int, begin_s: float) -> float:
        threads = self.system.classes[j].threads
        free_s = [begin_s] * threads
        for turn, sample in enumerate(samples):
            free_s[turn % threads] += self.copy_s(sample, j, local=False) + self.write_s(sample)
            self.copies[node][sample] = (j, 0.0)
        return max(free_s)

    # --- the job ---

    def run(self) -> float:
        now_s = self.stall_s
        for node in range(self.system.nodes):
            self.fill(node, now_s)
        for first in range(0, len(self.strings[0]), self.batch):
            ends_s = []
            for node in range(self.system.nodes):
                at_s = now_s
                for place in range(first, first + self.batch):
                    at_s = self.request(node, place, at_s)
                    at_s += self.sizes_mb[self.strings[node][place]] / self.system.compute_mb_per_s
                ends_s.append(at_s)
            now_s = max(ends_s)
        return now_s

    def request(self, node: int, place: int, at_s: float) -> float:
        sample = self.strings[node][place]
        staged_s, from_pfs = self.staged[node].get(place, (INFINITY, False))
        got_s = at_s
        if staged_s <= at_s:
            if from_pfs:
                self.reads[node].append(at_s)
        else:
            options = [(self.pfs_s(sample, self.clients(node, at_s)), True)]
            for other in range(self.system.nodes):
                if sample in self.copies[other] and self.copies[other][sample][1] <= at_s:
                    options.append((self.copy_s(sample, self.copies[other][sample][0], other == node), False))
            rules = RULES[self.policy]
            if rules is not None and rules[2] and staged_s < INFINITY and not from_pfs:
                options = []
            fetch_s, fetched_from_pfs = min(options, default=(INFINITY, False))
            fetched_s = at_s + (fetch_s + self.write_s(sample))
            if fetched_s < staged_s:
                got_s = fetched_s
                if fetched_from_pfs:
                    self.reads[node].append(at_s)
                    self.pfs_mb += self.sizes_mb[sample]
            else:
                got_s = staged_s
                if from_pfs:
                    self.reads[node].append(staged_s)
        while self.dropped[node] < place // self.batch * self.batch:
            if self.staged[node].pop(self.dropped[node], None) is not None:
                self.used_mb[node] -= self.sizes_mb[self.strings[node][self.dropped[node]]]
            self.dropped[node] += 1
        self.place[node] = max(self.place[node], place + 1)
        self.fill(node, got_s)
        return got_s

    def fill(self, node: int, now_s: float) -> None:
        rules = RULES[self.policy]
        while rules is not None and self.place[node] < len(self.strings[node]):
            others_allowed, pfs_allowed, waits = rules
            sample = self.strings[node][self.place[node]]
            if self.used_mb[node] + self.sizes_mb[sample] > self.system.staging.capacity_mb:
                break
            start_s = max(now_s, self.free_s[node][self.thread])
            option: tuple[float, float, bool] | None = None  # seconds to fetch, ready, from the PFS
            for holder in [node] + [other for other in range(self.system.nodes) if other != node and others_allowed]:
                if sample in self.copies[holder]:
                    j, ready_s = self.copies[holder][sample]
                    fetch_s = self.copy_s(sample, j, holder == node)
                    if option is None or fetch_s < option[0]:
                        option = (fetch_s, ready_s, False)
            if pfs_allowed and not (waits and option is not None):
                fetch_s = self.pfs_s(sample, self.clients(node, start_s))
                if option is None or fetch_s < option[0] or option[1] > start_s:
                    option = (fetch_s, 0.0, True)
                    self.planned[node].append(start_s)
                    self.pfs_mb += self.sizes_mb[sample]
            if option is not None:
                end_s = max(start_s, option[1]) + (option[0] + self.write_s(sample))
                self.free_s[node][self.thread] = end_s
                self.staged[node][self.place[node]] = (end_s, option[2])
                if sample not in self.ever_staged[node]:
                    self.ever_staged[node].add(sample)
                    self.used_mb[node] += self.sizes_mb[sample]
            self.thread = (self.thread + 1) % self.system.staging.threads
            self.place[node] += 1


def load_all(reference: Reference) -> None:
    """What the policy loads before the job or beside it."""
    system, sizes_mb, policy = reference.system, reference.sizes_mb, reference.policy
    nodes, count = system.nodes, len(sizes_mb)
    threads = [storage.threads for storage in system.classes]
    taken = 0  # samples that nodes before have in memory
    for node in range(nodes):
        share = list(range(node * count // nodes, (node + 1) * count // nodes))
        if policy == "hdmlp":
            wanted = _hdmlp_list(reference, node)[:-1]
            for j in range(1, len(system.classes)):
                chosen = _first_that_fit(sizes_mb, wanted, system.classes[j].capacity_mb)
                reference.load(node, chosen, [j] * len(chosen), threads[j], waits=False)
                wanted = wanted[len(chosen) :]
        elif policy.startswith("deepio"):
            if sum(sizes_mb) / nodes > system.classes[1].capacity_mb:
                share = _first_that_fit(sizes_mb, list(range(taken, count)), system.classes[1].capacity_mb)
                taken += len(share)
            reference.stall_s = reference.load(node, share, [1] * len(share), threads[1], waits=True)
        elif policy == "lbann-preload":
            reference.stall_s = reference.load(node, share, [1] * len(share), threads[1], waits=True)
        elif policy == "lbann-dynamic":
            share = reference.strings[node][: count // nodes // reference.batch * reference.batch]  # the first epoch
            reference.load(node, share, [1] * len(share), threads[1], waits=False)
        elif policy in ("locality-aware", "parallel-staging"):
            disk = len(system.classes) - 1
            own = _first_that_fit(sizes_mb, share, system.classes[disk].capacity_mb)
            reference.stall_s = reference.load(node, own, [disk] * len(own), threads[disk], waits=True)
            if policy == "parallel-staging":
                room_mb = system.classes[disk].capacity_mb - sum(sizes_mb[sample] for sample in own)
                others = _first_that_fit(sizes_mb, list(range(share[0])), room_mb)
                reference.stall_s = reference.copy_from_others(node, others, disk, reference.stall_s)


def _first_that_fit(sizes_mb: Sequence[float], samples: Sequence[int], capacity_mb: float) -> list[int]:
    chosen, used_mb = [], 0.0
    for sample in samples:
        used_mb += sizes_mb[sample]
        if used_mb > capacity_mb:
            break
        chosen.append(sample)
    return chosen


def _hdmlp_list(reference: Reference, node: int) -> list[int]:
    string = reference.strings[node]
    count = len(reference.sizes_mb)
    often = [0] * count
    for sample in string:
        often[sample] += 1
    first = [string.index(sample) if often[sample] else len(string) for sample in range(count)]
    samples = sorted(range(count), key=lambda sample: -often[sample])
    listed: list[int] = []
    for storage in reference.system.classes:
        window, used_mb = [], 0.0
        while samples and used_mb <= storage.capacity_mb:
            used_mb += reference.sizes_mb[samples[0]]
            window.append(samples.pop(0))
        listed += sorted(window, key=lambda sample: first[sample])
    return listed + samples
