"""From messages to a model's inputs: media loaded, decoded in a guarded process, and worded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError

from saccade.core.prompt import Inputs
from saccade.engine.generate import Asked, settled
from saccade.inputs import Loaded, captions
from saccade.inputs.media import Clip, Limits, Sampling
from saccade.inputs.media.fetch import Sources
from saccade.inputs.media.guard import Guard, Stop
from saccade.inputs.questions import converse, same_inputs
from saccade.model import families
from saccade.serve.wire import ChatRequest, ImagePart, TextPart, Trouble, VideoPart, parts

CHARACTERS = 16  # a token holds on average at most; more text is not even tokenized
MODEL = "this model"  # a checkpoint's name may be a path of this machine
ROLES = {"developer": "system"}  # the newer name of the same


@dataclass(frozen=True)
class Pair:
    """The models a server answers with."""

    target: Loaded
    draft: Loaded | None = None
    captioner: str | None = None  # for views that read a caption


@dataclass(frozen=True)
class Media:
    """What clients may send, and how it is looked at."""

    sources: Sources = Sources()
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    most: int = 16  # of one request
    options: bool = False  # whether a request may choose its frames


@dataclass(frozen=True)
class Seen:
    """A request's media, in the order they stand in."""

    clips: tuple[Clip, ...]
    images: tuple[np.ndarray, ...]

    @property
    def warnings(self) -> list[str]:
        return [warning for clip in self.clips for warning in clip.warnings]

    @property
    def frames(self) -> list[np.ndarray]:
        return [*self.images, *(frame for clip in self.clips for frame in clip.frames)]


class Reader:
    """Loads, decodes and words requests; any thread may call."""

    def __init__(self, pair: Pair, media: Media, *, most_tokens: int, guard: Guard) -> None:
        self._pair, self._media, self._guard = pair, media, guard
        self._most_tokens = most_tokens
        text = families.text_config(pair.target.backbone.model.config)
        self._context = int(text.max_position_embeddings)
        self._most_text = CHARACTERS * self._context
        self._own_draft = None
        if pair.draft is not None and not same_inputs(pair.target, pair.draft):
            self._own_draft = pair.draft
        # a tokenizer's settings are switched while it works
        self._processor = threading.Lock()

    def check(self, asked: ChatRequest) -> None:
        """Refuses, before any work, what this server does not allow. Raises Trouble."""
        if asked.addresses > self._media.most:
            most = self._media.most
            raise Trouble(400, f"messages: at most {most} images and videos together", "messages")
        if not self._media.options:
            for name in ("media_io_kwargs", "mm_processor_kwargs"):
                if getattr(asked, name) is not None:
                    raise Trouble(
                        400, f"{name} is not allowed here: the server chooses the frames", name
                    )
        if asked.limit is not None and asked.limit > self._most_tokens:
            name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
            most = self._most_tokens
            raise Trouble(400, f"{name}: this server writes at most {most} tokens", name)
        if asked.characters > self._most_text:
            said = f"{asked.characters} characters are more than this model reads: send less text"
            raise Trouble(400, said, "messages")
        self._sampling(asked)

    def look(self, asked: ChatRequest, stop: Stop | None = None) -> Seen:
        """Loads and decodes the media; another thread may stop it. Raises VideoInputError."""
        stop, sampling = stop or Stop(), self._sampling(asked)
        clips: list[Clip] = []
        images: list[np.ndarray] = []
        for part in (part for turn in asked.messages for part in parts(turn)):
            stop.check()
            if isinstance(part, ImagePart):
                images.append(self._image(part.image_url.url, stop))
            elif isinstance(part, VideoPart):
                clips.append(self._clip(part.video_url.url, sampling, stop))
        return Seen(tuple(clips), tuple(images))

    def word(self, asked: ChatRequest, seen: Seen) -> list[Asked]:
        """What the engine takes, for each answer asked for: they differ in the noise they draw.

        Raises SaccadeError or Trouble.
        """
        own = self._own_draft
        with self._processor:
            inputs = self._inputs(self._pair.target, asked, seen)
            draft_inputs = None if own is None else self._inputs(own, asked, seen)
        return [
            self._settled(asked, inputs, draft_inputs, seen, choice)
            for choice in range(asked.n or 1)
        ]

    def _inputs(self, loaded: Loaded, asked: ChatRequest, seen: Seen) -> Inputs:
        turns = [
            {"role": ROLES.get(turn.role, turn.role), "content": [_worded(p) for p in parts(turn)]}
            for turn in asked.messages
        ]
        try:
            return converse(MODEL, loaded.processor, turns, seen.clips, seen.images)
        except TemplateError as error:
            said = " ".join(str(error).split())[:200]
            raise Trouble(400, f"the model's template refuses this: {said}", "messages") from None

    def _settled(
        self,
        asked: ChatRequest,
        inputs: Inputs,
        draft_inputs: Inputs | None,
        seen: Seen,
        choice: int,
    ) -> Asked:
        target = self._pair.target
        prompt = int(inputs["input_ids"].shape[1])
        room = self._context - prompt
        if room < (asked.limit or 1):
            wanted = f" and {asked.limit} of answer" if asked.limit else ""
            raise Trouble(
                400,
                f"{prompt} tokens of prompt{wanted} are more than the {self._context} this model "
                "reads: send fewer frames or less text",
                "messages",
            )
        seed = None if asked.seed is None else (asked.seed + choice) % 2**63
        return settled(
            target.backbone,
            inputs,
            draft_inputs=draft_inputs,
            tokenizer=target.tokenizer,
            seed=seed,
            captioner=self._captioner(seen.frames),
            max_new_tokens=asked.limit or min(room, self._most_tokens),
            stop_strings=asked.stops or None,
            **asked.sampled,
        )

    def _captioner(self, frames: Sequence[np.ndarray]) -> Any:
        name = self._pair.captioner
        if name is None:
            return None
        return captions.later(name, frames, str(self._pair.target.backbone.device))

    def _sampling(self, asked: ChatRequest) -> Sampling:
        given = [
            (name, value)
            for options in (
                asked.media_io_kwargs and asked.media_io_kwargs.video,
                asked.mm_processor_kwargs,
            )
            if options is not None
            for name, value in options.model_dump(exclude_none=True).items()
        ]
        return replace(Sampling(), **dict(given)) if given else self._media.sampling

    def _image(self, url: str, stop: Stop) -> np.ndarray:
        found = self._media.sources.load(url)
        if found.kind == "frames":
            raise Trouble(400, "an image_url holds a list of frames: use video_url", "messages")
        source = found.data if found.path is None else found.path
        return self._guard.read_image(source, self._media.limits, stop)

    def _clip(self, url: str, sampling: Sampling, stop: Stop) -> Clip:
        found, limits = self._media.sources.load(url), self._media.limits
        if found.kind == "frames":
            if sampling.num_frames is not None and sampling != self._media.sampling:
                said = "num_frames: a list of frames is taken whole, so leave it out"
                raise Trouble(400, said, "num_frames")
            return self._guard.read_frames(found.frames, sampling.fps, limits, stop)
        source = found.data if found.path is None else found.path
        return self._guard.read(source, sampling, limits, stop)


def _worded(part: Any) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image" if isinstance(part, ImagePart) else "video"}
