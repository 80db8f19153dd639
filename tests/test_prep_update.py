"""fanstore-prep --update, and going on after a run that was killed: never a wrong byte, and nothing done twice."""

import fcntl
import gzip
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from commands import BIN, assert_one_error, run_inside
from mounting import Mount, needs_fuse
from object_servers import Nginx, needs_nginx
from oddities import compare_trees, compressible, incompressible

from fanstore.errors import FormatError
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import Directory
from fanstore.prep import build, outdir
from fanstore.prep.spool import spool

pytest_plugins = ["mounting", "object_servers"]

KIB, MIB = 1 << 10, 1 << 20


def make_source(root: Path) -> Path:
    for number in range(40):
        path = root / f"class{number % 4}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(9 * KIB + 100 * number, number))
    (root / "large").write_bytes(incompressible(9 * MIB, 99))
    (root / "link").symlink_to("class0/000.txt")
    (root / "linked").hardlink_to(root / "class1" / "001.txt")
    (root / "empty").mkdir()
    return root


def succeed(command: str, *arguments: str | Path) -> str:
    result = run_inside(command, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def verified(out: Path, *sources: str | Path, options: tuple[str, ...] = ()) -> None:
    assert "the same" in succeed("verify", out, "--against", *sources, *options)


def unpack(out: Path, target: Path) -> Path:
    """As docs/format.md says it, for a dataset without compression."""
    target.mkdir()
    for part in sorted(out.glob("part-*.tar")):
        subprocess.run(["tar", "-xpf", part, "-C", target], check=True, timeout=60)
    return target


def partitions(out: Path) -> dict[str, tuple[int, int]]:
    """By name of a partition: which file it is, and when it was written."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("part-*.tar")}


def change_content(root: Path) -> None:
    (root / "class2" / "002.txt").write_bytes(b"another")


def change_size_only(root: Path) -> None:
    """The time stays as it was."""
    path = root / "class2" / "006.txt"
    before = path.stat()
    path.write_bytes(path.read_bytes() + b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def change_time_only(root: Path) -> None:
    path = root / "class3" / "003.txt"
    content = bytes(reversed(path.read_bytes()))
    path.write_bytes(content)
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def change_link(root: Path) -> None:
    (root / "link").unlink()
    (root / "link").symlink_to("class0/00x.txt")


def unlink_hard(root: Path) -> None:
    """The further name of a file becomes one of its own, of the same content and time."""
    path = root / "linked"
    shutil.copy2(path, root / "copy")
    os.rename(root / "copy", path)


def file_to_directory(root: Path) -> None:
    (root / "class0" / "004.txt").unlink()
    (root / "class0" / "004.txt").mkdir()
    (root / "class0" / "004.txt" / "inside").write_bytes(b"in")


def directory_to_file(root: Path) -> None:
    shutil.rmtree(root / "class3")
    (root / "class3").write_bytes(b"a file now")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "added": (lambda root: (root / "class0" / "new.txt").write_bytes(b"new"), "1 added, 0 changed, 0 removed"),
    "removed": (lambda root: (root / "class0" / "000.txt").unlink(), "0 added, 0 changed, 1 removed"),
    "content": (change_content, "0 added, 1 changed, 0 removed"),
    "size": (change_size_only, "0 added, 1 changed, 0 removed"),
    "time": (change_time_only, "0 added, 1 changed, 0 removed"),
    "mode": (lambda root: (root / "large").chmod(0o600), "0 added, 1 changed, 0 removed"),
    "link": (change_link, "0 added, 1 changed, 0 removed"),
    "hard link": (unlink_hard, "0 added, 2 changed, 0 removed"),
    "hard link added": (lambda root: (root / "z").hardlink_to(root / "large"), "1 added, 1 changed, 0 removed"),
    "directory": (lambda root: (root / "more" / "deep").mkdir(parents=True), "0 added, 0 changed, 0 removed"),
    "directory mode": (lambda root: (root / "class1").chmod(0o700), "0 added, 0 changed, 0 removed"),
    "file to directory": (file_to_directory, "1 added, 0 changed, 1 removed"),
    "directory to file": (directory_to_file, "0 added, 1 changed, 10 removed"),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source and its dataset, by codec; to be copied, never changed."""
    root = tmp_path_factory.mktemp("before")
    make_source(root / "source")
    for codec in ("none", "lz4"):
        succeed("prep", root / "source", root / f"{codec}.fan", "--codec", codec, "--partition-size", "1MiB")
    return root


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("name", CHANGES)
def test_only_what_has_changed_is_written(before: Path, name: str, codec: str, tmp_path: Path) -> None:
    change, expected = CHANGES[name]
    source, out = tmp_path / "source", tmp_path / "out.fan"
    shutil.copytree(before / f"{codec}.fan", out)
    # The dataset names the place of its source: the test works on that, and puts it back.
    original = before / "source"
    subprocess.run(["cp", "-a", original, source], check=True, timeout=60)
    try:
        change(original)
        old = partitions(out)
        said = succeed("prep", original, out, "--update")
        assert expected in said, said
        assert {part: stat for part, stat in partitions(out).items() if part in old} == old
        assert len(partitions(out)) == len(old) + 1
        if name != "mode" and name != "hard link added":
            assert re.search(r"kept as they are: \d+ files \(9", said), "the large file was not read again"
        verified(out, original)
        assert succeed("prep", original, out, "--update").endswith("nothing has changed\n")
        misleading = "would not be unpacked right" in said
        kinds = ["file to directory", "directory to file"] + (["content"] if codec != "none" else [])
        assert misleading == (name in kinds), "what was compressed and is too short now has another name, too"
        if codec == "none" and not misleading:
            differences = compare_trees(original, unpack(out, tmp_path / "back"))
            left = ["b'class0/000.txt': only in the second tree"] if name == "removed" else []
            assert differences == left, "garbage stays until --repack"
        succeed("prep", original, out, "--update", "--repack")
        assert compare_trees(original, unpack(out, tmp_path / "repacked")) == [] or codec != "none"
        assert json.loads((out / "manifest.json").read_bytes())["codec"] == codec
        verified(out, original)
    finally:
        shutil.rmtree(original)
        subprocess.run(["cp", "-a", source, original], check=True, timeout=60)


def test_updates_at_random(tmp_path: Path) -> None:
    """Many small changes, one update after the other, compressed and shuffled; each compared with the source."""
    source, out = make_source(tmp_path / "source"), tmp_path / "out.fan"
    options = ("--codec", "zstd", "--partition-size", "1MiB", "--shuffle", "3", "--everywhere", "class1")
    succeed("prep", source, out, *options)
    dice = random.Random(7)
    for round_number in range(6):
        files = sorted(path for path in source.rglob("*") if path.is_file() and not path.is_symlink())
        for path in dice.sample(files, 5):
            what = dice.randrange(4)
            if what == 0:
                path.unlink()
            elif what == 1:
                path.write_bytes(incompressible(dice.randrange(40 * KIB), round_number))
            elif what == 2:
                path.rename(path.with_name(f"moved-{round_number}-{path.name}"))
            else:
                (path.parent / f"link-{round_number}-{path.name}").hardlink_to(path)
        succeed("prep", source, out, "--update", *(() if round_number % 2 else options))
        verified(out, source)
    manifest = json.loads((out / "manifest.json").read_bytes())
    facts = json.loads(succeed("info", out, "--json"))
    index = PreparedDataset.open(out).index
    members = sum(part["entries"] for part in manifest["partitions"])
    assert manifest["garbage"]["members"] == members - index.entry_count > 0
    assert facts["garbage_bytes"] == manifest["garbage"]["bytes"] > 0
    assert manifest["shuffle"] == 3
    assert len(list(out.glob("index*.fsx"))) == 2, "the index before the last is gone"


def test_readers_of_the_old_state_go_on(tmp_path: Path) -> None:
    source, out = make_source(tmp_path / "source"), tmp_path / "out.fan"
    succeed("prep", source, out)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", source, copy], check=True, timeout=60)
    old = PreparedDataset.open(out)
    manifest_then = (out / "manifest.json").read_bytes()
    change_content(source)
    (source / "large").unlink()
    succeed("prep", source, out, "--update")
    new = PreparedDataset.open(out)
    assert new.manifest.index_checksum != old.manifest.index_checksum
    for part in old.manifest.partitions:
        with tarfile.open(fileobj=io.BytesIO((out / part.file).read_bytes())) as tar:
            contents = {member.name: tar.extractfile(member) for member in tar if member.isreg()}
            for name, content in contents.items():
                assert content is not None and content.read() == (copy / name).read_bytes()
    # Who has read the old manifest a moment ago still finds its index.
    assert (out / json.loads(manifest_then)["index"]["file"]).exists()
    assert PreparedDataset.from_parts(out, manifest_then, memoryview((out / "index.fsx").read_bytes()))
    # And who was so slow that there were two updates meanwhile reads the manifest once more.
    (source / "class0" / "000.txt").unlink()
    succeed("prep", source, out, "--update")
    assert not (out / "index.fsx").exists()

    class Slow(Directory):
        manifests: ClassVar = [manifest_then]

        def read(self, name: str) -> bytes:
            return self.manifests.pop() if name == "manifest.json" and self.manifests else super().read(name)

    assert PreparedDataset.open(Slow(out)).manifest == PreparedDataset.open(out).manifest


@needs_fuse
def test_a_mount_that_is_up_reads_on(tmp_path: Path, mount: Mount) -> None:
    source, out = make_source(tmp_path / "source"), tmp_path / "out.fan"
    succeed("prep", source, out)
    mounted = mount(out)
    mountpoint = mounted.path
    expected = (source / "class2" / "002.txt").read_bytes()
    large = (source / "large").read_bytes()
    change_content(source)
    (source / "large").unlink()
    succeed("prep", source, out, "--update")
    assert (mountpoint / "class2" / "002.txt").read_bytes() == expected
    assert (mountpoint / "large").read_bytes() == large
    assert "is in use" in assert_one_error(run_inside("prep", source, out, "--update", "--repack"), "prep", 1)
    mounted.stop()


def test_tar_files_that_were_written_to_are_read_again(tmp_path: Path) -> None:
    """Members often have all the same time: one byte may differ, and nothing else."""

    def write(name: str, *contents: bytes) -> Path:
        with tarfile.open(tmp_path / name, "w") as tar:
            for number, content in enumerate(contents):
                member = tarfile.TarInfo(f"{name}-{number}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return tmp_path / name

    one, two, out = write("one.tar", b"same", b"aaaa"), write("two.tar", b"cccc"), tmp_path / "out.fan"
    succeed("prep", one, two, out)
    write("one.tar", b"same", b"bbbb")
    assert "0 added, 2 changed, 0 removed; kept as they are: 1 file" in succeed("prep", one, two, out, "--update")
    verified(out, one, two)
    three = write("three.tar", b"dddd")
    two.unlink()
    assert "1 added, 0 changed, 1 removed; kept as they are: 2 files" in succeed("prep", one, three, out, "--update")
    verified(out, one, three)
    assert "is not named now" in assert_one_error(run_inside("prep", one, out, "--update"), "prep", 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--codec", "zstd"), "was prepared with --codec none"),
        (("--exclude", "x*"), "was prepared without it"),
        (("--dereference",), "was prepared without it"),
        (("--force",), "goes with no --force"),
        (("--partitions", "3"), "goes with no"),
    ],
)
def test_options_of_the_dataset_stay(before: Path, options: tuple[str, ...], said: str) -> None:
    content = (before / "none.fan" / "manifest.json").read_bytes()
    result = run_inside("prep", before / "source", before / "none.fan", "--update", *options)
    assert said in assert_one_error(result, "prep", 2)
    assert (before / "none.fan" / "manifest.json").read_bytes() == content


def test_what_cannot_be_updated(before: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert "is not named now" in assert_one_error(run_inside("prep", other, before / "none.fan", "--update"), "prep", 2)
    (tmp_path / "empty.fan").mkdir()
    result = run_inside("prep", other, tmp_path / "empty.fan", "--update")
    assert "is not a prepared dataset" in assert_one_error(result, "prep", 1)
    assert "goes with --update" in assert_one_error(
        run_inside("prep", other, tmp_path / "x.fan", "--repack"), "prep", 2
    )
    assert "1 directory" in succeed("prep", other, tmp_path / "x.fan", "--update"), "there was none: it is made"


def test_no_two_updates_at_once(before: Path) -> None:
    held = os.open(before / "none.fan", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = run_inside("prep", before / "source", before / "none.fan", "--update")
        assert "is being updated by another" in assert_one_error(result, "prep", 1)
    finally:
        os.close(held)


# --- going on after a run that was killed ---


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Much enough for several partitions, and for being killed in between."""
    root = tmp_path_factory.mktemp("many") / "source"
    for number in range(500):
        path = root / f"d{number % 30}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(20 * KIB, number))
    with open(root / "large", "wb") as file:  # larger than a buffer
        file.truncate(66 * MIB)
    return root


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BIN / "fanstore-prep", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_partitions(directory: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(list(directory.glob(".out.fan.partial-*/part-*.done"))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def remains(directory: Path) -> list[Path]:
    return sorted(directory.glob(".out.fan.*"))


OPTIONS = ("--codec", "lz4hc:12", "--partition-size", "1MiB", "--jobs", "1")


def test_killed_at_random_moments(many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.fan"
    dice = random.Random(3)
    killed = 0
    for wanted in (1, 2, 4, 6):
        process = start(many, out, *OPTIONS)
        wait_for_partitions(tmp_path, wanted, process)
        time.sleep(dice.random() * 0.05)
        process.kill()
        process.communicate()
        killed += not out.exists()
    assert killed == 4 and len(remains(tmp_path)) == 1
    said = succeed("prep", many, out, *OPTIONS)
    match = re.search(r"(\d+) partitions \(.*\) taken over from a run that was interrupted", said)
    assert match is not None and int(match[1]) >= 6, said
    verified(out, many)
    assert remains(tmp_path) == [] and not list(out.glob("*.done"))


def test_what_has_changed_meanwhile_is_packed_again(many: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out.fan"
    subprocess.run(["cp", "-a", many, source], check=True, timeout=60)
    (source / "large").unlink()
    process = start(source, out, *OPTIONS)
    wait_for_partitions(tmp_path, 3, process)
    process.kill()
    process.communicate()
    (source / "d3" / "3.txt").write_bytes(b"changed")
    assert "taken over" not in succeed("prep", source, out, *OPTIONS)
    verified(out, source)
    assert remains(tmp_path) == []


def test_damage_in_what_was_finished(many: Path, tmp_path: Path) -> None:
    """A byte that is not as it was noted, a note that is cut short: both partitions are packed again."""
    out = tmp_path / "out.fan"
    process = start(many, out, *OPTIONS)
    wait_for_partitions(tmp_path, 4, process)
    process.kill()
    process.communicate()
    (left,) = remains(tmp_path)
    notes = sorted(left.glob("*.done"))
    with open(str(notes[0]).removesuffix(".done"), "r+b") as part:
        place = os.fstat(part.fileno()).st_size // 2
        part.seek(place)
        byte = part.read(1)
        part.seek(place)
        part.write(bytes([byte[0] ^ 1]))
    os.truncate(notes[1], 300)
    said = succeed("prep", many, out, *OPTIONS)
    match = re.search(r"(\d+) partitions? \(.*\) taken over", said)
    assert match is not None and int(match[1]) == len(notes) - 2
    verified(out, many)


def test_an_update_that_was_killed(many: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out.fan"
    (source / "old").mkdir(parents=True)
    (source / "old" / "file").write_bytes(b"old")
    succeed("prep", source, out, *OPTIONS)
    subprocess.run(["cp", "-a", many / "d1", many / "d2", many / "d3", source], check=True, timeout=60)
    for number in range(400):
        (source / "d1" / f"more-{number}").write_bytes(compressible(30 * KIB, number))
    manifest = (out / "manifest.json").read_bytes()
    process = start(source, out, "--update")
    wait_for_partitions(tmp_path, 1, process)
    process.kill()
    process.communicate()
    assert (out / "manifest.json").read_bytes() == manifest
    assert "taken over" in succeed("prep", source, out, "--update")
    verified(out, source)
    assert remains(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_with_much_done(number: signal.Signals, tmp_path: Path) -> None:
    """Finished partitions of more than a little are kept, with a sentence; less is not."""
    source, out = tmp_path / "source", tmp_path / "out.fan"
    source.mkdir()
    for each in range(12):
        with open(source / f"sparse-{each}", "wb") as file:
            file.truncate(outdir.WORTH_KEEPING_BYTES)
    process = start(source, out, "--partition-size", "10MiB", "--jobs", "1")
    wait_for_partitions(tmp_path, 1, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    (left,) = remains(tmp_path)
    assert not out.exists()
    assert all(path.name.endswith((".tar", ".tar.done")) for path in left.iterdir())
    assert f"are kept in '{left}': the same command goes on from there" in err
    with pytest.raises(FormatError):
        PreparedDataset.open(out)


def directory_member() -> tarfile.TarInfo:
    """The root, which otherwise has the time at which the tar file was made or fetched."""
    member = tarfile.TarInfo(".")
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    return member


@needs_nginx
def test_what_is_at_an_address_now_is_packed(many: Path, nginx: Nginx, tmp_path: Path) -> None:
    """Another object of the same lengths and times: what a killed run has finished of the old one is not taken over."""
    out, address = tmp_path / "out.fan", f"{nginx.url}/shard.tar"
    tars = [nginx.root / "shard.tar", nginx.root / "other.tar"]
    for number, tar in enumerate(tars):
        with tarfile.open(tar, "w") as file:
            file.addfile(directory_member())
            for name in range(300):
                member = tarfile.TarInfo(f"{name:03d}")
                data = compressible(20 * KIB, name + 1000 * number)
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    process = start(address, out, *OPTIONS)
    wait_for_partitions(tmp_path, 2, process)
    process.kill()
    process.communicate()
    os.replace(tars[1], tars[0])
    assert "taken over" not in succeed("prep", address, out, *OPTIONS)
    verified(out, tars[0])


def test_a_source_that_is_replaced_while_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next update sees it, although all lengths and times are the same."""
    out, archive, other = tmp_path / "out.fan", tmp_path / "a.tar.gz", tmp_path / "b.tar.gz"
    for path, data in ((archive, b"one"), (other, b"two")):
        with tarfile.open(path, "w:gz") as file:
            file.addfile(directory_member())
            member = tarfile.TarInfo("file")
            member.size = 3
            file.addfile(member, io.BytesIO(data))
    os.utime(other, (1, 1))

    def replaced(source: str, target: Path, tick: Callable[[int], None]) -> int:
        checksum = spool(source, target, tick)
        os.replace(other, archive)
        return checksum

    with monkeypatch.context() as patched:
        patched.setattr(build, "spool", replaced)
        succeed("prep", archive, out)
    succeed("prep", archive, out, "--update")
    (tmp_path / "plain.tar").write_bytes(gzip.decompress(archive.read_bytes()))
    verified(out, tmp_path / "plain.tar")
