"""``saccade chat``: answers one question after another about videos, pictures and documents."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import command_options, run_setup
from saccade.cli.command_options import ClipOptions, LoadOptions, ModelOptions, with_option_groups
from saccade.cli.describe import output_detail, print_answer, result_fields
from saccade.cli.terminal import Json, Quiet, Verbose, err, prepare
from saccade.core.errors import SaccadeError
from saccade.inputs import subjects

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from saccade.inputs import Pair
    from saccade.inputs.media import FrameSampling
    from saccade.inputs.questions import Dialogue

RESET = "/reset"
DOCUMENT = "/document"
ADD = "/add"
END_COMMANDS = ("", "exit", "quit", "/exit", "/quit")
# What is printed for a line that is exactly one of these. A bare /document gets a hint.
REPLIES = {
    RESET: "the questions and answers are forgotten; the video and the documents stay",
    DOCUMENT: "name a file of text: /document notes.txt",
    "/help": "type one question per line; /add FILE adds a video, a picture or a text to the next "
    "question; /document FILE adds a long text at the start of the conversation; "
    "/reset forgets the questions and answers; exit, or an empty line, ends the chat",
}
DOCUMENT_ADDED = (
    "the document and the whole conversation are read with the next question; questions and "
    "answers stay"
)
NAME_A_FILE = "name a video, a picture or a text: /add second.mp4"
FILE_ADDED = "the file is read with the next question; what was read before stays"
TRY_AGAIN = "ask again, or give /reset, which forgets the questions and answers"


@dataclass
class _Talk:
    """The conversation so far, and what was given for the next question.

    A *subject* is what a question is about: a video or picture, long texts, or both. A turn's
    subjects are those that were given before its question.
    """

    new: list[subjects.Subject]  # the subjects that come with the next question
    # For each turn its subjects, its question and its answer.
    turns: list[tuple[list[subjects.Subject], str, str]] = field(default_factory=list)

    def dialogue(self, question: str) -> Dialogue:
        """Returns the dialogue of all turns and of one more question with the new subjects."""
        from saccade.inputs.questions import Dialogue

        dialogue = Dialogue()
        for turn_subjects, earlier, answer in self.turns:
            dialogue = dialogue.ask(earlier, **_merge_arguments(turn_subjects)).answer(answer)
        return dialogue.ask(question, **_merge_arguments(self.new))

    def finish(self, question: str, answer: str) -> None:
        """Adds a turn: the new subjects, the question and its answer."""
        self.turns.append((self.new, question, answer))
        self.new = []

    def forget(self) -> None:
        """Forgets questions and answers. All subjects come with the next question."""
        self.new = self._subjects
        self.turns.clear()

    def add_document(self, text: str) -> _Talk:
        """Returns a copy in which the first subject of the conversation has one more document."""
        turns = [
            ([*turn_subjects], question, answer) for turn_subjects, question, answer in self.turns
        ]
        copy = _Talk([*self.new], turns)
        first_subjects = turns[0][0] if turns else copy.new
        first = first_subjects[0]
        first_subjects[0] = replace(first, documents=(*first.documents, text))
        return copy

    @property
    def frames(self) -> list[list[np.ndarray]]:
        """The frames of each video and picture so far, the new ones included. A captioner makes
        captions of them, which some views read."""
        return [frames for each in self._subjects for frames in each.frames]

    @property
    def _subjects(self) -> list[subjects.Subject]:
        """The subjects of all turns, and then the new ones."""
        earlier = [each for turn_subjects, _, _ in self.turns for each in turn_subjects]
        return [*earlier, *self.new]


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

    A question a line on standard input. /add FILE shows one more video, picture or text, /document
    FILE adds a text before the conversation, /reset forgets what was said, /help lists these; exit,
    an empty line or the end of input ends it.
    """
    settings = run_setup.resolve_settings(models, loading, method)
    detail = output_detail(as_json, quiet)
    sampling = frames.sampling()
    subject = run_setup.read_subject(
        video,
        document,
        sampling,
        quiet=detail != "all",
        warn=not quiet,
        target=settings.target,
    )
    prepare(settings.threads, verbose, quiet=detail != "all")
    from saccade.engine.conversation import Conversation

    (recipe,) = run_setup.resolve_recipes([settings.method], exact)
    pair = settings.load_models(quiet=detail != "all")
    talk = _Talk([subject])
    is_interactive = sys.stdin.isatty() and detail == "all"
    with Conversation(
        pair.target.backbone,
        draft=pair.draft_backbone,
        method=recipe,
        tokenizer=pair.target.tokenizer,
        seed=seed,
        exact=exact,
        max_new_tokens=max_new_tokens,
        do_sample=False,
    ) as conversation:
        while (question := _read_question(is_interactive)) not in END_COMMANDS:
            if question == RESET:
                # Closing frees the caches. The conversation can go on, and reads everything again.
                conversation.close()
                talk.forget()
            if question in REPLIES:
                err.print(REPLIES[question], markup=False)
                continue
            command, _, file_name = question.partition(" ")
            file_name = os.path.expanduser(file_name.strip())
            if command == ADD and not file_name:
                err.print(NAME_A_FILE, markup=False)
                continue
            if command in (ADD, DOCUMENT):
                try:
                    new_talk = _read_file(
                        talk, command, file_name, sampling, settings.target, not quiet
                    )
                    _check_length(pair, new_talk)
                except SaccadeError as error:
                    err.print(str(error), style="yellow", markup=False, soft_wrap=True)
                    continue
                talk = new_talk
                if command == DOCUMENT:
                    # The document belongs to the first turn. Closing makes the next question read
                    # the whole conversation again, so that the draft's view chooses once more.
                    # Otherwise the draft would keep what it chose without the document.
                    conversation.close()
                err.print(DOCUMENT_ADDED if command == DOCUMENT else FILE_ADDED, markup=False)
                continue
            try:
                inputs, draft_inputs = pair.converse(talk.dialogue(question))
                start_answer = partial(
                    conversation.stream,
                    inputs,
                    draft_inputs=draft_inputs,
                    captioner=settings.make_captioner(talk.frames),
                )
                result = print_answer(pair.target, start_answer, detail)
            except SaccadeError as error:
                if not is_interactive:
                    raise
                conversation.close()
                err.print(f"{error}; {TRY_AGAIN}", style="yellow", markup=False, soft_wrap=True)
                continue
            if as_json:
                frame_count = sum(map(len, talk.frames))
                new_warnings = [text for each in talk.new for text in each.warnings]
                fields = result_fields(result, frame_count, new_warnings)
                typer.echo(json.dumps({"question": question, **fields}))
            talk.finish(question, result.text or "")


def _read_file(
    talk: _Talk, command: str, file_name: str, sampling: FrameSampling, target: str, warn: bool
) -> _Talk:
    """Returns the talk with the file that a command names. Raises SaccadeError if it cannot be
    read."""
    path = Path(file_name)
    if command == DOCUMENT:
        return talk.add_document(subjects.read_document(path))
    if subjects.is_text_file(path):
        new = subjects.Subject(clip=None, documents=(subjects.read_document(path),))
    else:
        clip = run_setup.read_clip(file_name, sampling, quiet=True, warn=warn, target=target)
        new = subjects.Subject(clip)
    return _Talk([*talk.new, new], talk.turns)


def _merge_arguments(several: Sequence[subjects.Subject]) -> dict[str, Any]:
    """Returns the keyword arguments of :meth:`Dialogue.ask` for several subjects together."""
    merged: dict[str, list[Any]] = {"clips": [], "images": [], "documents": []}
    for subject in several:
        for name, values in subject.ask_arguments.items():
            merged[name].extend(values)
    return merged


def _check_length(pair: Pair, talk: _Talk) -> None:
    """Raises ModelError where the prompt of the next question is longer than the target can read.

    The next question is not known yet, so the default question stands in for it.
    """
    from saccade.engine.request import Request

    target = pair.target.backbone
    inputs, _ = pair.converse(talk.dialogue(command_options.QUESTION))
    Request.of(target, inputs).check_length(target)


def _read_question(is_interactive: bool) -> str:
    """Returns the next line of standard input; an empty string at its end."""
    if is_interactive:
        err.print("\n[bold]?[/bold] [dim](/help)[/dim] ", end="")
    return sys.stdin.readline().strip()
