"""Which methods are listed as studies, held against the stored runs."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from saccade.methods import METHODS

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def _suite_medians() -> dict[str, list[float]]:
    """How many times as fast as plain decoding each method is, decoding alone and in whole answers:
    the medians of every suite of every stored run, and of the run over all methods."""
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for file in RESULTS.glob("*/results.jsonl.gz"):
        with gzip.open(file, "rt") as lines:
            rows = [row for row in map(json.loads, lines) if row.get("decode")]
        plain = {(r["suite"], r["item"], r["turn"]): r for r in rows if r["method"] == "ar"}
        for row in rows:
            base = plain.get((row["suite"], row["item"], row["turn"]))
            for part in ("decode", "total") if base is not None else ():
                key = (f"{file.parent.name} {row['suite']}", row["method"], part)
                ratios[key].append(base[part] / row[part])
    for clip in json.loads((RESULTS / "methods.json").read_text())["clips"]:
        for method, run in clip["methods"].items():
            for part in ("speedup_decode", "speedup_end_to_end"):
                ratios["all methods", method, part].append(run[part])
    medians: dict[str, list[float]] = defaultdict(list)
    for (_, method, _), values in ratios.items():
        medians[method].append(median(values))
    return medians


@pytest.mark.extra
def test_studies_are_what_gained_nothing_in_any_stored_run():
    """Claim: a method is listed as a study exactly where it was measured and is slower than plain
    decoding in the median of every suite of every stored run, decoding and in whole answers.

    Fails where one that gains is put away, or one that gains nowhere is not. Control: some methods
    are on each side, and plain decoding is on neither."""
    medians = {name: speedups for name, speedups in _suite_medians().items() if name in METHODS}
    slower = {name for name, speedups in medians.items() if max(speedups) < 1}
    studies = {name for name, recipe in METHODS.items() if recipe.study}
    assert studies == slower
    assert {"streaming", "layerskip"} <= slower and {"ar", "auto", "sd"} <= medians.keys() - slower
