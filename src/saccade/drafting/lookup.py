"""Prompt lookup: a drafter without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from saccade.core.prompt import Prefill, Turn
from saccade.core.protocols import Drafter, State
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain

MATCH = 3  # tokens of the text's ending that are looked for, at most


class Lookup(Drafter):
    """What followed the last occurrence of the text's last few tokens.

    Longer matches win over shorter ones, later over earlier; no placeholder is proposed.
    """

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.shape, Chain), "Recipe refuses other shapes"
        self._length = setup.shape.length
        self._banned = set(setup.target.placeholders)
        self._texts: list[list[int]] = []

    def ready(self, prefills: Sequence[Prefill]) -> float:
        self._texts = [prefill.prompt.context.tolist() for prefill in prefills]
        return 0.0

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        found = {}
        for request in states:
            tokens = lookup(self._texts[request], MATCH, self._length)
            stops = (place for place, token in enumerate(tokens) if token in self._banned)
            found[request] = chain(tokens[: next(stops, None)])
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self._texts[request] += new

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        for request, turn in turns.items():
            text = self._texts[request]
            text[len(text) - turn.drop :] = turn.ids


def lookup(text: Sequence[int] | np.ndarray, longest: int, count: int) -> list[int]:
    """Up to ``count`` tokens that followed the last earlier occurrence of the text's ending."""
    ids = np.asarray(text)
    for size in range(min(longest, len(ids) - 1), 0, -1):
        same = (sliding_window_view(ids[:-1], size) == ids[-size:]).all(1).nonzero()[0]
        if len(same):
            after = same[-1] + size
            return ids[after : after + count].tolist()
    return []
