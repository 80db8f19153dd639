"""The measured process of index_load.py: loads one name space in one way, looks names up in it, reports as JSON.

Usage: index_child.py index|objects|pickle FILE QUERIES
QUERIES holds relative paths of files, one a line, in random order. A fresh process per measurement: what an earlier
one left in the allocator would hide what this one takes.
"""

import json
import pickle
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Entry:
    """The plain Python-object way: one object per file, a dictionary per directory. Slots, to be fair to it."""

    mode: int
    mtime_ns: int
    size: int
    partition: int
    offset: int
    stored_size: int
    codec: int
    checksum: int
    children: "dict[bytes, Entry] | None"


def status_bytes(field: str) -> int:
    """A field of this process's status that is given in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def load_objects(path: str) -> Entry:
    """Build the tree from rows of text: parent numbers point to earlier lines."""
    entries: list[Entry] = []
    with open(path, "rb") as file:
        for line in file:
            name, *numbers = line[:-1].split(b"\t")
            parent, mode, mtime_ns, size, partition, offset, stored_size, codec, checksum = map(int, numbers)
            children: dict[bytes, Entry] | None = {} if stat.S_ISDIR(mode) else None
            entry = Entry(mode, mtime_ns, size, partition, offset, stored_size, codec, checksum, children)
            siblings = entries[parent].children if entries else None
            if siblings is not None:
                siblings[name] = entry
            entries.append(entry)
    return entries[0]


def load_pickle(path: str) -> Entry:
    with open(path, "rb") as file:
        root = pickle.load(file)
    assert isinstance(root, Entry)
    return root


def best_ns(calls: int, loop: Callable[[], None]) -> float:
    """Nanoseconds per call of a loop of calls: the best of three, the first of which warms the processor's caches."""
    times = []
    for _ in range(3):
        begin = time.perf_counter_ns()
        loop()
        times.append(time.perf_counter_ns() - begin)
    return min(times) / calls


def resolve_ns(queries: list[bytes], resolve: Callable[[bytes], object]) -> float:
    def loop() -> None:
        for query in queries:
            resolve(query)

    return best_ns(len(queries), loop)


def measure_index(path: str, queries: list[bytes]) -> dict[str, float]:
    from fanstore.format.index import Index  # imported before memory is looked at: it is there in any case

    before = status_bytes("VmRSS")
    begin = time.perf_counter()
    index = Index.adopt(memoryview(Path(path).read_bytes()))
    seconds = time.perf_counter() - begin
    added = status_bytes("VmRSS") - before
    split = [query.rpartition(b"/") for query in queries]
    pairs = [(index.resolve(folder), name) for folder, _, name in split]
    assert all(index.lookup(*pair) > 0 for pair in pairs)

    def lookups(suffix: bytes) -> float:
        wanted = [(directory, name + suffix) for directory, name in pairs]
        lookup = index.lookup

        def loop() -> None:
            for directory, name in wanted:
                lookup(directory, name)

        return best_ns(len(wanted), loop)

    return {
        "load_s": seconds,
        "added_rss_bytes": added,
        "lookup_ns": lookups(b""),
        "absent_ns": lookups(b"~"),
        "path_ns": resolve_ns(queries, index.resolve),
    }


def measure_objects(load: Callable[[str], Entry], path: str, queries: list[bytes]) -> dict[str, float]:
    before = status_bytes("VmRSS")
    begin = time.perf_counter()
    root = load(path)
    seconds = time.perf_counter() - begin
    added = status_bytes("VmRSS") - before

    def resolve(query: bytes) -> Entry | None:
        entry: Entry | None = root
        for part in query.split(b"/"):
            if entry is None or entry.children is None:
                return None
            entry = entry.children.get(part)
        return entry

    pairs = []
    for query in queries:
        folder, _, name = query.rpartition(b"/")
        directory = resolve(folder)
        assert directory is not None and directory.children is not None and name in directory.children
        pairs.append((directory.children, name))

    def lookups(suffix: bytes) -> float:
        wanted = [(children, name + suffix) for children, name in pairs]

        def loop() -> None:
            for children, name in wanted:
                children.get(name)

        return best_ns(len(wanted), loop)

    return {
        "load_s": seconds,
        "added_rss_bytes": added,
        "lookup_ns": lookups(b""),
        "absent_ns": lookups(b"~"),
        "path_ns": resolve_ns(queries, resolve),
    }


def main() -> int:
    way, path, queries_path = sys.argv[1:]
    queries = Path(queries_path).read_bytes().splitlines()
    if way == "index":
        figures = measure_index(path, queries)
    elif way == "objects":
        figures = measure_objects(load_objects, path, queries)
    else:
        figures = measure_objects(load_pickle, path, queries)
    print(json.dumps(figures | {"peak_rss_bytes": status_bytes("VmHWM")}))
    return 0


if __name__ == "__main__":
    # Under its real name, so that a pickle written elsewhere finds the class Entry.
    import index_child

    sys.exit(index_child.main())
