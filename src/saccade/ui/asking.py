"""What may be asked of the page, and the whole of a run: both answers, then what the draft saw.

Knows neither gradio nor how anything is drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from saccade.core.errors import OptionError
from saccade.core.result import RoundRecord
from saccade.corpus.answering import answered
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.drafting.setup import Captioner, Words
from saccade.inputs import Pair, clip_arguments, media
from saccade.inputs.media import Clip
from saccade.methods import SYSTEMS, resolve
from saccade.ui.duel import Duel, Tell, duel
from saccade.ui.kept import KeptClips, kept
from saccade.world import drawing, scenes
from saccade.world.knowing import remarked

log = logging.getLogger(__name__)

SECONDS = 8.0


@dataclass(frozen=True)
class Example:
    """A scene that no training stage drew, how many frames of it are taken, and their size."""

    seed: int
    frames: int
    side: int

    def clip(self) -> Clip:
        pictures = drawing.render(scenes.scene(self.seed), self.frames, self.side)
        return drawing.clip(pictures, SECONDS)


EXAMPLES: dict[str, Example] = {
    "Three shapes (2,048 visual tokens)": Example(20_000_002, 64, 224),
    "Four on stripes (2,048)": Example(20_000_005, 64, 224),
    "Five shapes, short (256)": Example(20_000_001, 32, 112),
}


@dataclass(frozen=True)
class PageModels(Pair):
    """What answers: the models, and who puts frames into words (None: nobody)."""

    captioner: Callable[[Sequence[Sequence[np.ndarray]]], Captioner | None] = lambda media: None

    def word(self, token: int) -> str:
        return self.target.tokenizer.decode([token])

    def encode(self, text: str) -> list[int]:
        return self.target.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class PageSettings:
    """What may be asked of the page, which model answers, and by which method at first."""

    method: str = "auto"
    target: str = "shapes"
    draft: str | None = None
    limits: media.Limits = media.Limits(max_bytes=200 << 20, max_frames=64, max_seconds=60)
    max_prompt: int = 16_384  # tokens
    max_new_tokens: int = 1024


@dataclass(frozen=True)
class PageQuestion:
    """What a person asked for."""

    example: str | None
    upload: str | None
    prompt: str
    method: str
    tokens: int
    temperature: float
    seed: int | None


@dataclass(frozen=True)
class Shown:
    """What there is to show: the duel, then what the draft saw."""

    duel: Duel
    recipe: Recipe
    clip: Clip
    seen: tuple[KeptClips, ...] | None = None  # None: not known yet
    why: str = ""  # it never will be

    @property
    def rounds(self) -> tuple[RoundRecord, ...]:
        """Of the drafted side."""
        return self.duel.drafted.rounds


def read(example: str | None, upload: str | None, settings: PageSettings) -> Clip:
    """The clip asked about. Raises SaccadeError."""
    if upload is not None:
        return remarked(media.read(upload, limits=settings.limits), settings.target)
    if example in EXAMPLES:
        return EXAMPLES[example].clip()
    raise OptionError("pick an example clip, or drop a video")


def checked(asked: PageQuestion, settings: PageSettings) -> PageQuestion:
    """What was asked for, if the page allows it. Raises OptionError."""
    if not 1 <= asked.tokens <= settings.max_new_tokens:
        raise OptionError(f"an answer may have 1 to {settings.max_new_tokens} tokens")
    if not 0 <= asked.temperature <= 10:
        raise OptionError("the temperature is a number from 0 (greedy) to 10")
    if not asked.prompt.strip():
        raise OptionError("there is no question: write one")
    return asked


def answers(
    pair: PageModels, settings: PageSettings, asked: PageQuestion, halted: Callable[[], bool]
) -> Generator[Shown, None, None]:
    """The whole of a run: both answers, then what the draft saw. Raises SaccadeError."""
    recipe = resolve(checked(asked, settings).method)
    clip = read(asked.example, asked.upload, settings)
    inputs, own = pair.ask(asked.prompt, **clip_arguments(clip))
    length = int(inputs["input_ids"].shape[1])
    if length > settings.max_prompt:
        raise OptionError(
            f"this clip and question are {length} tokens and the page takes {settings.max_prompt}: "
            "use a shorter or smaller clip, or start it with a larger --max-prompt"
        )
    captioner = pair.captioner([list(clip.frames)])
    settled = [recipe]

    def begin(method: Recipe, tell: Tell, **others: Any) -> Any:
        told = {"captioner": captioner, "seed": asked.seed, "on_phase": tell}
        found = answered(pair, (inputs, own), method, **told, **{**_settings(asked), **others})
        settled[0] = found.recipe
        return found

    def ready(method: Recipe, tell: Tell) -> Any:
        """As ``begin``; a draft's process is started before anything is timed."""
        if method.schedule is parallel:
            begin(method, tell, max_new_tokens=1).finish()
        return begin(method, tell)

    plain = "ar", partial(ready, SYSTEMS["ar"])
    drafted = asked.method, partial(ready, recipe)
    last = None
    for now in duel(plain, drafted, pair.target.decode, halted=halted):
        last = Shown(now, settled[0], clip)
        yield last
    if last is None or not last.duel.over:
        return
    words = Words(pair.encode, captioner)
    try:
        seen = kept(pair.target.backbone, pair.draft_backbone, settled[0], inputs, own, words)
        yield replace(last, seen=seen)
    except Exception as error:  # the answers stand, whatever the picture of them does
        log.warning("the picture of what the draft saw failed", exc_info=error)
        yield replace(last, why=f"What the draft saw cannot be shown: {error}")


def _settings(asked: PageQuestion) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": asked.tokens, "do_sample": asked.temperature > 0}
    return settings | ({"temperature": asked.temperature} if asked.temperature > 0 else {})
