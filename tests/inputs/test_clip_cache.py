"""Claims about clips that a later prompt need not process again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import BatchFeature

from saccade.inputs.clip_cache import ClipCache


def processor_of(calls: list[int]) -> Any:
    """A processor that multiplies each clip by an option, and counts the clips that it reads."""

    def preprocess(videos: list[torch.Tensor], video_metadata: Any = None, factor: int = 1) -> Any:
        calls.append(len(videos))
        return BatchFeature({"pixels": torch.cat([factor * video for video in videos])})

    return SimpleNamespace(video_processor=SimpleNamespace(preprocess=preprocess))


def test_a_clip_is_processed_once_for_each_option() -> None:
    """Claim: a clip of the prompt before is not processed again, and is where an option of the
    processor has another value. Fails if only the names of options are compared, so that a clip
    comes back as another request had asked for it."""
    calls: list[int] = []
    cache, processor = ClipCache(), processor_of(calls)
    clips, facts = [torch.full((1, 2), float(n)) for n in range(2)], [{"fps": 2.0}, {"fps": 2.0}]

    def process(factor: int) -> torch.Tensor:
        with cache.processing(processor):
            owner = processor.video_processor
            pixels: torch.Tensor = owner.preprocess(clips, video_metadata=facts, factor=factor)[
                "pixels"
            ]
        return pixels

    assert torch.equal(process(1), torch.cat(clips))
    calls.clear()
    assert torch.equal(process(1), torch.cat(clips)) and not calls
    assert torch.equal(process(3), 3 * torch.cat(clips)) and calls
