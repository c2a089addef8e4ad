"""Runs FlashSpec, a library for text models, on the embedded pair, with the clip in the prompt.

This is one engine of the table of peers (``rows.py``), and runs in an environment of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, TargetModel
from torch import Tensor

from lab.peers.rows import Task, Turn
from lab.peers.saccade import load_task
from saccade.core.prompt import Inputs


class ModelWithClip(torch.nn.Module):
    """A vision-language model that can be called like a text model.

    FlashSpec passes ids and a KV cache but no video. So the clip of :meth:`set_clip` is added to
    every forward that begins a cache. ``ready_time`` is when the first forward after ``set_clip``
    ended, by ``time.perf_counter``, or 0 before that.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config.get_text_config()
        self.inputs: Inputs = {}
        self.ready_time = 0.0

    def set_clip(self, inputs: Inputs) -> None:
        """Sets the prompt whose clip is read, and forgets when an earlier prefill ended."""
        self.inputs = inputs
        self.ready_time = 0.0

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> Any:
        arguments: dict[str, Any] = {"use_cache": use_cache, "logits_to_keep": logits_to_keep}
        if past_key_values is None:
            # The arguments that have an entry for each token must fit these ids. FlashSpec may
            # begin a cache with fewer ids than the prompt has, or with those of the answer as well.
            text_names = ("input_ids", "attention_mask", "mm_token_type_ids")
            arguments |= {
                name: value for name, value in self.inputs.items() if name not in text_names
            }
            kinds = self.inputs["mm_token_type_ids"]
            # Padding with 0, which is text, or cutting off where ``missing`` is negative.
            missing = input_ids.shape[1] - kinds.shape[1]
            arguments["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, missing))
        out = self.model(input_ids, past_key_values=past_key_values, **arguments)
        self.ready_time = self.ready_time or time.perf_counter()
        return out


def start(task: Task) -> Callable[[int], Turn]:
    """Makes the engine, and returns the function that gives one timed answer.

    That function takes the largest number of tokens of the answer.
    """
    pair = load_task(task)
    device = torch.device("cpu")
    dtype = torch.float32
    target, draft = (ModelWithClip(one.backbone.model) for one in (pair.target, pair.draft))
    engine = SpeculativeEngine(
        FlashSpecConfig(device="cpu", sampling=SamplingConfig(temperature=0.0)),
        [HuggingFaceDrafter("draft", device, dtype, temperature=0.0, model=draft)],
        TargetModel("target", device, dtype, model=target),
    )
    stops = pair.target.backbone.model.generation_config.eos_token_id

    def answer(tokens: int) -> Turn:
        start_time = time.perf_counter()
        inputs = pair.make_inputs()
        target.set_clip(inputs)
        draft.set_clip(inputs)
        result = engine.generate(inputs["input_ids"], tokens, torch.tensor([stops]).flatten())
        total = time.perf_counter() - start_time
        row = result.output_ids[0]  # Filled up with negative numbers.
        return Turn(tuple(row[row >= 0].tolist()), target.ready_time - start_time, total)

    return answer


START_BY_ROW = {"FlashSpec": start}
