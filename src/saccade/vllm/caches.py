"""Drafts for requests that come and go: a cache for each over what a view kept of its prompt.

Knows no engine. ``Drafts`` is the one seam: a request is started, follows what was really emitted,
is drafted for together with others, and is forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from jaxtyping import Int

from saccade.core.prompt import Prefill
from saccade.core.protocols import Growing, View
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add
from saccade.drafting.drafters import MAX_MATCH_TOKENS, drive, lookup
from saccade.drafting.shapes.policies import confidence
from saccade.drafting.views.basic import SCATTERED
from saccade.model.backbone import Backbone
from saccade.model.session import LONG, ROOM, Session
from saccade.vllm.pace import DraftPlan


@dataclass(frozen=True)
class DraftRequest:
    """A request that an engine asks a draft for; written by the engine's adapter."""

    name: str
    ids: Int[np.ndarray, " len"]  # of its prompt and all that was emitted after it
    start: int  # where its answer begins
    new: Sequence[int]  # what the last forward emitted, the last of ``ids``
    read: Callable[[], Prefill | None] = field(compare=False)
    """The draft's own whole prompt, and what the target attended to where a view asks for that;
    None where the pixels are gone."""


@dataclass(frozen=True)
class Drafted:
    """Tokens in a row, each chosen, and what the draft promised of each."""

    tokens: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()


class Drafts(ABC):
    """Who drafts, for many requests at once."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def start(self, asked: DraftRequest) -> bool:
        """Whether the request can be drafted for from now on; False for good if it cannot."""

    @abstractmethod
    def draft(self, asked: Sequence[DraftRequest], plan: DraftPlan) -> dict[str, Drafted]:
        """A draft each, after what was emitted so far."""

    @abstractmethod
    def keep(self, names: Collection[str]) -> None:
        """Forgets every other request."""


class ModelDrafts(Drafts):
    """A model with its own cache over the visual tokens its view keeps.

    ``memory`` bounds the bytes of all caches: a request that does not fit is not drafted for.
    """

    def __init__(
        self,
        backbone: Backbone,
        view: View,
        *,
        vocab: int,
        banned: Sequence[int],
        ends: tuple[int, ...],
        memory: int,
    ) -> None:
        rules = Sampling(end_ids=ends)
        self._backbone, self._view, self._memory = backbone, view, memory
        self._session = Session(
            backbone, defaultdict(lambda: rules), vocab=vocab, banned=banned, room=LONG // 4
        )
        self._numbers: dict[str, int] = {}
        self._fresh = count()

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    @property
    def bytes(self) -> int:
        """What the caches take."""
        return sum(request.cache.bytes for request in self._session.requests.values())

    def start(self, asked: DraftRequest) -> bool:
        prefill = asked.read()
        if prefill is None:
            return False
        view = self._view
        if view.attention and prefill.mass is None:  # the target's attention was not to be seen
            view = replace(SCATTERED, keep=view.keep or SCATTERED.keep)
        prompt = self._backbone.written(view(prefill, prefill.prompt))
        rows = len(prompt) + LONG // 4 + ROOM
        if self.bytes + rows * self._backbone.token_bytes > self._memory:
            return False
        number = next(self._fresh)
        for _ in self._session.reading(number, prompt, place=number):
            pass
        self._numbers[asked.name] = number
        return True

    def draft(self, asked: Sequence[DraftRequest], plan: DraftPlan) -> dict[str, Drafted]:
        for each in asked:
            number = self._numbers[each.name]
            known = self._session.requests[number].length
            if fresh := each.ids[each.start + known :].tolist():
                self._session.commit({number: fresh})
        spare, names = self._memory - self.bytes, {}
        for each in asked:
            number = self._numbers[each.name]
            more, held = self._growth(number, plan)
            if more > spare:  # it is drafted for no more, and the others have its room
                self._session.end(self._numbers.pop(each.name))
                spare += held
            else:
                names[number], spare = each.name, spare - more
        growing = {number: grow(plan) for number in names}
        trees = drive(self._session.score, growing, {})
        return {names[number]: Drafted(tree.tokens, tree.odds) for number, tree in trees.items()}

    def _growth(self, number: int, plan: DraftPlan) -> tuple[int, int]:
        """The bytes that a draft may add to a request's cache, and those it has."""
        request = self._session.requests[number]
        cache = request.cache
        needed = cache.length + len(request.pending) + plan.length + 1
        if needed <= cache.capacity:
            return 0, cache.bytes
        # a cache that grows is copied into one half as large again, or as large as it must be
        return max(3 * cache.bytes // 2, needed * self._backbone.token_bytes), cache.bytes

    def keep(self, names: Collection[str]) -> None:
        for name in self._numbers.keys() - set(names):
            self._session.end(self._numbers.pop(name))


class LookupDrafts(Drafts):
    """What followed the same words earlier in prompt or answer; no placeholder is proposed."""

    def __init__(self, banned: Collection[int]) -> None:
        self._banned = frozenset(banned)

    def __contains__(self, name: str) -> bool:
        return True

    def start(self, asked: DraftRequest) -> bool:
        return True

    def draft(self, asked: Sequence[DraftRequest], plan: DraftPlan) -> dict[str, Drafted]:
        return {each.name: self._looked_up(each, plan.length) for each in asked}

    def _looked_up(self, asked: DraftRequest, length: int) -> Drafted:
        found = lookup(asked.ids, MAX_MATCH_TOKENS, length)
        stop = next((at for at, token in enumerate(found) if token in self._banned), len(found))
        return Drafted(tuple(found[:stop]), (1.0,) * stop)

    def keep(self, names: Collection[str]) -> None: ...


def grow(plan: DraftPlan) -> Growing:
    """A chain of the draft's own choices that ends where one more token would not pay."""
    tree, reach = Tree(), 1.0
    while len(tree) < plan.length:
        scores = yield tree
        last = len(tree) - 1
        token, _ = scores.draw(last)
        odds = confidence(scores, last, token)
        reach *= plan.trust.chance(odds)
        if len(tree) and reach <= plan.bar:  # the first is drafted always: else nothing is learnt
            break
        tree = add(tree, last, token, None, odds)
        if token in scores.rules.end_ids:
            break
    return tree
