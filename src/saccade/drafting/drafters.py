"""Who drafts. Each drafter holds its own session; how a draft grows is the shape's affair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from saccade.core.errors import ModelError, OptionError
from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import Ahead, Draft, Growing, Scoring, Shape, State, View
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree, add, check
from saccade.drafting.policies import Chain
from saccade.drafting.views import Several, Worded
from saccade.model.backbone import Backbone
from saccade.model.session import Session
from saccade.model.timing import Clock

T = TypeVar("T")
LOOKUP_MATCH = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Words:
    """How text becomes ids, and who puts a video into words; either may be missing."""

    encode: Callable[[str], list[int]] | None = None
    captioner: Callable[[Inputs], Sequence[str]] | None = None  # one caption a request

    def check(self, view: View) -> None:
        """Raises OptionError unless what this view asks for is there."""
        says = {part.says for part in _parts(view) if isinstance(part, Worded)}
        if says and self.encode is None:
            raise OptionError(f"view {view.name} writes words, so it needs tokenizer=")
        if "caption" in says and self.captioner is None:
            raise OptionError(
                f"view {view.name} reads a caption: give captioner= (--captioner), "
                "a function from inputs to one caption a request"
            )

    def say(self, view: View, inputs: Inputs) -> list[dict[str, tuple[int, ...]]]:
        """``Prefill.words`` of each request, as far as the view asks for them."""
        says = {part.says for part in _parts(view) if isinstance(part, Worded)}
        requests = int(inputs["input_ids"].shape[0])
        found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(requests)]
        if "newline" in says and self.encode is not None:
            # one token: some tokenizers put a mark of a text's start before it
            found = [{"newline": tuple(self.encode("\n")[-1:])} for _ in found]
        if "caption" in says and self.encode is not None and self.captioner is not None:
            for told, caption in zip(found, self.captioner(inputs), strict=True):
                told["caption"] = tuple(self.encode(f"image: {caption}"))  # TABED's wording
        return found


@dataclass(frozen=True)
class Team:
    """What a drafter is made from: models, a recipe's view and shape, the requests' rules."""

    target: Backbone
    draft: Backbone | None
    view: View
    shape: Shape
    rules: Sequence[Sampling]
    room: int  # tokens an answer may have
    words: Words = Words()

    def drafting(self) -> Backbone:
        """The draft model. Raises ModelError where there is none."""
        if self.draft is None:
            raise ModelError(
                "this method drafts with a second model: give one with draft= (--draft), "
                "or let the target draft for itself with drafter=self"
            )
        return self.draft

    def common(self) -> tuple[int, list[int]]:
        """How many ids both models know, and those of them that stand for pixels."""
        draft = self.drafting()
        common = min(self.target.vocab, draft.vocab)
        placeholders = {*self.target.placeholders, *draft.placeholders}
        return common, sorted(i for i in placeholders if i < common)

    def readable(self, inputs: Inputs) -> Inputs:
        """What the draft model can read of the inputs: the text alone, if it has no eyes."""
        if self.drafting().placeholders or not self.target.placeholders:
            return inputs
        ids = inputs["input_ids"]
        media = torch.isin(ids, torch.tensor([*self.target.placeholders], device=ids.device))
        mask = inputs.get("attention_mask", torch.ones_like(ids)) * ~media
        return {"input_ids": ids.masked_fill(media, 0), "attention_mask": mask}


Drafter = Callable[[Team], Draft]
"""Who drafts, as one of the classes below."""


def _parts(view: View) -> tuple[View, ...]:
    return view.views if isinstance(view, Several) else (view,)


class _Modelless:
    """What drafters without a model share: nothing to learn, nothing to show."""

    def start(self) -> State:
        return None

    def fold(self, state: State, round: Round) -> State:
        return state

    def begin(self, inputs: Inputs) -> None: ...

    def look(self, prompts: Sequence[Prompt]) -> None: ...

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None: ...

    def scores(self, request: int) -> Scores | None:
        return None

    def noted(self, request: int) -> tuple[float, ...]:
        return ()

    def visible(self, request: int) -> int | None:
        return None

    def end(self, request: int) -> None: ...

    def close(self) -> None: ...


class Nobody(_Modelless):
    """Plain decoding: every tree is empty."""

    def __init__(self, team: Team) -> None: ...

    def guide(self, prefills: Sequence[Prefill]) -> float:
        return 0.0

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        return dict(stems)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None: ...


class _Drafting:
    """What drafters over a session share: growing trees in step, and committing."""

    def __init__(self, session: Session, shape: Shape) -> None:
        self.session = session
        self._shape = shape
        self._seen: dict[int, int] = {}
        self._scores: dict[int, Scores] = {}

    def look(self, prompts: Sequence[Prompt]) -> None: ...

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self.session.turn(turns, rules)

    def start(self) -> State:
        return self._shape.start()

    def fold(self, state: State, round: Round) -> State:
        return self._shape.fold(state, round)

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        growing = {r: self._shape.grow(stem, states[r]) for r, stem in stems.items()}
        return drive(self.session, growing, self._scores)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)

    def scores(self, request: int) -> Scores | None:
        return self._scores.get(request)

    def noted(self, request: int) -> tuple[float, ...]:
        return ()

    def visible(self, request: int) -> int | None:
        return self._seen.get(request)

    def end(self, request: int) -> None:
        self.session.end(request)

    def close(self) -> None: ...


class ModelDraft(_Drafting):
    """A smaller model with its own cache over the tokens its view keeps.

    Where both models turn pixels into the same rows, it adopts the target's: no second vision run.
    Where only their vision towers are equal, it projects what the target's gave.
    """

    def __init__(self, team: Team) -> None:
        draft = team.drafting()
        common, banned = team.common()
        session = Session(draft, team.rules, vocab=common, banned=banned, room=team.room)
        super().__init__(session, team.shape)
        self._team = team
        self._shares = draft.sees_as(team.target)
        self._overhears = not self._shares and draft.looks_as(team.target)
        self._inputs: Inputs = {}
        self._seen_there: list[Any] = []  # by the target's vision tower
        self._listening: RemovableHandle | None = None
        self._prompts: list[Prompt] = []
        self._words: list[dict[str, tuple[int, ...]]] = []

    def begin(self, inputs: Inputs) -> None:
        self._words = self._team.words.say(self._team.view, inputs)
        if self._overhears:
            self._inputs = inputs
            self._listening = self._team.target.overhear(self._seen_there)
        elif not self._shares:
            self._prompts = self.session.backbone.prompts(self._team.readable(inputs))

    def look(self, prompts: Sequence[Prompt]) -> None:
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

    def guide(self, prefills: Sequence[Prefill]) -> float:
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
        pruned = [self._team.view(prefill, prompt) for prefill, prompt in shown]
        self._seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        return pruned


class SelfDraft(_Drafting):
    """The target drafting for itself, over copies of the keys its view keeps: no second prefill."""

    def __init__(self, team: Team, layers: int | None = None) -> None:
        banned = list(team.target.placeholders)
        model = team.target if layers is None else team.target.first(layers)
        session = Session(model, team.rules, banned=banned, room=team.room)
        super().__init__(session, team.shape)
        self._view = team.view

    def begin(self, inputs: Inputs) -> None: ...

    def guide(self, prefills: Sequence[Prefill]) -> float:
        pruned = [self._view(prefill, prefill.prompt) for prefill in prefills]
        self._seen = {i: prompt.seen for i, prompt in enumerate(pruned)}
        clock = Clock(self.session.backbone.device)
        self.session.fork(prefills, pruned)
        return clock.since()


class EarlyExit(SelfDraft):
    """The target's first half drafting for the whole, over the target's own keys."""

    def __init__(self, team: Team) -> None:
        super().__init__(team, max(1, team.target.layers // 2))


class Lookup(_Modelless):
    """Prompt lookup: what followed the last occurrence of the text's last few tokens.

    Needs no model. Longer matches win over shorter ones, later over earlier; no placeholder is
    proposed.
    """

    def __init__(self, team: Team) -> None:
        assert isinstance(team.shape, Chain), "Recipe refuses other shapes"
        self._length = team.shape.length
        self._banned = set(team.target.placeholders)
        self._texts: list[list[int]] = []

    def guide(self, prefills: Sequence[Prefill]) -> float:
        self._texts = [prefill.prompt.context.tolist() for prefill in prefills]
        return 0.0

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        found = {}
        for request, tree in stems.items():
            for token in lookup(self._texts[request], LOOKUP_MATCH, self._length):
                if token in self._banned:
                    break
                tree = add(tree, len(tree) - 1, token)
            found[request] = tree
        return found

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self._texts[request] += new

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        for request, turn in turns.items():
            text = self._texts[request]
            text[len(text) - turn.drop :] = turn.ids


def lookup(text: Sequence[int], longest: int, count: int) -> list[int]:
    """Up to ``count`` tokens that followed the last earlier occurrence of the text's ending."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        ending = text[-size:]
        for at in range(len(text) - size - 1, -1, -1):
            if text[at : at + size] == ending:
                return list(text[at + size : at + size + count])
    return []


class Guarded:
    """A draft whose failure costs speed and nothing else: the answer goes on by plain decoding.

    A tree that is malformed or names ids the target does not have counts as a failure.
    """

    def __init__(self, draft: Draft, vocab: int) -> None:
        self._draft = draft
        self._vocab = vocab
        self.reason: str | None = None

    def start(self) -> State:
        return self._try(lambda: self._draft.start())

    def fold(self, state: State, round: Round) -> State:
        return state if self.reason else self._try(lambda: self._draft.fold(state, round))

    def begin(self, inputs: Inputs) -> None:
        self._try(lambda: self._draft.begin(inputs))

    def look(self, prompts: Sequence[Prompt]) -> None:
        self._try(lambda: self._draft.look(prompts))

    def guide(self, prefills: Sequence[Prefill]) -> float:
        return self._try(lambda: self._draft.guide(prefills)) or 0.0

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._try(lambda: self._draft.turn(turns, rules))

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        return self._checked(stems, lambda: self._draft.propose(stems, states))

    def ahead(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        draft = cast(Ahead, self._draft)  # Recipe sees to it that parallel schedules have one
        return self._checked(flights, lambda: draft.ahead(flights))

    def _checked(
        self, stems: Mapping[int, Tree], draft: Callable[[], dict[int, Tree]]
    ) -> dict[int, Tree]:
        def act() -> dict[int, Tree]:
            trees = draft()
            for request in stems:
                check(trees[request], self._vocab)
            return trees

        trees = self._try(act)
        return dict(stems) if trees is None else trees

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self._try(lambda: self._draft.commit(tokens))

    def scores(self, request: int) -> Scores | None:
        return None if self.reason else self._draft.scores(request)

    def noted(self, request: int) -> tuple[float, ...]:
        return () if self.reason else self._draft.noted(request)

    def visible(self, request: int) -> int | None:
        return self._draft.visible(request)

    def end(self, request: int) -> None:
        self._try(lambda: self._draft.end(request))

    def close(self) -> None:
        try:
            self._draft.close()
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
