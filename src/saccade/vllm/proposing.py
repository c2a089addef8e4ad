"""A round of drafting for whatever engine asks: who is drafted for, how far, and how it went."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from saccade.vllm.caches import Drafted, DraftRequest, Drafts
from saccade.vllm.pace import DraftPlan, RoundCosts, Trust, bucket


class Proposer:
    """Drafts for the requests an engine names, round by round, as far as it pays (``pace``).

    ``most`` is the longest draft; ``length`` fixes it instead. ``clock`` gives seconds.
    """

    def __init__(
        self,
        drafts: Drafts,
        most: int,
        length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafts, self._most, self._length, self._clock = drafts, most, length, clock
        self._paces: dict[int, RoundCosts] = {}
        self._trust = Trust()
        self._last: dict[str, Drafted] = {}  # of the round before, one for each it was asked for
        self._left = clock()
        self._declined: set[str] = set()

    def propose(self, asked: Sequence[DraftRequest], *, alone: bool) -> dict[str, Drafted]:
        """A draft for each; an empty one where drafting does not pay or cannot be.

        ``alone``: whether the forward before held no one's prompt, so that its seconds are those of
        decoding.
        """
        began = self._clock()
        names = [each.name for each in asked]
        pace = self._paces.get(bucket(len(names)), RoundCosts(self._most))
        if alone and names and self._last.keys() == set(names):
            rows = sum(1 + len(draft.tokens) for draft in self._last.values())
            pace = pace.stepped(rows, began - self._left)
        for each in asked:
            draft = self._last.get(each.name, Drafted())
            self._trust = self._trust.fold(draft.tokens, draft.odds, each.new)
        plan = self._plan(pace, len(names))
        found = dict.fromkeys(names, Drafted())
        if plan.length:
            able = [each for each in asked if self._able(each)]
            start = self._clock()
            if able:
                found |= self.drafts.draft(able, plan)
                # whoever outgrew the memory would be read anew every round
                self._declined |= {each.name for each in able if each.name not in self.drafts}
            levels = max((len(draft.tokens) for draft in found.values()), default=0)
            pace = pace.drafted(levels, self._clock() - start)
        elif names:
            pace = pace.drafted(0, 0.0)
        if names:
            self._paces[bucket(len(names))] = pace
        self._last = found
        self._left = self._clock()
        return found

    def keep(self, names: Collection[str]) -> None:
        """Forgets every request but these."""
        self.drafts.keep(names)
        self._declined &= set(names)

    def _plan(self, pace: RoundCosts, requests: int) -> DraftPlan:
        if self._length is not None:
            return DraftPlan(self._length)
        return pace.plan(requests, self._trust) if requests else DraftPlan(0)

    def _able(self, asked: DraftRequest) -> bool:
        """Whether the request can be drafted for; its prompt is read when that is first asked."""
        if asked.name in self._declined:
            return False
        if asked.name in self.drafts or self.drafts.start(asked):
            return True
        self._declined.add(asked.name)
        return False
