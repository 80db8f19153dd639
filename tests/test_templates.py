"""The job templates in scripts/: they parse, use options that exist, and do what they say on a machine of one node."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import MakePrepared
from mounting import needs_fuse
from templates import PBS, SCRIPTS, SLURM, with_values

from fanstore.cli.mount import _parser

SHELL_TEMPLATES = [SLURM, PBS]
KUBERNETES = SCRIPTS / "kubernetes-mpijob.yaml"
LAUNCHER = "--with-ft ulfm --map-by ppr:1:node --bind-to none"


def name(path: Path) -> str:
    return path.name


def commands(template: Path) -> list[list[str]]:
    """The words of every fanstore-mount in a template, those in comments included, up to the COMMAND."""
    lines = [line.removeprefix("#").strip() for line in template.read_text().splitlines()]
    text = "\n".join(lines).replace("\\\n", " ")
    if template == KUBERNETES:  # one word per line
        text = re.sub(r"\n- +(\S+)", r" \1", text).replace('"', "")
    found = re.findall(r'fanstore-mount"? ([^\n]*)', text)
    return [re.sub(r"--launch (['\"]).*?\1", "--launch x", line).partition(" -- ")[0].split() for line in found]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("template", [*SHELL_TEMPLATES, KUBERNETES], ids=name)
def test_template_is_short_and_says_what_to_change(template: Path) -> None:
    text = template.read_text()
    assert len(text.splitlines()) < 90
    assert "Change " in text.split("\n\n")[0]
    words = re.sub(r"\n *- +", " ", text)
    assert LAUNCHER in words
    assert "--background" in words and "--launch" in words


@pytest.mark.parametrize("template", [*SHELL_TEMPLATES, KUBERNETES], ids=name)
def test_options_exist(template: Path) -> None:
    found = commands(template)
    assert found
    used = {word for command in found for word in command if word.startswith("--")}
    assert {"--local", "--replicas"} <= used
    assert used <= options_of(_parser())


@pytest.mark.parametrize("template", SHELL_TEMPLATES, ids=name)
def test_shell_template_parses(template: Path) -> None:
    assert template.read_text().startswith("#!/bin/bash\n#")
    subprocess.run(["bash", "-n", template], check=True, timeout=60)
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", template], capture_output=True, text=True, timeout=60)
        assert checked.returncode == 0, checked.stdout


def test_kubernetes_template_is_yaml() -> None:
    job = yaml.safe_load(KUBERNETES.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    command = launcher["template"]["spec"]["containers"][0]["command"]
    assert all(isinstance(word, str) for word in command), "Kubernetes refuses numbers there"
    mounts = worker["template"]["spec"]["containers"][0]["volumeMounts"]
    assert command[command.index("--local") + 1] in [mount["mountPath"] for mount in mounts]


@needs_fuse
@pytest.mark.parametrize("background", [False, True], ids=["command", "background"])
@pytest.mark.parametrize("template", SHELL_TEMPLATES, ids=name)
def test_template_runs(template: Path, background: bool, tmp_path: Path, make_prepared: MakePrepared) -> None:
    """On the one node that there is here; the exit code is that of the program."""
    pytest.importorskip("mpi4py")
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("content")
    mount, ssd, train = tmp_path / "mount", tmp_path / "ssd", tmp_path / "train.sh"
    train.write_text(f"#!/bin/sh\ncat {mount}/file >{tmp_path}/seen\nexit 7\n")
    train.chmod(0o755)
    (tmp_path / "nodes").write_text("localhost\n")
    values = {
        "fanstore": str(Path(sys.executable).parent),
        "prepared": str(make_prepared(source, quiet=True)),
        "mount": str(mount),
        "ssd": str(ssd),
        "train": str(train),
    }
    if template == SLURM:
        values["output"] = str(tmp_path / "run")
    text = with_values(template, values, background)
    if background:  # there is no such launcher here
        text, count = re.subn(r"^(FANSTORE_MOUNT=\S+ srun|mpiexec) .*$", r'"$train"', text, flags=re.MULTILINE)
        assert count == 1
    script = tmp_path / "job"
    script.write_text(text)
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
    result = subprocess.run(
        ["bash", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 7, result.stdout + result.stderr
    assert (tmp_path / "seen").read_text() == "content"
    assert not mount.exists() and not ssd.exists()
