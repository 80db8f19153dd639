"""Symbolic links that leave the source: fanstore-prep warns, and packs what they point to with --dereference."""

import os
import re
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from commands import assert_one_error, mpirun, run_fanstore, run_inside
from materialise import Prepared, materialise
from oddities import compressible, incompressible, make_deep, opened_directory, remove_tree, write_file

MIB = 1 << 20


def hub(root: Path) -> Path:
    """The layout of Hugging Face's cache: a snapshot is a directory of links to the blobs beside it."""
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "main"
    (snapshot / "data").mkdir(parents=True)
    for number in range(3):
        (root / "blobs" / f"{number:040x}").write_bytes(incompressible(30_000, number))
    (snapshot / "config.json").symlink_to(f"../../blobs/{0:040x}")
    (snapshot / "data" / "a.bin").symlink_to(f"../../../blobs/{1:040x}")
    (snapshot / "data" / "b.bin").symlink_to(root / "blobs" / f"{2:040x}")
    return snapshot


def walked(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file below a directory, links followed: permissions, time and content."""
    found = {}
    for folder, _, files in os.walk(root, followlinks=True):
        for name in files:
            path = Path(folder, name)
            status = path.stat()
            found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, path.read_bytes())
    return found


def test_links_out_of_the_source_are_warned_of(tmp_path: Path) -> None:
    snapshot = hub(tmp_path / "hub")
    result = run_inside("prep", snapshot, tmp_path / "out.fan")
    assert result.returncode == 0
    (warning,) = re.findall("warning: .*", result.stderr)
    first = f"'config.json' to '../../blobs/{0:040x}'"
    assert warning.startswith("warning: 3 symbolic links out of the source will lead nowhere in the mount, or to ")
    assert warning.endswith(f"such as {first}; --dereference packs what links in directories point to")


@pytest.mark.parametrize(
    ("link", "target", "leaves"),
    [
        ("l", "file", False),
        ("l", "..", True),
        ("a/l", "..", False),
        ("a/l", "../file", False),
        ("a/l", "../../x", True),
        ("a/b/l", "../../../x", True),
        ("a/b/l", ".././//../file", False),
        ("a/b/l", "../../a/../../x", True),
        ("l", "..file/..x", False),
        ("l", "a/../..", True),
        ("l", "/etc/passwd", True),
        ("l", "nothing", False),
    ],
)
def test_which_links_leave(tmp_path: Path, link: str, target: str, leaves: bool) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / link).symlink_to(target)
    directory = run_inside("prep", source, tmp_path / "out.fan")
    assert ("warning: 1 symbolic link out of" in directory.stderr) == leaves
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(source, ".")
    packed = run_inside("prep", tmp_path / "x.tar", tmp_path / "tar.fan")
    assert ("warning: 1 symbolic link out of" in packed.stderr) == leaves


@pytest.mark.parametrize("options", [[], ["--codec", "lz4", "--partitions", "3"], ["--codec", "auto"]])
def test_what_links_point_to(tmp_path: Path, options: list[str]) -> None:
    """A snapshot alone; links are gone, attributes are those of the files."""
    snapshot = hub(tmp_path / "hub")
    os.utime(tmp_path / "hub/blobs" / f"{1:040x}", ns=(5, 123_456_789))
    (tmp_path / "hub/blobs" / f"{2:040x}").chmod(0o640)
    large = tmp_path / "large"
    large.write_bytes(compressible(20 * MIB))
    (snapshot / "large").symlink_to(large)
    result = run_inside("prep", snapshot, tmp_path / "out.fan", "--dereference", *options)
    assert result.returncode == 0 and "warning" not in result.stderr, result.stderr
    prepared = Prepared(tmp_path / "out.fan")
    assert walked(materialise(prepared, tmp_path / "back")) == walked(snapshot)
    totals = prepared.manifest["totals"]
    assert (totals["files"], totals["symlinks"], totals["hardlinks"]) == (4, 0, 0)
    assert run_inside("verify", tmp_path / "out.fan", "--against", snapshot, "--dereference").returncode == 0
    without = run_inside("verify", tmp_path / "out.fan", "--against", snapshot)
    assert without.returncode == 1 and "a symbolic link in the source, a file in the dataset" in without.stdout


def test_what_several_links_lead_to_is_stored_once(tmp_path: Path) -> None:
    """The whole cache: blobs and the links to them; a directory and a link to it; hard links."""
    root = hub(tmp_path / "hub").parent.parent
    (root / "snapshots" / "other").symlink_to("main")
    (root / "again").symlink_to(root / "blobs")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"x" * 5_000)
    os.link(tmp_path / "elsewhere" / "file", tmp_path / "elsewhere" / "second name")
    out = tmp_path / "out.fan"
    assert run_inside("prep", root, out, "--dereference").returncode == 0
    prepared = Prepared(out)
    assert walked(materialise(prepared, tmp_path / "back")) == walked(root)
    totals = prepared.manifest["totals"]
    assert (totals["files"], totals["symlinks"]) == (4, 0)
    assert totals["hardlinks"] == 3 * 3 + 1, "blobs twice, and two snapshots; the second name"
    assert totals["bytes"] == 3 * 30_000 + 5_000
    assert run_inside("verify", out, "--against", root, "--dereference").returncode == 0
    shared = tmp_path / "back" / "snapshots" / "main" / "config.json"
    assert os.path.samefile(shared, tmp_path / "back" / "again" / f"{0:040x}")
    # Two sources that lead to the same files, with names of which both have some.
    for name in ("one", "two"):
        (tmp_path / name / "common").mkdir(parents=True)
        (tmp_path / name / "common" / name).symlink_to(root / "blobs")
    assert (
        run_inside("prep", tmp_path / "one", tmp_path / "two", tmp_path / "both.fan", "--dereference").returncode == 0
    )
    both = Prepared(tmp_path / "both.fan").manifest["totals"]
    assert (both["files"], both["hardlinks"]) == (3, 3)


def test_loops_and_links_to_nothing(tmp_path: Path) -> None:
    """They are listed like files that cannot be read, the rest is packed, and the exit code says so."""
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "file").write_bytes(b"content")
    for link, target in {
        "itself": "itself",
        "a/b/root": str(source),
        "a/up": "..",
        "a/b/here": ".",
        "nothing": "no/such/file",
        "a/gone": "/no/such/file",
        "fine": "a/b",
    }.items():
        (source / link).symlink_to(target)
    os.mkfifo(source / "pipe")
    (source / "to a pipe").symlink_to("pipe")
    result = run_inside("prep", source, tmp_path / "out.fan", "--dereference")
    assert result.returncode == 3, result.stderr
    listed = dict(re.findall("^  '(.*)': is a symbolic link that leads (.*)$", result.stderr, re.MULTILINE))
    circles, nowhere = "round in circles", "nowhere"
    assert listed == {
        "itself": circles,
        "nothing": nowhere,
        "a/up": circles,
        "a/gone": nowhere,
        "a/b/root": circles,
        "a/b/here": circles,
        "fine/root": circles,
        "fine/here": circles,
    }
    assert "skipped 2 sockets, pipes and devices" in result.stdout
    assert Prepared(tmp_path / "out.fan").paths() == {b"a", b"a/b", b"a/b/file", b"fine", b"fine/file"}
    against = run_inside("verify", tmp_path / "out.fan", "--against", source, "--dereference")
    assert against.stdout.count("the source is a symbolic link that leads") == 8


def test_a_link_to_where_the_dataset_is_made(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "place").mkdir()
    (tmp_path / "source" / "link").symlink_to(tmp_path / "place")
    result = run_inside("prep", tmp_path / "source", tmp_path / "place" / "out.fan", "--dereference")
    assert "would lie inside" in assert_one_error(result, "prep", 2)
    assert os.listdir(tmp_path / "place") == []


def test_deep_directories_behind_links(tmp_path: Path) -> None:
    """Deeper than the kernel takes a path at once."""
    (tmp_path / "elsewhere").mkdir()
    with opened_directory(tmp_path / "elsewhere") as fd:
        make_deep(fd, [b"d" * 200] * 40, lambda bottom: write_file(bottom, b"file", b"x"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "link").symlink_to(tmp_path / "elsewhere")
    assert run_inside("prep", tmp_path / "source", tmp_path / "out.fan", "--dereference").returncode == 0
    assert Prepared(tmp_path / "out.fan").manifest["totals"]["files"] == 1
    remove_tree(tmp_path / "elsewhere")


def test_several_ranks(tmp_path: Path) -> None:
    snapshot = hub(tmp_path / "hub")
    out = tmp_path / "out.fan"
    result = run_fanstore("prep", snapshot, out, "--dereference", "--partitions", "3", prefix=mpirun(2))
    assert result.returncode == 0, result.stderr
    assert walked(materialise(Prepared(out), tmp_path / "back")) == walked(snapshot)


def test_with_tar_files(tmp_path: Path) -> None:
    """Links in a tar file stay links; with --index-only there can be nothing to follow."""
    snapshot = hub(tmp_path / "hub")
    subprocess.run(["tar", "-cf", tmp_path / "x.tar", "-C", snapshot, "data"], check=True, timeout=60)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "link").symlink_to(snapshot / "config.json")
    out = tmp_path / "out.fan"
    result = run_inside("prep", tmp_path / "x.tar", tmp_path / "more", out, "--dereference")
    assert result.returncode == 0 and "2 symbolic links out of the source" in result.stderr
    index = Prepared(out).index
    kinds = [stat.S_IFMT(mode) for mode in index.column["mode"]]
    assert (kinds.count(stat.S_IFLNK), kinds.count(stat.S_IFREG)) == (2, 1)
    refused = run_inside("prep", tmp_path / "x.tar", tmp_path / "no.fan", "--dereference", "--index-only")
    assert "--index-only takes tar files" in assert_one_error(refused, "prep", 2)
