"""What fanstore-prep takes: several sources merged, tar files plain and compressed, shards that stay in place."""

import bz2
import gzip
import hashlib
import lzma
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import oddities
import pytest
import zstandard
from commands import assert_one_error, run_inside
from materialise import Prepared, materialise
from oddities import compare_trees, compressible, incompressible


def prepare(*arguments: str | Path) -> Prepared:
    """Arguments of the command; the dataset is the last one that is no option."""
    result = run_inside("prep", *arguments)
    assert result.returncode == 0, result.stderr
    positional = [argument for argument in arguments if isinstance(argument, Path)]
    return Prepared(positional[-1])


def make_tree(root: Path, name: str) -> Path:
    (root / "shared" / "deeper").mkdir(parents=True)
    (root / f"only-{name}").mkdir()
    for directory in (root, root / "shared", root / "shared" / "deeper", root / f"only-{name}"):
        (directory / f"{name}.txt").write_bytes(compressible(5_000))
        (directory / f"{name}.bin").write_bytes(incompressible(5_000))
        os.symlink(f"{name}.txt", directory / f"{name}.link")
    os.link(root / f"{name}.txt", root / "shared" / f"{name}.hard")
    return root


def test_several_directories_are_merged(tmp_path: Path) -> None:
    one, two, three = (make_tree(tmp_path / name, name) for name in ("one", "two", "three"))
    (one / "shared").chmod(0o700)
    os.utime(two, ns=(0, 5))
    prepared = prepare(one, two, three, tmp_path / "out.fan", "--codec", "lz4", "--partitions", "2")
    merged = tmp_path / "merged"
    subprocess.run(["cp", "-a", one, merged], check=True, timeout=60)
    for other in (two, three):
        subprocess.run(["cp", "-a", f"{other}/.", merged], check=True, timeout=60)
    # The first source's attributes win where several have the same directory.
    for path in (".", "shared", "shared/deeper"):
        status = (one / path).stat()
        (merged / path).chmod(stat.S_IMODE(status.st_mode))
        os.utime(merged / path, ns=(0, status.st_mtime_ns))
    assert compare_trees(merged, materialise(prepared, tmp_path / "back")) == []


CLASHES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object], str]] = {
    "two files": (lambda root: (root / "x").write_bytes(b"1"), lambda root: (root / "x").write_bytes(b"2"), "x"),
    "the same content": (lambda root: (root / "x").write_bytes(b"1"), lambda root: (root / "x").write_bytes(b"1"), "x"),
    "file and directory": (lambda root: (root / "x").write_bytes(b"1"), lambda root: (root / "x").mkdir(), "x"),
    "directory and file": (lambda root: (root / "x").mkdir(), lambda root: (root / "x").write_bytes(b"1"), "x"),
    "two links": (lambda root: (root / "x").symlink_to("y"), lambda root: (root / "x").symlink_to("y"), "x"),
    "deep down": (
        lambda root: (_directory(root / "a" / "b") / "x").write_bytes(b"1"),
        lambda root: (_directory(root / "a" / "b") / "x").write_bytes(b"1"),
        "a/b/x",
    ),
}


def _directory(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@pytest.mark.parametrize("first, second, path", CLASHES.values(), ids=CLASHES.keys())
@pytest.mark.parametrize("tarred", [False, True])
def test_a_clash_of_names_names_both(
    first: Callable[[Path], object], second: Callable[[Path], object], path: str, tarred: bool, tmp_path: Path
) -> None:
    one, two = _directory(tmp_path / "one"), _directory(tmp_path / "two")
    first(one)
    second(two)
    other = two
    if tarred:
        other = tmp_path / "two.tar"
        subprocess.run(["tar", "-cf", other, "-C", two, "."], check=True, timeout=60)
    sentence = assert_one_error(run_inside("prep", one, other, tmp_path / "out.fan"), "prep")
    for part in (f"'{path}'", f"'{one}'", f"'{other}'"):
        assert part in sentence
    assert not (tmp_path / "out.fan").exists()


def test_the_same_source_twice_is_a_clash(tmp_path: Path) -> None:
    one = make_tree(tmp_path / "one", "one")
    assert_one_error(run_inside("prep", one, one, tmp_path / "out.fan"), "prep")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oddities.build(tmp_path_factory.mktemp("sources") / "tree", beyond_path_max=False, specials=False)


@pytest.fixture(scope="module")
def archive(tree: Path) -> Path:
    path = tree.parent / "tree.tar"
    subprocess.run(["tar", "-cf", path, "--format=pax", "-C", tree, "."], check=True, timeout=60)
    return path


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "tar": lambda data: data,
    "tar.gz": lambda data: gzip.compress(data, 1),
    "tar.zst": lambda data: zstandard.ZstdCompressor(level=1).compress(data),
    "tar.bz2": lambda data: bz2.compress(data, 1),
    "tar.xz": lambda data: lzma.compress(data, preset=0),
}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.zst"])
def test_a_tar_with_everything_in_it(tree: Path, archive: Path, suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"tree.{suffix}"
    source.write_bytes(COMPRESSORS[suffix](archive.read_bytes()))
    prepared = prepare(source, tmp_path / "out.fan", "--codec", "lz4", "--partitions", "2")
    back = materialise(prepared, tmp_path / "back")
    try:
        assert compare_trees(tree, back) == []
    finally:
        oddities.remove_tree(back)
    assert sorted(os.listdir(tmp_path / "out.fan")) == [
        ".users",
        "index.fsx",
        "manifest.json",
        "part-00000.tar",
        "part-00001.tar",
    ]


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compression_is_known_by_content_not_by_name(suffix: str, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", "x")
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "-C", root, "."], check=True, timeout=60)
    (tmp_path / "source").write_bytes(COMPRESSORS[suffix]((tmp_path / "x.tar").read_bytes()))
    prepared = prepare(tmp_path / "source", tmp_path / "out.fan")
    assert {b"x.txt", b"shared/deeper/x.bin"} <= prepared.paths()


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.zst", "tar.bz2", "tar.xz"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_damaged_compressed_tars(suffix: str, damage: str, tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", "x")
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "-C", root, "."], check=True, timeout=60)
    data = bytearray(COMPRESSORS[suffix]((tmp_path / "x.tar").read_bytes()))
    if damage == "cut":
        data = data[: len(data) * 2 // 3]
    elif damage == "empty":
        data = data[:12]
    else:
        data[len(data) // 2] ^= 0xFF
        data[len(data) // 2 + 1] ^= 0xFF
    (tmp_path / f"x.{suffix}").write_bytes(data)
    result = run_inside("prep", tmp_path / f"x.{suffix}", tmp_path / "out.fan")
    if result.returncode != 0:
        assert f"x.{suffix}" in assert_one_error(result, "prep")
        assert not list(tmp_path.glob("*out.fan*"))
    else:  # zstd without its checksum cannot always tell
        assert (suffix, damage) == ("tar.zst", "flipped")


def test_concatenated_compressed_streams(tmp_path: Path) -> None:
    """As pigz, bgzip and pzstd write them."""
    root = make_tree(tmp_path / "root", "x")
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "--format=pax", "-C", root, "."], check=True, timeout=60)
    data = (tmp_path / "x.tar").read_bytes()
    for suffix in ("tar.gz", "tar.zst"):
        pieces = [COMPRESSORS[suffix](data[at : at + 7_000]) for at in range(0, len(data), 7_000)]
        (tmp_path / f"x.{suffix}").write_bytes(b"".join(pieces))
        prepared = prepare(tmp_path / f"x.{suffix}", tmp_path / f"{suffix}.fan")
        assert compare_trees(root, materialise(prepared, tmp_path / f"back-{suffix}")) == []


def test_directories_and_tars_together(tmp_path: Path) -> None:
    one, two = make_tree(tmp_path / "one", "one"), make_tree(tmp_path / "two", "two")
    subprocess.run(["tar", "-czf", tmp_path / "two.tar.gz", "-C", two, "."], check=True, timeout=60)
    prepared = prepare(one, tmp_path / "two.tar.gz", tmp_path / "out.fan")
    assert {b"one.txt", b"two.txt", b"shared/deeper/one.bin", b"shared/deeper/two.bin"} <= prepared.paths()


def shards(root: Path, count: int = 3, *, kind: int = tarfile.GNU_FORMAT) -> list[Path]:
    """Tar shards as WebDataset makes them: samples of several files, no directories."""
    root.mkdir()
    paths = []
    for shard in range(count):
        path = root / f"shard-{shard:03d}.tar"
        with tarfile.open(path, "w", format=kind) as tar:
            for sample in range(20):
                for suffix, content in (("bin", incompressible(3_000, sample)), ("cls", b"%d" % sample)):
                    (root / "member").write_bytes(content)
                    tar.add(root / "member", f"{shard:03d}/{sample:05d}.{suffix}")
        paths.append(path)
    (root / "member").unlink()
    return paths


def fingerprint(path: Path) -> tuple[str, int, int, int]:
    status = path.stat()
    return hashlib.sha256(path.read_bytes()).hexdigest(), status.st_mtime_ns, status.st_ino, status.st_mode


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_index_only_leaves_the_shards_where_they_are(kind: int, tmp_path: Path) -> None:
    paths = shards(tmp_path / "shards", kind=kind)
    before = [fingerprint(path) for path in paths]
    prepared = prepare(*paths, tmp_path / "out.fan", "--index-only")
    assert [fingerprint(path) for path in paths] == before
    assert sorted(os.listdir(tmp_path / "out.fan")) == [".users", "index.fsx", "manifest.json"]
    infos = prepared.manifest["partitions"]
    assert [info["file"] for info in infos] == [str(path) for path in paths]
    assert all(info["external"] and not info["everywhere"] and info["entries"] == 40 for info in infos)
    for entry in range(prepared.index.n):
        path = prepared.index.path(entry)
        if path.endswith(b".bin"):
            assert prepared.content(entry) == incompressible(3_000, int(path[4:9]))


def test_index_only_with_everything_in_it(tree: Path, archive: Path, tmp_path: Path) -> None:
    """Also files of several chunks, hard links and long names."""
    prepared = prepare(archive, tmp_path / "out.fan", "--index-only")
    back = materialise(prepared, tmp_path / "back")
    try:
        assert compare_trees(tree, back) == []
    finally:
        oddities.remove_tree(back)


def test_index_only_with_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path / "shards", 1)
    monkeypatch.chdir(tmp_path)
    assert run_inside("prep", "shards/shard-000.tar", "out.fan", "--index-only").returncode == 0
    monkeypatch.chdir("/")
    assert Prepared(tmp_path / "out.fan").manifest["partitions"][0]["file"] == str(tmp_path / "shards/shard-000.tar")


def test_index_only_under_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    (path,) = shards(tmp_path / "shards", 1)
    odd = os.fsencode(tmp_path) + b"/caf\xe9.tar"
    os.rename(path, odd)
    result = run_inside("prep", Path(os.fsdecode(odd)), tmp_path / "out.fan", "--index-only")
    assert result.returncode == 0, result.stderr
    assert run_inside("verify", tmp_path / "out.fan").returncode == 0


def test_index_only_refuses_what_it_cannot_leave_in_place(tmp_path: Path) -> None:
    (path,) = shards(tmp_path / "shards", 1)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    for source in (tmp_path / "shards", tmp_path / "x.tar.gz"):
        sentence = assert_one_error(run_inside("prep", source, tmp_path / "out.fan", "--index-only"), "prep", 2)
        assert str(source) in sentence
    for option in (("--codec", "lz4"), ("--partitions", "2"), ("--everywhere", "x")):
        assert_one_error(run_inside("prep", path, tmp_path / "out.fan", "--index-only", *option), "prep", 2)
    assert not list(tmp_path.glob("*out.fan*"))


def test_index_only_clash(tmp_path: Path) -> None:
    (path,) = shards(tmp_path / "shards", 1)
    assert_one_error(run_inside("prep", path, path, tmp_path / "out.fan", "--index-only"), "prep")
