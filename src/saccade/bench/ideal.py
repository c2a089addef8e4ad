"""The cost model: what forwards cost, what drafting could gain at most, and the share achieved.

A round of a draft gamma levels deep costs gamma T_q + T_p(n) for n rows judged, and emits tau
tokens; plain decoding pays T_p(1) for each. The ideal speedup is their ratio from bare forwards
over a filled cache: it knows no committing, no verdicts, no Python between forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from saccade import cost
from saccade.bench.records import Answer
from saccade.bench.synthetic import Decree, imposed
from saccade.cost import Costs
from saccade.engine import run
from saccade.models import Loaded
from saccade.systems import resolve
from saccade.tree import height
from saccade.types import Inputs, Result


@dataclass(frozen=True)
class Share:
    """One method at one imposed acceptance: what was measured against what is possible."""

    method: str
    accepted: float  # tokens a round, as they came
    gamma: float  # levels drafted a round
    rows: float  # judged a round, the root included
    ideal: float
    measured: float

    @property
    def share(self) -> float:
        return self.measured / self.ideal


def ideal(costs: Costs, emitted: float, gamma: float, rows: float) -> float:
    """emitted T(1) / (gamma T_q + T(rows)): the speedup bare forwards allow."""
    low, high = int(rows), int(rows) + 1
    judged = costs.verify(low) + (costs.verify(high) - costs.verify(low)) * (rows - low)
    return emitted * costs.verify(1) / (gamma * costs.draft + judged)


def achieved(
    target: Loaded,
    draft: Loaded,
    inputs: Inputs,
    methods: Sequence[str],
    decree: Decree,
    *,
    tokens: int = 128,
    repeat: int = 3,
) -> tuple[Costs, list[Share]]:
    """Costs of bare forwards here, and each method's share of what they allow.

    Runs interleave with plain decoding; an end-of-text token ends nothing, so that all write
    ``tokens``.
    """
    length = int(inputs["input_ids"].shape[1])
    costs = cost.measure(
        target.backbone, draft.backbone, context=cost.bucket(length), draft_context=64
    )
    recipes = {name: imposed(resolve(name), decree) for name in methods}
    plain: list[float] = []
    found: dict[str, list[Result]] = {name: [] for name in methods}
    for turn in range(repeat + 1):
        base = _run(target, draft, inputs, "ar", tokens)
        if turn:  # the first warms up
            plain.append(_seconds(base))
        for name, recipe in recipes.items():
            result = _run(target, draft, inputs, recipe, tokens)
            if turn:
                found[name].append(result)
    return costs, [_share(name, own, median(plain), costs) for name, own in found.items()]


def of_answers(answers: Sequence[Answer], plain: Sequence[Answer], costs: Costs) -> Share | None:
    """The share of a recorded run; None where nothing was drafted."""
    rounds = sum(answer.rounds for answer in answers)
    if not rounds or not sum(sum(answer.drafted) for answer in answers) or not plain:
        return None
    accepted = sum(sum(answer.accepted) for answer in answers) / rounds
    emitted = accepted + sum(answer.own for answer in answers) / rounds
    gamma = sum(sum(answer.drafted) for answer in answers) / rounds
    rows = 1 + sum(sum(answer.nodes) for answer in answers) / rounds
    own = mean(answer.decode / answer.counted for answer in answers)
    base = mean(answer.decode / answer.counted for answer in plain)
    best = ideal(costs, emitted, gamma, rows)
    return Share(answers[0].method, accepted, gamma, rows, best, base / own)


def _run(target: Loaded, draft: Loaded, inputs: Inputs, method: object, tokens: int) -> Result:
    return run(
        target.backbone,
        inputs,
        draft=draft.backbone,
        method=method,
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=-1,
    )


def _seconds(result: Result) -> float:
    return result.timings.decode / max(1, len(result.ids) - 1)


def _share(name: str, results: Sequence[Result], plain: float, costs: Costs) -> Share:
    rounds = [round for result in results for round in result.rounds]
    accepted = mean(len(round.accepted) for round in rounds)
    emitted = mean(len(round.emitted) for round in rounds)
    gamma = mean(height(round.parents) for round in rounds)
    rows = 1 + mean(len(round.tokens) for round in rounds)
    measured = plain / median(_seconds(result) for result in results)
    return Share(name, accepted, gamma, rows, ideal(costs, emitted, gamma, rows), measured)
