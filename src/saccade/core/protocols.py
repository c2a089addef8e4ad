"""The interfaces of the parts of a method (views, shapes, drafters, schedules) and of sessions.

A new part derives from its class here and overrides what is not the default. A session runs a
model's forwards for the requests of one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, fields
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from saccade.core.capabilities import NO_CAPABILITIES, Capabilities, Capability
from saccade.core.costs import Costs
from saccade.core.prompt import Inputs, Prefill, Prompt, SharedPrefix, Turn
from saccade.core.result import FinishReason, Round
from saccade.core.sampling import Sampling, Scores
from saccade.core.tree import Tree

State = Any
"""What a ``Learner`` carries from round to round. Its size is bounded, and it can be computed again
from recorded rounds."""

Growing = Generator[Tree, Scores, Tree]
"""A growing draft. It yields a tree to be scored and is sent its scores, as often as it needs, and
returns the tree that it has grown."""


@dataclass(frozen=True)
class Repetition:
    """A prompt-lookup match: the tokens after the last earlier occurrence of the text's ending."""

    tokens: tuple[int, ...]
    match_length: int  # How many of the text's last tokens also stand before ``tokens``.


@dataclass(frozen=True)
class Refresh:
    """How a view chooses again, during an answer, which of the target's keys the draft attends to.

    It chooses again every ``every`` rounds, by the target's attention from the last ``rows`` tokens
    that the target verified. The attention on keys that the draft already has is multiplied by
    1 + ``hold``, so that small differences do not replace them.
    """

    every: int = 1
    rows: int = 8
    hold: float = 0.25


@dataclass(frozen=True)
class KeyUpdates:
    """How a draft over the target's own keys changes which of them it attends to during an answer.

    By default it attends to the keys that the view chose first, and to all later ones.
    """

    refresh: Refresh | None = None  # If given, the view chooses again during the answer.
    sinks: int | None = None
    """If given, the draft always attends to this many first rows of the prompt (attention sinks),
    and to a sliding window of later rows.

    At first the window is the other rows that the view kept. After rows of the answer were added,
    as many rows of the prompt are dropped, those that come first after the sinks. Rows of the
    answer are never dropped, so the window grows once it has no row of the prompt left. If the view
    keeps the whole prompt, there is no window and nothing is dropped."""


@dataclass(frozen=True)
class EarlyChoice:
    """The visual tokens that a draft reads before the target's prefill has ended."""

    tokens: Int[Tensor, " early"]  # Indices among the visual tokens.
    without_target: Float[Tensor, " visual"] | None = None
    """For each visual token, the part of its saliency that is computed without the target's
    attention; None if the view does not compute it."""


class View(ABC):
    """Chooses what the draft reads.

    A view is called with the target's prefill and the draft's whole prompt, and returns the prompt
    that the draft reads. Derive a frozen dataclass from it.
    """

    name: str
    keep: float | None = None  # the share of visual tokens that it keeps; None if the view decides

    @property
    def needs(self) -> Capabilities:
        """The capabilities that this view needs, for example ``Capability.ATTENTION`` if the
        target's prefill must record attention mass."""
        return NO_CAPABILITIES

    @property
    def offers(self) -> Capabilities:
        """The capabilities that the drafter may rely on."""
        return frozenset({Capability.PROMPT_ROWS, Capability.ORIGINAL_POSITIONS})

    @abstractmethod
    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt: ...

    @property
    def settings(self) -> frozenset[str]:
        """The names of the fields that an override may set, as in ``keep=0.2``."""
        return frozenset(each.name for each in fields(cast(Any, self)))

    @property
    def key_updates(self) -> KeyUpdates:
        """How its choice changes during an answer, where the target drafts for itself."""
        return KeyUpdates()


class EarlyView(View):
    """A view that a draft may begin to read before the target's prefill has ended.

    Every view that needs ``Capability.BESIDE_TARGET`` derives from it.
    """

    @abstractmethod
    def choose_early(self, prompt: Prompt) -> EarlyChoice:
        """Returns what the draft reads before the target's prefill has ended."""

    @abstractmethod
    def choose(
        self, prefill: Prefill, prompt: Prompt, early: EarlyChoice | None = None
    ) -> Int[Tensor, " kept"]:
        """Returns the visual tokens that the draft keeps of a whole prompt. If ``early`` is given,
        the draft has read those tokens already and keeps some of them."""


class CostedView(View):
    """A view whose share of the tokens follows from costs.

    Every view that needs ``Capability.COSTS`` derives from it.
    """

    @abstractmethod
    def with_share(self, keep: float) -> View:
        """Returns the view that keeps this share of the tokens."""


@runtime_checkable
class CostMemory(Protocol):
    """Costs as the rounds of earlier answers have corrected them, for a pair on this machine."""

    def load(self) -> Costs | None:
        """Returns the costs that were saved last; None if there are none."""
        ...

    def save(self, costs: Costs) -> None:
        """Stores costs for later answers."""
        ...


class Learner:
    """Learns from past rounds, by a pure fold over them, so that the same rounds give the same
    states. This default learns nothing."""

    def start(self) -> State:
        """Returns the state before the first round."""
        return None

    def fold(self, state: State, round: Round) -> State:
        """Returns the state after a round. The opening round, which has no draft, is not folded."""
        return state

    def finish(self, state: State) -> None:
        """Takes the last state of a finished answer, so that later answers can start from it."""


class Shape(Learner, ABC):
    """The shape of a draft: how a draft grows, and what the shape learns from past rounds.

    A shape is immutable. What it learns is in the state that is passed to its methods.

    Growing has one rule: a drawn token stands. Whether tokens are drawn below a node, and how many,
    may depend on laws and on the path down to that node, its own token included. It must not depend
    on which tokens these draws give, nor on anything drawn later. ``Tree`` has the whole rule.
    """

    # A family of shapes has a parameter, which follows its name: ``chain-5`` is of family "chain".
    family: ClassVar[str] = ""
    usage: ClassVar[str] = ""  # How it is written, for lists and errors: "chain-N".
    examples: ClassVar[tuple[str, ...]] = ()  # Parameters that the law tests run, such as "4".

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Returns the shape that ``FAMILY-text`` names. Raises MethodError saying what works."""
        raise NotImplementedError

    @property
    def spelling(self) -> str:
        """How the shape is written in errors and overrides, such as ``chain-5``.

        A shape that is registered under a name is written by that name in overrides. The default
        is the class's name.
        """
        return type(self).__name__

    @property
    def branches(self) -> bool:
        """Whether a drafted token may have siblings. If not, every draft is a chain."""
        return True

    @property
    def needs(self) -> Capabilities:
        """The capabilities that this shape needs, for example ``Capability.COSTS`` if it decides by
        what forwards cost."""
        return NO_CAPABILITIES

    @property
    def offers(self) -> Capabilities:
        """The capabilities that the drafter and the schedule may rely on.

        A shape offers ``Capability.GROWS_TOKEN_BY_TOKEN`` if its ``for_parallel`` returns a
        ``Chain`` that can be grown one token at a time. A draft grows so beside the target.
        """
        return NO_CAPABILITIES

    def for_parallel(self) -> Shape:
        """Returns the ``Chain`` by which a draft grows in parallel with the target.

        A ``Chain`` returns itself. Other shapes choose one, for example ``fit`` by its costs. It is
        called after ``prepare``, for shapes that offer ``Capability.GROWS_TOKEN_BY_TOKEN``.
        """
        return self

    def copy(self, state: State, repetition: Repetition) -> Tree | None:
        """Returns a draft of the first tokens of ``repetition``, made without a forward of the
        draft model; None where growing a draft is worth more. It is called for shapes that offer
        ``Capability.COPIES``."""
        return None

    def as_chains(self) -> Shape:
        """Returns the nearest shape whose drafts are chains; itself where there is none."""
        return self

    def prepare(
        self,
        measure: Callable[[], Costs],
        memory: CostMemory | None = None,
        target_family: str = "",
    ) -> Shape:
        """Returns the shape with what it needs to know of the models.

        A shape that decides by costs, and has none yet, takes them from ``memory``, or else calls
        ``measure``. ``memory`` has the costs as earlier answers corrected them; it is None where
        the answer may not depend on measured time. ``target_family`` is the target's
        ``model_type``, for shapes whose settings depend on it.
        """
        return self

    def is_expected_to_pay(self) -> bool:
        """Returns whether drafting is expected to pay, by what is known before the first round."""
        return True

    @property
    def has_measured_draft(self) -> bool:
        """Whether earlier answers have shown how often this draft is right and what it costs."""
        return False

    @abstractmethod
    def grow(self, state: State) -> Growing:
        """Grows one draft from the end of the committed text."""
        ...


@dataclass(frozen=True)
class Growth:
    """The drafts that one drafter has to grow, for a caller that grows those of several drafters.

    Where these use the same model, one forward a step scores the drafts of all of them.
    """

    session: Any  # the drafter's ``model.session.Session``, whose forwards score the drafts
    drafts: Mapping[int, Growing]  # by request
    last_scores: dict[int, Scores]
    """By request, the scores of the last step. The caller fills this in, and the drafter reads
    it."""
    finish: Callable[[dict[int, Tree]], dict[int, Tree]] = lambda trees: trees
    """Is called with the trees once they have grown, and returns the trees to propose."""


class ParallelWork:
    """What a drafter does while the target runs.

    This default is that of a drafter which works only between the target's forwards.
    """

    def encode(self, inputs: Inputs) -> None:
        """Takes the inputs of a call. It is called before the target encodes them."""

    def prefill(self, prompts: Sequence[Prompt]) -> None:
        """Takes the encoded prompts. It is called before the target prefills them."""

    def sharing_threads(self) -> AbstractContextManager[None]:
        """Returns a context in which the caller works for this drafter's requests.

        A drafter that runs in parallel with the target on a CPU limits torch's threads in this
        context, so that both have some, and restores their number at its end.
        """
        return nullcontext()

    def extend(self, in_flight: Mapping[int, Tree]) -> dict[int, Tree]:
        """Returns each tree of ``in_flight`` with one more token at its end.

        The token is the one that was drafted while the target scored the tree. If it is not there
        yet, this waits for it. A drafter that cannot draft yet returns the trees as they are.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class DraftSeconds:
    """The seconds that only a drafter can measure, such as those of its work beside the target."""

    beside_prefill: float = 0.0  # of reading prompts beside the target
    beside_guide: float = 0.0  # of the view's choice of visual tokens beside the target
    beside_draft: float = 0.0  # of drafting beside the target
    planning: float = 0.0  # of deciding what to draft, without the models' forwards
    caption: float = 0.0  # of captioning
    caption_hidden: float = 0.0  # the part of ``caption`` beside the target's prefill

    def since(self, earlier: DraftSeconds) -> DraftSeconds:
        """Returns the seconds that were added after an earlier look at the same drafter."""
        current = astuple(self)
        before = astuple(earlier)
        return DraftSeconds(*(later - then for later, then in zip(current, before, strict=True)))


@dataclass(frozen=True)
class DraftReport:
    """What a drafter tells of its work, by request; what it does not know is left out."""

    scores: Mapping[int, Scores] = field(default_factory=dict)
    """The draft's scores at the nodes of the last tree. They become ``Round.q``, from which the
    learner learns."""
    notes: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """Numbers that the draft decided by, to be recorded in ``Round.note``."""
    visual_tokens: Mapping[int, int] = field(default_factory=dict)
    """How many visual tokens the draft reads."""
    seconds: DraftSeconds = DraftSeconds()


@dataclass(frozen=True)
class EarlierTurns:
    """What a drafter is told of a turn with new media, so that it reads only what is new.

    ``prefixes`` say for each prompt which rows and media earlier turns have prefilled already.
    ``rules`` are the sampling rules that drafts of this turn follow (``Sampling.for_drafts``), by
    prompt.
    """

    prefixes: Sequence[SharedPrefix]
    rules: Sequence[Sampling]


class Drafter(ABC):
    """Proposes trees of tokens. One object serves every request of a call, numbered from 0.

    The schedule folds what is learnt from past rounds into a state that it passes to ``propose``.
    The drafter itself keeps no learnt state, so that what is learnt depends on nothing but the
    rounds. Calls come in this order: ``encode`` and ``prefill`` of its :attr:`parallel_work`, and
    ``read_prompts``; then ``propose`` and ``commit``, round after round.
    """

    name: ClassVar[str] = "of its own kind"
    """Its name in overrides (``drafter=model``). In errors it follows the word "drafter", so the
    default of a drafter without a name reads "drafter of its own kind"."""
    needs: ClassVar[Capabilities] = NO_CAPABILITIES
    offers: ClassVar[Capabilities] = frozenset({Capability.READS_VIEW})

    @property
    def learner(self) -> Learner:
        """What it learns from past rounds."""
        return Learner()

    @property
    def parallel_work(self) -> ParallelWork:
        """How it works while the target works."""
        return ParallelWork()

    def read_prompts(
        self, prefills: Sequence[Prefill], earlier: EarlierTurns | None = None
    ) -> float:
        """Reads the prompts, given the results of the target's prefill. Afterwards the drafter can
        propose.

        With ``earlier`` the prompts continue those of earlier turns by new media, and only what
        is new needs to be read. Only a drafter that offers ``Capability.ADDS_MEDIA`` is given
        ``earlier``. Where a drafter cannot continue in this way (``Recipe.can_add_media``), a new
        one is made for the turn, which reads the conversation from its beginning.

        Returns the seconds that the target waited for the drafter's own prefill.
        """
        return 0.0

    def start_turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        """Takes the next turns of conversations, whose earlier turns stay in the caches. ``rules``
        are the sampling rules that drafts of these turns follow, by request."""

    @abstractmethod
    def propose(self, states: Mapping[int, State]) -> dict[int, Tree]:
        """Returns a tree for each request whose state is given."""
        ...

    def start_growth(self, states: Mapping[int, State]) -> Growth | None:
        """Returns the drafts that ``propose`` would grow, for the caller to grow them together with
        those of other drafters; None where this drafter does not share its forwards."""
        return None

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Takes the tokens that were emitted, by request."""

    def report(self) -> DraftReport:
        """Returns what there is to tell of the last round and of the work so far."""
        return DraftReport()

    def end(self, request: int) -> None:
        """Frees a request whose answer is complete, when no turn will follow."""

    def close(self) -> None:
        """Frees everything: the answers are complete, or abandoned."""


@runtime_checkable
class Scoring(Protocol):
    """A session as schedules and drafters use it. In tests an oracle without a cache takes its
    place."""

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]:
        """Returns a model's scores after the text and after each node of its tree, by request."""
        ...

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Adds emitted tokens to the texts, by request."""
        ...


Cut = Callable[[int, Sequence[int]], tuple[int, FinishReason | None]]
"""(request, new tokens) -> how many of them the answer takes before it stops, and why the request
ends, if it does."""

Rounds = Callable[[Scoring, Drafter, Sequence[int], Cut], Iterator[Round]]
"""(session, drafter, requests, cut) -> the rounds, until every request has ended."""


@dataclass(frozen=True)
class Schedule:
    """Runs the rounds of a call's requests: decides when to draft, to verify and to commit."""

    name: str
    run: Rounds
    needs: Capabilities = NO_CAPABILITIES
    offers: Capabilities = NO_CAPABILITIES

    def __call__(
        self, session: Scoring, drafter: Drafter, requests: Sequence[int], cut: Cut
    ) -> Iterator[Round]:
        return self.run(session, drafter, requests, cut)
