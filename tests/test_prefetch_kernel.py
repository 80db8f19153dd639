"""Files that are fetched ahead into the kernel's page cache: read unseen, followed all the same, without a deadlock."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mounting import LIMIT_S, Mount, Mounted, lister_of, needs_fuse, prepare, wait_until
from ordered import FILES, check, forget, order, shuffled, until

pytest_plugins = ["mounting", "ordered"]
pytestmark = needs_fuse

#: Files that a program asks for: every 32nd, and the last.
MILESTONES = FILES // 32 + 1
#: Reads that come from looking at the statistics.
OWN = 3


def reader_of(mounted: Mounted) -> int | None:
    return lister_of(mounted.path, b"fanstore-pages")


def test_files_come_into_the_page_cache(mount: Mount, prepared: Path, root: Path) -> None:
    """The program asks for the milestones only, and how far it is, is known all the same."""
    mounted = mount(prepared)
    paths = shuffled(root, 9)
    (mounted.path / ".fanstore/order").write_text("\n".join([*paths, ""]))
    until(mounted, lambda now: now["into_kernel"] >= FILES - MILESTONES, "that all others are there")
    before = mounted.count("read")
    check(mounted.path, root, paths)
    assert mounted.count("read") - before <= MILESTONES + OWN
    now = until(mounted, lambda now: now["predicted"] == FILES, "that all were followed")
    assert (now["files"], now["taken"], now["late"]) == (FILES, FILES, 0)
    until(mounted, lambda now: now["source"] == "none", "the end of the list")


def test_plain_files_of_this_node_come_into_the_page_cache(mount: Mount, root: Path, tmp_path: Path) -> None:
    """Bytes that lie in memory are not fetched, but a program finds them in the kernel."""
    plain = prepare(root, tmp_path / "plain.fan", "--codec", "none")
    (tmp_path / "ssd").mkdir()
    mounted = mount(plain, local=tmp_path / "ssd")
    paths = shuffled(root, 10)
    (mounted.path / ".fanstore/order").write_text("\n".join([*paths, ""]))
    until(mounted, lambda now: now["into_kernel"] >= FILES - MILESTONES, "that they are there")
    check(mounted.path, root, paths)
    until(mounted, lambda now: now["predicted"] == FILES, "that all were followed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_the_process_that_reads_ahead(mount: Mount, prepared: Path, root: Path, number: signal.Signals) -> None:
    """It dies, or hangs: files are asked for as before, and the mount ends in time."""
    mounted = mount(prepared)
    paths = shuffled(root, 11)
    (mounted.path / ".fanstore/order").write_text("\n".join([*paths[:100], ""]))
    wait_until(lambda: reader_of(mounted) is not None, "start of the process", mounted.evidence)
    os.kill(reader_of(mounted) or 0, number)
    check(mounted.path, root, paths[:100])
    (mounted.path / ".fanstore/order").write_text("\n".join([*paths[100:], ""]))
    check(mounted.path, root, paths[100:])
    until(mounted, lambda now: now["predicted"] >= FILES - 40, "that both lists were followed")
    if number == signal.SIGKILL:
        ended = r"fanstore-pages has ended \(-9\): files are not read into the page cache ahead any more"
        wait_until(lambda: re.search(ended, mounted.log_text()) is not None, "word of it", mounted.evidence)
    mounted.stop()
    assert reader_of(mounted) is None


def test_no_deadlock_and_no_wrong_byte(mount: Mount, prepared: Path, root: Path) -> None:
    """Files are fetched ahead into the page cache while programs read the same ones, and the kernel forgets them.

    For two minutes, with the daemon killed in between: benchmarks/push_stress.py.
    """
    mounted = mount(prepared, "--cache", "2MiB")
    deadline = time.monotonic() + 2
    failures: list[Exception] = []

    def guarded(work: Callable[[list[str]], None], seed: int) -> None:
        try:
            while time.monotonic() < deadline:
                work(shuffled(root, seed)[:60])
        except (AssertionError, OSError) as error:
            failures.append(error)

    def state_and_read(paths: list[str]) -> None:
        (mounted.path / ".fanstore/order").write_text("\n".join([*paths, ""]))
        check(mounted.path, root, paths)

    jobs: list[Callable[[list[str]], None]] = [
        lambda paths: check(mounted.path, root, paths),
        lambda paths: forget(mounted.path, paths),
        state_and_read,
    ]
    threads = [threading.Thread(target=guarded, args=(job, 50 + number // 2)) for number, job in enumerate(jobs * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), mounted.evidence()
    assert not failures, failures
    assert order(mounted)["into_kernel"] > 0
    mounted.stop()
