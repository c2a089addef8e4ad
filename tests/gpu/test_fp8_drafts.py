"""Claims about drafts in FP8 on a GPU, over a pretended one; torch multiplies FP8 on a CPU too."""

from __future__ import annotations

from collections.abc import Iterator

import budgets
import pytest
import torch
from helpers import needs_fp8_on_cpu, truth
from pretended import pretend_gpus

from saccade.core.errors import OptionError
from saccade.inputs import loading
from saccade.model.kernels import few_bits
from saccade.model.kernels.few_bits import ROUNDINGS


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    """A trial product on a pretended GPU says nothing about this machine, nor the other way."""
    few_bits._is_correct.cache_clear()
    yield
    few_bits._is_correct.cache_clear()


@needs_fp8_on_cpu
def test_fp8_is_refused_where_no_unit_multiplies_it(monkeypatch):
    """Claim: on a CPU, and on a GPU without FP8, ``draft_quantize="fp8"`` is refused by name before
    a weight is read; on a GPU that has it, it is not."""
    with pretend_gpus(), torch.no_grad():
        place = torch.device("cuda:0")
        loading.check_draft_quantize("fp8", place, is_own=True)
        with pytest.raises(OptionError, match="int8 is not available on cuda:0.*use fp8"):
            loading.check_draft_quantize("int8", place, is_own=True)
        loading.check_draft_quantize("int8", place, is_own=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        with pytest.raises(OptionError, match="does not multiply FP8.*8.9"):
            loading.check_draft_quantize("fp8", place, is_own=False)
    with pytest.raises(OptionError, match="fp8 is not available on cpu.*use int8, int4"):
        loading.check_draft_quantize("fp8", torch.device("cpu"), is_own=False)
    on_cpu = [each.name for each in few_bits.roundings_on(torch.device("cpu"))]
    assert on_cpu == ["int8", "int4"]


@needs_fp8_on_cpu
@pytest.mark.representatives(1)
@pytest.mark.parametrize("own", [True, False])
def test_an_answer_with_an_fp8_draft_on_a_gpu_is_the_targets(own):
    """Claim: on a GPU with FP8 a draft in FP8, or the target as its own, multiplies few rows with
    rounded weights in captured steps, drafts are accepted, and the answer is plain decoding's.
    Fails if the target decodes with rounded weights, or if nothing is rounded."""
    expected = truth("qwen2_5_vl", 0, budgets.TOKENS)
    with pretend_gpus() as record, torch.no_grad():
        target, draft = budgets.pair()
        rounded = (target if own else draft).rounded(ROUNDINGS["fp8"])
        counted = budgets.answer(record, target, rounded, "sd")
        assert counted.ids == expected and counted.fallback is None and record.errors == []
        assert rounded.fused.layers[0].down.prepared_kernels == {"plain", "fp8-scaled"}
        assert target.fused.layers[0].down.prepared_kernels == {"plain"}
    assert counted.counts["replay"] > 0


def test_fp8_is_available_on_the_gpus_that_have_it(monkeypatch):
    """Claim: on a machine with GPUs of two kinds, only those that multiply FP8 are said to. Fails
    if the current GPU stands for all."""
    with pretend_gpus(2):
        kinds = {0: (9, 0), 1: (8, 0), None: (9, 0)}
        monkeypatch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda device=None: kinds[None if device is None else device.index],
        )
        rounding = few_bits.rounding_named("fp8")
        monkeypatch.setattr(few_bits, "few_bit_products", lambda rounding: {"fp8": object()})
        available = [rounding.is_available_on(torch.device("cuda", n)) for n in range(2)]
    assert available == [True, False]
