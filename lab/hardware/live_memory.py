"""Watches a long live video, for ``python -m lab live``: memory must stay flat, answers exact.

A live video is a conversation to which frames are appended while questions are asked. Answers are
exact if they are those of transformers' ``generate`` to the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

import saccade
from saccade.core.prompt import Inputs
from saccade.inputs import Loaded, Pair
from saccade.inputs.media import Image
from saccade.world import drawing, scenes

FRAMES = 600
QUESTION = "What is happening now?"
QUESTION_FRAMES = (90, 210, 330, 450, 570)
"""After how many frames a question is asked. Memory is measured at other frames."""
MEASURED_EVERY = 100  # Memory is measured after every so many frames.
WARM_FRAMES = 200  # Buffers and allocators have reached their size after so many frames.
# The share by which memory may grow after ``WARM_FRAMES``: allocators are never perfectly still.
ALLOWED_GROWTH = 0.02
SCENE_FRAMES = 40  # Frames of one scene; then the next scene begins.
FIRST_SCENE = 20_000_101  # The seed of the first scene; the next scenes have the next seeds.
MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class LiveMemory:
    """The memory that a live video took, and whether each answer was ``generate``'s."""

    resident: dict[int, int]  # The process's resident bytes, by the number of frames so far.
    equal_answers: tuple[bool, ...]  # One for each of ``QUESTION_FRAMES``.

    @property
    def growth(self) -> float:
        """The largest growth since ``WARM_FRAMES``, as a share of the memory at that time."""
        warm = self.resident[WARM_FRAMES]
        later = [size for frames, size in self.resident.items() if frames > WARM_FRAMES]
        return max(later) / warm - 1

    @property
    def is_flat(self) -> bool:
        return self.growth <= ALLOWED_GROWTH

    @property
    def passes(self) -> bool:
        return self.is_flat and all(self.equal_answers)


def drawn_frames(size: int) -> Iterator[Image]:
    """Yields the frames of one drawn scene after another, without end.

    A frame is uint8 [size, size, 3].
    """
    number = FIRST_SCENE
    while True:
        yield from drawing.render(scenes.scene(number), SCENE_FRAMES, size)
        number += 1


def generated_ids(target: Loaded, inputs: Inputs) -> list[int]:
    """Returns the greedy ids of transformers' own ``generate``."""
    output = target.backbone.model.generate(
        **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
    )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def watch_frames(
    pair: Pair,
    method: str,
    *,
    window: str,
    size: int,
    on_measure: Callable[[int, int], None] = lambda frames, resident: None,
) -> LiveMemory:
    """Appends ``FRAMES`` frames to a live video and asks five questions meanwhile.

    ``generate`` answers the same prompts after the live video is closed, so that the memory which
    ``generate`` takes is not counted. The prompts lie on the disk until then.

    Args:
        pair: the models.
        method: how answers are drafted.
        window: how much of the video is kept, such as "64 frames".
        size: the side of a frame, in pixels.
        on_measure: is called with the number of frames so far and the resident bytes.
    """
    process = psutil.Process()
    resident: dict[int, int] = {}
    answers: dict[Path, list[int]] = {}
    with TemporaryDirectory() as folder:
        with saccade.Model(pair, method).watch(
            window=window, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        ) as live:
            for frame, number in zip(drawn_frames(size), range(1, FRAMES + 1), strict=False):
                live.append(frame)
                if number in QUESTION_FRAMES:
                    prompt = Path(folder) / f"{number}.pt"
                    torch.save(dict(live.inputs(QUESTION)), prompt)
                    answers[prompt] = list(live.ask(QUESTION).ids)
                if number % MEASURED_EVERY == 0:
                    resident[number] = process.memory_info().rss
                    on_measure(number, resident[number])
        equal = [
            generated_ids(pair.target, torch.load(prompt)) == ids for prompt, ids in answers.items()
        ]
    return LiveMemory(resident, tuple(equal))
