"""One call under way: its requests are read, decoded round by round and reported.

What both models keep of it is in its session and its drafter.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from saccade.core.options import Stops
from saccade.core.prompt import Prompt, Turn
from saccade.core.protocols import Schedule
from saccade.core.result import FinishReason, Result, Round, RoundRecord, Timings
from saccade.core.timing import Clock, Phase, stopped_seconds, untold
from saccade.core.tree import Tree, common
from saccade.drafting.drafters import SelfDrafter
from saccade.drafting.fallback import Fallback
from saccade.drafting.recipe import Recipe, chained, plan
from saccade.drafting.schedule import NO_MEMORY, MemoryGuard, opening, parallel
from saccade.drafting.setup import Setup
from saccade.drafting.views.basic import FULL
from saccade.engine.request import Request
from saccade.model import batch_invariant, trial
from saccade.model.backbone import Backbone
from saccade.model.session import Session
from saccade.model.tensor_parallel import agreeing

T = TypeVar("T")


class Call:
    """The requests of one call, which share a drafter and are counted from 0.

    The ``recipe`` is settled for this machine, and all is checked, before any work. In ``session``
    the requests stand from ``first`` on; without one they get their own. Raises MethodError,
    OptionError, or ModelError where the target has no memory for them.
    """

    def __init__(
        self,
        target: Backbone,
        recipe: Recipe,
        request: Request,
        *,
        draft: Backbone | None = None,
        exact: bool = False,
        session: Session | None = None,
        first: int = 0,
        phase: Phase = untold,
    ) -> None:
        self.target, self.draft = target, draft
        self.wanted, self.exact = recipe, exact
        if exact:
            recipe = chained(recipe)
            batch_invariant.check(target)
        length = int(request.inputs["input_ids"].shape[1])
        request.check(target)  # first: costs would be timed at a length nobody reads
        self.recipe = plan(recipe, target, draft, length, exact, phase)
        self._ask(request)
        room = self.stops.options.max_new_tokens
        view, shape = self.recipe.view, self.recipe.shape
        setup = Setup(target, draft, view, shape, self._draft_rules, room, request.words)
        self.drafter = Fallback(self.recipe.drafter(setup), target.vocab)
        if session is None:
            kind = batch_invariant.BatchInvariantSession if exact else Session
            session = kind(target, self.rules, room=room)
        self.session, self.first = session, first
        self.prompts: Sequence[Prompt] = ()
        self.decoding = False  # everything is read
        self._media = request.media
        self._turns: Mapping[int, Turn] = {}
        self._live: Sequence[int] = ()  # those whose openings did not end them

    def _ask(self, request: Request) -> None:
        """What belongs to one answer alone."""
        if self.recipe.drafts:
            request.words.check(self.recipe.view)
        contexts = [torch.tensor(ids, device=self.target.device) for ids in request.ids]
        self.request = request
        self.rules = request.rules(contexts)
        self._draft_rules = [rule.for_drafts for rule in self.rules]
        self.stops = Stops(request.limits, contexts, request.decode, request.spell)
        self.spent: dict[str, float] = {}
        self.reused = [0] * len(contexts)
        self._records: list[list[RoundRecord]] = [[] for _ in contexts]
        self._finish: dict[int, FinishReason] = {}
        self._clock, self._first_token = Clock(self.target.device), 0.0
        self._stopped = stopped_seconds()

    # -- reading -------------------------------------------------------------------------------

    def reading(
        self, phase: Phase = untold, keep: bool = False
    ) -> Generator[Round | None, None, None]:
        """Both models' vision, prefill and what the draft is to see, a piece at a time: None after
        a piece, and a request's opening as soon as the target has read it. Where that ends them all
        the draft reads nothing, unless a turn may follow (``keep``)."""
        opened: dict[int, Round] = {}
        reading = self._reading_turns if self._turns else self._reading_prompts
        yield from self._within_scope(reading(phase, keep, opened))
        self._live = [request for request, round in opened.items() if round.finish is None]
        stay = opened if keep else self._live
        if stay:
            self.drafter.commit({request: opened[request].tokens for request in stay})
            for request in opened.keys() - stay:
                self.drafter.end(request)
        self.decoding = True

    def _opening(self, request: int, opened: dict[int, Round]) -> Round:
        split = self.target.shares.count > 1  # then it is rank 0's in all, as in every round
        cut = agreeing(self.stops.cut) if split else self.stops.cut
        round = opened[request] = opening(self.session, request, cut, self.first)
        self.note(round)
        return round

    def _reading_prompts(
        self, phase: Phase, keep: bool, opened: dict[int, Round]
    ) -> Generator[Round | None, None, None]:
        target, drafter, request, spent = self.target, self.drafter, self.request, self.spent
        phase("vision")
        clock = Clock(target.device)
        drafter.encode(request.draft_inputs or request.inputs)
        self.prompts = target.prompts(request.inputs)
        spent["vision"] = clock.since()
        trial.check(target)  # after the prompt, of which models say themselves what is special
        yield
        phase("prefill")
        clock = Clock(target.device)
        drafter.prefill(self.prompts)
        spent["prefill"] = clock.lap()
        refresh = self.recipe.view.refresh
        record = self.recipe.drafts and self.recipe.view.attention
        follow = refresh.rows if record and refresh is not None else 0
        prefills = []
        for place, prompt in enumerate(self.prompts):
            number = self.first + place
            for prefill in self.session.reading(
                number, prompt, record=record, follow=follow, place=place
            ):
                spent["prefill"] += clock.lap()
                if prefill is None:
                    yield
                    clock.lap()
                else:
                    prefills.append(prefill)
                    self.reused[place] = self.session.requests[number].reused
                    yield self._opening(place, opened)
                    clock.lap()
        if not keep and all(round.finish for round in opened.values()):
            return
        phase("guide")
        clock.lap()
        spent["draft_prefill"] = drafter.ready(prefills)
        caption, hidden = spent["caption"], spent["caption_hidden"] = drafter.captioning()
        spent["guide"] = max(0.0, clock.lap() - spent["draft_prefill"] - (caption - hidden))

    def goes_on(self, request: Request, recipe: Recipe, exact: bool) -> bool:
        """Takes the conversation's next request, to be read from where the cached one parts from
        it. Of another method, or with other videos, it is not taken, and nothing is changed."""
        if (recipe, exact) != (self.wanted, self.exact) or self.target.rotates_by_length:
            return False
        turns = self._parting(request)
        if turns is None:
            return False
        request.check_length(self.target)
        self._ask(request)
        self._turns, self.decoding = turns, False
        self.reused = [len(ids) - len(turns[i].ids) for i, ids in enumerate(request.ids)]
        return True

    def _parting(self, request: Request) -> dict[int, Turn] | None:
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
            same = common(old, new)
            if {*old[same:], *new[same:]} & self.target.placeholders.keys():
                return None
            found[number] = Turn(len(old) - same, tuple(new[same:]))
        return found

    def _reading_turns(
        self, phase: Phase, keep: bool, opened: dict[int, Round]
    ) -> Generator[Round | None, None, None]:
        """Only what is new; the draft keeps the view it had."""
        phase("prefill")
        clock = Clock(self.target.device)
        self.session.turn(self._turns, self.rules)
        self.session.score({number: Tree() for number in self._turns})
        self.spent["prefill"] = clock.lap()
        for request in self._turns:
            yield self._opening(request, opened)
        phase("guide")
        clock.lap()
        self.drafter.turn(self._turns, self._draft_rules)
        self.spent["draft_prefill"] = clock.lap()

    # -- decoding ------------------------------------------------------------------------------

    def rounds(self) -> Generator[Round, None, None]:
        """Every round after the openings, by the recipe's own schedule, until all have ended."""
        if not self._live:
            return
        schedule: Schedule = self.recipe.schedule
        session = MemoryGuard(
            self.session, lambda trees, error: self.drafter.give_up(NO_MEMORY, error)
        )
        rounds = schedule(session, self.drafter, self._live, self.stops.cut)
        for round in self._within_scope(rounds):
            self.note(round)
            yield round

    def _within_scope(self, steps: Iterator[T]) -> Generator[T, None, None]:
        """These steps, each in the drafter's scope: what it changes of the process it changes for
        the length of a step, and whoever iterates finds it as it was."""
        while True:
            with self.drafter.sharing_threads():
                try:
                    step = next(steps)
                except StopIteration:
                    return
            yield step

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
        captures = stopped_seconds() - self._stopped
        total = self._clock.since() + captures
        beside = dict(zip(("beside_prefill", "beside_draft"), self.drafter.beside(), strict=True))
        spent = {**self.spent, **beside}
        timings = Timings(
            **spent,
            decode=decode,
            captures=captures,
            first_token=self._first_token,
            total=total,
        )
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
                warnings=self._warnings(number),
                peak_bytes=peak,
            )
            for number, answer in enumerate(self.stops.answers)
        ]

    def _warnings(self, number: int) -> tuple[str, ...]:
        """What was not as the method's name has it, or as in ``generate``."""
        own = self.recipe.drafter is SelfDrafter and self.recipe.view != FULL
        warnings = {
            PLAIN: self.wanted.drafts and not self.recipe.drafts,
            NOTHING_TO_PRUNE: self.recipe.drafts and own and not self.prompts[number].seen,
            MOVED: self.prompts[number].moved,
            TARGET_ALONE: self.recipe.drafts and self.rules[number] != self._draft_rules[number],
            TAKES_TURNS: self._shares_a_gpu(),
            SLOW_EXACT: self.exact and self.target.device.type == "cuda",
        }
        return tuple(text for text, holds in warnings.items() if holds)

    def _shares_a_gpu(self) -> bool:
        """Whether a draft in a process of its own works on the target's GPU."""
        draft = self.draft
        if draft is None or self.recipe.schedule is not parallel or not self.recipe.drafts:
            return False
        return draft.device.type == "cuda" and draft.device == self.target.device

    def end(self, request: int) -> None:
        """Frees what is kept of a request that no turn will follow."""
        self.session.end(self.first + request)
        if self.decoding:  # else the draft has yet to read
            self.drafter.end(request)

    def close(self) -> None:
        """Frees the drafter's caches, and its process where there is one."""
        self.drafter.close()


NOTHING_TO_PRUNE = (
    "the prompt has no video and no document (context=) to prune, so the target drafted with all "
    "it reads, which is no faster than plain decoding"
)
MOVED = (
    "text after the video stands where this model was trained to see it; transformers' generate "
    "puts it elsewhere and may answer otherwise (positions library is as there)"
)
TARGET_ALONE = (
    "the draft does not follow your own logits processor: it may remember earlier calls, so it is "
    "called for the target alone, once a token and in order, as generate calls it"
)
TAKES_TURNS = (
    "draft and target share one GPU, where two processes take turns unless MPS runs, so this "
    "parallel method gains nothing there: use a serial one, or a second GPU"
)
SLOW_EXACT = (
    "exact=True computes every token with 16 rows and its attention in float32, block by block, so "
    "an answer on a GPU takes longer than without it"
)
PLAIN = "no draft model was given and the target's own drafts do not pay here: plain"
