"""Who drafts. Each drafter holds its own session; how a draft grows is the shape's affair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.hooks import RemovableHandle

from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import Drafter, Growing, Scoring, Shape, State
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree
from saccade.drafting.setup import Setup
from saccade.model.session import Session
from saccade.model.timing import Clock


class NoDraft(Drafter):
    """Plain decoding: every tree is empty."""

    def __init__(self, setup: Setup) -> None: ...

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return dict.fromkeys(states, Tree())


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

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        growing = {request: self._shape.grow(state) for request, state in states.items()}
        return drive(self.session, growing, self._scores)

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
    Where only their vision towers are equal, it projects what the target's gave.
    """

    def __init__(self, setup: Setup) -> None:
        draft = setup.drafting()
        common, banned = setup.common()
        session = Session(draft, setup.rules, vocab=common, banned=banned, room=setup.room)
        super().__init__(session, setup.shape)
        self._setup = setup
        self._shares = draft.shares_rows_with(setup.target)
        self._reuses_vision = not self._shares and draft.shares_vision_with(setup.target)
        self._inputs: Inputs = {}
        self._seen_there: list[Any] = []  # by the target's vision tower
        self._listening: RemovableHandle | None = None
        self._prompts: list[Prompt] = []
        self._words: list[dict[str, tuple[int, ...]]] = []

    def encode(self, inputs: Inputs) -> None:
        self._words = self._setup.words.say(self._setup.view, inputs)
        if self._reuses_vision:
            self._inputs = inputs
            self._listening = self._setup.target.record_vision(self._seen_there)
        elif not self._shares:
            self._prompts = self.session.backbone.prompts(self._setup.readable(inputs))

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        if self._listening is not None:
            self.close()
            self._prompts = self.session.backbone.prompts(self._inputs, self._seen_there)
            self._inputs, self._seen_there = {}, []
        if self._shares:
            self._prompts = [self.session.backbone.adopt(prompt) for prompt in prompts]

    def close(self) -> None:
        if self._listening is not None:
            self._listening.remove()
            self._listening = None

    def ready(self, prefills: Sequence[Prefill]) -> float:
        told = [
            replace(prefill, words=words)
            for prefill, words in zip(prefills, self._words, strict=True)
        ]
        read = self._read(list(zip(told, self._prompts, strict=True)))
        model = self.session.backbone
        clock = Clock(model.device)
        self.session.prefill([model.written(prompt) for prompt in read])
        return clock.since()

    def _read(self, shown: Sequence[tuple[Prefill, Prompt]]) -> list[Prompt]:
        pruned = [self._setup.view(prefill, prompt) for prefill, prompt in shown]
        self._seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        return pruned


class SelfDrafter(SessionDrafter):
    """The target drafting for itself, over copies of the keys its view keeps: no second prefill."""

    def __init__(self, setup: Setup, layers: int | None = None) -> None:
        banned = list(setup.target.placeholders)
        model = setup.target if layers is None else setup.target.first(layers)
        session = Session(model, setup.rules, banned=banned, room=setup.room)
        super().__init__(session, setup.shape)
        self._view = setup.view
        self._followed: dict[int, tuple[Prefill, Prompt]] = {}  # what is kept now of which
        self._rounds: dict[int, int] = {}

    def ready(self, prefills: Sequence[Prefill]) -> float:
        pruned = [self._view(prefill, prefill.prompt) for prefill in prefills]
        self._seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        clock = Clock(self.session.backbone.device)
        if self._view.refresh is not None:
            self._followed = dict(enumerate(zip(prefills, pruned, strict=True)))
        self.session.fork(prefills, pruned, renewed=bool(self._followed))
        return clock.since()

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        super().commit(tokens)
        for request in self._followed.keys() & tokens.keys():
            self._look_again(request)

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


def drive(
    session: Scoring, growing: Mapping[int, Growing], seen: dict[int, Scores]
) -> dict[int, Tree]:
    """Runs growing drafts in step, scoring what they all want in one forward a step.

    ``seen`` takes the last scores of each request.
    """
    finished: dict[int, Tree] = {}
    wanted: dict[int, Tree] = {}

    def advance(request: int, scores: Scores | None) -> None:
        try:
            grower = growing[request]
            wanted[request] = next(grower) if scores is None else grower.send(scores)
        except StopIteration as stop:
            wanted.pop(request, None)
            finished[request] = stop.value

    for request in growing:
        advance(request, None)
    while wanted:
        scored = session.score(wanted)
        seen.update(scored)
        for request, scores in scored.items():
            advance(request, scores)
    return finished
