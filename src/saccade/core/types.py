"""The vocabulary: what flows between prefill, drafting, verification and the result.

Everything here is frozen and knows no model. ``p`` is the target's law, ``q`` the draft's, always.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from saccade.core.sampling import Sampling, Scores
    from saccade.model.cache import Cache

Law = int | Float[Tensor, " _vocab"]
"""A probability law over token ids: one id (all mass on it) or a vector of probabilities."""

ROOT = -1
"""The parent of a tree's first nodes: the end of the committed text."""

FinishReason = Literal["stop", "length", "error"]
Kind = Literal["accepted", "recovered", "bonus"]


@dataclass(frozen=True)
class Prompt:
    """One request as a language model reads it: embedded, with its true positions.

    Written by ``Backbone.prompts``; a view keeps a subset of its rows with :meth:`select`.
    """

    context: Int[Tensor, " full"]  # ids of the whole prompt, whatever was pruned: penalties see it
    embeds: Float[Tensor, "len dim"]
    positions: Int[Tensor, "axes len"]
    visual: Bool[Tensor, " len"]
    fixed: Bool[Tensor, " len"]  # rows a tower made that no view may drop: sound, newlines
    grid: Int[Tensor, "seen 4"]  # (medium, t, h, w) of each visual row
    index: Int[Tensor, " len"]  # where each row stands in the whole prompt
    next_position: int
    deepstack: tuple[Float[Tensor, "seen dim"], ...] = ()  # rows some models add to early layers
    heads: Int[Tensor, "layer kv_head kept"] | None = None
    """Rows of the whole prompt each head keeps, where heads differ (Sparse-to-Dense)."""
    blank: Int[Tensor, " len"] | None = None
    """Ids of rows whose embeddings the model has yet to look up (words put in the place of a
    video), -1 elsewhere; ``Backbone.written`` fills them in."""

    def __len__(self) -> int:
        return self.embeds.shape[0]

    @property
    def seen(self) -> int:
        """How many visual rows a head sees."""
        if self.heads is not None:
            return self.heads.shape[-1] - int((~self.visual).sum())
        return self.grid.shape[0]

    def select(self, keep: Int[Tensor, " kept"]) -> Prompt:
        """The prompt with all its text and only these visual rows, at their original positions.

        ``keep`` counts visual rows, in any order; the rows stay in prompt order.
        """
        chosen = torch.zeros(self.seen, dtype=torch.bool, device=keep.device)
        chosen[keep] = True
        rows = ~self.visual
        rows[self.visual] = chosen
        return self.rows(rows)

    def rows(self, rows: Bool[Tensor, " len"]) -> Prompt:
        """The prompt with these rows only, text or visual, at their original positions."""
        chosen = rows[self.visual]
        return Prompt(
            context=self.context,
            embeds=self.embeds[rows],
            positions=self.positions[:, rows],
            visual=self.visual[rows],
            fixed=self.fixed[rows],
            grid=self.grid[chosen],
            index=self.index[rows],
            next_position=self.next_position,
            deepstack=tuple(layer[chosen] for layer in self.deepstack),
        )


@dataclass(frozen=True)
class Prefill:
    """What the target's prefill revealed, for a view to choose by."""

    prompt: Prompt
    cache: Cache | None
    tip: Float[Tensor, " vocab"]  # raw logits after the prompt
    mass: Float[Tensor, "layer kv_head seen"] | None = None
    """Softmax mass each visual key got, averaged over the text queries after the last visual row
    and over the heads of a group; recorded only when a view asks (``View.attention``)."""
    relevance: Float[Tensor, "layer kv_head seen"] | None = None
    """The same with the softmax over the visual keys alone (HIPPO, Eq. 2)."""
    words: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Ids a view may write in the place of a video: "newline", "caption"."""


@dataclass(frozen=True)
class Turn:
    """How a conversation goes on: its last ``drop`` tokens are taken back, then ``ids`` follow.

    Counted in text tokens, so it means the same to a draft that saw another prompt.
    """

    drop: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Drafted tokens. A chain is a tree; an empty tree is plain decoding.

    ``parents[i]`` is a node before ``i`` or ``ROOT``. ``q[i]`` is the law node ``i`` was *sampled*
    from, or None when it was *chosen* (arg-max, top-k), which is a point mass on it.
    Siblings that carry a q must be independent draws from that one law. ``odds`` are what the
    draft promised of each token, where the shape decides by them.

    **The rule of every shape: a drawn token stands.** Whether a token is drawn after a node, and
    how many, may read laws and what stands above that node, never the draw itself or what was
    drawn after it; and what the next draft looks like may read laws and tokens that were judged,
    never a draw that was not. A draw taken back because of what it was bends the target's law:
    ``docs/lossless.md`` has the proof, and ``tests/laws`` holds every registered shape to it.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[Float[Tensor, " vocab"] | None, ...] = ()
    odds: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Verdict:
    """What verification let through: accepted nodes, then at most one token of the target's own."""

    path: tuple[int, ...]  # accepted nodes, root first
    accepted: tuple[int, ...]  # their tokens
    own: int | None  # "recovered" after a refusal, "bonus" after full acceptance
    kind: Literal["recovered", "bonus"] | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.accepted if self.own is None else (*self.accepted, self.own)


@dataclass(frozen=True)
class Round:
    """One propose-verify-commit of one request. ``p`` and ``q`` live until the fold has run."""

    request: int
    tree: Tree
    verdict: Verdict  # already cut at the first stop
    finish: FinishReason | None
    p: Scores
    q: Scores | None
    draft_seconds: float
    verify_seconds: float
    note: tuple[float, ...] = ()  # what the draft decided by: an ensemble's weights, odds

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.verdict.tokens

    def scalars(self) -> RoundRecord:
        return RoundRecord(
            tokens=self.tree.tokens,
            parents=self.tree.parents,
            accepted=self.verdict.accepted,
            own=self.verdict.own,
            kind=self.verdict.kind,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            note=self.note,
        )


@dataclass(frozen=True)
class RoundRecord:
    """A round without its laws: what a result keeps and a trace file holds."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    own: int | None
    kind: Literal["recovered", "bonus"] | None
    draft_seconds: float
    verify_seconds: float
    note: tuple[float, ...] = ()

    @property
    def emitted(self) -> tuple[int, ...]:
        return self.accepted if self.own is None else (*self.accepted, self.own)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """How each emitted token came, for colouring text as it appears."""
        kinds: list[Kind] = ["accepted"] * len(self.accepted)
        return tuple(kinds) if self.kind is None else (*kinds, self.kind)


@dataclass(frozen=True)
class Timings:
    """Seconds on the wall clock; ``total`` is from inputs to the last token."""

    vision: float = 0.0  # both models' embedding of the prompt, vision towers included
    prefill: float = 0.0  # target
    guide: float = 0.0  # choosing what the draft sees
    draft_prefill: float = 0.0  # 0 where it ran beside the target
    decode: float = 0.0  # every round
    first_token: float = 0.0  # from inputs to the first emitted token
    total: float = 0.0


@dataclass(frozen=True)
class Result:
    """One answer and how it came about. Scalars and ids only."""

    ids: tuple[int, ...]
    text: str | None
    method: str
    finish_reason: FinishReason
    rounds: tuple[RoundRecord, ...]
    timings: Timings
    prompt_tokens: int
    visual_tokens: int
    draft_visual_tokens: int | None  # what the draft kept of them
    fallback_reason: str | None = None  # why drafting stopped, if it did
    reused_tokens: int = 0  # of the prompt, whose keys an earlier turn had left
    warnings: tuple[str, ...] = ()
    peak_bytes: int | None = None
    """Memory taken at most, above what was held before (so without weights): what torch allocated
    on GPUs, else the growth of this process's resident size (``memory.Peak``); None unknown."""

    @property
    def tau(self) -> float | None:
        """Tokens emitted per target forward, the target's own token included (SpecVLM's tau)."""
        if not self.rounds:
            return None
        return sum(len(r.emitted) for r in self.rounds) / len(self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        drafted = sum(len(r.tokens) for r in self.rounds)
        return sum(len(r.accepted) for r in self.rounds) / drafted if drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        return len(self.ids) / self.timings.decode if self.timings.decode > 0 else None


State = Any
"""What a fold carries from round to round: bounded, and replayable from recorded rounds."""

Inputs = Mapping[str, Any]
"""What a Hugging Face processor returns."""

Growing = Generator[Tree, "Scores", Tree]
"""A draft under way: yields the tree it wants scored, is sent the scores, returns the tree."""


@runtime_checkable
class View(Protocol):
    """What the draft sees: (what the target revealed, its own whole prompt) -> its prompt."""

    @property
    def name(self) -> str: ...

    @property
    def keep(self) -> float | None:
        """The share of visual tokens kept; None leaves it to the view."""
        ...

    @property
    def attention(self) -> bool:
        """Whether the target's prefill must record attention mass for it."""
        ...

    @property
    def own_keys(self) -> bool:
        """Whether it picks among the target's own keys, so that only the target can draft on it."""
        ...

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt: ...


@runtime_checkable
class Shape(Protocol):
    """The shape of a draft: how it grows, and what it learns from past rounds."""

    def start(self) -> State: ...

    def grow(self, stem: Tree, state: State) -> Growing: ...

    def fold(self, state: State, round: Round) -> State: ...


@runtime_checkable
class Draft(Protocol):
    """Who drafts. One object serves every request of a batch; requests are counted from 0.

    What a draft learns from past rounds is a fold it defines and the schedule runs: the state is
    handed to ``propose`` and kept nowhere else, so that a recorded trace replays it.
    """

    def start(self) -> State: ...

    def fold(self, state: State, round: Round) -> State: ...

    def begin(self, inputs: Inputs) -> None:
        """May start work at once, before the target has looked at the video."""
        ...

    def look(self, prompts: Sequence[Prompt]) -> None:
        """What the target is about to read; may start work beside its prefill."""
        ...

    def guide(self, prefills: Sequence[Prefill]) -> float:
        """Brings what the target's prefill revealed; afterwards the draft can propose.

        Returns the seconds that its own prefill held the target up.
        """
        ...

    def turn(self, turns: Mapping[int, Turn], rules: Sequence[Sampling]) -> None:
        """The conversation goes on, over the caches there are, by this turn's rules."""
        ...

    def propose(self, stems: Mapping[int, Tree], states: Mapping[int, State]) -> dict[int, Tree]:
        """A tree for each request asked for, each extending the stem it is given."""
        ...

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """What was really emitted, per request."""
        ...

    def scores(self, request: int) -> Scores | None:
        """The draft's laws at the nodes of the last tree, for the fold."""
        ...

    def noted(self, request: int) -> tuple[float, ...]:
        """Numbers to keep with the round: what the draft decided by."""
        ...

    def visible(self, request: int) -> int | None:
        """How many visual tokens the draft reads."""
        ...

    def end(self, request: int) -> None:
        """This request's answer is complete, and no turn will follow."""
        ...

    def close(self) -> None:
        """The answers are complete, or nobody wants them any more."""
        ...


@runtime_checkable
class Ahead(Draft, Protocol):
    """A draft that works beside the target: it goes on drafting while its tokens are judged."""

    def ahead(self, flights: Mapping[int, Tree]) -> dict[int, Tree]:
        """Each flight with the one token drafted after it, as soon as that is there."""
        ...


@runtime_checkable
class Scoring(Protocol):
    """A session as schedules and drafts see it; the cache-free oracle is one too."""

    def score(self, trees: Mapping[int, Tree]) -> dict[int, Scores]: ...

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None: ...


Cut = Callable[[int, Sequence[int]], tuple[int, FinishReason | None]]
"""(request, new tokens) -> how many of them stand, and why the request ends if it does."""

Schedule = Callable[..., Iterator[Round]]


@dataclass(frozen=True)
class Options:
    """How long an answer may get and where it stops."""

    max_new_tokens: int = 256
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    criteria: tuple[Callable[..., Any], ...] = field(default=())
