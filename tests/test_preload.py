"""Interception: programs with libfanstore-io.so get what they would get through the mount, but read by themselves."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from commands import assert_one_error, mpirun, run_fanstore
from conftest import MakePrepared, fanstore_command
from mounting import LIMIT_S, Mount, Mounted, command, needs_fuse, needs_root, prepare, wait_until
from oddities import compressible, incompressible
from PIL import Image
from sanitized import ADDRESS, DRIVERS, ENVIRONMENT, NATIVE, compile_c, room_sources
from test_mount_damage import damage
from users import account, prefix_of

from fanstore.client.connection import ControlClient
from fanstore.client.preload import COUNTERS, LIBRARY, Described, PreloadState, environment

pytest_plugins = ["mounting"]
pytestmark = needs_fuse

HERE = Path(__file__).parent
#: It does not know fences, and says so. Without vfork: what its child does to its own descriptors the sanitizer would
#: take for a race in the parent.
THREADS = ("-fsanitize=thread", "-Wno-tsan", "-fno-omit-frame-pointer", "-Dvfork=fork")
QUIET = (
    "-Wno-unused-result",
    "-Wno-deprecated-declarations",
    "-Wno-stringop-overflow",
    "-Wno-maybe-uninitialized",
    "-DXXH_INLINE_ALL",
)
#: Layouts of native/preload/state.h.
STATE_BYTES, PART_BYTES = 128 + 2 * 4096, 16 + 2 * 4096
FILES = ("a/one", "a/two", "a/three", "a/b/large")


def make_source(root: Path) -> Path:
    """Files of several sizes and kinds, links, and what libraries read."""
    (root / "a" / "b").mkdir(parents=True)
    for number, name in enumerate(("one", "two", "three"), start=1):
        (root / "a" / name).write_bytes(incompressible(number * 100_000 + 7_000, number))
    (root / "a" / "b" / "large").write_bytes(incompressible(9_000_001, 9))
    (root / "a" / "b" / "text.txt").write_bytes(compressible(60_000, 1))
    (root / "empty").touch()
    (root / "small.txt").write_text("hello\nworld\n")
    os.link(root / "a" / "one", root / "hard")
    os.symlink("a/two", root / "link")
    np.save(root / "array.npy", np.arange(50_000))
    Image.effect_mandelbrot((64, 64), (-3, -2.5, 2, 2.5), 100).save(root / "picture.png")
    return root


@dataclass
class Intercepted:
    """A mount, and the environment in which programs are intercepted."""

    source: Path
    mounted: Mounted
    variables: Mapping[str, str]

    def counters(self) -> dict[str, int]:
        return {name: int(value) for name, value in self.mounted.statistics()["intercepted"].items()}

    def run(self, *argv: str | Path, preloaded: bool = True, **variables: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(word) for word in argv],
            env=os.environ | self.variables | ({} if preloaded else {"FANSTORE_PRELOAD": "0"}) | variables,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            stdin=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )

    def both_ways(self, *argv: str | Path, **variables: str) -> tuple[str, dict[str, int]]:
        """What a program says, which must be the same through the mount; and what was intercepted."""
        plain = self.run(*argv, preloaded=False)
        assert plain.returncode == 0, plain.stderr
        before = self.counters()
        result = self.run(*argv, preloaded=True, **variables)
        after = self.counters()
        assert (result.returncode, result.stderr) == (0, plain.stderr)
        different = [
            pair
            for pair in zip(plain.stdout.splitlines(), result.stdout.splitlines(), strict=False)
            if pair[0] != pair[1]
        ]
        assert not different and plain.stdout == result.stdout, "through the mount, and intercepted"
        return result.stdout, {name: after[name] - before[name] for name in COUNTERS}


def intercept(mounted: Mounted, source: Path) -> Intercepted:
    config = json.loads((mounted.path / ".fanstore" / "config.json").read_bytes())
    with ControlClient(Path(config["control_socket"]), "test") as client:
        state = client.ask("preload", LIMIT_S).values["state"]
    return Intercepted(source, mounted, environment(state, {}))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("preload") / "source")


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(source, tmp_path_factory.mktemp("plain") / "d.fan", "--partitions", "2")


@pytest.fixture(scope="module")
def programs(source: Path, plain: Path, module_mount: Mount) -> Intercepted:
    return intercept(module_mount(plain), source)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_driver(tmp_path_factory.mktemp("driver") / "drive", (), ())


def library_sources() -> list[Path]:
    return [*room_sources("preload"), NATIVE / "format" / "index_columns.c"]


def compile_driver(target: Path, library: Sequence[str | Path], flags: Sequence[str]) -> Path:
    """The driver, perhaps with the library in it, so that a sanitizer sees both."""
    return compile_c(target, [*QUIET, DRIVERS / "preload_drive.c", *library, "-lpthread"], flags)


# --- the same as through the mount ---


@pytest.mark.parametrize("way", ["auto", "map", "pread"])
def test_calls_say_the_same(programs: Intercepted, driver: Path, way: str) -> None:
    said, counted = programs.both_ways(driver, "say", programs.mounted.path, "a/two", FANSTORE_PRELOAD_READ=way)
    assert said.count("\n") > 190
    assert counted["opens"] > 15 and counted["reads"] > 20 and counted["stats"] > 10
    assert counted["promotions"] > 8 and counted["listings"] == 1


@pytest.mark.parametrize("option", ["--verify=always", "--scratch"])
def test_odd_datasets_say_the_same(mount: Mount, make_prepared: MakePrepared, tmp_path: Path, option: str) -> None:
    """Files and directories closed to their owner, and a name that the mount hides."""
    source = tmp_path / "source"
    for name in ("closed/inner", "unlisted/inner", ".fanstore/inner", "none", "large"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(incompressible(300_000, len(name)))
    for name, mode in (("none", 0), ("closed", 0o600), ("unlisted", 0o311)):
        (source / name).chmod(mode)
    mounted = mount(make_prepared(source), option, announced=["'.fanstore' is hidden"])
    programs = intercept(mounted, source)
    code = """if True:
        import os, sys
        os.chdir(sys.argv[1])
        def read(path): return open(path, "rb").read()
        def may_read(path): return os.access(path, os.R_OK)
        for path in ("none", "closed", "closed/inner", "unlisted", "unlisted/inner", ".fanstore/inner", "."):
            for call in (os.stat, os.listdir, read, may_read):
                try: print(path, call(path))
                except OSError as error: print(path, error.strerror)
    """
    programs.both_ways(sys.executable, "-c", code, mounted.path)
    programs.both_ways(compile_driver(tmp_path / "drive", (), ()), "say", mounted.path, "large")


_OTHER_LIBRARY = r"""/* Says that it was called, once, and passes it on. */
#include <dlfcn.h>
#include <stdio.h>
int close(int fd) {
    static int calls;
    if (calls++ == 0)
        dprintf(2, "seen\n");
    return ((int (*)(int))dlsym(RTLD_NEXT, "close"))(fd);
}
"""


@pytest.mark.parametrize("first", [True, False])
def test_another_preloaded_library_is_called(programs: Intercepted, tmp_path: Path, first: bool) -> None:
    source = (tmp_path / "other").with_suffix(".c")
    source.write_text(_OTHER_LIBRARY)
    other = str(compile_c(tmp_path / "other.so", ["-shared", "-fPIC", source], ()))
    libraries = f"{other}:{LIBRARY}" if first else f"{LIBRARY}:{other}"
    before = programs.counters()["opens"]
    result = programs.run("cat", programs.mounted.path / "small.txt", LD_PRELOAD=libraries)
    assert (result.stdout, result.stderr) == ("hello\nworld\n", "seen\n")
    assert programs.counters()["opens"] == before + 1


def test_python_says_the_same(programs: Intercepted) -> None:
    said, counted = programs.both_ways(sys.executable, HERE / "preload_program.py", programs.mounted.path)
    assert "--- make_mistakes" in said
    assert counted["opens"] > 32 * 10 and counted["bytes"] > 32 * 9_000_000
    for path in programs.source.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert str(path.stat().st_mtime_ns) in said


SCRIPT = """
cd "$1" || exit 1
cat a/one small.txt | sha256sum
cp -p a/two "$TMPDIR/copy" && cmp a/two "$TMPDIR/copy" && stat -c '%s %Y %a' "$TMPDIR/copy"
md5sum a/one a/b/large empty link hard
tar cf - --sort=name --mtime=@0 . | sha256sum
head -c 10 a/three | od -c; tail -c 10 a/three | od -c; dd if=a/b/large bs=7777 skip=3 count=2 status=none | sha256sum
{ read -r first; read -r second; } < small.txt; echo "$first, $second"
exec 5< small.txt; read -r -u 5 line; cat <&5; echo "$line"; exec 5<&-
while read -r word; do echo "$word"; done < small.txt
cat < a/one | wc -c; cat /dev/fd/6 6< small.txt; wc -l < small.txt; sort -r small.txt
grep -c hello small.txt; find . -type f | sort | xargs ls -ln; du -b a; diff a/one hard && echo same
python3 - < /dev/null; test -r a/one -a ! -e nothing && echo there
"""


def test_shells_and_their_programs_say_the_same(programs: Intercepted, tmp_path: Path) -> None:
    arguments = ("bash", "-c", SCRIPT, "bash", programs.mounted.path)
    said, counted = programs.both_ways(*arguments, TMPDIR=str(tmp_path))
    assert "hello, world" in said and "there" in said
    assert counted["opens"] > 10


def test_a_job_of_ordinary_commands(plain: Path, source: Path, tmp_path: Path) -> None:
    """fanstore-mount --preload -- COMMAND: as said on the command line, with the path as it was given."""
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    point = tmp_path / "alias" / "m"
    code = (
        f"import json, os; data = open({str(point / 'a' / 'two')!r}, 'rb').read();"
        "stats = json.load(open(os.environ['FANSTORE_MOUNT'] + '/.fanstore/stats.json'));"
        "print(len(data), stats['intercepted']['opens'], os.environ['FANSTORE_SIZE']); os._exit(7)"
    )
    result = command("mount", plain, point, "--preload", "--", sys.executable, "-c", code)
    assert (result.returncode, result.stdout) == (7, "207000 1 1\n"), result.stderr
    sentence = assert_one_error(command("mount", plain, point, "--preload"), "mount", 2)
    assert sentence.startswith("--preload is for a COMMAND, and there is none")


# --- what is read by whom ---


def test_a_staged_copy_was_checked_and_is_not_again(
    source: Path, plain: Path, mount: Mount, tmp_path: Path, driver: Path
) -> None:
    (tmp_path / "ssd").mkdir()
    mounted = mount(plain, local=tmp_path / "ssd")
    programs = intercept(mounted, source)
    _, counted = programs.both_ways(driver, "say", mounted.path, "a/two")
    assert counted["reads"] > 20
    state = Path(programs.variables["FANSTORE_PRELOAD_STATE"])
    assert not any((state / "marks").read_bytes())
    log = tmp_path / "log"
    programs.run("cat", mounted.path / "a" / "one", FANSTORE_PRELOAD_LOG=str(log))
    assert re.search(r"^\d+ open \S+/a/one \d+: answered$", log.read_text(), re.MULTILINE)


def test_chunks_are_checked_once_and_marked(programs: Intercepted, mount: Mount, plain: Path, source: Path) -> None:
    other = intercept(mount(plain), source)
    marks = Path(other.variables["FANSTORE_PRELOAD_STATE"]) / "marks"
    assert not any(marks.read_bytes())
    other.run("cat", other.mounted.path / "a" / "one")
    assert sum(marks.read_bytes()) == 1, "one file of one chunk, in the prepared file"
    other.run("tail", "-c", "1", other.mounted.path / "a" / "b" / "large")
    assert sum(marks.read_bytes()) == 2, "one chunk of three"


@pytest.mark.parametrize("way", ["map", "pread"])
def test_a_damaged_file_is_an_error_and_others_are_not(
    source: Path, mount: Mount, make_prepared: MakePrepared, way: str
) -> None:
    prepared = make_prepared(source, codec="none", partitions=2)
    partition = damage(prepared, "a/two")
    mounted = mount(prepared, announced=[f"cannot read 'a/two' from partition file {re.escape(str(partition))}: "])
    programs = intercept(mounted, source)
    code = (
        "import sys\nfor name in sys.argv[1:]:\n try: print(len(open(name, 'rb', 0).read()))\n"
        " except OSError as error: print(error.errno)"
    )
    names = [mounted.path / name for name in FILES]
    result = programs.run(sys.executable, "-c", code, *names, FANSTORE_PRELOAD_READ=way)
    assert result.stdout.split() == ["107000", str(errno.EIO), "307000", "9000001"], result.stderr
    assert mounted.statistics()["errors"]["damaged_files"] == 1
    assert programs.counters()["opens"] == 4


def test_outputs_are_the_mount_s_affair(source: Path, plain: Path, mount: Mount) -> None:
    mounted = mount(plain, "--scratch")
    programs = intercept(mounted, source)
    code = """if True:
        import os, sys
        os.chdir(sys.argv[1])
        before = os.stat("a").st_mtime_ns
        with open("a/new", "w+") as file:
            file.write("written"); file.flush(); file.seek(0)
            print(file.read(), os.path.getsize("a/new"))
        print(open("a/new").read(), os.stat("a").st_mtime_ns > before, "new" in os.listdir("a"))
        os.rename("a/new", "a/newer"); print(open("a/newer").read(), os.path.exists("a/new"))
        os.unlink("a/newer"); print(os.path.exists("a/newer"))
        for attempt in (lambda: open("a/one", "r+b"), lambda: os.rename("a/one", "x"), lambda: os.unlink("a/one")):
            try: attempt()
            except OSError as error: print(error.strerror)
        print(len(open("a/one", "rb").read()))
    """
    said, counted = programs.both_ways(sys.executable, "-c", code, mounted.path)
    assert said.count("Read-only file system") == 3 and said.endswith("107000\n")
    assert counted["opens"] == 1


def test_counters_survive_a_process_that_is_killed(programs: Intercepted) -> None:
    before = programs.counters()
    code = "import os, sys; open(sys.argv[1], 'rb').read(); os.kill(os.getpid(), 9)"
    result = programs.run(sys.executable, "-c", code, programs.mounted.path / "a" / "one")
    assert result.returncode == -signal.SIGKILL
    after = programs.counters()
    assert after["opens"] == before["opens"] + 1
    assert after["bytes"] == before["bytes"] + 107_000
    shown = command("stat", programs.mounted.path).stdout
    assert re.search(r"^intercepted +\S+ opens, ", shown, re.MULTILINE)


def test_each_node_reads_its_own_files(source: Path, tmp_path: Path, plain: Path) -> None:
    """Two ranks, a partition each, stored as they are: on this node in a file, on the other one in memory."""
    code = """if True:
        import hashlib, json, os, sys
        point = os.environ["FANSTORE_MOUNT"]
        for name in sys.argv[1:] * 3:
            print(name, hashlib.md5(open(f"{point}/{name}", "rb").read()).hexdigest())
        print("counted", json.load(open(f"{point}/.fanstore/stats.json"))["intercepted"]["opens"])
    """
    options = [
        "--local",
        str(tmp_path / "ssd{rank}"),
        "--stage-first",
        "--preload",
        "--",
        sys.executable,
        "-c",
        code,
        *FILES,
    ]
    result = run_fanstore("mount", plain, tmp_path / "m{rank}", *options, prefix=mpirun(2))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in FILES:
        digest = hashlib.md5((source / name).read_bytes()).hexdigest()
        assert lines.count(f"{name} {digest}") == 6
    counted = [int(line.split()[1]) for line in lines if line.startswith("counted")]
    assert counted == [3 * len(FILES)] * 2, "half of them in a file of its own, the rest from memory"


def test_a_copy_takes_over_while_a_program_reads(programs: Intercepted, plain: Path, tmp_path: Path) -> None:
    """As when staging ends: the program goes on with the copy, and checks it anew."""
    right = Path(programs.variables["FANSTORE_PRELOAD_STATE"])
    folder = tmp_path / "state"
    shutil.copytree(right, folder, ignore=shutil.ignore_patterns("placeholder", "marks"))
    os.mknod(folder / "placeholder", stat.S_IFSOCK | 0o600)
    (folder / "marks").write_bytes(bytes((right / "marks").stat().st_size))
    partitions = sorted(plain.glob("part-*.tar"))
    with open(folder / "state", "r+b") as state:
        for number, partition in enumerate(partitions):
            copy = shutil.copy(partition, tmp_path)
            state.seek(STATE_BYTES + number * PART_BYTES + 16 + 4096)
            state.write(os.fsencode(copy))
    code = """if True:
        import os, sys
        state, size, part = os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2]), int(sys.argv[3])
        def read(): return [len(open(sys.argv[4], "rb").read()) for _ in range(3)]
        print(read())
        for number in range(2): os.pwrite(state, (2).to_bytes(4, "little"), size + number * part)
        print(read())
    """
    arguments = (folder / "state", STATE_BYTES, PART_BYTES, programs.mounted.path / "a" / "one")
    before = marks_of(folder)
    result = programs.run(sys.executable, "-c", code, *map(str, arguments), FANSTORE_PRELOAD_STATE=str(folder))
    assert result.stdout == "[107000, 107000, 107000]\n" * 2, result.stderr
    assert (sum(before), sum(marks_of(folder))) == (0, 2), "found intact in the prepared file (1), then in the copy (2)"


def marks_of(state: Path) -> bytes:
    return (state / "marks").read_bytes()


# --- descriptors, threads, processes ---


def test_races(programs: Intercepted, driver: Path) -> None:
    result = programs.run(driver, "race", programs.mounted.path, programs.source, "3", *FILES)
    assert (result.returncode, result.stderr) == (0, "")
    assert programs.counters()["promotions"] > 0


def test_few_descriptors(programs: Intercepted, driver: Path) -> None:
    names = " ".join(str(programs.mounted.path / name) for name in FILES)
    said, counted = programs.both_ways("bash", "-c", f"ulimit -n 64; exec {driver} limit {names}")
    assert said == "error EMFILE\nopened enough\n"
    assert counted["opens"] > 50


def link_renamed(folder: Path, flags: Sequence[str], driver: str = "preload_drive.c") -> Path:
    """The driver and the library in one program, in which the library's functions have names of their own.

    A thread sanitizer calls open and its like before it is ready, and must find those of the C library.
    """
    exported = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True)
    names = [line.split()[2] for line in exported.stdout.splitlines()]
    renames = [f"--redefine-sym={name}=fsx_call_{name}" for name in names]
    objects = []
    for source in [*library_sources(), DRIVERS / driver]:
        made = compile_c(folder / f"{source.stem}.o", [*QUIET, "-c", source], flags)
        subprocess.run(["objcopy", *renames, made], check=True, timeout=LIMIT_S)
        objects.append(made)
    return compile_c(folder / "drive", [*objects, "-lpthread"], flags)


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_races_under_a_sanitizer(programs: Intercepted, tmp_path: Path, kind: str) -> None:
    if kind == "address":
        program = compile_driver(tmp_path / "drive", library_sources(), ADDRESS)
    else:
        program = link_renamed(tmp_path, THREADS)
    variables = {name: value for name, value in programs.variables.items() if name != "LD_PRELOAD"}
    before = programs.counters()["opens"]
    result = subprocess.run(
        [program, "race", programs.mounted.path, programs.source, "3", *FILES],
        env=ENVIRONMENT | variables | {"TSAN_OPTIONS": "die_after_fork=0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert programs.counters()["opens"] > before + 100


def test_local_files_stay_readable_when_the_daemon_dies(
    source: Path, plain: Path, mount: Mount, tmp_path: Path
) -> None:
    mounted = mount(plain)
    programs = intercept(mounted, source)
    code = """if True:
        import sys
        paths = [sys.argv[1] + "/" + name for name in sys.argv[2:]]
        print(sum(len(open(path, "rb").read()) for path in paths), flush=True)
        sys.stdin.read()
        print(sum(len(open(path, "rb").read()) for path in paths))
        try: open(sys.argv[1] + "/nothing")
        except OSError as error: print(error.strerror)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code, mounted.path, *FILES],
        env=os.environ | programs.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "9621001\n"
    config = json.loads((mounted.path / ".fanstore" / "config.json").read_bytes())
    mounted.signal(signal.SIGKILL)  # its supervisor, with which it dies
    mounted.process.wait(LIMIT_S)
    wait_until(lambda: not Path(f"/proc/{config['pid']}").exists(), "death of the daemon", mounted.evidence)
    said, _ = process.communicate("", timeout=LIMIT_S)
    assert said.splitlines() == ["9621001", "Transport endpoint is not connected"]
    shutil.rmtree(Path(config["job_directory"]))


def test_after_the_end_of_the_mount_there_is_nothing(source: Path, plain: Path, mount: Mount) -> None:
    mounted = mount(plain)
    programs = intercept(mounted, source)
    code = """if True:
        import sys
        kept = open(sys.argv[1] + "/a/one", "rb")
        print(len(kept.read()), flush=True)
        sys.stdin.read()
        kept.seek(0); print(len(kept.read()))
        try: open(sys.argv[1] + "/a/one")
        except OSError as error: print(error.strerror)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code, mounted.path],
        env=os.environ | programs.variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "107000\n"
    mounted.stop()
    said, _ = process.communicate("", timeout=LIMIT_S)
    assert said.splitlines() == ["107000", "No such file or directory"], "what is open stays readable"


# --- start, and what is odd ---


def test_anything_odd_at_the_start_is_one_line(programs: Intercepted, tmp_path: Path) -> None:
    one = programs.mounted.path / "a" / "one"
    right = Path(programs.variables["FANSTORE_PRELOAD_STATE"])

    def state(name: str, change: Callable[[bytearray], None]) -> Path:
        folder = tmp_path / name
        shutil.copytree(right, folder, ignore=shutil.ignore_patterns("placeholder"))
        content = bytearray((right / "state").read_bytes())
        change(content)
        (folder / "state").write_bytes(content)
        return folder

    def grow(content: bytearray) -> None:
        content[8:12] = b"\x09\0\0\0"

    def age(content: bytearray) -> None:
        content[8:12] = b"\x01\0\0\0"

    def spoil(content: bytearray) -> None:
        content[:4] = b"\0\0\0\0"

    def shorten(content: bytearray) -> None:
        del content[9000:]

    cases = {
        tmp_path / "nowhere": "there is no such directory",
        state("newer", grow): "another version of FanStore",
        state("older", age): "another version of FanStore",
        state("spoiled", spoil): "not the state of a mount",
        state("short", shorten): "too short",
        state("incomplete", lambda content: None): "No such file or directory",
    }
    before = programs.counters()["opens"]
    for folder, reason in cases.items():
        result = programs.run("cat", one, FANSTORE_PRELOAD_STATE=str(folder))
        assert (result.returncode, result.stderr.count("\n")) == (0, 1), folder
        assert result.stderr.startswith(f"libfanstore-io: {folder}: ") and reason in result.stderr
        assert len(result.stdout) > 100_000
    assert programs.run("cat", one, preloaded=False).stderr == ""
    assert programs.run("cat", one, FANSTORE_PRELOAD_STATE="").stderr == ""
    assert programs.counters()["opens"] == before


def test_the_library_needs_nothing_but_an_old_c_library() -> None:
    symbols = subprocess.run(["objdump", "-T", LIBRARY], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"UND.*GLIBC_([\d.]+)", symbols.stdout)}
    assert versions and max(versions) <= (2, 17)
    headers = subprocess.run(["objdump", "-p", LIBRARY], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert set(re.findall(r"NEEDED +(\S+)", headers.stdout)) <= {"libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}


def test_the_run_command(programs: Intercepted, tmp_path: Path) -> None:
    point = programs.mounted.path
    before = programs.counters()["opens"]
    code = "import sys; print(len(open(sys.argv[1], 'rb').read())); sys.exit(3)"
    result = command("run", point, "--", sys.executable, "-c", code, point / "a" / "one")
    assert (result.returncode, result.stdout, result.stderr) == (3, "107000\n", "")
    assert programs.counters()["opens"] == before + 1
    for arguments, code_, reason in (
        ((point, "--", "no-such-program"), 127, "command 'no-such-program' was not found"),
        ((point, "--", str(tmp_path)), 126, "cannot be started"),
        ((tmp_path, "--", "true"), 1, f"no FanStore dataset is mounted on {tmp_path}"),
        ((point,), 2, "which program?"),
        ((point, "cat", "x"), 2, f"as in: fanstore-run {point} -- cat x"),
    ):
        assert reason in assert_one_error(command("run", *arguments), "run", code_)


def test_other_preloaded_libraries_stay() -> None:
    assert environment("/s", {"LD_PRELOAD": "libx.so /y.so"})["LD_PRELOAD"] == f"libx.so:/y.so:{LIBRARY}"
    assert environment("/s", {"LD_PRELOAD": str(LIBRARY)})["LD_PRELOAD"] == str(LIBRARY)


def test_a_local_copy_is_not_replaced_by_the_prepared_file(tmp_path: Path) -> None:
    described = Described(1, 0, 0, 0, False, -1, [tmp_path], 1, 1, 1)
    state = PreloadState(tmp_path, memoryview(b"index"), described)
    state.use(0, 2, Path("/local"), verified=True)
    state.use(0, 1, Path("/prepared"), verified=False)
    content = (state.path / "state").read_bytes()
    assert b"/local" in content and b"/prepared" not in content
    state.end()
    state.use(0, 2, Path("/later"), verified=True)
    assert state.counters() == dict.fromkeys(COUNTERS, 0)


@contextlib.contextmanager
def home_of(uid: int, gid: int) -> Iterator[Path]:
    """A directory of somebody else, for a while."""
    path = Path(tempfile.mkdtemp(prefix="fanstore-preload-", dir="/tmp"))
    try:
        os.chown(path, uid, gid)
        yield path
    finally:
        shutil.rmtree(path)


@needs_root
def test_an_ordinary_user(plain: Path, driver: Path) -> None:
    """In a directory of their own, since the tests' is root's."""
    with account("p") as user, home_of(user.pw_uid, user.pw_gid) as home:
        shutil.copytree(plain, home / "d.fan")
        shutil.copy(driver, home / "drive")
        point = home / "m"
        script = (
            f"FANSTORE_PRELOAD=0 ./drive say {point} a/two > plain; ./drive say {point} a/two > own; cmp plain own && "
            f"""python3 -c "import json; print(json.load(open('{point}/.fanstore/stats.json'))['intercepted'])" """
        )
        chown = ["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(home)]
        subprocess.run(chown, check=True, timeout=LIMIT_S)
        mount_it = [fanstore_command("mount"), "d.fan", str(point), "--preload", "--", "sh", "-c", script]
        result = subprocess.run(
            [*prefix_of(user), *mount_it],
            cwd=home,
            env=os.environ | {"HOME": str(home), "TMPDIR": str(home)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert re.search(r"'opens': (\d\d)", result.stdout), result.stdout
