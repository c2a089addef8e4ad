"""Several servers behind one address: a Ray Serve application.

Each replica is a process with models of its own and the HTTP application of `routes.py`, which
answers requests as it does in a single server. Ray Serve shares the requests out among the
replicas, and restarts a replica that died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.core.errors import OptionError
from saccade.serve.api_errors import ApiError
from saccade.serve.routes import METRICS_MEDIA_TYPE, make_app
from saccade.serve.server_settings import ServerSettings
from saccade.serve.service import build_service

APP_NAME = "saccade"  # The name of the application and of its deployment.
REPLICA_HEADER = b"x-saccade-replica"
LOADING_POLL_SECONDS = 0.1  # The time between two checks of whether the models are loaded.
METRICS_TIMEOUT_SECONDS = 5.0  # How long a replica has to return its metrics.
MAX_START_ATTEMPTS = 3  # How many times a replica may fail to start before Ray Serve gives up.


@serve.ingress()
class Replica:
    """One of several servers. Ray Serve calls its methods, and other replicas call `metrics`."""

    def __init__(self, settings: ServerSettings) -> None:
        # ``_load_engine`` loads the models and returns the engine. It is called when the
        # application starts.
        self._service, self._load_engine = build_service(settings)
        self._id = serve.get_replica_context().replica_id.unique_id

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application that Ray Serve runs in this replica."""
        return ReplicaApp(make_app(self._service, self._load_engine), self._id, collect_metrics)

    async def check_health(self) -> None:
        """Returns once the models are loaded, so that no request is sent here before.

        Raises RuntimeError where they cannot be loaded or the engine has stopped.
        """
        while self._service.engine is None and self._service.failure is None:
            await asyncio.sleep(LOADING_POLL_SECONDS)
        try:
            self._service.require_engine()
        except ApiError as error:
            raise RuntimeError(str(self._service.failure or error.message)) from None

    def metrics(self) -> tuple[str, str]:
        """Returns this replica's id and its metrics."""
        return self._id, self._service.metrics_text().decode()


class ReplicaApp:
    """A replica's application, whose responses name the replica in a header.

    GET /metrics returns the metrics of all replicas, which ``collect`` returns by replica id.
    """

    def __init__(
        self, app: ASGIApp, name: str, collect: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> None:
        self._app = app
        self._name = name.encode()
        self._collect = collect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_name(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {
                    **message,
                    "headers": [*message["headers"], (REPLICA_HEADER, self._name)],
                }
            await send(message)

        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/metrics"):
            text = merge_metrics(await self._collect())
            response = Response(text, media_type=METRICS_MEDIA_TYPE)
            await response(scope, receive, send_with_name)
            return
        await self._app(scope, receive, send_with_name)


async def collect_metrics() -> dict[str, str]:
    """Returns the metrics of every replica that answers in time, by its id."""
    responses = serve.get_deployment_handle(APP_NAME, APP_NAME).broadcast("metrics")
    results = await responses.results_async(
        timeout_s=METRICS_TIMEOUT_SECONDS, return_exceptions=True
    )
    return dict(result for result in results if not isinstance(result, BaseException))


def merge_metrics(texts: Mapping[str, str]) -> bytes:
    """Returns the metrics of several servers as one text; each sample gets a label ``replica``."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for parsed in text_string_to_metric_families(text):
            family = families.setdefault(
                parsed.name, Metric(parsed.name, parsed.documentation, parsed.type)
            )
            family.samples += [
                sample._replace(labels={"replica": replica, **sample.labels})
                for sample in parsed.samples
            ]
    return generate_latest(_FamilyRegistry(families.values()))


class _FamilyRegistry:
    """Families of metrics in the form that ``generate_latest`` takes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def deployment_options(
    settings: ServerSettings,
    replicas: int,
    max_replicas: int,
    drain_seconds: float,
    uses_gpus: bool = False,
) -> dict[str, Any]:
    """Returns Ray Serve's options for a deployment of ``replicas`` replicas.

    A replica has a slot for each request that it may run or let wait, and gets as many requests as
    it has slots. As many again may wait in the proxy, which refuses further ones with 429. Under
    load the deployment grows to at most ``max_replicas``: another replica is started where the
    replicas have more requests each, on average, than one can run at once. ``drain_seconds`` is how
    long a replica that is stopped may finish its requests. With ``uses_gpus`` each replica has one
    GPU.
    """
    slots = settings.max_running + settings.max_waiting
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas > replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas,
                "initial_replicas": replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": settings.max_running,
            }
        }
    return {
        **scaling,
        "name": APP_NAME,
        "max_ongoing_requests": slots,
        "max_queued_requests": slots,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": drain_seconds,
        "max_constructor_retry_count": MAX_START_ATTEMPTS,
        "ray_actor_options": {"num_cpus": settings.threads or 1, "num_gpus": int(uses_gpus)},
    }


def deploy(settings: ServerSettings, options: dict[str, Any], host: str, port: int) -> None:
    """Starts the replicas and the proxies, and returns when they answer.

    ``options`` are those of `deployment_options`. This process must have joined the cluster. Every
    node needs this package and the checkpoints under the same paths. Raises OptionError where the
    replicas cannot be started.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": host, "port": port})
    try:
        deployment = serve.deployment(Replica, **options)
        serve.run(deployment.bind(settings), name=APP_NAME, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise OptionError(
            f"the replicas could not be started: {_deployment_message() or error}"
        ) from error


def shut_down() -> None:
    """Ends the replicas, after requests under way have ended or the drain time has passed."""
    with suppress(RayServeException):  # Raised where the application was never started.
        serve.delete(APP_NAME)


def _deployment_message() -> str:
    """Returns the last line of Ray Serve's messages about replicas that did not start."""
    status = serve.status().applications.get(APP_NAME)
    deployments = [] if status is None else status.deployments.values()
    messages = [deployment.message for deployment in deployments]
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
