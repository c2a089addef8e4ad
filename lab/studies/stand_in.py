"""Prompts that nobody read: random keys under an imposed acceptance.

So contexts of any length cost no prefill; how long a token takes is real.
"""

from __future__ import annotations

import torch

from saccade.core.prompt import Prefill, Prompt
from saccade.core.sampling import Sampling
from saccade.core.stopping import Limits, Stops
from saccade.core.timing import Clock
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup
from saccade.model.backbone import Backbone
from saccade.model.session import DRAFT_ROOM_TOKENS, RequestState, Session

SIDE = 8  # rows and columns of a stand-in's frames


def stand_in(target: Backbone, visual: int, *, text: int = 64, room: int = 256) -> Prefill:
    """What a prefill of ``visual`` tokens and some text would leave, all of it random: rows, keys,
    attention. As long as a real one, at the price of none."""
    length, (first, *_) = visual + text, (*target.placeholders, 0)
    frames = -(-visual // SIDE**2)
    seen = torch.arange(length) < visual
    cells = torch.cartesian_prod(*map(torch.arange, (1, frames, SIDE, SIDE)))
    prompt = Prompt(
        context=torch.where(seen, first, 0),
        embeds=torch.randn(length, target.embed([0]).shape[-1]),
        positions=torch.arange(length).expand(target.axes, -1),
        visual=seen,
        fixed=torch.zeros_like(seen),
        grid=cells[:visual],
        index=torch.arange(length),
        next_position=length,
    )
    cache = target.cache(length + room + DRAFT_ROOM_TOKENS)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    cache.advance(length)
    mass = torch.rand(target.layers, target.kv_heads, visual)
    return Prefill(prompt, cache, torch.randn(target.vocab), mass, mass)


def decode(
    target: Backbone, draft: Backbone, recipe: Recipe, prefill: Prefill, tokens: int
) -> float:
    """Seconds a token of decoding after a stand-in, from the second token on; on a CPU.

    The draft reads what its view keeps, and proposes, in earnest.
    """
    prompt, cache, rules = prefill.prompt, prefill.cache, [Sampling()]
    assert cache is not None
    cache.length = len(prompt)
    session = Session(target, rules, room=tokens)
    session.requests[0] = RequestState(
        cache,
        prompt.context.tolist(),
        prompt.next_position,
        root_logits=prefill.logits,
        prompt_rows=(len(prompt), len(prompt)),
    )
    drafting = recipe.drafter(Setup(target, draft, recipe.view, recipe.shape, rules, tokens))
    drafting.encode({"input_ids": prompt.context[None]})
    drafting.prefill([prompt])
    drafting.ready([prefill])
    stops = Stops(Limits(tokens), [prompt.context], None)
    clock = Clock(target.device)
    for _ in recipe.schedule(session, drafting, [0], stops.cut):
        pass
    return clock.since() / (tokens - 1)
