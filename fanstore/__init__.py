"""FanStore: a transient, distributed, user-space file system for deep-learning input.

The packages, highest first (imports only go down; tests/test_architecture.py keeps it): ``cli`` → ``doctor`` →
``fuse`` → ``job`` → ``outputs`` and ``prefetch`` → ``dataset``, ``prep`` and ``report`` → ``torch``, ``views``,
``transport`` and ``model`` → ``client``, ``telemetry``, ``format`` and ``order``; beside them the small modules
``errors``, ``ids``, ``units``, ``progress``, ``processes``, ``mounttable`` and ``paths``, and the C extension
``_native`` (sources in ``native/``).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanstore.views.view import view

__version__ = "0.1.0"
#: The name that pip knows this by. On PyPI ``fanstore`` is somebody else's package, with the same import name.
DISTRIBUTION = "fanstore-fs"
__all__ = ["view"]


def __getattr__(name: str) -> object:
    """What training programs use is imported when they do: the commands start without it."""
    if name != "view":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fanstore.views.view import view

    return view
