"""SpecVLM's figures: what pruning costs and saves, where attention goes, and what to prune by."""

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
from lab.studies.lab import TAU, Lab, interval, rounded
from lab.studies.steps import REPEATS, WARM_UP, milliseconds
from lab.studies.study import Study
from saccade.bench.measures import Interval
from saccade.core.prompt import Prompt
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.views import saliency
from saccade.model.backbone import Backbone

PRUNED = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LAMBDAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
APART = 1000  # the first of the clips lambda is calibrated on: no figure has these
LAMBDA = 0.02  # what ``calibration`` found
CALIBRATED = f"specvlm/lambda={LAMBDA}"
CRITERIA = (CALIBRATED, "random", "uniform", "frames", "fastvid", "dycoke")
FRAMES, FLOOR = 4, 1e-3
CELLS = 32  # a side of the map of rows by rows


def latency(lab: Lab) -> Data:
    """Fig. 2a, Table 6: milliseconds of a draft's and the target's step over caches."""
    panel: Data = {"target": [], "draft": []}
    for context in CONTEXTS:
        lab.tell(f"a step over {context} keys")
        for name, model in (("target", lab.target), ("draft", lab.draft)):
            panel[name] += milliseconds(model.backbone, context, [(1, 1)])
    across = "keys in the cache (log scale)"
    return {"x": across, "at": CONTEXTS, "panels": {"ms a step": panel}, "from zero": True}


def sensitivity(lab: Lab) -> Data:
    """Fig. 2b: tau against the share of visual tokens pruned at random, up to all of them."""
    panel: Data = {}
    for what, draft in lab.drafts.items():
        taus = lab.by_view([_random(pruned) for pruned in PRUNED], draft)
        panel[f"a smaller draft that {what}"] = [interval(own) for own in taus.values()]
    panel["the target itself"] = [
        interval(lab.by_clip(f"sd/drafter=self/view={_random(pruned)}")) for pruned in PRUNED
    ]
    return _over_pruned(PRUNED, {TAU: panel})


def calibration(lab: Lab) -> Data:
    """App. A: tau by lambda on clips of their own, of which stage I takes so much of the budget."""
    views = {share: f"specvlm/keep=0.1/lambda={share:g}" for share in LAMBDAS}
    panel: Data = {}
    each: Data = {}
    for what, draft in lab.drafts.items():
        taus = lab.by_view(list(views.values()), draft, APART)
        panel[f"a draft that {what}"] = [interval(taus[view]) for view in views.values()]
        each[what] = rounded(taus)
    means = [
        float(np.mean([own[view] for own in each.values()])) for view in views.values()
    ]  # one lambda a target, whatever drafts for it
    taken: list[list[float]] = [[] for _ in LAMBDAS]
    for number in range(APART, APART + lab.clips):
        mass = saliency.attended(lab.shot(number).guide)
        budget = saliency.budget(len(mass), 0.1)
        for own, share in zip(taken, LAMBDAS, strict=True):
            own.append(len(saliency.top_mass(mass, share, budget)) / budget)
    return {
        "x": "lambda",
        "at": list(LAMBDAS),
        "linear": True,
        "tall": True,
        "panels": {
            f"{TAU},\na tenth kept": panel,
            "stage I's share\nof the budget": {"stage I": [interval(own) for own in taken]},
        },
        "clips_tau": each,
        "best": LAMBDAS[1 + int(np.argmax(means[1:]))],  # without stage I it is not SpecVLM
    }


def _random(pruned: float) -> str:
    return "none" if pruned == 1 else f"random/keep={1 - pruned:.2f}"


def _over_pruned(shares: Sequence[float], panels: Data) -> Data:
    across = "share of visual tokens pruned"
    return {"x": across, "at": list(shares), "linear": True, "tall": True, "panels": panels}


def attention(lab: Lab) -> Data:
    """Fig. 4: what the target's text attends to in four frames, by layer and on average."""
    shot = lab.shot(0)
    mass, grid = shot.guide.mass, shot.guide.prompt.grid
    assert mass is not None
    times, high, wide = (grid[:, 1:].amax(0) + 1).tolist()
    layers = {
        "first layer": mass[0].mean(0),
        "last layer": mass[-1].mean(0),
        "all layers": saliency.attention(mass),
    }
    shown = [(2 * i + 1) * times // (2 * FRAMES) for i in range(FRAMES)]
    maps = {}
    for name, own in layers.items():
        cells = (own / own.max()).reshape(times, high, wide)
        maps[name] = [np.round(cells[t].numpy(), 5).tolist() for t in shown]
    labels = [f"frames {2 * t} and {2 * t + 1}" for t in shown]
    floor = max(FLOOR, *(min(map(min, frame)) for own in maps.values() for frame in own))
    return {"maps": maps, "labels": labels, "floor": floor, "z": "log10 of the share of the most"}


def boundary(lab: Lab) -> Data:
    """Fig. 4: what every row of a prompt attends to, the mean over layers and heads, in the first
    clip; and over clips how much of what goes to the video its most attended tenth gets."""
    shown, *rest = (_rows(lab, number) for number in range(lab.clips))
    return {
        **{name: shown[name] for name in ("maps", "labels")},
        "floor": FLOOR,
        "z": "log10 of the share of the most",
        **{
            what: {
                name: interval([own[what][name] for own in (shown, *rest)]) for name in shown[what]
            }
            for what in ("tenth", "alike")
        },
    }


def _rows(lab: Lab, number: int) -> Data:
    prompt = lab.shot(number).guide.prompt
    mass = attended_by_row(lab.target.backbone, prompt)
    seen = mass[:, prompt.visual]
    last = int(prompt.visual.nonzero()[-1])
    text = torch.arange(len(seen)) > last
    whole = seen / seen.sum(-1, keepdim=True).clamp(min=1e-12)
    tenth = whole.topk(max(1, prompt.visual_tokens // 10), -1).values.sum(-1)
    # a visual query sees those before it alone, so only the second half is asked
    late = prompt.visual & (torch.arange(len(seen)) > last - prompt.visual_tokens // 2)
    rows = {"visual queries": whole[late], "text queries": whole[text]}
    return {
        "maps": {"all rows": [_shrunk(mass)]},
        "labels": [f"queries down, keys across; the video ends at row {last + 1} of {len(mass)}"],
        "tenth": {
            "visual queries": float(tenth[late].mean()),
            "text queries": float(tenth[text].mean()),
        },
        "alike": {
            name: float(torch.corrcoef(own)[~torch.eye(len(own), dtype=torch.bool)].mean())
            for name, own in rows.items()
        },
    }


@torch.no_grad()
def attended_by_row(target: Backbone, prompt: Prompt) -> Float[Tensor, "query key"]:
    """By Hugging Face's own eager attention, the mean over layers and heads."""
    decoder = copy.deepcopy(target.model).get_decoder()
    decoder.config._attn_implementation = "eager"
    out = decoder(
        inputs_embeds=prompt.embeds[None],
        position_ids=prompt.positions[:, None],
        output_attentions=True,
        use_cache=False,
    )
    return torch.stack([layer[0].mean(0) for layer in out.attentions]).mean(0).double()


def _shrunk(mass: Float[Tensor, "query key"]) -> list[list[float]]:
    """A map of at most CELLS x CELLS cells, over the largest of them."""
    cells = torch.nn.functional.adaptive_max_pool2d(mass[None], CELLS)[0]
    return np.round((cells / cells.max()).numpy(), 5).tolist()


def layers(lab: Lab) -> Data:
    """Fig. 2a, Table 6: milliseconds of a draft's step in attention, in FFNs and in all, and of one
    layer, over caches of growing length; by the modules, which can be told apart."""
    model = Backbone(lab.draft.backbone.model, fused=False)
    parts = {"attention": "self_attn", "FFN": "mlp"}
    found: dict[str, list[Interval]] = {name: [] for name in (*parts, "the step", "one layer")}
    for context in CONTEXTS:
        lab.tell(f"a step over {context} keys, part by part")
        session = cost_measurement.filled_session(model, context, 1, 1)
        with timed(model.text.layers, parts) as spent:
            taken: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(WARM_UP + REPEATS):
                before = {name: spent[name] for name in spent}
                taken["the step"].append(1e3 * cost_measurement.time_step(session, context, 1))
                for name in spent:
                    taken[name].append(1e3 * (spent[name] - before[name]))
        for name, own in taken.items():
            found[name].append(interval(own[WARM_UP:], np.median))
    return {
        "x": "keys in the cache (log scale)",
        "at": list(CONTEXTS),
        "panels": {"ms of a draft's step": found},
        "from zero": True,
    }


@contextmanager
def timed(stack: Sequence[nn.Module], parts: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Seconds spent so far in the named part of every layer, and in a layer on average."""
    spent = {**dict.fromkeys(parts, 0.0), "one layer": 0.0}
    began: dict[str, float] = {}

    def watch(name: str, module: nn.Module, share: float) -> list[RemovableHandle]:
        def enter(*given: object) -> None:
            began[name] = time.perf_counter()

        def leave(*given: object) -> None:
            spent[name] += share * (time.perf_counter() - began[name])

        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    handles = [h for layer in stack for h in watch("one layer", layer, 1 / len(stack))]
    for name, part in parts.items():
        handles += [h for layer in stack for h in watch(name, getattr(layer, part), 1.0)]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def tail(lab: Lab) -> Data:
    """Fig. 5: the visual tokens' shares of the attention they get, most attended first."""
    ranked = []
    for number in range(lab.clips):
        own = saliency.attended(lab.shot(number).guide).double()
        ranked.append((own / own.sum()).sort(descending=True).values.numpy())
    by_rank = np.mean(ranked, axis=0)
    at = np.unique(np.geomspace(1, len(by_rank), 24).astype(int))
    ideal = np.arange(1, len(by_rank) + 1) / len(by_rank)
    panels = {
        "share of one token": {"attention": by_rank[at - 1].tolist()},
        "share of the most\nattended, together": {
            "attention": by_rank.cumsum()[at - 1].tolist(),
            "if all were alike": ideal[at - 1].tolist(),
        },
    }
    return {
        "x": f"rank of {len(by_rank)} visual tokens (log scale)",
        "at": at.tolist(),
        "ticks": [rank for rank in (1, 10, 100, 1000, 10000) if rank <= len(by_rank)],
        "tall": True,
        "panels": panels,
    }


def criteria(lab: Lab) -> Data:
    """Fig. 6: tau by the share pruned, for each way to choose; both drafts."""
    return over_shares(lab, CRITERIA)


def over_shares(lab: Lab, views: Sequence[str]) -> Data:
    """Tau by the share pruned under each view, a panel a draft."""
    shares = PRUNED[1:-1]
    panels: Data = {}
    each: Data = {}
    for what, draft in lab.drafts.items():
        names = {f"{view}/keep={1 - p:.2f}": view for view in views for p in shares}
        taus = lab.by_view(list(names), draft)
        lines: dict[str, list[list[float]]] = {}
        for name, view in names.items():
            lines.setdefault(view, []).append(list(interval(taus[name])))
        panels[f"{TAU},\na draft that {what}"] = lines
        each[what] = rounded(taus)
    return {**_over_pruned(shares, panels), "clips_tau": each}


def windows(lab: Lab) -> Data:
    """Fig. 7a: attention against windows of the video."""
    names = ("attention", "window-front", "window-middle", "window-end")
    return _choices(lab, {name: f"{name}/keep=0.1" for name in names})


def redundancy(lab: Lab) -> Data:
    """Fig. 7b: spatial against temporal redundancy."""
    names = ("uniform", "random", "frames", "fastvid", "dycoke")
    return _choices(lab, {name: f"{name}/keep=0.1" for name in names})


def _choices(lab: Lab, views: dict[str, str]) -> Data:
    rows: Data = {name: {} for name in views}
    each: Data = {}
    for what, draft in lab.drafts.items():
        taus = lab.by_view(list(views.values()), draft)
        each[what] = rounded(taus)
        for name, view in views.items():
            rows[name][f"a draft that {what}"] = interval(taus[view])
    across = f"{TAU}, a tenth of the video kept"
    return {"x": across, "rows": rows, "start": 1, "clips_tau": each}


def stages(lab: Lab) -> Data:
    """Fig. 8: what tau loses without a stage, clip by clip."""
    views = {
        "without stage II\n(attention alone)": "attention/keep=0.1",
        "without stage I\n(evenly spread)": "uniform/keep=0.1",
        "lambda 0.5\n(not calibrated)": "specvlm/keep=0.1/lambda=0.5",
    }
    across = f"tau less SpecVLM's (lambda {LAMBDA:g}, calibrated) on the same clip"
    return less(lab, f"{CALIBRATED}/keep=0.1", views, across)


def less(lab: Lab, whole: str, views: Mapping[str, str], across: str) -> Data:
    """Tau under each view less that of a whole one, clip by clip; both drafts."""
    rows: Data = {name: {} for name in views}
    each: Data = {}
    for what, draft in lab.drafts.items():
        taus = lab.by_view([whole, *views.values()], draft)
        each[what] = rounded(taus)
        for name, view in views.items():
            lost = [b - a for a, b in zip(taus[whole], taus[view], strict=True)]
            rows[name][f"a draft that {what}"] = interval(lost)
    return {"x": across, "rows": rows, "start": None, "clips_tau": each}


STUDIES = {
    "specvlm-latency": Study(
        "SpecVLM, Fig. 2a and Table 6",
        "Milliseconds of one step of draft and target over caches of growing length.",
        latency,
        timed=True,
    ),
    "specvlm-layers": Study(
        "SpecVLM, Fig. 2a and Table 6",
        "Milliseconds of a draft's step in attention, in FFNs and in all, and of one layer.",
        layers,
        timed=True,
    ),
    "specvlm-lambda": Study(
        "SpecVLM, App. A",
        "Tau of a chain of 5 by lambda, on clips that no other figure has.",
        calibration,
        clips=16,
    ),
    "specvlm-boundary": Study(
        "SpecVLM, Fig. 4",
        "What every row of a prompt attends to: visual rows first, then text.",
        boundary,
        draw.maps,
        clips=8,
        size=64,
    ),
    "specvlm-sensitivity": Study(
        "SpecVLM, Fig. 2b",
        "Tau of a chain of 5 against the share of the video pruned at random, up to all of it.",
        sensitivity,
        clips=8,
    ),
    "specvlm-attention": Study(
        "SpecVLM, Fig. 4",
        "How much the target's text attends to each visual token of four frames.",
        attention,
        draw.maps,
        clips=1,
    ),
    "specvlm-tail": Study(
        "SpecVLM, Fig. 5",
        "Visual tokens by the attention they get, most attended first.",
        tail,
        clips=24,
    ),
    "specvlm-criteria": Study(
        "SpecVLM, Fig. 6",
        "Tau of a chain of 5 against the share pruned, for each way to choose.",
        criteria,
        clips=12,
    ),
    "specvlm-windows": Study(
        "SpecVLM, Fig. 7a",
        "Tau when the tenth kept is the most attended, or a window of the video.",
        windows,
        draw.bars,
        clips=50,
    ),
    "specvlm-redundancy": Study(
        "SpecVLM, Fig. 7b",
        "Tau when the tenth kept is chosen by spatial or by temporal redundancy.",
        redundancy,
        draw.bars,
        clips=50,
    ),
    "specvlm-stages": Study(
        "SpecVLM, Fig. 8",
        "What tau loses without one of SpecVLM's stages.",
        stages,
        draw.bars,
        clips=24,
    ),
}
