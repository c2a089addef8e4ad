"""``saccade chat``: answers one question after another about the same video or document."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import ClipOptions, LoadOptions, ModelOptions, with_option_groups
from saccade.cli.describe import output_detail, print_answer, result_fields
from saccade.cli.terminal import Json, Quiet, Verbose, err, prepare
from saccade.core.errors import SaccadeError
from saccade.inputs import subjects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from saccade.inputs import Pair

RESET = "/reset"
DOCUMENT = "/document"
END_COMMANDS = ("", "exit", "quit", "/exit", "/quit")
REPLIES = {
    RESET: "what was said is forgotten; the video and the documents stay",
    DOCUMENT: "name a file of text: /document notes.txt",
    "/help": "a question a line; /document FILE puts a long text before all that was said; "
    "/reset forgets what was said; exit, or an empty line, ends this",
}
DOCUMENT_ADDED = "read with the next question, and the rest again; what was said stays"


@with_option_groups
def chat(
    models: ModelOptions,
    frames: ClipOptions,
    loading: LoadOptions,
    video: command_options.Video = None,
    document: command_options.Documents = None,
    method: command_options.Method = None,
    max_new_tokens: command_options.Tokens = 256,
    seed: command_options.Seed = None,
    exact: command_options.Exact = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Ask one question after another about a video or document; only what is new is read.

    A question a line on standard input. /document FILE adds a text, /reset forgets what was said,
    /help says so; exit, an empty line or the end of input ends it.
    """
    settings = run_setup.resolve_settings(models, loading, method)
    detail = output_detail(as_json, quiet)
    subject = run_setup.read_subject(
        video,
        document,
        frames.sampling(),
        quiet=detail != "all",
        warn=not quiet,
        target=settings.target,
    )
    prepare(settings.threads, verbose, quiet=detail != "all")
    from saccade.engine.conversation import Conversation

    (recipe,) = run_setup.resolve_recipes([settings.method], exact)
    pair = settings.load_models(quiet=detail != "all")
    history: list[tuple[str, str]] = []
    has_prompt = sys.stdin.isatty() and detail == "all"
    with Conversation(
        pair.target.backbone,
        draft=pair.draft_backbone,
        method=recipe,
        tokenizer=pair.target.tokenizer,
        captioner=settings.make_captioner(subject.frames),
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    ) as conversation:
        while (question := _read_question(has_prompt)) not in END_COMMANDS:
            if question == RESET:
                conversation.close()
                history.clear()
            if question in REPLIES:
                err.print(REPLIES[question], markup=False)
                continue
            command, _, file_name = question.partition(" ")
            if command == DOCUMENT:
                try:
                    subject = _add_document(subject, file_name.strip(), pair, history)
                except SaccadeError as error:
                    err.print(str(error), style="yellow", markup=False, soft_wrap=True)
                else:
                    conversation.close()  # The draft's view must be chosen again.
                    err.print(DOCUMENT_ADDED, markup=False)
                continue
            inputs, draft_inputs = pair.ask(question, **subject.ask_arguments, history=history)
            start = partial(conversation.stream, inputs, draft_inputs=draft_inputs)
            result = print_answer(pair.target, start, detail)
            if as_json:
                typer.echo(json.dumps({"question": question, **result_fields(result, subject)}))
            history.append((question, result.text or ""))


def _add_document(
    subject: subjects.Subject, file_name: str, pair: Pair, history: Sequence[tuple[str, str]]
) -> subjects.Subject:
    """Returns the subject with one more document.

    Raises SaccadeError where the file is no text, or too long for the target.
    """
    from saccade.engine.request import Request

    text = subjects.read_document(Path(os.path.expanduser(file_name)))
    larger = replace(subject, documents=(*subject.documents, text))
    inputs, _ = pair.ask(command_options.QUESTION, **larger.ask_arguments, history=history)
    target = pair.target.backbone
    Request.of(target, inputs).check_length(target)
    return larger


def _read_question(has_prompt: bool) -> str:
    """Returns the next line of standard input, which is empty at the end."""
    if has_prompt:
        err.print("\n[bold]?[/bold] [dim](/help)[/dim] ", end="")
    return sys.stdin.readline().strip()
