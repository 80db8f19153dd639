"""Who uses a prepared dataset: registrations, and that fanstore-prep --force replaces nothing that is in use."""

import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import assert_one_error, run_inside
from conftest import MakePrepared
from jobs import ULFM, StartJob, needs_jobs
from mounting import Mount, command, needs_fuse, needs_root, wait_until
from oddities import incompressible

from fanstore.dataset.registration import DatasetUse
from fanstore.errors import FanstoreError, OutputError
from fanstore.format import users
from fanstore.format.prepared import PreparedDataset
from fanstore.format.users import STALE_S, USERS_DIRECTORY, Registration, users_of
from fanstore.prep.outdir import OutputDirectory

pytest_plugins = ["mounting", "jobs"]
NOBODY = 65534


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    for number in range(12):
        (tmp_path / "source" / f"file-{number}").write_bytes(incompressible(30_000, number))
    return tmp_path / "source"


@pytest.fixture
def prepared(source: Path, make_prepared: MakePrepared, tmp_path: Path) -> Path:
    return make_prepared(source, out=tmp_path / "d.fan", partitions=3)


def registered(prepared: Path, ranks: int = 1) -> Registration:
    registration = Registration(prepared, Path("/mnt/x"), "a-host", ranks)
    registration.register()
    return registration


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("[!.]*")}


# --- a real mount ---


@needs_fuse
def test_a_mounted_dataset_is_not_replaced(mount: Mount, prepared: Path, source: Path) -> None:
    """The command that gave EIO for every file of the mount, and exit code 0."""
    mounted = mount(prepared)
    before = contents(prepared)
    (source / "another").write_bytes(b"new")
    sentence = assert_one_error(run_inside("prep", source, prepared, "--force"), "prep")
    user = f"root on {os.uname().nodename.partition('.')[0]} has it mounted on {mounted.path} since 2"
    assert sentence.startswith(f"'{prepared}' is in use and was not replaced: {user}")
    assert "; unmount it, or prepare under another name (" in sentence
    assert contents(prepared) == before
    assert sorted(os.listdir(prepared.parent)) == ["d.fan", "mount-0", "source"]
    for path in source.glob("file-*"):
        assert (mounted.path / path.name).read_bytes() == path.read_bytes()
    mounted.stop()
    assert os.listdir(prepared / USERS_DIRECTORY) == [], "it has taken itself off"
    assert run_inside("prep", source, prepared, "--force").returncode == 0
    assert command("mount", prepared, prepared.parent / "m", "--", "cat", prepared.parent / "m/another").stdout == "new"


@needs_fuse
def test_a_killed_mount_of_this_machine_does_not_count(mount: Mount, prepared: Path, source: Path) -> None:
    mounted = mount(prepared)
    mounted.process.kill()
    mounted.wait_end()
    assert len(os.listdir(prepared / USERS_DIRECTORY)) == 1
    again = mount(prepared, point=mounted.path)
    assert len(os.listdir(prepared / USERS_DIRECTORY)) == 1, "the next mount removes what it finds dead"
    again.process.kill()
    again.wait_end()
    assert run_inside("prep", source, prepared, "--force").returncode == 0
    assert os.listdir(prepared / USERS_DIRECTORY) == []


@needs_fuse
def test_a_start_that_fails_leaves_nothing(prepared: Path, tmp_path: Path) -> None:
    (prepared / "part-00001.tar").rename(tmp_path / "away")
    assert_one_error(command("mount", prepared, tmp_path / "m"), "mount")
    assert os.listdir(prepared / USERS_DIRECTORY) == []
    (tmp_path / "photos").mkdir()
    assert_one_error(command("mount", tmp_path / "photos", tmp_path / "m"), "mount")
    assert os.listdir(tmp_path / "photos") == [], "not even that is made in what is no dataset"


@needs_fuse
def test_a_dataset_of_an_earlier_version(mount: Mount, prepared: Path) -> None:
    """It has no directory for registrations; who may, makes it."""
    (prepared / USERS_DIRECTORY).rmdir()
    mount(prepared)
    assert (prepared / USERS_DIRECTORY).stat().st_mode & 0o7777 == 0o1777
    assert len(users_of(prepared)) == 1


@needs_fuse
@needs_root
def test_a_mount_that_cannot_register(mount: Mount, prepared: Path, source: Path, tmp_path: Path) -> None:
    """On a read-only file system it works all the same, and says so in the log."""
    shown = tmp_path / "shown.fan"
    shown.mkdir()
    subprocess.run(["mount", "--bind", prepared, shown], check=True, timeout=60)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", shown], check=True, timeout=60)
        mounted = mount(shown)
        assert (mounted.path / "file-3").read_bytes() == (source / "file-3").read_bytes()
        assert (
            f"INFO fanstore.dataset.registration: {shown} cannot be marked as in use (Read-only" in mounted.log_text()
        )
        mounted.stop()
    finally:
        subprocess.run(["umount", "-l", shown], check=True, timeout=60)


@needs_jobs
def test_one_registration_for_a_job(start_job: StartJob, prepared: Path) -> None:
    """The death of the node that made it does not end it; the next one removes it."""
    job = start_job(prepared, 3, launcher=ULFM, announced=[r"rank 0 on \S+ has died"])
    (name,) = os.listdir(prepared / USERS_DIRECTORY)
    job.kill(0)
    job.wait_log(r"rank 0 on \S+ has died")
    assert [user.file for user in users_of(prepared)] == [name], "its process is dead, its job is not"
    job.stop()
    assert os.listdir(prepared / USERS_DIRECTORY) == []


# --- registrations ---


def test_what_counts(prepared: Path) -> None:
    directory = prepared / USERS_DIRECTORY
    living = registered(prepared)
    assert [str(user) for user in users_of(prepared)] == [f"root on a-host has it mounted on /mnt/x since {now()}"]
    note = json.loads((directory / living.name).read_bytes())
    dead = subprocess.Popen(["true"])
    dead.wait()
    away = {"machine": "another", "pid": dead.pid}
    files = {
        "dead.json": note | {"pid": dead.pid},
        "number-used-again.json": note | {"start_ticks": note["start_ticks"] + 1},
        "elsewhere.json": note | away,
        "several.json": note | {"pid": dead.pid, "ranks": 2},
        "long-ago.json": note | away,
        "half.json": "{",
        "nonsense.json": {"host": 5},
        "hostile.json": note | {"host": "a\nb\x1b[31m\ud800" + "x" * 1000},
        "something": "else",
    }
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    before = time.time() - STALE_S - 5
    os.utime(directory / "long-ago.json", (before, before))
    found = {user.file: str(user) for user in users_of(prepared)}
    alive = {"elsewhere.json", "several.json", "half.json", "nonsense.json", "hostile.json"}
    assert found.keys() == {living.name} | alive
    assert found["half.json"].startswith("root on an unknown host has it mounted on ")
    assert found["hostile.json"].isprintable() and len(found["hostile.json"]) < 500
    again = registered(prepared)
    assert set(os.listdir(directory)) == {living.name, again.name} | alive, "dead ones are forgotten"
    for registration in (living, again, again):
        registration.remove()
    assert {user.file for user in users_of(prepared)} == alive
    assert users.close(prepared) != [] and directory.exists()
    for name in alive:
        (directory / name).unlink()
    (directory / "something").touch()
    assert users.close(prepared) == [] and not directory.exists()
    with pytest.raises(FileNotFoundError):
        registered(prepared.parent / "absent.fan")


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def test_the_thread_keeps_it_fresh_and_removes_it(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the rank whose turn it is; also if somebody has removed the file."""
    monkeypatch.setattr("fanstore.dataset.registration.HEARTBEAT_S", 0.01)
    first, second = (DatasetUse(prepared, Path("/mnt/x")) for _ in range(2))
    first.register("a-host", 2)
    path = prepared / USERS_DIRECTORY / first.name
    turn = [1]
    second.keep(first.name, "b-host", 2, lambda: turn[0] == 2)
    old = time.time() - 2 * STALE_S
    os.utime(path, (old, old))
    assert users_of(prepared) == []
    first.keep(first.name, "a-host", 2, lambda: turn[0] == 1)
    wait_until(lambda: len(users_of(prepared)) == 1, "a touch", str)
    first.leave()
    first.end()
    assert [user.host for user in users_of(prepared)] == ["a-host"], "others of the job go on"
    turn[0] = 2
    path.unlink()
    wait_until(lambda: [user.host for user in users_of(prepared)] == ["b-host"], "the next one", str)
    second.end()
    assert os.listdir(prepared / USERS_DIRECTORY) == []


@pytest.fixture
def open_place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fanstore-test-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@needs_root
def test_a_dataset_of_another_user(open_place: Path, source: Path) -> None:
    """They register, and the owner does not replace what they read; nobody removes the registration of another."""
    out = open_place / "d.fan"
    assert run_inside("prep", source, out).returncode == 0
    mine = registered(out)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        theirs = registered(out, ranks=2)
        try:
            (out / USERS_DIRECTORY / mine.name).unlink()
        except PermissionError:
            theirs.touch()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    mine.remove()
    assert "nobody on a-host has it mounted" in assert_one_error(run_inside("prep", source, out, "--force"), "prep")
    (name,) = os.listdir(out / USERS_DIRECTORY)
    (out / USERS_DIRECTORY / name).unlink()
    assert run_inside("prep", source, out, "--force").returncode == 0


# --- replacing ---


def test_a_mount_that_begins_while_a_dataset_is_prepared(prepared: Path, source: Path, tmp_path: Path) -> None:
    """It is noticed at the end: the old dataset stays, the new one is kept, and its name is said."""
    before = contents(prepared)
    for suffix in (".new", ".new-"):
        with pytest.raises(OutputError) as caught, OutputDirectory(str(prepared), force=True) as out:
            (out.path / "manifest.json").write_text("new")
            registration = registered(prepared)
            out.publish()
        assert f"unmount it, then replace it with the new dataset, '{prepared}{suffix}" in str(caught.value)
        assert contents(prepared) == before
        assert [user.file for user in users_of(prepared)] == [registration.name]
        registration.remove()
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name != "source")
    assert kept[:2] == ["d.fan", "d.fan.new"] and kept[2].startswith("d.fan.new-") and len(kept) == 3
    assert contents(tmp_path / kept[1]) == contents(tmp_path / kept[2]) == {"manifest.json": b"new"}


def test_a_run_that_was_killed_while_it_replaced(prepared: Path, source: Path, tmp_path: Path) -> None:
    """The old dataset has been moved aside, the new one has not got its name."""
    before = contents(prepared)
    (tmp_path / ".d.fan.partial-00000000").mkdir()
    aside = prepared.rename(tmp_path / ".d.fan.replaced-00000000")
    assert f"left it as '{aside}': rename that" in assert_one_error(run_inside("verify", prepared), "verify")
    assert "--force" in assert_one_error(run_inside("prep", source, prepared), "prep")
    assert contents(prepared) == before
    prepared.rename(aside)
    assert run_inside("prep", source, prepared, "--force").returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["d.fan", "source"]


def test_nothing_that_is_in_use_is_ever_removed(prepared: Path, tmp_path: Path) -> None:
    """Registering against replacing, as fast as both go: who has registered can read what it has opened."""
    stop = threading.Event()
    held = 0
    problems: list[Exception] = []

    def use() -> None:
        nonlocal held
        try:
            while not stop.is_set():
                registration = registered(prepared)
                inode = prepared.stat().st_ino
                stop.wait(random.uniform(0, 0.02))
                PreparedDataset.open(prepared).check_partitions()
                assert prepared.stat().st_ino == inode, "replaced while it was in use"
                held += 1
                registration.remove()
                stop.wait(random.uniform(0, 0.02))
        except (OSError, FanstoreError, AssertionError) as error:
            problems.append(error)

    good = tmp_path / "good.fan"
    shutil.copytree(prepared, good)
    (good / USERS_DIRECTORY).rmdir()
    users_of_it = [threading.Thread(target=use) for _ in range(2)]
    for thread in users_of_it:
        thread.start()
    replaced = refused = 0
    deadline = time.monotonic() + 60
    while min(replaced, refused, held) < 50 and time.monotonic() < deadline and not problems:
        try:
            with OutputDirectory(str(prepared), force=True) as out:
                shutil.copytree(good, out.path, dirs_exist_ok=True)
                out.publish()
            replaced += 1
        except OutputError as error:
            assert "is in use" in str(error)
            refused += 1
            for kept in tmp_path.glob("d.fan.new*"):
                shutil.rmtree(kept)
    stop.set()
    for thread in users_of_it:
        thread.join(60)
    assert not problems, problems
    assert min(replaced, refused, held) >= 50, (replaced, refused, held)
    assert sorted(os.listdir(tmp_path)) == ["d.fan", "good.fan", "source"]


def test_others_are_not_disturbed(prepared: Path, source: Path, tmp_path: Path) -> None:
    """Verifying, copying and moving a dataset that is in use, and one whose shards are elsewhere."""
    registration = registered(prepared)
    assert run_inside("verify", prepared, "--against", source).returncode == 0
    subprocess.run(["cp", "-r", prepared, tmp_path / "copy.fan"], check=True, timeout=60)
    assert run_inside("verify", tmp_path / "copy.fan").returncode == 0
    indexed = tmp_path / "indexed.fan"
    shards = sorted(prepared.glob("part-*.tar"))
    assert run_inside("prep", *shards, indexed, "--index-only").returncode == 0
    registration.remove()
    user = registered(indexed)
    assert "is in use" in assert_one_error(run_inside("prep", *shards, indexed, "--index-only", "--force"), "prep")
    user.remove()
    assert run_inside("prep", *shards, indexed, "--index-only", "--force").returncode == 0
    moved = indexed.rename(tmp_path / "moved.fan")
    assert run_inside("verify", moved).returncode == 0
