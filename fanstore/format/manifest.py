"""manifest.json: what a prepared dataset consists of (docs/format.md, *manifest.json*).

Owns reading, checking and writing of the manifest; nothing else looks at its JSON.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fanstore.errors import FormatError
from fanstore.format.checksum import to_hex, xxh3_64
from fanstore.format.codec_table import is_known

FORMAT = "fanstore"
VERSION = 1
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.fsx"
#: Each update gives the index a new name, so that the old manifest and the old index stay a pair.
_UPDATED_INDEX = re.compile(r"index-[0-9a-f]{8}\.fsx")
#: Characters of a wrong value that an error message shows.
SHOWN_LENGTH = 200
#: A manifest of a million partitions stays below this; a longer one is not a manifest.
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class PartitionInfo:
    """One partition file."""

    file: str  #: name in the dataset's directory, or an absolute path if external
    bytes: int
    entries: int  #: tar members
    checksum: int  #: of the whole file
    everywhere: bool  #: to be placed on every node
    external: bool  #: an existing tar that stays where it is


@dataclass(frozen=True)
class Totals:
    """What the dataset holds."""

    files: int
    directories: int
    symlinks: int
    hardlinks: int  #: further names of files that have several
    bytes: int  #: of content, each inode once
    stored_bytes: int


@dataclass(frozen=True)
class SourceInfo:
    """What a dataset was made from. ``bytes`` and ``mtime_ns`` are those of a tar or zip file, None of a directory."""

    path: str  #: absolute, or an address
    prefix: str  #: folder of the dataset that it is in; empty: the root
    bytes: int | None
    mtime_ns: int | None


@dataclass(frozen=True)
class Origin:
    """How a dataset was made, so that it can be updated: all that decides which entries there are, and where."""

    sources: tuple[SourceInfo, ...]
    partition_bytes: int
    everywhere: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    sample: int | None = None
    left_out: int = 0  #: files, by the three above
    dereference: bool = False


@dataclass(frozen=True)
class Garbage:
    """What partitions hold for nobody, since the dataset was updated."""

    members: int
    bytes: int
    misleading: int  #: members that unpacking with tar would take for something that is in the dataset


@dataclass(frozen=True)
class Manifest:
    """A checked manifest."""

    created: str
    codec: str
    index_bytes: int
    index_checksum: int
    totals: Totals
    partitions: tuple[PartitionInfo, ...]
    version: int = VERSION
    shuffle: int | None = None  #: the seed, if files are in partitions in random order
    index_file: str = INDEX_FILE
    origin: Origin | None = None  #: None of datasets that were made by an earlier version
    garbage: Garbage | None = None

    def dumps(self) -> str:
        """The JSON text, with its own checksum."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": self.version,
            "created": self.created,
            "codec": self.codec,
            "index": {"file": self.index_file, "bytes": self.index_bytes, "checksum": to_hex(self.index_checksum)},
            "totals": asdict(self.totals),
            "partitions": [{**asdict(part), "checksum": to_hex(part.checksum)} for part in self.partitions],
        }
        if self.shuffle is not None:
            content["shuffle"] = self.shuffle
        if self.origin is not None:
            content["origin"] = asdict(self.origin)
        if self.garbage is not None:
            content["garbage"] = asdict(self.garbage)
        content["checksum"] = _own_checksum(content)
        return json.dumps(content, indent=1, ensure_ascii=True) + "\n"

    @classmethod
    def loads(cls, text: bytes, what: str = "the manifest") -> "Manifest":
        """Check the text of a manifest; ``what`` names it in the error."""
        try:
            return _parse(text)
        except _Refused as refused:
            raise FormatError(f"{what} is refused: {refused}") from None


class _Refused(Exception):
    """Half a sentence: why the manifest is not taken."""


def _own_checksum(content: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "checksum"}
    return to_hex(xxh3_64(json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()))


def _parse(text: bytes) -> Manifest:
    if len(text) > MAX_BYTES:
        raise _Refused("it is too long")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise _Refused("it is not valid JSON (truncated or altered)") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _Refused("it is not the manifest of a FanStore dataset")
    version = content.get("version")
    if type(version) is not int or version != VERSION:  # True == 1, but is no version
        raise _Refused(f"it has format version {_shown(version)}, this program reads version {VERSION}")
    try:
        expected = _own_checksum(content)
    except RecursionError:  # writing JSON gives up at a lower depth than reading it
        raise _Refused("it is nested too deeply") from None
    if content.get("checksum") != expected:
        raise _Refused("it was altered (its checksum does not match)")
    codec = _text(content, "codec")
    if not is_known(codec):
        raise _Refused(f"the codec {_shown(codec)} is unknown here; a newer FanStore has written it")
    index = _object(content, "index")
    index_file = _text(index, "file")
    if not is_index_name(index_file):
        raise _Refused("its index has another name than 'index.fsx'")
    totals = _object(content, "totals")
    partitions = content.get("partitions")
    if not isinstance(partitions, list):
        raise _Refused("it has no list of partitions")
    return Manifest(
        created=_text(content, "created"),
        codec=codec,
        index_bytes=_count(index, "bytes"),
        index_checksum=_checksum(index, "checksum"),
        totals=Totals(**{field: _count(totals, field) for field in Totals.__dataclass_fields__}),
        partitions=tuple(_partition(item) for item in partitions),
        shuffle=_count(content, "shuffle") if "shuffle" in content else None,
        index_file=index_file,
        origin=_origin(_object(content, "origin")) if "origin" in content else None,
        garbage=_garbage(_object(content, "garbage")) if "garbage" in content else None,
    )


def is_index_name(name: str) -> bool:
    """Whether a file is called as an index is: the first one, or one that an update has written."""
    return name == INDEX_FILE or _UPDATED_INDEX.fullmatch(name) is not None


def _origin(content: Mapping[str, Any]) -> Origin:
    sources = content.get("sources")
    if not isinstance(sources, list):
        raise _Refused("its origin has no list of sources")
    return Origin(
        sources=tuple(_source(item) for item in sources),
        partition_bytes=_count(content, "partition_bytes"),
        everywhere=_texts(content, "everywhere"),
        include=_texts(content, "include"),
        exclude=_texts(content, "exclude"),
        sample=None if content.get("sample") is None else _count(content, "sample"),
        left_out=_count(content, "left_out"),
        dereference=_flag(content, "dereference"),
    )


def _source(item: object) -> SourceInfo:
    if not isinstance(item, dict):
        raise _Refused("a source is not an object")
    mtime_ns = item.get("mtime_ns")
    if mtime_ns is not None and type(mtime_ns) is not int:
        raise _Refused("a source has no valid time")
    size = None if item.get("bytes") is None else _count(item, "bytes")
    return SourceInfo(_text(item, "path"), _text(item, "prefix"), size, mtime_ns)


def _garbage(content: Mapping[str, Any]) -> Garbage:
    return Garbage(*(_count(content, field) for field in Garbage.__dataclass_fields__))


def _texts(content: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = content.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise _Refused(f"'{key}' is missing or not a list of texts")
    return tuple(values)


def _partition(item: object) -> PartitionInfo:
    if not isinstance(item, dict):
        raise _Refused("a partition is not an object")
    file = _text(item, "file")
    external = _flag(item, "external")
    if "\0" in file or not file or not _is_path(file):
        raise _Refused("a partition has no valid file name")
    if external and not os.path.isabs(file):
        raise _Refused(f"the external partition {_shown(file)} has no absolute path")
    if not external and ("/" in file or file in (".", "..")):
        raise _Refused(f"the partition {_shown(file)} is outside the dataset's directory")
    return PartitionInfo(
        file=file,
        bytes=_count(item, "bytes"),
        entries=_count(item, "entries"),
        checksum=_checksum(item, "checksum"),
        everywhere=_flag(item, "everywhere"),
        external=external,
    )


def _is_path(text: str) -> bool:
    """Whether the text stands for bytes: JSON can say lone surrogates that no file name gives."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """A value for an error message, which stays one readable sentence whatever the value is."""
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "a huge number"  # Python refuses to print the largest
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"  # printing what is nested deeply fails, too
    text = repr(value)
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "…"


def _object(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    if not isinstance(value, dict):
        raise _Refused(f"'{key}' is missing or not an object")
    return value


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str):
        raise _Refused(f"'{key}' is missing or not a text")
    return value


def _count(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _Refused(f"'{key}' is missing or not a count")
    return value


def _flag(content: Mapping[str, Any], key: str) -> bool:
    value = content.get(key)
    if not isinstance(value, bool):
        raise _Refused(f"'{key}' is missing or not true or false")
    return value


def _checksum(content: Mapping[str, Any], key: str) -> int:
    value = _text(content, key)
    try:
        number = int(value, 16)
    except ValueError:
        number = -1
    if len(value) != 16 or number < 0 or to_hex(number) != value:
        raise _Refused(f"'{key}' is not a checksum")
    return number
