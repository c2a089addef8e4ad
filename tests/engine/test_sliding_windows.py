"""Claims about models whose layers see the last tokens alone: they answer past their window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import (
    AMOUNT,
    hf_greedy,
    noisy,
    randomize,
    text_input,
)

import saccade
from saccade.core.errors import ModelError
from saccade.model import generate_check, windowed_attention

pytestmark = pytest.mark.usefixtures("unchecked")


WINDOW = 8


def mistral(window: int = WINDOW) -> Any:
    config = hf.MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=window, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return randomize(hf.MistralForCausalLM(config), 0)


def _no_windows(config: Any, layers: Sequence[int]) -> list[None]:
    return [None for _ in layers]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "std", "lookup"])
def test_answers_past_the_window_are_those_of_generate(method, length):
    """Claim: an answer that leaves the window, and one after a prompt that is longer than it, has
    generate's ids. Fails if a row sees a key too many or one too few."""
    model, inputs, count = mistral(), text_input(1, length), 3 * WINDOW
    draft = noisy(lambda seed: mistral(), 0, AMOUNT)
    result = saccade.run(model, inputs, draft=draft, method=method, max_new_tokens=count)
    assert list(result.ids) == hf_greedy(model, inputs, count)
    assert result.fallback_reason is None
    if method in ("sd", "sd-tree"):
        assert any(each.accepted for each in result.rounds)


def test_control_without_its_window_it_would_answer_wrongly(monkeypatch):
    """Control: where layers see every key, tokens beyond the window differ from generate's, and
    tokens within the window do not."""
    monkeypatch.setattr(
        windowed_attention, "windows_of", lambda config, layers: [None for _ in layers]
    )
    monkeypatch.setattr(generate_check, "check_against_generate", lambda target: None)
    model = mistral()
    for length, same in ((3, True), (20, False)):
        inputs, count = text_input(1, length), 4
        ids = saccade.run(model, inputs, method="ar", max_new_tokens=count).ids
        assert (list(ids) == hf_greedy(model, inputs, count)) == same


def test_a_window_that_is_missed_is_noticed_at_the_first_prompt(monkeypatch):
    """Claim: the comparison with generate refuses a model whose window is shorter than the text of
    that comparison, if it is not followed. Fails if such a model answers, wrongly."""
    monkeypatch.setattr(
        windowed_attention, "windows_of", lambda config, layers: [None for _ in layers]
    )
    with pytest.raises(ModelError, match="other logits"):
        saccade.run(mistral(window=4), text_input(1, 20), method="ar", max_new_tokens=4)
