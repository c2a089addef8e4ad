"""Claims about the sizes of models that are counted from their configs alone."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM

from saccade.inputs.footprint import footprint

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts_per_tok=2,
)


@pytest.mark.parametrize(
    ("kind", "count_name"),
    [
        ("Glm4MoeConfig", "n_routed_experts"),
        ("Qwen3MoeConfig", "num_experts"),
        ("MixtralConfig", "num_local_experts"),
    ],
)
def test_a_token_uses_the_experts_that_the_config_selects(kind: str, count_name: str):
    """Claim: of the weights of experts only the selected share counts for a token, whatever the
    family calls their number. Fails if all experts count."""
    config = getattr(transformers, kind)(**SIZES, **{count_name: 8})
    model = AutoModelForCausalLM.from_config(config)
    layers = model.model.layers
    experts = sum(each.numel() for name, each in layers.named_parameters() if ".experts." in name)
    assert experts > 0
    rest = sum(each.numel() for each in layers.parameters()) - experts
    expected = rest + experts * 2 // 8 + model.lm_head.weight.numel()
    assert footprint(config).weights_per_token == expected
