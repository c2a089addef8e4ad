"""Claims about arguments that cannot be used: each is refused in a sentence, before any work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from helpers import VIDEO, qwen25, video_input

import saccade
from saccade import inputs as models
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unchecked")


def _inputs(**changed: Any) -> dict[str, Any]:
    return {**video_input(0), **changed}


TEXT = torch.full((1, 5), 7)

PIXELS, GRID = video_input(0)["pixel_values_videos"], video_input(0)["video_grid_thw"]

IDS = video_input(0)["input_ids"]
FEWER = IDS.clone()
FEWER[0, (IDS[0] == VIDEO).nonzero()[0]] = 7  # one place less than there are cells


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
        ((qwen25(), _inputs(pixel_values_videos=None)), "the pixels are not there"),
        ((qwen25(), _inputs(pixel_values_videos=PIXELS[:-4])), "holds 68 patches and .* 72"),
        ((qwen25(), _inputs(pixel_values_videos=PIXELS[:0])), "holds 0 patches"),
        ((qwen25(), _inputs(video_grid_thw=None)), "video_grid_thw is not"),
        ((qwen25(), _inputs(video_grid_thw=GRID * 2)), "counts 576"),
        ((qwen25(), _inputs(video_grid_thw=GRID[0])), "whole numbers above 0"),
        ((qwen25(), _inputs(video_grid_thw=GRID.float())), "whole numbers above 0"),
        ((qwen25(), _inputs(video_grid_thw=-GRID)), "whole numbers above 0"),
        ((qwen25(), _inputs(image_grid_thw=GRID)), "pixel_values is not"),
        ((qwen25(), _inputs(input_ids=FEWER)), "do not belong together"),
        ((qwen25(), {"input_ids": TEXT.to("meta")}), "inputs are what a processor returns"),
        ((qwen25(), {"input_ids": TEXT.cfloat()}), "inputs are what a processor returns"),
        ((qwen25(), {"input_ids": TEXT, "attention_mask": [[1] * 5]}), "attention_mask is"),
        ((qwen25(), _inputs(pixel_values_videos=PIXELS[:, :-1])), "do not belong together"),
        ((qwen25(), _inputs(video_grid_thw=GRID[:, [1, 0, 2]])), "do not belong together"),
        ((qwen25(), _inputs(position_ids=IDS[:, :3])), "do not belong to"),
        ((qwen25(), _inputs(mm_token_type_ids=IDS[:, :3] * 0)), "do not belong together"),
    ],
)
def test_inputs_no_model_can_read_are_refused(arguments: tuple[Any, Any], says: str) -> None:
    """Claim: a misuse of the library is an OptionError in a sentence, before any work."""
    for answer in (saccade.run, saccade.generate):
        with pytest.raises(OptionError, match=says):
            answer(arguments[0], arguments[1], max_new_tokens=2)


def test_what_has_no_layers_and_no_head_is_no_model() -> None:
    """Claim: a module that is no language model, or one without its head, is refused as such."""
    for model in (torch.nn.Linear(2, 2), qwen25().model):
        with pytest.raises(ModelError, match=f"{type(model).__name__} has no decoder of layers"):
            saccade.run(model, {"input_ids": TEXT}, max_new_tokens=2)


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
        ({"do_sample": "no"}, "do_sample='no' is neither True nor False"),
        ({"do_sample": True, "temperature": True}, "temperature=True must be a number"),
        ({"do_sample": True, "typical_p": 2.0}, "typical_p=2.0 must be a number"),
        ({"top_h": 0.4}, "top_h"),
        ({"do_sample": True, "top_k": True}, "top_k=True is not a whole number"),
        ({"do_sample": True, "min_p": "x"}, "these generation settings cannot be used"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1 must be at least 0"),
        ({"max_time": "x"}, "max_time='x' must be a number above 0"),
        ({"max_time": float("nan")}, "max_time=nan must be a number above 0"),
        ({"seed": True}, "seed=True is not a whole number"),
        ({"eos_token_id": "x"}, "eos_token_id='x' is not a whole number"),
        ({"eos_token_id": [2, 1.5]}, "eos_token_id=1.5 is not a whole number"),
        ({"pad_token_id": "x"}, "pad_token_id='x' is not a whole number"),
        ({"bad_words_ids": [["x"]]}, "bad_words_ids='x' is not a whole number"),
        ({"generation_config": {"max_length": 5}}, "GenerationConfig, not dict"),
        ({"logits_processor": lambda ids, scores: scores}, "logits_processor= is a list of"),
        ({"stopping_criteria": [5]}, "stopping_criteria= is a list of"),
        ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn= is a function"),
        ({"tokenizer": "gpt2"}, "a loaded tokenizer or processor, not str"),
    ],
)
def test_settings_that_are_none_are_refused(settings: dict[str, Any], says: str) -> None:
    """Claim: a setting of another type or out of range is refused by its name."""
    with pytest.raises(OptionError, match=says):
        saccade.run(qwen25(), video_input(0), **settings)


@pytest.mark.parametrize("streamer", [5, "x", SimpleNamespace(put=print)])
def test_a_streamer_has_put_and_end(streamer: Any) -> None:
    """Claim: what cannot be streamed to is refused before any work."""
    with pytest.raises(OptionError, match="streamer= needs put and end"):
        saccade.generate(qwen25(), video_input(0), streamer=streamer, max_new_tokens=2)


def test_a_method_is_a_name_or_a_recipe() -> None:
    """Claim: nothing else is resolved."""
    with pytest.raises(MethodError, match="a name or a Recipe, not NoneType"):
        saccade.run(qwen25(), video_input(0), method=None)


def test_ids_of_32_bits_are_read() -> None:
    """Claim: ids of another width of whole numbers are the same ids."""
    inputs = _inputs(input_ids=IDS.int())
    recipe = resolve("ar")
    wide = saccade.run(qwen25(), _inputs(), method=recipe, max_new_tokens=4)
    assert saccade.run(qwen25(), inputs, method=recipe, max_new_tokens=4).ids == wide.ids


def test_half_a_character_is_refused_in_a_sentence():
    """Claim: a lone surrogate in a question, an earlier turn or a document is an OptionError, and
    text beyond the basic plane (control) is none."""
    loaded = zoo.member("llama")
    broken = "a \ud83d"
    for arguments in (
        dict(question=broken),
        dict(question="hi", history=[("hi", broken)]),
        dict(question="hi", documents=[broken]),
    ):
        with pytest.raises(OptionError, match="lone surrogate"):
            models.ask(loaded, **arguments)
    assert models.ask(loaded, "a \U0001f600")["input_ids"].numel()
