"""Measures seconds and memory of a long video's prefill and of one verification after it.

``python -m lab prefill`` and ``verify`` print these. A verification is a forward of the target that
judges the tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

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
from saccade.world.suites import LENGTHS, suites


@dataclass(frozen=True)
class Reading:
    """The seconds and bytes of reading one video and verifying one draft.

    A peak is the most memory in use during a part of the work, less the memory in use before that
    part began. It is None where nothing measures it.
    """

    visual_tokens: int
    prompt_tokens: int
    vision_seconds: float
    prefill_seconds: float
    verify_seconds: float  # Of one forward of ``rows`` tokens, and of keeping one of them.
    rows: int  # Tokens of the verification: the one that is pending, and those of a draft.
    weights: int  # Bytes.
    kv: int  # Bytes of the request's KV cache after the verification.
    vision_peak: int | None  # Bytes.
    prefill_peak: int | None  # Bytes; of the prefill and the verification, with the cache.


def measure_reading(target: Loaded, tokens: int, *, rows: int = 8, record: bool = False) -> Reading:
    """Times reading a clip of about ``tokens`` visual tokens, and verifying one draft after it.

    The verification has ``rows`` tokens. With ``record``, the prefill records the text's attention
    on the video too, by which some views choose. Raises OptionError for a model whose
    inputs do not have their videos' grids.
    """
    backbone = target.backbone
    item = next(iter(suites()["shapes-caption"].items()))
    clip = item.media[0].read()
    assert isinstance(clip, Clip)
    inputs = stretch_video(ask(target, item.question, clips=[clip]), tokens)
    peak = PeakMemory(backbone.devices)
    clock = Clock(backbone.device)
    prompts = backbone.prompts(inputs)
    vision_seconds = clock.lap()
    vision_peak = peak.bytes()
    peak = PeakMemory(backbone.devices)
    session = Session(backbone, [Sampling()], room=rows)
    clock.lap()  # Making the session is not part of the prefill's time.
    session.prefill(prompts, record=record)
    prefill = clock.lap()
    session.score({0: chain([0] * (rows - 1))})
    session.commit({0: [0]})
    return Reading(
        visual_tokens=prompts[0].visual_tokens,
        prompt_tokens=len(prompts[0]),
        vision_seconds=vision_seconds,
        prefill_seconds=prefill,
        verify_seconds=clock.lap(),
        rows=rows,
        weights=sum(each.numel() * each.element_size() for each in backbone.model.parameters()),
        kv=session.requests[0].cache.bytes,
        vision_peak=vision_peak,
        prefill_peak=peak.bytes(),
    )


def measure_recording(target: Loaded, tokens: int, turns: int) -> tuple[float, float]:
    """Returns the median seconds of a prefill, and of one that records attention.

    In each of ``turns`` turns one prefill of either kind is timed. Two turns before them warm up
    and do not count.
    """
    plain, recorded = [], []
    for turn in range(turns + 2):
        seconds = [
            measure_reading(target, tokens, record=record).prefill_seconds
            for record in (False, True)
        ]
        if turn > 1:
            plain.append(seconds[0])
            recorded.append(seconds[1])
    return median(plain), median(recorded)


def measure_verifications(
    target: Loaded, keys: int, rows: Collection[int], turns: int
) -> dict[int, float]:
    """Returns the seconds of a forward over ``keys`` cached tokens, by its number of rows.

    In each of ``turns`` turns one forward of each number of rows is timed, and the fastest counts.
    """
    session = filled_session(target.backbone, keys, requests=1, room=max(rows))
    seconds = [
        {each: time_step(session, keys, each) for each in sorted(rows)} for _ in range(turns)
    ]
    return {each: min(turn[each] for turn in seconds) for each in seconds[0]}


def stretch_video(inputs: Inputs, tokens: int) -> Inputs:
    """Returns a video prompt with its frames repeated to about ``tokens`` visual tokens.

    The given video counts as 256 visual tokens, which it has where a token covers 28 x 28 pixels.
    Its processed inputs are repeated and not its frames, because the processor would take long over
    so long a clip, or shorten it. Only the model's work is timed here. Raises OptionError
    for a model whose inputs do not have their videos' grids.
    """
    if "video_grid_thw" not in inputs or "mm_token_type_ids" not in inputs:
        raise OptionError(
            "this model's inputs do not have their videos' grids, so no longer video can be made; "
            "a Qwen-VL model would work"
        )
    times = max(1, round(tokens / LENGTHS["256"].tokens))
    visual = inputs["mm_token_type_ids"][0] != 0
    first, last = (int(visual.nonzero()[i]) for i in (0, -1))

    def repeat_visual(row: Tensor) -> Tensor:
        middle = row[:, first : last + 1].repeat(1, times)
        return torch.cat([row[:, :first], middle, row[:, last + 1 :]], 1)

    stretched: dict[str, Any] = dict(inputs)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        stretched[name] = repeat_visual(stretched[name])
    stretched["pixel_values_videos"] = stretched["pixel_values_videos"].repeat(times, 1)
    stretched["video_grid_thw"] = stretched["video_grid_thw"] * torch.tensor([times, 1, 1])
    return stretched
