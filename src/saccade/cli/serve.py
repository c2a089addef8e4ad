"""``saccade serve``: the OpenAI-compatible server."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import loading, options
from saccade.cli.options import LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Verbose, err, prepare
from saccade.core.errors import OptionError, how_to_install

if TYPE_CHECKING:
    from saccade.serve.service import Engine, Service

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
MIB = 1 << 20


@grouped
def serve(
    models: ModelOptions,
    how: LoadOptions,
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free one.")] = 8000,
    method: options.Method = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model (repeatable).")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SACCADE_API_KEY", help="Asked of every /v1 request.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="An origin whose pages may ask, or * for all (repeatable)."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Requests worked on at once.")] = 8,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait beside them.")] = 32,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds an answer may take.")] = 600,
    drain: Annotated[float, typer.Option(min=0, help="Seconds SIGTERM waits for answers.")] = 30,
    max_new_tokens: options.Tokens = 2048,
    max_choices: Annotated[int, typer.Option(min=1, help="The largest n.")] = 8,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="So many servers on a Ray cluster, behind one port.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="With --replicas: under load, up to so many.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="The cluster of --replicas: local, auto (this machine's) or host:port."),
    ] = None,
    fps: options.Fps = None,
    num_frames: options.NumFrames = None,
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
        bool, typer.Option("--any-media-host", help="Fetch from any public host.")
    ] = False,
    allow_media_options: Annotated[
        bool, typer.Option("--allow-media-options", help="Let requests choose their frames.")
    ] = False,
    max_frames: Annotated[int, typer.Option(min=1, help="Frames of one video.")] = 768,
    max_media_mb: Annotated[int, typer.Option(min=1, help="Size of one video.")] = 512,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Size of one request.")] = 256,
    prefix_cache: Annotated[
        str, typer.Option(help="Media and prompts kept for later requests: a size, 0 for none.")
    ] = "2GiB",
    exact: options.Exact = False,
    verbose: Verbose = False,
) -> None:
    """Answer over HTTP, as OpenAI's chat completions (needs the extra `serve`)."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise OptionError(f"saccade serve needs {', '.join(missing)}: {how_to_install('serve')}")
    if replicas is None and (ray is not None or max_replicas is not None):
        raise OptionError("--ray and --max-replicas are of several servers: give --replicas")
    known = loading.known(models, how, method)
    loading.warn_of_embedded(known.target)
    prepare(known.threads, verbose)
    from saccade.inputs.media import FrameSampling, Limits
    from saccade.inputs.media.fetch import Sources
    from saccade.serve.service import build, chosen
    from saccade.serve.settings import Media, Settings

    if media_root is not None and not media_root.is_dir():
        raise OptionError(f"--media-root {media_root} is not a folder")
    if private_media_hosts and not media_host:
        raise OptionError("--private-media-hosts is about hosts named by --media-host: name them")
    if api_key is not None and not api_key.strip():
        raise OptionError("the API key is empty: give one, or leave --api-key and its variable out")
    settings = Settings(
        **vars(known),
        names=tuple(served_name or [Path(known.target).name]),
        media=Media(
            Sources(
                root=media_root,
                hosts=tuple(media_host or ()),
                any_host=any_media_host,
                private=private_media_hosts,
                max_bytes=max_media_mb * MIB,
            ),
            Limits(max_bytes=max_media_mb * MIB, max_frames=max_frames, root=media_root),
            FrameSampling(fps, num_frames),
            options=allow_media_options,
        ),
        key=api_key,
        cors=tuple(cors or ()),
        rows=rows,
        queue=queue,
        seconds=timeout,
        choices=max_choices,
        most_tokens=max_new_tokens,
        body=max_body_mb * MIB,
        prefix_cache=_bytes(prefix_cache),
        exact=exact,
    )
    if replicas is not None:
        from saccade.cli.replicas import run as run_several

        chosen(settings)  # refused now, and not by every replica
        cluster = ray or "local"
        run_several(
            settings, host, port, drain, address=cluster, replicas=replicas, most=max_replicas
        )
        return
    service, start = build(settings)
    run(service, start, host, port, drain)


def run(
    service: Service,
    start: Callable[[], Engine],
    host: str,
    port: int,
    drain: float,
) -> None:
    """Serves until a signal; then lets what is under way end, up to ``drain`` seconds.

    A second signal ends at once. Raises what kept the models from being loaded, and OptionError
    where nothing can listen.
    """
    import uvicorn

    from saccade.serve.app import app
    from saccade.serve.listening import Impatient, listening

    line = listening(host, port)

    class Server(uvicorn.Server):
        until = 0.0

        def handle_exit(self, sig: int, frame: Any) -> None:
            if service.draining:
                os._exit(128 + sig)  # children notice that their parent has gone
            service.draining, self.until = True, time.monotonic() + drain

        async def on_tick(self, counter: int) -> bool:
            if service.draining and not self.should_exit:
                self.drained()
            self.should_exit |= service.failure is not None
            return await super().on_tick(counter)

        def drained(self) -> None:
            """Ends the main loop when nobody is served, or time is up and those who are know."""
            late = time.monotonic() > self.until
            if late and service.engine is not None:
                service.engine.queue.close()
            self.should_exit = late or not service.busy

    def told() -> Engine:
        found = start()
        err.print(f"ready: {service.settings.names[0]}", style="dim", markup=False)
        return found

    config = uvicorn.Config(
        app(service, told),
        http=Impatient,
        log_level="error",  # clients that send no HTTP are their own affair
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    err.print(f"{_address(line)}/v1 is loading its models", style="dim", soft_wrap=True)
    with line:
        Server(config).run([line])
    if service.failure is not None:
        raise service.failure


def _bytes(size: str) -> int:
    """2GiB, 500MB or a number of bytes. Raises OptionError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([kmgt])(i?)b?|b)?", size.strip().lower())
    if found is None:
        raise OptionError(f"--prefix-cache {size} is no size: write 2GiB, 500MB or 0")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(unit or " ")))


def _address(line: socket.socket) -> str:
    host, port = line.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
