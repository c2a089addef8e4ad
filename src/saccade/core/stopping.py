"""Decides where an answer stops: at an end id, a stop string, a limit or a caller's criterion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.core.result import FinishReason

MAX_NEW_TOKENS = 256  # the limit where neither the caller nor the model's config sets one
# Stop strings are searched for in the last tokens: one for each byte of the longest, since a token
# has at least one byte, and this many more for special tokens that decode to nothing.
EXTRA_WINDOW_TOKENS = 8


@dataclass(frozen=True)
class StopConditions:
    """How long an answer may get and where it stops."""

    max_new_tokens: int = MAX_NEW_TOKENS
    eos: tuple[int, ...] = ()  # the ids that end an answer
    stop: tuple[str, ...] = ()  # the strings that end an answer
    # Functions of the caller that end an answer. They are called as transformers' stopping criteria
    # are, with the ids of prompt and answer, but without scores.
    criteria: tuple[Callable[..., Any], ...] = ()
    pad: int = 0  # the id that fills up the shorter answers of a batch


class Stops:
    """Collects the answers of a batch, and cuts each at the first end id, stop string, limit or
    criterion.

    ``conditions`` say what ends an answer, and ``contexts`` are the ids of each request's prompt.
    Stop strings are looked for in the text of the answer (``decode``). A special token may be part
    of a stop string, so they are also looked for in the text with special tokens
    (``decode_with_special``). If both functions are None, no stop string ends an answer.
    """

    def __init__(
        self,
        conditions: StopConditions,
        contexts: Sequence[torch.Tensor],
        decode: Callable[[Sequence[int]], str] | None,
        decode_with_special: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.conditions = conditions
        self.answers: list[list[int]] = [[] for _ in contexts]
        self.stopped_by: dict[int, str] = {}  # The stop string that ended a request's answer.
        self._contexts = contexts
        self._decoders = [
            decoder for decoder in (decode, decode_with_special) if decoder is not None
        ]
        longest = max((len(string.encode()) for string in conditions.stop), default=0)
        self._window = longest + EXTRA_WINDOW_TOKENS

    def append_until_stop(
        self, request: int, tokens: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        """Appends tokens to a request's answer up to where it stops.

        Returns how many of ``tokens`` were appended, and why the request ends, if it does.
        """
        answer = self.answers[request]
        for count, token in enumerate(tokens, start=1):
            answer.append(token)
            if token in self.conditions.eos or self._contains_stop_string(request):
                return count, "stop"
            if len(answer) >= self.conditions.max_new_tokens:
                return count, "length"
            if self.conditions.criteria and self._meets_criterion(request):
                return count, "stop"
        return len(tokens), None

    def _contains_stop_string(self, request: int) -> bool:
        """Returns whether the last tokens contain a stop string, and stores the one that begins
        first.

        The stop string need not be the end of the text, because the last token may go on after it.
        """
        if not self.conditions.stop:
            return False
        last = self.answers[request][-self._window :]
        for tail in (decode(last) for decode in self._decoders):
            # (place in the text, string) of each stop string that is there.
            matches = [
                (tail.find(string), string) for string in self.conditions.stop if string in tail
            ]
            if matches:
                _, first_string = min(matches)
                self.stopped_by[request] = first_string
                return True
        return False

    def _meets_criterion(self, request: int) -> bool:
        """Returns whether one of the caller's stopping criteria holds for prompt and answer."""
        context = self._contexts[request]
        new = torch.tensor(self.answers[request], device=context.device)
        ids = torch.cat([context, new])[None]
        return any(
            bool(torch.as_tensor(criterion(ids, None)).all())
            for criterion in self.conditions.criteria
        )
