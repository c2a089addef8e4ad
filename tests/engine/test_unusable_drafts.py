"""Claims about drafts that cannot be loaded or cannot start: a sentence, or plain decoding."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    input_for,
    noisy,
    qwen25,
    truth,
)

import saccade
from saccade.core.errors import ModelError
from saccade.inputs import load
from saccade.inputs.checkpoints import EMBEDDED

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")


def _missing(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")


def _unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "flubber"}))


def _cut(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:5000])


def _garbage(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"\x00" * 4096)


def _no_weights(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.unlink()


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*.json"):
        file.write_text("[]")


SPOILT: dict[str, Callable[[Path], None]] = {
    "no folder": _missing,
    "an empty folder": _empty,
    "a config that is no JSON": _no_json,
    "an unknown architecture": _unknown,
    "weights cut short": _cut,
    "weights of zeros": _garbage,
    "no weights": _no_weights,
    "no tokenizer": _no_tokenizer,
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_draft_folder_is_a_sentence(name, tmp_path):
    """Claim: whatever is wrong with a draft's folder, loading it says so in one sentence that
    names it. Fails on a traceback of another library, or if such a folder loads.
    """
    folder = tmp_path / "draft"
    shutil.copytree(EMBEDDED / "draft", folder)
    SPOILT[name](folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder), device="cpu")
    assert "\n" not in str(caught.value) and "draft" in str(caught.value)


def test_control_the_folder_itself_loads(tmp_path):
    """Control: unspoilt, the same copy loads."""
    folder = tmp_path / "draft"
    shutil.copytree(EMBEDDED / "draft", folder)
    assert load(str(folder), device="cpu").backbone.vocab > 0


@pytest.mark.parametrize("method", ["sd", "sd-tree", "specvlm"])
def test_a_draft_that_breaks_as_it_starts_leaves_plain_decoding(method):
    """Claim: a loaded draft whose weights do not fit together costs speed only, and the result says
    why; nothing is drafted from then on.
    """
    broken = copy.deepcopy(noisy(qwen25, 0, 0.05))
    for layer in broken.get_decoder().layers:
        layer.mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(7, 3))
    result = saccade.run(qwen25(), INPUTS, draft=broken, method=method, max_new_tokens=24)
    assert result.ids == truth("qwen2_5_vl")[:24]
    assert result.fallback_reason is not None and "drafting failed" in result.fallback_reason
    assert not any(round.tokens for round in result.rounds)
