"""``saccade serve``: the OpenAI-compatible server."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import LoadOptions, ModelOptions, with_option_groups
from saccade.cli.terminal import Verbose, err, prepare
from saccade.core.errors import OptionError, how_to_install

if TYPE_CHECKING:
    from saccade.serve.service import Engine, Service

REQUIRED_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
MIB = 1 << 20


@with_option_groups
def serve(
    models: ModelOptions,
    loading: LoadOptions,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    method: command_options.Method = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests (repeatable).")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SACCADE_API_KEY", help="Key that every /v1 request must send."),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="A browser origin allowed by CORS, or * for all (repeatable)."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Answers decoded at the same time.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait beside them.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 600,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that SIGTERM waits for answers.")
    ] = 30,
    max_new_tokens: command_options.Tokens = 2048,
    max_choices: Annotated[int, typer.Option(min=1, help="Most answers to one request (n).")] = 8,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Number of servers to run on a Ray cluster, behind one port."),
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Most servers under load; needs --replicas.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="The cluster of --replicas: local, auto (this machine's) or host:port."),
    ] = None,
    fps: command_options.Fps = None,
    num_frames: command_options.NumFrames = None,
    media_root: Annotated[
        Path | None, typer.Option(help="A folder whose files file:// addresses may name.")
    ] = None,
    media_host: Annotated[
        list[str] | None, typer.Option(help="A host videos may be fetched from (repeatable).")
    ] = None,
    private_media_hosts: Annotated[
        bool,
        typer.Option(
            "--private-media-hosts", help="Those hosts may be on this machine or its network."
        ),
    ] = False,
    any_media_host: Annotated[
        bool,
        typer.Option("--any-media-host", help="Fetch from any public host, at its usual port."),
    ] = False,
    allow_media_options: Annotated[
        bool, typer.Option("--allow-media-options", help="Let requests choose their frames.")
    ] = False,
    max_frames: Annotated[int, typer.Option(min=1, help="Most frames of one video.")] = 768,
    max_media_mb: Annotated[int, typer.Option(min=1, help="Most MiB of one video or image.")] = 512,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Most MiB of one request.")] = 256,
    prefix_cache: Annotated[
        str, typer.Option(help="Media and prompts kept for later requests: a size, 0 for none.")
    ] = "2GiB",
    exact: command_options.Exact = False,
    verbose: Verbose = False,
) -> None:
    """Answer over HTTP, as OpenAI's chat completions (needs the extra `serve`)."""
    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise OptionError(f"saccade serve needs {', '.join(missing)}: {how_to_install('serve')}")
    if replicas is None and (ray is not None or max_replicas is not None):
        raise OptionError(
            "--ray and --max-replicas only apply to several servers: give --replicas too"
        )
    run_settings = run_setup.resolve_settings(models, loading, method)
    run_setup.warn_about_training(run_settings.target)
    prepare(run_settings.threads, verbose)
    from saccade.inputs.media import FrameSampling, Limits
    from saccade.inputs.media.fetch import Sources
    from saccade.serve.server_settings import MediaSettings, ServerSettings
    from saccade.serve.service import build_service, resolve_recipe

    if media_root is not None and not media_root.is_dir():
        raise OptionError(f"--media-root {media_root} is not a folder")
    if private_media_hosts and not media_host:
        raise OptionError("--private-media-hosts is about hosts named by --media-host: name them")
    if api_key is not None:
        api_key = api_key.strip()  # A key may end in a line break, which no header can contain.
    if api_key == "":
        raise OptionError("the API key is empty: give one, or leave --api-key and its variable out")
    settings = ServerSettings(
        **vars(run_settings),
        model_names=tuple(served_name or [Path(run_settings.target).name]),
        media=MediaSettings(
            Sources(
                root=media_root,
                hosts=tuple(media_host or ()),
                any_host=any_media_host,
                allows_private_hosts=private_media_hosts,
                max_bytes=max_media_mb * MIB,
            ),
            Limits(max_bytes=max_media_mb * MIB, max_frames=max_frames, root=media_root),
            FrameSampling(fps, num_frames),
            clients_may_choose_frames=allow_media_options,
        ),
        api_key=api_key,
        cors_origins=tuple(cors or ()),
        max_running=rows,
        max_waiting=queue,
        timeout_seconds=timeout,
        max_choices=max_choices,
        max_answer_tokens=max_new_tokens,
        max_body_bytes=max_body_mb * MIB,
        prefix_cache_bytes=_parse_size(prefix_cache),
        exact=exact,
    )
    if replicas is not None:
        from saccade.cli.serve_replicas import run_replicas

        resolve_recipe(settings)  # So that an unknown method is refused before replicas start.
        run_replicas(
            settings,
            host,
            port,
            drain,
            cluster=ray or "local",
            replicas=replicas,
            max_replicas=max_replicas,
        )
        return
    service, start = build_service(settings)
    run_server(service, start, host, port, drain)


def run_server(
    service: Service,
    start: Callable[[], Engine],
    host: str,
    port: int,
    drain_seconds: float,
) -> None:
    """Serves until a signal, then waits up to ``drain_seconds`` for requests under way.

    A second signal ends the process at once. Raises the error that kept the models from being
    loaded, and OptionError where it cannot listen on the address.
    """
    import uvicorn

    from saccade.serve.listen_socket import HeaderTimeoutProtocol, open_listen_socket, socket_url
    from saccade.serve.routes import make_app

    listen_socket = open_listen_socket(host, port)

    class Server(uvicorn.Server):
        drain_deadline = 0.0  # By time.monotonic(). The first signal sets it.

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.is_draining:
                os._exit(128 + sig)  # Child processes notice that this one has ended, and end too.
            service.is_draining = True
            self.drain_deadline = time.monotonic() + drain_seconds

        async def on_tick(self, counter: int) -> bool:
            if service.is_draining and not self.should_exit:
                self.check_drained()
            self.should_exit |= service.failure is not None
            return await super().on_tick(counter)

        def check_drained(self) -> None:
            """Ends the main loop when no request is left, or when the drain time has passed.

            In the second case the requests that are left get an error first.
            """
            is_late = time.monotonic() > self.drain_deadline
            if is_late and service.engine is not None:
                service.engine.queue.close()
            self.should_exit = is_late or not service.is_busy

    def start_and_announce() -> Engine:
        engine = start()
        err.print(f"ready: {service.settings.model_names[0]}", style="dim", markup=False)
        return engine

    config = uvicorn.Config(
        make_app(service, start_and_announce),
        http=HeaderTimeoutProtocol,
        log_level="error",  # Below this, uvicorn logs every client that sends invalid HTTP.
        timeout_graceful_shutdown=5,  # Seconds that connections get to close after the main loop.
        server_header=False,
    )
    notice = f"{socket_url(listen_socket)}/v1 is loading its models"
    err.print(notice, style="dim", markup=False, soft_wrap=True)
    with listen_socket:
        Server(config).run([listen_socket])
    if service.failure is not None:
        raise service.failure


def _parse_size(size: str) -> int:
    """Returns the bytes of a size such as 2GiB, 500MB or 1000. Raises OptionError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i?)b?|b)?", size.strip().lower())
    count = math.inf
    if match is not None:
        number, prefix, binary = match.groups()
        base = 1024 if binary else 1000
        power = " kmgt".index(prefix or " ")  # 0 without a prefix, 1 for k, 2 for m and so on.
        count = float(number) * base**power
    if math.isinf(count):  # The number may have hundreds of digits.
        raise OptionError(f"--prefix-cache {size[:40]} is no size: write 2GiB, 500MB or 0")
    return int(count)
