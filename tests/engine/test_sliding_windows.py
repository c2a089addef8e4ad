"""Claims about models whose cache forgets on its own: they are refused before any work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from helpers import (
    hf_greedy,
    randomize,
    text_input,
)

import saccade
from saccade.core.errors import ModelError
from saccade.model import families, generate_check

pytestmark = pytest.mark.usefixtures("unchecked")


WINDOW = 8


def mistral() -> Any:
    config = hf.MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return randomize(hf.MistralForCausalLM(config), 0)


@pytest.mark.parametrize("method", ["ar", "sd", "std"])
def test_a_cache_that_slides_is_refused_before_any_work(method):
    """Claim: a model whose cache forgets on its own is refused in one sentence, as a target, and
    costs speed alone as a draft. Fails if it runs past its window and answers something."""
    with pytest.raises(ModelError, match="sliding-window") as caught:
        saccade.run(mistral(), text_input(0, 20), draft=mistral(), method=method)
    assert "\n" not in str(caught.value)


def test_control_past_its_window_it_would_answer_wrongly(monkeypatch):
    """Control: with the refusal taken out, tokens beyond the window differ from generate's, so
    there is something to refuse; within the window they do not."""
    monkeypatch.setattr(families, "refuse_unsupported", lambda whole, text: None)
    monkeypatch.setattr(generate_check, "check_against_generate", lambda target: None)
    model = mistral()
    for length, same in ((3, True), (20, False)):
        inputs, count = text_input(1, length), 4
        found = saccade.run(model, inputs, method="ar", max_new_tokens=count).ids
        assert (list(found) == hf_greedy(model, inputs, count)) == same
