"""Claims about what must not go wrong in silence: each ends in one sentence, in time (R1 to R7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import qwen25, video_input
from safetensors.torch import load_file, save_file

import saccade
from evidence import checkpoints
from evidence.checkpoints import FAMILIES
from saccade import inputs as models
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.methods import resolve

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
def test_silent_1_and_2_weights_that_are_not_whole_are_refused_by_name(
    tmp_path: Path, spoil: Callable[[Weights], None], says: str
) -> None:
    """Claim: weights that are missing, foreign, of another shape, NaN or infinite are refused as
    the checkpoint is loaded. Fails if it loads and answers nonsense."""
    folder = checkpoints.make("llama", tmp_path / "llama")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    models.load(str(folder))  # control: as it was made
    spoil(weights)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelError, match=says):
        models.load(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_silent_1_control_whole_checkpoints_load(tmp_path: Path, family: str) -> None:
    """Control: of no family's checkpoint a weight is called missing or foreign; tied ones are read
    once, and a talker's are left alone."""
    if family == "smolvlm":
        pytest.importorskip("num2words")
    models.load(str(checkpoints.make(family, tmp_path / family)))


def test_silent_4_a_prompt_that_is_too_long_is_refused_before_it_is_read() -> None:
    """Claim: more tokens than the model was made for end in a sentence. Fails if it reads them."""
    target = qwen25()
    longest = int(target.config.get_text_config().max_position_embeddings)
    inputs = {"input_ids": torch.full((1, longest + 1), 5)}
    with pytest.raises(
        ModelError, match=f"has {longest + 1} tokens, and this model reads {longest}"
    ):
        saccade.run(target, inputs, max_new_tokens=1)


def _inputs(**changed: Any) -> dict[str, Any]:
    return {**video_input(0), **changed}


IDS = video_input(0)["input_ids"]
TEXT = torch.full((1, 5), 7)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None, _inputs()), "a loaded Hugging Face model, not NoneType"),
        ((qwen25(), {}), "inputs are what a processor returns"),
        ((qwen25(), {"input_ids": IDS[0]}), "inputs are what a processor returns"),
        ((qwen25(), {"input_ids": IDS.float()}), "inputs are what a processor returns"),
        ((qwen25(), {"input_ids": IDS[:, :0]}), "input_ids are empty"),
        ((qwen25(), {"input_ids": TEXT * 100_000}), "another tokenizer's"),
        ((qwen25(), {"input_ids": -TEXT}), "another tokenizer's"),
        (
            (qwen25(), _inputs(attention_mask=torch.zeros_like(IDS))),
            "hides all of a request",
        ),
        ((qwen25(), _inputs(attention_mask=torch.ones(1, 2))), "attention_mask is"),
        ((qwen25(), {"input_ids": IDS}), "the pixels are not there"),
    ],
)
def test_silent_7_inputs_no_model_can_read_are_refused(
    arguments: tuple[Any, Any], says: str
) -> None:
    """Claim: a misuse of the library is an OptionError in a sentence, before any work."""
    for answer in (saccade.run, saccade.generate):
        with pytest.raises(OptionError, match=says):
            answer(arguments[0], arguments[1], max_new_tokens=2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_new_tokens": "4"}, "max_new_tokens='4' is not a whole number"),
        ({"max_new_tokens": True}, "is not a whole number"),
        ({"seed": "x"}, "seed='x' is not a whole number"),
        ({"stop_strings": 5}, "stop_strings=5 is neither a string"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature=nan must be a number"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5 must be a number above 0 and up to 1"),
        ({"repetition_penalty": "much"}, "repetition_penalty='much' must be a number"),
    ],
)
def test_silent_7_settings_that_are_none_are_refused(settings: dict[str, Any], says: str) -> None:
    """Claim: a setting of another type or out of range is refused by its name."""
    with pytest.raises(OptionError, match=says):
        saccade.run(qwen25(), video_input(0), **settings)


def test_silent_7_a_method_is_a_name_or_a_recipe() -> None:
    """Claim: nothing else is resolved."""
    with pytest.raises(MethodError, match="a name or a Recipe, not NoneType"):
        saccade.run(qwen25(), video_input(0), method=None)


def test_ids_of_32_bits_are_read() -> None:
    """Claim: ids of another width of whole numbers are the same ids."""
    inputs = _inputs(input_ids=IDS.int())
    recipe = resolve("ar")
    wide = saccade.run(qwen25(), _inputs(), method=recipe, max_new_tokens=4)
    assert saccade.run(qwen25(), inputs, method=recipe, max_new_tokens=4).ids == wide.ids
