"""Compares what a GPU could reach by its memory bandwidth with what it does reach.

A decoding step reads every weight that it uses and every cached key at least once, so bytes over
bandwidth are a lower bound of its time. Models have published shapes and random weights, since
speed does not depend on the weights. Drafts of random weights would never be accepted. So
acceptance is imposed: as many tokens are accepted as a paper reports, whichever tokens they are. A
captured forward is one that is replayed as a CUDA graph. ``python -m lab gpu`` prints the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
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

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # In bytes a second, as published for SXM.
ROWS = (1, 2, 4, 8, 16, 26)  # Tokens of a target's forward; 26 verify a tree of 25 nodes.
WARM_UP_STEPS = 3  # Steps before those that are timed.
FRAME_SIDE = 28  # Visual tokens along a side of a frame.
TEXT_TOKENS = 40  # Text tokens of a prompt, a few before the video and the rest after it.
TEXT_IDS = 2000  # Their ids are below this one, which is the first special id of a tiny config.


@dataclass(frozen=True)
class Reported:
    """The acceptance that a paper reports for a method.

    Source: SpecVLM, Table 2, Qwen2.5-VL 32B with 7B on VideoDetailCaption.
    """

    method: str
    accepted: float  # Drafted tokens accepted in a round, which this paper calls tau.
    levels: int  # Of its draft tree, for each of which the draft makes one step.
    nodes: int  # Of its draft tree.
    keep: float  # The share of the visual tokens that the draft reads.

    @property
    def tau(self) -> float:
        """Tokens emitted in a round, the target's own token included."""
        return self.accepted + 1


REPORTED = (
    Reported("sd-tree", accepted=3.27, levels=5, nodes=25, keep=1.0),
    Reported("specvlm", accepted=3.23, levels=5, nodes=25, keep=0.1),
)


@dataclass(frozen=True)
class Step:
    """The milliseconds of one forward, as measured and by bytes over bandwidth."""

    model: str  # "target" or "draft".
    rows: int  # Tokens that the forward scores.
    context: int  # Cached tokens.
    floor: float  # Milliseconds by bytes over bandwidth, which are the lower bound.
    captured: float  # Measured milliseconds as a CUDA graph: the median over repeats.
    ordinary: float  # Measured milliseconds without a graph: the median over repeats.
    # The largest difference between a logit of the captured forward and of the ordinary one.
    difference: float

    @property
    def ratio(self) -> float:
        """How many times the lower bound the captured forward takes."""
        return self.captured / self.floor


@dataclass(frozen=True)
class AnswerSpeed:
    """The speed of decoding by one method with imposed acceptance: the median over turns."""

    method: str
    tokens_per_second: float
    over_ar: float  # Times as fast as plain decoding.
    over_generate: float  # Times as fast as transformers' ``generate``.


def published_config(name: str, *, tiny: bool = False) -> Any:
    """Returns the config of a published model, with its vision tower cut to one layer.

    Only the width of the tower's output matters here. ``tiny`` shrinks everything else too, so that
    the command can be tried without a GPU.
    """
    config = CONFIGS[name]()
    config.vision_config.depth, config.vision_config.fullatt_block_indexes = 1, [0]
    if tiny:
        text, vision = config.text_config, config.vision_config
        text.num_attention_heads, text.num_key_value_heads = 2, 1
        text.hidden_size, text.intermediate_size, text.vocab_size = 256, 256, 2048
        text.num_hidden_layers = 4 if "32B" in name else 2
        text.layer_types = text.layer_types[: text.num_hidden_layers]
        vision.hidden_size, vision.intermediate_size, vision.num_heads = 64, 64, 2
        vision.out_hidden_size = text.hidden_size
        config.image_token_id, config.video_token_id = 2000, 2001
        config.vision_start_token_id, config.vision_end_token_id = 2002, 2003
    return config


def build_model(config: Any, device: torch.device, dtype: torch.dtype) -> Backbone:
    """Makes a model of this config with random weights on the device."""
    with torch.device(device):
        model = architectures.model_class(config).from_config(config, dtype=dtype)
    return Backbone(model.to(device).eval())


def bandwidth_floor(shape: Footprint, tokens: int, bandwidth: float, size: int = 2) -> float:
    """Returns the seconds of reading once what a decoding step reads: the lower bound of its time.

    It reads the weights that a token passes through, and the keys and values of ``tokens`` cached
    tokens. ``bandwidth`` is in bytes a second, and ``size`` is the bytes of one number.
    """
    return shape.bytes_read_per_token(size, tokens, size) / bandwidth


def predict_speedups(
    target: str, draft: str, tokens: int, bandwidth: float
) -> list[tuple[Reported, float, float, float]]:
    """Predicts the speedup over plain decoding from bandwidth alone.

    ``target`` and ``draft`` are names of published shapes, ``tokens`` is the number of cached
    tokens, and ``bandwidth`` is in bytes a second. Returns (reported acceptance, seconds of a
    target's step, seconds of a draft's step, speedup) for each of REPORTED.
    """
    big = footprint(CONFIGS[target]())
    small = footprint(CONFIGS[draft]())
    predictions = []
    for each in REPORTED:
        target_step = bandwidth_floor(big, tokens, bandwidth)
        draft_step = bandwidth_floor(small, int(tokens * each.keep), bandwidth)
        # A forward of more rows reads the same bytes, so by bandwidth it takes as long as one row.
        costs = Costs((1, each.nodes + 1), (target_step, target_step), draft_step)
        predictions.append((each, target_step, draft_step, ideal_speedup(costs, each)))
    return predictions


def measure_steps(
    name: str,
    model: Backbone,
    context: int,
    bandwidth: float,
    *,
    rows: Sequence[int] = ROWS,
    repeat: int = 15,
) -> list[Step]:
    """Times forwards over a filled cache with and without CUDA graphs and compares their logits.

    Returns a step for each number of ``rows``. ``name`` says which model the steps are of,
    ``context`` is the number of cached tokens, and ``bandwidth`` is in bytes a second.
    """
    shape = footprint(model.model.config)
    measured = []
    session = cost_measurement.filled_session(
        model, context, requests=1, room=4 * max(rows), cuda_graphs=True
    )
    graphs = session.cuda_graphs
    floor_seconds = bandwidth_floor(shape, context, bandwidth, model.dtype.itemsize)
    for count in rows:
        # Both lists get two entries: of captured forwards, and of ordinary ones.
        times, logits = [], []
        for graphs_in_use in (graphs, None):
            session.cuda_graphs = graphs_in_use
            cost_measurement.time_step(session, context, count)
            capture_new_sizes()
            seconds = [
                cost_measurement.time_step(session, context, count)
                for _ in range(WARM_UP_STEPS + repeat)
            ]
            request = session.requests[0]
            assert request.root_logits is not None
            times.append(median(seconds[WARM_UP_STEPS:]) * 1e3)
            logits.append(torch.stack([request.root_logits, *request.node_logits]).float())
        apart = float((logits[0] - logits[1]).abs().max())
        measured.append(Step(name, count, context, floor_seconds * 1e3, times[0], times[1], apart))
    return measured


def project_speedup(target: Sequence[Step], draft: Step, each: Reported) -> float:
    """Returns the speedup over plain decoding that measured captured forwards allow.

    ``target`` has the target's steps with 1 row and more, and ``draft`` is a step of one row over
    what the method's view keeps. ``each`` is the method with its reported acceptance.
    """
    rows = tuple(step.rows for step in target)
    costs = Costs(rows, tuple(step.captured for step in target), draft.captured)
    return ideal_speedup(costs, each)


def ideal_speedup(costs: Costs, each: Reported) -> float:
    """Returns the speedup over plain decoding of a loop in which only forwards take time.

    It is tau T(1) / (levels T_q + T(nodes + 1)), where T(n) is the time of a target's forward of n
    tokens, and T_q that of a draft's step. A round emits tau tokens, for each of which plain
    decoding takes T(1).
    """
    round_cost = each.levels * costs.draft + costs.verify(each.nodes + 1)
    return each.tau * costs.verify(1) / round_cost


def noise_video_inputs(config: Any, tokens: int, seed: int = 0) -> Inputs:
    """Returns a prompt with a video of noise and some random text around it.

    The video has about ``tokens`` visual tokens. ``config`` is that of a Qwen2.5-VL.
    """
    side = min(FRAME_SIDE, max(1, int(tokens**0.5)))
    # A frame of visual tokens is made of two frames of pixels.
    frames = max(1, round(tokens / side**2))
    generator = torch.Generator().manual_seed(seed)
    visual = [config.video_token_id] * (frames * side * side)
    text = torch.randint(0, TEXT_IDS, (TEXT_TOKENS,), generator=generator).tolist()
    start, end = config.vision_start_token_id, config.vision_end_token_id
    ids = torch.tensor([[*text[:8], start, *visual, end, *text[8:]]])
    # A patch has 2 frames of 3 colours. The tower merges 2 x 2 patches into a visual token.
    patch_values = 2 * 3 * config.vision_config.patch_size**2
    pixels = torch.randn(frames * (2 * side) ** 2, patch_values, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == config.video_token_id).int() * 2,  # 0 is text, 2 is video.
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[frames, 2 * side, 2 * side]]),
        "second_per_grid_ts": torch.tensor([1.0]),
    }


def measure_answers(
    target: Backbone, draft: Backbone, prompt: Inputs, *, tokens: int, repeat: int = 3
) -> list[AnswerSpeed]:
    """Times answers of ``tokens`` tokens by ``ar``, every method of REPORTED and ``generate``.

    They take turns, ``repeat`` times. Returns the speed of each; that of ``generate`` has the
    method "hf". Raises RuntimeError if a method stops drafting.
    """
    prompt = {**prompt, "pixel_values_videos": prompt["pixel_values_videos"].to(target.dtype)}
    recipes: dict[str, Any] = {"ar": "ar"}
    for each in REPORTED:
        recipes[each.method] = impose_acceptance(
            resolve(each.method), ImposedAcceptance(length=each.accepted)
        )
    speeds: dict[str, list[float]] = {name: [] for name in (*recipes, "hf")}
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    for turn in range(repeat + 1):  # The first turn warms up and is not recorded.
        for name, method in recipes.items():
            result = run(target, prompt, draft=draft, method=method, eos_token_id=-1, **settings)
            if result.fallback_reason:
                raise RuntimeError(f"{name} stopped drafting: {result.fallback_reason}")
            if turn:
                speeds[name].append((len(result.ids) - 1) / result.timings.decode)
        peer = hf(
            Loaded("random", target, processor=None),
            draft=None,
            inputs=prompt,
            settings={**settings, "eos_token_id": None},
        )
        if turn:
            speeds["hf"].append(peer.decoded_tokens / peer.decode_seconds)
    medians = {name: median(own) for name, own in speeds.items()}
    return [
        AnswerSpeed(name, speed, speed / medians["ar"], speed / medians["hf"])
        for name, speed in medians.items()
    ]
