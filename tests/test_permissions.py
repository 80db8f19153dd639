"""Every command against directories and files without permission, as an ordinary user: one sentence, no traceback.

Needs root, to make such a user for the time of the tests. Everything that is closed belongs to root.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest
from commands import BIN, mpirun
from mounting import LIMIT_S, needs_fuse, needs_root, prepare
from users import account, prefix_of

pytestmark = [needs_fuse, needs_root]


class Place:
    """A directory of the user (``home``), with things of root in it that are closed to them.

    Attributes:
        home: the working directory of all commands.
    """

    def __init__(self, home: Path, user: pwd.struct_passwd) -> None:
        self.home = home
        self._user = user
        self._prefix = prefix_of(user)

    def run(self, *words: str, ranks: int = 0) -> subprocess.CompletedProcess[str]:
        name, *arguments = words
        launcher = [word for word in mpirun(ranks) if word != "--allow-run-as-root"] if ranks else []
        return subprocess.run(
            [*self._prefix, *launcher, str(BIN / f"fanstore-{name}"), *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            env={
                "PATH": f"{BIN}:/usr/bin:/bin",
                "HOME": str(self.home),
                "TMPDIR": "/tmp",
                leftovers.MARK_VARIABLE: os.environ[leftovers.MARK_VARIABLE],
            },
        )


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    directory = Path(tempfile.mkdtemp(prefix="fanstore-permissions-test-", dir="/tmp"))
    directory.chmod(0o755)
    try:
        with account("p") as user:
            home = directory / "home"
            home.mkdir()
            _furnish(home)
            os.chown(home, user.pw_uid, user.pw_gid)
            yield Place(home, user)
        assert leftovers.mounts_below(directory) == []
    finally:
        shutil.rmtree(directory)


def _furnish(home: Path) -> None:
    """Mode 0 and 0500 for root: the user may do nothing with it, or nothing but read."""
    before = os.umask(0o022)
    try:
        source = home / "source"
        source.mkdir()
        for number in range(3):
            (source / str(number)).write_bytes(bytes(100_000))
        prepare(source, home / "good.fan")
        (home / "closed").mkdir()
        shutil.copytree(home / "good.fan", home / "closed/d.fan")
        shutil.copytree(home / "good.fan", home / "closed.fan")
        for name in ("manifest.json", "index.fsx", "part-00000.tar"):
            shutil.copytree(home / "good.fan", home / f"no-{name}.fan")
            (home / f"no-{name}.fan" / name).chmod(0)
        (home / "output/sub").mkdir(parents=True)
        (home / "output/sub").chmod(0)
        (home / "output").chmod(0o777)
        subprocess.run(["tar", "-cf", home / "closed.tar", "-C", source, "."], check=True, timeout=60)
        shutil.copytree(source, home / "half")
        (home / "half/0").rename(home / "half/closed")
        (home / "half/closed").chmod(0)
        (home / "file").write_text("text\n")
        (home / "readable/new").mkdir(parents=True)
        (home / "closed-m").mkdir()
        for name in ("closed", "closed.fan", "closed.tar", "closed-m", "file"):
            (home / name).chmod(0)
    finally:
        os.umask(before)


#: Words; then what the sentence says, and the exit code.
COMMANDS = [
    ("mount closed.fan m", "closed.fan", 1),
    ("mount closed/d.fan m", "closed/d.fan", 1),
    ("mount no-manifest.json.fan m", "manifest.json", 1),
    ("mount no-index.fsx.fan m", "index.fsx", 1),
    ("mount no-part-00000.tar.fan m", "part-00000.tar", 1),
    ("mount good.fan closed/m", "closed/m", 1),
    ("mount good.fan closed-m", "closed-m", 1),
    ("mount good.fan readable/new", "readable/new", 1),
    ("mount good.fan readable/m", "readable/m", 1),
    ("mount good.fan m --local closed", "closed", 1),
    ("mount good.fan m --local closed/ssd", "closed", 1),
    ("mount good.fan m --local readable", "readable", 1),
    ("mount good.fan m --local readable/ssd", "readable", 1),
    ("mount good.fan m --local file/ssd", "file", 1),
    ("mount good.fan m --output closed", "--output", 1),
    ("mount good.fan m --output closed/out", "--output", 1),
    ("mount good.fan m --output readable", "--output", 1),
    ("mount good.fan m --output readable/out", "--output", 1),
    ("mount good.fan m --output output", "--output", 1),
    ("mount good.fan m --report closed/r.html", "--report", 1),
    ("mount good.fan m --report readable/r.html", "--report", 1),
    ("mount good.fan m --metrics closed/x/m.prom", "--metrics", 1),
    ("mount good.fan m --success closed/proof", "--success", 1),
    ("mount good.fan m --success readable/proof", "--success", 1),
    ("mount good.fan m --success file", "--success", 1),
    ("mount good.fan m --log closed/log", "log", 2),
    ("mount good.fan m --log readable/log", "log", 2),
    ("mount good.fan m --log file", "log", 2),
    ("mount good.fan m --background --log file", "log", 2),
    ("mount --recover --local closed", "closed", 1),
    ("mount --recover --local closed/ssd", "closed/ssd", 1),
    ("prep closed x.fan", "closed", 1),
    ("prep closed/d.fan x.fan", "closed/d.fan", 1),
    ("prep closed.tar x.fan", "closed.tar", 1),
    ("prep closed.tar x.fan --index-only", "closed.tar", 1),
    ("prep source closed/x.fan", "closed", 1),
    ("prep source readable/x.fan", "readable", 1),
    ("prep source closed.fan --force", "closed.fan", 1),
    ("prep source closed --force", "closed", 1),
    ("verify closed.fan", "closed.fan", 1),
    ("verify closed/d.fan", "closed/d.fan", 1),
    ("verify no-manifest.json.fan", "manifest.json", 1),
    ("verify no-index.fsx.fan", "index.fsx", 1),
    ("verify good.fan --against closed", "closed", 1),
    ("verify good.fan --against closed.tar", "closed.tar", 1),
    ("plan job closed.fan", "closed.fan", 1),
    ("plan job no-index.fsx.fan", "index.fsx", 1),
    ("plan job good.fan --measured file", "file", 2),
    ("plan job good.fan --html readable/x.html", "readable/x.html", 2),
    ("plan simulate --scenario file", "file", 2),
    ("plan simulate --html closed/x.html", "closed/x.html", 2),
    ("plan measure x.toml --shared closed", "closed", 2),
    ("plan measure x.toml --shared readable", "readable", 2),
    ("plan measure x.toml --shared source/.. --local readable", "readable", 2),
    ("plan measure readable/x.toml --shared .", "readable/x.toml", 2),
    ("plan measure file --shared .", "file", 2),
    ("umount closed/m", "closed/m", 1),
    ("umount closed-m", "closed-m", 1),
    ("stat closed/m", "closed/m", 1),
    ("stat closed-m", "closed-m", 1),
]


@pytest.mark.parametrize(("words", "said", "code"), COMMANDS, ids=[words for words, _, _ in COMMANDS])
def test_one_sentence(place: Place, words: str, said: str, code: int) -> None:
    name, *rest = words.split()
    result = place.run(name, *rest, *(["--", "true"] if name == "mount" and "--background" not in rest else []))
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.startswith(f"fanstore-{name}: error: ") and result.stderr.count("\n") == 1, result.stderr
    assert said in result.stderr
    assert not (place.home / "m").exists() and not (place.home / "x.fan").exists()


#: The same in a job of two ranks, whose launcher has something to say as well.
JOBS = [
    ("mount closed.fan m{rank}", "closed.fan", 1),
    ("mount no-index.fsx.fan m{rank}", "index.fsx", 1),
    ("mount no-part-00000.tar.fan m{rank}", "part-00000.tar", 1),
    ("mount good.fan closed/m{rank}", "closed/m", 1),
    ("mount good.fan m{rank} --local closed/ssd{rank}", "closed/ssd", 1),
    ("mount good.fan m{rank} --output closed/out", "--output", 1),
    ("mount good.fan m{rank} --report closed/r.html", "--report", 1),
    ("mount good.fan m{rank} --log closed/log{rank}", "log", 2),
    ("prep closed x.fan", "closed", 1),
    ("prep source closed/x.fan", "closed", 1),
    ("prep source closed.fan --force", "closed.fan", 1),
]


@pytest.mark.parametrize(("words", "said", "code"), JOBS, ids=[words for words, _, _ in JOBS])
def test_one_sentence_of_a_job(place: Place, words: str, said: str, code: int) -> None:
    pytest.importorskip("mpi4py")
    name, *rest = words.split()
    result = place.run(name, *rest, *(["--", "true"] if name == "mount" else []), ranks=2)
    assert result.returncode == code, result.stdout + result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith(f"fanstore-{name}: ")]
    assert len(errors) == 1 and errors[0].startswith(f"fanstore-{name}: error: ") and said in errors[0], result.stderr
    assert "Traceback" not in result.stderr and "Traceback" not in result.stdout
    assert not list(place.home.glob("m[01]")) and not (place.home / "x.fan").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify no-part-00000.tar.fan", "damaged: part-00000.tar: "),
        ("doctor --local closed --shared closed", "closed cannot be read (Permission denied)"),
        ("doctor --local closed/ssd --shared closed/d.fan", "closed/d.fan cannot be read (Permission denied)"),
        ("doctor --shared no-index.fsx.fan", "index.fsx"),
    ],
)
def test_listed(place: Place, words: str, said: str) -> None:
    """What these find is on standard output, and nothing else."""
    result = place.run(*words.split())
    assert result.returncode == 1 and said in result.stdout, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr and "error:" not in result.stderr
    assert "please report" not in result.stdout


def test_prep_lists_what_it_could_not_read(place: Place) -> None:
    result = place.run("prep", "half", "half.fan")
    assert result.returncode == 3
    assert "Traceback" not in result.stderr and "  'closed': Permission denied\n" in result.stderr
