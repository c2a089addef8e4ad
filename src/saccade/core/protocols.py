"""What the parts of a method look like to each other: views, shapes, drafters, sessions.

A new part derives from its class here and says what is not the default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from saccade.core.costs import Costs
from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.result import FinishReason, Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree

State = Any
"""What a fold carries from round to round: bounded, and replayable from recorded rounds."""

Growing = Generator[Tree, Scores, Tree]
"""A draft under way: yields the tree it wants scored, is sent the scores, returns the tree."""

Positions = Literal["original", "repacked"]
Early = Literal["wait", "superset", "all"]


@dataclass(frozen=True)
class Refresh:
    """A view that follows the answer: chosen again after every ``every`` rounds by the attention of
    the target's last ``rows`` judged rows. What is held counts ``hold`` more than its mass, so that
    few rows move for little."""

    every: int = 1
    rows: int = 8
    hold: float = 0.25


class View(ABC):
    """What the draft sees: (what the target revealed, its own whole prompt) -> its prompt.

    Derive a frozen dataclass from it; a field named like one of these may be set by an override.
    """

    name: str
    keep: float | None = None  # the share of visual tokens kept; None leaves it to the view
    attention: bool = False  # whether the target's prefill must record attention mass for it
    own_keys: bool = False  # whether it picks among the target's keys: only the target can draft
    positions: Positions = "original"  # "repacked": counted anew from 0
    early: Early = "wait"  # what a draft beside the target reads before attention is known
    page: int | None = None  # where each step reads the keys it asks for: so many at once
    refresh: Refresh | None = None  # how often it chooses anew, by what the target looks at then
    sinks: int | None = None  # where the rest slides along with the answer: rows that stay
    coarse: bool = False  # whether it reads ``Prompt.coarse``, where the draft's family has it
    says: str | None = None  # which of ``Prefill.words`` it writes in the place of a video
    subset: ClassVar[bool] = True  # whether its rows are some of the prompt's own
    timed: ClassVar[bool] = False  # whether how much it keeps depends on what forwards cost

    @abstractmethod
    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt: ...

    @property
    def parts(self) -> tuple[View, ...]:
        """The views an ensemble reads; itself alone."""
        return (self,)

    def settled(self, keep: float) -> View:
        """The view for the share that is affordable, where it is timed."""
        return self

    def start(self, prompt: Prompt) -> Int[Tensor, " held"] | None:
        """The visual tokens a draft may read at once; None where it waits for the target."""
        return None

    def choose(
        self, prefill: Prefill, prompt: Prompt, held: Int[Tensor, " held"] | None = None
    ) -> Int[Tensor, " kept"]:
        """The visual tokens kept of a whole prompt; among ``held``, where a draft started early."""
        raise NotImplementedError


class Shape(ABC):
    """The shape of a draft: how it grows, and what it learns from past rounds. Frozen.

    See ``Tree`` for the one rule of growing: a drawn token stands.
    """

    timed: ClassVar[bool] = False  # whether it decides by what forwards cost
    optional: ClassVar[bool] = False  # whether a method with it does without a draft model too
    # How a family of shapes is written, ``NAME-...``, and what the law tests run of it.
    family: ClassVar[str] = ""
    usage: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    costs: Costs | None = None  # of forwards here, where it is timed; written by ``plan``

    @classmethod
    def read(cls, text: str) -> Shape:
        """The shape that ``FAMILY-text`` stands for. Raises MethodError saying what would work."""
        raise NotImplementedError

    @property
    def written(self) -> str:
        """How an override writes it, where it has no name of its own: ``chain-5``."""
        return type(self).__name__

    @property
    def branches(self) -> bool:
        """Whether a token may get siblings; else every draft is a chain."""
        return True

    @property
    def stepwise(self) -> bool:
        """Whether it is a ``Chain`` grown token by token, as a draft beside the target does."""
        return False

    def beside(self) -> Shape:
        """What it is where the draft works beside the target, once priced if it is timed; one that
        is not ``stepwise`` cannot be there."""
        return self

    @property
    def reads_laws(self) -> bool:
        """Whether how it grows depends on the draft's laws."""
        return True

    def chained(self) -> Shape:
        """The nearest shape whose drafts are chains; itself where there is none."""
        return self

    def priced(self, costs: Costs) -> Shape:
        """The shape, told what forwards cost, where it is timed."""
        return replace(cast(Any, self), costs=costs) if self.timed else self

    @property
    def prices(self) -> Costs:
        """What forwards cost here, once it has been told."""
        assert self.costs is not None, (
            f"{type(self).__name__} needs measured costs: see recipe.plan"
        )
        return self.costs

    def pays(self) -> bool:
        """Whether drafting is expected to pay, before anything is known of the draft."""
        return True

    def start(self) -> State:
        """The state before the first round."""
        return None

    @abstractmethod
    def grow(self, state: State) -> Growing:
        """One draft, from the end of the committed text."""
        ...

    def fold(self, state: State, round: Round) -> State:
        """The state after a round; an answer's last one is not folded."""
        return state


@dataclass(frozen=True)
class Growth:
    """A drafter's drafts under way, which may be scored with others' over the same model."""

    session: Any  # a model's: ``model.session.Session``
    drafts: Mapping[int, Growing]
    seen: dict[int, Scores]  # takes the last scores of each request
    take: Callable[[dict[int, Tree]], dict[int, Tree]] = lambda trees: trees
    """What the drafter makes of the trees once they are grown."""


class Drafter(ABC):
    """Who drafts. One object serves every request of a call; requests are counted from 0.

    What is learnt from past rounds is a fold that the schedule runs: the state is handed to
    ``propose`` and kept nowhere else, so that a recorded trace replays it. Calls come in this
    order: encode, prefill, ready; then propose and commit round after round.
    """

    def start(self) -> State:
        return None

    def fold(self, state: State, round: Round) -> State:
        return state

    def sharing_threads(self) -> AbstractContextManager[None]:
        """The scope in which the caller works for this drafter's requests. A drafter that works
        beside the target on a CPU takes threads from it there, and there only."""
        return nullcontext()

    def encode(self, inputs: Inputs) -> None:
        """The request arrives; may start work at once, before the target has seen the video."""

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """What the target is about to read; may start work beside its prefill."""

    def ready(self, prefills: Sequence[Prefill]) -> float:
        """Brings what the target's prefill revealed; afterwards the drafter can propose.

        Returns the seconds that its own prefill held the target up.
        """
        return 0.0

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        """The conversation goes on, over the caches there are, by this turn's rules."""

    @abstractmethod
    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        """A tree for each request whose state is given."""
        ...

    def growing(self, states: Mapping[int, State]) -> Growth | None:
        """What ``propose`` would grow, for growing it beside others'; None: it does not share."""
        return None

    def extend(self, in_flight: Mapping[int, Tree]) -> dict[int, Tree]:
        """Each tree under judgement with the one token drafted after it, as soon as that is there.

        Asked of drafters that go on drafting while their tokens are judged.
        """
        raise NotImplementedError

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """What was really emitted, per request."""

    def scores(self, request: int) -> Scores | None:
        """The draft's laws at the nodes of the last tree, for the fold."""
        return None

    def noted(self, request: int) -> tuple[float, ...]:
        """Numbers to keep with the round: what the draft decided by."""
        return ()

    def beside(self) -> tuple[float, float]:
        """Seconds of reading prompts and of drafting that ran beside the target so far."""
        return 0.0, 0.0

    def captioning(self) -> tuple[float, float]:
        """Seconds that captions of this call's media took, and those of them nobody waited for."""
        return 0.0, 0.0

    def visible(self, request: int) -> int | None:
        """How many visual tokens the draft reads."""
        return None

    def end(self, request: int) -> None:
        """This request's answer is complete, and no turn will follow."""

    def close(self) -> None:
        """The answers are complete, or nobody wants them any more."""


@runtime_checkable
class Scoring(Protocol):
    """A session as schedules and drafters see it; the cache-free oracle is one too."""

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]: ...

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None: ...


Cut = Callable[[int, Sequence[int]], tuple[int, FinishReason | None]]
"""(request, new tokens) -> how many of them stand, and why the request ends if it does."""

Schedule = Callable[..., Iterator[Round]]
"""(session, drafter, requests, cut) -> the rounds, until every request has ended."""
