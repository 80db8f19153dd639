"""A damaged partition: EIO for the damaged file alone, a log line that names file and partition, a count."""

import errno
import json
import os
from pathlib import Path

import pytest
from conftest import BOTH_ENGINES, MakePrepared
from mounting import Mount, Mounted, command, needs_fuse
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
    line = f"ERROR fanstore.core.reader: cannot read '{name}' from partition file {partition}: "
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
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, codec="none", partitions=1)
    dataset = PreparedDataset.open(prepared)
    index = dataset.index
    last = max((index.resolve(path.name.encode()) for path in source.iterdir()), key=lambda entry: index.offset[entry])
    os.truncate(dataset.partition_path(0), index.offset[last] + 10)
    mounted = mount(prepared)
    mounted.announced.append("the partition file is truncated")
    check_only_this_is_unreadable(mounted, source, os.fsdecode(index.name(last)))


def test_partition_that_is_missing(mount: Mount, make_prepared: MakePrepared, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    prepared = make_prepared(source, codec="none", partitions=2)
    dataset = PreparedDataset.open(prepared)
    index = dataset.index
    dataset.partition_path(1).unlink()
    mounted = mount(prepared)
    mounted.announced.append("part-00001.tar: No such file or directory")
    for path in source.iterdir():
        if index.partition[index.resolve(path.name.encode())] == 0:
            assert (mounted.path / path.name).read_bytes() == path.read_bytes()
        else:
            with pytest.raises(OSError, match="Input/output error"):
                (mounted.path / path.name).read_bytes()


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
