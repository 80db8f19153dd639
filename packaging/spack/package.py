# Recipe for Spack: copy this file to var/spack/repos/.../packages/fanstore/ of a repository of your own, give its place
# with `git = ...` (there is no public one yet), and `spack install fanstore`. tests/test_packaging.py keeps it in step with
# pyproject.toml.
from spack.package import *


class Fanstore(PythonPackage):
    """A transient, distributed, user-space file system for deep-learning input on clusters."""

    # On PyPI "fanstore" is another program: this one is installed from its sources.
    git = "file:///path/to/fanstore"
    license("BSD-3-Clause")

    version("main", branch="main")
    version("0.1.0", tag="v0.1.0")

    variant("mpi", default=True, description="Several nodes in one job")
    variant("objects", default=False, description="Datasets behind HTTP and in S3")

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
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-trio@0.25:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
    depends_on("py-zstandard@0.22:", type=("build", "run"))

    depends_on("py-mpi4py@4.0:", type=("build", "run"), when="+mpi")
    depends_on("openmpi@5.0:", type=("build", "run"), when="+mpi")
    depends_on("py-obstore@0.12:", type=("build", "run"), when="+objects")

    import_modules = ["fanstore", "fanstore._native"]
