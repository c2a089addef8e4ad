"""Hugging Face's own ways to decode, timed like ours, as rows of a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from saccade.models import Loaded
from saccade.types import Inputs


@dataclass(frozen=True)
class Timed:
    """An answer of a peer's: its ids, seconds to the first token, and seconds in all."""

    ids: tuple[int, ...]
    first: float
    total: float


Peer = Callable[[Loaded, Loaded | None, Inputs, dict[str, Any]], Timed]


class _FirstToken(BaseStreamer):
    """Notes when the first generated token arrives; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None: ...


def hf(target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]) -> Timed:
    """``model.generate``: plain decoding with Hugging Face's cache."""
    model = target.backbone.model
    place = target.backbone.device
    moved = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    streamer = _FirstToken()
    started = time.perf_counter()
    out = model.generate(**moved, streamer=streamer, **settings)
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    ended = time.perf_counter()
    ids = tuple(out[0, inputs["input_ids"].shape[1] :].tolist())
    return Timed(ids, streamer.at - started, ended - started)


def hf_assisted(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> Timed:
    """Assisted generation as shipped: the assistant is never shown the video."""
    if draft is None:
        raise ValueError("hf-assisted needs a draft model")
    return hf(target, draft, inputs, {**settings, "assistant_model": draft.backbone.model})


def hf_lookup(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> Timed:
    """Prompt lookup as shipped: n-grams over all ids, placeholders included."""
    return hf(target, draft, inputs, {**settings, "prompt_lookup_num_tokens": 5})


PEERS: dict[str, Peer] = {"hf": hf, "hf-assisted": hf_assisted, "hf-lookup": hf_lookup}
