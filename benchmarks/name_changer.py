"""The program that name_changes.py times, on each node: ``python name_changer.py DIRECTORY COUNT MEETING RANK RANKS``

Creates COUNT empty files in a directory of its own below DIRECTORY, renames them, and removes them: first rank 0 alone,
then the last rank alone, then all at once. Ranks wait for each other with files in MEETING, where each leaves its
figures as one line of JSON. ``python name_changer.py raw COUNT``, under mpirun, times a message of the size of such a
change there and back, with mpi4py alone, and prints a line of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path

from harness.meeting import Meeting

KINDS = ("create", "rename", "remove")
#: Bytes of a question of the sequencer with a short name.
MESSAGE_BYTES = 80


def change(kind: str, directory: Path, number: int) -> None:
    if kind == "create":
        os.close(os.open(directory / f"new-{number:06}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    elif kind == "rename":
        os.rename(directory / f"new-{number:06}", directory / f"renamed-{number:06}")
    else:
        os.unlink(directory / f"renamed-{number:06}")


def measure(directory: Path, count: int) -> dict[str, dict[str, float]]:
    """Per kind of change: seconds for all, and percentiles in microseconds."""
    directory.mkdir()
    figures = {}
    for kind in KINDS:
        times_s = []
        start_s = time.perf_counter()
        for number in range(count):
            before_s = time.perf_counter()
            change(kind, directory, number)
            times_s.append(time.perf_counter() - before_s)
        seconds = time.perf_counter() - start_s
        times_s.sort()
        figures[kind] = {
            "changes": count,
            "seconds": seconds,
            "p50_us": times_s[count // 2] * 1e6,
            "p99_us": times_s[count * 99 // 100] * 1e6,
        }
    directory.rmdir()
    return figures


def work(directory: Path, count: int, meeting: Meeting, rank: int, ranks: int) -> dict[str, object]:
    turns = {"first": [0], "last": [ranks - 1], "all": list(range(ranks))}
    figures: dict[str, object] = {}
    for turn, who in turns.items():
        meeting.wait()
        if rank in who:
            figures[turn] = measure(directory / f"{turn}-{rank}", count)
    meeting.wait()
    return figures


def time_raw(count: int) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    message = bytearray(MESSAGE_BYTES)
    times_s = []
    for _ in range(count):
        start_s = time.perf_counter()
        if world.Get_rank() == 0:
            world.Send(message, 1, 1)
            world.Recv(message, 1, 1)
        else:
            world.Recv(message, 0, 1)
            world.Send(message, 0, 1)
        times_s.append(time.perf_counter() - start_s)
    if world.Get_rank() == 0:
        times_s.sort()
        print(json.dumps({"p50_us": times_s[count // 2] * 1e6, "p99_us": times_s[count * 99 // 100] * 1e6}))


def main() -> None:
    if sys.argv[1] == "raw":
        time_raw(int(sys.argv[2]))
        return
    directory, count, place = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank, ranks = int(sys.argv[4]), int(sys.argv[5])
    figures = work(directory, count, Meeting(place, rank, ranks), rank, ranks)
    (place / f"figures-{rank}").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
