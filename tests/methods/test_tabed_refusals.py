"""TABED's refusals: an ensemble that cannot be is refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from helpers import (
    Letters,
    answered,
    backbone,
    noisy,
    qwen25,
)
from tabed_by_hand import FAMILIES, METHODS, captions, truth

import saccade
from saccade.core.errors import MethodError, OptionError
from saccade.drafting.ensemble import Ensemble
from saccade.drafting.views.basic import Several
from saccade.methods import resolve

IMPOSSIBLE = {
    "one view": "tabed/view=full",
    "no view but one": "tabed/view=text",
    "weights without an ensemble": "sd/weights=kl",
    "an empty window": "tabed/weights=kl-0",
    "unknown weights": "tabed/weights=hope",
    "an ensemble of one view": "sd/drafter=ensemble",
    "the target's own keys": "tabed/view=full+per-head",
    "two views of the target": "tabed/drafter=self",
    "another process": "tabed/schedule=parallel",
}


def is_a_sentence(message: str) -> bool:
    return len(message) > 20 and "\n" not in message and ". " not in message


@pytest.mark.parametrize("name", list(IMPOSSIBLE))
def test_an_impossible_ensemble_is_refused_in_a_sentence(name):
    """Claim: what cannot be is refused when it is named. Fails if it resolves, or explains badly.

    The control: what can be, resolves.
    """
    with pytest.raises(MethodError) as caught:
        resolve(IMPOSSIBLE[name])
    assert is_a_sentence(str(caught.value))
    for possible in (*METHODS, "sd/view=full+text", "tabed-mt/view=full+text+pooled"):
        assert isinstance(resolve(possible).drafter, Ensemble)


@pytest.mark.parametrize(
    "name", ["tabed/keep=0.1", "tabed/view=specvlm+text/keep=0.5", "tabed-mt/weights=equal-4"]
)
def test_an_override_does_something_or_is_refused(name):
    """Claim: no override is taken and then ignored. Fails if it resolves to the same ensemble."""
    base = "/".join(part for part in name.split("/") if not part.startswith(("keep", "weights")))
    try:
        changed = resolve(name)
    except MethodError:
        return
    plain = resolve(base)
    assert isinstance(changed.view, Several) and isinstance(plain.view, Several)
    assert (changed.view.views, changed.drafter) != (plain.view.views, plain.drafter)


@pytest.mark.parametrize(
    ("method", "given", "option"),
    [
        ("tabed", {}, "tokenizer"),
        ("tabed-mtcp", {"tokenizer": Letters()}, "captioner"),
        ("tabed-mtcp", {"captioner": captions}, "tokenizer"),
        ("sd/view=text", {}, "tokenizer"),
        ("sd/view=caption", {"tokenizer": Letters()}, "captioner"),
    ],
)
def test_words_that_cannot_be_written_are_asked_for(method, given, option):
    """Claim: a missing tokenizer or captioner is named before any work, in a sentence.

    Fails if it surfaces later, as a draft that gave up.
    """
    with pytest.raises(OptionError, match=f"{option}=") as caught:
        answered("qwen2_5_vl", method, count=4, **{"tokenizer": None, "captioner": None, **given})
    assert is_a_sentence(str(caught.value))


def test_a_captioner_that_fails_costs_speed_only():
    """Claim: a captioner that raises, or tells too few captions, ends drafting, not the answer."""

    def silent(inputs: Mapping[str, Any]) -> list[str]:
        return []

    def broken(inputs: Mapping[str, Any]) -> list[str]:
        raise RuntimeError("no caption today")

    inputs = FAMILIES["qwen2_5_vl"][1](0)
    for captioner in (silent, broken):
        result = saccade.run(
            backbone(qwen25(0)),
            inputs,
            draft=backbone(noisy(qwen25, 0, 0.1)),
            method="tabed-mtcp",
            tokenizer=Letters(),
            captioner=captioner,
            max_new_tokens=8,
            do_sample=False,
        )
        assert result.fallback_reason is not None
        assert list(result.ids) == truth("qwen2_5_vl")[:8]
