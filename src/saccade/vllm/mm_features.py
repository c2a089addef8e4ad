"""Converts vLLM's multimodal features of a request into inputs of the draft's own processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import ProcessorMixin

from saccade.core.prompt import Inputs
from saccade.model.families import KINDS, Kind


def group_batches(features: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Returns a request's media as vLLM gives them to its model's encoder: one mapping of keyword
    arguments for each batch of media."""
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    items = [(feature.modality, feature.data) for feature in features]
    return [batch for _, _, batch in group_and_batch_mm_kwargs(items)]


def have_pixels(features: Sequence[Any]) -> bool:
    """Returns whether all features still have their pixels; vLLM drops those it no longer needs."""
    return all(any(key.startswith("pixel") for key in feature.data) for feature in features)


def have_videos(features: Sequence[Any]) -> bool:
    """Returns whether any feature is a video."""
    return any(feature.modality == "video" for feature in features)


def draft_inputs(
    ids: Sequence[int],
    features: Sequence[Any],
    placeholders: Mapping[int, Kind],
    processor: Any,
) -> Inputs | None:
    """Returns a request as inputs of the draft's model; None where a medium's data are gone.

    ``ids`` are the prompt's, with all placeholders. ``features`` are vLLM's, one for each medium.
    ``placeholders`` has the kind of medium of each placeholder's id, and ``processor`` is the
    draft's.
    """
    if any(feature.data is None for feature in features):
        return None
    row = torch.tensor(ids, dtype=torch.long)[None]
    inputs: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if not features:
        return inputs
    inputs["mm_token_type_ids"] = _token_kinds(row, placeholders, processor)
    for batch in group_batches(features):
        for key, value in batch.items():
            if isinstance(value, Tensor):
                inputs[key] = torch.cat([inputs[key], value]) if key in inputs else value
    for key, kind in (("pixel_values", "image"), ("pixel_values_videos", "video")):
        if key in inputs:
            inputs[key] = normalize_pixels(
                inputs[key], getattr(processor, f"{kind}_processor", None)
            )
    return inputs


def _token_kinds(
    row: Int[Tensor, "1 len"], placeholders: Mapping[int, Kind], processor: Any
) -> Int[Tensor, "1 len"]:
    """Returns the kind of each token by its number: 0 is text, 1 an image, 2 a video, 3 audio.

    The processor is asked if it can tell. An id alone does not always tell the kind: in GLM's
    prompts the placeholders of videos are those of pictures.
    """
    if isinstance(processor, ProcessorMixin):
        return torch.tensor(processor.create_mm_token_type_ids(row.tolist()))
    kinds = torch.zeros_like(row)
    for token, kind in placeholders.items():
        kinds[row == token] = 1 + KINDS.index(kind)
    return kinds


def normalize_pixels(pixels: Tensor, processor: Any) -> Tensor:
    """Returns pixels scaled and normalized as a vision tower reads them.

    vLLM may carry pixels as bytes and scale them later. Pixels of another type are scaled already,
    and are returned as they are. Pixels are either patches [patch, channel x ...], in which all
    values of a channel follow each other, or pictures [..., channel, height, width].
    """
    if pixels.dtype != torch.uint8:
        return pixels
    mean, std = (torch.tensor(each) for each in (processor.image_mean, processor.image_std))
    planes = pixels.float() * processor.rescale_factor
    if pixels.ndim == 2:
        planes = planes.view(len(pixels), len(mean), -1)
        return ((planes - mean[:, None]) / std[:, None]).view(len(pixels), -1)
    return (planes - mean[:, None, None]) / std[:, None, None]
