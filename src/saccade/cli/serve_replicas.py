"""``saccade serve --replicas``: several servers on a Ray cluster, behind one port."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from saccade.cli.terminal import err
from saccade.core.errors import OptionError, how_to_install
from saccade.corpus.cluster import LOCAL, join_cluster
from saccade.serve.listen_socket import open_listen_socket

if TYPE_CHECKING:
    from saccade.serve.server_settings import ServerSettings

MISSING_RAY = f"--replicas needs Ray Serve: {how_to_install('ray', 'serve')}"


def run_replicas(
    settings: ServerSettings,
    host: str,
    port: int,
    drain_seconds: float,
    *,
    cluster: str,
    replicas: int,
    max_replicas: int | None,
) -> None:
    """Serves until a signal, then waits up to ``drain_seconds`` for requests under way.

    A second signal ends that wait by KeyboardInterrupt, and so does a signal before the replicas
    are ready. Raises OptionError where replicas cannot be started.
    """
    if port == 0:
        raise OptionError("--replicas needs a definite --port: 0 (any free one) is for one server")
    max_replicas = replicas if max_replicas is None else max_replicas
    if max_replicas < replicas:
        raise OptionError(f"--max-replicas {max_replicas} is less than --replicas {replicas}")
    if cluster == LOCAL:
        # A cluster of this machine alone will listen at this port of this machine. Opening it here
        # raises where it is in use, while Ray would retry for ever.
        open_listen_socket(host, port).close()
    # A cluster that is started here is said to have as many processors as the replicas ask for, so
    # that no replica waits for one.
    ray = join_cluster(cluster, MISSING_RAY, num_cpus=max_replicas * (settings.threads or 1))
    try:
        from saccade.serve.ray_replicas import deploy, deployment_options, shut_down
    except ImportError as error:  # Ray is installed without what Ray Serve needs.
        ray.shutdown()
        raise OptionError(MISSING_RAY) from error

    is_on_cpu = dict(settings.load).get("device") == "cpu"
    gpus = 0 if is_on_cpu else int(ray.cluster_resources().get("GPU", 0))
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    with ExitStack() as cleanup:
        cleanup.callback(ray.shutdown)
        is_ready, stop_requested = _handle_signals()
        # The brackets of an IPv6 address would be read as markup.
        err.print(f"{url} is starting {replicas} replicas on {cluster}", style="dim", markup=False)
        if 0 < gpus < replicas:
            err.print(f"the cluster has {gpus} GPUs: some replicas wait for one", style="yellow")
        cleanup.callback(shut_down)
        options = deployment_options(
            settings, replicas, max_replicas, drain_seconds, uses_gpus=gpus > 0
        )
        deploy(settings, options, host, port)
        is_ready.set()
        err.print(f"ready: {settings.model_names[0]}", style="dim", markup=False)
        stop_requested.wait()
        err.print("finishing running requests; send the signal again to stop at once", style="dim")


def _handle_signals() -> tuple[threading.Event, threading.Event]:
    """Installs handlers for SIGTERM and SIGINT, and returns two events.

    The caller sets ``is_ready`` when the replicas are ready. The first signal after that sets
    ``stop_requested``. Any other signal raises KeyboardInterrupt.
    """
    is_ready = threading.Event()
    stop_requested = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop_requested.is_set() or not is_ready.is_set():
            raise KeyboardInterrupt
        stop_requested.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return is_ready, stop_requested
