"""Gives the classes of the installed transformers, with a stand-in for each that it lacks.

The tables of families name classes that only newer releases have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import transformers

from saccade.core.errors import OptionError


class MissingClassError(OptionError):
    """The installed transformers is too old to make a checkpoint of some family."""


@dataclass(frozen=True)
class MissingClass:
    """Stands for a class that the installed transformers does not have."""

    name: str

    def __call__(self, *args: Any, **settings: Any) -> NoReturn:
        """Raises MissingClassError, because only a newer release can make such an object."""
        raise MissingClassError(
            f"transformers {transformers.__version__} has no {self.name}: a newer release makes "
            "checkpoints of this family"
        )


class AvailableClasses:
    """Gives classes of transformers by name, so that tables of families load with any release."""

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(transformers, name)
        except AttributeError:
            return MissingClass(name)
