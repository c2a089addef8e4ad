"""Checks the files that commands of the laboratory write, before any work."""

from __future__ import annotations

from pathlib import Path

from saccade.core.errors import OptionError


def check_folder_of(path: Path | None) -> None:
    """Raises OptionError where a file cannot be written because its folder is missing. None stands
    for no file."""
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"cannot write {path}: there is no folder {path.parent}")
