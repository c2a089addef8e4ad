"""``saccade chat``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from saccade.cli import loading, options
from saccade.cli.describe import answer, described, showing
from saccade.cli.options import ClipOptions, LoadOptions, ModelOptions, grouped
from saccade.cli.terminal import Json, Quiet, Verbose, err, prepare
from saccade.core.errors import SaccadeError
from saccade.inputs import texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from saccade.inputs import Pair

RESET, DOCUMENT = "/reset", "/document"
ENDS = ("", "exit", "quit", "/exit", "/quit")
SAID = {
    RESET: "what was said is forgotten; the video and the documents stay",
    DOCUMENT: "name a file of text: /document notes.txt",
    "/help": "a question a line; /document FILE puts a long text before all that was said; "
    "/reset forgets what was said; exit, or an empty line, ends this",
}
READ = "read with the next question, and the rest again; what was said stays"


@grouped
def chat(
    models: ModelOptions,
    frames: ClipOptions,
    how: LoadOptions,
    video: options.Video = None,
    document: options.Documents = None,
    method: options.Method = None,
    max_new_tokens: options.Tokens = 256,
    seed: options.Seed = None,
    exact: options.Exact = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Ask one question after another about a video or document; only what is new is read.

    A question a line on standard input. /document FILE adds a text, /reset forgets what was said,
    /help says so; exit, an empty line or the end of input ends it.
    """
    known, show = loading.known(models, how, method), showing(as_json, quiet)
    seen = loading.about(
        *(video, document, frames.sampling()),
        quiet=show != "all",
        warn=not quiet,
        target=known.target,
    )
    prepare(known.threads, verbose, quiet=show != "all")
    from saccade.engine.conversation import Conversation

    (recipe,) = loading.recipes([known.method], exact)
    pair = known.models(quiet=show != "all")
    history: list[tuple[str, str]] = []
    asking = sys.stdin.isatty() and show == "all"
    with Conversation(
        pair.target.backbone,
        draft=pair.drafting,
        method=recipe,
        tokenizer=pair.target.tokenizer,
        captioner=known.captions(seen.frames),
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
            command, _, named = question.partition(" ")
            if command == DOCUMENT:
                try:
                    seen = _with(seen, named.strip(), pair, history)
                except SaccadeError as error:
                    err.print(str(error), style="yellow", markup=False, soft_wrap=True)
                else:
                    talk.close()  # what the draft sees is chosen anew
                    err.print(READ, markup=False)
                continue
            inputs, own = pair.ask(question, **seen.asked, history=history)
            begin = partial(talk.stream, inputs, draft_inputs=own)
            result = answer(pair.target, begin, show)
            if as_json:
                typer.echo(json.dumps({"question": question, **described(result, seen)}))
            history.append((question, result.text or ""))


def _with(
    seen: texts.About, named: str, pair: Pair, history: Sequence[tuple[str, str]]
) -> texts.About:
    """With one more document. Raises SaccadeError where it is none, or too long for the target."""
    from saccade.engine.request import Request

    text = texts.document(Path(os.path.expanduser(named)))
    found = replace(seen, documents=(*seen.documents, text))
    inputs, _ = pair.ask(options.QUESTION, **found.asked, history=history)
    target = pair.target.backbone
    Request.of(target, inputs).check_length(target)
    return found


def _question(asking: bool) -> str:
    """The next line of standard input; empty at the end."""
    if asking:
        err.print("\n[bold]?[/bold] [dim](/help)[/dim] ", end="")
    return sys.stdin.readline().strip()
