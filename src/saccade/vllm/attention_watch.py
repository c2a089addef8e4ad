"""Records how much a prompt's text attends to its visual tokens, in vLLM's own attention layers.

A layer calls ``impl.forward`` outside of any compiled graph, with rotated queries and keys. Because
a prompt may be read in chunks, its keys are stored until its end, up to ``memory`` bytes for all
prompts. Keys from vLLM's prefix cache are not among the arguments of ``impl.forward``. Where a
prompt was not recorded completely, the view works without the target's attention.
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

AttentionMass = tuple[Float[Tensor, "layer kv_head seen"], Float[Tensor, "layer kv_head seen"]]
"""Attention mass on each visual key, as a share of all keys and of the visual keys alone."""


@dataclass
class _PromptAttention:
    """The attention of one prompt so far.

    ``columns`` [seen] are the rows of its visual tokens, and ``text_start`` is the first row after
    the last of them. ``keys`` has the chunks so far by layer.
    """

    columns: Tensor
    text_start: int
    length: int
    mass: Tensor  # [layer, kv_head, seen], as is relevance.
    relevance: Tensor
    keys: list[list[Tensor]]
    key_bytes: int  # What the keys of the whole prompt take.
    position: int = 0  # How many rows all layers have recorded.


@dataclass
class AttentionWatch:
    """Watches the decoder layers of a runner's target while prompts are read."""

    runner: Any
    layers: Mapping[str, Any]
    placeholders: Mapping[int, Any]
    memory: float = math.inf
    _prompts: dict[str, _PromptAttention] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._watched_layers = [layer for layer in self.layers.values() if _is_decoder_layer(layer)]
        for number, layer in enumerate(self._watched_layers):
            layer.impl.forward = _watched_forward(self, number, layer.impl.forward)

    def close(self) -> None:
        """Stops watching."""
        for layer in self._watched_layers:
            del layer.impl.forward
        self._watched_layers = []
        self._prompts.clear()

    def forget_ended(self) -> None:
        """Forgets requests that the runner no longer knows."""
        for name in self._prompts.keys() - self.runner.requests.keys():
            del self._prompts[name]

    def take(self, name: str) -> AttentionMass | None:
        """Returns the attention of a prompt, or None where not all of it was recorded."""
        prompt = self._prompts.pop(name, None)
        if prompt is None or prompt.position < prompt.length or not len(prompt.columns):
            return None
        return prompt.mass, prompt.relevance

    def record(self, number: int, impl: Any, query: Tensor, key: Tensor, metadata: Any) -> None:
        """Records what one layer's rows of visual prompts attend to in a step.

        ``query`` and ``key`` are [token, head, head_dim], of all requests one after another.
        """
        batch, starts = self.runner.input_batch, metadata.query_start_loc.tolist()
        if number == 0:  # It is the first layer of a new step.
            self.forget_ended()
        for index, name in enumerate(batch.req_ids):
            state, (start, stop) = self.runner.requests[name], starts[index : index + 2]
            position = int(batch.num_computed_tokens_cpu[index])
            if position >= state.num_prompt_tokens or not state.mm_features:
                continue  # It decodes, or its prompt has no video or picture.
            if position == 0 and number == 0:
                self._start_prompt(name, state, impl, key)
            prompt = self._prompts.get(name)
            if prompt is None or prompt.position != position:
                continue  # Its keys take too much memory, or its first ones were cached by vLLM.
            _add_chunk(prompt, number, impl, query[start:stop], key[start:stop], position)
            if number == len(self._watched_layers) - 1:
                prompt.position = position + stop - start

    def _start_prompt(self, name: str, state: Any, impl: Any, key: Tensor) -> None:
        """Starts to record a prompt at its first row, if its keys fit into the allowed memory."""
        device, length = key.device, len(state.prompt_token_ids)
        key_bytes = len(self._watched_layers) * length * key[0].numel() * key.element_size()
        self._prompts.pop(name, None)  # A preempted prompt begins again.
        unfinished = (
            each.key_bytes for each in self._prompts.values() if each.position < each.length
        )
        if sum(unfinished) + key_bytes > self.memory:
            return
        ids = torch.tensor(state.prompt_token_ids)
        columns = torch.isin(ids, torch.tensor([*self.placeholders])).nonzero().squeeze(-1)
        mass = torch.zeros(
            len(self._watched_layers), impl.num_kv_heads, len(columns), device=device
        )
        text_start = int(columns[-1]) + 1 if len(columns) else 0
        keys: list[list[Tensor]] = [[] for _ in self._watched_layers]
        self._prompts[name] = _PromptAttention(
            columns.to(device), text_start, length, mass, torch.zeros_like(mass), keys, key_bytes
        )


def _add_chunk(
    prompt: _PromptAttention, number: int, impl: Any, query: Tensor, key: Tensor, position: int
) -> None:
    """Adds the attention of a chunk's text rows in one layer. ``position`` is the chunk's first row
    in the prompt."""
    heads, group = impl.num_kv_heads, impl.num_heads // impl.num_kv_heads
    layer_keys = prompt.keys[number]
    layer_keys.append(key.reshape(len(key), heads, -1).clone())  # Its buffer may be used again.
    first = max(prompt.text_start, position)
    if first >= position + len(query):
        return
    keys = torch.cat(layer_keys).float()
    rows = torch.arange(first, position + len(query), device=keys.device)
    queries = query.reshape(len(query), heads, group, -1)[first - position :].float()
    logits = torch.einsum("tkgd,nkd->kgtn", queries, keys) * impl.scale
    is_later = torch.arange(len(keys), device=keys.device) > rows[:, None]
    logits.masked_fill_(is_later, float("-inf"))
    visual_only = logits[..., prompt.columns].softmax(-1)
    # The mean is over the group's query heads and over all text rows of the prompt.
    count = group * (prompt.length - prompt.text_start)
    prompt.mass[number] += logits.softmax(-1)[..., prompt.columns].sum((1, 2)) / count
    prompt.relevance[number] += visual_only.sum((1, 2)) / count
    if position + len(query) >= prompt.length:
        layer_keys.clear()


def _is_decoder_layer(layer: Any) -> bool:
    """Returns whether a layer attends over a cache of its own, as decoders do and towers do not."""
    attributes = vars(layer)
    return "impl" in attributes and attributes.get("attn_type") == "decoder"


def _watched_forward(watch: AttentionWatch, number: int, forward: Any) -> Any:
    def forward_and_record(
        layer: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            metadata = args[2]  # The arguments before it are the values and the cache.
            if metadata is not None:  # It is None while the engine warms up.
                watch.record(number, layer.impl, query, key, metadata)
        except Exception as error:  # The target's answers do not depend on the recording.
            watch.close()
            log.warning(
                "watching the target failed with %s: %s; drafts now read visual tokens that are "
                "spread evenly over the video",
                type(error).__name__,
                error,
                exc_info=error,
            )
        return forward(layer, query, key, *args, **kwargs)

    return forward_and_record
