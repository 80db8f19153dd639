"""One rank of a transport scenario with the extension module given: ``mpirun ... sanitized_mpi.py MODULE SCENARIO``

Used by test_native_sanitized.py, which has the module compiled with sanitizers.
"""

import importlib.util
import sys
from pathlib import Path

module, scenario = sys.argv[1:]
spec = importlib.util.spec_from_file_location("fanstore._native", module)
assert spec is not None and spec.loader is not None
native = importlib.util.module_from_spec(spec)
sys.modules["fanstore._native"] = native
spec.loader.exec_module(native)
import fanstore  # noqa: E402

fanstore._native = native  # before any other module imports it
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.argv[1:] = [scenario]
import mpi_driver  # noqa: E402

sys.exit(mpi_driver.main())
