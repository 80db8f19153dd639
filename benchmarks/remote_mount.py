"""The program of one node of a mounted job of remote_reads.py: ``fanstore-mount ... -- python remote_mount.py SPEC``

Reads whole files with the C reader (reader.c), as many threads as requests are to be under way, out of the mount of
this rank. What the kernel keeps of a file is dropped before it is read again, so that every read reaches FanStore.
Ranks wait for each other before each case, with files. Each writes its figures as one line of JSON per case.
"""

import json
import os
import sys
from pathlib import Path

from harness.command import run
from harness.meeting import LIMIT_S, Meeting
from harness.reading import BUFFER_BYTES
from harness.remote import Case, File, Files, Spec, keep_in_memory

from fanstore.format.prepared import PreparedDataset


def forget(paths: list[Path]) -> None:
    """Have the kernel drop what it keeps of these files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(spec: Spec, case: Case, mount: Path, files: list[File], work: Path) -> dict[str, float]:
    """Passes over the files until the time is up; latencies of the median pass."""
    paths = [mount / file.path for file in files]
    order = work / f"order-{os.getpid()}"
    order.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in paths))
    passes: list[dict[str, float]] = []
    while sum(item["seconds"] for item in passes) < spec.seconds:
        forget(paths)
        argv = [*spec.under, spec.reader, str(order), str(case.window), str(BUFFER_BYTES)]
        done = json.loads(run(argv, LIMIT_S).stdout)
        if done["files"] != len(files) or done["bytes"] != len(files) * case.size:
            raise SystemExit(f"{done} is not {len(files)} files of {case.size} bytes")
        percentiles = {f"{name}_us": done["latency_us"][name] for name in ("p50", "p90", "p99")}
        passes.append({"files": done["files"], "seconds": done["seconds"], **percentiles})
    forget(paths)
    middle = sorted(passes, key=lambda item: item["p50_us"])[len(passes) // 2]
    return {**middle, **{name: sum(item[name] for item in passes) for name in ("files", "seconds")}}


def counts(mount: Path) -> dict[str, int]:
    sources = json.loads((mount / ".fanstore/stats.json").read_text())["sources"]
    return {name: sources[name]["fetches"] for name in ("local", "remote", "shared")}


def main() -> None:
    spec = Spec.read(sys.argv[1])
    work = Path(sys.argv[1]).parent
    rank = int(os.environ["FANSTORE_RANK"])
    mount = Path(os.environ["FANSTORE_MOUNT"])
    files = Files(PreparedDataset.open(Path(spec.prepared)), spec.ranks)
    kept = keep_in_memory(Path(spec.local.replace("{rank}", str(rank))))
    meeting = Meeting(work, rank, spec.ranks)
    with (work / f"figures-{rank}").open("w") as output:
        for case in spec.cases:
            meeting.wait()
            line: dict[str, float] = {"files": 0, "seconds": 0, "p50_us": 0, "p90_us": 0, "p99_us": 0}
            if rank < case.askers:
                before = counts(mount)
                line = measure(spec, case, mount, files.of(case, rank), work)
                answered = {name for name, count in counts(mount).items() if count > before[name]}
                wanted = {"local", "remote"} if case.share == "half" else {case.share}
                if answered != wanted:
                    meeting.give_up(f"{case}: answered by {answered}, not by {wanted}")
            output.write(json.dumps(line) + "\n")
    (work / f"daemon-{rank}").write_text(" ".join(os.listdir(f"/proc/{os.getppid()}/task")))
    meeting.wait()
    del kept


if __name__ == "__main__":
    main()
