"""How much a prompt's text attends to its visual tokens, watched in vLLM's own attention layers.

A layer calls ``impl.forward`` outside of any compiled graph, with rotated queries and keys. Keys of
a prompt read in chunks are kept until its end, up to ``memory`` bytes of all prompts under way;
those that came from the prefix cache pass by unseen. Where not all was seen, a view asks nothing of
the target.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

log = logging.getLogger("vllm.saccade")

Scored = tuple[Float[Tensor, "layer kv_head seen"], Float[Tensor, "layer kv_head seen"]]
"""Attention mass on each visual key among all keys, and among the visual keys alone."""


@dataclass
class _Reading:
    """One prompt under way."""

    columns: Tensor  # [seen] rows of visual tokens
    text: int  # the first row after the last of them
    length: int
    mass: Tensor  # [layer, kv_head, seen], as are the sums of queries so far
    relevance: Tensor
    keys: list[list[Tensor]]  # by layer, what came so far
    bytes: int  # of the keys of all of it
    reached: int = 0


@dataclass
class Watch:
    """The decoder layers of a runner's target, watched while prompts are read."""

    runner: Any
    layers: Mapping[str, Any]
    placeholders: Mapping[int, Any]
    memory: float = math.inf
    _readings: dict[str, _Reading] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # towers have no cache; decoder layers are those that attend by one
        self._watched = [layer for layer in self.layers.values() if _decodes(layer)]
        for number, layer in enumerate(self._watched):
            layer.impl.forward = _forward(self, number, layer.impl.forward)

    def close(self) -> None:
        """Looks no longer."""
        for layer in self._watched:
            del layer.impl.forward
        self._watched = []
        self._readings.clear()

    def forget_ended(self) -> None:
        """Keeps nothing of requests that the runner does not know any more."""
        for name in self._readings.keys() - self.runner.requests.keys():
            del self._readings[name]

    def take(self, name: str) -> Scored | None:
        """What was seen of a prompt read to its end; None where not all of it was seen."""
        found = self._readings.pop(name, None)
        if found is None or found.reached < found.length or not len(found.columns):
            return None
        return found.mass, found.relevance

    def note(self, number: int, impl: Any, query: Tensor, key: Tensor, meta: Any) -> None:
        """One layer's queries and keys of a step, [token, head, head_dim], request by request."""
        batch, starts = self.runner.input_batch, meta.query_start_loc.tolist()
        if number == 0:  # a step begins
            self.forget_ended()
        for row, name in enumerate(batch.req_ids):
            state, (start, stop) = self.runner.requests[name], starts[row : row + 2]
            at = int(batch.num_computed_tokens_cpu[row])
            if at >= state.num_prompt_tokens or not state.mm_features:
                continue
            if at == 0 and number == 0:
                self._begin(name, state, impl, key)
            reading = self._readings.get(name)
            if reading is None or reading.reached != at:
                continue  # its first part came from the prefix cache
            _add(reading, number, impl, query[start:stop], key[start:stop], at)
            if number == len(self._watched) - 1:
                reading.reached = at + stop - start

    def _begin(self, name: str, state: Any, impl: Any, key: Tensor) -> None:
        """Watches a prompt from its first row on, if its keys fit."""
        device, length = key.device, len(state.prompt_token_ids)
        bytes_ = len(self._watched) * length * key[0].numel() * key.element_size()
        self._readings.pop(name, None)  # it was put off, and begins again
        under_way = (each.bytes for each in self._readings.values() if each.reached < each.length)
        if sum(under_way) + bytes_ > self.memory:
            return
        ids = torch.tensor(state.prompt_token_ids)
        columns = torch.isin(ids, torch.tensor([*self.placeholders])).nonzero().squeeze(-1)
        mass = torch.zeros(len(self._watched), impl.num_kv_heads, len(columns), device=device)
        text = int(columns[-1]) + 1 if len(columns) else 0
        keys: list[list[Tensor]] = [[] for _ in self._watched]
        self._readings[name] = _Reading(
            columns.to(device), text, length, mass, torch.zeros_like(mass), keys, bytes_
        )


def _add(reading: _Reading, number: int, impl: Any, query: Tensor, key: Tensor, at: int) -> None:
    """Takes one chunk of a prompt, from row ``at`` on, into what is known of a layer."""
    heads, group = impl.num_kv_heads, impl.num_heads // impl.num_kv_heads
    seen = reading.keys[number]
    seen.append(key.reshape(len(key), heads, -1))
    first = max(reading.text, at)
    if first >= at + len(query):
        return
    keys = torch.cat(seen).float()
    rows = torch.arange(first, at + len(query), device=keys.device)
    asks = query.reshape(len(query), heads, group, -1)[first - at :].float()
    logits = torch.einsum("tkgd,nkd->kgtn", asks, keys) * impl.scale
    later = torch.arange(len(keys), device=keys.device) > rows[:, None]
    logits.masked_fill_(later, float("-inf"))
    count = group * (reading.length - reading.text)
    only = logits[..., reading.columns].softmax(-1)
    reading.mass[number] += logits.softmax(-1)[..., reading.columns].sum((1, 2)) / count
    reading.relevance[number] += only.sum((1, 2)) / count
    if at + len(query) >= reading.length:
        seen.clear()


def _decodes(layer: Any) -> bool:
    """Whether a layer attends over a cache of its own: decoders do, towers do not."""
    known = vars(layer)
    return "impl" in known and known.get("attn_type") == "decoder"


def _forward(watch: Watch, number: int, forward: Any) -> Any:
    def watched(at: Any, query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Any:
        try:
            meta = rest[2]  # after values and the cache; None while the engine warms up
            if meta is not None:
                watch.note(number, at.impl, query, key, meta)
        except Exception as error:  # whatever goes wrong with looking, the target can go on
            watch.close()
            log.warning(
                "watching the target failed with %s: %s; drafts go on over a scattered part",
                type(error).__name__,
                error,
                exc_info=error,
            )
        return forward(at, query, key, *rest, **more)

    return watched
