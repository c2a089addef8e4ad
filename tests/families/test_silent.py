"""Claims about what must not go wrong in silence: each ends in one sentence, in time."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from helpers import VIDEO, qwen25, video_input
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, TemperatureLogitsWarper

import saccade
from lab import checkpoints
from lab.checkpoints import FAMILIES
from saccade import inputs as models
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.core.sampling import Sampling
from saccade.drafting.parallel.drafter import _sendable_rule
from saccade.drafting.shapes import cost_measurement
from saccade.inputs import architectures, footprint, loading
from saccade.methods import resolve
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")

ROOT = Path(__file__).parents[2]
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
def test_weights_that_are_not_whole_are_refused_by_name(
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


def test_a_config_of_a_far_larger_model_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: where config.json leaves the text model to transformers' defaults (280 GB) beside
    files of a few kilobytes, a sentence comes before any of it is made. Control: as it was made."""
    folder = checkpoints.make("qwen2.5-vl", tmp_path / "qwen")
    models.load(str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    kind = architectures.model_class(AutoConfig.from_pretrained(folder))
    monkeypatch.setattr(kind, "from_pretrained", lambda *a, **b: pytest.fail("it was built"))
    with pytest.raises(ModelError, match="does not fit: its weights take 2[0-9]{2}"):
        models.load(str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_control_whole_checkpoints_load(tmp_path: Path, family: str) -> None:
    """Control: of no family's checkpoint a weight is called missing or foreign; tied ones are read
    once, and a talker's are left alone."""
    if family == "smolvlm":
        pytest.importorskip("num2words")
    models.load(str(checkpoints.make(family, tmp_path / family)))


def test_a_prompt_that_is_too_long_is_refused_before_it_is_read() -> None:
    """Claim: more tokens than the model was made for end in a sentence. Fails if it reads them."""
    target = qwen25()
    longest = int(target.config.get_text_config().max_position_embeddings)
    inputs = {"input_ids": torch.full((1, longest + 1), 5)}
    with pytest.raises(
        ModelError, match=f"has {longest + 1} tokens, and this model reads {longest}"
    ):
        saccade.run(target, inputs, max_new_tokens=1)


def test_nothing_is_timed_at_a_length_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: nor are costs measured for it, which at such a length takes minutes and gigabytes."""
    monkeypatch.setattr(
        cost_measurement, "measure_costs", lambda *_, **__: pytest.fail("costs were measured")
    )
    target = qwen25()
    longest = int(target.config.get_text_config().max_position_embeddings)
    inputs = {"input_ids": torch.full((1, longest + 1), 5)}
    with pytest.raises(ModelError, match="this model reads"):
        saccade.run(target, inputs, draft=qwen25(1), method="auto", max_new_tokens=1)


def _inputs(**changed: Any) -> dict[str, Any]:
    return {**video_input(0), **changed}


IDS = video_input(0)["input_ids"]
TEXT = torch.full((1, 5), 7)
PIXELS, GRID = video_input(0)["pixel_values_videos"], video_input(0)["video_grid_thw"]
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


def test_a_later_turn_that_is_too_long_is_refused() -> None:
    """Claim: the length of the context holds in every turn of a conversation, which goes on after
    the refusal. Fails if only the first turn is looked at."""
    target = Backbone.of(qwen25())
    ids = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch, saccade.Conversation(target) as talk:
        patch.setattr(target, "context", 60)
        first = talk.run({"input_ids": ids}, method="ar", max_new_tokens=2)
        longer = torch.cat([ids, torch.tensor([first.ids]), ids[:, :30]], 1)
        with pytest.raises(ModelError, match="has 72 tokens, and this model reads 60"):
            talk.run({"input_ids": longer}, method="ar", max_new_tokens=2)
        again = talk.run({"input_ids": longer[:, :50]}, method="ar", max_new_tokens=2)
        assert again.reused_tokens


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    """Claim: a tokenizer.json without its entries, or no JSON at all, is named as what is wrong."""
    folder = checkpoints.make("qwen2.5-vl", tmp_path / "qwen")
    file = folder / "tokenizer.json"
    held = json.loads(file.read_text())
    for entry in ("added_tokens", "model"):
        file.write_text(json.dumps({key: value for key, value in held.items() if key != entry}))
        with pytest.raises(ModelError, match="its tokenizer.json lacks added_tokens, model"):
            models.load(str(folder))
    file.write_text("{" + file.read_text())
    with pytest.raises(ModelError, match="its tokenizer.json is no JSON file that can be read"):
        models.load(str(folder))


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
        models.load(str(folder))
    with pytest.raises(ModelError):
        footprint.footprint(loading.read_config(str(folder)))


SCRIPT = """
import sys, torch, saccade
sys.path[:0] = {paths!r}
from helpers import qwen25, video_input

class Even:
    def __call__(self, ids, scores):
        scores = scores.clone()
        scores[:, 1::2] = -1e9
        return scores

if __name__ == "__main__":
    asked = dict(draft=qwen25(1), max_new_tokens=12, logits_processor=[Even()])
    plain = saccade.run(qwen25(), video_input(0), method="ar", **asked)
    found = saccade.run(qwen25(), video_input(0), method="hippo", **asked)
    assert found.ids == plain.ids and not any(each % 2 for each in plain.ids)
    print(found.fallback_reason, len(found.rounds))
"""


def test_what_no_other_process_can_import_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: of a rule's processors those of ``__main__``, which pickle well here, stay with the
    target, and others go. Fails if the draft's process is sent what it cannot read."""
    own = type("Even", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Even", own, raising=False)
    other = TemperatureLogitsWarper(2.0)
    assert pickle.dumps(own())
    kept = _sendable_rule(Sampling(True, (own(), other), 1, ()))
    assert kept.processors == (other,)


@pytest.mark.slow
def test_a_processor_of_the_callers_script_stays_with_the_target(tmp_path: Path) -> None:
    """Claim: so in a script, whose answer is plain decoding's, drafted to its end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[str(Path(__file__).parents[1]), str(ROOT)]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == "None"


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
    for asked in (
        dict(question=broken),
        dict(question="hi", history=[("hi", broken)]),
        dict(question="hi", documents=[broken]),
    ):
        with pytest.raises(OptionError, match="lone surrogate"):
            models.ask(loaded, **asked)
    assert models.ask(loaded, "a \U0001f600")["input_ids"].numel()
