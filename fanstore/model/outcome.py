"""What a simulation found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a job went.

    Attributes:
        seconds: from the start to the end of the last iteration.
        stall_s: of these, before the first iteration began.
        pfs_mb: what was read from the PFS.
        epoch_ends_s: when each epoch was done.
        local_mb, remote_mb: what was read from copies on the node itself, and on other nodes; None where that was not
            counted (the published mode).
    """

    seconds: float
    stall_s: float
    pfs_mb: float
    epoch_ends_s: tuple[float, ...]
    local_mb: float | None = None
    remote_mb: float | None = None
