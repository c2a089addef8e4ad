"""Builds the command line arguments that repeat a stored benchmark run of the claims.

A stored run says itself how it was made: its suites, methods, models and items.
"""

from __future__ import annotations

from pathlib import Path

from saccade.bench import records
from saccade.core.errors import OptionError


def bench_arguments(name: str, results: Path, limit: int | None = None, seed: int = 0) -> list[str]:
    """Returns the arguments of ``saccade bench`` that make a stored run of this name again.

    ``limit`` is the number of items of each suite; without it, it is the number that the stored
    run has of its first suite. A ``seed`` above 0 makes a repeat of the same questions. The claims
    look for it in the folder ``NAME-seed-N`` beside the run.
    Raises OptionError where there is no such run.
    """
    if not (results / name / "results.jsonl.gz").is_file():
        stored = sorted(path.parent.name for path in results.glob("*/results.jsonl.gz"))
        raise OptionError(
            f"no run is called {name}; these lie in {results}: {', '.join(stored) or 'none'}"
        )
    about, answers = records.read_run(results / name)
    plan = about["plan"]
    suites = about["plan"]["suites"]
    own_limit = len({answer.item for answer in answers if answer.suite == suites[0]})
    seed = seed or plan.get("seed", 0)
    arguments = [
        *(["--seed", str(seed)] if seed else []),
        *("--threads", str(about["environment"]["threads"]), "--limit", str(limit or own_limit)),
        *("--suite", ",".join(suites), "--methods", ",".join(plan["methods"])),
        *("--target", plan["target"], "--draft", plan["draft"]),
    ]
    for option, value in (("temperature", 0), ("batch", 1)):
        if plan.get(option, value) != value:
            arguments += [f"--{option}", str(plan[option])]
    return arguments
