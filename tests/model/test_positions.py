"""Claims about where text stands after a video: as transformers puts it, or as models learnt it."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from helpers import FAMILIES, VIDEO, backbone, input_for, qwen25, video_input
from packaging.version import Version
from transformers import AutoConfig

import saccade
from lab import checkpoints
from saccade.inputs import ask, load
from saccade.inputs.media import Clip
from saccade.model import families
from saccade.model.backbone import Backbone


def _expected(inputs, second: float, rate: int) -> torch.Tensor:
    """The rule as Qwen2.5-VL's authors wrote it, a token at a time: a video's cells count from
    where text would go on, time by seconds; text goes on one past the largest of all."""
    t, h, w = (n // m for n, m in zip(inputs["video_grid_thw"][0].tolist(), (1, 2, 2), strict=True))
    positions: list[tuple[int, int, int]] = []
    cells = iter([(i, j, k) for i in range(t) for j in range(h) for k in range(w)])
    start = following = 0
    for token in inputs["input_ids"][0].tolist():
        if token == VIDEO:
            i, j, k = next(cells)
            positions.append((start + int(i * second * rate), start + j, start + k))
            following = max(following, *(n + 1 for n in positions[-1]))
        else:
            positions.append((following,) * 3)
            following += 1
            start = following
    return torch.tensor(positions).T


DROPS_FRACTIONS = Version(transformers.__version__) < Version("5.18")
"""Such a transformers drops fractions of a second when it places a video's frames."""


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(
            0.5,
            marks=pytest.mark.skipif(DROPS_FRACTIONS, reason="transformers drops half seconds"),
        ),
        1.0,
        4.0,
    ],
)
def test_trained_positions_are_the_authors_rule(seconds):
    """Claim: with positions="trained" every row stands where the authors' rule, written out, puts
    it, also where a video is longer than it is wide; the answer goes on one past the last."""
    inputs = video_input(grid=(5, 4, 6), seconds=seconds)
    prompt = Backbone(copy.deepcopy(qwen25()), positions="trained").prompts(inputs)[0]
    expected = _expected(inputs, seconds, 2)
    assert torch.equal(prompt.positions, expected)
    assert prompt.next_position == int(expected[:, -1].max()) + 1


def test_control_the_library_differs_where_time_runs_further():
    """Control: without the option a long video's text stands elsewhere, which is what the option
    is for. When this fails transformers has been mended, and the option can go."""
    inputs = video_input(grid=(5, 4, 6), seconds=4.0)
    assert not torch.equal(backbone(qwen25()).prompts(inputs)[0].positions, _expected(inputs, 4, 2))


@pytest.mark.parametrize("family", ["qwen2_vl", "llama", "llava_onevision"])
def test_other_families_stay(family):
    """Claim: where time never runs past height and width, or there is one axis, nothing moves."""
    model, inputs = FAMILIES[family](), input_for(family)
    one, other = backbone(model), Backbone(copy.deepcopy(model), positions="trained")
    assert torch.equal(one.prompts(inputs)[0].positions, other.prompts(inputs)[0].positions)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("version", "place"),
    [("4.41.2", "trained"), ("5.2.0", "trained"), ("5.3.0", "library"), (None, "library")],
)
def test_a_checkpoints_age_says_where_it_was_trained_to_read(tmp_path, version, place):
    """Claim: a checkpoint saved by a transformers that put text after a video as the authors did is
    read so, a newer one as the library does, each answer telling where they part; whoever names
    positions has those. Control: a family that was never moved stays."""
    folder = checkpoints.make("qwen2.5-vl", tmp_path / "qwen")
    entries = json.loads((folder / "config.json").read_text()) | {"transformers_version": version}
    (folder / "config.json").write_text(json.dumps(entries))
    clip = Clip(np.zeros((8, 56, 56, 3), np.uint8), np.arange(8) * 5.0, 40.0, 0.2, 8, 0.2)
    prompts = {}
    for mode in ("auto", "library", "trained"):
        model = load(str(folder), device="cpu", positions=mode)
        inputs = ask(model, "What?", clips=[clip])
        prompts[mode] = model.backbone.prompts(inputs)[0]
        result = saccade.run(model.backbone, inputs, method="ar", max_new_tokens=1)
        assert (
            any("trained to see" in text for text in result.warnings)
            == prompts[mode].media.has_trained_positions
        )
    assert torch.equal(prompts["auto"].positions, prompts[place].positions)
    assert (
        prompts["trained"].media.has_trained_positions
        and not prompts["library"].media.has_trained_positions
    )
    config = AutoConfig.for_model("llava_onevision", transformers_version=version)
    assert families.position_rule(config) == "library"
