"""The setting that decodes fastest for a pair, a view and a machine, from a handful of videos.

One axis after the other (lambda, keep, shape), each from the best so far; every candidate runs on
every video beside plain decoding. The winner is measured once more: the fastest of several noisy
timings flatters itself, so the speedup reported comes from runs that chose nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from saccade.bench.compare import BASELINE, Summary, named, race
from saccade.core.errors import MethodError, OptionError
from saccade.core.prompt import Inputs
from saccade.drafting.shapes.policies import Best, Chain, Static
from saccade.engine.trace import environment
from saccade.inputs import Loaded
from saccade.methods import AXES, resolve

Candidates = Mapping[str, Sequence[str]]

CANDIDATES: Candidates = {
    "lambda": ("0.2", "0.35", "0.5", "0.65", "0.8"),
    "keep": ("0.05", "0.1", "0.2", "0.3", "0.5"),
    "shape": (
        *("fit", "tree", "chain-3", "chain-5", "chain-7", "chain-9", "chain-12"),
        *("best-8", "best-16"),
    ),
}
START, CONFIRM = "start", "confirm"
TIE = 0.02  # timings this close to each other say nothing
LARGEST_FILE = 100_000  # bytes


Measure = Callable[[int, Sequence[str]], Mapping[str, Summary]]
"""(video, methods) -> the figures of each, from interleaved runs."""


@dataclass(frozen=True)
class Trial:
    """One method at one stage of the search: what it did on each video, and medians over them."""

    stage: str
    method: str
    readings: tuple[Summary, ...]

    @property
    def speedup(self) -> float:
        return median(row.speedup_decode or 0.0 for row in self.readings)

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
        found = {"stage": self.stage, "method": self.method, "videos": len(self.readings)}
        found |= {"speedup": round(self.speedup, 3), "tau": round(self.tau, 3)}
        return found if self.fallback is None else {**found, "fallback": self.fallback}


@dataclass(frozen=True)
class Calibration:
    """The best setting found, what it gains, and what that was measured on."""

    best: Trial
    table: tuple[Trial, ...]
    skipped: tuple[str, ...]  # stages there was no time for
    target: str
    draft: str | None
    visual_tokens: tuple[int, ...]  # of each video measured
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

    def json(self) -> dict[str, Any]:
        """What the file holds."""
        measured = {
            "worth_it": self.worth_it,
            "speedup": round(self.best.speedup, 3),
            "tau": round(self.best.tau, 3),
            "visual_tokens": self.visual_tokens,
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
    target: Loaded,
    draft: Loaded | None,
    inputs: Sequence[Inputs],
    *,
    draft_inputs: Sequence[Inputs | None] | None = None,
    method: str = "specvlm",
    candidates: Candidates = CANDIDATES,
    seconds: float = 600,
    max_new_tokens: int = 128,
    tell: Callable[[str], None] | None = None,
) -> Calibration:
    """The fastest setting of ``method`` over ``inputs``, in about ``seconds``.

    An axis that ``method`` sets itself stays as it is. Raises MethodError where a candidate writes
    other tokens than plain decoding.
    """
    check(method)
    if not inputs or seconds <= 0:
        raise OptionError("calibrating needs a video or more and some seconds")
    seen: dict[int, int] = {}

    def measure(video: int, methods: Sequence[str]) -> dict[str, Summary]:
        def on_run(name: str, round: int) -> None:
            if tell is not None:
                tell(f"video {video + 1} of {len(inputs)}: {'' if round else 'warming up '}{name}")

        settings = {"max_new_tokens": max_new_tokens, "do_sample": False}
        raced = race(
            target,
            draft,
            inputs[video],
            named(methods),
            repeat=1,
            settings=settings,
            draft_inputs=None if draft_inputs is None else draft_inputs[video],
            on_run=on_run,
        )
        seen[video] = raced.last()[BASELINE].visual_tokens
        return raced.rows()

    started = time.monotonic()
    found = search(method, len(inputs), measure, candidates=candidates, seconds=seconds)
    return Calibration(
        *found,
        target=target.name,
        draft=None if draft is None else draft.name,
        visual_tokens=tuple(seen[video] for video in sorted(seen)),
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
    candidates: Candidates = CANDIDATES,
    seconds: float = 600,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Trial, tuple[Trial, ...], tuple[str, ...]]:
    """From ``base`` to (the best, every trial in order, the stages there was no time for).

    Each stage gets an even share of the time left. ``base`` on the first video always runs; after
    it nothing begins that would, at the pace measured so far, run past the time. A stage is cut to
    fewer videos, never to fewer candidates.
    """
    deadline = clock() + seconds
    pace: dict[int, float] = {}  # seconds a method, by video
    table: list[Trial] = []
    skipped: list[str] = []

    def stage(name: str, methods: Sequence[str], over: int = videos, left: int = 1) -> list[Trial]:
        share = clock() + (deadline - clock()) / left
        readings: list[Mapping[str, Summary]] = []
        for video in range(over):
            runs, begun = len(methods) + 1, clock()
            needed = runs * pace.get(video, max(pace.values(), default=0))
            if pace and begun + needed > (share if video else deadline):
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

    (best,) = stage(START, [base], over=1)
    axes = [axis for axis in candidates if f"/{axis}=" not in base]
    for number, axis in enumerate(axes):
        names = [f"{best.method}/{axis}={value}" for value in candidates[axis]]
        kept, methods = _methods(best.method, names)
        if len(methods) > 1 and (trials := stage(axis, methods, left=len(axes) - number + 1)):
            best = choose(trials, kept)
    if confirmed := stage(CONFIRM, [best.method]):
        (best,) = confirmed
    return best, tuple(table), tuple(skipped)


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


# -- the file -----------------------------------------------------------------------------------


KEYS = ("method", "target", "draft", "threads", *AXES, "measured")
NUMBER = ((int, float), "a number between 0 and 1")
WANTED: Mapping[str, tuple[tuple[type, ...], str]] = {
    "threads": ((int,), "a whole number from 1"),
    "keep": NUMBER,
    "lambda": NUMBER,
    "shape": ((str, list), "a name, or a tree as paths like [[0], [1], [0, 0]]"),
    "measured": ((dict,), "keys and values"),
}
NAME = ((str,), "a name")


def write(path: Path, calibration: Calibration) -> None:
    """A small file that ``read`` reads and a person can edit."""
    found = calibration
    says = "decodes fastest" if found.worth_it else "was best, yet SLOWER than plain decoding"
    head = (
        "# Made by `saccade calibrate`; read by --config. Holds for this pair and this machine.\n"
        f"# Of what was tried the method below {says}: x {found.best.speedup:.2f} against ar,\n"
        f"# the median over {len(found.best.readings)} video(s).\n"
    )
    plain = json.loads(json.dumps(found.json()))  # torch's version is not quite a str
    said = {key: value for key, value in plain.items() if value is not None}
    text = yaml.safe_dump(
        said, sort_keys=False, allow_unicode=True, default_flow_style=None, width=200
    )
    try:
        path.write_text(head + text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> dict[str, Any]:
    """What a file says of method, target, draft, threads and measured, every key and value checked.
    An axis may be a key: one more override of the method."""
    said = {key: value for key, value in _mapping(path).items() if value is not None}
    for key, value in said.items():
        types, wanted = WANTED.get(key, NAME)
        good = type(value) in types and value != "" and (key != "threads" or value >= 1)
        if not good or (isinstance(value, list) and not all(map(_is_path, value))):
            raise OptionError(f"{path}: {key} must be {wanted}, not {str(value)[:40]!r}")
    overrides = [f"{key}={_text(value)}" for key, value in said.items() if key in AXES]
    found = {key: value for key, value in said.items() if key not in AXES}
    if "method" in said or overrides:
        found["method"] = "/".join([said.get("method", "specvlm").strip(), *overrides])
        try:
            resolve(found["method"])
        except MethodError as error:
            raise OptionError(f"{path}: {error}") from error
    return found


def _mapping(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > LARGEST_FILE:
        raise OptionError(f"{path} is too large for a config: {LARGEST_FILE} bytes at most")
    try:
        node, said = yaml.compose(raw, yaml.SafeLoader), yaml.safe_load(raw)
    except Exception as error:  # besides YAMLError whatever its converters trip over
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise OptionError(f"{path} cannot be read as YAML{where}") from error
    known = f"known keys: {', '.join(KEYS)}"
    if not isinstance(said, dict | None):
        raise OptionError(f"{path} holds no keys and values; {known}")
    keys = [] if said is None else [key.value for key, _ in node.value]
    for key in said or ():
        if key not in KEYS:
            raise OptionError(f"{path}: unknown key {key!r}; {known}")
        if keys.count(key) > 1:
            raise OptionError(f"{path}: key {key!r} is given twice")
    return said or {}


def _is_path(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int for rank in value)


def _text(value: Any) -> str:
    """An override's value as a method's name spells it."""
    if isinstance(value, list):
        return "paths-" + ",".join(".".join(map(str, path)) for path in value)
    return str(value)
