"""Who drafts, and what becomes of the answer if it fails.

Drafters with a model hold their own session; how a draft grows is the shape's affair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.hooks import RemovableHandle

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import Drafter, Growing, Growth, Shape, State
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.timing import Clock
from saccade.core.tree import Tree, chain, check
from saccade.drafting.captioning import Telling
from saccade.drafting.growing import drive
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain
from saccade.model.session import Session

SLIDE = 32  # tokens that a window slides at a time: every time moves the draft's keys
MATCH = 3  # tokens of the text's ending that are looked for, at most

T = TypeVar("T")

log = logging.getLogger(__name__)


class NoDraft(Drafter):
    """Plain decoding: every tree is empty."""

    def __init__(self, setup: Setup) -> None: ...

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return dict.fromkeys(states, Tree())


class Lookup(Drafter):
    """What followed the last occurrence of the text's last few tokens.

    Longer matches win over shorter ones, later over earlier; no placeholder is proposed.
    """

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.shape, Chain), "Recipe refuses other shapes"
        self._length = setup.shape.length
        self._banned = set(setup.target.placeholders)
        self._texts: list[list[int]] = []

    def ready(self, prefills: Sequence[Prefill]) -> float:
        self._texts = [prefill.prompt.context.tolist() for prefill in prefills]
        return 0.0

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        found = {}
        for request in states:
            tokens = lookup(self._texts[request], MATCH, self._length)
            stops = (place for place, token in enumerate(tokens) if token in self._banned)
            found[request] = chain(tokens[: next(stops, None)])
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self._texts[request] += new

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        for request, turn in turns.items():
            text = self._texts[request]
            text[len(text) - turn.drop :] = turn.ids


def lookup(text: Sequence[int] | np.ndarray, longest: int, count: int) -> list[int]:
    """Up to ``count`` tokens that followed the last earlier occurrence of the text's ending."""
    ids = np.asarray(text)
    for size in range(min(longest, len(ids) - 1), 0, -1):
        same = (sliding_window_view(ids[:-1], size) == ids[-size:]).all(1).nonzero()[0]
        if len(same):
            after = same[-1] + size
            return ids[after : after + count].tolist()
    return []


class SessionDrafter(Drafter):
    """What drafters over a session share: growing trees in step, and committing."""

    def __init__(self, session: Session, shape: Shape) -> None:
        self.session = session
        self._shape = shape
        self._seen: dict[int, int] = {}
        self._scores: dict[int, Scores] = {}

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self.session.turn(turns, rules)

    def start(self) -> State:
        return self._shape.start()

    def fold(self, state: State, round: Round) -> State:
        return self._shape.fold(state, round)

    def growing(self, states: Mapping[int, State]) -> Growth | None:
        if type(self).propose is not SessionDrafter.propose:
            return None  # it proposes in a way of its own
        return Growth(self.session, self._drafts(states), self._scores)

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return drive(self.session, self._drafts(states), self._scores)

    def _drafts(self, states: Mapping[int, State]) -> dict[int, Growing]:
        return {request: self._shape.grow(state) for request, state in states.items()}

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)

    def scores(self, request: int) -> Scores | None:
        return self._scores.get(request)

    def visible(self, request: int) -> int | None:
        return self._seen.get(request)

    def end(self, request: int) -> None:
        self.session.end(request)


class ModelDrafter(SessionDrafter):
    """A smaller model with its own cache over the tokens its view keeps.

    Where both models turn pixels into the same rows, it adopts the target's: no second vision run.
    Where only their vision towers are equal, or a view averages what they give before it is
    projected, it projects what the target's gave.
    """

    def __init__(self, setup: Setup) -> None:
        draft = setup.drafting()
        common, banned = setup.common()
        session = Session(
            draft,
            setup.rules,
            vocab=common,
            banned=banned,
            room=setup.room,
            views=len(setup.view.parts),
        )
        super().__init__(session, setup.shape)
        self._setup = setup
        self._shares = not setup.coarse and draft.shares_rows_with(setup.target)
        self._reuses_vision = not self._shares and draft.shares_vision_with(setup.target)
        self._inputs: Inputs = {}
        self._seen_there: list[Any] = []  # by the target's vision tower
        self._listening: RemovableHandle | None = None
        self._prompts: list[Prompt] = []
        self._telling: Telling | None = None

    def encode(self, inputs: Inputs) -> None:
        self._inputs = inputs
        if self._reuses_vision:
            self._listening = self._setup.target.record_vision(self._seen_there)
        elif not self._shares:
            self._look(self._setup.readable(inputs))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if self._listening is not None:
            self.close()
            self._look(self._inputs, self._seen_there)
            self._seen_there = []
        if self._shares:
            self._prompts = [self.session.backbone.adopt(prompt) for prompt in prompts]
        self._telling = Telling(self._setup, self._inputs)
        self._inputs = {}

    def _look(self, inputs: Inputs, seen: Sequence[Any] | None = None) -> None:
        coarse = self._setup.coarse
        self._prompts = self.session.backbone.prompts(inputs, seen, coarse=coarse)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.remove()
            self._listening = None

    def ready(self, prefills: Sequence[Prefill]) -> float:
        views, model = self._setup.view.parts, self.session.backbone
        assert self._telling is not None, "prefill comes first"
        words, read = self._telling.told(), []
        for i, prompt in enumerate(self._prompts):
            told = replace(prefills[i], words=words[i])
            pruned = [view(told, prompt) for view in views]  # each is a row of the batch
            self._seen[i] = max(each.seen for each in pruned)
            read += pruned
        clock = Clock(model.device)
        self.session.prefill([model.written(prompt) for prompt in read])
        return clock.since()

    def captioning(self) -> tuple[float, float]:
        return (0.0, 0.0) if self._telling is None else self._telling.spent


class SelfDrafter(SessionDrafter):
    """The target drafting for itself, over copies of the keys its view keeps: no second prefill."""

    def __init__(self, setup: Setup, layers: int | None = None) -> None:
        banned = list(setup.target.placeholders)
        model = setup.target if layers is None else setup.target.first(layers)
        session = Session(model, setup.rules, banned=banned, room=setup.room)
        super().__init__(session, setup.shape)
        self._view = setup.view
        self._windows: dict[int, int] = {}  # rows of those that slide
        self._followed: dict[int, tuple[Prefill, Prompt]] = {}  # what is kept now of which
        self._rounds: dict[int, int] = {}

    def ready(self, prefills: Sequence[Prefill]) -> float:
        pruned = [self._view(prefill, prefill.prompt) for prefill in prefills]
        self._seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        clock = Clock(self.session.backbone.device)
        if self._view.sinks is not None:
            every = enumerate(zip(prefills, pruned, strict=True))
            self._windows = {i: len(own) for i, (all_, own) in every if len(own) < len(all_.prompt)}
        if self._view.refresh is not None:
            self._followed = dict(enumerate(zip(prefills, pruned, strict=True)))
        self.session.fork(prefills, pruned, renewed=bool(self._followed))
        return clock.since()

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        super().commit(tokens)
        for request in self._followed.keys() & tokens.keys() & self._scores.keys():
            self._look_again(request)  # it has drafted by what it held
        for request in self._windows.keys() & tokens.keys():
            self._slide(request)

    def _slide(self, request: int) -> None:
        """The prompt's oldest rows but its sinks make room for what has been written."""
        state, sinks = self.session.requests[request], self._view.sinks or 0
        (here, there), over = state.prompt_rows, state.cache.length - self._windows[request]
        if over >= SLIDE and here > sinks:
            gone = min(over, here - sinks)
            state.cache.forget(sinks, gone)
            state.prompt_rows = here - gone, there

    def _look_again(self, request: int) -> None:
        """Chooses anew where it is time to, by what the target's last judged rows looked at."""
        refresh = self._view.refresh
        assert refresh is not None
        self._rounds[request] = self._rounds.get(request, 0) + 1
        if self._rounds[request] % refresh.every:
            return
        prefill, pruned = self._followed[request]
        assert prefill.again is not None
        newer, held = prefill.again(), pruned.held(prefill.prompt)
        assert newer.mass is not None and newer.relevance is not None
        more = 1 + refresh.hold * held
        newer = replace(newer, mass=newer.mass * more, relevance=newer.relevance * more)
        pruned = self._view(newer, prefill.prompt)
        self._followed[request] = prefill, pruned
        self.session.reselect(request, pruned)

    def end(self, request: int) -> None:
        self._followed.pop(request, None)
        super().end(request)


class EarlyExit(SelfDrafter):
    """The target's first half drafting for the whole, over the target's own keys."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, max(1, setup.target.layers // 2))


class Fallback(Drafter):
    """A drafter whose failure costs speed and nothing else.

    A tree that is malformed or names ids the target does not have counts as a failure.
    """

    def __init__(self, drafter: Drafter, vocab: int) -> None:
        self._drafter = drafter
        self._vocab = vocab
        self.reason: str | None = None

    def start(self) -> State:
        return self._try(lambda: self._drafter.start())

    def fold(self, state: State, round: Round) -> State:
        return state if self.reason else self._try(lambda: self._drafter.fold(state, round))

    def encode(self, inputs: Inputs) -> None:
        self._try(lambda: self._drafter.encode(inputs))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        self._try(lambda: self._drafter.prefill(prompts))

    def ready(self, prefills: Sequence[Prefill]) -> float:
        return self._try(lambda: self._drafter.ready(prefills)) or 0.0

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._try(lambda: self._drafter.turn(turns, rules))

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        plain = dict.fromkeys(states, Tree())
        return self._checked(plain, lambda: self._drafter.propose(states))

    def growing(self, states: Mapping[int, State]) -> Growth | None:
        plain = dict.fromkeys(states, Tree())
        growth = self._try(lambda: self._drafter.growing(states))
        return growth and replace(growth, take=lambda trees: self._checked(plain, lambda: trees))

    def extend(self, in_flight: Mapping[int, Tree]) -> dict[int, Tree]:
        return self._checked(in_flight, lambda: self._drafter.extend(in_flight))

    def _checked(
        self, instead: Mapping[int, Tree], draft: Callable[[], dict[int, Tree]]
    ) -> dict[int, Tree]:
        def act() -> dict[int, Tree]:
            trees = draft()
            for request in instead:
                check(trees[request], self._vocab)
            return trees

        return self._try(act) or dict(instead)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._try(lambda: self._drafter.commit(tokens))

    def scores(self, request: int) -> Scores | None:
        return None if self.reason else self._drafter.scores(request)

    def noted(self, request: int) -> tuple[float, ...]:
        return () if self.reason else self._drafter.noted(request)

    def beside(self) -> tuple[float, float]:
        return self._drafter.beside()

    def captioning(self) -> tuple[float, float]:
        return self._drafter.captioning()

    def visible(self, request: int) -> int | None:
        return self._drafter.visible(request)

    def end(self, request: int) -> None:
        self._try(lambda: self._drafter.end(request))

    def close(self) -> None:
        try:
            self._drafter.close()
        except Exception as error:
            log.warning("the draft did not close", exc_info=error)

    def _try(self, act: Callable[[], T]) -> T | None:
        if self.reason is not None:
            return None
        try:
            return act()
        except Exception as error:  # whatever a draft does wrong, the target can go on without it
            self.give_up(f"drafting failed with {type(error).__name__}: {error}", error)
            return None

    def give_up(self, reason: str, error: Exception) -> None:
        """Proposes nothing from now on; the result says why."""
        log.warning("drafting failed; going on by plain decoding", exc_info=error)
        self.reason = reason
        self.close()
