"""OpenVINO GenAI's rows. Its environment has no torch to spare and not this library."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from lab.peers.rows import Asked, Turn

MODELS = Path(sys.prefix)  # what the Makefile exports lies in the environment: target, draft


class _Heard(genai.StreamerBase):
    """Ids as they come, and when the first did."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.at, self.early = 0.0, 0

    def write(self, token: int | list[int]) -> Any:
        new = np.atleast_1d(token).tolist()
        if not self.ids:
            self.at, self.early = time.perf_counter(), len(new)
        self.ids += new
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


def pipeline(
    make: Callable[[dict[str, Any]], dict[str, Any]], **config: int
) -> Callable[[Asked], Callable[[int], Turn]]:
    """A row: what the pipeline is made with besides the device's properties, and generation's
    settings."""

    def made(asked: Asked) -> Callable[[int], Turn]:
        properties = {
            "INFERENCE_NUM_THREADS": asked.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }
        standing = genai.VLMPipeline(MODELS / "target", "CPU", **make(properties), **properties)
        rules = genai.GenerationConfig(MODELS / "target" / "generation_config.json")
        for name, value in config.items():
            setattr(rules, name, value)
        frames = np.load(asked.frames)

        def answer(tokens: int) -> Turn:
            rules.max_new_tokens = tokens
            heard = _Heard()
            began = time.perf_counter()
            standing.generate(
                asked.words,
                videos=[openvino.Tensor(frames)],
                generation_config=rules,
                streamer=heard,
            )
            total = time.perf_counter() - began
            return Turn(tuple(heard.ids), heard.at - began, total, heard.early)

        return answer

    return made


def _drafting(properties: dict[str, Any]) -> dict[str, Any]:
    return {"draft_model": genai.draft_model(MODELS / "draft", "CPU", **properties)}


MADE = {
    "OpenVINO GenAI": pipeline(lambda properties: {}),
    "OpenVINO GenAI, prompt lookup": pipeline(
        lambda properties: {"prompt_lookup": True}, num_assistant_tokens=5, max_ngram_size=3
    ),
    "OpenVINO GenAI, draft model": pipeline(_drafting, num_assistant_tokens=5),
}
