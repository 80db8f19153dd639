# For Spack 1.0 or newer, in a clone of FanStore:
#     spack repo add packaging/spack/spack_repo/fanstore
#     spack install fanstore
# The packages beside this one are those that Spack's own repository does not have. tests/test_packaging.py keeps this
# one in step with pyproject.toml.
from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class Fanstore(PythonPackage):
    """A transient, distributed, user-space file system for deep-learning input on clusters."""

    # The clone that this file is in. On PyPI "fanstore" is another program.
    git = Path(__file__).resolve().parents[6].as_uri()
    license("BSD-3-Clause")

    version("0.1.0", branch="main")

    variant("mpi", default=True, description="Several nodes in one job")

    depends_on("c", type="build")
    depends_on("cmake@3.20:", type="build")
    depends_on("ninja", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("py-scikit-build-core@0.10:", type="build")

    depends_on("python@3.11:", type=("build", "link", "run"))
    depends_on("lz4")
    depends_on("zstd")
    depends_on("xxhash")

    depends_on("py-lz4@4.3:", type=("build", "run"))
    depends_on("py-msgpack@1.0:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-outcome@1.3:", type=("build", "run"))
    depends_on("py-pyfuse3@3.3:", type=("build", "run"))
    depends_on("py-trio@0.25:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
    depends_on("py-zstandard@0.22:", type=("build", "run"))

    with when("+mpi"):
        depends_on("py-mpi4py@4.0:", type=("build", "run"))
        depends_on("openmpi@5.0:", type=("build", "run"))

    import_modules = ["fanstore", "fanstore._native"]
