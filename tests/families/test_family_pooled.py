"""TABED's pooled view where projectors take rows one by one, by Hugging Face's modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

import saccade
from lab.checkpoints import Size
from saccade.core.prompt import Prefill, Prompt
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.parallel.child import Job, JobRunner
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.drafting.setup import Setup
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views.baseline_pruning import POOLED, POOLED_AFTER
from saccade.model.backbone import Backbone
from saccade.model.prompt_reader import average_blocks
from saccade.model.session import Session

CASES = [
    ("llava-1.5", "image"),
    ("llava-1.5", "images"),
    ("llava-next", "image"),
    ("llava-next-video", "video"),
    ("llava-onevision", "image"),
    ("llava-onevision", "video"),
    ("llava-onevision", "videos"),
    ("internvl", "image"),
    ("internvl", "video"),
]
WHERE = ("rows and tower", "tower alone", "nothing")  # what draft and target share

pytestmark = pytest.mark.usefixtures("unchecked")


@torch.no_grad()
def by_hand(model: Any, inputs: Any) -> Tensor:
    """projector(avg_pool(what the tower gave it)), [picture, row, dim]: every frame and tile."""
    projector, given = model.base_model.multi_modal_projector, []
    handle = projector.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    model(**inputs, use_cache=False)
    handle.remove()
    (rows,) = given
    pictures, count, dim = rows.shape
    side = round(count**0.5)
    square = rows.transpose(1, 2).reshape(pictures, dim, side, side)
    return projector(avg_pool2d(square, 2).flatten(2).transpose(1, 2))


def halved(rows: Tensor) -> Tensor:
    """OneVision's own pooling of a frame, after the projector."""
    side = round(rows.shape[1] ** 0.5)
    square = rows.transpose(1, 2).reshape(len(rows), -1, side, side)
    small = interpolate(square, size=[-(-side // 2)] * 2, mode="bilinear")
    return small.flatten(2).transpose(1, 2)


def view(prompt: Prompt, kind: Any = POOLED) -> Prompt:
    return kind(Prefill(prompt, None, torch.empty(0)), prompt)


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.representatives(4)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_pooled_is_before_the_projector(family: str, kind: str) -> None:
    """Claim: the pooled rows of every whole square are projector(avg_pool(tower rows)), of
    OneVision's frames what its own pooling makes of those; all rows count from 0.
    Control: pooled after the projector neither the rows nor the positions are these.
    """
    loaded = zoo.member(family)
    inputs = zoo.make_inputs(loaded, kind)
    expected = by_hand(loaded.backbone.model, inputs)
    if family == "llava-onevision" and kind.startswith("video"):
        expected = halved(expected)
    (whole,) = loaded.backbone.prompts(inputs, with_averaged_rows=True)
    before, after = view(whole), view(whole, POOLED_AFTER)

    def squares(prompt: Prompt) -> Tensor:
        """The rows of whole squares: of a picture cut into tiles, only of the one of all of it."""
        tiled = family in ("llava-next", "llava-onevision") and kind == "image"
        rows = prompt.embeds[prompt.visual]
        return rows[prompt.grid[:, 1] == 0] if tiled else rows

    wanted = (
        expected[:1] if len(squares(before)) < expected.shape[0] * expected.shape[1] else expected
    )
    assert close(squares(before), wanted.flatten(0, 1))
    assert not torch.allclose(squares(after), wanted.flatten(0, 1), rtol=0, atol=1e-2)
    assert torch.equal(before.positions, torch.arange(len(before)).expand_as(before.positions))
    assert before.next_position == len(before) < after.next_position == whole.next_position
    assert torch.equal(after.positions, whole.positions[:, after.places])
    assert torch.equal(before.embeds[~before.visual], whole.embeds[~whole.visual])
    assert torch.equal(before.grid, after.grid) and before.media.averaged_rows is None


def pair(share: str, family: str) -> tuple[Backbone, Backbone]:
    target = copy.deepcopy(zoo.member(family).backbone.model)
    if share == "rows and tower":
        draft = copy.deepcopy(zoo.draft_of(family).backbone.model)
    else:
        draft = copy.deepcopy(zoo.member(family, seed=1, size=Size(1, 192, 320)).backbone.model)
    if share == "tower alone":
        draft.base_model.vision_tower.load_state_dict(target.base_model.vision_tower.state_dict())
    return Backbone(target), Backbone(draft)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("share", WHERE)
@pytest.mark.parametrize("family", ["llava-1.5", "llava-onevision"])
def test_what_a_draft_reads(family: str, share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: whatever draft and target share, the draft's session reads its own pooled rows, its
    tower looks once, or not at all where the target's is the same, and the answer is plain
    decoding's. Fails if the target's rows are adopted, or pixels are looked at twice."""
    target, draft = pair(share, family)
    inputs = zoo.make_inputs(zoo.member(family), "image")
    (own,) = draft.prompts(inputs, with_averaged_rows=True)
    plain = saccade.run(target, inputs, method="ar", max_new_tokens=12, do_sample=False)
    read: list[Prompt] = []
    prefill = Session.prefill

    def watched(self: Session, prompts: Any, **more: Any) -> Any:
        read.extend(prompts)
        return prefill(self, prompts, **more)

    looks: list[Any] = []
    layers = draft.model.base_model.vision_tower.get_submodule("encoder.layers")
    hook = layers[0].register_forward_hook(lambda *args: looks.append(None))
    monkeypatch.setattr(Session, "prefill", watched)
    result = saccade.run(
        target, inputs, draft=draft, method="sd/view=pooled", max_new_tokens=12, do_sample=False
    )
    hook.remove()
    assert result.fallback_reason is None and result.ids == plain.ids
    assert len(looks) == (share == "nothing")
    (mine,) = read
    assert close(mine.embeds, view(own).embeds)
    assert torch.equal(mine.positions, view(own).positions)
    assert not draft.model.base_model.multi_modal_projector._forward_pre_hooks


def test_a_draft_in_a_process_of_its_own_looks_for_itself() -> None:
    """Claim: beside the target too the rows are pooled before the projector: the draft is sent the
    inputs, not the target's rows, and its process makes both. Fails if it adopts rows that hold
    nothing of what stood before the projector; ``pooled-after`` adopts them."""
    target, draft = pair("rows and tower", "llava-1.5")
    inputs = zoo.make_inputs(zoo.member("llava-1.5"), "image")
    rules = [Sampling()]
    adopts = {
        kind.name: WorkerDrafter(Setup(target, draft, kind, Chain(3), rules, 8))._shares_rows
        for kind in (POOLED, POOLED_AFTER)
    }
    assert adopts == {"pooled": False, "pooled-after": True}
    child = JobRunner(
        draft, Job(POOLED, rules, draft.vocab, (), 8, Chain(3), None), lambda *args: None
    )
    child.prefill(None, inputs)
    (guide,) = Session(target, rules).prefill(target.prompts(inputs))
    child.ready([guide])
    session = Session(draft, rules)
    session.prefill([view(draft.prompts(inputs, with_averaged_rows=True)[0])])
    child_row, own = (each.score({0: Tree()})[0].logits(-1) for each in (child._session, session))
    assert close(child_row, own)


def test_families_that_merge_there_have_no_such_rows() -> None:
    """Claim: asked of a family whose projector merges patches, or of text, nothing is read twice
    and the view pools afterwards, positions kept. Fails if it is pooled twice or refused."""
    for family, kind in (("qwen2.5-vl", "video"), ("llama", "text")):
        loaded = zoo.member(family)
        inputs = zoo.make_inputs(loaded, kind)
        (whole,) = loaded.backbone.prompts(inputs, with_averaged_rows=True)
        assert whole.media.averaged_rows is None and not loaded.backbone.can_average_rows
        before, after = view(whole), view(whole, POOLED_AFTER)
        assert torch.equal(before.embeds, after.embeds)
        assert torch.equal(before.positions, after.positions)


def test_averaged_rows_are_means_of_blocks() -> None:
    """Claim: each row is the mean of the block it stands in, edges of what they have; a class token
    stays, and what is no square of these sides too. Fails at an odd side, or across pictures."""
    rows = torch.randn(2, 10, 3)
    averages = average_blocks(rows, (3,))
    assert torch.equal(averages[:, 0], rows[:, 0])
    for picture in range(2):
        square, means = (each[picture, 1:].view(3, 3, 3) for each in (rows, averages))
        for h in range(3):
            for w in range(3):
                block = square[h // 2 * 2 :, w // 2 * 2 :][:2, :2].flatten(0, 1)
                torch.testing.assert_close(means[h, w], block.mean(0))
    assert average_blocks(rows, (4,)) is rows
    assert average_blocks(torch.ones(1, 11, 3), (3,)).shape == (1, 11, 3)
