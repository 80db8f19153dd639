"""A notebook without a browser: runs cells in a kernel, and restarts or kills it. Used by test_python_mount.py.

Run as ``python notebook.py restart|kill PREPARED OUTPUT`` by a Python with jupyter_client. The first cell mounts; what
it has printed, the mount point, is printed at once. A line on standard input says that the kernel may go.
"""

import contextlib
import queue
import signal
import subprocess
import sys
import time
from typing import Any

from jupyter_client.manager import start_new_kernel

LIMIT_S = 60.0


def run(client: Any, cell: str) -> str:
    """What the cell prints on standard output. Ends this program if it fails."""
    wanted, printed = client.execute(cell), ""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=LIMIT_S)
        except queue.Empty:
            break
        if message["parent_header"].get("msg_id") != wanted:
            continue
        content = message["content"]
        if message["msg_type"] == "error":
            sys.exit("\n".join(content["traceback"]))
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed += content["text"]
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return printed
    sys.exit(f"no answer of the kernel to: {cell}")


def main() -> None:
    way, prepared, output = sys.argv[1:]
    manager, client = start_new_kernel(startup_timeout=LIMIT_S)
    try:
        run(client, f"import fanstore\njob = fanstore.mount({prepared!r}, output={output!r})")
        run(client, "_ = (job.path / 'written').write_text('in a cell')")
        print(run(client, "print(job.path)"), end="", flush=True)
        print(run(client, "print(job.statistics()['version'], (job.path / 'file').read_text())"), end="", flush=True)
        manager.interrupt_kernel()  # of a cell that does not run: nothing for the daemon
        print(run(client, "print((job.path / 'file').read_text())"), end="", flush=True)
        sys.stdin.readline()
        if way == "restart":
            manager.restart_kernel(now=False)
        else:
            manager.signal_kernel(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                manager.provisioner.process.wait(LIMIT_S)
        print("gone", flush=True)
        sys.stdin.readline()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main()
