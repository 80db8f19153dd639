"""Directories that are listed ahead of look-ups, through the kernel: for who opens files from a list, within limits."""

import errno
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import mounting
import pytest
from mounting import LIMIT_S, Mount, Mounted, command, lister_of, needs_fuse, wait_until

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

#: Constants of native/fuse/namesahead.h.
PER_LOOKUP, FIRST_LOOKUPS, WORTH = 32, 4, 8

LARGE, SMALL = 5_000, 300
#: Bytes that a message between the engine and the lister must not stumble over.
ODD = b"\xff\xfe \n'$x"

#: LOOKUPs that come from looking at the statistics.
OWN = 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "tree"
    for folder, count in ((b"large", LARGE), (b"deep/" + ODD, SMALL), (b"few", WORTH - 1), (b"other", SMALL)):
        place = os.path.join(os.fsencode(root), folder)
        os.makedirs(place)
        for number in range(count):
            name = b"%05d" % number + b"y" * (number % 90)
            with open(os.path.join(place, name), "wb") as file:
                file.write(b"%d of %s" % (number, folder))
    return root


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    return mounting.prepare(source, source.parent / "d.fan")


def names_ahead(mounted: Mounted) -> dict[str, int]:
    """Slices, names in them, and directories that were listed to their end."""
    said: dict[str, int] = mounted.statistics()["engine"]["names_ahead"]
    return said


def files_of(source: Path, mounted: Mounted, folder: bytes) -> list[tuple[bytes, bytes]]:
    """Paths in the source and in the mount, in random order; not by listing the mount, which would tell the kernel."""
    places = [os.path.join(os.fsencode(root), folder) for root in (source, mounted.path)]
    found = sorted(os.listdir(places[0]))
    random.Random(1).shuffle(found)
    return [(os.path.join(places[0], name), os.path.join(places[1], name)) for name in found]


def compare(pairs: list[tuple[bytes, bytes]]) -> None:
    for true, ours in pairs:
        with open(true, "rb") as expected, open(ours, "rb") as file:
            assert file.read() == expected.read()


def compare_until_listed(mounted: Mounted, pairs: list[tuple[bytes, bytes]], directories: int) -> int:
    """Read what a listing of all costs, and go on until so many directories were listed; how many files that took."""
    taken = len(pairs) // PER_LOOKUP + 1
    compare(pairs[:taken])

    def is_listed() -> bool:
        nonlocal taken
        compare(pairs[taken : taken + 1])  # a slice that had to wait for another one is ordered by the next look-up
        taken += 1
        return names_ahead(mounted)["directories"] == directories

    wait_until(is_listed, "listing", mounted.evidence)
    return taken


def wait_for_lister(mounted: Mounted) -> int:
    wait_until(lambda: lister_of(mounted.path) is not None, "start of the lister", mounted.evidence)
    found = lister_of(mounted.path)
    assert found is not None
    return found


@pytest.fixture
def listing_mount(mount: Mount) -> Callable[..., Mounted]:
    """A mount whose lister has started, and whose files are in memory, so that all look-ups count.

    Where a disk is to be waited for, it begins with the look-up (native/fuse/ahead.h), and names are not listed.
    """

    def start(prepared: Path, *options: str) -> Mounted:
        # Orders may be recognised: then files are read ahead, and names are looked up for that.
        mounted = mount(prepared, "--order", "off", *options)
        wait_for_lister(mounted)
        for part in prepared.glob("part-*.tar"):
            part.read_bytes()
        return mounted

    return start


def test_a_job_that_opens_files_from_a_list(
    source: Path, prepared: Path, listing_mount: Callable[..., Mounted]
) -> None:
    mounted = listing_mount(prepared)
    pairs = files_of(source, mounted, b"large")
    taken = compare_until_listed(mounted, pairs, 1)
    assert taken < LARGE // 2
    assert names_ahead(mounted)["names"] == LARGE
    before, reads = mounted.count("lookup"), mounted.count("read")
    compare(pairs[taken:])
    assert mounted.count("lookup") - before <= OWN, "the kernel asks for names that were listed"
    assert mounted.count("read") - reads >= LARGE - taken

    deep = files_of(source, mounted, b"deep/" + ODD)
    compare(deep[compare_until_listed(mounted, deep, 2) :])
    few = files_of(source, mounted, b"few")
    before = mounted.count("lookup")
    compare(few)
    assert mounted.count("lookup") - before >= len(few), "a directory with few names is not worth it"
    assert names_ahead(mounted)["names"] == LARGE + SMALL
    mounted.stop()


def test_what_is_listed_is_bounded_by_what_is_looked_up(
    source: Path, prepared: Path, listing_mount: Callable[..., Mounted]
) -> None:
    mounted = listing_mount(prepared)
    pairs = files_of(source, mounted, b"large")
    for number in range(200):
        assert not os.path.exists(pairs[0][1] + b"-%d" % number)  # what is not there does not count
    compare(pairs[:FIRST_LOOKUPS])
    wait_until(lambda: names_ahead(mounted)["listings"] > 0, "listing", mounted.evidence)
    assert names_ahead(mounted) == {"listings": 1, "names": FIRST_LOOKUPS * PER_LOOKUP, "directories": 0}
    for taken in range(FIRST_LOOKUPS, 40):
        compare(pairs[taken : taken + 1])
        assert names_ahead(mounted)["names"] <= (taken + 1) * PER_LOOKUP
    mounted.stop()


def test_a_walk_lists_nothing_ahead(prepared: Path, listing_mount: Callable[..., Mounted]) -> None:
    mounted = listing_mount(prepared)
    seen = 0
    for folder, _, files in os.walk(os.fsencode(mounted.path)):
        for name in files:
            os.lstat(os.path.join(folder, name))
            seen += 1
    assert seen > LARGE
    assert names_ahead(mounted) == {"listings": 0, "names": 0, "directories": 0}
    mounted.stop()


def test_a_directory_with_outputs_is_left_alone(
    source: Path, prepared: Path, listing_mount: Callable[..., Mounted]
) -> None:
    mounted = listing_mount(prepared, "--scratch")
    (mounted.path / "large" / "output").write_bytes(b"new")
    compare(files_of(source, mounted, b"large")[:300])
    assert names_ahead(mounted) == {"listings": 0, "names": 0, "directories": 0}
    other = files_of(source, mounted, b"other")
    compare(other[: SMALL // 2])
    wait_until(lambda: names_ahead(mounted)["names"] > 0, "listing", mounted.evidence)
    (mounted.path / "other" / "output").write_bytes(b"new")
    compare(other)
    assert sorted(os.listdir(mounted.path / "other")) == sorted([*os.listdir(source / "other"), "output"])
    mounted.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lister_that_dies_or_hangs_is_not_missed(
    source: Path, prepared: Path, listing_mount: Callable[..., Mounted], number: int
) -> None:
    mounted = listing_mount(prepared)
    pairs = files_of(source, mounted, b"large")
    compare(pairs[:20])
    lister = wait_for_lister(mounted)
    os.kill(lister, number)
    if number == signal.SIGKILL:
        wait_until(lambda: "not listed ahead any more" in mounted.log_text(), "note", mounted.evidence)
    compare(pairs)
    mounted.stop()
    assert lister_of(mounted.path) is None
    assert mounted.log_text().count("not listed ahead") == (1 if number == signal.SIGKILL else 0)


def test_signals_for_the_daemon_do_not_end_the_lister(prepared: Path, listing_mount: Callable[..., Mounted]) -> None:
    """A terminal and some batch systems send them to all processes of a group."""
    mounted = listing_mount(prepared)
    lister = wait_for_lister(mounted)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(lister, number)
    mounted.stop()
    assert "not listed ahead" not in mounted.log_text()


def test_the_lister_ends_with_a_daemon_that_is_killed(
    source: Path, prepared: Path, listing_mount: Callable[..., Mounted]
) -> None:
    mounted = listing_mount(prepared)
    for _, ours in files_of(source, mounted, b"large")[:500]:
        os.stat(ours)
    mounted.signal(signal.SIGKILL)
    assert mounted.wait_end() == -signal.SIGKILL
    wait_until(lambda: lister_of(mounted.path) is None, "end of the lister", mounted.evidence, 10)
    with pytest.raises(OSError) as caught:
        os.statvfs(mounted.path)
    assert caught.value.errno == errno.ENOTCONN
    assert command("umount", mounted.path).returncode == 0


@pytest.mark.parametrize("lookups", [40, 400, 700, 1_000])
def test_unmounting_while_a_listing_is_under_way(
    source: Path, prepared: Path, listing_mount: Callable[..., Mounted], lookups: int
) -> None:
    mounted = listing_mount(prepared)
    for _, ours in files_of(source, mounted, b"large")[:lookups]:
        os.stat(ours)
    begin = time.monotonic()
    result = command("umount", mounted.path)
    assert (result.returncode, result.stderr) == (0, "")
    assert time.monotonic() - begin < LIMIT_S / 4
    assert mounted.wait_end() == 0
    mounted.check_clean()
    assert lister_of(mounted.path) is None


def test_the_python_engine_lists_nothing_ahead(prepared: Path, source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "python"
    directory.mkdir()
    mounted = Mounted(prepared, directory / "m", (), directory, None, "python")
    try:
        mounted.wait_up()
        compare(files_of(source, mounted, b"other"))
        assert lister_of(mounted.path) is None
        assert "names_ahead" not in mounted.statistics()["engine"]
        mounted.stop()
    finally:
        mounted.destroy()
