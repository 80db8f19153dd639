"""Directories that several nodes fill at the same time."""

import contextlib
import functools
import itertools
import os
import threading
import time

import pytest
from filled_jobs import RANKS, SIZE, check, content_of, fill, filled_folder, new_folder, write
from jobs import LIMIT_S, Job, in_threads, needs_jobs
from mounting import wait_until

pytest_plugins = ["jobs", "filled_jobs"]
pytestmark = needs_jobs


def test_turns(job: Job) -> None:
    """Bursts into one directory, by each node in turn."""
    folder, files = new_folder(job), dict[str, bytes]()
    for turn in range(6):
        burst = fill(job.mount(turn % SIZE) / folder, f"turn-{turn}", 40)
        files |= burst
        for step in (1, 2, 0):
            check(job.mount((turn + step) % SIZE) / folder, files, list(burst)[:: 13 if step else 39])


def test_one_winner(job: Job) -> None:
    """Each node begins elsewhere among the same names, so that it creates many in a row before it meets another."""
    folder, count = new_folder(job), 200
    won: list[list[str]] = [[] for _ in RANKS]

    def race(rank: int) -> None:
        for number in range(count):
            name = f"file-{(number + rank * count // SIZE) % count}"
            try:
                write(job.mount(rank) / folder / name, b"%d" % rank)
                won[rank].append(name)
            except FileExistsError:
                assert os.path.exists(job.mount(rank) / folder / name)

    in_threads(*(functools.partial(race, rank) for rank in RANKS))
    files = {name: b"%d" % rank for rank in RANKS for name in won[rank]}
    assert sum(map(len, won)) == len(files) == count, "one winner each"
    for rank in RANKS:
        check(job.mount(rank) / folder, files, files)


@pytest.mark.parametrize("holder", RANKS)
def test_the_same_name_at_the_same_time(job: Job, holder: int) -> None:
    """One of the nodes has filled the directory, and all want the same names, in the same order."""
    folder, files = filled_folder(job, holder)
    racers = [*RANKS, holder]  # two of them on the node itself
    start = threading.Barrier(len(racers))
    wanted = [f"file-{number}" for number in range(40)]
    won: list[list[str]] = [[] for _ in racers]

    def race(number: int, rank: int) -> None:
        start.wait(LIMIT_S)
        for name in wanted:
            with contextlib.suppress(FileExistsError):
                write(job.mount(rank) / folder / name, b"%d" % number)
                won[number].append(name)

    in_threads(*(functools.partial(race, number, rank) for number, rank in enumerate(racers)))
    assert sorted(itertools.chain(*won)) == sorted(wanted), "one winner each"
    files |= {name: b"%d" % number for number in range(len(racers)) for name in won[number]}
    for rank in RANKS:
        check(job.mount(rank) / folder, files, wanted)


@pytest.mark.parametrize("holder", [0, 1])
def test_watched(job: Job, holder: int) -> None:
    """While one node writes, others look again and again: what was closed before they look is there."""
    folder, wanted = new_folder(job), [f"file-{number}" for number in range(300)]
    done = 0
    looks = {rank: 0 for rank in RANKS if rank != holder}

    def write_all() -> None:
        nonlocal done
        for number, name in enumerate(wanted):
            write(job.mount(holder) / folder / name, content_of(name))
            done = number + 1
            if done == 200:
                wait_until(lambda: all(looks.values()), "that the others have looked", job.evidence)

    def watch(rank: int) -> None:
        end_s = time.monotonic() + LIMIT_S
        while (before := done) < len(wanted):
            assert time.monotonic() < end_s, job.evidence()
            if before:
                last = wanted[before - 1]
                if looks[rank] % 2:
                    assert set(wanted[:before]) <= set(os.listdir(job.mount(rank) / folder))
                assert (job.mount(rank) / folder / last).read_bytes() == content_of(last)
                looks[rank] += 1

    in_threads(write_all, *(functools.partial(watch, rank) for rank in looks))
    for rank in RANKS:
        check(job.mount(rank) / folder, {name: content_of(name) for name in wanted}, wanted[::60])


def test_each_its_own_and_one_for_all(job: Job) -> None:
    """Several directories are filled at once; what is complete is moved to one directory, under the eyes of all."""
    own, done = [new_folder(job, rank) for rank in RANKS], new_folder(job)
    kept: list[dict[str, bytes]] = [{} for _ in RANKS]
    moved: list[dict[str, bytes]] = [{} for _ in RANKS]

    def work(rank: int) -> None:
        mine, target = job.mount(rank) / own[rank], job.mount(rank) / done
        for number in range(120):
            name = f"rank-{rank}-{number}"
            write(mine / name, content_of(name))
            if number % 10 < 9:
                kept[rank][name] = content_of(name)
                continue
            os.rename(mine / name, target / name)
            moved[rank][name] = content_of(name)
            assert set(moved[rank]) <= set(os.listdir(target))

    in_threads(*(functools.partial(work, rank) for rank in RANKS))
    everything = {name: content for files in moved for name, content in files.items()}
    for rank in RANKS:
        check(job.mount(rank) / done, everything, everything)
        for owner in RANKS:
            check(job.mount(rank) / own[owner], kept[owner], list(kept[owner])[::20])
