"""Claims about views and shapes of a draft model, judged again on real weights: acceptance over the
documents and questions of ``real-drafts.json``, which ``python -m lab text`` makes.

The draft is the target with its weights rounded: it costs what the target does, so a claim about
speed is judged by its acceptance alone, and then holds in part at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from lab.claims import sage, sparse_to_dense, specvlm
from lab.claims.evidence import Evidence, Finding, among, between, graded, ordered, said
from lab.studies.lab import interval
from lab.studies.sage import LEAST, correlations, white_noise
from lab.studies.text import CODE, SHARES, SUMS, Row, sets, taken
from saccade.bench.measures import Interval
from saccade.core.errors import OptionError

DOCUMENTS = "documents"
SPECVLM, RANDOM, WHOLE = "specvlm/keep=0.1", "sd-tree/view=random/keep={:g}", "sd-tree"
LIVE = "sage/shape=sage-live/rule=formal"
LENGTHS = (16, 32, 64)  # tokens of an answer
HALF = 0.5  # of the layers that layerskip drafts with


def _rows(e: Evidence, kind: str, where: str) -> Sequence[Row]:
    path = e.folder / e.drafted
    if not path.is_file():
        raise OptionError(f"{path} is missing: python -m lab text makes it")
    return sets(json.loads(path.read_text())[kind])[where]


def _taken(e: Evidence, method: str, where: str = DOCUMENTS) -> dict[str, float]:
    return taken(_rows(e, "measured", where), method)


def _mean(e: Evidence, method: str, first: int | None = None) -> float:
    return fmean(taken(_rows(e, "measured", DOCUMENTS), method, first).values())


def _gain(e: Evidence, method: str, other: str, where: str = DOCUMENTS) -> Interval:
    """Accepted tokens of one method less another's, on the same question."""
    own, than = (_taken(e, name, where) for name in (method, other))
    return between([own[each] - than[each] for each in own if each in than])


def _ordered(gains: Mapping[str, Interval], told: str) -> Finding:
    words = ", ".join(f"{said(gain)} {name}" for name, gain in gains.items())
    return Finding(ordered(list(gains.values())), f"accepted tokens of {told}: {words}")


def over_random(e: Evidence) -> Finding:
    return _ordered(
        {"over a random tenth": _gain(e, SPECVLM, RANDOM.format(0.1))}, "SpecVLM's tenth"
    )


def insensitive(e: Evidence) -> Finding:
    whole = _mean(e, WHOLE)
    left = {1 - keep: _mean(e, RANDOM.format(keep)) / whole for keep in SHARES}
    left[1.0] = _mean(e, f"{WHOLE}/view=none") / whole
    words = ", ".join(f"{share:.0%} with {pruned:.0%} pruned" for pruned, share in left.items())
    return Finding(
        specvlm.pruned_at_random([left[0.5]], [left[0.9]]),
        f"of the accepted tokens of the whole document remain {words}",
    )


def every_ratio(e: Evidence) -> Finding:
    gains = {
        f"at {keep:g}": _gain(e, f"specvlm/keep={keep:g}", RANDOM.format(keep)) for keep in SHARES
    }
    return _ordered(gains, "SpecVLM less random")


def both_stages(e: Evidence) -> Finding:
    parts = {"stage I": "uniform", "stage II": "attention"}
    gains = {
        f"over none of {stage}": _gain(e, SPECVLM, f"{SPECVLM}/view={view}")
        for stage, view in parts.items()
    }
    return _ordered(gains, "SpecVLM")


def steady(e: Evidence) -> Finding:
    rows = [row for row in _rows(e, "measured", DOCUMENTS) if row["method"] == SPECVLM]
    by_round = [fmean(r["taken"][at] for r in rows if len(r["taken"]) > at) for at in range(10)]
    early = fmean(n for row in rows for n in row["taken"][:10])
    every = fmean(n for row in rows for n in row["taken"])
    return Finding(
        among([0.8 <= early / every <= 1.25, by_round[0] == max(by_round)]),
        f"{early:.2f} accepted tokens in the first ten rounds, {every:.2f} in all; first round "
        f"{by_round[0]:.2f}, the nine after it {min(by_round[1:]):.2f} to {max(by_round[1:]):.2f}",
    )


def trees(e: Evidence) -> Finding:
    pairs = {"(whole)": (WHOLE, "sd"), "(a tenth)": (SPECVLM, f"{SPECVLM}/shape=chain-5")}
    return _ordered(
        {name: _gain(e, *pair) for name, pair in pairs.items()}, "the tree less the chain's"
    )


def skipping(e: Evidence) -> Finding:
    rows = [row for row in _rows(e, "measured", DOCUMENTS) if row["method"] == "layerskip"]
    rate = fmean(row["accepted"] for row in rows)
    bound = fmean(row["tau"] / (1 + HALF * row["drafted"]) for row in rows)
    return Finding(
        sparse_to_dense.skips(rate, bound),
        f"accepts {rate:.1%}; by the weights read {bound:.2f}x plain decoding",
    )


def writes(e: Evidence) -> Finding:
    rows = [row for row in _rows(e, "measured", DOCUMENTS) if row["method"] == SPECVLM]
    found = between([sum(n := row["taken"]) / (sum(n) + len(n)) for row in rows])
    return Finding(
        graded(found[1] > 0.5, found[2] > 0.5),
        f"{said(found)} of the tokens are the draft's, over a tenth of the document",
    )


def hangs_together(e: Evidence) -> Finding:
    right, words = [], []
    for where in (SUMS, CODE, DOCUMENTS):
        traces = [row["entropies"] for row in _rows(e, "looked", where)]
        traces = [trace for trace in traces if len(trace) >= LEAST]
        by_question = [correlations(trace) for trace in traces]
        line = [interval(at) for at in zip(*by_question, strict=True)]
        noise = white_noise([len(trace) for trace in traces])
        above = [value[1] > most for value, most in zip(line, noise, strict=True)]
        right += above
        words.append(
            f"{where} ({len(traces)}): lag 1 {said(line[0])}, above noise at {sum(above)} of "
            f"{len(above)} lags"
        )
    return Finding(among(right), "autocorrelation, " + "; ".join(words))


def longer(e: Evidence) -> Finding:
    own, other = ([_mean(e, name, count) for count in LENGTHS] for name in ("sage", SPECVLM))
    gaps = [a / b - 1 for a, b in zip(own, other, strict=True)]
    rises, widens = own[-1] > own[0] and other[-1] > other[0], gaps[-1] > gaps[0]
    words = ", ".join(f"{gap:+.0%} at {at}" for gap, at in zip(gaps, LENGTHS, strict=True))
    return Finding(
        graded(rises and widens, rises or widens),
        f"accepted tokens of SAGE {own[0]:.2f} over the first {LENGTHS[0]} tokens, {own[-1]:.2f} "
        f"over {LENGTHS[-1]}; over SpecVLM's {words} tokens",
    )


def pruned(e: Evidence) -> Finding:
    whole, tenth = (_mean(e, name) for name in ("sage/keep=1", "sage"))
    return Finding(
        graded(False, tenth > 0.97 * whole),
        f"accepted tokens over all of the document {whole:.2f}, over a tenth {tenth:.2f}",
    )


def ahead(e: Evidence) -> Finding:
    last, whole = (_gain(e, name, LIVE) for name in ("sage/rule=formal", _AHEAD))
    return Finding(
        graded(last[2] > 0),
        "accepted tokens less the all-live tree's: depth and width of the last round "
        f"{said(last)}; its root's law at every level too {said(whole)}",
    )


def accepts_more(e: Evidence) -> Finding:
    gains = {
        "by the rounded draft": _gain(e, "sage", SPECVLM),
        "by the target itself over a tenth": _gain(e, "specvlm-self/shape=sage", "specvlm-self"),
    }
    return _ordered(gains, "SAGE less SpecVLM's")


def alone(e: Evidence) -> Finding:
    gains = {f"({where})": _gain(e, "sd/shape=sage", "sd", where) for where in (SUMS, CODE)}
    return _ordered(gains, "SAGE less native SD's")


_AHEAD = "sage/shape=sage-ahead/rule=formal"

# by the function that judges the claim on the embedded pair
JUDGES: Mapping[Callable[[Evidence], Finding], Callable[[Evidence], Finding]] = {
    specvlm.over_random: over_random,
    specvlm.insensitive: insensitive,
    specvlm.against_random: every_ratio,
    specvlm.both_stages: both_stages,
    specvlm.steady: steady,
    specvlm.trees: trees,
    specvlm.examples: writes,
    sparse_to_dense.skipping: skipping,
    sage.correlated: hangs_together,
    sage.longer: longer,
    sage.pruned: pruned,
    sage.ahead: ahead,
    sage.accepts_more: accepts_more,
    sage.alone: alone,
}
