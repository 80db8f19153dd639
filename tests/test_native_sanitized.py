"""The C part under the address and undefined-behaviour sanitizers.

The checks of index.fsx, on thousands of spoiled files: the corpus is written by the reference (index_trees.py),
spoiling and checking are in tests/native/index_fuzz.c, where a read one byte outside the file is seen. Messages of the
kernel, well formed and not, in tests/native/request_fuzz.c. And the whole extension module, at the preparation of a
tree with all oddities (native/sanitized_prep.py) and at the exchange between the ranks of an MPI job
(native/sanitized_mpi.py).
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import leftovers
import oddities
import pytest
from commands import BIN, mpirun
from sanitized import (
    DRIVERS,
    ENVIRONMENT,
    LIBRARIES,
    NATIVE,
    SEED,
    compile_c,
    compile_module,
    preload,
    room_sources,
    write_corpus,
)

ROUNDS = 6_000
MESSAGES = 25_000
_MESSAGE_COUNTS = "replies N silent N reads N outputs N forwarded N refused N\n".replace("N", r"(\d+)")


def run_fuzzer(fuzzer: Path, rounds: int, corpus: list[Path]) -> str:
    """What it prints; a report of a sanitizer ends the test."""
    result = subprocess.run(
        [str(fuzzer), str(SEED), str(rounds), *map(str, corpus)],
        capture_output=True,
        text=True,
        timeout=100,
        env=ENVIRONMENT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_no_sanitizer_report_on_spoiled_indexes(tmp_path: Path) -> None:
    fuzzer = compile_c(tmp_path / "index_fuzz", [*room_sources("format"), DRIVERS / "index_fuzz.c", *LIBRARIES])
    corpus = write_corpus(tmp_path)
    counts = re.fullmatch(r"accepted (\d+) refused (\d+)\n", said := run_fuzzer(fuzzer, ROUNDS, corpus))
    assert counts is not None, said
    accepted, refused = map(int, counts.groups())
    assert accepted + refused == ROUNDS * len(corpus) >= 20_000
    # Both answers must be frequent, or the spoiling is too mild or too wild to say anything.
    assert accepted > 1_000
    assert refused > 10_000


def test_no_sanitizer_report_on_messages(tmp_path: Path) -> None:
    """Every message gets a verdict, and every answer is the one that the index gives."""
    sources = [NATIVE / "fuse" / "request.c", NATIVE / "fuse" / "fuse_meta.c"]
    sources += room_sources("format") + room_sources("outputs")
    fuzzer = compile_c(tmp_path / "request_fuzz", [*sources, DRIVERS / "request_fuzz.c", *LIBRARIES])
    corpus = write_corpus(tmp_path)
    said = run_fuzzer(fuzzer, MESSAGES, corpus)
    counts = re.fullmatch(_MESSAGE_COUNTS, said)
    assert counts is not None, said
    numbers = [int(number) for number in counts.groups()]
    assert sum(numbers) == MESSAGES * len(corpus)
    assert min(numbers) > 800, said  # each kind is frequent


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension module with sanitizers."""
    return compile_module(tmp_path_factory.mktemp("sanitized") / "_native.so")


@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="no MPI in this environment")
@pytest.mark.parametrize("scenario", ["fetch_all_to_all", "killed"])
def test_no_sanitizer_report_on_exchanging(module: Path, scenario: str) -> None:
    """Requests, answers, time-outs and the loss of a peer, in three ranks."""
    launcher = mpirun(3)
    launcher[1:1] = ["--with-ft", "ulfm", "-x", f"LD_PRELOAD={preload()}"]
    shared_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fst-", dir=shared_memory) as place:
        result = subprocess.run(
            [*launcher, sys.executable, str(DRIVERS / "sanitized_mpi.py"), str(module), scenario],
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
            [sys.executable, str(DRIVERS / "sanitized_prep.py"), str(module), str(tree), str(tmp_path / "out")],
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


def test_no_sanitizer_report_on_orders(module: Path, tmp_path: Path) -> None:
    """Shuffles and the search for seeds, at the tests that compare them with plain Python."""
    tests = [str(Path(__file__).parent / f"test_order_{name}.py") for name in ("replay", "search")]
    result = subprocess.run(
        [sys.executable, str(DRIVERS / "sanitized_order.py"), str(module), *tests],
        capture_output=True,
        text=True,
        timeout=170,
        # A run of pytest of its own, which must not take the daemons of other workers for what it left behind.
        env=ENVIRONMENT | {"LD_PRELOAD": preload(), "TMPDIR": str(tmp_path), leftovers.MARK_VARIABLE: "orders"},
    )
    assert result.returncode == 0, result.stdout[-5_000:] + result.stderr[-5_000:]
    assert "Sanitizer" not in result.stderr and "runtime error" not in result.stderr, result.stderr
