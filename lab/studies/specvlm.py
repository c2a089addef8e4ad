"""Measures SpecVLM's figures: what pruning costs and saves, where attention goes, how to choose.

SpecVLM (``saccade/methods/specvlm.py``) lets the draft see a tenth of a video's tokens. Stage I
takes the tokens that the target's text attends to most, until they have the share lambda of its
attention to the video. Stage II fills the rest of the tenth with evenly spaced ones of the others.
``mass`` is the attention that each visual token gets, as softmax weights over all keys:
[layer, KV head, visual token], or their mean over layers and heads.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lab import draw
from lab.draw import Data
from lab.studies.experiment import TAU, Experiment, interval_over_clips, rounded_taus
from lab.studies.step_timing import REPEATS, WARM_UP, step_milliseconds
from lab.studies.study import Study
from saccade.bench.measures import Interval
from saccade.core.prompt import Prompt
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.views import saliency
from saccade.model.backbone import Backbone

# The shares of visual tokens that are pruned, the lengths of caches in keys, and the lambdas tried.
PRUNED = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LAMBDAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
FIRST_CALIBRATION_CLIP = 1000  # No other figure uses the clips from here on.
LAMBDA = 0.02  # The best one by ``measure_lambda``.
CALIBRATED = f"specvlm/lambda={LAMBDA}"
CRITERIA = (CALIBRATED, "random", "uniform", "frames", "fastvid", "dycoke")
FRAMES = 4  # That ``measure_attention_maps`` shows of a clip.
# The grey scale of a map begins at this share of the map's largest cell, or above it. Cells below
# its beginning look alike.
FLOOR = 1e-3
MAP_CELLS = 32  # On each side of the map of rows by rows.


def measure_step_latency(experiment: Experiment) -> Data:
    """Measures Fig. 2a and Table 6: milliseconds of a draft's and a target's step over caches."""
    panel: Data = {"target": [], "draft": []}
    for context in CONTEXTS:
        experiment.on_progress(f"a step over {context} keys")
        for name, model in (("target", experiment.target), ("draft", experiment.draft)):
            panel[name] += step_milliseconds(model.backbone, context, [(1, 1)])
    across = "keys in the cache (log scale)"
    return {"x": across, "at": CONTEXTS, "panels": {"ms a step": panel}, "from zero": True}


def measure_random_pruning(experiment: Experiment) -> Data:
    """Measures Fig. 2b: tau by the share of visual tokens pruned at random, up to all of them.

    With a smaller draft, tau is that of ``Experiment.taus_by_view``, over several random draws for
    each clip. The target that drafts for itself is run, with one draw.
    """
    panel: Data = {}
    for what, draft in experiment.drafts.items():
        taus = experiment.taus_by_view([_random_view(pruned) for pruned in PRUNED], draft)
        panel[f"a smaller draft that {what}"] = [interval_over_clips(own) for own in taus.values()]
    panel["the target itself"] = [
        interval_over_clips(experiment.tau_by_clip(f"sd/drafter=self/view={_random_view(pruned)}"))
        for pruned in PRUNED
    ]
    return _panels_over_pruned(PRUNED, {TAU: panel})


def measure_lambda(experiment: Experiment) -> Data:
    """Measures App. A: tau by lambda, and the share of the budget that stage I takes.

    Its clips begin with ``FIRST_CALIBRATION_CLIP``. "best" is the lambda above 0 with the largest
    mean tau over drafts and clips.
    """
    views = {share: f"specvlm/keep=0.1/lambda={share:g}" for share in LAMBDAS}
    panel: Data = {}
    taus_by_draft: Data = {}
    for what, draft in experiment.drafts.items():
        taus = experiment.taus_by_view(list(views.values()), draft, FIRST_CALIBRATION_CLIP)
        panel[f"a draft that {what}"] = [interval_over_clips(taus[view]) for view in views.values()]
        taus_by_draft[what] = rounded_taus(taus)
    # A target has one lambda, whichever draft it has, so the best one is that of the drafts' mean.
    means = [
        float(np.mean([own[view] for own in taus_by_draft.values()])) for view in views.values()
    ]
    stage_one_shares: list[list[float]] = [[] for _ in LAMBDAS]
    for number in range(FIRST_CALIBRATION_CLIP, FIRST_CALIBRATION_CLIP + experiment.clips):
        mass = saliency.attention_over_all_keys(experiment.answered_clip(number).guide)
        budget = saliency.budget(len(mass), 0.1)
        for own, share in zip(stage_one_shares, LAMBDAS, strict=True):
            own.append(len(saliency.top_mass(mass, share, budget)) / budget)
    return {
        "x": "lambda",
        "at": list(LAMBDAS),
        "linear": True,
        "tall": True,
        "panels": {
            f"{TAU},\na tenth kept": panel,
            "stage I's share\nof the budget": {
                "stage I": [interval_over_clips(own) for own in stage_one_shares]
            },
        },
        "clips_tau": taus_by_draft,
        "best": LAMBDAS[1 + int(np.argmax(means[1:]))],  # At 0 there is no stage I.
    }


def _random_view(pruned: float) -> str:
    return "none" if pruned == 1 else f"random/keep={1 - pruned:.2f}"


def _panels_over_pruned(shares: Sequence[float], panels: Data) -> Data:
    across = "share of visual tokens pruned"
    return {"x": across, "at": list(shares), "linear": True, "tall": True, "panels": panels}


def measure_attention_maps(experiment: Experiment) -> Data:
    """Measures Fig. 4: what the target's text attends to in four frames, by layer and on average.

    Each map is divided by its largest cell.
    """
    clip = experiment.answered_clip(0)
    mass, grid = clip.guide.mass, clip.guide.prompt.grid
    assert mass is not None
    times, high, wide = (grid[:, 1:].amax(0) + 1).tolist()
    mass_by_name = {
        "first layer": mass[0].mean(0),
        "last layer": mass[-1].mean(0),
        "all layers": saliency.attention(mass),
    }
    # The middles of FRAMES equal parts of the video: 1, 3, 5 and 7 of 8 frames.
    times_shown = [(2 * i + 1) * times // (2 * FRAMES) for i in range(FRAMES)]
    maps = {}
    for name, own in mass_by_name.items():
        cells = (own / own.max()).reshape(times, high, wide)
        maps[name] = [np.round(cells[t].numpy(), 5).tolist() for t in times_shown]
    # Two frames of pixels make one frame of visual tokens.
    labels = [f"frames {2 * t} and {2 * t + 1}" for t in times_shown]
    floor = max(FLOOR, *(min(map(min, frame)) for own in maps.values() for frame in own))
    return {"maps": maps, "labels": labels, "floor": floor, "z": "log10 of the share of the most"}


def measure_attention_by_row(experiment: Experiment) -> Data:
    """Measures Fig. 4: what every row of the first clip's prompt attends to.

    Attention is the mean over layers and heads. Over all clips two numbers are measured, for
    queries in the video and in the text: "tenth", how much of the attention on the video its most
    attended tenth gets, and "alike", the mean correlation between the attention of two queries.
    """
    first, *rest = (_row_attention(experiment, number) for number in range(experiment.clips))
    return {
        **{name: first[name] for name in ("maps", "labels")},
        "floor": FLOOR,
        "z": "log10 of the share of the most",
        **{
            what: {
                name: interval_over_clips([own[what][name] for own in (first, *rest)])
                for name in first[what]
            }
            for what in ("tenth", "alike")
        },
    }


def _row_attention(experiment: Experiment, number: int) -> Data:
    """Returns one clip's map of attention, and its "tenth" and "alike"."""
    prompt = experiment.answered_clip(number).guide.prompt
    attention = attention_by_row(experiment.target.backbone, prompt)
    on_video = attention[:, prompt.visual]
    last_visual_row = int(prompt.visual.nonzero()[-1])
    row = torch.arange(len(on_video))
    is_text = row > last_visual_row
    video_shares = on_video / on_video.sum(-1, keepdim=True).clamp(min=1e-12)
    tenth_share = video_shares.topk(max(1, prompt.visual_tokens // 10), -1).values.sum(-1)
    # A visual query sees only the visual tokens before it, and the first ones see hardly any. So
    # only the second half of them is counted.
    is_late_visual = prompt.visual & (row > last_visual_row - prompt.visual_tokens // 2)
    video_end = last_visual_row + 1
    rows = {"visual queries": video_shares[is_late_visual], "text queries": video_shares[is_text]}
    return {
        "maps": {"all rows": [_shrunk_map(attention)]},
        "labels": [
            f"queries down, keys across; the video ends at row {video_end} of {len(attention)}"
        ],
        "tenth": {
            "visual queries": float(tenth_share[is_late_visual].mean()),
            "text queries": float(tenth_share[is_text].mean()),
        },
        "alike": {
            # The diagonal is left out, since there each query is compared with itself.
            name: float(torch.corrcoef(own)[~torch.eye(len(own), dtype=torch.bool)].mean())
            for name, own in rows.items()
        },
    }


@torch.no_grad()
def attention_by_row(target: Backbone, prompt: Prompt) -> Float[Tensor, "query key"]:
    """Returns how much each row of a prompt attends to each row, the mean over layers and heads.

    It is Hugging Face's own eager attention.
    """
    decoder = copy.deepcopy(target.model).get_decoder()
    decoder.config._attn_implementation = "eager"
    out = decoder(
        inputs_embeds=prompt.embeds[None],
        position_ids=prompt.positions[:, None],
        output_attentions=True,
        use_cache=False,
    )
    return torch.stack([layer[0].mean(0) for layer in out.attentions]).mean(0).double()


def _shrunk_map(attention: Float[Tensor, "query key"]) -> list[list[float]]:
    """Returns a map of ``MAP_CELLS`` cells a side, divided by its largest cell.

    A cell has the largest attention of the rows and keys that it covers.
    """
    cells = torch.nn.functional.adaptive_max_pool2d(attention[None], MAP_CELLS)[0]
    return np.round((cells / cells.max()).numpy(), 5).tolist()


def measure_layer_latency(experiment: Experiment) -> Data:
    """Measures Fig. 2a and Table 6: milliseconds of a draft's step by its parts.

    Parts are attention, FFNs and one layer, beside the whole step, over caches of growing length.
    They are timed in the unfused model, whose modules can be timed apart. The intervals are those
    of medians over repeats.
    """
    model = Backbone(experiment.draft.backbone.model, fused=False)
    parts = {"attention": "self_attn", "FFN": "mlp"}
    intervals: dict[str, list[Interval]] = {name: [] for name in (*parts, "the step", "one layer")}
    for context in CONTEXTS:
        experiment.on_progress(f"a step over {context} keys, part by part")
        session = cost_measurement.filled_session(model, context, requests=1, room=1)
        with time_modules(model.text.layers, parts) as seconds_so_far:
            milliseconds: dict[str, list[float]] = {name: [] for name in intervals}
            for _ in range(WARM_UP + REPEATS):
                before = {name: seconds_so_far[name] for name in seconds_so_far}
                milliseconds["the step"].append(
                    1e3 * cost_measurement.time_step(session, context, 1)
                )
                for name in seconds_so_far:
                    milliseconds[name].append(1e3 * (seconds_so_far[name] - before[name]))
        for name, own in milliseconds.items():
            intervals[name].append(interval_over_clips(own[WARM_UP:], np.median))
    return {
        "x": "keys in the cache (log scale)",
        "at": list(CONTEXTS),
        "panels": {"ms of a draft's step": intervals},
        "from zero": True,
    }


@contextmanager
def time_modules(
    stack: Sequence[nn.Module], parts: Mapping[str, str]
) -> Iterator[dict[str, float]]:
    """Yields the seconds spent so far in each part of all layers together, and in an average layer.

    ``stack`` has the layers, and ``parts`` maps a part's name to its attribute in a layer.
    """
    seconds = {**dict.fromkeys(parts, 0.0), "one layer": 0.0}
    started_at: dict[str, float] = {}

    def add_hooks(name: str, module: nn.Module, share: float) -> list[RemovableHandle]:
        # ``share`` is the part of the module's seconds that counts: 1 / n for each of n layers
        # gives the seconds of an average layer.
        def enter(*arguments: object) -> None:
            started_at[name] = time.perf_counter()

        def leave(*arguments: object) -> None:
            seconds[name] += share * (time.perf_counter() - started_at[name])

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    handles = [h for layer in stack for h in add_hooks("one layer", layer, 1 / len(stack))]
    for name, part in parts.items():
        handles += [h for layer in stack for h in add_hooks(name, getattr(layer, part), 1.0)]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def measure_attention_tail(experiment: Experiment) -> Data:
    """Measures Fig. 5: the shares of the attention to a video that its tokens get.

    The most attended token is first, and shares of a rank are means over clips. ``clips_tenth`` has
    the share that the most attended tenth gets in each clip.
    """
    shares_by_clip = []
    for number in range(experiment.clips):
        own = saliency.attention_over_all_keys(experiment.answered_clip(number).guide).double()
        shares_by_clip.append((own / own.sum()).sort(descending=True).values.numpy())
    by_rank = np.mean(shares_by_clip, axis=0)
    at = np.unique(np.geomspace(1, len(by_rank), 24).astype(int))
    even_shares = np.arange(1, len(by_rank) + 1) / len(by_rank)
    panels = {
        "share of one token": {"attention": by_rank[at - 1].tolist()},
        "share of the most\nattended, together": {
            "attention": by_rank.cumsum()[at - 1].tolist(),
            "if all were alike": even_shares[at - 1].tolist(),
        },
    }
    return {
        "x": f"rank of {len(by_rank)} visual tokens (log scale)",
        "at": at.tolist(),
        "ticks": [rank for rank in (1, 10, 100, 1000, 10000) if rank <= len(by_rank)],
        "tall": True,
        "panels": panels,
        "clips_tenth": [float(own[: len(own) // 10].sum()) for own in shares_by_clip],
    }


def measure_criteria(experiment: Experiment) -> Data:
    """Measures Fig. 6: tau by the share pruned, for each way to choose, with both drafts."""
    return measure_over_shares(experiment, CRITERIA)


def measure_over_shares(experiment: Experiment, views: Sequence[str]) -> Data:
    """Measures tau by the share pruned under each view, in a panel for each draft."""
    shares = PRUNED[1:-1]
    panels: Data = {}
    taus_by_draft: Data = {}
    for what, draft in experiment.drafts.items():
        names = {f"{view}/keep={1 - p:.2f}": view for view in views for p in shares}
        taus = experiment.taus_by_view(list(names), draft)
        lines: dict[str, list[list[float]]] = {}
        for name, view in names.items():
            lines.setdefault(view, []).append(list(interval_over_clips(taus[name])))
        panels[f"{TAU},\na draft that {what}"] = lines
        taus_by_draft[what] = rounded_taus(taus)
    return {**_panels_over_pruned(shares, panels), "clips_tau": taus_by_draft}


def measure_windows(experiment: Experiment) -> Data:
    """Measures Fig. 7a: attention against windows of the video."""
    names = ("attention", "window-front", "window-middle", "window-end")
    return _measure_choices(experiment, {name: f"{name}/keep=0.1" for name in names})


def measure_redundancy(experiment: Experiment) -> Data:
    """Measures Fig. 7b: spatial against temporal redundancy."""
    names = ("uniform", "random", "frames", "fastvid", "dycoke")
    return _measure_choices(experiment, {name: f"{name}/keep=0.1" for name in names})


def _measure_choices(experiment: Experiment, views: dict[str, str]) -> Data:
    """Measures tau under each of these views, which are given by the names of the figure's rows."""
    rows: Data = {name: {} for name in views}
    taus_by_draft: Data = {}
    for what, draft in experiment.drafts.items():
        taus = experiment.taus_by_view(list(views.values()), draft)
        taus_by_draft[what] = rounded_taus(taus)
        for name, view in views.items():
            rows[name][f"a draft that {what}"] = interval_over_clips(taus[view])
    across = f"{TAU}, a tenth of the video kept"
    return {"x": across, "rows": rows, "start": 1, "clips_tau": taus_by_draft}


def measure_stages(experiment: Experiment) -> Data:
    """Measures Fig. 8: the difference of tau without a stage, or with another lambda, from tau with
    both stages, clip by clip."""
    views = {
        "without stage II\n(attention alone)": "attention/keep=0.1",
        "without stage I\n(evenly spread)": "uniform/keep=0.1",
        "lambda 0.5\n(not calibrated)": "specvlm/keep=0.1/lambda=0.5",
    }
    across = f"tau less SpecVLM's (lambda {LAMBDA:g}, calibrated) on the same clip"
    return measure_tau_differences(experiment, f"{CALIBRATED}/keep=0.1", views, across)


def measure_tau_differences(
    experiment: Experiment, whole: str, views: Mapping[str, str], across: str
) -> Data:
    """Measures tau under each view less tau under the view ``whole``, clip by clip, by each draft.

    ``whole`` is a view with all its stages, and ``views`` has others, named by how they differ from
    it. ``across`` is the text below the figure.
    """
    rows: Data = {name: {} for name in views}
    taus_by_draft: Data = {}
    for what, draft in experiment.drafts.items():
        taus = experiment.taus_by_view([whole, *views.values()], draft)
        taus_by_draft[what] = rounded_taus(taus)
        for name, view in views.items():
            gains = [own - full for full, own in zip(taus[whole], taus[view], strict=True)]
            rows[name][f"a draft that {what}"] = interval_over_clips(gains)
    return {"x": across, "rows": rows, "start": None, "clips_tau": taus_by_draft}


STUDIES = {
    "specvlm-latency": Study(
        "SpecVLM, Fig. 2a and Table 6",
        "Milliseconds of one step of draft and target over caches of growing length.",
        measure_step_latency,
        clips=8,
        timed=True,
    ),
    "specvlm-layers": Study(
        "SpecVLM, Fig. 2a and Table 6",
        "Milliseconds of a draft's step in attention, in FFNs and in all, and of one layer.",
        measure_layer_latency,
        clips=8,
        timed=True,
    ),
    "specvlm-lambda": Study(
        "SpecVLM, App. A",
        "Tau of a chain of 5 by lambda, on clips that no other figure has.",
        measure_lambda,
        clips=16,
    ),
    "specvlm-boundary": Study(
        "SpecVLM, Fig. 4",
        "What every row of a prompt attends to: visual rows first, then text.",
        measure_attention_by_row,
        draw.maps,
        clips=8,
        size=64,
    ),
    "specvlm-sensitivity": Study(
        "SpecVLM, Fig. 2b",
        "Tau of a chain of 5 against the share of the video pruned at random, up to all of it.",
        measure_random_pruning,
        clips=8,
    ),
    "specvlm-attention": Study(
        "SpecVLM, Fig. 4",
        "How much the target's text attends to each visual token of four frames.",
        measure_attention_maps,
        draw.maps,
        clips=1,
    ),
    "specvlm-tail": Study(
        "SpecVLM, Fig. 5",
        "Visual tokens by the attention they get, most attended first.",
        measure_attention_tail,
        clips=24,
    ),
    "specvlm-criteria": Study(
        "SpecVLM, Fig. 6",
        "Tau of a chain of 5 against the share pruned, for each way to choose.",
        measure_criteria,
        clips=12,
    ),
    "specvlm-windows": Study(
        "SpecVLM, Fig. 7a",
        "Tau when the tenth kept is the most attended, or a window of the video.",
        measure_windows,
        draw.bars,
        clips=50,
    ),
    "specvlm-redundancy": Study(
        "SpecVLM, Fig. 7b",
        "Tau when the tenth kept is chosen by spatial or by temporal redundancy.",
        measure_redundancy,
        draw.bars,
        clips=50,
    ),
    "specvlm-stages": Study(
        "SpecVLM, Fig. 8",
        "What tau loses without one of SpecVLM's stages.",
        measure_stages,
        draw.bars,
        clips=24,
    ),
}
