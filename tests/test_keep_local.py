"""--keep-local with real mounts and jobs: the next one copies nothing, whoever dies, and each user has their own."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import oddities
import pytest
from conftest import fanstore_command
from core_parts import flip_byte
from jobs import Job, StartJob, needs_jobs
from load import Source, make_files
from mounting import LIMIT_S, Mount, command, needs_fuse, needs_root, prepare, small_file_system, wait_until
from object_servers import Nginx, needs_nginx
from users import account, prefix_of

from fanstore.doctor.leftovers import check_kept
from fanstore.format.prepared import PreparedDataset
from fanstore.mounttable import find_mount

pytest_plugins = ["mounting", "jobs", "object_servers"]
pytestmark = needs_fuse

PARTITIONS = 6
KEPT = f"fanstore-kept-{os.geteuid()}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("keep") / "source", 40)


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("prepared") / "d.fan", "--partitions", str(PARTITIONS))


@pytest.fixture
def ssd(tmp_path: Path) -> Path:
    path = tmp_path / "ssd"
    path.mkdir()
    return path


def copies_in(ssd: Path) -> list[Path]:
    return sorted((ssd / KEPT).glob("*.tar"))


def run_job(prepared: Path | str, ssd: Path, source: Path, *options: str | Path) -> dict[str, Any]:
    """A job that compares all that it sees with the source; its statistics at the end."""
    script = 'diff -r "$0" "$FANSTORE_MOUNT" >&2 && cat "$FANSTORE_MOUNT/.fanstore/stats.json"'
    point = ssd.parent / "m"
    options = (*options, "--local", ssd, "--keep-local", "--stage-first", "--", "sh", "-c", script, source)
    result = command("mount", str(prepared), point, *options)
    assert result.returncode == 0, result.stderr
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def from_shared(statistics: dict[str, Any]) -> int:
    return int(statistics["staging"]["done_bytes"] + statistics["sources"]["shared"]["fetched_bytes"])


def test_the_second_start_reads_nothing_of_the_shared_file_system(prepared: Path, source: Path, ssd: Path) -> None:
    """Without a mount; with one: below."""
    first = run_job(prepared, ssd, source, "--no-fuse")
    size = sum(info.bytes for info in PreparedDataset.open(prepared).manifest.partitions)
    assert first["staging"]["done_bytes"] == size
    assert [path.name for path in ssd.iterdir()] == [KEPT]
    second = run_job(prepared, ssd, source, "--no-fuse")
    assert from_shared(second) == 0
    assert (second["staging"]["reused_partitions"], second["staging"]["reused_bytes"]) == (PARTITIONS, size)


def test_without_stage_first_not_even_the_first_reads(mount: Mount, prepared: Path, source: Path, ssd: Path) -> None:
    run_job(prepared, ssd, source)
    mounted = mount(prepared, "--keep-local", "--local", str(ssd))
    Source(source).check(mounted.path)
    assert from_shared(mounted.statistics()) == 0
    assert mounted.statistics()["verification"]["chunks"] > 0, "what was kept is checked when it is first read"
    assert f"reused {PARTITIONS} of {PARTITIONS} partitions (" in mounted.log_text()
    kept = f"; {PARTITIONS} of {PARTITIONS} copies kept by earlier jobs"
    assert kept in mounted.output()
    shown = command("stat", mounted.path).stdout
    assert re.search(rf"^reused +{PARTITIONS} partitions, .* kept$", shown, re.MULTILINE), shown
    # What a job uses stays, and is said to be in use.
    listed = command("clean", "--local", ssd)
    assert (listed.returncode, "in use now" in listed.stdout) == (0, True)
    cleaned = command("clean", "--local", ssd, "--all")
    assert cleaned.returncode == 1 and "6 copies (" in cleaned.stderr and "are in use by a job" in cleaned.stderr
    assert len(copies_in(ssd)) == PARTITIONS
    mounted.stop()
    assert command("clean", "--local", ssd, "--all").returncode == 0
    assert not (ssd / KEPT).exists()


def test_two_jobs_at_once_copy_once(mount: Mount, prepared: Path, source: Path, ssd: Path) -> None:
    mounts = [mount(prepared, "--keep-local", local=ssd, wait=False) for _ in range(2)]
    for mounted in mounts:
        mounted.wait_up()
        Source(source).check(mounted.path)
    staged = [mounted.statistics()["staging"] for mounted in mounts]
    assert sum(staging["done_partitions"] for staging in staged) == PARTITIONS
    assert sum(staging["reused_partitions"] for staging in staged) == PARTITIONS
    mounts[0].process.send_signal(signal.SIGTERM)
    assert mounts[0].wait_end() == 0
    Source(source).check(mounts[1].path)
    mounts[1].stop()
    mounts[0].check_clean()
    assert len(copies_in(ssd)) == PARTITIONS


def test_a_damaged_copy_is_replaced(mount: Mount, prepared: Path, source: Path, ssd: Path) -> None:
    run_job(prepared, ssd, source)
    dataset = PreparedDataset.open(prepared)
    entry = dataset.index.resolve(b"class-3/00013.bin")
    checksum = f"{dataset.manifest.partitions[dataset.index.partition[entry]].checksum:016x}"
    (victim,) = (path for path in copies_in(ssd) if path.name.startswith(checksum))
    times = victim.stat()
    victim.chmod(0o600)
    flip_byte(victim, dataset.index.offset[entry] + 5)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    mounted = mount(prepared, "--keep-local", local=ssd)
    mounted.announced.append("00013.bin' is read from the prepared dataset: local copy .*/part-.*tar: .* do not match")
    Source(source).check(mounted.path)
    mounted.stop()
    assert not victim.exists() and len(copies_in(ssd)) == PARTITIONS - 1
    healed = run_job(prepared, ssd, source)["staging"]
    assert (healed["done_partitions"], healed["reused_partitions"]) == (1, PARTITIONS - 1)


def test_killed_at_random_moments_between_versions(source: Path, ssd: Path, tmp_path: Path) -> None:
    """The dataset is prepared anew at the same path between kills; every job that ends well has seen it as it was."""
    versions = [tmp_path / f"version{number}" for number in range(2)]
    for number, version in enumerate(versions):
        shutil.copytree(source, version)
        (version / "which").write_bytes(oddities.incompressible(200_000, number))
        for path in [*version.rglob("*"), version]:
            os.utime(path, ns=(0, 0))
    path, point = tmp_path / "d.fan", tmp_path / "m"
    numbers = random.Random(19)
    for number in range(3):
        prepare(versions[number % 2], path, "--partitions", str(PARTITIONS), "--force")
        line = [fanstore_command("mount"), str(path), str(point), "--local", str(ssd), "--keep-local"]
        killed = subprocess.Popen([*line, "--", "sleep", "60"], start_new_session=True, stderr=subprocess.DEVNULL)
        wait_until(lambda: any(ssd.glob("fanstore-[0-9]*")), "the directory of the job", lambda: "")
        if number % 2:  # in the middle of copying, as near as can be
            wait_until(lambda: any(ssd.glob("fanstore-[0-9]*/part-*")), "the first copy", lambda: "")
        time.sleep(numbers.uniform(0, 0.05))
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait(LIMIT_S)
        statistics = run_job(path, ssd, versions[number % 2])
        assert statistics["errors"] == {"damaged_files": 0, "failed_reads": 0, "fallbacks": 0}
        assert find_mount(point) is None
    assert len(list(ssd.iterdir())) == 1, "of the killed ones nothing is left"
    staging = run_job(path, ssd, versions[0])["staging"]
    assert staging["reused_partitions"] == PARTITIONS


@needs_root
def test_other_users_copies(
    prepared: Path, source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In a directory that all may write to, each has their own."""
    shared = Path("/tmp") / f"fanstore-test-kept-{os.getpid()}"
    shared.mkdir()
    shared.chmod(0o1777)
    try:
        ssd = shared / "ssd"
        ssd.mkdir()
        ssd.chmod(0o1777)
        run_job(prepared, ssd, source)
        with account("k") as user:
            home = shared / "home"
            shutil.copytree(prepared, home / "d.fan")
            for path in (home, *home.rglob("*")):
                os.chown(path, user.pw_uid, user.pw_gid)
            mount, clean = (fanstore_command(name) for name in ("mount", "clean"))
            script = (
                f"cd {home} && {mount} d.fan m --local {ssd} --keep-local --stage-first -- "
                f"cat m/.fanstore/stats.json && {clean} --local {ssd} /nothing; {clean} --local {ssd} --list >&2"
            )
            line = [*prefix_of(user), "env", f"HOME={home}", f"TMPDIR={home}", "sh", "-c", script]
            result = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
            assert json.loads(result.stdout)["staging"]["reused_partitions"] == 0, result.stderr
            assert f"nothing is kept of /nothing in {ssd}; there are some of {home}/d.fan" in result.stderr
            assert f"{home}/d.fan, prepared" in result.stderr and str(prepared) not in result.stderr
            theirs = ssd / f"fanstore-kept-{user.pw_uid}"
            assert theirs.stat().st_mode & 0o777 == 0o700
            assert command("clean", "--local", ssd, "--all").returncode == 0
            assert len(list(theirs.glob("*.tar"))) == PARTITIONS
            assert not (ssd / KEPT).exists()
            # They have taken our name.
            (ssd / KEPT).mkdir(0o700)
            os.chown(ssd / KEPT, user.pw_uid, user.pw_gid)
            refused = command("mount", prepared, tmp_path / "m", "--local", ssd, "--keep-local", "--", "true")
            assert refused.returncode == 1 and f"{KEPT} is not yours alone" in refused.stderr
    finally:
        shutil.rmtree(shared)


@needs_root
def test_copies_make_room_on_a_full_disk(tmp_path: Path) -> None:
    """For a dataset of the same user, with --keep-local or without; --capacity bounds what stays."""
    datasets, sources = [], []
    for number in range(3):
        root = tmp_path / f"source{number}"
        root.mkdir()
        for name in range(6):
            (root / f"{name}").write_bytes(oddities.incompressible(1 << 20, 10 * number + name))
        sources.append(root)
        datasets.append(prepare(root, tmp_path / f"d{number}.fan", "--partitions", "6"))
    with small_file_system(tmp_path / "small", f"{64 + 15}m") as disk:  # 64 MiB are left to others
        ssd = disk / "ssd"
        ssd.mkdir()
        run_job(datasets[0], ssd, sources[0])
        run_job(datasets[1], ssd, sources[1])
        assert len(copies_in(ssd)) == 12
        assert run_job(datasets[0], ssd, sources[0])["staging"]["reused_partitions"] == 6, "now 1 is the older one"
        third = run_job(datasets[2], ssd, sources[2])["staging"]
        assert (third["done_partitions"], third["skipped_partitions"], third["failed_partitions"]) == (6, 0, 0)
        assert run_job(datasets[0], ssd, sources[0])["staging"]["reused_partitions"] == 6
        assert 12 <= len(copies_in(ssd)) <= 14
        plain = command(
            "mount", datasets[1], ssd.parent / "m", "--local", ssd, "--stage-first", "--quiet", "--", "true"
        )
        assert (plain.returncode, plain.stderr) == (0, ""), "without a warning that it does not fit"
        kept = run_job(datasets[0], ssd, sources[0], "--capacity", "7MiB")["staging"]
        assert kept["reused_partitions"] == 6 and len(copies_in(ssd)) == 6
        listed = command("clean", "--local", ssd).stdout
        assert str(datasets[0]) in listed and str(datasets[1]) not in listed


def test_clean_and_doctor(prepared: Path, source: Path, ssd: Path, tmp_path: Path) -> None:
    nothing = command("clean", "--local", ssd)
    assert (nothing.returncode, nothing.stdout) == (0, f"no copies are kept in {ssd}\n")
    other = prepare(source, tmp_path / "other.fan", "--partitions", "1")
    for dataset in (prepared, other):
        run_job(dataset, ssd, source)
    listed = command("clean", "--local", ssd)
    assert listed.returncode == 0 and len(copies_in(ssd)) == PARTITIONS + 1, "nothing is removed without being told to"
    assert re.search(rf"^  .*  6 of 6 partitions +used just now +{prepared}, prepared 20", listed.stdout, re.MULTILINE)
    assert f"fanstore clean --local {ssd} --all" in listed.stdout
    found = [finding.found for finding in check_kept(ssd)]
    assert len(found) == 2 and all(re.search(r"keeps \d cop.* of /.*\.fan, used just now$", text) for text in found)
    assert command("clean", "--local", ssd, other).stdout.startswith("removed 1 copy (")
    assert len(copies_in(ssd)) == PARTITIONS
    again = command("clean", "--local", ssd, other)
    assert (
        again.returncode == 1 and f"nothing is kept of {other} in {ssd}; there are some of {prepared}" in again.stderr
    )
    absent = command("clean", "--local", tmp_path / "absent")
    assert absent.returncode == 1 and "is not a directory" in absent.stderr
    both = command("clean", "--all", other)
    assert both.returncode == 2 and "leave out either" in both.stderr


def test_keep_local_needs_local(prepared: Path, tmp_path: Path) -> None:
    result = command("mount", prepared, tmp_path / "m", "--keep-local", "--", "true")
    assert result.returncode == 2
    assert result.stderr.startswith("fanstore-mount: error: --keep-local needs --local, the directory on each node's")


@needs_nginx
def test_copies_of_an_object_store_serve_a_directory(nginx: Nginx, source: Path, ssd: Path, tmp_path: Path) -> None:
    """The same partitions, wherever they are."""
    here = prepare(source, tmp_path / "here.fan", "--partitions", str(PARTITIONS))
    shutil.copytree(here, nginx.root / "there.fan")
    assert run_job(f"{nginx.url}/there.fan", ssd, source)["staging"]["done_partitions"] == PARTITIONS
    assert from_shared(run_job(here, ssd, source)) == 0


@needs_jobs
def test_several_nodes_find_what_they_had(start_job: StartJob, source: Path, tmp_path: Path) -> None:
    """With replicas and files that are everywhere, and the nodes in another order."""
    options = ("--partitions", "8", "--everywhere", "class-0/*")
    prepared = prepare(source, tmp_path / "d.fan", *options)
    contents = Source(source)

    def run() -> list[dict[str, Any]]:
        job: Job = start_job(
            prepared, 3, "--keep-local", "--stage-first", "--replicas", "2", local=True, directory=tmp_path / "job"
        )
        for mount in job.mounts():
            contents.check(mount)
        statistics = [job.statistics(rank) for rank in range(3)]
        job.stop()
        return statistics

    first = run()
    copied = [one["staging"]["done_partitions"] for one in first]
    assert min(copied) > 0 and sum(copied) > 16, "two of each, and one everywhere"
    (tmp_path / "job" / "ssd0").rename(tmp_path / "job" / "aside")
    (tmp_path / "job" / "ssd2").rename(tmp_path / "job" / "ssd0")
    (tmp_path / "job" / "aside").rename(tmp_path / "job" / "ssd2")
    second = run()
    assert [from_shared(one) for one in second] == [0, 0, 0]
    assert [one["staging"]["reused_partitions"] for one in second] == copied[::-1]
