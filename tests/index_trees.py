"""Trees for the tests of the index: how they are generated, and how they become columns (docs/format.md).

Owns the logical description of a tree and its breadth-first layout. Sizes here are only numbers: no file is made, so a
file of many chunks costs nothing. Used by the tests of index.fsx only.
"""

import random
import stat
import struct
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import strategies as st
from index_reference import CHUNK_BYTES, CODECS, NO_PARTITION, ChunkRecord, Columns, checksum


@dataclass(eq=False)
class Node:
    """One inode; a directory has children, anything else may be held by several directories (hard links)."""

    mode: int
    mtime_ns: int = 0
    size: int = 0
    codec: int = 0
    target: bytes = b""
    seed: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)


def directory(children: dict[bytes, Node] | None = None, mode: int = 0o755, mtime_ns: int = 0) -> Node:
    return Node(stat.S_IFDIR | mode, mtime_ns, children=children or {})


def file(size: int, *, codec: int = 0, mode: int = 0o644, mtime_ns: int = 0, seed: int = 0) -> Node:
    return Node(stat.S_IFREG | mode, mtime_ns, size, codec if size > 40 else 0, seed=seed)


def symlink(target: bytes, mtime_ns: int = 0) -> Node:
    return Node(stat.S_IFLNK | 0o777, mtime_ns, len(target), target=target)


def _stored_starts(node: Node, numbers: random.Random) -> list[int]:
    """Where the stored chunks of a file begin, and the end: chunks + 1 numbers."""
    count = max(1, -(-node.size // CHUNK_BYTES))
    if node.codec == 0:
        return [min(k * CHUNK_BYTES, node.size) for k in range(count)] + [node.size]
    shortest, extra = CODECS[node.codec]
    if count == 1:
        return [0, numbers.randrange(shortest, node.size)]
    starts = [0, numbers.randrange(20, CHUNK_BYTES // 2)]
    for _ in range(count - 2):
        starts.append(starts[-1] + numbers.randrange(5, CHUNK_BYTES + 4))
    # Long enough to be a chunk, short enough for the frame to be shorter than the file.
    starts.append(min(starts[-1] + 9 + numbers.randrange(CHUNK_BYTES // 2), node.size - 1))
    if not all(0 < b - a <= CHUNK_BYTES + extra for a, b in pairwise(starts)):
        return [k * 100 for k in range(count + 1)]
    return starts


def columns_of(root: Node, partitions: int = 2) -> Columns:
    """Lay a tree out breadth first, as docs/format.md says."""
    columns = Columns()
    numbers = columns.numbers
    entries: list[tuple[bytes, int, Node]] = [(b"", 0, root)]
    primary: dict[int, int] = {}
    layout: dict[int, dict[str, int]] = {}
    ends = [512] * partitions
    position = 0
    while position < len(entries):
        name, parent, node = entries[position]
        is_new = id(node) not in primary
        primary.setdefault(id(node), position)
        columns.names += name
        numbers["nameoff"].append(len(columns.names) - len(name))
        numbers["parent"].append(parent)
        if stat.S_ISDIR(node.mode):
            row = {"nlink": 2 + sum(stat.S_ISDIR(child.mode) for child in node.children.values())}
            row |= {"first": len(entries), "count": len(node.children), "part": NO_PARTITION}
            entries += [(child_name, position, node.children[child_name]) for child_name in sorted(node.children)]
        elif not is_new:
            row = layout[id(node)]
        elif stat.S_ISLNK(node.mode):
            row = {"size": node.size, "stored": node.size, "offset": len(columns.links), "part": NO_PARTITION}
            columns.links += node.target
        else:
            row = _file_row(node, columns, ends, position % partitions)
        layout[id(node)] = row
        for tag in numbers:
            if tag not in ("parent", "nameoff", "mode", "mtime", "inode"):
                numbers[tag].append(row.get(tag, 0))
        numbers["mode"].append(node.mode)
        numbers["mtime"].append(node.mtime_ns)
        numbers["inode"].append(primary[id(node)])
        position += 1
    numbers["nameoff"].append(len(columns.names))
    names_of = [numbers["inode"].count(entry) for entry in range(position)]
    for entry in range(position):
        if not stat.S_ISDIR(numbers["mode"][entry]):
            numbers["nlink"][entry] = names_of[numbers["inode"][entry]]
    columns.parts = [end + 1024 for end in ends]
    return columns


def _file_row(node: Node, columns: Columns, ends: list[int], part: int) -> dict[str, int]:
    random_numbers = random.Random(node.seed)
    starts = _stored_starts(node, random_numbers)
    row = {"size": node.size, "stored": starts[-1], "offset": ends[part], "part": part, "codec": node.codec}
    ends[part] += -(-starts[-1] // 512) * 512 + 512
    sums = [random_numbers.getrandbits(64) for _ in starts[1:]]
    if node.size == 0:
        row["checksum"] = checksum(b"")
    elif len(sums) == 1:
        row["checksum"] = sums[0]
    else:
        row |= {"first": len(columns.chunks), "count": len(sums)}
        row["checksum"] = checksum(struct.pack(f"<{len(sums)}Q", *sums))
        columns.chunks += [ChunkRecord(start, value) for start, value in zip(starts, sums, strict=False)]
    return row


def sample_tree() -> Node:
    """A tree with one of each: what the targeted cases spoil. Kept small, since it is spoiled thousands of times."""
    linked = file(700, codec=1, seed=1)
    big_linked = file(CHUNK_BYTES * 2 + 1, codec=1, seed=2)
    link = symlink(b"plain")
    return directory(
        {
            b"a": directory({b"x": linked, b"y": symlink(b"\xff/y"), b"z": directory({b"deep": file(1)})}),
            b"b": directory(),
            b"c": directory({b"again": linked, b"big-again": big_linked, b"link-again": link}),
            b"big": big_linked,
            b"big-plain": file(CHUNK_BYTES * 3, seed=3, mtime_ns=-5),
            b"empty": file(0),
            b"link": link,
            b"one-chunk": file(CHUNK_BYTES, seed=4),
            b"plain": file(1000, seed=5, mode=0o4711),
            b"zstd": file(CHUNK_BYTES * 2 + 1, codec=2, seed=7),
            b"zstd-small": file(300, codec=2, seed=8),
            b"\xff" * 255: file(512, codec=1, seed=6),
        },
        mtime_ns=123,
    )


names = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from([b"a", b"a.", b"a..", b"...", b"A", b"-", b"\xff", b"n" * 255, b"\n", b" "]),
).filter(lambda name: name not in (b".", b"..") and b"/" not in name and b"\0" not in name)
times = st.integers(-(2**63), 2**63 - 1)
permissions = st.integers(0, 0o7777)
sizes = st.one_of(
    st.integers(0, 3000),
    st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES, 9 << 20, 40 << 20]),
)
files = st.builds(
    lambda size, codec, mode, mtime, seed: file(size, codec=codec, mode=mode, mtime_ns=mtime, seed=seed),
    sizes,
    st.sampled_from([0, *CODECS]),
    permissions,
    times,
    st.integers(0, 2**32),
)
targets = st.one_of(st.binary(min_size=1, max_size=12), st.just(b"t" * 4095)).filter(lambda target: b"\0" not in target)
symlinks = st.builds(symlink, targets, times)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> Node:
    """Directories, files, symbolic links and hard links between all of them."""
    linkable: list[Node] = []

    def leaf() -> Node:
        if linkable and draw(st.integers(0, 3)) == 0:
            return draw(st.sampled_from(linkable))
        node = draw(st.one_of(files, symlinks))
        linkable.append(node)
        return node

    def make(levels: int) -> Node:
        children: dict[bytes, Node] = {}
        for name in draw(st.lists(names, max_size=5, unique=True)):
            children[name] = make(levels - 1) if levels and draw(st.integers(0, 2)) == 0 else leaf()
        return directory(children, draw(permissions), draw(times))

    return make(depth)
