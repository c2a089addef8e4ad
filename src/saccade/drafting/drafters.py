"""The drafters that work in the target's process. One more is in ``ensemble``.

* ``NoDraft`` drafts nothing. ``Lookup`` and ``Copies`` draft from the text, without a model.
* ``ModelDrafter`` drafts with a draft model, and ``HeadDrafter`` with a draft head.
* ``SelfDrafter`` and ``EarlyExit`` draft with the target's own layers, over its own keys.

A drafter with a model has a session, which holds its caches. The recipe's view chooses which part
of the prompt is in them. The recipe's shape decides how a draft grows. It is written as a
generator (``Growing``): it yields the tree so far, is sent the draft's scores of that tree, and
returns the finished tree.

The engine calls a drafter in this order. Of its ``parallel_work`` it calls ``encode`` before the
target's vision tower runs, and ``prefill`` before the target's prefill. After that prefill it calls
``read_prompts``, which returns the seconds that the target waited for the draft's own prefill. Then
``propose`` and ``commit`` follow in every round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from saccade.core.capabilities import Capability
from saccade.core.errors import DraftFailed
from saccade.core.prompt import Inputs, Prefill, Prompt, Turn
from saccade.core.protocols import (
    Drafter,
    DraftReport,
    DraftSeconds,
    EarlierTurns,
    Growing,
    Growth,
    Learner,
    ParallelWork,
    Repetition,
    Shape,
    State,
)
from saccade.core.result import Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.timing import Clock, now
from saccade.core.tree import Tree, add, chain
from saccade.drafting.captioning import Captioning
from saccade.drafting.repetitions import Repetitions
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views.basic import views_to_read
from saccade.model.heads.block_session import BlockSession
from saccade.model.heads.head_session import HeadSession
from saccade.model.likeliest import Vocabulary
from saccade.model.session import RequestState, Session

SLIDE_TOKENS = 32  # A window slides after so many added tokens, because each slide moves keys.
MAX_MATCH_TOKENS = 3  # The longest ending of the text that prompt lookup searches for.

K = TypeVar("K")


class NoDraft(Drafter):
    """Plain decoding: every tree is empty."""

    name = "none"
    offers = frozenset({Capability.PLAIN_DECODING, Capability.ADDS_MEDIA})

    def __init__(self, setup: Setup) -> None: ...

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return dict.fromkeys(states, Tree())


class TextDrafter(Drafter):
    """The common part of drafters that read the text alone, without a model."""

    needs = frozenset({Capability.WHOLE_PROMPT})
    offers = frozenset({Capability.ADDS_MEDIA})

    def __init__(self, setup: Setup) -> None:
        self._texts: list[list[int]] = []

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        self._texts = [prefill.prompt.full_ids.tolist() for prefill in prefills]
        return 0.0

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for request, new in tokens.items():
            self._texts[request] += new

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        for request, turn in turns.items():
            text = self._texts[request]
            text[len(text) - turn.drop :] = turn.ids  # The last tokens are replaced by new ones.


class Lookup(TextDrafter):
    """Prompt lookup: proposes what followed the last occurrence of the text's last few tokens.

    It prefers the longest match, and of equally long ones the last. A proposal ends before the
    first placeholder of a picture or video.
    """

    name = "lookup"
    needs = TextDrafter.needs | {Capability.FIXED_LENGTH}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        assert isinstance(setup.shape, Chain), "Recipe refuses other shapes"
        self._length = setup.shape.length
        self._banned = set(setup.target.placeholders)

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        trees = {}
        for request in states:
            tokens = find_continuation(self._texts[request], MAX_MATCH_TOKENS, self._length)
            banned_places = (i for i, token in enumerate(tokens) if token in self._banned)
            trees[request] = chain(tokens[: next(banned_places, None)])
        return trees


class Copies(TextDrafter):
    """Decodes plainly, unless the text's ending has occurred before. Then it proposes the tokens
    that followed the earlier occurrence, as many of them as the shape expects to save time."""

    name = "copies"
    needs = TextDrafter.needs | {Capability.COPIES}
    offers = TextDrafter.offers | {Capability.PLAIN_DECODING}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._planning = TimedShape(setup.shape)
        vocabulary = Vocabulary(setup.target.vocab, tuple(setup.target.placeholders))
        self._repetitions = Repetitions(vocabulary)

    @property
    def learner(self) -> Learner:
        return self._planning

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return {request: self._copy(request, state) for request, state in states.items()}

    def _copy(self, request: int, state: State) -> Tree:
        find = partial(self._repetitions.find, request, self._texts[request])
        return self._planning.copy(state, find) or Tree()

    def report(self) -> DraftReport:
        return DraftReport(seconds=DraftSeconds(planning=self._planning.seconds))

    def end(self, request: int) -> None:
        self._repetitions.end(request)


def find_continuation(text: Sequence[int] | np.ndarray, longest: int, count: int) -> list[int]:
    """Returns up to ``count`` tokens that followed the last earlier occurrence of the text's
    ending, of which up to ``longest`` tokens are searched for.

    For the text 5 6 7 5 6 and ``count`` 2 it returns 7 5: the ending 5 6 is also at the beginning.
    """
    ids = np.asarray(text)
    for size in range(min(longest, len(ids) - 1), 0, -1):
        is_match = (sliding_window_view(ids[:-1], size) == ids[-size:]).all(1)
        matches = is_match.nonzero()[0]
        if len(matches):
            after = matches[-1] + size
            return ids[after : after + count].tolist()
    return []


class GrowingDraft:
    """Runs a shape's generator step by step, and keeps all scores, with the tokens drawn from them.

    ``tree`` is the tree to be scored next, or the whole draft once ``is_finished``.
    """

    def __init__(self, growing: Growing) -> None:
        self._growing = growing
        self._scores: list[Scores] = []
        self.tree = Tree()
        self.is_finished = False

    def start(self) -> None:
        """Runs to the first tree that has to be scored, or to the end of the draft."""
        self._go_on(lambda: next(self._growing))

    def grow(self, scores: Scores) -> None:
        """Takes the scores of ``tree`` and runs to the next tree to be scored, or to the end."""
        self._scores.append(scores)
        self._go_on(lambda: self._growing.send(scores))

    def _go_on(self, go: Callable[[], Tree]) -> None:
        try:
            self.tree = go()
        except StopIteration as stop:
            self.tree, self.is_finished = stop.value, True

    def tree_with_draws(self) -> Tree:
        """Returns the last tree, with every drawn token that it lacks added to it. A drawn token
        stands even if the draft has failed (see ``Tree``)."""
        tree = self.tree
        known_draws = Counter(map(_identity, tree.parents, tree.tokens, tree.q))
        for scores in self._scores:
            for parent, token, law in scores.draws:
                draw = _identity(parent, token, law)
                if known_draws[draw]:  # Two siblings may be equal draws, so they are counted.
                    known_draws[draw] -= 1
                else:
                    tree = add(tree, parent, token, law)
        return tree


def _identity(parent: int, token: int, law: Tensor | None) -> tuple[int, int, int | None]:
    """Returns a key that is the same for a draw and for its node in the tree."""
    return parent, token, None if law is None else id(law)


def drive(
    score: Callable[[dict[K, Tree]], Mapping[K, Scores]],
    growing: Mapping[K, Growing],
    last_scores: dict[K, Scores],
) -> dict[K, Tree]:
    """Grows several drafts together and returns their trees.

    In each step one call of ``score`` scores the trees of all drafts that are still growing. The
    latest scores of each draft are put into ``last_scores``. If ``score`` or any draft fails, this
    raises DraftFailed with trees that have every drawn token.
    """
    drafts = {key: GrowingDraft(each) for key, each in growing.items()}
    try:
        for draft in drafts.values():
            draft.start()
        while trees := {key: each.tree for key, each in drafts.items() if not each.is_finished}:
            scored = score(trees)
            last_scores.update(scored)
            for key in trees:
                drafts[key].grow(scored[key])
    except Exception as error:
        trees_with_draws: Mapping[Any, Tree] = {
            key: draft.tree_with_draws() for key, draft in drafts.items()
        }
        raise DraftFailed(trees_with_draws) from error
    return {key: draft.tree for key, draft in drafts.items()}


class TimedShape(Learner):
    """Calls a shape, and measures how long the shape takes to decide and to learn.

    ``seconds`` is the sum of these times. The draft's forwards between the decisions are not
    included on a CPU. On a GPU a forward is still running when the shape is called, and the shape
    waits for it when it reads the scores, so this wait is included.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.seconds = 0.0

    def start(self) -> State:
        return self._shape.start()

    def fold(self, state: State, round: Round) -> State:
        began = now()
        try:
            return self._shape.fold(state, round)
        finally:
            self.seconds += now() - began

    def finish(self, state: State) -> None:
        self._shape.finish(state)

    @property
    def can_copy(self) -> bool:
        """Whether the shape copies from the text."""
        return Capability.COPIES in self._shape.offers

    def copy(self, state: State, find: Callable[[], Repetition | None]) -> Tree | None:
        """Returns a copy of what ``find`` finds in the text; None where the shape wants none."""
        began = now()
        repetition = find()
        tree = None if repetition is None else self._shape.copy(state, repetition)
        self.seconds += now() - began
        return tree

    def grow(self, state: State, find: Callable[[], Repetition | None] | None = None) -> Growing:
        """Grows a draft, or copies what ``find`` finds in the text where the shape prefers that.

        The time between a yield and the scores that are sent back is not counted.
        """
        copied = None if find is None else self.copy(state, find)
        if copied is not None:
            return copied
        began = now()
        growing = self._shape.grow(state)
        step = partial(next, growing)
        while True:
            try:
                tree = step()
            except StopIteration as stop:
                return stop.value
            finally:
                self.seconds += now() - began
            scores: Scores = yield tree
            began = now()
            step = partial(growing.send, scores)


class SessionDrafter(Drafter):
    """The common part of drafters that have a session: drafting for all requests together, and
    committing."""

    def __init__(self, session: Session, shape: Shape) -> None:
        self.session = session
        self._planning = TimedShape(shape)
        self._repetitions = Repetitions(session.vocabulary)
        self._visual_tokens: dict[int, int] = {}  # how many of them each request's draft reads
        self._scores: dict[int, Scores] = {}  # of each request's latest draft, if it was scored
        self._has_drafted: set[int] = set()  # the requests that have had a round in this turn

    @property
    def learner(self) -> Learner:
        return self._planning

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        self._has_drafted -= turns.keys()
        self.session.start_turn(turns, rules)

    def start_growth(self, states: Mapping[int, State]) -> Growth | None:
        # With a ``Growth`` the caller grows these drafts itself, together with those of other
        # drafters over the same model, and does not call ``propose``. With None it calls
        # ``propose``, as it must where a subclass overrides that.
        if type(self).propose is not SessionDrafter.propose:
            return None
        return Growth(self.session, self._drafts(states), self._scores)

    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        return drive(self.session.score, self._drafts(states), self._scores)

    def _drafts(self, states: Mapping[int, State]) -> dict[int, Growing]:
        self._begin_round(states)
        if not self._planning.can_copy:
            return {request: self._planning.grow(state) for request, state in states.items()}
        return {
            request: self._planning.grow(state, partial(self._find_repetition, request))
            for request, state in states.items()
        }

    def _begin_round(self, requests: Iterable[int]) -> None:
        """Forgets the scores of earlier drafts of these requests, and notes that the requests have
        had a round in this turn."""
        for request in requests:
            self._scores.pop(request, None)
            self._has_drafted.add(request)

    def _find_repetition(self, request: int) -> Repetition | None:
        return self._repetitions.find(request, self.session.requests[request].context)

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        self.session.commit(tokens)

    def close(self) -> None:
        self.session.requests.clear()
        self._scores.clear()
        self._has_drafted.clear()

    def report(self) -> DraftReport:
        seconds = DraftSeconds(planning=self._planning.seconds)
        return DraftReport(self._scores, visual_tokens=self._visual_tokens, seconds=seconds)

    def end(self, request: int) -> None:
        self._repetitions.end(request)
        self.session.end(request)


@dataclass(frozen=True)
class _PrefilledPrompt:
    """The positions of a prompt, its visual rows, and the rows of it that a draft prefilled.

    The prompt of a later turn is compared with it, to find the rows that need not be read again.
    The ids of the prefilled prompt are in the session's ``RequestState.context``.
    """

    positions: Int[Tensor, "axes full"]
    visual: Bool[Tensor, " full"]
    index: Int[Tensor, " kept"]  # the rows that the view kept

    @classmethod
    def of(cls, full_prompt: Prompt, pruned: Prompt) -> _PrefilledPrompt:
        return cls(full_prompt.positions, full_prompt.visual, pruned.places)

    def shared_rows(self, state: RequestState, prompt: Prompt, media: frozenset[int]) -> int:
        """Returns how many leading rows of a new prompt equal the rows of this prompt and of the
        text after it (answers and later questions).

        Rows are equal if they have the same id and position, and both or neither are visual. A
        visual row must also be of a medium whose number is in ``media``, those of earlier turns.
        ``state`` is the request's in the draft's session.
        """
        # ``state.context`` has the ids of the prompt and of the text after it, which is
        # ``state.text_length`` long. A turn may have dropped the prompt's last tokens, so what is
        # left of the prompt may be shorter than it was when it was read.
        text_start = len(state.context) - state.text_length
        device = prompt.positions.device
        ids = torch.tensor(state.context, device=device)
        # A row of text has the same position on every axis.
        text_position = state.first_position + torch.arange(state.text_length, device=device)
        text_positions = text_position.expand(len(self.positions), -1)
        positions = torch.cat([self.positions[:, :text_start], text_positions], 1)
        text_visual = torch.zeros_like(text_position, dtype=torch.bool)
        visual = torch.cat([self.visual[:text_start], text_visual])
        # The new prompt is compared with all this row by row, up to the first unequal row.
        count = min(len(ids), len(prompt))
        equal = ids[:count] == prompt.full_ids[:count]
        equal &= (positions[:, :count] == prompt.positions[:, :count]).all(0)
        equal &= visual[:count] == prompt.visual[:count]
        rows = int(equal.long().cumprod(0).sum())
        # The shared rows also end before the first row of a medium that is not in ``media``. The
        # first column of ``grid`` has the number of each visual row's medium.
        media_numbers = torch.tensor([*media], dtype=torch.long, device=device)
        is_new = ~torch.isin(prompt.grid[:, 0], media_numbers)
        new_visual_rows = prompt.visual.nonzero().squeeze(-1)[is_new]
        return min(rows, int(new_visual_rows[0])) if len(new_visual_rows) else rows

    def rows_before(self, state: RequestState, stop: int) -> Int[Tensor, " rows"]:
        """Returns which rows before ``stop`` the draft has in its cache: those of the prompt that
        the view kept, and all rows of the text after it. They are numbered as in the whole prompt
        followed by the text."""
        start = len(state.context) - state.text_length
        text = torch.arange(min(start, stop), stop, device=self.index.device)
        return torch.cat([self.index[self.index < min(start, stop)], text])


class ModelDrafter(SessionDrafter, ParallelWork):
    """A smaller model with a cache of its own, over the tokens that its view keeps.

    Its visual rows come from the first of these that is possible:

    - the target's own rows, if both models make the same rows from pixels, and the draft makes no
      rows that are averaged before the projector (``Setup.needs_averaged_rows``);
    - the output of the target's vision tower, which the draft projects, if the towers are equal;
    - its own vision tower, if it has one.
    """

    name = "model"
    offers = frozenset({Capability.READS_VIEW, Capability.DRAFT_MODEL, Capability.ADDS_MEDIA})

    def __init__(self, setup: Setup) -> None:
        draft = setup.draft_model()
        common, banned = setup.shared_vocabulary()
        session = Session(draft, setup.rules, vocab=common, banned=banned, room=setup.room)
        super().__init__(session, setup.shape)
        self._setup = setup
        self._shares_rows = not setup.needs_averaged_rows and draft.shares_rows_with(setup.target)
        self._reuses_vision = not self._shares_rows and draft.shares_vision_with(setup.target)
        self._inputs: Inputs = {}
        self._target_vision_outputs: list[Any] = []
        self._vision_hook: RemovableHandle | None = None
        self._captioning: Captioning | None = None
        self._prefilled_prompts: list[_PrefilledPrompt] = []

    @property
    def parallel_work(self) -> ParallelWork:
        return self

    def encode(self, inputs: Inputs) -> None:
        """Keeps the inputs, and records the output of the target's vision tower if the draft can
        use it."""
        self._inputs = inputs
        if self._reuses_vision:
            self._vision_hook = self._setup.target.record_vision(self._target_vision_outputs)

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Stops recording the target's vision tower, which has run, and begins to make captions if
        the view reads them. The draft's own prefill is in ``read_prompts``."""
        self._remove_vision_hook()
        self._captioning = Captioning(self._setup, self._inputs)

    def _draft_prompts(self, prefills: Sequence[Prefill]) -> list[Prompt]:
        """Returns the draft's whole prompts. They are made only after the target's prefill, so that
        the first token does not wait for them."""
        model, setup, inputs = self.session.backbone, self._setup, self._inputs
        if self._shares_rows:
            return [model.adopt(prefill.prompt) for prefill in prefills]
        if not self._reuses_vision:
            own_inputs = setup.draft_inputs(inputs)
            return model.prompts(
                own_inputs, with_averaged_rows=setup.needs_averaged_rows, vision=setup.vision
            )
        outputs, self._target_vision_outputs = self._target_vision_outputs, []
        return model.prompts(
            inputs, outputs, with_averaged_rows=setup.needs_averaged_rows, vision=setup.vision
        )

    def close(self) -> None:
        super().close()
        self._remove_vision_hook()

    def _remove_vision_hook(self) -> None:
        if self._vision_hook is not None:
            self._vision_hook.remove()
            self._vision_hook = None

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        if earlier is not None:
            return self._read_new_media(prefills, earlier)
        views = views_to_read(self._setup.view)
        model = self.session.backbone
        assert self._captioning is not None, "prefill comes first"
        words = self._captioning.texts()
        clock = Clock(model.device)
        prompts = self._draft_prompts(prefills)
        vision_seconds = clock.lap()
        pruned_prompts = []  # for each request in turn, its prompt as each view prunes it
        self._prefilled_prompts = []
        for i, prompt in enumerate(prompts):
            prefill = replace(prefills[i].to(model.device), replacement_texts=words[i])
            by_view = [view(prefill, prompt) for view in views]
            self._visual_tokens[i] = max(each.visual_tokens for each in by_view)
            self._prefilled_prompts.append(_PrefilledPrompt.of(prompt, by_view[0]))
            pruned_prompts += by_view
        # The seconds of the views are left out: the caller counts them as ``Timings.guide``.
        clock.lap()
        self.session.prefill([model.embed_missing_rows(prompt) for prompt in pruned_prompts])
        return vision_seconds + clock.lap()

    def _read_new_media(self, prefills: Sequence[Prefill], earlier: EarlierTurns) -> float:
        """Reads the new rows of each prompt: new text, and what the view keeps of new media.

        The rows that the draft has of earlier media stay. The view is applied to the new rows
        alone, as if they were a whole prompt, by the attention of this turn's question. Returns
        the seconds without those of the views.
        """
        (view,) = views_to_read(self._setup.view)
        session = self.session
        model = session.backbone
        session.rules = earlier.rules
        clock = Clock(model.device)
        prompts = self._draft_prompts(prefills)
        seconds = clock.lap()
        for i, (prompt, prefix) in enumerate(zip(prompts, earlier.prefixes, strict=True)):
            state = session.requests[i]
            prefilled = self._prefilled_prompts[i]
            # How many leading rows of the draft's prompt were in earlier turns. If the draft shares
            # the target's rows, it is the target's number, which ``prefix`` has. Otherwise the
            # draft's prompt is compared with the prompt that it read in earlier turns.
            shared = prefix.shared_rows
            if not self._shares_rows:
                shared = prefilled.shared_rows(state, prompt, prefix.shared_media)
            # The view chooses among the draft's rows after the ``shared`` ones. The view is given
            # what the target's prefill recorded for the target's own new rows: those after the
            # first ``prefix.shared_rows``.
            new = self._with_image_rows(prompt.keep_from(shared))
            seconds += clock.lap()
            pruned_new = view(prefills[i].to(model.device).tail(prefix.shared_rows), new)
            # The seconds of the view are left out: the caller counts them as ``Timings.guide``.
            clock.lap()
            # The pruned prompt has the rows that the draft has already, and then the new ones.
            kept_rows = torch.cat([prefilled.rows_before(state, shared), pruned_new.places])
            is_kept = torch.zeros(len(prompt), dtype=torch.bool, device=kept_rows.device)
            is_kept[kept_rows] = True
            pruned = prompt.keep_rows(is_kept)
            first_new = len(kept_rows) - len(pruned_new)
            # The new rows have the embeddings that the view gave them.
            embeds = torch.cat([pruned.embeds[:first_new], pruned_new.embeds])
            pruned = replace(pruned, embeds=embeds)
            # The generator reads one chunk in each step, and nothing is done between the chunks.
            # ``noise_number`` is the request's number in the call, which selects its noise.
            for _ in session.prefill_in_chunks(i, pruned, noise_number=i, shared_rows=first_new):
                pass
            self._visual_tokens[i] = pruned.visual_tokens
            self._prefilled_prompts[i] = _PrefilledPrompt.of(prompt, pruned)
            seconds += clock.lap()
        return seconds

    def _with_image_rows(self, part: Prompt) -> Prompt:
        """Returns a part of a prompt with ``Media.image_rows`` filled in: how many of its visual
        rows are of images."""
        kinds = self._setup.target.placeholders | self.session.backbone.placeholders
        images = [token for token, kind in kinds.items() if kind == "image"]
        ids = part.full_ids[part.places[part.visual]]
        image_rows = int(torch.isin(ids, ids.new_tensor(images)).sum())
        return replace(part, media=replace(part.media, image_rows=image_rows))

    def report(self) -> DraftReport:
        if self._captioning is None:
            return super().report()
        report = super().report()
        caption, hidden = self._captioning.seconds
        seconds = replace(report.seconds, caption=caption, caption_hidden=hidden)
        return replace(report, seconds=seconds)


class SelfDrafter(SessionDrafter):
    """The target drafts for itself, without a second prefill: it copies its keys of the rows that
    the view keeps. It may draft with rounded weights (``draft_quantize``), and with its first
    ``layers`` layers alone."""

    name = "self"
    needs = frozenset({Capability.PROMPT_ROWS, Capability.ORIGINAL_POSITIONS})
    offers = frozenset(
        {
            Capability.READS_VIEW,
            Capability.STARTS_FROM_TARGET_KEYS,
            Capability.TARGET_KEYS,
            Capability.ADDS_MEDIA,
        }
    )

    def __init__(self, setup: Setup, layers: int | None = None) -> None:
        banned = list(setup.target.placeholders)
        full_model = setup.target_as_draft
        model = full_model if layers is None else full_model.first_layers(layers)
        session = Session(model, setup.rules, banned=banned, room=setup.room)
        super().__init__(session, setup.shape)
        self._view, self._key_updates = setup.view, setup.view.key_updates
        # By request, how many rows ``read_prompts`` put into the draft's cache. A request's window
        # slides (see ``KeyUpdates.sinks``) by dropping rows of the prompt, until the cache has that
        # many rows again, or until only the sinks are left of the prompt. Requests whose whole
        # prompt the view keeps have no window, and are not in here.
        self._window_rows: dict[int, int] = {}
        # The target's prefill and the current pruned prompt of requests whose view is refreshed.
        self._refreshed_views: dict[int, tuple[Prefill, Prompt]] = {}
        # How many rounds each of these requests has had since ``read_prompts`` applied the view.
        self._rounds: dict[int, int] = {}

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        """Copies the target's keys of the rows that the view chooses.

        In a later turn with new media the view chooses again, among the media of all turns.
        """
        if earlier is not None:
            self.session.rules = earlier.rules
            self._rounds.clear()
            self._has_drafted.clear()
        pruned = [self._view(prefill, prefill.prompt) for prefill in prefills]
        self._visual_tokens = {i: prompt.visual_tokens for i, prompt in enumerate(pruned)}
        clock = Clock(self.session.backbone.device)
        if self._key_updates.sinks is not None:
            pairs = enumerate(zip(prefills, pruned, strict=True))
            self._window_rows = {
                i: len(pruned_prompt)
                for i, (prefill, pruned_prompt) in pairs
                if len(pruned_prompt) < len(prefill.prompt)
            }
        if self._key_updates.refresh is not None:
            self._refreshed_views = dict(enumerate(zip(prefills, pruned, strict=True)))
        self.session.fork(prefills, pruned, can_reselect=bool(self._refreshed_views))
        return clock.elapsed()

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        super().commit(tokens)
        # A request that has not drafted in this turn commits its first token, which comes from the
        # target's prefill. That is no round, so it is not counted as one below.
        requests_with_round = tokens.keys() & self._has_drafted
        for request in self._refreshed_views.keys() & requests_with_round:
            self._refresh_view(request)
        for request in self._window_rows.keys() & tokens.keys():
            self._slide(request)

    def _slide(self, request: int) -> None:
        """Slides a request's window once ``SLIDE_TOKENS`` rows or more were added to it.

        It drops as many of the prompt's rows as were added, but none of the attention sinks. The
        rows that come first after the sinks are dropped first.
        """
        state = self.session.requests[request]
        sinks = self._key_updates.sinks or 0
        # How many rows the prompt has in the draft's cache, and in the target's, which keeps all.
        prompt_rows, target_prompt_rows = state.prompt_rows
        added = state.cache.length - self._window_rows[request]
        if added >= SLIDE_TOKENS and prompt_rows > sinks:
            dropped = min(added, prompt_rows - sinks)
            state.cache.remove_rows(sinks, dropped)
            state.prompt_rows = prompt_rows - dropped, target_prompt_rows

    def _refresh_view(self, request: int) -> None:
        """Lets the view choose again in every ``Refresh.every``-th round, by the attention of the
        last ``Refresh.rows`` rows that were committed, whatever rounds they came from."""
        refresh = self._key_updates.refresh
        assert refresh is not None
        self._rounds[request] = self._rounds.get(request, 0) + 1
        if self._rounds[request] % refresh.every:
            return
        prefill, pruned = self._refreshed_views[request]
        assert prefill.with_latest_attention is not None
        newer = prefill.with_latest_attention()
        assert newer.mass is not None and newer.relevance is not None
        # The attention on tokens that the draft has already counts more, so that small differences
        # do not replace them.
        factor = 1 + refresh.hold * pruned.chosen_mask(prefill.prompt)
        newer = replace(newer, mass=newer.mass * factor, relevance=newer.relevance * factor)
        pruned = self._view(newer, prefill.prompt)
        self._refreshed_views[request] = prefill, pruned
        self.session.reselect(request, pruned)

    def end(self, request: int) -> None:
        self._refreshed_views.pop(request, None)
        super().end(request)


class EarlyExit(SelfDrafter):
    """The first half of the target's layers drafts for the whole target, over its own keys."""

    name = "early-exit"
    offers = frozenset(
        {Capability.READS_VIEW, Capability.STARTS_FROM_TARGET_KEYS, Capability.ADDS_MEDIA}
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, max(1, setup.target.layer_count // 2))


class HeadDrafter(SessionDrafter):
    """A head that drafts from the target's hidden states: one that the target's checkpoint has, or
    an EAGLE-3 or DFlash head. It reads the rows of the prompt that its view keeps, at the target's
    positions."""

    name = "head"
    needs = frozenset(
        {Capability.HIDDEN_STATES, Capability.PROMPT_ROWS, Capability.ORIGINAL_POSITIONS}
    )
    offers = frozenset({Capability.READS_VIEW, Capability.ADDS_MEDIA})

    def __init__(self, setup: Setup) -> None:
        banned = list(setup.target.placeholders)
        self._view = setup.view
        head = setup.head()
        session_class = BlockSession if head.drafts_blocks else HeadSession
        self._head_session: HeadSession = session_class(
            head, setup.rules, banned=banned, room=setup.room
        )
        super().__init__(self._head_session, setup.shape)

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        """Reads the hidden states that the target's cache still has of the rows that the view
        chooses.

        In a later turn with new media the view chooses again, among the media of all turns.
        """
        if earlier is not None:
            self.session.rules = earlier.rules
        clock = Clock(self.session.backbone.device)
        seconds = 0.0
        for request, prefill in enumerate(prefills):
            prompt = self._view(prefill, prefill.prompt)
            # The seconds of the view are left out: the caller counts them as ``Timings.guide``.
            clock.lap()
            self._visual_tokens[request] = prompt.visual_tokens
            self._head_session.read(request, prefill, prompt)
            seconds += clock.lap()
        return seconds
