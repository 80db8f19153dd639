"""``fanstore.mount``: a mounted dataset for as long as a program, or a notebook, wants it.

Owns one fanstore-mount, a process of its own, from its start to its end; what a mount is and does is its business, and
so is every option and every sentence about a wrong one. It reads a pipe whose other end is ours (``--until-eof``): when
this process is gone, whatever killed it, the kernel closes that end, and mount, local copies and daemon go, too. Any
thread, one at a time. A child of fork may use the mount, and cannot end it.
"""

import atexit
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self, TypedDict, Unpack

from fanstore.client.connection import connect
from fanstore.client.protocol import ControlError
from fanstore.errors import MountError, UsageError

#: The command. As a module, which is there wherever this one is, and without the working directory among its modules.
COMMAND = (sys.executable, "-P", "-m", "fanstore.cli.fanstore")
#: What it prints when the mount is up if that is in its environment, as cli/launch.py has both.
_VARIABLE, _READY_LINE = "FANSTORE_LAUNCHED", "fanstore: ready"
_ERROR = "fanstore-mount: error: "
#: Options of the command that mean nothing here, and why.
_SENSELESS = {
    "background": "the mount is there as soon as fanstore.mount returns, and this program goes on",
    "foreground": "the mount is there as soon as fanstore.mount returns, and this program goes on",
    "no_fuse": "without a mount only programs that are started for it see the dataset, and this one runs already: "
    "use fanstore-mount --no-fuse or fanstore-run",
    "preload": "it is for programs that are started on the mount, and this one runs already: use fanstore-run",
    "recover": "it ends without a mount: use fanstore-mount --recover",
    "success": "close() raises an error if anything has gone wrong",
    "until_eof": "it is how this process and the daemon know of each other",
}

_Path = str | os.PathLike[str]


class Options(TypedDict, total=False):
    """The options of fanstore-mount (docs/commands.md) as keywords; False and None leave one out."""

    local: _Path | None
    keep_local: bool
    stage_first: bool
    cache: str | int
    verify: Literal["first", "always", "never"]
    allow_other: bool
    log: _Path | None
    report: _Path | None
    plan: _Path | None
    metrics: _Path | None
    verbose: bool
    quiet: bool
    start_timeout: float
    replicas: int
    capacity: str | int | None
    peer_timeout: float
    launch: str | None
    engine: Literal["auto", "native", "python"]
    order: _Path
    output: _Path | None
    scratch: bool
    fsync: Literal["output", "local"]


class MountedJob:
    """A mounted dataset; made by ``mount``, ended by ``close``, by the end of ``with``, or by that of this process.

    Attributes:
        path: where the dataset is. log: the log of the daemon; None with ``launch`` if none was named.
        _process: None when it has ended, and in a child of fork.
        _existed: the mount point is not ours to remove. _quiet: nothing is printed.
        _ready: set when the mount is up, or never will be; _is_up: which of both.
        _error: the last one that the daemon has told.
        _config: what the mount says of itself.
    """

    def __init__(self, prepared: str, mountpoint: str, words: list[str], quiet: bool) -> None:
        self.path = Path(mountpoint.replace("{rank}", "0").replace("{host}", socket.gethostname().partition(".")[0]))
        self._existed = os.path.lexists(self.path)
        self._quiet = quiet
        self._ready = threading.Event()
        self._is_up = False
        self._error = ""
        # In a session of its own: neither Ctrl-C nor what kills a notebook's process group is meant for it.
        process = subprocess.Popen[bytes](
            [*COMMAND, "mount", prepared, mountpoint, "--until-eof", *words],
            env=os.environ | {_VARIABLE: "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._process: subprocess.Popen[bytes] | None = process
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            threading.Thread(target=self._wait_ready, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True),
        ]
        _forget_in_children(self)
        atexit.register(self.close)
        try:
            for reader in self._readers:
                reader.start()
            self._ready.wait()
            if not self._is_up:
                self.close()
                raise MountError(f"the mount of {prepared} was ended by somebody else before it was up")
            self._config = self._read_config()
            self.log = None if self._config["log"] is None else Path(self._config["log"])
        except BaseException:
            with contextlib.suppress(MountError):  # why it ends is known already: Ctrl-C, say
                self.close()
            raise

    def statistics(self) -> dict[str, Any]:
        """What the mount has done so far, as ``fanstore-stat --json`` prints it (docs/operations.md)."""
        client = connect(self._config, "fanstore.mount")
        if client is not None:
            with client:
                try:
                    answer: dict[str, Any] = json.loads(client.ask("stat", name="stats.json").values["content"])
                    return answer
                except ControlError as error:
                    raise MountError(f"the mount {self.path} does not answer: {error}") from None
        return self._read_control("stats.json")

    def prefetch(self, paths: Iterable[_Path]) -> None:
        """Say what will be read, in that order, so that it is fetched ahead: paths below the mount, or relative to it.

        Returns when the daemon knows; it fetches a window of bytes ahead of what is read, not all at once.
        """
        names = [os.fsencode(path) for path in paths]
        wrong = next((name for name in names if b"\n" in name), None)
        if wrong is not None:
            raise MountError(f"a name with a line feed cannot be fetched ahead: {os.fsdecode(wrong)!r}")
        try:
            # Without waiting: nobody may be there any more who reads it.
            order = os.open(self.path / ".fanstore" / "order", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._config["order"] == "off" and (self.path / ".fanstore").exists():
                raise MountError("nothing is fetched ahead with order='off'; leave it out") from None
            raise MountError(f"{self.path} is not mounted any more") from None
        except OSError as error:
            raise MountError(f"cannot say what is to be fetched ahead to {self.path}: {error.strerror}") from None
        os.set_blocking(order, True)
        with open(order, "wb") as file:
            try:
                file.write(b"".join(name + b"\n" for name in names))
                file.flush()
            except BrokenPipeError:
                raise MountError(f"{self.path} is not mounted any more") from None

    def close(self) -> None:
        """End it: outputs are saved, the mount and local copies are gone when this returns. Again, it does nothing.

        Raises MountError if anything has gone wrong, such as an output that could not be saved.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        code = process.wait()
        for reader in self._readers:
            if reader.ident is not None:
                reader.join()
        self._process = None
        atexit.unregister(self.close)
        if code == 0:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
        if code < 0:
            # It has left its mount, and nobody else would remove it.
            subprocess.run([*COMMAND, "umount", str(self.path)], capture_output=True, stdin=subprocess.DEVNULL)
            if not self._existed:
                with contextlib.suppress(OSError):  # it is in use, or gone
                    self.path.rmdir()
        error = MountError(self._error or f"the daemon of {self.path} {how}")
        error.exit_code = code if code > 0 else 128 - code
        raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<fanstore.mount {self.path}{'' if self._process is not None else ', closed'}>"

    def _wait_ready(self, stdout: IO[bytes]) -> None:
        """In a thread: until the mount is up, and then so that nobody has to wait who prints."""
        with stdout:
            for line in stdout:
                if line.strip() == _READY_LINE.encode():
                    self._is_up = True
                    self._ready.set()
        self._ready.set()

    def _pass_on(self, stderr: IO[bytes]) -> None:
        """In a thread: what the daemon says, to where this program says such things; errors are raised."""
        with stderr:
            for line in stderr:
                text = line.decode(errors="replace")
                if text.startswith(_ERROR):
                    self._error = text.removeprefix(_ERROR).strip()
                elif not self._quiet or "WARNING" in text or "ERROR" in text:
                    sys.stderr.write(text)

    def _read_config(self) -> dict[str, Any]:
        try:
            return self._read_control("config.json")
        except MountError:
            raise MountError(f"the dataset is mounted, but not at {self.path} of this machine") from None

    def _read_control(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / ".fanstore" / name).read_bytes())
        except FileNotFoundError:
            raise MountError(f"{self.path} is not mounted any more") from None
        except OSError as error:
            raise MountError(f"the mount {self.path} does not answer: {error.strerror}") from None
        return content

    def _forget(self) -> None:
        """In a child of fork: the mount is that of the parent."""
        process, self._process = self._process, None
        atexit.unregister(self.close)
        if process is not None and process.stdin is not None:
            process.returncode = 0  # it is not our child, and no matter for the one who collects us
            process.stdin.close()


def _forget_in_children(job: MountedJob) -> None:
    """The pipe must have one end only in this process, or the daemon would wait for all children, too."""
    known = weakref.ref(job)

    def forget() -> None:
        own = known()
        if own is not None:
            own._forget()

    os.register_at_fork(after_in_child=forget)


def mount(prepared: _Path, mountpoint: _Path | None = None, **options: Unpack[Options]) -> MountedJob:
    """Mount a prepared dataset, and return when it can be read at ``.path`` of what is returned.

    ``prepared`` may be an address. Without ``mountpoint`` it is a new name in the directory for temporary files.
    Raises MountError with what fanstore-mount says.

    >>> with fanstore.mount("imagenet.fan", local="/local/ssd", output="run42") as job:
    ...     train(job.path)
    """
    words: list[str] = []
    for name, value in options.items():
        if name in _SENSELESS:
            raise _refused(f"fanstore.mount has no {name}: {_SENSELESS[name]}")
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            if not isinstance(value, str | int | float | os.PathLike):
                raise _refused(f"{name} of fanstore.mount is a text, a path or a number, not {value!r}")
            words.append(f"{option}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    source = os.fspath(prepared)
    if mountpoint is None:
        stem = os.path.basename(source.rstrip("/")).removesuffix(".fan") or "dataset"
        mountpoint = os.path.join(tempfile.gettempdir(), f"{stem}-{secrets.token_hex(4)}")
    point = os.path.abspath(mountpoint)
    return MountedJob(source, point, words, bool(options.get("quiet")))


def _refused(sentence: str) -> MountError:
    error = MountError(sentence)
    error.exit_code = UsageError.exit_code
    return error
