"""A draft put together from a language model and a vision tower, trained, and drafting."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import saccade
from lab import checkpoints
from saccade.core.errors import ModelError, OptionError
from saccade.inputs import Loaded, ask, load
from saccade.world.train_draft import run
from saccade.world.train_draft.assembly import assemble_draft
from saccade.world.train_draft.recipes import RECIPES, Settings, parts_by_parameter
from saccade.world.train_draft.run import make_starting_draft

FORMS = ("llava-1.5", "llava-next", "llava-onevision")
TINY = dict(steps=4, batch_size=2, lr_scale=10.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of LLaVA's form, a smaller language model of fewer ids, towers, and a picture."""
    root = tmp_path_factory.mktemp("parts")
    for name in FORMS:
        checkpoints.make(name, root / name, size=checkpoints.Size(layers=3))
    small = checkpoints.Size(layers=1, hidden=64, vocab=300)
    checkpoints.make("llama", root / "language", seed=4, size=small)
    checkpoints.make("qwen2.5-vl", root / "qwen")
    seen = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2)
    sizes = {"clip": 56, "wide": 112}
    for name, side in sizes.items():
        vision = hf.CLIPVisionConfig(**seen, image_size=side, patch_size=14)
        text = hf.CLIPTextConfig(**seen, vocab_size=50)
        config = hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())
        torch.manual_seed(8)
        hf.CLIPModel(config).save_pretrained(root / name)
    return root


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """A whole CLIP holds weights that its tower has no use for, and transformers says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def target(folder: Path, form: str) -> Loaded:
    return load(str(folder / form), fused=False)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_is_the_targets_class_around_smaller_parts(folder: Path, form: str) -> None:
    """Claim: of LLaVA's families the draft's decoder is the language model's, weight by weight, its
    tower the target's own, its vocabulary the target's with the mean in new rows, and only the
    projector follows from the seed. It reads what the target reads, and drafts for it. Fails where
    a weight is left untrained that had been trained."""
    whole = target(folder, form)
    language = load(str(folder / "language"), fused=False).backbone.model
    made = assemble_draft(whole, str(folder / "language"), None, seed=0)
    model: Any = made.backbone.model
    assert type(model) is type(whole.backbone.model) and made.processor is whole.processor
    now, text, seeing = (
        each.state_dict()
        for each in (model.get_decoder(), language.get_decoder(), model.base_model.vision_tower)
    )
    for name, weight in text.items():
        if name == "embed_tokens.weight":
            assert torch.equal(now[name][: len(weight)], weight)
            assert torch.equal(now[name][len(weight) :], weight.mean(0).expand(20, -1))
        else:
            assert torch.equal(now[name], weight), name
    head = model.get_output_embeddings().weight
    assert len(head) == whole.backbone.vocab == 320
    assert torch.equal(head[:300], language.get_output_embeddings().weight)
    theirs = whole.backbone.model.base_model.vision_tower.state_dict()
    assert seeing.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in seeing.items())

    other = assemble_draft(
        whole, str(folder / "language"), None, seed=1
    ).backbone.model.state_dict()
    same = assemble_draft(whole, str(folder / "language"), None, seed=0).backbone.model.state_dict()
    kinds = parts_by_parameter(model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, same[name])
        drawn = kinds[name] == "projector" and not name.endswith("bias")
        assert torch.equal(weight, other[name]) != drawn, name

    picture = np.zeros((56, 56, 3), np.uint8)
    inputs = ask(whole, "What is it?", images=[picture])
    answer = saccade.run(whole.backbone, inputs, method="ar", max_new_tokens=8)
    drafted = saccade.run(
        whole.backbone, inputs, draft=made.backbone, method="specvlm", max_new_tokens=8
    )
    assert drafted.ids == answer.ids and drafted.fallback_reason is None


@pytest.mark.extra
def test_a_tower_may_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the tower of a CLIP that reads text too is taken out of it, weight by weight, with its
    own number of layers. Like every name of a model, its name may begin with the home folder."""
    monkeypatch.setenv("HOME", str(folder))
    made = assemble_draft(target(folder, "llava-1.5"), "~/language", "~/clip", seed=0)
    clip = hf.CLIPModel.from_pretrained(folder / "clip")
    theirs = clip.vision_model.state_dict()
    model: Any = made.backbone.model
    seeing = {
        name.removeprefix("vision_model."): weight
        for name, weight in model.base_model.vision_tower.state_dict().items()
    }
    assert model.config.vision_config.num_hidden_layers == 3
    assert seeing.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in seeing.items())


def test_what_does_not_go_together_is_refused(folder: Path) -> None:
    """Claim: a target of another form, a tower that sees other pictures, a language model that is
    none, and a tower that is none are refused by name, in a sentence that says what would work."""
    llava, words = target(folder, "llava-1.5"), str(folder / "language")
    for arguments, says in (
        ((target(folder, "qwen"), words, None), "LLaVA's form.*qwen2_5_vl: give --draft"),
        ((llava, words, str(folder / "wide")), "pictures of 112 pixels.*prepares 56"),
        ((llava, words, words), "pictures of None pixels"),
        ((llava, str(folder / "none"), None), "no checkpoint folder"),
        ((llava, words, str(folder / "none")), "no checkpoint folder"),
    ):
        with pytest.raises(ModelError, match=says) as caught:
            assemble_draft(*arguments, seed=0)
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="leave --draft out"):
        run.train_draft(folder / "out", Settings(draft=words, language=words, **TINY))
    with pytest.raises(OptionError, match="--data"):
        run.train_draft(folder / "out", Settings(images="here", **TINY))
    assert not (folder / "out").exists()


def test_the_recipes_name_what_tabed_starts_from(folder: Path, monkeypatch: Any) -> None:
    """Claim: without names a draft for a target of LLaVA's form starts from LLaMA-68M or -160M
    (Miao et al., 2023) behind the target's own CLIP, and for the embedded target from nothing."""
    calls = []
    monkeypatch.setattr(run, "assemble_draft", lambda target, *given: calls.append(given))
    whole = target(folder, "llava-1.5")
    for name, model in (
        ("llava-1.5-68m", "JackFram/llama-68m"),
        ("llava-1.5-160m", "JackFram/llama-160m"),
        ("llava-onevision-68m", "JackFram/llama-68m"),
    ):
        make_starting_draft(whole, RECIPES[name], Settings(recipe=name, seed=3))
        assert calls.pop() == (model, None, 3)
    make_starting_draft(whole, RECIPES["llava-1.5-68m"], Settings(language="mine", tower="eyes"))
    assert calls == [("mine", "eyes", 0)]
    assert (
        make_starting_draft(load("shapes"), RECIPES["llava-1.5-68m"], Settings()).name
        == "a fresh draft"
    )


@pytest.mark.extra
def test_a_run_over_llavas_data_trains_and_its_draft_drafts(folder: Path, tmp_path: Path) -> None:
    """Claim: `train-draft --target --language --data` by LLaVA-1.5's recipe leaves a checkpoint
    that drafts for the target; the tower has not moved, projector and language have. The target
    reads no videos, and the world's samples for it are pictures."""
    (tmp_path / "coco").mkdir()
    rows = []
    for number in range(3):
        pixels = np.full((56, 56 + 14 * number, 3), 60 * number, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "coco" / f"{number}.png")
        turns = [("human", "<image>\nWhich?"), ("gpt", f"Number {number}.")] * 2
        turns[2] = ("human", "Again?")
        messages = [{"from": who, "value": what} for who, what in turns]
        rows.append({"id": number, "image": f"coco/{number}.png", "conversations": messages})
    (tmp_path / "data.json").write_text(json.dumps(rows))
    names = dict(target=str(folder / "llava-1.5"), language=str(folder / "language"))
    start = assemble_draft(target(folder, "llava-1.5"), names["language"], None, seed=0)
    for data in (str(tmp_path / "data.json"), None):
        out = tmp_path / f"out{data is None}"
        report = run.train_draft(out, Settings(**names, data=data, distill=0.5, **TINY))
        assert [phase["phase"] for phase in report["phases"]] == ["pretraining", "instruction"]
        draft = load(str(out))
        kinds, before = parts_by_parameter(draft.backbone.model), start.backbone.model.state_dict()
        moved = {
            kinds[name]
            for name, weight in draft.backbone.model.state_dict().items()
            if not torch.equal(weight, before[name])
        }
        assert moved == {"projector", "language"}
        whole = target(folder, "llava-1.5")
        inputs = ask(whole, "Which?", images=[np.zeros((56, 56, 3), np.uint8)])
        answer = saccade.run(whole.backbone, inputs, method="ar", max_new_tokens=6)
        drafted = saccade.run(
            whole.backbone, inputs, draft=draft.backbone, method="sd", max_new_tokens=6
        )
        assert drafted.ids == answer.ids and drafted.fallback_reason is None
