"""What the papers say, as plain loops over Hugging Face's own modules: no cache, no view, no shape
of ours. Slow, and meant to be read beside the equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from helpers import IMAGE, VIDEO, backbone, frames_input, onevision, qwen25, video_input
from torch import Tensor

from saccade.core.capabilities import Capabilities
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import KeyUpdates, View
from saccade.core.result import Result, Round
from saccade.core.sampling import Sampling
from saccade.drafting.recipe import Recipe
from saccade.engine.generate import stream
from saccade.methods import resolve
from saccade.model.session import Session

# -- models and prompts ------------------------------------------------------------------------

CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_5_vl": lambda: (qwen25(), video_input(1, grid=(2, 8, 10))),
    "llava_onevision": lambda: (onevision(), frames_input(frames=5)),
}


def case(family: str) -> tuple[Any, Any]:
    """A model, and a prompt with enough that is visual to choose from."""
    return CASES[family]()


# -- real runs ---------------------------------------------------------------------------------


@dataclass
class Spy(View):
    """A view that remembers what it was shown and what it let through."""

    view: View
    seen: list[tuple[Prefill, Prompt]] = field(default_factory=list)
    pruned: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.keep = self.view.name, self.view.keep

    @property
    def needs(self) -> Capabilities:
        return self.view.needs

    @property
    def offers(self) -> Capabilities:
        return self.view.offers

    @property
    def key_updates(self) -> KeyUpdates:
        return self.view.key_updates

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        self.seen.append((prefill, prompt))
        self.pruned.append(self.view(prefill, prompt))
        return self.pruned[-1]


@dataclass
class Run:
    """One answer as the engine gave it, with everything needed to compute it again."""

    target: Any
    draft: Any
    prefill: Prefill  # what the view was shown
    whole: Prompt  # the draft's prompt before its view
    pruned: Prompt  # and after
    rounds: list[Round]  # after the opening
    result: Result

    def texts(self) -> Iterator[tuple[Round, list[int]]]:
        """Every round with the ids emitted before it."""
        text = [self.result.ids[0]]
        for round in self.rounds:
            yield round, list(text)
            text += round.emitted


def real(method: str | Recipe, target: Any, inputs: Any, draft: Any = None, count: int = 32) -> Run:
    """An answer by the engine itself."""
    recipe = resolve(method) if isinstance(method, str) else method
    spy = Spy(recipe.view)
    rounds = stream(
        backbone(target),
        inputs,
        draft=None if draft is None else backbone(draft),
        method=replace(recipe, view=spy),
        max_new_tokens=count,
    )
    first, *later_rounds = rounds
    assert first.opening and not any(round.opening for round in later_rounds)
    (result,) = rounds.results
    assert result.fallback_reason is None
    if not spy.seen:  # a drafter that sees nothing: no view was asked
        prefill = prefilled(target, inputs)
        return Run(target, draft, prefill, prefill.prompt, prefill.prompt, later_rounds, result)
    return Run(target, draft, *spy.seen[0], spy.pruned[0], later_rounds, result)


def prefilled(model: Any, inputs: Any, record: bool = True) -> Prefill:
    """The target's prefill, for views called by hand."""
    target = backbone(model)
    return Session(target, [Sampling()]).prefill(target.prompts(inputs), record=record)[0]


# -- forwards ----------------------------------------------------------------------------------


@contextmanager
def _eager(text: Any) -> Iterator[None]:
    before = text.config._attn_implementation
    text.config._attn_implementation = "eager"
    try:
        yield
    finally:
        text.config._attn_implementation = before


def _rows(model: Any, prompt: Prompt, tokens: Sequence[int]) -> dict[str, Tensor]:
    """Prompt and text as the language model reads them."""
    new = torch.tensor(list(tokens), dtype=torch.long)
    later = prompt.next_position + torch.arange(len(new))
    positions = torch.cat([prompt.positions, later.expand(len(prompt.positions), -1)], 1)
    return {
        "inputs_embeds": torch.cat([prompt.embeds, model.get_input_embeddings()(new)])[None],
        "position_ids": positions[:, None] if len(positions) > 1 else positions,
    }


def _bias(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@torch.no_grad()
def attention(model: Any, prompt: Prompt, tokens: Sequence[int] = ()) -> list[Tensor]:
    """The full attention matrix of every layer, ``[head, query, key]``, by the modules, over the
    prompt and what was answered."""
    text = model.get_decoder()
    with _eager(text):
        out = text(
            **_rows(model, prompt, tokens),
            attention_mask=_bias(causal(len(prompt) + len(tokens)))[None, None],
            use_cache=False,
            output_attentions=True,
        )
    return [weights[0] for weights in out.attentions]


@torch.no_grad()
def masked_logits(model: Any, prompt: Prompt, tokens: Sequence[int], seen: Tensor) -> Tensor:
    """Logits after the prompt and after each token, every head of every layer with its own mask.

    ``seen[layer, head, query, key]`` says who reads whom. The modules do the rest.
    """
    text = model.get_decoder()

    def use(layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            assert "attention_mask" in kwargs
            return args, {**kwargs, "attention_mask": _bias(seen[layer])[None]}

        return hook

    hooks = [
        layer.self_attn.register_forward_pre_hook(use(index), with_kwargs=True)
        for index, layer in enumerate(text.layers)
    ]
    try:
        with _eager(text):
            hidden = text(**_rows(model, prompt, tokens), use_cache=False).last_hidden_state[0]
    finally:
        for hook in hooks:
            hook.remove()
    return model.get_output_embeddings()(hidden[len(prompt) - 1 :])


def sparse_logits(
    model: Any,
    prompt: Prompt,
    tokens: Sequence[int],
    kept: Sequence[Sequence[Sequence[int]]],
    sparse: Sequence[int],
) -> Tensor:
    """The target drafting for itself: prompt and text as it read them, save the ``sparse`` tokens.

    Those read of the prompt, in each layer and KV head, the rows ``kept[layer][kv_head]`` alone.
    """
    config = model.get_decoder().config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    length = len(prompt) + len(tokens)
    seen = causal(length).repeat(config.num_hidden_layers, heads, 1, 1)
    for layer in range(config.num_hidden_layers):
        for head in range(heads):
            rows = set(kept[layer][head // (heads // groups)])
            hidden = [row for row in range(len(prompt)) if row not in rows]
            for token in sparse:
                seen[layer, head, len(prompt) + token, hidden] = False
    return masked_logits(model, prompt, tokens, seen)


def everywhere(model: Any, rows: Sequence[int]) -> list[list[list[int]]]:
    """The same kept rows in every layer and head."""
    config = model.get_decoder().config
    return [[list(rows)] * config.num_key_value_heads] * config.num_hidden_layers


# -- the two-stage view of SpecVLM -------------------------------------------------------------


def visual_rows(prompt: Prompt) -> list[int]:
    return [row for row, visual in enumerate(prompt.visual.tolist()) if visual]


def text_rows(prompt: Prompt) -> list[int]:
    return [row for row, visual in enumerate(prompt.visual.tolist()) if not visual]


def queries(prompt: Prompt) -> list[int]:
    """The text after the video: a newline row that ends one is no text, it has a video's id."""
    last = visual_rows(prompt)[-1]
    ids = prompt.full_ids[prompt.places].tolist()
    return [row for row in text_rows(prompt) if row > last and ids[row] not in (IMAGE, VIDEO)]


def ranked(scores: Sequence[float], count: int | None = None) -> list[int]:
    """Indices of the ``count`` highest scores (all of them), highest first; ties by index."""
    left: list[int] = list(range(len(scores)))
    order: list[int] = []
    while left and len(order) != count:
        best = max(left, key=lambda index: (scores[index], -index))
        left.remove(best)
        order.append(best)
    return order


def two_stages(scores: Sequence[float], share: float, budget: int, literal: bool) -> list[int]:
    """Eq. 6 and 7: the smallest top set with ``share`` of the mass, then the rest evenly.

    ``literal``: as printed, where neither equation knows of what the other keeps."""
    wanted, mass, first = share * sum(scores), 0.0, []
    for index in ranked(scores):
        if mass >= wanted or (len(first) == budget and not literal):
            break
        first.append(index)
        mass += scores[index]
    left = [index for index in range(len(scores)) if index not in first]
    more = min(budget if literal else budget - len(first), len(left))
    # the middle of each of `more` stretches of interval I = len(left) / more
    second = [left[(2 * i + 1) * len(left) // (2 * more)] for i in range(more)]
    return sorted(first + second)


def share_of(seen: int, keep: float) -> int:
    """max(1, round(N (1 - r)))"""
    return max(1, int(seen * keep + 0.5))
