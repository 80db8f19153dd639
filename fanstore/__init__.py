"""FanStore: a transient, distributed, user-space file system for deep-learning input.

The packages, highest first (imports only go down; tests/test_architecture.py keeps it):
``cli`` → ``doctor`` → ``fuse`` → ``core``, ``prep`` and ``report`` → ``transport`` → ``format``; beside them the small
modules ``errors``, ``ids``, ``units`` and ``progress``, and the C extension ``_native`` (sources in ``native/``).
"""

__version__ = "0.1.0"
