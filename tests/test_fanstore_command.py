"""The command ``fanstore``: other commands by another name, versions for a bug report, completion in real shells."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import BIN, LIMIT_S
from conftest import fanstore_command
from terminals import on_terminal

from fanstore import __version__
from fanstore.cli.fanstore import COMMANDS, parsers


def fanstore(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "fanstore", *arguments], capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | environment
    )


# --- the same as the others ---


@pytest.mark.parametrize("name", COMMANDS)
def test_is_the_same_command(name: str) -> None:
    assert fanstore(name, "--version").stdout == f"fanstore-{name} {__version__}\n"
    wrong = fanstore(name, "--no-such-thing")
    assert wrong.returncode == 2 and wrong.stderr.startswith(f"fanstore-{name}: error: there is no option ")


def test_help_is_the_same() -> None:
    one = fanstore("prep", "--help")
    other = subprocess.run([fanstore_command("prep"), "--help"], capture_output=True, text=True, timeout=LIMIT_S)
    assert (one.returncode, one.stdout, one.stderr) == (0, other.stdout, "")


def test_arguments_and_exit_code_are_passed_on(tmp_path: Path) -> None:
    source, prepared = tmp_path / "source", tmp_path / "d.fan"
    source.mkdir()
    (source / "file").write_text("content")
    assert fanstore("prep", source, prepared).returncode == 0
    assert fanstore("verify", prepared, "--against", source).returncode == 0
    (source / "file").write_text("other..")
    assert fanstore("verify", prepared, "--against", source).returncode == 1
    result = fanstore("umount", tmp_path / "nothing")
    assert (result.returncode, result.stderr) == (1, f"fanstore-umount: error: {tmp_path}/nothing does not exist\n")


def test_launch_starts_the_command_of_its_own_name() -> None:
    """What a launcher starts on other nodes is fanstore-mount, whatever name it was called by here."""
    result = fanstore("mount", "d.fan", "m", "--launch", "echo", "--", "true")
    assert result.stdout == f"{BIN}/fanstore-mount --success - d.fan m -- true\n"
    assert result.returncode == 1, "echo proves nothing"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"], ["completion", "fish"]])
def test_wrong_usage(arguments: list[str]) -> None:
    result = fanstore(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("fanstore: error: " if arguments else "usage: fanstore ") and result.stdout == ""


# --- versions ---


def versions(**environment: str) -> dict[str, str]:
    result = fanstore("--version", **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in result.stdout.splitlines()}


def test_versions() -> None:
    found = versions()
    assert {"FanStore", "engine", "Python", "packages", "pyfuse3", "fusermount3", "MPI", "kernel"} < set(found)
    assert found["FanStore"] == __version__
    assert found["engine"] == "native"
    assert found["kernel"].startswith(f"Linux {os.uname().release} ")
    assert "trio " in found["packages"] and "not installed" not in found["packages"]
    assert ", libfuse 3." in found["pyfuse3"]


def test_versions_of_what_is_broken(tmp_path: Path) -> None:
    """A bug report is wanted most of all where something does not even load."""
    for name in ("pyfuse3", "mpi4py"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} today')\n")
    found = versions(PYTHONPATH=str(tmp_path))
    assert "cannot be loaded (ImportError: no pyfuse3 today)" in found["pyfuse3"]
    assert found["MPI"] == "not available (no mpi4py today)"


# --- completion ---


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return completion("bash", tmp_path_factory.mktemp("bash"))


def completion(shell: str, directory: Path) -> Path:
    result = fanstore("completion", shell)
    assert (result.returncode, result.stderr) == (0, "")
    path = directory / f"completion.{shell}"
    path.write_text(result.stdout)
    return path


def completed(script: Path, *words: str, cwd: Path | None = None) -> list[str]:
    """What bash offers for the last word."""
    code = '. "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _fanstore "$1"; printf "%s\\n" "${COMPREPLY[@]}"'
    result = subprocess.run(
        ["bash", "--norc", "-c", code, script, *words], capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd
    )
    assert (result.returncode, result.stderr) == (0, "")
    return sorted(set(result.stdout.split()))  # a program may be on PATH twice


def test_bash_offers_all_options_of_all_commands(bash_script: Path) -> None:
    for program, parser in parsers().items():
        options = {option for action in parser._actions for option in action.option_strings if option[:2] == "--"}
        extra = {"--"} if program == "fanstore-mount" else set()
        assert set(completed(bash_script, program, "--")) == options | extra
        if program != "fanstore":
            name = program.removeprefix("fanstore-")
            assert set(completed(bash_script, "fanstore", name, "--")) == options | extra


def test_bash_offers_values(bash_script: Path, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "document").touch()
    offer = [
        (["fanstore", "mo"], ["mount"]),
        (["fanstore", "completion", ""], ["bash", "zsh"]),
        (["fanstore-mount", "--verify", ""], ["always", "first", "never"]),
        (["fanstore-mount", "--verify", "=", "al"], ["always"]),
        (["fanstore", "prep", "--codec", "lz4"], ["lz4", "lz4hc"]),
        (["fanstore-mount", "--local", "d"], ["directory"]),
        (["fanstore-mount", "--log", "d"], ["directory", "document"]),
        (["fanstore-mount", "--order", "ho"], ["hook"]),
        (["fanstore-mount", "--order", "d"], ["directory", "document"]),
        (["fanstore-mount", "d"], ["directory"]),
        (["fanstore-prep", "d"], ["directory", "document"]),
        (["fanstore-mount", "--cache", ""], []),
        (["fanstore-plan", "simu"], ["simulate"]),
        (["fanstore", "plan", "simu"], ["simulate"]),
        (["fanstore", "plan", "simulate", "--mode", ""], ["corrected", "published"]),
        (["fanstore-plan", "simulate", "--jso"], ["--json"]),
        (["fanstore-plan", "simulate", "--scenario", "d"], ["directory", "document"]),
        (["fanstore-mount", "x", "y", "--", "shutd"], ["shutdown"] if shutil.which("shutdown") else []),
        (["fanstore-mount", "x", "y", "--", "cat", "doc"], ["document"]),
    ]
    for words, wanted in offer:
        assert completed(bash_script, *words, cwd=tmp_path) == wanted, words


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_in_a_real_shell(shell: str, tmp_path: Path) -> None:
    """Typed on a terminal, with the tabulator: what the user gets."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not there")
    script = completion(shell, tmp_path)
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "dumb", "PS1": "> "}
    with on_terminal([program, "--norc" if shell == "bash" else "-f", "-i"], environment) as terminal:
        if shell == "zsh":
            terminal.type("unsetopt prompt_cr prompt_sp zle_bracketed_paste; autoload -U compinit; compinit -D -u\n")
        terminal.type(f". {script}; echo rea''dy\n")
        terminal.wait_for("ready")
        for typed, result in [
            ("fanstore-mount --stage\t", "--stage-first"),
            ("fanstore-mount --engine na\t", "native"),
            ("fanstore ver\t", "verify"),
            ("fanstore verify --aga\t", "--against"),
            ("fanstore completion zs\t", "zsh"),
            ("fanstore plan simulate --mode corr\t", "corrected"),
            ("fanstore-plan simulate --scen\t", "--scenario"),
        ]:
            terminal.type(typed)
            terminal.wait_for(result)
            terminal.type("\x15")  # the line is not run but deleted
        terminal.type("exit\n")
