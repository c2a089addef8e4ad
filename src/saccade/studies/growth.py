"""What a token costs as the video grows: the claim behind every method here."""

from __future__ import annotations

import numpy as np

from saccade.bench.measures import per_token
from saccade.measure.draw import Data
from saccade.shapes.agreement import FRAMES
from saccade.studies.lab import Lab, interval
from saccade.studies.study import Study

METHODS = {
    "ar": "ar",
    "hf (generate)": "hf",
    "sd": "sd",
    "specvlm, fitted": "specvlm/shape=fit",
    "sd on a tenth, fitted": "sd/view=uniform/keep=0.1/shape=fit",
    "std": "std",
}


def growth(lab: Lab) -> Data:
    """Milliseconds of decoding a token by visual tokens, up to the lab's size."""
    endless = lab.target.backbone.vocab  # no token ends a text: all answers are as long
    sizes = [size for size in FRAMES if size <= lab.size]
    lines: dict[str, list[list[float]]] = {name: [] for name in METHODS}
    for size in sizes:
        ran = lab.race(*METHODS.values(), size=size, eos_token_id=endless)
        for name, method in METHODS.items():
            spent = [1e3 * per_token(own) for own in ran[method]]
            lines[name].append(list(interval(spent, np.median)))
    across = f"visual tokens (log scale), answers of {lab.tokens} tokens"
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
}
