"""Answers requests that arrive at any time by one target, for a server: continuous batching.

Each request is a batch of one with a drafter of its own, so that a drafter that fails harms no
other request. A step of the scheduler does this:

1. It reads waiting prompts in chunks of 2,048 tokens. A step reads about as many chunks as a
   request gets tokens in a round on average: three chunks where a round gives each request three
   tokens. So about one chunk is read for each token that a request gets, and rounds that give
   many tokens do not hold up the first tokens of requests that wait. The chunks may come from one
   long prompt or from several short ones. The last chunk of a prompt gives the request's first
   token.
2. It lets the drafts read the prompts whose first token has been emitted, so that no first token
   waits for drafting.
3. It runs a round of the requests that decode, in one forward of the target that they share. Where
   a round of all of them would take longer than reading one prompt took, they take turns: each
   round serves only some of them (``RoundTimes``).

Requests that cannot share a forward (with a draft in a process of its own, or with ``exact``) are
worked on one after another within a round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from saccade.core.capabilities import Capability
from saccade.core.errors import ModelError
from saccade.core.result import Result, Round
from saccade.core.round_estimates import NEW_ROUND_WEIGHT
from saccade.core.sampling import Sampling
from saccade.core.scoped_steps import each_within
from saccade.core.timing import now
from saccade.core.tree import Tree
from saccade.drafting.recipe import Recipe, recorded_hidden_layers
from saccade.drafting.schedule import NO_MEMORY_REASON, Group, MemoryGuard, advance
from saccade.engine.request import Request
from saccade.engine.request_batch import RequestBatch
from saccade.engine.requests_per_round import RoundTimes
from saccade.engine.scopes import planning_scope, step_scope
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.session import Session

log = logging.getLogger(__name__)

INITIAL_ANSWER_TOKENS = 512  # A request's cache has room for this many at first.


@dataclass(frozen=True)
class Event:
    """What happened to a request: a round, its result, or an error that ended it."""

    number: int  # of the request, as ``Scheduler.join`` returned it
    round: Round | None = None
    result: Result | None = None
    error: Exception | None = None


@dataclass
class _Entry:
    """One request under way."""

    batch: RequestBatch  # of this request alone
    # Each ``next`` reads one more piece of the prompt. It returns None after each of the target's
    # pieces but the last, and the request's opening round after the last. Then the draft reads the
    # prompt, and the iterator ends.
    unread_pieces: Iterator[Round | None]
    # Decoding uses only one of these two: the group where requests share the target's forwards, and
    # the rounds where each request has forwards of its own. The group has this request alone, with
    # its drafter and what the drafter has learnt. Each ``next`` of ``rounds`` runs one round.
    group: Group
    rounds: Iterator[Round]
    reading_seconds: float = 0.0  # spent on its prompt so far
    has_first_token: bool = False


class Scheduler:
    """Holds the requests under way. Each ``step`` advances them and yields events.

    Only one thread may use it.
    """

    def __init__(
        self,
        target: Backbone,
        recipe: Recipe,
        draft: Backbone | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self._target, self._recipe, self._draft, self._exact = target, recipe, draft, exact
        self._rules: dict[int, Sampling] = {}  # by request; a shared session reads them
        shared = Capability.SHARED_FORWARDS in recipe.schedule.offers and not exact
        self._session = Session(target, self._rules, room=INITIAL_ANSWER_TOKENS) if shared else None
        # In the order in which they get their turn: those that have waited longest come first.
        self._entries: dict[int, _Entry] = {}
        self._next_number = 0
        self._tokens_per_round = 1.0  # a running mean of the tokens that a request gets
        self._round_times = RoundTimes()
        self._last_reading_seconds = 0.0  # of the prompt that was read last

    def __len__(self) -> int:
        return len(self._entries)

    def fits(self, request: Request) -> bool:
        """Returns whether memory has room for one more request, beside the caches there are and
        those of requests whose prompts are not read yet. If it has not, this drops stored prefixes
        and looks again."""
        unread = [e.batch.request for e in self._entries.values() if not e.batch.has_read_prompts]
        layers = recorded_hidden_layers(self._recipe, self._draft)
        keeps_all_keys = self._recipe.needs_all_keys

        def is_room() -> bool:
            return request.fits(self._target, unread, layers, keeps_all_keys=keeps_all_keys)

        prefix_cache = self._target.prefix_cache
        if not is_room() and prefix_cache is not None:
            # Answering this request matters more than prefixes that a later request may reuse.
            prefix_cache.clear()
        return is_room()

    def join(self, request: Request) -> int:
        """Adds a request and returns its number. Raises OptionError or ModelError before any of its
        prompt is read."""
        self._follow_changes()
        self.fits(request)  # This drops stored prefixes where memory is short.
        number = self._next_number
        # Planning may time forwards, and this scope decides with how many threads.
        with planning_scope(self._target, self._recipe, self._exact, request.is_sampled):
            batch = RequestBatch(
                self._target,
                self._recipe,
                request,
                draft=self._draft,
                exact=self._exact,
                session=self._session,
                # A session of its own has this request alone, as number 0.
                first=0 if self._session is None else number,
            )
        self._rules[number] = batch.rules[0]
        # The drafter knows this request as 0, and a shared session knows it as ``number``.
        group = Group.start(batch.drafter, [0], batch.stops.append_until_stop, number)
        self._entries[number] = _Entry(batch, batch.read(), group, batch.rounds())
        self._next_number += 1
        return number

    def _follow_changes(self) -> None:
        """Replaces the target and the draft if they were changed since the last request. Raises
        ModelError where the target was changed while answers by it are under way."""
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
            self._session = Session(target, self._rules, room=INITIAL_ANSWER_TOKENS)

    def leave(self, number: int) -> None:
        """Removes a request and frees its memory."""
        entry = self._entries.pop(number, None)
        if entry is None:
            return
        del self._rules[number]
        entry.batch.session.end(entry.batch.first)
        entry.batch.close()

    def step(self) -> Iterator[Event]:
        """Reads pieces of the prompts that have waited longest, then runs a round of the requests
        that have waited longest for one.

        It is a generator, so that the caller gets a first token before the round runs.
        """
        # The scope is entered anew for the work on each event, and left before the caller gets it.
        yield from each_within(self._step_scope, self._advance())

    def _step_scope(self) -> AbstractContextManager[None]:
        """Returns a scope that may reduce PyTorch's number of threads, where other programs keep
        cores busy. Tensors that name no device are made on the CPU in it."""
        return step_scope(self._target, self._recipe, self._exact)

    def _advance(self) -> Iterator[Event]:
        # How many chunks of prompts this step may read: as many as a request gets tokens a round.
        chunks_left = max(1.0, self._tokens_per_round)
        while chunks_left > 0 and (number := self._next_unread()) is not None:
            batch = self._entries[number].batch
            # A prompt shorter than a chunk counts as a part of one.
            chunks_left -= min(1.0, len(batch.request.ids[0]) / batch.session.chunk)
            yield from self._read_on(number)
        waiting_for_draft = [
            number
            for number, entry in self._entries.items()
            if entry.has_first_token and not entry.batch.has_read_prompts
        ]
        for number in waiting_for_draft:
            # The request may have left while the caller handled an event that this step yielded.
            if number in self._entries:
                yield from self._read_on(number)
        # The round. The mean of the tokens that a request gets is over all requests that decode. It
        # includes those that get no token because it is not their turn.
        decoding = [
            number for number, entry in self._entries.items() if entry.batch.has_read_prompts
        ]
        if decoding:
            size = self._round_times.requests_per_round(len(decoding), self._last_reading_seconds)
            events = self._step_round(decoding[:size])
            emitted = sum(len(event.round.emitted) for event in events if event.round is not None)
            change = emitted / len(decoding) - self._tokens_per_round
            self._tokens_per_round += NEW_ROUND_WEIGHT * change
            yield from events

    def _step_round(self, numbers: Sequence[int]) -> list[Event]:
        """Runs a round of these requests and moves them behind those that have waited longer."""
        live = {number: self._entries[number] for number in numbers}
        start = now()
        events: list[Event] = []
        if self._session is not None:
            events = self._step_together(self._session, live)
        else:
            for number, entry in live.items():
                events += self._step_alone(number, entry)
        seconds = now() - start
        # Where CUDA graphs are used, the first forward of a size is an ordinary one, and later ones
        # are replays of a graph. So the seconds of the first tell nothing of later rounds.
        if not any(event.round is not None and event.round.first_of_size for event in events):
            self._round_times = self._round_times.fold(len(live), seconds)
        for number in numbers:
            if number in self._entries:  # To remove and add an entry puts it last.
                self._entries[number] = self._entries.pop(number)
        return events

    def _next_unread(self) -> int | None:
        """Returns the request whose prompt has waited longest to be read."""
        return next((number for number, e in self._entries.items() if not e.has_first_token), None)

    def _read_on(self, number: int) -> list[Event]:
        """Reads the next piece of a request's prompt, and returns the events that follow.

        The target's last piece gives the first token. The call after it lets the draft read.
        """
        entry = self._entries[number]
        try:
            start = now()
            opening_round = next(entry.unread_pieces, None)
            entry.reading_seconds += now() - start
            if opening_round is None:
                return []
            entry.has_first_token = True
            self._last_reading_seconds = entry.reading_seconds
            return self._events(number, opening_round)
        except Exception as error:
            return [self._fail(number, error)]

    def _step_together(self, session: Session, live: Mapping[int, _Entry]) -> list[Event]:
        """Runs a round of all these requests in one forward of the target."""

        def give_up(trees: Mapping[int, Tree], error: Exception) -> None:
            """Ends the drafting of the requests for whose drafts there was no memory.

            ``MemoryGuard`` calls this, and then scores the round without drafts.
            """
            for number, tree in trees.items():
                if len(tree):  # A request without a draft in this round took no memory for one.
                    live[number].batch.drafter.give_up(NO_MEMORY_REASON, error)

        events: list[Event] = []
        try:
            groups = [entry.group for entry in live.values()]
            for group, round in advance(MemoryGuard(session, give_up), groups):
                live[group.first_request].batch.record(round)
                events += self._events(group.first_request, round)
        except Exception as error:
            # The forward was shared, so its failure ends every request that took part.
            log.warning("a round failed", exc_info=error)
            remaining = [number for number in live if number in self._entries]
            return events + [self._fail(number, error) for number in remaining]
        return events

    def _step_alone(self, number: int, entry: _Entry) -> list[Event]:
        """Runs the next round of one request that shares no forward."""
        try:
            return self._events(number, next(entry.rounds))
        except Exception as error:
            return [self._fail(number, error)]

    def _events(self, number: int, round: Round) -> list[Event]:
        """Returns the events of a round; a request that it ends is removed."""
        events = [Event(number, round=round)]
        if round.finish is not None:
            events.append(Event(number, result=self._entries[number].batch.results()[0]))
            self.leave(number)
        return events

    def _fail(self, number: int, error: Exception) -> Event:
        """Removes a request that failed and returns its last event."""
        batch = self._entries[number].batch
        self.leave(number)
        if memory.is_out_of_memory(error):
            error = batch.request.too_long_error(self._target, batch.hidden_layers)
        return Event(number, error=error)
