"""The pictures of ``docs/methods``: what a paper's method does on the embedded pair.

One function per paper runs the pair on clips it was never trained on and returns numbers, kept as
JSON; two draw such numbers (lines in panels, and HIPPO's frames) and know nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from saccade.captions import SHAPES, captioner
from saccade.engine import run
from saccade.errors import OptionError
from saccade.media import Clip
from saccade.models import Loaded, ask, load
from saccade.sampling import Sampling
from saccade.session import Session
from saccade.systems import resolve
from saccade.tree import levels
from saccade.types import RoundRecord

Data = dict[str, Any]

VIEWS = ("specvlm", "attention", "uniform", "random", "window-front")
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
KEYS = (0.01, 0.03, 0.0625, 0.125, 0.25, 0.5)
HIPPO_VIEWS = "specvlm", "holistic"
STRIP, ROUNDS = 6, 36  # frames and rounds shown of HIPPO
TAU = "tokens per target forward"
# Okabe and Ito's colours; marks and dashes tell the lines apart without them
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000")
MARKS, DASHES = "osD^v ", ("-", "--", "-.", ":", (0, (6, 1)), "-")
SMALL = 8


@dataclass
class Bench:
    """The embedded pair and the first ``clips`` unseen clips of ``size`` visual tokens."""

    clips: int = 4
    size: int = 2048
    tokens: int = 128
    tell: Callable[[str], None] = lambda text: None
    target: Loaded = field(default_factory=partial(load, "shapes"))
    draft: Loaded = field(default_factory=partial(load, "shapes-draft"))

    def rounds(self, method: str, number: int = 0) -> Sequence[RoundRecord]:
        """Of one greedy answer. A draft that gave up would make a wrong picture: an error."""
        self.tell(f"{method}, clip {number + 1} of {self.clips}")
        clip, question = _clip(number, self.size)
        found = run(
            self.target.backbone,
            ask(self.target, question, clips=[clip]),
            draft=self.draft.backbone,
            method=method,
            tokenizer=self.target.tokenizer,
            captioner=captioner(SHAPES, list(clip.frames)),
            max_new_tokens=self.tokens,
            do_sample=False,
        )
        if found.fallback_reason is not None:
            raise RuntimeError(f"{method}: {found.fallback_reason}")
        return found.rounds

    def tau(self, method: str) -> float:
        """The mean over the clips."""
        rounds = [self.rounds(method, number) for number in range(self.clips)]
        return mean(mean(len(round.emitted) for round in own) for own in rounds)

    def taus(self, *methods: str) -> dict[str, float]:
        return {method: self.tau(method) for method in methods}


def _clip(number: int, size: int) -> tuple[Clip, str]:
    from saccade.shapes import agreement

    return agreement.held_out(number, size)[1:]


# -- what is measured --------------------------------------------------------------------------


def specvlm(bench: Bench) -> Data:
    """Tau of each view by the share it keeps."""
    name = "sd/view={}/keep={}/shape=chain-7"
    panel = {view: [bench.tau(name.format(view, keep)) for keep in SHARES] for view in VIEWS}
    panel["all of them"] = [bench.tau("sd/shape=chain-7")] * len(SHARES)
    return _shares("visual tokens the draft reads", bench.size, SHARES, panel)


def sparse_to_dense(bench: Bench) -> Data:
    """Tau by K."""
    methods = "std", "streaming"
    panel = {name: [bench.tau(f"{name}/keep={keep}") for keep in KEYS] for name in methods}
    return _shares("visual keys K a head reads", bench.size, KEYS, panel)


def _shares(across: str, size: int, shares: Sequence[float], panel: Data) -> Data:
    at = [round(share * size) for share in shares]
    return {"x": f"{across}, of {size} (log scale)", "at": at, "panels": {TAU: panel}}


def tabed(bench: Bench) -> Data:
    """The weights of every round of the first clip."""
    panels = {}
    for method in ("tabed", "tabed-mtcp"):
        views = resolve(method).view.name.split("+")
        notes = zip(*(round.note for round in bench.rounds(method)), strict=True)
        panels[f"weight\n({method})"] = dict(zip(views, map(list, notes), strict=True))
    tau = bench.taus("sd", "sd/view=text", "tabed-mt", "tabed", "tabed-mtcp")
    return {"x": "round", "panels": panels, "tau": tau}


def sage(bench: Bench) -> Data:
    """The tree of every round of the first clip, and what was accepted of it."""
    panels: Data = {"nodes\n(tokens)": {}, "depth\n(levels)": {}, "accepted\n(tokens)": {}}
    for method in ("sage", "specvlm"):
        trees = zip(*map(_tree, bench.rounds(method)), strict=True)
        for panel, own in zip(panels.values(), trees, strict=True):
            panel[method] = list(own)
    tau = bench.taus("specvlm", "sage", "sage/shape=sage-live", "specvlm/shape=chain-8")
    return {"x": "round", "panels": panels, "tau": tau}


def _tree(round: RoundRecord) -> tuple[int, int, int]:
    """Its nodes, depth and accepted tokens."""
    return len(round.parents), max(levels(round.parents), default=0), len(round.accepted)


def hippo(bench: Bench) -> Data:
    """The cells (t, h, w) two views keep of the first clip, and how many tokens a round judged."""
    target, draft = bench.target.backbone, bench.draft.backbone
    clip, question = _clip(0, bench.size)
    inputs = ask(bench.target, question, clips=[clip])
    guide = Session(target, [Sampling()]).prefill(target.prompts(inputs), record=True)[0]
    prompt = draft.adopt(guide.prompt) if draft.sees_as(target) else draft.prompts(inputs)[0]
    views = {name: resolve(f"sd/view={name}").view(guide, prompt) for name in HIPPO_VIEWS}
    rounds = bench.rounds("hippo")
    return {
        "grid": (prompt.grid[:, 1:].amax(0) + 1).tolist(),
        "kept": {name: seen.grid[:, 1:].tolist() for name, seen in views.items()},
        "judged": [len(round.tokens) for round in rounds],
        "accepted": [len(round.accepted) for round in rounds],
        "tau": bench.taus("hippo", *(f"sd/view={name}" for name in (*HIPPO_VIEWS, "uniform"))),
    }


# -- how it is drawn ---------------------------------------------------------------------------


def lines(data: Data) -> Figure:
    """A panel below another with a line for each name; over rounds, or over ``at`` (log scale)."""
    panels = data["panels"]
    size = (5.4, 1.3 + 1.3 * len(panels)) if len(panels) > 1 else (5.4, 3.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False).flat
    for axis, (label, own) in zip(axes, panels.items(), strict=True):
        for i, (name, y) in enumerate(own.items()):
            x = data.get("at") or range(1, len(y) + 1)
            axis.plot(x, y, marker=MARKS[i], ls=DASHES[i], c=COLOURS[i], label=name)
            # hollow and ever smaller: all show when on a pile
            axis.lines[-1].set(mfc="none", lw=1.2, ms=7 - i)
        _label(axis, data["x"], label)
        axis.label_outer()
        axis.margins(y=0.1)
        if "at" in data:
            axis.set_xscale("log")
            axis.set_xticks(data["at"], map(str, data["at"]))
            axis.minorticks_off()
        else:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.set_ylim(bottom=-0.05 * axis.get_ylim()[1])
    most = max(figure.axes, key=lambda axis: len(axis.lines))
    names = most.get_legend_handles_labels()
    figure.legend(*names, fontsize=SMALL, ncols=4, loc="outside upper center")
    return figure


def frames(data: Data) -> Figure:
    """The clip's frames, veiled where a view drops a token; below, each round's tokens."""
    figure = Figure(figsize=(1.25 * STRIP, 4.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1.2))
    pictures = _clip(0, data["size"])[0].frames
    times, high, wide = data["grid"]
    rows = above.subplots(len(data["kept"]), STRIP, squeeze=False)
    for row, (view, kept) in zip(rows, data["kept"].items(), strict=True):
        for i, axis in enumerate(row):
            t = (2 * i + 1) * times // (2 * STRIP)
            picture = np.asarray(pictures[t * len(pictures) // times]) / 255
            seen = np.zeros((high, wide, 1), dtype=bool)
            for _, h, w in (cell for cell in kept if cell[0] == t):
                seen[h, w] = True
            clear = seen.repeat(len(picture) // high, 0).repeat(picture.shape[1] // wide, 1)
            axis.imshow(np.where(clear, picture, 0.75 + 0.2 * picture))
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"{seen.sum()} of {seen.size}", fontsize=SMALL)
        row[0].set_ylabel(f"{view}\n{len(kept)} in all", fontsize=SMALL)
    _rounds(
        below.subplots(), np.array(data["judged"][:ROUNDS]), np.array(data["accepted"][:ROUNDS])
    )
    return figure


def _rounds(axis: Axes, judged: Any, accepted: Any) -> None:
    """One token past the flight is judged with it, so a conservative round judges one."""
    at = np.arange(1, len(judged) + 1)
    for name, colour, these in (
        ("optimistic", COLOURS[0], judged > 1),
        ("conservative", COLOURS[1], judged == 1),
    ):
        axis.bar(at[these], accepted[these], color=colour, label=f"accepted, {name}")
    axis.bar(at, judged, fc="none", ec=COLOURS[-1], lw=0.7, label="judged")
    early = at[judged == 0]
    axis.plot(early, 0 * early, "x", c=COLOURS[-1], ms=4, label="draft not ready")
    _label(axis, "round", "drafted tokens")
    axis.set_ylim(top=1.5 * max(1, judged.max(initial=0)))
    axis.legend(fontsize=SMALL, ncols=4, loc="upper center")


def _label(axis: Axes, across: str, up: str) -> None:
    axis.set_xlabel(across, fontsize=SMALL)
    axis.set_ylabel(up, fontsize=SMALL)
    axis.tick_params(labelsize=SMALL - 1)
    axis.grid(alpha=0.3)


# -- by name, and to files ---------------------------------------------------------------------


Picture = tuple[Callable[[Bench], Data], Callable[[Data], Figure]]

FIGURES: dict[str, Picture] = {
    "specvlm": (specvlm, lines),
    "sparse-to-dense": (sparse_to_dense, lines),
    "tabed": (tabed, lines),
    "sage": (sage, lines),
    "hippo": (hippo, frames),
}


def named(name: str) -> Picture:
    if name not in FIGURES:
        raise OptionError(f"unknown figure {name!r}; known: {', '.join(FIGURES)}")
    return FIGURES[name]


def write(path: Path, name: str, bench: Bench) -> None:
    """Measures; the file says what was run."""
    about = {"figure": name, "clips": bench.clips, "size": bench.size, "tokens": bench.tokens}
    path.write_text(json.dumps(about | named(name)[0](bench), separators=(",", ":")) + "\n")


def read(path: Path, name: str) -> Data:
    """The numbers of this figure; OptionError where the file holds something else."""
    try:
        data: Data = json.loads(path.read_text())
        held = data["figure"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"cannot read {path}; give --data the JSON of an earlier run") from error
    if held != name:
        raise OptionError(f"{path} holds the numbers of {held!r}, not of {name!r}")
    return data


def save(figure: Figure, path: Path) -> None:
    """Without a date or random ids, so that a file in the repository changes with its numbers.

    Names of clip paths may change still: they are hashes of a layout that is solved to 1e-13.
    """
    date = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "saccade"}):
        figure.savefig(path, dpi=130, metadata=date)
