"""One training job on a cluster in a box (cluster/): ``cluster_job.py --way fanstore-stated --set hosts=4 epochs=3``

Prints the figures of the job: epochs over their computing, bytes by source, how busy the processors were. With --json,
all that was measured. Settings are those of cluster/settings.py, from a TOML file or the command line. --dataset DIR
keeps the dataset for the next job. --measure FILE runs fanstore-plan measure on the hosts instead of a job. Everything
is gone at the end, also after Ctrl-C and after kill -9 of this program. Root only.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from cluster import box
from cluster.job import Job, prepare
from cluster.settings import WAYS, Settings
from harness.command import BenchmarkError
from harness.script import run_script


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="?", type=Path, help="a TOML file")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="values in TOML")
    parser.add_argument("--way", choices=WAYS, default="fanstore-off")
    parser.add_argument("--dataset", type=Path, help="where the dataset is, or will be made (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--measure", type=Path, metavar="FILE", help="fanstore-plan measure instead of a job")
    return parser.parse_args()


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The file's, and what the command line says in addition."""
    values = Settings.read(arguments.settings).as_dict() if arguments.settings else {}
    try:
        for text in arguments.set:
            values |= tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BenchmarkError(f"--set takes NAME=VALUE with values as in TOML: {error}") from None
    return Settings.of(values)


def report(result: dict[str, Any]) -> str:
    """The figures for people."""
    busy = f"busy {result['busy']:.0%}, by hosts {result['hosts_busy']:.0%}"
    lines = [f"{result['way']}: start-up {result['startup_s']:.1f} s, {busy}"]
    for epoch in result["epochs"]:
        compute = f" = {epoch['seconds'] / epoch['compute_s']:.3f} of computing" if epoch["compute_s"] else ""
        sources = "".join(
            f", {name} {counters['fetched_bytes'] / 1e6:.0f} MB" for name, counters in epoch.get("sources", {}).items()
        )
        received = sum(link["received"] for link in epoch["link_bytes"]) / 1e6
        lines.append(
            f"epoch {epoch['epoch']}: {epoch['seconds']:.2f} s{compute}; {epoch['bytes'] / 1e6:.0f} MB read{sources}; "
            f"links {received:.0f} MB, shared file system {epoch['shared']['bytes'] / 1e6:.0f} MB, "
            f"busy {epoch['busy']:.0%}, by hosts {epoch['hosts_busy']:.0%}"
        )
    whole = result["total"]["shared"]["bytes"]
    lines.append(f"the job: shared file system {whole / result['dataset_bytes']:.3f} of the dataset")
    return "\n".join(lines)


def inside(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    served = (arguments.dataset or box.directory() / "dataset").resolve()
    served.mkdir(exist_ok=True)
    prepare(served, settings)
    job = Job(settings, arguments.way, served)
    if arguments.measure:
        job.measure(arguments.measure)
        return
    result = job.run()
    print(report(result), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


def outside(arguments: argparse.Namespace) -> None:
    settings_of(arguments)  # what is wrong with them is said before anything is made
    code = box.enter(sys.argv)
    if code == box.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise BenchmarkError("the job was not measured")


def main() -> int:
    arguments = parse_arguments()
    work = inside if box.is_inside() else outside
    return run_script(lambda: work(arguments))


if __name__ == "__main__":
    sys.exit(main())
