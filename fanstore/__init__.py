"""FanStore: a transient, distributed, user-space file system for deep-learning input.

The packages, highest first (imports only go down; tests/test_architecture.py keeps it): ``cli`` → ``doctor`` →
``fuse`` → ``job`` → ``outputs`` and ``prefetch`` → ``dataset``, ``prep`` and ``report`` → ``torch``, ``views``,
``transport`` and ``model`` → ``client``, ``telemetry``, ``format`` and ``order``; beside them the small modules
``errors``, ``ids``, ``units``, ``progress``, ``processes``, ``mounttable`` and ``paths``, and the C extension
``_native`` (sources in ``native/``).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fanstore.client.mounted import mount
    from fanstore.errors import MountError
    from fanstore.views.view import view

__version__ = "0.1.0"
#: The name that pip knows this by. On PyPI ``fanstore`` is somebody else's package, with the same import name.
DISTRIBUTION = "fanstore-fs"
__all__ = ["MountError", "mount", "view"]


def __getattr__(name: str) -> object:
    """What programs use is imported when they do: the commands start without it."""
    if name == "mount":
        from fanstore.client.mounted import mount

        return mount
    if name == "MountError":
        from fanstore.errors import MountError

        return MountError
    if name == "view":
        from fanstore.views.view import view

        return view
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
