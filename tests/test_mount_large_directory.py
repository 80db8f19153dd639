"""A directory of 100,000 entries: complete, in one listing or many, with attributes, in a reasonable time."""

import os
import subprocess
import time

import mounting
import pytest
from conftest import BOTH_ENGINES
from mounting import Mount, Mounted, needs_fuse

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

COUNT = 100_000


@pytest.fixture(scope="module")
def mounted(module_mount: Mount, tmp_path_factory: pytest.TempPathFactory) -> Mounted:
    directory = tmp_path_factory.mktemp("large")
    source = directory / "source"
    (source / "all").mkdir(parents=True)
    fd = os.open(source / "all", os.O_RDONLY)
    try:
        for number in range(COUNT):
            os.close(os.open(f"image-{number:06d}.jpg", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=fd))
    finally:
        os.close(fd)
    (source / "all/image-077777.jpg").write_bytes(b"found\n")
    return module_mount(mounting.prepare(source, directory / "d.fan"))


def wanted() -> set[str]:
    return {f"image-{number:06d}.jpg" for number in range(COUNT)}


def test_listing_is_complete(mounted: Mounted) -> None:
    start = time.monotonic()
    names = os.listdir(mounted.path / "all")
    elapsed_s = time.monotonic() - start
    assert len(names) == COUNT
    assert set(names) == wanted()
    assert elapsed_s < 30, "it takes about one second"


def test_listing_brings_the_attributes(mounted: Mounted) -> None:
    """READDIRPLUS: stat of each file after a listing asks the daemon for nothing."""
    before = {name: mounted.count(name) for name in ("lookup", "getattr")}
    entries = {entry.name: entry.stat() for entry in os.scandir(mounted.path / "all")}
    assert len(entries) == COUNT
    assert len({status.st_ino for status in entries.values()}) == COUNT
    assert mounted.count("lookup") - before["lookup"] < 20, "those of stats.json itself"
    assert mounted.count("getattr") - before["getattr"] < 20


def test_several_listings_at_once(mounted: Mounted) -> None:
    """Two of them interleaved, and one in another process."""
    other = subprocess.Popen(["ls", "-f", mounted.path / "all"], stdout=subprocess.PIPE, text=True)
    with os.scandir(mounted.path / "all") as one, os.scandir(mounted.path / "all") as two:
        pairs = [(a.name, b.name) for a, b in zip(one, two, strict=True)]
    assert {a for a, _ in pairs} == {b for _, b in pairs} == wanted()
    output, _ = other.communicate(timeout=60)
    assert len(output.splitlines()) == COUNT + 2


def test_rewind(mounted: Mounted) -> None:
    """rewinddir after some entries begins again; nothing is doubled or lost."""
    fd = os.open(mounted.path / "all", os.O_RDONLY)
    try:
        with os.scandir(fd) as entries:
            first = [next(entries).name for _ in range(10)]
        assert os.listdir(fd)[:10] == first
    finally:
        os.close(fd)


def test_lookup(mounted: Mounted) -> None:
    assert (mounted.path / "all/image-077777.jpg").read_bytes() == b"found\n"
    assert not (mounted.path / "all/image-100000.jpg").exists()
