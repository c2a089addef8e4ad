"""The HTTP side: routes, keys, sizes, streams, and who is told what went wrong."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from saccade.core.errors import OptionError, SaccadeError, VideoInputError
from saccade.core.result import Result
from saccade.engine.request import Request as EngineRequest
from saccade.inputs.media.guard import Stop
from saccade.serve.answer import Likely, Writer, about, logprobs, speculation, usage
from saccade.serve.desk import Busy, Desk, Gone, Late, Piece, Ticket, Told
from saccade.serve.metrics import Metrics
from saccade.serve.reading import Reader
from saccade.serve.threads import Threads
from saccade.serve.wire import ChatRequest, Completion, FailureBody, Trouble, trouble

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL = 0.1  # seconds between looks at whether a client is still there
GRACE = 1.0  # seconds in which the desk itself says that time is up
LINGER = 2.0  # seconds in which the rest of a body that is too long is read and forgotten
TOGETHER = 4  # bodies of full size that may be arriving at once
READERS = 32  # threads that read media and words; a client that goes may leave one for a while
GONE = 499  # the status nobody reads
BROKEN = "the model's numbers broke down (NaN), so there is no answer"


@dataclass(frozen=True)
class Engine:
    """What answers, once it has been loaded."""

    desk: Desk
    reader: Reader
    decode: Callable[[Sequence[int]], str]
    close: Callable[[], None] = lambda: None

    def stop(self) -> None:
        """Ends its processes and its thread; who still waits is told."""
        self.close()
        self.desk.stop()


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
    failure: str | None = None  # why there will never be an engine, as clients are told
    cause: Exception | None = None  # and as whoever runs the server is
    metrics: Metrics = field(default_factory=Metrics)
    born: int = field(default_factory=lambda: int(time.time()))
    threads: Threads = field(default_factory=lambda: Threads(READERS))

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
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if service.engine is not None:
            await run_in_threadpool(service.engine.stop)

    from saccade import __version__

    made = FastAPI(
        title="Saccade",
        version=__version__,
        lifespan=life,
        openapi_url="/openapi.json" if docs else None,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
    )
    _describe(made, service)
    _tell_errors(made, service)
    _small_routes(made, service)
    _chat_route(made, service)
    return made


async def _load(service: Service, start: Callable[[], Engine]) -> None:
    def load() -> Engine:
        found = start()
        if service.draining:  # nobody waits any more
            found.stop()
        return found

    try:
        service.engine = await service.threads.run(load)
    except Exception as error:
        log.info("the models could not be loaded", exc_info=error)
        service.cause = error
        service.failure = "the models could not be loaded: the server's log says why"


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
        if trouble.status != GONE:  # nobody was refused
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


class Bodies:
    """Reads bodies up to a size, and up to ``TOGETHER`` of those at once: memory is everybody's."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    @asynccontextmanager
    async def read(self, request: Request, end: float) -> AsyncIterator[bytes]:
        """A body that is whole by ``end``, on the clock of time.monotonic. Raises Trouble, Busy."""
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > self.most):
            await _ignored(request, self.most)
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(max(0.0, end - time.monotonic())):
                async for piece in request.stream():
                    size, self.held = size + len(piece), self.held + len(piece)
                    if size > self.most:
                        pieces.clear()
                        await _ignored(request, self.most)
                        raise self._too_large()
                    if self.held > TOGETHER * self.most:
                        raise Busy(1)
                    pieces.append(piece)
            yield b"".join(pieces)
        except TimeoutError:
            said = "the request took too long to arrive: send a shorter video"
            raise Trouble(408, said) from None
        except ClientDisconnect:
            raise Trouble(GONE, "the client has gone") from None
        finally:
            self.held -= size

    def _too_large(self) -> Trouble:
        return Trouble(413, f"the request is larger than {self.most} bytes: send a shorter video")


async def _ignored(request: Request, most: int) -> None:
    """Reads on a while without keeping anything: who is still sending does not hear an answer."""
    if "expect" in request.headers:  # asked first, and has sent nothing
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while most > 0:
                message = await request.receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


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
STATUSES = (400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)


def _chat_route(made: FastAPI, service: Service) -> None:
    bodies = Bodies(service.body)

    @made.post(
        "/v1/chat/completions",
        response_model=None,
        responses={
            200: {"model": Completion, "content": {"text/event-stream": {}}},
            **{status: {"model": FailureBody} for status in STATUSES},
        },
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
        _check_kind(request)
        engine = service.ready()
        try:
            async with bodies.read(request, came + service.seconds) as body:
                asked = parsed(body)
            _known(service, asked.model)
            engine.reader.check(asked)
            most = min(service.choices, engine.desk.rows + engine.desk.queue)
            if (asked.n or 1) > most:
                raise Trouble(400, f"n: this server gives at most {most} answers", "n")
            call = Call(service, engine, asked, came)
            with call.place():
                await call.begin(request.is_disconnected)
                if asked.stream:
                    return call.stream()
                return JSONResponse(await call.whole(request.is_disconnected))
        except (SaccadeError, Busy, Late, Gone) as error:
            raise explained(error) from None


def _check_kind(request: Request) -> None:
    # a page of another site can make a browser send forms and plain text here, but no JSON
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Trouble(415, "the request must be JSON: send Content-Type: application/json")


def parsed(body: bytes) -> ChatRequest:
    """The request, or Trouble that names the field."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise trouble(error) from None


class Events(StreamingResponse):
    """Server-sent events of a call, which ends with them: also when they were never begun, and
    when the client does not read them in the call's time."""

    def __init__(self, call: Call) -> None:
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


class Call:
    """One request under way: its places at the desk, its tickets, its texts."""

    def __init__(self, service: Service, engine: Engine, asked: ChatRequest, came: float) -> None:
        self._service, self._engine, self._asked, self._came = service, engine, asked, came
        self.end = came + service.seconds
        self._places = asked.n or 1
        self._streams, self._left, self._failed = False, True, False
        self._tickets: list[Ticket] = []
        self._told: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
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
        except BaseException as error:
            hung_up = isinstance(error, Trouble) and error.status == GONE
            self._failed = isinstance(error, Exception) and not hung_up
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
        for ticket in self._tickets:
            if ticket.index not in self._ended:
                self._engine.desk.cancel(ticket)
        answered = len(self._results) == self._places
        if not answered and not self._failed:
            self._service.metrics.cancelled.inc()
        self._engine.desk.give(self._places, time.monotonic() - self._came if answered else None)

    async def begin(self, gone: Callable[[], Awaitable[bool]]) -> None:
        """Reads the media and words, and hands the tickets in."""
        reader, asked, stop = self._engine.reader, self._asked, Stop()

        def read() -> tuple[list[str], list[EngineRequest]]:
            seen = reader.look(asked, stop)
            return seen.warnings, reader.word(asked, seen)

        try:
            reading = self._service.threads.run(read)
            self._warnings, settled = await self._waited(reading, gone)
        finally:
            stop()
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._tickets = [
            Ticket(each, self.end, top, index, self._told) for index, each in enumerate(settled)
        ]
        self._asked = asked.model_copy(update={"messages": []})  # media are large
        self._engine.desk.submit(self._tickets)

    async def _waited(self, work: Coroutine[Any, Any, T], gone: Callable[[], Awaitable[bool]]) -> T:
        """What the work gives, unless the client goes or time is up before."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([task], timeout=POLL))[0]:
                if time.monotonic() > self.end + GRACE:
                    raise Late("the request took too long to read")
                if await gone():
                    raise Trouble(GONE, "the client has gone")
            return task.result()
        finally:
            task.cancel()

    async def _news(self) -> AsyncIterator[tuple[int, Piece | Result]]:
        """What is told of the answers, until all have results. Raises what ended one of them."""
        while len(self._results) < self._places:
            try:
                async with asyncio.timeout(max(0.0, self.end + GRACE - time.monotonic())):
                    index, told = await self._told.get()
            except TimeoutError:
                raise Late("the answer took too long") from None
            now = time.monotonic() - self._came
            if isinstance(told, Piece):
                self._first.setdefault(index, now)
                yield index, told
                continue
            self._ended.add(index)
            if isinstance(told, Exception):
                raise explained(told)
            if told.finish_reason == "error":
                raise Trouble(500, BROKEN)
            self._results[index] = told
            self._service.metrics.answered(told, self._first.get(index, now), now)
            yield index, told

    @property
    def _answers(self) -> list[Result]:
        return [self._results[index] for index in range(self._places)]

    # -- whole answers -------------------------------------------------------------------------

    async def whole(self, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
        """The answer in one piece. A client that hangs up ends it."""
        likely: list[list[Likely]] = [[] for _ in range(self._places)]

        async def follow() -> None:
            async for index, told in self._news():
                if isinstance(told, Piece):
                    likely[index] += told.likely

        await self._waited(follow(), gone)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": result.text, "refusal": None},
                "logprobs": self._logprobs(likely[index]),
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(self._answers)
        ]
        return self._frame("chat.completion", choices) | self._numbers()

    # -- streams -------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events, an error as the last one."""
        try:
            async for event in self._chunks():
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except Exception as error:
            said = explained(error)
            self._failed = True
            self._service.metrics.refused.labels(str(said.status)).inc()
            yield f"data: {json.dumps(said.body())}\n\n"
        yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Every answer's chunks as they come: text as it becomes certain."""
        stops = self._asked.stops
        writers = [Writer(self._engine.decode, stops) for _ in range(self._places)]
        held: list[list[Likely]] = [[] for _ in writers]
        for index in range(self._places):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for index, told in self._news():
            ended = isinstance(told, Result)
            if isinstance(told, Piece):
                text = writers[index].write(told.tokens)
                held[index] += told.likely
            else:
                text = writers[index].finish(told.text or "")
            if text or (ended and held[index]):
                yield self._chunk(index, {"content": text}, held[index])
                held[index] = []
            if isinstance(told, Result):
                yield self._chunk(index, {}, finish=told.finish_reason)
        options = self._asked.stream_options
        if options is not None and options.include_usage:
            yield self._frame("chat.completion.chunk", []) | self._numbers()

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

    def _numbers(self) -> dict[str, Any]:
        results = self._answers
        rounds = [round for result in results for round in result.rounds]
        return {
            "usage": usage(results),
            "metrics": {"speculative_decoding": speculation(rounds)},
            "saccade": about(results, self._warnings),
        }
