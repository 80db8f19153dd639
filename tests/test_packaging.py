"""Recipes of other package managers (packaging/): that they say what pyproject.toml says.

Neither Spack nor conda can be had from PyPI or Debian: that the recipes build was not tried.
"""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from fanstore import DISTRIBUTION, __version__

ROOT = Path(__file__).parent.parent
SPACK = ROOT / "packaging" / "spack" / "spack_repo" / "fanstore"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Names that conda-forge has for what PyPI calls otherwise.
CONDA_NAMES = {"msgpack-python": "msgpack", "python-xxhash": "xxhash"}


def least_versions(requirements: list[str]) -> dict[str, str]:
    found = dict(requirement.split(">=") for requirement in requirements)
    assert found
    return found


NEEDED = least_versions(PROJECT["project"]["dependencies"])
MPI = least_versions(PROJECT["project"]["optional-dependencies"]["mpi"])
TO_BUILD = least_versions(PROJECT["build-system"]["requires"])


def calls(path: Path) -> dict[str, list[str]]:
    """By function, the first arguments of all calls in a recipe for Spack."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(first)), *_]):
                found.setdefault(name, []).append(first)
    return found


def test_versions_are_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == __version__
    assert PROJECT["project"]["name"] == DISTRIBUTION


def test_spack() -> None:
    found = calls(SPACK / "packages" / "fanstore" / "package.py")
    assert found["version"] == [__version__]
    depends = dict(name.removesuffix(":").partition("@")[::2] for name in found["depends_on"])
    python = {name.removeprefix("py-"): version for name, version in depends.items() if name.startswith("py-")}
    assert python | {"openmpi": depends["openmpi"]} == NEEDED | MPI | TO_BUILD
    assert f">={depends['python']}" == PROJECT["project"]["requires-python"]
    assert {"c", "cmake", "pkgconfig", "lz4", "zstd", "xxhash"} <= set(depends)
    assert yaml.safe_load((SPACK / "repo.yaml").read_text())["repo"]["namespace"] == SPACK.name


def test_what_spack_does_not_have() -> None:
    """Its name is that of the folder, its version one that FanStore can use, and comes with a checksum."""
    for path in sorted(SPACK.glob("packages/py_*/package.py")):
        name = path.parent.name.removeprefix("py_")
        (version,) = calls(path)["version"]
        least = tuple(map(int, NEEDED[name].split(".")))
        assert tuple(map(int, version.split(".")[: len(least)])) >= least
        text = path.read_text()
        assert f'pypi = "{name}/{name}-{version}.tar.gz"' in text
        assert f"class Py{name.capitalize()}(PythonPackage):" in text
        assert re.search(r'sha256="[0-9a-f]{64}"\)', text)


def test_conda() -> None:
    text = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    plain = re.sub(r"^{%.*%}$", "", text, flags=re.MULTILINE).replace("{{ version }}", __version__)
    recipe = yaml.safe_load(re.sub(r"{{(.*?)}}", lambda found: re.sub(r"\W", "", found[1]), plain))
    assert f'{{% set version = "{__version__}" %}}' in text
    assert recipe["package"] == {"name": DISTRIBUTION, "version": __version__}

    def versions(part: str) -> dict[str, str]:
        pairs = (item.partition(" >=")[::2] for item in recipe["requirements"][part] if " >=" in item)
        return {CONDA_NAMES.get(name, name): version for name, version in pairs}

    assert versions("run") == NEEDED | MPI
    assert versions("host") == TO_BUILD
    assert f"py<{PROJECT['project']['requires-python'].removeprefix('>=').replace('.', '')}]" in text
