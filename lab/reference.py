"""The oracle: no cache, no mask, no tree attention. Slow and obviously right.

``Oracle`` is a drop-in for :class:`saccade.model.session.Session`: every law is computed by running
Hugging Face's own modules over prompt + text + path from the start.
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
    """Scores and commits by recomputing everything."""

    def __init__(self, model: Any, prompts: Sequence[Prompt], rules: Sequence[Sampling]) -> None:
        self.model = model
        self.text = model.get_decoder()
        self.prompts = list(prompts)
        self.rules = rules
        self.committed: list[list[int]] = [[] for _ in prompts]

    @torch.no_grad()
    def logits(self, request: int, tokens: Sequence[int]) -> Float[Tensor, "row vocab"]:
        """Logits after the prompt and after each of ``tokens``, in one uncached forward."""
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
            attention_mask=torch.ones_like(positions[:1]),  # else gaps would read as packed texts
            use_cache=False,
            **extra,
        )
        hidden = out.last_hidden_state[0, len(prompt) - 1 :]
        return self.model.get_output_embeddings()(hidden)

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        found = {}
        for request, tree in trees.items():
            text = self.committed[request]
            rows = []
            for node in range(ROOT, len(tree)):
                tokens = [*text, *(tree.tokens[n] for n in path(tree, node))]
                rows.append(self.logits(request, tokens)[-1])
            context = [*self.prompts[request].context.tolist(), *text]
            found[request] = Scores(tree, rows, self.rules[request], context, len(text), request)
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self.committed[request] += new


def greedy(model: Any, prompt: Prompt, count: int, eos: Sequence[int] = ()) -> list[int]:
    """Greedy decoding, one uncached forward a token."""
    oracle = Oracle(model, [prompt], [Sampling()])
    tokens: list[int] = []
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        tokens.append(int(oracle.logits(0, tokens)[-1].argmax()))
    return tokens


def teacher_forced(model: Any, prompt: Prompt, tokens: Sequence[int]) -> list[int]:
    """The arg-max at every position of ``tokens``, in one uncached forward.

    ``tokens`` is the greedy answer if and only if this equals it.
    """
    oracle = Oracle(model, [prompt], [Sampling()])
    return oracle.logits(0, list(tokens)[:-1]).argmax(-1).tolist()


def attention_mass(model: Any, prefill: Prefill) -> Float[Tensor, "layer kv_head seen"]:
    """``Prefill.mass`` from the modules' own full attention matrices (eager attention)."""
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
    asks = ~prompt.fixed
    asks[: int(prompt.visual.nonzero().max()) + 1] = False
    found = []
    for weights in out.attentions:
        rows = weights[0][:, asks][..., prompt.visual].float().mean(1)
        heads = text.config.num_key_value_heads
        found.append(rows.view(heads, -1, rows.shape[-1]).mean(1))
    return torch.stack(found)
