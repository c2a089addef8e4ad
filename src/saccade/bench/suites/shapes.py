"""Suites of the synthetic world: made from seeds, with the true answers, at several lengths.

Seeds start where neither training nor ``evidence eval`` nor ``calibrate`` ever went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from saccade.bench.suites.benchmarks import TURNS
from saccade.bench.suites.types import Item, Medium, Setting, Task, in_a_row
from saccade.inputs.media import Clip
from saccade.world import drawing, scenes, text
from saccade.world.scenes import Scene
from saccade.world.text import Exchange

FIRST_SEED = 60_000_000
SAMPLES = 50
FPS = 8.0


@dataclass(frozen=True)
class Length:
    """How a clip is drawn: a token sees two frames of 28 by 28 pixels."""

    frames: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.frames // 2 * (self.height // 28) * (self.width // 28)


LENGTHS = {
    "256": Length(8, 224, 224),
    "2k": Length(64, 224, 224),
    "8k": Length(256, 224, 224),
    "10k": Length(320, 224, 224),
}
LONG = "10k"  # captions alone: a long context to compare plain decoders in
PICTURE = 448, 448
PICTURES = {"256": (224, 448), "2k": (896, 896)}  # height, width; the processor takes no more
SHORTEST = "256"  # of a name without a length: a run of every method takes minutes


def _frames(scene: Scene, length: Length) -> Clip:
    """The frames as drawn: no codec stands between the world and the model."""
    frames = drawing.render(scene, length.frames, length.height, length.width)
    return drawing.clip(frames, length.frames / FPS)


def _clip(scene: Scene, length: str) -> tuple[Medium, ...]:
    return (Medium("video", f"scene-{scene.seed}", partial(_frames, scene, LENGTHS[length])),)


def _wide_clip(scene: Scene, length: str) -> tuple[Medium, ...]:
    size = LENGTHS[length]
    wide = replace(size, height=size.height // 2, width=size.width * 2)
    return (Medium("video", f"scene-{scene.seed}", partial(_frames, scene, wide)),)


def _pictures(scene: Scene, length: str) -> tuple[Medium, ...]:
    """Two that differ in one or two things."""
    both = {"before": scene, "after": scenes.edit(scene, scene.seed)}
    return tuple(
        Medium("image", name, partial(drawing.image_frame, each, *PICTURES[length]))
        for name, each in both.items()
    )


def _picture(scene: Scene, length: str) -> tuple[Medium, ...]:
    read = partial(drawing.image_frame, scene, *PICTURE)
    return (Medium("image", f"scene-{scene.seed}", read),)


@dataclass(frozen=True)
class Kind:
    """What is asked about a scene: one of the world's tasks, all of its turns or some."""

    asked: str
    longest: int  # answer, in tokens
    task: Task = "open"
    turns: Callable[[Sequence[Exchange], int], Sequence[Exchange]] = lambda turns, seed: turns
    media: Callable[[Scene, str], tuple[Medium, ...]] = _clip
    then: str | None = None  # a second turn's question, beside the world's
    next: bool = False  # whether the second turn is the next item, with its picture

    def item(self, name: str, seed: int, length: str) -> Item:
        scene = scenes.scene(seed)
        first, *then = self.turns(text.conversation(scene, self.asked, seed), seed)
        return Item(
            id=f"{name}-{length}-{seed}",
            task=self.task,
            question=first.question,
            media=self.media(scene, length),
            answers=(first.answer,),
            then=(*(turn.question for turn in then), *([self.then] if self.then else [])),
            meta={"seed": seed},
        )


def _in_other_words(turns: Sequence[Exchange], seed: int) -> Sequence[Exchange]:
    return [replace(turns[0], question=UNHEARD)]


UNHEARD = "Tell a friend who cannot see this clip everything that goes on in it."
TASKS: Mapping[str, Kind] = {
    "shapes-caption": Kind("describe", 256, "caption"),
    "shapes-events": Kind("events", 128),
    # a clip has several short questions, and the seed picks
    "shapes-qa": Kind("qa", 32, "short", lambda turns, seed: turns[seed % len(turns) :][:1]),
    "shapes-chat": Kind("chat", 192, turns=lambda turns, seed: turns[:2]),
    "shapes-diff": Kind("diff", 128, media=_pictures),
    # what training never showed: a question in other words, of frames that are not square
    "shapes-ood": Kind("describe", 256, "caption", _in_other_words, _wide_clip),
}
# TABED's second turns: over a picture, or over two of which the second comes with its question.
# The world's models were never asked for a summary or a story: what they say then is nothing known.
SECOND: Mapping[str, Kind] = {
    f"shapes-second-{name}": Kind(
        "image", 128, media=_picture, then=question, next=question is None
    )
    for name, question in TURNS.items()
}


@dataclass(frozen=True)
class Shapes:
    """One of ``TASKS`` at one of ``LENGTHS``, or one of ``SECOND``."""

    name: str
    kind: str
    length: str
    setting: Setting

    def items(self) -> Iterator[Item]:
        kind = {**TASKS, **SECOND}[self.kind]
        seeds = range(FIRST_SEED, FIRST_SEED + (self.setting.samples or SAMPLES))
        found = (kind.item(self.kind, seed, self.length) for seed in seeds)
        return in_a_row(found) if kind.next else found


def suites() -> dict[str, Shapes]:
    """Every suite by name: ``shapes-caption`` (256 visual tokens), ``shapes-caption-2k``, ..."""
    found = {}
    for task, kind in {**TASKS, **SECOND}.items():
        lengths = [SHORTEST] if task in SECOND else PICTURES if kind.media is _pictures else LENGTHS
        for length in lengths:
            if length == LONG and task != "shapes-caption":
                continue
            name = task if length == SHORTEST else f"{task}-{length}"
            setting = Setting("the embedded world", samples=SAMPLES, max_new_tokens=kind.longest)
            found[name] = Shapes(name, task, length, setting)
    return found
