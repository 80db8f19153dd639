"""Interception without a mount: the same programs, where there is no /dev/fuse, get what they would get through one."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import assert_one_error, mpirun
from conftest import fanstore_command
from mounting import LIMIT_S, command, needs_fuse, needs_root, prepare
from sanitized import DRIVERS, compile_c
from test_preload import HERE, QUIET, SCRIPT, compile_driver, home_of, make_source
from users import account, prefix_of

from fanstore.fuse.unmounted import find_directory
from fanstore.job.job_directory import JobDirectory

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

FRAMEWORKS = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")
#: A mount namespace with a /dev of its own, in which there is no FUSE.
WITHOUT_FUSE = """
own=$(mktemp -d) && mount -t tmpfs -o mode=755 none "$own"
for name in null zero full random urandom tty; do touch "$own/$name"; mount --bind "/dev/$name" "$own/$name"; done
mkdir "$own/shm" && mount --rbind /dev/shm "$own/shm" && ln -s /proc/self/fd "$own/fd"
mount --move "$own" /dev && rmdir "$own" && test ! -e /dev/fuse && exec "$@"
"""
WAYS = {"mount": [], "preload": ["--preload"], "no-fuse": ["--no-fuse"]}


def make_tree(root: Path) -> Path:
    """What preload_names.c asks for, beside files for other programs."""
    make_source(root)
    for name in ("walk/sub", "loops"):
        (root / name).mkdir(parents=True)
    (root / "walk" / "sub" / "file").write_text("inside\n")
    (root / "run.sh").write_text('#!/bin/sh\necho "ran with $1"\n')
    (root / "run.sh").chmod(0o755)
    links = {"walk/up": ".", "walk/dangling": "nothing", "walk/tosub": "sub", "loops/loop": "loop", "dirlink": "a"}
    links |= {"a/up": "..", "dangling": "nothing", "abs": "/etc/hostname", "out": "/etc"}
    for name, target in links.items():
        os.symlink(target, root / name)
    return root


@dataclass
class Served:
    """A dataset, compressed or not, and a place at which it is shown in one of several ways."""

    source: Path
    prepared: Mapping[str, Path]
    folder: Path

    @property
    def point(self) -> Path:
        return self.folder / "m"

    def run(
        self, way: str, *argv: str | Path, codec: str = "none", hidden: bool = True, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """A command on the dataset; without a mount also without /dev/fuse, as far as this user can hide it."""
        mount = [fanstore_command("mount"), str(self.prepared[codec]), str(self.point), *WAYS[way], "--"]
        prefix = ["unshare", "--mount", "sh", "-ec", WITHOUT_FUSE, "sh"] if way == "no-fuse" and hidden else []
        return subprocess.run(
            [*(prefix if os.geteuid() == 0 else []), *mount, *map(str, argv)],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
            env=os.environ | variables,
        )

    def all_ways(self, *argv: str | Path, ways: Sequence[str] = ("mount", "no-fuse"), codec: str = "none") -> str:
        """What a program says, which must be the same in all of them."""
        said = {}
        for way in ways:
            result = self.run(way, *argv, codec=codec)
            assert result.returncode == 0, f"{way}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
            said[way] = f"{result.stdout}--- errors\n{result.stderr}"
        first = said[ways[0]].splitlines()
        for way in ways[1:]:
            other = said[way].splitlines()
            different = [pair for pair in zip(first, other, strict=False) if pair[0] != pair[1]]
            assert not different, f"{ways[0]}, and {way}"
            assert len(first) == len(other)
        return said[ways[0]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("unmounted")
    source = make_tree(folder / "source")
    prepared = {
        codec: prepare(source, folder / f"{codec}.fan", "--partitions", "2", "--codec", codec)
        for codec in ("none", "lz4")
    }
    return Served(source, prepared, folder)


@pytest.fixture(scope="module")
def names_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("driver") / "names"
    return compile_c(target, [*QUIET, "-Wno-format-truncation", DRIVERS / "preload_names.c"], ())


# --- the same as through a mount ---


def test_names_say_the_same(served: Served, names_driver: Path, tmp_path: Path) -> None:
    said = served.all_ways(names_driver, served.point, tmp_path, ways=tuple(WAYS))
    assert said.count("\n") > 2900
    for number in (
        "EROFS",
        "ENOENT",
        "ENOTDIR",
        "EXDEV",
        "ELOOP",
        "ENAMETOOLONG",
        "ENODATA",
        "ERANGE",
        "EISDIR",
        "EEXIST",
    ):
        assert number in said


def test_calls_say_the_same(served: Served, tmp_path: Path) -> None:
    """With some files compressed, which the daemon has to give, and others stored as they are."""
    driver = compile_driver(tmp_path / "drive", (), ())
    said = served.all_ways(driver, "say", served.point, "a/two", codec="lz4")
    assert said.count("\n") > 190
    names = " ".join(str(served.point / name) for name in ("a/one", "a/b/text.txt", "a/two"))
    result = served.run("no-fuse", "bash", "-c", f"ulimit -n 64; exec {driver} limit {names}", codec="lz4")
    assert (result.returncode, result.stdout) == (0, "error EMFILE\nopened enough\n"), result.stderr


def test_python_says_the_same(served: Served, tmp_path: Path) -> None:
    """Without links that lead nowhere, which it would open."""
    own = Served(served.source, {"lz4": tmp_path / "d.fan"}, tmp_path)
    prepare(make_source(tmp_path / "source"), tmp_path / "d.fan", "--codec", "lz4")
    said = own.all_ways(sys.executable, HERE / "preload_program.py", own.point, codec="lz4")
    assert "--- make_mistakes" in said


PROGRAMS = """
cd "$1" && export LC_ALL=C
ls -R; ls -lin --time-style=+%s . a; find . -printf '%p %y %s %m %i %n %l\n' | sort
find . -name '*.txt' -newermt 2000-01-01
du -b --apparent-size a | sort; stat -f -c '%s %b %c' .; stat -c '%n %N %s %h %i' * */*
md5sum small.txt a/one a/b/*; cat link small.txt | sha256sum; sha1sum < a/two; wc -c a/*  2>&1
tar cf - --sort=name . | sha256sum; tar cf - . | tar tvf - --numeric-owner | sort
cp -r . "$TMPDIR/copy" && diff -r --no-dereference . "$TMPDIR/copy" && echo copied
cp -a a "$TMPDIR/again" && ls "$TMPDIR/again"
rsync -a ./ "$TMPDIR/synced/" && diff -r --no-dereference . "$TMPDIR/synced" && echo synced
rsync -anv --delete ./ "$TMPDIR/synced/" | grep -v '^sent\\|^total'
grep -rn hello . 2>&1 | sort; git grep --no-index -n hello -- . | sort
(cd a && tar cf "$TMPDIR/b.tar" b && tar tf "$TMPDIR/b.tar")
(cd walk && tar cf ../../out.tar sub && cat ../small.txt && pwd && pwd -P); tar tf ../out.tar; rm ../out.tar
for name in a/*; do echo "$name"; done; echo */*.txt; echo a/../*.txt
./run.sh once; sh run.sh twice; bash -c 'exec ./run.sh thrice'
env ./run.sh "$(readlink link)"; realpath a/up/small.txt dirlink
head -3 .fanstore/config.json | head -1; ls .fanstore; test -e .fanstore/order -a ! -e .fanstore/none && echo controlled
echo x > new; mkdir d; rm -f a/one; mv small.txt other; ln -s x y; touch small.txt; chmod 600 small.txt; rmdir a
: >> a/one; cp "$TMPDIR/b.tar" .; mv "$TMPDIR/b.tar" a/; ln a/one "$TMPDIR/hard"; truncate -s 0 a/one; rm -rf walk; true
"""


def test_programs_say_the_same(served: Served, tmp_path: Path) -> None:
    assert shutil.which("rsync") and shutil.which("git")
    script = f'export TMPDIR="{tmp_path}/$$"; mkdir "$TMPDIR"; ({PROGRAMS}) 2>&1 | sed "s:$TMPDIR:TMPDIR:g"'
    said = served.all_ways("bash", "-c", script, "bash", served.point, codec="lz4")
    for word in (
        "copied",
        "synced",
        "ran with once",
        "ran with twice",
        "ran with a/two",
        "controlled",
        "Read-only file",
    ):
        assert word in said


def test_shells_say_the_same(served: Served, tmp_path: Path) -> None:
    said = served.all_ways("bash", "-c", f'TMPDIR="{tmp_path}"\n{SCRIPT}', "bash", served.point)
    assert "hello, world" in said and "there" in said


@pytest.mark.skipif(not FRAMEWORKS, reason="FANSTORE_TEST_FRAMEWORKS does not name a Python with torch")
def test_workers_of_a_data_loader_read_it(served: Served) -> None:
    result = served.run("no-fuse", FRAMEWORKS, HERE / "preload_loader.py", served.point / "a", codec="lz4")
    assert result.returncode == 0, result.stderr
    files = sorted(path for path in (served.source / "a").rglob("*") if path.is_file() and not path.is_symlink())
    for path in files:
        name = served.point / path.relative_to(served.source)
        line = f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}\n"
        assert result.stdout.count(line) == 4, "two epochs of workers that stay, and two other kinds of workers"
    assert result.stdout.endswith(f"\n{files[0].stat().st_size}\n")


@needs_root
def test_an_ordinary_user_says_the_same() -> None:
    """What one may not do is refused as on a mount; nobody mounts anything."""
    with account("p") as user, home_of(user.pw_uid, user.pw_gid) as home:
        source = home / "source"
        for name, mode in (("closed/inner", 0o644), ("unlisted/inner", 0o644), ("none", 0), ("all", 0o755)):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text("#!/bin/sh\necho ran\n")
            (source / name).chmod(mode)
        (source / "closed").chmod(0o600)
        (source / "unlisted").chmod(0o311)
        prepare(source, home / "d.fan")
        script = """
        for path in none closed closed/inner unlisted unlisted/inner all .; do
            cat m/$path; ls -d m/$path; ls m/$path; cd m/$path && cd ../..; m/$path
            for what in r w x e d; do test -$what m/$path && echo $path $what; done
        done
        """
        subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(home)], check=True, timeout=LIMIT_S)
        said = []
        for way in ("mount", "no-fuse"):
            line = [fanstore_command("mount"), "d.fan", "m", *WAYS[way], "--", "sh", "-c", f"exec 2>&1; {script} true"]
            result = subprocess.run(
                [*prefix_of(user), *line],
                cwd=home,
                env=os.environ | {"HOME": str(home), "TMPDIR": str(home)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert result.returncode == 0, result.stdout + result.stderr
            said.append(result.stdout)
        assert said[0].splitlines() == said[1].splitlines()
        assert "Permission denied" in said[0] and "unlisted x" in said[0] and "ran" in said[0]


# --- the job ---


def test_nothing_is_made_at_the_path(served: Served, tmp_path: Path) -> None:
    """PATH and what is above it need not be there; and it is the same with --local, staged."""
    point = tmp_path / "not" / "there" / "m"
    for options in ([], ["--local", str(tmp_path / "ssd"), "--stage-first", "--verify", "always"]):
        result = command(
            "mount", served.prepared["none"], point, "--no-fuse", *options, "--",
            "sh", "-c", 'cat "$FANSTORE_MOUNT/small.txt"; ls "$(dirname "$FANSTORE_MOUNT")"; exit 7',
        )  # fmt: skip
        assert (result.returncode, result.stdout) == (7, "hello\nworld\n"), result.stderr
        assert "cannot access" in result.stderr
    result = command("mount", served.prepared["lz4"], point, "--no-fuse", "--", point / "run.sh", "ours")
    assert result.stdout == "ran with ours\n", "a program of the dataset"
    assert not (tmp_path / "not").exists() and not (tmp_path / "ssd").exists()


def test_commands_find_a_job_by_its_path(served: Served, tmp_path: Path) -> None:
    point, log = tmp_path / "m", tmp_path / "log"
    (tmp_path / "ssd").mkdir()
    started = command(
        "mount", served.prepared["lz4"], point, "--no-fuse", "--background", "--log", log, "--local", tmp_path / "ssd"
    )
    assert started.returncode == 0 and f"can be read by programs at {point}" in started.stdout, started.stderr
    try:
        result = command("run", point, "--", "cat", point / "small.txt")
        assert (result.stdout, result.stderr) == ("hello\nworld\n", "")
        inside = command("run", point, "--", fanstore_command("stat"), point, "--json")
        assert json.loads(inside.stdout)["intercepted"]["opens"] >= 1
        shown = command("stat", point)
        assert "intercepted" in shown.stdout and shown.returncode == 0, shown.stderr
        again = assert_one_error(command("mount", served.prepared["none"], point, "--no-fuse", "--", "true"), "mount")
        assert "another fanstore-mount --no-fuse serves" in again
        assert [path.name.startswith("fanstore-") for path in (tmp_path / "ssd").iterdir()] == [True]
    finally:
        ended = command("umount", point)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert find_directory(point) is None and not list((tmp_path / "ssd").iterdir())
    assert not re.search(r" (WARNING|ERROR|CRITICAL) ", log.read_text())
    for name in ("stat", "umount"):
        assert str(point) in assert_one_error(command(name, point), name)
    assert "nor served there" in assert_one_error(command("run", point, "--", "true"), "run")


def test_what_makes_no_sense_is_refused(served: Served, tmp_path: Path) -> None:
    prepared, point = served.prepared["none"], tmp_path / "m"
    for arguments, reason in (
        ((), "give a COMMAND, or --background"),
        (("--allow-other", "--", "true"), "--allow-other is about a mount"),
        (("--scratch", "--", "true"), "programs cannot write below MOUNTPOINT"),
    ):
        assert reason in assert_one_error(command("mount", prepared, point, "--no-fuse", *arguments), "mount", 2)
    (point / "full").mkdir(parents=True)
    (tmp_path / "file").touch()
    for path, reason in ((point, "is not empty"), (tmp_path / "file", "is not a directory")):
        assert reason in assert_one_error(command("mount", prepared, path, "--no-fuse", "--", "true"), "mount")


@needs_root
def test_without_fuse_the_message_offers_it(served: Served) -> None:
    line = [fanstore_command("mount"), str(served.prepared["none"]), str(served.point), "--", "true"]
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", WITHOUT_FUSE, "sh", *line], capture_output=True, text=True, timeout=LIMIT_S
    )
    sentence = assert_one_error(result, "mount")
    assert "there is no /dev/fuse" in sentence and "fanstore-mount --no-fuse" in sentence


def test_files_of_other_nodes(served: Served, tmp_path: Path) -> None:
    """Two nodes with half of the partitions each: every file is read on both."""
    script = """
    cd "$FANSTORE_MOUNT" && find . -type f | sort | xargs md5sum > "$1/$FANSTORE_RANK"
    python3 -c "import json; s = json.load(open('.fanstore/stats.json')); print(s['sources']['remote']['reads'] > 0)"
    python3 -c "import json; print(len(json.load(open('.fanstore/nodes.json'))['nodes']))"
    """
    for rank in range(2):
        (tmp_path / f"ssd{rank}").mkdir()
    line = [fanstore_command("mount"), str(served.prepared["lz4"]), str(tmp_path / "m{rank}"), "--no-fuse"]
    line += ["--local", str(tmp_path / "ssd{rank}"), "--stage-first", "--", "sh", "-ec", script, "sh", str(tmp_path)]
    result = subprocess.run([*mpirun(2), *line], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == ["2", "2", "True", "True"]
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
    assert (tmp_path / "0").read_text().count("\n") == sum(
        path.is_file() and not path.is_symlink() for path in served.source.rglob("*")
    )


def test_a_dead_daemon_is_an_error_and_not_a_hang(served: Served, tmp_path: Path) -> None:
    """What is stored as it is on this node stays readable; the rest is EIO, at once."""
    code = """if True:
        import json, os, signal, sys, time
        os.chdir(sys.argv[1])
        kept = open("a/b/text.txt", "rb")
        print(len(open("a/one", "rb").read()), flush=True)
        os.kill(json.load(open(".fanstore/config.json"))["pid"], signal.SIGKILL)
        sys.stdin.readline()
        print(len(open("a/one", "rb").read()), len(os.listdir("a")), os.path.exists("a/nothing"))
        for read in (kept.read, lambda: open("a/b/text.txt", "rb").read(), lambda: open(".fanstore/stats.json").read()):
            try: print(read())
            except OSError as error: print(error.strerror)
        os._exit(0)
    """
    log = tmp_path / "log"
    started = command("mount", served.prepared["lz4"], tmp_path / "m", "--no-fuse", "--background", "--log", log)
    assert started.returncode == 0, started.stderr
    directory = find_directory(tmp_path / "m")
    assert directory is not None
    with subprocess.Popen(
        [fanstore_command("run"), str(tmp_path / "m"), "--", sys.executable, "-c", code, str(tmp_path / "m")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "107000\n"
        deadline_s = time.monotonic() + LIMIT_S
        while directory in JobDirectory.living(directory.parent):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        said, _ = process.communicate("\n", timeout=LIMIT_S)
    assert said.splitlines() == ["107000 5 False", *["Input/output error"] * 3]
    JobDirectory.sweep(directory.parent, lambda path: path == directory)


def test_after_the_end_there_is_nothing(served: Served, tmp_path: Path) -> None:
    started = command(
        "mount", served.prepared["none"], tmp_path / "m", "--no-fuse", "--background", "--log", tmp_path / "log"
    )
    assert started.returncode == 0, started.stderr
    code = """if True:
        import sys
        kept = open(sys.argv[1] + "/a/one", "rb")
        print(len(kept.read()), flush=True)
        sys.stdin.read()
        kept.seek(0); print(len(kept.read()))
        try: open(sys.argv[1] + "/a/one")
        except OSError as error: print(error.strerror)
    """
    with subprocess.Popen(
        [fanstore_command("run"), str(tmp_path / "m"), "--", sys.executable, "-c", code, str(tmp_path / "m")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "107000\n"
        assert command("umount", tmp_path / "m").returncode == 0
        said, _ = process.communicate("", timeout=LIMIT_S)
    assert said.splitlines() == ["107000", "No such file or directory"], "what is open stays readable"
