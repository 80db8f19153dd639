"""TOML files that a user names: scenarios and measurements. Used by the subcommands of fanstore-plan."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fanstore.errors import UsageError


def read_toml(path: Path) -> Mapping[str, Any]:
    """What is in the file. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"'{path}' is not a TOML file: {error}") from error
