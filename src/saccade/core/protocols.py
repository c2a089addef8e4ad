"""What the parts of a method look like to each other: views, shapes, drafts, sessions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.result import FinishReason, Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree

State = Any
"""What a fold carries from round to round: bounded, and replayable from recorded rounds."""

Growing = Generator[Tree, Scores, Tree]
"""A draft under way: yields the tree it wants scored, is sent the scores, returns the tree."""


@runtime_checkable
class View(Protocol):
    """What the draft sees: (what the target revealed, its own whole prompt) -> its prompt."""

    @property
    def name(self) -> str: ...

    @property
    def keep(self) -> float | None:
        """The share of visual tokens kept; None leaves it to the view."""
        ...

    @property
    def attention(self) -> bool:
        """Whether the target's prefill must record attention mass for it."""
        ...

    @property
    def own_keys(self) -> bool:
        """Whether it picks among the target's own keys, so that only the target can draft on it."""
        ...

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt: ...


@runtime_checkable
class Shape(Protocol):
    """The shape of a draft: how it grows, and what it learns from past rounds."""

    def start(self) -> State: ...

    def grow(self, stem: Tree, state: State) -> Growing: ...

    def fold(self, state: State, round: Round) -> State: ...


@runtime_checkable
class Draft(Protocol):
    """Who drafts. One object serves every request of a batch; requests are counted from 0.

    What a draft learns from past rounds is a fold it defines and the schedule runs: the state is
    handed to ``propose`` and kept nowhere else, so that a recorded trace replays it.
    """

    def start(self) -> State: ...

    def fold(self, state: State, round: Round) -> State: ...

    def begin(self, inputs: Inputs) -> None:
        """May start work at once, before the target has looked at the video."""
        ...

    def look(self, prompts: Sequence[Prompt]) -> None:
        """What the target is about to read; may start work beside its prefill."""
        ...

    def guide(self, prefills: Sequence[Prefill]) -> float:
        """Brings what the target's prefill revealed; afterwards the draft can propose.

        Returns the seconds that its own prefill held the target up.
        """
        ...

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        """The conversation goes on, over the caches there are, by this turn's rules."""
        ...

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        """A tree for each request asked for, each extending the stem it is given."""
        ...

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """What was really emitted, per request."""
        ...

    def scores(self, request: int) -> Scores | None:
        """The draft's laws at the nodes of the last tree, for the fold."""
        ...

    def noted(self, request: int) -> tuple[float, ...]:
        """Numbers to keep with the round: what the draft decided by."""
        ...

    def visible(self, request: int) -> int | None:
        """How many visual tokens the draft reads."""
        ...

    def end(self, request: int) -> None:
        """This request's answer is complete, and no turn will follow."""
        ...

    def close(self) -> None:
        """The answers are complete, or nobody wants them any more."""
        ...


@runtime_checkable
class Ahead(Draft, Protocol):
    """A draft that works beside the target: it goes on drafting while its tokens are judged."""

    def ahead(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        """Each flight with the one token drafted after it, as soon as that is there."""
        ...


@runtime_checkable
class Scoring(Protocol):
    """A session as schedules and drafts see it; the cache-free oracle is one too."""

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]: ...

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None: ...


Cut = Callable[[int, Sequence[int]], tuple[int, FinishReason | None]]
"""(request, new tokens) -> how many of them stand, and why the request ends if it does."""

Schedule = Callable[..., Iterator[Round]]
