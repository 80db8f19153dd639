"""fanstore-stat on a job of several nodes: the table from recorded nodes.json, and a real job of two ranks."""

import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from commands import mpirun, run_fanstore
from conftest import MakePrepared, fanstore_command
from mounting import Mount, needs_fuse
from terminals import on_terminal

from fanstore.cli.nodetable import copies_text, fitted_table, node_table
from fanstore.cli.statpage import screen
from fanstore.job.copies import CopyStatistics

pytest_plugins = ["mounting"]

#: Recorded from a job of four nodes; one stopped, one killed.
UP: dict[str, Any] = {
    "state": "up",
    "rank": 0,
    "host": "node017",
    "pid": 4711,
    "partitions": {"local": [4, 5], "shared": [0, 1, 2, 3]},
    "local_bytes": 3 << 30,
    "reads": {"local": 1036, "remote": 48_024, "shared": 7, "cache": 12},
    "read_bytes": 3_810_000_000,
    "fetched_bytes": 2_568_000_000,
    "served_bytes": 40_000_000,
    "errors": {"damaged_files": 1, "failed_reads": 3, "fallbacks": 9},
    "peers_lost": [3],
    "uptime_s": 20.0,
}
NODES = [
    UP,
    {**UP, "rank": 1, "host": "node018", "errors": {**UP["errors"], "failed_reads": 0}},
    {"rank": 2, "host": "node019", "state": "silent"},
    {"rank": 3, "host": "node020", "state": "lost"},
]


def rows(nodes: list[dict[str, Any]], before: list[dict[str, Any]] | None = None) -> list[list[str]]:
    return [line.split() for line in node_table(nodes, before)]


def test_table_has_a_line_per_node_and_their_sum() -> None:
    _, titles, first, second, silent, lost, total = rows(NODES)
    assert titles[:3] == ["rank", "host", "state"]
    assert titles[5:9] == ["local", "cache", "remote", "shared"]
    assert first[:5] == ["0", "node017", "up", "3", "GiB"]
    assert first[5:9] == ["1,036", "12", "48,024", "7"]
    assert first[9:] == ["190", "128", "2.0", "3", "3"], "MB/s read, in, out; errors; peers lost"
    assert second[-2:] == ["0", "3"]
    assert silent == ["2", "node019", "silent", *"-" * 10]
    assert lost == ["3", "node020", "lost", *"-" * 10]
    assert total == ["all", "2", "up", "6", "GiB", "2,072", "24", "96,048", "14", "381", "257", "4.0", "3", "3"]


def test_columns_are_aligned() -> None:
    """Numbers end where their titles end, with host names of any length."""
    for host in ("n1", "a" * 60):
        _, titles, *lines = node_table([{**node, "host": host} for node in NODES], None)
        ends = [titles.index(word) + len(word) for word in ("on disk", "cache", "shared", "out", "errors")]
        for line in lines:
            assert all(line[end - 1] != " " and line[end] == " " for end in ends), line
        assert max(map(len, lines)) < 150


def test_copies_that_are_made_again() -> None:
    """Sums of what each node has done; of what all have to do, each tells what it knows."""
    none = dict.fromkeys((field.name for field in fields(CopyStatistics)), 0)
    assert copies_text([None, none]) == ""
    busy = {**none, "partitions": 3, "done_partitions": 1, "bytes": 3 << 30, "done_bytes": 3 << 29, "missing_copies": 4}
    expected = "1 of 3 partitions copied again after a death, 1.5 GiB of 3 GiB; 4 copies to go on all nodes"
    assert copies_text([busy, {**none, "missing_copies": 3}, None]) == expected
    short = {**none, "partitions": 1, "failed_partitions": 1, "unplaced_partitions": 1}
    expected = (
        "0 of 1 partition copied again after a death, 0 B of 0 B; 1 could not be; no room for those of 1 partition"
    )
    assert copies_text([short]) == expected


def test_rates_are_those_of_each_nodes_own_clock() -> None:
    later = [
        {**UP, "uptime_s": 22.0, "read_bytes": UP["read_bytes"] + 1_000_000, "served_bytes": UP["served_bytes"]},
        {**NODES[1], "uptime_s": 24.0, "fetched_bytes": UP["fetched_bytes"] + 8_000_000},
    ]
    title, _, first, second, total = rows(later, NODES[:2])
    assert title[-2:] == ["MB/s", "now"]
    assert first[9:12] == ["0.5", "0.0", "0.0"]
    assert second[9:12] == ["0.0", "2.0", "0.0"]
    assert total[9:12] == ["0.5", "2.0", "0.0"]


def test_no_rate_where_there_was_no_answer_before() -> None:
    """A node that was silent and answers again; and one whose clock stands still (two samples in one moment)."""
    woken = {**UP, "rank": 2}
    _, _, again, still, total = rows([woken, {**UP, "rank": 1}], [NODES[2], {**UP, "rank": 1}])
    assert again[9:12] == still[9:12] == total[9:12] == ["-", "-", "-"]


def test_many_lost_peers_are_counted() -> None:
    table = list(node_table([{**UP, "peers_lost": list(range(100, 140))}], None))
    assert len(table) == 3, "no sum of one node"
    assert table[-1].endswith("40 nodes")


def job_of(size: int) -> list[dict[str, Any]]:
    """Nodes with long names and large numbers; of many, one has failed reads, one is silent, one is lost."""
    nodes: list[dict[str, Any]] = [
        {**UP, "rank": rank, "host": f"gpu-node-{rank:04d}.cluster", "errors": {**UP["errors"], "failed_reads": 0}}
        | {"read_bytes": UP["read_bytes"] * (rank + 1), "peers_lost": [] if size < 4 else [size - 1]}
        | {"reads": {name: count * 1_000 for name, count in UP["reads"].items()}}
        for rank in range(size)
    ]
    if size > 3:
        nodes[5]["errors"] = UP["errors"]
        nodes[size - 2] = {"rank": size - 2, "host": "node-silent", "state": "silent"}
        nodes[size - 1] = {"rank": size - 1, "host": "node-lost", "state": "lost"}
    return nodes


def test_table_on_a_terminal_shows_what_matters_first() -> None:
    titles, lost, silent, failed, busiest, others, total = fitted_table(job_of(64), None, 120, 7)
    assert titles.split() == [
        "rank",
        "host",
        "state",
        "on",
        "disk",
        "local",
        "cache",
        "remote",
        "shared",
        "MB/s",
        "in",
        "out",
        "errors",
        "lost",
    ]
    assert lost.split()[:3] == ["63", "node-lost", "lost"] and silent.split()[:3] == ["62", "node-silent", "silent"]
    assert failed.split()[0] == "5" and failed.split()[-2:] == ["3", "63"]
    assert busiest.split()[0] == "61", "which has read most"
    assert others.split()[:2] == ["60", "others"] and total.split()[:3] == ["all", "62", "up"]
    assert "2.98G" in total and total.split()[-2:] == ["3", "63"]
    ranks = [line.split()[0] for line in fitted_table(job_of(64), None, 120, 80)]
    assert ranks == ["rank", *map(str, range(64)), "all"], "in order if there is room"
    assert len(fitted_table(job_of(1), None, 80, 7)) == 2, "no sum of one"


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_table_fits(size: int, columns: int) -> None:
    titles, *lines = fitted_table(job_of(size), None, columns, 8)
    assert len(lines) < 8 and max(map(len, (titles, *lines))) <= columns
    for name in ("state", "MB/s", "errors"):
        assert name in titles, "is given up last"
    if columns == 120:
        assert titles.endswith("lost")


@pytest.fixture(scope="module", params=["native"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@needs_fuse
def test_watching_fits_the_terminal(tmp_path: Path, make_prepared: MakePrepared, mount: Mount) -> None:
    """Of a real mount with much to tell, also with the nodes of a job; and when the terminal becomes larger."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / f"{number}").write_bytes(bytes([number]) * 50_000)
    prepared = make_prepared(source, partitions=2, codec="lz4", quiet=True)
    (tmp_path / "out").mkdir()
    mounted = mount(prepared, "--output", str(tmp_path / "out"), local=tmp_path / "ssd")
    for number in range(8):
        (mounted.path / f"{number}").read_bytes()
        (mounted.path / f"out-{number}").write_bytes(b"x")
    os.statvfs(mounted.path)
    command = [fanstore_command("stat"), str(mounted.path), "--watch", "0.1"]
    with on_terminal(command, dict(os.environ), size=(80, 24)) as terminal:
        terminal.wait_for("in the last")
        terminal.wait_for("\x1b[H")
        small = terminal.wait_for("\x1b[J").replace("\x1b[K", "").splitlines()
        terminal.resize(120, 50)
        terminal.wait_for("verified")
        terminal.wait_for("\x1b[H")
        large = terminal.wait_for("\x1b[J").replace("\x1b[K", "").splitlines()
    for lines, columns, most in ((small, 80, 23), (large, 120, 49)):
        assert len(lines) <= most and max(map(len, lines)) <= columns, lines
        text = "\n".join(lines)
        for shown in (
            str(prepared)[:40],
            "in the last 0.",
            "read from",
            "local",
            "operation",
            "all others",
            "outputs ",
        ):
            assert shown in text, text
        assert "other " not in text
    assert len(small) >= 22 and len(large) > len(small), "the room is used"
    stats = mounted.statistics()
    for size in (1, 3, 64):
        for columns, most in ((80, 24), (120, 40)):
            lines = screen(["x" * 200, "up"], stats, (job_of(size), None), columns, most)
            assert len(lines) < most and max(map(len, lines)) <= columns
            text = "\n".join(lines)
            assert "read from" in text and "operation" in text and "outputs " in text
            assert ("MB/s" in text) == (size > 1) and ("node-lost" in text) == (size == 64)
            assert bool(re.search(r"\d+ others ", text)) == (size == 64)


@needs_fuse
@pytest.mark.timeout(100)
def test_job_of_two_ranks(tmp_path: Path, make_prepared: MakePrepared) -> None:
    """Each command reads everything, then rank 0 asks fanstore-stat in all its ways."""
    pytest.importorskip("mpi4py")
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / f"{number}").write_bytes(bytes([number]) * 50_000)
    prepared = make_prepared(source, partitions=4, quiet=True)
    stat = shlex.quote(fanstore_command("stat"))
    here = shlex.quote(str(tmp_path))
    script = f"""
        set -e
        nodes='{stat} '"$FANSTORE_MOUNT --nodes"
        cat "$FANSTORE_MOUNT"/[0-9] >/dev/null
        touch {here}/read-$FANSTORE_RANK
        until [ -e {here}/read-0 ] && [ -e {here}/read-1 ]; do sleep 0.02; done
        if [ $FANSTORE_RANK = 0 ]; then
            {stat} "$FANSTORE_MOUNT" >{here}/table
            {stat} "$FANSTORE_MOUNT" --json >{here}/stats.json
            # Again if the other node has not answered within its second: the machine may be busy.
            until $nodes >{here}/nodes && ! grep silent {here}/nodes; do :; done
            until $nodes --json >{here}/nodes.json && ! grep silent {here}/nodes.json; do :; done
            timeout --signal=INT 20 {stat} "$FANSTORE_MOUNT" --nodes --watch 0.2 | head -n 12 >{here}/watched || true
        fi
    """
    mount = ["mount", prepared, tmp_path / "m{rank}", "--local", tmp_path / "ssd{rank}", "--stage-first"]
    mount += ["--peer-timeout", "60"]
    result = run_fanstore(*map(str, mount), "--", "sh", "-c", script, prefix=mpirun(2))
    assert result.returncode == 0, result.stderr
    (before,) = (line for line in result.stderr.splitlines() if "is mounted on" in line)
    (after,) = (line for line in result.stderr.splitlines() if "fanstore-mount: read " in line)
    assert "2 nodes, 4 of 4 partitions on local disks" in before, "rank 0 says it for all"
    assert re.search(r"read 16 files, 781 KiB: 50\.0 % from local disks, .*50\.0 % from other nodes$", after), after
    table = (tmp_path / "table").read_text()
    assert table.startswith(f"{prepared} on {tmp_path}/m0\n")
    assert "this node, rank 0:\nup " in table and "operation" in table
    only_nodes = (tmp_path / "nodes").read_text().splitlines()
    first, second, total = (line.split() for line in only_nodes[-3:])
    assert (first[0], second[0], total[:3]) == ("0", "1", ["all", "2", "up"])
    assert "operation" not in "\n".join(only_nodes)
    assert json.loads((tmp_path / "stats.json").read_text())["version"] == 1
    nodes = json.loads((tmp_path / "nodes.json").read_text())["nodes"]
    assert [node["rank"] for node in nodes] == [0, 1]
    for node in nodes:
        assert node["state"] == "up"
        assert node["local_bytes"] > 0 and node["fetched_bytes"] > 0 and node["served_bytes"] > 0
        assert node["reads"]["remote"] > 0
    watched = (tmp_path / "watched").read_text()
    assert "MB/s, average" in watched and "MB/s now" in watched
