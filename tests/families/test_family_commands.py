"""Claims about the commands behind the scorecard: what they ask for and what they count."""

from __future__ import annotations

import pytest
import rounding
import sweep
import zoo

from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")


def test_lengths_replace_fixed_shapes_and_no_others():
    """Claim: ``--gamma`` makes a chain of each length of what has a fixed shape; plain decoding,
    a shape of one's own and one that adapts stay. Fails if a length is lost or asked for twice."""
    methods = sweep.drafting(["ar", "sd", "specvlm", "sage", "sd/shape=best-4"], [1, 8])
    assert methods == (
        *("ar", "sd/shape=chain-1", "sd/shape=chain-8"),
        *("specvlm/shape=chain-1", "specvlm/shape=chain-8", "sage", "sd/shape=best-4"),
    )
    assert sweep.drafting(["sd", "ar"], []) == ("sd", "ar")
    assert all(resolve(name) for name in methods)


def test_the_line_of_numbers_counts_answers_and_mismatches():
    """Claim: answers, tokens and mismatches are counted over methods; a fallback is a mismatch."""
    good, bad = {"same": True, "fallback": None}, {"same": False, "fallback": None}
    lines = [
        {"family": "a", "prompt": 0, "tokens": 8, "methods": {"ar": good, "sd": bad}},
        {"family": "b", "prompt": 0, "tokens": 8, "methods": {"sd": good | {"fallback": "why"}}},
    ]
    assert sweep.numbers(lines) == {
        "families": 2, "prompts": 2, "methods": 2, "answers": 3, "tokens": 24, "mismatches": 2,
    }  # fmt: skip


@pytest.mark.extra
def test_low_precision_is_judged_with_and_without_exact():
    """Claim: one prompt in bf16: no drafted answer differs with ``exact``, and without it none
    parts but at a near-tie; a mixture of experts is counted as refusing ``exact``."""
    tally, wrong = rounding.judged("llama", "bfloat16", 0, ["sd", "lookup"], 16)
    assert not wrong and tally["exact"] == tally["default"] == 2 and not tally["exact mismatches"]
    tally, wrong = rounding.judged("qwen3-vl-moe", "bfloat16", 0, ["sd"], 8)
    assert tally["exact refused"] == 1 and tally["exact"] == 0 and tally["default"] == 1


def test_control_an_answer_that_differs_with_exact_is_counted(monkeypatch):
    """Control: with a draft that is believed, both counts must show it."""
    monkeypatch.setattr("saccade.core.verify.prob", lambda law, token: 1.0)
    monkeypatch.setattr(zoo, "NOISE", 2.0)
    counts, wrong = rounding.judged("llama", "bfloat16", 1, ["sd"], 16)
    assert counts["exact mismatches"] == 1 and counts["parted"] == 1 and counts["near-ties"] == 0
    assert len(wrong) == 2
