"""Drafts for the requests of a serving engine such as vLLM, where requests come and go.

``Drafts`` is the interface: the caller starts a request, asks in each round for drafts of several
requests together, and forgets a request when it has ended. Drafts come from a draft model, which
has a KV cache for each request over the tokens that its view keeps, or from a lookup in the text.
This module imports no engine. The module ``saccade.vllm.draft`` is the adapter to vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import numpy as np
from jaxtyping import Int

from saccade.core.capabilities import Capability
from saccade.core.prompt import Prefill
from saccade.core.protocols import Growing, View
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, add
from saccade.drafting.drafters import MAX_MATCH_TOKENS, drive, find_continuation
from saccade.drafting.shapes.policies import confidence
from saccade.drafting.views.basic import SCATTERED
from saccade.model.backbone import Backbone
from saccade.model.session import DRAFT_ROOM_TOKENS, MAX_RESERVED_ANSWER_TOKENS, Session
from saccade.vllm.draft_length import DraftPlan

# A new cache has this many rows for the answer. For a longer answer it grows.
_ANSWER_ROWS = MAX_RESERVED_ANSWER_TOKENS // 4


@dataclass(frozen=True)
class DraftRequest:
    """A request of an engine that is to be drafted for; the engine's adapter makes it.

    ``ids`` are the ids of its prompt, and from index ``start`` on those of all emitted tokens.
    ``new`` are the last of them: the tokens that the target's last forward emitted.
    """

    name: str  # the engine's own id of the request
    ids: Int[np.ndarray, " len"]
    start: int
    new: Sequence[int]
    read: Callable[[], Prefill | None] = field(compare=False)
    """Called when a draft model starts the request. Returns the draft's whole prompt, with the
    target's attention if the view needs it and it was recorded. Returns None where the engine no
    longer has the pixels."""


@dataclass(frozen=True)
class ProposedTokens:
    """A drafted chain, and the draft's probability of each token.

    A draft model drafts its arg-max tokens. A copied token has the probability 1.
    """

    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()


class Drafts(ABC):
    """Drafts for many requests at once."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Returns whether ``draft`` takes this request now, so that ``start`` need not be called
        for it."""

    @abstractmethod
    def start(self, request: DraftRequest) -> bool:
        """Starts a request, and returns whether it can be drafted for; False is final."""

    @abstractmethod
    def draft(self, requests: Sequence[DraftRequest], plan: DraftPlan) -> dict[str, ProposedTokens]:
        """Returns a draft for each request, to follow its last emitted token.

        A request whose cache no longer fits into memory is given up and left out.
        """

    @abstractmethod
    def forget_all_except(self, names: Collection[str]) -> None:
        """Forgets every other request."""


class ModelDrafts(Drafts):
    """Drafts by a model with a cache of its own over the visual tokens that its view keeps.

    ``memory`` limits the bytes of all caches: a request that does not fit is not drafted for.
    ``vocab`` is how many ids draft and target share, and ``banned`` ids are never drafted. A draft
    stops after any of the ids in ``ends``.
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
        rules = Sampling(end_ids=ends)  # Greedy, for every request.
        self._backbone, self._view, self._memory = backbone, view, memory
        self._session = Session(
            backbone,
            defaultdict(lambda: rules),
            vocab=vocab,
            banned=banned,
            room=_ANSWER_ROWS,
        )
        self._numbers_by_name: dict[str, int] = {}
        self._next_number = count()

    def __contains__(self, name: str) -> bool:
        return name in self._numbers_by_name

    @property
    def bytes(self) -> int:
        """The bytes of all caches."""
        return sum(request.cache.bytes for request in self._session.requests.values())

    def start(self, request: DraftRequest) -> bool:
        prefill = request.read()
        if prefill is None:
            return False
        view = self._view
        if Capability.ATTENTION in view.needs and prefill.mass is None:
            # The target's attention was not recorded, so another view takes over. It keeps tokens
            # spread over the whole video: the share that ``view`` would keep, or where ``view`` has
            # none, the share of ``SCATTERED``.
            view = replace(SCATTERED, keep=view.keep or SCATTERED.keep)
        prompt = self._backbone.embed_missing_rows(view(prefill, prefill.prompt))
        rows = len(prompt) + _ANSWER_ROWS + DRAFT_ROOM_TOKENS
        needed = rows * self._backbone.token_bytes + self._backbone.state_bytes
        if self.bytes + needed > self._memory:
            return False
        number = next(self._next_number)
        for _ in self._session.prefill_in_chunks(number, prompt):
            pass
        self._numbers_by_name[request.name] = number
        return True

    def draft(self, requests: Sequence[DraftRequest], plan: DraftPlan) -> dict[str, ProposedTokens]:
        for each in requests:
            number = self._numbers_by_name[each.name]
            committed_tokens = self._session.requests[number].text_length
            # There are more than ``each.new`` where some rounds went by without a draft.
            if uncommitted_ids := each.ids[each.start + committed_tokens :].tolist():
                self._session.commit({number: uncommitted_ids})
        free_bytes = self._memory - self.bytes
        names_by_number = {}
        for each in requests:
            number = self._numbers_by_name[each.name]
            added_bytes, current_bytes = self._cache_growth(number, plan)
            if added_bytes > free_bytes:  # Its drafting ends, and the others get its memory.
                self._session.end(self._numbers_by_name.pop(each.name))
                free_bytes += current_bytes
            else:
                names_by_number[number] = each.name
                free_bytes -= added_bytes
        chains = {number: grow_chain(plan) for number in names_by_number}
        # ``drive`` puts each chain's latest scores into ``last_scores``. They are not used here.
        trees = drive(self._session.score, chains, last_scores={})
        return {
            names_by_number[number]: ProposedTokens(tree.tokens, tree.confidences)
            for number, tree in trees.items()
        }

    def _cache_growth(self, number: int, plan: DraftPlan) -> tuple[int, int]:
        """Returns how many bytes a draft may allocate for a request's cache, and how many the cache
        has now."""
        request = self._session.requests[number]
        cache = request.cache
        # The cache has ``length`` rows. Committed tokens that are not in it yet are pending.
        needed_rows = cache.length + len(request.pending) + plan.length + 1
        if needed_rows <= cache.capacity:
            return 0, cache.bytes
        # A growing cache is copied into a new one, which is half as large again or as large as
        # needed. Both exist during the copy, so the whole new one is counted.
        return max(3 * cache.bytes // 2, needed_rows * self._backbone.token_bytes), cache.bytes

    def forget_all_except(self, names: Collection[str]) -> None:
        for name in self._numbers_by_name.keys() - set(names):
            self._session.end(self._numbers_by_name.pop(name))


class LookupDrafts(Drafts):
    """Drafts by lookup: proposes what followed the latest words where they occurred before.

    ``banned`` ids are the placeholders of media. A draft ends before one.
    """

    def __init__(self, banned: Collection[int]) -> None:
        self._banned = frozenset(banned)

    def __contains__(self, name: str) -> bool:
        return True

    def start(self, request: DraftRequest) -> bool:
        return True

    def draft(self, requests: Sequence[DraftRequest], plan: DraftPlan) -> dict[str, ProposedTokens]:
        return {each.name: self._lookup(each, plan.length) for each in requests}

    def _lookup(self, request: DraftRequest, length: int) -> ProposedTokens:
        tokens = find_continuation(request.ids, MAX_MATCH_TOKENS, length)
        allowed = tuple(takewhile(lambda token: token not in self._banned, tokens))
        return ProposedTokens(allowed, (1.0,) * len(allowed))

    def forget_all_except(self, names: Collection[str]) -> None: ...


def grow_chain(plan: DraftPlan) -> Growing:
    """Grows a chain of the draft's likeliest tokens, until one more would not pay by the plan.

    It yields the chain to be scored, is sent the scores, and returns the finished chain.
    """
    tree = Tree()
    probability = 1.0  # That every token up to the current one is accepted.
    while len(tree) < plan.length:
        scores = yield tree
        last = len(tree) - 1  # The node of the last token; of an empty chain this is ROOT, -1.
        # Every request is greedy, so the token is the arg-max. It may be left out of the chain
        # below, as a token that was drawn from a law could not be.
        token, _ = scores.draw(last)
        confidence_in_token = confidence(scores, last, token)
        probability *= plan.acceptance.chance(confidence_in_token)
        # The first token is always drafted, because nothing is learnt from an empty draft.
        if len(tree) and probability <= plan.min_probability:
            break
        tree = add(tree, last, token, q=None, confidence=confidence_in_token)
        if not scores.may_go_on(tree, len(tree) - 1):
            break
    return tree
