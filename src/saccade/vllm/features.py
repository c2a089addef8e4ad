"""What vLLM carries of a request's images and videos, as the draft's own processor would say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.core.prompt import Inputs
from saccade.model.families import KINDS, Kind


def batches(features: Sequence[Any]) -> list[Mapping[str, Any]]:
    """What vLLM would give its model for these features: keyword arguments, batch by batch."""
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    items = [(feature.modality, feature.data) for feature in features]
    return [batch for _, _, batch in group_and_batch_mm_kwargs(items)]


def whole(features: Sequence[Any]) -> bool:
    """Whether the pixels of all are there: vLLM lets go of those it will not look at again."""
    return all(any(key.startswith("pixel") for key in feature.data) for feature in features)


def inputs(
    ids: Sequence[int],
    features: Sequence[Any],
    placeholders: Mapping[int, Kind],
    processor: Any,
) -> Inputs | None:
    """A request as the draft's model takes it; None where nothing is left of a medium."""
    if any(feature.data is None for feature in features):
        return None
    row = torch.tensor(ids, dtype=torch.long)[None]
    kinds = torch.zeros_like(row)
    for token, kind in placeholders.items():
        kinds[row == token] = 1 + KINDS.index(kind)
    found: dict[str, Any] = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if not features:
        return found
    found["mm_token_type_ids"] = kinds
    for batch in batches(features):
        for key, value in batch.items():
            if isinstance(value, Tensor):
                found[key] = torch.cat([found[key], value]) if key in found else value
    for key, half in (("pixel_values", "image"), ("pixel_values_videos", "video")):
        if key in found:
            found[key] = normal(found[key], getattr(processor, f"{half}_processor", None))
    return found


def normal(pixels: Tensor, rule: Any) -> Tensor:
    """Pixels as a tower reads them: vLLM may carry bytes, and scale them beside the model.

    Patches are [patch, channel x ...], channel first; pictures [..., channel, height, width].
    """
    if pixels.dtype != torch.uint8:
        return pixels
    mean, std = (torch.tensor(each) for each in (rule.image_mean, rule.image_std))
    planes = pixels.float() * rule.rescale_factor
    if pixels.ndim == 2:
        planes = planes.view(len(pixels), len(mean), -1)
        return ((planes - mean[:, None]) / std[:, None]).view(len(pixels), -1)
    return (planes - mean[:, None, None]) / std[:, None, None]
