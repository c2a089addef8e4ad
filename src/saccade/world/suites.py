"""Suites about clips of the synthetic world, in which shapes move, at several lengths of video.

Every clip, its questions and their right answers follow from a seed. Training uses other seeds, so
the models have not seen these clips. ``lab eval`` and ``calibrate`` use yet other seeds.
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

FIRST_SEED = 60_000_000  # The seed of a suite's first sample. Each later one has the next seed.
SAMPLES = 50  # How many samples a suite has.
FPS = 8.0  # Frames per second of every clip.


@dataclass(frozen=True)
class ClipSize:
    """The size of a clip: how many frames it has, and their height and width in pixels.

    One visual token covers 28 by 28 pixels of two frames.
    """

    frames: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        """How many visual tokens the clip has."""
        return self.frames // 2 * (self.height // 28) * (self.width // 28)


LENGTHS = {  # By about how many visual tokens a clip has.
    "256": ClipSize(frames=8, height=224, width=224),
    "2k": ClipSize(frames=64, height=224, width=224),
    "8k": ClipSize(frames=256, height=224, width=224),
    "10k": ClipSize(frames=320, height=224, width=224),
}
# Only ``shapes-caption`` has this length. It is a long context to compare plain decoders on.
CAPTION_ONLY_LENGTH = "10k"
PICTURE = 448, 448  # The (height, width) of a single picture.
# The (height, width) of each of two pictures, by about how many visual tokens both have together.
PICTURES = {"256": (224, 448), "2k": (896, 896)}
DEFAULT_LENGTH = "256"  # Names of suites leave this length out. A run at it takes minutes.


def _frames(scene: Scene, size: ClipSize) -> Clip:
    """Returns the frames as they are rendered, without a codec in between."""
    frames = drawing.render(scene, size.frames, size.height, size.width)
    return make_clip(frames, size.frames / FPS)


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
    """How an item is made of a scene."""

    world_task: str
    """The task of ``dialogues.conversation``, which gives the questions and the right answer."""
    max_answer_tokens: int
    task: Task = "open"
    """How the answer is scored."""
    turns: Callable[[Sequence[Exchange], int], Sequence[Exchange]] = lambda turns, seed: turns
    """(the conversation's turns, seed) -> the turns to ask."""
    media: Callable[[Scene, str], tuple[Medium, ...]] = _clip
    """(scene, a key of ``LENGTHS``) -> the item's media."""
    then: str | None = None
    """The question of a further turn about the same media, if there is one."""
    asks_next_item: bool = False
    """Whether a further turn asks the question of the next item, with that item's picture."""

    def item(self, name: str, seed: int, length: str) -> Item:
        """Returns the item of one seed.

        ``name`` is the key of this kind in ``TASKS`` or ``SECOND_TURN_TASKS``, and ``length`` is a
        key of ``LENGTHS``.
        """
        scene = scenes.scene(seed)
        first, *later = self.turns(dialogues.conversation(scene, self.world_task, seed), seed)
        later_questions = [turn.question for turn in later]
        if self.then:
            later_questions.append(self.then)
        return Item(
            id=f"{name}-{length}-{seed}",
            task=self.task,
            question=first.question,
            media=self.media(scene, length),
            answers=(first.answer,),
            later_questions=tuple(later_questions),
            meta={"seed": seed},
        )


def _with_untrained_question(turns: Sequence[Exchange], seed: int) -> Sequence[Exchange]:
    return [replace(turns[0], question=UNTRAINED_QUESTION)]


UNTRAINED_QUESTION = "Tell a friend who cannot see this clip everything that goes on in it."
TASKS: Mapping[str, Kind] = {
    "shapes-caption": Kind("describe", max_answer_tokens=256, task="caption"),
    "shapes-events": Kind("events", max_answer_tokens=128),
    # A clip has several short questions, and the seed selects one.
    "shapes-qa": Kind(
        "qa",
        max_answer_tokens=32,
        task="short",
        turns=lambda turns, seed: turns[seed % len(turns) :][:1],
    ),
    "shapes-chat": Kind("chat", max_answer_tokens=192, turns=lambda turns, seed: turns[:2]),
    "shapes-diff": Kind("diff", max_answer_tokens=128, media=_pictures),
    # The models were trained on square frames alone, and never on this question.
    "shapes-ood": Kind(
        "describe",
        max_answer_tokens=256,
        task="caption",
        turns=_with_untrained_question,
        media=_wide_clip,
    ),
}
# The second turns of the TABED paper: another question about the same picture, or the next item's
# question with its picture. The world's models were not trained on the summaries and stories that
# some of these questions want, so their answers mean nothing.
SECOND_TURN_TASKS: Mapping[str, Kind] = {
    f"shapes-second-{name}": Kind(
        "image",
        max_answer_tokens=128,
        media=_picture,
        then=question,
        asks_next_item=question is None,
    )
    for name, question in SECOND_TURNS.items()
}


@dataclass(frozen=True)
class DrawnSuite:
    """One of ``TASKS`` at one of ``LENGTHS``, or one of ``SECOND_TURN_TASKS``."""

    name: str
    task: str
    length: str
    setting: Setting

    def items(self) -> Iterator[Item]:
        kind = {**TASKS, **SECOND_TURN_TASKS}[self.task]
        seeds = range(FIRST_SEED, FIRST_SEED + (self.setting.samples or SAMPLES))
        items = (kind.item(self.task, seed, self.length) for seed in seeds)
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
                paper="the embedded world",
                samples=SAMPLES,
                max_new_tokens=kind.max_answer_tokens,
            )
            suites_by_name[name] = DrawnSuite(name, task, length, setting)
    return suites_by_name
