"""A conversation about the same videos: each turn reads only the new tokens, in both models."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.engine.generate import Stream, stream
from saccade.engine.request_batch import RequestBatch
from saccade.model.backbone import Backbone


class Conversation(AbstractContextManager["Conversation"]):
    """Questions and answers over caches of target and draft that stay from turn to turn.

    Every turn takes the processor's output for the whole conversation so far (the same videos, the
    earlier answers, the new question) and gives the answer of a fresh start. Cached tokens are not
    read again. A question that replaces an earlier one continues from where the texts differ, and
    other videos start afresh. The draft reads the visual tokens that its view chose in the first
    turn.

    The arguments are those of :func:`saccade.stream`. Close it, or use it in a ``with``, to free
    the caches.
    """

    def __init__(
        self,
        model: nn.Module | Backbone,
        *,
        draft: nn.Module | Backbone | None = None,
        **defaults: Any,
    ) -> None:
        self._model, self._draft, self._defaults = model, draft, defaults
        self._last: Stream | None = None

    def stream(self, inputs: Inputs, **settings: Any) -> Stream:
        """Yields the rounds of the next answer. Exhaust or close it before the next question."""
        if self._last is not None and not self._last.results and not self._last.closed:
            raise OptionError("the last answer is under way: exhaust its stream or close it")
        merged = {**self._defaults, **settings}
        self._last = stream(
            self._model, inputs, draft=self._draft, call=self._last_call, keep=True, **merged
        )
        return self._last

    @property
    def _last_call(self) -> RequestBatch | None:
        return None if self._last is None else self._last.call

    def run(self, inputs: Inputs, **settings: Any) -> Result:
        """Returns the next answer. One request at a time."""
        return self.stream(inputs, **settings).finish()[0]

    def close(self) -> None:
        """Frees the caches, and the draft's process where there is one."""
        if self._last_call is not None:
            self._last_call.close()
        self._last = None

    def __exit__(self, *exception: object) -> None:
        self.close()
