"""Builds of the C part with sanitizers, for tests, and indexes for its fuzzers.

Owns the compiler flags and the environment for programs built with them. Used by the tests of native/.
"""

import os
import random
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from index_reference import CHUNK_BYTES, ReferenceIndex, assemble
from index_reference import CODECS as CODEC_NUMBERS
from index_trees import Node, columns_of, directory, file, sample_tree, symlink

REPOSITORY = Path(__file__).parent.parent
NATIVE = REPOSITORY / "native"
DRIVERS = REPOSITORY / "tests" / "native"
SEED = 20_240_229
#: What reads an index or a chunk needs the codecs; what all of native/ is linked with.
CODECS = sorted(NATIVE.glob("format/codec*.c"))
LIBRARIES = ("-llz4", "-lzstd", "-lxxhash")

#: Leak detection needs ptrace, which containers often forbid; valgrind looks for leaks.
ENVIRONMENT = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
COMPILER = os.environ.get("CC") or shutil.which("cc") or "gcc"
ADDRESS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def compile_c(target: Path, arguments: Sequence[str | Path], flags: Sequence[str] = ADDRESS) -> Path:
    command = [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}", *flags]
    command += [*map(str, arguments), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return target


def room_sources(room: str) -> list[Path]:
    """The C files of one folder of native/."""
    return sorted((NATIVE / room).glob("*.c"))


def compile_module(target: Path) -> Path:
    """The whole extension module; to be loaded by a Python that has ``preload()`` in LD_PRELOAD."""
    includes = [f"-I{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}]
    sources = sorted(path for path in NATIVE.rglob("*.c") if path.parent.name not in ("programs", "preload"))
    shared = ["-shared", "-fPIC", "-Wno-unused-parameter"]
    return compile_c(target, [*shared, *includes, *sources, *LIBRARIES])


def preload() -> str:
    """The run-time library of the address sanitizer, which must be loaded before Python."""
    found = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=20
    )
    return found.stdout.strip()


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
            children[name] = file(size, codec=numbers.choice((0, *CODEC_NUMBERS)), seed=numbers.getrandbits(30))
            linkable.append(children[name])
    return directory(children)


def corpus() -> dict[str, bytes]:
    numbers = random.Random(SEED)
    trees = {"sample": sample_tree(), "empty": directory(), "one": directory({b"a": file(1)})}
    trees["wide"] = directory({b"%05d" % i: file(i) for i in range(2_000)})
    for number in range(4):
        trees[f"random-{number}"] = random_tree(numbers, 4, 12)
    return {name: assemble(columns_of(tree, partitions=3)) for name, tree in trees.items()}


def write_corpus(folder: Path) -> list[Path]:
    """The corpus as files; each is right, or nothing behind the checks would be reached."""
    paths = []
    for name, data in corpus().items():
        ReferenceIndex(data)
        path = folder / f"{name}.fsx"
        path.write_bytes(data)
        paths.append(path)
    return paths
