"""How fast staging copies partitions from a web server to a local disk beside ``curl -o`` of the same, in one run.

Example: python benchmarks/object_staging.py --rounds 5

nginx on this machine serves one prepared dataset twice, as one partition and as eight, from the page cache. curl gets
the files one after the other over one connection; staging asks for ranges of several at a time, and compares every byte
with the checksum of the manifest. Both end when the copies are complete; the time until they are on the disk (fsync),
and the processor time of curl and of staging, without that of nginx, are kept as well. Writes results/NAME.json.gz
(every run) and NAME.md.
"""

import argparse
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import machine, record
from harness.caches import sync_tree
from harness.command import BenchmarkError, find_program, run
from harness.dataset import DatasetSpec, make
from harness.record import Spread, markdown_table
from harness.script import run_script
from harness.staging import copy_with_staging, summarize
from harness.workspace import workspace

from fanstore.allocator import bound_freed_memory
from fanstore.format.prepared import PreparedDataset

PARTITIONS = (1, 8)
CONTENDERS = ("curl", "fanstore staging")
TIMES = ("complete_s", "on_disk_s", "processor_s")
RUN_S = 600.0

_CONFIGURATION = """
daemon off; master_process off; pid {work}/pid; error_log {work}/errors; {user}
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nopush on;
  client_body_temp_path {work}/t1; proxy_temp_path {work}/t2; fastcgi_temp_path {work}/t3;
  uwsgi_temp_path {work}/t4; scgi_temp_path {work}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def nginx(root: Path, work: Path) -> Iterator[str]:
    """A server for the files below ``root``; its address."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        raise BenchmarkError("nginx is not installed; .venv/bin/python tests/packages.py installs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    work.mkdir()
    user = "user root;" if os.geteuid() == 0 else ""
    (work / "conf").write_text(_CONFIGURATION.format(work=work, root=root, port=port, user=user))
    with subprocess.Popen([program, "-c", str(work / "conf")]) as process:
        try:
            deadline = time.monotonic() + 10.0
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchmarkError(f"nginx does not listen: {(work / 'errors').read_text()}")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def copy_with_curl(address: str, prepared: PreparedDataset, target: Path) -> None:
    names = [part.file for part in prepared.manifest.partitions]
    run(
        ["curl", "-sS", "-f", *(word for name in names for word in ("-o", str(target / name), f"{address}/{name}"))],
        RUN_S,
    )


def measure(contender: str, address: str, target: Path) -> dict[str, Any]:
    """Copy once; the copy is removed again."""
    prepared = PreparedDataset.open(address)  # a new one, which has no connections yet
    os.sync()
    target.mkdir()
    whose = resource.RUSAGE_CHILDREN if contender == "curl" else resource.RUSAGE_SELF
    before = resource.getrusage(whose)
    begin = time.monotonic()
    try:
        if contender == "curl":
            copy_with_curl(address, prepared, target)
        else:
            copy_with_staging(prepared, target)
        complete = time.monotonic() - begin
        after = resource.getrusage(whose)
        sync_tree(target)
        on_disk = time.monotonic() - begin
    finally:
        shutil.rmtree(target)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"complete_s": round(complete, 4), "on_disk_s": round(on_disk, 4), "processor_s": round(processor, 4)}


def make_table(result: dict[str, Any]) -> str:
    """The Markdown page of the record."""
    rows = [
        [
            f"{item['contender']}, {item['partitions']} partition{'s' if item['partitions'] > 1 else ''}",
            Spread(**item["complete_s ratio to curl"]).ratio_text(),
            f"{item['complete_s MB/s']['median']:,.0f}",
            Spread(**item["on_disk_s ratio to curl"]).ratio_text(),
            f"{item['on_disk_s MB/s']['median']:,.0f}",
            Spread(**item["processor_s ratio to curl"]).ratio_text(),
        ]
        for item in result["summary"]
    ]
    lines = [
        "# Staging from a web server beside curl",
        "",
        f"nginx and both on one machine. {result['settings']['rounds']} interleaved rounds, "
        f"{result['settings']['bytes'] / 1e6:,.0f} MB, which the server has in its page cache. "
        f"{machine.sentence(result['machine'])}.",
        "Ratio: speed relative to `curl -o` of the same files in the same round: median (lowest-highest). On disk: "
        "with fsync, on both sides. Staging also compares every byte with the checksum of the manifest.",
        record.load_sentence(result["runs"]),
        "",
        markdown_table(["", "ratio", "MB/s", "ratio on disk", "MB/s on disk", "MB per processor s, ratio"], rows),
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="of 107 KB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work-dir", type=Path, help="the disk on which everything lies")
    parser.add_argument("--name", default="object-staging", help="of the files in results/")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def benchmark(arguments: argparse.Namespace) -> None:
    prep = find_program("fanstore-prep")
    if prep is None or find_program("curl") is None:
        raise BenchmarkError("fanstore-prep or curl is not installed")
    bound_freed_memory()  # as a daemon does
    runs: list[dict[str, Any]] = []
    with workspace(arguments.work_dir) as work:
        dataset = make(work / "images", DatasetSpec(arguments.files, 107_000, 100))
        (work / "root").mkdir()
        for partitions in PARTITIONS:
            out = work / "root" / f"{partitions}.fan"
            run([prep, str(dataset.root), str(out), "--partitions", str(partitions)], RUN_S)
            for part in out.glob("*.tar"):
                run(["cat", str(part)], RUN_S)
        shutil.rmtree(dataset.root)
        with nginx(work / "root", work / "nginx") as address:
            prepared = PreparedDataset.open(f"{address}/{PARTITIONS[0]}.fan")
            total_bytes = sum(part.bytes for part in prepared.manifest.partitions)
            for round_number in range(1, arguments.rounds + 1):
                turn = CONTENDERS if round_number % 2 else CONTENDERS[::-1]
                for partitions in PARTITIONS:
                    for contender in turn:
                        figures = measure(contender, f"{address}/{partitions}.fan", work / "local")
                        print(f"round {round_number}: {partitions} partitions: {contender:18} {figures}", flush=True)
                        place = {"round": round_number, "partitions": partitions, "contender": contender}
                        runs.append(place | figures | {"load_average": os.getloadavg()[0]})
            result = {
                "kind": "object_staging",
                "machine": machine.describe(work),
                "settings": {"rounds": arguments.rounds, "bytes": total_bytes},
                "summary": summarize(runs, total_bytes, "partitions", CONTENDERS, TIMES),
                "runs": runs,
            }
            record.write(arguments.name, result, make_table(result), arguments.results, picture=False)


if __name__ == "__main__":
    sys.exit(run_script(lambda: benchmark(parse_arguments())))
