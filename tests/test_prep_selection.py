"""What goes into a dataset and where: patterns, samples, a folder per source, zip files; and the room that it takes."""

import io
import json
import mmap
import os
import shutil
import stat
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from commands import assert_one_error, run_inside
from oddities import compressible, incompressible

from fanstore import _native
from fanstore.format.prepared import PreparedDataset
from fanstore.prep import room
from fanstore.prep.plan import Limits, make_plan
from fanstore.prep.scan import scan
from fanstore.prep.sources import DirectorySource, Given, in_own_folder
from fanstore.units import format_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree") / "source"
    for number in range(100):
        path = root / f"class{number // 10}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(2 * KIB, number))
    (root / "class1" / "notes.tmp").write_bytes(b"no")
    (root / "class2" / "deep").mkdir()
    (root / "class2" / "deep" / "inside.txt").write_bytes(b"yes")
    (root / "again").hardlink_to(root / "class9" / "090.jpg")
    (root / "link").symlink_to("class0/000.jpg")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module", params=["directory", "tar"])
def source(request: pytest.FixtureRequest, tree: Path) -> Path:
    if request.param == "directory":
        return tree
    subprocess.run(["tar", "-cf", tree.parent / "source.tar", "-C", tree, "."], check=True, timeout=60)
    return tree.parent / "source.tar"


def succeed(command: str, *arguments: str | Path) -> tuple[str, str]:
    result = run_inside(command, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, result.stderr


def paths(out: Path) -> set[str]:
    index = PreparedDataset.open(out).index
    return {os.fsdecode(index.path(entry)) for entry in range(1, index.entry_count)}


def expected(tree: Path, *options: str) -> set[str]:
    """By another program: what GNU find finds."""
    found = subprocess.run(
        ["find", ".", "-mindepth", "1", *options], cwd=tree, capture_output=True, check=True, text=True
    )
    return {line[2:] for line in found.stdout.splitlines()}


def test_exclude(source: Path, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.fan"
    said, notes = succeed("prep", source, out, "--exclude", "*.tmp", "--exclude", "class2/", "--exclude", "nothing*")
    assert "--exclude 'nothing*' matches nothing" in notes and "class2" not in notes
    assert "12 files left out" in said
    assert paths(out) == expected(tree, "-not", "-name", "*.tmp", "-not", "-path", "./class2*")
    assert "the same" in succeed("verify", out, "--against", source)[0]
    assert json.loads((out / "manifest.json").read_bytes())["origin"]["left_out"] == 12


def test_include(source: Path, tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.fan"
    succeed("prep", source, out, "--include", "class1", "--include", "*/deep/*", "--exclude", "*.tmp")
    files = expected(tree, "-path", "./class1*", "-not", "-name", "*.tmp") | {"class2/deep/inside.txt"}
    assert paths(out) == files | {"class2", "class2/deep"}
    assert "the same" in succeed("verify", out, "--against", source)[0]


def test_the_first_name_of_a_file_is_left_out(source: Path, tmp_path: Path) -> None:
    """Then the further one is all there is of it."""
    out = tmp_path / "out.fan"
    said, _ = succeed("prep", source, out, "--include", "class9")
    assert "10 files, 2 directories" in said
    index = PreparedDataset.open(out).index
    assert index.nlink[index.resolve(b"class9/090.jpg")] == 1
    assert "the same" in succeed("verify", out, "--against", source)[0]


def test_nothing_is_included(source: Path, tmp_path: Path) -> None:
    _, notes = succeed("prep", source, tmp_path / "out.fan", "--include", "*.png")
    assert "--include '*.png' matches nothing" in notes and "nothing is left to pack" in notes


def test_sample(source: Path, tmp_path: Path) -> None:
    taken = []
    for name, options in (("a", ()), ("b", ()), ("c", ("--shuffle", "5"))):
        said, _ = succeed("prep", source, tmp_path / f"{name}.fan", "--sample", "20", "--include", "class*", *options)
        assert said.startswith(f"{tmp_path / name}.fan: 20 files")
        taken.append({path for path in paths(tmp_path / f"{name}.fan") if path.endswith((".jpg", ".tmp", ".txt"))})
    assert taken[0] == taken[1] != taken[2]
    for chosen in taken:
        assert {path.split("/")[0] for path in chosen} == {f"class{number}" for number in range(10)}, "spread over all"
    assert "the same" in succeed("verify", tmp_path / "a.fan", "--against", source)[0]
    said, _ = succeed("prep", source, tmp_path / "all.fan", "--sample", "5000")
    assert "102 files" in said, "all of them"
    assert "--sample needs" in assert_one_error(
        run_inside("prep", source, tmp_path / "n.fan", "--sample", "0"), "prep", 2
    )


def test_a_prefix_per_source(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "000.jpg").write_bytes(incompressible(70 * MIB))  # streamed, not packed in a buffer
    (tmp_path / "b" / "deep").mkdir()
    (tmp_path / "b" / "deep" / "x").write_bytes(b"x")
    subprocess.run(["tar", "-cf", tmp_path / "c.tar", "-C", tree, "class1", "class2"], check=True, timeout=60)
    sources = (
        f"train/one={tree}",
        f"val={tmp_path / 'b'}",
        f"train/two={tmp_path / 'c.tar'}",
        f"{tmp_path / 'b/deep'}",
    )
    out = tmp_path / "out.fan"
    succeed("prep", *sources, out, "--codec", "lz4")
    assert {"train", "val", "x", "train/one/class0/000.jpg", "val/000.jpg", "val/deep/x", "train/two/class1"} < paths(
        out
    )
    assert "train/one/class3" not in {path for path in paths(out) if path.startswith("train/two")}
    assert "the same" in succeed("verify", out, "--against", *sources)[0]
    assert "differences" in run_inside("verify", out, "--against", f"train/one={tree}").stdout


def test_a_path_with_an_equals_sign(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b").mkdir()
    Path("a=b/file").write_bytes(b"1")
    succeed("prep", "a=b", "out.fan")
    assert paths(Path("out.fan")) == {"file"}
    for name in ("../x", "/abs", "a//b", "", "."):
        assert "is no name of a folder" in assert_one_error(run_inside("prep", f"{name}={tree}", "n.fan"), "prep", 2)
    assert "no path behind '='" in assert_one_error(run_inside("prep", "name=", "n.fan"), "prep", 2)
    assert "'nowhere'" in assert_one_error(run_inside("prep", "name=nowhere", "n.fan"), "prep", 1)


def write_shards(directory: Path, *names: str) -> list[Path]:
    for name in names:
        with tarfile.open(directory / name, "w:gz" if name.endswith("gz") else "w") as tar:
            member = tarfile.TarInfo("0000.jpg")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return [directory / name for name in names]


def test_shards_with_names_in_common(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, "s-000.tar", "s-001.tar", "s.002.tar.gz")
    out = tmp_path / "out.fan"
    sentence = assert_one_error(run_inside("prep", *shards[:2], out), "prep")
    assert "is in both" in sentence and "--shard-folders" in sentence
    for options in ((), ("--index-only",)):
        used = shards if not options else shards[:2]
        succeed("prep", *used, out, "--shard-folders", "--force", *options)
        names = {"s-000", "s-001", "s.002"} if not options else {"s-000", "s-001"}
        assert paths(out) == names | {f"{name}/0000.jpg" for name in names}
    assert "the same" in succeed("verify", out, "--against", *shards[:2], "--shard-folders")[0]
    succeed("prep", *shards[:2], out, "--shard-folders", "--force")
    assert "1 added, 0 changed" in succeed("prep", *shards, out, "--shard-folders", "--update")[0]


def test_zip_files(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tree / "class0", "class0")
        archive.write(tree / "class0" / "000.jpg", "class0/000.jpg")
        archive.writestr(zipfile.ZipInfo("ünï/plain", (1999, 12, 31, 23, 59, 58)), b"plain")
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "class0/000.jpg")
        script = zipfile.ZipInfo("run.sh")
        script.external_attr = (stat.S_IFREG | 0o755) << 16
        # Unix programs keep the time in UTC as well.
        script.extra = b"UT\x05\x00\x01" + (1_234_567_890).to_bytes(4, "little")
        archive.writestr(script, bytes(5 * MIB))
    out = tmp_path / "out.fan"
    succeed("prep", target, out)
    index = PreparedDataset.open(out).index
    assert paths(out) == {"class0", "class0/000.jpg", "ünï", "ünï/plain", "link", "run.sh"}
    assert index.link_target(index.resolve(b"link")) == b"class0/000.jpg"
    run = index.resolve(b"run.sh")
    assert (index.size[run], index.mtime_ns[run]) == (5 * MIB, 1_234_567_890 * 10**9)
    assert index.mode[run] == stat.S_IFREG | 0o755
    plain = index.resolve("ünï/plain".encode())
    assert index.mtime_ns[plain] == time.mktime((1999, 12, 31, 23, 59, 58, 0, 0, -1)) * 10**9
    with tarfile.open(out / "part-00000.tar") as tar:
        content = tar.extractfile("class0/000.jpg")
        assert content is not None and content.read() == (tree / "class0" / "000.jpg").read_bytes()
    assert not list(tmp_path.glob(".out.fan*")) and sorted(os.listdir(out)) == sorted(
        [".users", "index.fsx", "manifest.json", "part-00000.tar"]
    )


def test_zip_files_that_are_refused(tmp_path: Path) -> None:
    def write(name: str, member: str, content: bytes = b"content" * 100) -> Path:
        with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        return tmp_path / name

    encrypted = write("secret.zip", "x")
    data = bytearray(encrypted.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + flags] |= 1
    encrypted.write_bytes(data)
    damaged = write("damaged.zip", "x", incompressible(5000))
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 1
    damaged.write_bytes(data)
    cut = write("cut.zip", "x")
    os.truncate(cut, cut.stat().st_size - 10)
    for path, said in (
        (encrypted, "is encrypted"),
        (damaged, "is damaged or cut short"),
        (cut, "is damaged or cut short"),
        (write("up.zip", "../up"), "with '..' in it"),
        (write("absolute.zip", "/etc/passwd"), "that is absolute"),
    ):
        assert said in assert_one_error(run_inside("prep", path, tmp_path / "out.fan"), "prep")
        assert not (tmp_path / "out.fan").exists() and not list(tmp_path.glob(".out.fan*"))


def test_the_room_is_said_and_nearly_right(tree: Path, tmp_path: Path) -> None:
    succeed("prep", tree, tmp_path / "out.fan")
    taken = sum(path.stat().st_size for path in (tmp_path / "out.fan").glob("[pi]*"))
    source = DirectorySource(str(tree))
    table = scan([source], lambda _: None).table
    found = room.estimate(table, [source], make_plan(table, Limits(1 << 30, None, [])))
    source.close()
    assert abs(found.total - taken) < 0.02 * taken
    _, notes = succeed("prep", tree, tmp_path / "again.fan")
    assert f"103 files to pack: {format_bytes(found.total)}" in notes and "are free" in notes


def test_too_little_room(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is said to have little: the only thing that is not real here, since real small disks need root."""
    real = os.statvfs

    def nearly_full(path: object) -> os.statvfs_result:
        values = list(real(path))  # type: ignore[arg-type]  # as os.statvfs takes it
        values[4] = 100 * KIB // values[1]
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    sentence = assert_one_error(run_inside("prep", tree, tmp_path / "out.fan"), "prep")
    assert "only 100 KiB are free there" in sentence and "would take" in sentence
    assert not list(tmp_path.iterdir())
    succeed("prep", tree, tmp_path / "out.fan", "--codec", "lz4")  # it may well shrink
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(10 << 30)
    monkeypatch.undo()
    holes = room.Room(1, 10 << 30, 10 << 30, 2048, 100)
    room.refuse_too_little(holes, 100 * KIB, 0, "OUT")  # holes take no room


# --- large files at multiples of a page ---


SIZES = [*[3000] * 7, MIB, MIB - 1, 5, 4 * MIB + 1, *[900] * 3, 2 * MIB + 511, MIB, 70 * MIB + 3, 7, MIB + 4096, 0]


def test_large_files_are_page_aligned(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out.fan"
    source.mkdir()
    for number, size in enumerate(SIZES):
        name = f"{number:02d}" + ("-" + "n" * 180 if number % 3 == 0 else "")
        (source / name).write_bytes(incompressible(size, number))
        # Some headers have records of their own (times with fractions, long names), some have none.
        os.utime(source / name, ns=(0, 1_600_000_000 * 10**9 + (number % 2) * 123_456_789))
    succeed("prep", source, out, "--jobs", "4", "--partition-size", "60MiB")
    index = PreparedDataset.open(out).index
    large = [entry for entry in range(1, index.entry_count) if index.size[entry] >= MIB]
    assert len(large) == 6
    assert [index.offset[entry] % mmap.PAGESIZE for entry in large] == [0] * 6
    assert any(index.offset[entry] % 4096 for entry in range(1, index.entry_count))
    assert "the same" in succeed("verify", out, "--against", source)[0]
    assert 0 < sum(path.stat().st_size for path in out.glob("part-*")) - sum(SIZES) < 6 * 8192 + 20 * 2048
    for name, command in (
        ("gnu", ["tar", "-xpf"]),
        ("libarchive", ["bsdtar", "-xpf"] if shutil.which("bsdtar") else ["cmake", "-E", "tar", "xf"]),
        ("python", ["python3", "-c", "import sys,tarfile;tarfile.open(sys.argv[1]).extractall()"]),
    ):
        if shutil.which(command[0]) is None:
            continue
        target = tmp_path / name
        target.mkdir()
        for part in sorted(out.glob("part-*.tar")):
            done = subprocess.run([*command, part], cwd=target, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(target)) == sorted(os.listdir(source))
        for path in source.iterdir():
            assert (target / path.name).read_bytes() == path.read_bytes()
            assert (target / path.name).stat().st_mtime == pytest.approx(path.stat().st_mtime, abs=1e-5)


@pytest.mark.parametrize("path", [b"short", b"d/" * 60 + b"n" * 150, b"n" * 255])
@pytest.mark.parametrize("mtime_ns", [0, 1])
def test_headers_end_at_a_page_wherever_they_begin(path: bytes, mtime_ns: int) -> None:
    for position in range(0, 8192, 512):
        header = _native.tar_file_header(path, 0o644, 0, 0, mtime_ns, MIB, MIB, position)
        assert (position + len(header)) % 4096 == 0 and len(header) <= 512 * 3 + 4096 + len(path)
        with tarfile.open(fileobj=io.BytesIO(header + bytes(MIB + 1024))) as tar:
            (member,) = tar.getmembers()
        assert (member.name.encode(), member.size, member.mtime) == (path, MIB, mtime_ns / 1e9)
        fill = _native.tar_fill(position)
        assert (position + len(fill)) % 4096 == 0 and len(fill) in (0, *range(1024, 5120, 512))
        with tarfile.open(fileobj=io.BytesIO(fill + header + bytes(MIB + 1024))) as tar:
            assert [one.name.encode() for one in tar] == [path]


@pytest.mark.parametrize(
    ("path", "folder"), [("x/a.tar.gz", "a"), ("x/.tar", ".tar"), ("x/..tar", "..tar"), ("x/...tar", "...tar")]
)
def test_a_folder_has_a_name_that_leads_nowhere_else(path: str, folder: str) -> None:
    assert in_own_folder(Given(path, b"p")).prefix == b"p/" + folder.encode()
