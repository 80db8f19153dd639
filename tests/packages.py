"""Programs that some tests use and the product does not: ``python tests/packages.py`` installs what is missing.

Owns the list. Called by scripts/test. Without root or apt-get, or if it fails, it says so and leaves it at that: the
tests that need something skip themselves and say what. With ``--required`` the exit code is then 1.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: Program and Debian package.
PACKAGES = {
    "chromium": "chromium",  # the job report in a real browser
    "slurmctld": "slurmctld",  # jobs under a real Slurm: tests/slurm_cluster.py
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "mandoc": "mandoc",  # manual pages
    "man": "man-db",
    "zsh": "zsh",  # completion
    "nginx": "nginx-light",  # datasets over HTTP: tests/object_servers.py
    "rsync": "rsync",  # onto outputs
    "strace": "strace",  # system calls counted, delayed and made to fail
    "dpkg-source": "dpkg-dev",  # scripts/bundle
    "jemalloc-config": "libjemalloc-dev",  # beside the preloaded library
    "valgrind": "valgrind",  # memory of the native engine
}
LIMIT_S = 240.0
#: Debian's way to say that no service may be started: tests start their own daemons.
POLICY = Path("/usr/sbin/policy-rc.d")


def install(packages: list[str]) -> None:
    """Raises OSError or subprocess.SubprocessError."""
    added = not POLICY.exists()
    if added:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
    apt = ["apt-get", "-y", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    command = [*apt, "install", "--no-install-recommends", *packages]
    try:
        if subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S).returncode:
            # The package lists are absent or older than the archive.
            subprocess.run([*apt, "update"], env=environment, capture_output=True, check=True, timeout=LIMIT_S)
            subprocess.run(command, env=environment, capture_output=True, check=True, timeout=LIMIT_S)
    finally:
        if added:
            POLICY.unlink()


def main() -> int:
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if not missing:
        return 0
    is_required = sys.argv[1:] == ["--required"]
    consequence = "these Debian packages are needed for --all and CI=true" if is_required else "some tests are skipped"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"not installed, and this user cannot: {consequence}: {' '.join(missing)}")
        return int(is_required)
    print(f"installing {' '.join(missing)}", flush=True)
    try:
        install(missing)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None) or b""
        print(f"{output.decode(errors='replace')[-2_000:]}\nthat failed: {consequence}: {' '.join(missing)}: {error}")
        return int(is_required)
    return 0


if __name__ == "__main__":
    sys.exit(main())
