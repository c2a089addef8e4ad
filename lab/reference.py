"""The oracle that decoding is tested against: no cache, no mask and no tree attention.

``Oracle`` has the methods ``score`` and ``commit`` of :class:`saccade.model.session.Session`. It
computes the logits of every node by running Hugging Face's own modules over prompt, text and path
from the start, which is slow and obviously right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.prompt import Prefill, Prompt
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree, path


class Oracle:
    """Scores trees and commits tokens by computing everything anew each time."""

    def __init__(self, model: Any, prompts: Sequence[Prompt], rules: Sequence[Sampling]) -> None:
        self.model = model
        self.text = model.get_decoder()
        self.prompts = list(prompts)
        self.rules = rules
        self.committed: list[list[int]] = [[] for _ in prompts]

    @torch.no_grad()
    def logits(self, request: int, tokens: Sequence[int]) -> Float[Tensor, "row vocab"]:
        """Returns logits after the prompt and after each of ``tokens``, of one uncached forward."""
        prompt = self.prompts[request]
        embed = self.model.get_input_embeddings()
        new = torch.tensor(list(tokens), dtype=torch.long, device=prompt.embeds.device)
        embeds = torch.cat([prompt.embeds, embed(new)])
        later = prompt.next_position + torch.arange(len(new), device=new.device)
        positions = torch.cat([prompt.positions, later.expand(prompt.positions.shape[0], -1)], 1)
        extra: dict[str, Any] = {}
        if prompt.media.deepstack:
            rows = torch.cat([prompt.visual, torch.zeros_like(new, dtype=torch.bool)])
            extra = {
                "visual_pos_masks": rows[None],
                "deepstack_visual_embeds": list(prompt.media.deepstack),
            }
        out = self.text(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None] if positions.shape[0] > 1 else positions,
            # Without a mask, transformers would take gaps in positions for packed texts.
            attention_mask=torch.ones_like(positions[:1]),
            use_cache=False,
            **extra,
        )
        hidden = out.last_hidden_state[0, len(prompt) - 1 :]
        return self.model.get_output_embeddings()(hidden)

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        """Returns each request's logits at the root and at every node of its tree."""
        scores = {}
        for request, tree in trees.items():
            text = self.committed[request]
            rows = []
            for node in range(ROOT, len(tree)):
                tokens = [*text, *(tree.tokens[n] for n in path(tree, node))]
                rows.append(self.logits(request, tokens)[-1])
            context = [*self.prompts[request].full_ids.tolist(), *text]
            scores[request] = Scores(tree, rows, self.rules[request], context, len(text), request)
        return scores

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Appends tokens to each request's text."""
        for request, new in tokens.items():
            self.committed[request] += new


def decode_greedily(model: Any, prompt: Prompt, count: int, eos: Sequence[int] = ()) -> list[int]:
    """Returns ``count`` greedy tokens, or fewer up to an ``eos``, by one uncached forward each."""
    oracle = Oracle(model, [prompt], [Sampling()])
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        tokens.append(int(oracle.logits(0, tokens)[-1].argmax()))
    return tokens


def teacher_forced_argmax(model: Any, prompt: Prompt, tokens: Sequence[int]) -> list[int]:
    """Returns the arg-max at every position of ``tokens``, of one uncached forward.

    Each of the ``tokens`` is the greedy one if and only if they equal what is returned. There must
    be at least one.
    """
    oracle = Oracle(model, [prompt], [Sampling()])
    return oracle.logits(0, list(tokens)[:-1]).argmax(-1).tolist()


def attention_mass(model: Any, prefill: Prefill) -> Float[Tensor, "layer kv_head visual"]:
    """Returns what ``Prefill.mass`` should be, from the full matrices of eager attention.

    It is the attention that each visual key gets: the mean over the text queries after the last
    visual row, and over the query heads that share a KV head.
    """
    prompt = prefill.prompt
    text = model.get_decoder()
    before = text.config._attn_implementation
    text.config._attn_implementation = "eager"
    try:
        length = len(prompt)
        causal = torch.full((length, length), float("-inf")).triu_(1)[None, None]
        with torch.no_grad():
            out = text(
                inputs_embeds=prompt.embeds[None],
                position_ids=(
                    prompt.positions[:, None] if prompt.positions.shape[0] > 1 else prompt.positions
                ),
                attention_mask=causal.to(prompt.embeds),
                use_cache=False,
                output_attentions=True,
            )
    finally:
        text.config._attn_implementation = before
    # Fixed rows are a tower's, such as sound, and so no text.
    is_query = ~prompt.fixed
    last_visual = int(prompt.visual.nonzero().max())
    is_query[: last_visual + 1] = False
    mass = []
    for weights in out.attentions:
        by_query_head = weights[0][:, is_query][..., prompt.visual].float().mean(1)
        kv_heads = text.config.num_key_value_heads
        mass.append(by_query_head.view(kv_heads, -1, by_query_head.shape[-1]).mean(1))
    return torch.stack(mass)
