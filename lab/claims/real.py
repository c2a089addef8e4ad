"""Judges claims that need no video again, on a language model with weights that others trained.

Its documents are in ``real.json`` and ``real-8k.json``, which ``saccade bench real`` makes. A
verdict here stands beside the embedded pair's and does not change it. ``draft_model`` judges the
claims that need a draft model. Claims that need a video are not judged here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.claims import draft_model, sage, sparse_to_dense, specvlm
from lab.claims.claim import (
    Claim,
    Finding,
    StoredResults,
    grade,
    grade_each,
    grade_ordering,
    interval_text,
    mean_difference,
)
from saccade.core.errors import OptionError
from saccade.methods.std import GAMMA

NAME = "SmolLM2-135M"
KEEPS = 0.1, 0.25
CLAIMED_AGREEMENT = 0.95
Row = Mapping[str, Any]
Judge = Callable[[StoredResults], Finding]


def _rows(results: StoredResults, kind: str, file: str | None = None) -> Sequence[Row]:
    path = results.folder / (file or results.self_draft_file)
    if not path.is_file():
        raise OptionError(f"{path} is missing: saccade bench real --out makes it")
    rows: Sequence[Row] = json.loads(path.read_text())[kind]
    return rows


def _values(results: StoredResults, method: str, what: str) -> list[float]:
    """Returns one number of each document's answer, in the order of documents."""
    return [row[what] for row in _rows(results, "measured") if row["method"] == method]


def _mean_over_documents(results: StoredResults, chosen: str, what: str, keep: float) -> float:
    """Returns the mean over documents of one number of a set of the document's tokens."""
    rows = _rows(results, "looked")
    return fmean(row[what] for row in rows if (row["chosen"], row["keep"]) == (chosen, keep))


def judge_long_tail(results: StoredResults) -> Finding:
    share = _mean_over_documents(results, "oracle, shared by all heads", "mass", 0.1)
    return Finding(
        grade(share > 0.4, share > 0.2),
        f"the most attended tenth of a document gets {share:.0%} of the attention",
    )


def judge_windows(results: StoredResults) -> Finding:
    sets_compared = _SHARED_SET, "streaming: sinks and the last"
    gains = {
        keep: mean_difference(
            *(_agreement_by_document(results, name, keep) for name in sets_compared)
        )
        for keep in KEEPS
    }
    words = ", ".join(f"{interval_text(gain)} at {keep:g}" for keep, gain in gains.items())
    return Finding(
        grade_ordering(list(gains.values())),
        "share of tokens that stay the same over the part of the document that all heads together "
        f"attend to most, less over its end: {words}",
    )


def _agreement_by_document(results: StoredResults, chosen: str, keep: float) -> list[float]:
    rows = _rows(results, "looked")
    return [row["agrees"] for row in rows if (row["chosen"], row["keep"]) == (chosen, keep)]


def judge_agreement(results: StoredResults) -> Finding:
    words = []
    is_same = []
    for chosen, chosen_when in (
        ("oracle: each head's top now", "now"),
        (_STATIC_SET, "at prefill"),
    ):
        shares = [_mean_over_documents(results, chosen, "agrees", keep) for keep in KEEPS]
        is_same += [share >= CLAIMED_AGREEMENT for share in shares]
        words.append(
            f"{chosen_when}: "
            + ", ".join(f"{s:.2f} at {k:g}" for k, s in zip(KEEPS, shares, strict=True))
        )
    return Finding(
        grade_each(is_same), "of the tokens, over each head's top keys chosen " + "; ".join(words)
    )


def judge_acceptance(results: StoredResults) -> Finding:
    gains = {
        keep: mean_difference(
            _values(results, f"std/keep={keep}", "accepted"),
            _values(results, f"streaming/keep={keep}", "accepted"),
        )
        for keep in KEEPS
    }
    words = ", ".join(f"{interval_text(gain)} at {keep:g}" for keep, gain in gains.items())
    return Finding(
        grade_ordering(list(gains.values())), f"accepted of drafted, std less streaming: {words}"
    )


def judge_fewer_keys(results: StoredResults) -> Finding:
    reads_fewer = []
    words = []
    for keep in KEEPS:
        rows = [r for r in _rows(results, "measured") if r["method"] == f"std/keep={keep}"]
        alpha = fmean(row["accepted"] for row in rows)
        needed = fmean(row["kept"] / row["prompt_tokens"] for row in rows) + 1 / GAMMA
        reads_fewer.append(alpha > needed)
        words.append(f"alpha {alpha:.2f}, needed {needed:.2f} at {keep:g}")
    return Finding(grade_each(reads_fewer), ", ".join(words))


def judge_speedup(results: StoredResults) -> Finding:
    rows = {row["method"]: row for row in _rows(results, "measured", "real-8k.json")}
    speeds = {
        keep: rows["ar"]["decode_seconds"] / rows[f"std/keep={keep}"]["decode_seconds"]
        for keep in KEEPS
    }
    words = ", ".join(f"{speed:.2f}x at {keep:g}" for keep, speed in speeds.items())
    return Finding(
        grade(min(speeds.values()) >= 1.59, max(speeds.values()) > 1),
        f"{words}, one document of {rows['ar']['prompt_tokens']:,} tokens",
    )


def _is_timed_one_by_one(results: StoredResults) -> bool:
    """Returns whether documents were answered one at a time, by plain decoding as well."""
    path = results.folder / "real.json"
    one_by_one = path.is_file() and json.loads(path.read_text()).get("together") == 1
    return one_by_one and bool(_values(results, "ar", "decode_seconds"))


def _decoding_speeds(results: StoredResults, method: str) -> list[float]:
    """Returns tokens per second of decoding, document by document."""
    rows = [row for row in _rows(results, "measured") if row["method"] == method]
    return [(row["tokens"] - 1) / row["decode_seconds"] for row in rows]


def judge_fastest(results: StoredResults) -> Finding | None:
    """Judges half the claim, so it holds in part at most: LayerSkip is not in the run.

    Returns None where the run did not time documents one by one.
    """
    if not _is_timed_one_by_one(results):
        return None
    gains = {
        keep: mean_difference(
            *(_decoding_speeds(results, f"{name}/keep={keep}") for name in ("std", "streaming"))
        )
        for keep in KEEPS
    }
    words = ", ".join(f"{interval_text(gain)} at {keep:g}" for keep, gain in gains.items())
    return Finding(
        grade(False, any(low > 0 for _, low, _ in gains.values())),
        f"tokens/s of std less streaming (LayerSkip was not timed): {words}",
    )


def judge_time_by_keys(results: StoredResults) -> Finding | None:
    if not _is_timed_one_by_one(results):
        return None
    plain, ratios = sum(_values(results, "ar", "decode_seconds")), {}
    for keep in KEEPS:
        rows = [row for row in _rows(results, "measured") if row["method"] == f"std/keep={keep}"]
        read_keys, all_keys = 0.0, 0.0
        for row in rows:
            prompt_tokens, count = row["prompt_tokens"], row["tokens"] - 1
            step_keys = prompt_tokens - row["kept"] * (1 / keep - 1)  # The text and the kept keys.
            read_keys += count / row["tau"] * (row["drafted"] * step_keys + prompt_tokens)
            all_keys += count * prompt_tokens
        seconds = sum(row["decode_seconds"] for row in rows) / plain
        ratios[keep] = seconds / (read_keys / all_keys)
    words = ", ".join(f"{ratio:.1f} at {keep:g}" for keep, ratio in ratios.items())
    return Finding(
        grade_each([max(ratio, 1 / ratio) < 1.15 for ratio in ratios.values()]),
        f"seconds a token beside plain decoding's are, times the share of keys read: {words}",
    )


_SHARED_SET = "shared by all heads, at prefill"
_STATIC_SET = "std: each head's top at prefill"

# The function that judges a claim on the embedded pair -> the one that judges it over documents.
JUDGES: Mapping[Judge, Callable[[StoredResults], Finding | None]] = {
    specvlm.judge_long_tail: judge_long_tail,
    **draft_model.JUDGES,
    specvlm.judge_windows: judge_windows,
    sparse_to_dense.judge_agreement: judge_agreement,
    sparse_to_dense.judge_acceptance: judge_acceptance,
    sparse_to_dense.judge_fewer_keys: judge_fewer_keys,
    sparse_to_dense.judge_speedup: judge_speedup,
    sparse_to_dense.judge_fastest: judge_fastest,
    sparse_to_dense.judge_time_by_keys: judge_time_by_keys,
}
_PROOF = "a proof: it needs no model"
_SAME_COST = "needs seconds of a small draft: the one here costs what its target does"
_ONE_BY_ONE = "needs a run that times documents one by one"
# Why a claim has no function above, or why that function may return nothing.
UNJUDGED: Mapping[Judge, str] = {
    specvlm.judge_text_attention: "needs a video: all rows here are text",
    specvlm.judge_standard_speedup: _SAME_COST,
    specvlm.judge_self_speedup: "needs seconds: its run here counts tokens",
    specvlm.judge_pruning_speedup: _SAME_COST,
    specvlm.judge_temporal_redundancy: "needs the frames of a video",
    specvlm.judge_pruning_cost: _SAME_COST,
    specvlm.judge_step_growth: "needs a draft's steps timed by context",
    sparse_to_dense.judge_gamma_peak: "needs a run by gamma",
    sparse_to_dense.judge_key_peak: "needs a timed run by K",
    sparse_to_dense.judge_fastest: _ONE_BY_ONE,
    sparse_to_dense.judge_time_by_keys: _ONE_BY_ONE,
    sage.judge_speed: _SAME_COST,
    sage.judge_fixed_shapes: _SAME_COST,
    sage.judge_overhead: "needs seconds: its run here counts tokens",
    sage.judge_mixtures: "needs a mixture of experts",
    **dict.fromkeys(
        (
            sage.judge_lemma,
            sage.judge_guarantee,
            sage.judge_expectation,
            sage.judge_depth_formula,
            sage.judge_width_formula,
        ),
        _PROOF,
    ),
}


def cell(claim: Claim, results: StoredResults) -> str:
    """Returns what the page has of a claim in the column of real weights.

    That is a verdict, the reason why there is none, or nothing for a claim about video.
    """
    judge = JUDGES.get(claim.judge)
    finding = None if judge is None else judge(results)
    if finding is None:
        return UNJUDGED.get(claim.judge, "")
    return f"**{finding.verdict}**: {finding.number}"
