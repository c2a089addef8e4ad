"""Engines in environments of their own, asked in turns. Knows no engine, only where each lives."""

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

from lab.hardware import inside
from lab.peers.rows import GENERATE, REFERENCES, ROWS, Asked, table
from saccade.engine.trace import environment
from saccade.world import drawing, scenes

BEGIN = "<!-- `python -m lab peers` writes from here -->"
PYTHONS: Mapping[str, Path] = {
    "saccade": Path(sys.executable),
    **{name: Path(".cache", name, "bin", "python") for name in ("vllm", "openvino", "flashspec")},
}
REST = 0.5  # seconds before a turn, while threads of the engine before still spin


@dataclass(frozen=True)
class Plan:
    """What is measured: by default the clip of ``make bench``, of 2,048 visual tokens."""

    scene: tuple[int, int, int] = (20000002, 64, 224)  # seed, frames, pixels a side
    seconds: float = 8.0
    words: str = "Describe the video in detail."
    tokens: int = 192  # at most
    repeat: int = 3
    threads: int = 2
    rows: tuple[str, ...] = tuple(row.name for row in ROWS)


class Child:
    """The worker of one environment, until ``close``. Whoever cannot answer says why: a
    dictionary with "error"."""

    def __init__(
        self, engine: str, asked: Asked, folder: Path, timeout: float, python: Path | None = None
    ) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / f"{engine}.log"
        python = python or PYTHONS[engine]
        self._lost = f"no environment {python.parents[1]}: `make peers` makes it"
        if python.exists():
            self._start(engine, asked, python)
        self.versions: dict[str, str] = self._line()
        if "error" in self.versions:
            self.versions = {}

    def ask(self, row: str, tokens: int) -> dict[str, Any]:
        """A turn's fields, or its error."""
        if self._process is None:
            return {"error": self._lost}
        try:
            print(json.dumps({"row": row, "tokens": tokens}), file=self._to)  # noqa: T201
        except BrokenPipeError:
            return self._end("it ended")
        return self._line()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._of.close()
            with suppress(BrokenPipeError):  # what it was not there to read
                self._to.close()

    def _start(self, engine: str, asked: Asked, python: Path) -> None:
        # as many threads for everybody; a library that counts cores keeps none back
        threads = {"OMP_NUM_THREADS": str(asked.threads), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [str(python), "-m", "lab.peers.worker", engine, json.dumps(asdict(asked))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"},
            )
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._to = process.stdin
        self._of = process.stdout

    def _line(self) -> dict[str, Any]:
        if self._process is None:
            return {"error": self._lost}
        if not select.select([self._of], [], [], self._timeout)[0]:
            return self._end(f"no answer in {self._timeout:g} s")
        line = self._of.readline()
        return dict(json.loads(line)) if line else self._end("it ended")

    def _end(self, why: str) -> dict[str, Any]:
        said = self._log.read_text(errors="replace").strip().splitlines()
        self.close()
        self._lost = f"{why}: {said[-1]}" if said else why
        return {"error": self._lost}


def run(
    plan: Plan, path: Path, tell: Callable[[str], None], timeout: float = 900
) -> dict[str, Any]:
    """Measures, and keeps what there is in ``path`` after every turn."""
    found: dict[str, Any] = {
        "environment": environment(),
        "settings": asdict(plan),
        **{"versions": {}, "answers": {}, "errors": {}, "runs": []},
    }
    for kind, name, told in measure(plan, tell, timeout):
        if kind == "runs":
            found[kind].append({"row": name, **told})
        else:
            found[kind][name] = told
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def measure(
    plan: Plan, tell: Callable[[str], None], timeout: float
) -> Iterator[tuple[str, str, Any]]:
    """What was learnt, of whom, and where it belongs: "versions", "answers" to compare with,
    "errors" or "runs". The first turn starts and warms up, and is not kept."""
    rows = [row for row in ROWS if row.name in plan.rows]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        seed, frames, side = plan.scene
        np.save(folder / "frames.npy", drawing.render(scenes.scene(seed), frames, side))
        asked = Asked(
            str(folder / "frames.npy"), plan.scene, plan.seconds, plan.words, plan.threads
        )
        children = {}
        for engine in dict.fromkeys(("saccade", *(row.engine for row in rows))):
            tell(f"starting {engine}")
            children[engine] = Child(engine, asked, folder, timeout)
            stack.callback(children[engine].close)
            yield "versions", engine, children[engine].versions
        for name in (GENERATE, *REFERENCES):
            tell(f"the answer to compare with: {name}")
            answer = children["saccade"].ask(name, plan.tokens)
            if "ids" in answer:
                yield "answers", name, answer["ids"]
        for turn in range(plan.repeat + 1):
            # in reverse every other time: what an engine leaves busy is not always the same one's
            for row in tuple(rows[:: -1 if turn % 2 else 1]):
                tell(f"turn {turn} of {plan.repeat}: {row.name}")
                time.sleep(REST)
                told = children[row.engine].ask(row.name, plan.tokens)
                if "error" in told:
                    rows.remove(row)
                    yield "errors", row.name, told["error"]
                elif turn:
                    yield "runs", row.name, {**told, "load": os.getloadavg()[0]}


def written(page: str, found: Mapping[str, Any]) -> str:
    """A page with the table of what was found in its place."""
    return inside.written(page, table(found), BEGIN)
