"""What scripts/bundle has made, as a user without rights and compiler has it: installed, prepared, mounted, verified.

FANSTORE_TEST_BUNDLE names the directory with the archive; ``scripts/test --all`` makes one. By hand:
``scripts/bundle --output DIR``, and ``FANSTORE_TEST_BUNDLE=DIR .venv/bin/python -m pytest tests/test_bundle.py``.
"""

import os
import pwd
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from mounting import needs_fuse, needs_root
from users import account, prefix_of

BUNDLE = os.environ.get("FANSTORE_TEST_BUNDLE", "")
ROOT = Path(__file__).parent.parent
LIMIT_S = 150.0

pytestmark = [
    pytest.mark.skipif(not BUNDLE, reason="no bundle: FANSTORE_TEST_BUNDLE names a directory that scripts/bundle made"),
    pytest.mark.timeout(2 * LIMIT_S),
]

#: All that the user has, besides Python: no compiler, no pkg-config, no pip.
PROGRAMS = ("bash", "cat", "diff", "dirname", "fusermount3", "ls", "mkdir", "paste", "sed", "sh", "sort", "uname")

#: For a shell that ends with the first error. $programs, $python, $install, $source; stands in a directory of the user.
SESSION = """
PATH=$programs
if command -v gcc cc pip pkg-config; then exit 99; fi
"$install" --python "$python" fs
. fs/bin/activate
fanstore --version
fanstore-prep "$source" d.fan --codec zstd
fanstore-verify d.fan --against "$source"
mkdir m
fanstore-mount d.fan m --engine native -- diff -r "$source" m
fanstore-mount d.fan m --engine python -- diff -r "$source" m
fanstore-mount d.fan n --no-fuse -- diff -r "$source" n
mpirun --oversubscribe -n 2 fanstore-mount d.fan "m-{rank}" --local "l-{rank}" -- \\
    sh -c 'diff -r "$source" "$FANSTORE_MOUNT"'
ls -A
"""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Readable for everybody, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="fanstore-bundle-test-"))
    path.chmod(0o755)
    try:
        yield path
        assert leftovers.mounts_below(path) == []
    finally:
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def unpacked(directory: Path) -> Path:
    """The bundle, at a path that nobody has thought of."""
    (archive,) = Path(BUNDLE).glob("fanstore-*-x86_64.tar.gz")
    place = directory / "any where"
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    (bundle,) = place.iterdir()
    assert bundle.name == archive.name.removesuffix(".tar.gz")
    return bundle


@pytest.fixture(scope="module")
def user() -> Iterator[pwd.struct_passwd]:
    with account("b") as entry:
        yield entry


@pytest.fixture(scope="module")
def source(directory: Path) -> Path:
    folder = directory / "source"
    for number in range(40):
        file = folder / f"class {number % 4}" / f"{number}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([number]) * 5_000 + os.urandom(1_000 * number))
    return folder


@pytest.fixture(scope="module")
def path(directory: Path) -> str:
    folder = directory / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None, name
        (folder / name).symlink_to(program)
    return str(folder)


#: That of the distribution, and the one that runs the tests.
PYTHONS = {"system": "/usr/bin/python3", "tests": os.path.realpath(getattr(sys, "_base_executable", sys.executable))}


@needs_root
@needs_fuse
@pytest.mark.parametrize("kind", PYTHONS)
def test_a_user_without_rights_and_compiler(
    kind: str, unpacked: Path, user: pwd.struct_passwd, source: Path, path: str, directory: Path
) -> None:
    python = PYTHONS[kind]
    asked = subprocess.run(
        [python, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"], capture_output=True, text=True, timeout=60
    )
    if not [*unpacked.glob(f"wheels/fanstore_fs-*-{asked.stdout.strip() or 'none'}-*.whl")]:
        pytest.skip(f"the bundle is not for {python}")
    home = directory / kind
    home.mkdir()
    os.chown(home, user.pw_uid, user.pw_gid)
    result = subprocess.run(
        [*prefix_of(user), shutil.which("bash") or "bash", "-exc", SESSION],
        cwd=home,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "programs": path,
            "HOME": str(home),
            "python": python,
            "install": str(unpacked / "install"),
            "source": str(source),
            leftovers.MARK_VARIABLE: os.environ[leftovers.MARK_VARIABLE],
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines() if len(line.split()) > 1}
    assert found["engine"] == "native"
    assert found["Python"].endswith(f"{home}/fs/bin/python")
    assert re.search(r", libfuse 3\.\d+", found["pyfuse3"]) and found["MPI"].startswith("Open MPI v5.")
    assert result.stdout.splitlines()[-3:] == ["d.fan", "fs", "m"], "nothing else is left"


def test_what_an_older_system_can_load(unpacked: Path, tmp_path: Path) -> None:
    """The C parts of our own two wheels; the wheels of others say themselves what they need, and pip reads it."""
    looked_at = set()
    for wheel in [*unpacked.glob("wheels/fanstore_fs-*.whl"), *unpacked.glob("wheels/pyfuse3-*.whl")]:
        assert wheel.name.endswith("-manylinux_2_28_x86_64.whl")
        shutil.unpack_archive(wheel, tmp_path / wheel.stem, "zip")
        for file in (tmp_path / wheel.stem).rglob("*"):
            if not file.is_file() or file.read_bytes()[:4] != b"\x7fELF":
                continue
            looked_at.add(re.sub(r"[-.].*", "", file.name))
            shown = subprocess.run(
                ["objdump", "-pT", file], capture_output=True, text=True, timeout=60, check=True
            ).stdout
            versions = [tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", shown)]
            assert max(versions) <= ((2, 17) if file.name == "libfanstore-io.so" else (2, 28)), file
            needed = {name.split(".so")[0] for name in re.findall(r"NEEDED +(\S+)", shown)}
            needed -= {"libc", "libpthread", "libdl", "librt", "ld-linux-x86-64"}
            assert {name.split("-")[0] for name in needed} <= {"libfuse3"}, file
            if file.name == "libfanstore-io.so":
                assert "libpthread" not in shown, "programs that have no threads must not get its library"
    assert {"_native", "fanstore", "libfanstore", "libfuse3", "__init__"} <= looked_at


def test_licences_and_the_source_of_what_is_under_the_lgpl(unpacked: Path) -> None:
    licences = {file.name.partition("-")[0].partition(".")[0]: file for file in (unpacked / "licenses").iterdir()}
    assert set(licences) == {"fanstore", "fuse3", "libzstd", "lz4", "xxhash"}
    assert licences["fanstore"].read_text() == (ROOT / "LICENSE").read_text()
    assert "LGPL" in licences["fuse3"].read_text()
    sources = {file.name for file in (unpacked / "sources").iterdir()}
    for pattern in (r"fuse3_.*\.orig\.tar\.xz", r"fuse3_.*\.debian\.tar\.xz", r"pyfuse3-.*\.tar\.gz"):
        assert any(re.fullmatch(pattern, name) for name in sources), pattern


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--pyhton", "x"], 2, "unknown argument '--pyhton'"),
        ([], 2, "PREFIX is missing"),
        (["a", "b"], 2, "more than one PREFIX"),
        (["fan store"], 2, "fan store' has white space or a colon in it"),
        (["--python", "/bin/false", "new"], 1, "'/bin/false' is not a Python of these versions: 3."),
        (["--python", sys.executable, "full"], 1, "full' exists, and FanStore was not installed there"),
    ],
)
def test_what_the_installer_refuses(
    arguments: list[str], code: int, reason: str, unpacked: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    result = subprocess.run(
        [unpacked / "install", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (code, "", 1), result.stderr
    assert result.stderr.startswith("install: error: ") and reason in result.stderr
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["full", "thesis.tex"]
