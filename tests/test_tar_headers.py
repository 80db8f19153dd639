"""Tar headers that we write (native/prep/tarhead.c): any path, size, time and owner is read back by others and by us.

Covers files of 8 GiB and more without making one.
"""

import io
import subprocess
import tarfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fanstore import _native
from fanstore.format.tarshard import TarMember, list_members

#: The largest number that eleven octal digits hold: one byte less than 8 GiB.
OCTAL_MAX = 8**11 - 1

names = st.binary(min_size=1, max_size=255).filter(
    lambda name: name not in (b".", b"..") and b"/" not in name and b"\0" not in name
)
paths = st.one_of(
    st.lists(names, min_size=1, max_size=6),
    # Around the borders of the fields of a ustar header: 100 for the name, 155 for the prefix.
    st.tuples(st.integers(1, 255), st.integers(1, 255)).map(lambda pair: [b"p" * pair[0], b"n" * pair[1]]),
    st.integers(1, 255).map(lambda length: [b"n" * length]),
).map(b"/".join)
sizes = st.one_of(st.integers(0, 2**62), st.sampled_from([0, 1, OCTAL_MAX - 1, OCTAL_MAX, OCTAL_MAX + 1, 2**40]))
times = st.integers(-(2**63), 2**63 - 1)
owners = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 0o7777777, 0o10000000]))


class Claimed(io.BytesIO):
    """Headers of a file whose content is not there: reads behind them give zeros."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        return data + bytes(max(0, (size or 0) - len(data)))


def read_by_us(headers: bytes, size: int) -> TarMember:
    member = next(list_members(Claimed(headers), len(headers) + size + 1024, "'x.tar'"))
    assert member.offset == len(headers)
    return member


def read_by_python(headers: bytes) -> tarfile.TarInfo:
    with tarfile.open(fileobj=io.BytesIO(headers + bytes(1024)), mode="r:", errors="surrogateescape") as tar:
        info = tar.firstmember  # type: ignore[attr-defined]  # next() would look for the content
    assert isinstance(info, tarfile.TarInfo)
    return info


@settings(max_examples=1_000, deadline=None)
@given(path=paths, mode=st.integers(0, 0o7777), uid=owners, gid=owners, mtime_ns=times, size=sizes)
@example(path=b"a", mode=0o644, uid=0, gid=0, mtime_ns=0, size=OCTAL_MAX + 1)
@example(path=b"a", mode=0o644, uid=0, gid=0, mtime_ns=-1, size=0)
@example(path=b"d" * 155 + b"/" + b"n" * 100, mode=0o644, uid=0, gid=0, mtime_ns=0, size=0)
@example(path=b"d" * 156 + b"/" + b"n" * 100, mode=0o644, uid=0, gid=0, mtime_ns=0, size=0)
def test_what_is_written_is_read(path: bytes, mode: int, uid: int, gid: int, mtime_ns: int, size: int) -> None:
    headers = _native.tar_file_header(path, 0o100000 | mode, uid, gid, mtime_ns, size, size)
    assert len(headers) % 512 == 0
    member = read_by_us(headers, size)
    assert (b"/".join(member.path), member.kind) == (path, "file")
    assert (member.mode, member.uid, member.gid) == (mode, uid, gid)
    assert (member.mtime_ns, member.size) == (mtime_ns, size)
    info = read_by_python(headers)
    assert info.name.encode("utf-8", "surrogateescape") == path
    assert (info.mode, info.uid, info.gid, info.size) == (mode, uid, gid, size)
    assert abs(info.mtime - mtime_ns / 10**9) < 1e-3 * max(1.0, abs(mtime_ns) / 10**18)
    assert set(info.pax_headers) <= {"path", "mtime", "size", "uid", "gid"}


@settings(max_examples=200, deadline=None)
@given(path=paths, mtime_ns=times, size=sizes, largest=sizes)
def test_headers_are_as_long_for_any_smaller_size(path: bytes, mtime_ns: int, size: int, largest: int) -> None:
    """A header that is written after its content (a compressed stream) must fit where it was left out."""
    size, largest = sorted((size, largest))
    early = _native.tar_file_header(path, 0o644, 0, 0, mtime_ns, largest, largest)
    late = _native.tar_file_header(path, 0o644, 0, 0, mtime_ns, size, largest)
    assert len(early) == len(late)
    assert read_by_us(late, size).size == size


def test_what_ustar_can_say_needs_no_pax_header() -> None:
    for path in (b"a", b"n" * 100, b"p" * 155 + b"/" + b"n" * 100, b"p/" * 70 + b"name"):
        assert len(_native.tar_file_header(path, 0o644, 0o7777777, 5, 10**9, OCTAL_MAX, OCTAL_MAX)) == 512


def test_gnu_tar_reads_sizes_of_8_gib_and_more(tmp_path: Path) -> None:
    """The content is a hole, so nothing is written and nothing is read."""
    for size in (OCTAL_MAX, OCTAL_MAX + 1, 2**40):
        headers = _native.tar_file_header(b"big", 0o600, 0, 0, 1_500_000_000 * 10**9, size, size)
        with open(tmp_path / "x.tar", "wb") as file:
            file.write(headers)
            file.truncate(len(headers) + -(-size // 512) * 512 + 1024)
        listing = subprocess.run(
            ["tar", "-tvf", tmp_path / "x.tar"], capture_output=True, text=True, check=True, timeout=60
        )
        assert f" {size} 2017-07-14 " in listing.stdout
