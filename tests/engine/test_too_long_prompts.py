"""Claims about prompts longer than the context: refused before anything is computed."""

from __future__ import annotations

import pytest
import torch
from helpers import qwen25

import saccade
from saccade.core.errors import ModelError
from saccade.drafting.shapes import cost_measurement
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_prompt_that_is_too_long_is_refused_before_it_is_read() -> None:
    """Claim: more tokens than the model was made for end in a sentence. Fails if it reads them."""
    target = qwen25()
    longest = int(target.config.get_text_config().max_position_embeddings)
    inputs = {"input_ids": torch.full((1, longest + 1), 5)}
    with pytest.raises(
        ModelError, match=f"has {longest + 1} tokens, and this model reads {longest}"
    ):
        saccade.run(target, inputs, max_new_tokens=1)


def test_nothing_is_timed_at_a_length_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: nor are costs measured for it, which at such a length takes minutes and gigabytes."""
    monkeypatch.setattr(
        cost_measurement, "measure_costs", lambda *_, **__: pytest.fail("costs were measured")
    )
    target = qwen25()
    longest = int(target.config.get_text_config().max_position_embeddings)
    inputs = {"input_ids": torch.full((1, longest + 1), 5)}
    with pytest.raises(ModelError, match="this model reads"):
        saccade.run(target, inputs, draft=qwen25(1), method="auto", max_new_tokens=1)


def test_a_later_turn_that_is_too_long_is_refused() -> None:
    """Claim: the length of the context holds in every turn of a conversation, which goes on after
    the refusal. Fails if only the first turn is looked at."""
    target = Backbone.of(qwen25())
    ids = torch.randint(0, 200, (1, 40), generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch, saccade.Conversation(target) as talk:
        patch.setattr(target, "max_positions", 60)
        first = talk.run({"input_ids": ids}, method="ar", max_new_tokens=2)
        longer = torch.cat([ids, torch.tensor([first.ids]), ids[:, :30]], 1)
        with pytest.raises(ModelError, match="has 72 tokens, and this model reads 60"):
            talk.run({"input_ids": longer}, method="ar", max_new_tokens=2)
        again = talk.run({"input_ids": longer[:, :50]}, method="ar", max_new_tokens=2)
        assert again.reused_tokens
