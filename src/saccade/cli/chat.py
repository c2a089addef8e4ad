"""``saccade chat``."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Annotated

import typer

from saccade.cli import loading, options
from saccade.cli.describe import answer, described, showing
from saccade.cli.options import ClipOptions, LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Json, Quiet, Verbose, err, prepare

RESET = "/reset"
ENDS = ("", "exit", "quit", "/exit", "/quit")
SAID = {
    RESET: "what was said is forgotten; the video stays",
    "/help": "a question a line; /reset forgets what was said; exit, or an empty line, ends this",
}


@grouped
def chat(
    video: Annotated[str, typer.Argument(help="A video, GIF, image or folder of frames.")],
    models: ModelOptions,
    frames: ClipOptions,
    how: LoadOptions,
    method: options.Method = None,
    max_new_tokens: options.Tokens = 256,
    seed: options.Seed = None,
    exact: options.Exact = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Ask one question after another about a video; only what is new is read.

    A question a line on standard input. /reset forgets what was said, /help says so; exit, an
    empty line or the end of input ends it.
    """
    known, show = loading.known(models, how, method), showing(as_json, quiet)
    clip = loading.read(
        video, frames.sampling(), quiet=show != "all", warn=not quiet, target=known.target
    )
    prepare(known.threads, verbose, quiet=show != "all")
    from saccade.engine.conversation import Conversation
    from saccade.inputs import shown

    (recipe,) = loading.recipes([known.method], exact)
    pair = known.models(quiet=show != "all")
    history: list[tuple[str, str]] = []
    asking = sys.stdin.isatty() and show == "all"
    with Conversation(
        pair.target.backbone,
        draft=pair.drafting,
        method=recipe,
        tokenizer=pair.target.tokenizer,
        captioner=known.captions([list(clip.frames)]),
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    ) as talk:
        while (question := _question(asking)) not in ENDS:
            if question == RESET:
                talk.close()
                history.clear()
            if question in SAID:
                err.print(SAID[question], markup=False)
                continue
            inputs, own = pair.ask(question, **shown(clip), history=history)
            begin = partial(talk.stream, inputs, draft_inputs=own)
            result = answer(pair.target, begin, show)
            if as_json:
                typer.echo(json.dumps({"question": question, **described(result, clip)}))
            history.append((question, result.text or ""))


def _question(asking: bool) -> str:
    """The next line of standard input; empty at the end."""
    if asking:
        err.print("\n[bold]?[/bold] [dim](/help)[/dim] ", end="")
    return sys.stdin.readline().strip()
