"""All pairs of paths that commands take: which of them are refused, however a path leads to its place.

``TABLE`` says it once more, by hand: for each pair how the first may not lie to the second. Every other pair is taken.
"""

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from commands import assert_one_error, run_fanstore
from conftest import MakePrepared
from jobs import StartJob, needs_jobs
from mounting import command, needs_fuse, needs_root

from fanstore.errors import UsageError
from fanstore.format.manifest import INDEX_FILE, MANIFEST_FILE
from fanstore.format.users import USERS_DIRECTORY
from fanstore.paths import DATASET_FILES, Role, Used, refuse_overlaps

pytest_plugins = ["jobs", "mounting"]

#: By pair: S the same, I the first inside the second, C the first contains the second.
TABLE = {
    (Role.OUTPUT, Role.PREPARED): "SIC",
    (Role.OUTPUT, Role.SHARDS): "SIC",
    (Role.OUTPUT, Role.MOUNTPOINT): "SIC",
    (Role.OUTPUT, Role.LOCAL): "SIC",
    (Role.OUTPUT, Role.TEMPORARY): "SC",
    (Role.LOCAL, Role.PREPARED): "SI",
    (Role.LOCAL, Role.SHARDS): "SI",
    (Role.LOCAL, Role.MOUNTPOINT): "SI",
    (Role.TEMPORARY, Role.MOUNTPOINT): "SI",
    (Role.MOUNTPOINT, Role.PREPARED): "SIC",
    (Role.MOUNTPOINT, Role.SHARDS): "SC",
    (Role.REPORT, Role.PREPARED): "SI",
    (Role.REPORT, Role.MOUNTPOINT): "SI",
    (Role.REPORT, Role.SHARD): "S",
    (Role.REPORT, Role.METRICS): "S",
    (Role.REPORT, Role.LOG): "S",
    (Role.METRICS, Role.PREPARED): "SI",
    (Role.METRICS, Role.MOUNTPOINT): "SI",
    (Role.METRICS, Role.SHARD): "S",
    (Role.METRICS, Role.LOG): "S",
    (Role.SUCCESS, Role.PREPARED): "SI",
    (Role.SUCCESS, Role.MOUNTPOINT): "SI",
    (Role.SUCCESS, Role.SHARD): "S",
    (Role.SUCCESS, Role.REPORT): "S",
    (Role.SUCCESS, Role.METRICS): "S",
    (Role.SUCCESS, Role.LOG): "S",
    (Role.LOG, Role.PREPARED): "SI",
    (Role.LOG, Role.MOUNTPOINT): "SI",
    (Role.LOG, Role.SHARD): "S",
    (Role.PAGE, Role.PREPARED): "SI",
    (Role.PAGE, Role.MOUNTPOINT): "SI",
    (Role.PAGE, Role.SHARD): "S",
    **{(Role.PAGE, other): "S" for other in (Role.REPORT, Role.METRICS, Role.SUCCESS, Role.LOG)},
    (Role.OUT, Role.SOURCE): "SIC",
    (Role.PAGE, Role.SOURCE): "SI",
}
REVERSED = {"S": "S", "I": "C", "C": "I"}


@contextmanager
def bound(source: Path, target: Path) -> Iterator[Path]:
    """The same directory at another place, by a bind mount."""
    target.mkdir()
    subprocess.run(["mount", "--bind", source, target], check=True, timeout=60)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", target], check=True, timeout=60)


class Places:
    """A directory, one in it and one elsewhere, each by several ways."""

    def __init__(self, directory: Path, route: str, stack: ExitStack) -> None:
        real = directory / "real"
        (real / "outer/inner").mkdir(parents=True)
        (real / "other").mkdir()
        self.real = real
        self.outer, self.inner, self.other = (
            self._lead(directory, path, route, stack) for path in ("outer", "outer/inner", "other")
        )

    def _lead(self, directory: Path, name: str, route: str, stack: ExitStack) -> Path:
        way = directory / f"way-to-{name.replace('/', '-')}"
        if route == "symlink":
            way.symlink_to(self.real / name)
        elif route == "bind":
            stack.enter_context(bound(self.real / name, way))
        elif route == "dots":
            way = self.real / "other" / ".." / name
        else:
            way = self.real / name
        return way


@pytest.fixture(params=["direct", "dots", "symlink", pytest.param("bind", marks=needs_root)])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    with ExitStack() as stack:
        yield Places(tmp_path, request.param, stack)


def is_refused(first: Used, second: Used) -> bool:
    """In whatever order they come; then the sentence names both."""
    try:
        refuse_overlaps([first, second])
    except UsageError as error:
        with pytest.raises(UsageError, match="; name another path"):
            refuse_overlaps([second, first])
        assert all(f"{used.role.value} {used.path}" in str(error) for used in (first, second))
        return True
    return False


def test_every_pair(places: Places) -> None:
    real = places.real
    cases = {
        "S": [
            (places.outer, real / "outer"),
            (real / "outer/inner", places.inner),
            (places.outer / "new", real / "outer/new"),
        ],
        "I": [
            (places.inner, real / "outer"),
            (places.outer / "new", real / "outer"),
            (places.outer / "new/x", real / "outer/new"),
        ],
        "-": [
            (places.other, real / "outer"),
            (places.inner / "new", real / "outer/inner2"),
            (places.outer / "a", real / "outer/b"),
        ],
    }
    cases["C"] = [(two, one) for one, two in cases["I"]]
    for first, second in itertools.combinations(Role, 2):
        forbidden = TABLE.get((first, second)) or "".join(REVERSED[kind] for kind in TABLE.get((second, first), ""))
        for kind, examples in cases.items():
            for one, two in examples:
                refused = is_refused(Used(first, one), Used(second, two))
                assert refused == (kind in forbidden), (first, kind, second, one, two)


@needs_root
def test_mounts_within(tmp_path: Path) -> None:
    """What is mounted inside a directory belongs to it, by whatever way it is named."""
    prepared, output = tmp_path / "elsewhere/d.fan", tmp_path / "output"
    prepared.mkdir(parents=True)
    (output / "deep").mkdir(parents=True)
    with bound(prepared.parent, output / "deep/way"):
        assert is_refused(Used(Role.OUTPUT, output), Used(Role.PREPARED, prepared))
        assert is_refused(Used(Role.OUTPUT, prepared), Used(Role.PREPARED, output / "deep/way/d.fan"))
        assert not is_refused(Used(Role.OUTPUT, tmp_path / "other"), Used(Role.PREPARED, prepared))


def test_hard_links(tmp_path: Path) -> None:
    (tmp_path / "1.tar").write_bytes(b"bytes")
    os.link(tmp_path / "1.tar", tmp_path / "report.html")
    assert is_refused(Used(Role.REPORT, tmp_path / "report.html"), Used(Role.SHARD, tmp_path / "1.tar"))


@pytest.mark.parametrize("role", Role)
def test_nothing_is_written_into_any_dataset(role: Role, tmp_path: Path) -> None:
    assert DATASET_FILES == (MANIFEST_FILE, INDEX_FILE)
    for name in DATASET_FILES:
        (tmp_path / name).touch()
    read = {Role.PREPARED, Role.SHARDS, Role.SHARD, Role.SOURCE, Role.TEMPORARY}
    for path in (tmp_path, tmp_path / "new", tmp_path / "a/b"):
        if role in read or (role in (Role.OUT, Role.MOUNTPOINT) and path == tmp_path):  # others see to that
            refuse_overlaps([Used(role, path)])
        else:
            with pytest.raises(UsageError, match=f"the prepared dataset {tmp_path}: nothing but fanstore-prep"):
                refuse_overlaps([Used(role, path)])


def test_a_path_without_permission_is_compared_by_name(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert is_refused(Used(Role.OUTPUT, closed / "a/b"), Used(Role.PREPARED, closed / "a"))
    assert not is_refused(Used(Role.OUTPUT, closed / "b"), Used(Role.PREPARED, closed / "a"))


# --- the commands ---


def snapshot(*directories: Path) -> list[tuple[object, ...]]:
    """Names, types, times and bytes of everything; but for the mark of who uses a dataset, which comes and goes."""
    found: list[tuple[object, ...]] = []
    for directory in directories:
        for path in [directory, *sorted(directory.rglob("*"))]:
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            time_ns = 0 if path.name == USERS_DIRECTORY else status.st_mtime_ns
            found.append((path, status.st_mode, time_ns, status.st_ino, content))
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source/train").mkdir(parents=True)
    for number in range(5):
        (tmp_path / f"source/train/{number}").write_bytes(os.urandom(10_000))
    (tmp_path / "source/train/link").symlink_to("1")
    return tmp_path / "source"


@pytest.fixture
def prepared(source: Path, make_prepared: MakePrepared, tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return make_prepared(source, out=tmp_path / "data/d.fan", partitions=2)


#: Options in a directory with the dataset in data/d.fan, its source in source; what is said.
REFUSED = [
    (["--output", "data/d.fan"], "--output {0}/data/d.fan is the prepared dataset {0}/data/d.fan"),
    (["--output", "link"], "--output {0}/link is the prepared dataset {0}/data/d.fan"),
    (["--output", "data/d.fan/run1"], "--output {0}/data/d.fan/run1 lies inside the prepared dataset"),
    (["--output", "data"], "--output {0}/data contains the prepared dataset"),
    (["--output", "m"], "--output {0}/m is the mount point {0}/m"),
    (["--output", "m/run1"], "--output {0}/m/run1 lies inside the mount point"),
    (["--output", "source"], "--output {0}/source holds files of the dataset, such as 'train/0'"),
    (["--output", "out", "--local", "out/ssd"], "--local {0}/out/ssd lies inside --output {0}/out"),
    (["--output", "ssd/out", "--local", "ssd"], "--local {0}/ssd contains --output {0}/ssd/out"),
    (["--local", "data/d.fan"], "--local {0}/data/d.fan is the prepared dataset"),
    (["--local", "m/ssd"], "--local {0}/m/ssd lies inside the mount point"),
    (["--report", "data/d.fan/part-00000.tar"], "--report {0}/data/d.fan/part-00000.tar lies inside the prepared"),
    (["--metrics", "m/x.prom"], "--metrics {0}/m/x.prom lies inside the mount point"),
    (["--log", "data/d.fan/part-00000.tar"], "--log {0}/data/d.fan/part-00000.tar lies inside the prepared dataset"),
    (["--log", "link/log"], "--log {0}/link/log lies inside the prepared dataset"),
    (["--success", "data/d.fan/new"], "--success {0}/data/d.fan/new lies inside the prepared dataset"),
    (["--success", "data/d.fan/manifest.json"], "--success {0}/data/d.fan/manifest.json exists, and is no proof"),
    (["--success", "photo"], "--success {0}/photo exists, and is no proof of an earlier job; name another file"),
    (["--log", "m/log"], "--log {0}/m/log lies inside the mount point"),
    (["--log", "photo"], "--log {0}/photo holds something else than text already"),
    (["--log", "x", "--report", "x"], "--report {0}/x is --log {0}/x"),
]


@needs_fuse
@pytest.mark.parametrize(
    ("options", "sentence"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mount_refuses(prepared: Path, source: Path, tmp_path: Path, options: list[str], sentence: str) -> None:
    (tmp_path / "link").symlink_to("data/d.fan")
    (tmp_path / "photo").write_bytes(b"GIF\0\1")
    (tmp_path / "m").mkdir()
    before = snapshot(tmp_path)
    words = [str(tmp_path / word) if number % 2 else word for number, word in enumerate(options)]
    result = command("mount", prepared, tmp_path / "m", *words, "--", "rm", "-rf", tmp_path / "m")
    assert assert_one_error(result, "mount", 2).startswith(sentence.format(tmp_path))
    assert result.stderr.count("\n") == 1
    changed = [entry for entry in snapshot(tmp_path) if entry not in before]
    assert [entry[0] for entry in changed if entry[0] != tmp_path] == [tmp_path / "x"] * (
        "--log x" in " ".join(options)
    )


@needs_fuse
@pytest.mark.parametrize("point", ["data/d.fan", "data/d.fan/m", "data"])
def test_mount_points_that_are_refused(prepared: Path, tmp_path: Path, point: str) -> None:
    before = snapshot(prepared)
    result = command("mount", prepared, tmp_path / point, "--", "true")
    assert "the prepared dataset" in assert_one_error(result, "mount", 2)
    assert snapshot(prepared) == before


@needs_fuse
def test_shards(source: Path, tmp_path: Path) -> None:
    """Tar files of ``--index-only`` are as safe as the dataset."""
    shards = tmp_path / "shards"
    shards.mkdir()
    subprocess.run(["tar", "-cf", shards / "1.tar", "-C", source, "train"], check=True, timeout=60)
    prepared = tmp_path / "d.fan"
    assert run_fanstore("prep", shards / "1.tar", prepared, "--index-only").returncode == 0
    before = snapshot(shards, prepared)
    title = f"the directory of the dataset's tar files {shards}"
    refused: list[tuple[list[str | Path], str]] = [
        (["--output", shards], f"--output {shards} is {title}"),
        (["--output", shards / "run1"], f"--output {shards}/run1 lies inside {title}"),
        (["--output", tmp_path, "--local", "/dev/shm"], f"--output {tmp_path} contains the prepared dataset"),
        (["--local", shards], f"--local {shards} is {title}"),
        (["--report", shards / "1.tar"], f"--report {shards}/1.tar is the tar file {shards}/1.tar"),
        (["--log", shards / "1.tar"], f"--log {shards}/1.tar holds something else than text already"),
    ]
    for options, sentence in refused:
        result = command("mount", prepared, tmp_path / "m", *options, "--", "true")
        assert assert_one_error(result, "mount", 2).startswith(sentence)
    after = snapshot(shards, prepared)
    assert [entry for entry in after if entry[0] != shards] == [entry for entry in before if entry[0] != shards]


@needs_fuse
def test_local_with_a_missing_parent(prepared: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    result = command("mount", prepared, tmp_path / "m", "--local", tmp_path / "lcoal/ssd/x", "--", "true")
    assert f"the directory {tmp_path}/lcoal/ssd does not exist" in assert_one_error(result, "mount")
    assert [entry for entry in snapshot(tmp_path) if entry not in before and entry[0] != tmp_path] == []
    assert command("mount", prepared, tmp_path / "m", "--local", tmp_path / "ssd", "--", "true").returncode == 0
    assert not (tmp_path / "ssd").exists()


@needs_jobs
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--local", "{directory}/m{{rank}}/ssd"), "lies inside the mount point"),
        (("--output", "{directory}/m1"), "is the mount point"),
        (("--metrics", "{prepared}/{{rank}}.prom"), "lies inside the prepared dataset"),
        (("--log", "{prepared}/log{{rank}}"), "lies inside the prepared dataset"),
    ],
)
def test_one_message_of_a_job(
    start_job: StartJob, prepared: Path, tmp_path: Path, options: tuple[str, str], sentence: str
) -> None:
    """The second is refused by rank 1 only."""
    directory, before = tmp_path / "job-0", snapshot(prepared)
    option, value = options
    job = start_job(prepared, 2, option, value.format(directory=directory, prepared=prepared), wait=False)
    assert job.wait_end() == 2, job.evidence()
    errors = [line for line in job.output().splitlines() if line.startswith("fanstore-mount: error: ")]
    assert len(errors) == 1 and sentence in errors[0] and "so no node is mounted" in errors[0], job.evidence()
    assert "Traceback" not in job.output()
    assert snapshot(prepared) == before


PREP_REFUSED = [
    (["source", "source"], "OUT {0}/source is the source {0}/source"),
    (["source", "source/d.fan"], "OUT {0}/source/d.fan lies inside the source {0}/source"),
    (["source", "link/d.fan"], "OUT {0}/link/d.fan lies inside the source {0}/source"),
    (["data/d.fan", "data/d.fan", "--force"], "OUT {0}/data/d.fan is the source"),
    (
        ["data/d.fan/part-00000.tar", "data/d.fan", "--force"],
        "the source {0}/data/d.fan/part-00000.tar lies inside OUT",
    ),
    (["data/d.fan/part-00000.tar", "data/d.fan", "--force", "--index-only"], "the source {0}/data/d.fan/part-00000"),
    (["source", "data/d.fan/new.fan"], "OUT {0}/data/d.fan/new.fan lies inside the prepared dataset {0}/data/d.fan"),
]


@pytest.mark.parametrize(
    ("words", "sentence"), PREP_REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_prep_refuses(prepared: Path, tmp_path: Path, words: list[str], sentence: str) -> None:
    (tmp_path / "link").symlink_to("source")
    before = snapshot(tmp_path)
    result = run_fanstore("prep", *(word if word.startswith("--") else tmp_path / word for word in words))
    assert assert_one_error(result, "prep", 2).startswith(sentence.format(tmp_path))
    assert snapshot(tmp_path) == before


def test_a_prepared_dataset_is_no_source(prepared: Path, tmp_path: Path) -> None:
    result = run_fanstore("prep", prepared, tmp_path / "again.fan")
    sentence = assert_one_error(result, "prep", 2)
    assert sentence.startswith(f"'{prepared}' is a prepared dataset already: mount it with 'fanstore-mount {prepared} ")
    assert sentence.endswith("use --force-pack")
    assert not (tmp_path / "again.fan").exists()
    assert run_fanstore("prep", prepared, tmp_path / "again.fan", "--force-pack").returncode == 0
    assert run_fanstore("verify", tmp_path / "again.fan", "--against", prepared).returncode == 0


def test_doctor_writes_nothing_into_a_dataset(prepared: Path) -> None:
    before = snapshot(prepared)
    result = run_fanstore("doctor", "--local", prepared, "--shared", prepared)
    assert f"--local {prepared} is the prepared dataset {prepared}" in result.stdout
    assert result.returncode == 1
    assert snapshot(prepared) == before
