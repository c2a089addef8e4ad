"""Measures SAGE's figures: a draft's entropy along an answer, and what the adaptive tree gives.

SAGE (``saccade/methods/sage.py``) makes its tree deep where the draft is confident and wide where
it is not. Its H is the entropy, in nats, of the probabilities of the draft's ten likeliest tokens,
scaled to sum to 1. Its confidence alpha is 1 for an H of 0 and 0 for the largest H. The tree is
measured by the length of answers, by the share of the video that the draft reads, and by when the
tree is planned.
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
# What the target does, as the figure calls it -> the task of ``dialogues`` that asks for it.
TASKS = {"describing a clip": "describe", "listing its events": "events"}
# Keys of a figure's data, for ``lab.draw.lines``.
DRAWING_OPTIONS = {"tall": True, "guides": ["ar"]}
LAGS = 20  # A place of an answer is correlated with those up to this many tokens later.
MIN_TOKENS = 2 * LAGS  # A shorter answer has too few pairs of tokens at long lags.
CALIBRATED_SAGE = f"sage/lambda={LAMBDA}"  # Over the view that SpecVLM is measured with.
# The name of a line in the figure by length -> its method.
LENGTHENED = {"sd": "sd", "specvlm": CALIBRATED, "sage": CALIBRATED_SAGE}
CALIBRATED_VIEW = f"specvlm/keep=0.1/lambda={LAMBDA}"
# The range of alpha, 0 to 1, is divided into this many bins of equal width. Paths are measured with
# 1 level up to this many levels, so that the panels by alpha and by levels share an x axis.
BINS = 5
CONFIDENT = 0.56  # Theorem 4.4's threshold for k = 10 and an epsilon of 0.05.
BY_ALPHA, BY_DEPTH = "accepted, by alpha", "accepted whole,\nby levels of a confident path"
# The shares of the visual tokens that the draft reads, for Table 5.
KEEPS = (1.0, 0.7, 0.4, 0.3, 0.2, 0.1, 0.05)
# A row's label -> its method. "Planned ahead" plans a whole tree from one law of the round before.
# "Depth and width ahead" takes only the limits of depth and width from that law, and the tokens
# from the laws that the draft scores as the tree grows. "Grown live" takes the limits from the law
# at the new tree's own root.
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
    """Measures Fig. 2: the autocorrelation of a draft's entropy along the target's answers.

    A value is the mean over answers. Answers of fewer than ``MIN_TOKENS`` tokens are left out. A
    panel's label has the number of the others. Raises OptionError where there are none.
    """
    panels: Data = {}
    for what, task in TASKS.items():
        answered = (_answered_clip(experiment, task, number) for number in range(experiment.clips))
        # A trace has the draft's entropy at every token of one answer.
        traces: dict[str, list[list[float]]] = {name: [] for name in experiment.drafts}
        for clip in answered:
            if len(clip.ids) >= MIN_TOKENS:
                for name, draft in experiment.drafts.items():
                    traces[name].append(_clip_entropies(experiment, clip, draft))
        lines: Data = {}
        for name, own in traces.items():
            correlations_by_clip = [autocorrelations(trace) for trace in own]
            lines[f"a draft that {name}"] = [
                interval_over_clips(at_lag) for at_lag in zip(*correlations_by_clip, strict=True)
            ]
        if not own:
            raise OptionError(
                f"no answer has {MIN_TOKENS} tokens: give more --clips or longer answers"
            )
        # All drafts read the same answers, so the band of the last draft's traces is that of all.
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
    """Returns a clip with the target's answer to the task's first question about it."""
    if task == "describe":
        return experiment.answered_clip(number)
    experiment.on_progress(f"{task}, clip {number + 1} of {experiment.clips}")
    scene, clip, _ = agreement.unseen_clip(number, experiment.size)
    question = dialogues.conversation(scene, task, number)[0].question
    return experiment.answer_clip(number, clip, ask(experiment.target, question, clips=[clip]))


def _clip_entropies(experiment: Experiment, clip: AnsweredClip, draft: Loaded) -> list[float]:
    """Returns SAGE's H at each token of the target's answer, where the draft sees SAGE's view."""
    return draft_entropies(
        experiment.draft_logits(clip, f"{sage.VIEW.name}/keep={sage.VIEW.keep}", draft)
    )


def draft_entropies(logits: Float[Tensor, "answer vocab"]) -> list[float]:
    """Returns SAGE's H (Eq. 8) at each place, in nats, of the ten most probable tokens."""
    top = sage.Sage().top
    best = logits.double().softmax(-1).topk(min(top, logits.shape[-1])).values
    # Alpha is 1 - H / log k (Eq. 9), so H is (1 - alpha) log k.
    return [(1 - sage.confidence(ranked, top)) * math.log(top) for ranked in best.tolist()]


def measure_confidence(experiment: Experiment) -> Data:
    """Measures Remark A.1 and Corollary A.2: how often a draft's tokens are accepted, by its alpha.

    A place of the target's answer is accepted where the draft's arg-max is the target's token. A
    confident path has an alpha above Theorem 4.4's threshold at each level. A value is the mean
    over clips of the accepted share, and "clips_accepted" has the shares themselves.
    """
    # By draft, and then for each clip: the accepted share in each fifth of alpha, or of the paths
    # of each number of levels.
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
    shares_by_panel = {BY_ALPHA: by_alpha, BY_DEPTH: by_depth}
    return {
        "x": "alpha, in fifths; and levels of a confident path",
        "at": list(range(1, BINS + 1)),
        "linear": True,
        "tall": True,
        "panels": {
            panel: {
                f"a draft that {name}": _intervals_by_point(shares_by_clip)
                for name, shares_by_clip in shares_by_draft.items()
            }
            for panel, shares_by_draft in shares_by_panel.items()
        },
        "clips_accepted": shares_by_panel,
    }


def _intervals_by_point(shares_by_clip: Sequence[Sequence[float | None]]) -> list[Interval]:
    """Returns the mean share at each point of a line, over the clips that have one there.

    Where no clip has one, the point is drawn at 0.
    """
    shares_by_point = zip(*shares_by_clip, strict=True)
    return [
        interval_over_clips([share for share in shares if share is not None] or [0.0])
        for shares in shares_by_point
    ]


def draft_confidences(logits: Float[Tensor, "answer vocab"]) -> list[float]:
    """Returns SAGE's alpha (Eq. 7-9), from 0 to 1, at each place of an answer."""
    top = sage.Sage().top
    return [1 - entropy / math.log(top) for entropy in draft_entropies(logits)]


def accepted_by_confidence(alphas: Sequence[float], accepted: Sequence[bool]) -> list[float | None]:
    """Returns the accepted share of the places in each fifth of alpha, the lowest fifth first.

    ``alphas`` and ``accepted`` are by place. The share is None for a fifth without places.
    """
    by_bin: list[list[float]] = [[] for _ in range(BINS)]
    for alpha, is_accepted in zip(alphas, accepted, strict=True):
        fifth = min(BINS - 1, max(0, int(alpha * BINS)))
        by_bin[fifth].append(float(is_accepted))
    return [mean(own) if own else None for own in by_bin]


def accepted_paths(alphas: Sequence[float], accepted: Sequence[bool]) -> list[float | None]:
    """Returns the share of confident paths of 1, 2, ... levels whose tokens are all accepted.

    A path is a stretch of consecutive tokens of the answer, and is confident if all their alphas
    are above ``CONFIDENT``. ``alphas`` and ``accepted`` are by place in the answer. The share is
    None where no path of this length is confident.
    """
    shares: list[float | None] = []
    for depth in range(1, BINS + 1):
        ends = range(depth, len(alphas) + 1)
        confident_ends = [end for end in ends if min(alphas[end - depth : end]) > CONFIDENT]
        are_whole = [float(all(accepted[end - depth : end])) for end in confident_ends]
        shares.append(mean(are_whole) if are_whole else None)
    return shares


def autocorrelations(trace: Sequence[float]) -> list[float]:
    """Returns Pearson's correlation of a trace with itself at each lag from 1 to ``LAGS``."""
    return [float(np.corrcoef(trace[:-lag], trace[lag:])[0, 1]) for lag in range(1, LAGS + 1)]


def white_noise_band(lengths: Sequence[int]) -> list[float]:
    """Returns the 97.5 % quantile, at each lag, of the mean autocorrelation of white noise.

    ``lengths`` are those of the traces whose mean is taken. A trace of n tokens has n - lag pairs,
    so the autocorrelation of white noise has a variance of about 1 / (n - lag).
    """
    variances = [[1 / (n - lag) for n in lengths] for lag in range(1, LAGS + 1)]
    return [1.96 * math.sqrt(sum(own)) / len(lengths) for own in variances]


def measure_length(experiment: Experiment) -> Data:
    """Measures Fig. 3: tau and speed by the number of tokens written.

    The numbers of tokens are the experiment's, and a half to a sixteenth of it. Answers go on after
    the token that would end them, so that all have the same length. Tau is the mean over clips, and
    speed the median.
    """
    no_token = experiment.target.backbone.vocab  # An id that no token has, so nothing ends a text.
    lengths = [experiment.tokens // part for part in (16, 8, 4, 2, 1)]
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
    # ``answers_by_method`` now has the longest answers. They show after how many tokens a text
    # would have ended by itself.
    end_ids = answer_limits(
        merge_settings(experiment.target.backbone.model, generation_config=None, settings={}), 0
    ).eos
    natural_lengths = [
        length
        for own in answers_by_method["ar"]
        if (length := tokens_until_end(own.ids, end_ids)) is not None
    ]
    across = "tokens written (log scale)"
    if natural_lengths:
        across += (
            f"; by itself {len(natural_lengths)} of {experiment.clips} would end, after "
            f"{mean(natural_lengths):.0f}"
        )
    return {"x": across, "at": lengths, "panels": _with_ar_line(panels), **DRAWING_OPTIONS}


def tokens_until_end(ids: Sequence[int], ends: Sequence[int]) -> int | None:
    """Returns the number of tokens up to and with the first of ``ends``, or None without one."""
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
    """Returns the panels, after adding plain decoding to that of speeds, where it is always 1."""
    panels[SPEED]["ar"] = [1.0] * len(next(iter(panels[SPEED].values())))
    return panels


def measure_plans(experiment: Experiment) -> Data:
    """Measures the tau of every method in ``PLANS``; no paper has this figure.

    "clips_tau" has the taus clip by clip, by draft and then by method.
    """
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
