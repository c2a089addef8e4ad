"""``saccade ui``."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from typing import Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.options import LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Verbose, out, prepare
from saccade.core.errors import OptionError, extra

HOST, PORT = "127.0.0.1", 7860
PATIENCE = 2  # seconds open pages get when it ends


@grouped
def ui(
    models: ModelOptions,
    how: LoadOptions,
    method: options.Method = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is everywhere.")] = HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = PORT,
    max_new_tokens: options.Tokens = 1024,
    max_upload_mb: Annotated[int, typer.Option(min=1, help="The largest file to read.")] = 200,
    max_frames: Annotated[int, typer.Option(min=1, help="Frames taken of a video at most.")] = 64,
    max_prompt: Annotated[
        int, typer.Option(min=1, help="Tokens of clip and question at most.")
    ] = 16_384,
    verbose: Verbose = False,
) -> None:
    """A web page: drop a video and watch it answered plainly and with a draft, side by side."""
    if importlib.util.find_spec("gradio") is None:
        raise OptionError(f"the page needs gradio: {extra('ui')}")
    known = loading.known(models, how, method)
    loading.recipes([known.method])
    from saccade.serve.listening import listening

    with listening(host, port) as door, tempfile.TemporaryDirectory() as uploads:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        prepare(known.threads, verbose)
        import uvicorn

        from saccade.inputs.media import Limits
        from saccade.ui import page, page_run

        loaded = known.models(quiet=False)
        pair = page_run.PageModels(loaded.target, loaded.draft, known.captions)
        limits = Limits(max_bytes=max_upload_mb << 20, max_frames=max_frames, max_seconds=60)
        settings = page_run.PageSettings(
            method=known.method,
            target=known.target,
            draft=None if loaded.draft is None else loaded.draft.name,
            limits=limits,
            max_prompt=max_prompt,
            max_new_tokens=max_new_tokens,
        )
        app = page.make_app(page.build_page(lambda: pair, settings), settings)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=PATIENCE)
        out.print(f"http://{host}:{door.getsockname()[1]}  (Ctrl-C ends it)", markup=False)
        uvicorn.Server(config).run(sockets=[door])
