"""Paths that are too long for ``--output`` are refused to who makes them; all others are saved, and nothing is left."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mounting
import pytest
from conftest import BOTH_ENGINES
from jobs import StartJob, needs_jobs
from mounting import Mount, needs_fuse

pytest_plugins = ["mounting", "jobs"]
ENGINES = BOTH_ENGINES
pytestmark = needs_fuse

#: Of a directory in the dataset, and of outputs.
NAME, NEW = "d" * 200, "n" * 200
PATH_MAX = 4096


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    deep = directory.joinpath("source", *4 * [NAME])
    deep.mkdir(parents=True)
    (deep / "file").write_text("content")
    return mounting.prepare(directory / "source", directory / "d.fan")


@contextmanager
def entered(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def is_too_long(call: Callable[[], object]) -> bool:
    with pytest.raises(OSError) as raised:
        call()
    return raised.value.errno == errno.ENAMETOOLONG


def descend(top: int) -> list[str]:
    """Make directories in each other until one is refused; how they are called."""
    made: list[str] = []
    fd = os.dup(top)
    try:
        while len(made) < PATH_MAX // len(NAME) + 2:
            try:
                os.mkdir(NEW, dir_fd=fd)
            except OSError as error:
                assert error.errno == errno.ENAMETOOLONG
                return made
            made.append(NEW)
            below = os.open(NEW, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    raise AssertionError("no directory was refused")


def test_directories_in_each_other(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """As deep as a directory can be, files of any name are created, by the engine itself, and saved."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=tmp_path / "local")
    with entered(mounted.path) as top:
        deep = "/".join(descend(top))
    deepest = output / deep
    assert len(os.fsencode(deepest)) + 256 < PATH_MAX <= len(os.fsencode(deepest)) + 600
    names = [f"{number:03d}".ljust(255, "n") for number in range(50)]
    parts = deep.split("/")
    with entered(mounted.path / "/".join(parts[:10])) as middle, entered_at(middle, "/".join(parts[10:])) as fd:
        for name in names:
            file = os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=fd)
            os.write(file, name.encode())
            os.close(file)
    mounted.stop()
    assert all((deepest / name).read_text() == name for name in names)


@contextmanager
def entered_at(above: int, path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=above)
    try:
        yield fd
    finally:
        os.close(fd)


def test_renamed_directories_with_deep_contents(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """What is in a directory counts, too; and it can always be brought nearer."""
    output = tmp_path / "output"
    mounted = mount(prepared, "--output", str(output), local=tmp_path / "local")
    with entered(mounted.path) as top:
        os.mkdir("tree", dir_fd=top)
        os.makedirs(mounted.path / "tree/a/b" / NEW)
        (mounted.path / "tree/a/b" / NEW / "f").write_text("inside")
        deep = descend(top)
        with entered_at(top, "/".join(deep[:10])) as middle, entered_at(middle, "/".join(deep[10:])) as bottom:
            assert is_too_long(lambda: os.rename("tree", "tree", src_dir_fd=top, dst_dir_fd=bottom))
        with entered_at(top, deep[0]) as first:
            os.rename("tree", "tree", src_dir_fd=top, dst_dir_fd=first)
            os.rename("tree", "nearer", src_dir_fd=first, dst_dir_fd=top)
    mounted.stop()
    assert (output / "nearer/a/b" / NEW / "f").read_text() == "inside"


def test_a_directory_of_the_dataset_that_is_too_deep_in_output(mount: Mount, prepared: Path, tmp_path: Path) -> None:
    """``--output`` has a long path itself: there is no room for every name, and each is looked at."""
    output = tmp_path
    while len(os.fsencode(output)) < PATH_MAX - 64 - 4 * 201 - 210 - 201:
        output /= NAME
    output /= "o" * (PATH_MAX - 64 - 4 * 201 - 210 - len(os.fsencode(output)) - 1)
    output.mkdir(parents=True)
    mounted = mount(prepared, "--output", str(output), local=tmp_path / "local")
    directory = mounted.path.joinpath(*4 * [NAME])
    for number in range(20):
        (directory / f"{number}".ljust(150, "s")).write_text(f"{number}")
        assert is_too_long((directory / f"{number}".ljust(255, "n")).touch)
        assert is_too_long(lambda number=number: (directory / f"{number}d").mkdir())  # type: ignore[misc]
        assert is_too_long(lambda number=number: os.symlink("x", directory / f"{number}".ljust(255, "l")))  # type: ignore[misc]
    (mounted.path / "n".ljust(255, "n")).write_text("there is room here")
    mounted.stop()
    saved = output.joinpath(*4 * [NAME])
    assert sorted(os.listdir(saved)) == sorted(f"{number}".ljust(150, "s") for number in range(20))


def test_scratch_has_no_limit(mount: Mount, prepared: Path) -> None:
    mounted = mount(prepared, "--scratch")
    with entered(mounted.path) as top:
        fd = os.dup(top)
        for _ in range(2 * PATH_MAX // len(NAME)):
            os.mkdir(NEW, dir_fd=fd)
            below = os.open(NEW, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)


@needs_jobs
def test_on_another_node(start_job: StartJob, prepared: Path, tmp_path: Path) -> None:
    """Decided on by rank 0, and told to who asked; files are created without asking where any name fits."""
    job = start_job(prepared, 2, "--output", tmp_path / "output", local=True)
    with entered(job.mount(1)) as top:
        deep = descend(top)
        with entered_at(top, "/".join(deep[:10])) as middle, entered_at(middle, "/".join(deep[10:])) as fd:
            for number in range(30):
                os.close(os.open(f"{number:03d}".ljust(255, "n"), os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    job.stop()
    assert len(os.listdir(tmp_path.joinpath("output", *deep))) == 30
