"""Outputs of a job of one node, without a mount, on real directories; for the tests of core.

Owns the wiring, and how long what is pending is waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import core_parts
import mounting
import pytest
import trio

from fanstore.outputs.journal import Journal, Owner
from fanstore.outputs.local_contents import LocalContents
from fanstore.outputs.output_dir import OutputDir
from fanstore.outputs.outputs import Outputs

LIMIT_S = 20.0


@contextmanager
def written(prepared: Path, directory: Path, output_dir: OutputDir) -> Iterator[Outputs]:
    """Outputs of a job of one node."""
    with core_parts.opened(prepared) as parts:
        owner = Owner("job", 0, str(output_dir.directory), ".fanstore-job")
        objects = LocalContents(directory / "objects")
        journal = Journal.make(directory / "journal", owner)
        output_dir.open()
        try:
            yield Outputs(parts.namespace, None, objects, journal, output_dir)
        finally:
            journal.close()
            objects.close()


def prepare_in(directory: Path) -> Path:
    """A dataset of one file in one directory."""
    (directory / "source/data").mkdir(parents=True)
    (directory / "source/data/file").write_text("x")
    return mounting.prepare(directory / "source", directory / "d.fan")


async def wait_saved(outputs: Outputs) -> None:
    assert outputs.saver is not None
    with trio.move_on_after(LIMIT_S):
        while outputs.saver.pending()[0]:
            await outputs.saver.wait_progress()
        return
    tree = outputs.tree
    left = list(tree.unsaved())
    pytest.fail(f"not saved: {left}, of\n" + "\n".join(map(str, tree.outputs.values())))
