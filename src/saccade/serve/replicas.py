"""The server several times over, behind one address: a Ray Serve application.

Each replica is a process with models of its own and the application of `app.py`; Ray's proxies pass
requests on to whoever has the fewest and begin again what died. Knows nothing of how one answers.
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
from saccade.serve.app import METRICS, app
from saccade.serve.errors import ApiError
from saccade.serve.service import build
from saccade.serve.settings import Settings

NAME = "saccade"  # of the application and of its deployment
HEADER = b"x-saccade-replica"
POLL = 0.1  # seconds between looks at whether the models are there
PATIENCE = 5.0  # seconds a replica has to tell its numbers
TRIES = 3  # times a replica may fail to start before the whole is given up


@serve.ingress()
class Replica:
    """One of several servers. Ray Serve calls all but `numbers`, which its fellows call."""

    def __init__(self, settings: Settings) -> None:
        self._service, self._start = build(settings)
        self._id = serve.get_replica_context().replica_id.unique_id

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Member(app(self._service, self._start), self._id, told)

    async def check_health(self) -> None:
        """Returns once there are models, so that nobody is sent here before. Raises if unready."""
        while self._service.engine is None and self._service.failure is None:
            await asyncio.sleep(POLL)
        try:
            self._service.ready()
        except ApiError as error:
            raise RuntimeError(str(self._service.failure or error.message)) from None

    def numbers(self) -> tuple[str, str]:
        """Which replica this is, and its metrics."""
        return self._id, self._service.numbers().decode()


class Member:
    """The application as one of several: it says which it is, and tells all their metrics."""

    def __init__(
        self, app: ASGIApp, name: str, told: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> None:
        self._app, self._name, self._told = app, name.encode(), told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (HEADER, self._name)]}
            await send(message)

        if scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/metrics"):
            text = merged(await self._told())
            answer = Response(text, media_type=METRICS)
            await answer(scope, receive, named)
            return
        await self._app(scope, receive, named)


async def told() -> dict[str, str]:
    """The metrics of every replica that tells them, by its id."""
    asked = serve.get_deployment_handle(NAME, NAME).broadcast("numbers")
    found = await asked.results_async(timeout_s=PATIENCE, return_exceptions=True)
    return dict(each for each in found if not isinstance(each, BaseException))


def merged(texts: Mapping[str, str]) -> bytes:
    """Several servers' metrics as one text, each sample with the label ``replica``."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for each in text_string_to_metric_families(text):
            family = families.setdefault(
                each.name, Metric(each.name, each.documentation, each.type)
            )
            family.samples += [
                sample._replace(labels={"replica": replica, **sample.labels})
                for sample in each.samples
            ]
    return generate_latest(_Collected(families.values()))


class _Collected:
    """Metrics as a registry gives them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def options(
    settings: Settings, replicas: int, most: int, drain: float, gpus: bool = False
) -> dict[str, Any]:
    """How Ray Serve is to run the replicas: ``replicas`` of them, up to ``most`` under load.

    A replica is given as many requests as it has places; as many again may wait in the proxy, and
    who comes after those is told 429. More replicas are started where each has more requests than
    rows to work on them.
    """
    places = settings.rows + settings.queue
    scaling: dict[str, Any] = {"num_replicas": replicas}
    if most > replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": replicas,
                "initial_replicas": replicas,
                "max_replicas": most,
                "target_ongoing_requests": settings.rows,
            }
        }
    return {
        **scaling,
        "name": NAME,
        "max_ongoing_requests": places,
        "max_queued_requests": places,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": drain,
        "max_constructor_retry_count": TRIES,
        "ray_actor_options": {"num_cpus": settings.threads or 1, "num_gpus": int(gpus)},
    }


def deploy(settings: Settings, how: dict[str, Any], host: str, port: int) -> None:
    """Starts replicas as `options` has them, and proxies; returns when they answer.

    This process belongs to the cluster. Every node needs this package and the checkpoints under
    the same paths. Raises OptionError where the replicas cannot be started.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(http_options={"host": host, "port": port})
    try:
        serve.run(serve.deployment(Replica, **how).bind(settings), name=NAME, route_prefix="/")
    except (RuntimeError, RayServeException) as error:
        raise OptionError(f"the replicas could not be started: {_why() or error}") from error


def end() -> None:
    """Lets what is under way end, for as long as `options` has it, and the replicas with it."""
    with suppress(RayServeException):  # it was never started
        serve.delete(NAME)


def _why() -> str:
    """What Ray Serve says of replicas that did not come up, its last line."""
    found = serve.status().applications.get(NAME)
    messages = [] if found is None else [each.message for each in found.deployments.values()]
    lines = [line.strip() for text in messages for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
