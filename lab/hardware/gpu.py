"""What a GPU should reach by its memory's bandwidth, and what it does: random weights, real shapes.

A step reads every weight it passes through and every cached key once; nothing is faster than that.
Weights are random (speed does not depend on them), acceptance is imposed at the papers' figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lab.hardware.imposed import ImposedAcceptance, imposed
from saccade.bench.hardware.published import CONFIGS
from saccade.bench.peers import hf
from saccade.core.prompt import Inputs
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.shapes.cost_measurement import Costs
from saccade.engine.generate import run
from saccade.inputs import Loaded, architectures
from saccade.inputs.footprint import Footprint, footprint
from saccade.methods import resolve
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, as published (SXM)
ROWS = (1, 2, 4, 8, 16, 26)
SIDE = 28  # of a frame, in visual tokens


@dataclass(frozen=True)
class Reported:
    """How much a paper's draft was accepted: SpecVLM, Table 2, 32B with 7B, VideoDetailCaption."""

    method: str
    accepted: float  # drafted tokens a round: the paper's tau, without the target's own
    levels: int
    nodes: int
    keep: float  # of the visual tokens the draft reads

    @property
    def tau(self) -> float:
        """Tokens emitted a round."""
        return self.accepted + 1


REPORTED = (Reported("sd-tree", 3.27, 5, 25, 1.0), Reported("specvlm", 3.23, 5, 25, 0.1))


@dataclass(frozen=True)
class Step:
    """Milliseconds of a forward of some rows, as bytes over bandwidth and as measured."""

    model: str
    rows: int
    context: int
    floor: float
    captured: float
    ordinary: float
    difference: float  # of the two kinds' logits, at most

    @property
    def ratio(self) -> float:
        return self.captured / self.floor


@dataclass(frozen=True)
class Ran:
    """A whole answer with acceptance imposed, against plain decoding and ``generate``."""

    method: str
    tokens_per_second: float
    over_ar: float
    over_generate: float


def config(name: str, *, tiny: bool = False) -> Any:
    """A published shape, its vision tower cut to one layer: only its output's width matters here.

    ``tiny`` keeps the kind and shrinks everything, to try the command without a GPU.
    """
    made = CONFIGS[name]()
    made.vision_config.depth, made.vision_config.fullatt_block_indexes = 1, [0]
    if tiny:
        text, vision = made.text_config, made.vision_config
        text.num_attention_heads, text.num_key_value_heads = 2, 1
        text.hidden_size, text.intermediate_size, text.vocab_size = 256, 256, 2048
        text.num_hidden_layers = 4 if "32B" in name else 2
        text.layer_types = text.layer_types[: text.num_hidden_layers]
        vision.hidden_size, vision.intermediate_size, vision.num_heads = 64, 64, 2
        vision.out_hidden_size = text.hidden_size
        made.image_token_id, made.video_token_id = 2000, 2001
        made.vision_start_token_id, made.vision_end_token_id = 2002, 2003
    return made


def build(made: Any, device: torch.device, dtype: torch.dtype) -> Backbone:
    """A model of that shape with random weights, made where it is to run."""
    with torch.device(device):
        model = architectures.model_class(made).from_config(made, dtype=dtype)
    return Backbone(model.to(device).eval())


def floor(shape: Footprint, tokens: int, bandwidth: float, size: int = 2) -> float:
    """Seconds to read all weights a token passes through, and its keys and values, once."""
    return shape.step(size, tokens, size) / bandwidth


def predicted(
    target: str, draft: str, tokens: int, bandwidth: float
) -> list[tuple[Reported, float, float, float]]:
    """(what was reported, T(1), a draft's step, speedup over plain decoding) by bandwidth alone."""
    big, small = footprint(CONFIGS[target]()), footprint(CONFIGS[draft]())
    found = []
    for each in REPORTED:
        once = floor(big, tokens, bandwidth)
        step = floor(small, int(tokens * each.keep), bandwidth)
        costs = Costs((1, each.nodes + 1), (once, once), step)
        found.append((each, once, step, allowed(costs, each)))
    return found


def steps(
    name: str,
    model: Backbone,
    context: int,
    bandwidth: float,
    *,
    rows: Sequence[int] = ROWS,
    repeat: int = 15,
) -> list[Step]:
    """Times verifying forwards over a filled cache, of fixed shape and ordinary, and compares."""
    shape, found = footprint(model.model.config), []
    session = cost_measurement.filled_session(model, context, 1, 4 * max(rows), cuda_graphs=True)
    fixed = session.cuda_graphs
    least = floor(shape, context, bandwidth, model.dtype.itemsize)
    for count in rows:
        times, logits = [], []
        for session.cuda_graphs in (fixed, None):
            cost_measurement.time_step(session, context, count)
            capture_new_sizes()
            took = [cost_measurement.time_step(session, context, count) for _ in range(repeat + 3)][
                3:
            ]
            request = session.requests[0]
            assert request.root_logits is not None
            times.append(median(took) * 1e3)
            logits.append(torch.stack([request.root_logits, *request.node_logits]).float())
        apart = float((logits[0] - logits[1]).abs().max())
        found.append(Step(name, count, context, least * 1e3, times[0], times[1], apart))
    return found


def projected(target: Sequence[Step], draft: Step, each: Reported) -> float:
    """The speedup measured forwards allow at a reported acceptance."""
    rows = tuple(step.rows for step in target)
    costs = Costs(rows, tuple(step.captured for step in target), draft.captured)
    return allowed(costs, each)


def allowed(costs: Costs, each: Reported) -> float:
    """tau T(1) / (levels T_q + T(rows)): what bare forwards allow of a reported acceptance."""
    spent = each.levels * costs.draft + costs.verify(each.nodes + 1)
    return each.tau * costs.verify(1) / spent


def inputs(made: Any, tokens: int, seed: int = 0) -> Inputs:
    """A video of noise of about ``tokens`` visual tokens, and a few ids around it."""
    side = min(SIDE, max(1, int(tokens**0.5)))
    times = max(1, round(tokens / side**2))
    generator = torch.Generator().manual_seed(seed)
    visual = [made.video_token_id] * (times * side * side)
    text = torch.randint(0, 2000, (40,), generator=generator).tolist()
    start, end = made.vision_start_token_id, made.vision_end_token_id
    ids = torch.tensor([[*text[:8], start, *visual, end, *text[8:]]])
    patch = 2 * 3 * made.vision_config.patch_size**2
    pixels = torch.randn(times * (2 * side) ** 2, patch, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == made.video_token_id).int() * 2,
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[times, 2 * side, 2 * side]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }


def answers(
    target: Backbone, draft: Backbone, prompt: Inputs, *, tokens: int, repeat: int = 3
) -> list[Ran]:
    """Decodes ``tokens`` by every reported method, plainly, and by Hugging Face, interleaved."""
    prompt = {**prompt, "pixel_values_videos": prompt["pixel_values_videos"].to(target.dtype)}
    recipes: dict[str, Any] = {"ar": "ar"}
    for each in REPORTED:
        recipes[each.method] = imposed(resolve(each.method), ImposedAcceptance(each.accepted))
    speeds: dict[str, list[float]] = {name: [] for name in (*recipes, "hf")}
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    for turn in range(repeat + 1):  # the first warms up
        for name, method in recipes.items():
            result = run(target, prompt, draft=draft, method=method, eos_token_id=-1, **settings)
            if result.fallback_reason:
                raise RuntimeError(f"{name} stopped drafting: {result.fallback_reason}")
            if turn:
                speeds[name].append((len(result.ids) - 1) / result.timings.decode)
        peer = hf(Loaded("random", target, None), None, prompt, {**settings, "eos_token_id": None})
        if turn:
            speeds["hf"].append(peer.counted / peer.decode)
    middle = {name: median(own) for name, own in speeds.items()}
    return [
        Ran(name, speed, speed / middle["ar"], speed / middle["hf"])
        for name, speed in middle.items()
    ]
