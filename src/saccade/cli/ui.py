"""``saccade ui``: serves the web page."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from typing import Annotated

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import LoadOptions, ModelOptions, with_option_groups
from saccade.cli.terminal import Verbose, out, prepare
from saccade.core.errors import OptionError, how_to_install

HOST = "127.0.0.1"
PORT = 7860
MAX_READ_SECONDS = 60  # A video or image that takes longer to read is refused.
SHUTDOWN_SECONDS = 2  # How long the server waits for open connections when it shuts down.


@with_option_groups
def ui(
    models: ModelOptions,
    loading: LoadOptions,
    method: command_options.Method = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is everywhere.")] = HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = PORT,
    max_new_tokens: command_options.Tokens = 1024,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="The largest file to read.")] = 200,
    max_frames: Annotated[int, typer.Option(min=1, help="Frames taken of a video at most.")] = 64,
    max_prompt: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens of clip and question at most; with --chat, of texts and earlier turns. "
            "Not with --watch, which keeps a window of the video.",
        ),
    ] = 16_384,
    watch: Annotated[
        bool, typer.Option("--watch", help="The page that watches a video as if it were live.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="The page of a conversation that takes new media.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """A web page: drop a video and watch it answered plainly and with a draft, side by side.

    With --watch the video is played as if it were live, and questions are answered at any time.
    With --chat questions go on, and each may bring pictures, videos and texts.
    """
    if watch and chat:
        raise OptionError("--watch and --chat are two pages: name one of them")
    if importlib.util.find_spec("gradio") is None:
        raise OptionError(f"the page needs gradio: {how_to_install('ui')}")
    settings = run_setup.resolve_settings(models, loading, method)
    (recipe,) = run_setup.resolve_recipes([settings.method])
    from saccade.serve.listen_socket import open_listen_socket, socket_url

    with open_listen_socket(host, port) as listen_socket, tempfile.TemporaryDirectory() as uploads:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        prepare(settings.threads, verbose)
        import uvicorn

        from saccade.inputs.media import Limits
        from saccade.ui import page, page_run

        loaded = settings.load_models(quiet=False)
        pair = page_run.PageModels(loaded.target, loaded.draft, settings.make_captioner)
        limits = Limits(
            max_bytes=max_upload_mb << 20, max_frames=max_frames, max_seconds=MAX_READ_SECONDS
        )
        page_settings = page_run.PageSettings(
            method=settings.method,
            target=settings.target,
            draft=None if loaded.draft is None else loaded.draft.name,
            limits=limits,
            max_prompt=max_prompt,
            max_new_tokens=max_new_tokens,
        )
        if watch:
            from saccade.answering.chat_model import Model
            from saccade.ui import watch_page

            blocks = watch_page.build_watch_page(Model(pair, recipe), page_settings)
        elif chat:
            from saccade.answering.chat_model import Model
            from saccade.ui import chat_page

            blocks = chat_page.build_chat_page(Model(pair, recipe), page_settings)
        else:
            # The page calls the function when there is a question. The models are loaded already.
            blocks = page.build_page(lambda: pair, page_settings)
        app = page.make_app(blocks, page_settings)
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_SECONDS
        )
        out.print(f"{socket_url(listen_socket)}  (Ctrl-C ends it)", markup=False)
        uvicorn.Server(config).run(sockets=[listen_socket])
