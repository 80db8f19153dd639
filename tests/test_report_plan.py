"""Plan and reality side by side: what is read of a plan, what the section says, and a whole job with one."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import browser_in
from commands import run_fanstore, run_inside
from conftest import MakePrepared
from mounting import Mount, command, needs_fuse
from report_data import SECTIONS, make_job
from test_plan_job import look_at_page

from fanstore.errors import UsageError
from fanstore.report.markup import share
from fanstore.report.page import report_page
from fanstore.report.planned import read_plan

pytest_plugins = ["mounting"]

FILES = 1_281_167


def way(seconds: float, **changes: Any) -> dict[str, Any]:
    figures = {"start_s": 2.0, "epochs_s": [seconds / 3] * 3, "room_bytes": 74e9}
    return {"seconds": seconds, **figures, "shared_bytes": 148e9, "network_bytes": 200e9, **changes}


def document(**changes: Any) -> dict[str, Any]:
    ways = {"direct": way(900.0), "copy": {"impossible": "no room"}, "fanstore": way(500.0), "ordered": way(400.0)}
    course = {"ends_s": [50.0, 100.0], **{name: [1e8, 2e8] for name in ("local", "network", "shared", "staging")}}
    return {
        "version": 1,
        "dataset": {"files": FILES},
        "job": {"nodes": 4},
        "nodes": {"1": ways, "2": ways, "4": ways},
        "first_epoch": {"fanstore": course, "ordered": course},
        **changes,
    }


def words_of(page: Path) -> str:
    """What stands in the section; it is the second one behind the head."""
    parts = re.split(r'<section id="(\w+)">', page.read_text().partition("<body>")[2])
    assert parts[1::2] == [*SECTIONS[:2], "plan", *SECTIONS[2:]]
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", parts[parts.index("plan") + 1]).split()))


def page_of(tmp_path: Path, size: int, **changes: Any) -> str:
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    plan.write_text(json.dumps(document(**changes)))
    page.write_text(report_page(make_job(size), read_plan(plan)), errors="replace")
    return words_of(page)


def test_side_by_side(tmp_path: Path) -> None:
    words = page_of(tmp_path, 4)
    assert words.startswith("As planned?")
    assert "the whole job 8 min 20 s 6 min 40 s 10 min 00 s 120 %" in words
    job = make_job(4)
    network = sum(sum(node["fetched"].values()) for node in job["nodes"])
    shared = sum(node["sources"]["shared"]["fetched_bytes"] + node["staging"]["done_bytes"] for node in job["nodes"])
    assert f" {share(network, 200e9)} " in words and f" {share(shared, 148e9)} " in words
    assert "The first epoch" in words and "The plan is for 3 epochs" in words


def test_in_a_browser(tmp_path: Path) -> None:
    page_of(tmp_path, 4)
    page = tmp_path / "page.html"
    with browser_in(tmp_path) as browser:
        look_at_page(page, browser)
        browser.open(page, 1000)
        fills = browser.evaluate("[...document.querySelectorAll('#plan .area')].map(e => getComputedStyle(e).fill)")
    assert len(fills) > 12 and "rgb(0, 0, 0)" not in fills


def test_a_number_of_nodes_that_was_looked_at_beside(tmp_path: Path) -> None:
    """The plan has it, but not its first epoch."""
    words = page_of(tmp_path, 2)
    assert "120 %" in words and "The first epoch" not in words


def test_plans_of_something_else(tmp_path: Path) -> None:
    assert "The plan is for 1, 2, 4 nodes, and this job has 3." in page_of(tmp_path, 3)
    words = page_of(tmp_path, 4, dataset={"files": 5})
    assert "The plan is for another dataset: that has 5 files, and this one 1,281,167." in words


def test_without_a_plan(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(report_page(make_job(2)), errors="replace")
    assert 'id="plan"' not in page.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps(document(version=2)),
        json.dumps(document(nodes={"x": {}})),
        json.dumps(document(nodes={"4": {"fanstore": {}}})),
        json.dumps(document(nodes={"4": {"fanstore": way(float("nan")), "ordered": way(1.0)}})),
        json.dumps(document(nodes={"4": {"fanstore": way(-1.0), "ordered": way(1.0)}})),
        json.dumps(document(first_epoch={"fanstore": {"ends_s": [1.0]}})),
        json.dumps(document(first_epoch={"fanstore": {key: [1.0] for key in ("ends_s", "local")}})),
    ],
)
def test_what_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="is no plan that this version of FanStore knows; fanstore-plan job"):
        read_plan(path)


@pytest.fixture
def prepared(tmp_path: Path, make_prepared: MakePrepared) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(6):
        (source / f"file-{number}").write_bytes(bytes(60_000))
    return make_prepared(source, partitions=2, quiet=True)


@needs_fuse
def test_a_whole_job(tmp_path: Path, prepared: Path, mount: Mount) -> None:
    plan, page, live = tmp_path / "plan.json", tmp_path / "report.html", tmp_path / "live.html"
    planned = run_inside("plan", "job", prepared, "--epochs", "1", "--batch", "1", "--json")
    assert planned.returncode == 0
    plan.write_text(planned.stdout)
    mounted = mount(prepared, "--report", str(page), "--plan", str(plan), local=tmp_path / "ssd")
    assert len((mounted.path / "file-1").read_bytes()) == 60_000
    shown = command("stat", mounted.path, "--html", live, "--plan", plan)
    assert (shown.returncode, shown.stdout) == (0, ""), shown.stderr
    alone = command("stat", mounted.path, "--plan", plan)
    assert alone.returncode == 2 and "--plan is for the page of --html" in alone.stderr
    mounted.stop()
    for words in (words_of(live), words_of(page)):
        assert "The plan is for 1 epoch" in words and "room on a node" in words


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--report", "r.html", "--plan", "none.json"), "cannot read the plan "),
        (("--report", "r.html", "--plan", "bad.json"), "is no plan that this version of FanStore knows"),
        (("--plan", "bad.json"), "--plan is for --report, which is not given"),
    ],
)
def test_refused_at_the_start(options: tuple[str, ...], sentence: str, tmp_path: Path, prepared: Path) -> None:
    (tmp_path / "bad.json").write_text("no")
    words = [str(tmp_path / word) if "." in word else word for word in options]
    result = run_fanstore("mount", prepared, tmp_path / "m", *words)
    assert result.returncode == 2 and sentence in result.stderr and result.stderr.count("\n") == 1
