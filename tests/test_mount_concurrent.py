"""Many readers at once: random offsets and mappings in several processes, and readers that are killed in the middle."""

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES
from mounting import LIMIT_S, Mount, needs_fuse
from oddities import compressible, incompressible

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

READERS = 8

#: One reader: SOURCE MOUNT SEED SECONDS; compares with the source, by pread and by mmap, and prints how often.
READER = """
import mmap, os, random, sys, time
source, mount, seed, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
numbers = random.Random(seed)
names = sorted(os.path.join(folder, name)[len(source) + 1:] for folder, _, found in os.walk(source) for name in found)
end, done = time.monotonic() + seconds, 0
while time.monotonic() < end:
    name = numbers.choice(names)
    with open(os.path.join(source, name), "rb") as true, open(os.path.join(mount, name), "rb", buffering=0) as ours:
        size = os.fstat(ours.fileno()).st_size
        assert size == os.fstat(true.fileno()).st_size, name
        if numbers.random() < 0.2:
            os.posix_fadvise(ours.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(4):
            place, length = numbers.randrange(size), numbers.choice([1, 4096, 100_000, 3_000_000])
            expected = os.pread(true.fileno(), length, place)
            assert os.pread(ours.fileno(), length, place) == expected, (name, place, length)
            with mmap.mmap(ours.fileno(), 0, prot=mmap.PROT_READ) as mapping:
                assert mapping[place:place + length] == expected, (name, place, length)
            done += 1
print(done)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("concurrent") / "source"
    root.mkdir()
    for number in range(60):
        make = compressible if number % 2 else incompressible
        (root / f"small-{number}").write_bytes(make(1000 + 3777 * number, number))
    for number in range(3):
        (root / f"large-text-{number}").write_bytes(compressible(9_000_001, number))
        (root / f"large-noise-{number}").write_bytes(incompressible(9_000_001, number))
    return root


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("none", []),
        ("lz4", []),
        ("lz4", ["--cache", "6MiB"]),  # one or two chunks: nearly every read evicts
        ("lz4", ["--cache", "0", "--verify", "always"]),
        ("lz4hc", ["--local", "ssd"]),
    ],
)
def test_many_readers(mount: Mount, source: Path, tmp_path: Path, codec: str, options: list[str]) -> None:
    prepared = mounting.prepare(source, tmp_path / "d.fan", "--codec", codec, "--partition-size", "8MiB")
    local = None
    if "--local" in options:
        options, local = [], tmp_path / "ssd"
        local.mkdir()
    mounted = mount(prepared, *options, local=local)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, source, mounted.path, str(seed), "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(READERS)
    ]
    try:
        results = [reader.communicate(timeout=LIMIT_S) for reader in readers]
    except subprocess.TimeoutExpired:
        pytest.fail("readers hang\n" + mounted.evidence())
    finally:
        for reader in readers:
            reader.kill()
    assert [error for _, error in results] == [""] * READERS
    assert sum(int(done) for done, _ in results) > READERS
    statistics = mounted.statistics()
    assert statistics["errors"] == {"damaged_files": 0, "failed_reads": 0, "fallbacks": 0}
    assert statistics["cache"]["used_bytes"] <= statistics["cache"]["capacity_bytes"]
    sources = {name for name, counters in statistics["sources"].items() if counters["reads"]}
    assert sources <= ({"local", "cache"} if local is not None else {"shared", "cache"})
    mounted.stop()


def test_one_file_is_decompressed_once(mount: Mount, source: Path, tmp_path: Path) -> None:
    """All readers of a file at once share one decompression of each of its chunks."""
    mounted = mount(mounting.prepare(source, tmp_path / "d.fan", "--codec", "lz4"))
    script = "import sys; open(sys.argv[1], 'rb').read()"
    readers = [
        subprocess.Popen([sys.executable, "-S", "-c", script, mounted.path / "large-text-1"]) for _ in range(READERS)
    ]
    assert [reader.wait(LIMIT_S) for reader in readers] == [0] * READERS
    statistics = mounted.statistics()
    assert statistics["verification"]["chunks"] == statistics["sources"]["shared"]["fetches"] == 3
    assert json.dumps(statistics["cache"]["evictions"]) == "0"


#: MOUNT TAG: asks for names that do not exist, each of them once, so that the kernel must pass on every question.
ASKER = """
import os, sys
print(flush=True)
number = 0
while True:
    number += 1
    os.path.exists(f"{sys.argv[1]}/{sys.argv[2]}-{number}")
"""

#: FILE: reads one page after the other past the kernel's cache, and prints a dot for each.
STEADY = """
import mmap, os, sys
fd, page, place = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4096), 0
while True:
    os.preadv(fd, [page], place)
    place = (place + 997 * 4096) % (8 << 20)
    os.write(1, b".")
"""


def test_killed_readers_do_not_stop_the_daemon(mount: Mount, source: Path, tmp_path: Path) -> None:
    """A request that is taken back at the wrong moment must not leave the daemon in a blocking read (fuse/kernel.py).

    After processes were killed in the middle of their questions, nobody asks anything new; the one reader that is left
    waits for an answer that a worker thread has ready. Without the cure this hangs within some ten rounds.
    """
    # Without a cache each page means work in a thread, so that the answer comes from there.
    mounted = mount(mounting.prepare(source, tmp_path / "d.fan", "--codec", "lz4"), "--cache", "0")
    numbers = random.Random(1)
    with python(STEADY, mounted.path / "large-text-1") as steady:
        assert steady.stdout is not None
        for _ in range(60):
            with python(ASKER, mounted.path, "a") as one, python(ASKER, mounted.path, "b") as two:
                for asker in (one, two):
                    assert asker.stdout is not None
                    asker.stdout.readline()
                time.sleep(numbers.uniform(0, 0.02))  # not synchronisation: the moment of the kill is to be random
            # Both are killed by now. What the pipe holds may be from before: wait for what comes after.
            os.set_blocking(steady.stdout.fileno(), False)
            while steady.stdout.read(65_536):
                pass
            for _ in range(3):
                if not select.select([steady.stdout], [], [], LIMIT_S)[0]:
                    pytest.fail("the daemon has stopped answering\n" + mounted.evidence())
                steady.stdout.read(65_536)
    mounted.stop()


@contextmanager
def python(script: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process, killed at the end of the block."""
    command = [sys.executable, "-S", "-c", script, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
