"""What every codec must do, in Python and in C: a new row of the table is tested by all of this without a line here.

Chunks that one side has written are read by the other; damaged and hostile ones are refused by both alike; what
fanstore-prep makes with each name of --codec is found by its index and read by both; and the decoders in C are fuzzed
under sanitizers (tests/native/codec_fuzz.c). That the codec's own program reads it, too, is in test_prep_roundtrip.py.
"""

import functools
import re
import subprocess
import tarfile
from pathlib import Path

import native_codecs
import pytest
from commands import run_inside
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_codecs import NativeCodec
from oddities import compressible, incompressible
from sanitized import CODECS as SOURCES
from sanitized import DRIVERS, ENVIRONMENT, LIBRARIES, SEED, compile_c

from fanstore import _native
from fanstore.errors import CorruptDataError, UsageError
from fanstore.format.codec import CHUNK_BYTES, NONE, Codec
from fanstore.format.codec_table import CODECS, METHODS, Compression, parse_compression
from fanstore.format.prepared import PreparedDataset

COMPRESSING = [codec for codec in CODECS.values() if codec is not NONE]
#: Every name of --codec, and with levels the lowest and the highest one.
ASKED = [
    parse_compression(name + level)
    for name, (codec, method) in METHODS.items()
    if codec is not NONE
    for level in ("", *(f":{bound}" for bound in {*method.levels[:1], *method.levels[-1:]}))
]
SIZES = (1, 2, 100, 4_096, 100_000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 77)
KINDS = {"text": compressible, "noise": incompressible, "zeros": lambda size, seed: bytes(size)}
FUZZ_ROUNDS = 4_000

quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
many = settings(quick, max_examples=300)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[int, NativeCodec]:
    """The table in C."""
    return native_codecs.load(tmp_path_factory.mktemp("codecs"))


def cut(content: bytes) -> list[bytes]:
    return [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]


def encode(compression: Compression, content: bytes) -> list[bytes]:
    assert compression.codec.encode is not None
    return list(compression.codec.encode(cut(content), len(content), compression.level))


def usual(codec: Codec) -> Compression:
    return parse_compression(codec.methods[0].name)


def decode(codec: Codec, stored: bytes, content_bytes: int, first: bool) -> bytes | None:
    """None if it is refused; any other error than this one is a bug."""
    try:
        return codec.decode_chunk(stored, content_bytes, first)
    except CorruptDataError as error:
        assert "\n" not in str(error)
        return None


@functools.cache
def _kind(kind: str) -> bytes:
    return KINDS[kind](CHUNK_BYTES, 1)


def mixture(size: int, kinds: list[str]) -> bytes:
    """Content whose chunks are of these kinds: one that does not shrink is among others that do."""
    return b"".join(_kind(kind) for kind in kinds[: -(-size // CHUNK_BYTES)])[:size]


def test_both_tables_have_the_same_rows(native: dict[int, NativeCodec]) -> None:
    rows = {number: (row.name, row.suffix, row.decodes) for number, row in native.items()}
    assert rows == {number: (row.name, row.suffix, row.decode is not None) for number, row in CODECS.items()}
    suffixes = [codec.suffix for codec in COMPRESSING]
    assert len(set(suffixes)) == len(suffixes) and all(suffix.startswith(b".") for suffix in suffixes)
    header = (Path(__file__).parent.parent / "native" / "format" / "codec.h").read_text()
    most = re.search(r"#define FSX_CODEC_OVERHEAD_MAX \((\d+)u << 10\)", header)
    assert most is not None
    assert all(row.overhead_bytes <= int(most[1]) << 10 for row in native.values())


@pytest.mark.parametrize("compression", ASKED, ids=lambda compression: compression.name)
class TestEveryName:
    """What --codec can say."""

    @quick
    @given(size=st.sampled_from(SIZES), kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=3, max_size=3))
    def test_round_trip(
        self, compression: Compression, native: dict[int, NativeCodec], size: int, kinds: list[str]
    ) -> None:
        """What one side has written, both read; and it keeps the bounds by which an index is checked."""
        codec, row = compression.codec, native[compression.codec.number]
        content = mixture(size if compression.level <= 9 else min(size, 100_000), kinds)  # slow, and the same code
        chunks = cut(content)
        for stored in (encode(compression, content), row.encode(chunks, compression.level)):
            assert len(stored) == len(chunks)
            for number, (piece, chunk) in enumerate(zip(stored, chunks, strict=True)):
                assert decode(codec, piece, len(chunk), number == 0) == chunk
                assert row.decode(piece, len(chunk), number == 0) == chunk
            if sum(map(len, stored)) < len(content):  # otherwise it is not stored like this
                assert max(map(len, stored)) <= CHUNK_BYTES + row.overhead_bytes
            assert sum(map(len, stored)) >= row.shortest_bytes

    def test_it_compresses(self, compression: Compression, native: dict[int, NativeCodec]) -> None:
        content = compressible(200_000)
        row = native[compression.codec.number]
        for stored in (encode(compression, content), row.encode([content], compression.level)):
            assert len(stored[0]) < len(content) / 2


@pytest.mark.parametrize("codec", COMPRESSING, ids=lambda codec: codec.name)
class TestEveryDecoder:
    """Decoding, whatever the level was: right chunks, and wrong ones."""

    @many
    @given(data=st.data())
    def test_damage(self, codec: Codec, native: dict[int, NativeCodec], data: st.DataObject) -> None:
        """Spoiled bytes are refused, or happen to be a chunk of the right length.

        Both sides say the same of all but changed bits, of which versions of one library think differently.
        """
        content = data.draw(st.sampled_from([compressible(3_000), incompressible(300), bytes(500)]))
        stored = bytearray(encode(usual(codec), content)[0])
        match kind := data.draw(st.sampled_from(["cut", "bits", "longer", "garbage"])):
            case "cut":
                del stored[data.draw(st.integers(0, len(stored) - 1)) :]
            case "bits":
                for _ in range(data.draw(st.integers(1, 4))):
                    stored[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "longer":
                stored += data.draw(st.binary(min_size=1, max_size=40))
            case _:
                stored = bytearray(data.draw(st.binary(max_size=200)))
        expected = data.draw(st.sampled_from([len(content), len(content), 0, 1, 10 * len(content)]))
        first = data.draw(st.booleans())
        found = decode(codec, bytes(stored), expected, first)
        assert found is None or len(found) == expected
        other = native[codec.number].decode(bytes(stored), expected, first)
        assert other is None or len(other) == expected
        assert kind == "bits" or other == found

    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_content_of_another_length_is_refused(
        self, codec: Codec, native: dict[int, NativeCodec], kind: str
    ) -> None:
        """Also where the length is far too large: nobody takes memory for what a chunk only says of itself."""
        content = KINDS[kind](100_000, 1)
        stored = encode(usual(codec), content)[0]
        for wrong in (0, 1, 99_999, 100_001, CHUNK_BYTES):
            assert decode(codec, stored, wrong, True) is None
            assert native[codec.number].decode(stored, wrong, True) is None

    def test_the_module_decodes_as_the_table_does(self, codec: Codec) -> None:
        """By which fanstore-prep measures what a mount will do."""
        content, room = compressible(9_000), bytearray(9_000)
        stored = encode(usual(codec), content)[0]
        assert _native.decode_chunk(codec.number, stored, True, room) and room == content
        assert not _native.decode_chunk(codec.number, stored, True, bytearray(8_999))
        for number in (NONE.number, 77):
            with pytest.raises(ValueError, match="does not compress"):
                _native.decode_chunk(number, stored, True, room)

    def test_no_sanitizer_report_on_spoiled_chunks(self, codec: Codec, tmp_path: Path) -> None:
        """Chunks of all kinds, the first and later ones, spoiled in thousands of ways."""
        corpus: list[Path] = []
        for name, content in {
            "text": compressible(20_000),
            "noise": incompressible(2_000),
            "zeros": bytes(3_000),
            "mixed": compressible(2_000) + incompressible(2_000) + bytes(2_000),
            "second": bytes(CHUNK_BYTES) + compressible(9_000),
        }.items():
            stored, number = encode(usual(codec), content)[-1], len(cut(content)) - 1
            head = b"".join(value.to_bytes(8, "little") for value in (codec.number, number == 0, len(cut(content)[-1])))
            corpus.append(tmp_path / name)
            corpus[-1].write_bytes(head + stored)
        fuzzer = compile_c(tmp_path / "codec_fuzz", [*SOURCES, DRIVERS / "codec_fuzz.c", *LIBRARIES])
        result = subprocess.run(
            [str(fuzzer), str(SEED), str(FUZZ_ROUNDS), *map(str, corpus)],
            capture_output=True,
            text=True,
            timeout=100,
            env=ENVIRONMENT,
        )
        assert (result.returncode, result.stderr) == (0, ""), result.stderr
        counts = re.fullmatch(r"decoded (\d+) refused (\d+)\n", result.stdout)
        assert counts is not None, result.stdout
        decoded, refused = map(int, counts.groups())
        assert decoded + refused == FUZZ_ROUNDS * len(corpus)
        assert decoded > 1_000 and refused > 10_000, (
            "both answers are frequent, or the spoiling is too mild or too wild"
        )


@pytest.mark.parametrize("name", [name for name, (codec, _) in METHODS.items() if codec is not NONE])
@pytest.mark.parametrize("jobs", [1, 40], ids=["buffered", "streamed"])
def test_prepared_and_read(name: str, native: dict[int, NativeCodec], jobs: int, tmp_path: Path) -> None:
    """With 40 threads, memory is so scarce that the large files are streamed by Python (prep/giant.py)."""
    middle = compressible(CHUNK_BYTES) + incompressible(CHUNK_BYTES, 1) + compressible(CHUNK_BYTES // 2)
    files = {
        "empty": b"",
        "tiny": b"x",
        "text": compressible(60_000),
        "noise": incompressible(60_000),
        "chunk": compressible(CHUNK_BYTES),
        "more": compressible(CHUNK_BYTES + 1),
        "middle": middle,
        "loud": incompressible(2 * CHUNK_BYTES + 5),
    }
    (tmp_path / "source").mkdir()
    for file, content in files.items():
        (tmp_path / "source" / file).write_bytes(content)
    out = tmp_path / "out.fan"
    result = run_inside("prep", tmp_path / "source", out, "--codec", name, "--jobs", str(jobs))
    assert result.returncode == 0, result.stderr
    prepared, codec = PreparedDataset.open(out), METHODS[name][0]
    assert prepared.manifest.codec == name
    index, compressed = prepared.index, set()
    with open(prepared.partition_path(0), "rb") as part:
        for file, content in files.items():
            entry = index.resolve(file.encode())
            used = CODECS[index.codec[entry]]
            if used is not NONE:
                assert used is codec
                compressed.add(file)
            for number, chunk in enumerate(cut(content)):
                where = index.chunk(entry, number)
                part.seek(where.offset)
                stored = part.read(where.stored_bytes)
                assert used.decode_chunk(stored, where.content_bytes, where.first) == chunk
                if used is not NONE:
                    row = native[codec.number]
                    assert row.decode(stored, where.content_bytes, where.first) == chunk
    assert compressed == {"text", "chunk", "more", "middle"}
    with tarfile.open(prepared.partition_path(0)) as tar:
        names = {member.name for member in tar.getmembers() if member.isreg()}
    assert names == {file + codec.suffix.decode() * (file in compressed) for file in files}
    assert run_inside("verify", out, "--against", tmp_path / "source").returncode == 0


@pytest.mark.parametrize("name", ["", "zip", "none:1", "lz4hc:99", "lz4hc:nine", "lz4hc:"])
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_compression(name)
    assert "\n" not in str(refused.value)
