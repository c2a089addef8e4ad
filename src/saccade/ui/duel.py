"""Two answers to one question in one process, each with a clock of its own.

They share the machine's cores, so they take turns: whichever has worked least so far takes the next
step, and so both advance on screen at the speeds they would show against each other alone. It is a
demonstration: each finds the processor's caches full of the other's weights, and a draft in a
process of its own goes on while the other side works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.bench.show import Typist
from saccade.core.result import Kind, Result, Round, RoundRecord, emitted_per_forward
from saccade.engine.generate import Stream

EVERY = 0.15  # seconds between two snapshots
READING = "reading the video"

Tell = Callable[[str], None]
Clock = Callable[[], float]
Decode = Callable[[Sequence[int]], str]


Begin = Callable[[Tell], Stream]
"""Starts an answer whose phases are told to the function given; an exception from it ends it."""


class Halted(Exception):
    """Somebody pressed stop."""


@dataclass(frozen=True)
class Piece:
    """Some of an answer's text, and how its token came."""

    text: str
    kind: Kind


@dataclass(frozen=True)
class Column:
    """One answer so far."""

    method: str
    phase: str = "waiting"
    pieces: tuple[Piece, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    seconds: float = 0.0  # of its own work
    before: float = 0.0  # of these, what came before decoding: vision, prefill, guidance
    result: Result | None = None  # once it is complete

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return sum(len(round.emitted) for round in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(len(round.tokens) for round in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(len(round.accepted) for round in self.rounds)

    @property
    def tau(self) -> float | None:
        """Tokens per target forward."""
        return emitted_per_forward(self.rounds)

    @property
    def rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def per_token(self) -> float | None:
        """Seconds of decoding a token. The first comes of the prefill, as ``compare`` counts."""
        seconds = self.seconds - self.before
        return seconds / (self.tokens - 1) if self.tokens > 1 and seconds > 0 else None


@dataclass(frozen=True)
class Duel:
    """Both answers at one moment."""

    plain: Column
    drafted: Column
    halted: bool = False

    @property
    def over(self) -> bool:
        return self.plain.result is not None and self.drafted.result is not None

    @property
    def same(self) -> bool | None:
        """Whether both emitted the same tokens; None until both are complete."""
        if self.plain.result is None or self.drafted.result is None:
            return None
        return self.plain.result.ids == self.drafted.result.ids

    @property
    def speedup(self) -> float | None:
        """Of decoding, a token; None until both are complete."""
        plain, drafted = self.plain.per_token, self.drafted.per_token
        return plain / drafted if self.over and plain and drafted else None

    @property
    def speedup_whole(self) -> float | None:
        """From the question to the last token, a token; None until both are complete."""
        if not (self.over and self.plain.tokens and self.drafted.tokens and self.drafted.seconds):
            return None
        plain = self.plain.seconds / self.plain.tokens
        return plain / (self.drafted.seconds / self.drafted.tokens)


@dataclass
class Entrant:
    """One side at work: a stream, and what has come of it."""

    side: Column
    begin: Begin
    typist: Typist
    halted: Callable[[], bool]
    clock: Clock
    stream: Stream | None = None
    _began: float = 0.0

    def start(self) -> None:
        """Settles what there is to settle; what a method measures of this machine is not timed."""
        self.stream = self.begin(self._tell)
        self.change(phase=READING)

    def step(self) -> None:
        """One round, its seconds added to this side's; the first brings all before it, too."""
        assert self.stream is not None
        self._began = self.clock()
        try:
            round: Round | None = next(self.stream)
        except StopIteration:
            round = None
        self.change(seconds=self._seconds())
        pieces, rounds = self.side.pieces, self.side.rounds
        if round is None:
            result = self.stream.results[0]
            if (rest := self.typist.rest()) and rounds:  # half a character
                pieces += (Piece(rest, rounds[-1].kinds[-1]),)
            phase = "stopped by an error" if result.finish_reason == "error" else "done"
            self.change(result=result, phase=phase, pieces=pieces)
            return
        record = round.scalars()
        typed = tuple(Piece(text, kind) for text, kind in self.typist.pieces(record))
        self.change(rounds=(*rounds, record), pieces=pieces + typed)

    def change(self, **what: Any) -> None:
        self.side = replace(self.side, **what)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def _seconds(self) -> float:
        """Of its own work, what it is at included."""
        return self.side.seconds + self.clock() - self._began

    def _tell(self, phase: str) -> None:
        if self.halted():
            raise Halted
        if phase == "decode":
            self.change(phase="answering", before=self._seconds())


def duel(
    plain: tuple[str, Begin],
    drafted: tuple[str, Begin],
    decode: Decode,
    *,
    halted: Callable[[], bool] = lambda: False,
    every: float = EVERY,
    clock: Clock = time.perf_counter,
) -> Iterator[Duel]:
    """Both answers as they come, a snapshot every so often; the last has both results.

    Each side is a method's name and how to begin its answer. ``halted`` is asked before every step
    and phase. Closing the iterator ends both answers; what they raise comes through.
    """
    both = [
        Entrant(Column(name), begin, Typist(decode), halted, clock)
        for name, begin in (plain, drafted)
    ]

    def snapshot(stopped: bool = False) -> Duel:
        return Duel(both[0].side, both[1].side, stopped)

    try:
        for each in both:
            each.change(phase="getting ready")
            yield snapshot()
            each.start()
        shown = clock() - every
        while running := [each for each in both if each.side.result is None]:
            if halted():
                raise Halted
            turn = min(running, key=lambda each: each.side.seconds)
            if clock() - shown >= every or not turn.side.rounds:
                shown = clock()
                yield snapshot()
            turn.step()
        yield snapshot()
    except Halted:
        for each in both:
            each.change(phase="stopped" if each.side.result is None else "done")
        yield snapshot(stopped=True)
    finally:
        for each in both:
            each.close()
