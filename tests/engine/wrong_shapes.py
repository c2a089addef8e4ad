"""A control of ``test_typed.py``, which runs it where shapes and types are checked."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from saccade.core.tree import Tree, add
from saccade.core.verify import residual


def test_control_a_wrong_shape_and_a_wrong_type_are_noticed() -> None:
    """Control: a law of two axes, and a token that is a word, are refused where they come in."""
    law = torch.tensor([0.5, 0.5])
    with pytest.raises(TypeCheckError):
        residual(law[None], law)
    with pytest.raises(TypeCheckError):
        add(Tree(), -1, "word")  # type: ignore[arg-type]
