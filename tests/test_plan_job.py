"""fanstore-plan job as a user calls it: text, JSON, the page in a real browser, and what cannot be planned."""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser_in
from commands import run_fanstore, run_inside
from test_report_browser import COLLISIONS, CONTRAST, CONTRAST_LARGE, OVERFLOWS, TEXTS, contrast, over

MEASURED = """
version = 1
measured = "2026-11-18"
hosts = ["n0", "n1"]
[shared]
small_bytes = 20_000
small = [{ readers = 1, files_per_s = 20 }, { readers = 8, files_per_s = 40 }]
large = [{ readers = 1, mb_per_s = 400 }]
[local]
free_mb = 1000
read = [{ threads = 1, mb_per_s = 500 }]
write = [{ threads = 1, mb_per_s = 300 }]
[memory]
free_mb = 0
mb_per_s = 8000
cores = 8
[network]
mb_per_s = 110
request_s = 2e-4
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("job") / "source"
    for folder in ("a", "b"):
        (source / folder).mkdir(parents=True)
        for number in range(150):
            (source / folder / f"{number}.bin").write_bytes(b"\0" * 20_000)
    return source


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    out = source.with_name("d.fan")
    assert run_inside("prep", "--quiet", "--partitions", "4", source, out).returncode == 0
    return out


@pytest.fixture(scope="module")
def measured(source: Path) -> Path:
    path = source.with_name("m.toml")
    path.write_text(MEASURED)
    return path


def test_installed_command(prepared: Path, measured: Path) -> None:
    result = run_fanstore("plan", "job", prepared, "--nodes", "4", "--measured", measured)
    assert (result.returncode, result.stderr) == (0, "")
    assert "300 files, 5.72 MiB; 4 nodes with 1 GPU, computing takes no time; 10 epochs" in result.stdout
    assert "measured 2026-11-18 on n0, n1" in result.stdout
    assert "Use FanStore for this job." in result.stdout
    assert "Without it, the job is limited by the shared file system." in result.stdout
    assert re.search(r"^1 node  .*\n2 nodes .*\n4 nodes ", result.stdout, re.MULTILINE)
    assert "measured with up to 8 readers, and this job has 16" in result.stdout


def test_json(prepared: Path, measured: Path) -> None:
    result = run_inside("plan", "job", prepared, "--nodes", "2", "--epochs", "3", "--measured", measured, "--json")
    found = json.loads(result.stdout)
    assert found["dataset"]["files"] == 300 and found["job"]["nodes"] == 2
    assert list(found["nodes"]) == ["1", "2"]
    assert list(found["nodes"]["2"]) == ["direct", "copy", "fanstore", "ordered"]
    direct = found["nodes"]["2"]["direct"]
    # 8 readers get 40 files/s; of 300 samples the last incomplete batch of 64 is dropped.
    assert direct["epochs_s"] == pytest.approx([256 / 40] * 3, rel=1e-3)
    assert direct["shared_bytes"] == pytest.approx(3 * 256 * 20_000, rel=1e-6)
    assert (found["use_fanstore"], found["pays_from_epoch"]) == (True, 1)
    assert found["weakest_link"] in found["nodes"]["2"]["fanstore"]["busy_s"]


def test_shuffles(prepared: Path, measured: Path) -> None:
    words: list[str | Path] = [prepared, "--nodes", "2", "--batch", "5", "--measured", measured]
    found = json.loads(run_inside("plan", "job", *words, "--json").stdout)["shuffles"]
    assert found["global"]["remote_share"] == 0.5 and found["local"]["fanstore"]["network_bytes_per_epoch"] == 0
    assert found["partial, Q = 0.3"]["remote_share"] == pytest.approx(0.15, abs=0.04)
    assert found["partial, Q = 0.3"]["held_bytes"] == pytest.approx(1.3 * 150 * 20_000, rel=0.01)
    text = run_inside("plan", "job", *words).stdout
    assert re.search(r"^a later epoch, if ranks shuffle +over network", text, re.MULTILINE)
    assert re.search(r"^locality-aware .*data loader workers$", text, re.MULTILINE)
    assert json.loads(run_inside("plan", "job", prepared, "--json").stdout)["shuffles"] == {}
    assert "if ranks shuffle" not in run_inside("plan", "job", prepared).stdout


def test_what_a_node_needs(prepared: Path, measured: Path) -> None:
    words: list[str | Path] = [
        prepared,
        "--measured",
        measured,
        "--nodes",
        "2",
        "--samples-per-second",
        "1e5",
        "--batch",
        "1",
    ]
    result = run_inside("plan", "job", *words)
    assert re.search(r"a node needs: [\d,]+ SSDs?, [\d,]+ network interfaces?, [\d,]+ data loader work", result.stdout)
    assert json.loads(run_inside("plan", "job", *words, "--json").stdout)["needs_on_each_node"]["SSDs"] >= 1


def test_do_not_use_it_here(prepared: Path, measured: Path) -> None:
    result = run_inside("plan", "job", prepared, "--measured", measured, "--samples-per-second", "1", "--json")
    found = json.loads(result.stdout)
    assert (found["use_fanstore"], found["pays_from_epoch"], found["weakest_link"]) == (False, None, "computing")
    text = run_inside("plan", "job", prepared, "--measured", measured, "--samples-per-second", "1").stdout
    assert "Do not use FanStore for this job.\n  The shared file system and the memory of the nodes keep up" in text


def test_what_is_not_prepared_yet(source: Path, tmp_path: Path) -> None:
    """A directory and a tar file of it: about the same plan, and nothing is changed."""
    archive = tmp_path / "source.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(source, "source")
    seconds = []
    for path in (source, archive):
        result = run_inside("plan", "job", path, "--json")
        found = json.loads(result.stdout)
        assert found["measured"] is None and found["dataset"]["files"] == 300
        seconds.append(found["nodes"]["1"]["fanstore"]["seconds"])
    assert seconds[0] == pytest.approx(seconds[1])
    assert len(list(source.rglob("*"))) == 302
    assert "NOT measured: figures of a usual cluster" in run_inside("plan", "job", source).stdout


def test_compressed(source: Path, tmp_path: Path, measured: Path) -> None:
    assert run_inside("prep", "--quiet", "--codec", "lz4", source, tmp_path / "z.fan").returncode == 0
    refused([str(tmp_path / "z.fan"), "--measured", str(measured)], "decompression was not measured", 2)
    found = json.loads(run_inside("plan", "job", tmp_path / "z.fan", "--json").stdout)
    assert found["dataset"]["compressed"] and found["dataset"]["stored_mb"] < found["dataset"]["content_mb"]
    assert "decompression" in found["nodes"]["1"]["fanstore"]["busy_s"]


@pytest.mark.parametrize(
    ("words", "sentence", "code"),
    [
        ("nothing", "cannot read the source 'nothing': No such file or directory", 1),
        ("PREPARED --nodes 0", "'--nodes' is 0; it must be 1 or more", 2),
        ("PREPARED --samples-per-second 0", "'--samples-per-second' is 0; it must be above 0", 2),
        ("PREPARED --samples-per-second nan", "'--samples-per-second' is nan; it must be above 0", 2),
        ("PREPARED --batch 301", "an epoch has 300 samples, and one batch of all GPUs 301: nothing would be read", 2),
        ("PREPARED --room much", "'much' is not a size", 2),
        ("PREPARED --room 2GB --measured MEASURED", "--room 2GB is more than the 1,000 MB that were free", 2),
        ("PREPARED --measured nothing", "cannot read 'nothing': No such file or directory", 2),
        ("PREPARED --html PREPARED/x.html", "lies inside the prepared dataset", 2),
        ("SOURCE --html SOURCE/x.html", "it would become a part of the dataset", 2),
        ("PREPARED --html - --json", "--json and --html - both write to standard output", 2),
        ("PREPARED --node 4", "there is no option --node; did you mean --nodes?", 2),
    ],
)
def test_what_cannot_be(words: str, sentence: str, code: int, prepared: Path, source: Path, measured: Path) -> None:
    paths = {"PREPARED": str(prepared), "SOURCE": str(source), "MEASURED": str(measured)}
    refused([re.sub("|".join(paths), lambda match: paths[match[0]], word) for word in words.split()], sentence, code)


def refused(words: list[str], sentence: str, code: int) -> None:
    result = run_inside("plan", "job", *words)
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.startswith("fanstore-plan: error: ") and sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_empty_dataset(tmp_path: Path) -> None:
    refused([str(tmp_path)], "the dataset has no bytes in any file: there is nothing to plan for", 2)


# --- pages ---


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_in(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


SECTIONS = ["glance", "ways", "course", "nodes", "room", "shuffles", "links", "about"]


@pytest.mark.parametrize(
    "options",
    ["--nodes 8 --batch 1 --samples-per-second 300", "--nodes 1 --stage-first", "--nodes 6 --batch 2 --room 1MB", ""],
)
def test_page(options: str, prepared: Path, tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "plan.html"
    assert run_inside("plan", "job", prepared, "--html", page, *options.split()).returncode == 0
    look_at_page(page, browser)
    assert browser.evaluate("[...document.querySelectorAll('section')].map(s => s.id)") == SECTIONS


def test_page_of_a_simulation(tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "simulation.html"
    result = run_inside("plan", "simulate", "--scenario", "S1", "--policy", "naive", "lbann-preload", "--html", page)
    assert result.returncode == 0
    look_at_page(page, browser)


def look_at_page(page: Path, browser: Browser) -> None:
    """It needs nothing else, fits wide and narrow windows, and can be read in light and in dark."""
    for dark in (False, True):
        for width in (1280, 390):
            browser.open(page, width, dark=dark)
            assert browser.complaints() == []
            assert browser.requests() == [page.resolve().as_uri()]
            assert browser.evaluate(OVERFLOWS) == []
            assert browser.evaluate(COLLISIONS) == []
            for words, colour, grounds, pixels, weight in browser.evaluate(TEXTS):
                large = pixels >= 24 or (pixels >= 18.66 and weight >= 700)
                wanted = CONTRAST_LARGE if large else CONTRAST
                assert contrast(over([colour, *grounds]), over(grounds)) >= wanted, (words, dark)
