"""Products of bf16 that read the weights where they are: what they compute, and when they do."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import llama, text_input
from torch.nn.functional import silu

import saccade
from saccade.model import batch_invariant, kernels
from saccade.model.backbone import Backbone
from saccade.model.kernels import Choice, Epilogue, Matrix, compiled
from saccade.model.kernels.compiled import Bf16Unit

UNITS = [
    pytest.param(
        unit,
        marks=pytest.mark.skipif(
            unit not in compiled.bf16_units(), reason=f"no {unit.value} of bf16 here"
        ),
    )
    for unit in Bf16Unit
]
CHOOSING = kernels.choose_products  # before the session's fixture puts a fixed choice there


def _numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.representatives(47)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 6, 16, 17, 33, 70])
@pytest.mark.parametrize("use", Epilogue)
@pytest.mark.parametrize("unit", UNITS)
def test_a_product_is_fp32s_rounded_once(unit, use, rows, threads):
    """Claim: at every number of rows, with every epilogue and by several threads, a product is that
    of fp32 rounded to bf16, where the outputs fill no whole tile too. Fails for a wrong layout, a
    gate of the wrong half, a bias a row too far, or results that are rounded on the way."""
    out, into = 152, 96 if unit is Bf16Unit.TILES else 88  # These inputs fill no vector.
    weight, x = _numbers(out, into, seed=1), _numbers(rows, into, seed=2)
    bias = _numbers(out, seed=3) if use is Epilogue.BIAS else None
    below = _numbers(rows, out, seed=4)
    matrix = Matrix(weight, bias, use)
    matrix.choose(Choice((1,), (unit.value,)))
    exact = x.double() @ weight.double().t()
    torch.set_num_threads(threads)
    try:
        product = matrix.add_to(below, x) if use is Epilogue.ADD else matrix(x)
    finally:
        torch.set_num_threads(1)
    if use is Epilogue.BIAS:
        exact += bias
    elif use is Epilogue.ADD:
        exact += below
    elif use is Epilogue.SILU_GATE:
        exact = silu(exact[:, : out // 2]) * exact[:, out // 2 :]
    assert product.dtype == torch.bfloat16 and product.shape == exact.shape
    # Half of a last place, and what the sums of fp32 are off where terms cancel.
    assert ((product - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@pytest.mark.representatives(8)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("out", [16, 17, 33, 80])
@pytest.mark.parametrize("into", [1536, 1600, 3104, 8960])
@pytest.mark.parametrize("unit", UNITS)
def test_many_inputs_are_added_up_in_parts(unit, into, out, gated):
    """Claim: where the inputs are gone over in parts, and where the outputs fill no unit, a product
    is that of fp32 rounded to bf16, and a row has the same bits in blocks of any size. Fails where
    a part is left out, added twice or begun anew for some rows."""
    weight, x = _numbers(out * (2 if gated else 1), into, seed=1), _numbers(53, into, seed=2)
    if unit is Bf16Unit.VECTORS:
        weight, x = weight[:, : into - 9].contiguous(), x[:, : into - 9].contiguous()
    exact = x.double() @ weight.double().t()
    if gated:
        exact = silu(exact[:, :out]) * exact[:, out:]
    whole = compiled.multiply_bf16(unit, x, weight, None, gated)
    assert ((whole - exact).abs() <= 2**-8 * exact.abs() + 2e-3).all()
    for rows in (1, 2, 5, 6, 7, 11, 13, 48, 49):
        part = compiled.multiply_bf16(unit, x[-rows:].contiguous(), weight, None, gated)
        assert torch.equal(part, whole[-rows:])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(unit, gated):
    """Claim: a row's result is the same bit for bit alone, among others, at every place, and with
    any number of threads. Fails where a sum is split or ordered by the number of rows."""
    weight, x = _numbers(190, 320, seed=1), _numbers(50, 320, seed=2)
    whole = compiled.multiply_bf16(unit, x, weight, gated=gated)
    for rows in (1, 3, 15, 16, 18, 33):
        for start in (0, 7, 50 - rows):
            torch.set_num_threads(1 + rows % 3)
            try:
                part = compiled.multiply_bf16(unit, x[start : start + rows], weight, gated=gated)
            finally:
                torch.set_num_threads(1)
            assert torch.equal(part, whole[start : start + rows])


@pytest.mark.parametrize("unit", UNITS)
def test_no_number_beside_a_weight_is_read(unit):
    """Claim: a weight that lies among NaN in memory has finite products, and nothing is written
    beside the results. Fails for tiles that reach over the last row."""
    among = torch.full((60, 64), float("nan"), dtype=torch.bfloat16)
    among[8:51] = _numbers(43, 64)
    x = _numbers(5, 64, seed=1)
    product = compiled.multiply_bf16(unit, x, among[8:51])
    assert product.isfinite().all()
    assert torch.isnan(among[:8]).all() and torch.isnan(among[51:]).all()


@pytest.mark.parametrize("unit", UNITS)
def test_weights_it_is_not_made_for_are_left_to_torch(unit):
    """Claim: few outputs, weights that are not row after row in memory, and (for tiles) inputs that
    fill no tile are multiplied by torch. Control: others are ours."""
    assert compiled.supports_bf16(unit, _numbers(16, 64))
    assert not compiled.supports_bf16(unit, _numbers(15, 64))
    assert not compiled.supports_bf16(unit, _numbers(30, 64), gated=True)
    assert not compiled.supports_bf16(unit, _numbers(64, 64).t()[:, :32])
    assert compiled.supports_bf16(unit, _numbers(16, 40)) == (unit is Bf16Unit.VECTORS)
    name = unit.value
    assert name in Matrix(_numbers(16, 64)).candidates
    assert name not in Matrix(_numbers(8, 64)).candidates
    assert name not in Matrix(torch.zeros(16, 64)).candidates


def _without_copies(monkeypatch):
    """A machine without memory for copies, on which ours are the quickest."""
    monkeypatch.setattr(kernels, "choose_products", CHOOSING)
    monkeypatch.setattr(kernels.memory, "available_bytes", lambda device: 1000)

    def seconds(calls):
        return {name: 1.0 / (1 + place) for place, name in enumerate(calls)}

    monkeypatch.setattr(kernels, "time_calls", seconds)


@pytest.mark.skipif(not compiled.bf16_units(), reason="no products of bf16 here")
def test_without_memory_for_copies_bf16_is_still_ours(monkeypatch, tmp_path):
    """Claim: a model that leaves no memory for copies of its weights is multiplied where it is, and
    its weights, changed in place, count at once. Fails if bf16 needs a copy, as fp32 does."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    _without_copies(monkeypatch)
    model = copy.deepcopy(llama()).bfloat16()
    fused = Backbone(model).fused
    quickest = compiled.bf16_units()[-1].value
    down = fused.layers[0].down
    assert quickest in down.prepared_kernels and "packed" not in down.prepared_kernels
    x = _numbers(3, down.weight.shape[1])
    before = down(x)
    down.weight.data.neg_()
    assert torch.equal(down(x), -before)


@pytest.mark.skipif(not compiled.bf16_units(), reason="no products of bf16 here")
def test_an_exact_answer_in_bf16_is_plain_decodings():
    """Claim: where bf16 is multiplied by ours, a drafted answer with ``exact`` is plain decoding's,
    and the model passes the trial that says so."""
    target = Backbone(copy.deepcopy(llama()).bfloat16())
    assert compiled.bf16_units()[-1].value in target.fused.layers[0].qkv.prepared_kernels
    assert batch_invariant.is_batch_invariant(target)
    draft = copy.deepcopy(llama(1)).bfloat16()
    plain = saccade.run(target, text_input(1), method="ar", exact=True, max_new_tokens=16)
    drafted = saccade.run(
        target, text_input(1), draft=draft, method="sd", exact=True, max_new_tokens=16
    )
    assert drafted.ids == plain.ids


@pytest.mark.skipif(not compiled.bf16_units(), reason="no products of bf16 here")
def test_a_wrong_product_is_left_alone(monkeypatch, caplog):
    """Claim: a unit that does not compute what torch does is never chosen, and the log says so."""
    compiled.bf16_units.cache_clear()
    right = compiled.multiply_bf16
    monkeypatch.setattr(compiled, "multiply_bf16", lambda *a, **k: right(*a, **k) * 2)
    try:
        assert compiled.bf16_units() == ()
    finally:
        compiled.bf16_units.cache_clear()
    assert "wrong on this processor" in caplog.text
