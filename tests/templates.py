"""The job templates in scripts/, filled in as their users do it. Used by test_templates.py and test_slurm.py."""

import re
from collections.abc import Mapping
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"
SLURM = SCRIPTS / "slurm.sbatch"
PBS = SCRIPTS / "pbs.sh"

_VARIANT = "\n# Instead of "


def with_values(template: Path, values: Mapping[str, str | Path], background: bool) -> str:
    """The template with other values of its variables; with ``background`` in its second way."""
    text, mark, rest = template.read_text().partition(_VARIANT)
    assert mark
    if background:
        text = text[: text.index('\n"$fanstore/mpirun"')] + "\n"
        text += "".join(line.removeprefix("#   ") + "\n" for line in rest.splitlines() if line.startswith("#   "))
    for variable, value in values.items():
        text, count = re.subn(rf"^{variable}=.*$", f"{variable}={value}", text, flags=re.MULTILINE)
        assert count == 1, variable
    return text
