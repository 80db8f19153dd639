"""The sources of stored bytes: each passes the same tests, and the names of all are in the statistics."""

import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
from commands import run_inside
from core_cluster import Cluster, cluster
from core_parts import opened
from object_servers import Nginx, needs_nginx
from source_conformance import Case, SourceConformance

from fanstore.dataset.local_copies import LocalCopies
from fanstore.dataset.source import BlockingSource
from fanstore.dataset.sources import prepared_source
from fanstore.dataset.staging import stage
from fanstore.dataset.store import PartitionStore
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import Stored
from fanstore.telemetry.statistics import Source

pytest_plugins = ["object_servers"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One partition of a megabyte and a half."""
    base = tmp_path_factory.mktemp("sources")
    (base / "src").mkdir()
    for number in range(12):
        (base / "src" / f"{number:02d}").write_bytes(os.urandom(128 << 10))
    result = run_inside("prep", base / "src", base / "x.fan", "--partitions", "1", "--quiet")
    assert result.returncode == 0, result.stderr
    return base / "x.fan"


@pytest.fixture
def prepared(original: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "x.fan"))


class FileCase(Case):
    """A source in files: ``path`` is the one that it reads. Held by its own check, in its thread."""

    def __init__(self, source: BlockingSource, path: Path) -> None:
        self.source = source
        self.path = path
        self.content = path.read_bytes()
        self._running = threading.Event()
        self._running.set()

    def check(self, stored: Stored) -> Stored:
        assert self._running.wait(20)
        return super().check(stored)

    def remove(self) -> None:
        self.path.unlink()

    def forbid(self) -> None:
        # Not by its mode, which root may ignore: a directory opens, and cannot be read.
        self.path.unlink()
        self.path.mkdir()

    def change(self) -> None:
        self.path.write_bytes(os.urandom(len(self.content)))

    def hold(self) -> None:
        self._running.clear()

    def go_on(self) -> None:
        self._running.set()


class TestLocalCopies(SourceConformance):
    name = Source.LOCAL

    async def opened(self, prepared: Path, base: Path) -> AsyncIterator[Case]:
        dataset = PreparedDataset.open(prepared)
        store = PartitionStore(dataset, open_limit=0)  # so that each read opens the file anew
        local = base / "local"
        local.mkdir()
        assert stage(dataset, store, local, partitions=[0]).verified == (0,)
        source = LocalCopies(store, trio.CapacityLimiter(4))
        assert source.has(0)
        yield FileCase(source, store.path(0))
        store.close()
        store.validate()


class TestSharedFiles(SourceConformance):
    name = Source.SHARED

    async def opened(self, prepared: Path, base: Path) -> AsyncIterator[Case]:
        store = PartitionStore(PreparedDataset.open(prepared), open_limit=0)
        yield FileCase(prepared_source(store), store.path(0))
        store.close()
        store.validate()


class PeerCase(Case):
    """Rank 0 asks rank 1, which has the only copy."""

    def __init__(self, job: Cluster) -> None:
        self.source = job.nodes[0].remote
        self.content = job.nodes[1].prepared.partition_path(0).read_bytes()
        self._network = job.network
        self._holder = job.nodes[1]

    def remove(self) -> None:
        self._holder.store._maps.clear()

    def forbid(self) -> None:
        self._network.kill(1)

    def change(self) -> None:
        self._network.damage(1, True)

    def hold(self) -> None:
        self._network.stop(1)

    def go_on(self) -> None:
        self._network.cont(1)


class TestPeers(SourceConformance):
    name = Source.REMOTE

    @pytest.fixture(autouse=True)
    def damage_is_said(self, request: pytest.FixtureRequest, expect_warnings: Callable[[str], None]) -> None:
        if "[change]" in request.node.name:
            expect_warnings("gave damaged bytes of partition 0")

    async def opened(self, prepared: Path, base: Path) -> AsyncIterator[Case]:
        async with cluster(prepared, base, size=2, room=[0, 1 << 40]) as job:
            yield PeerCase(job)


class ObjectCase(Case):
    """An object that nginx gives; ``server`` can be stopped."""

    def __init__(self, store: PartitionStore, server: Nginx, path: Path) -> None:
        self.source = prepared_source(store)
        self.content = path.read_bytes()
        self._path = path
        self._server = server

    def remove(self) -> None:
        self._path.unlink()

    def forbid(self) -> None:
        self._server.forbid()

    def change(self) -> None:
        self._path.write_bytes(os.urandom(len(self.content)))
        os.utime(self._path, (1, 1))  # nginx tells versions apart by their time, in seconds, and length

    def hold(self) -> None:
        self._server.hold()

    def go_on(self) -> None:
        self._server.go_on()

    def check(self, stored: Stored) -> Stored:
        return stored  # it knows by itself that an object has changed


@needs_nginx
class TestObjectStore(SourceConformance):
    name = Source.SHARED

    @pytest.fixture(autouse=True)
    def server(self, nginx: Nginx) -> None:
        self._nginx = nginx

    async def opened(self, prepared: Path, base: Path) -> AsyncIterator[Case]:
        store = PartitionStore(PreparedDataset.open(f"{self._nginx.url}/{prepared.name}"))
        yield ObjectCase(store, self._nginx, prepared / "part-00000.tar")
        store.close()
        store.validate()


def test_every_source_is_counted_under_its_name(prepared: Path, tmp_path: Path) -> None:
    with opened(prepared, cache_bytes=0) as parts:
        parts.read("00")
        assert parts.statistics.totals().sources[Source.SHARED].fetches
        local = tmp_path / "local"
        local.mkdir()
        stage(parts.prepared, parts.store, local)
        parts.read("01")
        assert parts.statistics.totals().sources[Source.LOCAL].reads

    async def remote() -> None:
        async with cluster(prepared, tmp_path, size=2, room=[0, 1 << 40]) as job:
            assert await job.nodes[0].read("02")
            assert job.nodes[0].source(Source.REMOTE).fetches == 1

    trio.run(remote)
