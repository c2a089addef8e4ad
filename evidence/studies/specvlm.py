"""SpecVLM's figures: what pruning costs and saves, where attention goes, and what to prune by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from evidence import draw
from evidence.draw import Data
from evidence.studies.lab import TAU, Lab, interval, rounded
from evidence.studies.steps import milliseconds
from evidence.studies.study import Study
from saccade.drafting.views import saliency

PRUNED = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CRITERIA = ("specvlm", "random", "uniform", "frames", "fastvid", "dycoke")
FRAMES, FLOOR = 4, 1e-3


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
        "lambda 0.2": "specvlm/keep=0.1/lambda=0.2",
    }
    across = "tau less SpecVLM's (lambda 0.5) on the same clip"
    return less(lab, "specvlm/keep=0.1", views, across)


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
        clips=24,
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
        clips=50,
    ),
}
