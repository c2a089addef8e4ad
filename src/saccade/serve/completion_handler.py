"""Answers one request of OpenAI's completion or chat completion API, whole or as a stream.

The handler reads the request's media in a thread, queues one engine request for each answer, and
turns the engine's events into JSON. ``routes`` makes a handler for each HTTP request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from saccade.core.errors import INVALID_LOGITS_MESSAGE
from saccade.core.result import Result
from saccade.inputs.media.decoder_pool import StopSignal
from saccade.serve.api_errors import CLIENT_CLOSED_REQUEST, ApiError, to_api_error
from saccade.serve.detokenizer import StreamingDetokenizer
from saccade.serve.formats.chat_forms import ResponseForm, TextForm
from saccade.serve.queue import Event, NewTokens, QueuedRequest
from saccade.serve.request_bodies import RequestBody
from saccade.serve.request_schema import CompletionRequest
from saccade.serve.response_fields import (
    TokenLogprobs,
    logprobs_field,
    saccade_field,
    speculation_field,
    usage_field,
)
from saccade.serve.service import Engine, Service

log = logging.getLogger(__name__)
T = TypeVar("T")

DISCONNECT_POLL_SECONDS = 0.1  # How often it is checked whether a client is still connected.
MEDIA_TOO_LATE = "its media, or others before them, were not read in time; try again later"
# The handler waits this much longer than the deadline, so that the queue's own error normally comes
# first.
GRACE_SECONDS = 1.0


class CompletionHandler:
    """Answers one HTTP request: reserves slots, queues an engine request per answer, responds.

    A slot is a place for one answer in the queue, which the answer holds from its admission to its
    end. All slots of a request are reserved first, so that a full server refuses it before its
    media are read.

    A class for another API overrides `end_of_stream`, `_complete`, `_chunks`, `_event` and
    `_failure`.
    """

    end_of_stream: ClassVar[str] = "data: [DONE]\n\n"

    def __init__(
        self,
        service: Service,
        engine: Engine,
        http: Request,
        request: Any,
        arrived_at: float,
        body: RequestBody,
    ) -> None:
        self._form: ResponseForm = TextForm()  # Until the request has been read.
        self._service, self._engine, self._http = service, engine, http
        self._request: CompletionRequest = request.completion_request
        self._arrived_at, self._body = arrived_at, body
        self.deadline = arrived_at + service.settings.timeout_seconds
        self._slots = self._request.n or 1  # One for each answer.
        self._has_failed = False  # By an error; a client that disconnects is not one.
        self._queued: list[QueuedRequest] = []
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._warnings: list[str] = []
        self._results: dict[int, Result] = {}
        self._first_token_seconds: dict[int, float] = {}  # By answer; from the request's arrival.
        self._id = secrets.token_hex(12)
        self._created = int(time.time())

    # -- from arrival to release ---------------------------------------------------------------

    async def respond(self) -> Response:
        """Returns the response; a stream holds its slots until it ends. Raises SaccadeError."""
        self._engine.queue.reserve(self._slots)
        try:
            await self._submit()
            if self._request.stream:
                return EventStream(self)
            completion = await self._wait_for(self._complete())
        except BaseException as error:
            is_disconnect = isinstance(error, ApiError) and error.status == CLIENT_CLOSED_REQUEST
            self._has_failed = isinstance(error, Exception) and not is_disconnect
            self.close()
            raise
        self.close()
        return JSONResponse(completion)

    def close(self) -> None:
        """Cancels the answers that have not ended, and releases the slots."""
        for queued in self._queued:
            queued.is_cancelled = True
        is_complete = len(self._results) == self._slots
        if not is_complete and not self._has_failed:
            self._service.metrics.cancelled.inc()
        # The queue averages how long complete requests took. From this it estimates after how long
        # a client that it refuses should try again.
        seconds = time.monotonic() - self._arrived_at
        self._engine.queue.release(self._slots, seconds if is_complete else None)

    async def _submit(self) -> None:
        """Reads the media and the text, and queues an engine request for each answer."""
        reader = self._engine.reader
        request = self._request
        stop = StopSignal(self.deadline)
        try:
            reading = self._service.reader_threads.run(
                lambda: reader.read(request, stop, self._body.data_urls)
            )
            read_request = await self._wait_for(reading)
        finally:
            stop.set()
        self._form, self._warnings = read_request.form, read_request.warnings
        self._queued = [
            QueuedRequest(
                engine_request, self.deadline, request.top_logprobs_count, index, self._events
            )
            for index, engine_request in enumerate(read_request.answers)
        ]
        self._body.release()
        self._engine.queue.submit(self._queued)

    async def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of ``work``.

        Raises ApiError if the client disconnects, or the deadline and its grace period pass, before
        the work is done.
        """
        task = asyncio.create_task(work)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=DISCONNECT_POLL_SECONDS)
                if done:
                    return task.result()
                if time.monotonic() > self.deadline + GRACE_SECONDS:
                    raise ApiError(504, "the request took too long to read: " + MEDIA_TOO_LATE)
                if await self._http.is_disconnected():
                    raise ApiError(CLIENT_CLOSED_REQUEST, "the client has disconnected")
        finally:
            task.cancel()

    async def _answer_events(self) -> AsyncIterator[tuple[int, NewTokens | Result]]:
        """Yields (answer, event) as the engine sends events, until each answer has its result.

        Answers are numbered from 0. Raises the error that ended one of them.
        """
        while len(self._results) < self._slots:
            try:
                async with asyncio.timeout(
                    max(0.0, self.deadline + GRACE_SECONDS - time.monotonic())
                ):
                    index, event = await self._events.get()
            except TimeoutError:
                raise ApiError(504, "the answer took too long") from None
            seconds = time.monotonic() - self._arrived_at
            if isinstance(event, NewTokens):
                self._first_token_seconds.setdefault(index, seconds)
                yield index, event
                continue
            if isinstance(event, Exception):
                raise to_api_error(event)
            if event.finish_reason == "error":
                raise ApiError(500, INVALID_LOGITS_MESSAGE)
            self._results[index] = event
            first_token_seconds = self._first_token_seconds.get(index, seconds)
            self._service.metrics.count_answer(event, first_token_seconds, seconds)
            yield index, event

    # -- whole answers -------------------------------------------------------------------------

    async def _complete(self) -> dict[str, Any]:
        logprobs: list[list[TokenLogprobs]] = [[] for _ in range(self._slots)]
        async for index, event in self._answer_events():
            if isinstance(event, NewTokens):
                logprobs[index] += event.logprobs
        choices = [
            {
                "index": index,
                "logprobs": self._logprobs(logprobs[index]),
                **self._form.choice(result),
            }
            for index, result in sorted(self._results.items())
        ]
        return self._response(self._form.object_name, choices) | self._statistics()

    # -- streams -------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Yields server-sent events. An error is the last event, before ``end_of_stream``."""
        try:
            async for chunk in self._chunks():
                yield self._event(chunk)
        except Exception as error:
            api_error = to_api_error(error)
            self._has_failed = True
            self._service.metrics.refused.labels(str(api_error.status)).inc()
            yield self._event(self._failure(api_error))
        if self.end_of_stream:
            yield self.end_of_stream

    def _event(self, chunk: dict[str, Any]) -> str:
        """Returns a chunk as a server-sent event."""
        return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"

    def _failure(self, error: ApiError) -> dict[str, Any]:
        """Returns the chunk that tells of an error."""
        return error.body()

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yields every answer's chunks. Text is sent once later tokens cannot change it."""
        detokenizers = self._detokenizers()
        streams = [self._form.stream() for _ in detokenizers]
        # Log-probabilities wait here for the next chunk of their answer.
        pending: list[list[TokenLogprobs]] = [[] for _ in detokenizers]
        for index, stream in enumerate(streams):
            for body in stream.begin():
                yield self._chunk(index, body)
        async for index, event in self._answer_events():
            stream = streams[index]
            if isinstance(event, NewTokens):
                bodies = stream.write(detokenizers[index].write(event.tokens))
                pending[index] += event.logprobs
            else:
                # From the whole text of the answer, the detokenizer returns what it held back.
                rest = detokenizers[index].finish(event.text or "")
                bodies = stream.write(rest)
                # The stream may have held back bodies too. They are sent before the last body,
                # which goes with the finish reason.
                unsent_bodies, last_body, reason = stream.end(event)
                bodies += unsent_bodies
            for body in bodies:
                yield self._chunk(index, body, pending[index])
                pending[index] = []
            if isinstance(event, Result):
                yield self._chunk(index, last_body, pending[index], reason)
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield self._response(self._form.chunk_object_name, []) | self._statistics()

    def _detokenizers(self) -> list[StreamingDetokenizer]:
        """Returns what turns each answer's tokens into text."""
        requests = [queued.request for queued in self._queued]
        return [
            StreamingDetokenizer(
                each.decode or self._engine.decode, self._request.stops, each.decode_with_special
            )
            for each in requests
        ]

    # -- the JSON of responses -----------------------------------------------------------------

    def _chunk(
        self,
        index: int,
        body: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            **body,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        return self._response(self._form.chunk_object_name, [choice])

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._request.top_logprobs_count is None:
            return None
        return logprobs_field(entries, self._engine.decode)

    def _response(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self._form.id_prefix}-{self._id}",
            "object": object_name,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _reasoning_tokens(self) -> int:
        """Returns how many tokens of all answers are reasoning."""
        return sum(self._form.reasoning_tokens(result) for result in self._results.values())

    def _statistics(self) -> dict[str, Any]:
        results = [self._results[index] for index in range(self._slots)]
        rounds = [round for result in results for round in result.rounds]
        return {
            "usage": usage_field(results, self._reasoning_tokens()),
            "metrics": {"speculative_decoding": speculation_field(rounds)},
            "saccade": saccade_field(results, self._warnings),
        }


class EventStream(StreamingResponse):
    """Server-sent events, after which the handler is closed.

    The handler is closed even if no event was sent. If the client has not read the whole stream two
    grace periods after the request's deadline, the stream ends and the handler is closed.
    """

    def __init__(self, handler: CompletionHandler) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(handler.events(), media_type="text/event-stream", headers=headers)
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # The handler itself ends an answer that is late by one grace period. The second one
            # leaves time to send its error.
            latest = self._handler.deadline + 2 * GRACE_SECONDS
            async with asyncio.timeout(max(0.0, latest - time.monotonic())):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.info("A client did not read its answer in time.")
        finally:
            self._handler.close()
