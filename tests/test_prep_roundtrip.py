"""Preparation keeps everything: a tree with all oddities, with each codec, comes back bit for bit.

Twice for each codec: by docs/format.md alone (materialise.py), and unpacked with GNU tar and lz4 or zstd alone, by
the very commands that the document gives.
"""

import itertools
import os
import re
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import oddities
import pytest
from commands import run_fanstore
from materialise import Prepared, materialise

CODECS = ["none", "lz4", "lz4hc", "zstd"]
SUFFIXES = {"none": "", "lz4": ".lz4", "lz4hc": ".lz4", "zstd": ".zst"}
README = Path(__file__).parent.parent / "README.md"
FORMAT = README.parent / "docs" / "format.md"


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that an ordinary user may enter (pytest's own may not be) and that goes away whatever is in it."""
    path = Path(tempfile.mkdtemp(prefix="fanstore-test-"))
    path.chmod(0o755)
    yield path
    oddities.remove_tree(path)


@pytest.fixture(scope="module")
def tree(place: Path) -> Path:
    """All oddities."""
    return oddities.build(place / "tree")


@pytest.fixture(scope="module")
def tar_tree(place: Path) -> Path:
    """What GNU tar can extract: no path longer than the kernel takes at once."""
    return oddities.build(place / "tar-tree", beyond_path_max=False, specials=False)


def prepare(source: Path, out: Path, *options: str) -> Prepared:
    result = run_fanstore("prep", source, out, *options)
    assert result.returncode == 0, result.stderr
    return Prepared(out)


@pytest.mark.parametrize("codec", CODECS)
def test_everything_comes_back_by_the_document(tree: Path, codec: str, tmp_path: Path) -> None:
    prepared = prepare(tree, tmp_path / "out.fan", "--codec", codec, "--partition-size", "8MiB")
    back = materialise(prepared, tmp_path / "back")
    try:
        assert oddities.compare_trees(tree, back) == []
    finally:
        oddities.remove_tree(back)
    assert len(prepared.parts) > 2
    if codec == "none":
        assert prepared.compressed() == set()


def test_totals_and_skipped(tree: Path, tmp_path: Path) -> None:
    result = run_fanstore("prep", tree, tmp_path / "out.fan", "--codec", "lz4")
    assert f"skipped {oddities.SPECIAL_COUNT} sockets, pipes and devices" in result.stdout
    prepared = Prepared(tmp_path / "out.fan")
    column = prepared.index.column
    own = [entry for entry in range(prepared.index.n) if column["inode"][entry] == entry]
    files = [entry for entry in own if stat.S_ISREG(column["mode"][entry])]
    assert prepared.manifest["totals"] == {
        "files": len(files),
        "directories": sum(stat.S_ISDIR(mode) for mode in column["mode"]),
        "symlinks": sum(stat.S_ISLNK(column["mode"][entry]) for entry in own),
        "hardlinks": prepared.index.n - len(own),
        "bytes": sum(column["size"][entry] for entry in files),
        "stored_bytes": sum(column["stored"][entry] for entry in files),
    }


def test_what_is_compressed_and_what_is_not(tree: Path, tmp_path: Path) -> None:
    compressed = prepare(tree, tmp_path / "out.fan", "--codec", "lz4").compressed()
    for path in (
        b"sizes/text-65536",
        b"sizes/text-9MiB",
        b"sizes/mixed-9MiB",
        b"sizes/zeros-8MiB",
        b"clashes/only.lz4",
    ):
        assert (path in compressed) == (path != b"clashes/only.lz4"), path
    names = {b"names/" + name: name for name in os.listdir(os.fsencode(tree / "names")) if name.startswith(b"long-")}
    for path, name in names.items():
        assert (path in compressed) == (len(name) + 4 <= 255), path
    for path in (b"clashes/a.txt", b"clashes/a.txt.lz4", b"clashes/b.txt", b"clashes/c.txt", b"clashes/d.txt"):
        assert path not in compressed, "the name of its member is taken"
    assert b"clashes/a.txt.lz4.lz4" in compressed and b"clashes/z" not in compressed
    assert not any(path.startswith((b"sizes/noise", b"hardlinks/")) for path in compressed)


def unpack_commands() -> list[str]:
    """The shell lines of docs/format.md that give the tree back."""
    text = FORMAT.read_text()
    section = text[text.index("To get the tree back") :]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1].replace("imagenet.fan", "$FAN").splitlines()


def shell(script: str, *, cwd: Path, user: int | None = None, **variables: str) -> None:
    # UTF-8, so that tar does not convert names of pax headers; warnings on times in the future are not of interest.
    env = os.environ | variables | {"LC_ALL": "C.UTF-8", "TAR_OPTIONS": "--warning=no-timestamp"}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=env,
        capture_output=True,
        timeout=150,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    assert result.returncode == 0, result.stderr.decode(errors="replace")[-3000:]
    assert result.stderr == b""


@pytest.mark.parametrize("codec", CODECS)
def test_the_documented_commands_give_the_tree_back(tar_tree: Path, codec: str, tmp_path: Path) -> None:
    """Literally those of docs/format.md, but for the files that had a codec's suffix before, as it says."""
    prepared = prepare(tar_tree, tmp_path / "out.fan", "--codec", codec, "--partitions", "3")
    suffix = SUFFIXES[codec]
    listed = b"".join(b"out/" + path + suffix.encode() + b"\0" for path in sorted(prepared.compressed()))
    (tmp_path / "list").write_bytes(listed)
    script = "\n".join(unpack_commands())
    assert f"find out -name '*{suffix}' -print0" in script or not suffix
    script = script.replace(f"find out -name '*{suffix}' -print0", "cat list")
    shell(re.sub(r"find out -name '.*' -print0", "true", script), cwd=tmp_path, FAN=str(tmp_path / "out.fan"))
    try:
        assert oddities.compare_trees(tar_tree, tmp_path / "out") == []
    finally:
        oddities.remove_tree(tmp_path / "out")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_the_documented_commands_as_they_are(codec: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with_parts = {b"sizes": oddities.PARTS[b"sizes"], b"times": oddities.PARTS[b"times"]}
    source.mkdir()
    with oddities.opened_directory(source) as fd:
        for name, make in with_parts.items():
            with oddities.made_directory(fd, name) as inner:
                make(inner)
    prepare(source, tmp_path / "out.fan", "--codec", codec, "--partitions", "2")
    shell("\n".join(unpack_commands()), cwd=tmp_path, FAN=str(tmp_path / "out.fan"))
    assert oddities.compare_trees(source, tmp_path / "out") == []


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_the_commands_of_the_readme(codec: str, tmp_path: Path) -> None:
    """They are shorter than those of docs/format.md, and keep no fractions of seconds where lz4 does not."""
    source = tmp_path / "source"
    for number, size in enumerate((0, 1, 1_000, 100_000, 9 << 20)):
        (source / str(number)).mkdir(parents=True)
        (source / str(number) / "text").write_bytes(oddities.compressible(size))
        (source / str(number) / "noise").write_bytes(oddities.incompressible(size))
    prepared = prepare(source, tmp_path / "out.fan", "--codec", codec, "--partitions", "2")
    assert len(prepared.compressed()) == (0 if codec == "none" else 3)
    block = re.search(r"get your data back.*?```\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    shell(block[1].replace("imagenet.fan", "$FAN"), cwd=tmp_path, FAN=str(tmp_path / "out.fan"))
    shell("diff -r source out", cwd=tmp_path)


@pytest.mark.skipif(not oddities.IS_ROOT, reason="needs root to become an ordinary user")
def test_an_ordinary_user_can_unpack_read_only_directories(place: Path) -> None:
    """Directories come last in the tar, so that a read-only one is not in the way of its own files."""
    source, out = place / "readonly", place / "readonly.fan"
    for directory in (source / "a" / "b", source / "c"):
        directory.mkdir(parents=True)
        for number in range(30):
            (directory / f"file-{number}").write_bytes(oddities.compressible(1000 * number))
    os.link(source / "a" / "b" / "file-1", source / "c" / "link")
    for directory in (source / "a" / "b", source / "a", source / "c", source):
        os.utime(directory, ns=(0, 1_500_000_000_123_456_789))
        directory.chmod(0o555)
    prepare(source, out, "--partitions", "2")
    target = place / "unpacked"
    target.mkdir()
    os.chown(target, 65534, 65534)
    shell('for p in "$FAN"/part-*.tar; do tar -xpf "$p" -C .; done', cwd=target, user=65534, FAN=str(out))
    assert oddities.compare_trees(source, target) == []


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_partitions_are_plain_tar_files(tar_tree: Path, codec: str, tmp_path: Path) -> None:
    """Another reader (Python's) agrees with the index on every member: name, place, size, attributes."""
    prepared = prepare(tar_tree, tmp_path / "out.fan", "--codec", codec, "--partitions", "4")
    column, compressed = prepared.index.column, prepared.compressed()
    seen: list[bytes] = []
    for number, info in enumerate(prepared.manifest["partitions"]):
        with tarfile.open(tmp_path / "out.fan" / info["file"], "r:", errors="surrogateescape") as tar:
            members = tar.getmembers()
        assert len(members) == info["entries"]
        assert prepared.parts[number].endswith(bytes(1024))
        assert len(prepared.parts[number]) % 512 == 0
        for member in members:
            path = member.name.encode("utf-8", "surrogateescape").removeprefix(b".")
            if path.removesuffix(SUFFIXES[codec].encode()) in compressed:
                path = path.removesuffix(SUFFIXES[codec].encode())
            entry = prepared.index.resolve(path)
            assert entry >= 0, path
            seen.append(path)
            assert member.mode == stat.S_IMODE(column["mode"][entry])
            # A comment means nothing, and lets the content of large files begin at a multiple of a page.
            assert set(member.pax_headers) <= {"path", "linkpath", "mtime", "size", "uid", "gid", "comment"}
            if member.isreg():
                assert column["part"][entry] == number
                assert (member.offset_data, member.size) == (column["offset"][entry], column["stored"][entry])
            elif member.islnk():
                first = prepared.index.resolve(member.linkname.encode("utf-8", "surrogateescape"))
                assert first == column["inode"][entry] != entry
    assert sorted(seen) == sorted(prepared.paths() | {b""}), "each entry is one member of one partition"


def test_members_of_a_directory_are_together(tar_tree: Path, tmp_path: Path) -> None:
    prepared = prepare(tar_tree, tmp_path / "out.fan", "--partitions", "2")
    column = prepared.index.column
    files = [e for e in range(prepared.index.n) if prepared.index.is_type(e, stat.S_IFREG) and column["inode"][e] == e]
    files.sort(key=lambda entry: (column["part"][entry], column["offset"][entry]))
    parents = [column["parent"][entry] for entry in files]
    runs = sum(a != b for a, b in itertools.pairwise(parents)) + 1
    # A cut between two partitions may split one directory.
    assert runs <= len(set(parents)) + 1


def test_the_same_source_gives_the_same_bytes(tar_tree: Path, tmp_path: Path) -> None:
    """Whatever the number of threads: nothing depends on who was first."""
    options = ("--codec", "lz4", "--partition-size", "6MiB")
    first = prepare(tar_tree, tmp_path / "first.fan", *options, "--jobs", "1")
    for jobs in ("2", "5"):
        other = prepare(tar_tree, tmp_path / f"{jobs}.fan", *options, "--jobs", jobs)
        assert other.parts == first.parts
        assert (tmp_path / f"{jobs}.fan" / "index.fsx").read_bytes() == (
            tmp_path / "first.fan" / "index.fsx"
        ).read_bytes()
        assert other.manifest | {"created": 0, "checksum": 0} == first.manifest | {"created": 0, "checksum": 0}


def test_an_empty_directory_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    prepared = prepare(tmp_path / "source", tmp_path / "out.fan")
    assert prepared.index.n == 1
    assert oddities.compare_trees(tmp_path / "source", materialise(prepared, tmp_path / "back")) == []


@pytest.mark.skipif(
    "FANSTORE_TEST_HUGE" not in os.environ,
    reason="reads 8 GiB several times: only with scripts/test --all or FANSTORE_TEST_HUGE=1",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_file_of_more_than_8_gib(codec: str, place: Path) -> None:
    source, out, target = place / "huge", place / "huge.fan", place / "huge-unpacked"
    source.mkdir()
    with oddities.opened_directory(source) as fd:
        oddities.PARTS.get(b"huge", oddities._huge)(fd)
    result = run_fanstore("prep", source, out, "--codec", codec, limit_s=200)
    assert result.returncode == 0, result.stderr
    target.mkdir()
    suffix = ".lz4" if codec == "lz4" else ""
    shell(f'tar -xSpf "$FAN"/part-00000.tar -C . sparse{suffix}', cwd=target, FAN=str(out))
    if suffix:
        shell("lz4 -d -q -m --rm sparse.lz4", cwd=target)
    result = run_fanstore("verify", out, "--against", source, limit_s=200)
    assert result.returncode == 0, result.stdout
    compared = subprocess.run(["cmp", source / "sparse", target / "sparse"], capture_output=True, timeout=200)
    assert compared.returncode == 0, compared.stdout
    for path in (source, out, target):
        oddities.remove_tree(path)
