"""Turns a prepared dataset back into a tree by means of docs/format.md alone: no code of FanStore is used.

The index is read by the reference reader, bytes are cut out of the partition files at the index's offsets, compressed
files are decoded whole by their library; checksums of all chunks and partitions are compared on the way. Works for
paths of any length. Used by the tests of preparation and of verification.
"""

import json
import os
import stat
from pathlib import Path

import lz4.frame
import zstandard
from index_reference import ReferenceIndex, checksum
from oddities import opened_directory, write_file


def _plain(data: bytes, size: int) -> bytes:
    assert len(data) == size
    return data


def _lz4(data: bytes, size: int) -> bytes:
    assert data[:4] == b"\x04\x22\x4d\x18"
    info = lz4.frame.get_frame_info(data)
    assert (info["block_linked"], info["content_checksum"], info["block_checksum"]) == (False, False, False)
    assert info["content_size"] == size
    content: bytes = lz4.frame.decompress(data)
    return content


def _zstd(data: bytes, size: int) -> bytes:
    content, left = [], data
    while left:
        frame = zstandard.get_frame_parameters(left)
        assert (frame.has_checksum, frame.dict_id) == (False, 0)
        assert frame.window_size <= 4 << 20
        decoder = zstandard.ZstdDecompressor().decompressobj()
        content.append(decoder.decompress(left))
        assert decoder.eof and len(content[-1]) == frame.content_size
        left = decoder.unused_data
    assert {len(one) for one in content[:-1]} <= {4 << 20}, "a frame is a chunk"
    return b"".join(content)


#: By the number of the codec.
_DECODERS = {0: _plain, 1: _lz4, 2: _zstd}


class Prepared:
    """A prepared dataset, read by the document."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = json.loads((path / "manifest.json").read_text())
        data = (path / "index.fsx").read_bytes()
        assert self.manifest["index"]["bytes"] == len(data)
        assert int(self.manifest["index"]["checksum"], 16) == checksum(data)
        self.index = ReferenceIndex(data)
        self.parts: list[bytes] = []
        for info in self.manifest["partitions"]:
            content = (path / info["file"]).read_bytes()  # an absolute path, if external, replaces the first
            assert len(content) == info["bytes"]
            assert checksum(content) == int(info["checksum"], 16), info["file"]
            self.parts.append(content)
        assert [len(part) for part in self.parts] == list(self.index.parts)

    def content(self, entry: int) -> bytes:
        """The bytes of a regular file."""
        column = self.index.column
        part, offset, stored = column["part"][entry], column["offset"][entry], column["stored"][entry]
        data = self.parts[part][offset : offset + stored]
        chunks = self.index.stored_chunks(entry)
        sums = []
        for chunk in chunks:
            piece = self.parts[chunk.partition][chunk.offset : chunk.offset + chunk.stored_bytes]
            assert checksum(piece) == chunk.checksum, self.index.path(entry)
            sums.append(chunk.checksum.to_bytes(8, "little"))
        expected = column["checksum"][entry]
        assert expected == (checksum(b"".join(sums)) if len(sums) > 1 else checksum(data)), self.index.path(entry)
        return _DECODERS[column["codec"][entry]](data, column["size"][entry])

    def compressed(self) -> set[bytes]:
        """Paths of the files that are compressed."""
        return {self.index.path(entry) for entry, codec in enumerate(self.index.column["codec"]) if codec != 0}

    def paths(self) -> set[bytes]:
        return {self.index.path(entry) for entry in range(1, self.index.n)}


def materialise(prepared: Prepared, out: Path) -> Path:
    """Write the tree to ``out``, which must not exist."""
    index = prepared.index
    primaries: dict[int, tuple[int, bytes]] = {}

    def attributes(entry: int, name: bytes, dir_fd: int) -> None:
        mode, mtime_ns = index.column["mode"][entry], index.column["mtime"][entry]
        if not stat.S_ISLNK(mode):
            os.chmod(name, stat.S_IMODE(mode), dir_fd=dir_fd)
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)

    def make(entry: int, fd: int) -> None:
        for child in index.children(entry):
            name = index.name(child)
            if index.is_type(child, stat.S_IFDIR):
                os.mkdir(name, dir_fd=fd)
                continue
            primary = index.column["inode"][child]
            if primary in primaries:
                link_fd, link_name = primaries[primary]
                os.link(link_name, name, src_dir_fd=link_fd, dst_dir_fd=fd, follow_symlinks=False)
                continue
            if index.is_type(child, stat.S_IFLNK):
                os.symlink(index.link_target(child), name, dir_fd=fd)
            else:
                write_file(fd, name, prepared.content(child))
            attributes(child, name, fd)
            if index.column["nlink"][child] > 1:
                primaries[primary] = (os.dup(fd), name)
        for child in index.children(entry):
            if index.is_type(child, stat.S_IFDIR):
                with opened_directory(index.name(child), fd) as inner:
                    make(child, inner)

    def finish(entry: int, fd: int) -> None:
        for child in index.children(entry):
            if index.is_type(child, stat.S_IFDIR):
                with opened_directory(index.name(child), fd) as inner:
                    finish(child, inner)
                attributes(child, index.name(child), fd)

    out.mkdir()
    try:
        with opened_directory(out) as fd:
            make(0, fd)
            finish(0, fd)
    finally:
        for held, _ in primaries.values():
            os.close(held)
    os.chmod(out, stat.S_IMODE(index.column["mode"][0]))
    os.utime(out, ns=(index.column["mtime"][0],) * 2)
    return out
