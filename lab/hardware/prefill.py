"""How a long video is read: seconds and memory of one prefill and of one verification after it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from saccade.bench.suites.shapes import LENGTHS, suites
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock
from saccade.core.tree import chain
from saccade.drafting.shapes.cost_measurement import filled_session, time_step
from saccade.inputs import Loaded, ask
from saccade.inputs.media import Clip
from saccade.model.memory import PeakMemory
from saccade.model.session import Session


@dataclass(frozen=True)
class Reading:
    """Seconds and bytes; each peak is above what was held before that part began."""

    visual_tokens: int
    prompt_tokens: int
    vision_seconds: float
    prefill_seconds: float
    verify_seconds: float  # of one forward of ``rows``
    rows: int
    weights: int
    kv: int  # the cache made for the prompt
    vision_peak: int | None
    prefill_peak: int | None  # the cache, one chunk and the verification


def read(target: Loaded, tokens: int, *, rows: int = 8, record: bool = False) -> Reading:
    """Reads a clip of about ``tokens`` visual tokens, recording attention where asked.

    Raises OptionError for a model whose prompts do not say their grid.
    """
    backbone = target.backbone
    item = next(iter(suites()["shapes-caption"].items()))
    clip = item.media[0].read()
    assert isinstance(clip, Clip)
    inputs = stretched(ask(target, item.question, clips=[clip]), tokens)
    peak, clock = PeakMemory(backbone.devices), Clock(backbone.device)
    prompts = backbone.prompts(inputs)
    vision, seen = clock.lap(), peak.bytes()
    peak = PeakMemory(backbone.devices)
    session = Session(backbone, [Sampling()], room=rows)
    clock.lap()
    session.prefill(prompts, record=record)
    prefill = clock.lap()
    session.score({0: chain([0] * (rows - 1))})
    session.commit({0: [0]})
    return Reading(
        visual_tokens=prompts[0].visual_tokens,
        prompt_tokens=len(prompts[0]),
        vision_seconds=vision,
        prefill_seconds=prefill,
        verify_seconds=clock.lap(),
        rows=rows,
        weights=sum(each.numel() * each.element_size() for each in backbone.model.parameters()),
        kv=session.requests[0].cache.bytes,
        vision_peak=seen,
        prefill_peak=peak.bytes(),
    )


def recording(target: Loaded, tokens: int, turns: int) -> tuple[float, float]:
    """Median seconds of a prefill, and of one that writes attention down, in turns; the first two
    turns warm up."""
    plain, recorded = [], []
    for turn in range(turns + 2):
        found = [read(target, tokens, record=record).prefill_seconds for record in (False, True)]
        if turn > 1:
            plain.append(found[0])
            recorded.append(found[1])
    return median(plain), median(recorded)


def verifications(target: Loaded, keys: int, rows: Collection[int], turns: int) -> dict[int, float]:
    """The least seconds of a forward of each number of rows over so many keys, in turns."""
    session = filled_session(target.backbone, keys, 1, max(rows))
    took = [{each: time_step(session, keys, each) for each in sorted(rows)} for _ in range(turns)]
    return {each: min(turn[each] for turn in took) for each in took[0]}


def stretched(inputs: Inputs, tokens: int) -> Inputs:
    """A video prompt with its frames repeated until they are about ``tokens`` visual tokens.

    No processor draws, resizes or limits so long a clip here: it is the model's reading we time.
    """
    if "video_grid_thw" not in inputs or "mm_token_type_ids" not in inputs:
        raise OptionError("only a model that is told its videos' grids can be given a longer one")
    times = max(1, round(tokens / LENGTHS["256"].tokens))
    visual = inputs["mm_token_type_ids"][0] != 0
    first, last = (int(visual.nonzero()[i]) for i in (0, -1))

    def longer(row: Tensor) -> Tensor:
        middle = row[:, first : last + 1].repeat(1, times)
        return torch.cat([row[:, :first], middle, row[:, last + 1 :]], 1)

    found: dict[str, Any] = dict(inputs)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        found[name] = longer(found[name])
    found["pixel_values_videos"] = found["pixel_values_videos"].repeat(times, 1)
    found["video_grid_thw"] = found["video_grid_thw"] * torch.tensor([times, 1, 1])
    return found
