"""What runs in an engine's own environment: ``python -m lab.peers.worker ENGINE ASKED``.

Rows and numbers of tokens come in by lines of JSON and turns go out; what the engine says itself
goes to the log. Knows no engine and not this library: an environment may have neither.
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

from lab.peers.rows import ROWS, Asked, Turn

Answer = Callable[[int], Turn]  # at most so many tokens
Made = Mapping[str, Callable[[Asked], Answer]]  # by the row's name


def versions(engine: str) -> dict[str, str]:
    """Of the packages that the engine's rows name, as far as they are here."""
    found = {}
    for name in {name for row in ROWS if row.engine == engine for name in row.packages}:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def told(error: Exception) -> str:
    """What an error says in the end: the cause stands in the last line of a C++ one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def main() -> None:
    engine, given = sys.argv[1], json.loads(sys.argv[2])
    asked = Asked(**{**given, "scene": tuple(given["scene"])})
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(versions(engine)), file=out)  # noqa: T201
    made: dict[str, Answer] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["row"]
        try:
            if name not in made:
                rows: Made = import_module(f"lab.peers.{engine}").MADE
                made[name] = rows[name](asked)
            answer = asdict(made[name](request["tokens"]))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": told(error)}
        print(json.dumps(answer), file=out)  # noqa: T201


if __name__ == "__main__":
    main()
