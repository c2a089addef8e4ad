"""What a study is: one figure of a paper, measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from lab import draw
from lab.draw import Data
from lab.studies.lab import Lab


@dataclass(frozen=True)
class Study:
    """Where the paper has it, what is seen, how it is measured and drawn, and how large by default.

    ``timed``: it measures seconds, and wants an idle machine.
    """

    place: str  # "SpecVLM, Fig. 6"
    about: str  # what is measured here, in a sentence
    measure: Callable[[Lab], Data]
    draw: Callable[[Data], Figure] = draw.lines
    clips: int = 4
    size: int = 2048
    tokens: int = 128
    timed: bool = False
