"""Claims about the training of EAGLE-3 heads: what is unrolled, what is learnt, and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import saccade
from lab.checkpoints import make
from saccade.core.errors import OptionError
from saccade.core.sampling import Sampling
from saccade.core.tree import chain
from saccade.inputs import head_checkpoints, load
from saccade.model.heads.head_session import HeadSession
from saccade.model.session import Session
from saccade.world.train_draft import eagle3
from saccade.world.train_draft.recipes import Settings
from saccade.world.train_draft.run import train_draft

TINY = Settings(recipe="eagle3", steps=2, batch_size=1, lr_scale=10.0)


def test_an_unrolled_row_is_a_drafted_row(tmp_path: Path) -> None:
    """Claim: in training, row j of step s gives the logits of the node that is drafted s steps
    after place j - s when the text is followed. Fails if a step sees a key that drafting does not
    have, or the hidden state of another row."""
    folder = make("llama", tmp_path / "target")
    target = load(str(folder), device="cpu", fused=False)
    trained = eagle3.TrainedHead(target, torch.arange(3, 200, 2), seed=0)
    (tmp_path / "head").mkdir()
    trained.save(tmp_path / "head")
    head = head_checkpoints.load_head(str(tmp_path / "head"), target.backbone)
    ids = torch.randint(0, 200, (1, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    read = {**inputs, "labels": ids, "kept_mask": torch.ones_like(ids, dtype=torch.bool)}
    (row,) = eagle3.read_target(target.backbone, head.hidden_layers, read)
    with torch.no_grad():
        steps = [*trained.unroll(row.ids, row.positions, row.hidden, 4)]
        unrolled = [trained.head.own_logits(trained.head.prepare_logits(out)) for out in steps]
    for place in (2, 5):
        prompt = {name: value[:, : place + 1] for name, value in inputs.items()}
        session = Session(target.backbone, [Sampling()])
        (whole,) = target.backbone.prompts(prompt)
        *_, prefill = session.prefill_in_chunks(0, whole, hidden_layers=head.hidden_layers)
        drafting = HeadSession(head, [Sampling()])
        drafting.read(0, prefill, whole)
        drafting.commit({0: [int(ids[0, place + 1])]})
        drafted = drafting.score({0: chain(ids[0, place + 2 : place + 5].tolist())})[0].rows
        for step, logits in enumerate(drafted):
            torch.testing.assert_close(logits, unrolled[step][place + step], atol=1e-3, rtol=1e-3)


def test_a_training_step_leaves_out_what_no_answer_reads(tmp_path: Path) -> None:
    """Claim: unrolled from row 4 on, step s gives from row 4 + s on what the whole unrolling gives.
    Fails if a row that is left out was read, or a row that stays sees another key."""
    target = load(str(make("llama", tmp_path / "target")), device="cpu", fused=False)
    trained = eagle3.TrainedHead(target, torch.arange(3, 200, 2), seed=0)
    ids = torch.randint(0, 200, (1, 12), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    read = {**inputs, "labels": ids, "kept_mask": torch.ones_like(ids, dtype=torch.bool)}
    (row,) = eagle3.read_target(target.backbone, trained.head.hidden_layers, read)
    with torch.no_grad():
        whole = [*trained.unroll(row.ids, row.positions, row.hidden, 4)]
        part = [*trained.unroll(row.ids, row.positions, row.hidden, 4, first=4)]
    assert [len(out) for out in part] == [11, 7, 7, 7]
    for step, (out, expected) in enumerate(zip(part, whole, strict=True)):
        torch.testing.assert_close(out[step - 7 :], expected[4 + step :], atol=1e-4, rtol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(part[3][0], whole[3][4], atol=1e-4, rtol=1e-4)


def test_the_mask_of_a_step_is_what_drafting_sees() -> None:
    """Claim: for four rows the mask of step 2 is the one written by hand."""
    assert eagle3.unrolled_mask(4, 2).int().tolist() == [
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1],
    ]


@pytest.mark.extra
def test_a_trained_head_drafts_for_its_target(tmp_path: Path) -> None:
    """Claim: ``train-draft --recipe eagle3`` writes a folder that ``draft=`` takes; only the head
    was trained, and answers stay the target's."""
    out = tmp_path / "head"
    report = train_draft(out, TINY)
    (phase,) = report["phases"]
    assert phase["phase"] == "head" and phase["steps"] == 2 and phase["trains"] == ["head"]
    assert not (out / "checkpoints").exists()
    model = saccade.load("shapes", str(out), method="head")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    result = model.describe(None, "What is it?", **options)
    plain = saccade.load("shapes", method="ar").describe(None, "What is it?", **options)
    assert result.ids == plain.ids and result.fallback_reason is None
    assert any(each.tokens for each in result.rounds)


@pytest.mark.slow
def test_an_interrupted_training_of_a_head_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Claim: cut after its first step and resumed, a run ends in the same weights."""

    def cut(phase: str, done: int, total: int, loss: float | None) -> None:
        if done >= 2:
            raise KeyboardInterrupt

    settings = Settings(recipe="eagle3", steps=3, batch_size=1, lr_scale=10.0)
    with pytest.raises(KeyboardInterrupt):
        train_draft(tmp_path / "cut", settings, on_progress=cut, save_every_s=0)
    train_draft(tmp_path / "cut", settings, resume=True)
    train_draft(tmp_path / "straight", settings)
    target = load("shapes").backbone
    one, two = (
        head_checkpoints.load_head(str(tmp_path / name), target).module.state_dict()
        for name in ("cut", "straight")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("option", ["draft", "distill", "drop_visual"])
def test_options_of_draft_models_are_refused(option: str, tmp_path: Path) -> None:
    """Claim: options that mean nothing to a head are refused in a sentence, before any step."""
    settings = Settings(recipe="eagle3", **{option: "x" if option == "draft" else 0.5})
    with pytest.raises(OptionError, match="leave it out with eagle3"):
        train_draft(tmp_path / "head", settings)
