"""Programs that know nothing of FanStore write under the mount: they work, or fail with an error that says why.

What is known of each is in docs/outputs.md. All of it is saved to ``--output``, and compared there at the end.
"""

import os
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mounting
import numpy as np
import pytest
from conftest import BOTH_ENGINES
from mounting import LIMIT_S, Mount, Mounted, needs_fuse, needs_root

pytest_plugins = ["mounting"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("programs")
    (directory / "source").mkdir()
    (directory / "source/file").write_text("content\n")
    return mounting.prepare(directory / "source", directory / "d.fan")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def mounted(mount: Mount, prepared: Path, output: Path, tmp_path: Path) -> Mounted:
    return mount(prepared, "--output", str(output), local=tmp_path / "local")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Something to copy: all that the mount can hold."""
    tree = tmp_path / "tree"
    (tree / "sub/deep").mkdir(parents=True)
    (tree / "empty").mkdir()
    for number in range(40):
        (tree / f"sub/{number}").write_bytes(os.urandom(number * 1000))
    (tree / "sub/deep/large").write_bytes(os.urandom(5 << 20))
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    (tree / "secret").write_text("x")
    (tree / "secret").chmod(0o600)
    (tree / "link").symlink_to("sub/3")
    (tree / "dangling").symlink_to("/no/where")
    os.setxattr(tree / "run.sh", "user.note", b"kept")
    for number, path in enumerate(sorted(tree.rglob("*"), reverse=True)):
        os.utime(path, ns=(1, 1_000_000_000_123_456_789 + number), follow_symlinks=False)
    os.utime(tree, ns=(1, 900_000_000_123_456_789))
    return tree


def run(
    *command: str | Path, cwd: Path | None = None, code: int = 0, environment: Mapping[str, str] | None = None
) -> str:
    """A program, which ends with this exit code; what it has said."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd, env={**os.environ, **(environment or {})}
    )
    assert result.returncode == code, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


class Entry(NamedTuple):
    """What must be alike of two files."""

    mode: int
    time_ns: int
    content: bytes | str
    xattrs: tuple[str, ...]


def contents(root: Path) -> dict[str, Entry]:
    """All that is in a directory, itself included, for comparison."""
    found: dict[str, Entry] = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        content: bytes | str = ""
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        names = () if path.is_symlink() else os.listxattr(path)
        xattrs = tuple(name for name in names if name.startswith("user."))
        found[str(path.relative_to(root))] = Entry(status.st_mode, status.st_mtime_ns, content, xattrs)
    return found


# --- copies ---


def test_cp(mounted: Mounted, output: Path, tree: Path) -> None:
    run("cp", "-a", tree, mounted.path / "copy")
    assert contents(mounted.path / "copy") == contents(tree)
    run("cp", "-a", mounted.path / "copy", mounted.path / "again")
    mounted.stop()
    assert contents(output / "copy") == contents(tree)
    assert contents(output / "again") == contents(tree)


def test_cp_of_hard_links(mounted: Mounted, output: Path, tmp_path: Path) -> None:
    """The second name is refused, and cp says so; the rest is copied."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/a").write_text("x")
    os.link(tmp_path / "linked/a", tmp_path / "linked/b")
    said = run("cp", "-a", tmp_path / "linked", mounted.path / "copy", code=1)
    assert "Operation not permitted" in said
    run("cp", "-r", tmp_path / "linked", mounted.path / "copies")
    mounted.stop()
    assert len(os.listdir(output / "copy")) == 1
    assert sorted(os.listdir(output / "copies")) == ["a", "b"]


def test_copytree(mounted: Mounted, output: Path, tree: Path) -> None:
    """Python's own, which sets times and modes after the close."""
    shutil.copytree(tree, mounted.path / "copy", symlinks=True)
    mounted.stop()
    assert contents(output / "copy") == contents(tree)


@needs("tar")
def test_tar(mounted: Mounted, output: Path, tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "tree.tar"
    run("tar", "--xattrs", "-cf", archive, "-C", tree, ".")
    (mounted.path / "copy").mkdir()
    run("tar", "--xattrs", "-xpf", archive, "-C", mounted.path / "copy")
    assert contents(mounted.path / "copy") == contents(tree)
    run("tar", "-cf", mounted.path / "made.tar", "-C", mounted.path, "copy")
    mounted.stop()
    assert contents(output / "copy") == contents(tree)
    assert "copy/sub/deep/large" in run("tar", "-tf", output / "made.tar").splitlines()


@needs_root
@needs("tar")
def test_tar_of_somebody_else(mounted: Mounted, tree: Path, tmp_path: Path) -> None:
    """Root's tar wants to give files away, which is refused; --no-same-owner does not ask for it."""
    archive = tmp_path / "tree.tar"
    run("tar", "--owner=12345", "--group=12345", "-cf", archive, "-C", tree, ".")
    (mounted.path / "copy").mkdir()
    said = run("tar", "-xf", archive, "-C", mounted.path / "copy", code=2)
    assert "Cannot change ownership to uid 12345" in said and "Operation not permitted" in said
    run("tar", "--no-same-owner", "-xf", archive, "-C", mounted.path / "copy")
    assert (mounted.path / "copy/sub/deep/large").read_bytes() == (tree / "sub/deep/large").read_bytes()


@needs("rsync")
def test_rsync(mounted: Mounted, output: Path, tree: Path) -> None:
    """Also a second time, when little has changed: it writes temporary files and renames them."""
    run("rsync", "-aX", f"{tree}/", mounted.path / "copy")
    assert contents(mounted.path / "copy") == contents(tree)
    (tree / "sub/7").write_text("changed")
    (tree / "sub/8").unlink()
    os.utime(tree / "sub", ns=(10**18, 10**18))  # rsync does not set a time that differs by less than a second
    run("rsync", "-aX", "--delete", f"{tree}/", mounted.path / "copy")
    mounted.stop()
    assert contents(output / "copy") == contents(tree)


def test_shell(mounted: Mounted, output: Path) -> None:
    """Small tools, each with its own way of writing."""
    script = """
        set -e
        echo one > log; echo two >> log; echo three | tee -a log
        sed -i s/two/2/ log
        mkdir -p a/b; mv log a/b/; cp a/b/log a/log; ln -s b/log a/last
        dd if=/dev/zero of=zeros bs=64k count=10 conv=fsync status=none
        truncate -s 100 zeros; install -m 750 a/log script
        touch -d @1000000000 old; rm -r a/b; find . -name log -exec rm {} +
        seq 1000 | sort -r -T . -S 16k -o sorted
    """
    run("sh", "-c", script, cwd=mounted.path)
    mounted.stop()
    assert contents(output).keys() == {".", "a", "a/last", "zeros", "script", "old", "sorted"}
    assert (output / "script").read_text() == "one\n2\nthree\n"
    assert stat.S_IMODE((output / "script").stat().st_mode) == 0o750
    assert (output / "zeros").read_bytes() == bytes(100)
    assert (output / "old").stat().st_mtime == 1_000_000_000
    assert len((output / "sorted").read_text().splitlines()) == 1000


# --- programs with files of their own ---


@needs("git")
def test_git(mounted: Mounted, output: Path) -> None:
    """A repository can be made, used, packed and checked; without hard links git renames."""
    repository = mounted.path / "repository"

    def git(*arguments: str) -> str:
        who = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(output.parent)}
        for role in ("AUTHOR", "COMMITTER"):
            who |= {f"GIT_{role}_NAME": "somebody", f"GIT_{role}_EMAIL": "somebody@localhost"}
        return run("git", *arguments, cwd=repository, environment=who)

    repository.mkdir()
    git("init", "-q")
    for number in range(20):
        (repository / f"f{number % 5}").write_text(f"{number}\n" * 100)
        git("add", ".")
        git("commit", "-q", "-m", f"change {number}")
    git("checkout", "-q", "-b", "other", "HEAD~3")
    git("gc", "-q")
    assert git("status", "--short") == ""
    mounted.stop()
    assert run("git", "-C", output / "repository", "-c", "safe.directory=*", "fsck", "--strict") == ""
    log = run("git", "-C", output / "repository", "-c", "safe.directory=*", "log", "--oneline", "--all")
    assert len(log.splitlines()) == 20


@pytest.mark.parametrize("journal", ["delete", "truncate", "wal"])
def test_sqlite(mounted: Mounted, output: Path, journal: str) -> None:
    """In each way that it keeps its own journal; each commit is safe in ``--output``, as it syncs."""
    path = mounted.path / "results.db"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=LIMIT_S)
        assert connection.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal,)
        return connection

    first = connect()
    with first:
        first.execute("CREATE TABLE results (epoch INTEGER, loss REAL)")
    second = connect()
    for epoch in range(10):
        with first if epoch % 2 else second as connection:
            connection.executemany("INSERT INTO results VALUES (?, ?)", [(epoch, n / 7) for n in range(50)])
    assert second.execute("SELECT count(*) FROM results").fetchone() == (500,)
    first.close()
    second.close()
    again = connect()
    assert again.execute("SELECT count(*), max(epoch) FROM results").fetchone() == (500, 9)
    assert again.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    again.close()
    mounted.stop()
    saved = sqlite3.connect(f"file:{output / 'results.db'}?mode=ro", uri=True)
    assert saved.execute("SELECT count(*) FROM results").fetchone() == (500,)
    saved.close()


def test_numpy(mounted: Mounted, output: Path) -> None:
    """save, savez and a map that is written to, as for features that do not fit into memory."""
    array = np.arange(100_000, dtype=np.int64).reshape(100, 1000)
    np.save(mounted.path / "array.npy", array)
    np.savez_compressed(mounted.path / "arrays.npz", first=array, second=array + 1)
    mapped = np.lib.format.open_memmap(mounted.path / "map.npy", mode="w+", dtype=np.int64, shape=(100, 1000))
    mapped[:] = array * 2
    mapped.flush()
    del mapped
    assert np.array_equal(np.load(mounted.path / "map.npy", mmap_mode="r"), array * 2)
    mounted.stop()
    assert np.array_equal(np.load(output / "array.npy"), array)
    assert np.array_equal(np.load(output / "map.npy"), array * 2)
    with np.load(output / "arrays.npz") as arrays:
        assert np.array_equal(arrays["second"], array + 1)
