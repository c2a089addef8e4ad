"""One question about a video: its inputs, its greedy answer, and runs with any draft and method."""

from __future__ import annotations

from typing import Any

from helpers import (
    input_for,
    truth,
)

import saccade

FAMILY = "qwen2_5_vl"

INPUTS = input_for(FAMILY)


def greedy_ids(count: int = 40) -> tuple[int, ...]:
    """The first tokens of the greedy answer."""
    return truth(FAMILY)[:count]


def run_on_video(
    model: Any, draft: Any, method: Any = "sd", inputs: Any = INPUTS, **settings: Any
) -> Any:
    """One answer about the video; 24 tokens of it unless ``settings`` say otherwise."""
    settings = {"max_new_tokens": 24, **settings}
    return saccade.run(model, inputs, draft=draft, method=method, **settings)
