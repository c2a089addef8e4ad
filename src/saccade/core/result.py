"""What decoding yields: the verdict on a draft, a round, and a whole answer with its measures.

All classes are frozen. ``p`` is always the target's law and ``q`` the draft's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from saccade.core.sampling import Scores
from saccade.core.tree import Tree

FinishReason = Literal["stop", "length", "error"]

TargetTokenKind = Literal["recovered", "bonus"]
"""Which token the target added: after a rejection, or after everything was accepted."""
TokenKind = Literal["accepted", "recovered", "bonus"]


@dataclass(frozen=True)
class Verdict:
    """What verification let through: accepted nodes, then at most one token of the target's own."""

    path: tuple[int, ...]
    """The accepted nodes of the tree, each after its parent. The root is not among them."""
    accepted: tuple[int, ...]
    """Their tokens."""
    own: int | None
    """The target's own token, if there is one."""
    kind: TargetTokenKind | None
    """"bonus" where everything was accepted, "recovered" after a rejection."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.accepted if self.own is None else (*self.accepted, self.own)


@dataclass(frozen=True)
class Load:
    """One request's part in a round whose forwards it shared with other requests."""

    requests: int  # in the target's forward, this one included
    rows: int  # of the target's forward, for all its requests
    draft_seconds: float  # this request's part of the seconds of drafting


@dataclass(frozen=True, repr=False)
class Round:
    """One round of one request: propose, verify, commit. ``p`` and ``q`` are kept only until the
    method has learnt from the round."""

    request: int  # its number in its batch
    tree: Tree  # what was drafted
    verdict: Verdict  # already cut at the first stop
    finish: FinishReason | None  # None where the answer goes on
    p: Scores
    q: Scores | None  # None where the drafter gives no laws
    draft_seconds: float  # of the whole round, other requests' drafts included
    verify_seconds: float  # of the target's forward, judging and committing, for all its requests
    note: tuple[float, ...] = ()
    """Numbers that the draft decided by: an ensemble's weights, or its confidence in each token."""
    load: Load | None = None  # None where the request was alone
    opening: bool = False
    """Whether it only emits the prefill's own token, without a draft or a further forward."""
    first_of_size: bool = False
    """Whether one of the round's forwards was the first of its size. Later forwards of that size
    are replayed as a CUDA graph, which is faster, so this round's seconds do not predict theirs."""
    decode_text: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    """Decodes ``text``, where there is a tokenizer. It is called only when the text is read."""

    @property
    def emitted(self) -> tuple[int, ...]:
        """The tokens that this round adds to the answer."""
        return self.verdict.tokens

    @property
    def has_typical_duration(self) -> bool:
        """Whether the duration of this round predicts that of later rounds.

        An opening has no duration of its own, and forwards that are the first of their size are
        slower than later ones.
        """
        return self.verify_seconds > 0 and not self.first_of_size

    @property
    def text(self) -> str:
        """The text that became certain with this round; empty without a tokenizer. A character of
        several tokens is emitted with the last of them. Text that may begin a stop string is held
        back until it can no longer be one."""
        return "" if self.decode_text is None else self.decode_text()

    def __repr__(self) -> str:
        """Returns one line without the laws, which are as long as the vocabulary."""
        drafted = len(self.tree.tokens)
        accepted = len(self.verdict.accepted)
        text = "" if self.decode_text is None else f" {self.text!r}"
        return f"<Round of request {self.request}: {accepted} of {drafted} accepted{text}>"

    def to_record(self) -> RoundRecord:
        """Returns the round without its laws."""
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
            match_length=self.tree.match_length,
            first_of_size=self.first_of_size,
        )


@dataclass(frozen=True)
class RoundRecord:
    """A round without its laws, as results and trace files have it."""

    tokens: tuple[int, ...]  # of the drafted tree, node by node
    parents: tuple[int, ...]  # each node's parent, or -1 (``tree.ROOT``)
    accepted: tuple[int, ...]  # tokens
    own: int | None  # the target's own token
    kind: TargetTokenKind | None
    # The fields that have no comment here are those of ``Round``.
    draft_seconds: float
    verify_seconds: float
    note: tuple[float, ...] = ()
    load: Load | None = None
    opening: bool = False
    match_length: int = 0  # of a draft that was copied from the text
    first_of_size: bool = False

    @property
    def emitted(self) -> tuple[int, ...]:
        return self.accepted if self.own is None else (*self.accepted, self.own)

    @property
    def kinds(self) -> tuple[TokenKind, ...]:
        """The kind of each emitted token, by which text is coloured as it appears."""
        kinds: list[TokenKind] = ["accepted"] * len(self.accepted)
        return tuple(kinds) if self.kind is None else (*kinds, self.kind)


def emitted_per_forward(rounds: Sequence[RoundRecord]) -> float | None:
    """Returns the mean number of tokens emitted by a target forward; None where none ran."""
    counts = [len(round.emitted) for round in rounds if not round.opening]
    return fmean(counts) if counts else None


@dataclass(frozen=True)
class Timings:
    """Seconds on the wall clock; ``total`` is from inputs to the last token. The seconds of
    ``captures`` are in ``total`` and in no other field."""

    vision: float = 0.0  # the target's embedding of the prompt, its vision tower included
    prefill: float = 0.0  # target
    guide: float = 0.0  # choosing what the draft sees
    caption: float = 0.0  # making captions for views that read them
    caption_hidden: float = 0.0  # the part of ``caption`` that ran beside the target's prefill
    draft_prefill: float = 0.0  # with its vision tower; 0 where it ran beside the target
    beside_prefill: float = 0.0  # the draft's prefill beside the target
    beside_guide: float = 0.0  # choosing what the draft sees, beside the target
    # the draft's steps beside the target, whether or not the target waited for them
    beside_draft: float = 0.0
    planning: float = 0.0  # deciding what to draft, learning included: a part of ``decode``
    decode: float = 0.0  # every round
    captures: float = 0.0  # capturing CUDA graphs between rounds, which serve later answers too
    first_token: float = 0.0  # from inputs to the first emitted token
    total: float = 0.0


@dataclass(frozen=True)
class Result:
    """One answer and how it came about, in plain values: it holds no tensors."""

    ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    method: str
    finish_reason: FinishReason
    rounds: tuple[RoundRecord, ...]
    timings: Timings
    prompt_tokens: int
    visual_tokens: int  # among the prompt's tokens
    draft_visual_tokens: int | None  # how many of them the draft reads; None if not reported
    fallback_reason: str | None = None  # why drafting stopped, if it did
    reused_tokens: int = 0  # tokens of the prompt that were in the cache already
    warnings: tuple[str, ...] = ()
    peak_bytes: int | None = None
    """The most memory in use during the answer, minus what was in use before it, such as the
    weights. On GPUs it is what torch allocated, elsewhere the process's resident size
    (``memory.PeakMemory``). None where it is unknown."""

    @property
    def forwards(self) -> tuple[RoundRecord, ...]:
        """The rounds in which the target ran: all except the opening."""
        return tuple(round for round in self.rounds if not round.opening)

    @property
    def tau(self) -> float | None:
        """Tokens emitted per target forward: accepted ones and the target's own. The token of the
        prefill is not counted.

        TABED's paper calls this block efficiency. The papers of SpecVLM and SAGE count accepted
        tokens only, and call that tau; ``bench.measures.accepted_per_forward`` computes it.
        """
        return emitted_per_forward(self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        drafted = sum(len(r.tokens) for r in self.rounds)
        return sum(len(r.accepted) for r in self.rounds) / drafted if drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding; the prefill's token is not counted."""
        count = sum(len(round.emitted) for round in self.forwards)
        return count / self.timings.decode if self.timings.decode > 0 else None
