"""SAGE's figures: whether entropy hangs together, and what the adaptive tree gives by length,
by pruning, and planned ahead or live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lab import draw
from lab.draw import Data
from lab.studies.lab import TAU, Lab, Shot, interval, rounded
from lab.studies.specvlm import CALIBRATED, LAMBDA
from lab.studies.study import Study
from lab.training import agreement
from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.bench.records import Answer
from saccade.core.errors import OptionError
from saccade.core.generation_settings import answer_limits, merge_settings
from saccade.core.tree import height
from saccade.inputs import Loaded, ask
from saccade.methods import sage
from saccade.world import dialogues

SPEED = "times as fast as ar (decoding)"
TASKS = {"describing a clip": "describe", "listing its events": "events"}
LOOKS = {"tall": True, "guides": ["ar"]}
LAGS = 20
LEAST = 2 * LAGS  # tokens of an answer, or it says too little of long lags
OWN = f"sage/lambda={LAMBDA}"  # over the view that SpecVLM is judged with
LENGTHENED = {"sd": "sd", "specvlm": CALIBRATED, "sage": OWN}
KEEPS = (1.0, 0.7, 0.4, 0.3, 0.2, 0.1, 0.05)
PLANS = {
    **{
        f"SAGE ({rule}), {name}": f"{OWN}{shape}/rule={rule}"
        for rule in ("formal", "prose")
        for name, shape in {
            "planned ahead": "/shape=sage-ahead",
            "depth and width ahead": "",
            "grown live": "/shape=sage-live",
        }.items()
    },
    "static tree (SpecVLM's)": CALIBRATED,
    **{f"chain of {depth}": f"{CALIBRATED}/shape=chain-{depth}" for depth in (5, 8, 12)},
}


def entropy(lab: Lab) -> Data:
    """Fig. 2: how a draft's entropy at a token goes with that some tokens later."""
    panels: Data = {}
    for what, task in TASKS.items():
        shots = (_shot(lab, task, number) for number in range(lab.clips))
        traces: dict[str, list[list[float]]] = {name: [] for name in lab.drafts}
        for shot in shots:
            if len(shot.ids) >= LEAST:
                for name, draft in lab.drafts.items():
                    traces[name].append(_entropies(lab, shot, draft))
        lines: Data = {}
        for name, own in traces.items():
            by_clip = [correlations(trace) for trace in own]
            lines[f"a draft that {name}"] = [interval(at) for at in zip(*by_clip, strict=True)]
        if not own:
            raise OptionError(f"no answer has {LEAST} tokens: give more --clips or longer answers")
        band = white_noise([len(trace) for trace in own])
        lines |= {"white noise, 97.5 %": band, "white noise, 2.5 %": [-most for most in band]}
        panels[f"autocorrelation,\n{what} ({len(own)})"] = lines
    return {
        "x": "lag (tokens)",
        "at": list(range(1, LAGS + 1)),
        "linear": True,
        "tall": True,
        "guides": ["white noise, 97.5 %", "white noise, 2.5 %"],
        "panels": panels,
    }


def _shot(lab: Lab, task: str, number: int) -> Shot:
    if task == "describe":
        return lab.shot(number)
    lab.tell(f"{task}, clip {number + 1} of {lab.clips}")
    scene, clip, _ = agreement.unseen_clip(number, lab.size)
    question = dialogues.conversation(scene, task, number)[0].question
    return lab.look(number, clip, ask(lab.target, question, clips=[clip]))


def _entropies(lab: Lab, shot: Shot, draft: Loaded) -> list[float]:
    """H along the target's answer."""
    return entropies(lab.along(shot, f"{sage.VIEW.name}/keep={sage.VIEW.keep}", draft))


def entropies(logits: Float[Tensor, "answer vocab"]) -> list[float]:
    """SAGE's H (Eq. 8) at each place, of the ten likeliest tokens' law."""
    most = math.log(sage.Sage().top)
    return [(1 - sage.confidence(law)) * most for law in logits.double().softmax(-1)]


def correlations(trace: Sequence[float]) -> list[float]:
    """Pearson's, at each lag."""
    return [float(np.corrcoef(trace[:-lag], trace[lag:])[0, 1]) for lag in range(1, LAGS + 1)]


def white_noise(lengths: Sequence[int]) -> list[float]:
    """Where 97.5 % of the mean over clips would lie below, were no token like any other."""
    variances = [[1 / (n - lag) for n in lengths] for lag in range(1, LAGS + 1)]
    return [1.96 * math.sqrt(sum(own)) / len(lengths) for own in variances]


def length(lab: Lab) -> Data:
    """Fig. 3: tau and speed by how much is written, past the end of the text if need be."""
    endless = lab.target.backbone.vocab  # no token ends a text: all answers are as long
    lengths = [lab.tokens >> halved for halved in (4, 3, 2, 1, 0)]
    panels: Data = {panel: {name: [] for name in LENGTHENED} for panel in (TAU, SPEED)}
    for tokens in lengths:
        methods = LENGTHENED.values()
        ran = lab.race("ar", *methods, max_new_tokens=tokens, eos_token_id=endless)
        for name, method in LENGTHENED.items():
            panels[TAU][name].append(_tau(ran[method]))
            panels[SPEED][name].append(_speed(ran[method], ran["ar"]))
    ends = answer_limits(merge_settings(lab.target.backbone.model, None, {}), 0).eos
    ended = [end for own in ran["ar"] if (end := until(own.ids, ends)) is not None]
    across = "tokens written (log scale)"
    if ended:
        across += f"; by itself {len(ended)} of {lab.clips} would end, after {mean(ended):.0f}"
    return {"x": across, "at": lengths, "panels": _beside_ar(panels), **LOOKS}


def until(ids: Sequence[int], ends: Sequence[int]) -> int | None:
    """How many there are up to the first end of text; None without one."""
    return next((place + 1 for place, token in enumerate(ids) if token in ends), None)


def pruning(lab: Lab) -> Data:
    """Table 5: tau and speed by the share of the video that the draft reads."""
    names = [f"{OWN}/keep={keep:g}" for keep in KEEPS]
    panels: Data = {TAU: {}, SPEED: {}}
    for what, draft in lab.drafts.items():
        ran = lab.race("ar", *names, draft=draft)
        panels[TAU][f"a draft that {what}"] = [_tau(ran[name]) for name in names]
        panels[SPEED][f"a draft that {what}"] = [_speed(ran[name], ran["ar"]) for name in names]
    across = f"share of {lab.size} visual tokens kept (log scale)"
    return {"x": across, "at": list(KEEPS), "panels": _beside_ar(panels), **LOOKS}


def _tau(answers: Sequence[Answer]) -> Interval:
    return interval([found for own in answers if (found := measures.tau([own])) is not None])


def _speed(answers: Sequence[Answer], plain: Sequence[Answer]) -> Interval:
    return interval(measures.speedups(answers, plain), np.median)


def _beside_ar(panels: Data) -> Data:
    panels[SPEED]["ar"] = [1.0] * len(next(iter(panels[SPEED].values())))
    return panels


def plan(lab: Lab) -> Data:
    """Our own: the tree planned a round ahead against the one grown from live laws."""
    panels: Data = {}
    each: Data = {}
    for what, draft in lab.drafts.items():
        taus: dict[str, list[float]] = {}
        rows: Data = {}
        for name, method in PLANS.items():
            runs = [lab.run(method, number, draft=draft) for number in range(lab.clips)]
            taus[method] = [run.tau or 0.0 for run in runs]
            trees = [round.parents for run in runs for round in run.forwards]
            deep = mean(height(tree) for tree in trees)
            nodes = mean(map(len, trees))
            rows[f"{name}\n({deep:.1f} levels, {nodes:.1f} nodes)"] = {
                "tau": interval(taus[method])
            }
        panels[f"a draft that {what}"] = rows
        each[what] = rounded(taus)
    return {"x": TAU, "panels": panels, "start": 1, "clips_tau": each}


STUDIES = {
    "sage-entropy": Study(
        "SAGE, Fig. 2",
        "Autocorrelation of the draft's entropy along the target's answers, against white noise.",
        entropy,
        clips=24,
    ),
    "sage-length": Study(
        "SAGE, Fig. 3",
        "Tau and speed over ar by tokens written; end of text is ignored, so all write as many.",
        length,
        clips=3,
        tokens=256,
        timed=True,
    ),
    "sage-pruning": Study(
        "SAGE, Table 5",
        "Tau and speed over ar by the share of the video that SAGE's draft reads.",
        pruning,
        clips=4,
        timed=True,
    ),
    "sage-plan": Study(
        "SAGE, Algorithm 1",
        "Tau of SAGE's tree planned a round ahead and grown live, of a static tree and of chains.",
        plan,
        draw.bars,
        clips=8,
    ),
}
