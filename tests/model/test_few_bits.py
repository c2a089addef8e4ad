"""Drafts with rounded weights: what they multiply, whose answer it is, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import llama, needs_fp8_on_cpu, noisy, qwen25, qwen35, text_input, video_input
from torch.nn.functional import silu

import saccade
from saccade.core.errors import ModelError, OptionError
from saccade.drafting import recipe
from saccade.drafting.drafters import ModelDrafter, NoDraft, SelfDrafter
from saccade.drafting.parallel import process
from saccade.inputs import loading
from saccade.methods import resolve
from saccade.model import decoder
from saccade.model.backbone import Backbone
from saccade.model.kernels import Choice, Epilogue, Matrix, few_bits
from saccade.model.kernels.few_bits import FEW_BIT_PRODUCTS, ROUNDINGS, Codes

PRODUCTS = [
    pytest.param(
        name, marks=pytest.mark.skipif(not each.is_available, reason=f"no {name} on this machine")
    )
    for name, each in FEW_BIT_PRODUCTS.items()
]

ON_CPU = [name for name, each in ROUNDINGS.items() if each.device_type == "cpu"]


def _numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "most"), [("int8", 0.012), ("int4", 0.17)])
def test_rounded_weights_are_near_the_weights(name, most):
    """Claim: rounding moves weights by about half a step of their block, a block of zeros stays
    zero, and the largest number of a block is met whatever its sign. Fails for one scale for all
    blocks, or a wrong sign."""
    weight = _numbers(70, 96) * torch.logspace(-2, 2, 70)[:, None]
    weight[3, 32:64] = 0
    weight = weight.bfloat16().float()
    codes = Codes.of(weight.bfloat16(), ROUNDINGS[name])
    rounded = codes.weights()
    assert (rounded[3, 32:64] == 0).all()
    off = (rounded - weight).view(70, 3, 32).norm(dim=-1)
    assert (off <= most * weight.view(70, 3, 32).norm(dim=-1) + 1e-9).all()
    largest = weight.abs().view(-1, 32).argmax(1)
    pairs = rounded.view(-1, 32), weight.view(-1, 32)
    own, exact = (each.gather(1, largest[:, None]) for each in pairs)
    assert torch.allclose(own, exact, rtol=0.01)


@pytest.mark.representatives(35)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize("use", Epilogue)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_the_rounded_weights(name, use, rows, dtype):
    """Claim: with every epilogue, at every number of rows and in both types, a product is that of
    the rounded weights, as far as rows in bytes allow. Fails for halves of bytes that are
    exchanged, outputs in another order, or a shift that is left out."""
    rounding = FEW_BIT_PRODUCTS[name].rounding
    out, into = 192 if name == "int4-torch" else 88, 160
    weight, x = _numbers(out, into, seed=1).to(dtype), _numbers(rows, into, seed=2).to(dtype)
    bias = _numbers(out, seed=3).to(dtype) if use is Epilogue.BIAS else None
    below = _numbers(rows, out, seed=4).to(dtype)
    matrix = Matrix(weight, bias, use, rounding)
    assert name in matrix.candidates
    matrix.choose(Choice((1,), (name,)))
    exact = x.float() @ Codes.of(weight, rounding).weights().t()
    if use is Epilogue.BIAS:
        exact += bias
    elif use is Epilogue.ADD:
        exact += below
    elif use is Epilogue.SILU_GATE:
        exact = silu(exact[:, : out // 2]) * exact[:, out // 2 :]
    product = matrix.add_to(below, x) if use is Epilogue.ADD else matrix(x)
    assert product.dtype == dtype and product.shape == exact.shape
    assert (product - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_whose_inputs_fill_no_block_stay_as_they_are(name):
    """Claim: such a matrix multiplies with its own weight. Control: another is rounded."""
    rounding = FEW_BIT_PRODUCTS[name].rounding
    assert Matrix(_numbers(64, 40), rounding=rounding).candidates == ["plain"]
    assert name in Matrix(_numbers(64, 64), rounding=rounding).candidates


def _weights(model):
    return {name: weight.clone() for name, weight in model.named_parameters()}


@pytest.mark.representatives(2)
@pytest.mark.parametrize("rounding", ON_CPU)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_answer_is_the_targets_whatever_the_draft_is_rounded_to(dtype, own, rounding):
    """Claim: with a rounded draft, or the target as its own, the answer is plain decoding's, drafts
    are accepted, and no weight of either model has another bit. Fails if the target decodes with
    rounded weights, or if rounding writes to them."""
    target, draft = (copy.deepcopy(each).to(dtype) for each in (llama(), noisy(llama, 0, 0.1)))
    before = _weights(target), _weights(draft)
    settings = dict(max_new_tokens=24, exact=dtype != torch.float32)
    plain = saccade.run(target, text_input(1), method="ar", **settings)
    drafted = saccade.run(
        target,
        text_input(1),
        draft=None if own else draft,
        draft_quantize=rounding,
        method="sd",
        **settings,
    )
    assert drafted.ids == plain.ids and drafted.fallback_reason is None
    assert len(drafted.rounds) < len(plain.rounds), "nothing was accepted"
    for model, weights in zip((target, draft), before, strict=True):
        assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    rounded = Backbone.of(target if own else draft).rounded(ROUNDINGS[rounding])
    used = rounded.fused.layers[0].down.prepared_kernels
    assert any(name.startswith(rounding) for name in used), "nothing was rounded"
    assert not any("int" in name for name in Backbone.of(target).fused.head.prepared_kernels)


@pytest.mark.extra
def test_a_video_is_drafted_on_with_rounded_weights_over_the_targets_keys():
    """Claim: with rounded weights and no draft model, methods that draft with a model let the
    target draft over its own keys; a method that prunes them does as well."""
    target = Backbone.of(copy.deepcopy(qwen25()))
    inputs = video_input(0, (1, 4, 4), before=2, after=3)
    plain = saccade.run(target, inputs, method="ar", max_new_tokens=16)
    for method in ("sd", "specvlm", "specvlm-self", "sage", "layerskip", "auto", "std"):
        drafted = saccade.run(
            target, inputs, draft_quantize="int8", method=method, max_new_tokens=16
        )
        assert drafted.ids == plain.ids and drafted.fallback_reason is None, method
    rounded = target.rounded(ROUNDINGS["int8"])
    planned = recipe.plan(resolve("sd"), target, rounded, 64)
    assert planned.drafter is SelfDrafter
    assert recipe.plan(resolve("sd"), target, target, 64).drafter is ModelDrafter
    assert recipe.plan(resolve("ar"), target, rounded, 64).drafter is NoDraft


def test_a_draft_in_a_process_of_its_own_is_rounded_there():
    """Claim: a parallel method's process gets a draft that rounds as here, and the answer is plain
    decoding's. Fails if the rounding is not sent along."""
    target, draft = copy.deepcopy(llama()), noisy(llama, 0, 0.1)
    plain = saccade.run(target, text_input(1), method="ar", max_new_tokens=16)
    drafted = saccade.run(
        target,
        text_input(1),
        draft=draft,
        draft_quantize="int4",
        method="pearl",
        max_new_tokens=16,
    )
    assert drafted.ids == plain.ids and drafted.fallback_reason is None
    assert process._idle[-1].has_model(Backbone.of(draft).rounded(ROUNDINGS["int4"]))


def test_a_rounded_copy_follows_its_model():
    """Claim: a rounded copy is made once, and anew when a weight was changed, in place too; it is
    never taken for another rounding. Fails if drafts go on with weights that are gone."""
    model = copy.deepcopy(llama())
    target = Backbone.of(model)
    rounded = target.rounded(ROUNDINGS["int4"])
    assert target.rounded(ROUNDINGS["int4"]) is rounded.current() is rounded
    assert target.rounded(ROUNDINGS["int8"]) is not rounded
    x = _numbers(2, 128)
    before = rounded.fused.layers[0].qkv(x)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight.neg_()
    newest = rounded.current()
    assert newest is not rounded and newest.rounding == ROUNDINGS["int4"]
    after = newest.fused.layers[0].qkv(x)
    assert torch.allclose(after[:, :128], -before[:, :128], atol=0.2)


def test_loading_rounds_the_draft_or_the_target():
    """Claim: ``saccade.load`` gives a rounded draft beside an untouched target, and without a draft
    the target as its own. Fails if the target is rounded."""
    target, draft = loading.load_pair("shapes", None, draft_quantize="int4")
    assert target.backbone.rounding is None and draft.backbone.rounding == ROUNDINGS["int4"]
    assert draft.backbone.model is not target.backbone.model
    model = saccade.load("shapes-draft", draft_quantize="int8")
    pair = model.pair
    assert pair.draft.backbone.is_rounded_copy_of(pair.target.backbone)


def test_what_cannot_be_rounded_is_refused_in_a_sentence(monkeypatch):
    """Claim: an unknown rounding, FP8, a model that runs by its own modules, and too little memory
    are refused before anything is answered."""
    with pytest.raises(OptionError, match="unknown draft_quantize 'int3'.*int8, int4"):
        saccade.run(llama(), text_input(1), draft_quantize="int3")
    with pytest.raises(OptionError, match="fp8 is not available"):
        saccade.load("shapes", draft_quantize="fp8")
    with pytest.raises(ModelError, match="runs by its own modules"):
        saccade.run(qwen35(), text_input(1), draft_quantize="int4")
    monkeypatch.setattr(decoder.memory, "available_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match="a copy of the weights in int4 takes"):
        Backbone(copy.deepcopy(llama())).rounded(ROUNDINGS["int4"])
    monkeypatch.undo()
    monkeypatch.setattr(few_bits, "FEW_BIT_PRODUCTS", {})
    with pytest.raises(ModelError, match="no products with weights in int4"):
        Backbone(copy.deepcopy(llama())).rounded(ROUNDINGS["int4"])


# -- FP8, on a GPU ---------------------------------------------------------------------------------


@needs_fp8_on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["nothing", "a bias", "rows"])
def test_an_fp8_product_is_that_of_the_rounded_weights(base, dtype):
    """Claim: a product in FP8 is that of weights rounded with a scale for each output and rows with
    a scale for each, on top of a bias or of rows; a row and an output of zeros give zeros. Fails
    for a scale on the wrong side, or a base that is left out. Torch computes it on a CPU too."""
    weight, x = _numbers(96, 160, seed=1), _numbers(5, 160, seed=2)
    weight *= torch.logspace(-4, 4, 96)[:, None]
    x *= torch.logspace(-1, 3, 5)[:, None]
    weight[3], x[0] = 0, 0
    weight, x = weight.to(dtype), x.to(dtype)
    below = {"nothing": None, "a bias": _numbers(96, seed=3), "rows": _numbers(5, 96, seed=4)}[base]
    below = None if below is None else below.to(dtype)
    product = FEW_BIT_PRODUCTS["fp8-scaled"]
    rounded = product.rounded(weight)
    lengths = weight.float().norm(dim=1)
    assert ((rounded - weight.float()).norm(dim=1) <= 0.04 * lengths).all()
    computed = product.multiply(x, product.prepare(weight, False), below)
    exact = x.float() @ rounded.t()
    expected = exact if below is None else exact + below.float()
    assert computed.dtype == dtype and product.rounding.bytes_per_weight == 1
    largest = x.float().norm(dim=1)[:, None] * rounded.norm(dim=1)
    assert ((computed - expected).abs() <= 0.01 * (largest + expected.abs())).all()
