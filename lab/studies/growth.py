"""Measures what a token costs as the video grows, which is why the papers prune videos.

Both studies are figures of ``python -m lab figure``. ``growth`` answers questions about clips.
``growth-filled`` goes on to lengths of which no clip could be read in time, so its caches are
filled with noise.
"""

from __future__ import annotations

import numpy as np

from lab.draw import Data
from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
from lab.studies import random_prefill
from lab.studies.experiment import Experiment, interval_over_clips
from lab.studies.study import Study
from lab.training.agreement import FRAMES
from saccade.bench.measures import seconds_per_token
from saccade.drafting.recipe import plan
from saccade.methods import resolve

# The name of a line in the figure -> the method that it shows.
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
# No acceptance can be imposed on a draft that works beside the target, so HIPPO's draft takes turns
# with the target here.
METHODS_ON_NOISE = {
    "ar": "ar",
    "specvlm, fitted": "specvlm/shape=fit",
    "std": "std",
    "hippo, in turns": "hippo/schedule=serial",
    "auto": "auto",
}
# The lengths of ``growth-filled``, in visual tokens. Those of ``growth`` are in ``FRAMES``.
SIZES = (256, 1024, 2048, 4096, 8192, 16384, 32768)
# The chance that a drafted token is accepted if those before it in its draft were, which is about
# what the embedded pair has. So of a chain of five tokens 74 % are accepted on average.
IMPOSED_ACCEPTANCE = 0.9


def measure_growth(experiment: Experiment) -> Data:
    """Measures milliseconds of decoding per token at each number of visual tokens in ``FRAMES``.

    Numbers above the experiment's size are left out. A value is the median over clips with its
    interval.
    """
    # No token has this id, so nothing ends a text, and all answers have the experiment's length.
    no_token = experiment.target.backbone.vocab
    sizes = [size for size in FRAMES if size <= experiment.size]
    lines: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for size in sizes:
        answers_by_method = experiment.run_interleaved(
            *METHODS.values(), size=size, eos_token_id=no_token
        )
        for name, method in METHODS.items():
            milliseconds = [1e3 * seconds_per_token(own) for own in answers_by_method[method]]
            lines[name].append(list(interval_over_clips(milliseconds, np.median)))
    across = f"visual tokens (log scale), answers of {experiment.tokens} tokens"
    panels = {"milliseconds of decoding a token": lines}
    return {"x": across, "at": sizes, "tall": True, "panels": panels, "from zero": True}


def measure_growth_on_noise(experiment: Experiment) -> Data:
    """Measures milliseconds of decoding per token at each number of visual tokens in ``SIZES``.

    Numbers above the experiment's size are left out.

    A prefill of so many tokens would take minutes for each answer. So caches are filled with noise,
    and a draw decides whether a drafted token is accepted (:class:`ImposedAcceptance`). Forwards,
    the view's choice and the draft's reading of what the view chose are real. In place of each of
    the experiment's clips there is a turn of all methods, with another seed of the draws. A value
    is the median over turns with its interval.
    """
    target, draft = experiment.target.backbone, experiment.draft.backbone
    sizes = [size for size in SIZES if size <= experiment.size]
    lines: dict[str, list[list[float]]] = {name: [] for name in METHODS_ON_NOISE}
    for size in sizes:
        prefill = random_prefill.make_prefill(target, size, room=experiment.tokens)
        recipes = {
            name: plan(resolve(method), target, draft, len(prefill.prompt))
            for name, method in METHODS_ON_NOISE.items()
        }
        milliseconds: dict[str, list[float]] = {name: [] for name in METHODS_ON_NOISE}
        for turn in range(experiment.clips + 1):  # The first turn is a warm-up.
            for name, recipe in recipes.items():
                experiment.on_progress(
                    f"{name}, {size} visual tokens, turn {turn} of {experiment.clips}"
                )
                recipe = impose_acceptance(
                    recipe, ImposedAcceptance(rates=(IMPOSED_ACCEPTANCE,), seed=turn)
                )
                seconds = random_prefill.time_decoding(
                    target, draft, recipe, prefill, experiment.tokens
                )
                if turn:
                    milliseconds[name].append(1e3 * seconds)
        for name, own in milliseconds.items():
            lines[name].append(list(interval_over_clips(own, np.median)))
    across = (
        "visual tokens (log scale), caches filled with noise, "
        f"{IMPOSED_ACCEPTANCE:.0%} of tokens stand"
    )
    panels = {"milliseconds of decoding a token": lines}
    return {"x": across, "at": sizes, "tall": True, "panels": panels, "from zero": True}


STUDIES = {
    "growth": Study(
        "SpecVLM, Sec. 1",
        "Milliseconds of decoding a token as the video grows.",
        measure_growth,
        clips=2,
        size=8192,
        tokens=64,
        timed=True,
    ),
    "growth-filled": Study(
        "SpecVLM, Sec. 1",
        "Milliseconds of decoding a token up to 32,768 visual tokens: caches filled with noise, "
        "nine of ten drafted tokens accepted (imposed).",
        measure_growth_on_noise,
        clips=3,
        size=SIZES[-1],
        tokens=64,
        timed=True,
    ),
}
