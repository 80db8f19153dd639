"""Options of fanstore-prep: how it cuts, what it compresses, what it refuses to write over."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import numpy as np
import pytest
from commands import BIN, assert_one_error, run_fanstore, run_inside
from materialise import Prepared, materialise
from oddities import compare_trees, compressible, incompressible
from PIL import Image

KIB, MIB = 1 << 10, 1 << 20


def make_files(root: Path, sizes: list[int], *, text: bool = False) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number, size in enumerate(sizes):
        content = compressible(size, number) if text else incompressible(size, number)
        (root / f"file-{number:04d}").write_bytes(content)
    return root


def prepare(source: Path, out: Path, *options: str) -> Prepared:
    result = run_inside("prep", source, out, *options)
    assert result.returncode == 0, result.stderr
    return Prepared(out)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_exactly_n_partitions_and_balanced(count: int, tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [20 * KIB + 997 * (n % 40) for n in range(200)])
    prepared = prepare(source, tmp_path / "out.fan", "--partitions", str(count))
    lengths = [len(part) for part in prepared.parts]
    assert len(lengths) == count
    # No cut is further from the ideal than one file, and the directory's member is in the last.
    assert max(lengths) - min(lengths) < 2 * (60 * KIB + 1024), lengths
    assert compare_trees(source, materialise(prepared, tmp_path / "back")) == []


def test_one_large_file_among_small_ones(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [5 * MIB, *[10 * KIB] * 100])
    prepared = prepare(source, tmp_path / "out.fan", "--partitions", "3")
    lengths = sorted(len(part) for part in prepared.parts)
    assert len(lengths) == 3
    assert lengths[2] < 5 * MIB + 100 * KIB, "the large file stays alone"
    assert lengths[1] - lengths[0] < 100 * KIB


@pytest.mark.parametrize("files", [0, 1, 3])
def test_more_partitions_than_files(files: int, tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100] * files)
    prepared = prepare(source, tmp_path / "out.fan", "--partitions", "5")
    assert len(prepared.parts) == 5
    assert compare_trees(source, materialise(prepared, tmp_path / "back")) == []
    for part in (tmp_path / "out.fan").glob("part-*.tar"):
        subprocess.run(["tar", "-tf", part], check=True, timeout=60, capture_output=True)


def test_partition_size(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100 * KIB] * 100)
    prepared = prepare(source, tmp_path / "out.fan", "--partition-size", "2MiB")
    lengths = [len(part) for part in prepared.parts]
    assert max(lengths) <= 2 * MIB + 110 * KIB
    assert 5 <= len(lengths) <= 7
    assert max(lengths) - min(lengths) < 250 * KIB, "balanced, not one small rest"


def test_the_default_is_one_partition_per_gib(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100 * KIB] * 20)
    assert len(prepare(source, tmp_path / "out.fan").parts) == 1


def test_everywhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_files(source / "train", [50 * KIB] * 60)
    make_files(source / "val", [50 * KIB] * 20)
    make_files(source / "val" / "deeper", [5 * KIB] * 3)
    (source / "labels.csv").write_bytes(b"label\n" * 100)
    options = ("--partition-size", "1MiB", "--everywhere", "val", "--everywhere", "*.csv")
    prepared = prepare(source, tmp_path / "out.fan", *options)
    flags = [part["everywhere"] for part in prepared.manifest["partitions"]]
    assert any(flags) and not all(flags)
    column = prepared.index.column
    for entry in range(prepared.index.n):
        path = prepared.index.path(entry)
        if column["mode"][entry] >> 12 == 8:
            expected = path.startswith(b"val/") or path == b"labels.csv"
            assert flags[column["part"][entry]] == expected, path
    assert compare_trees(source, materialise(prepared, tmp_path / "back")) == []


def test_everywhere_glob_and_partitions(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_files(source / "train", [50 * KIB] * 60)
    make_files(source / "val", [50 * KIB] * 20)
    prepared = prepare(source, tmp_path / "out.fan", "--partitions", "4", "--everywhere", "val/*")
    flags = [part["everywhere"] for part in prepared.manifest["partitions"]]
    assert sorted(flags) == [False, False, False, True]
    result = run_inside("prep", source, tmp_path / "one.fan", "--partitions", "1", "--everywhere", "val/*")
    assert "--partitions" in assert_one_error(result, "prep", 2)
    prepared = prepare(source, tmp_path / "none.fan", "--everywhere", "nothing-like-this")
    assert not any(part["everywhere"] for part in prepared.manifest["partitions"])


def test_hard_links_stay_with_their_file(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [300 * KIB] * 12)
    (source / "links").mkdir()
    for number in range(12):
        os.link(source / f"file-{number:04d}", source / "links" / f"link-{number}")
    prepared = prepare(source, tmp_path / "out.fan", "--partitions", "6")
    for part in sorted((tmp_path / "out.fan").glob("part-*.tar")):
        (tmp_path / "alone").mkdir()
        # Each partition can be unpacked alone: a link never leads to another partition.
        subprocess.run(["tar", "-xpf", part, "-C", tmp_path / "alone"], check=True, timeout=60)
        subprocess.run(["rm", "-rf", tmp_path / "alone"], check=True, timeout=60)
    assert len(prepared.parts) == 6


def jpeg(seed: int) -> bytes:
    """A photograph, as far as a codec can tell: smooth shapes and noise, compressed by JPEG."""
    numbers = np.random.default_rng(seed)
    small = numbers.integers(0, 255, (12, 16, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((320, 240), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(image).astype(np.int16) + numbers.normal(0, 8, (240, 320, 3)), 0, 255)
    output = io.BytesIO()
    Image.fromarray(noisy.astype(np.uint8)).save(output, "JPEG", quality=85)
    return output.getvalue()


def npy(seed: int) -> bytes:
    output = io.BytesIO()
    steps = np.random.default_rng(seed).integers(-3, 4, 20_000)
    np.save(output, np.cumsum(steps).astype(np.int32))
    return output.getvalue()


def choice(source: Path, out: Path) -> tuple[str, str]:
    """What auto chose, and the sentence that it said."""
    result = run_inside("prep", source, out, "--codec", "auto")
    assert result.returncode == 0, result.stderr
    sentence = re.search(r"codec auto: (\w+), because (.*)", result.stderr)
    assert sentence is not None, result.stderr
    prepared = Prepared(out)
    assert prepared.manifest["codec"] == sentence[1]
    assert bool(prepared.compressed()) == (sentence[1] == "lz4")
    return sentence[1], sentence[2]


@pytest.mark.parametrize(
    "make, expected",
    [(jpeg, "none"), (npy, "lz4"), (lambda n: compressible(50_000, n), "lz4")],
    ids=["jpeg", "npy", "text"],
)
def test_auto_chooses_and_says_why(make: object, expected: str, tmp_path: Path) -> None:
    assert callable(make)
    (tmp_path / "source").mkdir()
    for number in range(20):
        (tmp_path / "source" / f"{number}").write_bytes(make(number))
    codec, reason = choice(tmp_path / "source", tmp_path / "out.fan")
    assert codec == expected
    assert re.search(r"\d+ ?%", reason), reason
    assert re.search(r"decompress", reason), reason


def test_auto_decides_by_bytes_not_by_files(tmp_path: Path) -> None:
    """A thousand small texts beside much noise: the noise decides."""
    make_files(tmp_path / "source" / "a", [100] * 500, text=True)
    make_files(tmp_path / "source" / "b", [400_000] * 20)
    assert choice(tmp_path / "source", tmp_path / "out.fan")[0] == "none"


@pytest.mark.parametrize("sizes", [[], [0, 0]])
def test_auto_with_nothing_to_measure(sizes: list[int], tmp_path: Path) -> None:
    make_files(tmp_path / "source", sizes)
    assert choice(tmp_path / "source", tmp_path / "out.fan")[0] == "none"


def test_lz4hc_is_smaller(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [200_000] * 10, text=True)
    sizes = [
        prepare(source, tmp_path / f"{codec}.fan", "--codec", codec).manifest["totals"]["stored_bytes"]
        for codec in ("none", "lz4", "lz4hc")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_an_existing_out_is_refused(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    out = tmp_path / "out.fan"
    prepare(source, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "--force" in assert_one_error(run_inside("prep", source, out), "prep")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["out.fan", "source"]


def test_force_replaces(tmp_path: Path) -> None:
    old, new = make_files(tmp_path / "old", [100] * 3), make_files(tmp_path / "new", [200] * 5)
    out = tmp_path / "out.fan"
    before = prepare(old, out, "--partitions", "4").parts[0]
    held = os.open(out / "part-00000.tar", os.O_RDONLY)  # a reader of the old dataset is not disturbed
    try:
        prepared = prepare(new, out, "--force")
        assert compare_trees(new, materialise(prepared, tmp_path / "back")) == []
        assert os.pread(held, len(before), 0) == before
    finally:
        os.close(held)
    assert sorted(os.listdir(tmp_path)) == ["back", "new", "old", "out.fan"]
    assert sorted(os.listdir(out)) == ["index.fsx", "manifest.json", "part-00000.tar"]


def test_force_with_nothing_to_replace(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    prepare(source, tmp_path / "out.fan", "--force")


def test_the_name_is_never_missing_while_it_is_replaced(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    out = tmp_path / "out.fan"
    prepare(source, out)
    watch = subprocess.Popen(
        ["bash", "-c", f"while [ ! -e {tmp_path}/done ]; do [ -e {out}/manifest.json ] || echo gone; done"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for _ in range(20):
            prepare(source, out, "--force")
        (tmp_path / "done").touch()
        assert watch.communicate(timeout=60)[0] == ""
    finally:
        watch.kill()
        watch.wait()


@pytest.mark.parametrize("kind", ["directory", "file", "symlink"])
def test_force_replaces_nothing_but_a_dataset(kind: str, tmp_path: Path) -> None:
    source, out = make_files(tmp_path / "source", [100]), tmp_path / "out.fan"
    if kind == "directory":
        make_files(out, [5])
    elif kind == "file":
        out.write_bytes(b"precious")
    else:
        make_files(tmp_path / "target", [5])
        out.symlink_to(tmp_path / "target")
    assert_one_error(run_inside("prep", source, out, "--force"), "prep")
    assert out.is_symlink() == (kind == "symlink")
    if kind == "file":
        assert out.read_bytes() == b"precious"
    else:
        assert (out / "file-0000").exists()


@pytest.mark.parametrize("where", ["source/out.fan", "source/sub/out.fan", "link/out.fan"])
def test_a_dataset_inside_its_source_is_refused(where: str, tmp_path: Path) -> None:
    make_files(tmp_path / "source" / "sub", [100])
    (tmp_path / "link").symlink_to("source/sub")
    result = run_inside("prep", tmp_path / "source", tmp_path / where)
    assert "inside" in assert_one_error(result, "prep", 2)


WRONG_USAGE = [
    ["--partitions", "0"], ["--partitions", "-1"], ["--partitions", "x"], ["--partition-size", "0"], ["--jobs", "-1"],
    ["--partition-size", "1KiB"], ["--partition-size", "much"], ["--codec", "zip"],
    ["--partitions", "2", "--partition-size", "2GiB"], ["--index-only"], ["--nonsense"],
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG_USAGE, ids=" ".join)
def test_wrong_usage_is_exit_code_2(options: list[str], tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    result = run_inside("prep", source, tmp_path / "out.fan", *options)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == ["source"]


def test_errors_in_paths(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    assert_one_error(run_inside("prep", tmp_path / "nowhere", tmp_path / "out.fan"), "prep")
    assert_one_error(run_inside("prep", source, tmp_path / "no" / "parent" / "out.fan"), "prep")
    assert_one_error(run_inside("prep", source / "file-0000", tmp_path / "out.fan"), "prep")
    assert_one_error(run_inside("prep", "/dev/null", tmp_path / "out.fan"), "prep")
    assert os.listdir(tmp_path) == ["source"]


def test_out_with_a_trailing_slash_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path / "source", [100])
    monkeypatch.chdir(tmp_path)
    assert run_inside("prep", "source", "out.fan/").returncode == 0
    assert run_inside("prep", "./source/", "./other.fan").returncode == 0
    monkeypatch.chdir(tmp_path / "source")
    assert run_inside("prep", ".", "../third.fan").returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["other.fan", "out.fan", "source", "third.fan"]


def test_quiet_and_summary(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100_000] * 3)
    result = run_inside("prep", source, tmp_path / "out.fan", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")
    result = run_fanstore("prep", source, tmp_path / "two.fan", "--codec", "lz4")
    assert "3 files, 1 directory" in result.stdout
    assert "293 KiB" in result.stdout


def test_a_progress_bar_on_a_terminal_and_plain_lines_in_a_log(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [MIB] * 40)
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    try:
        command = [str(BIN / "fanstore-prep"), str(source), str(tmp_path / "out.fan"), "--codec", "lz4hc"]
        subprocess.run(command, stdout=terminal, stderr=terminal, check=True, timeout=60)
        os.close(terminal)
        shown = b""
        try:
            while data := os.read(master, 65536):
                shown += data
        except OSError:
            assert shown, "EIO is how a terminal says that its other end is closed"
    finally:
        os.close(master)
    assert b"%" in shown and b"files" in shown and b"\r" in shown
    result = run_fanstore("prep", source, tmp_path / "log.fan")
    assert "\r" not in result.stderr and "\x1b" not in result.stderr
