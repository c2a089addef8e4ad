"""Makes prefills of random keys, and times decoding after them.

In this way a study can time decoding over a long context without the prefill that it would need.
The seconds are real, because forwards over random keys take as long as over others. The text is
nonsense of which no draft would be accepted, so the caller imposes an acceptance on the recipe
(``lab.hardware.imposed``).
"""

from __future__ import annotations

import math

import torch

from saccade.core.prompt import Prefill, Prompt
from saccade.core.sampling import Sampling
from saccade.core.stopping import StopConditions, Stops
from saccade.core.timing import Clock
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Setup
from saccade.model.backbone import Backbone
from saccade.model.session import DRAFT_ROOM_TOKENS, RequestState, Session

FRAME_SIDE = 8  # Rows and columns of a frame's tokens.


def make_prefill(target: Backbone, visual: int, *, text: int = 64, room: int = 256) -> Prefill:
    """Makes a prefill of ``visual`` tokens and some text with random rows, keys and attention.

    Its cache has as many keys as after a real prefill, and no forward is run for it. ``text`` is
    the number of the text's tokens, and ``room`` how many tokens may be decoded after it.
    """
    length = visual + text
    # The id of a visual token, or 0 for a target without visual tokens.
    placeholder = next(iter((*target.placeholders, 0)))
    frames = math.ceil(visual / FRAME_SIDE**2)
    is_visual = torch.arange(length) < visual
    cells = torch.cartesian_prod(*map(torch.arange, (1, frames, FRAME_SIDE, FRAME_SIDE)))
    prompt = Prompt(
        full_ids=torch.where(is_visual, placeholder, 0),
        embeds=torch.randn(length, target.embed([0]).shape[-1]),
        positions=torch.arange(length).expand(target.axes, -1),
        visual=is_visual,
        fixed=torch.zeros_like(is_visual),
        grid=cells[:visual],
        places=torch.arange(length),
        next_position=length,
    )
    cache = target.new_cache(length + room + DRAFT_ROOM_TOKENS)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    cache.advance(length)
    mass = torch.rand(target.key_layer_count, target.kv_heads, visual)
    # The random attention stands for both kinds, with the softmax over all keys or visual ones.
    return Prefill(prompt, cache, torch.randn(target.vocab), mass, mass)


def time_decoding(
    target: Backbone, draft: Backbone, recipe: Recipe, prefill: Prefill, tokens: int
) -> float:
    """Returns the seconds of decoding per token after a random prefill, from the second token on.

    The answer has ``tokens`` tokens. It runs on a CPU. The draft really reads what its view keeps,
    which is not timed, and really proposes tokens.
    """
    prompt = prefill.prompt
    cache = prefill.cache
    rules = [Sampling()]
    assert cache is not None
    cache.length = len(prompt)  # Forgets the keys of an earlier call with this prefill.
    session = Session(target, rules, room=tokens)
    session.requests[0] = RequestState(
        cache,
        prompt.full_ids.tolist(),
        prompt.next_position,
        root_logits=prefill.logits,
        prompt_rows=(len(prompt), len(prompt)),
    )
    drafting = recipe.drafter(Setup(target, draft, recipe.view, recipe.shape, rules, tokens))
    drafting.parallel_work.encode({"input_ids": prompt.full_ids[None]})
    drafting.parallel_work.prefill([prompt])
    drafting.read_prompts([prefill])
    stops = Stops(StopConditions(tokens), [prompt.full_ids], decode=None)
    clock = Clock(target.device)
    for _ in recipe.schedule(session, drafting, [0], stops.append_until_stop):
        pass
    return clock.elapsed() / (tokens - 1)
