"""Options of fanstore-prep: how it cuts, what it compresses, what it refuses to write over."""

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import tarfile
import termios
from pathlib import Path

import numpy as np
import pytest
from commands import BIN, assert_one_error, run_fanstore, run_inside
from materialise import Prepared, materialise
from oddities import compare_trees, compressible, incompressible
from PIL import Image

from fanstore.prep.chooser import Trial, decide
from fanstore.prep.rates import Rate, link_rate

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


def partition_of_files(prepared: Prepared) -> dict[str, int]:
    """By path, from the tar files themselves."""
    found: dict[str, int] = {}
    for number, part in enumerate(prepared.parts):
        with tarfile.open(fileobj=io.BytesIO(part)) as tar:
            found |= {member.name: number for member in tar if not member.isdir()}
    return found


def test_shuffled_partitions_have_all_classes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(4):
        make_files(source / f"class{number}", [2 * KIB] * 50)
    (source / "class0" / "again").hardlink_to(source / "class3" / "file-0007")
    (source / "class1" / "link").symlink_to("file-0001")
    plain, shuffled, same, other = (
        prepare(source, tmp_path / f"{name}.fan", "--partitions", "4", *options)
        for name, options in (
            ("plain", []),
            ("shuffled", ["--shuffle", "1"]),
            ("same", ["--shuffle", "1", "--jobs", "1"]),
            ("other", ["--shuffle", "2"]),
        )
    )
    for prepared in (shuffled, other):
        where = partition_of_files(prepared)
        for part in range(4):
            classes = [path.split("/")[0] for path, number in where.items() if number == part]
            assert all(5 <= classes.count(f"class{each}") <= 22 for each in range(4)), where
        assert where["class0/again"] == where["class3/file-0007"]
        assert compare_trees(source, materialise(prepared, tmp_path / f"back{id(prepared)}")) == []
    assert len({partition_of_files(plain)[f"class0/file-{number:04d}"] for number in range(40)}) == 1
    assert same.parts == shuffled.parts and other.parts != shuffled.parts
    assert [json.loads((tmp_path / f"{name}.fan/manifest.json").read_bytes()).get("shuffle") for name in
            ("plain", "shuffled", "same", "other")] == [None, 1, 1, 2]  # fmt: skip
    verified = run_inside("verify", tmp_path / "shuffled.fan", "--against", source)
    assert verified.returncode == 0, verified.stderr


@pytest.mark.parametrize("seed", ["-1", str(1 << 63), "x"])
def test_a_seed_that_is_none(seed: str, tmp_path: Path) -> None:
    make_files(tmp_path / "source", [1])
    result = run_inside("prep", tmp_path / "source", tmp_path / "out.fan", f"--shuffle={seed}")
    assert "--shuffle" in assert_one_error(result, "prep", 2)
    assert not (tmp_path / "out.fan").exists()


def test_tar_files_that_stay_are_not_shuffled(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(make_files(tmp_path / "source", [1]), "source")
    result = run_inside("prep", tmp_path / "a.tar", tmp_path / "out.fan", "--index-only", "--shuffle", "1")
    assert "it goes with no --shuffle" in assert_one_error(result, "prep", 2)


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
    assert bool(prepared.compressed()) == (sentence[1] != "none")
    return sentence[1], sentence[2]


#: Rates of a cluster where every codec decompresses quickly enough; and of one where none does.
SLOW, FAST = "disk=10MB,network=20MB", "disk=2000GB,network=1000GB"
SMALLEST = "zstd is the smallest that decompresses faster than the disk"


@pytest.mark.parametrize(
    "make, rates, expected, why",
    [
        (jpeg, SLOW, "none", "to save less than 15% is not worth decompressing"),
        (npy, SLOW, "zstd", SMALLEST),
        (
            lambda n: compressible(50_000, n),
            SLOW,
            "zstd",
            SMALLEST,
        ),
        (npy, FAST, "none", "the network is faster than decompressing"),
    ],
    ids=["jpeg", "npy", "text", "fast"],
)
def test_auto_chooses_and_says_why(
    make: object, rates: str, expected: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(make)
    monkeypatch.setenv("FANSTORE_RATES", rates)
    (tmp_path / "source").mkdir()
    for number in range(20):
        (tmp_path / "source" / f"{number}").write_bytes(make(number))
    codec, reason = choice(tmp_path / "source", tmp_path / "out.fan")
    assert codec == expected
    trials = r"by \d+% with lz4 \(2 cores decompress \d+(\.\d+)? GB/s\) and by \d+% with zstd \("
    assert re.match(r"a sample of 20 files \(.*?\) shrinks " + trials, reason), reason
    assert "from the disk at" in reason and "over the network at" in reason and "stated in FANSTORE_RATES" in reason
    assert reason.endswith("; " + why)


@pytest.mark.parametrize(
    "disk, network, expected",
    [
        (1.0, 12.0, ("dense", "dense is the smallest that decompresses faster than the disk")),
        (9.0, 1.9, ("dense", "dense is the smallest that decompresses faster than the network")),
        (3.0, 12.0, ("light", "light is the smallest that decompresses faster than the disk")),
        (9.0, 2.0, ("light", "light is the smallest that decompresses faster than the network")),
        (9.0, 7.0, ("none", "the network is faster than decompressing")),
    ],
)
def test_auto_takes_the_smallest_that_is_quick_enough(disk: float, network: float, expected: tuple[str, str]) -> None:
    rates = [Rate("disk", disk * 1e9, ""), Rate("network", network * 1e9, "")]
    trials = [Trial("light", 0.5, 6e9), Trial("dense", 0.7, 2e9), Trial("useless", 0.1, 9e9)]
    assert decide(trials, rates) == expected
    assert decide(trials[2:], rates) == ("none", "to save less than 15% is not worth decompressing")


@pytest.mark.parametrize("sizes, how", [([700_000] * 8, "measured"), ([100_000], "assumed: too little to be timed")])
@pytest.mark.parametrize("kind", ["directory", "tar"])
def test_auto_measures_the_disk(
    kind: str, sizes: list[int], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FANSTORE_RATES", raising=False)
    source = make_files(tmp_path / "source", sizes, text=True)
    if kind == "tar":  # content begins at any block
        subprocess.run(["tar", "-cf", tmp_path / "source.tar", "-C", source, "."], check=True, timeout=60)
        source = tmp_path / "source.tar"
    sentence = choice(source, tmp_path / "out.fan")[1]
    assert re.search(rf"bytes come from the disk at \d+(\.\d+)? GB/s \({how}\)", sentence), sentence
    assert re.search(r"shrinks by [6-9]\d% with lz4", sentence), "what was read is the text"


@pytest.mark.parametrize(
    "rates", ["disc=1GB", "disk", "disk=", "disk=0", "disk=fast", "network=-1GB", "1GB", "disk:1GB"]
)
def test_rates_that_make_no_sense_are_wrong_usage(rates: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANSTORE_RATES", rates)
    source = make_files(tmp_path / "source", [100])
    result = run_inside("prep", source, tmp_path / "out.fan", "--codec", "auto")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "FANSTORE_RATES=disk=3GB,network=12GB" in result.stderr
    assert os.listdir(tmp_path) == ["source"]


def test_the_rate_of_the_network_is_that_of_the_fastest_link(tmp_path: Path) -> None:
    """As the kernel shows links: physical ones that are up, with a speed that is known, and InfiniBand."""

    def link(name: str, device: bool = True, operstate: str = "up", speed: str = "-1") -> None:
        place = tmp_path / "net" / name
        place.mkdir(parents=True)
        (place / "operstate").write_text(operstate + "\n")
        (place / "speed").write_text(speed + "\n")
        if device:
            (place / "device").mkdir()

    assert link_rate(tmp_path) is None
    link("unknown")
    link("veth", device=False, speed="10000")
    link("down", operstate="down", speed="100000")
    assert link_rate(tmp_path) is None
    link("eth0", speed="25000")
    link("eth1", speed="1000")
    rate = link_rate(tmp_path)
    assert rate is not None and (rate.of, rate.bytes_per_s) == ("network", 25e9 / 8)
    for port, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        place = tmp_path / "infiniband" / "mlx5_0" / "ports" / port
        place.mkdir(parents=True)
        (place / "state").write_text(state + "\n")
        (place / "rate").write_text(f"{port}00 Gb/sec (4X EDR)\n")
    rate = link_rate(tmp_path)
    assert rate is not None and rate.bytes_per_s == 100e9 / 8


def test_auto_decides_by_bytes_not_by_files(tmp_path: Path) -> None:
    """A thousand small texts beside much noise: the noise decides."""
    make_files(tmp_path / "source" / "a", [100] * 500, text=True)
    make_files(tmp_path / "source" / "b", [400_000] * 20)
    assert choice(tmp_path / "source", tmp_path / "out.fan")[0] == "none"


@pytest.mark.parametrize("sizes", [[], [0, 0]])
def test_auto_with_nothing_to_measure(sizes: list[int], tmp_path: Path) -> None:
    make_files(tmp_path / "source", sizes)
    assert choice(tmp_path / "source", tmp_path / "out.fan")[0] == "none"


@pytest.mark.parametrize(
    "codecs",
    [("none", "lz4", "lz4hc:3", "lz4hc", "lz4hc:12"), ("lz4", "zstd", "zstd:19")],
    ids=lambda codecs: codecs[-1],
)
def test_higher_levels_are_smaller(codecs: tuple[str, ...], tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [200_000] * 5, text=True)
    sizes = [
        prepare(source, tmp_path / f"{codec}.fan", "--codec", codec).manifest["totals"]["stored_bytes"]
        for codec in codecs
    ]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)


def test_the_level_is_in_the_manifest(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [2_000], text=True)
    assert prepare(source, tmp_path / "out.fan", "--codec", "zstd:9").manifest["codec"] == "zstd:9"


def test_an_existing_out_is_refused(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    out = tmp_path / "out.fan"
    prepare(source, out)
    before = {path.name: path.read_bytes() for path in out.glob("[!.]*")}
    assert "--force" in assert_one_error(run_inside("prep", source, out), "prep")
    assert {path.name: path.read_bytes() for path in out.glob("[!.]*")} == before
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
    assert sorted(os.listdir(out)) == [".users", "index.fsx", "manifest.json", "part-00000.tar"]


def test_force_with_nothing_to_replace(tmp_path: Path) -> None:
    source = make_files(tmp_path / "source", [100])
    prepare(source, tmp_path / "out.fan", "--force")


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
    *(["--codec", f"zstd{level}"] for level in (":0", ":20", ":-1", ":")),
    *(["--codec", f"lz4hc{level}"] for level in (":2", ":13", ":-9", ":x", ":", ":9:9")), ["--codec", "lz4:1"],
    ["--codec", "auto:3"],
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
