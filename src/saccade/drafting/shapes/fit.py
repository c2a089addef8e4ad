"""Shape ``fit``: the chain length or tree that pays best at what forwards cost here.

Expected tokens per second of a shape = E[tokens emitted] / (draft levels x c + T(n)), with T(n) the
target's time for n rows, c the draft's for one level and E from the rate at which drafts are
accepted (Leviathan et al. 2023, Sec. 3; the ideal speedup is this over 1 / T(1)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from saccade.core.costs import Costs
from saccade.core.protocols import Growing, Shape, State
from saccade.core.result import Round
from saccade.drafting.shapes.policies import Chain, Paths, grow_static

LONGEST = 12
PRIOR_RATE, PRIOR_WEIGHT, MEMORY = 0.85, 8.0, 0.98


class Rate(NamedTuple):
    """How much came true of what was tried, summed over rounds; old ones fade."""

    hits: float
    tries: float

    @property
    def share(self) -> float:
        return self.hits / self.tries

    def fold(self, hits: float, tries: float, memory: float) -> Rate:
        """With one more round; ``memory`` is what is left of those before."""
        return Rate(self.hits * memory + hits, self.tries * memory + tries)


def expected_chain(rate: float, length: int) -> float:
    """E[tokens] of a chain whose tokens are each accepted at ``rate``: 1 + a + a^2 + ..."""
    return sum(rate**i for i in range(length + 1))


def expected_tree(rate: float, paths: Paths) -> float:
    """E[tokens] of a static tree; rank r is right with probability rate, then half of what is left.

    The halving is a model, stated here and nowhere measured; chains do not depend on it.
    """
    share = [rate]
    for _ in range(max((max(path) for path in paths), default=0)):
        share.append((1 - sum(share)) / 2)
    total = 1.0
    for path in paths:
        chance = 1.0
        for rank in path:
            chance *= share[rank]
        total += chance
    return total


@dataclass(frozen=True)
class Fit(Shape):
    """Before every round, the chain length or tree with the best expected rate.

    Costs are measured once per machine and pair; the acceptance rate is folded from the rounds,
    starting at a stated prior. State: that rate.
    """

    timed: ClassVar[bool] = True

    trees: tuple[Paths, ...] = ()
    costs: Costs | None = None

    @property
    def branches(self) -> bool:
        return bool(self.trees)

    @property
    def stepwise(self) -> bool:
        return True

    def beside(self) -> Chain:
        """The most tokens that the draft writes while the target judges as many (HIPPO's and
        PEARL's gamma, T_target / T_draft)."""
        assert self.costs is not None, "Fit needs measured costs: see recipe.plan"
        draft, judge = self.costs.draft, self.costs.verify
        return Chain(max((n for n in range(1, LONGEST + 1) if n * draft <= judge(n)), default=1))

    def chained(self) -> Fit:
        return replace(self, trees=())

    def priced(self, costs: Costs) -> Fit:
        return replace(self, costs=costs)

    def start(self) -> State:
        return Rate(PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT)

    def choose(self, state: State) -> int | Paths:
        """A chain length or the paths of a tree."""
        assert self.costs is not None, "Fit needs measured costs: see recipe.plan"
        rate: float = state.share
        options: list[tuple[int | Paths, float, int, int]] = [
            *((n, expected_chain(rate, n), n, n + 1) for n in range(1, LONGEST + 1)),
            *((t, expected_tree(rate, t), max(map(len, t)), len(t) + 1) for t in self.trees),
        ]
        costs = self.costs
        best = max(options, key=lambda option: costs.speedup(*option[1:]))
        return best[0]

    def grow(self, state: State) -> Growing:
        choice = self.choose(state)
        return Chain(choice).grow(None) if isinstance(choice, int) else grow_static(choice)

    def fold(self, state: State, round: Round) -> State:
        accepted = len(round.verdict.accepted)
        refused = round.verdict.kind == "recovered"
        return state.fold(accepted, accepted + refused, MEMORY)
