"""The C part under the address and undefined-behaviour sanitizers.

The checks of index.fsx, on thousands of spoiled files: the corpus is written by the reference (index_trees.py),
spoiling and checking are in native/index_fuzz.c, where a read one byte outside the file is seen. And the whole
extension module, at the preparation of a tree with all oddities (native/sanitized_prep.py) and at the exchange between
the ranks of an MPI job (native/sanitized_mpi.py).
"""

import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import oddities
import pytest
from commands import BIN, mpirun
from index_reference import CHUNK_BYTES, ReferenceIndex, assemble
from index_trees import Node, columns_of, directory, file, sample_tree, symlink

REPOSITORY = Path(__file__).parent.parent
SOURCES = [REPOSITORY / "native" / "index.c", REPOSITORY / "tests" / "native" / "index_fuzz.c"]
DRIVER = REPOSITORY / "tests" / "native" / "sanitized_prep.py"
MPI_DRIVER = DRIVER.with_name("sanitized_mpi.py")
SEED = 20_240_229
ROUNDS = 6_000


def random_tree(numbers: random.Random, levels: int, width: int) -> Node:
    children: dict[bytes, Node] = {}
    linkable: list[Node] = []
    for _ in range(numbers.randrange(width + 1)):
        name = bytes(numbers.choices(b"abc.-\xff", k=numbers.choice((1, 3, 3, 7, 40)))).replace(b"..", b"x") + b"n"
        kind = numbers.randrange(5)
        if kind == 0 and levels:
            children[name] = random_tree(numbers, levels - 1, width)
        elif kind == 1:
            children[name] = symlink(b"t" * numbers.choice((1, 10, 4095)))
        elif kind == 2 and linkable:
            children[name] = numbers.choice(linkable)
        else:
            size = numbers.choice((0, 1, 500, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1, 30 << 20))
            children[name] = file(size, lz4=numbers.random() < 0.5, seed=numbers.getrandbits(30))
            linkable.append(children[name])
    return directory(children)


def corpus() -> dict[str, bytes]:
    numbers = random.Random(SEED)
    trees = {"sample": sample_tree(), "empty": directory(), "one": directory({b"a": file(1)})}
    trees["wide"] = directory({b"%05d" % i: file(i) for i in range(2_000)})
    for number in range(4):
        trees[f"random-{number}"] = random_tree(numbers, 4, 12)
    return {name: assemble(columns_of(tree, partitions=3)) for name, tree in trees.items()}


#: Leak detection needs ptrace, which containers often forbid; a leak is not what these tests are after.
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
COMPILER = os.environ.get("CC") or shutil.which("cc") or "gcc"


def compile_sanitized(target: Path, *arguments: str) -> Path:
    command = [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    command += [*arguments, "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return target


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_sanitized(tmp_path_factory.mktemp("sanitized") / "index_fuzz", *map(str, SOURCES), "-lxxhash")


def test_no_sanitizer_report_on_spoiled_indexes(fuzzer: Path, tmp_path: Path) -> None:
    paths = []
    for name, data in corpus().items():
        ReferenceIndex(data)  # the corpus itself must be right, or nothing below is reached
        path = tmp_path / f"{name}.fsx"
        path.write_bytes(data)
        paths.append(str(path))
    result = subprocess.run(
        [str(fuzzer), str(SEED), str(ROUNDS), *paths], capture_output=True, text=True, timeout=100, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    counts = re.fullmatch(r"accepted (\d+) refused (\d+)\n", result.stdout)
    assert counts is not None, result.stdout
    accepted, refused = map(int, counts.groups())
    assert accepted + refused == ROUNDS * len(paths) >= 20_000
    # Both answers must be frequent, or the spoiling is too mild or too wild to say anything.
    assert accepted > 1_000
    assert refused > 10_000


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension module with sanitizers."""
    includes = [f"-I{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}]
    sources = map(str, sorted((REPOSITORY / "native").glob("*.c")))
    target = tmp_path_factory.mktemp("sanitized") / "_native.so"
    arguments = ["-shared", "-fPIC", "-Wno-unused-parameter", *includes, *sources, "-llz4", "-lxxhash"]
    return compile_sanitized(target, *arguments)


def preload() -> str:
    """The sanitizer's library, which must be loaded before Python."""
    command = [COMPILER, "-print-file-name=libasan.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no MPI in this environment")
@pytest.mark.parametrize("scenario", ["fetch_all_to_all", "killed"])
def test_no_sanitizer_report_on_exchanging(module: Path, tmp_path: Path, scenario: str) -> None:
    """Requests, answers, time-outs and the loss of a peer, in three ranks."""
    launcher = mpirun(3)
    launcher[1:1] = ["--with-ft", "ulfm", "-x", f"LD_PRELOAD={preload()}"]
    with tempfile.TemporaryDirectory(
        prefix="fst-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as place:
        result = subprocess.run(
            [*launcher, sys.executable, str(MPI_DRIVER), str(module), scenario],
            capture_output=True,
            text=True,
            timeout=100,
            env=ENVIRONMENT | {"TMPDIR": place, "OMPI_MCA_btl_sm_backing_directory": place},
        )
    assert result.returncode == 0, result.stdout[-2_000:] + result.stderr[-5_000:]
    assert "Sanitizer" not in result.stderr and "runtime error" not in result.stderr, result.stderr
    assert result.stdout.count("close_s") == 3 - (scenario == "killed"), "each rank that lives has come to its end"


def test_no_sanitizer_report_on_preparing_all_oddities(module: Path, tmp_path: Path) -> None:
    """Listing, packing, compressing, headers, checks and look-ups: the module as a whole, with one and four threads."""
    tree = oddities.build(tmp_path / "tree")
    try:
        result = subprocess.run(
            [sys.executable, str(DRIVER), str(module), str(tree), str(tmp_path / "out")],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=110,
            env=ENVIRONMENT | {"LD_PRELOAD": preload()},
        )
    finally:
        oddities.remove_tree(tree)
    assert result.returncode == 0, result.stdout[-2_000:] + result.stderr[-5_000:]
    assert (result.stdout, result.stderr) == ("", "")
