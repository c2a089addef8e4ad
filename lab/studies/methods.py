"""The pictures of ``docs/methods``: what a paper's method does on the embedded pair.

One function per paper runs the pair on clips it was never trained on and returns numbers, kept as
JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from lab.draw import Data
from lab.studies.lab import Lab
from lab.training import agreement
from saccade.bench.figures import COLOURS, FONT_SIZE, name_axes
from saccade.core.result import RoundRecord
from saccade.core.tree import height
from saccade.methods import resolve

KEYS = (0.01, 0.03, 0.0625, 0.125, 0.25, 0.5)
HIPPO_VIEWS = "specvlm", "holistic"
STRIP, ROUNDS = 6, 36  # frames and rounds shown of HIPPO
TAU = "tokens per target forward"


# -- what is measured --------------------------------------------------------------------------


def sparse_to_dense(lab: Lab) -> Data:
    """Tau by K."""
    methods = "std", "streaming"
    panel = {name: [lab.tau(f"{name}/keep={keep}") for keep in KEYS] for name in methods}
    return _shares("visual keys K a head reads", lab.size, KEYS, panel)


def _shares(across: str, size: int, shares: Sequence[float], panel: Data) -> Data:
    at = [round(share * size) for share in shares]
    return {"x": f"{across}, of {size} (log scale)", "at": at, "panels": {TAU: panel}}


def tabed(lab: Lab) -> Data:
    """The weights of every round of the first clip."""
    panels = {}
    for method in ("tabed", "tabed-mtcp"):
        views = resolve(method).view.name.split("+")
        notes = zip(*(round.note for round in lab.rounds(method)), strict=True)
        panels[f"weight\n({method})"] = dict(zip(views, map(list, notes), strict=True))
    tau = lab.taus("sd", "sd/view=text", "tabed-mt", "tabed", "tabed-mtcp")
    return {"x": "round", "panels": panels, "tau": tau}


def sage(lab: Lab) -> Data:
    """The tree of every round of the first clip, and what was accepted of it."""
    panels: Data = {"nodes\n(tokens)": {}, "depth\n(levels)": {}, "accepted\n(tokens)": {}}
    for method in ("sage", "specvlm"):
        trees = zip(*map(_tree, lab.rounds(method)), strict=True)
        for panel, own in zip(panels.values(), trees, strict=True):
            panel[method] = list(own)
    tau = lab.taus("specvlm", "sage", "sage/shape=sage-live", "specvlm/shape=chain-8")
    return {"x": "round", "panels": panels, "tau": tau}


def _tree(round: RoundRecord) -> tuple[int, int, int]:
    """Its nodes, depth and accepted tokens."""
    return len(round.parents), height(round.parents), len(round.accepted)


def hippo(lab: Lab) -> Data:
    """What two views keep of the first clip, and how many tokens a round judged."""
    rounds = lab.rounds("hippo")
    return {
        **kept(lab, 0, HIPPO_VIEWS),
        "judged": [len(round.tokens) for round in rounds],
        "accepted": [len(round.accepted) for round in rounds],
        "tau": lab.taus("hippo", *(f"sd/view={name}" for name in (*HIPPO_VIEWS, "uniform"))),
    }


def kept(lab: Lab, number: int, views: Sequence[str]) -> Data:
    """The cells (t, h, w) that views keep of a clip, and how many there are on each axis."""
    shot = lab.shot(number)
    prompt = lab.draft.backbone.adopt(shot.guide.prompt)
    seen = {name: resolve(f"sd/view={name}").view(shot.guide, prompt) for name in views}
    return {
        "grid": (prompt.grid[:, 1:].amax(0) + 1).tolist(),
        "kept": {name: own.grid[:, 1:].tolist() for name, own in seen.items()},
    }


def frames(data: Data) -> Figure:
    """The clip's frames, veiled where a view drops a token; below, each round's tokens."""
    figure = Figure(figsize=(1.25 * STRIP, 4.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1.2))
    veiled(above, data)
    _rounds(
        below.subplots(), np.array(data["judged"][:ROUNDS]), np.array(data["accepted"][:ROUNDS])
    )
    return figure


def strips(data: Data) -> Figure:
    """The clip's frames alone, veiled where a view drops a token."""
    figure = Figure(figsize=(1.25 * STRIP, 1.45 * len(data["kept"])), layout="constrained")
    veiled(figure, data)
    return figure


def veiled(figure: FigureBase, data: Data, number: int = 0) -> None:
    """A row of a clip's frames a view."""
    pictures = agreement.unseen_clip(number, data["size"])[1].frames
    times, high, wide = data["grid"]
    rows = figure.subplots(len(data["kept"]), STRIP, squeeze=False)
    for row, (view, cells) in zip(rows, data["kept"].items(), strict=True):
        for i, axis in enumerate(row):
            t = (2 * i + 1) * times // (2 * STRIP)
            picture = np.asarray(pictures[t * len(pictures) // times]) / 255
            seen = np.zeros((high, wide, 1), dtype=bool)
            for _, h, w in (cell for cell in cells if cell[0] == t):
                seen[h, w] = True
            clear = seen.repeat(len(picture) // high, 0).repeat(picture.shape[1] // wide, 1)
            axis.imshow(np.where(clear, picture, 0.75 + 0.2 * picture))
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{seen.sum()} of {seen.size}", fontsize=FONT_SIZE)
        row[0].set_ylabel(f"{view}\n{len(cells)} in all", fontsize=FONT_SIZE)


def _rounds(axis: Axes, judged: Any, accepted: Any) -> None:
    """One token past those in flight is judged with it, so a conservative round judges one."""
    at = np.arange(1, len(judged) + 1)
    for name, colour, these in (
        ("optimistic", COLOURS[0], judged > 1),
        ("conservative", COLOURS[1], judged == 1),
    ):
        axis.bar(at[these], accepted[these], color=colour, label=f"accepted, {name}")
    axis.bar(at, judged, fc="none", ec=COLOURS[-1], lw=0.7, label="judged")
    early = at[judged == 0]
    axis.plot(early, 0 * early, "x", c=COLOURS[-1], ms=4, label="draft not ready")
    name_axes(axis, "round", "drafted tokens")
    axis.set_ylim(top=1.5 * max(1, judged.max(initial=0)))
    axis.legend(fontsize=FONT_SIZE, ncols=4, loc="upper center")
