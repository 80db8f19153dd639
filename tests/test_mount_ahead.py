"""Files that the engine reads ahead of their READ, through the kernel: for who reads, not for who walks."""

import os
import random
from pathlib import Path

import mounting
import pytest
from mounting import Mount, Mounted, needs_fuse
from oddities import compressible, incompressible

pytest_plugins = ["mounting"]
ENGINES = ["native"]
pytestmark = needs_fuse

#: Files of each kind of program in a test: more than are needed to recognise it.
FILES = 120
#: In each directory: so few that it is not listed ahead (native/fuse/namesahead.h), and its names are looked up.
TOGETHER = 6


def place(folder: Path, number: int) -> Path:
    return folder / str(number // TOGETHER) / f"{number:03d}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "tree"
    for name in ("walked", "read", "passed"):
        for number in range(FILES):
            make = compressible if number % 2 else incompressible
            path = place(root / name, number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make(20_000 + 571 * number, number))
    return root


@pytest.fixture(scope="module", params=["none", "lz4"])
def prepared(request: pytest.FixtureRequest, source: Path) -> Path:
    return mounting.prepare(source, source.parent / f"{request.param}.fan", "--codec", request.param)


def send_to_disk(folder: Path) -> None:
    """What the page cache has of the partitions is not read ahead."""
    parts = sorted(folder.rglob("part-*.tar"))
    assert parts
    for part in parts:
        fd = os.open(part, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_ahead(mounted: Mounted) -> tuple[int, int]:
    """Files that were read ahead, and those of them that were wanted."""
    said = mounted.statistics()["cache"]
    return said["prefetched"], said["prefetched_taken"]


def names(folder: Path) -> list[Path]:
    """Not by listing, from which the kernel would have all names; nor in order, which has the page cache read ahead."""
    numbers = list(range(FILES))
    random.Random(1).shuffle(numbers)
    return [place(folder, number) for number in numbers]


@pytest.mark.parametrize("options", [[], ["--verify", "always"]], ids=["staged", "in-place-always"])
def test_who_reads_and_who_walks(
    options: list[str], source: Path, prepared: Path, mount: Mount, tmp_path: Path
) -> None:
    local = None
    if not options:
        local = tmp_path / "ssd"
        local.mkdir()
    mounted = mount(prepared, *options, local=local)
    send_to_disk(local or prepared)
    for path in names(mounted.path / "walked"):
        os.lstat(path)
    assert read_ahead(mounted) == (0, 0), "a walk has read files"
    before = mounted.statistics()["sources"]
    assert sum(part["fetches"] for part in before.values()) == 0

    read_bytes = 0
    for path in names(mounted.path / "read"):
        content = path.read_bytes()
        assert content == (source / path.relative_to(mounted.path)).read_bytes()
        read_bytes += len(content)
    files, wanted = read_ahead(mounted)
    sources = mounted.statistics()["sources"]
    assert sum(part["bytes"] for part in sources.values()) == read_bytes, (
        "what programs read is counted, and nothing else"
    )
    if not lies_in_memory(local or prepared):
        # 33 to recognise it after a walk; and the kernel may read neighbours into the page cache.
        assert files >= FILES // 3
    assert wanted == files

    for path in names(mounted.path / "passed"):
        os.lstat(path)
    assert read_ahead(mounted)[0] - files <= 20, "a walk after a job has read files"
    for path in names(mounted.path / "passed"):
        assert path.read_bytes() == (source / path.relative_to(mounted.path)).read_bytes()


def lies_in_memory(folder: Path) -> bool:
    """Nothing is read ahead from a tmpfs."""
    found = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    device = os.stat(folder).st_dev
    kinds = {kind for _, point, kind, *_ in found if os.path.exists(point) and os.stat(point).st_dev == device}
    return bool(kinds & {"tmpfs", "ramfs"})
