"""Imposed acceptance: real forwards, judged by decree, to time shapes with random weights.

The words mean what they mean in vLLM: an acceptance *length* is the mean number of drafted tokens
accepted a round, *rates* are the chance of each place of a draft given that those before it stood.
What comes out is no answer; how long it took is real. A *stand-in* goes further: no prompt is read,
and decoding starts over keys as random, so that contexts of any length cost no prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from saccade.core.errors import OptionError
from saccade.core.options import Options, Stops
from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import Scoring
from saccade.core.sampling import Law, Sampling, Scores
from saccade.core.tree import ROOT, Tree, children
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.setup import Setup
from saccade.model.backbone import Backbone
from saccade.model.session import ROOM, Request, Session
from saccade.model.timing import Clock


@dataclass(frozen=True)
class Decree:
    """How many tokens of a draft stand: a mean length, or a rate for each place."""

    length: float | None = None
    rates: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.length is None) == (not self.rates):
            raise OptionError("give an acceptance length or acceptance rates")
        if self.length is not None and self.length < 0:
            raise OptionError(f"an acceptance length of {self.length} is below 0")
        if not all(0 <= rate <= 1 for rate in self.rates):
            raise OptionError("acceptance rates are between 0 and 1")

    def standing(self, request: int, round: int, depth: int) -> int:
        """How many of the first ``depth`` tokens stand in this round; the last rate goes on."""
        rng = np.random.default_rng([self.seed, request, round])
        if self.length is not None:
            whole = int(self.length)
            return min(depth, whole + int(rng.random() < self.length - whole))
        for place in range(depth):
            if rng.random() >= self.rates[min(place, len(self.rates) - 1)]:
                return place
        return depth


@dataclass(frozen=True)
class Decreed(Scores):
    """Scores whose laws let the nodes ``stands`` pass and no other: point masses all of them."""

    stands: tuple[int, ...] = ()  # from the root down

    def law(self, node: int) -> Law | None:
        """The token to accept after ``node``, or the likeliest that refuses what was drafted."""
        before = (ROOT, *self.stands)
        if node in before[:-1]:
            return self.tree.tokens[before[before.index(node) + 1]]
        first, second = self.top(node, 2)
        refused = {self.tree.tokens[child] for child in children(self.tree, node)}
        return next((t for t in (first, second) if t not in refused), _other(refused))


def _other(refused: set[int]) -> int:
    return next(token for token in range(len(refused) + 1) if token not in refused)


class Imposed:
    """A session whose forwards are real and whose verdicts are decreed."""

    def __init__(self, session: Scoring, decree: Decree) -> None:
        self._session, self._decree = session, decree
        self._rounds: dict[int, int] = {}

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        found: dict[int, Scores] = {}
        for request, scores in self._session.score(trees).items():
            round = self._rounds[request] = self._rounds.get(request, -1) + 1
            path = _first_path(trees[request])
            count = self._decree.standing(request, round, len(path))
            found[request] = Decreed(
                scores.tree,
                scores.rows,
                scores.rules,
                scores.context,
                scores.offset,
                scores.request,
                path[:count],
            )
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._session.commit(tokens)


def _first_path(tree: Tree) -> tuple[int, ...]:
    """The first child of the first child, and so on: in a ranked tree, the likeliest path."""
    node, found = ROOT, []
    while below := list(children(tree, node)):
        node = below[0]
        found.append(node)
    return tuple(found)


def imposed(recipe: Recipe, decree: Decree) -> Recipe:
    """The recipe with its verdicts decreed. Serial schedules only.

    Raises OptionError for a draft in parallel, which is judged as it flies.
    """
    if recipe.schedule is not serial:
        raise OptionError(f"{recipe.name} drafts in parallel: acceptance is imposed serially only")
    return replace(recipe, schedule=partial(_decreed, decree))


def _decreed(decree: Decree, session: Scoring, *rest: Any) -> Any:
    return serial(Imposed(session, decree), *rest)


# -- prompts that nobody read -------------------------------------------------------------------

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
    cache = target.cache(length + room + ROOM)
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
    session.requests[0] = Request(
        cache,
        prompt.context.tolist(),
        prompt.next_position,
        tip=prefill.tip,
        prompt_rows=(len(prompt), len(prompt)),
    )
    drafting = recipe.drafter(Setup(target, draft, recipe.view, recipe.shape, rules, tokens))
    drafting.encode({"input_ids": prompt.context[None]})
    drafting.prefill([prompt])
    drafting.ready([prefill])
    stops = Stops(Options(tokens), [prompt.context], None)
    clock = Clock(target.device)
    for _ in recipe.schedule(session, drafting, [0], stops.cut):
        pass
    return clock.since() / (tokens - 1)
