"""The order hook in programs' interpreters: what it leaves alone, and what it reports of real DataLoaders on a mount.

Those with torch need FANSTORE_TEST_FRAMEWORKS (see test_order_frameworks.py); the programs are in hooked_programs.py.
"""

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import fanstore_command
from mounting import Mount, Mounted, needs_fuse, prepare, wait_until
from oddities import compressible

from fanstore.client.hooking import DIRECTORY, hook_environment

pytest_plugins = ["mounting"]

FILES = 240
FRAMEWORKS = os.environ.get("FANSTORE_TEST_FRAMEWORKS", "")
PROGRAMS = Path(__file__).with_name("hooked_programs.py")
needs_torch = pytest.mark.skipif(not FRAMEWORKS, reason="frameworks are installed by scripts/test --all")
LIMIT_S = 120.0


# --- any program ---


def run(code: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def hooked(**inherited: str) -> dict[str, str]:
    return hook_environment("/nowhere/control", inherited) | {"FANSTORE_MOUNT": "/nowhere"}


def test_a_program_without_torch_is_left_alone() -> None:
    """It finds what it would find: the same modules, the same paths, and nobody at work."""
    code = "import json, sys; print(json.dumps([sorted(sys.modules), sys.path]))"
    plain, with_hook = run(code), run(code, **hooked())
    modules, paths = json.loads(plain.stdout)
    hooked_modules, hooked_paths = json.loads(with_hook.stdout)
    assert (with_hook.returncode, with_hook.stderr) == (0, "")
    assert set(hooked_modules) - set(modules) <= {"sitecustomize"} and hooked_paths == paths


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_flags_that_keep_it_out(flag: str) -> None:
    done = run("import sys; print('sitecustomize' in sys.modules, [type(f).__name__ for f in sys.meta_path])", flag)
    hooked_too = run(
        "import sys; print('sitecustomize' in sys.modules, [type(f).__name__ for f in sys.meta_path])",
        flag,
        **hooked(),
    )
    assert (hooked_too.stdout, hooked_too.stderr) == (done.stdout, "")


@pytest.mark.parametrize(
    "hidden",
    [
        "print('hidden', __name__, __file__[-22:])",
        "raise ValueError('of its own')",
        "import a_module_that_is_not_there",
        "import sys; sys.exit(3)",
    ],
)
def test_the_sitecustomize_that_it_hides(tmp_path: Path, hidden: str) -> None:
    """Runs as if there were no other; whatever it does is what happens."""
    (tmp_path / "sitecustomize.py").write_text(hidden)
    code = "import sys; print(sys.modules['sitecustomize'].__file__ if 'sitecustomize' in sys.modules else None)"
    plain = run(code, PYTHONPATH=str(tmp_path))
    with_hook = run(code, **hooked(PYTHONPATH=str(tmp_path)))
    said = (plain.returncode, plain.stdout, plain.stderr.splitlines()[-1:])
    assert (with_hook.returncode, with_hook.stdout, with_hook.stderr.splitlines()[-1:]) == said


def test_children_have_it_and_their_own_paths() -> None:
    code = (
        "import subprocess, sys\n"
        "child = 'import sys; print([type(f).__name__ for f in sys.meta_path][0], sys.path)'\n"
        "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout)"
    )
    said = run(code, **hooked()).stdout
    assert said.startswith("_Finder") and str(DIRECTORY) not in said


def test_the_environment() -> None:
    made = hook_environment("/j/control", {"PYTHONPATH": f"/a::{DIRECTORY}:/b"})
    assert made == {"PYTHONPATH": f"{DIRECTORY}:/a::/b", "FANSTORE_ORDER_SOCKET": "/j/control"}
    assert hook_environment("/j/control", {"PYTHONPATH": ""})["PYTHONPATH"] == str(DIRECTORY)


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.py")), ids=lambda path: path.name)
def test_it_needs_python_3_8_and_its_library(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported and {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_nothing_else_lies_in_its_directory() -> None:
    """A program would import it in place of a module of its own."""
    found = {path.name for path in DIRECTORY.iterdir() if path.name != "__pycache__"}
    assert found == {"sitecustomize.py", "fanstore_order_hook.py"}


# --- programs with torch ---


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hooked") / "source"
    for number in range(FILES):
        path = root / "train" / f"class{number % 4}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(9000 + number, number))
    for number in range(40):
        path = root / "val" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(compressible(5000 + number, 1000 + number))
    return prepare(root, tmp_path_factory.mktemp("prepared") / "d.fan", "--codec", "lz4", "--partitions", "2")


def order(mounted: Mounted) -> dict[str, Any]:
    section: dict[str, Any] = mounted.statistics()["order"]
    return section


def variables(mounted: Mounted) -> Mapping[str, str]:
    config = json.loads((mounted.path / ".fanstore/config.json").read_bytes())
    return {**os.environ, **hook_environment(config["control_socket"], os.environ), "FANSTORE_MOUNT": str(mounted.path)}


class Program:
    """One of hooked_programs.py, which waits before each epoch until it is told to go on."""

    def __init__(self, name: str, mounted: Mounted, *arguments: str, environment: Mapping[str, str] | None) -> None:
        self.mounted = mounted
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [FRAMEWORKS, PROGRAMS, name, mounted.path, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, word: str) -> None:
        """Let it go on until it says a line that begins like this."""
        assert self.process.stdin is not None and self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"{self.said}\n{self.mounted.evidence()}"
            self.said.append(line)
            if line.startswith(word):
                return
            self.go_on()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> list[str]:
        """All that it has said, when it has ended."""
        out, _ = self.process.communicate("\n" * 100, timeout=LIMIT_S)
        assert self.process.returncode == 0, out
        return [*self.said, *out.splitlines(keepends=True)]


Start = Callable[..., Program]


@pytest.fixture
def start() -> Any:
    """Start a program; none is left."""
    programs: list[Program] = []

    def make(name: str, mounted: Mounted, *arguments: str, hook: bool = True) -> Program:
        programs.append(Program(name, mounted, *arguments, environment=variables(mounted) if hook else None))
        return programs[-1]

    yield make
    for program in programs:
        program.process.kill()
        program.process.communicate()


def until(mounted: Mounted, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    wait_until(lambda: condition(order(mounted)), what, lambda: f"{order(mounted)}\n{mounted.evidence()}")
    return order(mounted)


CASES: Sequence[tuple[str, str, int | None]] = [
    ("random", "RandomSampler", 11),
    ("own", "RandomSampler", 5),
    ("distributed", "DistributedSampler", 17),
    ("weighted", "WeightedRandomSampler", None),
    ("subset", "SubsetRandomSampler", None),
    ("learned", "RandomSampler", 11),
    ("spawn", "SequentialSampler", None),
]
#: Those of which the third epoch is known before it begins; of others it is a matter of time.
PREDICTED = ("random", "own", "distributed", "learned", "spawn")


@needs_fuse
@needs_torch
def test_what_each_sampler_reads_is_known(mount: Mount, prepared: Path, start: Start) -> None:
    """One program with one loader after the other, three epochs of each; all of it as without the hook."""
    mounted = mount(prepared, "--order", "hook")
    program = start("samplers", mounted)
    for case, sampler, seed in CASES:
        program.until(f"{case} 1")
        before = until(mounted, lambda now, sampler=sampler: now["sampler"] == sampler, f"the second epoch of {case}")  # type: ignore[misc]
        program.go_on()
        program.until(f"{case} 2")
        last = 17 if case == "distributed" else 2
        now = until(mounted, lambda now, last=last: now["epoch"] == last, f"the third epoch of {case}")  # type: ignore[misc]
        assert (now["source"], now["sampler"], now["seed"]) == ("hooked", sampler, seed)
        if case in PREDICTED:
            least = before["predicted"] + 40
            until(mounted, lambda now, least=least: now["predicted"] >= least, f"predictions of {case}")  # type: ignore[misc]
        program.go_on()
    said = program.end()
    assert said == start("samplers", mount(prepared, "--order", "off"), hook=False).end()
    assert order(mounted)["files"] > FILES and "reports its order: DistributedSampler, seed 17" in mounted.log_text()


DDP = (FRAMEWORKS, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAMS))


def run_to_end(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)


@needs_fuse
@needs_torch
def test_two_ranks_with_two_workers(prepared: Path, tmp_path: Path) -> None:
    """DDP under torchrun as COMMAND, with a validation set: the loss is the same to the last digit."""
    said = {}
    for word in ("hook", "off"):
        point = tmp_path / word
        options = ["--order", word, "--log", str(tmp_path / f"{word}.log")]
        mounted = [fanstore_command("mount"), str(prepared), str(point), *options, "--"]
        done = run_to_end([*mounted, *DDP, "ddp", str(point)])
        assert done.returncode == 0, done.stderr
        said[word] = [line for line in done.stdout.splitlines() if not line.startswith("{")]
        if word == "hook":
            (now,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert len(said["hook"]) == 6 and sorted(said["hook"]) == sorted(said["off"])
    assert now["source"] == "hooked" and now["sampler"] in ("DistributedSampler", "SequentialSampler")
    assert now["predicted"] > 0
    log = (tmp_path / "hook.log").read_text()
    assert log.count("reports its order: DistributedSampler, seed 0") == 2


@needs_fuse
@needs_torch
def test_two_programs_of_which_one_is_killed(mount: Mount, prepared: Path, start: Start) -> None:
    """Each has its own order; when one dies in the middle of an epoch, nothing is expected of it any more."""
    mounted = mount(prepared, "--order", "hook")
    programs = [start("endless", mounted, seed) for seed in ("1", "2")]
    for program in programs:
        program.until("middle")
    until(mounted, lambda now: now["streams"] == 2, "that both are followed")
    programs[0].process.send_signal(signal.SIGKILL)
    until(mounted, lambda now: now["streams"] == 1, "that one is gone")
    before = order(mounted)
    programs[1].go_on()
    programs[1].until("middle")
    programs[1].go_on()
    programs[1].until("middle")
    least = before["predicted"] + FILES // 2
    now = until(mounted, lambda now: now["predicted"] >= least, "that it has gone on as predicted")
    assert now["seed"] == 2
    wait_until(lambda: mounted.statistics()["control"]["clients"] == 1, "that one is connected", mounted.evidence)


@needs_fuse
@needs_torch
def test_a_program_that_forks(mount: Mount, prepared: Path, start: Start) -> None:
    """Parent and child go on in a loader of the parent, then through loaders of their own, which each reports."""
    mounted = mount(prepared, "--order", "hook")
    said = start("forks", mounted).end()
    assert said == start("forks", mount(prepared, "--order", "off"), hook=False).end()
    now = until(mounted, lambda now: now["files"] >= 2 * FILES, "that all was seen")
    assert now["source"] == "hooked" and now["predicted"] > 0
    wait_until(lambda: mounted.log_text().count("reports its order") == 3, "three reports", mounted.evidence)


@needs_fuse
@needs_torch
def test_a_daemon_that_goes_away(mount: Mount, prepared: Path, start: Start, tmp_path: Path) -> None:
    """The program reads elsewhere then, and does not notice."""
    mounted = mount(prepared, "--order", "hook")
    program = start("elsewhere", mounted)
    program.until("begun")
    until(mounted, lambda now: now["source"] == "hooked", "that it has reported")
    mounted.stop()
    program.go_on()
    assert program.end()[-1] == "through 240\n"


@needs_fuse
@needs_torch
def test_an_intercepted_program_says_where_it_is(tmp_path: Path) -> None:
    """Nothing that it reads is seen; its epoch is known all the same."""
    point, root = tmp_path / "mount", tmp_path / "source" / "train"
    root.mkdir(parents=True)
    for number in range(40):
        (root / f"{number}.jpg").write_bytes(os.urandom(5000))
    prepared = prepare(root.parent, tmp_path / "d.fan")
    options = ["--order", "hook", "--preload", "--log", str(tmp_path / "log")]
    mounted = [fanstore_command("mount"), str(prepared), str(point), *options, "--"]
    done = run_to_end([*mounted, FRAMEWORKS, str(PROGRAMS), "intercepted", str(point)])
    assert done.returncode == 0, done.stderr
    before, now = (json.loads(line) for line in done.stdout.splitlines())
    assert (before["source"], before["epoch"], now["epoch"]) == ("hooked", 0, 1)
    assert now["files"] < 40
