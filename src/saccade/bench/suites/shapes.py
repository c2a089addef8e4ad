"""Suites of the synthetic world: made from seeds, with the true answers, at several lengths.

Seeds start where neither training nor ``evidence eval`` nor ``calibrate`` ever went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from saccade.bench.suites.types import Item, Medium, Setting, Task
from saccade.inputs.media import Clip
from saccade.world import descriptions, drawing, scenes, text
from saccade.world.scenes import Scene
from saccade.world.text import Turn

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
PICTURES = {"256": (224, 448), "2k": (896, 896)}  # height, width; the processor takes no more
SHORTEST = "256"  # of a name without a length: a run of every method takes minutes


@dataclass(frozen=True)
class Shapes:
    """One of ``TASKS`` at one of ``LENGTHS``."""

    name: str
    make: Callable[[int, str], Item]  # (seed, length)
    length: str
    setting: Setting

    def items(self) -> Iterator[Item]:
        for number in range(self.setting.samples or SAMPLES):
            yield self.make(FIRST_SEED + number, self.length)


def _clip(scene: Scene, length: Length) -> Clip:
    """The frames as drawn: no codec stands between the world and the model."""
    frames = drawing.render(scene, length.frames, length.height, length.width)
    return drawing.clip(frames, length.frames / FPS)


def _video(scene: Scene, length: str) -> Medium:
    return Medium("video", f"scene-{scene.seed}", partial(_clip, scene, LENGTHS[length]))


def _item(
    name: str, scene: Scene, length: str, turns: tuple[Turn, ...], task: Task = "open"
) -> Item:
    return Item(
        id=f"{name}-{length}-{scene.seed}",
        task=task,
        question=turns[0].question,
        media=(_video(scene, length),),
        answers=(turns[0].answer,),
        then=tuple(turn.question for turn in turns[1:]),
        meta={"seed": scene.seed},
    )


def _caption(seed: int, length: str) -> Item:
    scene = scenes.scene(seed)
    turns = text.conversation(scene, "describe", seed)
    return _item("shapes-caption", scene, length, turns, "caption")


def _events(seed: int, length: str) -> Item:
    scene = scenes.scene(seed)
    return _item("shapes-events", scene, length, text.conversation(scene, "events", seed))


def _qa(seed: int, length: str) -> Item:
    """One short question: a clip has several, and the seed picks."""
    scene = scenes.scene(seed)
    turns = text.conversation(scene, "qa", seed)
    return _item("shapes-qa", scene, length, turns[seed % len(turns) :][:1], "short")


def _chat(seed: int, length: str) -> Item:
    scene = scenes.scene(seed)
    turns = text.conversation(scene, "chat", seed)[:2]
    return _item("shapes-chat", scene, length, turns)


def _diff(seed: int, length: str) -> Item:
    """Two pictures that differ in one or two things."""
    scene = scenes.scene(seed)
    pair = [scene, scenes.edit(scene, seed)]
    draw = [partial(drawing.image_frame, each, *PICTURES[length]) for each in pair]
    (turn,) = text.conversation(scene, "diff", seed)
    item = _item("shapes-diff", scene, length, (turn,))
    names = ("before", "after")
    media = [Medium("image", name, read) for name, read in zip(names, draw, strict=True)]
    return replace(item, media=tuple(media))


def _ood(seed: int, length: str) -> Item:
    """What training never showed: a question in other words, of frames that are not square."""
    scene = scenes.scene(seed)
    size = LENGTHS[length]
    wide = replace(size, height=size.height // 2, width=size.width * 2)
    item = _item(
        "shapes-ood", scene, length, (Turn(UNHEARD, descriptions.describe(scene)),), "caption"
    )
    return replace(item, media=(Medium("video", f"scene-{seed}", partial(_clip, scene, wide)),))


UNHEARD = "Tell a friend who cannot see this clip everything that goes on in it."
TASKS: Mapping[str, tuple[Callable[[int, str], Item], int]] = {  # maker, longest answer
    "shapes-caption": (_caption, 256),
    "shapes-events": (_events, 128),
    "shapes-qa": (_qa, 32),
    "shapes-chat": (_chat, 192),
    "shapes-diff": (_diff, 128),
    "shapes-ood": (_ood, 256),
}


def suites() -> dict[str, Shapes]:
    """Every suite by name: ``shapes-caption`` (256 visual tokens), ``shapes-caption-2k``, ..."""
    found = {}
    for task, (make, longest) in TASKS.items():
        for length in PICTURES if task == "shapes-diff" else LENGTHS:
            if length == LONG and make is not _caption:
                continue
            name = task if length == SHORTEST else f"{task}-{length}"
            setting = Setting("the embedded world", samples=SAMPLES, max_new_tokens=longest)
            found[name] = Shapes(name, make, length, setting)
    return found
