"""One run of the page of ``saccade ui``, from a filled-in form to everything that the page shows.

The question is checked and answered twice, plainly and with a draft (``duel``). Then the draft's
view is applied once more, to find which visual tokens the draft read (``kept_visual_tokens``). The
results are plain data: this module knows neither gradio nor how anything is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from saccade.answering.chat_model import stream_answer
from saccade.answering.coloured_text import IncrementalDecoder
from saccade.core.answer_text import Decode, TextDecoder
from saccade.core.errors import INVALID_LOGITS_MESSAGE, ModelError, OptionError
from saccade.core.result import Result, RoundRecord
from saccade.drafting.recipe import Recipe
from saccade.drafting.setup import Captioner, TextMaker
from saccade.engine.generate import Stream
from saccade.inputs import Pair, clip_arguments, media
from saccade.inputs.checkpoints import EMBEDDED_TARGET
from saccade.inputs.media import Clip
from saccade.inputs.training_domain import read_training_domain, warn_outside_domain
from saccade.methods import METHODS, resolve
from saccade.ui.duel import Duel, OnPhase, run_duel
from saccade.ui.kept_visual_tokens import KeptTokens, measure_kept_tokens

log = logging.getLogger(__name__)

MAX_TEMPERATURE = 10


@dataclass(frozen=True)
class PageModels(Pair):
    """The target and the draft that answer on the page.

    ``captioner`` takes the frames of every medium and returns a captioner for them. It returns None
    if no captioning model was chosen.
    """

    captioner: Callable[[Sequence[Sequence[np.ndarray]]], Captioner | None] = lambda media: None

    def token_text(self, token: int) -> str:
        return self.target.tokenizer.decode([token])

    def encode(self, text: str) -> list[int]:
        return self.target.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class PageSettings:
    """The limits of the page, the models that answer, and the method that is selected at first."""

    method: str = "auto"
    target: str = EMBEDDED_TARGET
    draft: str | None = None
    limits: media.Limits = media.Limits(max_bytes=200 << 20, max_frames=64, max_seconds=60)
    max_prompt: int = 16_384  # In tokens.
    max_new_tokens: int = 1024


@dataclass(frozen=True)
class PageQuestion:
    """The form as a person filled it in. It need not be valid (:func:`check_question`)."""

    example: str | None  # The name of an example clip. An uploaded file takes its place.
    upload: str | None  # The path of an uploaded video or picture.
    prompt: str
    method: str  # Of the answer with a draft, perhaps with overrides: "specvlm/keep=0.2".
    tokens: int  # The most tokens of an answer.
    temperature: float  # 0 is greedy.
    seed: int | None


@dataclass(frozen=True)
class PageRun:
    """The state of a run at one moment.

    ``duel`` has both answers so far. ``recipe`` is the recipe of the drafted answer. Until that
    answer starts, it is the question's recipe. From then on it is the same recipe, planned for this
    machine. ``views`` says which visual tokens each view of the draft kept. It is None until both
    answers are complete, and also if finding this out failed. ``views_error`` is then a sentence
    about the failure.
    """

    duel: Duel
    recipe: Recipe
    clip: Clip
    views: tuple[KeptTokens, ...] | None = None
    views_error: str = ""

    @property
    def rounds(self) -> tuple[RoundRecord, ...]:
        """The rounds of the drafted answer."""
        return self.duel.drafted.rounds


def read_clip(example: str | None, upload: str | None, settings: PageSettings) -> Clip:
    """Returns the uploaded file, or else the example, as frames. Raises SaccadeError."""
    if upload is not None:
        clip = media.read(upload, limits=settings.limits)
        return warn_outside_domain(clip, read_training_domain(settings.target))
    from saccade.world.demo_clips import EXAMPLES

    if example is not None and example in EXAMPLES:
        return EXAMPLES[example].clip()
    raise OptionError("pick an example clip, or drop a video")


def check_question(question: PageQuestion, settings: PageSettings) -> None:
    """Raises OptionError if the page does not allow the question."""
    if not 1 <= question.tokens <= settings.max_new_tokens:
        raise OptionError(f"an answer may have 1 to {settings.max_new_tokens} tokens")
    if not 0 <= question.temperature <= MAX_TEMPERATURE:
        raise OptionError(f"the temperature is a number from 0 (greedy) to {MAX_TEMPERATURE}")
    if not question.prompt.strip():
        raise OptionError("there is no question: write one")


def run_question(
    pair: PageModels,
    settings: PageSettings,
    question: PageQuestion,
    should_stop: Callable[[], bool],
) -> Generator[PageRun, None, None]:
    """Yields the state of a run as it goes on: both answers, then which tokens the draft read.

    ``should_stop`` is called before every step and phase of the answers, and returns whether to
    stop them. A stopped run ends without ``views``. Raises SaccadeError.
    """
    check_question(question, settings)
    recipe = resolve(question.method)
    clip = read_clip(question.example, question.upload, settings)
    inputs, draft_inputs = pair.ask(question.prompt, **clip_arguments(clip))
    length = int(inputs["input_ids"].shape[1])
    if length > settings.max_prompt:
        raise OptionError(
            f"this clip and question are {length} tokens and the page takes {settings.max_prompt}: "
            "use a shorter or smaller clip, or start saccade ui with a larger --max-prompt"
        )
    captioner = pair.captioner([list(clip.frames)])
    # A stream plans its recipe for this machine when it starts. From then on this variable has the
    # planned recipe of the drafted answer.
    planned_recipe = recipe

    def start(answer_recipe: Recipe, on_phase: OnPhase, **overrides: Any) -> Any:
        """Starts an answer's stream, which calls ``on_phase`` with each phase's name as it begins.

        ``overrides`` are further arguments of the stream.
        """
        nonlocal planned_recipe
        arguments = {"captioner": captioner, "seed": question.seed, "on_phase": on_phase}
        arguments |= {**_sampling_settings(question), **overrides}
        stream = stream_answer(pair, (inputs, draft_inputs), answer_recipe, **arguments)
        if answer_recipe is recipe:
            planned_recipe = stream.recipe
        return stream

    def start_warm(answer_recipe: Recipe, on_phase: OnPhase) -> Any:
        """Starts an answer.

        If its draft works in a process of its own, an answer of one token is decoded first. That
        starts the process, so that starting it takes no time of the answer that is measured.
        """
        if answer_recipe.drafts_beside_target:
            start(answer_recipe, on_phase, max_new_tokens=1).finish()
        return start(answer_recipe, on_phase)

    plain = "ar", partial(start_warm, METHODS["ar"])
    drafted = question.method, partial(start_warm, recipe)
    last = None
    for duel in run_duel(plain, drafted, pair.target.decode, should_stop=should_stop):
        last = PageRun(duel, planned_recipe, clip)
        yield last
    if last is None or not last.duel.is_complete:
        return
    text_maker = TextMaker(pair.encode, captioner)
    try:
        views = measure_kept_tokens(
            pair.target.backbone,
            pair.draft_backbone,
            planned_recipe,
            inputs,
            draft_inputs,
            text_maker,
        )
        yield replace(last, views=views)
    except Exception as error:  # The answers are valid even if this picture fails.
        log.warning("measuring which visual tokens the draft read failed", exc_info=error)
        yield replace(last, views_error=f"What the draft saw cannot be shown: {error}")


def _sampling_settings(question: PageQuestion) -> dict[str, Any]:
    """Returns the answer's length and sampling rules as arguments of :func:`saccade.stream`."""
    sampled = question.temperature > 0
    settings: dict[str, Any] = {"max_new_tokens": question.tokens, "do_sample": sampled}
    if sampled:
        settings["temperature"] = question.temperature
    return settings


def growing_answer(stream: Stream, decode: Decode) -> Generator[str, None, Result]:
    """Yields an answer's text as it grows, and returns the whole result.

    Whoever leaves in the middle of an answer closes this generator. Then the stream is closed too,
    because the next question would be refused if it stayed open. Raises ModelError for an answer
    that ended because of invalid logits.
    """
    decoder = IncrementalDecoder(TextDecoder(decode))
    text = ""
    with closing(stream):
        for round in stream:
            text += str(decoder.styled_text(round.to_record()))
            yield text
    (result,) = stream.results
    if result.finish_reason == "error":
        raise ModelError(INVALID_LOGITS_MESSAGE)
    return result
