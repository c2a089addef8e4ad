"""``python -m lab speed``: every ratio of speed we set ourselves a goal for, measured.

A part is data: whose clips, which methods, how long the answers, which ratios and their goals. Its
methods take turns on a clip.
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
    Raced,
    Ratio,
    Seconds,
    best_versus,
    decoding,
    lengthened,
    of_amdahl,
    of_best_fixed,
    versus,
    whole,
)
from saccade.bench.compare import BASELINE, resolve_methods, run_interleaved
from saccade.bench.peers import TimedRun
from saccade.bench.runner import media_arguments
from saccade.bench.suites import shapes
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

FAST = (AUTO, "sd/shape=fit", "specvlm/shape=fit", "sd/view=uniform/keep=0.1/shape=fit")
FIXED = (*FAST[1:], "sd", "specvlm", "sage", "hippo/schedule=serial", "lookup", "tabed")

Recipes = Mapping[str, Recipe | None]
Tell = Callable[[str], None]


# -- the parts, as data -------------------------------------------------------------------------

Spoil = Callable[["Pair", Sequence[Inputs]], tuple[Loaded, Recipes]]
"""A draft made useless: (the pair, this clip's inputs and the next one's) -> draft and methods."""


@dataclass(frozen=True)
class Pair(questions.Pair):
    """The two models: there is a draft."""

    draft: Loaded


def random_weights(pair: Pair, inputs: Sequence[Inputs]) -> tuple[Loaded, Recipes]:
    """A draft of the same build that learnt nothing; its vision tower is another's as well."""
    return untrained(pair.draft), resolve_methods([AUTO])


def untrained(model: Loaded, seed: int = 0) -> Loaded:
    """The same architecture with weights as torch draws them."""
    own = model.backbone
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh: Any = type(own.model)(copy.deepcopy(own.model.config))
    fresh.generation_config = own.model.generation_config
    fresh = fresh.to(own.device, own.dtype).eval()
    return Loaded(f"{model.name}, untrained", Backbone(fresh), model.processor)


@dataclass(eq=False)
class Elsewhere(View):
    """A view of another video: its rows stand where this one's should."""

    view: View
    rows: Float[Tensor, "seen dim"]

    def __post_init__(self) -> None:
        self.name, self.keep = f"{self.view.name} of another video", self.view.keep

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


def wrong_video(pair: Pair, inputs: Sequence[Inputs]) -> tuple[Loaded, Recipes]:
    """The true draft, shown the next clip. The draft takes over what the target's eyes saw, so the
    swap is in its view: it costs nothing, and `auto` is settled before it."""
    this, other = inputs
    target, draft = pair.target.backbone, pair.draft.backbone
    assert draft.shares_rows_with(target), (
        "this draft looks with its own eyes: give it draft_inputs"
    )
    (prompt,) = target.prompts(other)
    recipe = resolve_methods([AUTO])[AUTO]
    assert recipe is not None
    fitted = plan(recipe, target, draft, int(this["input_ids"].shape[1]))
    swapped = replace(fitted, view=Elsewhere(fitted.view, prompt.embeds[prompt.visual]))
    return pair.draft, {**resolve_methods([]), AUTO: swapped}


@dataclass(frozen=True)
class Part:
    """Clips of a suite, methods beside plain decoding, and the ratios asked for."""

    name: str
    about: str
    suite: str
    methods: tuple[str, ...]
    goals: tuple[Goal, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # else the suite's own
    clips: int | None = None  # else as many as asked for
    natural: int = 0  # only clips whose plain answer ends by itself after so many tokens
    spoil: Spoil | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.suite}"


def _rank(suite: str) -> Part:
    goals = (Goal(f"auto / best fixed method, decoding, {suite}", of_best_fixed, 0.95),)
    about = f"auto against every fixed method, {suite}"
    return Part("auto", about, suite, (AUTO, *FIXED), goals)


def _useless(about: str, spoil: Spoil) -> Part:
    goals = (
        Goal(f"auto / ar, decoding, {about}", versus(AUTO, BASELINE), 0.98),
        Goal(f"auto / ar, end to end, {about}", versus(AUTO, BASELINE, whole), 0.95),
    )
    return Part("useless", about, "shapes-caption", (AUTO,), goals, spoil=spoil)


PARTS = (
    Part(
        "decode-2k",
        "2,048 visual tokens, answers that end by themselves after 128 tokens or more",
        "shapes-caption-2k",
        (*FAST, PEER),
        (
            Goal("best / ar, decoding", best_versus(BASELINE), 3.5),
            Goal("best / hf, decoding", best_versus(PEER), 4.5),
            Goal("best / ar, end to end, of Amdahl's limit", of_amdahl, 0.9),
            Goal("ar / hf, decoding", versus(BASELINE, PEER), 1.3),
        ),
        natural=128,
    ),
    Part(
        "whole-256",
        "256 visual tokens, exactly 256 new ones",
        "shapes-caption",
        (*FAST, PEER),
        (
            Goal("best / ar, end to end", best_versus(BASELINE, whole), 2.2),
            Goal("best / hf, end to end", best_versus(PEER, whole)),
            Goal("best / ar, end to end, of Amdahl's limit", of_amdahl),
        ),
        {"min_new_tokens": 256, "max_new_tokens": 256},
    ),
    Part(  # past its end the target writes what no draft guesses: this is the same without that
        "whole-256",
        "256 visual tokens, answers that end by themselves after 128 tokens or more",
        "shapes-caption",
        (*FAST, PEER),
        (
            Goal("best / ar, end to end, natural answers", best_versus(BASELINE, whole)),
            Goal(
                "best / ar, end to end, natural answers as if of 256 tokens",
                best_versus(BASELINE, lengthened(256)),
            ),
        ),
        natural=128,
    ),
    Part(
        "context-10k",
        "10,240 visual tokens, plain decoding",
        "shapes-caption-10k",
        (PEER,),
        (Goal("ar / hf, decoding", versus(BASELINE, PEER), 1.6),),
        {"min_new_tokens": 64, "max_new_tokens": 64},  # at this length it stops after a few
        clips=3,
    ),
    *(_rank(suite) for suite in (*shapes.TASKS, "shapes-caption-2k")),
    _useless("random weights", random_weights),
    _useless("wrong video", wrong_video),
)
NAMES = tuple(dict.fromkeys(part.name for part in PARTS))


def chosen(names: Sequence[str]) -> tuple[Part, ...]:
    """The parts of these names, all of them for none. Raises OptionError."""
    for name in names:
        if name not in NAMES:
            raise OptionError(f"unknown part {name!r}; known: {', '.join(NAMES)}")
    return tuple(part for part in PARTS if not names or part.name in names)


# -- running ------------------------------------------------------------------------------------


def measure(part: Part, pair: Pair, *, clips: int, repeat: int, tell: Tell) -> Raced:
    """A part's runs. Of a conversation the first question is asked."""
    suite = shapes.suites()[part.suite]
    settings = {"max_new_tokens": suite.setting.max_new_tokens, "do_sample": False}
    settings |= part.settings
    count = part.clips or clips
    ids: list[str] = []
    runs: list[Mapping[str, Sequence[TimedRun]]] = []
    errors: dict[str, str] = {}
    for item, inputs, following in islice(_fitting(part, pair, settings, tell), count):
        tell(f"{part.title}: clip {len(ids) + 1} of {count}")
        beside = pair
        recipes: Recipes = resolve_methods(part.methods)
        if part.spoil is not None:
            draft, recipes = part.spoil(pair, (inputs, _inputs(pair, following)))
            beside = Pair(pair.target, draft)
        timed = run_interleaved(
            beside,
            (inputs, None),
            recipes,
            repeat=repeat,
            settings=settings,
            on_run=lambda name, turn: tell(
                f"{part.title}: clip {len(ids) + 1} of {count}, "
                + (f"turn {turn} of {repeat}, {name}" if turn else f"warming up {name}")
            ),
        )
        ids.append(item.id)
        runs.append(timed.runs)
        errors |= timed.errors
    if not ids:
        raise OptionError(f"{part.suite} has no clip whose answer has {part.natural} tokens")
    return Raced(tuple(ids), tuple(runs), errors)


def _fitting(
    part: Part, pair: Pair, settings: Mapping[str, Any], tell: Tell
) -> Iterator[tuple[Item, Inputs, Item]]:
    """The suite's items in order that the part wants, and which item follows each."""
    items = list(shapes.suites()[part.suite].items())
    for item, following in zip(items, (*items[1:], items[0]), strict=True):
        inputs = _inputs(pair, item)
        if part.natural:
            tell(f"{part.title}: is the answer to {item.id} long enough?")
            plain = run(pair.target.backbone, inputs, method=BASELINE, **settings)
            if plain.finish_reason != "stop" or len(plain.ids) < part.natural:
                continue
        yield item, inputs, following


def _inputs(pair: Pair, item: Item) -> Inputs:
    return ask(pair.target, item.question, **media_arguments(item))


# -- reporting ----------------------------------------------------------------------------------


def judged(part: Part, timed: Raced) -> Iterator[Ratio]:
    """Every ratio of a part against its goal."""
    for goal in part.goals:
        found = goal.figure(timed)
        met = None if goal.least is None or found.value is None else found.value >= goal.least
        yield Ratio(
            part.name, goal.name, found.value, goal.least, met, found.interval, found.detail
        )


def differing(timed: Raced) -> list[tuple[str, str]]:
    """(clip, method) of every answer that is not plain decoding's, token for token."""
    return [
        (clip, name)
        for clip, own in zip(timed.clips, timed.runs, strict=True)
        for name, runs in own.items()
        if any(each.ids != own[BASELINE][0].ids for each in runs)
    ]


def summary(part: Part, timed: Raced) -> dict[str, Any]:
    """What was run and what each method took, medians over clips of medians over turns."""

    def middle(name: str, figure: Seconds) -> float:
        return median(median(map(figure, own[name])) for own in timed.runs)

    methods = {}
    for name in timed.methods():
        every = [each.result for own in timed.runs for each in own[name] if each.result is not None]
        rounds = [round for result in every for round in result.rounds]
        methods[name] = {
            "tau": emitted_per_forward(rounds),
            "tokens": [len(own[name][0].ids) for own in timed.runs],
            "ms a token": 1e3 * middle(name, decoding),
            "decode seconds": middle(name, lambda each: each.decode),
            "before seconds": middle(name, lambda each: each.total - each.decode),
            "total seconds": middle(name, lambda each: each.total),
            "fallback": next((r.fallback_reason for r in every if r.fallback_reason), None),
        }
    apart = differing(timed)
    return {
        "part": part.name,
        "about": part.about,
        "suite": part.suite,
        "clips": list(timed.clips),
        "settings": dict(part.settings),
        "methods": methods,
        "errors": dict(timed.errors),
        "identical": not apart,
        "differing": apart,
    }


def speed(
    pair: Pair,
    parts: Sequence[Part] = PARTS,
    *,
    clips: int = 4,
    repeat: int = 3,
    tell: Tell = lambda text: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything ``python -m lab speed --json`` prints: the machine, the parts, the ratios.

    ``keep`` is handed what there is after every part, for a run that may be interrupted.
    """
    found: dict[str, Any] = {
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
        timed = measure(part, pair, clips=clips, repeat=repeat, tell=tell)
        found["parts"].append(summary(part, timed))
        found["ratios"] += [asdict(ratio) for ratio in judged(part, timed)]
        keep(found)
    return found
