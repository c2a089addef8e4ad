"""Claims about the table of speed inside vLLM. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.hardware import vllm_comparison
from lab.hardware.vllm_engines import WaveResults
from saccade.core.errors import OptionError

ROOT = Path(__file__).parents[2]


def _one(row: str, decoding: float, equal: bool = True, accepted: int = 0) -> dict[str, object]:
    return {
        **{"row": row, "at once": 1, "decoding": decoding, "whole": decoding / 2},
        **{"equal": equal, "drafted": 2 * accepted, "accepted": accepted},
    }


def test_the_table_is_of_medians_over_the_first_row() -> None:
    """Claim: each row's median over turns stands beside its ratio to the first row's, with what
    was accepted of all that was drafted; one answer that differs is told."""
    runs = [
        *(_one("alone", speed) for speed in (90, 100, 400)),
        *(_one("drafted", speed, accepted=5) for speed in (300, 250, 10)),
        *(_one("wrong", speed, equal=speed > 1) for speed in (50, 1)),
    ]
    lines = vllm_comparison.table(runs).splitlines()[2:]
    assert lines == [
        "| 1 | alone | 100 (1.00x) | 50 (1.00x) |  | equal |",
        "| 1 | drafted | 250 (2.50x) | 125 (2.50x) | 0.50 | equal |",
        "| 1 | wrong | 26 (0.26x) | 13 (0.26x) |  | differ |",
    ]


def test_a_row_that_does_not_exist_is_refused(tmp_path) -> None:
    """Claim: an unknown row is refused by name before an engine starts, whether or not the file to
    continue exists."""
    plan = vllm_comparison.Plan(rows=("none",))
    with pytest.raises(OptionError, match="no row 'none'; rows: vLLM, eager"):
        vllm_comparison.run_comparison(plan, tmp_path / "new.json", print, more=True)


def test_a_wave_s_figures() -> None:
    """Claim: first tokens are no decoding, and all tokens are of the whole."""
    ran = WaveResults([[[1] * 10, [2] * 6]], [4.0], [2.0], [[7, 7]], 8, 4, 0)
    figures = vllm_comparison.wave_figures(ran)
    assert (figures["decoding"], figures["whole"], figures["tokens"]) == (7, 4, 16)


def test_clips_have_much_to_say() -> None:
    """Claim: the clips measured are those of a stored run whose answers end after 96 tokens and
    more, and no clip comes twice within two turns of eight."""
    seeds = vllm_comparison.long_answers(ROOT / "docs/results/bench-2k/results.jsonl.gz")
    assert len(set(seeds)) == len(seeds) >= 40
