"""Compares vLLM alone, compiled, with its n-grams and with our draft, for ``python -m lab vllm``.

A wave is a number of questions that are sent to an engine at once. All engines are started before
the first wave and then take turns: every engine answers the same wave before the next one. Other
load on the machine therefore affects all of them alike, and medians of one run can be compared.
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

from lab.hardware.vllm_engines import Engine, Setup, Wave, WaveResults, clip_questions
from saccade.core.errors import OptionError
from saccade.engine.trace import environment
from saccade.inputs.checkpoints import NAMES

TARGET = str(NAMES["shapes"])
DRAFT = str(NAMES["shapes-draft"])
SUITE = "shapes-caption-2k"  # Its scenes were never drawn in training.
# Only clips are used whose answer by plain decoding had so many tokens or more in a stored run.
MIN_ANSWER_TOKENS = 96
COMPILED_OPTIONS = {"enforce_eager": False}
# No engine reuses what it computed for the same prompt or clip before.
ENGINE_OPTIONS = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
# The engines that are compared, by their names in the table's rows.
ROWS: Mapping[str, Setup] = {
    "vLLM, eager": Setup(TARGET),
    "vLLM, compiled": Setup(TARGET, engine=COMPILED_OPTIONS),
    "vLLM, its n-grams": Setup(TARGET, ngram=True, most=5),
    "ours": Setup(TARGET, {"draft": DRAFT}),
    "ours, compiled": Setup(TARGET, {"draft": DRAFT}, engine=COMPILED_OPTIONS),
}
# The marks in the page between which the table is written.
BEGIN, END = "<!-- `python -m lab vllm` writes from here -->", "<!-- to here -->"


@dataclass(frozen=True)
class Plan:
    """Says which engines are measured, with how many requests at once and how often."""

    at_once: tuple[int, ...] = (1, 8, 32)
    repeat: int = 3  # How many turns are recorded.
    tokens: int = 192  # The largest number of tokens of an answer.
    rows: tuple[str, ...] = field(default=tuple(ROWS))  # Names of ``ROWS``.

    def wave(self, at_once: int, turn: int) -> Wave:
        """Returns the questions of a turn, one clip of 2,048 visual tokens each.

        Turns use different clips until there are no more, and then begin again.
        """
        seeds = long_answers()
        places = range(turn * at_once, (turn + 1) * at_once)
        turn_seeds = [seeds[place % len(seeds)] for place in places]
        return clip_questions(turn_seeds, frames=64, side=224)  # 2,048 visual tokens.


def long_answers(results: Path = Path("docs/results/bench-2k/results.jsonl.gz")) -> list[int]:
    """Returns the seeds of the clips whose answer by plain decoding is long in a stored run."""
    with gzip.open(results, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    plain = (row for row in rows if row.get("method") == "ar" and row["suite"] == SUITE)
    return [
        int(row["item"].rpartition("-")[2]) for row in plain if len(row["ids"]) >= MIN_ANSWER_TOKENS
    ]


def engine_setup(row: str, most: int) -> Setup:
    """Returns the settings of a row's engine for at most ``most`` requests at once."""
    # The prompts of a wave are read in one step, so that no prefill falls into the decoding time. A
    # prompt has 2,048 visual tokens and some words, so 2,200 tokens are room enough.
    room = {"max_num_batched_tokens": 2200 * most, "max_num_seqs": most}
    own = ROWS[row]
    return replace(own, engine={**ENGINE_OPTIONS, **room, **own.engine})


def measure_turns(
    plan: Plan, on_progress: Callable[[str], None] = lambda text: None, timeout: float = 600
) -> Iterator[dict[str, Any]]:
    """Starts all engines and yields one record for each wave that an engine answered.

    A record has the row, the number of requests at once, the figures of :func:`wave_figures`, and
    whether the answers equal those of the first engine to the same wave. ``timeout`` is the seconds
    that an engine's start or one wave may take. The first turn warms up and has no records.
    """
    with ExitStack() as stack:
        engines = {}
        for name in plan.rows:
            on_progress(f"starting {name}")
            setup = engine_setup(name, max(plan.at_once))
            engines[name] = stack.enter_context(Engine(setup, timeout))
        for at_once in plan.at_once:
            for turn in range(plan.repeat + 1):  # The first turn warms up and is not recorded.
                wave = plan.wave(at_once, turn)
                reference: WaveResults | None = None
                for name, engine in engines.items():
                    on_progress(f"{at_once} at once, turn {turn} of {plan.repeat}: {name}")
                    results = engine.ask([wave], max_tokens=plan.tokens)
                    reference = reference or results
                    if turn:
                        equal = results.answers == reference.answers
                        yield {
                            "row": name,
                            "at once": at_once,
                            "equal": equal,
                            **wave_figures(results),
                        }


def wave_figures(results: WaveResults) -> dict[str, Any]:
    """Returns the speeds, token counts and machine load of one wave.

    Both speeds are in tokens a second. "decoding" leaves out the first token of each answer, and
    divides by the longest time between an answer's first and last token. "whole" is over all the
    time of the wave. "load" is how many processes of the machine ran or waited, a mean of the last
    minute.
    """
    (answers,) = results.answers
    tokens = sum(map(len, answers))
    tokens_after_first = tokens - len(answers)
    return {
        "decoding": tokens_after_first / results.decoding[0],
        "whole": tokens / results.seconds[0],
        "prompt": results.prompts[0][0],  # Tokens of the first question.
        "tokens": tokens,
        "drafted": results.drafted,
        "accepted": results.accepted,
        "load": os.getloadavg()[0],
    }


def run_comparison(
    plan: Plan, path: Path, on_progress: Callable[[str], None], *, more: bool
) -> dict[str, Any]:
    """Measures a plan, writes the results to ``path`` after every record, and returns them.

    With ``more``, the records that ``path`` has for other numbers of requests at once are kept. The
    environment and the settings that are written are of this run alone. Raises OptionError for a
    row that does not exist.
    """
    unknown = [name for name in plan.rows if name not in ROWS]
    if unknown:
        raise OptionError(f"there is no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
    earlier = json.loads(path.read_text())["runs"] if more and path.is_file() else []
    other_runs = [one for one in earlier if one["at once"] not in plan.at_once]
    settings = {name: value for name, value in asdict(plan).items() if name != "at_once"}
    settings["threads"] = os.environ.get("OMP_NUM_THREADS", "1")
    facts: dict[str, Any] = {"environment": environment(), "settings": settings, "runs": other_runs}
    for one in measure_turns(plan, on_progress):
        facts["runs"].append(one)
        path.write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a Markdown table of the records' medians over turns.

    Ratios are to the first row of the same number of requests at once. The acceptance rate is of
    all turns together.
    """
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


def replace_table(page: str, table: str, begin: str = BEGIN) -> str:
    """Returns the page with this table between the markers ``begin`` and ``END``.

    A page without these markers gets them and the table at its end.
    """
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n\n{table}\n{END}{after}"
