"""Which versions of everything are in use: for bug reports (``fanstore --version``) and for fanstore-doctor.

Every package is imported in a process of its own, with a limit: one that is missing, broken or crashes is a line of the
report, not the end of it. Any thread.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fanstore import DISTRIBUTION, __version__
from fanstore.doctor.finding import Finding, ok, warning, wrong
from fanstore.doctor.fuse import fusermount_version
from fanstore.doctor.programs import PYTHON, Programs, alone
from fanstore.transport.trial import TRIAL_MARK

_LIMIT_S = 30.0
#: Modules whose name is not that of their package.
_MODULES = {DISTRIBUTION: "fanstore._native"}
#: On PyPI another program, which brings modules of the same name as ours; pip cannot know that they conflict.
_NAMESAKE = "fanstore"

# In a process of its own: the first argument is JSON, {package: module}. Prints JSON, {package: error or ""}, and the
# version of libfuse, which only the loaded library knows.
_IMPORTER = """
import ctypes, importlib, json, sys
errors, libfuse = {}, ""
for package, module in json.loads(sys.argv[1]).items():
    try:
        importlib.import_module(module)
        errors[package] = ""
    except Exception as error:
        errors[package] = f"{type(error).__name__}: {error}"
for line in open("/proc/self/maps"):
    path = line.rstrip("\\n").partition("/")[2]
    if "libfuse3" in path.rpartition("/")[2]:
        library = ctypes.CDLL("/" + path)
        library.fuse_pkgversion.restype = ctypes.c_char_p
        libfuse = library.fuse_pkgversion().decode()
        break
print(json.dumps([errors, libfuse]))
"""


@dataclass(frozen=True)
class Packages:
    """What is installed.

    Attributes:
        versions: by package; None if it is not installed. least: by package, the oldest that will do.
        errors: by package, why it cannot be imported; empty if it can.
        libfuse: version of the library that pyfuse3 uses; empty if unknown.
        namesake: version of the other program whose modules are called fanstore; None if it is not installed.
    """

    versions: dict[str, str | None]
    least: dict[str, str]
    errors: dict[str, str]
    libfuse: str
    namesake: str | None


def look_at_packages(programs: Programs) -> Packages:
    """All that FanStore needs to run, without extras."""
    least = {DISTRIBUTION: "0"} | dict(_requirements())
    versions = {package: _installed(package) for package in least}
    namesake = _installed(_NAMESAKE)
    modules = {package: _MODULES.get(package, package) for package in least}
    ended = programs.run([*PYTHON, "-c", _IMPORTER, json.dumps(modules)], _LIMIT_S)
    if ended.code != 0:
        reason = f"no answer within {_LIMIT_S:g} s" if ended.code is None else ended.said
        return Packages(versions, least, dict.fromkeys(least, reason), "", namesake)
    errors, libfuse = json.loads(ended.out)
    return Packages(versions, least, errors, libfuse, namesake)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str]]:
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*>=\s*([\d.]+)", text)  # extras have a condition behind it
        if match is not None:
            yield match[1], match[2]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_packages(packages: Packages) -> Iterator[Finding]:
    """Python and what it needs."""
    yield ok("python.version", f"Python {platform.python_version()} ({sys.executable})")
    good = []
    for package, version in packages.versions.items():
        name = f"python.{package}"
        if package == DISTRIBUTION:
            continue  # its C part has a line of its own
        if version is None:
            yield wrong(
                name,
                f"the package {package} is not installed",
                f"run: {sys.executable} -m pip install '{package}>={packages.least[package]}'",
            )
        elif packages.errors[package]:
            yield wrong(
                name,
                f"{package} {version} cannot be loaded ({packages.errors[package]})",
                f"run: {sys.executable} -m pip install --force-reinstall {package}",
            )
        elif _numbers(version) < _numbers(packages.least[package]):
            yield warning(
                name,
                f"{package} {version} is older than {packages.least[package]}",
                f"run: {sys.executable} -m pip install --upgrade {package}",
            )
        else:
            good.append(f"{package} {version}")
    if packages.libfuse:
        good.append(f"libfuse {packages.libfuse}")
    yield ok("python.packages", ", ".join(good))
    if packages.namesake is not None:
        yield warning(
            f"python.{_NAMESAKE}",
            f"the package {_NAMESAKE} {packages.namesake} is installed, too: another program, whose modules have the "
            f"same names as those of {DISTRIBUTION}",
            f"run: {sys.executable} -m pip uninstall {_NAMESAKE}, and install {DISTRIBUTION} again",
        )


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library of this environment; ``error`` if there is none that can be loaded."""

    library: str = ""
    mpi4py: str = ""
    error: str = ""

    @property
    def title(self) -> str:
        """Such as ``Open MPI v5.0.11``: the first part of what may be many lines."""
        return re.split(r"[,\n]", self.library)[0].strip()


def look_at_mpi(programs: Programs, limit_s: float = _LIMIT_S) -> MpiLibrary:
    """Loads the library in a process of its own."""
    ended = programs.run([*PYTHON, "-m", "fanstore.transport.trial", "--library"], limit_s, alone(os.environ))
    if ended.code is None:
        return MpiLibrary(error=f"no answer within {limit_s:g} s")
    answer = trial_answer(ended.out)
    if answer is None:
        return MpiLibrary(error=ended.said)
    return MpiLibrary(**answer)


def trial_answer(text: str) -> dict[str, Any] | None:
    """What the trial program has printed, among whatever else was."""
    for line in text.splitlines():
        _, mark, answer = line.partition(TRIAL_MARK)
        if mark:
            parsed: dict[str, Any] = json.loads(answer)
            return parsed
    return None


def report(programs: Programs) -> str:
    """What a bug report needs, one line each."""
    packages = look_at_packages(programs)
    error = packages.errors[DISTRIBUTION]
    mpi = look_at_mpi(programs)
    mpi_text = f"not available ({mpi.error})" if mpi.error else f"{mpi.title}, mpi4py {mpi.mpi4py}"
    pyfuse3 = packages.versions.get("pyfuse3") or "not installed"
    if packages.errors.get("pyfuse3"):
        pyfuse3 += f", cannot be loaded ({packages.errors['pyfuse3']})"
    others = ", ".join(
        f"{name} {version or 'not installed'}"
        for name, version in packages.versions.items()
        if name not in (DISTRIBUTION, "pyfuse3")
    )
    lines = {
        "FanStore": __version__,
        "engine": f"python only: the native one cannot be loaded ({error})" if error else "native",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "packages": others,
        "pyfuse3": f"{pyfuse3}, libfuse {packages.libfuse or 'unknown'}",
        "fusermount3": fusermount_version(programs) or "not found",
        "MPI": mpi_text,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "system": f"{_system()}, {' '.join(platform.libc_ver())}",
    }
    width = max(map(len, lines)) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in lines.items())


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return "unknown distribution"
