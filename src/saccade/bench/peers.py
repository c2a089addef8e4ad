"""Hugging Face's own ways to decode, timed like ours, as rows of a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.core.timing import Clock
from saccade.inputs import Loaded


@dataclass(frozen=True)
class Run:
    """One timed run of one method, or of a peer."""

    ids: tuple[int, ...]
    decode: float  # seconds of it, and of all
    total: float
    counted: int  # tokens that came of decoding: the first comes of the prefill
    result: Result | None = None  # None for a peer
    first: float = 0.0  # of a peer, seconds to the first of its tokens


def timed(ids: tuple[int, ...], first: float, total: float, early: int = 1) -> Run:
    """A peer's run. An assisted one hands over several tokens at first, ``early``: decoding is what
    follows them; everything, if all came at once."""
    if len(ids) <= early:
        return Run(ids, total, total, max(1, len(ids)), first=first)
    return Run(ids, total - first, total, len(ids) - early, first=first)


Peer = Callable[[Loaded, Loaded | None, Inputs, dict[str, Any]], Run]


class _FirstToken(BaseStreamer):
    """Notes when the first generated token arrives; the prompt comes before it."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0
        self.early = 1

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at, self.early = time.perf_counter(), value.numel()

    def end(self) -> None: ...


def hf(target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]) -> Run:
    """``model.generate``: plain decoding with Hugging Face's cache."""
    model = target.backbone.model
    place = target.backbone.device
    moved = {k: v.to(place) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    streamer = _FirstToken()
    started = time.perf_counter()
    clock = Clock(place)
    out = model.generate(**moved, streamer=streamer, **settings)
    took = clock.since()
    ids = tuple(out[0, inputs["input_ids"].shape[1] :].tolist())
    return timed(ids, streamer.at - started, took, streamer.early)


def hf_assisted(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> Run:
    """Assisted generation as shipped: the assistant is never shown the video."""
    if draft is None:
        raise ValueError("hf-assisted needs a draft model")
    return hf(target, draft, inputs, {**settings, "assistant_model": draft.backbone.model})


def hf_assisted_seeing(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> Run:
    """Assisted generation with its assistant's eyes opened: a hook hands it the pixels that
    transformers drops on the way, in the one call that reads the prompt."""
    if draft is None:
        raise ValueError("hf-assisted-seeing needs a draft model")
    seen = {name: value for name, value in inputs.items() if name not in ("input_ids",)}
    length = inputs["input_ids"].shape[1]

    def show(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[1] < length:
            return args, kwargs  # it goes on from its cache
        whole = {name: _longer(value, ids) for name, value in seen.items()}
        given = {name: value for name, value in kwargs.items() if name != "mm_encoder_outputs"}
        return args, {**given, **whole, "position_ids": None}

    handle = draft.backbone.model.register_forward_pre_hook(show, with_kwargs=True)
    try:
        return hf_assisted(target, draft, inputs, settings)
    finally:
        handle.remove()


def _longer(value: Any, ids: Tensor) -> Any:
    """A row of the prompt's length brought to that of ``ids``: text follows the prompt."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(ids.device)
    if value.ndim != 2 or value.shape[0] != 1 or value.is_floating_point():
        return value
    more = ids.shape[1] - value.shape[1]
    if not 0 < more < 64:
        return value
    fill = 1 if bool(value.bool().all()) else 0  # a mask goes on with ones, kinds of tokens do not
    return torch.cat([value, value.new_full((1, more), fill)], 1)


def hf_lookup(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> Run:
    """Prompt lookup as shipped: n-grams over all ids, placeholders included."""
    return hf(target, draft, inputs, {**settings, "prompt_lookup_num_tokens": 5})


PEERS: dict[str, Peer] = {
    "hf": hf,
    "hf-assisted": hf_assisted,
    "hf-assisted-seeing": hf_assisted_seeing,
    "hf-lookup": hf_lookup,
}
