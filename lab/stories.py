"""Two suites of five-panel stories of the drawn world: several pictures in one question.

They repeat an experiment of the paper TABED, whose drafts were trained on single pictures and fail
on the five pictures of the data sets PororoSV and VIST (Fig. 1). The embedded pair was trained on
prompts of one picture and of two. A story's first panel is a drawn scene, and each of the next four
changes one or two things of the panel before it.

``story-panels`` has the five pictures and then the prompt by which the embedded pair learnt to
describe one picture. ``story-captions`` is worded as the paper's data sets are: the first four
pictures have captions, and that of the last is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from saccade.bench.suites.types import IMAGE_MARK, Item, Medium, Setting
from saccade.world import descriptions, dialogues, drawing, scenes
from saccade.world.scenes import Scene

PANELS = 5
FIRST_SEED = 70_000_000  # No training, calibration or other suite uses scenes from here on.
SIDE = 448  # Pixels of a panel.
VISUAL_TOKENS = PANELS * (SIDE // 28) ** 2  # 1,280 a story.


def panels(seed: int) -> tuple[Scene, ...]:
    """Returns the scenes of a story's panels, of which no two have the same description."""
    story = [scenes.scene(seed)]
    number = seed
    while len(story) < PANELS:
        edited = scenes.edit(story[-1], number)
        number += 1
        if descriptions.describe_image(edited) not in map(descriptions.describe_image, story):
            story.append(edited)
    return tuple(story)


def captions(story: Sequence[Scene]) -> list[str]:
    """Returns the true description of each panel."""
    return [descriptions.describe_image(scene) for scene in story]


def _ask_after_pictures(story: Sequence[Scene], seed: int) -> str:
    (turn,) = dialogues.conversation(story[-1], "image", seed)
    return IMAGE_MARK * PANELS + turn.question


def _ask_for_last_caption(story: Sequence[Scene], seed: int) -> str:
    parts = [
        f"{IMAGE_MARK} Caption #{number}: {caption} "
        for number, caption in enumerate(captions(story)[:-1], start=1)
    ]
    return f"{''.join(parts)}{IMAGE_MARK} Caption #{PANELS}:"


# By the suite's name: (the scenes of a story's panels, its seed) -> the question with its pictures.
QUESTIONS: Mapping[str, Callable[[Sequence[Scene], int], str]] = {
    "story-panels": _ask_after_pictures,
    "story-captions": _ask_for_last_caption,
}


@dataclass(frozen=True)
class Stories:
    """A suite of stories. The expected answer is the caption of a story's last panel."""

    name: str  # One of ``QUESTIONS``, which says how the question is worded.
    setting: Setting = Setting("TABED, App. I.1", samples=50, max_new_tokens=128)

    def items(self) -> Iterator[Item]:
        for seed in range(FIRST_SEED, FIRST_SEED + (self.setting.samples or 0)):
            story = panels(seed)
            yield Item(
                id=f"{self.name}-{seed}",
                task="caption",
                question=QUESTIONS[self.name](story, seed),
                media=tuple(
                    Medium(
                        "image", f"panel {number}", partial(drawing.image_frame, scene, SIDE, SIDE)
                    )
                    for number, scene in enumerate(story, start=1)
                ),
                answers=(captions(story)[-1],),
                meta={"seed": seed},
            )


SUITES = tuple(Stories(name) for name in QUESTIONS)
