"""What came of drafting: a verdict, a round, and one answer with how it came about.

Frozen, and known to no model. ``p`` is the target's law, ``q`` the draft's, always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from saccade.core.sampling import Scores
from saccade.core.tree import Tree

UNFINISHED = "\ufffd"  # how the beginning of a character decodes

FinishReason = Literal["stop", "length", "error"]

Own = Literal["recovered", "bonus"]
"""How the target's own token came: after a refusal, or after all was accepted."""
Kind = Literal["accepted", "recovered", "bonus"]


@dataclass(frozen=True)
class Verdict:
    """What verification let through: accepted nodes, then at most one token of the target's own."""

    path: tuple[int, ...]  # accepted nodes, root first
    accepted: tuple[int, ...]  # their tokens
    own: int | None
    kind: Own | None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.accepted if self.own is None else (*self.accepted, self.own)


def spelt(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], start: int, end: int, over: bool
) -> str:
    """The text that ``ids[start:end]`` add to what came before them; what may be half a character
    waits for the rest, unless the answer is ``over``."""

    def shown(count: int) -> str:
        while (text := decode(ids[:count])).endswith(UNFINISHED) and count:
            count -= 1
        return text

    return (decode(ids[:end]) if over else shown(end))[len(shown(start)) :]


@dataclass(frozen=True)
class Load:
    """What a round shared its forwards with."""

    requests: int  # in the target's forward, itself included
    rows: int  # of that forward
    draft_seconds: float  # this request's part of drafting


@dataclass(frozen=True, repr=False)
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
    load: Load | None = None  # None: it was alone
    opening: bool = False  # the prefill's own token: nothing was drafted, and no forward run
    spell: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.verdict.tokens

    @property
    def text(self) -> str:
        """What this round adds to the answer; empty without a tokenizer. A character that several
        tokens spell comes with the last of them."""
        return "" if self.spell is None else self.spell()

    def __repr__(self) -> str:
        """In a line: its laws are as long as the vocabulary."""
        drafted, accepted = len(self.tree.tokens), len(self.verdict.accepted)
        text = "" if self.spell is None else f" {self.text!r}"
        return f"<Round of request {self.request}: {accepted} of {drafted} accepted{text}>"

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
            load=self.load,
            opening=self.opening,
        )


@dataclass(frozen=True)
class RoundRecord:
    """A round without its laws: what a result keeps and a trace file holds."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]
    own: int | None
    kind: Own | None
    draft_seconds: float
    verify_seconds: float
    note: tuple[float, ...] = ()
    load: Load | None = None
    opening: bool = False

    @property
    def emitted(self) -> tuple[int, ...]:
        return self.accepted if self.own is None else (*self.accepted, self.own)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """How each emitted token came, for colouring text as it appears."""
        kinds: list[Kind] = ["accepted"] * len(self.accepted)
        return tuple(kinds) if self.kind is None else (*kinds, self.kind)


def emitted_each(rounds: Sequence[RoundRecord]) -> float | None:
    """Tokens emitted a target forward; None where none ran."""
    counts = [len(round.emitted) for round in rounds if not round.opening]
    return fmean(counts) if counts else None


@dataclass(frozen=True)
class Timings:
    """Seconds on the wall clock; ``total`` is from inputs to the last token. What ``captures``
    counts is in ``total`` and in nothing else."""

    vision: float = 0.0  # the target's embedding of the prompt, its vision tower included
    prefill: float = 0.0  # target
    guide: float = 0.0  # choosing what the draft sees
    caption: float = 0.0  # captions for views that read one, and of these seconds those
    caption_hidden: float = 0.0  # beside the target's prefill: who waits, waits for the rest
    draft_prefill: float = 0.0  # its vision tower included; 0 where it ran beside the target
    beside_prefill: float = 0.0  # the draft's, beside the target: of its prompt, choosing included,
    beside_draft: float = 0.0  # and of its steps; who waits for it is in a round's draft_seconds
    decode: float = 0.0  # every round
    captures: float = 0.0  # CUDA graphs made between rounds, which later answers use; on GPUs only
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
    def forwards(self) -> tuple[RoundRecord, ...]:
        """The rounds in which the target ran: all but the opening."""
        return tuple(round for round in self.rounds if not round.opening)

    @property
    def tau(self) -> float | None:
        """Tokens emitted a target forward, the target's own included: TABED's block efficiency.
        The prefill's token is in neither count.

        The tau of SpecVLM and SAGE leaves the target's own out, as
        ``bench.measures.accepted_per_forward`` does.
        """
        return emitted_each(self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        drafted = sum(len(r.tokens) for r in self.rounds)
        return sum(len(r.accepted) for r in self.rounds) / drafted if drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of those that came after the prefill's own."""
        count = sum(len(round.emitted) for round in self.forwards)
        return count / self.timings.decode if self.timings.decode > 0 else None
