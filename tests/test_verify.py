"""fanstore-verify: silent when all is well, and names exactly what is damaged or different when it is not."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import oddities
import pytest
from commands import BIN, assert_one_error, run_fanstore, run_inside
from index_reference import HEADER, SECTION, SECTIONS, checksum, seal
from materialise import Prepared
from oddities import CHUNK_BYTES, compressible, incompressible


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify") / "source"
    for directory in ("a", "b/c"):
        (root / directory).mkdir(parents=True)
    for number in range(40):
        (root / "a" / f"text-{number:02d}").write_bytes(compressible(3_000 * number, number))
        (root / "b" / f"noise-{number:02d}").write_bytes(incompressible(2_000 * number, number))
    (root / "b" / "c" / "big-text").write_bytes(compressible(3 * CHUNK_BYTES + 17, 5))
    (root / "b" / "c" / "big-noise").write_bytes(incompressible(2 * CHUNK_BYTES))
    os.link(root / "a" / "text-07", root / "b" / "linked")
    os.symlink("a/text-01", root / "symlink")
    return root


@pytest.fixture(scope="module", params=["none", "lz4", "zstd"])
def pristine(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "data.fan"
    result = run_inside("prep", source, out, "--codec", request.param, "--partitions", "3")
    assert result.returncode == 0, result.stderr
    return out


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "data.fan"))


def lines(result: subprocess.CompletedProcess[str], kind: str) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith(f"{kind}: ")]


def where(dataset: Path, path: bytes) -> tuple[Path, int, int]:
    """Partition file, offset and stored bytes of a file."""
    prepared = Prepared(dataset)
    entry, column = prepared.index.resolve(path), prepared.index.column
    file = prepared.manifest["partitions"][column["part"][entry]]["file"]
    return dataset / file, column["offset"][entry], column["stored"][entry]


def flip(file: Path, position: int, mask: int = 0x10) -> None:
    with open(file, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ mask]))


def test_a_sound_dataset(pristine: Path, source: Path) -> None:
    result = run_fanstore("verify", pristine, "--against", source)
    assert (result.returncode, result.stderr) == (0, "")
    assert "all checksums match" in result.stdout
    assert result.stdout.endswith(": the same\n")
    assert "/s)" in result.stdout


def test_quiet_says_nothing_when_all_is_well(pristine: Path, source: Path) -> None:
    result = run_inside("verify", pristine, "--quiet", "--against", source)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("jobs", ["1", "7"])
def test_any_number_of_threads(pristine: Path, source: Path, jobs: str) -> None:
    assert run_inside("verify", pristine, "--jobs", jobs, "--against", source).returncode == 0


@pytest.mark.parametrize("path", [b"a/text-20", b"b/noise-01", b"b/c/big-text", b"b/c/big-noise"])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_flipped_byte_names_one_file(dataset: Path, path: bytes, place: str) -> None:
    file, offset, stored = where(dataset, path)
    position = {"first": offset, "middle": offset + stored // 2, "last": offset + stored - 1}[place]
    flip(file, position)
    result = run_inside("verify", dataset)
    assert result.returncode == 1
    damaged = lines(result, "damaged")
    assert len(damaged) == 2, result.stdout
    assert damaged[0] == f"damaged: {file.name}: its checksum does not match"
    assert damaged[1].startswith(f"damaged: '{path.decode()}' in {file.name}: ")
    if path.startswith(b"b/c/"):
        chunk = {"first": 0, "middle": 1 if path == b"b/c/big-noise" else None, "last": -1}[place]
        assert ": chunk " in damaged[1]
        if chunk == 0:
            assert "chunk 0 of" in damaged[1]
    assert "1 files damaged" in result.stdout


def test_all_names_of_a_damaged_file_are_listed(dataset: Path) -> None:
    file, offset, _ = where(dataset, b"b/linked")
    flip(file, offset + 5)
    result = run_inside("verify", dataset, "--quiet")
    named = [line.split("'")[1] for line in lines(result, "damaged") if "'" in line]
    assert named == ["a/text-07", "b/linked"]


def test_a_flipped_byte_outside_all_files(dataset: Path) -> None:
    file, offset, _ = where(dataset, b"a/text-20")
    flip(file, offset - 400)  # in the tar header
    result = run_inside("verify", dataset)
    assert result.returncode == 1
    assert lines(result, "damaged") == [
        f"damaged: {file.name}: its checksum does not match, but every file in it is sound: "
        "tar headers or padding were altered"
    ]


def test_every_damaged_file_is_found(dataset: Path) -> None:
    prepared, numbers = Prepared(dataset), random.Random(1)
    column = prepared.index.column
    candidates = [e for e in range(prepared.index.n) if column["stored"][e] > 0 and column["mode"][e] & 0o100000]
    candidates = [e for e in candidates if column["mode"][e] >> 12 == 8 and column["nlink"][e] == 1]
    chosen = sorted(numbers.sample(candidates, 15))
    for entry in chosen:
        file = dataset / prepared.manifest["partitions"][column["part"][entry]]["file"]
        flip(file, column["offset"][entry] + numbers.randrange(column["stored"][entry]))
    result = run_inside("verify", dataset)
    named = {line.split("'")[1] for line in lines(result, "damaged") if "'" in line}
    assert named == {prepared.index.path(entry).decode() for entry in chosen}


def test_a_truncated_partition(dataset: Path) -> None:
    file, offset, stored = where(dataset, b"b/c/big-noise")
    prepared = Prepared(dataset)
    column = prepared.index.column
    part = int(file.name[5:10])
    cut = offset + stored // 2
    os.truncate(file, cut)
    result = run_inside("verify", dataset)
    assert result.returncode == 1
    named = {line.split("'")[1] for line in lines(result, "damaged") if "'" in line}
    lost = {
        prepared.index.path(e).decode()
        for e in range(prepared.index.n)
        if column["part"][e] == part and column["offset"][e] + column["stored"][e] > cut and column["stored"][e]
    }
    assert named == lost
    assert any(f"{file.name}: has {cut:,} bytes instead of" in line for line in lines(result, "damaged"))


def test_an_empty_partition_file(dataset: Path) -> None:
    os.truncate(dataset / "part-00000.tar", 0)
    result = run_inside("verify", dataset)
    assert result.returncode == 1
    assert "part-00000.tar: has 0 bytes instead of" in result.stdout


def test_a_longer_partition(dataset: Path) -> None:
    with open(dataset / "part-00001.tar", "ab") as file:
        file.write(b"x")
    result = run_inside("verify", dataset)
    assert result.returncode == 1
    assert len(lines(result, "damaged")) == 1
    assert "part-00001.tar: has" in result.stdout


def test_a_missing_partition(dataset: Path) -> None:
    (dataset / "part-00002.tar").unlink()
    result = run_inside("verify", dataset)
    assert result.returncode == 1
    (line,) = lines(result, "damaged")
    assert line.startswith("damaged: part-00002.tar: cannot be opened (No such file or directory): ")
    assert line.endswith(" files are lost")


def test_swapped_partitions(dataset: Path) -> None:
    (dataset / "part-00000.tar").rename(dataset / "x")
    (dataset / "part-00001.tar").rename(dataset / "part-00000.tar")
    (dataset / "x").rename(dataset / "part-00001.tar")
    assert run_inside("verify", dataset).returncode == 1


def rewrite_index(dataset: Path, spoil: Callable[[bytearray, dict[str, int]], None]) -> None:
    """Change the index and make manifest and checksums agree with it again."""
    data = bytearray((dataset / "index.fsx").read_bytes())
    offsets = {
        tag: SECTION.unpack_from(data, HEADER.size + number * SECTION.size)[1]
        for number, (tag, _, _) in enumerate(SECTIONS)
    }
    spoil(data, offsets)
    seal(data)
    (dataset / "index.fsx").write_bytes(data)
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["index"]["checksum"] = f"{checksum(bytes(data)):016x}"
    del manifest["checksum"]
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (dataset / "manifest.json").write_text(json.dumps(manifest | {"checksum": f"{checksum(text.encode()):016x}"}))


@pytest.mark.parametrize("path", [b"b/c/big-text", b"a/text-00", b"a/text-20"])
def test_a_wrong_checksum_in_the_index(dataset: Path, path: bytes) -> None:
    """Of a file of several chunks, an empty one, and one of one chunk: each is checked in its own way."""
    entry = Prepared(dataset).index.resolve(path)

    def spoil(data: bytearray, offsets: dict[str, int]) -> None:
        data[offsets["checksum"] + 8 * entry] ^= 1

    rewrite_index(dataset, spoil)
    result = run_inside("verify", dataset, "--quiet")
    assert result.returncode == 1
    (line,) = lines(result, "damaged")
    assert f"'{path.decode()}'" in line


def test_right_checksum_but_not_a_frame(dataset: Path) -> None:
    """Bytes that match their checksum and still do not decode: only decoding finds them."""
    prepared = Prepared(dataset)
    frame = {"none": None, "lz4": "LZ4", "zstd": "zstd"}[prepared.manifest["codec"]]
    if frame is None:
        return  # nothing to decode
    path = b"a/text-20"
    file, offset, stored = where(dataset, path)
    entry = prepared.index.resolve(path)
    rubbish = incompressible(stored)
    with open(file, "r+b") as stream:
        stream.seek(offset)
        stream.write(rubbish)

    def spoil(data: bytearray, offsets: dict[str, int]) -> None:
        struct.pack_into("<Q", data, offsets["checksum"] + 8 * entry, checksum(rubbish))

    rewrite_index(dataset, spoil)
    result = run_inside("verify", dataset, "--quiet")
    assert any("'a/text-20'" in line and f"{frame} frame" in line for line in lines(result, "damaged")), result.stdout


@pytest.mark.parametrize("place", ["index", "manifest"])
def test_a_codec_of_the_future_is_one_sentence(dataset: Path, place: str) -> None:
    def spoil(data: bytearray, offsets: dict[str, int]) -> None:
        if place == "index":
            struct.pack_into("<I", data, offsets["codec"] + 4 * entry, 77)

    entry = Prepared(dataset).index.resolve(b"a/text-20")
    if place == "manifest":
        manifest = json.loads((dataset / "manifest.json").read_text())
        (dataset / "manifest.json").write_text(json.dumps(manifest | {"codec": "brotli:11"}))
    rewrite_index(dataset, spoil)
    sentence = assert_one_error(run_inside("verify", dataset), "verify")
    assert sentence.endswith("a newer FanStore has written it") and ("77" in sentence or "'brotli:11'" in sentence)


@pytest.mark.parametrize("name", ["index.fsx", "manifest.json"])
def test_a_damaged_index_or_manifest_is_one_error(dataset: Path, name: str) -> None:
    flip(dataset / name, 100)
    assert "is refused" in assert_one_error(run_inside("verify", dataset), "verify")


def test_not_a_dataset(tmp_path: Path) -> None:
    assert_one_error(run_inside("verify", tmp_path), "verify")
    assert_one_error(run_inside("verify", tmp_path / "nowhere"), "verify")
    assert run_inside("verify").returncode == 2


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "content": (lambda root: _write(root / "a/text-03", b"x" * 9_000), ["different: 'a/text-03': other content"]),
    "size": (
        lambda root: _write(root / "a/text-03", b"x"),
        ["different: 'a/text-03': 1 bytes, in the dataset 9,000"],
    ),
    "last byte of a large file": (
        lambda root: _write_last(root / "b/c/big-text"),
        ["different: 'b/c/big-text': other content"],
    ),
    "mode": (
        lambda root: (root / "b/noise-02").chmod(0o600),
        ["different: 'b/noise-02': mode 0600, in the dataset 0644"],
    ),
    "time": (
        lambda root: os.utime(root / "b/noise-02", ns=(0, 5)),
        ["different: 'b/noise-02': time 5 ns, in the dataset"],
    ),
    "directory's mode": (lambda root: (root / "b").chmod(0o700), ["different: 'b': mode 0700, in the dataset 0755"]),
    "root's mode": (lambda root: root.chmod(0o700), ["different: '.': mode 0700, in the dataset 0755"]),
    "missing": (
        lambda root: _write(root / "new\nfile", b""),
        ["missing: 'new\\nfile': in the source, not in the dataset"],
    ),
    "missing directory": (
        lambda root: (root / "new").mkdir(),
        ["missing: 'new': in the source, not in the dataset with all below it"],
    ),
    "extra": (lambda root: (root / "a/text-03").unlink(), ["extra: 'a/text-03': in the dataset, not in the source"]),
    "extra directory": (
        lambda root: shutil.rmtree(root / "b/c"),
        ["extra: 'b/c': in the dataset, not in the source, with 2 entries below it"],
    ),
    "type": (
        lambda root: _replace(root / "a/text-03", lambda path: path.mkdir()),
        ["different: 'a/text-03': a directory in the source, a file in the dataset"],
    ),
    "target": (
        lambda root: _replace(root / "symlink", lambda path: path.symlink_to("a/text-02")),
        ["different: 'symlink': another target"],
    ),
    "hard link gone": (
        lambda root: _replace(root / "b/linked", lambda path: shutil.copy2(root / "a/text-07", path)),
        ["different: 'b/linked': a hard link of 'a/text-07', not so in the source"],
    ),
    "hard link new": (
        lambda root: _replace(root / "a/text-08", lambda path: path.hardlink_to(root / "a/text-07")),
        ["different: 'a/text-08': not a hard link of 'a/text-07', as in the source"],
    ),
}


def _write(path: Path, content: bytes) -> None:
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_bytes(content)
    os.utime(path, ns=(before, before))


def _write_last(path: Path) -> None:
    before = path.stat().st_mtime_ns
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    os.utime(path, ns=(before, before))


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("change, expected", CHANGES.values(), ids=CHANGES.keys())
def test_against_a_source_that_has_changed(
    pristine: Path, source: Path, change: Callable[[Path], object], expected: list[str], tmp_path: Path
) -> None:
    # cp, since Python's copytree makes two files of a hard link.
    subprocess.run(["cp", "-a", source, tmp_path / "copy"], check=True, timeout=30)
    change(tmp_path / "copy")
    result = run_inside("verify", pristine, "--against", tmp_path / "copy")
    assert result.returncode == 1
    found = [line for kind in ("missing", "extra", "different") for line in lines(result, kind)]
    for line in expected:
        assert any(one.startswith(line) for one in found), result.stdout
    # Whatever else is listed follows from the change: the time of the directory that holds it, or of the file itself.
    others = [one for one in found if not any(one.startswith(line) for line in expected)]
    assert all(": time " in one or "other content" in one or "bytes, in the" in one for one in others), result.stdout


def test_against_all_oddities(tmp_path: Path) -> None:
    tree = oddities.build(tmp_path / "tree")
    try:
        for codec in ("none", "lz4"):
            out = tmp_path / f"{codec}.fan"
            assert run_inside("prep", tree, out, "--codec", codec, "--partitions", "2").returncode == 0
            result = run_inside("verify", out, "--against", tree)
            assert result.returncode == 0, result.stdout
    finally:
        oddities.remove_tree(tree)


def test_against_several_sources_and_tars(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "shared").mkdir(parents=True)
        (tmp_path / name / "shared" / f"{name}.txt").write_bytes(compressible(10_000))
        (tmp_path / name / f"{name}.bin").write_bytes(incompressible(10_000))
    with tarfile.open(tmp_path / "three.tar", "w") as tar:
        tar.add(tmp_path / "one" / "one.bin", "three.bin")
    sources = (tmp_path / "one", tmp_path / "two", tmp_path / "three.tar")
    assert run_inside("prep", *sources, tmp_path / "out.fan", "--codec", "lz4").returncode == 0
    result = run_inside("verify", tmp_path / "out.fan", "--against", *sources)
    assert result.returncode == 0, result.stdout
    assert run_inside("verify", tmp_path / "out.fan", "--against", *sources[:2]).returncode == 1
    assert run_inside("verify", tmp_path / "out.fan", "--against", *sources[1:]).returncode == 1


def test_external_partitions(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        (tmp_path / "file").write_bytes(compressible(100_000))
        tar.add(tmp_path / "file", "sub/file")
    assert run_inside("prep", tmp_path / "shard.tar", tmp_path / "out.fan", "--index-only").returncode == 0
    assert run_inside("verify", tmp_path / "out.fan", "--against", tmp_path / "shard.tar").returncode == 0
    flip(tmp_path / "shard.tar", 5_000)
    result = run_inside("verify", tmp_path / "out.fan")
    assert any("'sub/file' in" in line and "shard.tar" in line for line in lines(result, "damaged"))


def test_a_source_that_does_not_exist(pristine: Path, tmp_path: Path) -> None:
    assert_one_error(run_inside("verify", pristine, "--against", tmp_path / "nowhere"), "verify")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    """A partition of many gigabytes (a sparse file, so it costs nothing) is being read when the signal comes."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "small").write_bytes(b"x")
    assert run_inside("prep", source, tmp_path / "out.fan").returncode == 0
    with open(tmp_path / "out.fan" / "part-00000.tar", "r+b") as file:
        file.truncate(200 << 30)

    def spoil(data: bytearray, offsets: dict[str, int]) -> None:
        struct.pack_into("<Q", data, offsets["parts"], 200 << 30)

    manifest = json.loads((tmp_path / "out.fan" / "manifest.json").read_text())
    manifest["partitions"][0]["bytes"] = 200 << 30
    (tmp_path / "out.fan" / "manifest.json").write_text(json.dumps(manifest))
    rewrite_index(tmp_path / "out.fan", spoil)
    process = subprocess.Popen([BIN / "fanstore-verify", tmp_path / "out.fan"], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while _read_chars(process.pid) < 200 << 20:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, "fanstore-verify: interrupted\n")


def _read_chars(pid: int) -> int:
    """Bytes that a process has read so far."""
    text = Path(f"/proc/{pid}/io").read_text()
    return int(text.split()[1])
