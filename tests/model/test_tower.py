"""Vision towers by quick kernels: what they give is Hugging Face's, their modules stay whole."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import COMPILED, FAMILIES, input_for, qwen25, video_input
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from saccade.core.errors import OptionError
from saccade.core.home import MeasurementFile
from saccade.model import kernels
from saccade.model.backbone import Backbone
from saccade.model.kernels import Choice, Matrix, compiled, tower
from saccade.model.kernels.tower import OutsideKernels


@pytest.fixture
def packed(monkeypatch):
    """oneDNN's products win everywhere, and tell that they were asked."""
    calls = []
    called = Matrix.__call__
    monkeypatch.setattr(
        kernels, "choose_products", lambda matrices: [Choice((1,), ("packed",))] * len(matrices)
    )
    monkeypatch.setattr(
        Matrix, "__call__", lambda matrix, x: calls.append(matrix) or called(matrix, x)
    )
    return calls


def _eyes(model):
    decoder = {*model.get_decoder().modules(), model.get_output_embeddings()}
    own = [module for module in model.modules() if module not in decoder]
    return [module for module in own if type(module) in (nn.Linear, nn.Conv3d)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "llava_onevision"])
def test_what_a_tower_sees_is_what_its_modules_see(family, packed):
    """Claim: prompts read by other kernels are Hugging Face's to rounding, patches included, and
    every module multiplies with its own weights afterwards. Control: the kernels were asked."""
    model = copy.deepcopy(FAMILIES[family]())
    inputs = input_for(family, 1)
    with torch.no_grad():
        exact = model(**inputs).logits[0, -1]
    ours = Backbone(model)
    (prompt,) = ours.prompts(inputs)
    assert len({*packed}) >= len(_eyes(model)) - 1  # the head of a projector may stand idle
    assert not any("forward" in vars(module) for module in model.modules())
    seen = ours.model(**inputs).logits[0, -1]
    assert torch.equal(seen, exact)
    own = Backbone(model)
    own._outside_kernels = OutsideKernels(nn.Module(), nn.Module(), nn.Module())
    (plain,) = own.prompts(inputs)
    assert (prompt.embeds - plain.embeds).abs().max() < 1e-4 * plain.embeds.abs().max()


@pytest.mark.representatives(3)
@COMPILED
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "llava_onevision"])
@pytest.mark.parametrize("ours", [True, False])
def test_a_towers_attention_is_by_the_quicker_kernel(family, ours, monkeypatch):
    """Claim: where ours took fewer seconds a tower attends by it, and sees what it saw; where it
    took more, by Hugging Face's; the least of three measurements counts, and no fourth is made.
    Everybody else's attention is untouched before and after. Fails if a row sees what stands before
    it alone, or if the first measurement, which a busy moment spoilt here, decides."""
    theirs, attend_calls, timed = ALL_ATTENTION_FUNCTIONS["sdpa"], [], []
    model, inputs = copy.deepcopy(FAMILIES[family]()), input_for(family, 1)
    monkeypatch.setattr(kernels, "_MEASUREMENTS", MeasurementFile(f"{family}{ours}"))
    seconds = {"ours": 2.0 - ours, "theirs": 1.5}
    spoilt = seconds | {"ours" if ours else "theirs": 9.0}

    def quickest(calls):
        timed.append({*calls})
        return seconds if timed[1:] else spoilt

    monkeypatch.setattr(kernels, "time_calls", quickest)
    called = compiled.attend
    monkeypatch.setattr(compiled, "attend", lambda *given: attend_calls.append(1) or called(*given))
    (prompts, *_) = Backbone(model).prompts(inputs)
    assert bool(attend_calls) is not ours
    attend_calls.clear()
    prompts = [prompts, *(Backbone(model).prompts(inputs)[0] for _ in range(3))]
    assert bool(attend_calls) is ours and timed == [{"ours", "theirs"}] * 3
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    own = Backbone(model)
    own._outside_kernels = OutsideKernels(nn.Module(), nn.Module(), nn.Module())
    (plain,) = own.prompts(inputs)
    assert all((each.embeds - plain.embeds).abs().max() < 1e-5 for each in prompts)


@COMPILED
def test_attention_that_is_special_stays_theirs():
    """Claim: what is masked, causal, dropped out or of another type is Hugging Face's to compute,
    and so is what comes with names that we do not know. Control: the plain one is not."""
    tower = OutsideKernels(nn.Module(), nn.Module(), nn.Module())
    tower._is_ours_quicker = {(2, 2, 16, 3): True}
    module, (q, k, v) = nn.Module(), torch.randn(3, 1, 2, 5, 16)

    def by_theirs(dtype=torch.float32, mask=None, **named):
        mixed = torch.randn(1, 5, 2, 16)
        given = (each.to(dtype) for each in (q, k, v))
        output, _ = tower._attend(lambda *a, **b: (mixed, None), module, *given, mask, **named)
        return output is mixed

    assert not by_theirs(is_causal=False) and not by_theirs(
        is_causal=False, dropout=0.0, extra=None
    )
    assert by_theirs() and by_theirs(is_causal=True)  # a module without a word is causal there
    assert by_theirs(is_causal=False, mask=torch.ones(5, 5)) and by_theirs(is_causal=False, extra=1)
    assert by_theirs(torch.bfloat16, is_causal=False) and by_theirs(is_causal=False, dropout=0.1)


def test_a_prompt_that_fails_leaves_the_modules_as_they_were(packed):
    """Claim: an error while a tower looks takes nothing with it."""
    model = copy.deepcopy(qwen25())
    ours, inputs = Backbone(model), video_input(1)
    grid = next(name for name in inputs if name.endswith("grid_thw"))
    with pytest.raises(OptionError, match="do not belong together"):
        ours.prompts({**inputs, grid: inputs[grid] + 1})
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_towers_weights_changed_in_place_count_from_the_next_prompt_on(packed):
    """Claim: copies follow their weights. Control: the change can be seen."""
    model = copy.deepcopy(qwen25())
    ours, inputs = Backbone(model), video_input(1)
    (before,) = ours.prompts(inputs)
    for module in _eyes(model):
        module.weight.data *= 1.1
    (after,) = ours.prompts(inputs)
    (fresh,) = Backbone(model).prompts(inputs)
    assert torch.equal(after.embeds, fresh.embeds)
    assert (after.embeds - before.embeds).abs().max() > 1e-3


def test_a_module_that_somebody_wrapped_is_left_alone(packed):
    """Claim: a forward of someone else's is neither replaced nor lost."""
    model = copy.deepcopy(qwen25())
    module = next(each for each in _eyes(model) if type(each) is nn.Linear)
    own = module.forward
    module.forward = lambda x: own(x) * 2
    mine = module.forward
    ours = Backbone(model)
    ours.prompts(video_input(1))
    assert module.forward is mine
    assert all(matrix.weight.data_ptr() != module.weight.data_ptr() for matrix in packed)


def test_a_convolution_over_pictures_stays_one(packed):
    """Claim: only patches as large as the kernel are a product. Control: those are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)))
    tower = OutsideKernels(model, nn.Module(), nn.Module())
    patches, picture = torch.randn(5, 3, 2, 4, 4), torch.randn(1, 3, 4, 8, 8)
    with torch.no_grad():
        for x, products in ((patches, 1), (picture, 0)):
            packed.clear()
            with tower.use_quickest_kernels():
                output = model(x)
            assert len(packed) == products
            assert output.shape == model(x).shape
            assert torch.allclose(output, model(x), atol=1e-5)


@pytest.mark.parametrize("sizes", [(12, 3), (16, 20), (5, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_padded_sizes_multiply_the_same(sizes, bias):
    """Claim: a linear module over sizes that are padded to whole blocks gives what it gives."""
    module = nn.Linear(*sizes, bias=bias)
    x = torch.randn(2, 7, sizes[0])
    assert torch.allclose(tower._aligned_forward(module)(x), module(x), atol=1e-6)
    assert tower._has_unaligned_sizes(module)
    assert not tower._has_unaligned_sizes(nn.Linear(16, 24))


def test_only_a_gpu_pads_and_the_modules_stay_as_they_were(monkeypatch):
    """Claim: sizes are padded where the weights are halves on a GPU, while a prompt is read and not
    after it, and not in a module that somebody changed. Fails if a hook of the user's is passed
    over."""
    model = copy.deepcopy(qwen25())
    layers = [nn.Linear(12, 20), nn.Linear(20, 16)]
    model.model.visual.more = nn.ModuleList(layers)
    own = layers[1].forward
    layers[1].forward = lambda x: own(x) + 1
    towers = OutsideKernels(model, model.get_decoder(), model.get_output_embeddings())
    padded: list[nn.Module] = []
    monkeypatch.setattr(tower, "_aligned_forward", lambda module: padded.append(module) or own)
    with towers.use_quickest_kernels():
        assert padded == []
    monkeypatch.setattr(tower, "_is_half_on_gpu", lambda weight: True)
    with towers.use_quickest_kernels():
        assert layers[0] in padded and layers[1] not in padded
    assert "forward" not in vars(layers[0]) and layers[1](torch.zeros(1, 20)).shape == (1, 16)
