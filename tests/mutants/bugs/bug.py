"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patterns import replace_c, replace_code

PACKAGE = Path(__file__).parents[3] / "src" / "saccade"


@dataclass(frozen=True)
class PlantedBug:
    """One small change of the package, and the tests that must fail because of it.

    Attributes
    ----------
    name
        What goes wrong, in plain English.
    file
        The changed file, below ``src/saccade``.
    find
        A pattern of the code to change, as ``patterns.py`` describes it. It matches exactly once.
    plant
        What stands in its place. ``pass`` or ``None`` takes code away.
    tests
        Node ids below ``tests/``: as few and as fast as notice it.
    within
        The function to look into, where the pattern alone would match more than once.
    survives
        A control: the change is harmless, and all the tests must pass. It shows that the runner
        does not report a failure whatever it is given.
    needs
        A flag of ``/proc/cpuinfo``. On a processor without it the changed code never runs, so no
        test could notice the bug there.
    """

    name: str
    file: str
    find: str
    plant: str
    tests: tuple[str, ...]
    within: str = ""
    survives: bool = False
    needs: str = ""

    def changed_source(self) -> str:
        """The source of the file with the bug in it; raises `PatternError` if it does not fit."""
        source = (PACKAGE / self.file).read_text()
        if self.file.endswith(".c"):
            return replace_c(source, self.find, self.plant)
        return replace_code(source, self.find, self.plant, self.within)
