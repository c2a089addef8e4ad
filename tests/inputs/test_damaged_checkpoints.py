"""Claims about checkpoints that are incomplete or impossible: one sentence, before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from lab import checkpoints
from lab.checkpoints import FAMILIES
from saccade import inputs
from saccade.core.errors import ModelError
from saccade.inputs import architectures, footprint, loading

pytestmark = pytest.mark.usefixtures("unchecked")

Weights = dict[str, torch.Tensor]

GATE = "model.layers.0.mlp.gate_proj.weight"


def _without(weights: Weights) -> None:
    del weights[GATE]


def _renamed(weights: Weights) -> None:
    weights["model.layers.0.mlp.gates.weight"] = weights[GATE].clone()


def _narrow(weights: Weights) -> None:
    weights[GATE] = weights[GATE][:-1].clone()


def _row(weights: Weights) -> None:
    weights[GATE][2] = float("nan")


def _infinite(weights: Weights) -> None:
    weights["model.norm.weight"][0] = float("inf")


@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_without, rf"lacks: {GATE}; its config.json and its weights"),
        (_renamed, r"has beyond what its model knows: model.layers.0.mlp.gates.weight"),
        (_narrow, rf"has in another shape: {GATE}"),
        (_row, rf"holds NaN or infinity in {GATE}"),
        (_infinite, "holds NaN or infinity in model.norm.weight"),
    ],
)
def test_weights_that_are_not_whole_are_refused_by_name(
    tmp_path: Path, spoil: Callable[[Weights], None], says: str
) -> None:
    """Claim: weights that are missing, foreign, of another shape, NaN or infinite are refused as
    the checkpoint is loaded. Fails if it loads and answers nonsense."""
    folder = checkpoints.make("llama", tmp_path / "llama")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    inputs.load(str(folder))  # control: as it was made
    spoil(weights)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=says):
        inputs.load(str(folder))


def test_a_config_of_a_far_larger_model_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: where config.json leaves the text model to transformers' defaults (280 GB) beside
    files of a few kilobytes, a sentence comes before any of it is made. Control: as it was made."""
    folder = checkpoints.make("qwen2.5-vl", tmp_path / "qwen")
    inputs.load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    kind = architectures.model_class(AutoConfig.from_pretrained(folder))
    monkeypatch.setattr(kind, "from_pretrained", lambda *a, **b: pytest.fail("it was built"))
    with pytest.raises(ModelError, match="does not fit: its weights take 2[0-9]{2}"):
        inputs.load(str(folder))


# A family whose layers Saccade refuses in a sentence cannot be loaded, however whole it is.
REFUSED_FAMILIES = ("minimax-m3-vl",)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in REFUSED_FAMILIES])
def test_control_whole_checkpoints_load(tmp_path: Path, family: str) -> None:
    """Control: of no family's checkpoint a weight is called missing or foreign; tied ones are read
    once, and a talker's are left alone."""
    if family == "smolvlm":
        pytest.importorskip("num2words")
    inputs.load(str(checkpoints.make(family, tmp_path / family)))


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    """Claim: a tokenizer.json without its entries, or no JSON at all, is named as what is wrong.
    Fails if another program's list, such as modules.json, is named instead."""
    folder = checkpoints.make("qwen2.5-vl", tmp_path / "qwen")
    (folder / "modules.json").write_text("[]")
    file = folder / "tokenizer.json"
    entries = json.loads(file.read_text())
    for entry in ("added_tokens", "model"):
        file.write_text(json.dumps({key: value for key, value in entries.items() if key != entry}))
        with pytest.raises(ModelError, match="its tokenizer.json lacks added_tokens, model"):
            inputs.load(str(folder))
    file.write_text("{" + file.read_text())
    with pytest.raises(ModelError, match="its tokenizer.json is no JSON file that can be read"):
        inputs.load(str(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 0.5},
        {"num_attention_heads": 10**20},
        {"hidden_size": -256},
        {"num_attention_heads": 0},
        {"hidden_act": "quick_glu"},
        {"num_hidden_layers": 10**20},
    ],
)
def test_a_config_of_no_model_is_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    """Claim: numbers that no model can have, found by fuzzing, end in a ModelError."""
    folder = checkpoints.make("llama", tmp_path / "llama")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError):
        inputs.load(str(folder))
    with pytest.raises(ModelError):
        footprint.footprint(loading.read_config(str(folder)))


def test_a_pair_is_compared_before_weights_are_read(tmp_path: Path) -> None:
    """Claim: a draft of another tokenizer, or one that is not there, is refused before the target's
    weights are read. Fails if somebody waits for a large model to be told so.

    The weights are spoilt, so that reading them is another error, which the last line sees."""
    target = checkpoints.make("qwen2.5-vl", tmp_path / "target")
    (target / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot draft for .*their tokenizers differ at id"):
        loading.load_pair(str(target), "shapes-draft")
    with pytest.raises(ModelError, match="nowhere"):
        loading.load_pair(str(target), str(tmp_path / "nowhere"))
    with pytest.raises(ModelError) as caught:
        loading.load_pair(str(target), None)
    assert "tokenizers" not in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 300, "/tmp/" + "x" * 300, "a/" + "x" * 300, "a\0b"])
def test_a_name_that_no_file_may_have_is_refused(name: str):
    """Claim: a name too long or impossible for a file is refused like any other unknown model."""
    with pytest.raises(ModelError, match="checkpoint folder"):
        inputs.load(name)
