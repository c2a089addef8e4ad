"""Sparse-to-Dense's figures: how many tokens to draft, how many keys to keep, what that saves.

In Sparse-to-Dense (``std``) the target drafts for itself. While it drafts, each of its heads reads
only K of the visual keys, those with most attention in the prefill. All names in ``STUDIES`` are
figures of ``python -m lab figure``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

import numpy as np

from lab import draw
from lab.draw import Data
from lab.studies.experiment import Experiment, interval_over_clips
from lab.studies.methods import KEY_SHARES
from lab.studies.study import Study
from saccade.bench import measures
from saccade.bench.measures import Interval
from saccade.bench.records import Answer
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, chain
from saccade.drafting.views import saliency
from saccade.engine.generate import stream
from saccade.inputs.questions import batch_inputs
from saccade.methods import resolve
from saccade.model.session import Session

GAMMAS = (1, 3, 5, 7, 9, 11, 13, 15)  # Drafted tokens of a round.
SPARSE = ("std", "streaming")  # Methods whose drafts read a part of the visual keys.
BATCH_METHODS, TURNS = ("std", "streaming", "layerskip"), 3
# The share of tokens for which sparse and dense attention agree, by the paper (Sec. 2), and the
# name of its line in the figure.
CLAIMED_AGREEMENT, CLAIMED_LINE = 0.95, "the paper's 95 %"
# Keys of a figure's data, for ``lab.draw.lines``.
DRAWING_OPTIONS = {"tall": True, "guides": ["ar", CLAIMED_LINE]}


def measure_gamma(experiment: Experiment) -> Data:
    """Measures Fig. 1a: acceptance and speed by the tokens drafted in a round."""
    panels = _measure_gains(experiment, [f"std/shape=chain-{length}" for length in GAMMAS])
    axis = {"x": "gamma: tokens drafted a round", "at": GAMMAS, "ticks": GAMMAS, "linear": True}
    return {**axis, "panels": panels, **DRAWING_OPTIONS}


def measure_keys(experiment: Experiment) -> Data:
    """Measures Fig. 1b: acceptance and speed by K, the visual keys that a head reads."""
    return _panels_over_keys(
        experiment, _measure_gains(experiment, [f"std/keep={keep}" for keep in KEY_SHARES])
    )


def _measure_gains(experiment: Experiment, names: Sequence[str]) -> Data:
    """Returns the panels of acceptance and of speed, with a point for each method of ``names``.

    A point is the median over clips with its interval.
    """
    answers_by_method = experiment.run_interleaved("ar", *names)
    speedups = [
        interval_over_clips(
            measures.speedups(answers_by_method[name], answers_by_method["ar"]), np.median
        )
        for name in names
    ]
    return {
        "acceptance rate": {
            "std": [
                _interval_of_answers(measures.acceptance_rate, answers_by_method[name])
                for name in names
            ]
        },
        "times as fast as ar (decoding)": {"std": speedups, "ar": [1.0] * len(names)},
    }


def _interval_of_answers(
    figure: Callable[[Sequence[Answer]], float | None], answers: Sequence[Answer]
) -> Interval:
    """Returns the median over answers of what ``figure`` gives for each, with its interval.

    There is one answer to each clip. Answers for which ``figure`` gives None are left out.
    """
    values = [own for answer in answers if (own := figure([answer])) is not None]
    return interval_over_clips(values, np.median)


def _panels_over_keys(experiment: Experiment, panels: Data) -> Data:
    """Returns the data of a figure with these panels, whose x axis is K for each of KEY_SHARES."""
    across = f"visual keys K a head reads, of {experiment.size} (log scale)"
    at = [saliency.budget(experiment.size, keep) for keep in KEY_SHARES]
    return {"x": across, "at": at, "panels": panels, **DRAWING_OPTIONS}


def measure_agreement(experiment: Experiment) -> Data:
    """Measures Sec. 2: how often sparse attention guesses the token of dense attention, by K.

    A value is the mean over clips of the share of an answer's tokens.
    """
    names = [f"{method}/keep={keep}" for method in SPARSE for keep in KEY_SHARES]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(experiment.clips):
        for name, guesses in zip(names, correct_guesses(experiment, number, names), strict=True):
            rates[name].append(mean(guesses))
    lines: Data = {
        method: [interval_over_clips(rates[f"{method}/keep={keep}"]) for keep in KEY_SHARES]
        for method in SPARSE
    }
    lines[CLAIMED_LINE] = [CLAIMED_AGREEMENT] * len(KEY_SHARES)
    return _panels_over_keys(experiment, {"share of tokens guessed right": lines})


def correct_guesses(
    experiment: Experiment, number: int, methods: Sequence[str]
) -> list[list[bool]]:
    """Returns, for each method and each token of clip ``number``'s answer, whether it is guessed.

    The answer is the target's greedy one. The guess is made by the target itself over the keys that
    the method keeps, one token at a time. The keys of the answer so far were made with dense
    attention, as for the first token of a round. (In a run, the later tokens of a round read keys
    that the draft made.) The answer's first token is left out, because it comes from the prefill,
    which is always dense.
    """
    _, inputs = experiment.inputs(number)
    ids = list(experiment.run("ar", number).ids)
    model = experiment.target.backbone
    target = Session(model, [Sampling()], room=len(ids))
    (prefill,) = target.prefill(model.prompts(inputs), record=True)
    # It has one request for each method, which begins with copies of the keys that its view keeps.
    draft = Session(model, [Sampling()] * len(methods), banned=list(model.placeholders))
    views = [resolve(name).view(prefill, prefill.prompt) for name in methods]
    draft.fork([prefill] * len(methods), views)
    # The target makes the keys of the whole answer. A commit of the draft below copies a token's
    # keys from there.
    target.score({0: chain(ids)})
    target.commit({0: ids})
    correct: list[list[bool]] = [[] for _ in methods]
    for token, following in zip(ids, ids[1:], strict=False):
        draft.commit({request: [token] for request in range(len(methods))})
        scores = draft.score({request: Tree() for request in range(len(methods))})
        for request, own in enumerate(correct):
            own.append(int(scores[request].raw_logits(ROOT).argmax()) == following)
    return correct


def measure_key_reads(experiment: Experiment) -> Data:
    """Measures Sec. 3.3: keys read per token by the formula, and measured seconds per token.

    Both are shares of what plain decoding takes. A value is the median over clips with its
    interval.
    """
    names = [f"std/keep={keep}" for keep in KEY_SHARES]
    answers_by_method = experiment.run_interleaved("ar", *names)
    slower = [
        [
            1 / speedup
            for speedup in measures.speedups(answers_by_method[name], answers_by_method["ar"])
        ]
        for name in names
    ]
    lines = {
        "keys read (predicted)": [
            _interval_of_answers(measures.predicted_key_reads, answers_by_method[name])
            for name in names
        ],
        "seconds (measured)": [interval_over_clips(own, np.median) for own in slower],
        "ar": [1.0] * len(names),
    }
    return _panels_over_keys(experiment, {"cost of a token over ar's": lines}) | {"from zero": True}


def measure_batch(experiment: Experiment) -> Data:
    """Measures Table 1's setting: all clips in one batch, by every method in turn, three times.

    A speedup is over ``ar`` in the same turn, in tokens per second of decoding. The median and its
    interval are over the turns.
    """
    inputs = batch_inputs(
        experiment.target, [experiment.inputs(number)[1] for number in range(experiment.clips)]
    )
    gains: dict[str, list[float]] = {method: [] for method in BATCH_METHODS}
    for turn in range(TURNS):
        rates = {}
        for method in ("ar", *BATCH_METHODS):
            experiment.on_progress(
                f"{method}, a batch of {experiment.clips}, turn {turn + 1} of {TURNS}"
            )
            rates[method] = _batch_tokens_per_second(experiment, method, inputs)
        for method, own in gains.items():
            own.append(rates[method] / rates["ar"])
    return {
        "x": f"times as fast as ar (decoding), {experiment.clips} clips in one batch",
        "rows": {
            method: {"speed": interval_over_clips(own, np.median)} for method, own in gains.items()
        },
        "marks": {"ar": 1.0},
        "turns": gains,
    }


def _batch_tokens_per_second(experiment: Experiment, method: str, inputs: Inputs) -> float:
    """Returns tokens per second of decoding a batch, with answers of the experiment's length."""
    results = stream(
        experiment.target.backbone,
        inputs,
        method=method,
        max_new_tokens=experiment.tokens,
        do_sample=False,
        eos_token_id=experiment.target.backbone.vocab,  # No token ends a text.
    ).finish()
    for result in results:
        if result.fallback_reason is not None:
            raise RuntimeError(f"{method}: {result.fallback_reason}")
    # First tokens come from the prefill. The seconds are of all requests together.
    return sum(len(result.ids) - 1 for result in results) / results[0].timings.decode


STUDIES = {
    "std-gamma": Study(
        "Sparse-to-Dense, Fig. 1a",
        "Acceptance and speed over plain decoding by the tokens drafted a round.",
        measure_gamma,
        clips=8,
        timed=True,
    ),
    "std-batch": Study(
        "Sparse-to-Dense, Table 1",
        "Speed over plain decoding of eight clips in one batch, of 64 tokens each; three turns.",
        measure_batch,
        draw.bars,
        clips=8,
        tokens=64,
        timed=True,
    ),
    "std-k": Study(
        "Sparse-to-Dense, Fig. 1b",
        "Acceptance and speed over plain decoding by the visual keys a head keeps.",
        measure_keys,
        clips=8,
        timed=True,
    ),
    "std-agreement": Study(
        "Sparse-to-Dense, Sec. 2",
        "The share of tokens that sparse attention guesses right, by the keys it keeps.",
        measure_agreement,
        clips=8,
    ),
    "std-io": Study(
        "Sparse-to-Dense, Sec. 3.3",
        "Keys read a token by the paper's formula, against the measured seconds a token.",
        measure_key_reads,
        clips=8,
        timed=True,
    ),
}
