"""fanstore.view: files of a mounted dataset as memory, and what holds that memory."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MakePrepared
from mounting import LIMIT_S, Mount, Mounted, needs_fuse, prepare, wait_until
from oddities import compressible, incompressible
from test_mount_damage import damage

import fanstore

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

SIZES = {"small": 11, "empty": 0, "image": 107_000, "large": 9_000_001, "text": 300_000, "folder/inner": 50_000}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("view") / "source"
    (root / "folder").mkdir(parents=True)
    for number, (name, size) in enumerate(SIZES.items()):
        make = compressible if name in ("text", "large") else incompressible
        (root / name).write_bytes(make(size, number))
    (root / "link").symlink_to("image")
    return root


@pytest.fixture(scope="module", params=["none", "lz4"])
def mounted(
    source: Path, tmp_path_factory: pytest.TempPathFactory, module_mount: Mount, request: pytest.FixtureRequest
) -> Mounted:
    return module_mount(prepare(source, tmp_path_factory.mktemp("view") / "d.fan", "--codec", request.param))


def held_bytes(mounted: Mounted) -> int:
    return int(mounted.statistics()["cache"]["held_bytes"])


def test_views_are_the_files(source: Path, mounted: Mounted) -> None:
    for name in [*SIZES, "link"]:
        content = fanstore.view(mounted.path / name)
        assert content.readonly and content.format == "B" and content == (source / name).read_bytes(), name
    with pytest.raises(FileNotFoundError):
        fanstore.view(mounted.path / "nothing")
    with pytest.raises(IsADirectoryError):
        fanstore.view(mounted.path / "folder")
    with pytest.raises(FileNotFoundError):
        fanstore.view(mounted.path / ".fanstore" / "nothing")
    config = fanstore.view(mounted.path / ".fanstore" / "config.json")
    assert bytes(config) == (mounted.path / ".fanstore" / "config.json").read_bytes()


def test_elsewhere_files_are_read(source: Path) -> None:
    assert fanstore.view(source / "image") == (source / "image").read_bytes()
    assert len(fanstore.view(str(source / "empty"))) == 0


def test_a_view_holds_its_memory(source: Path, mount: Mount, tmp_path: Path) -> None:
    """And what is cut from it does; when nobody has any of it any more, the cache may use the memory."""
    mounted = mount(prepare(source, tmp_path / "d.fan", "--codec", "lz4"))
    expected = (source / "text").read_bytes()
    first, second = fanstore.view(mounted.path / "text"), fanstore.view(mounted.path / "text")
    part = first[1000:2000]
    del first
    assert held_bytes(mounted) == 2 * 300_000
    del second
    assert part == expected[1000:2000]
    wait_until(lambda: held_bytes(mounted) == 300_000, "release of the second", mounted.evidence)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            right = part == expected[1000:2000] and fanstore.view(mounted.path / "text") == expected
            del part
            gc.collect()
            code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    wait_until(lambda: held_bytes(mounted) == 300_000, "end of the child", mounted.evidence)
    assert part == expected[1000:2000], "the parent's is held as before"
    part.release()
    del part
    wait_until(lambda: held_bytes(mounted) == 0, "release of all", mounted.evidence)


def test_a_program_that_is_killed_holds_nothing(source: Path, mount: Mount, tmp_path: Path) -> None:
    mounted = mount(prepare(source, tmp_path / "d.fan", "--codec", "lz4"))
    code = "import fanstore, sys; kept = fanstore.view(sys.argv[1]); print(len(kept), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, mounted.path / "text"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "300000\n"
        assert held_bytes(mounted) == 300_000
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    wait_until(lambda: held_bytes(mounted) == 0, "release", mounted.evidence)


def test_more_than_may_be_held_is_read(source: Path, mount: Mount, tmp_path: Path) -> None:
    mounted = mount(prepare(source, tmp_path / "d.fan", "--codec", "lz4"), "--cache", "1MiB")
    views = [fanstore.view(mounted.path / "text") for _ in range(5)]
    assert all(view == (source / "text").read_bytes() for view in views)
    assert held_bytes(mounted) == 300_000, "half of the cache"


@pytest.mark.parametrize("killed", [False, True])
def test_another_mount_with_the_same_device_number(mount: Mount, tmp_path: Path, killed: bool) -> None:
    """The kernel gives the number of a mount that has ended to a later one; its daemon may have been killed."""
    for number in range(3):
        folder = tmp_path / f"source-{number}"
        folder.mkdir()
        (folder / "file").write_bytes(compressible(200_000, number))
        mounted = mount(prepare(folder, tmp_path / f"{number}.fan", "--codec", "lz4"))
        shown = fanstore.view(mounted.path / "file")
        assert shown == (folder / "file").read_bytes() and held_bytes(mounted) == 200_000
        del shown
        if killed:
            mounted.destroy()
        else:
            mounted.stop()


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_damaged_files_have_no_views(source: Path, mount: Mount, make_prepared: MakePrepared, codec: str) -> None:
    prepared = make_prepared(source, codec=codec, partitions=1)
    partition = damage(prepared, "text")
    mounted = mount(prepared, announced=[f"cannot read 'text' from partition file {partition}: "])
    with pytest.raises(OSError, match="Input/output error"):
        fanstore.view(mounted.path / "text")
    assert fanstore.view(mounted.path / "image") == (source / "image").read_bytes()
