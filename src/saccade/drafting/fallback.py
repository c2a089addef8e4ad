"""A drafter that may fail: the answer goes on by plain decoding, and the result says why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import Drafter, State
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree, check

T = TypeVar("T")

log = logging.getLogger(__name__)


class Fallback(Drafter):
    """A drafter whose failure costs speed and nothing else.

    A tree that is malformed or names ids the target does not have counts as a failure.
    """

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self._drafter = drafter
        self._vocab = vocab
        self.reason: str | None = None

    def start(self) -> State:
        return self._try(lambda: self._drafter.start())

    def fold(self, state: State, round: Round) -> State:
        return state if self.reason else self._try(lambda: self._drafter.fold(state, round))

    def encode(self, inputs: Inputs) -> None:
        self._try(lambda: self._drafter.encode(inputs))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        self._try(lambda: self._drafter.prefill(prompts))

    def ready(self, prefills: Sequence[Prefill]) -> float:
        return self._try(lambda: self._drafter.ready(prefills)) or 0.0

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._try(lambda: self._drafter.turn(turns, rules))

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        trees = self._checked(states, lambda: self._drafter.propose(states))
        return dict.fromkeys(states, Tree()) if trees is None else trees

    def extend(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        trees = self._checked(flights, lambda: self._drafter.extend(flights))
        return dict(flights) if trees is None else trees

    def _checked(
        self, requests: Mapping[int, object], draft: Callable[[], dict[int, Tree]]
    ) -> dict[int, Tree] | None:
        def act() -> dict[int, Tree]:
            trees = draft()
            for request in requests:
                check(trees[request], self._vocab)
            return trees

        return self._try(act)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._try(lambda: self._drafter.commit(tokens))

    def scores(self, request: int) -> Scores | None:
        return None if self.reason else self._drafter.scores(request)

    def noted(self, request: int) -> tuple[float, ...]:
        return () if self.reason else self._drafter.noted(request)

    def visible(self, request: int) -> int | None:
        return self._drafter.visible(request)

    def end(self, request: int) -> None:
        self._try(lambda: self._drafter.end(request))

    def close(self) -> None:
        try:
            self._drafter.close()
        except Exception as error:
            log.warning("the draft did not close", exc_info=error)

    def _try(self, act: Callable[[], T]) -> T | None:
        if self.reason is not None:
            return None
        try:
            return act()
        except Exception as error:  # whatever a draft does wrong, the target can go on without it
            self.give_up(f"drafting failed with {type(error).__name__}: {error}", error)
            return None

    def give_up(self, reason: str, error: Exception) -> None:
        """Proposes nothing from now on; the result says why."""
        log.warning("drafting failed; going on by plain decoding", exc_info=error)
        self.reason = reason
        self.close()
