"""Claims about ``python -m lab profile | prefill | verify | flips`` as commands."""

from __future__ import annotations

import json

import pytest
import torch
from commands import Call
from helpers import qwen25, video_input

from lab.hardware import profile
from lab.hardware.prefill import stretch_video
from saccade.core.errors import OptionError
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.extra
def test_a_profile(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a line a method, plain decoding first; as JSON the figures it is made of."""
    monkeypatch.setattr(profile, "BARE_CYCLES", 2)
    words = ("--suite", "shapes-qa", "--limit", 1, "--repeat", 1, "--max-new-tokens", 8)
    words = ("profile", "--methods", "sd/shape=chain-2", *words)
    code, printed, error = call(*words)
    assert code == 0, error
    head, plain, own, *_ = printed.splitlines()
    assert head.split()[0] == "method" and head.split()[-1] == "share"
    assert plain.startswith("ar ") and plain.rstrip().endswith("100%")
    assert own.startswith("sd/shape=chain-2 ")
    code, printed, error = call(*words, "--json")
    assert code == 0, error
    report = json.loads(printed)
    assert [each["method"] for each in report["methods"]] == ["ar", "sd/shape=chain-2"]
    assert report["environment"]["threads"] == 1 and report["suite"] == "shapes-qa"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["hippo", "magic"])
def test_what_has_no_profile_is_refused(call: Call, method: str) -> None:
    """Claim: a draft beside the target, or no method at all, is one sentence that names it."""
    code, printed, error = call("profile", "--methods", method)
    assert code == 2 and printed == "" and "Traceback" not in error
    assert method in error and len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_flips_of_the_target_alone(call: Call) -> None:
    """`lab flips` counts every token of an answer; with `--exact` no logit differs."""
    words = ["flips", "--dtype", "bfloat16", "--limit", 1, "--max-new-tokens", 8]
    report = json.loads(call(*words, "--json")[1])
    assert report["compared"] == 8 and report["unlike"] > 0
    exact = json.loads(call(*words, "--exact", "--json")[1])
    assert exact["compared"] == 8 and exact["flips"] == exact["unlike"] == 0
    assert "8 tokens" in call(*words)[1]


@pytest.mark.extra
def test_what_it_costs_to_verify_several_rows(call: Call) -> None:
    """Claim: seconds of one row and of those asked for, and as a line their ratios to one row's."""
    words = ["verify", "--visual-tokens", 64, "--rows", 3, "--turns", 2]
    report = json.loads(call(*words, "--json")[1])
    assert report["keys"] == 64 and {"1", "3"} == {*report["seconds"]}
    assert all(took > 0 for took in report["seconds"].values())
    code, printed, error = call(*words)
    assert code == 0, error
    assert printed.startswith("over 64 keys: T(1) ") and printed.count("/T(1)") == 1


def test_a_stretched_clip_is_the_clip_several_times() -> None:
    """Claim: a repeated clip has its tokens times over, and the model reads it as one video."""
    inputs = stretch_video(video_input(0, (2, 4, 4)), 3 * 256)
    assert inputs["video_grid_thw"].tolist() == [[6, 4, 4]]
    (prompt,) = Backbone(qwen25()).prompts(inputs)
    assert prompt.visual_tokens == 6 * 4
    assert prompt.grid[:, 1].tolist() == [t for t in range(6) for _ in range(4)]
    with pytest.raises(OptionError, match="grids"):
        stretch_video({"input_ids": torch.zeros(1, 3)}, 10)
