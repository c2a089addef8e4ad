"""SAGE's figures: how entropy is correlated along an answer, and what the adaptive tree gives.

The tree is measured by the length of answers, by pruning, and planned ahead or grown live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

import numpy as np
from jaxtyping import Float
from torch import Tensor

from lab import draw
from lab.draw import Data
from lab.studies.experiment import TAU, AnsweredClip, Experiment, interval_over_clips, rounded_taus
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
DRAWING_OPTIONS = {"tall": True, "guides": ["ar"]}
LAGS = 20
MIN_TOKENS = 2 * LAGS  # A shorter answer has too few pairs of tokens at long lags.
CALIBRATED_SAGE = f"sage/lambda={LAMBDA}"  # Over the view that SpecVLM is measured with.
LENGTHENED = {"sd": "sd", "specvlm": CALIBRATED, "sage": CALIBRATED_SAGE}
CALIBRATED_VIEW = f"specvlm/keep=0.1/lambda={LAMBDA}"
BINS = 5  # Of alpha, and the levels of the deepest path.
CONFIDENT = 0.56  # Theorem 4.4's threshold for k = 10 and an epsilon of 0.05.
BY_ALPHA, BY_DEPTH = "accepted, by alpha", "accepted whole,\nby levels of a confident path"
KEEPS = (1.0, 0.7, 0.4, 0.3, 0.2, 0.1, 0.05)
PLANS = {
    **{
        f"SAGE ({rule}), {name}": f"{CALIBRATED_SAGE}{shape}/rule={rule}"
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


def measure_entropy(experiment: Experiment) -> Data:
    """Measures Fig. 2: the autocorrelation of a draft's entropy along the target's answers."""
    panels: Data = {}
    for what, task in TASKS.items():
        answered = (_answered_clip(experiment, task, number) for number in range(experiment.clips))
        traces: dict[str, list[list[float]]] = {name: [] for name in experiment.drafts}
        for clip in answered:
            if len(clip.ids) >= MIN_TOKENS:
                for name, draft in experiment.drafts.items():
                    traces[name].append(_clip_entropies(experiment, clip, draft))
        lines: Data = {}
        for name, own in traces.items():
            correlations_by_clip = [autocorrelations(trace) for trace in own]
            lines[f"a draft that {name}"] = [
                interval_over_clips(at) for at in zip(*correlations_by_clip, strict=True)
            ]
        if not own:
            raise OptionError(
                f"no answer has {MIN_TOKENS} tokens: give more --clips or longer answers"
            )
        noise_band = white_noise_band([len(trace) for trace in own])
        lines |= {
            "white noise, 97.5 %": noise_band,
            "white noise, 2.5 %": [-most for most in noise_band],
        }
        panels[f"autocorrelation,\n{what} ({len(own)})"] = lines
    return {
        "x": "lag (tokens)",
        "at": list(range(1, LAGS + 1)),
        "linear": True,
        "tall": True,
        "guides": ["white noise, 97.5 %", "white noise, 2.5 %"],
        "panels": panels,
    }


def _answered_clip(experiment: Experiment, task: str, number: int) -> AnsweredClip:
    if task == "describe":
        return experiment.answered_clip(number)
    experiment.on_progress(f"{task}, clip {number + 1} of {experiment.clips}")
    scene, clip, _ = agreement.unseen_clip(number, experiment.size)
    question = dialogues.conversation(scene, task, number)[0].question
    return experiment.answer_clip(number, clip, ask(experiment.target, question, clips=[clip]))


def _clip_entropies(experiment: Experiment, clip: AnsweredClip, draft: Loaded) -> list[float]:
    """Returns SAGE's H along the target's answer."""
    return draft_entropies(
        experiment.draft_logits(clip, f"{sage.VIEW.name}/keep={sage.VIEW.keep}", draft)
    )


def draft_entropies(logits: Float[Tensor, "answer vocab"]) -> list[float]:
    """Returns SAGE's H (Eq. 8) at each place, of the ten most probable tokens."""
    top = sage.Sage().top
    best = logits.double().softmax(-1).topk(min(top, logits.shape[-1])).values
    return [(1 - sage.confidence(ranks, top)) * math.log(top) for ranks in best.tolist()]


def measure_confidence(experiment: Experiment) -> Data:
    """Measures Remark A.1 and Corollary A.2: how often a draft's tokens stand, by its alpha.

    A place of the target's answer is accepted where the draft's arg-max is the target's token. A
    confident path has an alpha above Theorem 4.4's threshold at each level.
    """
    by_alpha: dict[str, list[list[float | None]]] = {name: [] for name in experiment.drafts}
    by_depth: dict[str, list[list[float | None]]] = {name: [] for name in experiment.drafts}
    for number in range(experiment.clips):
        clip = experiment.answered_clip(number)
        for name, draft in experiment.drafts.items():
            logits = experiment.draft_logits(clip, CALIBRATED_VIEW, draft)
            alphas = draft_confidences(logits)
            likeliest = logits.argmax(-1).tolist()
            accepted = [own == token for own, token in zip(likeliest, clip.ids, strict=True)]
            by_alpha[name].append(accepted_by_confidence(alphas, accepted))
            by_depth[name].append(accepted_paths(alphas, accepted))
    return {
        "x": "alpha, in fifths; and levels of a confident path",
        "at": list(range(1, BINS + 1)),
        "linear": True,
        "tall": True,
        "panels": {
            panel: {
                f"a draft that {name}": [
                    interval_over_clips([share for share in at if share is not None] or [0.0])
                    for at in zip(*own, strict=True)
                ]
                for name, own in shares.items()
            }
            for panel, shares in {BY_ALPHA: by_alpha, BY_DEPTH: by_depth}.items()
        },
        "clips_accepted": {BY_ALPHA: by_alpha, BY_DEPTH: by_depth},
    }


def draft_confidences(logits: Float[Tensor, "answer vocab"]) -> list[float]:
    """Returns SAGE's alpha (Eq. 7-9) at each place."""
    top = sage.Sage().top
    return [1 - entropy / math.log(top) for entropy in draft_entropies(logits)]


def accepted_by_confidence(alphas: Sequence[float], accepted: Sequence[bool]) -> list[float | None]:
    """Returns the accepted share of the places in each fifth of alpha, None where it has none."""
    by_bin: list[list[float]] = [[] for _ in range(BINS)]
    for alpha, stands in zip(alphas, accepted, strict=True):
        by_bin[min(BINS - 1, max(0, int(alpha * BINS)))].append(float(stands))
    return [mean(own) if own else None for own in by_bin]


def accepted_paths(alphas: Sequence[float], accepted: Sequence[bool]) -> list[float | None]:
    """Returns the share of confident paths of 1, 2, ... levels whose tokens are all accepted."""
    shares: list[float | None] = []
    for depth in range(1, BINS + 1):
        ends = range(depth, len(alphas) + 1)
        confident = [end for end in ends if min(alphas[end - depth : end]) > CONFIDENT]
        stands = [float(all(accepted[end - depth : end])) for end in confident]
        shares.append(mean(stands) if stands else None)
    return shares


def autocorrelations(trace: Sequence[float]) -> list[float]:
    """Returns Pearson's correlation of a trace with itself at each lag."""
    return [float(np.corrcoef(trace[:-lag], trace[lag:])[0, 1]) for lag in range(1, LAGS + 1)]


def white_noise_band(lengths: Sequence[int]) -> list[float]:
    """Returns the 97.5 % quantile, at each lag, of the mean autocorrelation of white noise.

    ``lengths`` are those of the traces whose mean is taken.
    """
    variances = [[1 / (n - lag) for n in lengths] for lag in range(1, LAGS + 1)]
    return [1.96 * math.sqrt(sum(own)) / len(lengths) for own in variances]


def measure_length(experiment: Experiment) -> Data:
    """Measures Fig. 3: tau and speed by the tokens written, past the end of the text if need be."""
    no_token = experiment.target.backbone.vocab  # No token ends a text, so all answers are as long.
    lengths = [experiment.tokens >> halved for halved in (4, 3, 2, 1, 0)]
    panels: Data = {panel: {name: [] for name in LENGTHENED} for panel in (TAU, SPEED)}
    for tokens in lengths:
        methods = LENGTHENED.values()
        answers_by_method = experiment.run_interleaved(
            "ar", *methods, max_new_tokens=tokens, eos_token_id=no_token
        )
        for name, method in LENGTHENED.items():
            panels[TAU][name].append(_tau_interval(answers_by_method[method]))
            panels[SPEED][name].append(
                _speed_interval(answers_by_method[method], answers_by_method["ar"])
            )
    ends = answer_limits(merge_settings(experiment.target.backbone.model, None, {}), 0).eos
    natural_lengths = [
        end
        for own in answers_by_method["ar"]
        if (end := tokens_until_end(own.ids, ends)) is not None
    ]
    across = "tokens written (log scale)"
    if natural_lengths:
        across += (
            f"; by itself {len(natural_lengths)} of {experiment.clips} would end, after "
            f"{mean(natural_lengths):.0f}"
        )
    return {"x": across, "at": lengths, "panels": _with_ar_line(panels), **DRAWING_OPTIONS}


def tokens_until_end(ids: Sequence[int], ends: Sequence[int]) -> int | None:
    """Returns the number of tokens up to the first end of text, or None where there is none."""
    return next((place + 1 for place, token in enumerate(ids) if token in ends), None)


def measure_pruning(experiment: Experiment) -> Data:
    """Measures Table 5: tau and speed by the share of the video that the draft reads."""
    names = [f"{CALIBRATED_SAGE}/keep={keep:g}" for keep in KEEPS]
    panels: Data = {TAU: {}, SPEED: {}}
    for what, draft in experiment.drafts.items():
        answers_by_method = experiment.run_interleaved("ar", *names, draft=draft)
        panels[TAU][f"a draft that {what}"] = [
            _tau_interval(answers_by_method[name]) for name in names
        ]
        panels[SPEED][f"a draft that {what}"] = [
            _speed_interval(answers_by_method[name], answers_by_method["ar"]) for name in names
        ]
    across = f"share of {experiment.size} visual tokens kept (log scale)"
    return {"x": across, "at": list(KEEPS), "panels": _with_ar_line(panels), **DRAWING_OPTIONS}


def _tau_interval(answers: Sequence[Answer]) -> Interval:
    return interval_over_clips(
        [tau for answer in answers if (tau := measures.tau([answer])) is not None]
    )


def _speed_interval(answers: Sequence[Answer], plain: Sequence[Answer]) -> Interval:
    return interval_over_clips(measures.speedups(answers, plain), np.median)


def _with_ar_line(panels: Data) -> Data:
    panels[SPEED]["ar"] = [1.0] * len(next(iter(panels[SPEED].values())))
    return panels


def measure_plans(experiment: Experiment) -> Data:
    """Measures the tree planned a round ahead against one grown live; no paper has this figure."""
    panels: Data = {}
    taus_by_draft: Data = {}
    for what, draft in experiment.drafts.items():
        taus: dict[str, list[float]] = {}
        rows: Data = {}
        for name, method in PLANS.items():
            runs = [
                experiment.run(method, number, draft=draft) for number in range(experiment.clips)
            ]
            taus[method] = [run.tau or 0.0 for run in runs]
            trees = [round.parents for run in runs for round in run.forwards]
            depth = mean(height(tree) for tree in trees)
            nodes = mean(map(len, trees))
            rows[f"{name}\n({depth:.1f} levels, {nodes:.1f} nodes)"] = {
                "tau": interval_over_clips(taus[method])
            }
        panels[f"a draft that {what}"] = rows
        taus_by_draft[what] = rounded_taus(taus)
    return {"x": TAU, "panels": panels, "start": 1, "clips_tau": taus_by_draft}


STUDIES = {
    "sage-entropy": Study(
        "SAGE, Fig. 2",
        "Autocorrelation of the draft's entropy along the target's answers, against white noise.",
        measure_entropy,
        clips=24,
    ),
    "sage-confidence": Study(
        "SAGE, Remark A.1 and Corollary A.2",
        "How often a draft's arg-max stands by its alpha, and paths of confident levels.",
        measure_confidence,
        clips=24,
    ),
    "sage-length": Study(
        "SAGE, Fig. 3",
        "Tau and speed over ar by tokens written; end of text is ignored, so all write as many.",
        measure_length,
        clips=8,
        tokens=256,
        timed=True,
    ),
    "sage-pruning": Study(
        "SAGE, Table 5",
        "Tau and speed over ar by the share of the video that SAGE's draft reads.",
        measure_pruning,
        clips=8,
        timed=True,
    ),
    "sage-plan": Study(
        "SAGE, Algorithm 1",
        "Tau of SAGE's tree planned a round ahead and grown live, of a static tree and of chains.",
        measure_plans,
        draw.bars,
        clips=8,
    ),
}
