"""Claims about the plan on paper: the page is the command's, and the arithmetic is by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import scaling
from lab.hardware import gpu
from lab.scaling import ASSUMED, GPUS, plan, shape
from saccade.bench.hardware.published import CONFIGS

ROOT = Path(__file__).parents[2]
H100, H200, A100, L40S = GPUS


@pytest.fixture(scope="module")
def pair() -> tuple[scaling.Shape, scaling.Shape]:
    return shape(scaling.TARGET), shape(scaling.DRAFT)


def test_one_gpu_is_what_the_older_prediction_says(
    pair: tuple[scaling.Shape, scaling.Shape],
) -> None:
    """Claim: with layers in turn, T(1) and the speedup are those of `lab gpu --predict`."""
    tokens = 12_288
    found = plan(*pair, H200, 2, "PP", tokens)
    each, once, step, speedup = gpu.predict_speedups(
        scaling.TARGET, scaling.DRAFT, tokens, H200.bandwidth
    )[1]
    assert each == ASSUMED.reported
    assert found.once == pytest.approx(once) and found.step == pytest.approx(step, rel=1e-3)
    assert found.gain == pytest.approx(speedup, rel=1e-2)


def test_memory_by_hand(pair: tuple[scaling.Shape, scaling.Shape]) -> None:
    """Claim: under TP a GPU holds its share of weights and keys, and a whole draft and tower."""
    target, draft = pair
    assert (target.kv_heads, target.width, target.counted.layers) == (8, 128, 80)
    assert target.counted.kv == 2 * 80 * 8 * 128
    found = plan(target, draft, H100, 4, "TP", 100_000)
    keys = (100_000 + 256) * 2 * 80 * 8 * 128 * 2
    drafts = (10_000 + 256) * 2 * 28 * 4 * 128 * 2 + draft.counted.parameters * 2
    tower = target.vision * 2
    whole = target.counted.parameters * 2 - tower
    working = 2 * 2048 * 8 * 8192 * 2
    assert found.held == pytest.approx((whole + keys) / 4 + tower + drafts + working)
    made = CONFIGS[scaling.TARGET]().vision_config
    assert 0.5e9 < target.vision < 1e9 and made.depth == 32
    assert not plan(target, draft, H100, 2, "TP", 12_288).fits
    assert plan(target, draft, H200, 2, "TP", 12_288).fits


def test_more_gpus_help_the_target_and_not_the_draft(
    pair: tuple[scaling.Shape, scaling.Shape],
) -> None:
    """Claim: TP divides T(1) by less than the GPUs there are, PP not at all, and so drafting pays
    less the more GPUs share the target. Fails if sums over GPUs were free.
    """
    found = [plan(*pair, H200, count, "TP", 12_288) for count in (1, 2, 4, 8)]
    for one, two in zip(found, found[1:], strict=False):
        assert one.once / 2 < two.once < one.once and two.step == one.step
        assert two.gain < one.gain
    turns = [plan(*pair, H200, count, "PP", 12_288) for count in (2, 8)]
    assert turns[0].once == turns[1].once and turns[1].dollars() > 3.9 * turns[0].dollars()
    assert found[1].once - found[0].once / 2 == pytest.approx(
        160 * (H200.wait + 8192 * 2 / H200.link)
    )


def test_videos_together_are_cheaper(pair: tuple[scaling.Shape, scaling.Shape]) -> None:
    """Claim: a batch reads the weights once, so a video costs less; its keys are all read."""
    one, eight = (plan(*pair, H200, 4, "TP", 12_288, batch) for batch in (1, 8))
    assert eight.dollars() < one.dollars()
    keys = 7 * 12_288 * pair[0].counted.kv * 2 / 4 / H200.bandwidth
    sums = 160 * 2 * 3 / 4 * 7 * 8192 * 2 / H200.link
    assert eight.once - one.once == pytest.approx(keys + sums)
