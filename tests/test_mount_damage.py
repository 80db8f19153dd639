"""A damaged partition: EIO for the damaged file alone, a log line that names file and partition, a count."""

import errno
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from commands import assert_one_error
from conftest import BOTH_ENGINES, MakePrepared
from mounting import Mount, Mounted, command, needs_fuse, needs_root, small_file_system
from oddities import compressible, incompressible

from fanstore.format.prepared import PreparedDataset

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse


def make_source(root: Path) -> Path:
    root.mkdir()
    for number in range(10):
        (root / f"noise-{number}").write_bytes(incompressible(50_000, number))
        (root / f"text-{number}").write_bytes(compressible(50_000, number))
    return root


def damage(prepared: Path, name: str, place: int = 100) -> Path:
    """Flip one bit of a file's stored bytes; the partition file."""
    dataset = PreparedDataset.open(prepared)
    entry = dataset.index.resolve(name.encode())
    path = dataset.partition_path(dataset.index.partition[entry])
    with open(path, "r+b") as file:
        file.seek(dataset.index.offset[entry] + place)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    return path


def check_only_this_is_unreadable(mounted: Mounted, source: Path, name: str) -> None:
    for _ in range(3):
        with pytest.raises(OSError) as caught:
            (mounted.path / name).read_bytes()
        assert caught.value.errno == errno.EIO
    assert (mounted.path / name).stat().st_size == 50_000
    for path in source.iterdir():
        if path.name != name:
            assert (mounted.path / path.name).read_bytes() == path.read_bytes()
    assert mounted.statistics()["errors"]["damaged_files"] == 1


@pytest.mark.parametrize("name", ["noise-4", "text-4"])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_damaged_byte(mount: Mount, make_prepared: MakePrepared, tmp_path: Path, name: str, verify: str) -> None:
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, codec="lz4", partitions=2)
    partition = damage(prepared, name)
    mounted = mount(prepared, "--verify", verify)
    line = f"ERROR fanstore.dataset.sources: cannot read '{name}' from partition file {partition}: "
    mounted.announced.append(line)
    check_only_this_is_unreadable(mounted, source, name)
    assert mounted.log_text().count(line) == 1, "one line for each file, not for each read"
    shown = command("stat", mounted.path)
    assert "damaged     1 files" in shown.stdout


def test_damaged_byte_in_a_staged_partition(mount: Mount, make_prepared: MakePrepared, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, codec="none", partitions=2)
    partition = damage(prepared, "noise-4")
    (tmp_path / "ssd").mkdir()
    mounted = mount(prepared, local=tmp_path / "ssd")
    mounted.announced.append(f"partition {partition} does not match its checksum")
    mounted.announced.append(f"cannot read 'noise-4' from partition file {partition}: ")
    check_only_this_is_unreadable(mounted, source, "noise-4")


def test_truncated_partition(mount: Mount, make_prepared: MakePrepared, tmp_path: Path) -> None:
    """Cut off while it is mounted; before, the mount is refused."""
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, codec="none", partitions=1)
    dataset = PreparedDataset.open(prepared)
    index = dataset.index
    last = max((index.resolve(path.name.encode()) for path in source.iterdir()), key=lambda entry: index.offset[entry])
    mounted = mount(prepared)
    os.truncate(dataset.partition_path(0), index.offset[last] + 10)
    mounted.announced.append("the partition file is truncated")
    check_only_this_is_unreadable(mounted, source, os.fsdecode(index.name(last)))


def test_an_unreadable_partition_is_a_few_lines(mount: Mount, make_prepared: MakePrepared, tmp_path: Path) -> None:
    """One for its first file, one for the tenth, and the count at the end; not one for each."""
    source = tmp_path / "source"
    for part in ("a", "b"):
        (source / part).mkdir(parents=True)
        for number in range(30):
            (source / part / str(number)).write_bytes(incompressible(1000, number))
    prepared = make_prepared(source, codec="none", everywhere="a/*")
    index = PreparedDataset.open(prepared).index
    gone = prepared / f"part-{index.partition[index.resolve(b'a/0')]:05d}.tar"
    mounted = mount(prepared)
    gone.unlink()
    mounted.announced += ["cannot read 'a/", "30 files could not be read from partition file"]
    for path in sorted(source.rglob("?/*")):
        name = path.relative_to(source)
        if name.parts[0] == "b":
            assert (mounted.path / name).read_bytes() == path.read_bytes()
        else:
            with pytest.raises(OSError, match="Input/output error"):
                (mounted.path / name).read_bytes()
    assert mounted.statistics()["errors"]["damaged_files"] == 30
    mounted.stop()
    reason = f"from partition file {gone}: No such file or directory"
    lines = [
        line.partition("fanstore.dataset.sources: ")[2] for line in mounted.log_text().splitlines() if " ERROR " in line
    ]
    assert lines == [
        f"cannot read 'a/0' {reason}",
        f"cannot read 'a/17' {reason} (10 files of this partition so far)",
        f"30 files could not be read from partition file {gone}",
    ]


def test_a_partition_that_cannot_be_right_is_noticed_at_the_start(make_prepared: MakePrepared, tmp_path: Path) -> None:
    """Missing or of another length: one sentence, and nothing is mounted."""
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, partitions=4)
    os.truncate(prepared / "part-00001.tar", 5)
    with open(prepared / "part-00003.tar", "ab") as file:
        file.write(b"x")
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        subprocess.run(["tar", "-cf", shards / f"{number}.tar", "-C", source, f"noise-{number}"], check=True)
    indexed = make_prepared(sorted(shards.iterdir()), index_only=True)
    shards.rename(tmp_path / "moved")
    more = " more of 4 partitions are not right"
    for path, sentence in (
        (prepared, f"partition file '{prepared}/part-00001.tar' has 5 bytes instead of [0-9,]+, and 1{more}; copy the"),
        (
            indexed,
            f"partition file '{shards}/0.tar' is missing, and 2 more of 3 .*--index-only must stay where they are",
        ),
    ):
        result = command("mount", path, tmp_path / "m", "--", "touch", tmp_path / "ran")
        assert re.search(sentence, assert_one_error(result, "mount"))
        assert not (tmp_path / "m").exists() and not (tmp_path / "ran").exists()
    (tmp_path / "moved").rename(shards)
    assert command("mount", indexed, tmp_path / "m", "--", "cat", tmp_path / "m/noise-2").returncode == 0


@needs_root
def test_local_without_any_room(mount: Mount, make_prepared: MakePrepared, tmp_path: Path) -> None:
    """Everything is read from where it is, which is said, with what to do."""
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, partitions=3)
    with small_file_system(tmp_path / "full", "16m") as full:
        mounted = mount(prepared, local=full)
        mounted.announced.append(
            r"3 of 3 partitions \(1014 KiB\) do not fit on local disks \(0 B free .* free space in --local \S*/full,"
        )
        assert (mounted.path / "noise-1").read_bytes() == (source / "noise-1").read_bytes()
        assert mounted.statistics()["sources"]["shared"]["reads"]
        mounted.stop()


def test_never_verify_reads_what_is_there(mount: Mount, make_prepared: MakePrepared, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, codec="none", partitions=1)
    damage(prepared, "noise-4", place=100)
    mounted = mount(prepared, "--verify", "never")
    wrong = bytearray((source / "noise-4").read_bytes())
    wrong[100] ^= 0x10
    assert (mounted.path / "noise-4").read_bytes() == bytes(wrong)


def test_refused_datasets(make_prepared: MakePrepared, tmp_path: Path) -> None:
    """One sentence for a dataset that cannot be used at all; the mount point is not touched."""
    prepared = make_prepared(make_source(tmp_path / "source"))
    manifest = prepared / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"codec": "lz4hc"}))
    os.mkdir(tmp_path / "empty")
    for path in (prepared, tmp_path / "empty", tmp_path / "source" / "text-1"):
        result = command("mount", path, tmp_path / "m", "--", "true")
        assert result.returncode == 1
        assert result.stderr.startswith("fanstore-mount: error: ")
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "m").exists()
