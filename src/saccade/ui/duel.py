"""Decodes two answers to one question in turns in one process, each with a clock of its own.

The page of ``saccade ui`` shows it: plain decoding on one side, decoding with a draft on the other.
Both share the machine's cores, so whichever has worked least so far takes the next step. Both
therefore advance on screen at their true relative speeds. This is a demonstration and not a
measurement: each side finds the processor's caches full of the other's weights, and a draft in a
process of its own goes on while the other side works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.answering.coloured_text import IncrementalDecoder
from saccade.core.answer_text import TextDecoder
from saccade.core.result import Result, Round, RoundRecord, TokenKind, emitted_per_forward
from saccade.engine.generate import Stream

SNAPSHOT_SECONDS = 0.15  # About how long it takes from one snapshot to the next.
READING_PHASE = "reading the video"

OnPhase = Callable[[str], None]
"""Takes the name of a phase of the work as it begins, such as "prefill" or "decode"."""
Clock = Callable[[], float]
"""Returns the current time in seconds, counted from any moment."""
Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""

StartAnswer = Callable[[OnPhase], Stream]
"""Starts an answer. The given function is called as each phase begins, and may raise an exception
to end the answer."""


class StopRequested(Exception):
    """A person pressed stop."""


@dataclass(frozen=True)
class Piece:
    """Some text of an answer, and whether its token was accepted, recovered or a bonus token."""

    text: str
    kind: TokenKind


@dataclass(frozen=True)
class Column:
    """The state of one answer.

    ``seconds`` counts this answer's own work. ``seconds_before_decoding`` is the part of it before
    decoding began: vision, prefill, choosing what the draft sees, and the draft's own prefill.
    ``result`` is None until the answer is complete.
    """

    method: str
    phase: str = "waiting"
    pieces: tuple[Piece, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    seconds: float = 0.0
    seconds_before_decoding: float = 0.0
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def token_count(self) -> int:
        return sum(len(round.emitted) for round in self.rounds)

    @property
    def drafted_count(self) -> int:
        return sum(len(round.tokens) for round in self.rounds)

    @property
    def accepted_count(self) -> int:
        return sum(len(round.accepted) for round in self.rounds)

    @property
    def tau(self) -> float | None:
        """Tokens per target forward."""
        return emitted_per_forward(self.rounds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted_count / self.drafted_count if self.drafted_count else None

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds of decoding per token, without the first token, which comes from the prefill."""
        seconds = self.seconds - self.seconds_before_decoding
        if self.token_count <= 1 or seconds <= 0:
            return None
        return seconds / (self.token_count - 1)


@dataclass(frozen=True)
class Duel:
    """The state of both answers at one moment."""

    plain: Column
    drafted: Column
    stopped: bool = False

    @property
    def is_complete(self) -> bool:
        return self.plain.result is not None and self.drafted.result is not None

    @property
    def has_same_tokens(self) -> bool | None:
        """Whether both emitted the same tokens; None until both are complete."""
        if self.plain.result is None or self.drafted.result is None:
            return None
        return self.plain.result.ids == self.drafted.result.ids

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the plain answer the drafted one decodes per token; None until
        both are complete, and where one has no token after its first."""
        plain, drafted = self.plain.seconds_per_token, self.drafted.seconds_per_token
        return plain / drafted if self.is_complete and plain and drafted else None

    @property
    def end_to_end_speedup(self) -> float | None:
        """As :attr:`speedup`, but counting the first token and the seconds before decoding too."""
        if not self.is_complete or not self.drafted.seconds:
            return None
        if not self.plain.token_count or not self.drafted.token_count:
            return None
        plain = self.plain.seconds / self.plain.token_count
        return plain / (self.drafted.seconds / self.drafted.token_count)


@dataclass
class AnswerRunner:
    """Decodes one answer step by step, and keeps its state in ``column``."""

    column: Column
    start_answer: StartAnswer
    text_decoder: IncrementalDecoder
    should_stop: Callable[[], bool]
    clock: Clock
    stream: Stream | None = None
    _step_start: float = 0.0

    def start(self) -> None:
        """Starts the answer. This is not timed, because a method may measure the machine first."""
        self.stream = self.start_answer(self._set_phase)
        self.update(phase=READING_PHASE)

    def step(self) -> None:
        """Runs one round and adds its seconds; the first step includes vision and prefill. The step
        after the last round stores the result instead."""
        assert self.stream is not None
        self._step_start = self.clock()
        try:
            round: Round | None = next(self.stream)
        except StopIteration:
            round = None
        finally:  # A step that a person stops counts too.
            self.update(seconds=self._seconds_so_far())
        pieces, rounds = self.column.pieces, self.column.rounds
        if round is None:
            result = self.stream.results[0]
            # A character whose bytes were never completed may be left. It is shown with the colour
            # of the last token.
            last_text = self.text_decoder.rest()
            if last_text and rounds:
                pieces += (Piece(last_text, rounds[-1].kinds[-1]),)
            phase = "stopped by an error" if result.finish_reason == "error" else "done"
            self.update(result=result, phase=phase, pieces=pieces)
            return
        record = round.to_record()
        new_pieces = tuple(Piece(text, kind) for text, kind in self.text_decoder.pieces(record))
        self.update(rounds=(*rounds, record), pieces=pieces + new_pieces)

    def update(self, **changes: Any) -> None:
        self.column = replace(self.column, **changes)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()

    def _seconds_so_far(self) -> float:
        """Returns the seconds of this answer's own work, the step under way included."""
        return self.column.seconds + self.clock() - self._step_start

    def _set_phase(self, phase: str) -> None:
        """Takes the name of a phase of the answer as it begins. Raises StopRequested if a stop was
        requested.

        Only the phase "decode" changes the column, which then shows "answering" and keeps the
        seconds so far as those before decoding. All earlier phases, such as vision and prefill, are
        displayed as ``READING_PHASE``.
        """
        if self.should_stop():
            raise StopRequested
        if phase == "decode":
            self.update(phase="answering", seconds_before_decoding=self._seconds_so_far())


def run_duel(
    plain: tuple[str, StartAnswer],
    drafted: tuple[str, StartAnswer],
    decode: Decode,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    snapshot_seconds: float = SNAPSHOT_SECONDS,
    clock: Clock = time.perf_counter,
) -> Iterator[Duel]:
    """Decodes both answers and yields a snapshot about every ``snapshot_seconds``.

    The last snapshot has both results, unless ``should_stop`` returned True; it is marked
    ``stopped`` then. ``should_stop`` is called before every step and phase. Each side is a method's
    name and a function that starts its answer, and ``decode`` gives the text of both. Closing the
    iterator ends both answers. Exceptions of either answer are raised.
    """
    runners = [
        AnswerRunner(
            Column(name), start_answer, IncrementalDecoder(TextDecoder(decode)), should_stop, clock
        )
        for name, start_answer in (plain, drafted)
    ]

    def snapshot(stopped: bool = False) -> Duel:
        return Duel(runners[0].column, runners[1].column, stopped)

    try:
        for runner in runners:
            runner.update(phase="getting ready")
            yield snapshot()
            runner.start()
        last_snapshot = clock() - snapshot_seconds  # So the first snapshot is yielded at once.
        while running := [runner for runner in runners if runner.column.result is None]:
            if should_stop():
                raise StopRequested
            next_runner = min(running, key=lambda runner: runner.column.seconds)
            # The first step of an answer takes long, since it reads the video. So a snapshot with
            # the phase is yielded just before that step, even if the last one is recent.
            if clock() - last_snapshot >= snapshot_seconds or not next_runner.column.rounds:
                last_snapshot = clock()
                yield snapshot()
            next_runner.step()
        yield snapshot()
    except StopRequested:
        for runner in runners:
            if runner.column.result is None:  # An answer that has ended keeps its phase.
                runner.update(phase="stopped")
        yield snapshot(stopped=True)
    finally:
        for runner in runners:
            runner.close()
