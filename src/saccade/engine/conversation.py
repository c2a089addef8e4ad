"""A conversation in which every turn may add media. Earlier media are not read again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

from torch import nn

from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.engine.generate import CallArguments, Stream, start_stream
from saccade.engine.request import Request, current_backbone
from saccade.engine.request_batch import RequestBatch
from saccade.model.backbone import Backbone


class Conversation(AbstractContextManager["Conversation"]):
    """Questions and answers over caches of target and draft that stay from turn to turn.

    Every turn takes the processor's output for the whole conversation so far (all videos and
    pictures, the earlier answers, the new question) and gives the answer that the whole prompt
    would get without the caches. The common beginning of the old and the new text is not read
    again, and a vision tower runs on new media alone. If an earlier question was replaced, the
    new text is read from the first difference on. If the first media differ, the language models
    read the whole prompt again.

    The draft keeps the tokens that its view chose from earlier media. From new media the view
    chooses by the attention of the question that comes with them. Where the target drafts for
    itself, the view chooses again among all media. A draft in a process of its own, or one that
    reads words in the place of pictures, reads a conversation with new media from its beginning;
    ``Result.warnings`` says so.

    The arguments are those of :func:`saccade.stream`; ``defaults`` hold for every turn. Close the
    conversation, or use it in a ``with``, to free the caches.
    """

    def __init__(
        self,
        model: nn.Module | Backbone,
        *,
        draft: nn.Module | Backbone | None = None,
        **defaults: Any,
    ) -> None:
        self._model, self._draft, self._defaults = model, draft, defaults
        self._last_stream: Stream | None = None

    def stream(self, inputs: Inputs, **settings: Any) -> Stream:
        """Returns a stream that yields the rounds of the next answer.

        Exhaust or close it before the next question. ``settings`` are those of this turn alone, and
        replace the conversation's own.
        """
        return self._begin(inputs, settings)

    def read_ahead(self, inputs: Inputs, **settings: Any) -> None:
        """Encodes and reads the media of a prompt before its question is known.

        ``inputs`` are those of the next turn with any question. The target reads them up to the end
        of the last medium, so that the turn itself has little left to read. The draft reads with
        the turn, because its view may need the question's attention. Raises OptionError where the
        prompt has no media.
        """
        target = current_backbone(self._model)
        if not Request.of(target, inputs).all_have_media(target):
            raise OptionError("there is nothing to read ahead: the prompt has no media")
        self._begin(inputs, settings).read_ahead()

    def _begin(
        self, inputs: Inputs, settings: dict[str, Any], several_requests_error: str | None = None
    ) -> Stream:
        """Returns a stream for the next turn, which continues from the last turn's caches.

        Raises OptionError while the last answer is under way, and for a setting that belongs to the
        whole conversation. If ``several_requests_error`` is given, it is the message of the
        OptionError that is raised for inputs of several requests.
        """
        last = self._last_stream
        is_under_way = last is not None and not last.results and not last.closed
        if is_under_way:
            raise OptionError("the last answer is under way: exhaust its stream or close it")
        merged = {**self._defaults, **settings}
        fixed = [name for name in ("draft", "batch", "keep") if name in merged]
        if fixed:
            raise OptionError(
                f"{fixed[0]}= cannot be given for a turn, because the conversation has its own; "
                "begin another with saccade.Conversation(target, draft=...)"
            )
        on_phase = merged.pop("on_phase", None)
        vision = merged.pop("vision", None)
        self._last_stream = start_stream(
            self._model,
            inputs,
            cast(CallArguments, {**merged, "draft": self._draft}),
            on_phase,
            self._last_batch,
            keep=True,  # The caches stay for the next turn.
            vision=vision,
            several_requests_error=several_requests_error,
        )
        return self._last_stream

    @property
    def _last_batch(self) -> RequestBatch | None:
        """The last turn's requests, with the caches from which the next turn continues."""
        return None if self._last_stream is None else self._last_stream.batch

    def run(self, inputs: Inputs, **settings: Any) -> Result:
        """Returns the next answer, to one request. Raises OptionError for ``inputs`` of several."""
        several_requests_error = (
            "a conversation's run answers one request; use its stream(...).finish() for several"
        )
        return self._begin(inputs, settings, several_requests_error).finish()[0]

    def close(self) -> None:
        """Frees the caches, and the draft's process where there is one."""
        if self._last_batch is not None:
            self._last_batch.close()
        self._last_stream = None

    def __exit__(self, *exception: object) -> None:
        self.close()
