"""Suites of the synthetic world, made from seeds, with right answers, at several lengths of video.

Training, ``lab eval`` and ``calibrate`` use other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from saccade.bench.suites.benchmarks import SECOND_TURNS
from saccade.bench.suites.types import Item, Medium, Setting, Task, with_next_items
from saccade.inputs.media.clip import Clip, make_clip
from saccade.world import dialogues, drawing, scenes
from saccade.world.dialogues import Exchange
from saccade.world.scenes import Scene

FIRST_SEED = 60_000_000
SAMPLES = 50
FPS = 8.0


@dataclass(frozen=True)
class Length:
    """The size of a clip; one token covers two frames of 28 by 28 pixels."""

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
# Only ``shapes-caption`` has this length. It is a long context to compare plain decoders on.
CAPTION_ONLY_LENGTH = "10k"
PICTURE = 448, 448  # The (height, width) of a single picture.
# The (height, width) of each of two pictures, by length. The processor accepts these sizes.
PICTURES = {"256": (224, 448), "2k": (896, 896)}
DEFAULT_LENGTH = "256"  # Names of suites leave this length out. A run at it takes minutes.


def _frames(scene: Scene, length: Length) -> Clip:
    """Returns the frames as they are rendered, without a codec in between."""
    frames = drawing.render(scene, length.frames, length.height, length.width)
    return make_clip(frames, length.frames / FPS)


def _clip(scene: Scene, length: str) -> tuple[Medium, ...]:
    return (Medium("video", f"scene-{scene.seed}", partial(_frames, scene, LENGTHS[length])),)


def _wide_clip(scene: Scene, length: str) -> tuple[Medium, ...]:
    """Returns a clip of half the height and twice the width, so with as many visual tokens."""
    size = LENGTHS[length]
    wide = replace(size, height=size.height // 2, width=size.width * 2)
    return (Medium("video", f"scene-{scene.seed}", partial(_frames, scene, wide)),)


def _pictures(scene: Scene, length: str) -> tuple[Medium, ...]:
    """Returns two pictures that differ in one or two things."""
    pictures = {"before": scene, "after": scenes.edit(scene, scene.seed)}
    return tuple(
        Medium("image", name, partial(drawing.image_frame, each, *PICTURES[length]))
        for name, each in pictures.items()
    )


def _picture(scene: Scene, length: str) -> tuple[Medium, ...]:
    read = partial(drawing.image_frame, scene, *PICTURE)
    return (Medium("image", f"scene-{scene.seed}", read),)


@dataclass(frozen=True)
class Kind:
    """A kind of item about a scene: one of the world's tasks, with all of its turns or some.

    ``then`` is the question of a second turn about the same media. ``asks_next_item`` says whether
    a second turn asks the question of the next item, with that item's picture.
    """

    world_task: str
    max_answer_tokens: int
    task: Task = "open"
    turns: Callable[[Sequence[Exchange], int], Sequence[Exchange]] = lambda turns, seed: turns
    media: Callable[[Scene, str], tuple[Medium, ...]] = _clip
    then: str | None = None
    asks_next_item: bool = False

    def item(self, name: str, seed: int, length: str) -> Item:
        scene = scenes.scene(seed)
        first, *then = self.turns(dialogues.conversation(scene, self.world_task, seed), seed)
        return Item(
            id=f"{name}-{length}-{seed}",
            task=self.task,
            question=first.question,
            media=self.media(scene, length),
            answers=(first.answer,),
            later_questions=(
                *(turn.question for turn in then),
                *([self.then] if self.then else []),
            ),
            meta={"seed": seed},
        )


def _with_untrained_question(turns: Sequence[Exchange], seed: int) -> Sequence[Exchange]:
    return [replace(turns[0], question=UNTRAINED_QUESTION)]


UNTRAINED_QUESTION = "Tell a friend who cannot see this clip everything that goes on in it."
TASKS: Mapping[str, Kind] = {
    "shapes-caption": Kind("describe", 256, "caption"),
    "shapes-events": Kind("events", 128),
    # A clip has several short questions, and the seed selects one.
    "shapes-qa": Kind("qa", 32, "short", lambda turns, seed: turns[seed % len(turns) :][:1]),
    "shapes-chat": Kind("chat", 192, turns=lambda turns, seed: turns[:2]),
    "shapes-diff": Kind("diff", 128, media=_pictures),
    # The models were trained on square frames alone, and never on this question.
    "shapes-ood": Kind("describe", 256, "caption", _with_untrained_question, _wide_clip),
}
# TABED's second turns: about the same picture, or about another one that comes with its question.
# The world's models were not trained on summaries or stories, so their answers here mean nothing.
SECOND_TURN_TASKS: Mapping[str, Kind] = {
    f"shapes-second-{name}": Kind(
        "image", 128, media=_picture, then=question, asks_next_item=question is None
    )
    for name, question in SECOND_TURNS.items()
}


@dataclass(frozen=True)
class DrawnSuite:
    """One of ``TASKS`` at one of ``LENGTHS``, or one of ``SECOND_TURN_TASKS``."""

    name: str
    kind: str
    length: str
    setting: Setting

    def items(self) -> Iterator[Item]:
        kind = {**TASKS, **SECOND_TURN_TASKS}[self.kind]
        seeds = range(FIRST_SEED, FIRST_SEED + (self.setting.samples or SAMPLES))
        items = (kind.item(self.kind, seed, self.length) for seed in seeds)
        return with_next_items(items) if kind.asks_next_item else items


def suites() -> dict[str, DrawnSuite]:
    """Returns every suite by name, such as ``shapes-caption`` and ``shapes-caption-2k``. A suite
    without a length in its name has about 256 visual tokens."""
    suites_by_name = {}
    for task, kind in {**TASKS, **SECOND_TURN_TASKS}.items():
        lengths = [*LENGTHS]
        if task in SECOND_TURN_TASKS:
            lengths = [DEFAULT_LENGTH]
        elif kind.media is _pictures:
            lengths = [*PICTURES]
        for length in lengths:
            if length == CAPTION_ONLY_LENGTH and task != "shapes-caption":
                continue
            name = task if length == DEFAULT_LENGTH else f"{task}-{length}"
            setting = Setting(
                "the embedded world", samples=SAMPLES, max_new_tokens=kind.max_answer_tokens
            )
            suites_by_name[name] = DrawnSuite(name, task, length, setting)
    return suites_by_name
