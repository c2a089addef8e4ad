"""The setting that decodes fastest for a pair and a machine, from a handful of videos.

One axis after the other (view or lambda, keep, shape), each from the best so far; every candidate
runs beside plain decoding on the first half of the videos. The fastest of several noisy timings
flatters itself, so the winner then meets ``auto`` and ``ar`` on the videos held out, and replaces
them only where it beats both there: what is written is never slower than doing nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from typing import Any

import torch

from saccade.bench.compare import BASELINE, Summary, named, race
from saccade.core.errors import MethodError, OptionError
from saccade.core.prompt import Inputs
from saccade.drafting.shapes.policies import Best, Chain, Static
from saccade.engine.generate import DEFAULT_METHOD
from saccade.engine.trace import environment
from saccade.inputs import Pair
from saccade.methods import resolve

Candidates = Mapping[str, Sequence[str]]

LAMBDAS = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5")  # attention is flat: small ones matter
CANDIDATES: Candidates = {
    "lambda": LAMBDAS,
    "keep": ("0.05", "0.1", "0.2", "0.3", "0.5", "1"),
    "shape": (
        *("fit", "tree", "chain-3", "chain-5", "chain-7", "chain-9", "chain-12"),
        *("best-8", "best-16"),
    ),
}
# auto names no view of its own choice, so there the view is an axis as well
OPEN: Candidates = {
    "view": tuple(f"specvlm/lambda={value}" for value in LAMBDAS),
    **{axis: values for axis, values in CANDIDATES.items() if axis != "lambda"},
}
BY_LENGTH = ("lambda", "view")  # axes on which lambdas compete, by accepted length first
START, CONFIRM = "start", "confirm"
REFERENCE, ALONE = DEFAULT_METHOD, "specvlm-self"  # where it begins with a draft, and without one
TIE = 0.02  # figures this close to each other say nothing
PASSES = 3  # runs of each video held out, at most


Measure = Callable[[int, Sequence[str]], Mapping[str, Summary]]
"""(video, methods) -> the figures of each and of ``ar``, from interleaved runs."""


@dataclass(frozen=True)
class Trial:
    """One method at one stage of the search: what it did in each run, and medians over them."""

    stage: str
    method: str
    readings: tuple[Summary, ...]

    @property
    def speedup(self) -> float:
        return median(_decode(row) for row in self.readings)

    @property
    def whole(self) -> float:
        """As ``speedup``, with all that comes before the first token."""
        return median(_whole(row) for row in self.readings)

    @property
    def taus(self) -> list[float]:
        return [row.tau or 0.0 for row in self.readings]

    @property
    def tau(self) -> float:
        return median(self.taus)

    @property
    def fallback(self) -> str | None:
        return next((row.fallback_reason for row in self.readings if row.fallback_reason), None)

    def json(self) -> dict[str, Any]:
        found = {"stage": self.stage, "method": self.method, "runs": len(self.readings)}
        found |= {"speedup": round(self.speedup, 3), "whole": round(self.whole, 3)}
        found |= {"tau": round(self.tau, 3)}
        return found if self.fallback is None else {**found, "fallback": self.fallback}


@dataclass(frozen=True)
class Calibration:
    """The setting to use, what it gains, and what that was measured on."""

    best: Trial
    table: tuple[Trial, ...]
    skipped: tuple[str, ...]  # stages there was no time for
    target: str
    draft: str | None
    visual_tokens: tuple[int, ...]  # of each video measured
    held_out: int  # videos that chose nothing; of a single one, none
    max_new_tokens: int
    threads: int
    seconds: float
    environment: Mapping[str, Any]

    @property
    def method(self) -> str:
        return self.best.method

    @property
    def worth_it(self) -> bool:
        """Whether it beats plain decoding; a draft that gave up has not."""
        return self.best.speedup > 1 and self.best.fallback is None

    @property
    def against_auto(self) -> float | None:
        """What was chosen beside ``auto``, see ``beside``."""
        return self.beside(self.best)

    def beside(self, trial: Trial) -> float | None:
        """How many times as fast as ``auto`` it decoded in the same runs; None: never side by
        side."""
        auto = [t for t in self.table if (t.stage, t.method) == (trial.stage, REFERENCE)]
        return _ratio(trial, auto[0], _decode) if auto else None

    @property
    def advice(self) -> str:
        """What to do, and on what grounds, in a line."""
        where = f"on {self.held_out} video(s) held out" if self.held_out else "on the one video"
        if self.method not in (BASELINE, REFERENCE):
            gains = f"x {self.best.speedup:.2f} against ar, x {self.against_auto:.2f} against auto"
            return f"use {self.method}: {gains}, {where}"
        keep = "keep plain decoding (ar)" if self.method == BASELINE else "keep auto"
        if self.best.stage != CONFIRM:
            return f"{keep}: there was no time to confirm anything else"
        plain, *met = [trial for trial in self.table if trial.stage == CONFIRM]
        lost = [_lost(trial, [met[0], plain]) for trial in met if trial is not self.best]
        grounds = f"{'; '.join(lost)}, {where}" if lost else "the search found nothing faster"
        return f"{keep}: {grounds}"

    def json(self) -> dict[str, Any]:
        """What the file holds."""
        measured = {
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
        names = {"method": self.method, "target": self.target, "draft": self.draft}
        return {**names, "threads": self.threads, "measured": measured}


def calibrate(
    pair: Pair,
    asked: Sequence[tuple[Inputs, Inputs | None]],
    *,
    method: str | None = None,
    candidates: Candidates | None = None,
    seconds: float = 600,
    max_new_tokens: int = 128,
    tell: Callable[[str], None] | None = None,
) -> Calibration:
    """The fastest setting that ``method`` leads to over ``asked``, in about ``seconds``, or
    ``auto`` or ``ar`` where that is not faster than they are.

    ``method`` is where the search begins: ``auto`` if none is named, and ``specvlm-self`` in its
    place without a draft model. An axis that it sets itself stays as it is. Raises MethodError
    where a candidate writes other tokens than plain decoding.
    """
    method = method or REFERENCE
    method = ALONE if pair.draft is None and method == REFERENCE else method
    check(method)
    if not asked or seconds <= 0:
        raise OptionError("calibrating needs a video or more and some seconds")
    seen: dict[int, int] = {}

    def measure(video: int, methods: Sequence[str]) -> dict[str, Summary]:
        def on_run(name: str, round: int) -> None:
            if tell is not None:
                tell(f"video {video + 1} of {len(asked)}: {'' if round else 'warming up '}{name}")

        settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
        raced = race(
            pair,
            asked[video],
            named(methods),
            repeat=1,
            settings=settings,
            on_run=on_run,
        )
        seen[video] = raced.last()[BASELINE].visual_tokens
        return raced.rows()

    started = time.monotonic()
    found = search(method, len(asked), measure, candidates=candidates, seconds=seconds)
    return Calibration(
        *found,
        target=pair.target.name,
        draft=None if pair.draft is None else pair.draft.name,
        visual_tokens=tuple(seen[video] for video in sorted(seen)),
        held_out=len(asked) // 2,
        max_new_tokens=max_new_tokens,
        threads=torch.get_num_threads(),
        seconds=time.monotonic() - started,
        environment=environment(),
    )


def check(method: str) -> None:
    """Raises MethodError or OptionError unless ``method`` can be calibrated."""
    if not resolve(method).drafts:
        raise OptionError(f"{method!r} drafts nothing, so there is nothing to calibrate")


# -- the search ---------------------------------------------------------------------------------


def search(
    base: str,
    videos: int,
    measure: Measure,
    *,
    candidates: Candidates | None = None,
    seconds: float = 600,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Trial, tuple[Trial, ...], tuple[str, ...]]:
    """From ``base`` to (what to use, every trial in order, the stages there was no time for).

    The first half of the videos is searched on, the rest held out (a single one is both). The start
    on the first video always runs; after it nothing begins that would, at the pace measured so
    far, run past the time or leave none to confirm in. Each stage gets an even share of the time
    left. A stage is cut to fewer videos, never to fewer candidates.
    """
    deadline = clock() + seconds
    pace: dict[int, float] = {}  # seconds a method, by video
    table: list[Trial] = []
    skipped: list[str] = []

    def stage(
        name: str, methods: Sequence[str], over: Sequence[int], end: float, left: int = 1
    ) -> list[Trial]:
        share = clock() + (end - clock()) / left
        readings: list[Mapping[str, Summary]] = []
        runs = len({BASELINE, *methods})
        for video in over:
            begun = clock()
            needed = runs * pace.get(video, max(pace.values(), default=0))
            if pace and begun + needed > (share if readings else end):
                break
            readings.append(measure(video, methods))
            pace[video] = (clock() - begun) / runs
            if wrong := [method for method in methods if not readings[-1][method].identical_to_ar]:
                raise MethodError(
                    f"{wrong[0]} wrote other tokens than plain decoding on video {video + 1}: a "
                    "bug in float32, rounding in lower precision (try --dtype float32)"
                )
        if not readings:
            skipped.append(name)
            return []
        trials = [
            Trial(name, method, tuple(found[method] for found in readings)) for method in methods
        ]
        table.extend(trials)
        return trials

    searched, held = range((videos + 1) // 2), range((videos + 1) // 2, videos) or range(videos)
    if candidates is None:
        candidates = OPEN if base.split("/")[0] == REFERENCE else CANDIDATES
    fitted = [] if "/shape=" in base else [f"{base}/shape=fit"]
    _, own = _methods(base, fitted)
    references = [BASELINE, REFERENCE]
    trials = stage(START, [*dict.fromkeys((*references, *own))], searched[:1], deadline)
    safe = verdict(trials[:2])
    best = choose([trial for trial in trials if trial.method in own], own[0])
    confirming = deadline - (len(references) + 1) * max(pace.values())
    axes = [axis for axis in candidates if f"/{axis}=" not in base]
    for number, axis in enumerate(axes):
        names = [_with(best.method, axis, value) for value in candidates[axis]]
        kept, methods = _methods(best.method, names)
        left = len(axes) - number + 1
        if len(methods) > 1 and (trials := stage(axis, methods, searched, confirming, left)):
            best = choose(_longest(trials) if axis in BY_LENGTH else trials, kept)
    last = [*dict.fromkeys((*references, best.method))]
    confirmed = stage(CONFIRM, last, [*held] * PASSES, deadline)
    return verdict(confirmed) if confirmed else safe, tuple(table), tuple(skipped)


def verdict(trials: Sequence[Trial]) -> Trial:
    """What to use, of the same runs of ``ar``, ``auto`` and perhaps another: the other only where
    it beats ``auto``, and either only where it beats ``ar``."""
    plain, auto, *others = trials
    for other in others:
        if _beats(other, auto, 1 + TIE) and _beats(other, plain, 1):
            return other
    return auto if _beats(auto, plain, 1) else plain


def _beats(trial: Trial, other: Trial, by: float) -> bool:
    """Whether it decodes more than ``by`` times as fast run by run, and its whole answers, with all
    that comes before the first token, are no slower."""
    whole = _ratio(trial, other, _whole) >= 1 - TIE
    return trial.fallback is None and whole and _ratio(trial, other, _decode) > by


def _lost(trial: Trial, references: Sequence[Trial]) -> str:
    """Which of the references it did not beat, and in what."""
    if trial.fallback is not None:
        return f"{trial.method} gave up drafting"
    for other in references:
        by = 1 if other.method == BASELINE else 1 + TIE
        if other is trial or _beats(trial, other, by):
            continue
        decode = _ratio(trial, other, _decode)
        said = f"{trial.method} decoded x {decode:.2f} against {other.method}"
        if decode > by:
            return f"{said}, but x {_ratio(trial, other, _whole):.2f} for whole answers"
        return f"{said}, no more than runs differ by" if decode > 1 - TIE else said
    raise ValueError(f"{trial.method} beat all of them")


def _decode(row: Summary) -> float:
    return row.speedup_decode or 0.0


def _whole(row: Summary) -> float:
    return row.speedup_end_to_end or 0.0


def _ratio(trial: Trial, other: Trial, figure: Callable[[Summary], float]) -> float:
    """The median ratio of two methods' figures over the runs they shared."""
    pairs = zip(trial.readings, other.readings, strict=True)
    return median(figure(mine) / max(figure(its), 1e-9) for mine, its in pairs)


def _longest(trials: Sequence[Trial]) -> list[Trial]:
    """Of the trials that set a lambda, those whose drafts are accepted longest; and the others.

    What lambda changes is which tokens the draft sees, so the clock has little to say about it.
    """
    longest = max((trial.tau for trial in trials if _sets_lambda(trial)), default=0.0)
    return [t for t in trials if not _sets_lambda(t) or t.tau >= (1 - TIE) * longest]


def _sets_lambda(trial: Trial) -> bool:
    return "/lambda=" in trial.method


def _with(method: str, axis: str, value: str) -> str:
    """The method's name with a value of its own on an axis."""
    others = [part for part in method.split("/") if not part.startswith(f"{axis}=")]
    return "/".join([*others, f"{axis}={value}"])


def choose(trials: Sequence[Trial], kept: str) -> Trial:
    """The fastest; of those as good as tied, the one that keeps least, then ``kept``, as it was.

    A draft that gave up is no choice unless they all did, nor is one that another must beat.
    """
    sound = [trial for trial in trials if trial.fallback is None] or list(trials)
    able = [trial for trial in sound if not any(_beaten(trial, other, kept) for other in sound)]
    fastest = max(trial.speedup for trial in able)
    tied = [trial for trial in able if trial.speedup >= (1 - TIE) * fastest]
    return min(tied, key=lambda t: (_keep(t.method), t.method != kept, -t.speedup))


def _beaten(trial: Trial, other: Trial, kept: str) -> bool:
    """Whether ``other`` cannot be slower, whatever a noisy clock said: the same drafts of the same
    fixed shape, no more of the video kept, no fewer tokens a round on any video. Two that are
    alike in all of it: the one that changes nothing."""
    own, its = resolve(trial.method), resolve(other.method)
    fixed = isinstance(own.shape, Chain | Static | Best)
    if not fixed or (own.shape, own.drafter) != (its.shape, its.drafter):
        return False
    taus = [*zip(trial.taus, other.taus, strict=True)]
    spared = _keep(trial.method) - _keep(other.method)
    if spared < 0 or any(mine > theirs for mine, theirs in taus):
        return False
    return (
        spared > 0
        or any(mine < theirs for mine, theirs in taus)
        or other.method == kept != trial.method
    )


def _methods(best: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """What stands for ``best`` at the next stage, and all its methods: the names that can be.

    A name that spells out what ``best`` does anyway takes its place.
    """
    recipes = {}
    for name in (best, *names):
        try:
            recipes[name] = replace(resolve(name), name="", about="")
        except MethodError:
            continue  # not every axis has every choice
    same = [name for name in recipes if name != best and recipes[name] == recipes[best]]
    return (same[0], [name for name in recipes if name != best]) if same else (best, [*recipes])


def _keep(name: str) -> float:
    keep = resolve(name).view.keep
    return 1.0 if keep is None else keep
