"""Runs an engine in its own environment: ``python -m lab.peers.worker ENGINE TASK``.

``lab.peers.turns`` starts one such process for each engine that Saccade is compared with, such as
vLLM. TASK is a ``Task`` in JSON. The first line of the output has the versions of packages. After
that every line of the input asks for one answer, as {"row": a row's name, "tokens": the largest
number of tokens}. A line of the output answers it with the fields of a ``Turn``, or an "error".
What the engine itself prints goes to the standard error, which is the log. This module imports
neither an engine nor Saccade, because an environment may lack both. The module of ENGINE in
``lab.peers`` is imported when the first row is asked for.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from lab.peers.rows import ROWS, Task, Turn

Answer = Callable[[int], Turn]  # Takes the largest number of tokens.
# By a row's name, the function that loads what the row needs and returns the one that answers.
StartByRow = Mapping[str, Callable[[Task], Answer]]


def package_versions(engine: str) -> dict[str, str]:
    """Returns the versions of the packages that the engine's rows name, if they are installed."""
    versions = {}
    for name in {name for row in ROWS if row.engine == engine for name in row.packages}:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def last_error_line(error: Exception) -> str:
    """Returns an error's kind and last line, which names the cause of an error from C++."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def main() -> None:
    """Answers the requests that come by standard input until it ends."""
    engine = sys.argv[1]
    fields = json.loads(sys.argv[2])
    task = Task(**{**fields, "scene": tuple(fields["scene"])})
    # Only this module may write to the standard output. What engines print there goes to the
    # standard error from here on.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(package_versions(engine)), file=out)  # noqa: T201
    answers: dict[str, Answer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["row"]
        try:
            if name not in answers:
                start_by_row: StartByRow = import_module(f"lab.peers.{engine}").START_BY_ROW
                answers[name] = start_by_row[name](task)
            answer = asdict(answers[name](request["tokens"]))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": last_error_line(error)}
        print(json.dumps(answer), file=out)  # noqa: T201


if __name__ == "__main__":
    main()
