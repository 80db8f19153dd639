"""Interception without a mount: the same programs, where there is no /dev/fuse, get what they would get through one."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import assert_one_error, mpirun
from conftest import fanstore_command
from mounting import LIMIT_S, command, needs_fuse, needs_root, prepare
from oddities import compressible, incompressible
from sanitized import DRIVERS, compile_c
from test_mount_damage import damage
from test_outputs_programs import contents
from test_preload import HERE, QUIET, SCRIPT, compile_driver, home_of, make_source
from users import account, prefix_of

from fanstore.client.connection import ControlClient
from fanstore.client.preload import LIBRARY
from fanstore.client.protocol import ControlError
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
        self,
        way: str,
        *argv: str | Path,
        codec: str = "none",
        hidden: bool = True,
        options: Sequence[str | Path] = (),
        **variables: str,
    ) -> "subprocess.CompletedProcess[str]":
        """A command on the dataset; without a mount also without /dev/fuse, as far as this user can hide it."""
        mount = [fanstore_command("mount"), str(self.prepared[codec]), str(self.point), *WAYS[way]]
        mount += [*map(str, options), "--quiet", "--"]
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

    def all_ways(
        self,
        *argv: str | Path,
        ways: Sequence[str] = ("mount", "no-fuse"),
        codec: str = "none",
        options: Callable[[str], Sequence[str | Path]] = lambda way: (),
    ) -> str:
        """What a program says, which must be the same in all of them; ``options``: more of fanstore-mount for each."""
        said = {}
        for way in ways:
            result = self.run(way, *argv, codec=codec, options=options(way))
            assert result.returncode == 0, f"{way}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
            # That a mount cannot be written to is told by its daemon, which knows of programs that ask the kernel.
            errors = [line for line in result.stderr.splitlines(True) if not line.startswith("fanstore-mount: WARNING")]
            said[way] = f"{result.stdout}--- errors\n{''.join(errors)}"
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
    # Without links that lead nowhere, which Python would open.
    prepared["without links"] = prepare(make_source(folder / "own"), folder / "own.fan", "--codec", "lz4")
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


def test_names_say_the_same_with_outputs(served: Served, names_driver: Path, tmp_path: Path) -> None:
    ways = tuple(WAYS)
    said = served.all_ways(names_driver, served.point, tmp_path, ways=ways, options=lambda way: ["--scratch"])
    assert said.count("\n") > 2900
    for number in ("EROFS", "ENOENT", "EXDEV", "EINVAL", "EBUSY", "EOPNOTSUPP"):
        assert number in said


def test_calls_say_the_same(served: Served, tmp_path: Path) -> None:
    """With some files compressed, which the daemon has to give, and others stored as they are."""
    driver = compile_driver(tmp_path / "drive", (), ())
    said = served.all_ways(driver, "say", served.point, "a/two", codec="lz4")
    assert said.count("\n") > 190
    names = " ".join(str(served.point / name) for name in ("a/one", "a/b/text.txt", "a/two"))
    result = served.run("no-fuse", "bash", "-c", f"ulimit -n 64; exec {driver} limit {names}", codec="lz4")
    assert (result.returncode, result.stdout) == (0, "error EMFILE\nopened enough\n"), result.stderr


def test_python_says_the_same(served: Served) -> None:
    said = served.all_ways(sys.executable, HERE / "preload_program.py", served.point, codec="without links")
    assert "--- make_mistakes" in said


@pytest.mark.parametrize("version", ["3.13"])
def test_other_versions_of_python_say_the_same(served: Served, version: str) -> None:
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"), shutil.which(f"python{version}")]
    python = found[0]
    if python is None:
        pytest.skip(f"there is no Python {version}")
    said = served.all_ways(python, HERE / "preload_program.py", served.point, "plain", codec="without links")
    assert "--- make_mistakes" in said


def test_a_thousand_threads(served: Served) -> None:
    """With stacks that are as small as some programs make them, all of them at once."""
    code = """if True:
        import hashlib, os, sys, threading
        os.chdir(sys.argv[1])
        threading.stack_size(256 << 10)
        found, start = set(), threading.Barrier(1000)
        def work(number):
            start.wait()
            names = ("a/one", "a/b/text.txt", "a/two", f"many/{number}")
            open(names[-1], "wb").write(b"x" * 100)
            found.add(tuple(hashlib.md5(open(name, "rb").read()).hexdigest() for name in names))
        os.mkdir("many")
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1000)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(found), len(os.listdir("many")), sum(os.stat(f"many/{n}").st_size for n in range(1000)))
    """
    result = served.run(
        "no-fuse", "bash", "-c", 'ulimit -n 8192; exec "$@"', "bash", sys.executable, "-c", code, served.point,
        codec="lz4", options=["--scratch"],
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "1 1000 100000\n"), result.stderr


@pytest.mark.parametrize("first", [True, False])
def test_jemalloc_beside_it(served: Served, first: bool) -> None:
    """An allocator that reads files while it starts, and calls mmap by itself."""
    jemalloc = "libjemalloc.so.2"
    alone = subprocess.run(["true"], env={**os.environ, "LD_PRELOAD": jemalloc}, capture_output=True, timeout=LIMIT_S)
    if alone.stderr:
        pytest.skip("there is no libjemalloc")
    libraries = f"{jemalloc}:{LIBRARY}" if first else f"{LIBRARY}:{jemalloc}"
    plain = served.run("mount", "md5sum", served.point / "a/one", served.point / "a/b/text.txt", codec="lz4")
    script = 'export LD_PRELOAD="$1"; shift; exec "$@"'
    reader: list[str | Path] = [
        "bash",
        "-c",
        script,
        "bash",
        libraries,
        "md5sum",
        served.point / "a/one",
        served.point / "a/b/text.txt",
    ]
    result = served.run("no-fuse", *reader, codec="lz4", MALLOC_CONF="stats_print:false")
    assert (result.returncode, result.stdout, result.stderr) == (0, plain.stdout, "")
    writer = [*reader[:5], sys.executable, HERE / "preload_program.py", served.point, "plain"]
    assert served.run("no-fuse", *writer, codec="without links").returncode == 0


@pytest.mark.skipif(not FRAMEWORKS, reason="FANSTORE_TEST_FRAMEWORKS does not name a Python with OpenCV")
def test_opencv_reads_it(served: Served, tmp_path: Path) -> None:
    if subprocess.run([FRAMEWORKS, "-c", "import cv2"], capture_output=True, timeout=LIMIT_S).returncode != 0:
        pytest.skip("this Python has no OpenCV")
    code = """if True:
        import hashlib, os, sys
        os.environ["OPENCV_LOG_LEVEL"] = "OFF"
        import cv2
        os.chdir(sys.argv[1])
        for path in ("picture.png", os.path.abspath("picture.png")):
            image = cv2.imread(path); print(image.shape, hashlib.md5(image.tobytes()).hexdigest())
        print(cv2.imread("nothing"), cv2.imread("small.txt"), cv2.imwrite("made.png", image[::2]))
        print(cv2.imread("made.png").shape, cv2.haveImageReader("picture.png"))
    """
    options = ["--output", str(tmp_path / "output")]
    ways = tuple(WAYS)
    said = served.all_ways(FRAMEWORKS, "-c", code, served.point, ways=ways, codec="lz4", options=lambda way: options)
    assert "(64, 64, 3)" in said and "(32, 64, 3) True" in said
    assert (tmp_path / "output/made.png").exists()


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


# --- maps ---

#: Stored as they are from a page on: longer than whole pages, whole pages only, several chunks, what numpy maps.
MAPPED = ("odd", "even", "several", "array.npy")


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("maps")
    source = folder / "source"
    source.mkdir()
    for number, (name, size) in enumerate((("odd", (3 << 20) + 17), ("even", 2 << 20), ("several", (9 << 20) - 5))):
        (source / name).write_bytes(incompressible(size, number))
    np.save(source / "array.npy", np.frombuffer(incompressible((1 << 20) + 800, 5), np.uint8))
    (source / "small").write_bytes(incompressible(100_000, 6))
    (source / "text").write_bytes(compressible(2 << 20))
    return Served(source, {"lz4": prepare(source, folder / "d.fan", "--codec", "lz4")}, folder)


def test_maps_say_the_same(mapped: Served) -> None:
    names = (*MAPPED, "small", "text")
    said = mapped.all_ways(
        sys.executable, HERE / "preload_maps.py", mapped.point, *names, ways=tuple(WAYS), codec="lz4"
    )
    for name in names:
        content = (mapped.source / name).read_bytes()
        assert f"{len(content)} {hashlib.sha256(content).hexdigest()[:16]} " in said
    assert "EACCES" in said and "EINVAL" in said and "whole pages" in said


@pytest.mark.parametrize("way", ["preload", "no-fuse"])
def test_maps_of_what_lies_at_a_page_are_of_the_partition(mapped: Served, way: str) -> None:
    """Nothing is promoted for them, whether partitions are open or only mapped; for others it is."""
    code = """if True:
        import json, mmap, os, sys
        import numpy as np
        os.chdir(sys.argv[1])
        def promotions(): return json.load(open(".fanstore/stats.json"))["intercepted"]["promotions"]
        def maps(): return sum("part-" in line for line in open("/proc/self/maps"))
        def whole(name):
            with open(name, "rb") as file: return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole_ones = [whole(name) for name in ("small", "odd")]
        before, seen = promotions(), maps()
        kept = [whole(name) for name in ("odd", "even", "several")] + [np.load("array.npy", mmap_mode="r")]
        print(promotions() - before, maps() > seen, kept[-1].sum())
        whole("small"), whole("text"), mmap.mmap(os.open("odd", os.O_RDONLY), 0, flags=mmap.MAP_PRIVATE, prot=5)
        print(promotions() - before)
    """
    total = int(np.load(mapped.source / "array.npy").sum())
    for reading in ("auto", "map"):
        result = mapped.run(way, sys.executable, "-c", code, mapped.point, codec="lz4", FANSTORE_PRELOAD_READ=reading)
        assert (result.returncode, result.stdout) == (0, f"0 True {total}\n3\n"), result.stderr


def test_a_map_of_a_damaged_file_is_an_error(mapped: Served, tmp_path: Path) -> None:
    """As far as the damaged chunk is in it; before anything of it is shown."""
    prepared = shutil.copytree(mapped.prepared["lz4"], tmp_path / "d.fan")
    damage(prepared, "several", 5 << 20)
    code = """if True:
        import mmap, os, sys
        for name, length, offset in (("odd", 0, 0), ("several", 1 << 20, 0), ("several", 0, 0), ("several", 1, 6 << 20),
                                     ("several", 0, 8 << 20)):
            with open(os.path.join(sys.argv[1], name), "rb") as file:
                try: memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=offset)
                except OSError as error: print(error.strerror)
                else: file.seek(offset); print(memory[:] == file.read(len(memory)))
    """
    damaged = Served(mapped.source, {"none": prepared}, tmp_path)
    result = damaged.run("no-fuse", sys.executable, "-c", code, damaged.point)
    wanted = ["True", "True", "Input/output error", "Input/output error", "True"]
    assert (result.returncode, result.stdout.splitlines()) == (0, wanted), result.stderr


# --- outputs ---


def test_writing_says_the_same(served: Served, tmp_path: Path) -> None:
    """Python, its libraries and shells; and what stands in --output in the end is the same, too."""
    assert shutil.which("rsync")

    def options(way: str) -> Sequence[str | Path]:
        shutil.rmtree(tmp_path / "aside", ignore_errors=True)
        (tmp_path / "aside").mkdir()
        return ["--output", tmp_path / way]

    writer = (sys.executable, HERE / "preload_writer.py", served.point, tmp_path / "aside")
    said = served.all_ways(*writer, ways=tuple(WAYS), codec="lz4", options=options)
    for word in ("--- use_shell", "synced", "database is locked", "ENOTEMPTY", "BlockingIOError"):
        assert word in said
    saved = {way: {name: entry._replace(time_ns=0) for name, entry in contents(tmp_path / way).items()} for way in WAYS}
    assert len(saved["mount"]) > 60
    assert saved["mount"] == saved["preload"] == saved["no-fuse"]


def test_the_tests_of_outputs_pass_without_a_mount(tmp_path: Path) -> None:
    """Those of files that programs write and look at, as they are: pytest itself is intercepted."""
    source = tmp_path / "source"
    (source / "directory/inner").mkdir(parents=True)
    (source / "file").write_text("content\n")
    (source / "large").write_bytes(b"dataset." * 10_000)
    (source / "link").symlink_to("file")
    own = Served(source, {"none": prepare(source, tmp_path / "d.fan")}, tmp_path)
    tests = []
    for name in ("test_outputs.py", "test_outputs_open.py"):
        found = re.findall(
            r"^def (test_\w+)\((?:scratch: Mounted|here: Path|path: Path)", (HERE / name).read_text(), re.M
        )
        # Sockets are not seen by the library, and there is no engine that statistics could tell of.
        other = ("test_statistics_of_scratch", "test_what_is_not_supported_says_so")
        tests += [f"{HERE / name}::{test}" for test in found if test not in other]
    pytest_command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "native"]
    # What other tests run at the same time is none of its business.
    mine = f"given-{os.getpid()}"
    result = own.run(
        "no-fuse",
        *pytest_command,
        *tests,
        options=["--scratch"],
        FANSTORE_TEST_GIVEN=str(own.point),
        FANSTORE_TEST_RUN=mine,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) > 40, result.stdout


@pytest.mark.skipif(not FRAMEWORKS, reason="FANSTORE_TEST_FRAMEWORKS does not name a Python with torch")
def test_checkpoints_of_torch(served: Served, tmp_path: Path) -> None:
    code = """if True:
        import os, sys, torch
        os.chdir(sys.argv[1])
        model = torch.nn.Linear(100, 100)
        torch.save(model.state_dict(), "model.tmp"); os.replace("model.tmp", "model.pt")
        print(all(torch.equal(*pair) for pair in zip(torch.load("model.pt").values(), model.state_dict().values())))
        torch.load("model.pt", mmap=True); print(sorted(torch.load("model.pt", mmap=True)))
    """
    options = ["--output", str(tmp_path / "output")]
    result = served.run("no-fuse", FRAMEWORKS, "-c", code, served.point, options=options)
    assert (result.returncode, result.stdout) == (0, "True\n['bias', 'weight']\n"), result.stderr
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["model.pt"]


def test_fsync_without_a_mount_means_safe(served: Served, tmp_path: Path) -> None:
    """Of a file and of a directory, in Python and in a shell: it stands there when the call returns."""
    code = """if True:
        import os, sys
        from pathlib import Path
        os.chdir(sys.argv[1])
        output = Path(sys.argv[2])
        os.mkdir("run")
        with open("run/one", "wb") as file:
            file.write(b"x" * 1000); file.flush()
            print((output / "run/one").exists())
            os.fsync(file.fileno())
            print((output / "run/one").read_bytes() == b"x" * 1000)
            file.write(b"y"); file.flush(); os.fdatasync(file.fileno())
            print(len((output / "run/one").read_bytes()))
        os.rename("run/one", "run/two")
        folder = os.open("run", os.O_RDONLY)
        os.fsync(folder)
        print(os.listdir(output / "run"))
    """
    output = tmp_path / "output"
    options = ["--output", str(output)]
    result = served.run("no-fuse", sys.executable, "-c", code, served.point, output, options=options)
    assert (result.returncode, result.stdout) == (0, "False\nTrue\n1001\n['two']\n"), result.stderr


def wait_for(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_no_close_tells_of_is_saved_without_a_mount(served: Served, tmp_path: Path) -> None:
    """A killed program, one that passes its descriptor on, and a map: the last that lets go of a file closes it."""
    output = tmp_path / "output"
    started = command(
        "mount", served.prepared["none"], tmp_path / "m", "--no-fuse", "--background", "--log", tmp_path / "log",
        "--output", output,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    code = """if True:
        import mmap, os, subprocess, sys
        os.chdir(sys.argv[1])
        killed = open("killed", "wb"); killed.write(b"written"); killed.flush()
        with open("mapped", "w+b") as file:
            file.truncate(4096)
            memory = mmap.mmap(file.fileno(), 4096)
        memory[:4] = b"late"
        inherited = open("inherited", "wb")
        subprocess.Popen(["env", "-i", "sh", "-c", "read line; echo from a child; read line"], stdout=inherited)
        inherited.close()
        print("ready", flush=True)
        import time; time.sleep(1000)
    """
    try:
        with subprocess.Popen(
            [fanstore_command("run"), str(tmp_path / "m"), "--", sys.executable, "-c", code, str(tmp_path / "m")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            assert json.loads(command("stat", tmp_path / "m", "--json").stdout)["outputs"]["being_written"] >= 1
            assert not (output / "killed").exists()
            assert "open for writing" in assert_one_error(command("umount", tmp_path / "m"), "umount")
            process.kill()
            wait_for((output / "killed").exists)
            wait_for(lambda: (output / "mapped").exists() and (output / "mapped").read_bytes()[:4] == b"late")
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdin.write("\n")
            process.stdin.close()
            wait_for(lambda: (output / "inherited").exists() and (output / "inherited").stat().st_size > 0)
        assert (output / "killed").read_text() == "written"
        assert (output / "inherited").read_text() == "from a child\n"
        shown = json.loads(command("stat", tmp_path / "m", "--json").stdout)["outputs"]
        assert (shown["files"], shown["being_written"]) == (3, 0)
    finally:
        assert command("umount", tmp_path / "m").returncode == 0
    assert not re.search(r" (WARNING|ERROR|CRITICAL) ", (tmp_path / "log").read_text())


def test_two_nodes_write_without_a_mount(served: Served, tmp_path: Path) -> None:
    """What one has closed is read on the other; names have one winner; who closes last wins, whoever had it open."""
    code = """if True:
        import os, sys, time
        from pathlib import Path
        rank, here = int(os.environ["FANSTORE_RANK"]), Path(os.environ["FANSTORE_MOUNT"])
        aside = Path(sys.argv[1])
        def meet(name):
            (aside / f"{name}{rank}").touch()
            while not (aside / f"{name}{1 - rank}").exists(): time.sleep(0.005)
        os.chdir(here)
        try:
            os.close(os.open("only", os.O_CREAT | os.O_EXCL | os.O_WRONLY)); print("won")
        except FileExistsError:
            print("lost")
        if rank == 0:
            os.makedirs("run/deep"); Path("run/deep/one").write_text("of rank 0")
        meet("written")
        print(Path("run/deep/one").read_text(), os.listdir("run"), os.stat("run/deep/one").st_size)
        meet("read")
        log = open("log", "a", buffering=1)
        meet("open")
        if rank == 0:
            log.write("first"); os.fsync(log.fileno())
        meet("synced")
        if rank == 1:
            log.write("second"); log.close()
        meet("closed")
        if rank == 0:
            log.write(", and more"); log.close()
        meet("last")
        print(Path("log").read_text())
        if rank == 1:
            os.rename("run", "again"); os.unlink("only")
        meet("renamed")
        print(sorted(os.listdir(".")), Path("again/deep/one").read_text())
        if rank == 0:
            Path("third").write_text("short")
        meet("third")
        old = open("third", "rb")
        meet("old")
        if rank == 1:
            Path("third").write_text("longer than it was")
        meet("new")
        print(os.fstat(old.fileno()).st_size == len(old.read()), Path("third").read_text())
    """
    for name in ("ssd0", "ssd1", "aside"):
        (tmp_path / name).mkdir()
    line = [fanstore_command("mount"), str(served.prepared["lz4"]), str(tmp_path / "m{rank}"), "--no-fuse"]
    line += ["--local", str(tmp_path / "ssd{rank}"), "--output", str(tmp_path / "output"), "--"]
    line += ["sh", "-c", f'exec {sys.executable} -c "$1" "$2" > "$2/said$FANSTORE_RANK"', "sh", code]
    result = subprocess.run(
        [*mpirun(2), *line, str(tmp_path / "aside")], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stderr
    said = [(tmp_path / f"aside/said{rank}").read_text().splitlines() for rank in range(2)]
    assert sorted((said[0][0], said[1][0])) == ["lost", "won"]
    assert said[0][1:] == said[1][1:]
    assert said[0][1:3] == ["of rank 0 ['deep'] 9", "first, and more"]
    assert (tmp_path / "output/log").read_text() == "first, and more"
    assert said[0][-1] == "True longer than it was"
    assert (tmp_path / "output/again/deep/one").read_text() == "of rank 0"
    assert not list((tmp_path / "ssd0").iterdir()) and not list((tmp_path / "ssd1").iterdir())


def test_a_name_that_is_replaced_is_there_at_any_time(served: Served, tmp_path: Path) -> None:
    """Whoever opens a file that others replace by renaming gets the one or the other."""
    code = """if True:
        import os, sys, time
        from pathlib import Path
        os.chdir(os.environ["FANSTORE_MOUNT"])
        Path("now").write_text("0")
        end = time.monotonic() + 1
        if os.fork() == 0:
            for number in range(10**9):
                if time.monotonic() > end: os._exit(0)
                Path("new").write_text(str(number)); os.rename("new", "now")
        seen = set()
        while time.monotonic() < end:
            seen.add(int(Path("now").read_text()))
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0 and len(seen) > 3, seen
    """
    result = served.run("no-fuse", sys.executable, "-c", code, options=["--output", tmp_path / "output"])
    assert result.returncode == 0, result.stderr


def test_requests_that_no_program_sends(served: Served, tmp_path: Path) -> None:
    """A client says what a kernel would not: nothing is made elsewhere, and the daemon goes on."""
    output, log = tmp_path / "output", tmp_path / "log"
    started = command(
        "mount", served.prepared["none"], tmp_path / "m", "--no-fuse", "--background", "--log", log, "--output", output
    )
    assert started.returncode == 0, started.stderr
    directory = find_directory(tmp_path / "m")
    assert directory is not None
    try:
        with contextlib.closing(ControlClient(directory / "control", "test")) as client:
            client.ask("output-make", parent=1, name=b"made", mode=stat.S_IFDIR | 0o755, target=b"")
            made = client.ask("output-lookup", parent=1, name=b"made").values["inode"]
            place = {"parent": made, "name": b"new"}
            content = {"inode": made, "what": 1, "mode": 0o700, "uid": 0, "gid": 0, "size": 0, "mtime_ns": 0}
            refused: list[tuple[str, dict[str, Any]]] = [
                *(
                    ("output-create", {**place, "name": name, "mode": stat.S_IFREG | 0o644, "flags": os.O_RDWR})
                    for name in (b"../../escaped", b"..", b".", b"", b"a/b", b"a\0b")
                ),
                ("output-make", {**place, "name": b"../out", "mode": stat.S_IFDIR | 0o755, "target": b""}),
                ("output-make", {**place, "mode": stat.S_IFDIR | 1 << 40, "target": b""}),
                ("output-rename", {"parent": 1, "name": b"made", "to": 1, "to_name": b"../made", "flags": 0}),
                ("output-remove", {"parent": 1, "name": b"made/..", "directory": True}),
                *(("output-set", {**content, "mode": mode}) for mode in (-1, 1 << 40)),
                ("output-set", {**content, "what": 16, "mtime_ns": 1 << 63}),
            ]
            for request, arguments in refused:
                with pytest.raises(ControlError) as caught:
                    client.ask(request, **arguments)
                assert str(caught.value) == os.strerror(errno.EINVAL), (request, arguments)
            (descriptor,) = client.ask("output-create", **place, mode=stat.S_IFREG | 0o644, flags=os.O_RDWR).descriptors
            os.write(descriptor, b"written")
            os.close(descriptor)
    finally:
        assert command("umount", tmp_path / "m").returncode == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.parent != tmp_path) == [
        "output/made",
        "output/made/new",
    ]
    assert (output / "made/new").read_bytes() == b"written"
    assert not re.search(r" (WARNING|ERROR|CRITICAL) ", log.read_text())


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
