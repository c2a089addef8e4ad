"""What drafting gives when answers are sampled: every method on the same clips, in turns.

Sampled answers of two methods differ in length, so the ratios are of seconds a token: a method's of
plain decoding's on the same clip with the same seed, the median over clips.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from saccade.bench.compare import named
from saccade.bench.measures import interval
from saccade.bench.runner import shown
from saccade.bench.suites.shapes import suites
from saccade.bench.trace import environment
from saccade.core.errors import OptionError
from saccade.core.result import Result
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask

BASELINE = "ar"


@dataclass(frozen=True)
class Sampled:
    """One method over all clips."""

    method: str
    decode: tuple[float, float, float]  # over plain decoding, with a 95 % interval
    whole: tuple[float, float, float]  # the same from inputs to the last token
    tau: float  # tokens a target forward
    tokens: int


def sampled(
    target: Loaded,
    draft: Loaded,
    methods: Sequence[str],
    *,
    suite: str,
    clips: int,
    temperature: float,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Numbers of each method on the first clips of a suite, greedy at temperature 0."""
    found = suites()
    if suite not in found:
        raise OptionError(f"there is no suite {suite!r}: take one of {', '.join(found)}")
    recipes = named(list(dict.fromkeys((BASELINE, *methods))))
    settings = {"do_sample": temperature > 0} | (
        {"temperature": temperature} if temperature > 0 else {}
    )
    results: dict[str, list[Result]] = {name: [] for name in recipes}
    for number, item in enumerate(islice(found[suite].items(), clips)):
        inputs = ask(target, item.question, **shown(item))
        order = list(recipes)
        turn = number % len(order)
        for name in (*(order if number == 0 else ()), *order[turn:], *order[:turn]):
            if tell is not None:
                tell(f"{item.id}: {name}, {number} of {clips} done")
            recipe = recipes[name]
            assert recipe is not None, "only our own methods"
            result = run(
                target.backbone,
                inputs,
                draft=draft.backbone,
                method=recipe,
                seed=number,
                max_new_tokens=found[suite].setting.max_new_tokens,
                **settings,
            )
            results[name] = [*results[name][:number], result]  # of the first clip the second run
    plain = results[BASELINE]
    return {
        "environment": environment(),
        "suite": suite,
        "clips": clips,
        "temperature": temperature,
        "methods": [vars(numbers(name, own, plain)) for name, own in results.items()],
    }


def numbers(name: str, own: Sequence[Result], plain: Sequence[Result]) -> Sampled:
    def ratio(seconds: Callable[[Result], float]) -> tuple[float, float, float]:
        each = [
            (seconds(b) / len(b.ids)) / (seconds(a) / len(a.ids))
            for a, b in zip(own, plain, strict=True)
        ]
        found = interval(each)
        assert found is not None
        return found

    rounds = [round for result in own for round in result.rounds]
    return Sampled(
        name,
        ratio(lambda result: result.timings.decode),
        ratio(lambda result: result.timings.total),
        sum(len(round.emitted) for round in rounds) / len(rounds),
        sum(len(result.ids) for result in own),
    )


def line(method: Mapping[str, Any]) -> str:
    """A method as a row of the page."""
    decode, whole = (
        "{:.2f} [{:.2f}, {:.2f}]".format(*method[name]) for name in ("decode", "whole")
    )
    return f"| `{method['method']}` | {decode} | {whole} | {method['tau']:.2f} |"
