"""Measures where a round's time goes, and how close it is to what bare forwards allow.

A round that drafts gamma levels and verifies n rows costs at least gamma c + T(n) and emits tau
tokens, while plain decoding costs T(1) for each token. The ideal speedup is the ratio of the two,
summed over the levels and rows of every single round, because T is not linear: the cost of a mean
round is not the mean cost.

A *bare forward* is ``Session.score`` over a filled cache as long as the prompt and half the answer;
a draft's cache lacks the visual tokens that its view leaves out. A bare forward includes embedding,
layers, head and the Python around them. It is our own forward and not a bound of the machine. The
ideal therefore shows what the loop around the forwards costs: drafting, acceptance, commits,
learning, stopping, and the two models' competition for the processor's caches. It does not show
what a faster forward could gain. c and T are those of chains, so a tree's mask and its wider levels
count as loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from saccade.bench import measures
from saccade.bench.comparison import BASELINE, run_interleaved
from saccade.bench.measures import Interval
from saccade.bench.peers import TimedRun
from saccade.core.capabilities import Capability
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.result import Result, RoundRecord
from saccade.core.tree import height
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes import cost_measurement
from saccade.inputs import Loaded, Pair
from saccade.model.backbone import Backbone
from saccade.model.session import Session

BARE_CYCLES = 15  # How often each kind of bare forward is timed.


@dataclass(frozen=True)
class BareSeconds:
    """The seconds of bare forwards at the context lengths of one method."""

    target: Mapping[int, float]  # T(n) by n, for every number of rows that occurred.
    draft: float  # c, the seconds of one drafted level.


@dataclass(frozen=True)
class Profile:
    """What a round of one method takes, what it consists of, and what would be possible."""

    method: str
    tau: float  # Tokens emitted in a round.
    accepted: float  # Tokens accepted in a round.
    gamma: float  # Levels drafted in a round.
    rows: float  # Rows verified in a round, the root included.
    round: float  # Seconds of a round.
    drafting: float  # Seconds of it that were spent on drafting.
    verifying: float  # Seconds of it that were spent on verification.
    rest: float  # All other seconds of it.
    level: float | None  # Seconds to draft one level; None if nothing is drafted.
    bare_round: float  # gamma c + T(n), the mean over rounds.
    bare_level: float  # c, the median over clips.
    bare_verify: float  # T(n), the mean over rounds.
    bare_plain: float  # T(1), the median over clips.
    ideal: Interval  # The ideal speedup, a median over clips with its interval.
    measured: Interval  # The measured speedup.
    share: Interval  # The measured speedup as a share of the ideal.


def forward_sizes(rounds: Sequence[RoundRecord]) -> Iterator[tuple[int, int]]:
    """Yields (levels, rows) of the forwards of each round; the opening round has none."""
    for round in rounds:
        if not round.opening:
            yield height(round.parents), 1 + len(round.tokens)


def bare_seconds(rounds: Sequence[RoundRecord], bare: BareSeconds) -> float:
    """Returns the seconds that the rounds would take if they consisted of forwards alone."""
    return sum(levels * bare.draft + bare.target[rows] for levels, rows in forward_sizes(rounds))


def ideal_speedup(rounds: Sequence[RoundRecord], bare: BareSeconds) -> float:
    """Returns tau T(1) / (gamma c + T(n)) over all rounds but the opening.

    The first token comes from the prefill, so it does not count.
    """
    emitted = sum(len(round.emitted) for round in rounds if not round.opening)
    return emitted * bare.target[1] / bare_seconds(rounds, bare)


Key = tuple[str, int]
"""A kind of bare forward: (method whose draft computes, or "" for the target; number of rows)."""


def time_bare_forwards(
    sessions: Mapping[str, tuple[Session, int]], keys: Sequence[Key]
) -> dict[Key, float]:
    """Returns the median seconds of each kind of bare forward. The kinds take turns.

    ``sessions`` has, by the first part of a key, the session that computes and its cached tokens.
    Each forward is run twice and the second is timed, because another model's forward before it may
    have evicted this model's data from the processor's caches.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in keys}
    for _ in range(BARE_CYCLES):
        for name, rows in keys:
            session, context = sessions[name]
            cost_measurement.time_step(session, context, rows)
            seconds[name, rows].append(cost_measurement.time_step(session, context, rows))
    return {key: median(own) for key, own in seconds.items()}


def profile_methods(
    target: Loaded,
    draft: Loaded | None,
    clips: Sequence[Inputs],
    recipes: Mapping[str, Recipe],
    *,
    settings: Mapping[str, Any],
    repeat: int = 3,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Profile]:
    """Measures the profile of each method, ``ar`` among them.

    The methods take turns on every clip, and bare forwards at the lengths that occurred are timed
    right after them. Raises OptionError for a method whose drafted level is not a single forward.
    """
    drafting = {
        name: _drafting_model(name, recipe, target, draft) for name, recipe in recipes.items()
    }
    ran: dict[str, list[tuple[BareSeconds, list[TimedRun], list[TimedRun]]]] = {
        name: [] for name in recipes
    }
    for number, inputs in enumerate(clips):
        where = f"clip {number + 1} of {len(clips)}"
        timed = run_interleaved(
            Pair(target, draft),
            (inputs, None),
            recipes,
            repeat=repeat,
            settings=dict(settings),
            on_run=lambda name, turn, where=where: on_progress(f"{where}, turn {turn}: {name}"),
        )
        on_progress(f"{where}: bare forwards")
        bare = _measure_bare_forwards(target.backbone, drafting, timed.runs)
        for name, runs in timed.runs.items():
            ran[name].append((bare[name], runs, timed.runs[BASELINE]))
    return [_summarize_method(name, own) for name, own in ran.items()]


def _drafting_model(
    name: str, recipe: Recipe, target: Loaded, draft: Loaded | None
) -> Backbone | None:
    """Returns the model whose forward drafts a level; None if drafting needs no forward."""
    offers = recipe.drafter.offers
    if Capability.READS_VIEW not in offers:
        return None
    if Capability.TARGET_KEYS in offers:
        return target.backbone
    if Capability.DRAFT_MODEL in offers and draft is not None:
        return draft.backbone
    raise OptionError(
        f"{name} has no profile: a level of its draft is not one forward of a model that the "
        "target waits for"
    )


def _measure_bare_forwards(
    target: Backbone,
    drafting: Mapping[str, Backbone | None],
    runs: Mapping[str, Sequence[TimedRun]],
) -> dict[str, BareSeconds]:
    """Times the bare forwards of one clip for every method.

    The target's forwards are over the whole prompt and half of the longest answer. Those of a draft
    are over as many tokens less the visual tokens that its view leaves out.
    """
    results = {name: [_result_of(run) for run in own] for name, own in runs.items()}
    every = [result for own in results.values() for result in own]
    row_counts = {rows for result in every for _, rows in forward_sizes(result.rounds)} | {1}
    half = max(len(result.ids) for result in every) // 2
    context = every[0].prompt_tokens + half
    target_session = cost_measurement.filled_session(
        target, context, requests=1, room=max(row_counts) + 1
    )
    sessions = {"": (target_session, context)}
    for name, model in drafting.items():
        if model is not None:
            any_result = results[name][0]  # All of a method's runs here are of the same clip.
            unseen = any_result.visual_tokens - (any_result.draft_visual_tokens or 0)
            draft_context = context - unseen
            draft_session = cost_measurement.filled_session(
                model, draft_context, requests=1, room=2
            )
            sessions[name] = (draft_session, draft_context)
    keys = [("", rows) for rows in sorted(row_counts)] + [(name, 1) for name in sessions if name]
    seconds = time_bare_forwards(sessions, keys)
    target_seconds = {rows: seconds["", rows] for rows in row_counts}
    return {name: BareSeconds(target_seconds, seconds.get((name, 1), 0.0)) for name in runs}


def _result_of(run: TimedRun) -> Result:
    assert run.result is not None, "peers have no rounds"
    if run.result.fallback_reason is not None:
        raise OptionError(f"{run.result.method} stopped drafting: {run.result.fallback_reason}")
    return run.result


def _summarize_method(
    name: str, clips: Sequence[tuple[BareSeconds, Sequence[TimedRun], Sequence[TimedRun]]]
) -> Profile:
    """Returns the profile of a method from each clip's bare seconds, its runs and those of ar."""
    # The speedups of each clip: medians over its runs.
    ideals, measured, shares = [], [], []
    for bare, runs, plain in clips:
        ideal_by_run = [ideal_speedup(_result_of(run).rounds, bare) for run in runs]
        measured_by_run = [
            (base.decode_seconds / base.decoded_tokens) / (run.decode_seconds / run.decoded_tokens)
            for run, base in zip(runs, plain, strict=True)
        ]
        share_by_run = [
            got / ideal for got, ideal in zip(measured_by_run, ideal_by_run, strict=True)
        ]
        ideals.append(median(ideal_by_run))
        measured.append(median(measured_by_run))
        shares.append(median(share_by_run))
    # What a round takes: means over the rounds of all clips and runs.
    results = [_result_of(run) for _, runs, _ in clips for run in runs]
    rounds = [round for result in results for round in result.forwards]
    count = len(rounds)
    bare_parts = [  # The seconds of (drafting, verifying) of each round by bare forwards.
        (levels * bare.draft, bare.target[rows])
        for bare, runs, _ in clips
        for run in runs
        for levels, rows in forward_sizes(_result_of(run).rounds)
    ]
    drafting = sum(round.draft_seconds for round in rounds) / count
    verifying = sum(round.verify_seconds for round in rounds) / count
    seconds = sum(result.timings.decode for result in results) / count
    levels = sum(height(round.parents) for round in rounds)
    return Profile(
        method=name,
        tau=mean(len(round.emitted) for round in rounds),
        accepted=mean(len(round.accepted) for round in rounds),
        gamma=levels / count,
        rows=1 + mean(len(round.tokens) for round in rounds),
        round=seconds,
        drafting=drafting,
        verifying=verifying,
        rest=seconds - drafting - verifying,
        level=drafting * count / levels if levels else None,
        bare_round=mean(drafted + verified for drafted, verified in bare_parts),
        bare_level=median(bare.draft for bare, _, _ in clips),
        bare_verify=mean(verified for _, verified in bare_parts),
        bare_plain=median(bare.target[1] for bare, _, _ in clips),
        ideal=_interval(ideals),
        measured=_interval(measured),
        share=_interval(shares),
    )


def _interval(values: Sequence[float]) -> Interval:
    interval = measures.interval(values)
    assert interval is not None
    return interval
