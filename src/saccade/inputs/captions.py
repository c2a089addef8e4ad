"""Captioners for views that read a caption (TABED's C): any callable from inputs to captions will
do; here are a Hugging Face image-to-text model and the embedded pair's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from saccade.core.errors import ModelError, first_line
from saccade.core.prompt import Inputs
from saccade.inputs.checkpoints import cached_only, check_folder, embedded
from saccade.inputs.loading import load, pick_device
from saccade.inputs.questions import put

MAX_TOKENS = 64
SHAPES = "shapes"  # what --captioner calls the embedded one
ONE = threading.Lock()  # a model may keep what it read last on itself (Qwen's rope_deltas)
TASKS = {"florence2": ("<CAPTION>", 3)}  # what a kind of model is asked for, with how many beams
SHAPES_QUESTION = "Describe the image in detail."


@dataclass(frozen=True)
class ImageToText:
    """Captions frames with a Hugging Face model: BLIP, BLIP-2, Florence-2, or one that chats.

    Called with a request's inputs (which it need not read: it has a frame of each of its videos and
    images), gives a caption a frame.
    """

    model: Any
    processor: Any
    frames: Sequence[np.ndarray]
    question: str | None = None  # for models with a chat template
    tokens: int = MAX_TOKENS  # at most

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> list[list[str]]:
        with ONE:  # another call's captions may still be under way
            return [[self._said(frame) for frame in self.frames]]

    def _said(self, frame: np.ndarray) -> str:
        task, beams = TASKS.get(self.model.config.model_type, (None, 1))
        asked: Any
        if self.question is None:
            spoken = {} if task is None else {"text": task}
            asked = self.processor(images=frame, return_tensors="pt", **spoken)
        else:
            asked = put("the captioner", self.processor, self.question, (), [frame], ())
        asked = asked.to(self.model.device)
        out = self.model.generate(
            **asked, max_new_tokens=self.tokens, do_sample=False, num_beams=beams
        )
        # what an encoder read is not in the answer
        again = "input_ids" in asked and not self.model.config.is_encoder_decoder
        given = asked["input_ids"].shape[1] if again else 0
        new = out[0, given:] if out.shape[1] > given else out[0]
        return str(self.processor.decode(new, skip_special_tokens=True)).strip()


def captioner(
    name: str, media: Sequence[Sequence[np.ndarray]], device: str | None = None
) -> ImageToText:
    """A captioner by folder or hub id, or the embedded one ("shapes"), of the middle frame of each
    video, and of each image (one frame), in prompt order.

    Raises ModelError where the model makes no text of images.
    """
    model, processor = _load(name, None if name == SHAPES else device)
    question = "Describe the image." if getattr(processor, "chat_template", None) else None
    middle = [frames[len(frames) // 2] for frames in media]
    return ImageToText(model, processor, middle, SHAPES_QUESTION if name == SHAPES else question)


def chosen(
    name: str | None,
    target: str,
    media: Sequence[Sequence[np.ndarray]],
    device: str | None = None,
) -> Callable[[Inputs], Sequence[Sequence[str]]] | None:
    """:func:`captioner`, loaded only if it is called: the one that is named, else for the embedded
    pair its own; None for another target."""
    if name is None and not embedded(target):
        return None
    return lambda inputs: captioner(name or SHAPES, media, device)(inputs)


@cache
def _load(name: str, device: str | None) -> tuple[Any, Any]:
    """A model and its processor; of the shapes world, the small draft looking at one picture."""
    if name == SHAPES:
        small = load("shapes-draft-naive")
        return small.backbone.model, small.processor
    check_folder(name, name)
    how = {"local_files_only": cached_only(name, name)}
    try:
        processor = AutoProcessor.from_pretrained(name, **how)
        model = AutoModelForImageTextToText.from_pretrained(name, use_safetensors=True, **how)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the captioner {name} cannot be loaded: {first_line(error)}") from error
    return model.to(pick_device(device)).eval(), processor
