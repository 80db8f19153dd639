"""What can be asked over the control socket: the table of requests, and their handlers.

Owns what a request means; who may ask, and how it is said, is the server's business (client/server.py). A new request
is a handler and a row here, and a row in docs/protocol.md. Made by session.py; trio thread.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import trio

from fanstore.client.preload import PreloadError
from fanstore.client.protocol import ControlError
from fanstore.client.server import Reply, Request
from fanstore.dataset.control import ControlDirectory
from fanstore.errors import CorruptDataError, MountError
from fanstore.fuse.interception import Interception
from fanstore.fuse.mountpoint import MountBusyError


def requests(
    control: ControlDirectory,
    end: Callable[[bool], None],
    interception: Interception,
    intercept: Callable[[], Awaitable[Path]],
    others: Mapping[str, Request],
) -> Mapping[str, Request]:
    """The table, for one mount; ``intercept`` makes what preloaded programs need.

    ``others``: what programs report of their order, and what they write where there is no mount.

    ``end``: take the mount away, or what stands for one, also if it is in use or not. In a thread; raises MountError.
    """

    async def stat(name: str) -> Reply:
        """The content of a control file, without a look-up that the statistics would count."""
        file = control.lookup(name.encode())
        if file is None or control.link_target(file) is not None:
            known = ", ".join(each.decode() for each, number in control.names() if control.link_target(number) is None)
            raise ControlError("arguments", f"there is no such file; there are {known}")
        return Reply({"content": await control.open(file)})

    async def take_away(lazy: bool) -> Reply:
        """Unmount, and hand out a descriptor of this process, which tells its end in any process namespace."""

        try:
            await trio.to_thread.run_sync(end, lazy)
        except MountBusyError as error:
            raise ControlError("busy", str(error)) from None
        except MountError as error:
            raise ControlError("failed", str(error)) from None
        return Reply(descriptors=[os.pidfd_open(os.getpid())])

    async def preload() -> Reply:
        """The directory that a preloaded program is to be told of (client/preload.py)."""
        try:
            return Reply({"state": str(await intercept())})
        except PreloadError as error:
            raise ControlError("failed", str(error)) from None

    async def content(entry: int) -> Reply:
        """A sealed memory file with the content of a regular file, for a program that cannot read it by itself."""
        try:
            return Reply(descriptors=[await interception.content(entry)])
        except (PreloadError, CorruptDataError) as error:
            raise ControlError("failed", str(error)) from None

    async def control_file(name: str) -> Reply:
        """The content of a control file as a memory file, for a program that has no mount to read it from."""
        try:
            return Reply(descriptors=[await interception.control(name)])
        except PreloadError as error:
            raise ControlError("failed", str(error)) from None

    async def attribute(entry: int, name: str) -> Reply:
        """The value of an extended attribute, for the same."""
        try:
            return Reply({"value": interception.attribute(entry, name)})
        except PreloadError as error:
            raise ControlError("failed", str(error)) from None

    async def cache() -> Reply:
        """What this node has in memory of the dataset, for programs that read it by themselves."""
        try:
            return Reply(descriptors=[interception.cache()])
        except PreloadError as error:
            raise ControlError("failed", str(error)) from None

    async def fetcher() -> Reply:
        """A socket over which such a program asks for what is not in memory."""
        try:
            return Reply(descriptors=[interception.fetcher()])
        except PreloadError as error:
            raise ControlError("failed", str(error)) from None

    return {
        "attribute": Request(attribute, {"entry": int, "name": str}),
        "cache": Request(cache),
        "control": Request(control_file, {"name": str}),
        "content": Request(content, {"entry": int}),
        "fetcher": Request(fetcher),
        "preload": Request(preload),
        "stat": Request(stat, {"name": str}),
        "unmount": Request(take_away, {"lazy": bool}),
        **others,
    }
