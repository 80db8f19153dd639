"""The proof that a job has ended well (``--success``): a file, or a line on standard output.

Owns how it is given and taken away. It does not depend on what a launcher makes of exit codes: no daemon that was
killed, no rank that never started can have given it. Used by session.py (rank 0 gives it, when all nodes have ended)
and by cli/mount.py and cli/launch.py; the calls may block.
"""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from fanstore.errors import MountError, UsageError
from fanstore.report.files import replace_file

#: Instead of a file.
STANDARD_OUTPUT = Path("-")
#: A proof is shorter than this.
_PROOF_BYTES = 4096
SUCCESS_LINE = "fanstore: all nodes have ended well"


def take_back(proof: Path) -> None:
    """That of an earlier job must not count for this one. Raises MountError; UsageError if something else is there."""
    if proof == STANDARD_OUTPUT:
        return
    try:
        if os.path.isfile(proof) and not _is_proof(proof):
            raise UsageError(f"--success {proof} exists, and is no proof of an earlier job; name another file")
        proof.unlink(missing_ok=True)
    except OSError as error:
        raise MountError(f"cannot remove --success {proof} of an earlier job: {error.strerror}") from None


def _is_proof(path: Path) -> bool:
    """Whether ``give`` has written it, or it is empty, as after ``touch``."""
    with open(path, "rb") as file:
        content = file.read(_PROOF_BYTES)
    try:
        return not content or set(json.loads(content)) == {"ended", "nodes"}
    except (ValueError, TypeError):
        return False


def give(proof: Path, nodes: int) -> None:
    """Every COMMAND has ended with 0, and every output is saved. Raises OSError."""
    if proof == STANDARD_OUTPUT:
        print(SUCCESS_LINE, flush=True)
    else:
        replace_file(
            proof, json.dumps({"ended": datetime.now(UTC).isoformat(timespec="seconds"), "nodes": nodes}) + "\n"
        )
