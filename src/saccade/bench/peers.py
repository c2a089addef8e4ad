"""Times Hugging Face's own ways to decode, the peers that our methods are compared with.

The peers are plain ``generate``, assisted generation with and without the video, and prompt lookup.
"""

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
class TimedRun:
    """One timed run of one method or peer, in seconds."""

    ids: tuple[int, ...]  # The answer's.
    decode_seconds: float  # Seconds of decoding, without the prefill.
    total_seconds: float  # Seconds of the whole run.
    # Tokens that were decoded in ``decode_seconds``. Those that came with the prefill do not count,
    # except for a peer whose whole answer came with it.
    decoded_tokens: int
    result: Result | None = None  # None for a peer.
    first_token_seconds: float = 0.0  # Seconds until a peer's first token; 0 for our methods.


def peer_run(ids: tuple[int, ...], first: float, total: float, early: int = 1) -> TimedRun:
    """Returns a peer's run, whose first ``early`` tokens came together after ``first`` seconds.

    With an assistant model the first step may return several tokens. Only what follows them counts
    as decoding. If no token follows, the whole run counts.
    """
    if len(ids) <= early:
        return TimedRun(ids, total, total, max(1, len(ids)), first_token_seconds=first)
    return TimedRun(ids, total - first, total, len(ids) - early, first_token_seconds=first)


Peer = Callable[[Loaded, Loaded | None, Inputs, dict[str, Any]], TimedRun]
"""(target, draft, the target's inputs, further arguments of ``generate``) -> one timed run."""


class _FirstTokenTimer(BaseStreamer):
    """Notes when the first generated tokens arrive, and how many of them arrive together."""

    def __init__(self) -> None:
        self.calls = 0
        self.arrived_at = 0.0
        self.arrived_together = 1

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # The first call has the prompt.
            self.arrived_at = time.perf_counter()
            self.arrived_together = value.numel()

    def end(self) -> None: ...


def hf(target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]) -> TimedRun:
    """Runs ``model.generate`` with Hugging Face's cache; ``draft`` is not used.

    It decodes plainly, unless ``settings`` name an assistant model or prompt lookup.
    """
    model = target.backbone.model
    device = target.backbone.device
    inputs_on_device = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    streamer = _FirstTokenTimer()
    start = time.perf_counter()
    clock = Clock(device)
    out = model.generate(**inputs_on_device, streamer=streamer, **settings)
    seconds = clock.elapsed()
    ids = tuple(out[0, inputs["input_ids"].shape[1] :].tolist())
    return peer_run(ids, streamer.arrived_at - start, seconds, streamer.arrived_together)


def hf_assisted(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> TimedRun:
    """Runs assisted generation as shipped, where the assistant never sees the video."""
    if draft is None:
        raise ValueError("hf-assisted needs a draft model")
    return hf(target, draft, inputs, {**settings, "assistant_model": draft.backbone.model})


def hf_assisted_seeing(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> TimedRun:
    """Runs assisted generation with an assistant that sees the video.

    Transformers does not pass the pixels on to the assistant. A hook adds them in the one call of
    the assistant that reads the prompt. It also drops two inputs of that call: the target's encoded
    media (``mm_encoder_outputs``) and the positions, so that the assistant computes its own.
    """
    if draft is None:
        raise ValueError("hf-assisted-seeing needs a draft model")
    media = {name: value for name, value in inputs.items() if name != "input_ids"}
    length = inputs["input_ids"].shape[1]

    def add_media(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[1] < length:
            return args, kwargs  # This call continues from the assistant's cache.
        # The call may read generated text after the prompt.
        media_inputs = {name: _extend_to(value, ids, length) for name, value in media.items()}
        other_inputs = {
            name: value for name, value in kwargs.items() if name != "mm_encoder_outputs"
        }
        return args, {**other_inputs, **media_inputs, "position_ids": None}

    handle = draft.backbone.model.register_forward_pre_hook(add_media, with_kwargs=True)
    try:
        return hf_assisted(target, draft, inputs, settings)
    finally:
        handle.remove()


def _extend_to(value: Any, ids: Tensor, length: int) -> Any:
    """Extends an input of the prompt to the length of ``ids``, if it has one number for each token,
    as an attention mask has. Other inputs, such as pixels, keep their values.

    ``ids`` are the prompt of ``length`` tokens and the text generated so far. Tensors are moved to
    the device of ``ids``.
    """
    if not isinstance(value, Tensor):
        return value
    value = value.to(ids.device)
    if value.ndim != 2 or value.shape[0] != 1 or value.is_floating_point():
        return value
    missing = ids.shape[1] - length
    if value.shape[1] != length or missing <= 0:
        return value
    # Generated text has a 1 in an attention mask and a 0 among token types. The two are told apart
    # by their values: the mask of one request is all ones, and token types contain zeros for text.
    fill = 1 if bool(value.bool().all()) else 0
    return torch.cat([value, value.new_full((1, missing), fill)], 1)


def hf_lookup(
    target: Loaded, draft: Loaded | None, inputs: Inputs, settings: dict[str, Any]
) -> TimedRun:
    """Runs prompt lookup as shipped: n-grams over all ids, placeholders included."""
    return hf(target, draft, inputs, {**settings, "prompt_lookup_num_tokens": 5})


PEERS: dict[str, Peer] = {
    "hf": hf,
    "hf-assisted": hf_assisted,
    "hf-assisted-seeing": hf_assisted_seeing,
    "hf-lookup": hf_lookup,
}
