"""FlashSpec's row: a library for text, given the pair's language models with the clip in them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from flashspec import FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, TargetModel
from torch import Tensor

from lab.peers.rows import Asked, Turn
from lab.peers.saccade import shown
from saccade.core.prompt import Inputs


class Sighted(torch.nn.Module):
    """A vision-language model that is called like a text model: it looks at the clip in the
    forward that begins a cache, and notes when the first such one ended."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config.get_text_config()
        self.inputs: Inputs = {}
        self.ready = 0.0

    def show(self, inputs: Inputs) -> None:
        self.inputs, self.ready = inputs, 0.0

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> Any:
        given: dict[str, Any] = {"use_cache": use_cache, "logits_to_keep": logits_to_keep}
        if past_key_values is None:  # it may begin a token early, or after some of the answer
            unseen = ("input_ids", "attention_mask", "mm_token_type_ids")
            given |= {name: value for name, value in self.inputs.items() if name not in unseen}
            kinds = self.inputs["mm_token_type_ids"]
            more = input_ids.shape[1] - kinds.shape[1]
            given["mm_token_type_ids"] = torch.nn.functional.pad(kinds, (0, more))
        out = self.model(input_ids, past_key_values=past_key_values, **given)
        self.ready = self.ready or time.perf_counter()
        return out


def made(asked: Asked) -> Callable[[int], Turn]:
    own = shown(asked)
    place, dtype = torch.device("cpu"), torch.float32
    target, draft = (Sighted(one.backbone.model) for one in (own.target, own.draft))
    engine = SpeculativeEngine(
        FlashSpecConfig(device="cpu", sampling=SamplingConfig(temperature=0.0)),
        [HuggingFaceDrafter("draft", place, dtype, temperature=0.0, model=draft)],
        TargetModel("target", place, dtype, model=target),
    )
    stops = own.target.backbone.model.generation_config.eos_token_id

    def answer(tokens: int) -> Turn:
        began = time.perf_counter()
        inputs = own.read()
        target.show(inputs)
        draft.show(inputs)
        result = engine.generate(inputs["input_ids"], tokens, torch.tensor([stops]).flatten())
        total = time.perf_counter() - began
        row = result.output_ids[0]
        return Turn(tuple(row[row >= 0].tolist()), target.ready - began, total)

    return answer


MADE = {"FlashSpec": made}
