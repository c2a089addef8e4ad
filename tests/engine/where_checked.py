"""What ``test_typed.py`` runs beside other tests where shapes and types are checked: every method,
and a control."""

from __future__ import annotations

import pytest
import torch
from helpers import answered
from jaxtyping import TypeCheckError

from saccade.core.tree import Tree, add
from saccade.core.verify import residual
from saccade.methods import METHODS

MORE = (
    "sd/shape=sage-live",
    "sd-tree/drafter=self",
    "specvlm/keep=0.1/shape=chain-2/view=random/positions=repacked",
    "specvlm-self/refresh=1",
)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", [*METHODS, *MORE])
def test_what_a_method_calls_gets_and_gives_what_it_says(method):
    """Claim: no call of a method's answer is refused, neither here nor in a draft's process."""
    assert answered("qwen2_5_vl", method, count=12).fallback_reason is None


def test_control_a_wrong_shape_and_a_wrong_type_are_noticed() -> None:
    """Control: a law of two axes, and a token that is a word, are refused where they come in."""
    law = torch.tensor([0.5, 0.5])
    with pytest.raises(TypeCheckError):
        residual(law[None], law)
    with pytest.raises(TypeCheckError):
        add(Tree(), -1, "word")  # type: ignore[arg-type]
