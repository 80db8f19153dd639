"""Datasets in an object store: nginx and moto's S3 server give them, and every fault is one sentence."""

import errno
import json
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import mpirun, run_fanstore, run_inside
from jobs import StartJob, needs_jobs
from mounting import Mount, needs_fuse
from object_servers import BUCKET, S3, FaultyServer, Nginx, needs_nginx

from fanstore.doctor.disks import SharedChecks
from fanstore.doctor.finding import Status
from fanstore.errors import CorruptDataError, UsageError
from fanstore.format import objects
from fanstore.format.objects import Objects
from fanstore.format.prepared import PreparedDataset
from fanstore.format.storage import is_address, storage_at
from fanstore.prep.spool import expand

pytest_plugins = ["jobs", "mounting", "object_servers"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree, ``src``, and its dataset, ``x.fan``."""
    base = tmp_path_factory.mktemp("objects")
    for number in range(40):
        folder = base / "src" / f"{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}").write_bytes(os.urandom(50_000 + number))
    result = run_inside("prep", base / "src", base / "x.fan", "--partitions", "4", "--quiet")
    assert result.returncode == 0, result.stderr
    return base


@pytest.fixture
def tree(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "src", tmp_path / "src"))


@pytest.fixture
def prepared(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original / "x.fan", tmp_path / "x.fan"))


def upload(s3: S3, prepared: Path, folder: str = "sets") -> str:
    for path in prepared.iterdir():
        if path.is_file():
            s3.write(f"{folder}/{prepared.name}/{path.name}", path.read_bytes())
    return f"s3://{BUCKET}/{folder}/{prepared.name}"


def partition_bytes(prepared: Path) -> dict[str, int]:
    return {part.file: part.bytes for part in PreparedDataset.open(prepared).manifest.partitions}


def same(mounted: Path, tree: Path) -> None:
    for path in tree.rglob("*"):
        if path.is_file():
            assert (mounted / path.relative_to(tree)).read_bytes() == path.read_bytes()


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "address"),
    [
        *((text, True) for text in ("http://h/x", "HTTPS://h/x", "s3://b/x")),
        *((text, False) for text in ("/data/x", "http:x", "x://y", "s3", "./s3://b/x")),
    ],
)
def test_what_is_an_address(text: str, address: bool) -> None:
    assert is_address(text) is address
    assert (storage_at(text).directory is None) is address


@pytest.mark.parametrize(
    "text",
    ["http://", "s3:///x", "http://[::1/x", "https://user:secret@h/x", "https://h/x?signature=1", "http://h/x#y"],
)
def test_addresses_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        storage_at(text)
    assert "secret" not in str(caught.value)
    result = run_inside("verify", text)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


# --- faults ---


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "SILENCE_S", "REQUEST_S", "GIVE_UP_S", "REPETITIONS"):
        monkeypatch.setattr(objects, name, 1)


def test_what_fails_for_a_moment_is_repeated(faulty: FaultyServer) -> None:
    storage = Objects(f"{faulty.url}/x")
    faulty.faults = 3
    assert bytes(storage.read_range("name", 100, 50)) == faulty.content[100:150]
    assert faulty.asked == 4


def test_a_connection_that_breaks(faulty: FaultyServer, hasty: None) -> None:
    """In the middle of an answer: asked for again; if it always breaks, an error and no half of the bytes."""
    storage = Objects(f"{faulty.url}/x")
    faulty.breaks = 1
    assert bytes(storage.read_range("name", 0, 60_000)) == faulty.content[:60_000]
    faulty.breaks = 1000
    with pytest.raises(ConnectionResetError, match=r"the connection to .* broke in an answer"):
        storage.read_range("name", 0, 60_000)
    assert faulty.asked == 4


def test_what_fails_for_long(faulty: FaultyServer, hasty: None) -> None:
    faulty.faults = 1000
    with pytest.raises(OSError, match=r"answers with an error \(503 Service Unavailable\)") as caught:
        Objects(f"{faulty.url}/x").read_range("name", 100, 50)
    assert caught.value.errno == errno.EIO
    assert faulty.asked == 2


def test_a_server_that_ignores_ranges(plain_http_server: str, prepared: Path) -> None:
    result = run_inside("verify", f"{plain_http_server}/{prepared.name}")
    assert result.returncode == 1
    assert "ignores byte ranges, which are needed; use a server" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_server_that_does_not_answer(silent: str, hasty: None) -> None:
    with pytest.raises(TimeoutError, match="did not answer in time"):
        Objects(f"{silent}/x").length("manifest.json")


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no-such-host.invalid"])
def test_a_server_that_cannot_be_reached(host: str, hasty: None) -> None:
    with pytest.raises(ConnectionRefusedError, match=f"cannot connect to {host}: (connection refused|its name is not)"):
        Objects(f"http://{host}/x").length("manifest.json")


@needs_nginx
def test_missing_and_forbidden(nginx: Nginx, prepared: Path) -> None:
    result = run_inside("verify", f"{nginx.url}/absent.fan")
    assert "is not a prepared dataset: there is no http" in result.stderr
    assert "manifest.json; make one with fanstore-prep" in result.stderr
    (prepared / "part-00002.tar").rename(prepared / "away")
    dataset = PreparedDataset.open(f"{nginx.url}/{prepared.name}")
    with pytest.raises(Exception, match=r"part-00002.tar' is missing; copy the dataset again"):
        dataset.check_partitions()
    nginx.forbid()
    result = run_inside("verify", f"{nginx.url}/{prepared.name}")
    assert result.returncode == 1
    assert "refuses access (403 Forbidden)" in result.stderr
    assert result.stderr.count("\n") == 1


@needs_nginx
def test_an_object_that_changes(nginx: Nginx, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "name").write_bytes(b"a" * 1000)
    storage = Objects(f"{nginx.url}/x")
    assert bytes(storage.read_range("name", 0, 10)) == b"a" * 10
    (tmp_path / "x" / "name").write_bytes(b"a" * 999)
    with pytest.raises(OSError, match="the object has changed since it was first read") as caught:
        storage.read_range("name", 0, 10)
    assert caught.value.errno == errno.ESTALE


@needs_nginx
def test_objects_of_several_ranges(nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given out in order; one that is shorter than it should be ends early."""
    monkeypatch.setattr(objects, "RANGE_BYTES", 10_000)
    content = os.urandom(123_456)
    (tmp_path / "x y").mkdir()
    (tmp_path / "x y" / "name").write_bytes(content)
    for address in (f"{nginx.url}/x%20y", f"{nginx.url}/x y"):
        storage = Objects(address)
        for wanted in (0, 1, 10_000, 123_456):
            assert b"".join(storage.stream("name", wanted)) == content[:wanted]
        for wanted in (123_457, 200_000):
            assert b"".join(storage.stream("name", wanted)) == content
        assert storage.read("name") == content
    with pytest.raises(CorruptDataError, match="it ends at byte 123456"):
        storage.read_range("name", 123_000, 1000)


@needs_nginx
def test_streams_share_their_memory(nginx: Nginx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at a time, with little room: all come to their end; who stops early gives its room back."""
    monkeypatch.setattr(objects, "RANGE_BYTES", 10_000)
    monkeypatch.setattr(objects, "RANGES", 3)
    content = os.urandom(200_000)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "name").write_bytes(content)
    storage = Objects(f"{nginx.url}/x")

    def read(number: int) -> bytes:
        stream = storage.stream("name", len(content))
        if number % 3:
            return b"".join(stream)
        next(stream)
        stream.close()
        return content

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(24), timeout=60)) == {content}
    assert storage._room._value == 3


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore.store", None)
    result = run_inside("verify", "s3://bucket/x.fan")
    assert result.returncode == 1
    assert "pip install 'fanstore-fs[objects]'" in result.stderr


# --- commands ---


@needs_nginx
def test_verify(nginx: Nginx, prepared: Path, tree: Path) -> None:
    address = f"{nginx.url}/{prepared.name}"
    result = run_inside("verify", address, "--against", tree)
    assert result.returncode == 0, result.stderr
    assert f"{address}: 4 partitions" in result.stdout
    data = bytearray((prepared / "part-00001.tar").read_bytes())
    data[5000] ^= 1
    (prepared / "part-00001.tar").write_bytes(data)
    result = run_inside("verify", address)
    assert result.returncode == 1
    assert "part-00001.tar: the bytes do not match their checksum" in result.stdout


@needs_nginx
@needs_fuse
@pytest.mark.parametrize("engine", ["native", "python"], indirect=True)
def test_mounted_without_local_disk(nginx: Nginx, mount: Mount, prepared: Path, tree: Path, engine: str) -> None:
    """Bytes come by ranges; twice read is once fetched."""
    mounted = mount(f"{nginx.url}/{prepared.name}", "--verify", "always")
    same(mounted.path, tree)
    same(mounted.path, tree)
    assert mounted.statistics()["sources"]["shared"]["fetches"] == 40
    config = json.loads((mounted.path / ".fanstore" / "config.json").read_text())
    assert (config["storage"], config["prepared"]) == ("object store", f"{nginx.url}/{prepared.name}")
    sent = nginx.sent()
    assert sum(count for name, count in sent.items() if name.startswith("part-")) == sum(
        path.stat().st_size for path in tree.rglob("*") if path.is_file()
    )


@needs_nginx
@needs_fuse
def test_an_object_that_changes_under_the_mount(nginx: Nginx, mount: Mount, prepared: Path, tree: Path) -> None:
    mounted = mount(f"{nginx.url}/{prepared.name}", announced=[r"cannot read '\d/\d\d' from object http.*ETag"])
    shutil.copy(prepared / "part-00000.tar", prepared / "new")
    for number in range(4):
        os.utime(prepared / f"part-{number:05d}.tar", (1, 1))
    with pytest.raises(OSError, match="Input/output error"):
        same(mounted.path, tree)


@needs_nginx
@needs_jobs
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_each_byte_once(
    kind: str, request: pytest.FixtureRequest, start_job: StartJob, prepared: Path, tree: Path
) -> None:
    """Three nodes: manifest and index are read once, by one of them; each partition once, by the node that keeps it."""
    if kind == "s3":
        s3: S3 = request.getfixturevalue("s3")
        front, address = s3.nginx, upload(s3, prepared)
    else:
        front = request.getfixturevalue("nginx")
        address = f"{front.url}/{prepared.name}"
    job = start_job(address, 3, "--stage-first", local=True)
    for mounted in job.mounts():
        same(mounted, tree)
    job.end()
    expected = partition_bytes(prepared) | {
        name: (prepared / name).stat().st_size for name in ("manifest.json", "index.fsx")
    }
    assert front.sent() == expected
    assert all(request.status in (200, 206) for request in front.requests())


@needs_nginx
@needs_jobs
def test_each_byte_once_in_a_first_epoch_during_staging(
    start_job: StartJob, nginx: Nginx, prepared: Path, tree: Path
) -> None:
    """Nobody waits for staging: who wants bytes has them from the node that keeps them, which gets them next."""
    nginx.slow_down()
    job = start_job(f"{nginx.url}/{prepared.name}", 3, local=True)
    mounts = job.mounts()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda mounted: same(mounted, tree), mounts))
    early = sum(json.loads((m / ".fanstore/stats.json").read_text())["sources"]["shared"]["reads"] for m in mounts)
    waited = sum(job.log_text(rank).count("did not answer") for rank in range(3))
    job.end()
    assert (early, waited) == (0, 0)
    sent = nginx.sent()
    assert {name: sent[name] for name in partition_bytes(prepared)} == partition_bytes(prepared)


@needs_nginx
def test_anonymous_and_signed(s3: S3, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = upload(s3, prepared)
    assert run_inside("verify", address, "--quiet").returncode == 0
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    result = run_inside("verify", address, "--quiet")
    assert result.returncode == 1
    assert "refuses access (403 Forbidden): check the credentials (AWS_ACCESS_KEY_ID and so on)" in result.stderr
    assert result.stderr.count("\n") == 1
    s3.is_public = True
    assert run_inside("verify", upload(s3, prepared, "public"), "--quiet").returncode == 0


@needs_nginx
def test_doctor(nginx: Nginx, prepared: Path) -> None:
    (good,) = SharedChecks(f"{nginx.url}/{prepared.name}").check()
    assert good.status is Status.OK
    assert "a prepared dataset: 40 files" in good.found
    (bad,) = SharedChecks(f"{nginx.url}/absent").check()
    assert bad.status is Status.ERROR
    assert "is not a prepared dataset" in bad.found


# --- preparing ---


def expected_names(folder: str, parts: int, tag: str = "") -> set[str]:
    return {f"{folder}/{name}" for name in ("manifest.json", "index.fsx")} | {
        f"{folder}/part-{tag}{number:05d}.tar" for number in range(parts)
    }


@needs_nginx
def test_prepared_in_s3(s3: S3, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left on this machine; what is there is refused without --force, and replaced as a whole with it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    address = f"s3://{BUCKET}/sets/x.fan"
    result = run_inside("prep", tree, address, "--partitions", "3", "--quiet")
    assert result.returncode == 0, result.stderr
    assert s3.names() == expected_names("sets/x.fan", 3)
    assert run_inside("verify", address, "--against", tree, "--quiet").returncode == 0
    result = run_inside("prep", tree, f"{address}/", "--quiet")
    assert (result.returncode, "exists already; use --force to replace it" in result.stderr) == (1, True)
    (tree / "new").write_bytes(b"new")
    result = run_inside("prep", tree, address, "--partitions", "2", "--codec", "lz4", "--force", "--quiet")
    assert result.returncode == 0, result.stderr
    (tag,) = {name[len("sets/x.fan/part-") :][:9] for name in s3.names() if "/part-" in name}
    assert s3.names() == expected_names("sets/x.fan", 2, tag)
    assert run_inside("verify", address, "--against", tree, "--quiet").returncode == 0
    assert not list(temporary.iterdir())


@needs_nginx
def test_a_copy_of_a_dataset_that_was_updated(s3: S3, tree: Path, tmp_path: Path) -> None:
    """Its index has another name, and the one before lies beside it: it is read, and replaced as a whole."""
    out = tmp_path / "x.fan"
    assert run_inside("prep", tree, out, "--quiet").returncode == 0
    (tree / "new").write_bytes(b"new")
    assert run_inside("prep", tree, out, "--update", "--quiet").returncode == 0
    assert "an address" in run_inside("prep", tree, f"s3://{BUCKET}/sets/x.fan", "--update").stderr
    for folder in ("both", "one"):  # with the index before, and without
        address = upload(s3, out, folder)
        assert run_inside("verify", address, "--against", tree, "--quiet").returncode == 0
        result = run_inside("prep", tree, address, "--partitions", "2", "--force", "--quiet")
        assert result.returncode == 0, result.stderr
        names = {name for name in s3.names() if name.startswith(folder)}
        (tag,) = {name.partition("/part-")[2][:9] for name in names if "/part-" in name}
        assert names == expected_names(f"{folder}/x.fan", 2, tag)
        (out / "index.fsx").unlink(missing_ok=True)


@needs_nginx
@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("when", ["packing", "index.fsx", "manifest.json"])
def test_interrupted(s3: S3, tree: Path, when: str, force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment: nothing that looks complete is left of it, and what was there before is as it was."""
    address = f"s3://{BUCKET}/sets/x.fan"
    if force:
        assert run_inside("prep", tree, address, "--partitions", "2", "--quiet").returncode == 0
    before = s3.contents()
    assert len(before) == 4 * force
    write = Objects.write
    left = [1]

    def interrupted(self: Objects, name: str, content: bytes | Path) -> None:
        if left and (name == when or (when == "packing" and name.endswith("3.tar"))):
            left.pop()
            raise KeyboardInterrupt
        write(self, name, content)

    monkeypatch.setattr(Objects, "write", interrupted)
    result = run_inside("prep", tree, address, "--partitions", "5", "--quiet", *(["--force"] if force else []))
    assert result.returncode == 130, result.stderr
    assert not left
    assert s3.contents() == before


@needs_nginx
def test_what_cannot_be_written(s3: S3, nginx: Nginx, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(out: str, *options: str) -> str:
        result = run_inside("prep", tree, out, "--quiet", *options)
        assert result.returncode in (1, 2)
        assert result.stderr.count("\n") == 1
        return result.stderr

    assert "can only be read; OUT is a directory, or s3://BUCKET/PATH" in said(f"{nginx.url}/x.fan")
    assert "can only be read; OUT is a directory, or s3://BUCKET/PATH" in said(f"s3://{BUCKET}/")
    s3.write("sets/photos/cat.jpg", b"cat")
    assert "holds other objects already, such as cat.jpg" in said(f"s3://{BUCKET}/sets/photos", "--force")
    s3.write("sets/odd/manifest.json", b"{}")
    assert "is not a prepared dataset, so --force does not replace it" in said(f"s3://{BUCKET}/sets/odd", "--force")
    assert s3.names() == {"sets/photos/cat.jpg", "sets/odd/manifest.json"}
    assert "--index-only leaves the tar files" in said(f"s3://{BUCKET}/x.fan", "--index-only")
    assert "cannot write to 's3://absent/x.fan': there is no such bucket (404 Not Found)" in said("s3://absent/x.fan")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert "the variables AWS_… do not fit together (Generic S3 error: Missing AccessKeyId)" in said(
        f"s3://{BUCKET}/x.fan"
    )
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "refuses access (403 Forbidden)" in said(f"s3://{BUCKET}/x.fan")


@needs_nginx
@needs_jobs
def test_several_ranks_write_to_s3(s3: S3, tree: Path, tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/sets/x.fan"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = ("prep", tree, address, "--partitions", "5", "--quiet")
    result = run_fanstore(*command, prefix=mpirun(3), env={"TMPDIR": str(temporary)})
    assert not list(temporary.glob("fanstore-*"))
    assert result.returncode == 0, result.stderr
    assert s3.names() == expected_names("sets/x.fan", 5)
    assert run_inside("verify", address, "--against", tree, "--quiet").returncode == 0


@needs_nginx
@pytest.mark.parametrize("kind", ["http", "s3"])
def test_tar_shards_of_an_address(kind: str, request: pytest.FixtureRequest, tree: Path, tmp_path: Path) -> None:
    """Plain and compressed ones, by patterns as a shell knows them."""
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(4):
        tar = shards / f"shard-{number:03d}.tar"
        subprocess.run(
            ["tar", "-C", tree, "-cf", tar, "--no-recursion", ".", "--recursion", f"./{number}"], check=True, timeout=60
        )
    subprocess.run(["gzip", shards / "shard-002.tar"], check=True, timeout=60)
    subprocess.run(["zstd", "-q", "--rm", shards / "shard-003.tar"], check=True, timeout=60)
    if kind == "s3":
        s3: S3 = request.getfixturevalue("s3")
        for path in shards.iterdir():
            s3.write(f"shards/{path.name}", path.read_bytes())
        base = f"s3://{BUCKET}/shards"
    else:
        base = f"{request.getfixturevalue('nginx').url}/shards"
    patterns = [f"{base}/shard-{{000..001}}.tar", f"{base}/shard-00{{2.tar.gz,3.tar.zst}}"]
    out = tmp_path / "out.fan"
    result = run_inside("prep", *patterns, out)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("fetching 'http" if kind == "http" else "fetching 's3") == 4
    assert sorted(path.name for path in out.iterdir() if path.is_file()) == [
        "index.fsx",
        "manifest.json",
        "part-00000.tar",
    ]
    tars = [f"{shards}/shard-{number:03d}.tar" for number in range(4)]
    subprocess.run(["gunzip", f"{tars[2]}.gz"], check=True, timeout=60)
    subprocess.run(["zstd", "-q", "-d", f"{tars[3]}.zst"], check=True, timeout=60)
    result = run_inside("verify", out, "--against", *tars)
    assert result.returncode == 0, result.stdout
    for option, sentence in (((), "there is no such object (404"), (("--index-only",), "is an address")):
        result = run_inside("prep", f"{base}/absent.tar", tmp_path / "x.fan", *option)
        assert result.returncode in (1, 2)
        assert sentence in result.stderr
        assert not (tmp_path / "x.fan").exists()
    assert "is an address" in run_inside("verify", out, "--against", f"{base}/shard-000.tar").stderr


def test_patterns() -> None:
    assert list(expand(["/a{1..3}", "s3://b/{08..11}-{x,y}.tar", "http://h/{1..2}/{z}"])) == [
        "/a{1..3}",
        *(f"s3://b/{number:02d}-{letter}.tar" for number in range(8, 12) for letter in "xy"),
        "http://h/1/{z}",
        "http://h/2/{z}",
    ]
    for wrong in ("http://h/{3..1}.tar", "http://h/{0..99999999}.tar"):
        with pytest.raises(UsageError, match="no range of numbers"):
            list(expand([wrong]))
