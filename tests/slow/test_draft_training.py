"""A draft trained from nothing for some minutes learns what its target says."""

from pathlib import Path

import pytest

from lab.training import evaluate
from saccade.inputs.checkpoints import NAMES
from saccade.inputs.loading import load
from saccade.world.train_draft import run
from saccade.world.train_draft.recipes import Settings
from saccade.world.train_draft.samples import Canvas

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLIP = Canvas("video", 16, 112, 112)


def test_a_fresh_draft_comes_to_agree_with_the_target(tmp_path: Path) -> None:
    """Claim: over unseen clips an untrained draft agrees nowhere, a trained one at a third of the
    positions and more, and the loss of its last tenth is below half of its first."""
    target = NAMES["shapes"]
    before = run.make_fresh_draft(load("shapes", fused=False), 2, seed=0)
    before.backbone.model.save_pretrained(tmp_path / "before")
    settings = Settings(
        phases="instruction", steps=120, batch_size=8, lr_scale=100.0, distill=0.5, drop_visual=0.9
    )
    report = run.train_draft(tmp_path / "after", settings)
    (phase,) = report["phases"]
    assert phase["loss_last"] < 0.5 * phase["loss_first"]
    start = evaluate.agreement(target, tmp_path / "before", CLIP, 16)
    end = evaluate.agreement(target, tmp_path / "after", CLIP, 16)
    assert start < 0.05 and end > 0.33
