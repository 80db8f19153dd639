"""Reading through the broker: every codec, every offset, many readers, damage of all kinds."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import oddities
import pytest
import trio
import trio.testing
from core_parts import Parts, flip_byte, opened
from mounting import wait_until

from fanstore.dataset.sources import Verify
from fanstore.dataset.store import CANNOT
from fanstore.errors import CorruptDataError
from fanstore.telemetry.statistics import Source

MakePrepared = Callable[..., Path]

MIB = 1 << 20
CHUNK = oddities.CHUNK_BYTES

CONTENTS = {
    "a/text": oddities.compressible(300_000, 1),
    "a/noise": oddities.incompressible(300_000, 2),
    "a/empty": b"",
    "a/one": b"x",
    "b/text-chunk": oddities.compressible(CHUNK, 3),
    "b/noise-chunk": oddities.incompressible(CHUNK, 4),
    "b/text-9M": oddities.compressible(9 * MIB + 17, 5),
    "b/noise-9M": oddities.incompressible(9 * MIB + 17, 6),
    "b/mixed": oddities.compressible(CHUNK, 7) + oddities.incompressible(CHUNK, 8) + b"end",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reader") / "tree"
    for name, content in CONTENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    os.link(root / "a/text", root / "b/again")
    return root


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """The datasets that ``intact`` has made, by codec."""
    return {}


@pytest.fixture
def intact(tree: Path, made: dict[str, Path], make_prepared: MakePrepared) -> Callable[[str], Path]:
    """A prepared dataset per codec for the tests that damage nothing: made once, since that takes a second each."""

    def prepared(codec: str) -> Path:
        if codec not in made:
            made[codec] = make_prepared(tree, out=tree.parent / f"{codec}.fan", codec=codec, partition_size="8MiB")
        return made[codec]

    return prepared


@pytest.mark.parametrize(
    ("codec", "verify"),
    [(codec, verify) for codec in ("none", "lz4", "zstd") for verify in Verify] + [("lz4hc", Verify.FIRST)],
)
def test_every_byte_of_every_file(intact: Callable[[str], Path], codec: str, verify: Verify) -> None:
    with opened(intact(codec), verify=verify) as parts:
        assert parts.prepared.index.partition_count > 1
        for _ in range(2):
            for name, content in CONTENTS.items():
                assert parts.read(name) == content, name
        assert parts.read("b/again") == CONTENTS["a/text"]
        checked = parts.statistics.totals().verification.chunks
        if verify is Verify.NEVER:
            assert checked == 0
        elif verify is Verify.FIRST:
            assert checked == sum(-(-len(content) // CHUNK) for content in CONTENTS.values())


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_offsets_and_ends(intact: Callable[[str], Path], codec: str) -> None:
    with opened(intact(codec)) as parts:
        for name, content in CONTENTS.items():
            length = len(content)
            interesting = {0, 1, length // 2, length - 1, length, length + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK}
            for offset in sorted(position for position in interesting if position >= 0):
                for size in (0, 1, 2, 4096, 128 << 10, CHUNK + 5):
                    assert parts.read(name, offset, size) == content[offset : offset + size], (name, offset, size)
            assert parts.read(name, 1 << 62, 10) == b""


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("cache_bytes", [0, 5 * MIB, 64 * MIB])
def test_many_readers_at_random_offsets(intact: Callable[[str], Path], codec: str, cache_bytes: int) -> None:
    prepared = intact(codec)

    async def read(parts: Parts, seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(25):
            name, content = numbers.choice(list(CONTENTS.items()))
            entry = parts.entry(name)
            offset, size = numbers.randrange(len(content) + 10), numbers.randrange(1, 2 * MIB)
            assert await parts.broker.read(entry, offset, size) == content[offset : offset + size]

    async def main(parts: Parts) -> None:
        async with trio.open_nursery() as nursery:
            for seed in range(8):
                nursery.start_soon(read, parts, seed)

    with opened(prepared, cache_bytes=cache_bytes, open_limit=2) as parts:
        parts.run(main, parts)
        parts.broker.validate()
        assert parts.broker.cache()["used_bytes"] <= cache_bytes
        if codec == "lz4" and cache_bytes == 64 * MIB:
            assert parts.statistics.totals().sources[Source.CACHE].reads > 0


def read_at_once(parts: Parts, name: str, readers: int, sizes: int = 128 << 10) -> None:
    """Several tasks read a file from start to end in pieces, all at the same time."""
    content = CONTENTS[name]

    async def read() -> None:
        for offset in range(0, len(content), sizes):
            data = await parts.broker.read(parts.entry(name), offset, sizes)
            assert data == content[offset : offset + sizes]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(readers):
                nursery.start_soon(read)

    parts.run(main)


def test_a_compressed_file_is_decompressed_once(intact: Callable[[str], Path]) -> None:
    with opened(intact("lz4")) as parts:
        read_at_once(parts, "b/text-9M", readers=6)
        sources = parts.statistics.totals().sources
        shared, cached = sources[Source.SHARED], sources[Source.CACHE]
        assert shared.fetches == 3
        assert shared.fetched_bytes == parts.prepared.index.stored_size[parts.entry("b/text-9M")]
        assert shared.bytes + cached.bytes == 6 * len(CONTENTS["b/text-9M"])
        assert cached.reads > shared.reads
        assert cached.fetches == 0


def test_a_plain_chunk_is_checked_once(intact: Callable[[str], Path]) -> None:
    with opened(intact("none")) as parts:
        read_at_once(parts, "b/noise-9M", readers=6)
        assert parts.statistics.totals().verification.chunks == 3
        assert parts.statistics.totals().verification.bytes == len(CONTENTS["b/noise-9M"])
        parts.broker.validate()
        assert parts.broker.cache()["chunks"] == 0, "plain bytes are in the page cache already"


def skip_if_reads_may_wait(parts: Parts, entry: int) -> None:
    """Some network file systems know no reads that never wait; the partition must have been read from before."""
    file = parts.store.acquire_nowait(parts.prepared.index.partition[entry])
    assert file is not None
    parts.store.release(file)
    if file.nowait_flags == CANNOT:
        pytest.skip("the file system under the temporary directory has no RWF_NOWAIT")


def test_what_the_page_cache_has_is_read_on_the_spot(intact: Callable[[str], Path]) -> None:
    with opened(intact("none")) as parts:

        async def main() -> None:
            entry = parts.entry("b/noise-chunk")
            await parts.broker.read(entry, 0, 1)  # checked from now on, and in the page cache
            skip_if_reads_may_wait(parts, entry)
            with trio.testing.assert_no_checkpoints():
                data = await parts.broker.read(entry, 12_345, 128 << 10)
            assert data == CONTENTS["b/noise-chunk"][12_345 : 12_345 + (128 << 10)]

        parts.run(main)


def test_a_cache_hit_needs_no_thread(intact: Callable[[str], Path]) -> None:
    with opened(intact("lz4")) as parts:

        async def main() -> None:
            entry = parts.entry("b/text-chunk")
            assert parts.prepared.index.codec[entry] != 0
            await parts.broker.read(entry, 0, 1)
            with trio.testing.assert_no_checkpoints():
                assert await parts.broker.read(entry, 5, 7) == CONTENTS["b/text-chunk"][5:12]

        parts.run(main)


def test_a_chunk_that_is_read_whole_is_not_kept(intact: Callable[[str], Path]) -> None:
    """Nobody wants its rest: its memory is the next one's, still warm."""
    with opened(intact("lz4")) as parts:
        assert parts.read("b/text-chunk", 0, 1 << 40) == CONTENTS["b/text-chunk"]
        cache = parts.broker.cache
        wait_until(lambda: cache()["used_bytes"] == 0, "that its memory is free", lambda: str(cache()))
        assert parts.read("b/mixed", 0, MIB) == CONTENTS["b/mixed"][:MIB]
        assert parts.broker.cache()["used_bytes"] > 0


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_cancelled_readers_take_nobody_with_them(intact: Callable[[str], Path], codec: str) -> None:
    prepared = intact(codec)
    names = [name for name in CONTENTS if name.startswith("b/")]

    async def read(parts: Parts, number: int) -> None:
        name = names[number % len(names)]
        with trio.CancelScope() as scope:
            if number % 3 == 0:
                scope.cancel()
            elif number % 3 == 1:
                scope.deadline = trio.current_time() + 0.001 * (number % 7)
            assert await parts.broker.read(parts.entry(name), 0, 1 << 40) == CONTENTS[name]

    async def main(parts: Parts) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(60):
                    nursery.start_soon(read, parts, number)
            while parts.broker._waiting:  # noqa: ASYNC110 -- what was begun for those who were cancelled comes, too
                await trio.sleep(0.001)

    with opened(prepared, workers=2) as parts:
        parts.run(main, parts)
        parts.store.validate()


def damage(parts: Parts, name: str, position: int) -> Path:
    """Flip a byte of a file's stored bytes; the partition file."""
    entry = parts.entry(name)
    index = parts.prepared.index
    path = parts.prepared.partition_path(index.partition[entry])
    flip_byte(path, index.offset[entry] + position)
    return path


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_damaged_byte_is_an_error_of_that_file_only(
    tree: Path,
    make_prepared: MakePrepared,
    expect_warnings: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    codec: str,
    verify: str,
) -> None:
    with opened(make_prepared(tree, codec=codec, partitions=2), verify=verify) as parts:
        path = damage(parts, "a/text", 100)
        expect_warnings(rf"cannot read 'a/text' from partition file {path}: .*checksum")
        for _ in range(3):
            with pytest.raises(CorruptDataError, match="'a/text'"):
                parts.read("a/text", 1000, 10)
        with pytest.raises(CorruptDataError):
            parts.read("b/again")
        for name, content in CONTENTS.items():
            if name != "a/text":
                assert parts.read(name) == content
        assert len(caplog.records) == 1, "one line per file, not one per read"
        assert caplog.records[0].levelname == "ERROR"
        assert parts.statistics.errors.damaged_files == 1
        assert parts.statistics.errors.failed_reads == 4


def test_only_the_damaged_chunk_of_a_large_file_is_lost(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree)) as parts:
        damage(parts, "b/noise-9M", CHUNK + 5)
        expect_warnings("cannot read 'b/noise-9M'")
        assert parts.read("b/noise-9M", 0, CHUNK) == CONTENTS["b/noise-9M"][:CHUNK]
        assert parts.read("b/noise-9M", 2 * CHUNK, CHUNK) == CONTENTS["b/noise-9M"][2 * CHUNK :]
        for offset, size in ((CHUNK, 1), (2 * CHUNK - 1, 1), (CHUNK - 1, 2), (2 * CHUNK - 1, 2)):
            with pytest.raises(CorruptDataError):
                parts.read("b/noise-9M", offset, size)


def test_every_waiter_of_a_damaged_chunk_fails(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree)) as parts:
        damage(parts, "b/noise-chunk", CHUNK - 1)
        expect_warnings("cannot read 'b/noise-chunk'")
        failures = 0

        async def read() -> None:
            nonlocal failures
            with pytest.raises(CorruptDataError):
                await parts.broker.read(parts.entry("b/noise-chunk"), 0, 10)
            failures += 1

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(read)

        parts.run(main)
        assert failures == parts.statistics.errors.failed_reads == 10


def test_never_means_never(tree: Path, make_prepared: MakePrepared) -> None:
    with opened(make_prepared(tree), verify="never") as parts:
        damage(parts, "a/noise", 10)
        data = parts.read("a/noise")
        assert data != CONTENTS["a/noise"]
        assert len(data) == len(CONTENTS["a/noise"])


def test_always_notices_damage_after_the_first_read(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree), verify="always", cache_bytes=0) as parts:
        assert parts.read("a/noise") == CONTENTS["a/noise"]
        parts.broker.validate()  # nothing is left in memory
        damage(parts, "a/noise", 10)
        expect_warnings("cannot read 'a/noise'")
        with pytest.raises(CorruptDataError):
            parts.read("a/noise")


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_a_truncated_partition_is_not_the_end_of_a_file(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None], verify: Verify, codec: str
) -> None:
    with opened(make_prepared(tree, codec=codec), verify=verify) as parts:
        index = parts.prepared.index
        last = max((parts.entry(name) for name in CONTENTS), key=lambda entry: index.offset[entry])
        name = os.fsdecode(index.path(last))
        path = parts.prepared.partition_path(0)
        os.truncate(path, index.offset[last] + index.stored_size[last] - 1)
        expect_warnings(rf"cannot read '{name}' from partition file {path}: .*truncated")
        with pytest.raises(CorruptDataError, match="truncated"):
            parts.read(name)
        if codec == "none" and verify is Verify.NEVER:
            assert parts.read(name, 0, 100) == CONTENTS[name][:100]
        for other, content in CONTENTS.items():
            if other != name:
                assert parts.read(other) == content


def test_truncated_after_it_was_checked(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree)) as parts:
        index = parts.prepared.index
        last = max((parts.entry(name) for name in CONTENTS), key=lambda entry: index.offset[entry])
        name = os.fsdecode(index.path(last))
        assert parts.read(name) == CONTENTS[name]
        os.truncate(parts.prepared.partition_path(0), index.offset[last] + 1)
        expect_warnings(rf"cannot read '{name}' .*truncated")
        with pytest.raises(CorruptDataError, match="truncated"):
            parts.read(name)


def test_a_partition_that_is_gone(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    with opened(make_prepared(tree)) as parts:
        path = parts.prepared.partition_path(0)
        path.unlink()
        expect_warnings(rf"cannot read 'a/text' from partition file {path}: No such file or directory")
        with pytest.raises(CorruptDataError, match="No such file"):
            parts.read("a/text")


def test_an_error_of_the_disk_names_file_and_partition(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    """A directory in the partition's place: it opens, but the kernel refuses each read, as with a broken disk."""
    with opened(make_prepared(tree)) as parts:
        path = parts.prepared.partition_path(0)
        path.unlink()
        path.mkdir()
        expect_warnings(rf"cannot read 'a/text' from partition file {path}: Is a directory")
        with pytest.raises(CorruptDataError, match="Is a directory"):
            parts.read("a/text")


def test_a_slow_partition_holds_up_nobody(
    tree: Path, make_prepared: MakePrepared, expect_warnings: Callable[..., None]
) -> None:
    """A pipe in the partition's place: opening it blocks until somebody opens its other end."""
    with opened(make_prepared(tree, partition_size="5MiB")) as parts:
        index = parts.prepared.index
        slow = index.partition[parts.entry("b/noise-9M")]
        quick = next(name for name in CONTENTS if CONTENTS[name] and index.partition[parts.entry(name)] != slow)
        path = parts.prepared.partition_path(slow)
        path.unlink()
        os.mkfifo(path)
        expect_warnings("cannot read 'b/noise-9M' .*Illegal seek")

        async def read_slow() -> None:
            with pytest.raises(CorruptDataError):
                await parts.broker.read(parts.entry("b/noise-9M"), 0, 10)

        async def main() -> None:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read_slow)
                    await trio.testing.wait_all_tasks_blocked()
                    assert await parts.broker.read(parts.entry(quick), 0, 1 << 40) == CONTENTS[quick]
                    parts.namespace.lookup(parts.namespace.lookup(parts.control.inode, b".."), b"a")
                    await trio.to_thread.run_sync(lambda: open(path, "wb").close())

        parts.run(main)


def test_a_chunk_that_nobody_waits_for_lands_in_the_cache(intact: Callable[[str], Path]) -> None:
    """Also one that C cannot load by itself, because the partition was not opened so far."""
    with opened(intact("lz4")) as parts:
        entry = parts.entry("b/text-9M")

        async def main() -> None:
            for number in range(3):
                parts.broker.prefetch(entry, number)
            with trio.fail_after(60):
                while parts.broker.cache()["in_line"]:  # noqa: ASYNC110 (nobody tells when it has landed)
                    await trio.sleep(0.001)
            assert parts.broker.cache()["chunks"] == 3
            with trio.testing.assert_no_checkpoints():
                data = await parts.broker.read(entry, CHUNK - 5, 10)
            assert data == CONTENTS["b/text-9M"][CHUNK - 5 : CHUNK + 5]

        parts.run(main)
        cache = parts.broker.cache()
        assert (cache["prefetched"], cache["forgotten"]) == (3, 0)


def test_nothing_is_prefetched_without_room(intact: Callable[[str], Path]) -> None:
    """What nobody waits for does not keep readers from being served."""
    with opened(intact("none"), cache_bytes=0) as parts:
        entry = parts.entry("b/noise-9M")

        async def main() -> None:
            for _ in range(100):
                for number in range(3):
                    parts.broker.prefetch(entry, number)
                assert await parts.broker.read(entry, 0, MIB) == CONTENTS["b/noise-9M"][:MIB]

        parts.run(main)
        parts.broker.validate()


def test_less_room_evicts(intact: Callable[[str], Path]) -> None:
    with opened(intact("lz4")) as parts:
        for name, content in CONTENTS.items():
            assert parts.read(name, 1, 1 << 40) == content[1:]
        before = parts.broker.cache()
        assert before["used_bytes"] > 10 * MIB
        parts.broker.set_capacity(6 * MIB)
        after = parts.broker.cache()
        assert after["used_bytes"] <= after["capacity_bytes"] == 6 * MIB
        assert after["evictions"] > before["evictions"]
        for name, content in CONTENTS.items():
            assert parts.read(name) == content


def test_what_is_used_is_evicted_last(tmp_path: Path, make_prepared: MakePrepared) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    contents = [oddities.compressible(100_000, number) for number in range(12)]
    for number, content in enumerate(contents):
        (tree / f"{number:02d}").write_bytes(content)
    with opened(make_prepared(tree, codec="lz4"), cache_bytes=10 * 128 << 10) as parts:
        for number in range(12):
            assert parts.read(f"{number:02d}", 1, 10) == contents[number][1:11]
            assert parts.read("00", 5, 10) == contents[0][5:15]
        assert parts.statistics.totals().sources[Source.SHARED].fetches == 12, "the one in use was read once"
        assert parts.broker.cache()["evictions"] >= 2


def test_a_read_that_never_asks_for_the_end_of_a_file(intact: Callable[[str], Path]) -> None:
    """Arguments of the door between Python and C are looked at: nothing outside a file is ever read."""
    with opened(intact("none")) as parts:
        native, entry = parts.broker.native, parts.entry("a/noise")
        size = len(CONTENTS["a/noise"])
        directory = parts.entry("a")
        for bad in ((entry, size, 1), (entry, 0, size + 1), (entry, 1 << 62, 1), (entry, 0, 0), (directory, 0, 1)):
            with pytest.raises(ValueError, match="no such piece"):
                native.read_nowait(*bad)
            with pytest.raises(ValueError, match="no such piece"):
                native.read(*bad, 1)
        for chunk in ((entry, 1), (directory, 0), (1 << 30, 0), (parts.entry("a/empty"), 0)):
            with pytest.raises(ValueError, match="no such chunk"):
                native.want(*chunk)
            with pytest.raises(ValueError, match="no such chunk"):
                native.give(*chunk, b"", 0)
        assert native.give(entry, 0, b"x" * 10, 2) is False, "nobody has asked for it"
        assert native.refuse(entry, 0, 5) == 0
