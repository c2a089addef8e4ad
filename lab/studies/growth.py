"""What a token costs as the video grows: the claim behind every method here."""

from __future__ import annotations

import numpy as np

from lab.draw import Data
from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
from lab.studies import stand_in
from lab.studies.lab import Lab, interval
from lab.studies.study import Study
from lab.training.agreement import FRAMES
from saccade.bench.measures import seconds_per_token
from saccade.drafting.recipe import plan
from saccade.methods import resolve

METHODS = {
    "ar": "ar",
    "hf (generate)": "hf",
    "sd": "sd",
    "specvlm, fitted": "specvlm/shape=fit",
    "sd on a tenth, fitted": "sd/view=uniform/keep=0.1/shape=fit",
    "std": "std",
    "hippo": "hippo",
    "auto": "auto",
}
# A draft that works beside the target takes no imposed acceptance: HIPPO's takes turns with it here
FILLED = {
    "ar": "ar",
    "specvlm, fitted": "specvlm/shape=fit",
    "std": "std",
    "hippo, in turns": "hippo/schedule=serial",
    "auto": "auto",
}
SIZES = (256, 1024, 2048, 4096, 8192, 16384, 32768)
STANDS = 0.9  # the chance of a drafted token, given those before it: about the pair's own


def growth(lab: Lab) -> Data:
    """Milliseconds of decoding a token by visual tokens, up to the lab's size."""
    endless = lab.target.backbone.vocab  # no token ends a text: all answers are as long
    sizes = [size for size in FRAMES if size <= lab.size]
    lines: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for size in sizes:
        ran = lab.race(*METHODS.values(), size=size, eos_token_id=endless)
        for name, method in METHODS.items():
            spent = [1e3 * seconds_per_token(own) for own in ran[method]]
            lines[name].append(list(interval(spent, np.median)))
    across = f"visual tokens (log scale), answers of {lab.tokens} tokens"
    panels = {"milliseconds of decoding a token": lines}
    return {"x": across, "at": sizes, "tall": True, "panels": panels, "from zero": True}


def filled(lab: Lab) -> Data:
    """The same up to 32,768 visual tokens, whose prefill would take minutes an answer: caches are
    filled with noise, and the acceptance is imposed. Forwards, the view's choice and the draft's
    reading of it are real; a clip is another noise."""
    target, draft = lab.target.backbone, lab.draft.backbone
    sizes = [size for size in SIZES if size <= lab.size]
    lines: dict[str, list[list[float]]] = {name: [] for name in FILLED}
    for size in sizes:
        prefill = stand_in.stand_in(target, size, room=lab.tokens)
        recipes = {
            name: plan(resolve(method), target, draft, len(prefill.prompt))
            for name, method in FILLED.items()
        }
        spent: dict[str, list[float]] = {name: [] for name in FILLED}
        for turn in range(lab.clips + 1):  # the first warms up
            for name, recipe in recipes.items():
                lab.tell(f"{name}, {size} visual tokens, turn {turn} of {lab.clips}")
                recipe = impose_acceptance(recipe, ImposedAcceptance(rates=(STANDS,), seed=turn))
                took = stand_in.decode(target, draft, recipe, prefill, lab.tokens)
                if turn:
                    spent[name].append(1e3 * took)
        for name, own in spent.items():
            lines[name].append(list(interval(own, np.median)))
    across = f"visual tokens (log scale), caches filled with noise, {STANDS:.0%} of tokens stand"
    panels = {"milliseconds of decoding a token": lines}
    return {"x": across, "at": sizes, "tall": True, "panels": panels, "from zero": True}


STUDIES = {
    "growth": Study(
        "SpecVLM, Sec. 1",
        "Milliseconds of decoding a token as the video grows.",
        growth,
        clips=2,
        size=8192,
        tokens=64,
        timed=True,
    ),
    "growth-filled": Study(
        "SpecVLM, Sec. 1",
        "Milliseconds of decoding a token up to 32,768 visual tokens: caches filled with noise, "
        "nine of ten drafted tokens accepted (imposed).",
        filled,
        clips=3,
        size=SIZES[-1],
        tokens=64,
        timed=True,
    ),
}
