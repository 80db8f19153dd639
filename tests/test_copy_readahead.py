"""Copies on this node are brought into the page cache before programs that are intercepted read them."""

import mmap
import os
import threading
from pathlib import Path

import pytest
from conftest import MakePrepared
from mounting import Mount, needs_fuse, wait_until
from test_preload import intercept

from fanstore import _native
from fanstore.dataset.copy_readahead import CopyReadahead
from fanstore.dataset.memory_limit import available_bytes

pytest_plugins = ["mounting"]

MIB = 1 << 20
BYTES = 9 * MIB + 5000


def resident(path: Path) -> list[bool]:
    """Of each MiB, whether all of it is in memory."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return [_native.pages_resident(view[start : start + MIB]) for start in range(0, len(view), MIB)]


def forget(path: Path) -> None:
    """Out of the page cache; skips where pages of this file system do not go."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if all(resident(path)):
        pytest.skip("files of this file system stay in memory")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = tmp_path / "part-00000.tar"
    path.write_bytes(os.urandom(BYTES))
    forget(path)
    return path


def wait_for(readahead: CopyReadahead) -> None:
    wait_until(lambda: not is_reading(), "the end of reading ahead", lambda: f"{readahead.read_bytes} bytes were read")


def is_reading() -> bool:
    return any(thread.name == "copy readahead" for thread in threading.enumerate())


def test_what_is_missing_is_read(copy: Path) -> None:
    readahead = CopyReadahead(lambda: [copy])
    with copy.open("rb") as file:
        os.pread(file.fileno(), 100_000, 5 * MIB)
    readahead.begin()
    wait_for(readahead)
    assert all(resident(copy))
    assert readahead.read_bytes == BYTES
    readahead.begin()
    wait_for(readahead)
    assert readahead.read_bytes == BYTES, "all of it was in memory"
    readahead.end()


def test_nothing_without_room(copy: Path) -> None:
    readahead = CopyReadahead(lambda: [copy], available=lambda: BYTES)
    readahead.begin()
    wait_for(readahead)
    assert not any(resident(copy))
    readahead.end()


def test_copies_that_go_harm_nobody(copy: Path, tmp_path: Path) -> None:
    readahead = CopyReadahead(lambda: [tmp_path / "gone", copy])
    readahead.begin()
    wait_for(readahead)
    assert all(resident(copy))
    readahead.end()
    readahead.begin()
    assert not is_reading(), "not after the end"


def test_memory_of_the_machine_bounds_it() -> None:
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@needs_fuse
def test_the_first_program_that_is_intercepted_begins_it(
    make_prepared: MakePrepared, mount: Mount, tmp_path: Path
) -> None:
    source, local = tmp_path / "source", tmp_path / "local"
    for directory in (source, local):
        directory.mkdir()
    (source / "a").write_bytes(os.urandom(5 * MIB))
    mounted = mount(make_prepared(source), "--stage-first", local=local)
    (copied,) = local.glob("*/**/part-*.tar")
    forget(copied)
    intercept(mounted, source)
    wait_until(lambda: all(resident(copied)), "the copy in memory", lambda: str(resident(copied)))
