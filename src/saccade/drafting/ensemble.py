"""Several drafts by one model, each over its own view of the prompt, mixed into one law (TABED).

The views of a prompt are rows of one batch, which score the same tree. Tokens are drafted from the
mixture of their laws. The recipe's ``Weighting`` learns the weights of the views from past rounds.
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
from saccade.core.tree import ROOT, Tree, count_shared_nodes
from saccade.drafting.drafters import ModelDrafter, drive
from saccade.drafting.setup import Setup
from saccade.drafting.views.basic import views_to_read
from saccade.model.session import Session

T = TypeVar("T")

LogLaw = Float[Tensor, "... vocab"]  # The logs of the probabilities of one law or more.


class Weighting(ABC):
    """A rule that weighs the views in the next draft by how their laws compared with the target's.

    It is immutable: what it has learnt is in the state that ``fold`` returns.
    """

    window: int | None = None  # how many of the last verified positions count; None for all

    @property
    def with_default_settings(self) -> Weighting:
        """This rule, with defaults in the fields that its name does not say.

        Such a field is written apart. For example, the rule ``inverse`` has this name at every
        temperature, which is written as ``weights=inverse/tau=0.5``. The name of a rule is found by
        comparing this property with the named rules, whose fields have the defaults.
        """
        return self

    @abstractmethod
    def start(self, views: int) -> State:
        """Returns the state before the first round, for so many views."""
        ...

    @abstractmethod
    def weights(self, state: State) -> tuple[float, ...]:
        """Returns the weight of each view in the next draft; together they are 1."""
        ...

    @abstractmethod
    def fold(self, state: State, p: LogLaw, q: LogLaw) -> State:
        """Returns the state after a round.

        p [position vocab] and q [view position vocab] are logs of the target's law and of the
        views' laws, before any sampling rule, at the positions that were verified last.
        """
        ...


@dataclass(frozen=True)
class Ensemble:
    """Makes a drafter that drafts from a mixture of one model's laws over several views.

    The recipe's view, ``views.basic.Several``, has these views. ``weighting`` decides how much each
    of them counts.
    """

    name: ClassVar[str] = "ensemble"
    needs: ClassVar[Capabilities] = frozenset({Capability.SEVERAL_VIEWS})
    offers: ClassVar[Capabilities] = frozenset({Capability.READS_VIEW, Capability.MIXTURE})

    weighting: Weighting

    def __call__(self, setup: Setup) -> Drafter:
        return EnsembleDrafter(setup, self.weighting)


@dataclass(frozen=True)
class MixtureScores(Scores):
    """The scores of a mixture. ``parts`` are the scores of the views that it mixes."""

    parts: tuple[Scores, ...] = ()


class MixtureSession:
    """Presents a session over all views as one over their mixture, whose logits are
    log sum_i w_i softmax(logits_i).

    In the wrapped session each view of a request is a request of its own: with 2 views, request 3
    has the rows 6 and 7 there.
    """

    def __init__(self, session: Session, views: int) -> None:
        # The weights of the views, by request. The drafter sets them before each draft.
        self.weights: dict[int, tuple[float, ...]] = {}
        self._session = session
        self._views = views  # how many views each request has
        # By request, the scores of the tree that was scored last. A commit drops them.
        self._last_scores: dict[int, MixtureScores] = {}

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        scored = self._session.score(self._by_row(trees))
        return {
            request: self._mix(request, tuple(scored[row] for row in self._rows(request)))
            for request in trees
        }

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request in tokens:
            self._last_scores.pop(request, None)
        self._session.commit(self._by_row(tokens))

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._session.start_turn(
            self._by_row(turns), [rule for rule in rules for _ in range(self._views)]
        )

    def end(self, request: int) -> None:
        for row in self._rows(request):
            self._session.end(row)

    def _rows(self, request: int) -> range:
        """Returns a request's rows of the batch: one for each view."""
        return range(request * self._views, (request + 1) * self._views)

    def _by_row(self, by_request: Mapping[int, T]) -> dict[int, T]:
        """Returns each request's value for every row of that request."""
        return {row: value for request, value in by_request.items() for row in self._rows(request)}

    def _mix(self, request: int, parts: tuple[Scores, ...]) -> Scores:
        """Returns the scores of the mixture of a request's views."""
        tree = parts[0].tree
        last = self._last_scores.get(request)
        # The weights do not change within a draft, so rows that were mixed for the last tree are
        # used again: row 0, which is the root's, and row i + 1 of each node i that both trees have.
        rows = [] if last is None else list(last.rows[: 1 + count_shared_nodes(last.tree, tree)])
        log_weights = torch.tensor(self.weights[request], dtype=torch.float32).log()
        for row in range(len(rows), len(parts[0].rows)):
            log_laws = torch.stack([part.rows[row] for part in parts]).float().log_softmax(-1)
            rows.append((log_laws + log_weights.to(log_laws.device)[:, None]).logsumexp(0))
        first = parts[0]
        mixed = MixtureScores(
            tree,
            rows,
            first.rules,
            first.context,
            first.answer_length,
            request=request,
            parts=parts,
        )
        self._last_scores[request] = mixed
        return mixed


class EnsembleDrafter(ModelDrafter, Learner):
    """One draft model that reads several views of each prompt.

    What it learns is a pair: the state of the shape and the state of the weighting.
    """

    def __init__(self, setup: Setup, weighting: Weighting) -> None:
        self._views = views_to_read(setup.view)
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
        shape_state, weighting_state = state
        return (
            self._planning.fold(shape_state, round),
            self._fold_weighting(weighting_state, round),
        )

    def finish(self, state: State) -> None:
        self._planning.finish(state[0])

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        self._begin_round(states)
        growing = {}
        for request, (shape_state, weighting_state) in states.items():
            self._mixture.weights[request] = self._weighting.weights(weighting_state)
            growing[request] = self._planning.grow(shape_state)
        return drive(self._mixture.score, growing, last_scores=self._scores)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._mixture.commit(tokens)

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._mixture.start_turn(turns, rules)

    def end(self, request: int) -> None:
        self._mixture.end(request)

    def report(self) -> DraftReport:
        """Returns the report, whose notes are the weights of the views in the last draft."""
        return replace(super().report(), notes=self._mixture.weights)

    def _fold_weighting(self, state: State, round: Round) -> State:
        """Returns the weighting's state after a round."""
        q = round.q
        if not isinstance(q, MixtureScores):
            return state  # The draft model has scored nothing in this round.
        # A position counts if the target has judged the token there and the views have laws for it.
        # The law after node i is in row i + 1. There is none after the nodes that were drafted
        # last, because no forward of the draft model followed.
        nodes = [node for node in (ROOT, *round.verdict.path) if node + 1 < len(q.rows)]
        view_logits = torch.stack(
            [torch.stack([part.raw_logits(node) for node in nodes]) for part in q.parts]
        ).double()
        target_logits = torch.stack([round.p.raw_logits(node) for node in nodes])
        # The draft may know fewer ids than the target.
        target_logits = target_logits[:, : view_logits.shape[-1]].to(view_logits)
        # Ids that no view may propose have the logit -inf in every view. The target's law is
        # computed without them too.
        banned = view_logits.isneginf().all(0)
        p = target_logits.masked_fill(banned, float("-inf")).log_softmax(-1)
        return self._weighting.fold(state, p, view_logits.log_softmax(-1))
