"""Tar files as sources: sound ones in every dialect are read, all others are refused with one sentence.

Whatever is in a tar file, nothing but FormatError or SourceError may come out, nothing may hang, take gigabytes of
memory, or lead outside the archive.
"""

import io
import os
import random
import resource
import stat
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import tars
from commands import assert_one_error, run_fanstore, run_inside
from materialise import Prepared, materialise
from oddities import compare_trees
from tars import END, base256, block, member, pax, record

from fanstore.errors import FanstoreError, FormatError, SourceError
from fanstore.format.tarshard import list_members
from fanstore.prep.scan import Scan, scan
from fanstore.prep.sources import TarSource

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def listed(data: bytes) -> Scan | None:
    """What a scan of the archive finds; None if it is refused properly."""
    fd = tars.in_memory(data)
    try:
        source = TarSource(f"/proc/self/fd/{fd}", "x.tar")
        try:
            source.read_members(0)
            found = scan([source], lambda _: None)
        except (FormatError, SourceError) as error:
            text = str(error)
            assert "\n" not in text, text
            assert "'x.tar'" in text, text
            assert len(text) < 700 + 2 * 4096, text
            return None
        finally:
            source.close()
    finally:
        os.close(fd)
    _check_bounds(found, len(data))
    return found


def _check_bounds(found: Scan, length: int) -> None:
    """Nothing that was accepted lies outside the archive or leaves its root."""
    table = found.table
    assert found.problems == []
    for entry in range(len(table)):
        mode, size = int(table.mode[entry]), int(table.size[entry])
        name = table.name(entry)
        assert (name == b"") == (entry == 0)
        assert name not in (b".", b"..")
        assert b"/" not in name and b"\0" not in name and len(name) <= 255
        assert int(table.parent[entry]) < max(entry, 1)
        assert stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        if stat.S_ISREG(mode):
            assert int(table.origin[entry]) + size <= length


def paths(found: Scan) -> set[bytes]:
    return {found.table.path(entry) for entry in range(1, len(found.table))}


@pytest.fixture(scope="module")
def gnu_archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = tmp_path_factory.mktemp("tars") / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "file").write_bytes(b"content\n" * 100)
    (root / "a" / ("n" * 200)).write_bytes(b"long name")
    os.symlink("t" * 150, root / "a" / "symlink")
    os.link(root / "a" / "file", root / "a" / "b" / "hard")
    os.mkfifo(root / "pipe")
    os.utime(root / "a" / "file", ns=(0, 1_234_567_890_123_456_789))
    return {kind: tars.by_gnu_tar(root, f"--format={kind}") for kind in ("gnu", "oldgnu", "pax", "posix")}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_of_python(dialect: str) -> None:
    found = listed(tars.by_python(DIALECTS[dialect]))
    assert found is not None
    assert found.skipped == 1
    assert {b"dir/plain", b"dir/hard", b"dir/link", b"implied", b"implied/deeper/file"} <= paths(found)
    table = found.table
    entries = {table.path(entry): entry for entry in range(len(table))}
    assert table.inode[entries[b"dir/plain"]] == table.inode[entries[b"dir/hard"]]
    expected = 1_700_000_000_250_000_000 if dialect == "pax" else 1_700_000_000_000_000_000
    assert int(table.mtime[entries[b"dir/plain"]]) == expected
    assert int(table.mode[entries[b"implied/deeper/file"]]) == 0o104755


def test_dialects_of_gnu_tar(gnu_archives: dict[str, bytes]) -> None:
    for kind, data in gnu_archives.items():
        found = listed(data)
        assert found is not None, kind
        assert {b"a/file", b"a/b/hard", b"a/symlink", b"a/" + b"n" * 200} <= paths(found)


def test_the_standard_library_reads_the_same(gnu_archives: dict[str, bytes]) -> None:
    """On sound archives, its parser is the reference."""
    kinds = {"file": "isreg", "directory": "isdir", "symlink": "issym", "hardlink": "islnk", "special": "isdev"}
    for data in [*gnu_archives.values(), *(tars.by_python(kind) for kind in DIALECTS.values())]:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as tar:
            expected = tar.getmembers()
        found = list(list_members(io.BytesIO(data), len(data), "'x.tar'"))
        assert len(found) == len(expected)
        for one, info in zip(found, expected, strict=True):
            name = os.path.normpath(info.name).encode("utf-8", "surrogateescape")
            assert (b"/".join(one.path) or b".") == name
            assert getattr(info, kinds[one.kind])()
            assert (one.mode, one.uid, one.gid) == (info.mode, info.uid, info.gid)
            assert one.offset == info.offset_data
            assert abs(one.mtime_ns / 1e9 - info.mtime) < 1e-3
            if one.kind == "file":
                assert one.size == info.size
            elif one.kind == "symlink":
                assert one.link == info.linkname.encode("utf-8", "surrogateescape")
            elif one.kind == "hardlink":
                assert b"/".join(one.link_path).decode() == os.path.normpath(info.linkname)


def test_flips_in_headers(gnu_archives: dict[str, bytes]) -> None:
    archives = [*gnu_archives.values(), *(tars.by_python(kind) for kind in DIALECTS.values())]
    numbers = random.Random(1)
    accepted = 0
    for number in range(5_000):
        data = numbers.choice(archives)
        accepted += listed(tars.spoiled(data, numbers, sealed=number % 5 != 0)) is not None
    assert 500 < accepted < 4_500, "the spoiling is too mild or too wild"


def test_random_bytes_and_noise_in_the_middle() -> None:
    numbers = random.Random(2)
    data = tars.by_python(tarfile.PAX_FORMAT)
    for _ in range(300):
        listed(numbers.randbytes(numbers.choice((1, 511, 512, 513, 1024, 5000))))
        spoiled = bytearray(data)
        at = numbers.randrange(len(data) - 600)
        spoiled[at : at + 600] = numbers.randbytes(600)
        listed(bytes(spoiled))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_truncation_at_every_block(dialect: str) -> None:
    """A cut archive is refused, unless nothing but the marks of its end are missing."""
    data = tars.by_python(DIALECTS[dialect])
    whole = listed(data)
    assert whole is not None
    end = len(data.rstrip(b"\0")) + 511
    for length in [*range(0, len(data), 512), *range(100, len(data), 512)]:
        found = listed(data[:length])
        if found is not None:
            assert paths(found) == paths(whole)
            assert length > end // 512 * 512


A = member(b"a", b"content of a")

REFUSED: dict[str, bytes] = {
    "empty file": b"",
    "text": b"This is not a tar file, but a text that is long enough to hold a header.\n" * 20,
    "absolute name": member(b"/etc/passwd", b"root") + END,
    "absolute name in pax": pax(record(b"path", b"/etc/passwd")) + A + END,
    "parent": member(b"../evil", b"x") + END,
    "parent in the middle": member(b"a/../../evil", b"x") + END,
    "parent at the end": member(b"a/..", b"x") + END,
    "parent in the prefix": block(b"evil", prefix=b"../..") + END,
    "name of 256 bytes": pax(record(b"path", b"n" * 256)) + A + END,
    "hard link to nowhere": A + member(b"b", kind=b"1", link=b"nowhere") + END,
    "hard link forward": member(b"b", kind=b"1", link=b"a") + A + END,
    "hard links in a circle": member(b"a", kind=b"1", link=b"b") + member(b"b", kind=b"1", link=b"a") + END,
    "hard link to itself": member(b"a", kind=b"1", link=b"a") + END,
    "hard link to a directory": member(b"d/", kind=b"5") + member(b"b", kind=b"1", link=b"d") + END,
    "hard link to the root": A + member(b"b", kind=b"1", link=b".") + END,
    "hard link outside": A + member(b"b", kind=b"1", link=b"../a") + END,
    "hard link absolute": A + member(b"b", kind=b"1", link=b"/a") + END,
    "symbolic link without target": member(b"s", kind=b"2") + END,
    "symbolic link of 4096 bytes": pax(record(b"linkpath", b"t" * 4096)) + member(b"s", kind=b"2", link=b"t") + END,
    "file below a file": A + member(b"a/b", b"x") + END,
    "directory over a file": A + member(b"a", kind=b"5") + END,
    "file over a directory": member(b"d/x", b"x") + member(b"d", b"x") + END,
    "file as root": member(b".", b"x") + END,
    "symbolic link as root": member(b"./", kind=b"2", link=b"x") + END,
    "negative size": block(b"a", size_field=base256(-512, 12)) + A + END,
    "enormous size": block(b"a", size_field=base256(2**80, 12)) + A + END,
    "size beyond the end": block(b"a", size=8**11 - 1) + END,
    "size one byte beyond the end": block(b"a", size=513) + bytes(512),
    "size in pax negative": pax(record(b"size", b"-1")) + A + END,
    "size in pax enormous": pax(record(b"size", b"9" * 30)) + A + END,
    "size in pax of 5000 digits": pax(record(b"size", b"9" * 5000)) + A + END,
    "time in pax is text": pax(record(b"mtime", b"yesterday")) + A + END,
    "time in pax is nan": pax(record(b"mtime", b"nan")) + A + END,
    "time in pax is infinite": pax(record(b"mtime", b"inf")) + A + END,
    "pax header at the end": A + pax(record(b"path", b"x")) + END,
    "pax record without end": pax(b"9999999999 path=x\n") + A + END,
    "pax record of length 0": pax(b"0 path=x\n") + A + END,
    "pax record without equals": pax(b"7 path\n") + A + END,
    "pax header of terabytes": block(b"x", b"x", size_field=base256(2**42, 12)) + A + END,
    "pax header of exabytes": block(b"x", b"x", size_field=base256(2**62, 12)) + A + END,
    "GNU long name of exabytes": block(b"x", b"L", size_field=base256(2**62, 12), gnu=True) + A + END,
    "GNU long name at the end": A + block(b"x", b"L", 5, gnu=True) + tars.padded(b"name\0") + END,
    "unknown type": member(b"a", b"x", kind=b"Z") + END,
    "multi-volume": member(b"a", b"x", kind=b"M") + END,
    "rubbish after a member": A + b"rubbish".ljust(512, b"!") + A + END,
    "newline in a name": A + member(b"b\nc", kind=b"1", link=b"no\nwhere") + END,
    "newline in a clash": member(b"a\nb", b"x") + member(b"a\nb/c", b"x") + END,
    "too deep": pax(record(b"path", b"d/" * 1_100 + b"f")) + A + END,
    "cut in a header": A + A[:300],
    "no end": A,
    "sparse in pax": pax(record(b"GNU.sparse.major", b"1") + record(b"GNU.sparse.minor", b"0")) + A + END,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    begin = time.process_time()
    assert listed(REFUSED[name]) is None
    assert time.process_time() - begin < 5


ACCEPTED: dict[str, tuple[bytes, set[bytes]]] = {
    "one file": (A + END, {b"a"}),
    "an archive of nothing": (END, set()),
    "one block of zeros at the end": (A + bytes(512), {b"a"}),
    "rubbish after the end": (A + END + b"rubbish" * 100, {b"a"}),
    "another archive after the end": (A + END + member(b"b") + END, {b"a"}),
    "dots and slashes": (member(b"./x//y/./z", b"1") + END, {b"x", b"x/y", b"x/y/z"}),
    "the same name twice": (A + member(b"a", b"second") + END, {b"a"}),
    "the same directory twice": (member(b"d/", kind=b"5") * 2 + member(b"d/a", b"1") + END, {b"d", b"d/a"}),
    "a global header": (pax(record(b"comment", b"git"), b"g") + A + END, {b"a"}),
    "a volume label": (member(b"label", kind=b"V") + A + END, {b"a"}),
    "old directory by slash": (block(b"d/", b"\0") + END, {b"d"}),
    "contiguous file": (member(b"a", b"x", kind=b"7") + END, {b"a"}),
    "device and pipe": (member(b"dev", kind=b"3") + member(b"pipe", kind=b"6") + A + END, {b"a"}),
    "thousands of long names in a row": (
        (block(b"x", b"L", 5, gnu=True) + tars.padded(b"name\0")) * 5_000 + A + END,
        {b"name"},
    ),
    "thousands of pax headers in a row": (pax(record(b"path", b"x")) * 5_000 + A + END, {b"x"}),
    "pax value taken back": (pax(record(b"path", b"x"), b"g") + pax(record(b"path", b"")) + A + END, {b"a"}),
    "longest name": (pax(record(b"path", b"n" * 255)) + A + END, {b"n" * 255}),
    "name that is not UTF-8": (member(b"\xff\xfe", b"1") + END, {b"\xff\xfe"}),
    "name in pax that is not UTF-8": (pax(record(b"path", b"caf\xe9")) + A + END, {b"caf\xe9"}),
    "negative time": (pax(record(b"mtime", b"-1.5")) + A + END, {b"a"}),
    "far future": (pax(record(b"mtime", b"9" * 15)) + A + END, {b"a"}),
    "links of links": (
        A + member(b"b", kind=b"1", link=b"a") + member(b"c", kind=b"1", link=b"b") + END,
        {b"a", b"b", b"c"},
    ),
    "link of a link": (member(b"s", kind=b"2", link=b"x") + member(b"h", kind=b"1", link=b"s") + END, {b"s", b"h"}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    data, expected = ACCEPTED[name]
    found = listed(data)
    assert found is not None
    assert {path for path in paths(found) if path != b"label"} == expected


def test_the_last_of_two_members_wins() -> None:
    """As it does when the archive is unpacked."""
    data = A + member(b"a", b"second") + END
    found = listed(data)
    assert found is not None
    origin, size = int(found.table.origin[1]), int(found.table.size[1])
    assert data[origin : origin + size] == b"second"


def test_times_are_exact() -> None:
    for text, expected in (
        (b"1.000000001", 1_000_000_001),
        (b"-1.5", -1_500_000_000),
        (b"-0.1", -100_000_000),
        (b"7.", 7 * 10**9),
    ):
        found = listed(pax(record(b"mtime", text)) + A + END)
        assert found is not None
        assert int(found.table.mtime[1]) == expected


@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0", "gnu"])
def test_sparse_members_are_refused_with_advice(version: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with open(tmp_path / "root" / "sparse", "wb") as file:
        file.truncate(10 << 20)
        file.seek(5 << 20)
        file.write(b"middle")
    kind = ["--format=gnu"] if version == "gnu" else ["--format=pax", f"--sparse-version={version}"]
    data = tars.by_gnu_tar(tmp_path / "root", "--sparse", *kind)
    assert len(data) < 1 << 20
    (tmp_path / "x.tar").write_bytes(data)
    for option in ((), ("--index-only",)):
        result = run_inside("prep", tmp_path / "x.tar", tmp_path / "out.fan", *option)
        assert "sparse" in assert_one_error(result, "prep")


@pytest.mark.timeout(60)
def test_long_names_do_not_take_long() -> None:
    """Paths of thousands of components, and pax headers of a megabyte: no time that grows with the square."""
    deep = pax(record(b"path", b"d/" * 100_000 + b"f")) + A + END
    many = pax(b"".join(record(b"key%d" % number, b"v" * 50) for number in range(15_000))) + A + END
    digits = pax(b"1" * 1_000_000) + A + END
    equal = pax(record(b"k", b"=" * 900_000)) + A + END
    begin = time.process_time()
    for data in (deep, many, digits, equal, pax(record(b"path", b"d/" * 1_000 + b"f")) + A + END):
        listed(data)
    assert time.process_time() - begin < 10


def test_memory_stays_bounded() -> None:
    """Sizes in headers are only claims: no memory is taken for them."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in (2**31, 2**33, 2**36):
        for kind in (b"x", b"g", b"L", b"K"):
            listed(block(b"x", kind, size_field=base256(size, 12), gnu=kind in b"LK") + A + END)
    # Nor for the square of a path's length.
    deep = [pax(record(b"path", b"%d/" % number + b"d/" * 1_000 + b"f")) + A for number in range(25)]
    assert listed(b"".join(deep) + END) is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_spoiled_archives_through_the_whole_command(tmp_path: Path) -> None:
    """What the listing accepts is prepared to a sound dataset, or refused; never anything else."""
    numbers = random.Random(3)
    archives = [tars.by_python(kind) for kind in DIALECTS.values()]
    prepared = 0
    for number in range(150):
        path, out = tmp_path / f"{number}.tar", tmp_path / f"{number}.fan"
        path.write_bytes(tars.spoiled(numbers.choice(archives), numbers, sealed=True))
        options = ("--index-only",) if number % 2 else ("--codec", "lz4")
        result = run_inside("prep", path, out, "--quiet", *options)
        if result.returncode == 0:
            prepared += 1
            content = Prepared(out)
            for entry in range(content.index.n):
                if content.index.is_type(entry, stat.S_IFREG):
                    content.content(entry)
        else:
            assert_one_error(result, "prep")
            assert not out.exists()
        assert not list(tmp_path.glob(".*"))
    assert 20 < prepared < 140


def test_a_tar_gives_what_unpacking_it_gives(gnu_archives: dict[str, bytes], tmp_path: Path) -> None:
    for kind, data in gnu_archives.items():
        archive, unpacked, out = tmp_path / f"{kind}.tar", tmp_path / f"{kind}-unpacked", tmp_path / f"{kind}.fan"
        archive.write_bytes(data)
        unpacked.mkdir()
        subprocess.run(["tar", "-xpf", archive, "-C", unpacked], check=True, timeout=30)
        result = run_inside("prep", archive, out)
        assert result.returncode == 0, result.stderr
        assert "skipped 1 sockets, pipes and devices" in result.stdout
        assert compare_trees(unpacked, materialise(Prepared(out), tmp_path / f"{kind}-back")) == []


def test_the_command_line_says_it_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(REFUSED["parent"])
    result = run_fanstore("prep", tmp_path / "bad.tar", tmp_path / "out.fan")
    assert "'..'" in assert_one_error(result, "prep")
    assert os.listdir(tmp_path) == ["bad.tar"]


def test_the_fuzzer_reaches_its_targets() -> None:
    """The spoiled archives of this file differ from the originals and are mostly readable headers."""
    numbers = random.Random(4)
    data = tars.by_python(tarfile.GNU_FORMAT)
    readable = 0
    for _ in range(100):
        spoiled = tars.spoiled(data, numbers, sealed=True)
        assert len(spoiled) == len(data)
        try:
            with tarfile.open(fileobj=io.BytesIO(spoiled), mode="r:") as tar:
                readable += tar.next() is not None
        except (tarfile.TarError, ValueError):
            continue
    assert readable > 30


def test_errors_are_of_the_tree() -> None:
    assert issubclass(FormatError, FanstoreError) and issubclass(SourceError, FanstoreError)
