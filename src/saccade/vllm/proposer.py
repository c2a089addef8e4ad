"""Decides in each round which of an engine's requests are drafted for and how far.

The engine, such as vLLM, calls :meth:`Proposer.propose` between two forwards of the target. From
call to call the proposer learns what forwards cost and how many drafted tokens were accepted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from saccade.vllm.draft_length import PRIOR, DraftPlan, RoundCosts, size_bucket, update_acceptance
from saccade.vllm.request_drafts import DraftRequest, Drafts, ProposedTokens


class Proposer:
    """Drafts for an engine's requests round by round, as far as it pays (see ``draft_length``).

    ``max_length`` is the longest draft in tokens. If ``length`` is given, drafts have that length
    whether it pays or not. ``clock`` gives seconds.
    """

    def __init__(
        self,
        drafts: Drafts,
        max_length: int,
        length: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafts = drafts
        self._max_length = max_length
        self._fixed_length = length
        self._clock = clock
        self._costs_by_size: dict[int, RoundCosts] = {}
        self._acceptance = PRIOR
        self._last_proposals: dict[str, ProposedTokens] = {}  # By request, of the last round.
        self._last_end = clock()  # When the last call of `propose` ended and the target went on.
        self._declined: set[str] = set()  # Requests that cannot be drafted for.

    def propose(
        self, requests: Sequence[DraftRequest], *, decoding_only: bool
    ) -> dict[str, ProposedTokens]:
        """Returns a draft for each request, empty where drafting does not pay or is impossible.

        ``decoding_only`` is False if the target's last forward prefilled a part of a prompt and did
        not reach its end. It may be True if the forward completed a prompt: the request is then new
        in this call. So the forward's seconds count as the cost of decoding only if
        ``decoding_only`` is True and the requests are those of the last call.
        """
        start = self._clock()
        names = [each.name for each in requests]
        costs = self._costs_by_size.get(size_bucket(len(names)), RoundCosts(self._max_length))
        # The target has run one forward since the last call. How many rows it had is known only if
        # it was over the same requests as the last call: then each had one row for its last token,
        # and one for every token that was drafted for it.
        has_same_requests = bool(names) and self._last_proposals.keys() == set(names)
        if decoding_only and has_same_requests:
            rows = sum(1 + len(draft.tokens) for draft in self._last_proposals.values())
            costs = costs.after_target_forward(rows, start - self._last_end)
        # ``new`` are the tokens that this forward emitted, which show what it accepted.
        for each in requests:
            draft = self._last_proposals.get(each.name, ProposedTokens())
            self._acceptance = update_acceptance(
                self._acceptance, draft.tokens, draft.probabilities, each.new
            )
        plan = self._plan(costs, len(names))
        proposals = dict.fromkeys(names, ProposedTokens())
        if plan.length:
            draftable = [each for each in requests if self._can_draft(each)]
            drafting_start = self._clock()
            if draftable:
                proposals |= self.drafts.draft(draftable, plan)
                # ``draft`` gives up a request whose cache no longer fits into memory. It is
                # declined from now on, or ``_can_draft`` would prefill it anew every round.
                self._declined |= {each.name for each in draftable if each.name not in self.drafts}
            # Requests draft together, so the draft model runs one forward for each token of the
            # longest draft. If that draft stopped at an unlikely token, which it leaves out, one
            # more forward was run for this token. It is not counted here.
            draft_forwards = max((len(draft.tokens) for draft in proposals.values()), default=0)
            costs = costs.after_drafting(draft_forwards, self._clock() - drafting_start)
        elif names:
            # A round without a draft adds no cost, but counts towards the next try at drafting.
            costs = costs.after_plain_round()
        if names:
            self._costs_by_size[size_bucket(len(names))] = costs
        self._last_proposals = proposals
        self._last_end = self._clock()
        return proposals

    def forget_all_except(self, names: Collection[str]) -> None:
        """Forgets every request but these."""
        self.drafts.forget_all_except(names)
        self._declined &= set(names)

    def _plan(self, costs: RoundCosts, requests: int) -> DraftPlan:
        if self._fixed_length is not None:
            return DraftPlan(self._fixed_length)
        return costs.plan(requests, self._acceptance) if requests else DraftPlan(0)

    def _can_draft(self, request: DraftRequest) -> bool:
        """Returns whether a request can be drafted for; the first call prefills its prompt."""
        if request.name in self._declined:
            return False
        if request.name in self.drafts or self.drafts.start(request):
            return True
        self._declined.add(request.name)
        return False
