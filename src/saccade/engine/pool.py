"""Requests that come and go over one target: what a server works with.

Each brings its own draft, so that one that fails is nobody else's affair; the target's forward is
one for all of them a round, over segments that read no other request's keys. A newcomer's prompt
is read a chunk a round, so that those under way are not held up by more than that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from saccade.core.options import Stops
from saccade.core.prompt import Prompt
from saccade.core.protocols import State
from saccade.core.result import FinishReason, Result, Round, RoundRecord, Timings
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.drafters import Guarded
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import NO_MEMORY, Sparing, finished, judged, serial
from saccade.engine.generate import Asked, Stream, warnings
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.session import Session

log = logging.getLogger(__name__)

ROOM = 512  # tokens of an answer a cache is made for at first


@dataclass(frozen=True)
class News:
    """What happened to a request: a round, then a result; or an error, and it is gone."""

    number: int
    round: Round | None = None
    result: Result | None = None
    error: Exception | None = None


@runtime_checkable
class Pool(Protocol):
    """Requests under way. One thread uses it; ``step`` does a little for each and tells of it."""

    def join(self, asked: Asked) -> int:
        """Takes a request in; its number. Raises OptionError or ModelError before any work."""
        ...

    def leave(self, number: int) -> None:
        """Forgets a request, and frees what it held."""
        ...

    def step(self) -> list[News]: ...

    def fits(self, asked: Asked) -> bool:
        """Whether there is memory for one more beside those under way."""
        ...

    def __len__(self) -> int: ...


def pool(
    target: Backbone, recipe: Recipe, draft: Backbone | None = None, *, exact: bool = False
) -> Pool:
    """Requests in one forward where the method allows it, else taking turns."""
    if recipe.schedule is serial and not exact:
        return Together(target, recipe, draft)
    return InTurns(target, recipe, draft, exact)


@dataclass
class _Guest:
    """A request under way. Its draft counts it as request 0."""

    asked: Asked
    recipe: Recipe
    draft: Guarded
    stops: Stops
    pieces: Iterator[None]  # of what is left before it decodes
    began: float
    prompt: Prompt | None = None
    decoding: bool = False
    state: State = None
    first: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    records: list[RoundRecord] = field(default_factory=list)


class Together:
    """One forward of the target a round, for all who decode."""

    def __init__(self, target: Backbone, recipe: Recipe, draft: Backbone | None) -> None:
        self._target, self._recipe, self._draft = target, recipe, draft
        self._rules: dict[int, Sampling] = {}
        self._session = Session(target, self._rules, room=ROOM)
        self._guests: dict[int, _Guest] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._guests)

    def fits(self, asked: Asked) -> bool:
        unread = (guest.asked for guest in self._guests.values() if not guest.decoding)
        return _fits(self._target, unread, asked)

    def join(self, asked: Asked) -> int:
        number, target = self._next, self._target
        asked.check(target)
        context = asked.contexts(target.device)
        recipe = self._recipe.fit(target, self._draft, len(context[0]))
        if recipe.drafts:
            asked.words.check(recipe.view)
        rules, stops = asked.rules(context), asked.stops(context)
        bound = recipe.bind(target, self._draft, rules, stops.options.max_new_tokens, asked.words)
        draft = Guarded(bound, target.vocab)
        guest = _Guest(asked, recipe, draft, stops, iter(()), time.perf_counter())
        guest.pieces = self._arriving(number, guest)
        self._rules[number] = rules[0]
        self._guests[number] = guest
        self._next += 1
        return number

    def leave(self, number: int) -> None:
        guest = self._guests.pop(number, None)
        if guest is None:
            return
        self._session.end(number)
        del self._rules[number]
        guest.draft.close()

    def step(self) -> list[News]:
        news = self._read_on()
        live = {number: guest for number, guest in self._guests.items() if guest.decoding}
        if not live:
            return news
        try:
            return news + self._round(live)
        except Exception as error:  # the forward was everybody's
            log.warning("a round failed", exc_info=error)
            return news + [self._failed(number, error) for number in live]

    # -- reading a newcomer --------------------------------------------------------------------

    def _read_on(self) -> list[News]:
        """One piece of the request that has waited longest."""
        waiting = [number for number, guest in self._guests.items() if not guest.decoding]
        if not waiting:
            return []
        number, guest = waiting[0], self._guests[waiting[0]]
        try:
            if next(guest.pieces, guest) is guest:
                guest.decoding = True
        except Exception as error:
            return [self._failed(number, error)]
        return []

    def _arriving(self, number: int, guest: _Guest) -> Generator[None, None, None]:
        target, draft, spent = self._target, guest.draft, guest.spent
        began = time.perf_counter()
        draft.begin(guest.asked.for_draft)
        (prompt,) = target.prompts(guest.asked.inputs)
        guest.prompt = prompt
        spent["vision"] = time.perf_counter() - began
        yield
        draft.look([prompt])
        record = guest.recipe.drafts and guest.recipe.view.attention
        pieces = self._session.reading(number, prompt, record=record)
        spent["prefill"] = 0.0
        while True:
            began = time.perf_counter()
            try:
                next(pieces)
            except StopIteration as stop:
                prefill = stop.value
                break
            finally:
                spent["prefill"] += time.perf_counter() - began
            yield
        began = time.perf_counter()
        spent["draft_prefill"] = draft.guide([prefill])
        spent["guide"] = max(0.0, time.perf_counter() - began - spent["draft_prefill"])
        guest.state = draft.start()

    # -- decoding ------------------------------------------------------------------------------

    def _round(self, live: dict[int, _Guest]) -> list[News]:
        trees, drafting = {}, {}
        for number, guest in live.items():
            began = time.perf_counter()
            trees[number] = guest.draft.propose({0: Tree()}, {0: guest.state})[0]
            drafting[number] = time.perf_counter() - began

        def give_up(trees: Mapping[int, Tree], error: Exception) -> None:
            for number in (number for number, tree in trees.items() if len(tree)):
                live[number].draft.give_up(NO_MEMORY, error)

        began = time.perf_counter()
        laws = Sparing(self._session, give_up).score(trees)
        verdicts, endings = judged(
            trees, laws, lambda number, tokens: live[number].stops.cut(0, tokens)
        )
        emitted = {number: verdict.tokens for number, verdict in verdicts.items()}
        self._session.commit(emitted)
        verifying = time.perf_counter() - began

        news: list[News] = []
        for number, guest in live.items():
            began = time.perf_counter()
            guest.draft.commit({0: emitted[number]})
            drafting[number] += time.perf_counter() - began
            round = finished(
                guest.draft,
                0,
                trees[number],
                laws[number],
                verdicts[number],
                endings[number],
                (drafting[number], verifying),
            )
            guest.state = guest.draft.fold(guest.state, round)
            guest.first = guest.first or time.perf_counter() - guest.began
            guest.records.append(round.scalars())
            news.append(News(number, round=round))
            ending = endings[number]
            if ending is not None:
                news.append(News(number, result=self._result(guest, ending)))
                self.leave(number)
        return news

    def _result(self, guest: _Guest, finish: FinishReason) -> Result:
        answer, spent, prompt = guest.stops.answers[0], guest.spent, guest.prompt
        assert prompt is not None
        total = time.perf_counter() - guest.began
        decode = sum(r.draft_seconds + r.verify_seconds for r in guest.records)
        return Result(
            ids=tuple(answer),
            text=guest.asked.text(answer, guest.stops.stopped_by.get(0)),
            method=guest.recipe.name,
            finish_reason=finish,
            rounds=tuple(guest.records),
            timings=Timings(**spent, decode=decode, first_token=guest.first, total=total),
            prompt_tokens=len(prompt.context),
            visual_tokens=prompt.seen,
            draft_visual_tokens=guest.draft.visible(0),
            fallback_reason=guest.draft.reason,
            warnings=warnings(self._recipe, guest.recipe),
        )

    def _failed(self, number: int, error: Exception) -> News:
        asked, ran_out = self._guests[number].asked, memory.ran_out(error)
        self.leave(number)
        return News(number, error=asked.too_long(self._target) if ran_out else error)


class InTurns:
    """A stream each, a round of each in turn: for what shares no forward (a draft in a process of
    its own, rows of a fixed number)."""

    def __init__(
        self, target: Backbone, recipe: Recipe, draft: Backbone | None, exact: bool
    ) -> None:
        self._target, self._recipe, self._draft, self._exact = target, recipe, draft, exact
        self._streams: dict[int, tuple[Asked, Stream]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._streams)

    def fits(self, asked: Asked) -> bool:
        unread = (other for other, stream in self._streams.values() if stream.talk is None)
        return _fits(self._target, unread, asked)

    def join(self, asked: Asked) -> int:
        asked.check(self._target)
        stream = Stream(self._target, asked, self._recipe, draft=self._draft, exact=self._exact)
        self._streams[self._next] = asked, stream
        self._next += 1
        return self._next - 1

    def leave(self, number: int) -> None:
        _, stream = self._streams.pop(number, (None, None))
        if stream is not None:
            stream.close()

    def step(self) -> list[News]:
        return [news for number in list(self._streams) for news in self._turn(number)]

    def _turn(self, number: int) -> list[News]:
        _, stream = self._streams[number]
        try:
            round = next(stream, None)
        except Exception as error:
            self.leave(number)
            return [News(number, error=error)]
        if round is not None:
            return [News(number, round=round)]
        self._streams.pop(number)
        return [News(number, result=stream.results[0])]


def _fits(target: Backbone, unread: Iterable[Asked], asked: Asked) -> bool:
    """Beside the caches there are, and those that others have yet to fill."""
    if len(set(target.devices)) > 1:
        return True
    tokens = sum(each.tokens() for each in (*unread, asked))
    return memory.has_room(tokens, target.token_bytes, target.device)
