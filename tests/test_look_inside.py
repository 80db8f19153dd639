"""fanstore info, ls and cat: a prepared dataset looked into without a mount."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import fanstore_command
from mounting import prepare

LIMIT_S = 60
TEXT = b"".join(b"%d\n" % number for number in range(900_000))  #: several chunks
NOISE = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("look")
    tree = base / "tree"
    (tree / "train" / "cat").mkdir(parents=True)
    (tree / "val").mkdir()
    (tree / "train" / "cat" / "large.txt").write_bytes(TEXT)
    (tree / "train" / "cat" / "empty").touch()
    (tree / "val" / "noise").write_bytes(NOISE)
    (tree / "val" / "odd\n\x1bname").write_bytes(b"odd")
    (tree / "link").symlink_to("train/cat")
    (tree / "val" / "up").symlink_to("../train/./cat/large.txt")
    (tree / "round").symlink_to("round")
    (tree / "out").symlink_to("/etc")
    options = ("--codec", "zstd", "--everywhere", "val/*", "--partition-size", "1MiB")
    return prepare(tree, base / "d.fan", *options)


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([fanstore_command(name), *map(str, arguments)], capture_output=True, timeout=LIMIT_S)


def output(name: str, *arguments: object) -> bytes:
    result = run(name, *arguments)
    assert (result.returncode, result.stderr) == (0, b"")
    return result.stdout


def test_info(dataset: Path) -> None:
    facts = json.loads(output("info", dataset, "--json", "--nodes", "3", "--replicas", "2"))
    assert facts["dataset"] == str(dataset) and facts["codec"] == "zstd" and facts["in_use_by"] == []
    assert (facts["files"], facts["directories"], facts["symlinks"]) == (4, 4, 4)
    assert facts["bytes"] == len(TEXT) + len(NOISE) + 3
    assert facts["file_bytes"] == {"smallest": 0, "median": 3, "percentile_90": len(NOISE), "largest": len(TEXT)}
    assert facts["stored_as"]["zstd"]["bytes"] >= len(TEXT) > 3 * facts["stored_as"]["zstd"]["stored_bytes"]
    sizes = sorted(path.stat().st_size for path in dataset.glob("part-*"))
    parts = facts["partitions"]
    assert (parts["count"], parts["bytes"]) == (len(sizes), sum(sizes)) and parts["everywhere"] >= 1
    (room,) = facts["room_bytes_per_node"].values()
    assert parts["everywhere_bytes"] < room <= sum(sizes)


def test_info_for_people(dataset: Path) -> None:
    lines = output("info", dataset).decode().splitlines()
    assert lines[0] == str(dataset)
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert list(rows) == ["made", "content", "sizes", "stored", "partitions", "order", "index", "room"]
    assert rows["content"].startswith("4 files in 4 directories, ") and rows["content"].endswith("; 4 symbolic links")
    assert rows["room"].count(" on ") == 5
    assert "for every node" in rows["partitions"]


def test_listings(dataset: Path) -> None:
    assert output("ls", dataset) == b"link\nout\nround\ntrain/\nval/\n"
    assert output("ls", dataset, "/train//cat/") == output("ls", dataset, "link") == b"empty\nlarge.txt\n"
    assert output("ls", dataset, "val/up") == b"large.txt\n"
    everything = output("ls", "-R", "-0", dataset).split(b"\0")[:-1]
    plain = [
        "link",
        "out",
        "round",
        "train/",
        "train/cat/",
        "train/cat/empty",
        "train/cat/large.txt",
        "val/",
        "val/noise",
        "val/up",
    ]
    assert set(everything) == {*map(str.encode, plain), b"val/odd\n\x1bname"} and len(everything) == len(plain) + 1
    mode, size, _, _, codec, stored, partition, name = output("ls", "-l", dataset, "val/up").decode().split()
    assert (mode[0], int(size), codec, name) == ("-", len(TEXT), "zstd", "large.txt")
    assert int(stored) < len(TEXT) // 3 and (dataset / partition).exists()


def test_contents(dataset: Path) -> None:
    assert output("cat", dataset, "link/large.txt", "val/noise", "train/cat/empty", "val/up") == TEXT + NOISE + TEXT


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ls", "nothing/here"], 1, "'nothing/here' is not in the dataset"),
        (["ls", "val/noise/x"], 1, "'val/noise/x' is not in the dataset: it leads through a file"),
        (["ls", "round/x"], 1, "'round/x' leads in a circle, by a symbolic link"),
        (["cat", "out/passwd"], 1, "'out/passwd' leads to '/etc', out of the dataset, by a symbolic link"),
        (["cat", "train"], 1, "'train' is a directory"),
        (["info", "--nodes", "0"], 2, "--nodes must be 1 or more"),
    ],
)
def test_mistakes(dataset: Path, arguments: list[str], code: int, said: str) -> None:
    result = run(arguments[0], dataset, *arguments[1:])
    assert (result.returncode, result.stdout) == (code, b"")
    assert result.stderr.decode() == f"fanstore-{arguments[0]}: error: {said}\n"


def test_others_are_written_when_one_is_damaged(dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.fan"
    copy.mkdir()
    for path in dataset.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    damaged = 0
    for path in copy.glob("part-*"):
        content = path.read_bytes()
        if NOISE[:2000] in content:
            at = content.index(NOISE[:2000]) + 1000
            path.write_bytes(content[:at] + b"!" + content[at + 1 :])
            damaged += 1
    assert damaged <= 1
    where = "val/noise"
    if not damaged:  # the noise has a pattern, which zstd has found
        partition = output("ls", "-l", copy, where).decode().split()[-2]
        (copy / partition).write_bytes(bytes((copy / partition).stat().st_size))
    result = run("cat", copy, where, "val/up")
    assert result.returncode == 1 and result.stdout == TEXT
    assert b"fanstore-cat: error: cannot read 'val/noise' in " in result.stderr
