"""Runs OpenVINO GenAI for the rows of the table of peers that name it as their engine.

``lab.peers.worker`` imports this module in an environment that has OpenVINO GenAI, and perhaps
neither torch nor this library. ``START_BY_ROW`` maps each row to a function that loads the row's
models and returns the function that answers the task.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from lab.peers.rows import Task, Turn

MODELS = Path(sys.prefix)  # The Makefile exports the folders target and draft into it.


class _TokenTimes(genai.StreamerBase):
    """Collects ids as they come, and records when the first of them came."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[int] = []
        self.first_time = 0.0  # By time.perf_counter.
        self.early = 0  # How many ids came in the first call of ``write``.

    def write(self, token: int | list[int]) -> Any:
        new = np.atleast_1d(token).tolist()
        if not self.ids:
            self.first_time = time.perf_counter()
            self.early = len(new)
        self.ids += new
        return genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


def make_pipeline_row(
    make: Callable[[dict[str, Any]], dict[str, Any]], **config: int
) -> Callable[[Task], Callable[[int], Turn]]:
    """Returns the function that loads a row's models for a task, as ``START_BY_ROW`` has it.

    ``make`` takes the settings of the device and returns further arguments of ``VLMPipeline``.
    ``config`` has fields of its ``GenerationConfig``.
    """

    def start(task: Task) -> Callable[[int], Turn]:
        properties = {
            "INFERENCE_NUM_THREADS": task.threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
        }
        pipeline = genai.VLMPipeline(MODELS / "target", "CPU", **make(properties), **properties)
        rules = genai.GenerationConfig(MODELS / "target" / "generation_config.json")
        for name, value in config.items():
            setattr(rules, name, value)
        frames = np.load(task.frames)

        def answer(tokens: int) -> Turn:
            rules.max_new_tokens = tokens
            streamer = _TokenTimes()
            start_time = time.perf_counter()
            pipeline.generate(
                task.words,
                videos=[openvino.Tensor(frames)],
                generation_config=rules,
                streamer=streamer,
            )
            total = time.perf_counter() - start_time
            return Turn(
                tuple(streamer.ids), streamer.first_time - start_time, total, streamer.early
            )

        return answer

    return start


def _with_draft_model(properties: dict[str, Any]) -> dict[str, Any]:
    """Returns the argument of ``VLMPipeline`` by which it drafts with the exported draft model."""
    return {"draft_model": genai.draft_model(MODELS / "draft", "CPU", **properties)}


START_BY_ROW = {
    "OpenVINO GenAI": make_pipeline_row(lambda properties: {}),
    "OpenVINO GenAI, prompt lookup": make_pipeline_row(
        lambda properties: {"prompt_lookup": True}, num_assistant_tokens=5, max_ngram_size=3
    ),
    "OpenVINO GenAI, draft model": make_pipeline_row(_with_draft_model, num_assistant_tokens=5),
}
