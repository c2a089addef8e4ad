"""Sparse-to-Dense's figures: how long to draft, how many keys to keep, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

import numpy as np

from lab import draw
from lab.draw import Data
from lab.studies.lab import Lab, interval
from lab.studies.methods import KEYS
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

GAMMAS = (1, 3, 5, 7, 9, 11, 13, 15)
SPARSE = ("std", "streaming")
BATCHED, TURNS = ("std", "streaming", "layerskip"), 3
CLAIMED, PAPERS = 0.95, "the paper's 95 %"  # of tokens agree, Sec. 2
LOOKS = {"tall": True, "guides": ["ar", PAPERS]}


def gamma(lab: Lab) -> Data:
    """Fig. 1a: acceptance and speed by the tokens drafted a round."""
    panels = _gains(lab, [f"std/shape=chain-{length}" for length in GAMMAS])
    axis = {"x": "gamma: tokens drafted a round", "at": GAMMAS, "ticks": GAMMAS, "linear": True}
    return {**axis, "panels": panels, **LOOKS}


def keys(lab: Lab) -> Data:
    """Fig. 1b: acceptance and speed by K."""
    return _over_keys(lab, _gains(lab, [f"std/keep={keep}" for keep in KEYS]))


def _gains(lab: Lab, names: Sequence[str]) -> Data:
    ran = lab.race("ar", *names)
    faster = [interval(measures.speedups(ran[name], ran["ar"]), np.median) for name in names]
    return {
        "acceptance rate": {"std": [_each(measures.acceptance_rate, ran[name]) for name in names]},
        "times as fast as ar (decoding)": {"std": faster, "ar": [1.0] * len(names)},
    }


def _each(
    figure: Callable[[Sequence[Answer]], float | None], answers: Sequence[Answer]
) -> Interval:
    """A figure of every answer by itself: the median, and its interval over clips."""
    found = [own for answer in answers if (own := figure([answer])) is not None]
    return interval(found, np.median)


def _over_keys(lab: Lab, panels: Data) -> Data:
    across = f"visual keys K a head reads, of {lab.size} (log scale)"
    at = [saliency.budget(lab.size, keep) for keep in KEYS]
    return {"x": across, "at": at, "panels": panels, **LOOKS}


def agreement(lab: Lab) -> Data:
    """Sec. 2: the share of tokens that sparse attention guesses like dense attention, by K."""
    names = [f"{method}/keep={keep}" for method in SPARSE for keep in KEYS]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(lab.clips):
        for name, guesses in zip(names, guessed(lab, number, names), strict=True):
            rates[name].append(mean(guesses))
    lines: Data = {
        method: [interval(rates[f"{method}/keep={keep}"]) for keep in KEYS] for method in SPARSE
    }
    lines[PAPERS] = [CLAIMED] * len(KEYS)
    return _over_keys(lab, {"share of tokens guessed right": lines})


def guessed(lab: Lab, number: int, methods: Sequence[str]) -> list[list[bool]]:
    """Whether each self-draft guesses each token of the target's answer but the first.

    One token at a time: of the text before the last token it reads the target's own keys, as at the
    start of a round. (In a run, the later tokens of a round read keys the draft made itself.) The
    first token comes of the prefill, which is dense for both.
    """
    _, inputs = lab.inputs(number)
    ids = list(lab.run("ar", number).ids)
    model = lab.target.backbone
    target = Session(model, [Sampling()], room=len(ids))
    (guide,) = target.prefill(model.prompts(inputs), record=True)
    draft = Session(model, [Sampling()] * len(methods), banned=list(model.placeholders))
    draft.fork(
        [guide] * len(methods), [resolve(name).view(guide, guide.prompt) for name in methods]
    )
    # every key of the answer at once; what is committed below copies its own of them
    target.score({0: chain(ids)})
    target.commit({0: ids})
    found: list[list[bool]] = [[] for _ in methods]
    for token, following in zip(ids, ids[1:], strict=False):
        draft.commit({request: [token] for request in range(len(methods))})
        laws = draft.score({request: Tree() for request in range(len(methods))})
        for request, own in enumerate(found):
            own.append(int(laws[request].raw(ROOT).argmax()) == following)
    return found


def io(lab: Lab) -> Data:
    """Sec. 3.3: keys read a token by the formula, and seconds a token, as shares of ``ar``'s."""
    names = [f"std/keep={keep}" for keep in KEYS]
    ran = lab.race("ar", *names)
    slower = [
        [1 / speedup for speedup in measures.speedups(ran[name], ran["ar"])] for name in names
    ]
    lines = {
        "keys read (predicted)": [_each(measures.predicted_key_reads, ran[name]) for name in names],
        "seconds (measured)": [interval(own, np.median) for own in slower],
        "ar": [1.0] * len(names),
    }
    return _over_keys(lab, {"cost of a token over ar's": lines}) | {"from zero": True}


def batch(lab: Lab) -> Data:
    """Table 1's setting: all clips in one batch, by every method in turn, three times over. Times
    as fast as ``ar`` in the same turn, in tokens by the second of decoding."""
    inputs = batch_inputs(lab.target, [lab.inputs(number)[1] for number in range(lab.clips)])
    gains: dict[str, list[float]] = {method: [] for method in BATCHED}
    for turn in range(TURNS):
        rates = {}
        for method in ("ar", *BATCHED):
            lab.tell(f"{method}, a batch of {lab.clips}, turn {turn + 1} of {TURNS}")
            rates[method] = _rate(lab, method, inputs)
        for method, own in gains.items():
            own.append(rates[method] / rates["ar"])
    return {
        "x": f"times as fast as ar (decoding), {lab.clips} clips in one batch",
        "rows": {method: {"speed": interval(own, np.median)} for method, own in gains.items()},
        "marks": {"ar": 1.0},
        "turns": gains,
    }


def _rate(lab: Lab, method: str, inputs: Inputs) -> float:
    """Tokens a second of decoding a batch, each answer of the lab's length."""
    results = stream(
        lab.target.backbone,
        inputs,
        method=method,
        max_new_tokens=lab.tokens,
        do_sample=False,
        eos_token_id=lab.target.backbone.vocab,  # no token ends a text
    ).finish()
    for result in results:
        if result.fallback_reason is not None:
            raise RuntimeError(f"{method}: {result.fallback_reason}")
    # the first tokens are the prefill's; the seconds are of all requests together
    return sum(len(result.ids) - 1 for result in results) / results[0].timings.decode


STUDIES = {
    "std-gamma": Study(
        "Sparse-to-Dense, Fig. 1a",
        "Acceptance and speed over plain decoding by the tokens drafted a round.",
        gamma,
        clips=4,
        timed=True,
    ),
    "std-batch": Study(
        "Sparse-to-Dense, Table 1",
        "Speed over plain decoding of eight clips in one batch, of 64 tokens each; three turns.",
        batch,
        draw.bars,
        clips=8,
        tokens=64,
        timed=True,
    ),
    "std-k": Study(
        "Sparse-to-Dense, Fig. 1b",
        "Acceptance and speed over plain decoding by the visual keys a head keeps.",
        keys,
        clips=4,
        timed=True,
    ),
    "std-agreement": Study(
        "Sparse-to-Dense, Sec. 2",
        "The share of tokens that sparse attention guesses right, by the keys it keeps.",
        agreement,
        clips=8,
    ),
    "std-io": Study(
        "Sparse-to-Dense, Sec. 3.3",
        "Keys read a token by the paper's formula, against the measured seconds a token.",
        io,
        clips=4,
        timed=True,
    ),
}
