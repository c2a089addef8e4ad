"""Shape ``fit``: the chain length or tree that emits most tokens a second, given forwards' costs.

Expected tokens per second of a shape = E[tokens emitted] / (draft forwards x c + T(n)), with T(n)
the target's time for n rows, c the draft's for one of its forwards, which may draft several levels
of a tree at once, and E from the acceptance rate (Leviathan et al. 2023, Sec. 3; the ideal speedup
is this over 1 / T(1)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.costs import Costs
from saccade.core.protocols import Growing, State
from saccade.core.result import Round
from saccade.core.round_estimates import FadingMean, correct_ratios, expected_chain
from saccade.core.tree import ROOT
from saccade.drafting.shapes.policies import Chain, CostedShape, Paths, grow_static

MAX_CHAIN_LENGTH = 12  # The longest chain that is considered.
PRIOR_ACCEPTANCE = 0.85  # The acceptance rate that is assumed before the first round.
PRIOR_WEIGHT = 8.0  # The assumed rate counts like this many judged tokens.
ACCEPTANCE_MEMORY = 0.98  # Each round multiplies the weight of earlier judged tokens by this.


def expected_tree(rate: float, paths: Paths) -> float:
    """Returns E[tokens] of a round that drafts a static tree, the target's own token included.

    ``paths`` has one path for each node of the tree, from the root down to the node. A path has a
    rank for each of its tokens, which is the token's place among its siblings: (0, 1) is the
    likeliest first token, and below it the second likeliest token after that one. The first rank is
    right with probability ``rate``, and each further rank with half of what is left: 0.8, 0.1, 0.05
    and so on. The halving is an assumption that was not measured; chains do not depend on it.
    """
    chance_by_rank = [rate]
    for _ in range(max((max(path) for path in paths), default=0)):
        chance_by_rank.append((1 - sum(chance_by_rank)) / 2)
    total = 1.0  # the target's own token
    for path in paths:
        chance = 1.0
        for rank in path:
            chance *= chance_by_rank[rank]
        total += chance
    return total


class FitState(NamedTuple):
    """The state of ``Fit``: how often drafts are accepted, and how forwards compare with their
    measured costs."""

    accepted: FadingMean
    # ``ratios[n]`` is about the target's forwards of n rows. It is the seconds that one of them is
    # now believed to take, divided by its measured cost. The tuple is empty while all ratios are 1.
    # No forward has 0 rows, so ``ratios[0]`` is never used.
    ratios: tuple[float, ...] = ()
    # How many requests shared the forwards of the last round; always 1 when sampling, whatever the
    # load is.
    requests: int = 1


class _Option(NamedTuple):
    """A draft that ``Fit`` may choose, and what is expected of a round with it."""

    draft: int | Paths  # a chain's length, or the paths of a tree
    tokens: float  # the expected tokens, the target's own included
    levels: int  # how deep the draft is
    rows: int  # that the target verifies: every node, and the last token of the text


@dataclass(frozen=True)
class Fit(CostedShape):
    """Chooses before every round the chain length or tree with the best expected rate.

    Costs are measured once per machine and pair, and corrected by the seconds of rounds in which a
    request was alone. They are not corrected when sampling, so that draws do not depend on any
    clock. The acceptance rate is learnt from the rounds, starting at the prior. In a tree it is
    that of the first sibling alone.
    """

    trees: tuple[Paths, ...] = ()
    costs: Costs | None = None

    @property
    def branches(self) -> bool:
        return bool(self.trees)

    @property
    def offers(self) -> Capabilities:
        return frozenset({Capability.GROWS_TOKEN_BY_TOKEN})

    def for_parallel(self) -> Chain:
        """Returns the longest chain that the draft writes while the target runs one forward.

        Its length is the largest n, up to ``MAX_CHAIN_LENGTH``, for which n steps of the draft take
        no longer than a forward of the target over n rows, and at least 1. This is HIPPO's and
        PEARL's gamma, T_target / T_draft.
        """
        costs = self.forward_costs
        lengths = range(1, MAX_CHAIN_LENGTH + 1)
        return Chain(max((n for n in lengths if n * costs.draft <= costs.verify(n)), default=1))

    def as_chains(self) -> Fit:
        return replace(self, trees=())

    def start(self) -> State:
        prior = FadingMean(total=PRIOR_ACCEPTANCE * PRIOR_WEIGHT, weight=PRIOR_WEIGHT)
        return FitState(prior)

    def choose(self, state: State) -> int | Paths:
        """Returns the draft that is expected to be fastest: a chain's length, or a tree's paths."""
        learnt: FitState = state
        costs = self.forward_costs.per_request(learnt.requests)
        ratios = learnt.ratios or self._unit_ratios
        rate = learnt.accepted.mean
        # Rounds correct the target's costs alone, so the draft has no ratio of its own. The
        # smallest of the target's ratios is assumed to hold for the whole machine, and so for the
        # draft too.
        draft_ratio = min(ratios[1:])
        options = [
            _Option(n, expected_chain(rate, n), n, n + 1) for n in range(1, MAX_CHAIN_LENGTH + 1)
        ]
        for tree in self.trees:
            depth = max(len(path) for path in tree)
            options.append(_Option(tree, expected_tree(rate, tree), depth, len(tree) + 1))

        def speed(option: _Option) -> float:
            """Returns the expected tokens a second."""
            draft_seconds = draft_ratio * costs.draft * costs.draft_forwards(option.levels)
            target_seconds = ratios[option.rows] * costs.verify(option.rows)
            return option.tokens / (draft_seconds + target_seconds)

        return max(options, key=speed).draft

    @property
    def _unit_ratios(self) -> tuple[float, ...]:
        """The ratios before any round, for 0 rows up to those of the largest draft."""
        most_nodes = max(MAX_CHAIN_LENGTH, *map(len, self.trees), 0)
        most_rows = 1 + most_nodes
        return (1.0,) * (1 + most_rows)

    def grow(self, state: State) -> Growing:
        choice = self.choose(state)
        return Chain(choice).grow(None) if isinstance(choice, int) else grow_static(choice)

    def fold(self, state: State, round: Round) -> State:
        learnt: FitState = state
        path = round.verdict.path
        had_rejection = round.verdict.kind == "recovered"
        # The rate is that of first siblings alone, and ``parents.index`` finds the first child of a
        # node. Where a later sibling was accepted, the first one had been rejected.
        accepted = sum(
            round.tree.parents.index(parent) == node
            for parent, node in zip((ROOT, *path), path, strict=False)
        )
        judged = len(path) + had_rejection  # first siblings that the target has judged
        rate = learnt.accepted.fold(accepted, judged, ACCEPTANCE_MEMORY)
        if round.p.rules.sample:
            return learnt._replace(accepted=rate)
        if round.load is not None:
            # The round shared its forwards with other requests, so its seconds do not show what a
            # forward of this request's rows alone takes.
            return learnt._replace(accepted=rate, requests=round.load.requests)
        return FitState(rate, self._correct_ratios(learnt.ratios or self._unit_ratios, round))

    def _correct_ratios(self, ratios: tuple[float, ...], round: Round) -> tuple[float, ...]:
        """Returns the ratios after a round.

        They are unchanged if its duration is not typical, or if there is no ratio for its number of
        rows.
        """
        rows = 1 + len(round.tree)
        if not round.has_typical_duration or rows >= len(ratios):
            return ratios
        # At place n are the seconds of a forward of n rows by the costs. No forward has 0 rows.
        seconds_by_rows = [0.0, *(self.forward_costs.verify(n) for n in range(1, len(ratios)))]
        return correct_ratios(ratios, seconds_by_rows, rows, round.verify_seconds)
