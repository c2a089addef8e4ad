"""The HTTP side: routes, keys, and who is told what went wrong."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from saccade.core.errors import SaccadeError
from saccade.serve.bodies import Bodies, Body
from saccade.serve.call import ClientCall
from saccade.serve.errors import HUNG_UP, ApiError, FailureBody, api_error, invalid
from saccade.serve.formats.replies import Completion, TextCompletion
from saccade.serve.service import Engine, Service
from saccade.serve.wire import ChatRequest, CompletionRequest, TextRequest

log = logging.getLogger(__name__)

METRICS = "text/plain; version=0.0.4"
REFS = "#/components/schemas/{model}"
Statuses = dict[int | str, dict[str, Any]]


def app(service: Service, start: Callable[[], Engine] | None = None) -> FastAPI:
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

    async def failed(_: Request, error: Exception) -> JSONResponse:
        told = api_error(error)
        if told.status != HUNG_UP:  # nobody was refused
            service.metrics.refused.labels(str(told.status)).inc()
        return JSONResponse(told.body(), told.status, told.headers)

    from saccade import __version__

    made = FastAPI(
        title="Saccade",
        version=__version__,
        lifespan=life,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        exception_handlers=dict.fromkeys((SaccadeError, HTTPException, Exception), failed),
    )
    made.include_router(_about(service, __version__))
    made.include_router(_api(service))
    if service.settings.cors:
        made.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    # the requests' own forms, which FastAPI does not see: they are parsed here
    schemas = made.openapi()["components"]["schemas"]
    for kind in (ChatRequest, TextRequest):
        form = kind.model_json_schema(ref_template=REFS)
        form["properties"]["model"]["enum"] = list(service.settings.names)
        schemas |= form.pop("$defs", {}) | {kind.__name__: form}
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
        service.failure = error


def _failures(*statuses: int) -> Statuses:
    return {status: {"model": FailureBody} for status in statuses}


def _about(service: Service, release: str) -> APIRouter:
    """What whoever runs the server asks."""
    router = APIRouter()

    async def health() -> dict[str, str]:
        service.ready()
        return {"status": "ok"}

    router.get("/health", responses=_failures(503))(health)
    router.get("/ready", responses=_failures(503), operation_id="ready")(health)

    @router.get("/live")
    async def live() -> dict[str, str]:
        """The process answers; not yet, or no longer, with a model."""
        return {"status": "ok"}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": release}

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def metrics() -> Response:
        return Response(service.numbers(), media_type=METRICS)

    return router


def _api(service: Service) -> APIRouter:
    """What clients ask, with the key if there is one."""
    settings = service.settings
    bodies = Bodies(settings.body)

    async def check_key(request: Request) -> None:
        if settings.key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), settings.key.encode())
        if kind.lower() != "bearer" or not right:
            said = "a valid API key is needed: send Authorization: Bearer KEY"
            raise ApiError(401, said, headers={"WWW-Authenticate": "Bearer"})

    router = APIRouter(prefix="/v1", dependencies=[Depends(check_key)], responses=_failures(401))

    def card(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": service.born, "owned_by": "saccade"}

    def check_name(name: str) -> None:
        if name not in settings.names:
            said = f"there is no model {name[:200]!r} here: ask for {settings.names[0]!r}"
            raise ApiError(404, said, "model")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in settings.names]}

    @router.get("/models/{name:path}", responses=_failures(404))
    async def model(name: str) -> dict[str, Any]:
        check_name(name)
        return card(name)

    def complete(kind: type[CompletionRequest]) -> Callable[[Request], Awaitable[Response]]:
        async def completion(request: Request) -> Response:
            came = time.monotonic()
            _check_kind(request)
            engine = service.ready()
            with Body(bodies) as body:
                text = await body.read(request, came + settings.seconds)
                asked = parsed(kind, text, body.apart)
                check_name(asked.model)
                engine.reader.check(asked)
                queue = engine.queue
                most = min(settings.choices, queue.rows + queue.queue)
                if (asked.n or 1) > most:
                    raise ApiError(400, f"n: this server gives at most {most} answers", "n")
                return await ClientCall(service, engine, request, asked, came, body).answer()

        return completion

    for path, kind, answer in (
        ("/chat/completions", ChatRequest, Completion),
        ("/completions", TextRequest, TextCompletion),
    ):
        schema = {"$ref": REFS.format(model=kind.__name__)}
        content = {"application/json": {"schema": schema}}
        router.post(
            path,
            response_model=None,
            responses={
                200: {"model": answer, "content": {"text/event-stream": {}}},
                **_failures(400, 404, 408, 413, 415, 422, 429, 500, 503, 504),
            },
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )(complete(kind))

    return router


def _check_kind(request: Request) -> None:
    # a page of another site can make a browser send forms and plain text here, but no JSON
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the request must be JSON: send Content-Type: application/json")


def parsed(
    kind: type[CompletionRequest], text: bytes, apart: Mapping[str, object] | None = None
) -> CompletionRequest:
    """The request; ``apart`` are the media that were cut out of it. Raises ApiError that names the
    field."""
    try:
        asked = kind.model_validate_json(text)
    except ValidationError as error:
        raise invalid(error) from None
    apart = apart or {}
    if sorted(url for url in asked.addresses if url in apart) != sorted(apart):
        raise ApiError(400, "a data: address stands where no media are read: leave it out")
    return asked
