"""One chat completion under way, answered whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from saccade.core.errors import BROKEN
from saccade.core.result import Result
from saccade.inputs.media.guard import Stop
from saccade.serve.answer import Likely, Writer, about, logprobs, speculation, usage
from saccade.serve.bodies import Body
from saccade.serve.errors import HUNG_UP, ApiError, api_error
from saccade.serve.formats.replies import Form
from saccade.serve.queue import Event, NewTokens, QueuedRequest
from saccade.serve.service import Engine, Service
from saccade.serve.wire import CompletionRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL = 0.1  # seconds between looks at whether a client is still there
OTHERS = "its media, or others before them, were not read in time; try again later"
GRACE = 1.0  # seconds in which the queue itself says that time is up


class ClientCall:
    """One request over HTTP: its slots in the queue, what it queues there, its texts."""

    def __init__(
        self,
        service: Service,
        engine: Engine,
        http: Request,
        asked: CompletionRequest,
        came: float,
        body: Body,
    ) -> None:
        self._form: Form = engine.reader.form(asked)
        self._service, self._engine, self._http = service, engine, http
        self._asked, self._came, self._body = asked, came, body
        self.end = came + service.settings.seconds
        self._slots = asked.n or 1
        self._failed = False
        self._queued: list[QueuedRequest] = []
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._warnings: list[str] = []
        self._results: dict[int, Result] = {}
        self._first: dict[int, float] = {}
        self._id = f"{self._form.mark}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    # -- its life ------------------------------------------------------------------------------

    async def answer(self) -> Response:
        """The whole answer, or a stream that holds the slots until its end. Raises SaccadeError."""
        self._engine.queue.reserve(self._slots)
        try:
            await self._begin()
            if self._asked.stream:
                return EventStream(self)
            answer = await self._waited(self._whole())
        except BaseException as error:
            hung_up = isinstance(error, ApiError) and error.status == HUNG_UP
            self._failed = isinstance(error, Exception) and not hung_up
            self.leave()
            raise
        self.leave()
        return JSONResponse(answer)

    def leave(self) -> None:
        """Ends whatever has not ended, and releases the slots."""
        for request in self._queued:
            request.cancelled = True
        answered = len(self._results) == self._slots
        if not answered and not self._failed:
            self._service.metrics.cancelled.inc()
        took = time.monotonic() - self._came
        self._engine.queue.release(self._slots, took if answered else None)

    async def _begin(self) -> None:
        """Reads the media and words, and queues a request for each answer."""
        reader, asked, stop = self._engine.reader, self._asked, Stop(self.end)
        try:
            reading = self._service.threads.run(lambda: reader.read(asked, stop, self._body.apart))
            settled, self._warnings = await self._waited(reading)
        finally:
            stop()
        self._queued = [
            QueuedRequest(each, self.end, asked.top, index, self._events)
            for index, each in enumerate(settled)
        ]
        self._body.leave()
        self._engine.queue.submit(self._queued)

    async def _waited(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work gives, unless the client goes or time is up before."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=POLL))[0]:
                if time.monotonic() > self.end + GRACE:
                    raise ApiError(504, "the request took too long to read: " + OTHERS)
                if await self._http.is_disconnected():
                    raise ApiError(HUNG_UP, "the client has gone")
            return task.result()
        finally:
            task.cancel()

    async def _news(self) -> AsyncIterator[tuple[int, NewTokens | Result]]:
        """What is told of the answers, until all have results. Raises what ended one of them."""
        while len(self._results) < self._slots:
            try:
                async with asyncio.timeout(max(0.0, self.end + GRACE - time.monotonic())):
                    index, event = await self._events.get()
            except TimeoutError:
                raise ApiError(504, "the answer took too long") from None
            now = time.monotonic() - self._came
            if isinstance(event, NewTokens):
                self._first.setdefault(index, now)
                yield index, event
                continue
            if isinstance(event, Exception):
                raise api_error(event)
            if event.finish_reason == "error":
                raise ApiError(500, BROKEN)
            self._results[index] = event
            self._service.metrics.answered(event, self._first.get(index, now), now)
            yield index, event

    # -- whole answers -------------------------------------------------------------------------

    async def _whole(self) -> dict[str, Any]:
        likely: list[list[Likely]] = [[] for _ in range(self._slots)]
        async for index, event in self._news():
            if isinstance(event, NewTokens):
                likely[index] += event.likely
        choices = [
            {
                "index": index,
                "logprobs": self._logprobs(likely[index]),
                **self._form.choice(result),
            }
            for index, result in sorted(self._results.items())
        ]
        return self._frame(self._form.whole, choices) | self._numbers()

    # -- streams -------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events, an error as the last one."""
        try:
            async for chunk in self._chunks():
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except Exception as error:
            said = api_error(error)
            self._failed = True
            self._service.metrics.refused.labels(str(said.status)).inc()
            yield f"data: {json.dumps(said.body())}\n\n"
        yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Every answer's chunks as they come: text as it becomes certain."""
        writers = [Writer(self._engine.decode, self._asked.stops) for _ in range(self._slots)]
        pieces = [self._form.pieces() for _ in writers]
        held: list[list[Likely]] = [[] for _ in writers]
        for index, each in enumerate(pieces):
            for body in each.begin():
                yield self._chunk(index, body)
        async for index, event in self._news():
            own = pieces[index]
            if isinstance(event, NewTokens):
                bodies = own.write(writers[index].write(event.tokens))
                held[index] += event.likely
            else:
                bodies = own.write(writers[index].finish(event.text or ""))
                rest, last, reason = own.end(event)
                bodies += rest
            for body in bodies:
                yield self._chunk(index, body, held[index])
                held[index] = []
            if isinstance(event, Result):
                yield self._chunk(index, last, held[index], reason)
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            yield self._frame(self._form.piece, []) | self._numbers()

    # -- forms ---------------------------------------------------------------------------------

    def _chunk(
        self,
        index: int,
        body: dict[str, Any],
        likely: Sequence[Likely] = (),
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            **body,
            "logprobs": self._logprobs(likely) if likely else None,
            "finish_reason": finish,
        }
        return self._frame(self._form.piece, [choice])

    def _logprobs(self, likely: Sequence[Likely]) -> dict[str, Any] | None:
        return logprobs(likely, self._engine.decode) if self._asked.top is not None else None

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "choices": choices,
        }

    def _numbers(self) -> dict[str, Any]:
        results = [self._results[index] for index in range(self._slots)]
        rounds = [round for result in results for round in result.rounds]
        return {
            "usage": usage(results),
            "metrics": {"speculative_decoding": speculation(rounds)},
            "saccade": about(results, self._warnings),
        }


class EventStream(StreamingResponse):
    """Server-sent events of a call, which ends with them: also when they were never begun, and
    when the client does not read them in the call's time."""

    def __init__(self, call: ClientCall) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(call.events(), media_type="text/event-stream", headers=headers)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(max(0.0, self._call.end + 2 * GRACE - time.monotonic())):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.info("a client did not read its answer in time")
        finally:
            self._call.leave()
