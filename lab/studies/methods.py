"""Measures and draws the pictures of ``docs/methods``: what each paper's method does.

One function for each paper but SpecVLM runs the embedded pair on clips that it was never trained
on, and returns numbers that are saved as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from lab.draw import Data
from lab.studies.experiment import Experiment
from lab.training import agreement
from saccade.bench.figures import COLOURS, FONT_SIZE, name_axes
from saccade.core.result import RoundRecord
from saccade.core.tree import height
from saccade.methods import resolve

KEY_SHARES = (0.01, 0.03, 0.0625, 0.125, 0.25, 0.5)  # Of the visual keys, what a head reads.
HIPPO_VIEWS = "specvlm", "holistic"
FRAMES_DRAWN = 6  # In each row, from the beginning of the clip to its end.
ROUNDS_DRAWN = 36  # Of the answer, from its first round on.
TAU = "tokens per target forward"


# -- Measuring -----------------------------------------------------------------------------------


def measure_sparse_to_dense(experiment: Experiment) -> Data:
    """Measures tau by K, the number of keys that a head reads."""
    methods = "std", "streaming"
    panel = {
        name: [experiment.mean_tau(f"{name}/keep={keep}") for keep in KEY_SHARES]
        for name in methods
    }
    return _panel_over_shares("visual keys K a head reads", experiment.size, KEY_SHARES, panel)


def _panel_over_shares(across: str, size: int, shares: Sequence[float], panel: Data) -> Data:
    """Returns the data of a figure with one panel: taus over shares of ``size`` visual tokens.

    ``panel`` has by method one tau for each share. ``across`` names the horizontal axis.
    """
    at = [round(share * size) for share in shares]
    return {"x": f"{across}, of {size} (log scale)", "at": at, "panels": {TAU: panel}}


def measure_tabed(experiment: Experiment) -> Data:
    """Measures the weight of each view in every round of the first clip, and methods' mean taus.

    The taus are means over all clips of the experiment.
    """
    panels = {}
    for method in ("tabed", "tabed-mtcp"):
        views = resolve(method).view.name.split("+")
        weights = zip(*(round.note for round in experiment.rounds(method)), strict=True)
        panels[f"weight\n({method})"] = dict(zip(views, map(list, weights), strict=True))
    tau = experiment.mean_taus("sd", "sd/view=text", "tabed-mt", "tabed", "tabed-mtcp")
    return {"x": "round", "panels": panels, "tau": tau}


def measure_sage(experiment: Experiment) -> Data:
    """Measures SAGE's and SpecVLM's tree of every round of the first clip, and methods' mean taus.

    Of a tree these are its nodes, its depth and its accepted tokens. The taus are means over all
    clips of the experiment.
    """
    panels: Data = {"nodes\n(tokens)": {}, "depth\n(levels)": {}, "accepted\n(tokens)": {}}
    for method in ("sage", "specvlm"):
        trees = zip(*map(_tree_sizes, experiment.rounds(method)), strict=True)
        for panel, own in zip(panels.values(), trees, strict=True):
            panel[method] = list(own)
    tau = experiment.mean_taus("specvlm", "sage", "sage/shape=sage-live", "specvlm/shape=chain-8")
    return {"x": "round", "panels": panels, "tau": tau}


def _tree_sizes(round: RoundRecord) -> tuple[int, int, int]:
    """Returns the nodes, the depth and the accepted tokens of a round's tree."""
    return len(round.parents), height(round.parents), len(round.accepted)


def measure_hippo(experiment: Experiment) -> Data:
    """Measures what two views keep of the first clip, and how many tokens each round verified.

    The rounds are HIPPO's on that clip. The mean taus of four methods, over all clips, come too.
    """
    rounds = experiment.rounds("hippo")
    return {
        **measure_kept_cells(experiment, 0, HIPPO_VIEWS),
        "judged": [len(round.tokens) for round in rounds],
        "accepted": [len(round.accepted) for round in rounds],
        "tau": experiment.mean_taus(
            "hippo", *(f"sd/view={name}" for name in (*HIPPO_VIEWS, "uniform"))
        ),
    }


def measure_kept_cells(experiment: Experiment, number: int, views: Sequence[str]) -> Data:
    """Returns the cells (t, h, w) that views keep of a clip, and the cells on each axis."""
    clip = experiment.answered_clip(number)
    prompt = experiment.draft.backbone.adopt(clip.guide.prompt)
    prompt_by_view = {name: resolve(f"sd/view={name}").view(clip.guide, prompt) for name in views}
    return {
        "grid": (prompt.grid[:, 1:].amax(0) + 1).tolist(),
        "kept": {name: own.grid[:, 1:].tolist() for name, own in prompt_by_view.items()},
    }


def draw_frames(data: Data) -> Figure:
    """Draws the clip's frames, veiled where a view drops a token, and below them each round."""
    figure = Figure(figsize=(1.25 * FRAMES_DRAWN, 4.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1.2))
    draw_veiled_frames(above, data)
    _draw_rounds(
        below.subplots(),
        np.array(data["judged"][:ROUNDS_DRAWN]),
        np.array(data["accepted"][:ROUNDS_DRAWN]),
    )
    return figure


def draw_strips(data: Data) -> Figure:
    """Draws the clip's frames alone, veiled where a view drops a token."""
    figure = Figure(figsize=(1.25 * FRAMES_DRAWN, 1.45 * len(data["kept"])), layout="constrained")
    draw_veiled_frames(figure, data)
    return figure


def draw_veiled_frames(figure: FigureBase, data: Data, number: int = 0) -> None:
    """Draws a row of a clip's frames for each view, veiled where it drops a visual token.

    A cell is the part of a frame that one visual token stands for. ``number`` is that of the clip
    which ``data`` was measured on, because the data has no pixels.
    """
    pictures = agreement.unseen_clip(number, data["size"])[1].frames
    times, high, wide = data["grid"]
    rows = figure.subplots(len(data["kept"]), FRAMES_DRAWN, squeeze=False)
    for row, (view, cells) in zip(rows, data["kept"].items(), strict=True):
        for i, axis in enumerate(row):
            # The middle of the i-th of ``FRAMES_DRAWN`` equal parts of the clip. Of 32 steps these
            # are the steps 2, 8, 13, 18, 24 and 29.
            t = (2 * i + 1) * times // (2 * FRAMES_DRAWN)
            # A step of the grid may have several frames, of which the first is drawn.
            picture = np.asarray(pictures[t * len(pictures) // times]) / 255
            is_kept = np.zeros((high, wide, 1), dtype=bool)
            for _, h, w in (cell for cell in cells if cell[0] == t):
                is_kept[h, w] = True
            # From a value for each cell to one for each pixel.
            is_clear = is_kept.repeat(len(picture) // high, 0).repeat(picture.shape[1] // wide, 1)
            axis.imshow(np.where(is_clear, picture, 0.75 + 0.2 * picture))
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{is_kept.sum()} of {is_kept.size}", fontsize=FONT_SIZE)
        row[0].set_ylabel(f"{view}\n{len(cells)} in all", fontsize=FONT_SIZE)


def _draw_rounds(axis: Axes, judged: Any, accepted: Any) -> None:
    """Draws the drafted tokens that each round verified (``judged``), and how many it accepted.

    HIPPO drafts while the target verifies. An optimistic round verifies the tokens that were
    drafted during the round before, and the first one that is drafted now. After a rejection
    nothing is left of that draft, so a conservative round verifies the first new token alone.
    """
    at = np.arange(1, len(judged) + 1)
    for name, colour, selected in (
        ("optimistic", COLOURS[0], judged > 1),
        ("conservative", COLOURS[1], judged == 1),
    ):
        axis.bar(at[selected], accepted[selected], color=colour, label=f"accepted, {name}")
    axis.bar(at, judged, fc="none", ec=COLOURS[-1], lw=0.7, label="judged")
    undrafted = at[judged == 0]
    axis.plot(undrafted, 0 * undrafted, "x", c=COLOURS[-1], ms=4, label="draft not ready")
    name_axes(axis, "round", "drafted tokens")
    axis.set_ylim(top=1.5 * max(1, judged.max(initial=0)))
    axis.legend(fontsize=FONT_SIZE, ncols=4, loc="upper center")
