"""Claims about training in pieces: where it starts, how it goes on, which answers are whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lab.training import train
from lab.training.batch import Source
from lab.training.model import create, grow, shrink
from lab.training.stages import STAGES
from lab.training.wholeness import is_whole
from saccade.inputs.checkpoints import EMBEDDED
from saccade.world.descriptions import describe
from saccade.world.scenes import scene
from saccade.world.train_draft.samples import Canvas


@pytest.mark.representatives(1)
@pytest.mark.parametrize("layers", [3, 5, 8])
def test_shrinking_undoes_growing(layers):
    """Claim: the layers growth began from are found again, whatever the new ones learnt."""
    small = create(3)
    grown = grow(small, layers)
    # In each layer that growth added these two were zero: what tells them from the others.
    for layer in grown.model.language_model.layers:
        if not layer.self_attn.o_proj.weight.any():
            torch.nn.init.normal_(layer.mlp.up_proj.weight)
    back, begun = shrink(grown, 3).state_dict(), small.state_dict()
    assert back.keys() == begun.keys()
    assert all(torch.equal(back[name], begun[name]) for name in begun)


@pytest.mark.extra
def test_a_stage_that_was_cut_goes_on(tmp_path, monkeypatch):
    """Claim: cut in its third step, a stage goes on after the first, where it was last saved, with
    clips not yet seen; what it leaves is a mean of its steps' weights, late ones counting more."""
    medium = next(stage for stage in STAGES if stage.name == "medium")
    short = replace(medium, canvases=[(Canvas("video", 4, 56, 56), 1.0)], tokens=400, layers=2)
    monkeypatch.setattr(train, "STAGES", [short])
    drawn, after = [], []
    whole_next, whole_update = Source.next, train.AveragedModel.update_parameters

    def draw(self, progress):
        if len(drawn) == 1:
            monkeypatch.setattr(train, "SAVE_EVERY_S", float("inf"))
        if len(drawn) == 2:
            drawn.append(None)
            raise KeyboardInterrupt
        drawn.append(whole_next(self, progress))
        return drawn[-1]

    def update(self, model):
        after.append(model.lm_head.weight.detach().clone())
        whole_update(self, model)

    monkeypatch.setattr(Source, "next", draw)
    monkeypatch.setattr(train.AveragedModel, "update_parameters", update)
    monkeypatch.setattr(train, "SAVE_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train.train(tmp_path, ["medium"], pair=EMBEDDED)
    cut = torch.load(tmp_path / "medium.part.pt")
    train.train(tmp_path, ["medium"], {"medium": cut["counts"][1] + 1e-3}, pair=EMBEDDED)

    lines = [json.loads(line) for line in (tmp_path / "medium.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["cpu_s"] > lines[0]["cpu_s"]
    first, lost, _, again = (batch and batch.ids for batch in drawn)
    assert not any(torch.equal(again, seen) for seen in (first, lost))
    left = torch.load(tmp_path / "medium.pt")
    assert torch.equal(left["model"]["lm_head.weight"], after[2])
    mean = 0.2 * after[0] + 0.8 * after[2]
    torch.testing.assert_close(left["mean"]["module.lm_head.weight"], mean)


@pytest.mark.slow
def test_a_broken_answer_is_distinguished_from_a_whole_one():
    """Claim: true descriptions of unseen clips are whole; one cut within a sentence, one with a
    word left out and one that breaks off after a sentence that cannot be the last are not."""
    for seed in range(10_000_000, 10_000_050):
        assert is_whole(describe(scene(seed)))
    words = describe(scene(10_000_000)).split(" ")
    for k in (k for k in range(1, len(words)) if not words[k - 1].endswith(".")):
        assert not is_whole(" ".join(words[:k])), words[:k]
        assert not is_whole(" ".join(words[:k] + words[k + 1 :])), words[k]
    assert not is_whole(describe(scene(10_000_000)).split(". ")[0] + ".")
    assert not is_whole("This clip, and the large cyan cross.")
    assert not is_whole("")
