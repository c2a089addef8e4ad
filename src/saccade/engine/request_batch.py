"""Answers a batch of requests: reads their prompts, decodes round by round, and makes the results.

A call of ``generate`` has one batch, and a conversation keeps its batch from turn to turn. In a
server the scheduler makes a batch for each request. The target's KV caches are in the batch's
session, and the draft's are in its drafter.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from saccade.core.capabilities import Capability
from saccade.core.prompt import Prompt, SharedPrefix, Turn
from saccade.core.protocols import Cut, DraftSeconds, EarlierTurns, Schedule
from saccade.core.result import FinishReason, Result, Round, RoundRecord, Timings
from saccade.core.scoped_steps import each_within
from saccade.core.stopping import Stops
from saccade.core.timing import Clock, Phase, ignore_phase, stopped_seconds
from saccade.core.tree import Tree, common_length
from saccade.drafting.fallback import Fallback
from saccade.drafting.recipe import (
    AnswerOutlook,
    Recipe,
    as_chains,
    plan,
    recorded_hidden_layers,
)
from saccade.drafting.schedule import NO_MEMORY_REASON, MemoryGuard, opening_round
from saccade.drafting.setup import Setup
from saccade.engine.request import Request
from saccade.model import batch_invariant, generate_check
from saccade.model.backbone import Backbone
from saccade.model.session import Session
from saccade.model.tensor_parallel import agree_on_cut
from saccade.model.vision_cache import ConversationVision

T = TypeVar("T")


class RequestBatch:
    """Some requests that are answered together and share a drafter.

    ``request`` is one object with the inputs of all of them. Here each is known by its place in the
    batch, from 0 on. Before any work the ``recipe`` is planned for this machine, and everything is
    checked.

    With ``exact`` drafted answers equal those of plain decoding bit for bit, in low precision too.
    ``session`` is a session of the target that other batches use as well: these requests have the
    numbers from ``first`` on in it. Without it the batch makes its own. ``phase`` is called with
    "costs" if the planning times forwards. ``vision`` has outputs of vision towers for media of
    earlier turns.

    Raises MethodError or OptionError, and ModelError where the target has no memory for the
    requests.
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
        phase: Phase = ignore_phase,
        vision: ConversationVision | None = None,
    ) -> None:
        self.target, self.draft = target, draft
        self.vision = vision
        self.requested_recipe, self.exact = recipe, exact
        if exact:
            recipe = as_chains(recipe)
            batch_invariant.require_batch_invariance(target)
        length = int(request.inputs["input_ids"].shape[1])
        # This comes before ``plan``, which may time forwards of this length.
        request.check_memory(
            target,
            recorded_hidden_layers(recipe, draft),
            keeps_all_keys=recipe.needs_all_keys,
        )
        answer = AnswerOutlook(request.limits.max_new_tokens, request.is_sampled)
        self.recipe = plan(recipe, target, draft, length, exact, phase, answer)
        self._set_request(request)
        room = self.stops.conditions.max_new_tokens
        self.drafter = self._make_drafter()
        # A drafter counts the seconds of all turns. These are the ones before this turn.
        self._draft_seconds_before = DraftSeconds()
        if session is None:
            kind = batch_invariant.BatchInvariantSession if exact else Session
            session = kind(target, self.rules, room=room)
        self.session, self.first = session, first
        self.prompts: list[Prompt] = []
        self.has_read_prompts = False  # True once target and draft have read everything
        self._media = request.media  # of the prompts that were encoded last
        # How each request continues its cached text. Empty where whole prompts are read.
        self._turns: Mapping[int, Turn] = {}
        self._adds_media = False  # whether this turn has media that the turns before did not have
        # For each prompt, how many of its leading rows the drafter has read. It is sys.maxsize once
        # the drafter has read the whole prompt. A later turn with new media lowers it to the number
        # of leading rows that its prompt has in common with the one before. None before the drafter
        # has read any prompt.
        self._rows_known_to_draft: list[int] | None = None
        self._restarted_draft = False  # whether a new drafter read this turn from the beginning
        self._unfinished: Sequence[int] = ()  # requests that go on after their first token

    def _make_drafter(self) -> Fallback:
        """Returns a new drafter, in a wrapper that goes on by plain decoding if it fails."""
        setup = Setup(
            self.target,
            self.draft,
            self.recipe.view,
            self.recipe.shape,
            self._draft_rules,
            self.stops.conditions.max_new_tokens,
            self.request.text_maker,
            self.vision,
        )
        return Fallback(self.recipe.drafter(setup), self.target.vocab)

    @property
    def hidden_layers(self) -> Sequence[int]:
        """The layers whose hidden states the target records, for a draft that is a head of the
        target."""
        return recorded_hidden_layers(self.recipe, self.draft)

    def _set_request(self, request: Request) -> None:
        """Sets up the state of one answer to each request of the batch."""
        if self.recipe.drafts:
            request.text_maker.check(self.recipe.view)
        contexts = [torch.tensor(ids, device=self.target.device) for ids in request.ids]
        self.request = request
        self.rules = request.rules(contexts)
        self._draft_rules = [rule.for_drafts for rule in self.rules]
        self.stops = Stops(request.limits, contexts, request.decode, request.decode_with_special)
        # The seconds of this turn, by the field of ``Timings``.
        self.phase_seconds: dict[str, float] = {}
        # How many tokens of each prompt a cache already had.
        self.reused_tokens = [0] * len(contexts)
        self._records: list[list[RoundRecord]] = [[] for _ in contexts]
        self._finish_reasons: dict[int, FinishReason] = {}
        self._clock = Clock(self.target.device)
        self._first_token = 0.0
        self._stopped_before = stopped_seconds()

    # -- reading -------------------------------------------------------------------------------

    def read(
        self, phase: Phase = ignore_phase, keep: bool = False
    ) -> Generator[Round | None, None, None]:
        """Reads the prompts piece by piece: vision, the target's prefill, then the draft's view.

        Yields None after a piece. As soon as the target has read a request's prompt, it yields the
        request's opening round, which emits the first token. If every request ends with its first
        token, the draft reads nothing, unless the caches are kept for a later turn (``keep``).
        """
        opened: dict[int, Round] = {}
        read = self._read_turns if self._turns else self._read_prompts
        yield from self._within_scope(read(phase, keep, opened))
        self._unfinished = [place for place, round in opened.items() if round.finish is None]
        needed = opened if keep else self._unfinished
        if needed:
            self.drafter.commit({place: opened[place].emitted for place in needed})
            for place in opened.keys() - needed:
                self.drafter.end(place)
        self.has_read_prompts = True

    def _open(self, place: int, opened: dict[int, Round]) -> Round:
        """Emits a request's first token. Returns the opening round, and stores it in ``opened``."""
        cut: Cut = self.stops.append_until_stop
        if self.target.shares.count > 1:
            # All processes of a split target end answers where rank 0 does.
            cut = agree_on_cut(cut)
        opened[place] = opening_round(self.session, place, cut, self.first)
        self.record(opened[place])
        return opened[place]

    def _read_prompts(
        self, phase: Phase, keep: bool, opened: dict[int, Round]
    ) -> Generator[Round | None, None, None]:
        """Reads whole prompts, apart from beginnings that are in caches already: those of earlier
        turns, of ``read_ahead``, or of another request's prompt."""
        target, request, spent = self.target, self.request, self.phase_seconds
        # If this turn adds media to prompts that the drafter has read, either the drafter reads
        # only what is new, or a new drafter reads everything.
        draft_has_earlier_turns = self._adds_media and self._rows_known_to_draft is not None
        # A drafter that has failed drafts nothing, so for it new media are no obstacle.
        can_continue = self.recipe.can_add_media or self.drafter.reason is not None
        draft_continues = draft_has_earlier_turns and can_continue
        self._restarted_draft = draft_has_earlier_turns and not draft_continues
        if self._restarted_draft:
            self.drafter.close()
            self.drafter = self._make_drafter()
            self._draft_seconds_before = DraftSeconds()
        drafter = self.drafter
        phase("vision")
        clock = Clock(target.device)
        # The drafter gets the inputs before the target encodes them. A draft in a process of its
        # own may begin to read them now. A draft in this process that has the same vision tower as
        # the target may record what that tower returns, instead of running it again.
        drafter.parallel_work.encode(request.draft_inputs or request.inputs)
        shared_rows = self._encode_prompts()
        spent["vision"] = clock.elapsed()
        # Before a target's first answer this compares its logits over a few tokens with those of
        # its own ``generate``. It raises ModelError if they differ in every way to run the target.
        # The prompts are encoded before that, because a model that cannot read them raises a
        # clearer error while they are encoded.
        generate_check.check_against_generate(target)
        yield
        phase("prefill")
        clock = Clock(target.device)
        # The drafter gets the encoded prompts before the target prefills them. It may begin to read
        # them, or to write captions, beside the target.
        drafter.parallel_work.prefill(self.prompts)
        spent["prefill"] = clock.lap()
        # A view may choose keys again during the answer, by the attention of the last
        # ``refresh.rows`` rows that were committed. For this the session keeps the queries of so
        # many rows.
        refresh = self.recipe.view.key_updates.refresh
        record = self.recipe.records_attention
        follow_rows = refresh.rows if record and refresh is not None else 0
        keeps_all_keys = self.recipe.needs_all_keys
        prefills = []
        for place, prompt in enumerate(self.prompts):
            # ``number`` is the request's number in the session, which other batches may use too.
            # The random numbers of sampling depend on the seed and on ``place`` instead, so that an
            # answer is the same whatever other batches there are.
            number = self.first + place
            # This gives None after each chunk but the last, and then the prompt's ``Prefill``. The
            # time that the caller takes after a ``yield`` is left out of the prefill's seconds by
            # the ``clock.lap()`` that follows.
            for prefill in self.session.prefill_in_chunks(
                number,
                prompt,
                record=record,
                follow_rows=follow_rows,
                noise_number=place,
                keeps_all_keys=keeps_all_keys,
                shared_rows=shared_rows[place],
                hidden_layers=self.hidden_layers,
            ):
                spent["prefill"] += clock.lap()
                if prefill is None:
                    yield
                    clock.lap()
                else:
                    prefills.append(prefill)
                    self.reused_tokens[place] = self.session.requests[number].reused_rows
                    yield self._open(place, opened)
                    clock.lap()
        if not keep and all(round.finish for round in opened.values()):
            return
        phase("guide")  # The view chooses what the draft sees, and the draft reads that.
        clock.lap()
        earlier_turns = None
        if draft_continues and self._rows_known_to_draft is not None:
            pairs = zip(self.prompts, self._rows_known_to_draft, strict=True)
            prefixes = [SharedPrefix.of(prompt, rows) for prompt, rows in pairs]
            earlier_turns = EarlierTurns(prefixes, self._draft_rules)
        # ``read_prompts`` returns the seconds that the target waited for the draft's prefill.
        draft_prefill_wait = drafter.read_prompts(prefills, earlier_turns)
        spent["draft_prefill"] = draft_prefill_wait
        self._rows_known_to_draft = [sys.maxsize] * len(self.prompts)
        seconds = self._draft_seconds()
        spent["caption"], spent["caption_hidden"] = seconds.caption, seconds.caption_hidden
        # "guide" is the rest of this phase, without the waits for the draft's prefill and for
        # captions. Captions made beside the target's prefill took no time of this phase.
        caption_wait = seconds.caption - seconds.caption_hidden
        spent["guide"] = max(0.0, clock.lap() - draft_prefill_wait - caption_wait)

    def _encode_prompts(self) -> list[int]:
        """Encodes the request's prompts and returns how many leading rows of each are those of the
        turns before."""
        earlier = self.prompts
        self.prompts = self.target.prompts(self.request.inputs, vision=self.vision)
        self._media = self.request.media
        if not self._adds_media:
            return [0] * len(self.prompts)
        self.session.rules = self.rules
        # Only a batch with a session of its own continues a conversation, so ``first`` is 0, and a
        # request's place is its number in the session.
        shared = [
            self.session.shared_rows(place, earlier[place], prompt)
            for place, prompt in enumerate(self.prompts)
        ]
        if self._rows_known_to_draft is not None:
            self._rows_known_to_draft = [*map(min, self._rows_known_to_draft, shared)]
        return shared

    def read_ahead(self, phase: Phase = ignore_phase) -> None:
        """Reads the prompts up to the end of their last medium, before the question is known.

        Every prompt must have media. The draft reads nothing yet, because its view may choose by
        what the question attends to.
        """
        if self._turns:  # The media are read already.
            return
        phase("vision")
        with self.drafter.parallel_work.sharing_threads():
            shared_rows = self._encode_prompts()
            generate_check.check_against_generate(self.target)
            phase("prefill")
            for place, prompt in enumerate(self.prompts):
                # A view may drop the ``visual`` rows of media, and must keep the ``fixed`` ones.
                media_rows = (prompt.visual | prompt.fixed).nonzero()
                self.prompts[place] = head = prompt.keep_first(int(media_rows[-1]) + 1)
                number = self.first + place
                for _ in self.session.prefill_in_chunks(
                    number,
                    head,
                    noise_number=place,
                    shared_rows=shared_rows[place],
                    hidden_layers=self.hidden_layers,
                    keeps_all_keys=self.recipe.needs_all_keys,
                ):
                    pass

    def try_continue(self, request: Request, recipe: Recipe, exact: bool) -> bool:
        """Sets the batch up for the conversation's next request, and reuses its caches, if that is
        possible.

        Returns False and changes nothing if the cached keys cannot be continued, for example
        because the method, the first media or the text before them differ. A turn may have new
        media after those of earlier turns.
        """
        if (recipe, exact) != (self.requested_recipe, self.exact):
            return False
        if self.target.rotates_by_length:
            return False  # Cached keys fit only a prompt of the length that they were made for.
        if any(prompt.changes_with_more_text for prompt in self.prompts):
            return False  # Earlier rows attend to the new text too, so their keys would change.
        if self.recipe.needs_costs and request.is_sampled != self.request.is_sampled:
            # Greedy answers use costs that are corrected by the measured seconds of rounds. Sampled
            # answers must not, because a seed must always give the same answer. So the recipe is
            # planned anew where one turn is greedy and the next one sampled, or the reverse.
            return False
        turns = self._turns_after_cached(request)
        adds_media = turns is None and self._continues_first_media(request)
        if turns is None and not adds_media:
            return False
        request.check_length(self.target)
        self._adds_media = adds_media
        self._draft_seconds_before = self.drafter.report().seconds
        self._set_request(request)
        self._turns = turns or {}
        self.has_read_prompts = False
        if turns is not None:
            self._restarted_draft = False
            # All tokens of a prompt are in the cache but the new ones of its turn.
            self.reused_tokens = [len(ids) - len(turns[i].ids) for i, ids in enumerate(request.ids)]
        return True

    def _continues_first_media(self, request: Request) -> bool:
        """Returns whether each request begins as the one before it in the conversation did: with
        the same tokens up to the end of its first medium, and the same first media.

        A batch that continues a conversation has a session of its own, so a request's place in the
        batch is its number in the session.
        """
        if len(request.ids) != len(self.prompts) or not request.starts_with_media(self._media):
            return False
        for number, (prompt, new) in enumerate(zip(self.prompts, request.ids, strict=True)):
            # ``grid`` has the number of the medium of each visual row; the first medium is 0.
            visual_rows = prompt.visual.nonzero().squeeze(-1)
            first_medium_rows = visual_rows[prompt.grid[:, 0] == 0]
            # Without a medium only the first token has to be the same.
            end = int(first_medium_rows[-1]) + 1 if len(first_medium_rows) else 1
            if common_length(self.session.requests[number].context, new) < end:
                return False
        return True

    def _turns_after_cached(self, request: Request) -> dict[int, Turn] | None:
        """Returns how each request continues the cached text; None where it cannot, for example
        because it has other media."""
        media = request.media
        # After a prompt that ends in a video, the answer goes on from the largest position of the
        # last row, its time included. Inside a longer prompt transformers goes on from the video's
        # height and width alone. As the answer may have other positions there, its keys are not
        # reused.
        if any(bool((prompt.visual | prompt.fixed)[-1]) for prompt in self.prompts):
            return None
        if media.keys() != self._media.keys() or len(request.ids) != len(self.prompts):
            return None
        if not all(value.equal(self._media[name]) for name, value in media.items()):
            return None
        turns: dict[int, Turn] = {}
        for number, new in enumerate(request.ids):
            old = self.session.requests[number].context
            same = common_length(old, new)
            # A turn removes and adds text only, so no medium may be in the parts that differ.
            if {*old[same:], *new[same:]} & self.target.placeholders.keys():
                return None
            if self._documents_changed(number, request, same):
                return None
            turns[number] = Turn(drop=len(old) - same, ids=tuple(new[same:]))
        return turns

    def _documents_changed(self, number: int, request: Request, same: int) -> bool:
        """Returns whether documents are marked differently in the first ``same`` tokens, or a new
        document follows them. In both cases the view must be applied again."""
        marks = request.document_marks(number)
        before = self.request.document_marks(number)
        shared = min(same, len(before))
        return marks[:shared] != before[:shared] or any(marks[shared:])

    def _read_turns(
        self, phase: Phase, keep: bool, opened: dict[int, Round]
    ) -> Generator[Round | None, None, None]:
        """Reads the new tokens of a conversation; the draft's view stays as it is."""
        phase("prefill")
        clock = Clock(self.target.device)
        # Only a batch with a session of its own continues a conversation, so ``first`` is 0, and a
        # request's place is its number in the session.
        self.session.start_turn(self._turns, self.rules)
        # Empty trees: the forward reads the new tokens alone, and gives the first token's scores.
        self.session.score({place: Tree() for place in self._turns})
        self.phase_seconds["prefill"] = clock.lap()
        for place in self._turns:
            yield self._open(place, opened)
        phase("guide")
        clock.lap()
        self.drafter.start_turn(self._turns, self._draft_rules)
        self.phase_seconds["draft_prefill"] = clock.lap()

    # -- decoding ------------------------------------------------------------------------------

    def rounds(self) -> Generator[Round, None, None]:
        """Yields every round after the openings, by the recipe's schedule, until all requests have
        ended."""
        if not self._unfinished:
            return
        schedule: Schedule = self.recipe.schedule
        # Where the target has no memory to score a draft, drafting is given up, and the answer goes
        # on by plain decoding.
        session = MemoryGuard(
            self.session, lambda trees, error: self.drafter.give_up(NO_MEMORY_REASON, error)
        )
        rounds = schedule(session, self.drafter, self._unfinished, self.stops.append_until_stop)
        for round in self._within_scope(rounds):
            self.record(round)
            yield round

    def _within_scope(self, steps: Iterator[T]) -> Generator[T, None, None]:
        """Yields these steps, running each within the drafter's scope.

        The drafter may change the process's number of threads for a step; the caller never sees
        the change.
        """
        yield from each_within(lambda: self.drafter.parallel_work.sharing_threads(), steps)

    def record(self, round: Round) -> None:
        """Stores a round's record, without its probabilities, for the results."""
        self._first_token = self._first_token or self._clock.elapsed()
        self._records[round.request].append(round.to_record())
        if round.finish is not None:
            self._finish_reasons[round.request] = round.finish

    def _draft_seconds(self) -> DraftSeconds:
        """Returns the seconds of the draft's work in this turn."""
        return self.drafter.report().seconds.since(self._draft_seconds_before)

    def results(self, decode: float | None = None, peak: int | None = None) -> list[Result]:
        """Returns one result per request, once all have ended.

        ``decode`` are the seconds of decoding; None takes the sum over the rounds. ``peak`` is how
        many bytes the used memory grew by at most, or None where it was not measured.
        """
        if decode is None:
            decode = sum(
                r.draft_seconds + r.verify_seconds for rounds in self._records for r in rounds
            )
        # Clocks stand still while CUDA graphs are captured, because the graphs serve later answers
        # too. Only the total includes that time.
        captures = stopped_seconds() - self._stopped_before
        total = self._clock.elapsed() + captures
        report = self.drafter.report()
        draft_seconds = self._draft_seconds()
        timings = Timings(
            **self.phase_seconds,
            beside_prefill=draft_seconds.beside_prefill,
            beside_guide=draft_seconds.beside_guide,
            beside_draft=draft_seconds.beside_draft,
            planning=draft_seconds.planning,
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
                finish_reason=self._finish_reasons[number],
                rounds=tuple(self._records[number]),
                timings=timings,
                prompt_tokens=len(prompts[number]),
                visual_tokens=self.prompts[number].visual_tokens,
                draft_visual_tokens=report.visual_tokens.get(number),
                fallback_reason=self.drafter.reason,
                reused_tokens=self.reused_tokens[number],
                warnings=self._warnings(number),
                peak_bytes=peak,
            )
            for number, answer in enumerate(self.stops.answers)
        ]

    def _warnings(self, number: int) -> tuple[str, ...]:
        """Returns the warnings about this answer: where it may surprise someone who knows the
        method or ``generate``."""
        drafts_from_target_keys = Capability.TARGET_KEYS in self.recipe.drafter.offers
        sees_all_keys = Capability.WHOLE_PROMPT in self.recipe.view.offers
        drafts = self.recipe.drafts
        visual_tokens = self.prompts[number].visual_tokens
        # Where a view has nothing to drop, a draft can still gain by rounded weights.
        has_rounded_weights = self.draft is not None and self.draft.is_rounded_copy_of(self.target)
        prunes_nothing = drafts_from_target_keys and not sees_all_keys and not visual_tokens
        # ``drafts`` is False also for a recipe whose drafter only copies repeated text.
        gave_drafting_up = self.requested_recipe.drafts and not drafts
        reason = NO_DRAFT_MODEL if self.draft is None else DRAFT_DOES_NOT_PAY
        has_copies = Capability.COPIES in self.recipe.shape.offers
        # The draft's rules leave out the logits processors that may remember earlier calls.
        draft_ignores_processors = drafts and self.rules[number] != self._draft_rules[number]
        warnings = {
            f"{reason}, so {PLAIN_ANSWER}": gave_drafting_up and not has_copies,
            f"{reason}, so {PLAIN_ANSWER}, {BUT_FOR_COPIES}": gave_drafting_up and has_copies,
            NOTHING_TO_PRUNE: drafts and prunes_nothing and not has_rounded_weights,
            TRAINED_POSITIONS: self.prompts[number].media.has_trained_positions,
            TARGET_ALONE: draft_ignores_processors,
            SHARED_GPU: self._shares_a_gpu(),
            DRAFT_RESTARTED: drafts and self._restarted_draft,
            SLOW_EXACT: self.exact and self.target.device.type == "cuda",
        }
        return tuple(text for text, holds in warnings.items() if holds)

    def _shares_a_gpu(self) -> bool:
        """Returns whether a draft in a process of its own works on the target's GPU."""
        draft = self.draft
        if draft is None or not self.recipe.drafts_beside_target:
            return False
        return draft.device.type == "cuda" and draft.device == self.target.device

    def end(self, request: int) -> None:
        """Frees the caches of a request that no turn will follow."""
        self.session.end(self.first + request)
        if self.has_read_prompts:  # Before that the draft has no cache of it.
            self.drafter.end(request)

    def close(self) -> None:
        """Frees the drafter's caches, and its process where there is one."""
        self.drafter.close()


NOTHING_TO_PRUNE = (
    "the prompt has no video and no document (context=) to prune, so the target drafted with all "
    "it reads, which is no faster than plain decoding"
)
TRAINED_POSITIONS = (
    "text after the video stands where this model was trained to see it; transformers' generate "
    "puts it elsewhere and may answer otherwise (positions='library' puts it where generate does)"
)
TARGET_ALONE = (
    "your own logits processor is called for the target alone, once a token and in order, as "
    "generate calls it, because a processor may remember earlier calls; the draft does not follow "
    "it (if your processor remembers nothing, wrap it in saccade.Stateless)"
)
SHARED_GPU = (
    "draft and target share one GPU, where two processes take turns unless MPS runs, so this "
    "parallel method gains nothing there: use a serial one, or a second GPU"
)
SLOW_EXACT = (
    "exact=True computes text in forwards of exactly 16 rows, padded where there are fewer, and "
    "attention in float32, block by block, so an answer on a GPU takes longer than without it"
)
DRAFT_RESTARTED = (
    "this turn has new media, and a draft of this kind (in a process of its own, or with words in "
    "the place of pictures) reads such a conversation from its beginning; the target does not"
)
NO_DRAFT_MODEL = "no draft model was given and the target's own drafts do not pay here"
DRAFT_DOES_NOT_PAY = (
    "in earlier answers this draft did not pay here (it is tried again from time to time)"
)
PLAIN_ANSWER = "the answer was decoded plainly"
BUT_FOR_COPIES = "but for copies of repeated text"
