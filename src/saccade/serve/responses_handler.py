"""Answers one request of OpenAI's Responses API, as one response or as a stream of events.

``responses_schema`` converts the request to a chat completion, which the server answers as any
other. Its text is written here in the form of this API: as items (``formats.response_items``).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, ClassVar

from fastapi import Request

from saccade.serve.api_errors import ApiError
from saccade.serve.completion_handler import CompletionHandler
from saccade.serve.formats.chat_forms import ChatForm
from saccade.serve.formats.response_items import ItemStream
from saccade.serve.queue import NewTokens
from saccade.serve.request_bodies import RequestBody
from saccade.serve.response_fields import TokenLogprobs
from saccade.serve.responses_schema import ResponsesRequest
from saccade.serve.service import Engine, Service


class ResponsesHandler(CompletionHandler):
    """Runs the chat completion that is equivalent to a request, and answers with its text as the
    items of a response."""

    # Nothing such as "data: [DONE]" follows the last event, whose type says that it is the last.
    end_of_stream: ClassVar[str] = ""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        http: Request,
        request: ResponsesRequest,
        arrived_at: float,
        body: RequestBody,
    ) -> None:
        super().__init__(service, engine, http, request, arrived_at, body)
        self._responses_request = request  # ``_request`` is the equivalent chat completion.
        self._event_count = 0

    async def _complete(self) -> dict[str, Any]:
        """Returns the whole response, which is in the last event of the stream."""
        *_, last = [chunk async for chunk in self._chunks()]
        response: dict[str, Any] = last["response"]
        return response

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        stream = ItemStream(self._chat_form)
        (detokenizer,) = self._detokenizers()
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response_object("in_progress", [])}
        # There is one answer, so its number is not needed.
        async for _, event in self._answer_events():
            if isinstance(event, NewTokens):
                chunks = []
                for tokens, logprobs in _pieces(event):
                    piece = detokenizer.write(tokens)
                    entries = self._logprob_entries(logprobs)
                    chunks += stream.write(piece, entries, detokenizer.length)
            else:
                piece = detokenizer.finish(event.text or "")
                chunks = stream.write(piece) + stream.end(event)
            for chunk in chunks:
                yield chunk
        response = self._final_response(stream)
        yield {"type": f"response.{response['status']}", "response": response}

    # -- the JSON of responses -----------------------------------------------------------------

    def _event(self, chunk: dict[str, Any]) -> str:
        event = {**chunk, "sequence_number": self._event_count}
        self._event_count += 1
        return f"event: {chunk['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"

    def _failure(self, error: ApiError) -> dict[str, Any]:
        failure = error.body()["error"]
        fields = {"message": failure["message"], "param": failure["param"]}
        # Clients also look for the whole error under ``error``, as in every other stream.
        return {"type": "error", **fields, "code": str(failure["code"]), "error": failure}

    @property
    def _chat_form(self) -> ChatForm:
        assert isinstance(self._form, ChatForm)
        return self._form

    def _logprob_entries(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Returns log-probabilities in this API's form, in which bytes are always a list.

        The result is empty if the request asked for none.
        """
        field = self._logprobs(entries)
        if field is None:
            return []

        def with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
            return {**entry, "bytes": entry["bytes"] or []}

        return [
            {**with_bytes(token), "top_logprobs": [*map(with_bytes, token["top_logprobs"])]}
            for token in field["content"]
        ]

    def _final_response(self, stream: ItemStream) -> dict[str, Any]:
        """Returns the response with all of its items and its statistics."""
        statistics = self._statistics()
        usage = statistics["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        is_cut = self._results[0].finish_reason == "length"
        response = self._response_object("incomplete" if is_cut else "completed", stream.items)
        return {
            **response,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **statistics,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage["completion_tokens_details"],
                "total_tokens": usage["total_tokens"],
            },
        }

    def _response_object(self, status: str, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns a response with this status and these items. It repeats the fields of its
        request, as OpenAI's responses do."""
        request = self._responses_request
        fields = request.model_dump(by_alias=True, exclude_none=True)
        form = fields.get("text", {}).get("format", {"type": "text"})
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": request.model,
            "output": list(items),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": fields.get("reasoning", {}).get("effort"), "summary": None},
            "store": False,
            "background": False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_logprobs": request.top_logprobs or 0,
            "text": {"format": form},
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": [
                {"description": None, "parameters": None, "strict": False, **tool}
                for tool in fields.get("tools", [])
            ],
            "truncation": "disabled",
            "user": request.user,
            "usage": None,
        }


def _pieces(
    event: NewTokens,
) -> Iterable[tuple[Sequence[int], Sequence[TokenLogprobs]]]:
    """Returns a round's tokens, with their log-probabilities, as pieces to write one by one.

    Without log-probabilities all tokens are one piece. Otherwise each token is a piece, so that its
    log-probabilities are sent with its own text.
    """
    if not event.logprobs:
        return [(event.tokens, ())]
    return [
        ((token,), (logprobs,))
        for token, logprobs in zip(event.tokens, event.logprobs, strict=True)
    ]
