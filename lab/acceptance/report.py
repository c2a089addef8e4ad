"""Writes the results of an acceptance as JSON lines, and limits the time that it takes.

An acceptance is one run of ``python -m lab accept``, which checks on a GPU whether Saccade is right
and fast. It consists of sections, which run one after another and must all end within a given time.
"""

from __future__ import annotations

import json
import logging
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

GRACE_SECONDS = 10.0  # Reserved at the end, to stop a section that takes too long.
BEFORE_ALL = "start"  # The name of what runs before the first section.
T = TypeVar("T")


def process_start() -> float:
    """Returns when this process began, in seconds since 1970.

    Times of an acceptance count from then, so that its imports count too.
    """
    return psutil.Process().create_time()


@dataclass
class Report:
    """The lines of an acceptance. Each is printed and appended to ``path`` at once."""

    path: Path
    seconds: float  # For everything, counted from the start of this process.
    device: torch.device
    judges_time: bool = True  # False for shrunken shapes, whose speed means nothing.
    rivals: frozenset[str] = frozenset()
    """Sections that only time other people's software. That one of them fails or does not end in
    time is no failure of the acceptance."""
    failures: list[str] = field(default_factory=list)  # A sentence each.
    lines: list[dict[str, Any]] = field(default_factory=list)
    section: str = BEFORE_ALL  # The current one.
    first_section_start: float = 0.0  # In seconds since the start of the process.
    deadline: float = math.inf  # Of the current section, in seconds since the start.
    start_time: float = field(default_factory=lambda: process_start())

    def elapsed(self) -> float:
        """Returns the seconds since the start of the process."""
        return time.time() - self.start_time

    def seconds_left(self) -> float:
        """Returns the seconds that the current section may still take."""
        return self.deadline - self.elapsed()

    def note(self, **facts: Any) -> None:
        """Writes a line with these facts, the section, and the seconds since the process began.

        Floats, also those in lists, are rounded to four significant digits.
        """
        line = {"section": self.section, "at": round(self.elapsed(), 1)}
        line |= {name: _rounded(value) for name, value in facts.items()}
        self.lines.append(line)
        text = json.dumps(line)
        typer.echo(text)
        sys.stdout.flush()
        with self.path.open("a") as file:
            file.write(text + "\n")

    def check(self, holds: bool, sentence: str) -> None:
        """Records the sentence, which says what is wrong, as a failure unless ``holds``."""
        if not holds:
            self.failures.append(f"{self.section}: {sentence}")
            self.note(wrong=sentence)

    def check_time(self, holds: bool, sentence: str) -> None:
        """Does what :meth:`check` does if this acceptance judges speed."""
        if self.judges_time:
            self.check(holds, sentence)

    def fail(self, sentence: str) -> None:
        """Records that a section could not go on, as a failure unless it is a rival's."""
        if self.section in self.rivals:
            self.note(skipped=[self.section], why=sentence)
        else:
            self.check(False, sentence)

    def cases(self, cases: Iterable[T], of: str = "") -> Iterator[T]:
        """Yields the cases of the current section for which there is time.

        Before each case the time that is left must be enough for another case as long as the
        longest so far, and at least a second. If it is not, this case and all later ones are
        skipped. A line names the skipped cases; ``of`` says what they are cases of, and without it
        they are the section's.
        """
        longest = 0.0
        skipped: list[str] = []
        for case in cases:
            if skipped or self.seconds_left() < max(longest, 1.0):
                skipped.append(str(case))
                continue
            start = self.elapsed()
            yield case
            longest = max(longest, self.elapsed() - start)
        if skipped:
            why = "this section's share of the time is used up"
            self.note(skipped=skipped, of=of or self.section, why=why)

    def run(self, section: str, until: float, work: Callable[[], None]) -> None:
        """Runs a section by calling ``work``, or skips it where less than a second is left for it.

        The section may last until the share ``until`` of the time for all sections is used. It is
        not stopped then: ``work`` has to ask :meth:`cases` or :meth:`seconds_left`. The time for
        all sections begins with the first one, because the imports before it may take long. An
        error in the section is recorded by :meth:`fail`, so that the next section runs.
        """
        if self.section == BEFORE_ALL:
            self.first_section_start = self.elapsed()
        self.section = section
        shared = self.seconds - GRACE_SECONDS - self.first_section_start
        self.deadline = self.first_section_start + until * shared
        if self.seconds_left() < 1:
            self.note(skipped=[section], why="the time is used up")
            return
        with self.errors_as_failures(), self._noted_warnings():
            work()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def errors_as_failures(self, case: str = "") -> Iterator[None]:
        """Records an error as a failure, so that the next case or section runs."""
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            prefix = f"{case}: " if case else ""
            self.fail(f"{prefix}{type(error).__name__} at {where}: {error}")
            traceback.print_exc(file=sys.stderr)

    @contextmanager
    def _noted_warnings(self) -> Iterator[None]:
        """Writes a line for each warning that Saccade logs, because it may explain a number."""
        handler = _Notes(self)
        logger = logging.getLogger("saccade")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """Ends the process shortly before all the time is used, even in the middle of a section.

        It then writes the last line first, and exits with 1 if there are failures.
        """

        def end_process() -> None:
            sentence = f"the time of {self.seconds:.0f} s ran out in the middle of it"
            self.fail(sentence)
            self.end()
            sys.stdout.flush()
            os._exit(1 if self.failures else 0)

        timer = threading.Timer(self.seconds - self.elapsed() - GRACE_SECONDS / 2, end_process)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def end(self) -> None:
        """Writes the last line, which has all failures."""
        self.section = "end"
        self.note(wrong_count=len(self.failures), all_wrong=self.failures, seconds=self.elapsed())


class _Notes(logging.Handler):
    """Notes warnings in a report."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        self._report.note(warning=record.getMessage())


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value if isinstance(value, str | int | bool | dict | None) else str(value)
