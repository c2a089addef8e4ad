"""From messages to a model's inputs: media loaded, decoded in a guarded process, and worded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from saccade.core.prompt import Inputs
from saccade.engine.request import Request
from saccade.inputs import Loaded, captions
from saccade.inputs.media import Clip, Sampling
from saccade.inputs.media.guard import Guard, Stop
from saccade.inputs.questions import converse, same_inputs
from saccade.serve.errors import ApiError
from saccade.serve.settings import Settings
from saccade.serve.wire import ChatRequest, ImagePart, TextPart, VideoPart, parts

CHARACTERS = 16  # a token holds on average at most; more text is not even tokenized
MODEL = "this model"  # a checkpoint's name may be a path of this machine
ROLES = {"developer": "system"}  # the newer name of the same


class Reader:
    """Loads, decodes and words requests; any thread may call."""

    def __init__(
        self, target: Loaded, draft: Loaded | None, settings: Settings, guard: Guard
    ) -> None:
        self._target, self._media, self._guard = target, settings.media, guard
        # whose inputs are not the target's
        self._own = None if draft is None or same_inputs(target, draft) else draft
        own = captions.SHAPES if settings.target == "shapes" else None
        self._captioner = settings.captioner or own
        self._most_tokens = settings.most_tokens
        self._context = target.backbone.context or sys.maxsize
        # a tokenizer's settings are switched while it works
        self._processor = threading.Lock()

    def check(self, asked: ChatRequest) -> None:
        """Refuses, before any work, what this server does not allow. Raises ApiError."""
        if asked.addresses > self._media.most:
            most = self._media.most
            raise ApiError(400, f"messages: at most {most} images and videos together", "messages")
        if not self._media.options:
            for name in ("media_io_kwargs", "mm_processor_kwargs"):
                if getattr(asked, name) is not None:
                    raise ApiError(
                        400, f"{name} is not allowed here: the server chooses the frames", name
                    )
        if asked.limit is not None and asked.limit > self._most_tokens:
            name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
            most = self._most_tokens
            raise ApiError(400, f"{name}: this server writes at most {most} tokens", name)
        if asked.characters > CHARACTERS * self._context:
            said = f"{asked.characters} characters are more than this model reads: send less text"
            raise ApiError(400, said, "messages")
        self._sampling(asked)

    def read(self, asked: ChatRequest, stop: Stop) -> tuple[list[Request], list[str]]:
        """What the engine takes, for each answer asked for, and what is to be said of the media.

        The answers differ in the noise they draw. Another thread may stop the decoding. Raises
        SaccadeError.
        """
        sampling = self._sampling(asked)
        clips: list[Clip] = []
        images: list[np.ndarray] = []
        for part in (part for turn in asked.messages for part in parts(turn)):
            stop.check()
            if isinstance(part, ImagePart):
                images.append(self._image(part.image_url.url, stop))
            elif isinstance(part, VideoPart):
                clips.append(self._clip(part.video_url.url, sampling, stop))
        own = self._own
        with self._processor:
            inputs = self._inputs(self._target, asked, clips, images)
            draft_inputs = None if own is None else self._inputs(own, asked, clips, images)
        captioner = None
        if self._captioner is not None:
            frames = [*images, *(frame for clip in clips for frame in clip.frames)]
            device = str(self._target.backbone.device)
            captioner = captions.later(self._captioner, frames, device)
        answers = self._settled(asked, inputs, draft_inputs, captioner)
        return answers, [warning for clip in clips for warning in clip.warnings]

    def _inputs(
        self,
        loaded: Loaded,
        asked: ChatRequest,
        clips: Sequence[Clip],
        images: Sequence[np.ndarray],
    ) -> Inputs:
        turns = [
            {"role": ROLES.get(turn.role, turn.role), "content": [_worded(p) for p in parts(turn)]}
            for turn in asked.messages
        ]
        try:
            return converse(MODEL, loaded.processor, turns, clips, images)
        except TemplateError as error:
            said = " ".join(str(error).split())[:200]
            raise ApiError(400, f"the model's template refuses this: {said}", "messages") from None

    def _settled(
        self, asked: ChatRequest, inputs: Inputs, draft_inputs: Inputs | None, captioner: Any
    ) -> list[Request]:
        prompt = int(inputs["input_ids"].shape[1])
        room = self._context - prompt
        if room < (asked.limit or 1):
            wanted = f" and {asked.limit} of answer" if asked.limit else ""
            raise ApiError(
                400,
                f"{prompt} tokens of prompt{wanted} are more than the {self._context} this model "
                "reads: send fewer frames or less text",
                "messages",
            )
        return [
            Request.of(
                self._target.backbone,
                inputs,
                draft_inputs=draft_inputs,
                tokenizer=self._target.tokenizer,
                seed=None if asked.seed is None else (asked.seed + choice) % 2**63,
                captioner=captioner,
                max_new_tokens=asked.limit or min(room, self._most_tokens),
                stop_strings=asked.stops or None,
                **asked.sampled,
            )
            for choice in range(asked.n or 1)
        ]

    def _sampling(self, asked: ChatRequest) -> Sampling:
        video = None if asked.media_io_kwargs is None else asked.media_io_kwargs.video
        given: dict[str, Any] = {}
        for options in (video, asked.mm_processor_kwargs):
            given |= {} if options is None else options.model_dump(exclude_none=True)
        return Sampling(**given) if given else self._media.sampling

    def _image(self, url: str, stop: Stop) -> np.ndarray:
        found = self._media.sources.load(url)
        if found.kind == "frames":
            raise ApiError(400, "an image_url holds a list of frames: use video_url", "messages")
        source = found.data if found.path is None else found.path
        return self._guard.read_image(source, self._media.limits, stop)

    def _clip(self, url: str, sampling: Sampling, stop: Stop) -> Clip:
        found, limits = self._media.sources.load(url), self._media.limits
        if found.kind == "frames":
            if sampling.num_frames is not None and sampling != self._media.sampling:
                said = "num_frames: a list of frames is taken whole, so leave it out"
                raise ApiError(400, said, "num_frames")
            return self._guard.read_frames(found.frames, sampling.fps, limits, stop)
        source = found.data if found.path is None else found.path
        return self._guard.read(source, sampling, limits, stop)


def _worded(part: Any) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}
