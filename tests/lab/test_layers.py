"""Claims about the comparison of captured steps: every rival runs, and computes the same."""

from __future__ import annotations

import pytest
from helpers import FAMILIES, backbone

from lab.hardware.layers import measure_step_variants
from saccade.model.kernels import few_rows


@pytest.mark.parametrize("ours", [pytest.param(True, marks=pytest.mark.slow), False])
def test_every_rival_computes_the_same(ours, monkeypatch):
    """Claim: kernels (where there are any), torch and compiled layers are each timed at each number
    of rows, over the same keys, and their logits are an ordinary forward's to 1e-4. Fails if a
    rival is another one in disguise: the compiler is called, and the kernels by their own alone."""
    model = backbone(FAMILIES["qwen2_5_vl"]())
    pytest.importorskip(few_rows.TRITON)
    kernels = few_rows.Kernels(
        model.heads, model.kv_heads, model.head_dim, model.dtype, model.device
    )
    monkeypatch.setattr(model, "few_row_kernels", kernels if ours else None)
    monkeypatch.setattr(model, "graphs", {})
    compiled, launched = [], []
    attend = few_rows.FewRowAttention.rotate_and_attend
    monkeypatch.setattr(
        few_rows.FewRowAttention,
        "rotate_and_attend",
        lambda *given: launched.append(1) or attend(*given),
    )

    def compiler(work):
        return lambda *given, **named: compiled.append(1) or work(*given, **named)

    timings = [*measure_step_variants(model, 70, (1, 3), repeat=1, compiler=compiler)]
    names = [*(["kernels"] if ours else []), "torch", "compiled"]
    assert [(each.kind, each.rows) for each in timings] == [(n, r) for r in (1, 3) for n in names]
    assert all(each.difference < 1e-4 and each.milliseconds > 0 for each in timings)
    assert compiled and bool(launched) is ours
