"""One call under way: its requests are read, decoded round by round and reported.

Whether it is alone (a stream), one of many (the scheduler) or the next turn of a conversation is
for others to say; what both models keep of it is in its session and its drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from saccade.core.prompt import Prompt, Turn
from saccade.core.protocols import Schedule
from saccade.core.result import FinishReason, Result, Round, RoundRecord, Timings
from saccade.core.tree import Tree
from saccade.drafting.fallback import Fallback
from saccade.drafting.planning import chained, plan
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import NO_MEMORY, MemoryGuard
from saccade.drafting.setup import Setup
from saccade.engine.request import Request
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import ExactSession, check
from saccade.model.session import Session
from saccade.model.timing import Clock

Phase = Callable[[str], None]


def settle(
    recipe: Recipe,
    target: Backbone,
    draft: Backbone | None,
    request: Request,
    exact: bool,
    used: Recipe | None = None,
) -> tuple[Recipe, Recipe]:
    """The recipe as it is asked for and as it is used on this machine, checked before any work.

    ``used`` is what it has come to already. Raises MethodError, ModelError or OptionError.
    """
    if exact:
        recipe = chained(recipe)
        check(target)
    if used is None:
        used = plan(recipe, target, draft, int(request.inputs["input_ids"].shape[1]), exact)
    if used.drafts:
        request.words.check(used.view)
    return recipe, used


class Call:
    """The requests of one call, which share a drafter and are counted from 0.

    In ``session`` they stand from ``first`` on; without one they get their own. ``recipes`` are as
    of :func:`settle`. Raises ModelError where the target has no memory for them.
    """

    def __init__(
        self,
        target: Backbone,
        recipes: tuple[Recipe, Recipe],
        request: Request,
        *,
        draft: Backbone | None = None,
        exact: bool = False,
        session: Session | None = None,
        first: int = 0,
    ) -> None:
        request.check(target)
        self.target, self.exact = target, exact
        self.wanted, self.recipe = recipes
        self._ask(request)
        room = self.stops.options.max_new_tokens
        view, shape = self.recipe.view, self.recipe.shape
        setup = Setup(target, draft, view, shape, self.rules, room, request.words)
        self.drafter = Fallback(self.recipe.drafter(setup), target.vocab)
        if session is None:
            session = (ExactSession if exact else Session)(target, self.rules, room=room)
        self.session, self.first = session, first
        self.prompts: Sequence[Prompt] = ()
        self.decoding = False  # everything is read
        self._media = request.media

    def _ask(self, request: Request) -> None:
        """What belongs to one answer alone."""
        contexts = request.contexts(self.target.device)
        self.request = request
        self.rules, self.stops = request.rules(contexts), request.stops(contexts)
        self.spent: dict[str, float] = {}
        self.reused = [0] * len(contexts)
        self._records: list[list[RoundRecord]] = [[] for _ in contexts]
        self._finish: dict[int, FinishReason] = {}
        self._clock, self._first_token = Clock(self.target.device), 0.0

    # -- reading -------------------------------------------------------------------------------

    def reading(self, phase: Phase = lambda name: None) -> Generator[None, None, None]:
        """Both models' vision, prefill and what the draft is to see, a piece at a time."""
        target, drafter, request, spent = self.target, self.drafter, self.request, self.spent
        phase("vision")
        clock = Clock(target.device)
        drafter.encode(request.for_draft)
        self.prompts = target.prompts(request.inputs)
        spent["vision"] = clock.since()
        yield
        phase("prefill")
        clock = Clock(target.device)
        drafter.prefill(self.prompts)
        spent["prefill"] = clock.since()
        record = self.recipe.drafts and self.recipe.view.attention
        prefills = []
        for place, prompt in enumerate(self.prompts):
            pieces = self.session.reading(self.first + place, prompt, record=record, place=place)
            while True:
                clock = Clock(target.device)
                try:
                    next(pieces)
                except StopIteration as stop:
                    prefills.append(stop.value)
                    self.reused[place] = self.session.requests[self.first + place].reused
                    break
                finally:
                    spent["prefill"] += clock.since()
                yield
        phase("guide")
        clock = Clock(target.device)
        spent["draft_prefill"] = drafter.ready(prefills)
        spent["guide"] = max(0.0, clock.since() - spent["draft_prefill"])
        self.decoding = True

    def turns(self, request: Request) -> dict[int, Turn] | None:
        """How a request goes on from what is cached; None if it shows something else."""
        media = request.media
        # an answer right after a video stands elsewhere than the same words in a longer prompt
        if any(bool((prompt.visual | prompt.fixed)[-1]) for prompt in self.prompts):
            return None
        if media.keys() != self._media.keys() or len(request.ids) != len(self.prompts):
            return None
        if not all(value.equal(self._media[name]) for name, value in media.items()):
            return None
        found: dict[int, Turn] = {}
        for number, new in enumerate(request.ids):
            old = self.session.requests[number].context
            same = 0
            while same < min(len(old), len(new)) and old[same] == new[same]:
                same += 1
            if {*old[same:], *new[same:]} & self.target.placeholders.keys():
                return None
            found[number] = Turn(len(old) - same, tuple(new[same:]))
        return found

    def go_on(self, request: Request, turns: Mapping[int, Turn], phase: Phase) -> None:
        """Reads only what is new since the last answer; the draft keeps the view it had."""
        self._ask(request)
        phase("prefill")
        clock = Clock(self.target.device)
        self.session.turn(turns, self.rules)
        self.session.score({number: Tree() for number in turns})
        self.spent["prefill"] = clock.lap()
        phase("guide")
        self.drafter.turn(turns, self.rules)
        self.spent["draft_prefill"] = clock.lap()
        self.reused = [len(ids) - len(turns[i].ids) for i, ids in enumerate(request.ids)]

    # -- decoding ------------------------------------------------------------------------------

    def rounds(self) -> Generator[Round, None, None]:
        """Every round, by the recipe's own schedule, until all requests have ended."""
        schedule: Schedule = self.recipe.schedule
        session = MemoryGuard(
            self.session, lambda trees, error: self.drafter.give_up(NO_MEMORY, error)
        )
        for round in schedule(session, self.drafter, range(len(self.prompts)), self.stops.cut):
            self.note(round)
            yield round

    def note(self, round: Round) -> None:
        """Keeps what the results will say of a round."""
        self._first_token = self._first_token or self._clock.since()
        self._records[round.request].append(round.scalars())
        if round.finish is not None:
            self._finish[round.request] = round.finish

    def results(self, decode: float | None = None, peak: int | None = None) -> list[Result]:
        """One per request, once all have ended. ``decode`` in seconds; else the rounds' own sum."""
        if decode is None:
            decode = sum(r.draft_seconds + r.verify_seconds for own in self._records for r in own)
        total = self._clock.since()
        timings = Timings(**self.spent, decode=decode, first_token=self._first_token, total=total)
        plain = self.wanted.drafts and not self.recipe.drafts
        prompts = self.request.ids
        return [
            Result(
                ids=tuple(answer),
                text=self.request.text(answer, self.stops.stopped_by.get(number)),
                method=self.recipe.name,
                finish_reason=self._finish[number],
                rounds=tuple(self._records[number]),
                timings=timings,
                prompt_tokens=len(prompts[number]),
                visual_tokens=self.prompts[number].seen,
                draft_visual_tokens=self.drafter.visible(number),
                fallback_reason=self.drafter.reason,
                reused_tokens=self.reused[number],
                warnings=(PLAIN,) if plain else (),
                peak_bytes=peak,
            )
            for number, answer in enumerate(self.stops.answers)
        ]

    def end(self, request: int) -> None:
        """Frees what is kept of a request that no turn will follow."""
        self.session.end(self.first + request)
        self.drafter.end(request)

    def close(self) -> None:
        """Frees the drafter's caches, and its process where there is one."""
        self.drafter.close()


PLAIN = "no draft model was given and the target's own drafts do not pay here: plain"
