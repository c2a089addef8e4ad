"""Where a round's time goes, and how near it comes to what bare forwards allow.

A round that drafts gamma levels and has n rows judged costs gamma c + T(n) at best and emits tau
tokens; plain decoding pays T(1) for each. The ideal speedup is their ratio, over the levels and
rows of every round as it was (T bends: the cost of a mean round is not the mean cost).

A *bare forward* is ``Session.score`` over a filled cache as long as the prompt and half the answer
(the draft's: as much of it as its view kept): embedding, layers, head, and the Python that lays
them out. It is our own forward and no bound of the machine's: an ideal by it shows what the loop
around forwards costs (proposing, verdicts, committing, learning, stopping, and that the two models
drive each other out of the processor's caches), not what a faster forward could gain. c and T are
of chains; a tree's mask and its wider levels count as loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from saccade.bench import measures
from saccade.bench.compare import BASELINE, run_interleaved
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

CYCLES = 15  # of bare forwards


@dataclass(frozen=True)
class Bare:
    """Seconds of bare forwards at one method's lengths."""

    target: Mapping[int, float]  # T by rows, of every number of rows that occurred
    draft: float  # c, of a level


@dataclass(frozen=True)
class Profile:
    """One method: what a round takes, out of what, and against what is possible."""

    method: str
    tau: float
    accepted: float  # tokens a round
    gamma: float  # levels drafted a round
    rows: float  # judged a round, the root included
    round: float  # seconds of a round, and of them
    drafting: float
    verifying: float
    rest: float
    level: float | None  # seconds of drafting a level; None where nothing is drafted
    bare_round: float  # gamma c + T(n), the mean over rounds
    bare_level: float  # c
    bare_verify: float  # T(n), the mean over rounds
    bare_plain: float  # T(1)
    ideal: Interval  # medians over clips, with intervals
    measured: Interval
    share: Interval


def forwards(rounds: Sequence[RoundRecord]) -> Iterator[tuple[int, int]]:
    """(levels, rows) computed in each round; the opening computes none."""
    for round in rounds:
        if not round.opening:
            yield height(round.parents), 1 + len(round.tokens)


def bare_seconds(rounds: Sequence[RoundRecord], bare: Bare) -> float:
    """What the rounds would take were there nothing but their forwards."""
    return sum(levels * bare.draft + bare.target[rows] for levels, rows in forwards(rounds))


def ideal(rounds: Sequence[RoundRecord], bare: Bare) -> float:
    """tau T(1) / (gamma c + T(n)) over all rounds; the first token comes of the prefill."""
    emitted = sum(len(round.emitted) for round in rounds if not round.opening)
    return emitted * bare.target[1] / bare_seconds(rounds, bare)


Key = tuple[str, int]  # whose forward ("" is the target's at its own length), rows


def timed(sessions: Mapping[str, tuple[Session, int]], keys: Sequence[Key]) -> dict[Key, float]:
    """Median seconds of bare forwards, every kind in turn, then again. Each is run twice and the
    second counted: what another model's forward put out of the processor's caches is back."""
    found: dict[Key, list[float]] = {key: [] for key in keys}
    for _ in range(CYCLES):
        for name, rows in keys:
            session, context = sessions[name]
            cost_measurement.time_step(session, context, rows)
            found[name, rows].append(cost_measurement.time_step(session, context, rows))
    return {key: median(own) for key, own in found.items()}


def profile(
    target: Loaded,
    draft: Loaded | None,
    clips: Sequence[Inputs],
    recipes: Mapping[str, Recipe],
    *,
    settings: Mapping[str, Any],
    repeat: int = 3,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Profile]:
    """Each method's profile, ``ar`` among them. On every clip the methods take turns, and the bare
    forwards of these very lengths are timed right after them.

    Raises OptionError for a draft whose level is no one forward.
    """
    drafting = {name: _drafts(name, recipe, target, draft) for name, recipe in recipes.items()}
    ran: dict[str, list[tuple[Bare, list[TimedRun], list[TimedRun]]]] = {
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
            on_run=lambda name, turn, where=where: tell(f"{where}, turn {turn}: {name}"),
        )
        tell(f"{where}: bare forwards")
        bare = _bare(target.backbone, drafting, timed.runs)
        for name, runs in timed.runs.items():
            ran[name].append((bare[name], runs, timed.runs[BASELINE]))
    return [_profiled(name, own) for name, own in ran.items()]


def _drafts(name: str, recipe: Recipe, target: Loaded, draft: Loaded | None) -> Backbone | None:
    """Whose forward a level of this method is; None for no forward at all."""
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


def _bare(
    target: Backbone,
    drafting: Mapping[str, Backbone | None],
    runs: Mapping[str, Sequence[TimedRun]],
) -> dict[str, Bare]:
    """Bare forwards of one clip, for every method."""
    results = {name: [_result(run) for run in own] for name, own in runs.items()}
    every = [result for own in results.values() for result in own]
    counts = {rows for result in every for _, rows in forwards(result.rounds)} | {1}
    half = max(len(result.ids) for result in every) // 2
    context = every[0].prompt_tokens + half
    sessions = {"": (cost_measurement.filled_session(target, context, 1, max(counts) + 1), context)}
    for name, model in drafting.items():
        if model is not None:
            one = results[name][0]
            unseen = one.visual_tokens - (one.draft_visual_tokens or 0)
            sessions[name] = (
                cost_measurement.filled_session(model, context - unseen, 1, 2),
                context - unseen,
            )
    keys = [("", rows) for rows in sorted(counts)] + [(name, 1) for name in sessions if name]
    found = timed(sessions, keys)
    judged = {rows: found["", rows] for rows in counts}
    return {name: Bare(judged, found.get((name, 1), 0.0)) for name in runs}


def _result(run: TimedRun) -> Result:
    assert run.result is not None, "peers have no rounds"
    if run.result.fallback_reason is not None:
        raise OptionError(f"{run.result.method} gave up drafting: {run.result.fallback_reason}")
    return run.result


def _profiled(
    name: str, clips: Sequence[tuple[Bare, Sequence[TimedRun], Sequence[TimedRun]]]
) -> Profile:
    ideals, measured, shares = [], [], []
    for bare, runs, plain in clips:
        best = [ideal(_result(run).rounds, bare) for run in runs]
        own = [
            (base.decode / base.counted) / (run.decode / run.counted)
            for run, base in zip(runs, plain, strict=True)
        ]
        ideals.append(median(best))
        measured.append(median(own))
        shares.append(median(got / most for got, most in zip(own, best, strict=True)))
    results = [_result(run) for _, runs, _ in clips for run in runs]
    rounds = [round for result in results for round in result.forwards]
    count = len(rounds)
    done = [
        (levels * bare.draft, bare.target[rows])
        for bare, runs, _ in clips
        for run in runs
        for levels, rows in forwards(_result(run).rounds)
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
        bare_round=mean(drafted + judged for drafted, judged in done),
        bare_level=median(bare.draft for bare, _, _ in clips),
        bare_verify=mean(judged for _, judged in done),
        bare_plain=median(bare.target[1] for bare, _, _ in clips),
        ideal=_interval(ideals),
        measured=_interval(measured),
        share=_interval(shares),
    )


def _interval(values: Sequence[float]) -> Interval:
    found = measures.interval(values)
    assert found is not None
    return found
