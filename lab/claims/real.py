"""Claims that a language model alone can settle, judged again on weights that others trained: over
the documents of ``real.json`` and ``real-8k.json``, which ``saccade bench real`` makes.

A verdict here stands beside the embedded pair's and is its own. ``drafted`` judges what a claim
needs a draft model for; what it needs a video for is not in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from lab.claims import drafted, sage, sparse_to_dense, specvlm
from lab.claims.evidence import Claim, Evidence, Finding, among, graded, less, ordered, said
from saccade.core.errors import OptionError
from saccade.methods.std import GAMMA

NAME = "SmolLM2-135M"
KEEPS = 0.1, 0.25
SAME = 0.95
Row = Mapping[str, Any]
Judge = Callable[[Evidence], Finding]


def _rows(e: Evidence, kind: str, file: str | None = None) -> Sequence[Row]:
    path = e.folder / (file or e.alone)
    if not path.is_file():
        raise OptionError(f"{path} is missing: saccade bench real --out makes it")
    found: Sequence[Row] = json.loads(path.read_text())[kind]
    return found


def _by(e: Evidence, method: str, what: str) -> list[float]:
    """A number of each document's answer, in their order."""
    return [row[what] for row in _rows(e, "measured") if row["method"] == method]


def _set(e: Evidence, chosen: str, what: str, keep: float) -> float:
    """The mean over documents of what a set of the document holds."""
    rows = _rows(e, "looked")
    return fmean(row[what] for row in rows if (row["chosen"], row["keep"]) == (chosen, keep))


def tail(e: Evidence) -> Finding:
    share = _set(e, "oracle, shared by all heads", "mass", 0.1)
    return Finding(
        graded(share > 0.4, share > 0.2),
        f"the most attended tenth of a document gets {share:.0%} of the attention",
    )


def over_windows(e: Evidence) -> Finding:
    sets = _SHARED, "streaming: sinks and the last"
    gains = {keep: less(*(_agreeing(e, name, keep) for name in sets)) for keep in KEEPS}
    words = ", ".join(f"{said(gain)} at {keep:g}" for keep, gain in gains.items())
    return Finding(
        ordered(list(gains.values())),
        "share of tokens that stay the same over the part of the document that all heads together "
        f"attend to most, less over its end: {words}",
    )


def _agreeing(e: Evidence, chosen: str, keep: float) -> list[float]:
    rows = _rows(e, "looked")
    return [row["agrees"] for row in rows if (row["chosen"], row["keep"]) == (chosen, keep)]


def agrees(e: Evidence) -> Finding:
    words, right = [], []
    for chosen, told in (("oracle: each head's top now", "now"), (_STATIC, "at prefill")):
        shares = [_set(e, chosen, "agrees", keep) for keep in KEEPS]
        right += [share >= SAME for share in shares]
        words.append(
            f"{told}: " + ", ".join(f"{s:.2f} at {k:g}" for k, s in zip(KEEPS, shares, strict=True))
        )
    return Finding(
        among(right), "of the tokens, over each head's top keys chosen " + "; ".join(words)
    )


def accepts(e: Evidence) -> Finding:
    gains = {
        keep: less(
            _by(e, f"std/keep={keep}", "accepted"), _by(e, f"streaming/keep={keep}", "accepted")
        )
        for keep in KEEPS
    }
    words = ", ".join(f"{said(gain)} at {keep:g}" for keep, gain in gains.items())
    return Finding(
        ordered(list(gains.values())), f"accepted of drafted, std less streaming: {words}"
    )


def fewer_keys(e: Evidence) -> Finding:
    right, words = [], []
    for keep in KEEPS:
        rows = [r for r in _rows(e, "measured") if r["method"] == f"std/keep={keep}"]
        alpha = fmean(row["accepted"] for row in rows)
        needed = fmean(row["kept"] / row["prompt_tokens"] for row in rows) + 1 / GAMMA
        right.append(alpha > needed)
        words.append(f"alpha {alpha:.2f}, needed {needed:.2f} at {keep:g}")
    return Finding(among(right), ", ".join(words))


def speedup(e: Evidence) -> Finding:
    rows = {row["method"]: row for row in _rows(e, "measured", "real-8k.json")}
    speeds = {
        keep: rows["ar"]["decode_seconds"] / rows[f"std/keep={keep}"]["decode_seconds"]
        for keep in KEEPS
    }
    words = ", ".join(f"{speed:.2f}x at {keep:g}" for keep, speed in speeds.items())
    return Finding(
        graded(min(speeds.values()) >= 1.59, max(speeds.values()) > 1),
        f"{words}, one document of {rows['ar']['prompt_tokens']:,} tokens",
    )


def _timed(e: Evidence) -> bool:
    """Whether documents were answered about one by one, plain decoding beside the methods."""
    path = e.folder / "real.json"
    alone = path.is_file() and json.loads(path.read_text()).get("together") == 1
    return alone and bool(_by(e, "ar", "decode_seconds"))


def _speeds(e: Evidence, method: str) -> list[float]:
    """Tokens a second of decoding, document by document."""
    rows = [row for row in _rows(e, "measured") if row["method"] == method]
    return [(row["tokens"] - 1) / row["decode_seconds"] for row in rows]


def fastest(e: Evidence) -> Finding | None:
    """Half the claim, so it holds in part at most: LayerSkip is not in the run."""
    if not _timed(e):
        return None
    gains = {
        keep: less(*(_speeds(e, f"{name}/keep={keep}") for name in ("std", "streaming")))
        for keep in KEEPS
    }
    words = ", ".join(f"{said(gain)} at {keep:g}" for keep, gain in gains.items())
    return Finding(
        graded(False, any(low > 0 for _, low, _ in gains.values())),
        f"tokens/s of std less streaming (LayerSkip was not timed): {words}",
    )


def inputs(e: Evidence) -> Finding | None:
    if not _timed(e):
        return None
    plain, ratios = sum(_by(e, "ar", "decode_seconds")), {}
    for keep in KEEPS:
        rows = [row for row in _rows(e, "measured") if row["method"] == f"std/keep={keep}"]
        read, every = 0.0, 0.0
        for row in rows:
            whole, count = row["prompt_tokens"], row["tokens"] - 1
            step = whole - row["kept"] * (1 / keep - 1)  # the text, and what is kept
            read += count / row["tau"] * (row["drafted"] * step + whole)
            every += count * whole
        seconds = sum(row["decode_seconds"] for row in rows) / plain
        ratios[keep] = seconds / (read / every)
    words = ", ".join(f"{ratio:.1f} at {keep:g}" for keep, ratio in ratios.items())
    return Finding(
        among([max(ratio, 1 / ratio) < 1.15 for ratio in ratios.values()]),
        f"seconds a token beside plain decoding's are, times the share of keys read: {words}",
    )


_SHARED = "shared by all heads, at prefill"
_STATIC = "std: each head's top at prefill"

# by the function that judges the claim on the embedded pair
JUDGES: Mapping[Judge, Callable[[Evidence], Finding | None]] = {
    specvlm.long_tail: tail,
    **drafted.JUDGES,
    specvlm.windows: over_windows,
    sparse_to_dense.agrees: agrees,
    sparse_to_dense.accepts: accepts,
    sparse_to_dense.fewer_keys: fewer_keys,
    sparse_to_dense.speedup: speedup,
    sparse_to_dense.fastest: fastest,
    sparse_to_dense.inputs: inputs,
}
_PROOF = "a proof: no model is asked"
_SAME_COST = "needs seconds of a small draft: the one here costs what its target does"
_ONE_BY_ONE = "needs a run that times documents one by one"
# why a claim has no judge, or why its judge may find nothing
UNJUDGED: Mapping[Judge, str] = {
    specvlm.concentrated: "needs a video: all rows here are text",
    specvlm.standard: _SAME_COST,
    specvlm.by_itself: "needs seconds: its run here counts tokens",
    specvlm.pruning_pays: _SAME_COST,
    specvlm.temporal: "needs the frames of a video",
    specvlm.cheap: _SAME_COST,
    specvlm.grows: "needs a draft's steps timed by context",
    sparse_to_dense.peak_gamma: "needs a run by gamma",
    sparse_to_dense.peak_keys: "needs a timed run by K",
    sparse_to_dense.fastest: _ONE_BY_ONE,
    sparse_to_dense.inputs: _ONE_BY_ONE,
    sage.faster: _SAME_COST,
    sage.fixed_shapes: _SAME_COST,
    sage.overhead: "needs seconds: its run here counts tokens",
    sage.mixtures: "needs a mixture of experts",
    **dict.fromkeys((sage.lemma, sage.guarantee, sage.expectation, sage.depth, sage.width), _PROOF),
}


def cell(claim: Claim, evidence: Evidence) -> str:
    """What the page says of a claim in the column of real weights: a verdict, or why there is none;
    empty where nothing."""
    judge = JUDGES.get(claim.judge)
    found = None if judge is None else judge(evidence)
    if found is None:
        return UNJUDGED.get(claim.judge, "")
    return f"**{found.verdict}**: {found.number}"
