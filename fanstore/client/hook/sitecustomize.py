"""Runs at the start of every Python program that a mount with ``--order hook`` starts, and waits for torch.

Lets the sitecustomize run that this one hides, and has fanstore_order_hook.py loaded when torch's DataLoader is
imported; a program that never imports it is left alone. Any Python can run this file, 2.7 included, and before 3.8 it
does nothing more. Short, because it may have to be compiled at every start. See docs/orders.md.
"""

import os
import sys

_DIRECTORY = os.path.dirname(os.path.abspath(__file__))


class _Finder(object):
    """On ``sys.meta_path`` until the awaited module is imported; finds nothing else."""

    busy = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch.utils.data.dataloader" or self.busy:
            return None
        self.busy = True
        from importlib import util

        own = util.spec_from_file_location("fanstore_order_hook", os.path.join(_DIRECTORY, "fanstore_order_hook.py"))
        hook = util.module_from_spec(own)
        try:
            own.loader.exec_module(hook)
            return hook.find(name, self)
        except Exception as error:  # noqa: BLE001  -- the program goes on without us
            if sys.flags.verbose:
                sys.stderr.write("FanStore's order hook: %r\n" % (error,))
            return None


if sys.version_info >= (3, 8) and os.environ.get("FANSTORE_ORDER_SOCKET"):
    sys.meta_path.insert(0, _Finder())
# The next one, as if this one were not there; what it raises is its own affair.
_ours = sys.modules.pop(__name__, None)
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _DIRECTORY]
try:
    __import__("sitecustomize")
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
finally:
    sys.modules.setdefault(__name__, _ours)  # whoever imports this module now wants to find one
