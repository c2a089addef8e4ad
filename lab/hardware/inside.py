"""``python -m lab vllm``: vLLM alone, compiled, with its n-grams, and with our draft.

All engines stand at once and take turns wave by wave: a busy minute falls on all alike, and what
is compared are medians within one run.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from lab.hardware.engines import Engine, Ran, Setup, Wave, clips
from saccade.engine.trace import environment
from saccade.inputs.checkpoints import NAMES

TARGET, DRAFT = str(NAMES["shapes"]), str(NAMES["shapes-draft"])
SUITE = "shapes-caption-2k"  # scenes no training has drawn
LEAST = 96  # tokens of an answer that ends by itself, by a stored run of the suite
COMPILED = {"enforce_eager": False}
ENGINE = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
ROWS: Mapping[str, Setup] = {
    "vLLM, eager": Setup(TARGET),
    "vLLM, compiled": Setup(TARGET, engine=COMPILED),
    "vLLM, its n-grams": Setup(TARGET, ngram=True, most=5),
    "ours": Setup(TARGET, {"draft": DRAFT}),
    "ours, compiled": Setup(TARGET, {"draft": DRAFT}, engine=COMPILED),
}
BEGIN, END = "<!-- `python -m lab vllm` writes from here -->", "<!-- to here -->"


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    at_once: tuple[int, ...] = (1, 8, 32)
    repeat: int = 3
    tokens: int = 192  # at most
    rows: tuple[str, ...] = field(default=tuple(ROWS))

    def wave(self, at_once: int, turn: int) -> Wave:
        """The clips of a turn, each of 2,048 visual tokens and other ones than a turn before as
        far as there are enough."""
        seeds = long_answers()
        places = range(turn * at_once, (turn + 1) * at_once)
        return clips([seeds[place % len(seeds)] for place in places], 64, 224)


def long_answers(results: Path = Path("docs/results/bench-2k/results.jsonl.gz")) -> list[int]:
    """The seeds of clips about which there is much to say."""
    with gzip.open(results, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    plain = (row for row in rows if row.get("method") == "ar" and row["suite"] == SUITE)
    return [int(row["item"].rpartition("-")[2]) for row in plain if len(row["ids"]) >= LEAST]


def settled(row: str, most: int) -> Setup:
    """A row's engine for at most so many requests at once, each of 2,048 visual tokens."""
    # prompts of a wave are read in one step, so that decoding is decoding alone
    room = {"max_num_batched_tokens": 2200 * most, "max_num_seqs": most}
    own = ROWS[row]
    return replace(own, engine={**ENGINE, **room, **own.engine})


def measure(
    plan: Plan, tell: Callable[[str], None] = lambda text: None, timeout: float = 600
) -> Iterator[dict[str, Any]]:
    """A turn each: the row, how many at once, tokens a second, and whether answers are equal."""
    with ExitStack() as stack:
        engines = {}
        for name in plan.rows:
            tell(f"starting {name}")
            setup = settled(name, max(plan.at_once))
            engines[name] = stack.enter_context(Engine(setup, timeout))
        for at_once in plan.at_once:
            for turn in range(plan.repeat + 1):  # the first warms up: shapes, caches, the pace
                wave = plan.wave(at_once, turn)
                first: Ran | None = None
                for name, engine in engines.items():
                    tell(f"{at_once} at once, turn {turn} of {plan.repeat}: {name}")
                    ran = engine.ask([wave], max_tokens=plan.tokens)
                    first = first or ran
                    if turn:
                        equal = ran.answers == first.answers
                        yield {"row": name, "at once": at_once, "equal": equal, **figures(ran)}


def figures(ran: Ran) -> dict[str, Any]:
    """Of one wave."""
    (answers,) = ran.answers
    tokens = sum(map(len, answers))
    return {
        "decoding": (tokens - len(answers)) / ran.decoding[0],  # tokens a second
        "whole": tokens / ran.seconds[0],
        "prompt": ran.prompts[0][0],
        "tokens": tokens,
        "drafted": ran.drafted,
        "accepted": ran.accepted,
        "load": os.getloadavg()[0],
    }


def run(plan: Plan, path: Path, tell: Callable[[str], None], *, more: bool) -> dict[str, Any]:
    """Measures and keeps what there is after every turn; ``more`` adds to what ``path`` holds."""
    earlier = json.loads(path.read_text())["runs"] if more else []
    kept = [one for one in earlier if one["at once"] not in plan.at_once]
    settings = {name: value for name, value in asdict(plan).items() if name != "at_once"}
    settings["threads"] = os.environ.get("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {"environment": environment(), "settings": settings, "runs": kept}
    for one in measure(plan, tell):
        found["runs"].append(one)
        path.write_text(json.dumps(found, indent=1) + "\n")
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Medians over turns, and in how many times the first row's."""
    lines = [
        "| at once | | decoding, tokens/s | whole, tokens/s | accepted | answers |",
        "|-" * 6 + "|",
    ]
    for at_once in dict.fromkeys(one["at once"] for one in runs):
        mine = [one for one in runs if one["at once"] == at_once]
        base: dict[str, float] = {}
        for name in dict.fromkeys(one["row"] for one in mine):
            own = [one for one in mine if one["row"] == name]
            cells = []
            for what in ("decoding", "whole"):
                value = median(one[what] for one in own)
                cells.append(f"{value:.0f} ({value / base.setdefault(what, value):.2f}x)")
            drafted = sum(one["drafted"] for one in own)
            rate = f"{sum(one['accepted'] for one in own) / drafted:.2f}" if drafted else ""
            equal = "equal" if all(one["equal"] for one in own) else "differ"
            lines.append(f"| {at_once} | {name} | {' | '.join(cells)} | {rate} | {equal} |")
    return "\n".join(lines) + "\n"


def written(page: str, told: str, begin: str = BEGIN) -> str:
    """A page with this table in its place."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n\n{told}\n{END}{after}"
