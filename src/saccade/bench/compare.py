"""Several methods on one prompt in interleaved runs: identical answers, and what each one cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from saccade.bench.peers import PEERS, Run
from saccade.core.errors import MethodError, OptionError, SaccadeError, kind_and_line
from saccade.core.prompt import CONTEXT, Inputs
from saccade.core.result import Result
from saccade.corpus.answering import stream_answer
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Captioner
from saccade.inputs import Pair
from saccade.methods import resolve

WARM_UP_TOKENS = 12
BASELINE = "ar"


@dataclass(frozen=True)
class Summary:
    """One method's figures: medians over the runs; None where a method has no such figure.

    ``decode_seconds`` is of the tokens after the first, ``prefill_seconds`` all else (vision, both
    prefills, guidance). Speedups are per token against ``ar``, run by run, then medians.
    """

    token_ids: tuple[int, ...] | None = None
    tokens: int | None = None
    identical_to_ar: bool | None = None
    tau: float | None = None
    acceptance_rate: float | None = None
    rounds: int | None = None
    decode_seconds: float | None = None
    prefill_seconds: float | None = None
    total_seconds: float | None = None
    tokens_per_second: float | None = None
    speedup_decode: float | None = None
    speedup_end_to_end: float | None = None
    finish_reason: str | None = None
    fallback_reason: str | None = None
    error: str | None = None

    def json(self) -> dict[str, Any]:
        """The contract's fields; ``error`` only where there is one."""
        fields = asdict(self)
        if self.error is None:
            del fields["error"]
        return fields


@dataclass(frozen=True)
class Raced:
    """Every timed run of every method, in order, and why a peer has none."""

    runs: dict[str, list[Run]]
    errors: dict[str, str]

    def rows(self) -> dict[str, Summary]:
        """Every method's figures; one that failed is a row with ``error``."""
        return {
            name: Summary(error=self.errors[name])
            if name in self.errors
            else _row(own, self.runs[BASELINE])
            for name, own in self.runs.items()
        }

    def last(self) -> dict[str, Result]:
        """The last result of each method of ours."""
        ran = {name: own[-1].result for name, own in self.runs.items() if own}
        return {name: result for name, result in ran.items() if result is not None}


def named(methods: Sequence[str]) -> dict[str, Recipe | None]:
    """Each method's recipe (None: a peer), ``ar`` first and always there."""
    order = [BASELINE, *(name for name in methods if name != BASELINE)]
    return {name: None if name in PEERS else _resolve(name) for name in order}


def race(
    pair: Pair,
    asked: tuple[Inputs, Inputs | None],
    recipes: Mapping[str, Recipe | None],
    *,
    repeat: int = 3,
    settings: dict[str, Any],
    seed: int | None = None,
    captioner: Captioner | None = None,
    exact: bool = False,
    on_run: Callable[[str, int], None] | None = None,
) -> Raced:
    """Every method once, then again, after a short warm-up of each (of one per schedule, for a
    single run). ``asked`` as of :meth:`Pair.ask`, ``recipes`` as of ``named``: None stands for the
    peer of that name. ``exact`` is :func:`saccade.stream`'s."""
    if repeat < 1:
        raise OptionError(f"repeat={repeat} must be at least 1")
    runs: dict[str, list[Run]] = {name: [] for name in recipes}
    errors: dict[str, str] = {}
    theirs = {name: value for name, value in asked[0].items() if name != CONTEXT}
    warm = {**settings, "max_new_tokens": min(WARM_UP_TOKENS, settings["max_new_tokens"])}
    warm.pop("min_new_tokens", None)
    started: set[object] = set()
    for round in range(repeat + 1):
        for name, recipe in recipes.items():
            if name in errors:
                continue
            if not round and repeat == 1 and recipe is not None:
                # a quick look warms up what a schedule starts, not every method
                if recipe.schedule in started:
                    continue
                started.add(recipe.schedule)
            if on_run is not None:
                on_run(name, round)
            try:
                own = {**(settings if round else warm)}
                if recipe is None:
                    timed = PEERS[name](pair.target, pair.draft, theirs, own)
                else:
                    own |= {"seed": seed, "captioner": captioner, "exact": exact}
                    rounds = stream_answer(pair, asked, recipe, **own)
                    timed = _timed(rounds.finish()[0])
            except SaccadeError:
                raise
            except Exception as error:  # a peer's crash is a finding, not the end of the comparison
                if recipe is not None:
                    raise
                errors[name] = kind_and_line(error)
                continue
            if round:
                runs[name].append(timed)
    return Raced(runs, errors)


def _resolve(name: str) -> Recipe:
    try:
        return resolve(name)
    except MethodError as error:
        peers = ", ".join(PEERS)
        raise MethodError(f"{error} (and, for comparing: {peers})") from None


def _timed(result: Result) -> Run:
    counted = max(1, len(result.ids) - 1)
    return Run(result.ids, result.timings.decode, result.timings.total, counted, result)


def _row(runs: Sequence[Run], baseline: Sequence[Run]) -> Summary:
    last, ids = runs[-1], runs[-1].ids
    row = Summary(
        token_ids=ids,
        tokens=len(ids),
        identical_to_ar=all(run.ids == base.ids for run, base in zip(runs, baseline, strict=True)),
        decode_seconds=median(run.decode for run in runs),
        prefill_seconds=median(run.total - run.decode for run in runs),
        total_seconds=median(run.total for run in runs),
        tokens_per_second=median(run.counted / run.decode for run in runs),
        speedup_decode=median(_ratios(runs, baseline, lambda run: run.decode / run.counted)),
        speedup_end_to_end=median(
            _ratios(runs, baseline, lambda run: run.total / max(1, len(run.ids)))
        ),
    )
    if last.result is None:
        return row
    return replace(
        row,
        tau=last.result.tau,
        acceptance_rate=last.result.acceptance_rate,
        rounds=len(last.result.forwards),
        finish_reason=last.result.finish_reason,
        fallback_reason=last.result.fallback_reason,
    )


def _ratios(
    runs: Sequence[Run], baseline: Sequence[Run], per_token: Callable[[Run], float]
) -> Iterator[float]:
    for own, base in zip(runs, baseline, strict=True):
        yield per_token(base) / per_token(own)
