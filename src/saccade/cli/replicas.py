"""``saccade serve --replicas``: the server several times over, on a Ray cluster."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from saccade.cli.terminal import err
from saccade.core.errors import OptionError, extra
from saccade.corpus.cluster import LOCAL, join_cluster
from saccade.serve.listening import listening

if TYPE_CHECKING:
    from saccade.serve.settings import Settings

MISSING = f"--replicas needs Ray Serve: {extra('ray', 'serve')}"


def run(
    settings: Settings,
    host: str,
    port: int,
    drain: float,
    *,
    address: str,
    replicas: int,
    most: int | None,
) -> None:
    """Serves until a signal; then lets what is under way end, up to ``drain`` seconds.

    A second signal ends at once. Raises OptionError where replicas cannot be started.
    """
    if port == 0:
        raise OptionError("--replicas needs a --port of its own: 0 is for one server")
    most = replicas if most is None else most
    if most < replicas:
        raise OptionError(f"--max-replicas {most} is less than --replicas {replicas}")
    if address == LOCAL:
        listening(host, port).close()  # where somebody listens already, Ray would try without end
    # on a cluster of our own, processors are counted as asked for: replicas never wait for one
    ray = join_cluster(address, MISSING, num_cpus=most * (settings.threads or 1))
    from saccade.serve.replicas import deploy, end, options  # imports Ray

    on_cpu = dict(settings.load).get("device") == "cpu"
    gpus = 0 if on_cpu else int(ray.cluster_resources().get("GPU", 0))
    url = f"http://{host}:{port}/v1"
    with ExitStack() as after:
        after.callback(ray.shutdown)
        ready, asked = _signals()
        err.print(f"{url} is starting {replicas} replicas on {address}", style="dim")
        if 0 < gpus < replicas:
            err.print(f"the cluster has {gpus} GPUs: some replicas wait for one", style="yellow")
        after.callback(end)
        deploy(settings, options(settings, replicas, most, drain, gpus > 0), host, port)
        ready.set()
        err.print(f"ready: {settings.names[0]}", style="dim")
        asked.wait()
        err.print("letting answers end; again to stop at once", style="dim")


def _signals() -> tuple[threading.Event, threading.Event]:
    """To be set when all is ready, and set by the first SIGTERM or SIGINT after that.

    One before that, or a second one, is a KeyboardInterrupt.
    """
    ready, asked = threading.Event(), threading.Event()

    def told(number: int, frame: Any) -> None:
        if asked.is_set() or not ready.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    return ready, asked
