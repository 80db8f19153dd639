"""A tree with everything that POSIX can hold, prepared in every way and mounted, is its source to the last bit."""

from pathlib import Path

import mounting
import oddities
import pytest
from conftest import BOTH_ENGINES
from mounting import Mount, needs_fuse

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oddities.build(tmp_path_factory.mktemp("oddities") / "tree")


@pytest.mark.parametrize("staged", [False, True], ids=["where it is", "staged"])
@pytest.mark.parametrize("codec", ["none", "lz4", "lz4hc", "auto"])
def test_identical(mount: Mount, source: Path, tmp_path: Path, codec: str, staged: bool) -> None:
    prepared = mounting.prepare(source, tmp_path / "d.fan", "--codec", codec, "--partition-size", "16MiB")
    local = None
    if staged:
        local = tmp_path / "ssd"
        local.mkdir()
    mounted = mount(prepared, local=local)
    for attempt in ("cold", "from the kernel's cache"):
        assert oddities.compare_trees(source, mounted.path) == [], attempt
    sources = mounted.statistics()["sources"]
    assert (sources["local"]["reads"] > 0, sources["shared"]["reads"] > 0) == (staged, not staged)
    mounted.stop()


def test_inode_numbers_are_stable(mount: Mount, source: Path, tmp_path: Path) -> None:
    """The same in every mount of a dataset, and each name of a hard link has the same."""
    prepared = mounting.prepare(source, tmp_path / "d.fan")

    def numbers(root: Path) -> dict[str, int]:
        return {str(path.relative_to(root)): path.lstat().st_ino for path in (root / "hardlinks").rglob("*")}

    first = mount(prepared)
    seen = numbers(first.path)
    first.stop()
    second = mount(prepared)
    assert numbers(second.path) == seen
    assert seen["hardlinks/one/text"] == seen["hardlinks/two/across-text"] == seen["hardlinks/zzz-shallow"]
    assert seen["hardlinks/one/text"] != seen["hardlinks/one/noise"]
