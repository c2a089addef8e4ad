"""``python -m lab speed``: measures the ratios of speed for which this project has goals.

A ratio says how many times as fast one method is as another, such as `auto` over `ar`, and its goal
is the least value that is good enough. (Some ratios have no goal and are only reported.) ``PARTS``
has the measurements as data. A part names the suite of its clips, the methods that take turns on
each clip, how long answers are, and its ratios with their goals.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lab.ratios import (
    AUTO,
    PEER,
    Goal,
    GoalOutcome,
    InterleavedRuns,
    Seconds,
    best_method_ratio,
    decoding_seconds_per_token,
    method_ratio,
    ratio_to_best_fixed,
    seconds_at_length,
    share_of_amdahl_limit,
    whole_seconds_per_token,
)
from saccade.bench.comparison import BASELINE, resolve_methods, run_interleaved
from saccade.bench.peers import TimedRun
from saccade.bench.runner import media_arguments
from saccade.bench.suites.types import Item
from saccade.core.capabilities import Capabilities
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.core.protocols import View
from saccade.core.result import emitted_per_forward
from saccade.drafting.recipe import Recipe, plan
from saccade.engine.generate import run
from saccade.engine.trace import environment
from saccade.inputs import Loaded, ask, questions
from saccade.model.backbone import Backbone
from saccade.world import suites as shapes

# `auto`, and three methods whose shape `fit` chooses by costs how deep to draft.
FAST = (AUTO, "sd/shape=fit", "specvlm/shape=fit", "sd/view=uniform/keep=0.1/shape=fit")
# The methods that `auto` is compared with. In every round `auto` decides by costs whether to draft,
# and how much. These methods never stop drafting, though `fit` chooses how deep by costs too.
FIXED = (*FAST[1:], "sd", "specvlm", "sage", "hippo/schedule=serial", "lookup", "tabed")

Recipes = Mapping[str, Recipe | None]
"""Methods by name; None for ways to decode that are not ours, such as transformers' own."""
OnProgress = Callable[[str], None]


# -- The parts, as data --------------------------------------------------------------------------

SpoilDraft = Callable[["Pair", Sequence[Inputs]], tuple[Loaded, Recipes]]
"""Makes a draft useless: (the pair, this clip's inputs and the next clip's) -> draft, methods."""


@dataclass(frozen=True)
class Pair(questions.Pair):
    """A target and a draft. (In the base class there may be no draft.)"""

    draft: Loaded


def use_random_weights(pair: Pair, inputs: Sequence[Inputs]) -> tuple[Loaded, Recipes]:
    """Replaces the draft by an untrained one of the same architecture, vision tower included.

    Of the methods only `auto` runs, beside plain decoding. ``inputs`` are not needed.
    """
    return untrained_copy(pair.draft), resolve_methods([AUTO])


def untrained_copy(model: Loaded, seed: int = 0) -> Loaded:
    """Returns a model of the same architecture whose weights are drawn at random from a seed."""
    own = model.backbone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh: Any = type(own.model)(copy.deepcopy(own.model.config))
    fresh.generation_config = own.model.generation_config
    fresh = fresh.to(own.device, own.dtype).eval()
    return Loaded(f"{model.name}, untrained", Backbone(fresh), model.processor)


@dataclass(eq=False)
class ViewOfAnotherVideo(View):
    """A view under which the draft sees the rows of another video in place of this one's."""

    view: View
    rows: Float[Tensor, "seen dim"]

    def __post_init__(self) -> None:
        self.name = f"{self.view.name} of another video"
        self.keep = self.view.keep

    @property
    def needs(self) -> Capabilities:
        return self.view.needs

    @property
    def offers(self) -> Capabilities:
        return self.view.offers

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        embeds = prompt.embeds.clone()
        embeds[prompt.visual] = self.rows
        return self.view(prefill, replace(prompt, embeds=embeds))


def show_another_video(pair: Pair, inputs: Sequence[Inputs]) -> tuple[Loaded, Recipes]:
    """Lets the trained draft see the next clip instead of this one.

    ``inputs`` are those of this clip and of the next one. The draft reads the visual rows that the
    target's vision tower made, so a view can put the next clip's rows in their place without taking
    time. `auto` plans with the right clip, because the rows are replaced afterwards.
    """
    this, other = inputs
    target, draft = pair.target.backbone, pair.draft.backbone
    assert draft.shares_rows_with(target), (
        "this draft has a processor of its own: give it draft_inputs"
    )
    (prompt,) = target.prompts(other)
    recipe = resolve_methods([AUTO])[AUTO]
    assert recipe is not None
    fitted = plan(recipe, target, draft, int(this["input_ids"].shape[1]))
    swapped = replace(fitted, view=ViewOfAnotherVideo(fitted.view, prompt.embeds[prompt.visual]))
    return pair.draft, {**resolve_methods([]), AUTO: swapped}


@dataclass(frozen=True)
class Part:
    """Clips of a suite, the methods that are compared on them, and the ratios with their goals.

    Plain decoding takes part in every part.
    """

    name: str  # Several parts may have one name, by which they are chosen together.
    about: str
    suite: str
    methods: tuple[str, ...]
    goals: tuple[Goal, ...]
    # Settings of decoding in place of the suite's own.
    settings: Mapping[str, Any] = field(default_factory=dict)
    clips: int | None = None  # How many; None takes the number that the caller gives.
    # Only clips are used whose answer by plain decoding ends by itself after so many tokens or
    # more. 0 uses all clips.
    min_natural_tokens: int = 0
    spoil_draft: SpoilDraft | None = None  # Makes the draft useless on each clip.

    @property
    def title(self) -> str:
        return f"{self.name}, {self.suite}"


def _rank_of_auto(suite: str) -> Part:
    """Returns the part that compares `auto` with the best fixed method on a suite."""
    goals = (Goal(f"auto / best fixed method, decoding, {suite}", ratio_to_best_fixed, 0.95),)
    about = f"auto against every fixed method, {suite}"
    return Part("auto", about, suite, (AUTO, *FIXED), goals)


def _useless_draft(about: str, spoil_draft: SpoilDraft) -> Part:
    """Returns the part that shows how much slower `auto` is than `ar` with a useless draft."""
    goals = (
        Goal(f"auto / ar, decoding, {about}", method_ratio(AUTO, BASELINE), 0.98),
        Goal(
            f"auto / ar, end to end, {about}",
            method_ratio(AUTO, BASELINE, whole_seconds_per_token),
            0.95,
        ),
    )
    return Part("useless", about, "shapes-caption", (AUTO,), goals, spoil_draft=spoil_draft)


PARTS = (
    Part(
        "decode-2k",
        "2,048 visual tokens, answers that end by themselves after 128 tokens or more",
        "shapes-caption-2k",
        (*FAST, PEER),
        (
            Goal("best / ar, decoding", best_method_ratio(BASELINE), 3.5),
            Goal("best / hf, decoding", best_method_ratio(PEER), 4.5),
            Goal("best / ar, end to end, of Amdahl's limit", share_of_amdahl_limit, 0.9),
            Goal("ar / hf, decoding", method_ratio(BASELINE, PEER), 1.3),
        ),
        min_natural_tokens=128,
    ),
    Part(
        "whole-256",
        "256 visual tokens, exactly 256 new ones",
        "shapes-caption",
        (*FAST, PEER),
        (
            Goal(
                "best / ar, end to end", best_method_ratio(BASELINE, whole_seconds_per_token), 2.2
            ),
            Goal("best / hf, end to end", best_method_ratio(PEER, whole_seconds_per_token)),
            Goal("best / ar, end to end, of Amdahl's limit", share_of_amdahl_limit),
        ),
        {"min_new_tokens": 256, "max_new_tokens": 256},
    ),
    # The part above goes on past the natural end of answers, where the target writes text that no
    # draft guesses. This part has answers that end by themselves.
    Part(
        "whole-256",
        "256 visual tokens, answers that end by themselves after 128 tokens or more",
        "shapes-caption",
        (*FAST, PEER),
        (
            Goal(
                "best / ar, end to end, natural answers",
                best_method_ratio(BASELINE, whole_seconds_per_token),
            ),
            Goal(
                "best / ar, end to end, natural answers as if of 256 tokens",
                best_method_ratio(BASELINE, seconds_at_length(256)),
            ),
        ),
        min_natural_tokens=128,
    ),
    Part(
        "context-10k",
        "10,240 visual tokens, plain decoding",
        "shapes-caption-10k",
        (PEER,),
        (Goal("ar / hf, decoding", method_ratio(BASELINE, PEER), 1.6),),
        # At this length the target would stop after a few tokens.
        {"min_new_tokens": 64, "max_new_tokens": 64},
        clips=3,
    ),
    *(_rank_of_auto(suite) for suite in (*shapes.TASKS, "shapes-caption-2k")),
    _useless_draft("random weights", use_random_weights),
    _useless_draft("wrong video", show_another_video),
)
PART_NAMES = tuple(dict.fromkeys(part.name for part in PARTS))


def parts_named(names: Sequence[str]) -> tuple[Part, ...]:
    """Returns the parts of these names, or every part for no name.

    Raises OptionError for a name that no part has.
    """
    for name in names:
        if name not in PART_NAMES:
            raise OptionError(f"unknown part {name!r}; known: {', '.join(PART_NAMES)}")
    return tuple(part for part in PARTS if not names or part.name in names)


# -- Running -------------------------------------------------------------------------------------


def measure_part(
    part: Part, pair: Pair, *, clips: int, repeat: int, on_progress: OnProgress
) -> InterleavedRuns:
    """Runs a part's methods on its clips and returns the timed runs.

    ``clips`` is how many clips are used, unless the part says so itself, and ``repeat`` is how many
    turns of each method are timed on a clip. Of a conversation, only the first question is asked.
    Raises OptionError if no clip of the suite has an answer that is long enough.
    """
    suite = shapes.suites()[part.suite]
    settings = {"max_new_tokens": suite.setting.max_new_tokens, "do_sample": False}
    settings |= part.settings
    count = part.clips or clips
    ids: list[str] = []
    runs: list[Mapping[str, Sequence[TimedRun]]] = []
    errors: dict[str, str] = {}
    for item, inputs, following in islice(_fitting_items(part, pair, settings, on_progress), count):
        on_progress(f"{part.title}: clip {len(ids) + 1} of {count}")
        pair_used = pair
        recipes: Recipes = resolve_methods(part.methods)
        if part.spoil_draft is not None:
            draft, recipes = part.spoil_draft(pair, (inputs, _inputs_of(pair, following)))
            pair_used = Pair(pair.target, draft)
        timed = run_interleaved(
            pair_used,
            (inputs, None),
            recipes,
            repeat=repeat,
            settings=settings,
            on_run=lambda name, turn: on_progress(
                f"{part.title}: clip {len(ids) + 1} of {count}, "
                + (f"turn {turn} of {repeat}, {name}" if turn else f"warming up {name}")
            ),
        )
        ids.append(item.id)
        runs.append(timed.runs)
        errors |= timed.errors
    if not ids:
        raise OptionError(
            f"{part.suite} has no clip whose answer has {part.min_natural_tokens} tokens"
        )
    return InterleavedRuns(tuple(ids), tuple(runs), errors)


def _fitting_items(
    part: Part, pair: Pair, settings: Mapping[str, Any], on_progress: OnProgress
) -> Iterator[tuple[Item, Inputs, Item]]:
    """Yields the suite's items that fit the part: the item, its inputs, and the item after it.

    An item fits if its answer by plain decoding ends by itself and is long enough for the part. If
    the part does not require a length, every item fits. After the last item comes the first.
    """
    items = list(shapes.suites()[part.suite].items())
    for item, following in zip(items, (*items[1:], items[0]), strict=True):
        inputs = _inputs_of(pair, item)
        if part.min_natural_tokens:
            on_progress(f"{part.title}: is the answer to {item.id} long enough?")
            plain = run(pair.target.backbone, inputs, method=BASELINE, **settings)
            if plain.finish_reason != "stop" or len(plain.ids) < part.min_natural_tokens:
                continue
        yield item, inputs, following


def _inputs_of(pair: Pair, item: Item) -> Inputs:
    return ask(pair.target, item.question, **media_arguments(item))


# -- Reporting -----------------------------------------------------------------------------------


def goal_outcomes(part: Part, timed: InterleavedRuns) -> Iterator[GoalOutcome]:
    """Yields every ratio of a part, and whether it meets its goal."""
    for goal in part.goals:
        measured = goal.measure(timed)
        met = None
        if goal.minimum is not None and measured.value is not None:
            met = measured.value >= goal.minimum
        yield GoalOutcome(
            part.name,
            goal.name,
            measured.value,
            goal.minimum,
            met,
            measured.interval,
            measured.detail,
        )


def differing_answers(timed: InterleavedRuns) -> list[tuple[str, str]]:
    """Returns (clip, method) of every answer that differs from plain decoding's in any token."""
    return [
        (clip, name)
        for clip, own in zip(timed.clips, timed.runs, strict=True)
        for name, runs in own.items()
        if any(each.ids != own[BASELINE][0].ids for each in runs)
    ]


def summary(part: Part, timed: InterleavedRuns) -> dict[str, Any]:
    """Returns what was run, and how long each method took, as the JSON of a run has it.

    Times are medians over clips of medians over turns, and tau is over all rounds of all clips and
    turns. "tokens" has the length of the first turn's answer on each clip.
    """

    def median_seconds(name: str, figure: Seconds) -> float:
        return median(median(map(figure, own[name])) for own in timed.runs)

    methods = {}
    for name in timed.methods():
        results = [
            each.result for own in timed.runs for each in own[name] if each.result is not None
        ]
        rounds = [round for result in results for round in result.rounds]
        methods[name] = {
            "tau": emitted_per_forward(rounds),
            "tokens": [len(own[name][0].ids) for own in timed.runs],
            "ms a token": 1e3 * median_seconds(name, decoding_seconds_per_token),
            "decode seconds": median_seconds(name, lambda each: each.decode_seconds),
            "before seconds": median_seconds(
                name, lambda each: each.total_seconds - each.decode_seconds
            ),
            "total seconds": median_seconds(name, lambda each: each.total_seconds),
            "fallback": next((r.fallback_reason for r in results if r.fallback_reason), None),
        }
    differences = differing_answers(timed)
    return {
        "part": part.name,
        "about": part.about,
        "suite": part.suite,
        "clips": list(timed.clips),
        "settings": dict(part.settings),
        "methods": methods,
        "errors": dict(timed.errors),
        "identical": not differences,
        "differing": differences,
    }


def measure_speed(
    pair: Pair,
    parts: Sequence[Part] = PARTS,
    *,
    clips: int = 4,
    repeat: int = 3,
    on_progress: OnProgress = lambda text: None,
    on_part: Callable[[Mapping[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Returns everything that ``python -m lab speed --json`` prints: machine, parts and ratios.

    ``on_part`` is called with the report so far after every part, because a run takes long and may
    be interrupted.
    """
    report: dict[str, Any] = {
        "target": pair.target.name,
        "draft": pair.draft.name,
        "dtype": str(pair.target.backbone.dtype).removeprefix("torch."),
        "device": str(pair.target.backbone.device),
        "repeat": repeat,
        "environment": environment(),
        "parts": [],
        "ratios": [],
    }
    for part in parts:
        timed = measure_part(part, pair, clips=clips, repeat=repeat, on_progress=on_progress)
        report["parts"].append(summary(part, timed))
        report["ratios"] += [asdict(ratio) for ratio in goal_outcomes(part, timed)]
        on_part(report)
    return report
