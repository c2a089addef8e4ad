"""Defines a study: one figure of a paper, measured on the embedded pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from lab import draw
from lab.draw import Data
from lab.studies.experiment import Experiment


@dataclass(frozen=True)
class Study:
    """One figure: its place in a paper, how it is measured and drawn, and its default size.

    A ``timed`` study measures seconds and needs an idle machine.
    """

    place: str  # Such as "SpecVLM, Fig. 6".
    about: str  # What is measured, in one sentence.
    measure: Callable[[Experiment], Data]
    draw: Callable[[Data], Figure] = draw.lines
    clips: int = 4
    size: int = 2048
    tokens: int = 128
    timed: bool = False
