"""Captioners for views in which a caption stands for each video or image (C in the paper TABED).

A captioner is any callable that takes a processor's inputs and returns, for each request, the
captions of its videos and images. This module makes two kinds: a Hugging Face image-to-text model,
and the embedded pair's own captioner.
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
from saccade.inputs.checkpoints import check_folder, is_embedded, must_use_cache, source_of
from saccade.inputs.loading import load, pick_device
from saccade.inputs.questions import question_inputs

MAX_TOKENS = 64  # of a caption
SHAPES = "shapes"  # The name of the embedded captioner.
# Captions are made one call at a time, because a model may keep state of its last input on itself,
# as Qwen's does in rope_deltas.
CAPTION_LOCK = threading.Lock()
# By the type of model: the task prompt that asks it for a caption, and the number of beams.
TASKS = {"florence2": ("<CAPTION>", 3)}
SHAPES_QUESTION = "Describe the image in detail."


@dataclass(frozen=True)
class ImageToText:
    """Captions frames with a Hugging Face model: BLIP, BLIP-2, Florence-2, or a chat model.

    It belongs to one request. A call returns a list whose one entry has a caption for each of
    ``frames``, and ignores its inputs, because the frames are known already.
    """

    model: Any
    processor: Any
    frames: Sequence[np.ndarray]  # One of each video and image of the request.
    question: str | None = None  # What a chat model is asked; None for other models.
    max_tokens: int = MAX_TOKENS  # Of each caption.

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> list[list[str]]:
        with CAPTION_LOCK:
            return [[self._caption(frame) for frame in self.frames]]

    def _caption(self, frame: np.ndarray) -> str:
        task, beams = TASKS.get(self.model.config.model_type, (None, 1))
        inputs: Any
        if self.question is None:
            text = {} if task is None else {"text": task}
            inputs = self.processor(images=frame, return_tensors="pt", **text)
        else:
            inputs = question_inputs(
                "the captioner", self.processor, self.question, clips=(), images=[frame], history=()
            )
        inputs = inputs.to(self.model.device)
        out = self.model.generate(
            **inputs, max_new_tokens=self.max_tokens, do_sample=False, num_beams=beams
        )
        # A decoder-only model usually returns its prompt and then the new ids. An encoder-decoder
        # returns new ids only. If there are no more ids than the prompt has, all count as new.
        repeats_prompt = "input_ids" in inputs and not self.model.config.is_encoder_decoder
        prompt_tokens = inputs["input_ids"].shape[1] if repeats_prompt else 0
        new = out[0, prompt_tokens:] if out.shape[1] > prompt_tokens else out[0]
        return str(self.processor.decode(new, skip_special_tokens=True)).strip()


def captioner(
    name: str, media: Sequence[Sequence[np.ndarray]], device: str | None = None
) -> ImageToText:
    """Loads a captioner by folder or hub id, or the embedded one ("shapes").

    ``media`` has the frames of each video and image, in prompt order. The captioner describes the
    middle frame of each. Raises ModelError for a checkpoint that cannot be found, and for a model
    that makes no text of images.
    """
    # The embedded captioner is loaded without a device, so it is cached under one key.
    model, processor = _load(name, None if name == SHAPES else device)
    question = "Describe the image." if getattr(processor, "chat_template", None) else None
    middle = [frames[len(frames) // 2] for frames in media]
    return ImageToText(model, processor, middle, SHAPES_QUESTION if name == SHAPES else question)


def lazy_captioner(
    name: str | None,
    target: str,
    media: Sequence[Sequence[np.ndarray]],
    device: str | None = None,
) -> Callable[[Inputs], Sequence[Sequence[str]]] | None:
    """Returns a :func:`captioner` that loads its model when it is first called, or None.

    It is the captioner ``name``. Without a name it is the embedded captioner if the target is
    embedded, and None otherwise.
    """
    if name is None and not is_embedded(target):
        return None
    return lambda inputs: captioner(name or SHAPES, media, device)(inputs)


def join_captioners(
    captioners: Sequence[Callable[[Inputs], Sequence[Sequence[str]]] | None],
) -> Callable[[Inputs], list[Sequence[str]]] | None:
    """Returns one captioner for a batch of requests, made of the captioner of each; None where no
    request has one.

    A request without a captioner gets no captions.
    """
    if not any(captioners):
        return None

    def caption_all(inputs: Inputs) -> list[Sequence[str]]:
        captions: list[Sequence[str]] = []
        for each in captioners:
            # A captioner of one request returns a list with one entry, that request's captions.
            captions += each(inputs) if each else [[]]
        return captions

    return caption_all


@cache
def _load(name: str, device: str | None) -> tuple[Any, Any]:
    """Loads a captioner's model and processor. The embedded captioner is the embedded model
    ``shapes-draft-naive``."""
    if name == SHAPES:
        loaded = load("shapes-draft-naive")
        return loaded.backbone.model, loaded.processor
    source = source_of(name)
    check_folder(name, source)
    options = {"local_files_only": must_use_cache(name, source)}
    try:
        processor = AutoProcessor.from_pretrained(source, **options)
        model = AutoModelForImageTextToText.from_pretrained(source, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the captioner {name} cannot be loaded: {first_line(error)}") from error
    return model.to(pick_device(device)).eval(), processor
