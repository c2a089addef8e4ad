"""``saccade chat``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.describe import answer, described, showing
from saccade.cli.terminal import Json, Quiet, Threads, Verbose, err, prepare

if TYPE_CHECKING:
    from saccade.core.prompt import Inputs
    from saccade.engine.conversation import Conversation
    from saccade.engine.generate import Stream


def chat(
    video: Annotated[str, typer.Argument(help="A video, GIF, image or folder of frames.")],
    target: options.Target = None,
    draft: options.Draft = None,
    method: options.Method = None,
    config: options.Config = None,
    captioner: options.Captioner = None,
    max_new_tokens: options.Tokens = 256,
    fps: options.Fps = None,
    num_frames: options.NumFrames = None,
    every_frame: options.Every = False,
    start: options.Start = None,
    end: options.End = None,
    seed: options.Seed = None,
    exact: options.Exact = False,
    threads: Threads = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    device_map: options.DeviceMap = None,
    quantize: options.Quantize = None,
    trust_remote_code: options.Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Ask one question after another about a video; only what is new is read.

    A question a line on standard input; an empty line or the end of input ends it.
    """
    known = loading.known(config, target, draft, method)
    prepare(threads or known.threads, verbose)
    from saccade.engine.conversation import Conversation

    (recipe,) = loading.recipes([known.method], exact)
    shown = showing(as_json, quiet)
    sampling = loading.sampling(fps, num_frames, every_frame, start, end)
    clip = loading.read(video, sampling, quiet=shown != "all", warn=not quiet)
    place = loading.Place(dtype, device, device_map, quantize, trust_remote_code)
    models = loading.models(known.target, known.draft, place, quiet=shown != "all")
    history: list[tuple[str, str]] = []
    asking = sys.stdin.isatty() and shown == "all"
    with Conversation(
        models.target.backbone,
        draft=None if models.draft is None else models.draft.backbone,
        method=recipe,
        tokenizer=models.target.tokenizer,
        captioner=loading.captioner(captioner, known.target, clip, device),
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    ) as talk:
        while question := _question(asking):
            inputs = loading.inputs(models.target, clip, question, history)
            own = loading.draft_inputs(models, clip, question, history)
            begin = partial(_begin, talk, inputs, own)
            result = answer(models.target, begin, shown)
            if as_json:
                typer.echo(json.dumps({"question": question, **described(result, clip)}))
            history.append((question, result.text or ""))


def _begin(
    talk: Conversation, inputs: Inputs, own: Inputs | None, tell: Callable[[str], None]
) -> Stream:
    return talk.stream(inputs, draft_inputs=own, on_phase=tell)


def _question(asking: bool) -> str:
    """The next line of standard input; empty at the end."""
    if asking:
        err.print("\n[bold]?[/bold] ", end="")
    return sys.stdin.readline().strip()
