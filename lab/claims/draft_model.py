"""Judges claims about the views and shapes of a draft model again on real weights.

Acceptance is over the documents and questions of ``real-drafts.json``, which ``python -m lab text``
makes. The draft is the target with rounded weights. Because it costs what the target does, a claim
about speed is judged by its acceptance alone, and then it holds in part at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from lab.claims import sage, sparse_to_dense, specvlm
from lab.claims.claim import (
    Finding,
    StoredResults,
    grade,
    grade_each,
    grade_ordering,
    interval_text,
    mean_interval,
)
from lab.studies.experiment import interval_over_clips
from lab.studies.sage import MIN_TOKENS, autocorrelations, white_noise_band
from lab.studies.text import CODE, SHARES, SUMS, Row, accepted_by_document, rows_by_task
from saccade.bench.measures import Interval
from saccade.core.errors import OptionError

DOCUMENTS = "documents"
SPECVLM, RANDOM, WHOLE_DOCUMENT = "specvlm/keep=0.1", "sd-tree/view=random/keep={:g}", "sd-tree"
LIVE_TREE = "sage/shape=sage-live/rule=formal"
AHEAD_TREE = "sage/shape=sage-ahead/rule=formal"
LENGTHS = (16, 32, 64)  # In tokens of an answer.
LAYERSKIP_SHARE = 0.5  # The share of the layers that ``layerskip`` drafts with.


def _rows(results: StoredResults, kind: str, where: str) -> Sequence[Row]:
    path = results.folder / results.draft_model_file
    if not path.is_file():
        raise OptionError(f"{path} is missing: python -m lab text makes it")
    return rows_by_task(json.loads(path.read_text())[kind])[where]


def _accepted_by_question(
    results: StoredResults, method: str, where: str = DOCUMENTS
) -> dict[str, float]:
    return accepted_by_document(_rows(results, "measured", where), method)


def _mean_accepted(results: StoredResults, method: str, first: int | None = None) -> float:
    return fmean(
        accepted_by_document(_rows(results, "measured", DOCUMENTS), method, first).values()
    )


def _gain(results: StoredResults, method: str, other: str, where: str = DOCUMENTS) -> Interval:
    """Returns accepted tokens of one method less another's, on the same questions."""
    own, other_accepted = (_accepted_by_question(results, name, where) for name in (method, other))
    return mean_interval(
        [own[each] - other_accepted[each] for each in own if each in other_accepted]
    )


def _judge_gains(gains: Mapping[str, Interval], what: str) -> Finding:
    words = ", ".join(f"{interval_text(gain)} {name}" for name, gain in gains.items())
    return Finding(grade_ordering(list(gains.values())), f"accepted tokens of {what}: {words}")


def judge_gain_over_random(results: StoredResults) -> Finding:
    return _judge_gains(
        {"over a random tenth": _gain(results, SPECVLM, RANDOM.format(0.1))}, "SpecVLM's tenth"
    )


def judge_random_pruning(results: StoredResults) -> Finding:
    whole = _mean_accepted(results, WHOLE_DOCUMENT)
    share_by_pruned = {
        1 - keep: _mean_accepted(results, RANDOM.format(keep)) / whole for keep in SHARES
    }
    share_by_pruned[1.0] = _mean_accepted(results, f"{WHOLE_DOCUMENT}/view=none") / whole
    words = ", ".join(
        f"{share:.0%} with {pruned:.0%} pruned" for pruned, share in share_by_pruned.items()
    )
    return Finding(
        specvlm.grade_random_pruning([share_by_pruned[0.5]], [share_by_pruned[0.9]]),
        f"of the accepted tokens of the whole document remain {words}",
    )


def judge_every_ratio(results: StoredResults) -> Finding:
    gains = {
        f"at {keep:g}": _gain(results, f"specvlm/keep={keep:g}", RANDOM.format(keep))
        for keep in SHARES
    }
    return _judge_gains(gains, "SpecVLM less random")


def judge_both_stages(results: StoredResults) -> Finding:
    parts = {"stage I": "uniform", "stage II": "attention"}
    gains = {
        f"over none of {stage}": _gain(results, SPECVLM, f"{SPECVLM}/view={view}")
        for stage, view in parts.items()
    }
    return _judge_gains(gains, "SpecVLM")


def judge_steady_acceptance(results: StoredResults) -> Finding:
    rows = [row for row in _rows(results, "measured", DOCUMENTS) if row["method"] == SPECVLM]
    by_round = [fmean(r["taken"][at] for r in rows if len(r["taken"]) > at) for at in range(10)]
    first_ten = fmean(n for row in rows for n in row["taken"][:10])
    all_rounds = fmean(n for row in rows for n in row["taken"])
    return Finding(
        grade_each([0.8 <= first_ten / all_rounds <= 1.25, by_round[0] == max(by_round)]),
        f"{first_ten:.2f} accepted tokens in the first ten rounds, {all_rounds:.2f} in all; first "
        f"round {by_round[0]:.2f}, the nine after it {min(by_round[1:]):.2f} to "
        f"{max(by_round[1:]):.2f}",
    )


def judge_trees(results: StoredResults) -> Finding:
    pairs = {"(whole)": (WHOLE_DOCUMENT, "sd"), "(a tenth)": (SPECVLM, f"{SPECVLM}/shape=chain-5")}
    return _judge_gains(
        {name: _gain(results, *pair) for name, pair in pairs.items()}, "the tree less the chain's"
    )


def judge_layer_skipping(results: StoredResults) -> Finding:
    rows = [row for row in _rows(results, "measured", DOCUMENTS) if row["method"] == "layerskip"]
    rate = fmean(row["accepted"] for row in rows)
    bound = fmean(row["tau"] / (1 + LAYERSKIP_SHARE * row["drafted"]) for row in rows)
    return Finding(
        sparse_to_dense.grade_layer_skipping(rate, bound),
        f"accepts {rate:.1%}; by the weights read {bound:.2f}x plain decoding",
    )


def judge_share_written(results: StoredResults) -> Finding:
    rows = [row for row in _rows(results, "measured", DOCUMENTS) if row["method"] == SPECVLM]
    share = mean_interval([sum(n := row["taken"]) / (sum(n) + len(n)) for row in rows])
    return Finding(
        grade(share[1] > 0.5, share[2] > 0.5),
        f"{interval_text(share)} of the tokens are the draft's, over a tenth of the document",
    )


def judge_entropy_correlation(results: StoredResults) -> Finding:
    is_above_noise = []
    words = []
    for where in (SUMS, CODE, DOCUMENTS):
        traces = [row["entropies"] for row in _rows(results, "looked", where)]
        traces = [trace for trace in traces if len(trace) >= MIN_TOKENS]
        by_question = [autocorrelations(trace) for trace in traces]
        line = [interval_over_clips(at) for at in zip(*by_question, strict=True)]
        noise = white_noise_band([len(trace) for trace in traces])
        above = [value[1] > most for value, most in zip(line, noise, strict=True)]
        is_above_noise += above
        words.append(
            f"{where} ({len(traces)}): lag 1 {interval_text(line[0])}, above noise at {sum(above)} "
            f"of {len(above)} lags"
        )
    return Finding(grade_each(is_above_noise), "autocorrelation, " + "; ".join(words))


def judge_answer_length(results: StoredResults) -> Finding:
    own, other = (
        [_mean_accepted(results, name, count) for count in LENGTHS] for name in ("sage", SPECVLM)
    )
    gaps = [a / b - 1 for a, b in zip(own, other, strict=True)]
    rises, widens = own[-1] > own[0] and other[-1] > other[0], gaps[-1] > gaps[0]
    words = ", ".join(f"{gap:+.0%} at {at}" for gap, at in zip(gaps, LENGTHS, strict=True))
    return Finding(
        grade(rises and widens, rises or widens),
        f"accepted tokens of SAGE {own[0]:.2f} over the first {LENGTHS[0]} tokens, {own[-1]:.2f} "
        f"over {LENGTHS[-1]}; over SpecVLM's {words} tokens",
    )


def judge_pruning(results: StoredResults) -> Finding:
    whole, tenth = (_mean_accepted(results, name) for name in ("sage/keep=1", "sage"))
    return Finding(
        grade(False, tenth > 0.97 * whole),
        f"accepted tokens over all of the document {whole:.2f}, over a tenth {tenth:.2f}",
    )


def judge_planning_ahead(results: StoredResults) -> Finding:
    last, whole = (_gain(results, name, LIVE_TREE) for name in ("sage/rule=formal", AHEAD_TREE))
    return Finding(
        grade(last[2] > 0),
        "accepted tokens less the all-live tree's: depth and width of the last round "
        f"{interval_text(last)}; its root's law at every level too {interval_text(whole)}",
    )


def judge_acceptance(results: StoredResults) -> Finding:
    gains = {
        "by the rounded draft": _gain(results, "sage", SPECVLM),
        "by the target itself over a tenth": _gain(
            results, "specvlm-self/shape=sage", "specvlm-self"
        ),
    }
    return _judge_gains(gains, "SAGE less SpecVLM's")


def judge_text_alone(results: StoredResults) -> Finding:
    gains = {f"({where})": _gain(results, "sd/shape=sage", "sd", where) for where in (SUMS, CODE)}
    return _judge_gains(gains, "SAGE less native SD's")


# The function that judges a claim on the embedded pair -> the one that judges it with this draft.
JUDGES: Mapping[Callable[[StoredResults], Finding], Callable[[StoredResults], Finding]] = {
    specvlm.judge_gain_over_random: judge_gain_over_random,
    specvlm.judge_random_pruning: judge_random_pruning,
    specvlm.judge_every_ratio: judge_every_ratio,
    specvlm.judge_both_stages: judge_both_stages,
    specvlm.judge_steady_acceptance: judge_steady_acceptance,
    specvlm.judge_trees: judge_trees,
    specvlm.judge_examples: judge_share_written,
    sparse_to_dense.judge_layer_skipping: judge_layer_skipping,
    sage.judge_entropy_correlation: judge_entropy_correlation,
    sage.judge_answer_length: judge_answer_length,
    sage.judge_pruning: judge_pruning,
    sage.judge_planning_ahead: judge_planning_ahead,
    sage.judge_acceptance: judge_acceptance,
    sage.judge_text_alone: judge_text_alone,
}
