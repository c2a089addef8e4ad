"""Several drafts by one model, each over its own view of the prompt, mixed into one law (TABED).

The views are rows of one batch. They score the same tree, and drafts follow the mixture of their
laws. The recipe's ``Weighting`` folds past rounds into the weights of the views.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.prompt import Turn
from saccade.core.protocols import Drafter, DraftReport, Learner, State
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import ROOT, Tree, shared_nodes
from saccade.drafting.drafters import ModelDrafter, drive
from saccade.drafting.setup import Setup
from saccade.model.session import Session

T = TypeVar("T")

LogLaw = Float[Tensor, "... vocab"]


class Weighting(ABC):
    """A rule that weighs each view in the next draft by the target's laws so far.

    It is immutable: what it has learnt is in the state that ``fold`` returns.
    """

    window: int | None = None  # how many of the last positions it reads; None reads all

    @property
    def with_default_settings(self) -> Weighting:
        """This rule with the defaults of every setting that ``weights=`` does not name."""
        return self

    @abstractmethod
    def start(self, views: int) -> State: ...

    @abstractmethod
    def weights(self, state: State) -> tuple[float, ...]: ...

    @abstractmethod
    def fold(self, state: State, p: LogLaw, q: LogLaw) -> State:
        """Returns the state after a round.

        p [position vocab] and q [view position vocab] are logs of the laws at the positions that
        were verified last, before any sampling rule.
        """
        ...


@dataclass(frozen=True)
class Ensemble:
    """A drafter for views joined by ``Several``, weighted by a rule."""

    name: ClassVar[str] = "ensemble"
    needs: ClassVar[Capabilities] = frozenset({Capability.SEVERAL_VIEWS})
    offers: ClassVar[Capabilities] = frozenset({Capability.READS_VIEW, Capability.MIXTURE})

    weighting: Weighting

    def __call__(self, setup: Setup) -> Drafter:
        return EnsembleDrafter(setup, self.weighting)


@dataclass(frozen=True)
class MixtureScores(Scores):
    """The scores of a mixture; ``parts`` are the scores of its views."""

    parts: tuple[Scores, ...] = ()


class MixtureSession:
    """Presents a session over all views as one over their mixture, whose logits are
    log sum_i w_i softmax(logits_i)."""

    def __init__(self, session: Session, views: int) -> None:
        self.weights: dict[int, tuple[float, ...]] = {}
        self._session = session
        self._views = views
        self._last: dict[int, MixtureScores] = {}

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        scored = self._session.score(self._by_row(trees))
        return {
            request: self._mix(request, tuple(scored[row] for row in self._by_row({request: None})))
            for request in trees
        }

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request in tokens:
            self._last.pop(request, None)
        self._session.commit(self._by_row(tokens))

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._session.turn(
            self._by_row(turns), [rule for rule in rules for _ in range(self._views)]
        )

    def end(self, request: int) -> None:
        for row in self._by_row({request: None}):
            self._session.end(row)

    def _by_row(self, each: Mapping[int, T]) -> dict[int, T]:
        """Returns each request's value for each of its rows of the batch, which are its views."""
        return {
            request * self._views + view: value
            for request, value in each.items()
            for view in range(self._views)
        }

    def _mix(self, request: int, parts: tuple[Scores, ...]) -> Scores:
        """Returns the scores of the mixture of a request's views."""
        tree, last = parts[0].tree, self._last.get(request)
        # Weights are constant within a draft, so rows of this tree that are mixed already are
        # reused.
        rows = [] if last is None else list(last.rows[: shared_nodes(last.tree, tree) + 1])
        weights = torch.tensor(self.weights[request], dtype=torch.float32).log()
        for row in range(len(rows), len(parts[0].rows)):
            laws = torch.stack([part.rows[row] for part in parts]).float().log_softmax(-1)
            rows.append((laws + weights.to(laws.device)[:, None]).logsumexp(0))
        first = parts[0]
        mixed = MixtureScores(
            tree, rows, first.rules, first.context, first.offset, request=request, parts=parts
        )
        self._last[request] = mixed
        return mixed


class EnsembleDrafter(ModelDrafter, Learner):
    """One draft model that reads m views of each prompt. Its state is the shape's and the
    weighting's."""

    def __init__(self, setup: Setup, weighting: Weighting) -> None:
        self._views = setup.view.parts
        rules = [rule for rule in setup.rules for _ in self._views]
        super().__init__(replace(setup, rules=rules))
        self._weighting = weighting
        self._mixture = MixtureSession(self.session, len(self._views))

    @property
    def learner(self) -> Learner:
        return self

    def start(self) -> State:
        return self._planning.start(), self._weighting.start(len(self._views))

    def fold(self, state: State, round: Round) -> State:
        shape, weighting = state
        return self._planning.fold(shape, round), self._fold_weighting(weighting, round)

    def finish(self, state: State) -> None:
        self._planning.finish(state[0])

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        self._begin_round(states)
        for request, (_, weighting) in states.items():
            self._mixture.weights[request] = self._weighting.weights(weighting)
        growing = {request: self._planning.grow(shape) for request, (shape, _) in states.items()}
        return drive(self._mixture.score, growing, self._scores)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._mixture.commit(tokens)

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._mixture.turn(turns, rules)

    def end(self, request: int) -> None:
        self._mixture.end(request)

    def report(self) -> DraftReport:
        """Returns the report, with the weights of the block that was drafted last as its notes."""
        return replace(super().report(), notes=self._mixture.weights)

    def _fold_weighting(self, state: State, round: Round) -> State:
        """Returns the weighting's state after a round."""
        q = round.q
        if not isinstance(q, MixtureScores):
            return state
        # These are the positions that the target has judged, where the views have laws.
        nodes = [node for node in (ROOT, *round.verdict.path) if node + 1 < len(q.rows)]
        views = torch.stack(
            [torch.stack([part.raw(node) for node in nodes]) for part in q.parts]
        ).double()
        p = torch.stack([round.p.raw(node) for node in nodes])[:, : views.shape[-1]].to(views)
        banned = views.isneginf().all(0)  # No draft may propose these ids, so they do not count.
        p = p.masked_fill(banned, float("-inf")).log_softmax(-1)
        return self._weighting.fold(state, p, views.log_softmax(-1))
