"""The HTTP application: its routes, its API key and its error responses."""

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
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from saccade.core.errors import SaccadeError
from saccade.serve.api_errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    ErrorBody,
    to_api_error,
    validation_api_error,
)
from saccade.serve.completion_handler import CompletionHandler
from saccade.serve.formats.chat_forms import Completion, TextCompletion
from saccade.serve.request_bodies import BodyMemory, RequestBody
from saccade.serve.request_schema import ChatRequest, CompletionRequest, TextRequest
from saccade.serve.responses_handler import ResponsesHandler
from saccade.serve.responses_schema import ResponseObject, ResponsesRequest
from saccade.serve.service import Engine, Service

log = logging.getLogger(__name__)

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4"
SCHEMA_REF = "#/components/schemas/{model}"
# FastAPI's description of a route's responses, by HTTP status.
ResponsesByStatus = dict[int | str, dict[str, Any]]
AnyRequest = CompletionRequest | ResponsesRequest


def make_app(service: Service, start: Callable[[], Engine] | None = None) -> FastAPI:
    """Returns the ASGI application.

    ``start`` loads the models and returns the engine. It is called in a thread when the server
    starts, and until it returns /health answers 503. Without ``start`` the service must have its
    engine already.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = None if start is None else asyncio.create_task(_load(service, start))
        yield
        service.is_draining = True
        if loading is not None:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        if service.engine is not None:
            await run_in_threadpool(service.engine.stop)

    async def error_response(_: Request, error: Exception) -> JSONResponse:
        api_error = to_api_error(error)
        # A client that has hung up was not refused.
        if api_error.status != CLIENT_CLOSED_REQUEST:
            service.metrics.refused.labels(str(api_error.status)).inc()
        return JSONResponse(api_error.body(), api_error.status, api_error.headers)

    from saccade import __version__

    app = FastAPI(
        title="Saccade",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page of documentation loads scripts from another host.
        redoc_url=None,
        exception_handlers=dict.fromkeys((SaccadeError, HTTPException, Exception), error_response),
    )
    app.include_router(_operator_routes(service, __version__))
    app.include_router(_client_routes(service))
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's JavaScript client sends headers of its own.
        )
    # FastAPI does not see the requests' schemas, since the routes parse the bodies themselves.
    schemas = app.openapi()["components"]["schemas"]
    for request_type in (ChatRequest, TextRequest, ResponsesRequest):
        schema = request_type.model_json_schema(ref_template=SCHEMA_REF)
        schema["properties"]["model"]["enum"] = list(service.settings.model_names)
        schemas |= schema.pop("$defs", {}) | {request_type.__name__: schema}
    return app


async def _load(service: Service, start: Callable[[], Engine]) -> None:
    """Loads the models in a thread, and gives the service its engine, or the error as
    ``failure``."""

    def load() -> Engine:
        engine = start()
        if service.is_draining:  # The server was stopped while the models were being loaded.
            engine.stop()
        return engine

    try:
        service.engine = await service.reader_threads.run(load)
    except Exception as error:
        log.info("The models could not be loaded.", exc_info=error)
        service.failure = error


def _error_responses(*statuses: int) -> ResponsesByStatus:
    """Returns what FastAPI's schema is to say of these statuses: their body is an ``ErrorBody``."""
    return {status: {"model": ErrorBody} for status in statuses}


def _operator_routes(service: Service, release: str) -> APIRouter:
    """Returns the routes for whoever operates the server: health, version and metrics."""
    router = APIRouter()

    async def health() -> dict[str, str]:
        service.require_engine()
        return {"status": "ok"}

    router.get("/health", responses=_error_responses(503))(health)
    router.get("/ready", responses=_error_responses(503), operation_id="ready")(health)
    for path in ("/health", "/ready"):  # Some load balancers ask by HEAD.
        router.head(path, include_in_schema=False)(health)

    @router.head("/live", include_in_schema=False)
    @router.get("/live")
    async def live() -> dict[str, str]:
        """Answers as long as the process is alive, whether or not a model is loaded."""
        return {"status": "ok"}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": release}

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type=METRICS_MEDIA_TYPE)

    return router


def _client_routes(service: Service) -> APIRouter:
    """Returns the routes under /v1, which need the API key if there is one."""
    settings = service.settings
    body_memory = BodyMemory(settings.max_body_bytes)

    async def check_key(request: Request) -> None:
        if settings.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Starlette decodes headers as Latin-1, so encoding gives back the bytes that were sent.
        # Only the blanks of ASCII are removed. Others may be bytes of the key's letters.
        sent_key = key.strip(" \t").encode("latin-1")
        is_right = hmac.compare_digest(sent_key, settings.api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            message = "a valid API key is needed: send Authorization: Bearer KEY"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    router = APIRouter(
        prefix="/v1", dependencies=[Depends(check_key)], responses=_error_responses(401)
    )

    def model_card(name: str) -> dict[str, Any]:
        created = service.started_at
        return {"id": name, "object": "model", "created": created, "owned_by": "saccade"}

    def check_model_name(name: str) -> None:
        if name not in settings.model_names:
            served = settings.model_names[0]
            message = f"there is no model {name[:200]!r} here: ask for {served!r}"
            raise ApiError(404, message, "model")

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card(name) for name in settings.model_names]}

    @router.get("/models/{name:path}", responses=_error_responses(404))
    async def model(name: str) -> dict[str, Any]:
        check_model_name(name)
        return model_card(name)

    def completion_endpoint(
        request_type: type[AnyRequest],
        handler_type: type[CompletionHandler],
    ) -> Callable[[Request], Awaitable[Response]]:
        """Returns the function of a route that answers requests of this type.

        Errors in it name fields as the client calls them: requests of /responses are converted to
        chat requests, some of whose fields have other names.
        """

        async def answer(http: Request) -> Response:
            arrived_at = time.monotonic()
            _check_content_type(http)
            engine = service.require_engine()
            with RequestBody(body_memory) as body:
                text = await body.read(http, arrived_at + settings.timeout_seconds)
                request = parse_request(request_type, text, body.data_urls)
                check_model_name(request.model)
                completion = request.completion_request
                # More answers than the queue has slots could never be admitted.
                queue = engine.queue
                max_choices = min(settings.max_choices, queue.max_running + queue.max_waiting)
                if (completion.n or 1) > max_choices:
                    message = f"n: this server gives at most {max_choices} answers"
                    raise ApiError(400, message, "n")
                try:
                    engine.reader.check(completion)
                    engine.reader.log_ignored(request.ignored_fields)
                    handler = handler_type(service, engine, http, request, arrived_at, body)
                    return await handler.respond()
                except SaccadeError as error:
                    api_error = to_api_error(error)
                    raise api_error.with_field_names(request.client_name_by_field) from error

        return answer

    for path, request_type, response_type, handler_type in (
        ("/chat/completions", ChatRequest, Completion, CompletionHandler),
        ("/completions", TextRequest, TextCompletion, CompletionHandler),
        ("/responses", ResponsesRequest, ResponseObject, ResponsesHandler),
    ):
        schema = {"$ref": SCHEMA_REF.format(model=request_type.__name__)}
        content = {"application/json": {"schema": schema}}
        router.post(
            path,
            response_model=None,
            responses={
                200: {"model": response_type, "content": {"text/event-stream": {}}},
                **_error_responses(400, 404, 408, 413, 415, 422, 429, 500, 503, 504),
            },
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )(completion_endpoint(request_type, handler_type))

    return router


def _check_content_type(request: Request) -> None:
    # A browser lets a page of another site send forms and plain text here without a CORS preflight,
    # but JSON only after one. So nothing but JSON is accepted.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, "the request must be JSON: send Content-Type: application/json")


def _read_json(text: bytes) -> Any:
    """Returns the value of a JSON text, or None where the text is not valid JSON."""
    try:
        return from_json(text)
    except ValueError:
        return None


def parse_request(
    request_type: type[AnyRequest],
    text: bytes,
    data_urls: Mapping[str, object] | None = None,
) -> AnyRequest:
    """Parses a request's JSON. Raises ApiError, which names the field to mend where one is known.

    Long data: URLs are not in ``text``: ``RequestBody`` has replaced each by a placeholder such as
    "data:0". The keys of ``data_urls`` are these placeholders. They are exchanged for the data
    again where pictures and videos are read, and nowhere else. So each has to be the URL of exactly
    one picture or video of the request, and a request where this is not so is refused.
    """
    try:
        request = request_type.model_validate_json(text)
    except ValidationError as error:
        raise validation_api_error(error, _read_json(text)) from None
    try:
        media_urls = request.completion_request.media_urls
    except ValidationError as error:
        api_error = validation_api_error(error, body=None)
        raise api_error.with_field_names(request.client_name_by_field) from None
    data_urls = data_urls or {}
    used_placeholders = sorted(url for url in media_urls if url in data_urls)
    if used_placeholders != sorted(data_urls):
        raise ApiError(400, "a data: address stands where no media are read: leave it out")
    return request
