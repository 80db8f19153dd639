"""The exception tree of FanStore.

Everything that goes wrong for a reason a user can act on is a FanstoreError whose message is one sentence; the
command line prints it without a traceback and ends with its exit code. Anything else that escapes is a bug.
"""


class FanstoreError(Exception):
    """Base of all expected errors. The message is one sentence for the user."""

    exit_code = 1
    #: Another rank of the same job says it; this one stays silent.
    told_elsewhere = False
    #: The user has been told here and now, because later may be too late.
    told = False


class UsageError(FanstoreError):
    """The command line asks for something that makes no sense; nothing was done."""

    exit_code = 2


class FormatError(FanstoreError):
    """A prepared dataset, an index, a manifest or a tar file is refused: truncated, altered or not ours."""


class CorruptDataError(FanstoreError):
    """Stored bytes do not match their checksum or do not decode."""


class SourceError(FanstoreError):
    """The data to prepare cannot be read, or two sources contradict each other."""


class OutputError(FanstoreError):
    """A result cannot be written: the disk is full, no permission, or it exists already."""


class MountError(FanstoreError):
    """A mount point cannot be used, or the mount failed."""


def first_expected(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The FanstoreError in a group that holds nothing else; otherwise the group, which is a bug to be seen in full."""
    expected, rest = group.split(FanstoreError)
    if expected is None or rest is not None:
        return group
    leaf: BaseException = expected
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf
