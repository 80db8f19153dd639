"""Memory of a daemon under load: below what docs/operations.md promises, and alive in a control group of that size.

Compressed files of several large chunks, a small cache and many readers are the worst case: every read loads chunks as
they are stored, and as they are kept.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest
from conftest import BOTH_ENGINES
from jobs import StartJob, needs_jobs
from load import Source, load
from mounting import Mount, command, needs_fuse, prepare
from oddities import compressible

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # its control groups
from harness.command import BenchmarkError
from harness.memorygroup import MemoryGroup, memory_group

pytestmark = [needs_fuse, pytest.mark.timeout(100)]
pytest_plugins = ["mounting", "jobs"]
ENGINES = BOTH_ENGINES

MIB = 1 << 20
CACHE = ("--cache", "32MiB")
#: What docs/operations.md promises with this cache, without the index: on one node, and on several.
ALONE_BYTES, TOGETHER_BYTES = (32 + 128) * MIB, (32 + 256) * MIB
READERS = 12
READS = 30  #: of each reader; some seconds


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    root = tmp_path_factory.mktemp("source")
    for number in range(30):
        size = (6, 3, 5, 1)[number % 4] * MIB + number
        (root / f"{number:02}").write_bytes(compressible(size, number))
    return Source(root)


@pytest.fixture(scope="module")
def dataset(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("prepared") / "d.fan"
    return prepare(source.root, target, "--codec", "lz4", "--partitions", "4")


class MakeGroup(Protocol):
    """The fixture ``make_group``; to be asked for before those that start daemons: these end first then."""

    def __call__(self, limit_bytes: int, name: str = ...) -> MemoryGroup: ...


@pytest.fixture
def make_group(dataset: Path) -> Iterator[MakeGroup]:
    """Memory cgroups of some size and that of the index; nothing in them may have been killed at the end."""
    with ExitStack() as stack:
        made: list[MemoryGroup] = []

        def make(limit_bytes: int, name: str = "test") -> MemoryGroup:
            try:
                group = memory_group(limit_bytes + (dataset / "index.fsx").stat().st_size, name)
                made.append(stack.enter_context(group))
            except BenchmarkError as error:
                pytest.skip(str(error))
            return made[-1]

        yield make
        assert [group.killed() for group in made] == [0] * len(made), "out of memory"


def read_much(source: Source, mounts: Sequence[Path]) -> None:
    with load(source, mounts, READERS) as readers:
        readers.wait_reads(READS, limit_s=80)


def test_one_node(mount: Mount, source: Source, dataset: Path) -> None:
    mounted = mount(dataset, *CACHE)
    read_much(source, [mounted.path])
    peak_bytes = mounted.statistics()["memory"]["peak_rss_bytes"]
    assert peak_bytes < ALONE_BYTES, f"{peak_bytes / MIB:.0f} MiB"


@needs_jobs
def test_two_nodes(start_job: StartJob, source: Source, dataset: Path) -> None:
    job = start_job(dataset, 2, *CACHE, local=True)
    job.wait_staged()
    read_much(source, job.mounts())
    peaks = [job.statistics(rank)["memory"]["peak_rss_bytes"] for rank in range(2)]
    assert max(peaks) < TOGETHER_BYTES, [f"{peak / MIB:.0f} MiB" for peak in peaks]
    assert min(job.reads(rank, "remote") for rank in range(2)) > 0


def test_one_node_in_a_control_group(make_group: MakeGroup, mount: Mount, source: Source, dataset: Path) -> None:
    with make_group(ALONE_BYTES).joined():
        mounted = mount(dataset, *CACHE, wait=False)
    mounted.wait_up()
    read_much(source, [mounted.path])
    mounted.stop()


@needs_jobs
def test_two_nodes_in_control_groups(make_group: MakeGroup, start_job: StartJob, source: Source, dataset: Path) -> None:
    groups = [make_group(TOGETHER_BYTES, name).path for name in ("0", "1")]
    join = 'd=$1; [ "$OMPI_COMM_WORLD_RANK" = 0 ] || d=$2; shift 2; echo $$ >$d/cgroup.procs; exec "$@"'
    job = start_job(dataset, 2, *CACHE, local=True, wrapper=["sh", "-c", join, "join", *groups])
    job.wait_staged()
    read_much(source, job.mounts())
    job.stop()


SHORT = r"memory is short: .* the memory cache gives way, to .* of --cache 1 GiB"
#: Takes 96 MiB within six seconds, and then waits for the end of its input.
NEIGHBOUR = """
import sys, time
taken = []
for _ in range(24):
    taken.append(b"x" * (4 << 20))
    time.sleep(0.25)
print("full", flush=True)
sys.stdin.read()
"""


def test_the_cache_gives_way(make_group: MakeGroup, mount: Mount, source: Source, dataset: Path) -> None:
    """The daemon is asked for more than its control group has, and somebody else in the group takes some of that."""
    group = make_group(320 * MIB)
    with group.joined():
        mounted = mount(dataset, "--cache", "1GiB", wait=False, announced=[SHORT])
    mounted.wait_up()
    read_much(source, [mounted.path])
    before = mounted.statistics()["memory"]
    assert before["limit_bytes"] == group.limit_bytes() and before["cache_withheld_bytes"] > 700 * MIB
    assert "less than --cache: memory is short" in command("stat", mounted.path).stdout
    with ExitStack() as stack:
        with group.joined():
            line = [sys.executable, "-c", NEIGHBOUR]
            neighbour = stack.enter_context(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(neighbour.kill)
        assert neighbour.stdout is not None
        with load(source, [mounted.path], READERS):
            assert neighbour.stdout.readline() == b"full\n"
        withheld = mounted.statistics()["memory"]["cache_withheld_bytes"]
        assert withheld > before["cache_withheld_bytes"] + 50 * MIB, f"{withheld / MIB:.0f} MiB"
    assert mounted.log_text().count("memory is short") == 1
    mounted.stop()
