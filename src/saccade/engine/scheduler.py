"""Requests that come and go over one target: what a server works with.

Each is a call with a drafter of its own, so that one that fails is nobody else's affair; the
forwards of a round are for all of them. Of newcomers' prompts as many chunks are read a round as it
gives tokens, one long prompt's or several short ones', and a first token is told before the draft
reads: so drafting makes nobody wait for one. Where a round of all takes longer than a prompt, they
take part in turns (``Pace``). What shares no forward (a draft in a process of its own, ``exact``)
takes turns within one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from saccade.core.errors import ModelError
from saccade.core.result import Result, Round
from saccade.core.sampling import Sampling
from saccade.core.timing import now
from saccade.core.tree import Tree
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import NO_MEMORY, Group, MemoryGuard, advance, serial
from saccade.engine.call import Call
from saccade.engine.pace import NEW, Pace
from saccade.engine.request import Request
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.session import Session

log = logging.getLogger(__name__)

ANSWER = 512  # tokens of an answer a cache is made for at first


@dataclass(frozen=True)
class Event:
    """What happened to a request: a round, then a result; or an error, and it is gone."""

    number: int
    round: Round | None = None
    result: Result | None = None
    error: Exception | None = None


@dataclass
class _Entry:
    """A call under way, which has one request."""

    call: Call
    pieces: Iterator[Round | None]  # of what is left to read
    group: Group  # for decoding where the forward is shared
    rounds: Iterator[Round]  # and where it is not
    reading: float = 0.0  # seconds of it so far
    opened: bool = False  # the first token is told


class Scheduler:
    """Requests under way. One thread uses it; ``step`` does a little for each and tells of it."""

    def __init__(
        self,
        target: Backbone,
        recipe: Recipe,
        draft: Backbone | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self._target, self._recipe, self._draft, self._exact = target, recipe, draft, exact
        self._rules: dict[int, Sampling] = {}
        shared = recipe.schedule is serial and not exact
        self._session = Session(target, self._rules, room=ANSWER) if shared else None
        self._entries: dict[int, _Entry] = {}
        self._next = 0
        self._given = 1.0  # tokens that a round gives a request, of late
        self._pace, self._reading = Pace(), 0.0  # what rounds take; the last prompt's seconds

    def __len__(self) -> int:
        return len(self._entries)

    def fits(self, request: Request) -> bool:
        """Whether there is memory for one more beside the caches there are, and those that others
        have yet to fill."""
        unread = (e.call.request for e in self._entries.values() if not e.call.decoding)
        others, kept = sum(each.tokens() for each in unread), self._target.kept
        if not request.fits(self._target, others) and kept is not None:
            kept.clear()  # what may be asked again gives way to what is asked
        return request.fits(self._target, others)

    def join(self, request: Request) -> int:
        """Takes a request in; its number. Raises OptionError or ModelError before any work."""
        self._follow_changes()
        self.fits(request)  # lets go of what is kept where it must
        number, target, draft, exact = self._next, self._target, self._draft, self._exact
        first = 0 if self._session is None else number
        call = Call(
            target,
            self._recipe,
            request,
            draft=draft,
            exact=exact,
            session=self._session,
            first=first,
        )
        self._rules[number] = call.rules[0]
        group = Group.begun(call.drafter, [0], call.stops.cut, number)
        self._entries[number] = _Entry(call, call.reading(), group, call.rounds())
        self._next += 1
        return number

    def _follow_changes(self) -> None:
        """Answers by the models as they are now. Raises ModelError where answers are under way by
        a target that was changed since."""
        target = self._target.current()
        self._draft = None if self._draft is None else self._draft.current()
        if target is self._target:
            return
        if self._entries:
            raise ModelError(
                "the model was changed while answers of it are under way: ask again when they "
                "have ended"
            )
        self._target = target
        if self._session is not None:
            self._session = Session(target, self._rules, room=ANSWER)

    def leave(self, number: int) -> None:
        """Forgets a request, and frees what it held."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        del self._rules[number]
        entry.call.session.end(entry.call.first)
        entry.call.close()

    def step(self) -> Iterator[Event]:
        """Pieces of the prompts that have waited longest, then a round of those who have waited
        longest for one; works as far as it is iterated, so that nobody's first token waits for
        others' round."""
        left = max(1.0, self._given)  # chunks of prompts
        while left > 0 and (number := self._unread()) is not None:
            call = self._entries[number].call
            left -= min(1.0, len(call.request.ids[0]) / call.session.chunk)
            yield from self._read_on(number)
        for number in [n for n, e in self._entries.items() if e.opened and not e.call.decoding]:
            if number in self._entries:  # else it left meanwhile
                yield from self._read_on(number)  # by the draft
        decoding = [number for number, entry in self._entries.items() if entry.call.decoding]
        if decoding:
            told = self._round(decoding[: self._pace.at_once(len(decoding), self._reading)])
            emitted = sum(len(event.round.tokens) for event in told if event.round is not None)
            self._given += NEW * (emitted / len(decoding) - self._given)
            yield from told

    def _round(self, numbers: Sequence[int]) -> list[Event]:
        """A round of these."""
        live = {number: self._entries[number] for number in numbers}
        began = now()
        if self._session is None:
            told = [event for number in live for event in self._turn(number, live[number])]
        else:
            told = self._together(self._session, live)
        self._pace = self._pace.fold(len(live), now() - began)
        for number in numbers:  # others have waited longer now
            if number in self._entries:
                self._entries[number] = self._entries.pop(number)
        return told

    def _unread(self) -> int | None:
        """Whose prompt has waited longest."""
        return next((number for number, e in self._entries.items() if not e.opened), None)

    def _read_on(self, number: int) -> list[Event]:
        """The next piece of a prompt, or its first token."""
        entry = self._entries[number]
        try:
            began = now()
            opening = next(entry.pieces, None)
            entry.reading += now() - began
            if opening is None:
                return []
            self._reading, entry.opened = entry.reading, True
            return self._told(number, opening)
        except Exception as error:
            return [self._failed(number, error)]

    def _together(self, session: Session, live: Mapping[int, _Entry]) -> list[Event]:
        """One forward of the target for all."""

        def give_up(trees: Mapping[int, Tree], error: Exception) -> None:
            for number in (number for number, tree in trees.items() if len(tree)):
                live[number].call.drafter.give_up(NO_MEMORY, error)

        events: list[Event] = []
        try:
            groups = [entry.group for entry in live.values()]
            for group, round in advance(MemoryGuard(session, give_up), groups):
                live[group.first].call.note(round)
                events += self._told(group.first, round)
        except Exception as error:  # the forward was everybody's
            log.warning("a round failed", exc_info=error)
            left = [number for number in live if number in self._entries]
            return events + [self._failed(number, error) for number in left]
        return events

    def _turn(self, number: int, entry: _Entry) -> list[Event]:
        """The next round of one."""
        try:
            return self._told(number, next(entry.rounds))
        except Exception as error:
            return [self._failed(number, error)]

    def _told(self, number: int, round: Round) -> list[Event]:
        events = [Event(number, round=round)]
        if round.finish is not None:
            events.append(Event(number, result=self._entries[number].call.results()[0]))
            self.leave(number)
        return events

    def _failed(self, number: int, error: Exception) -> Event:
        request = self._entries[number].call.request
        self.leave(number)
        ran_out = memory.ran_out(error)
        return Event(number, error=request.too_long(self._target) if ran_out else error)
