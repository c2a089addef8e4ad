"""What an acceptance finds, a JSON line each, and how much of its time each section may take."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import typer

GRACE = 10.0  # seconds kept free at the end, in which a section that overran is cut off
BEFORE_ALL = "start"
T = TypeVar("T")


def process_start() -> float:
    """When this process began, in seconds since 1970: importing everything counts too."""
    return psutil.Process().create_time()


@dataclass
class Report:
    """The lines of an acceptance. Each is printed and appended to ``path`` at once."""

    path: Path
    seconds: float  # for everything, counted from the start of this process
    device: torch.device
    judges_time: bool = True  # False where a slow answer says nothing: shrunken shapes
    wrong: list[str] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    section: str = BEFORE_ALL
    first: float = 0.0  # when the first section began, in seconds since the start
    deadline: float = math.inf  # of the section that runs, in seconds since the start
    began: float = field(default_factory=lambda: process_start())

    def since(self) -> float:
        """Seconds since the start."""
        return time.time() - self.began

    def left(self) -> float:
        """Seconds that the section that runs may still take."""
        return self.deadline - self.since()

    def note(self, **facts: Any) -> None:
        """Writes a line; floats are rounded to four digits that count."""
        line = {"section": self.section, "at": round(self.since(), 1)}
        line |= {name: _rounded(value) for name, value in facts.items()}
        self.lines.append(line)
        text = json.dumps(line)
        typer.echo(text)
        sys.stdout.flush()
        with self.path.open("a") as file:
            file.write(text + "\n")

    def check(self, holds: bool, sentence: str) -> None:
        """Writes the sentence as wrong unless it holds that it is not so."""
        if not holds:
            self.wrong.append(f"{self.section}: {sentence}")
            self.note(wrong=sentence)

    def check_time(self, holds: bool, sentence: str) -> None:
        """As :meth:`check`, where speed is judged at all."""
        if self.judges_time:
            self.check(holds, sentence)

    def cases(self, cases: Iterable[T], of: str = "") -> Iterator[T]:
        """The cases for which there is time, going by the longest so far.

        Says which cases ``of`` what it skips.
        """
        longest = 0.0
        skipped: list[str] = []
        for case in cases:
            if skipped or self.left() < max(longest, 1.0):
                skipped.append(str(case))
                continue
            began = self.since()
            yield case
            longest = max(longest, self.since() - began)
        if skipped:
            why = "this section's share of the time is used up"
            self.note(skipped=skipped, of=of or self.section, why=why)

    def run(self, section: str, until: float, work: Callable[[], None]) -> None:
        """Runs a section, which may take until this share of the time is gone. An error in it is a
        wrong line, and the next section goes on.

        The time that is shared begins with the first section: importing everything may take long.
        """
        if self.section == BEFORE_ALL:
            self.first = self.since()
        self.section = section
        self.deadline = self.first + until * (self.seconds - GRACE - self.first)
        if self.left() < 1:
            self.note(skipped=[section], why="the time is used up")
            return
        try:
            work()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            self.check(False, f"{type(error).__name__} at {where}: {error}")
            traceback.print_exc(file=sys.stderr)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def ends_in_time(self) -> Iterator[None]:
        """Ends the process when all the time is gone, even in the middle of a section."""

        def cut() -> None:
            what = f"the time of {self.seconds:.0f} s ran out in the middle of it"
            self.check(False, what)
            self.end()
            sys.stdout.flush()
            os._exit(1)

        watch = threading.Timer(self.seconds - self.since() - GRACE / 2, cut)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def end(self) -> None:
        """The last line: everything that was wrong."""
        self.section = "end"
        self.note(wrong_count=len(self.wrong), all_wrong=self.wrong, seconds=self.since())


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value if isinstance(value, str | int | bool | dict | None) else str(value)
