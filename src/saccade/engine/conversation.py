"""A conversation about the same videos: each turn reads only what is new, in target and draft."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.engine.call import Call
from saccade.engine.generate import Stream, stream
from saccade.model.backbone import Backbone


class Conversation(AbstractContextManager["Conversation"]):
    """Questions and answers over caches that stay, in the target and in the draft.

    Every turn takes the processor's output for the whole conversation so far (the same videos, the
    earlier answers, the new question) and gives the answer of a fresh start. What the caches hold
    is not read again: a question that replaces an earlier one goes on from where the texts part,
    other videos start afresh. What the draft sees stays what was chosen in the first turn.

    Args are :func:`saccade.stream`'s. Close it, or use it in a ``with``, to free the caches.
    """

    def __init__(
        self,
        model: nn.Module | Backbone,
        *,
        draft: nn.Module | Backbone | None = None,
        **always: Any,
    ) -> None:
        self._model, self._draft, self._always = model, draft, always
        self._last: Stream | None = None

    def stream(self, inputs: Inputs, **settings: Any) -> Stream:
        """The rounds of the next answer; exhaust it, or close it, before asking again."""
        if self._last is not None and not self._last.results and not self._last.closed:
            raise OptionError("the last answer is under way: exhaust its stream or close it")
        merged = {**self._always, **settings}
        self._last = stream(
            self._model, inputs, draft=self._draft, call=self._kept, keep=True, **merged
        )
        return self._last

    @property
    def _kept(self) -> Call | None:
        return None if self._last is None else self._last.call

    def run(self, inputs: Inputs, **settings: Any) -> Result:
        """The next answer. One request at a time."""
        return self.stream(inputs, **settings).finish()[0]

    def close(self) -> None:
        """Frees the caches, and the draft's process where there is one."""
        if self._kept is not None:
            self._kept.close()
        self._last = None

    def __exit__(self, *exception: object) -> None:
        self.close()
