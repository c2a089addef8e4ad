"""Runs several methods on one prompt in turns, and compares their answers and their speed.

Besides our methods, peers take part: Hugging Face's own ways to decode (``peers``). Speedups are
against plain decoding by Saccade, the method ``ar``. Methods run in turns, so that a machine that
becomes slower meanwhile does so for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from saccade.answering.chat_model import stream_answer
from saccade.bench.peers import PEERS, TimedRun
from saccade.core.errors import MethodError, OptionError, SaccadeError, kind_and_line
from saccade.core.prompt import DOCUMENT_MASK, Inputs
from saccade.core.result import Result
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Captioner
from saccade.inputs import Pair
from saccade.methods import resolve

WARM_UP_TOKENS = 12  # The longest answer of a warm-up, in tokens.
BASELINE = "ar"  # Plain decoding.


@dataclass(frozen=True)
class Summary:
    """One method's figures over its runs. A figure that the method does not have is None.

    Seconds and speeds are medians over the runs. ``identical_to_ar`` says whether the answers of
    all runs are those of ``ar``. The ids, ``tau``, ``acceptance_rate``, ``rounds`` and the two
    reasons are those of the last run.

    ``decode_seconds`` covers the tokens after the first, ``prefill_seconds`` everything else
    (vision, both prefills, choosing what the draft reads). If an answer has only one token, nothing
    is decoded, so ``tokens_per_second`` and ``speedup_decode`` are None.

    A speedup is the seconds per token of ``ar``, divided by those of the method. Each repetition
    gives one such ratio, and the speedup is their median.
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
        """Returns the fields of the JSON output; ``error`` is there only if there is one."""
        fields = asdict(self)
        if self.error is None:
            del fields["error"]
        return fields


@dataclass(frozen=True)
class TimedRuns:
    """Every timed run of every method, in order, and the error of each method that failed.

    The keys are the names of methods and peers.
    """

    runs: dict[str, list[TimedRun]]
    errors: dict[str, str]

    def summaries(self) -> dict[str, Summary]:
        """Returns the figures of every method that has run; one that failed has only ``error``.

        Before all runs are over a method may have one run fewer than plain decoding.
        """
        summaries = {}
        for name, runs in self.runs.items():
            if name in self.errors:
                summaries[name] = Summary(error=self.errors[name])
            elif runs:
                summaries[name] = _summarize(runs, self.runs[BASELINE][: len(runs)])
        return summaries

    def last_results(self) -> dict[str, Result]:
        """Returns the last result of each of our methods; peers have none."""
        results = {name: runs[-1].result for name, runs in self.runs.items() if runs}
        return {name: result for name, result in results.items() if result is not None}


def resolve_methods(methods: Sequence[str]) -> dict[str, Recipe | None]:
    """Returns each method's recipe, or None for a peer; ``ar`` is always there and comes first."""
    order = [BASELINE, *(name for name in methods if name != BASELINE)]
    return {name: None if name in PEERS else _resolve(name) for name in order}


def run_interleaved(
    pair: Pair,
    question: tuple[Inputs, Inputs | None],
    recipes: Mapping[str, Recipe | None],
    *,
    repeat: int = 3,
    settings: dict[str, Any],
    seed: int | None = None,
    captioner: Captioner | None = None,
    exact: bool = False,
    on_run: Callable[[str, int], None] | None = None,
    on_run_end: Callable[[TimedRuns], None] | None = None,
    may_start: Callable[[str], bool] | None = None,
    may_refuse: Collection[str] = (),
) -> TimedRuns:
    """Runs the methods in turns, ``repeat`` times each, after a short warm-up.

    ``question`` is the result of :meth:`Pair.ask`, ``recipes`` that of ``resolve_methods``, where
    None stands for the peer of that name. ``settings`` are further arguments of ``stream_answer``
    and of peers, and must have ``max_new_tokens``. ``seed``, ``captioner`` and ``exact`` are for
    our methods alone. With ``exact`` their answers equal those of ``ar`` bit for bit, in bf16 and
    fp16 too.

    The warm-up runs every method and peer once. If ``repeat`` is 1, it is shorter: of our methods
    that have the same schedule it runs only the first.

    ``on_run`` is called before each run with the method and the number of its repetition (0 in the
    warm-up), and ``on_run_end`` after each timed run with all runs so far. Before a timed run
    ``may_start`` is called with the method; if it returns False, this run and all later ones are
    left out.

    Some errors do not end the comparison. They are recorded in ``errors``, and the method is not
    run again: any error of a peer, and the SaccadeError of a method in ``may_refuse``. Every other
    error is raised. So are all errors of plain decoding, since the others are compared with it.
    """
    if repeat < 1:
        raise OptionError(f"repeat={repeat} must be at least 1")
    runs: dict[str, list[TimedRun]] = {name: [] for name in recipes}
    errors: dict[str, str] = {}
    # Only our own methods know which tokens are of documents.
    peer_inputs = {name: value for name, value in question[0].items() if name != DOCUMENT_MASK}
    warm_up_settings = {
        **settings,
        "max_new_tokens": min(WARM_UP_TOKENS, settings["max_new_tokens"]),
    }
    warm_up_settings.pop("min_new_tokens", None)
    warm_schedules: set[object] = set()
    timed = TimedRuns(runs, errors)
    for iteration in range(repeat + 1):
        is_warm_up = iteration == 0
        for name, recipe in recipes.items():
            if name in errors:
                continue
            if not is_warm_up and may_start is not None and not may_start(name):
                return timed
            if is_warm_up and repeat == 1 and recipe is not None:
                # One method warms up for all methods of its schedule.
                if recipe.schedule in warm_schedules:
                    continue
                warm_schedules.add(recipe.schedule)
            if on_run is not None:
                on_run(name, iteration)
            try:
                run_settings = {**(warm_up_settings if is_warm_up else settings)}
                if recipe is None:
                    run = PEERS[name](pair.target, pair.draft, peer_inputs, run_settings)
                else:
                    run_settings |= {"seed": seed, "captioner": captioner, "exact": exact}
                    stream = stream_answer(pair, question, recipe, **run_settings)
                    run = _timed_run(stream.finish()[0])  # One question has one result.
            except SaccadeError as error:
                is_peer = recipe is None
                if not is_peer and (name == BASELINE or name not in may_refuse):
                    raise
                errors[name] = str(error)
                continue
            except Exception as error:  # A peer that crashes does not end the comparison.
                if recipe is not None:
                    raise
                errors[name] = kind_and_line(error)
                continue
            if not is_warm_up:
                runs[name].append(run)
                if on_run_end is not None:
                    on_run_end(timed)
    return timed


def _resolve(name: str) -> Recipe:
    """Returns a method's recipe. The error for an unknown name also lists the peers."""
    try:
        return resolve(name)
    except MethodError as error:
        peers = ", ".join(PEERS)
        raise MethodError(f"{error} (and, for comparing: {peers})") from None


def _timed_run(result: Result) -> TimedRun:
    """Returns the figures of one of our runs. The first token comes with the prefill, so it is not
    counted as decoded."""
    decoded_tokens = len(result.ids) - 1
    return TimedRun(result.ids, result.timings.decode, result.timings.total, decoded_tokens, result)


def _summarize(runs: Sequence[TimedRun], baseline: Sequence[TimedRun]) -> Summary:
    """Returns a method's figures over its runs and plain decoding's runs of the same turns."""
    last = runs[-1]
    ids = runs[-1].ids
    # The only token of an answer of one token comes with the prefill, so none is decoded.
    has_decoded = all(run.decoded_tokens > 0 for run in (*runs, *baseline))
    summary = Summary(
        token_ids=ids,
        tokens=len(ids),
        identical_to_ar=all(run.ids == base.ids for run, base in zip(runs, baseline, strict=True)),
        decode_seconds=median(run.decode_seconds for run in runs),
        prefill_seconds=median(run.total_seconds - run.decode_seconds for run in runs),
        total_seconds=median(run.total_seconds for run in runs),
        tokens_per_second=(
            median(run.decoded_tokens / run.decode_seconds for run in runs) if has_decoded else None
        ),
        speedup_decode=(
            median(
                _speed_ratios(runs, baseline, lambda run: run.decode_seconds / run.decoded_tokens)
            )
            if has_decoded
            else None
        ),
        speedup_end_to_end=median(
            _speed_ratios(runs, baseline, lambda run: run.total_seconds / max(1, len(run.ids)))
        ),
    )
    if last.result is None:
        return summary
    return replace(
        summary,
        tau=last.result.tau,
        acceptance_rate=last.result.acceptance_rate,
        rounds=len(last.result.forwards),
        finish_reason=last.result.finish_reason,
        fallback_reason=last.result.fallback_reason,
    )


def _speed_ratios(
    runs: Sequence[TimedRun], baseline: Sequence[TimedRun], per_token: Callable[[TimedRun], float]
) -> Iterator[float]:
    """Yields how many times as fast each run was as plain decoding's run of the same turn.

    ``per_token`` returns the seconds per token that a run is judged by.
    """
    for run, base in zip(runs, baseline, strict=True):
        yield per_token(base) / per_token(run)
