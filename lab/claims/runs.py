"""Names the benchmark runs that the claims rest on, with the arguments that make each again.

A stored run says itself how it was made. Runs that nobody made yet are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.claims.rule import Suites
from lab.studies.specvlm import LAMBDA
from saccade.bench import records
from saccade.core.errors import OptionError
from saccade.world.suites import LENGTHS, suites

EVERY_2K_SUITE = (
    "shapes-caption-2k,shapes-events-2k,shapes-qa-2k,shapes-chat-2k,shapes-ood-2k,shapes-diff-2k"
)
CALIBRATED = f"specvlm/lambda={LAMBDA}"
EAGLE = f"{CALIBRATED}/shape=eagle-2"
REPACKED = f"{CALIBRATED}/positions=repacked"
SELF_DRAFTED = f"specvlm-self/lambda={LAMBDA}"
WAITING = "hippo/early=wait"


@dataclass(frozen=True)
class PlannedRun:
    """A run that is not stored yet. ``minutes`` are of two cores, estimated from stored answers."""

    suites: str
    methods: str
    minutes: int
    limit: int = 12
    options: tuple[str, ...] = ()


PLANNED: Mapping[str, PlannedRun] = {
    "specvlm-8k": PlannedRun(
        "shapes-caption-8k,shapes-events-8k,shapes-qa-8k,shapes-ood-8k,shapes-chat-8k",
        f"ar,sd-tree,sd-tree/view=random/keep=0.1,{CALIBRATED}",
        28,
    ),
    "std-batch-2k": PlannedRun(
        EVERY_2K_SUITE, "ar,std/keep=0.125,streaming/keep=0.125", 5, 8, ("--batch", "8")
    ),
    "tabed-2k": PlannedRun(
        EVERY_2K_SUITE,
        "ar,sd,sd/view=text,sd/view=caption,sd/view=pooled,tabed-mt,tabed,"
        "tabed-mtcp/weights=equal,tabed-mtcp",
        11,
        options=("--draft", "shapes-draft-naive"),
    ),
    "hippo-2k": PlannedRun(
        EVERY_2K_SUITE,
        f"ar,sd,sd-tree,{CALIBRATED},{WAITING},hippo/early=superset,hippo/early=all,"
        f"{WAITING}/schedule=serial,hippo-paper,pearl,pearl-syn,pearl-specvlm/lambda={LAMBDA}",
        14,
    ),
}


def bench_arguments(name: str, results: Path, limit: int | None = None, seed: int = 0) -> list[str]:
    """Returns the arguments of ``saccade bench`` that make a run of this name.

    ``limit`` is the number of items of each suite, where it is not the run's own. A ``seed`` above
    0 makes a repeat of the same questions, which is stored beside the run as ``NAME-seed-N``.
    Raises OptionError where there is neither a stored run nor a planned one.
    """
    if name in PLANNED:
        planned = PLANNED[name]
        return [
            *("--threads", "2", "--limit", str(limit or planned.limit)),
            *("--suite", planned.suites, "--methods", planned.methods, *planned.options),
            *_seed_arguments(seed),
        ]
    if not (results / name).is_dir():
        known = ", ".join(PLANNED)
        raise OptionError(
            f"no run is called {name}; stored runs lie in {results}, planned: {known}"
        )
    about, answers = records.read_finished_run(results / name)
    plan, suites = about["plan"], about["plan"]["suites"]
    own_limit = len({answer.item for answer in answers if answer.suite == suites[0]})
    arguments = [
        *_seed_arguments(seed or plan.get("seed", 0)),
        *("--threads", str(about["environment"]["threads"]), "--limit", str(limit or own_limit)),
        *("--suite", ",".join(suites), "--methods", ",".join(plan["methods"])),
        *("--target", plan["target"], "--draft", plan["draft"]),
    ]
    for option, value in (("temperature", 0), ("batch", 1)):
        if plan.get(option, value) != value:
            arguments += [f"--{option}", str(plan[option])]
    return arguments


def _seed_arguments(seed: int) -> list[str]:
    return ["--seed", str(seed)] if seed else []


def planned_suites(name: str) -> Suites:
    """Returns the suites of a planned run, with their visual tokens and items."""
    planned = PLANNED[name]
    names = tuple(planned.suites.split(","))
    by_name = suites()
    sizes = sorted({LENGTHS[by_name[suite].length].tokens for suite in names})
    return Suites(name, names, " to ".join(f"{size:,}" for size in sizes), planned.limit)


def stored_minutes(name: str, results: Path) -> float:
    """Returns how long the answers of a stored run took, without loading and warming up."""
    return sum(answer.total for answer in records.read_finished_run(results / name)[1]) / 60
