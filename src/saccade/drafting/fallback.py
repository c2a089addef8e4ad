"""Goes on by plain decoding after a draft has failed, so that the answer keeps the target's law."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

from saccade.core.errors import DraftFailed, kind_and_line
from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import (
    Drafter,
    DraftReport,
    EarlierTurns,
    Growth,
    Learner,
    ParallelWork,
    State,
)
from saccade.core.result import Round
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, find_fault, prefix

T = TypeVar("T")

log = logging.getLogger(__name__)


class Fallback(Drafter, Learner, ParallelWork):
    """Wraps a drafter, so that a failure of it costs speed and nothing else.

    After a failure nothing more is drafted. What had been drawn by then is still returned for
    verification: a failure may depend on a drawn token, so taking the token back would bend the
    law. A tree that is malformed, or that has ids outside the target's vocabulary, counts as a
    failure too; the nodes before the one at fault are returned.
    """

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self._drafter = drafter
        self._vocab = vocab
        # Trees that were drawn before a failure and have not been returned yet, by request.
        self._undelivered: dict[int, Tree] = {}
        self.reason: str | None = None  # Why drafting was given up; None while it goes on.

    # The schedule reaches the drafter's learner and its parallel work through these two, so their
    # failures are caught here as well.
    @property
    def learner(self) -> Learner:
        return self

    @property
    def parallel_work(self) -> ParallelWork:
        return self

    def start(self) -> State:
        return self._try(lambda: self._drafter.learner.start())

    def fold(self, state: State, round: Round) -> State:
        if self.reason is not None:
            return state  # Nothing is learnt any more, and ``_try`` would return None.
        return self._try(lambda: self._drafter.learner.fold(state, round))

    def finish(self, state: State) -> None:
        self._try(lambda: self._drafter.learner.finish(state))

    def sharing_threads(self) -> AbstractContextManager[None]:
        return self._try(lambda: self._drafter.parallel_work.sharing_threads()) or nullcontext()

    def encode(self, inputs: Inputs) -> None:
        self._try(lambda: self._drafter.parallel_work.encode(inputs))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        self._try(lambda: self._drafter.parallel_work.prefill(prompts))

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        self._undelivered = {}
        return self._try(lambda: self._drafter.read_prompts(prefills, earlier)) or 0.0

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._undelivered = {}
        self._try(lambda: self._drafter.start_turn(turns, rules))

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return self._sound_trees(
            dict.fromkeys(states, Tree()), lambda: self._drafter.propose(states)
        )

    def start_growth(self, states: Mapping[int, State]) -> Growth | None:
        empty_trees = dict.fromkeys(states, Tree())
        growth = self._try(lambda: self._drafter.start_growth(states))
        if growth is None:
            return None
        # The caller grows the drafts, then calls ``Growth.finish`` with the grown trees, and
        # proposes the trees that ``Growth.finish`` returns. The drafter's function does not check
        # these trees. So it is replaced by a function that calls it and checks what it returns.
        drafter_finish = growth.finish
        return replace(
            growth,
            finish=lambda trees: self._sound_trees(empty_trees, lambda: drafter_finish(trees)),
        )

    def extend(self, in_flight: Mapping[int, Tree]) -> dict[int, Tree]:
        return self._sound_trees(in_flight, lambda: self._drafter.parallel_work.extend(in_flight))

    def _sound_trees(
        self, defaults: Mapping[int, Tree], draft: Callable[[], Mapping[int, Tree]]
    ) -> dict[int, Tree]:
        """Returns a sound tree for each request of ``defaults``.

        * If ``draft`` succeeds, this is the tree that it returns, or the part of it before a fault.
        * If ``draft`` fails, or drafting has failed before, this is the tree of what was drawn for
          the request before the failure. Such a tree is returned once.
        * If there is no such tree, this is the request's tree in ``defaults``.
        """

        def checked_trees() -> dict[int, Tree]:
            trees = draft()
            return {request: self._sound_part(trees[request]) for request in defaults}

        trees = self._try(checked_trees)
        if trees is not None:
            return trees
        # Undelivered trees of requests that are not in this call are kept for a later call.
        return {
            request: self._sound_part(self._undelivered.pop(request, tree))
            for request, tree in defaults.items()
        }

    def _sound_part(self, tree: Tree) -> Tree:
        """Returns a tree's nodes before the first malformed one. If there is such a node, drafting
        is given up."""
        fault = find_fault(tree, self._vocab)
        if fault is None:
            return tree
        node, reason = fault
        self.give_up(f"drafting failed with a malformed tree: {reason}", ValueError(reason))
        return prefix(tree, node)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._try(lambda: self._drafter.commit(tokens))

    def report(self) -> DraftReport:
        try:
            report = self._drafter.report()
        except Exception as error:
            self._fail(error)
            return DraftReport()
        if self.reason is None:
            return report
        # After a failure the drafter's scores and notes may belong to other trees than those that
        # were returned for verification.
        return replace(report, scores={}, notes={})

    def end(self, request: int) -> None:
        self._try(lambda: self._drafter.end(request))

    def close(self) -> None:
        try:
            self._drafter.close()
        except Exception as error:
            log.warning("the draft did not close", exc_info=error)

    def _try(self, act: Callable[[], T]) -> T | None:
        """Returns what ``act`` returns; None where it fails or drafting has failed before."""
        if self.reason is not None:
            return None
        try:
            return act()
        except DraftFailed as failure:
            self._undelivered = {**failure.trees}
            self._fail(failure.__cause__ or failure)
        except Exception as error:  # The target can go on without a draft, whatever went wrong.
            self._fail(error)
        return None

    def _fail(self, error: BaseException) -> None:
        self.give_up(f"drafting failed with {kind_and_line(error)}", error)

    def give_up(self, reason: str, error: BaseException) -> None:
        """Stops drafting for good and closes the drafter.

        ``reason`` becomes the result's ``fallback_reason``, unless drafting was given up before.
        """
        log.warning("drafting failed; going on by plain decoding", exc_info=error)
        self.reason = self.reason or reason
        self.close()
