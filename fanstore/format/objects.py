"""Prepared datasets in an object store: ``http(s)://host/…/x.fan`` and ``s3://bucket/…/x.fan``.

Owns the client (the library obstore, which is loaded when the first request is made), what its errors are in plain
words, and the memory of which version of each object is being read: one that changes meanwhile is an error, not a mix
of two. The library repeats what fails for a moment. Used through Storage (storage.py). Calls block; any thread.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from fanstore import DISTRIBUTION
from fanstore.errors import CorruptDataError, FormatError, UsageError
from fanstore.format.manifest import MANIFEST_FILE
from fanstore.format.storage import BLOCK_BYTES, StoredFile, ends_at

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, HTTPStore, RetryConfig, S3Store

T = TypeVar("T")

#: What one request asks for while a file is copied, and how many of them may be under way or in memory at a time.
#: A range is given out in blocks as large as those of files: 512 MB took 0.35 s of processor time like that, 0.9 to 1.0
#: s if each range was one block of 4 MiB (curl: 0.46 s).
RANGE_BYTES = 4 << 20
RANGES = 8

#: What an object is written in: parts of this length or longer, since a store takes 10,000 of them at most.
PART_BYTES = 16 << 20
PARTS_MOST = 9_000

#: Seconds: to connect; without a byte; for one request; and for one with all its repetitions.
CONNECT_S = 5
SILENCE_S = 15
REQUEST_S = 120
GIVE_UP_S = 60
REPETITIONS = 6

#: Variables that say with which credentials requests to S3 are signed; without any of them they are not signed.
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Z][A-Za-z ]+))?")


class Objects:
    """The objects below one address.

    Attributes:
        _seen: by name, what told the version of an object that was read first; guarded by ``_lock``.
        _room: for ranges of objects that are copied.
    """

    words = "object store"
    directory = None

    def __init__(self, address: str) -> None:
        """Raises UsageError if it is none."""
        scheme, _, rest = address.rstrip("/").partition("://")
        self._address = f"{scheme.lower()}://{rest}"
        try:
            parts = urlsplit(self._address)
        except ValueError as error:
            raise UsageError(f"'{address}' is not an address: {error}") from error
        if parts.username is not None or parts.password is not None:
            raise UsageError("an address must not have a password in it: anybody on this machine could see it")
        if not parts.hostname or parts.query or parts.fragment:
            raise UsageError(
                f"'{address}' is not the address of a dataset: that is https://HOST/PATH or s3://BUCKET/PATH, "
                "with no '?' or '#' in it"
            )
        self._is_s3 = parts.scheme == "s3"
        self._server = parts.netloc if not self._is_s3 else _endpoint() or f"the S3 bucket {parts.netloc}"
        self._seen: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._room = threading.Semaphore(RANGES)

    def __str__(self) -> str:
        return self._address

    def label(self, name: str) -> str:
        return f"{self._address}/{name}"

    def check(self) -> None:
        try:
            self.length(MANIFEST_FILE)
        except FileNotFoundError as error:
            raise FormatError(
                f"'{self}' is not a prepared dataset: there is no {self.label(MANIFEST_FILE)}; "
                "make one with fanstore-prep"
            ) from error
        except OSError as error:
            raise FormatError(f"cannot read '{self.label(MANIFEST_FILE)}': {error.strerror}") from error

    def read(self, name: str) -> bytes:
        return b"".join(self.stream(name, self.length(name)))

    def length(self, name: str) -> int:
        # Not a HEAD request: that it can be read, and by ranges, is not known before some of it was.
        return self._get(name, 0, 1, _whole)[1]

    def open(self, name: str) -> StoredFile:
        return _Object(self, name)

    def stream(
        self, name: str, length: int, ranges: Iterable[tuple[int, int]] | None = None
    ) -> Generator[memoryview, None, None]:
        """Several ranges at a time, given out in order; all streams share what may be in memory.

        ``ranges``: these alone, offset and length; each is taken when it is about to be asked for.
        """
        under_way: deque[tuple[int, Future[list[bytes]]]] = deque()
        all_ranges = ((start, min(RANGE_BYTES, length - start)) for start in range(0, length, RANGE_BYTES))
        wanted = iter(all_ranges if ranges is None else ranges)
        is_more = True
        try:
            while True:
                # Waiting only while there is nothing of its own to give out: then others have it, and give it back.
                while is_more and self._room.acquire(blocking=not under_way):
                    following = next(wanted, None)
                    if following is None:
                        is_more = False
                        self._room.release()
                        break
                    offset, count = following
                    under_way.append((count, self._begin(name, offset, count)))
                if not under_way:
                    return
                count, future = under_way[0]
                try:
                    blocks = future.result()
                except CorruptDataError:
                    return
                for block in blocks:
                    yield memoryview(block)
                if sum(map(len, blocks)) < count:
                    return
                under_way.popleft()
                self._room.release()
        finally:
            for _ in under_way:
                self._room.release()

    def _begin(self, name: str, offset: int, length: int) -> Future[list[bytes]]:
        """Get a range in blocks, in a thread of its own, which does not keep the program from its end."""
        future: Future[list[bytes]] = Future()

        def get() -> None:
            try:
                blocks, _ = self._get(name, offset, length, lambda found: list(found.stream(BLOCK_BYTES)))
                future.set_result(blocks)
            except BaseException as error:  # noqa: BLE001  # whoever asked gets it
                future.set_exception(error)

        threading.Thread(target=get, name="objects", daemon=True).start()
        return future

    def read_range(self, name: str, offset: int, length: int) -> memoryview:
        """Exactly this range. Raises OSError, CorruptDataError."""
        if length == 0:
            return memoryview(b"")
        data, _ = self._get(name, offset, length, _whole)
        if len(data) < length:
            raise ends_at(offset + len(data))
        return data

    def _get(self, name: str, offset: int, length: int, take: Callable[[GetResult], T]) -> tuple[T, int]:
        """What there is of a range, as ``take`` takes it, and the length of the object. Raises OSError,
        CorruptDataError."""
        store = self._store
        import obstore

        for pause_s in (*(0.1 * 2**number for number in range(REPETITIONS)), None):
            try:
                found = obstore.get(store, name, options={"range": (offset, offset + length)})
                data, meta = take(found), found.meta
                break
            except Exception as error:
                problem = self._problem(error, offset)
                # The library repeats everything else, and goes on with an answer that broke if it has an ETag.
                if not isinstance(problem, ConnectionResetError) or pause_s is None:
                    raise problem from error
                time.sleep(pause_s)
        self._compare(name, str(meta["e_tag"] or meta["last_modified"]), meta["size"])
        return data, meta["size"]

    # --- writing, to S3 only ---

    @property
    def is_writable(self) -> bool:
        """A web server takes nothing, and a whole bucket is no place for a dataset."""
        return self._is_s3 and urlsplit(self._address).path != ""

    def write(self, name: str, content: bytes | Path) -> None:
        """Make an object, whole or not at all, in the place of one that may be there. Raises OSError."""
        store = self._store
        import obstore

        length = len(content) if isinstance(content, bytes) else content.stat().st_size
        try:
            obstore.put(store, name, content, chunk_size=max(PART_BYTES, -(-length // PARTS_MOST)))
        except Exception as error:
            raise self._problem(error, 0) from error
        with self._lock:
            self._seen.pop(name, None)

    def names(self) -> set[str]:
        """All objects, by their names. Raises OSError."""
        store = self._store
        import obstore

        try:
            return {str(meta["path"]) for batch in obstore.list(store) for meta in batch}
        except Exception as error:
            raise self._problem(error, 0) from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there do not matter. Raises OSError."""
        store, paths = self._store, sorted(names)
        import obstore

        try:
            if paths:
                obstore.delete(store, paths)
        except Exception as error:
            raise self._problem(error, 0) from error

    def _compare(self, name: str, version: str, size: int) -> None:
        with self._lock:
            if self._seen.setdefault(name, (version, size)) == (version, size):
                return
        raise OSError(
            errno.ESTALE, "the object has changed since it was first read (its ETag is another one): start again"
        )

    @functools.cached_property
    def _store(self) -> HTTPStore | S3Store:
        try:
            from obstore.store import HTTPStore, S3Store
        except ImportError as error:
            raise OSError(
                errno.ENOPKG, f"the library obstore is not installed: pip install '{DISTRIBUTION}[objects]'"
            ) from error
        client: ClientConfig = {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=CONNECT_S),
            "read_timeout": timedelta(seconds=SILENCE_S),
            "timeout": timedelta(seconds=REQUEST_S),
        }
        retry: RetryConfig = {"max_retries": REPETITIONS, "retry_timeout": timedelta(seconds=GIVE_UP_S)}
        options: dict[str, Any] = {}
        if not any(map(os.environ.get, _CREDENTIALS)) and "AWS_SKIP_SIGNATURE" not in os.environ:
            options["skip_signature"] = True
        try:
            if not self._is_s3:
                return HTTPStore.from_url(self._address, client_options=client, retry_config=retry)
            return S3Store.from_url(self._address, client_options=client, retry_config=retry, **options)
        except Exception as error:
            what = str(error).partition("\n")[0]
            fault = "the variables AWS_… do not fit together" if self._is_s3 else "that is no valid address"
            raise OSError(errno.EINVAL, f"{fault} ({what})") from error

    def _problem(self, error: Exception, offset: int) -> Exception:
        """What has gone wrong, as the rest of the program knows it."""
        from obstore import exceptions

        text = str(error)
        status = _STATUS.search(text)
        number = "" if status is None else status[1]
        code = "" if status is None else f" ({' '.join(filter(None, map(str.strip, status.groups(''))))})"
        if isinstance(error, FileNotFoundError) or number == "404":
            what = "bucket" if "NoSuchBucket" in text else "object"
            return FileNotFoundError(errno.ENOENT, f"there is no such {what}{code}")
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            hint = ": check the credentials (AWS_ACCESS_KEY_ID and so on) and the rights of the bucket"
            return PermissionError(errno.EACCES, f"{self._server} refuses access{code}{hint if self._is_s3 else ''}")
        if isinstance(error, exceptions.NotSupportedError):
            what = "ignores byte ranges, which are needed; use a server that knows them (nginx, Apache, S3)"
            return OSError(errno.EOPNOTSUPP, f"{self._server} {what}")
        if number == "416":
            return CorruptDataError(f"the object ends before byte {offset + 1}")
        if number.startswith("3"):
            hint = ": the bucket is in another region, set AWS_REGION" if self._is_s3 else ""
            return OSError(errno.EIO, f"{self._server} points elsewhere{code}{hint}")
        if number:
            return OSError(errno.EIO, f"{self._server} answers with an error{code}")
        if "imed out" in text or "kind: Timeout" in text:
            return TimeoutError(errno.ETIMEDOUT, f"{self._server} did not answer in time")
        if "kind: Connect" in text:
            why = next((words for sign, words in _CONNECT.items() if sign in text), "")
            return ConnectionRefusedError(errno.ECONNREFUSED, f"cannot connect to {self._server}{why}")
        if "kind: Interrupted" in text or "kind: Body" in text:
            return ConnectionResetError(errno.ECONNRESET, f"the connection to {self._server} broke in an answer")
        return OSError(errno.EIO, f"{self._server}: {text.partition(chr(10))[0]}")


def _whole(found: GetResult) -> memoryview:
    return memoryview(found.bytes())


#: Why a connection was not made, as the library says it.
_CONNECT = {
    "ConnectionRefused": ": connection refused",
    "dns error": ": its name is not known",
    "ertificate": ": its certificate is not valid",
}


class _Object:
    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self.length = objects.length(name)

    def read(self, offset: int, length: int) -> memoryview:
        return self._objects.read_range(self._name, offset, length)

    def close(self) -> None:
        """Nothing is kept open."""


def _endpoint() -> str:
    return next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
