"""The HTTP side: routes, keys, sizes, streams, and who is told what went wrong."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.errors import OptionError, SaccadeError, VideoInputError
from saccade.serve.answer import Likely, Writer, about, logprobs, speculation, usage
from saccade.serve.desk import Busy, Desk, Gone, Late, Piece, Ticket, Told
from saccade.serve.metrics import Metrics
from saccade.serve.reading import Reader
from saccade.serve.wire import ChatRequest, FailureBody, Trouble, trouble
from saccade.types import Result

log = logging.getLogger(__name__)

POLL = 0.1  # seconds between looks at whether a client is still there
GRACE = 1.0  # seconds in which the desk itself says that time is up
GONE = 499  # the status nobody reads
BROKEN = "the model's numbers broke down (NaN), so there is no answer"


@dataclass(frozen=True)
class Engine:
    """What answers, once it has been loaded."""

    desk: Desk
    reader: Reader
    decode: Callable[[Sequence[int]], str]
    close: Callable[[], None] = lambda: None


@dataclass
class Service:
    """What a server is: its names and limits, and an engine as soon as there is one."""

    names: tuple[str, ...]  # of the model; the first is told
    key: str | None = None
    seconds: float = 600.0  # an answer may take
    choices: int = 8
    body: int = 256 << 20  # bytes of a request
    engine: Engine | None = None
    draining: bool = False
    failure: str | None = None  # why there will never be an engine
    metrics: Metrics = field(default_factory=Metrics)
    born: int = field(default_factory=lambda: int(time.time()))

    def ready(self) -> Engine:
        """The engine. Raises Trouble while there is none for newcomers."""
        if self.draining:
            raise Trouble(503, "the server is shutting down: ask another one")
        if self.engine is None:
            raise Trouble(503, self.failure or "the models are being loaded: try again soon")
        if not self.engine.desk.alive:
            raise Trouble(503, "the engine has stopped: the server must be started again")
        return self.engine

    @property
    def busy(self) -> bool:
        return self.engine is not None and self.engine.desk.places > 0


def app(
    service: Service, start: Callable[[], Engine] | None = None, *, docs: bool = True
) -> FastAPI:
    """The ASGI application. ``start`` loads the engine in a thread while /health says 503."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        loading = None if start is None else asyncio.create_task(_load(service, start))
        yield
        service.draining = True
        if loading is not None:
            await asyncio.gather(loading, return_exceptions=True)
        if service.engine is not None:
            await run_in_threadpool(service.engine.desk.stop)
            service.engine.close()

    from saccade import __version__

    made = FastAPI(
        title="Saccade",
        version=__version__,
        lifespan=life,
        openapi_url="/openapi.json" if docs else None,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    made.add_middleware(Bounded, most=service.body)
    _describe(made, service)
    _tell_errors(made, service)
    _small_routes(made, service)
    _chat_route(made, service)
    return made


async def _load(service: Service, start: Callable[[], Engine]) -> None:
    try:
        service.engine = await run_in_threadpool(start)
    except Exception as error:
        log.error("the models could not be loaded: %s", error)
        service.failure = f"the models could not be loaded: {error}"
        raise


def _describe(made: FastAPI, service: Service) -> None:
    """The request's own form, which FastAPI does not see: it is parsed here."""

    def described() -> dict[str, Any]:
        if made.openapi_schema is None:
            found = get_openapi(title=made.title, version=made.version, routes=made.routes)
            form = ChatRequest.model_json_schema(ref_template=REFS)
            form["properties"]["model"]["enum"] = list(service.names)
            schemas = found.setdefault("components", {}).setdefault("schemas", {})
            schemas |= form.pop("$defs") | {"Chat": form}
            made.openapi_schema = found
        return made.openapi_schema

    made.openapi = described  # type: ignore[method-assign]


# -- errors ------------------------------------------------------------------------------------


def _tell_errors(made: FastAPI, service: Service) -> None:
    def told(trouble: Trouble) -> JSONResponse:
        service.metrics.refused.labels(str(trouble.status)).inc()
        headers = {} if trouble.wait is None else {"Retry-After": str(trouble.wait)}
        if trouble.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(trouble.body(), trouble.status, headers)

    @made.exception_handler(Trouble)
    async def ours(_: Request, error: Trouble) -> JSONResponse:
        return told(error)

    @made.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return told(Trouble(400, "the request is not one this path takes"))

    @made.exception_handler(HTTPException)
    async def theirs(_: Request, error: HTTPException) -> JSONResponse:
        response = told(Trouble(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response

    @made.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        return told(Trouble(500, "something went wrong in the server"))


def explained(error: Exception) -> Trouble:
    """An error of ours as a client is told it; of any other only that there was one."""
    if isinstance(error, Trouble):
        return error
    if isinstance(error, VideoInputError):
        return Trouble(error.status, str(error), "messages")
    if isinstance(error, Busy):
        return Trouble(429, str(error), wait=error.seconds)
    if isinstance(error, Late):
        return Trouble(504, str(error))
    if isinstance(error, Gone):
        return Trouble(503, str(error))
    if isinstance(error, SaccadeError):
        return Trouble(400, str(error), "messages" if isinstance(error, OptionError) else None)
    log.error("a request failed", exc_info=error)
    return Trouble(500, "something went wrong in the server")


class Bounded:
    """Cuts off bodies that are too long, whatever length they announce."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.most:
            await self._refuse(scope, receive, send)
            return
        seen, over = 0, False

        async def counted() -> Message:
            nonlocal seen, over
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                over = True
                raise _TooLong
            return message

        try:
            await self.app(scope, counted, send)
        except _TooLong:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = Trouble(413, f"the request is larger than {self.most} bytes: send a shorter video")
        await JSONResponse(said.body(), 413, {"Connection": "close"})(scope, receive, send)


class _TooLong(BaseException):
    """Passes by handlers of errors: it is answered where it was raised."""


# -- the small routes --------------------------------------------------------------------------


def _small_routes(made: FastAPI, service: Service) -> None:
    from saccade import __version__

    refused: dict[int | str, dict[str, Any]] = {503: {"model": FailureBody}}

    async def health() -> dict[str, str]:
        service.ready()
        return {"status": "ok"}

    made.get("/health", responses=refused)(health)
    made.get("/ready", responses=refused, operation_id="ready")(health)

    @made.get("/live")
    async def live() -> dict[str, str]:
        """The process answers; not yet, or no longer, with a model."""
        return {"status": "ok"}

    @made.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @made.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(numbers(service), media_type="text/plain; version=0.0.4")

    locked: dict[int | str, dict[str, Any]] = {401: {"model": FailureBody}}

    @made.get("/v1/models", responses=locked)
    async def models(request: Request) -> dict[str, Any]:
        _check_key(service, request)
        return {"object": "list", "data": [_card(service, name) for name in service.names]}

    @made.get("/v1/models/{name:path}", responses={**locked, 404: {"model": FailureBody}})
    async def model(request: Request, name: str) -> dict[str, Any]:
        _check_key(service, request)
        return _card(service, _known(service, name))


def numbers(service: Service) -> bytes:
    """The server's metrics as they are now, in Prometheus' form."""
    desk = None if service.engine is None else service.engine.desk
    service.metrics.running.set(0 if desk is None else desk.running)
    service.metrics.waiting.set(0 if desk is None else desk.waiting)
    return service.metrics.text()


def _card(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.born, "owned_by": "saccade"}


def _known(service: Service, name: str) -> str:
    if name not in service.names:
        raise Trouble(
            404,
            f"there is no model {name[:200]!r} here: ask for {service.names[0]!r}",
            "model",
        )
    return name


def _check_key(service: Service, request: Request) -> None:
    if service.key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    right = hmac.compare_digest(given.strip().encode(), service.key.encode())
    if kind.lower() != "bearer" or not right:
        raise Trouble(401, "a valid API key is needed: send Authorization: Bearer KEY")


# -- chat completions --------------------------------------------------------------------------


REFS = "#/components/schemas/{model}"
STATUSES = (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)


def _chat_route(made: FastAPI, service: Service) -> None:
    @made.post(
        "/v1/chat/completions",
        response_model=None,
        responses={status: {"model": FailureBody} for status in STATUSES},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": REFS.format(model="Chat")}}},
            }
        },
    )
    async def chat(request: Request) -> Response:
        came = time.monotonic()
        _check_key(service, request)
        asked = parsed(await request.body())
        engine = service.ready()
        _known(service, asked.model)
        engine.reader.check(asked)
        if (asked.n or 1) > min(service.choices, engine.desk.rows + engine.desk.queue):
            raise Trouble(400, f"n: this server gives at most {service.choices} answers", "n")
        call = Call(service, engine, asked, came)
        try:
            with call.place():
                await call.begin(request.is_disconnected)
                if asked.stream:
                    return call.stream()
                return JSONResponse(await call.whole(request.is_disconnected))
        except (SaccadeError, Busy, Late, Gone) as error:
            raise explained(error) from None


def parsed(body: bytes) -> ChatRequest:
    """The request, or Trouble that names the field."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise trouble(error) from None


class Events(StreamingResponse):
    """Server-sent events of a call, which ends with them: also when they were never begun."""

    def __init__(self, call: Call) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(call.events(), media_type="text/event-stream", headers=headers)
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.leave()


class Call:
    """One request under way: its places at the desk, its tickets, its texts."""

    def __init__(self, service: Service, engine: Engine, asked: ChatRequest, came: float) -> None:
        self._service, self._engine, self._asked, self._came = service, engine, asked, came
        self._places = asked.n or 1
        self._streams, self._left, self._failed = False, True, False
        self._tickets: list[Ticket] = []
        self._warnings: list[str] = []
        self._ended: set[int] = set()
        self._results: dict[int, Result] = {}
        self._first: dict[int, float] = {}
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())

    # -- its life ------------------------------------------------------------------------------

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds places at the desk, as long as the answer is not a stream. Raises Busy."""
        self._engine.desk.take(self._places)
        self._left = False
        try:
            yield
        except BaseException:
            self.leave()
            raise
        if not self._streams:
            self.leave()

    def stream(self) -> Response:
        """The answer as it comes; the places are given back at its end."""
        self._streams = True
        return Events(self)

    def leave(self) -> None:
        """Ends whatever has not ended, and gives the places back, once."""
        if self._left:
            return
        self._left = True
        for index, ticket in enumerate(self._tickets):
            if index not in self._ended:
                self._engine.desk.cancel(ticket)
        answered = len(self._results) == self._places
        if not answered and not self._failed:
            self._service.metrics.cancelled.inc()
        self._engine.desk.give(self._places, time.monotonic() - self._came if answered else None)

    async def begin(self, gone: Callable[[], Awaitable[bool]]) -> None:
        """Reads the media and words, and hands the tickets in."""
        reader, asked = self._engine.reader, self._asked
        end = self._came + self._service.seconds
        seen = await self._waited(run_in_threadpool(reader.look, asked), gone)
        self._warnings = seen.warnings
        settled = await self._waited(run_in_threadpool(reader.choices, asked, seen), gone)
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._tickets = [Ticket(each, end, top) for each in settled]
        self._engine.desk.submit(self._tickets)

    async def _waited(self, work: Awaitable[Any], gone: Callable[[], Awaitable[bool]]) -> Any:
        """What the work gives, unless the client goes or time is up before."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=POLL))[0]:
                if time.monotonic() > self._came + self._service.seconds + GRACE:
                    raise Late("the request took too long to read")
                if await gone():
                    raise Trouble(GONE, "the client has gone")
            return task.result()
        except Exception as error:
            self._failed = not (isinstance(error, Trouble) and error.status == GONE)
            raise
        finally:
            task.cancel()

    # -- whole answers -------------------------------------------------------------------------

    async def whole(self, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The answer in one piece. A client that hangs up ends it."""
        likely: list[list[Likely]] = [[] for _ in self._tickets]

        async def follow(index: int) -> None:
            async for told in self._news(index):
                if isinstance(told, Piece):
                    likely[index] += told.likely

        following = asyncio.gather(*map(follow, range(len(self._tickets))))
        await self._waited(following, gone)
        results = [self._results[index] for index in range(len(self._tickets))]
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": self._logprobs(likely[index]),
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(results)
        ]
        return self._frame("chat.completion", choices) | self._numbers(results)

    async def _news(self, index: int) -> AsyncIterator[Told]:
        """What a ticket is told, up to its result. Raises what ended it otherwise."""
        ticket = self._tickets[index]
        while True:
            told = await ticket.told.get()
            now = time.monotonic() - self._came
            if isinstance(told, Exception):
                self._ended.add(index)
                raise explained(told)
            if isinstance(told, Piece):
                self._first.setdefault(index, now)
                yield told
                continue
            self._ended.add(index)
            if told.finish_reason == "error":
                raise Trouble(500, BROKEN)
            self._results[index] = told
            self._service.metrics.answered(told, self._first.get(index, now), now)
            yield told
            return

    # -- streams -------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events, an error as the last one."""
        try:
            async for event in self._chunks():
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except Trouble as error:
            self._failed = True
            self._service.metrics.refused.labels(str(error.status)).inc()
            yield f"data: {json.dumps(error.body())}\n\n"
        yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        for index in range(len(self._tickets)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        merged: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

        async def follow(index: int) -> None:
            try:
                async for event in self._written(index):
                    merged.put_nowait(event)
                merged.put_nowait(None)
            except Trouble as error:
                merged.put_nowait(error)

        following = [asyncio.create_task(follow(i)) for i in range(len(self._tickets))]
        try:
            left = len(following)
            while left:
                event = await merged.get()
                if isinstance(event, Exception):
                    raise event
                if event is None:
                    left -= 1
                else:
                    yield event
        finally:
            for task in following:
                task.cancel()
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            results = [self._results[index] for index in range(len(self._tickets))]
            yield self._frame("chat.completion.chunk", []) | self._numbers(results)

    async def _written(self, index: int) -> AsyncIterator[dict[str, Any]]:
        """One answer's chunks: text as it becomes certain."""
        writer = Writer(self._engine.decode, self._asked.stops)
        held: list[Likely] = []
        async for told in self._news(index):
            if isinstance(told, Piece):
                text = writer.write(told.tokens)
                held += told.likely
                if text:
                    yield self._chunk(index, {"content": text}, held)
                    held = []
            elif isinstance(told, Result):
                if (rest := writer.finish(told.text or "")) or held:
                    yield self._chunk(index, {"content": rest}, held)
                yield self._chunk(index, {}, finish=told.finish_reason)

    # -- forms ---------------------------------------------------------------------------------

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        likely: Sequence[Likely] = (),
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(likely) if likely else None,
            "finish_reason": finish,
        }
        return self._frame("chat.completion.chunk", [choice])

    def _logprobs(self, likely: Sequence[Likely]) -> dict[str, Any] | None:
        return logprobs(likely, self._engine.decode) if self._asked.logprobs else None

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "choices": choices,
        }

    def _numbers(self, results: Sequence[Result]) -> dict[str, Any]:
        rounds = [round for result in results for round in result.rounds]
        return {
            "usage": usage(results),
            "metrics": {"speculative_decoding": speculation(rounds)},
            "saccade": about(results, self._warnings),
        }
