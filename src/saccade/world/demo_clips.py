"""Drawn clips for commands and the web page: examples, clips for calibration, and suites.

``saccade.world`` draws short videos of moving shapes from a seed, so it knows the right answers to
questions about them. Commands and the page use it through this module, except for ``saccade
train-draft``. Commands import this module late, where they need a drawn clip, because most runs
need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import OptionError, first_line
from saccade.inputs.media.clip import Clip, make_clip
from saccade.world import descriptions, dialogues, drawing, scenes

if TYPE_CHECKING:
    from saccade.world.suites import DrawnSuite

# The first seed of the calibration clips. No model was trained on their scenes, and `lab eval` uses
# others.
CALIBRATION_SEED = 30_000_000
CALIBRATION_CLIPS = 4  # ``calibrate`` searches on half of them and checks on the other half.
CLIP_FRAMES = 64
CLIP_SIDE = 224  # Pixels.
DEMO_SEED = 20_000_002  # The embedded pair was not trained on this scene.
EXAMPLE_SECONDS = 8.0


@dataclass(frozen=True)
class Example:
    """A scene that no training stage drew, the number of its frames, and their size in pixels."""

    seed: int
    frames: int
    side: int

    def clip(self) -> Clip:
        """Returns the frames as they are drawn, without a codec in between."""
        pictures = drawing.render(scenes.scene(self.seed), self.frames, self.side)
        return make_clip(pictures, EXAMPLE_SECONDS)


# The examples that the web page offers, by their labels, which say how many visual tokens each has.
EXAMPLES: Mapping[str, Example] = {
    "Three shapes (2,048 visual tokens)": Example(20_000_002, frames=64, side=224),
    "Four on stripes (2,048)": Example(20_000_005, frames=64, side=224),
    "Five shapes, short (256)": Example(20_000_001, frames=32, side=112),
}


def demo_clip() -> tuple[Clip, str]:
    """Returns the clip of ``saccade demo`` and a description of what was drawn."""
    scene = scenes.scene(DEMO_SEED)
    clip = drawing.render_through_mp4(scene, CLIP_FRAMES, CLIP_SIDE)
    return clip, descriptions.describe(scene)


def calibration_clips(tell: Callable[[str], None]) -> list[Clip]:
    """Returns clips that no model was trained on; ``tell`` gets a sentence before each."""
    clips = []
    for number in range(CALIBRATION_CLIPS):
        tell(f"drawing clip {number + 1} of {CALIBRATION_CLIPS}")
        scene = scenes.scene(CALIBRATION_SEED + number)
        clips.append(drawing.render_through_mp4(scene, CLIP_FRAMES, CLIP_SIDE))
    return clips


def write_clip(file: Path, seed: int, frames: int, size: int, fps: float) -> dict[str, Any]:
    """Writes the clip of a scene as an MP4, and returns the facts of the scene, a question about it
    and the right answer.

    Raises OptionError for a clip that cannot be written.
    """
    if size % 2:
        raise OptionError(f"--size {size} must be even for MP4")
    scene = scenes.scene(seed)
    try:
        drawing.write_clip(scene, file, frames, size, fps=fps)
    except (ArithmeticError, MemoryError, OSError, ValueError) as error:
        raise OptionError(f"cannot write {file} as an .mp4: {first_line(error)}") from error
    truth = scenes.scene_facts(scene, frames, size, fps=fps)
    turn = dialogues.conversation(scene, "describe", seed)[0]
    return {**truth, "prompt": turn.question, "answer": turn.answer}


def suites() -> dict[str, DrawnSuite]:
    """Returns every suite of drawn clips for ``saccade bench``, by name."""
    from saccade.world.suites import suites

    return suites()


def default_suites() -> list[DrawnSuite]:
    """Returns the suites that ``saccade bench --suite all`` stands for.

    There is one for each of ``TASKS``, at its shortest length.
    """
    from saccade.world.suites import TASKS

    # The shortest suite of a task has the task's name. The names of longer ones end in the length.
    return [suite for name, suite in suites().items() if name in TASKS]
