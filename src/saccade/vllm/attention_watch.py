"""Records how much a prompt's text attends to its visual tokens, in vLLM's own attention layers.

By this attention the view chooses which visual tokens the draft reads. The ``impl.forward`` of each
layer is replaced by a function that records and then calls it. This works because a layer calls
``impl.forward`` outside of any compiled graph, with rotated queries and keys. vLLM may read a
prompt in chunks, so the keys of earlier chunks are stored until the prompt's end.

A prompt is not recorded if its keys do not fit into ``memory``, or if its beginning comes from
vLLM's prefix cache, because then ``impl.forward`` does not get the keys of that part. The draft's
view of such a prompt is chosen without the target's attention.
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

AttentionMass = tuple[Float[Tensor, "layer kv_head visual"], Float[Tensor, "layer kv_head visual"]]
"""How much the text that follows the last visual token attends to each visual token, in two ways.

The first is ``mass``, with the softmax over all keys. The second is ``relevance``, with the softmax
over the visual keys alone. Both are means over the rows of that text and over the query heads of a
KV head."""


@dataclass
class _PromptAttention:
    """The attention of one prompt so far.

    Rows are the prompt's tokens, counted from 0. ``mass`` and ``relevance`` are sums that are
    complete once all chunks were added, see ``AttentionMass``.
    """

    visual_rows: Tensor  # [visual]: the rows of the visual tokens.
    text_start: int  # The first row after the last visual one.
    length: int  # Of the whole prompt, in rows.
    mass: Tensor  # [layer, kv_head, visual]
    relevance: Tensor  # [layer, kv_head, visual]
    keys: list[list[Tensor]]  # For each layer the keys of the chunks so far.
    key_bytes: int  # The bytes of the keys of the whole prompt, over all layers.
    position: int = 0  # How many rows all layers have recorded.


@dataclass
class AttentionWatch:
    """Watches the decoder layers of a runner's target while prompts are read.

    A runner is vLLM's object that runs the target on one device.
    """

    runner: Any
    layers: Mapping[str, Any]  # vLLM's attention layers by name.
    placeholders: Mapping[int, Any]  # Its keys are the ids of visual tokens.
    memory: float = math.inf  # The most bytes of the stored keys of all prompts together.
    _prompts: dict[str, _PromptAttention] = field(default_factory=dict)  # By vLLM's request id.

    def __post_init__(self) -> None:
        self._watched_layers = [layer for layer in self.layers.values() if _is_decoder_layer(layer)]
        for number, layer in enumerate(self._watched_layers):
            layer.impl.forward = _watched_forward(self, number, layer.impl.forward)

    def close(self) -> None:
        """Stops watching."""
        for layer in self._watched_layers:
            # The attribute of the instance hid the method of its class, which is used again now.
            del layer.impl.forward
        self._watched_layers = []
        self._prompts.clear()

    def forget_ended(self) -> None:
        """Forgets requests that the runner no longer knows."""
        for name in self._prompts.keys() - self.runner.requests.keys():
            del self._prompts[name]

    def take(self, name: str) -> AttentionMass | None:
        """Returns a request's attention and forgets it; None where not all of it was recorded, or
        where the prompt has no visual token, or no text after the last one."""
        prompt = self._prompts.pop(name, None)
        if prompt is None or prompt.position < prompt.length:
            return None
        if not len(prompt.visual_rows):
            return None
        return prompt.mass, prompt.relevance

    def record(self, number: int, impl: Any, query: Tensor, key: Tensor, metadata: Any) -> None:
        """Records what the rows of prompts with media attend to in one layer, in one step.

        ``number`` is the layer's place among the watched layers, and ``impl`` is vLLM's object
        that attends in this layer. ``query`` and ``key`` are [token, head, head_dim], of all
        requests one after another. ``metadata`` is what vLLM tells attention about this step, such
        as where each request's rows begin.
        """
        batch = self.runner.input_batch
        starts = metadata.query_start_loc.tolist()
        if number == 0:  # It is the first layer of a new step.
            self.forget_ended()
        for index, name in enumerate(batch.req_ids):
            state = self.runner.requests[name]
            (start, stop) = starts[index : index + 2]
            # How many of the request's tokens earlier steps have read.
            position = int(batch.num_computed_tokens_cpu[index])
            if position >= state.num_prompt_tokens or not state.mm_features:
                continue  # The request is decoding, or its prompt has no video or picture.
            if position == 0 and number == 0:
                self._start_prompt(name, state, impl, key)
            prompt = self._prompts.get(name)
            if prompt is None or prompt.position != position:
                continue  # Its keys take too much memory, or vLLM had its first ones in a cache.
            _add_chunk(prompt, number, impl, query[start:stop], key[start:stop], position)
            if number == len(self._watched_layers) - 1:  # All layers have recorded this chunk.
                prompt.position = position + stop - start

    def _start_prompt(self, name: str, state: Any, impl: Any, key: Tensor) -> None:
        """Starts to record a prompt at its first row, if text follows its last visual token and
        its keys fit into the allowed memory."""
        self._prompts.pop(name, None)  # A preempted prompt begins again.
        ids = torch.tensor(state.prompt_token_ids)
        visual_rows = torch.isin(ids, torch.tensor([*self.placeholders])).nonzero().squeeze(-1)
        text_start = int(visual_rows[-1]) + 1 if len(visual_rows) else 0
        if text_start == len(ids):
            return
        device = key.device
        length = len(state.prompt_token_ids)
        key_bytes = len(self._watched_layers) * length * key[0].numel() * key.element_size()
        unfinished = (
            each.key_bytes for each in self._prompts.values() if each.position < each.length
        )
        if sum(unfinished) + key_bytes > self.memory:
            return
        mass = torch.zeros(
            len(self._watched_layers), impl.num_kv_heads, len(visual_rows), device=device
        )
        keys: list[list[Tensor]] = [[] for _ in self._watched_layers]
        self._prompts[name] = _PromptAttention(
            visual_rows.to(device),
            text_start,
            length,
            mass,
            torch.zeros_like(mass),
            keys,
            key_bytes,
        )


def _add_chunk(
    prompt: _PromptAttention, number: int, impl: Any, query: Tensor, key: Tensor, position: int
) -> None:
    """Adds the attention of a chunk in one layer, from those of its rows that are text after the
    last visual row.

    ``position`` is the chunk's first row in the prompt. A chunk may go on beyond the prompt, where
    vLLM reads a request again with its answer; those rows are left out.
    """
    heads = impl.num_kv_heads
    group = impl.num_heads // impl.num_kv_heads
    layer_keys = prompt.keys[number]
    # The keys are copied, because vLLM may use their buffer again.
    layer_keys.append(key.reshape(len(key), heads, -1).clone())
    stop = min(position + len(query), prompt.length)
    first = max(prompt.text_start, position)
    if first >= stop:
        return
    keys = torch.cat(layer_keys).float()
    rows = torch.arange(first, stop, device=keys.device)
    queries = query.reshape(len(query), heads, group, -1)[
        first - position : stop - position
    ].float()
    # t is a text row, k a KV head, g a query head of its group, n a row of the keys, d a dimension.
    logits = torch.einsum("tkgd,nkd->kgtn", queries, keys) * impl.scale
    is_later = torch.arange(len(keys), device=keys.device) > rows[:, None]
    logits.masked_fill_(is_later, float("-inf"))
    over_all_keys = logits.softmax(-1)[..., prompt.visual_rows]
    over_visual_keys = logits[..., prompt.visual_rows].softmax(-1)
    # The mean is over the group's query heads and over the text rows of all chunks.
    count = group * (prompt.length - prompt.text_start)
    prompt.mass[number] += over_all_keys.sum((1, 2)) / count
    prompt.relevance[number] += over_visual_keys.sum((1, 2)) / count
    if stop >= prompt.length:
        layer_keys.clear()


def _is_decoder_layer(layer: Any) -> bool:
    """Returns whether vLLM marks a layer as attention of a decoder. Those of a vision tower are not
    marked so."""
    attributes = vars(layer)
    return "impl" in attributes and attributes.get("attn_type") == "decoder"


def _watched_forward(watch: AttentionWatch, number: int, forward: Any) -> Any:
    """Returns a function that records what a layer attends to and then calls ``forward``.

    If recording fails, it stops for all layers, and the target goes on without it.
    """

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
