"""Finds the setting that decodes fastest for a pair of models on this machine, from a few videos.

The search tries one axis after the other (view or lambda, keep, shape), each from the best setting
so far. Every candidate runs in turns with plain decoding (``ar``), on the first half of the videos.
The fastest of several noisy timings looks better than it is. So the winner is then compared with
``auto`` and ``ar`` on the other videos, and is chosen only if it beats both there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from typing import Any

import torch

from saccade.bench.comparison import BASELINE, Summary, resolve_methods, run_interleaved
from saccade.core.capabilities import Capability
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.core.prompt import Inputs
from saccade.engine.generate import DEFAULT_METHOD
from saccade.engine.trace import environment
from saccade.inputs import Pair
from saccade.inputs.loading import round_weights
from saccade.methods import resolve
from saccade.model.kernels.few_bits import roundings_on

Candidates = Mapping[str, Sequence[str]]
"""The values that the search tries, by axis; the axes are searched in this order."""

# SpecVLM's view keeps the fewest tokens whose attention adds up to the share lambda, and fills its
# budget with an even sample of the others. Where attention is spread over many tokens, a small
# share already takes many of them, so small values are tried as well.
LAMBDAS = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5")
CANDIDATES: Candidates = {
    "lambda": LAMBDAS,
    "keep": ("0.05", "0.1", "0.2", "0.3", "0.5", "1"),
    "shape": (
        *("fit", "tree", "chain-3", "chain-5", "chain-7", "chain-9", "chain-12"),
        *("best-8", "best-16"),
    ),
}
# `auto` chooses no view of its own, so the view is an axis as well.
AUTO_CANDIDATES: Candidates = {
    "view": tuple(f"specvlm/lambda={value}" for value in LAMBDAS),
    **{axis: values for axis, values in CANDIDATES.items() if axis != "lambda"},
}
LAMBDA_AXES = ("lambda", "view")  # Axes whose candidates are first compared by accepted tokens.
START_STAGE = "start"
CONFIRM_STAGE = "confirm"
ROUNDING_STAGE = "draft in "  # The name of a rounding follows.
# The search's winner has to beat REFERENCE, which is ``auto``. By default the search also begins
# with it, or with REFERENCE_WITHOUT_DRAFT where there is no draft model.
REFERENCE = DEFAULT_METHOD
REFERENCE_WITHOUT_DRAFT = "specvlm-self"
TIE_MARGIN = 0.02  # Speeds that differ by a smaller share than this count as equal.
MAX_CONFIRMING_RUNS = 3  # Of each method, on each video that the search did not use.


MeasureMethods = Callable[[int, Sequence[str], float], Mapping[str, Summary]]
"""Takes a video's index, methods, and the moment by which to end. Runs the methods and ``ar`` in
turns and returns each one's figures, without methods for which there was no time."""


@dataclass(frozen=True)
class Trial:
    """One method at one stage of the search: its figures in each run, and medians over the runs.

    A stage compares some methods with each other, for example those that differ on one axis.
    """

    stage: str
    method: str
    summaries: tuple[Summary, ...]  # One for each run, which is an answer about one video.

    @property
    def speedup(self) -> float:
        """How many times as fast as ``ar`` it decoded, without all that comes before the first
        token."""
        return median(_decode_speedup(row) for row in self.summaries)

    @property
    def end_to_end_speedup(self) -> float:
        """How many times as fast as ``ar`` it gave whole answers, prefill included."""
        return median(_end_to_end_speedup(row) for row in self.summaries)

    @property
    def taus(self) -> list[float]:
        return [row.tau or 0.0 for row in self.summaries]

    @property
    def tau(self) -> float:
        return median(self.taus)

    @property
    def fallback(self) -> str | None:
        return next((row.fallback_reason for row in self.summaries if row.fallback_reason), None)

    def json(self) -> dict[str, Any]:
        fields = {"stage": self.stage, "method": self.method, "runs": len(self.summaries)}
        fields |= {"speedup": round(self.speedup, 3), "whole": round(self.end_to_end_speedup, 3)}
        fields |= {"tau": round(self.tau, 3)}
        return fields if self.fallback is None else {**fields, "fallback": self.fallback}


@dataclass(frozen=True)
class Calibration:
    """The setting to use, its gain, and what that was measured on.

    ``best`` is the trial whose method is to be used. ``table`` has all trials in the order of their
    runs, and ``skipped`` the stages for which there was no time. ``target`` and ``draft`` are names
    of models; ``draft`` is None where there is none, or where it is a head in the target's own
    checkpoint. ``visual_tokens`` has the number of visual tokens of each video that ran.
    ``held_out`` is the number of videos that the search did not use: 0 if there is only one.
    ``threads`` are torch's. ``seconds`` is how long calibrating took. ``draft_quantize`` is the
    rounding of the draft's weights that is to be used, if there is one.
    """

    best: Trial
    table: tuple[Trial, ...]
    skipped: tuple[str, ...]
    target: str
    draft: str | None
    visual_tokens: tuple[int, ...]
    held_out: int
    max_new_tokens: int
    threads: int
    seconds: float
    environment: Mapping[str, Any]
    draft_quantize: str | None = None

    @property
    def method(self) -> str:
        return self.best.method

    @property
    def worth_it(self) -> bool:
        """Whether the chosen method beats plain decoding; one whose draft failed does not."""
        return self.best.speedup > 1 and self.best.fallback is None

    @property
    def against_auto(self) -> float | None:
        """The chosen method's :meth:`speedup_over_auto`."""
        return self.speedup_over_auto(self.best)

    def speedup_over_auto(self, trial: Trial) -> float | None:
        """Returns how many times as fast as ``auto`` a trial decoded in the same runs.

        None where the two never ran side by side.
        """
        # A stage that rounds the draft has a single trial. If its method is auto, it would be
        # compared with itself.
        is_rounded = trial.stage.startswith(ROUNDING_STAGE)
        auto = [t for t in self.table if (t.stage, t.method) == (trial.stage, REFERENCE)]
        return _speed_ratio(trial, auto[0], _decode_speedup) if auto and not is_rounded else None

    @property
    def advice(self) -> str:
        """What to do and why, in one line."""
        videos = f"on {self.held_out} video(s) held out" if self.held_out else "on the one video"
        if self.best.stage.startswith(ROUNDING_STAGE):
            gain = f"x {self.best.speedup:.2f} against ar"
            return (
                f"use {self.method} with --draft-quantize {self.draft_quantize}: {gain}, {videos}"
            )
        if self.method not in (BASELINE, REFERENCE):
            gains = f"x {self.best.speedup:.2f} against ar, x {self.against_auto:.2f} against auto"
            return f"use {self.method}: {gains}, {videos}"
        decision = "keep plain decoding (ar)" if self.method == BASELINE else "keep auto"
        if self.best.stage != CONFIRM_STAGE:
            return f"{decision}: there was no time to confirm anything else"
        # The stage ran ar first, then auto, and then the search's winner if that is another method.
        confirming = [trial for trial in self.table if trial.stage == CONFIRM_STAGE]
        plain, auto = confirming[:2]
        losers = [trial for trial in confirming[1:] if trial is not self.best]
        losses = [_loss_reason(trial, [auto, plain]) for trial in losers]
        reasons = f"{'; '.join(losses)}, {videos}" if losses else "the search found nothing faster"
        return f"{decision}: {reasons}"

    def json(self) -> dict[str, Any]:
        """Returns the content of the calibration's file."""
        measurements = {
            "worth_it": self.worth_it,
            "speedup": round(self.best.speedup, 3),
            "against_auto": None if self.against_auto is None else round(self.against_auto, 3),
            "tau": round(self.best.tau, 3),
            "visual_tokens": self.visual_tokens,
            "held_out": self.held_out,
            "max_new_tokens": self.max_new_tokens,
            "seconds": round(self.seconds, 1),
            "date": date.today().isoformat(),
            "skipped": self.skipped,
            "environment": self.environment,
            "trials": [trial.json() for trial in self.table],
        }
        setting = {"method": self.method, "target": self.target, "draft": self.draft}
        setting |= {"draft_quantize": self.draft_quantize}
        return {**setting, "threads": self.threads, "measured": measurements}


def calibrate(
    pair: Pair,
    questions: Sequence[tuple[Inputs, Inputs | None]],
    *,
    method: str | None = None,
    candidates: Candidates | None = None,
    seconds: float = 600,
    max_new_tokens: int = 128,
    on_progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Returns the fastest setting that the search from ``method`` finds in about ``seconds``.

    The setting is ``auto`` or ``ar`` where no other is faster. Without a ``method`` the search
    begins at ``auto``, or at ``specvlm-self`` where there is no draft model. An axis that
    ``method`` sets is not searched. ``questions`` has for each video the result of ``Pair.ask``:
    the target's inputs and the draft's own. Without ``candidates`` the search tries CANDIDATES, or
    AUTO_CANDIDATES if it begins at ``auto``. ``on_progress`` is called with a line of text before
    each run. Raises MethodError where a candidate writes other tokens than plain decoding, and
    OptionError for a method that drafts nothing or where there is no video or no time.
    """
    method = method or REFERENCE
    if pair.draft is None and method == REFERENCE:
        method = REFERENCE_WITHOUT_DRAFT
    check_method(method)
    if not questions or seconds <= 0:
        raise OptionError("calibrating needs a video or more and some seconds")
    visual_tokens: dict[int, int] = {}
    start = time.monotonic()
    pace = _RunPace(time.monotonic)

    def measure(video: int, methods: Sequence[str], until: float) -> dict[str, Summary]:
        def on_run(name: str, iteration: int) -> None:
            pace.start_run()
            if on_progress is not None:
                state = "" if iteration else "warming up "
                seconds_left = max(0, round(start + seconds - time.monotonic()))
                place = f"video {video + 1} of {len(questions)}"
                on_progress(f"{place}: {state}{name}, {seconds_left} s left")

        is_first_video = not visual_tokens
        # The references run on the first video even if there is no time.
        required = (BASELINE, REFERENCE) if is_first_video else ()
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
        timed = run_interleaved(
            pair,
            questions[video],
            resolve_methods(methods),
            repeat=1,
            settings=settings,
            on_run=on_run,
            on_run_end=lambda runs: pace.end_run(),
            may_start=lambda name: name in required or pace.can_end_by(until),
        )
        results = timed.last_results()
        if BASELINE not in results:
            return {}
        visual_tokens[video] = results[BASELINE].visual_tokens
        return timed.summaries()

    result = search(method, len(questions), measure, candidates=candidates, seconds=seconds)
    return Calibration(
        *result,
        target=pair.target.name,
        draft=None if pair.draft is None or pair.draft.is_own_head else pair.draft.name,
        visual_tokens=tuple(visual_tokens[video] for video in sorted(visual_tokens)),
        held_out=len(questions) // 2,
        max_new_tokens=max_new_tokens,
        threads=torch.get_num_threads(),
        seconds=time.monotonic() - start,
        environment=environment(),
    )


def propose_rounding(
    pair: Pair,
    questions: Sequence[tuple[Inputs, Inputs | None]],
    calibration: Calibration,
    on_progress: Callable[[str], None] | None = None,
    *,
    seconds: float = 600,
) -> Calibration:
    """Returns the calibration with trials of roundings of the draft's weights added to its table.

    The fastest of these trials becomes its ``best``, if that trial beats plain decoding and the
    trial that was ``best`` before, both by more than ``TIE_MARGIN``. The method that was chosen
    before, or ``auto`` if that was plain decoding, runs on the videos that the search did not use,
    once with each rounding. A rounding that the draft does not allow is left out. A rounding for
    which there is no time within ``seconds`` is among ``skipped``. Where there is no draft model, a
    rounded copy of the target drafts.
    """
    deadline = time.monotonic() + seconds
    pace = _RunPace(time.monotonic)
    method = REFERENCE if calibration.method == BASELINE else calibration.method
    held_out = questions[(len(questions) + 1) // 2 :] or questions
    speedup_to_beat = max(1.0, calibration.best.speedup) * (1 + TIE_MARGIN)
    updated: Calibration = calibration
    draft = pair.draft or pair.target
    for rounding in [each.name for each in roundings_on(draft.backbone.device)]:
        if on_progress is not None:
            on_progress(f"{method} with a draft in {rounding}")
        try:
            rounded = replace(pair, draft=round_weights(draft, rounding))
        except ModelError:
            continue
        settings = {"max_new_tokens": calibration.max_new_tokens, "do_sample": False}
        summaries: list[Summary] = []
        for question in held_out:
            timed = run_interleaved(
                rounded,
                question,
                resolve_methods([method]),
                repeat=1,
                settings=settings,
                on_run=lambda name, iteration: pace.start_run(),
                on_run_end=lambda runs: pace.end_run(),
                may_start=lambda name: pace.can_end_by(deadline),
            )
            if method not in timed.last_results():
                break
            summaries.append(timed.summaries()[method])
        stage = f"{ROUNDING_STAGE}{rounding}"
        if len(summaries) < len(held_out):
            updated = replace(updated, skipped=(*updated.skipped, stage))
            continue
        trial = Trial(stage, method, tuple(summaries))
        updated = replace(updated, table=(*updated.table, trial))
        if trial.fallback is None and trial.speedup > speedup_to_beat:
            speedup_to_beat = trial.speedup
            updated = replace(updated, best=trial, draft_quantize=rounding)
    return updated


class _RunPace:
    """Measures how long runs take, so that none begins that would end too late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = clock()
        self._longest = 0.0

    def start_run(self) -> None:
        self._started_at = self._clock()

    def end_run(self) -> None:
        self._longest = max(self._longest, self._clock() - self._started_at)

    def can_end_by(self, moment: float) -> bool:
        """Returns whether a run as long as the longest so far would end by a moment."""
        return self._clock() + self._longest <= moment


def check_method(method: str) -> None:
    """Raises MethodError or OptionError unless ``method`` can be calibrated."""
    if not resolve(method).drafts:
        raise OptionError(f"{method!r} drafts nothing, so there is nothing to calibrate")


# -- the search ---------------------------------------------------------------------------------


def search(
    base: str,
    videos: int,
    measure: MeasureMethods,
    *,
    candidates: Candidates | None = None,
    seconds: float = 600,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Trial, tuple[Trial, ...], tuple[str, ...]]:
    """Searches from ``base``; returns what to use, every trial in order, and the skipped stages.

    ``base`` is the method to begin with, and ``videos`` the number of videos. The search uses the
    first half of the videos, and the rest is held out; a single video serves both. Plain decoding
    and ``auto`` always run on the first video. After that, methods run on a video only if, at the
    pace measured so far, they end in time and leave time to confirm the winner. Each stage gets an
    even share of the remaining time. Where that is not enough, the stage runs on fewer videos,
    never with fewer candidates.
    """
    deadline = clock() + seconds
    seconds_per_method: dict[int, float] = {}  # By video.
    table: list[Trial] = []
    skipped: list[str] = []

    def run_stage(
        name: str,
        methods: Sequence[str],
        stage_videos: Sequence[int],
        stage_deadline: float,
        stages_left: int = 1,
    ) -> list[Trial]:
        """Runs a stage's methods on some videos; returns their trials, none if there is no time.

        The time until ``stage_deadline`` is divided among ``stages_left`` stages, of which this is
        the first.
        """
        share_end = clock() + (stage_deadline - clock()) / stages_left
        summaries: list[Mapping[str, Summary]] = []  # By method, of each video.
        run_count = len({BASELINE, *methods})  # Plain decoding runs at every stage.
        for video in stage_videos:
            start = clock()
            # A video that has not run yet is expected to be as slow as the slowest so far.
            slowest = max(seconds_per_method.values(), default=0)
            expected_seconds = run_count * seconds_per_method.get(video, slowest)
            # The first video may take more than the stage's share, or nothing would be compared.
            limit = share_end if summaries else stage_deadline
            if seconds_per_method and start + expected_seconds > limit:
                break
            by_method = measure(video, methods, stage_deadline)
            seconds_per_method[video] = (clock() - start) / len({BASELINE, *by_method})
            different = [
                method
                for method in methods
                if method in by_method and not by_method[method].identical_to_ar
            ]
            if different:
                raise MethodError(
                    f"{different[0]} wrote other tokens than plain decoding on video {video + 1}: "
                    "in float32 that is a bug, and in lower precision it may be rounding "
                    "(try --dtype float32)"
                )
            if name == START_STAGE:
                # This stage has one video. Methods for which there was no time are left out of it.
                methods = [each for each in methods if each in by_method]
            if not set(methods) <= by_method.keys():
                # The time ran out before every method had run on this video. Methods can only be
                # compared on the same videos, so this one is left out.
                break
            summaries.append(by_method)
        if not summaries:
            skipped.append(name)
            return []
        trials = [
            Trial(name, method, tuple(by_method[method] for by_method in summaries))
            for method in methods
        ]
        table.extend(trials)
        return trials

    # The start: the references, the base, and the base with the shape "fit" if it sets no shape.
    half = (videos + 1) // 2
    search_videos = range(half)
    held_out_videos = range(half, videos) or range(videos)
    if candidates is None:
        candidates = AUTO_CANDIDATES if base.split("/")[0] == REFERENCE else CANDIDATES
    fit_names = [] if "/shape=" in base else [f"{base}/shape=fit"]
    # ``base_name`` is ``base``, or its name with the shape "fit" if that is the same method.
    base_name, start_methods = _possible_methods(base, fit_names)
    references = [BASELINE, REFERENCE]
    first_methods = [*dict.fromkeys((*references, *start_methods))]
    trials = run_stage(START_STAGE, first_methods, search_videos[:1], deadline)
    better_reference = choose_confirmed(trials[: len(references)])
    start_trials = [trial for trial in trials if trial.method in start_methods]
    axes = [axis for axis in candidates if f"/{axis}=" not in base]
    if not start_trials:  # There was time for the references alone.
        for axis in axes:
            names = [_set_axis(base_name, axis, value) for value in candidates[axis]]
            _, methods = _possible_methods(base_name, names)
            if len(methods) > 1:
                skipped.append(axis)
        return better_reference, tuple(table), (*skipped, CONFIRM_STAGE)
    # The search: each axis is tried on the best method so far.
    best = choose_fastest(start_trials, base_name)
    # At the end there must be time to run both references and the winner on one video.
    confirm_seconds = (len(references) + 1) * max(seconds_per_method.values())
    search_deadline = deadline - confirm_seconds
    for number, axis in enumerate(axes):
        names = [_set_axis(best.method, axis, value) for value in candidates[axis]]
        # The best method so far, by the name that it has among ``methods``.
        best_so_far, methods = _possible_methods(best.method, names)
        stages_left = len(axes) - number + 1  # The stage that confirms the winner counts as well.
        if len(methods) <= 1:
            continue  # No other value of this axis is possible with this method.
        trials = run_stage(axis, methods, search_videos, search_deadline, stages_left)
        if trials:
            finalists = _drop_lower_taus(trials) if axis in LAMBDA_AXES else trials
            best = choose_fastest(finalists, best_so_far)
    # The confirmation: the winner and the references run on the videos that are held out.
    final_methods = [*dict.fromkeys((*references, best.method))]
    confirming_videos = [*held_out_videos] * MAX_CONFIRMING_RUNS
    confirmed = run_stage(CONFIRM_STAGE, final_methods, confirming_videos, deadline)
    chosen = choose_confirmed(confirmed) if confirmed else better_reference
    return chosen, tuple(table), tuple(skipped)


def choose_confirmed(trials: Sequence[Trial]) -> Trial:
    """Returns what to use of ``ar``, ``auto`` and perhaps another method, which ran side by side.

    The other method is used if it beats both, else ``auto`` if it beats ``ar``, and else ``ar``.
    """
    plain, auto, *alternatives = trials
    for alternative in alternatives:
        if _is_faster(alternative, auto, 1 + TIE_MARGIN) and _is_faster(alternative, plain, 1):
            return alternative
    return auto if _is_faster(auto, plain, 1) else plain


def _is_faster(trial: Trial, reference: Trial, factor: float) -> bool:
    """Returns whether a trial decodes more than ``factor`` times as fast as another.

    Its whole answers, with everything before the first token, must not be slower either.
    """
    end_to_end_ratio = _speed_ratio(trial, reference, _end_to_end_speedup)
    if trial.fallback is not None or end_to_end_ratio < 1 - TIE_MARGIN:
        return False
    return _speed_ratio(trial, reference, _decode_speedup) > factor


def _loss_reason(trial: Trial, references: Sequence[Trial]) -> str:
    """Says which of the references a trial did not beat, and by which figure."""
    if trial.fallback is not None:
        return f"{trial.method} gave up drafting"
    for reference in references:
        factor = 1 if reference.method == BASELINE else 1 + TIE_MARGIN
        if reference is trial or _is_faster(trial, reference, factor):
            continue
        decode_ratio = _speed_ratio(trial, reference, _decode_speedup)
        comparison = f"{trial.method} decoded x {decode_ratio:.2f} against {reference.method}"
        if decode_ratio > factor:
            end_to_end_ratio = _speed_ratio(trial, reference, _end_to_end_speedup)
            return f"{comparison}, but x {end_to_end_ratio:.2f} for whole answers"
        is_tie = decode_ratio > 1 - TIE_MARGIN
        return f"{comparison}, no more than runs differ by" if is_tie else comparison
    raise ValueError(f"{trial.method} beat all of them")


def _decode_speedup(row: Summary) -> float:
    return row.speedup_decode or 0.0


def _end_to_end_speedup(row: Summary) -> float:
    return row.speedup_end_to_end or 0.0


def _speed_ratio(trial: Trial, reference: Trial, figure: Callable[[Summary], float]) -> float:
    """Returns the median ratio of two methods' figures over the runs that they shared."""
    pairs = zip(trial.summaries, reference.summaries, strict=True)
    return median(figure(summary) / max(figure(baseline), 1e-9) for summary, baseline in pairs)


def _drop_lower_taus(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the trials without those that set a lambda and have a lower tau than the best lambda.

    Lambda changes which tokens the draft sees, so acceptance says more about it than noisy speeds.
    A tau that is lower by less than ``TIE_MARGIN`` counts as equal.
    """
    highest = max((trial.tau for trial in trials if _sets_lambda(trial)), default=0.0)
    return [t for t in trials if not _sets_lambda(t) or t.tau >= (1 - TIE_MARGIN) * highest]


def _sets_lambda(trial: Trial) -> bool:
    return "/lambda=" in trial.method


def _set_axis(method: str, axis: str, value: str) -> str:
    """Returns the method's name with one axis set to a value."""
    others = [part for part in method.split("/") if not part.startswith(f"{axis}=")]
    return "/".join([*others, f"{axis}={value}"])


def choose_fastest(trials: Sequence[Trial], best_so_far: str) -> Trial:
    """Returns the fastest trial, or one that ties with it.

    Among trials that tie, a smaller share of visual tokens decides first, then whether the trial is
    the method ``best_so_far`` (which was the best before), and then the speed. A method whose draft
    failed is chosen only if all failed. A trial is never chosen if another one is certain to be no
    slower (:func:`_is_dominated`).
    """
    working = [trial for trial in trials if trial.fallback is None] or list(trials)
    undominated = [
        trial
        for trial in working
        if not any(_is_dominated(trial, rival, best_so_far) for rival in working)
    ]
    fastest = max(trial.speedup for trial in undominated)
    tied = [trial for trial in undominated if trial.speedup >= (1 - TIE_MARGIN) * fastest]
    return min(tied, key=lambda t: (_kept_share(t.method), t.method != best_so_far, -t.speedup))


def _is_dominated(trial: Trial, rival: Trial, best_so_far: str) -> bool:
    """Returns whether ``rival`` cannot be slower than ``trial``, whatever the clock measured.

    Both must have the same drafter and the same fixed shape. ``rival`` must keep at most as many
    visual tokens as the trial, and its tau must be at least as high on every video. If they are
    equal in both, only the method ``best_so_far`` dominates, so that two trials never dominate each
    other.
    """
    recipe = resolve(trial.method)
    rival_recipe = resolve(rival.method)
    has_fixed_shape = Capability.FIXED_FORM in recipe.shape.offers
    parts = (recipe.shape, recipe.drafter)
    rival_parts = (rival_recipe.shape, rival_recipe.drafter)
    if not has_fixed_shape or parts != rival_parts:
        return False
    taus = [*zip(trial.taus, rival.taus, strict=True)]
    kept = _kept_share(trial.method)
    rival_kept = _kept_share(rival.method)
    if rival_kept > kept or any(rival_tau < tau for tau, rival_tau in taus):
        return False
    if rival_kept < kept or any(rival_tau > tau for tau, rival_tau in taus):
        return True
    return rival.method == best_so_far and trial.method != best_so_far


def _possible_methods(best: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the name that stands for ``best`` at the next stage, and all methods of that stage.

    The methods are ``best`` and those of ``names`` that exist. If one of ``names`` means the same
    as ``best``, it replaces ``best``, so that no method runs twice: ``specvlm/keep=0.1`` replaces
    ``specvlm``, which keeps a tenth by default.
    """
    recipes = {}
    for name in (best, *names):
        try:
            recipes[name] = replace(resolve(name), name="", about="")
        except MethodError:
            continue  # Not every axis has every choice.
    equal = [name for name in recipes if name != best and recipes[name] == recipes[best]]
    if not equal:
        return best, [*recipes]
    return equal[0], [name for name in recipes if name != best]


def _kept_share(name: str) -> float:
    """Returns the share of the visual tokens that a method's view keeps; 1 where it sets none."""
    share = resolve(name).view.keep
    return 1.0 if share is None else share
