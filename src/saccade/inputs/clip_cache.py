"""Keeps processed clips, so that a later prompt with the same clips does not process them again.

Most clips of a live video's prompt were also in the previous prompt. Where processing several clips
together gives what processing each alone gives, only new clips are processed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from saccade.model.prefix_cache import digest
from saccade.model.vision_cache import join_values


class ClipCache:
    """What a processor's ``preprocess`` (resizing, normalising, cutting into patches) made of each
    clip of the latest prompt.

    It is for one processor, because its entries do not say whose output they are. The first prompt
    of several clips is processed both clip by clip and as a whole. Where the results differ, every
    prompt is processed as a whole from then on.
    """

    def __init__(self) -> None:
        self._outputs: dict[bytes, Mapping[str, Any]] = {}
        # Whether clips can be processed one by one with the same result; None until it was tried.
        self._is_separable: bool | None = None

    @contextmanager
    def processing(self, processor: Any) -> Iterator[None]:
        """Lets the processor's video processor reuse what it made of the latest prompt's clips."""
        owner = getattr(processor, "video_processor", None)
        if owner is None:
            yield
            return
        # While this lasts, an attribute of the instance hides the method of its class. If there was
        # such an attribute before, it is restored at the end.
        instance_preprocess = vars(owner).get("preprocess")
        preprocess = owner.preprocess
        vars(owner)["preprocess"] = lambda videos, **kwargs: self._preprocess_new_clips(
            preprocess, videos, kwargs
        )
        try:
            yield
        finally:
            del vars(owner)["preprocess"]
            if instance_preprocess is not None:
                vars(owner)["preprocess"] = instance_preprocess

    def _preprocess_new_clips(self, preprocess: Any, videos: Any, kwargs: dict[str, Any]) -> Any:
        """Returns what ``preprocess`` makes of all these videos. Where clips can be processed one
        by one with the same result, it is called for new ones alone."""
        metadata = kwargs.get("video_metadata")
        are_lists = isinstance(videos, list) and isinstance(metadata, list)
        has_entry_per_video = are_lists and len(videos) == len(metadata or ())
        if self._is_separable is False or not has_entry_per_video:
            return preprocess(videos, **kwargs)
        # The output of a video depends on the video, its entry of the metadata, and all options.
        options = {name: value for name, value in kwargs.items() if name != "video_metadata"}
        keys = [digest(*pair, options) for pair in zip(videos, metadata or (), strict=True)]
        outputs: dict[bytes, Mapping[str, Any]] = {}
        for key, video, clip_metadata in zip(keys, videos, metadata or (), strict=True):
            if key not in outputs:
                output = self._outputs.get(key)
                if output is None:
                    output = preprocess([video], **{**kwargs, "video_metadata": [clip_metadata]})
                outputs[key] = output
        self._outputs = outputs
        joined = join_features([outputs[key] for key in keys])
        if self._is_separable is None and len(videos) > 1:  # This is the trial.
            joint_output = preprocess(videos, **kwargs)
            self._is_separable = joined is not None and are_equal(joined, joint_output)
            return joint_output
        return preprocess(videos, **kwargs) if joined is None else joined


def join_features(parts: Sequence[Any]) -> Any:
    """Returns a processor's outputs for several clips as one output, with each field joined; None
    where a field cannot be joined."""
    joined = copy(parts[0])
    joined.data = dict(parts[0])
    for name in joined.data:
        value = join_values([part.get(name) for part in parts])
        if value is None:
            return None
        joined.data[name] = value
    return joined


def are_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Returns whether two outputs of a processor have the same fields with the same tensors. The
    values of fields that are not tensors in both are not compared."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name])
        for name in first
        if isinstance(first[name], Tensor) and isinstance(second[name], Tensor)
    )
