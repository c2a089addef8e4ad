"""Measures several inference engines on one clip, in turns.

Each engine (vLLM, OpenVINO, ...) has a Python environment of its own, and a worker process in it
answers (``lab.peers.worker``). This module starts the workers and asks them. It knows where each
environment is, and imports no engine. A row is a line of the table: an engine with one way to
decode. A turn is one answer of a row. ``python -m lab peers`` runs this.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware import vllm_comparison
from lab.peers.rows import GENERATE, REFERENCES, ROWS, Task, table
from saccade.engine.trace import environment
from saccade.world import drawing, scenes

BEGIN = "<!-- `python -m lab peers` writes from here -->"
PYTHONS: Mapping[str, Path] = {
    "saccade": Path(sys.executable),
    **{name: Path(".cache", name, "bin", "python") for name in ("vllm", "openvino", "flashspec")},
}
PAUSE_SECONDS = 0.5  # Before a turn, because threads of the previous engine may still be busy.


@dataclass(frozen=True)
class Plan:
    """Says what is measured; the default is the clip of ``make bench``, of 2,048 visual tokens."""

    scene: tuple[int, int, int] = (20000002, 64, 224)  # (seed, number of frames, pixels a side)
    seconds: float = 8.0  # The clip's length.
    words: str = "Describe the video in detail."
    tokens: int = 192  # The largest number of tokens of an answer.
    repeat: int = 3  # Turns of each row that are measured.
    threads: int = 2  # Of each engine.
    # Names of the rows that are measured.
    rows: tuple[str, ...] = tuple(row.name for row in ROWS)


class Worker:
    """A process in an engine's environment, which answers until ``close``.

    First it sends the versions of the engine's packages, and then a line of JSON for each question.
    Where it cannot answer, ``ask`` returns a dictionary with the key "error", which says why. A
    process that ended, or took longer than ``timeout`` seconds to answer, is not started again, and
    every later question gets that error.
    """

    def __init__(
        self, engine: str, task: Task, folder: Path, timeout: float, python: Path | None = None
    ) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / f"{engine}.log"
        python = python or PYTHONS[engine]
        self._error = f"no environment {python.parents[1]}: `make peers` makes it"
        if python.exists():
            self._start(engine, task, python)
        self.versions: dict[str, str] = self._receive()
        if "error" in self.versions:
            self.versions = {}

    def ask(self, row: str, tokens: int) -> dict[str, Any]:
        """Returns the fields of a row's turn, with at most ``tokens`` tokens, or its error."""
        if self._process is None:
            return {"error": self._error}
        try:
            print(json.dumps({"row": row, "tokens": tokens}), file=self._to_worker)  # noqa: T201
        except BrokenPipeError:
            return self._stop("it ended")
        return self._receive()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._from_worker.close()
            with suppress(BrokenPipeError):  # The process may have ended before it read a line.
                self._to_worker.close()

    def _start(self, engine: str, task: Task, python: Path) -> None:
        # Every engine has the same number of threads, and vLLM reserves no core.
        threads = {"OMP_NUM_THREADS": str(task.threads), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [str(python), "-m", "lab.peers.worker", engine, json.dumps(asdict(task))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"},
            )
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._to_worker = process.stdin
        self._from_worker = process.stdout

    def _receive(self) -> dict[str, Any]:
        if self._process is None:
            return {"error": self._error}
        if not select.select([self._from_worker], [], [], self._timeout)[0]:
            return self._stop(f"no answer in {self._timeout:g} s")
        line = self._from_worker.readline()
        return dict(json.loads(line)) if line else self._stop("it ended")

    def _stop(self, why: str) -> dict[str, Any]:
        log_lines = self._log.read_text(errors="replace").strip().splitlines()
        self.close()
        self._error = f"{why}: {log_lines[-1]}" if log_lines else why
        return {"error": self._error}


def run(
    plan: Plan, path: Path, on_progress: Callable[[str], None], timeout: float = 900
) -> dict[str, Any]:
    """Measures a plan, and writes the results so far to ``path`` after every turn.

    ``timeout`` is in seconds, for one answer. Returns all results, as ``lab.peers.rows.table``
    reads them.
    """
    facts: dict[str, Any] = {
        "environment": environment(),
        "settings": asdict(plan),
        **{"versions": {}, "answers": {}, "errors": {}, "runs": []},
    }
    for kind, name, value in measure(plan, on_progress, timeout):
        if kind == "runs":
            facts[kind].append({"row": name, **value})
        else:
            facts[kind][name] = value
        path.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def measure(
    plan: Plan, on_progress: Callable[[str], None], timeout: float
) -> Iterator[tuple[str, str, Any]]:
    """Yields (kind, name, value) of every result.

    The kinds are "versions" of an environment, "answers" to compare with, "errors" of a row and
    "runs", which are its turns. The first turn warms up, and only its errors are yielded. A row
    with an error is not asked again. An answer to compare with that fails is left out.
    """
    rows = [row for row in ROWS if row.name in plan.rows]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        seed, frames, side = plan.scene
        np.save(folder / "frames.npy", drawing.render(scenes.scene(seed), frames, side))
        task = Task(str(folder / "frames.npy"), plan.scene, plan.seconds, plan.words, plan.threads)
        workers = {}
        for engine in dict.fromkeys(("saccade", *(row.engine for row in rows))):
            on_progress(f"starting {engine}")
            workers[engine] = Worker(engine, task, folder, timeout)
            stack.callback(workers[engine].close)
            yield "versions", engine, workers[engine].versions
        # Plain decoding's answers. Engines place the text after a video at different positions, so
        # there is one for each way.
        for name in (GENERATE, *REFERENCES):
            on_progress(f"the answer to compare with: {name}")
            answer = workers["saccade"].ask(name, plan.tokens)
            if "ids" in answer:
                yield "answers", name, answer["ids"]
        for turn in range(plan.repeat + 1):
            # Every other turn is in reverse, so that each row does not always follow the same one.
            # The order is a copy, because a row that fails is removed from ``rows``.
            order = tuple(reversed(rows)) if turn % 2 else tuple(rows)
            for row in order:
                on_progress(f"turn {turn} of {plan.repeat}: {row.name}")
                time.sleep(PAUSE_SECONDS)
                turn_fields = workers[row.engine].ask(row.name, plan.tokens)
                if "error" in turn_fields:
                    rows.remove(row)
                    yield "errors", row.name, turn_fields["error"]
                elif turn:
                    yield "runs", row.name, {**turn_fields, "load": os.getloadavg()[0]}


def page_with_table(page: str, facts: Mapping[str, Any]) -> str:
    """Returns the page with the table of these results in its place."""
    return vllm_comparison.replace_table(page, table(facts), BEGIN)
