"""Claims about outputs of vision towers that are stored: what a model reads of them stays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from saccade.model.vision_cache import ConversationVision, MediaCall, run_new_media


@dataclass
class TowerOutput(ModelOutput):
    """Declares one field of the two that the tower below sets."""

    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


def read_pictures(pixel_values: Tensor) -> TowerOutput:
    """A tower as some models of transformers 5.17 are."""
    rows = pixel_values.flatten(1)
    output = TowerOutput(last_hidden_state=rows, hidden_states=(rows,))
    output.pooler_output = tuple(rows[:, None] * 2)
    return output


def test_a_field_that_no_class_declares_is_stored_and_joined():
    """Claim: pictures that were read before and one that is new give what all give together, in
    declared fields and in others; what no language model reads is left out."""
    store = ConversationVision()
    pictures = torch.randn(3, 3, 2, 2, generator=torch.Generator().manual_seed(0))

    def read(values: Tensor) -> TowerOutput:
        call = MediaCall.of(read_pictures, (values,), {})
        assert call is not None
        return run_new_media(store, ("tower",), call)

    read(pictures[:2])
    output, expected = read(pictures), read_pictures(pictures)
    assert torch.equal(output.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(torch.cat(output.pooler_output), torch.cat(expected.pooler_output))
    assert output.hidden_states is None
    assert len(store._outputs) == 4  # Two outputs, and for each where it begins.
