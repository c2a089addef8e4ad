"""Greedy answers in low precision, by family: ``make rounding``.

With ``exact`` every drafted answer must be plain decoding's, token for token. Without it they may
part, and each first difference is judged by the oracle of ``ties.py``: two tokens nearer to each
other than the target's own rounding, or a bug. Ends with 1 if anything differs with ``exact`` or
any difference is no near-tie. Families whose kernels cannot promise ``exact`` are named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))  # for ``lab``

import torch
import transformers
import zoo
from ties import parting

from lab import checkpoints
from saccade import inputs as models
from saccade.core.errors import ModelError
from saccade.inputs import Loaded

METHODS = ("sd", "specvlm/shape=chain-7", "std", "lookup")


@cache
def member(family: str, dtype: str, noise: float = 0.0) -> Loaded:
    """A checkpoint of this family, read in this precision."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.make(family, f"{folder}/{family}", seed=0, noise=noise)
        return models.load(str(path), device="cpu", dtype=dtype)


def judged(
    family: str, dtype: str, prompt: int, methods: list[str], tokens: int
) -> tuple[Counter[str], list[str]]:
    """One prompt by every method, with and without ``exact``: counts, and what is wrong."""
    target, draft = member(family, dtype), member(family, dtype, zoo.NOISE)
    kind = zoo.kinds(family)[prompt % len(zoo.kinds(family))]
    inputs = zoo.make_inputs(target, kind, prompt)
    tally: Counter[str] = Counter()
    wrong: list[str] = []
    try:
        strict = zoo.run(target, draft, inputs, "ar", tokens, exact=True).ids
    except ModelError:
        strict = None
        tally["exact refused"] += 1
    plain = zoo.run(target, draft, inputs, "ar", tokens).ids
    for method in methods:
        where = f"{family} {dtype}, prompt {prompt} ({kind}), {method}"
        if strict is not None:
            mine = zoo.run(target, draft, inputs, method, tokens, exact=True)
            tally["exact"] += 1
            if mine.ids != strict or mine.fallback_reason:
                tally["exact mismatches"] += 1
                wrong.append(f"{where}: differs with exact")
        mine = zoo.run(target, draft, inputs, method, tokens)
        tally["default"] += 1
        tally["tokens"] += tokens
        apart = parting(target.backbone, inputs, plain, mine.ids)
        if apart is None:
            continue
        tally["parted"] += 1
        tally["near-ties"] += apart.near_tie
        if not apart.near_tie:
            wrong.append(f"{where}: token {apart.at}, gap {apart.gap:.3g}, noise {apart.noise:.3g}")
    return tally, wrong


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=zoo.FAMILIES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--prompts", type=int, default=10, help="a family and precision")
    parser.add_argument("--tokens", type=int, default=64, help="an answer")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for a scorecard")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    began = time.monotonic()
    totals: dict[str, Counter[str]] = {dtype: Counter() for dtype in options.dtypes}
    wrong: list[str] = []
    refusing: set[str] = set()
    for dtype in options.dtypes:
        for family in options.families:
            mine: Counter[str] = Counter()
            for prompt in range(options.prompts):
                tally, bad = judged(family, dtype, prompt, options.methods, options.tokens)
                mine += tally
                wrong += bad
            if mine["exact refused"]:
                refusing.add(family)
            totals[dtype] += mine
            sys.stderr.write(f"{dtype} {family}: {dict(mine)}\n")
    numbers: dict[str, Any] = {
        dtype: {name: total[name] for name in ("exact", "exact mismatches", "default", "tokens")}
        | {name: total[name] for name in ("parted", "near-ties")}
        for dtype, total in totals.items()
    }
    seconds = round(time.monotonic() - began)
    if options.json:
        more = {"no_exact": sorted(refusing), "wrong": wrong, "seconds": seconds}
        sys.stdout.write(json.dumps(numbers | more) + "\n")
    else:
        summary = "; ".join(
            f"{dtype}: {one['exact mismatches']} of {one['exact']} exact answers differ, "
            f"{one['parted']} of {one['default']} default ones part, "
            f"{one['near-ties']} of those at a near-tie"
            for dtype, one in numbers.items()
        )
        refused = f"; no exact: {', '.join(sorted(refusing))}" if refusing else ""
        sys.stdout.write(f"{summary}{refused} ({seconds} s)\n")
    for line in wrong:
        sys.stderr.write(line + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
