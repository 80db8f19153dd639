"""How programs are started so that they report the order in which they read: the environment that brings them the hook.

The hook itself is in ``hook/``, which is no package: it is put first in the program's PYTHONPATH, and must hold nothing
that the program could take for a module of its own. Any thread.
"""

from collections.abc import Mapping
from pathlib import Path

#: What is put into PYTHONPATH.
DIRECTORY = Path(__file__).with_name("hook")
SOCKET_VARIABLE = "FANSTORE_ORDER_SOCKET"
#: Set for programs whose order is rearranged.
ARRANGES_VARIABLE = "FANSTORE_ORDER_LOCALITY"


def hook_environment(
    control_socket: str | Path, inherited: Mapping[str, str], *, arranges: bool = False
) -> dict[str, str]:
    """The variables of a program that is to report its order, besides FANSTORE_MOUNT.

    ``arranges``: it is to read what the daemon says instead.
    """
    others = [entry for entry in inherited.get("PYTHONPATH", "").split(":") if entry != str(DIRECTORY)]
    # An empty entry is the working directory; a variable that is empty as a whole is as good as none.
    kept = others if any(others) else []
    variables = {"PYTHONPATH": ":".join([str(DIRECTORY), *kept]), SOCKET_VARIABLE: str(control_socket)}
    return variables | ({ARRANGES_VARIABLE: "1"} if arranges else {})
