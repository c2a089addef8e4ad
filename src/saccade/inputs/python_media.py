"""Reads the media that a Python program passes to ``saccade.load``'s models.

:func:`read` reads one medium: a path, an address, a Pillow image, an array or a tensor.
:class:`Messages` reads a whole conversation in the form of OpenAI or of chat templates, with the
media in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as PILImage

from saccade.core.errors import VideoInputError
from saccade.inputs import media
from saccade.inputs.media import Clip, FrameSampling, arrays
from saccade.inputs.media.fetch import Sources
from saccade.inputs.media.limits import bad_option

ADDRESS = re.compile(r"(data|file|https?):", re.IGNORECASE)
HOW_TO_ALLOW = (
    'saccade.load(..., media_hosts=["HOST"]) allows a host, media_root= a folder; else download it '
    "and give the file"
)


def read(value: Any, sampling: FrameSampling, sources: Sources) -> Clip:
    """Returns a video or a picture as a clip; a picture has one frame.

    ``value`` is a clip, a path, the bytes of a file or an open file, an address that ``sources``
    allow, a Pillow image, an array or a tensor (see ``arrays.rgb_frames``), or a list of pictures,
    which are the frames of a video. Raises VideoInputError.
    """
    if isinstance(value, Clip):
        return value
    if isinstance(value, str) and ADDRESS.match(value.strip()):
        return _read_address(value, sampling, sources)
    if isinstance(value, PILImage.Image):
        return arrays.picture_clip(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        array, channels_first = _as_array(value)
        if arrays.is_picture(array):
            return arrays.picture_clip(array, channels_first)
        return arrays.frames_clip(arrays.rgb_frames(array, channels_first), sampling)
    if isinstance(value, list | tuple):
        return _read_frames(value, sampling, sources)
    return media.read(value, sampling)


def read_picture(value: Any, sources: Sources) -> np.ndarray:
    """Returns one picture as bytes of [height, width, 3]; of a video or animation its first
    frame."""
    return read(value, FrameSampling(num_frames=1), sources).frames[0]


def _read_address(url: str, sampling: FrameSampling, sources: Sources) -> Clip:
    try:
        fetched = sources.load(url)
    except VideoInputError as error:
        if error.code != "not_allowed":
            raise
        raise VideoInputError(
            f"this address may not be opened: {HOW_TO_ALLOW}", error.code
        ) from error
    if fetched.kind == "frames":
        return media.read_frames(fetched.frames, sampling=sampling)
    return media.read(fetched.data if fetched.path is None else fetched.path, sampling)


def _read_frames(pictures: Sequence[Any], sampling: FrameSampling, sources: Sources) -> Clip:
    """Returns pictures as the frames of one video, all of the first one's size."""
    frames = stack_frames([read_picture(each, sources) for each in pictures])
    return arrays.frames_clip(frames, sampling)


def stack_frames(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Returns pictures as one array [frame, height, width, 3], all of the first one's size. Raises
    VideoInputError if there are none."""
    if not pictures:
        raise bad_option("a list of frames is empty: give at least one picture")
    height, width = pictures[0].shape[:2]
    frames = []
    for picture in pictures:
        if picture.shape[:2] != (height, width):
            picture = np.asarray(PILImage.fromarray(picture).resize((width, height)))
        frames.append(picture)
    return np.stack(frames)


def _as_array(value: np.ndarray | torch.Tensor) -> tuple[np.ndarray, bool]:
    """Returns an array or a tensor as an array, and whether channels usually come first in such a
    value: they do in tensors, and not in arrays."""
    if isinstance(value, np.ndarray):
        return value, False
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy(), True


# -- messages --------------------------------------------------------------------------------------

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXT_TYPES = ("text", "input_text")
# The keys under which a part of a message has its medium, by the part's type.
PICTURE_KEYS = {
    "image": ("image", "url", "path", "base64"),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
}
VIDEO_KEYS = {"video": ("video", "url", "path"), "video_url": ("video_url",)}
# Keys with options of a video in a message, and the field of FrameSampling that each sets.
VIDEO_OPTIONS = {
    "fps": "fps",
    "num_frames": "num_frames",
    "nframes": "num_frames",
    "start": "start",
    "video_start": "start",
    "end": "end",
    "video_end": "end",
}


class Messages:
    """A conversation in the form of chat templates or of OpenAI, with its media read.

    ``turns`` have the form that ``questions.conversation_inputs`` takes. ``clips`` and ``images``
    are in the order in which the turns mention them.
    """

    def __init__(self, messages: Sequence[Any], sampling: FrameSampling, sources: Sources) -> None:
        self.clips: list[Clip] = []
        self.images: list[np.ndarray] = []
        self._sampling, self._sources = sampling, sources
        self.turns = [self._read_turn(number, turn) for number, turn in enumerate(messages, 1)]

    @property
    def continues_last_turn(self) -> bool:
        """Whether the last message is the assistant's, which the answer then continues."""
        return bool(self.turns[-1]["role"] == "assistant")

    def _read_turn(self, number: int, turn: Any) -> dict[str, Any]:
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if not isinstance(role, str) or role not in ROLES:
            raise bad_option(
                f"message {number} has the role {role!r}: system, user and assistant are read"
            )
        content = turn.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list | tuple):
            raise bad_option(f"message {number} has no content: a text, or a list of parts")
        return {"role": ROLES[role], "content": [self._read_part(number, part) for part in parts]}

    def _read_part(self, number: int, part: Any) -> dict[str, str]:
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in TEXT_TYPES and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        readers: list[tuple[Mapping[str, tuple[str, ...]], Callable[[Any, Any], str]]] = [
            (PICTURE_KEYS, self._add_picture),
            (VIDEO_KEYS, self._add_video),
        ]
        for keys, add in readers:
            for key in keys.get(str(kind), ()):
                if part.get(key) is not None:
                    return {"type": add(part[key], part)}
        readable = ", ".join([TEXT_TYPES[0], *PICTURE_KEYS, *VIDEO_KEYS])
        raise bad_option(
            f"message {number} has a part of type {kind!r} without content that can be read: the "
            f"types are {readable}, as in {{'type': 'image', 'image': picture}}"
        )

    def _add_picture(self, value: Any, part: Mapping[str, Any]) -> str:
        value = _address_of(value)
        # Under the key "base64" the value may be bare base64, without a "data:...;base64," before
        # it.
        is_base64 = part.get("base64") is value and isinstance(value, str)
        if is_base64 and not value.startswith("data:"):
            value = f"data:image;base64,{value}"
        self.images.append(read_picture(value, self._sources))
        return "image"

    def _add_video(self, value: Any, part: Mapping[str, Any]) -> str:
        # Rows of a dataset often have a key with the value None, which is no option.
        options = {
            field: part[key] for key, field in VIDEO_OPTIONS.items() if part.get(key) is not None
        }
        sampling = self._sampling
        # Of ``fps``, ``num_frames`` and ``every`` only one can be set. So if the message has one of
        # the first two, all three are cleared before it is set.
        if not options.keys().isdisjoint(("fps", "num_frames")):
            sampling = replace(sampling, fps=None, num_frames=None, every=False)
        sampling = replace(sampling, **options)
        self.clips.append(read(_address_of(value), sampling, self._sources))
        return "video"


def is_messages(value: Any) -> bool:
    """Returns whether this is a list of messages, and not of media."""
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(isinstance(each, Mapping) for each in value)


def _address_of(value: Any) -> Any:
    """Returns the value itself, or the address in OpenAI's form ``{"url": ADDRESS}``."""
    return value.get("url") if isinstance(value, Mapping) else value


Medium = str | Path | bytes | Clip | PILImage.Image | np.ndarray | torch.Tensor
"""One video or picture."""
