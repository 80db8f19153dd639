"""The page of a job from data: what it says, with jobs of all sizes and lengths, and what hostile names cannot do."""

import html.parser
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_data import HOSTILE, SECTIONS, SOURCES, make_idle_node, make_job

from fanstore.report import figures, markup
from fanstore.report.ending import ending
from fanstore.report.files import replace_file
from fanstore.report.findings import findings
from fanstore.report.page import report_page


class Page(html.parser.HTMLParser):
    """Elements and text as a browser takes them apart.

    Attributes:
        tags: names of all elements; attributes: all names and values; words: the text, without style sheets.
        sections: text by id of the section.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.sections: dict[str, str] = {}
        self._open: list[str] = []
        self._section = "head"
        self.feed(page)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "section":
            self._section = str(dict(attrs)["id"])
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.sections[self._section] = self.sections.get(self._section, "") + data + " "


def check(data: dict[str, Any]) -> Page:
    """The page of this data, sound in itself: all sections, nothing from outside, nothing that runs, no odd numbers."""
    text = report_page(data)
    text.encode("utf-8", "backslashreplace").decode()
    page = Page(text)
    assert [name for key, name in page.attributes if key == "id"] == SECTIONS
    assert not {"script", "link", "img", "iframe", "object", "base", "form", "a"} & set(page.tags)
    assert not [key for key, _ in page.attributes if key.startswith("on") or key in ("href", "src", "action")]
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    numbers = " ".join(
        str(value) for key, value in page.attributes if key in ("d", "x", "y", "width", "height", "style")
    )
    assert not re.search(r"nan|inf|e[+-]\d", numbers), "coordinates are plain numbers"
    for section in ("throughput", "order", "traffic", "latency", "memory", "events", "nodes"):
        assert "Bad" in page.sections[section] or "nothing travels" in page.sections[section]
    return page


@pytest.mark.parametrize("size", [1, 2, 4, 64, 300])
def test_jobs_of_all_sizes(size: int) -> None:
    data = make_job(size)
    page = check(data)
    assert f" nodes {size} " in page.sections["head"]
    assert "/shared/datasets/imagenet.fan" in page.sections["head"]
    assert "10 min 00 s" in page.sections["head"] and "FanStore 0.1.0, native engine" in page.sections["head"]
    read = sum(figures.by_source(data["nodes"], "bytes").values())
    assert markup.size(read) in page.sections["glance"]
    assert "page cache" in page.sections["throughput"] and "page cache" in page.sections["about"]
    if size == 1:
        assert "nothing travels" in page.sections["traffic"]
    elif size == 2:
        assert "No node has fetched anything" in page.sections["traffic"], "both have everything"
    else:
        assert markup.size(max(figures.flows(data["nodes"], 1))[0]) in page.sections["traffic"]
    assert "node0101" in page.sections["nodes"]
    assert "staging ended: 8 of 8 partitions" in page.sections["events"]


@pytest.mark.parametrize("duration_s", [0.05, 0.9, 7, 59, 3000, 90_000, 6 * 86_400, 400 * 86_400])
def test_jobs_of_all_lengths(duration_s: float) -> None:
    page = check(make_job(2, duration_s, samples=max(1, min(200, int(duration_s * 4)))))
    days = re.search(r" \d+ d ", page.sections["throughput"])
    assert (days is not None) == (duration_s > 86_400)


def test_orders_of_nodes() -> None:
    """Nodes that know the same are one row; those without an order, and of older versions, are none."""
    data = make_job(4)
    data["nodes"][1]["order"] = None
    del data["nodes"][2]["order"]
    data["nodes"][3]["order"].update(source="repeated", sampler=None, seed=None)
    page = check(data)
    first, last = figures.orders(data["nodes"])
    assert (first.ranks, first.words) == ([0], "hooked: DistributedSampler, seed 7")
    assert (last.ranks, last.words, last.late, last.waited_s) == ([3], "repeated", 12, 1.5)
    assert "hooked: DistributedSampler, seed 7" in page.sections["order"]
    for node in data["nodes"]:
        node["order"] = None
    assert "--order off" in check(data).sections["order"]
    together = figures.orders(make_job(3)["nodes"])
    assert [each.ranks for each in together] == [[0, 1, 2]] and together[0].late == 36


def test_a_job_that_has_read_nothing() -> None:
    page = check(make_job(1, nodes=[make_idle_node()]))
    assert "No program has read anything" in page.sections["glance"]
    assert "No program has read anything" in page.sections["throughput"]
    assert "None so far" in page.sections["latency"]


def test_nodes_that_have_told_nothing_or_a_part() -> None:
    data = make_job(4, ended=False, code=None)
    data["nodes"][1] = {"rank": 1, "host": "node0102", "state": "silent"}
    for key in ("samples", "events", "fetched"):
        del data["nodes"][2][key]
    data["nodes"][3]["state"] = "lost"
    page = check(data)
    assert "running" in page.sections["head"] and "4 (1 lost, 1 silent)" in page.sections["head"]
    assert "Rank 3 died" in page.sections["glance"] and "Rank 1 did not answer" in page.sections["glance"]
    assert "has told nothing" in page.sections["nodes"]
    assert "Missing in all figures: rank 1" in page.sections["about"]
    nobody = make_job(2, nodes=[{"rank": rank, "host": "x", "state": "silent"} for rank in range(2)])
    assert "ranks 0, 1" in check(nobody).sections["about"]


def test_hostile_names_stay_text() -> None:
    data = make_job(5)
    data["config"] |= {"prepared": f"/d/{HOSTILE}", "local": HOSTILE, "output": HOSTILE, "fanstore": HOSTILE}
    data["nodes"][1]["outputs"]["trouble"] = HOSTILE
    for node in data["nodes"]:
        node["host"] = HOSTILE
        node["events"].append([2.0, "error", HOSTILE, f"cannot read '{HOSTILE}'"])
    page = check(data)
    for section in ("head", "traffic", "events", "nodes", "outputs"):
        assert '<script>alert("x")</script>' in page.sections[section], section
    text = report_page(data)
    assert "\u202e" not in text and "\x1b" not in text and "\udcff" not in text, "shown as escapes"


def test_copies_that_were_made_again() -> None:
    data = make_job(4)
    done = {"done_partitions": 2, "done_bytes": 5 << 30, "missing_copies": 0, "unplaced_partitions": 0}
    data["nodes"][0]["copies"] = data["nodes"][1]["copies"] = done
    assert ("good", "4 copies of partitions were made again on other nodes after a loss (10 GiB).") in findings(data)
    data["nodes"][2]["copies"] = {**done, "missing_copies": 1}
    assert ("plain", "1 copy of partitions of lost nodes had still to be made again.") in findings(data)
    data["nodes"][2]["copies"] = {**done, "unplaced_partitions": 3}
    assert any(
        level == "warning" and "3 partitions of lost nodes had no room" in text for level, text in findings(data)
    )


def test_copies_that_earlier_jobs_have_kept() -> None:
    data = make_job(2)
    for node in data["nodes"]:
        node["staging"] |= {"reused_partitions": 3, "reused_bytes": 3 << 30}
    sentence = "6 copies of partitions were there already, kept by earlier jobs (6 GiB)."
    assert ("plain", sentence) in findings(data)
    assert any(
        "All 16 copies of partitions were made on local disks; with those of" in text for _, text in findings(data)
    )


def test_what_is_wrong_is_said_first() -> None:
    data = make_job(4, code=None)
    assert "error" in {level for level, _ in findings(data)}
    data = make_job(4, code=7)
    data["nodes"][0]["errors"] = {"damaged_files": 2, "failed_reads": 5, "fallbacks": 3}
    data["nodes"][1]["staging"]["skipped_partitions"] = 1
    data["nodes"][2]["served_bytes"] *= 9
    data["nodes"][3]["uptime_s"] += 1  # the one that ended last knows best
    data["nodes"][3]["outputs"] |= {"pending": 2, "trouble": "copying: No space left on device"}
    said = list(findings(data))
    text = "\n".join(sentence for _, sentence in said)
    for words in (
        "exit code 7",
        "5 reads failed, in 2 damaged files",
        "3 times a damaged or unreadable copy",
        "1 copy of partitions could not be made",
        "Rank 2 gave",
        "2 outputs could not be saved",
        "No space left on device",
    ):
        assert words in text
    assert "good" not in {level for level, _ in said}
    healthy = [level for level, _ in findings(make_job(4))]
    assert healthy == ["good"] * 3


# --- figures ---


def test_the_course_of_time_adds_up_to_the_sums() -> None:
    """Also when nodes were asked at different times, with different intervals."""
    first, second = make_job(1, 100, samples=37)["nodes"][0], make_job(1, 90.5, samples=199, seed=2)["nodes"][0]
    course = figures.course([first, {**second, "rank": 1}])
    lengths = [end - start for start, end in zip([0, *course.ends_s], course.ends_s, strict=False)]
    for name in SOURCES:
        area = sum(rate * length for rate, length in zip(course.rates[name], lengths, strict=True))
        assert math.isclose(area, sum(first["samples"][name]) + sum(second["samples"][name]), rel_tol=1e-9)
    highest = max(max(node["samples"]["memory_bytes"]) for node in (first, second))
    assert max(course.memory_most) == highest
    assert max(course.pending_bytes) == max(max(node["samples"]["pending_bytes"]) for node in (first, second))
    assert all(mean <= most for mean, most in zip(course.memory_mean, course.memory_most, strict=True))


@given(st.lists(st.tuples(st.floats(0.001, 1e6), st.integers(0, 10**15)), min_size=1, max_size=20))
def test_any_samples_make_a_course(steps: list[tuple[float, int]]) -> None:
    node = make_idle_node()
    times, total = [0.0], 0
    for step_s, count in steps:
        times.append(times[-1] + step_s)
        total += count
    columns = {name: [0] * len(times) for name in node["samples"]}
    course = figures.course(
        [{**node, "samples": {**columns, "at_s": times, "local": [0, *(count for _, count in steps)]}}]
    )
    assert math.isclose(sum(course.rates["local"]) * course.ends_s[0], total, rel_tol=1e-6, abs_tol=1e-6)


def test_many_nodes_are_taken_together_in_the_matrix() -> None:
    nodes = make_job(130, samples=2)["nodes"]
    matrix = figures.matrix(nodes)
    assert len(matrix.labels) == 44 and matrix.labels[0] == "0-2" and matrix.labels[-1] == "129-129"
    whole = sum(sum(node["fetched"].values()) for node in nodes)
    assert sum(map(sum, matrix.cells)) == whole
    assert figures.matrix(nodes[:64]).cells[3][5] == nodes[3]["fetched"]["5"]


@given(st.floats(1e-3, 1e15))
def test_ticks_reach_the_highest_value_and_are_few(most: float) -> None:
    for ticks in (markup.decimal_ticks(most), markup.binary_ticks(most)):
        assert ticks[0] == 0 and ticks[-1] >= most * 0.998 and 2 <= len(ticks) <= 6


@given(st.floats(0.05, 1e8))
def test_times_on_the_axis_are_few_and_inside(end_s: float) -> None:
    ticks = markup.time_ticks(end_s)
    assert 1 <= len(ticks) <= 7 and all(0 <= tick <= end_s * 1.001 for tick in ticks)
    labels = [markup.time_label(tick, ticks[1]) for tick in ticks if len(ticks) > 1]
    assert len(set(labels)) == len(labels), labels


# --- files ---


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    replace_file(target, "first \udcff")
    assert target.read_text() == "first \\udcff"
    before = target.stat().st_ino
    replace_file(target, "second", 0o604)
    assert target.read_text() == "second" and target.stat().st_ino != before
    assert target.stat().st_mode & 0o777 == 0o604
    with pytest.raises(IsADirectoryError):
        (tmp_path / "d").mkdir()
        replace_file(tmp_path / "d", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "page.html"], "nothing is left of the attempt"


def test_the_line_at_the_end() -> None:
    """Of all nodes, and what is missing in it."""
    data = make_job(4)
    for node in data["nodes"]:
        node["outputs"] = {
            "files": 3,
            "directory": "/shared/run42",
            "pending": 0,
            "saved": node["rank"],
            "trouble": None,
        }
        node["order"]["files"], node["order"]["lost"] = 1000, 5
        node["intercepted"] = {"bytes": 0}
    line = ending(data, Path("/shared/job.html"))
    found = re.fullmatch(
        r"read 4,020 files, \S+ GiB: (\S+) % from local disks, (\S+) % from memory, (\S+) % from other nodes, "
        r"(\S+) % from the shared file system; 6 outputs saved to /shared/run42; report: /shared/job\.html",
        line,
    )
    assert found is not None and abs(sum(map(float, found.groups())) - 100) < 0.3, line
    idle = make_idle_node() | {"outputs": None}
    silent = {"rank": 1, "host": "node2", "state": "silent"}
    nothing = ending({**data, "nodes": [idle, silent]}, None)
    assert nothing == "read nothing; without what 1 node did, which told nothing"
    data["nodes"][0]["errors"]["failed_reads"] = 2
    data["nodes"][0]["outputs"] |= {"pending": 1}
    data["nodes"][1]["intercepted"] = {"bytes": 1 << 60}
    bad = ending(data, None)
    assert "100 % from files that programs read themselves" in bad
    assert bad.endswith("; 6 outputs saved to /shared/run42, 1 NOT saved; 2 reads FAILED")


def test_silence_is_not_averaged_into_the_speed() -> None:
    """Two epochs of three come from the page cache, but for a file now and then."""
    data = make_job(2, 600.0)
    for node in data["nodes"]:
        samples = node["samples"]
        times = samples["at_s"]
        for name in SOURCES:
            samples[name] = [0] * len(times)
        steps = itertools.pairwise(times)
        samples["local"][1:] = [int((end - start) * (50e6 if end <= 200 else 1e3)) for start, end in steps]
        read = sum(samples["local"])
        for name in SOURCES:
            node["sources"][name]["bytes"] = read if name == "local" else 0
        samples["waited_ms"] = [0, 250, 250] + [0] * (len(times) - 3)
        node["metadata"] = {"names": 1000, "attributes": 200, "listings": 30, "opens": 4}
    glance = " ".join(check(data).sections["glance"].split())
    found = re.search(r"(\d+) MB/s on average, in (\d+) min (\d+) s with reads", glance)
    assert found is not None, glance
    speed, minutes, seconds = map(int, found.groups())
    assert abs(60 * minutes + seconds - 200) <= 3 and 98 <= speed <= 101
    assert "1.0 s waited by all readers together" in glance
    assert "2,468 metadata operations spared the shared file system" in glance
    assert figures.reading(figures.course([])) == (0.0, 0.0)


def test_paths_of_ranks_that_differ() -> None:
    data = make_job(3)
    assert "mounted at" not in check(data).sections["nodes"]
    for node in data["nodes"]:
        node |= {"mountpoint": "/tmp/m", "local": "/ssd"}
    assert "mounted at" not in check(data).sections["nodes"]
    data["nodes"][2] |= {"mountpoint": "/tmp/m2", "local": "/ssd2"}
    page = check(data).sections
    assert "/tmp/m2, /ssd2" in page["nodes"] and "in --local of each node" in page["head"]
