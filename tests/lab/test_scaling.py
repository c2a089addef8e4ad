"""Claims about the plan on paper: the page is the command's, and the arithmetic is by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import scaling
from lab.hardware import gpu
from lab.scaling import ASSUMED, GPUS, predict_plan, published_shape
from saccade.bench.hardware.published import CONFIGS

ROOT = Path(__file__).parents[2]
H100, H200, A100, L40S = GPUS


@pytest.fixture(scope="module")
def pair() -> tuple[scaling.Shape, scaling.Shape]:
    return published_shape(scaling.TARGET), published_shape(scaling.DRAFT)


def test_one_gpu_is_what_the_older_prediction_says(
    pair: tuple[scaling.Shape, scaling.Shape],
) -> None:
    """Claim: with layers in turn, T(1) and the speedup are those of `lab gpu --predict`."""
    tokens = 12_288
    plan = predict_plan(*pair, H200, 2, "PP", tokens)
    each, once, step, speedup = gpu.predict_speedups(
        scaling.TARGET, scaling.DRAFT, tokens, H200.bandwidth
    )[1]
    assert each == ASSUMED.reported
    assert plan.single_row_seconds == pytest.approx(once)
    assert plan.draft_step_seconds == pytest.approx(step, rel=1e-3)
    assert plan.decoding_speedup == pytest.approx(speedup, rel=1e-2)


def test_memory_by_hand(pair: tuple[scaling.Shape, scaling.Shape]) -> None:
    """Claim: under TP a GPU holds its share of weights and keys, and a whole draft and tower."""
    target, draft = pair
    assert (target.kv_heads, target.head_width, target.footprint.layers) == (8, 128, 80)
    assert target.footprint.kv_numbers_per_token == 2 * 80 * 8 * 128
    plan = predict_plan(target, draft, H100, 4, "TP", 100_000)
    keys = (100_000 + 256) * 2 * 80 * 8 * 128 * 2
    drafts = (10_000 + 256) * 2 * 28 * 4 * 128 * 2 + draft.footprint.parameters * 2
    tower = target.vision_parameters * 2
    whole = target.footprint.parameters * 2 - tower
    working = 2 * 2048 * 8 * 8192 * 2
    assert plan.fullest_gpu_bytes == pytest.approx((whole + keys) / 4 + tower + drafts + working)
    made = CONFIGS[scaling.TARGET]().vision_config
    assert 0.5e9 < target.vision_parameters < 1e9 and made.depth == 32
    assert not predict_plan(target, draft, H100, 2, "TP", 12_288).fits
    assert predict_plan(target, draft, H200, 2, "TP", 12_288).fits


def test_more_gpus_help_the_target_and_not_the_draft(
    pair: tuple[scaling.Shape, scaling.Shape],
) -> None:
    """Claim: TP divides T(1) by less than the GPUs there are, PP not at all, and so drafting pays
    less the more GPUs share the target. Fails if sums over GPUs were free.
    """
    plans = [predict_plan(*pair, H200, count, "TP", 12_288) for count in (1, 2, 4, 8)]
    for one, two in zip(plans, plans[1:], strict=False):
        half = one.single_row_seconds / 2
        assert half < two.single_row_seconds < one.single_row_seconds
        assert two.draft_step_seconds == one.draft_step_seconds
        assert two.decoding_speedup < one.decoding_speedup
    turns = [predict_plan(*pair, H200, count, "PP", 12_288) for count in (2, 8)]
    assert turns[0].single_row_seconds == turns[1].single_row_seconds
    assert turns[1].dollars() > 3.9 * turns[0].dollars()
    assert plans[1].single_row_seconds - plans[0].single_row_seconds / 2 == pytest.approx(
        160 * (H200.all_reduce_seconds + 8192 * 2 / H200.link)
    )


def test_videos_together_are_cheaper(pair: tuple[scaling.Shape, scaling.Shape]) -> None:
    """Claim: a batch reads the weights once, so a video costs less; its keys are all read."""
    one, eight = (predict_plan(*pair, H200, 4, "TP", 12_288, batch) for batch in (1, 8))
    assert eight.dollars() < one.dollars()
    keys = 7 * 12_288 * pair[0].footprint.kv_numbers_per_token * 2 / 4 / H200.bandwidth
    sums = 160 * 2 * 3 / 4 * 7 * 8192 * 2 / H200.link
    assert eight.single_row_seconds - one.single_row_seconds == pytest.approx(keys + sums)
