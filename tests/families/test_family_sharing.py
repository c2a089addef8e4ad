"""One run of the vision tower for two models: where it may be shared, where not, what stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import saccade
from lab.checkpoints import Size
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs, Prompt
from saccade.drafting.drafters import ModelDrafter
from saccade.model.backbone import Backbone

COUNT = 16
FAMILIES = ("llava-1.5", "llava-next", "llava-onevision")
PAIRS = [(family, kind) for family in FAMILIES for kind in zoo.kinds(family)]

pytestmark = pytest.mark.usefixtures("unchecked")


def tower(backbone: Backbone) -> nn.Module:
    return backbone.model.base_model.vision_tower


def sharing(family: str) -> tuple[Backbone, Backbone]:
    """A target, and a wider draft with the target's tower before a projector of its own."""
    target = copy.deepcopy(zoo.member(family).backbone.model)
    draft = copy.deepcopy(zoo.member(family, seed=1, size=Size(1, 192, 320)).backbone.model)
    draft.base_model.vision_tower.load_state_dict(target.base_model.vision_tower.state_dict())
    return Backbone(target), Backbone(draft)


@contextmanager
def counted(backbone: Backbone) -> Iterator[list[str]]:
    """Which layers of the vision tower run meanwhile."""
    ran: list[str] = []
    layers = tower(backbone).get_submodule("encoder.layers")
    hooks = [
        layer.register_forward_hook(lambda *args, name=name: ran.append(name))
        for name, layer in layers.named_children()
    ]
    assert hooks
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def drafted(patch: pytest.MonkeyPatch) -> Iterator[list[Prompt]]:
    """The prompts a draft ends up with, before its view."""
    seen: list[Prompt] = []
    look = ModelDrafter._draft_prompts

    def watched(self: ModelDrafter, prefills: Any) -> list[Prompt]:
        prompts = look(self, prefills)
        seen.extend(prompts)
        return prompts

    with patch.context() as inner:
        inner.setattr(ModelDrafter, "_draft_prompts", watched)
        yield seen


def run(target: Backbone, draft: Backbone, inputs: Inputs, method: str = "sd", **more: Any) -> Any:
    return saccade.run(
        target, inputs, draft=draft, method=method, max_new_tokens=COUNT, do_sample=False, **more
    )


def alike(one: Prompt, other: Prompt) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("embeds", "positions", "visual", "fixed", "grid")
    )


def bare(backbone: Backbone) -> bool:
    """Whether nothing of ours is left on the tower."""
    module = tower(backbone)
    return not module._forward_hooks and "forward" not in vars(module)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_equal_towers_before_other_projectors(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a draft with the target's very tower and another projector runs none of the tower's
    layers, reads exactly what its own eyes would give, and the answer is plain decoding's.
    Fails if the tower runs twice, or what it gave is projected by the wrong model."""
    target, draft = sharing(family)
    assert draft.shares_vision_with(target) and not draft.shares_rows_with(target)
    inputs = zoo.make_inputs(zoo.member(family), kind)
    own = draft.prompts(inputs)
    plain = run(target, draft, inputs, "ar")
    with counted(draft) as ran, drafted(monkeypatch) as read:
        result = run(target, draft, inputs)
    assert result.fallback_reason is None and result.ids == plain.ids
    assert ran == [], "the draft looked for itself"
    assert len(read) == 1 and alike(read[0], own[0])
    assert bare(target) and bare(draft)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_control_one_other_weight_is_another_tower(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: with one number of its tower changed, the draft runs every layer of it, and still
    reads what its own eyes give. Fails if towers are taken for equal by shape or by name."""
    target, draft = sharing(family)
    with torch.no_grad():
        next(tower(draft).parameters()).view(-1)[0] += 1
    changed = Backbone(draft.model)
    assert not changed.shares_vision_with(target)
    inputs = zoo.make_inputs(zoo.member(family), "image")
    own = changed.prompts(inputs)
    with counted(changed) as ran, drafted(monkeypatch) as read:
        result = run(target, changed, inputs)
    assert result.fallback_reason is None
    assert ran and alike(read[0], own[0])


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_looks_for_itself_after_the_first_token(family: str) -> None:
    """Claim: until the first token is told no layer of the draft's own tower runs, then all of them
    do, once; where the first token is the last, none ever. Fails if the first token waits for a
    draft's eyes."""
    target, draft = sharing(family)
    with torch.no_grad():
        next(tower(draft).parameters()).view(-1)[0] += 1
    changed, inputs = Backbone(draft.model), zoo.make_inputs(zoo.member(family), "image")
    with counted(changed) as ran:
        settings = dict(draft=changed, method="sd", do_sample=False)
        stream = saccade.stream(target, inputs, max_new_tokens=COUNT, **settings)
        assert next(iter(stream)).opening and ran == []
        stream.finish()
        layers = len(list(tower(draft).get_submodule("encoder.layers").children()))
        assert len(ran) % layers == 0 and len({*ran}) == layers
        read = len(ran)
        saccade.run(target, inputs, max_new_tokens=1, **settings)
        assert len(ran) == read


@pytest.mark.parametrize("family", FAMILIES)
def test_control_what_is_shown_is_what_is_read(family: str) -> None:
    """Claim: a draft shown another picture's features as those of its own pixels reads that other
    picture; shown them as what they are, it looks for itself. Fails if what it is shown is ignored,
    so that the tests above compare a model with itself, or taken for the wrong pixels."""
    target, draft = sharing(family)
    inputs, other = (
        zoo.read(zoo.member(family), zoo.Media("what?", (zoo.picture(56, 56, seed),)))
        for seed in (1, 2)
    )
    seen: list[list[Any]] = []
    for each in (inputs, other):
        seen.append([])
        handle = target.record_vision(seen[-1])
        target.prompts(each)
        handle.remove()
    swapped = [(pixels, given) for (pixels, _), (_, given) in zip(*seen, strict=True)]
    mine, theirs = draft.prompts(inputs)[0], draft.prompts(other)[0]
    assert not alike(mine, theirs)
    assert alike(draft.prompts(inputs, swapped)[0], theirs)
    assert alike(draft.prompts(inputs, seen[1])[0], mine)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("keep", [False, True])
def test_after_a_failure_no_hook_stays(
    family: str, broken: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: whichever model breaks while it reads, also in a conversation, neither tower keeps
    anything of ours. Fails if a hook goes on listening and holds what every later answer saw."""
    target, draft = sharing(family)
    inputs = zoo.make_inputs(zoo.member(family), "image")
    model = (target if broken == "target" else draft).model

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise ValueError("out of order")

    with monkeypatch.context() as patch:
        patch.setattr(model.base_model.multi_modal_projector, "forward", breaks)
        stream = saccade.stream(
            target, inputs, draft=draft, method="sd", max_new_tokens=4, do_sample=False, keep=keep
        )
        if broken == "target":
            with pytest.raises(OptionError, match="out of order"):
                list(stream)
        else:
            list(stream)
            assert "out of order" in str(stream.results[0].fallback_reason)
    assert bare(target) and bare(draft)
    assert run(target, draft, inputs).fallback_reason is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_towers_and_projectors_are_adopted(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: where projectors are equal too, the draft is never asked to read the inputs: it takes
    the target's rows, which are those its own eyes would give. Fails at a second vision run."""
    target = Backbone(copy.deepcopy(zoo.member(family).backbone.model))
    draft = Backbone(copy.deepcopy(zoo.draft_of(family).backbone.model))
    assert draft.shares_rows_with(target)
    inputs = zoo.make_inputs(zoo.member(family), "image")
    own = draft.prompts(inputs)
    with counted(draft) as ran, drafted(monkeypatch) as read, monkeypatch.context() as patch:
        prompts = Backbone.prompts

        def watched(self: Backbone, *args: Any, **options: Any) -> list[Prompt]:
            assert self is not draft, "the draft read the inputs"
            return prompts(self, *args, **options)

        patch.setattr(Backbone, "prompts", watched)
        result = run(target, draft, inputs)
    assert result.fallback_reason is None and zoo.tally(result)["accepted"]
    assert not ran and alike(read[0], own[0]) and bare(target)


def test_a_draft_with_inputs_of_its_own_is_not_shown_the_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: with equal towers but pixels prepared differently (tiles against one square), the
    draft still reads what its own eyes make of its own inputs.
    Fails if it projects features of the target's pixels."""
    target, draft = zoo.member("llava-next"), zoo.member("llava-1.5", seed=1)
    model = copy.deepcopy(draft.backbone.model)
    eyes = tower(target.backbone).state_dict()
    model.base_model.vision_tower.load_state_dict(eyes)
    backbone = Backbone(model)
    assert backbone.shares_vision_with(target.backbone)
    media = zoo.draw("image", 0)
    inputs, its = zoo.read(target, media), zoo.read(draft, media)
    own = backbone.prompts(its)
    with drafted(monkeypatch) as read:
        result = run(target.backbone, backbone, inputs, draft_inputs=its)
    assert result.fallback_reason is None
    assert alike(read[0], own[0])
