"""Claims about position ids: every verified row is where plain decoding puts its token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    answered,
    hf_greedy,
    noisy,
    qwen25,
    video_input,
)
from one_video import FAMILY, INPUTS
from torch import nn

import saccade
from saccade.core.tree import ROOT
from saccade.model.backbone import Backbone
from saccade.model.generate_check import check_against_generate

# test_greedy.py runs the same code with shapes and types checked.
pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.representatives(1)
@pytest.mark.parametrize("fused", [None, False])
def test_positions_hold_over_many_rounds_of_mixed_acceptance(fused):
    """Claim: 130 tokens over rounds that accept 0 to 5 equal generate. Drift in a position, even
    by one after some refusal, changes the rest of the answer.
    """
    result = answered(FAMILY, "sd", fused=fused, count=130)
    assert list(result.ids) == hf_greedy(qwen25(), INPUTS, 130)
    assert {len(r.accepted) for r in result.rounds} == set(range(6))


def _generated_positions(model: Any, inputs: Any, count: int) -> list[list[int]]:
    """(t, h, w) at which transformers' generate feeds each generated token but the last."""
    fed: list[list[int]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        where = kwargs["position_ids"]
        if where.shape[-1] == 1:
            fed.append(where[-3:, 0, 0].tolist())

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        hf_greedy(model, inputs, count)
    finally:
        handle.remove()
    return fed


@pytest.mark.representatives(1)
@pytest.mark.parametrize("seconds", [0.5, 3.0])
@pytest.mark.parametrize("method", ["sd", "sd-tree"])
def test_verified_rows_stand_where_generate_puts_them(method, seconds, monkeypatch):
    """Claim: every row of every verification is at the position at which plain generate feeds the
    token of its depth, on all three axes (the video shifts them by its own delta).
    """
    model, inputs = copy.deepcopy(qwen25()), video_input(0, seconds=seconds)
    expected = _generated_positions(model, inputs, 25)
    assert expected[0] != [inputs["input_ids"].shape[1]] * 3, "the video shifts nothing"
    target = Backbone(model)
    check_against_generate(target)  # whose forwards are not the answer's
    seen: list[list[list[int]]] = []
    forward = target.forward

    def spy(embeds: torch.Tensor, positions: Any, *rest: Any, **named: Any) -> torch.Tensor:
        axes = torch.as_tensor(positions).expand(target.axes, -1)  # a list: text, alike on each
        seen.append(axes.T.tolist())
        return forward(embeds, positions, *rest, **named)

    monkeypatch.setattr(target, "forward", spy)
    stream = saccade.stream(
        target, inputs, draft=noisy(qwen25, 0, 0.05), method=method, max_new_tokens=20
    )
    assert next(stream).opening and len(seen) == 1, "the prefill gives the first token"
    generated = 1
    for count, round in enumerate(stream):
        depths: list[int] = []
        for parent in round.tree.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        rows = [generated - 1] + [generated + depth for depth in depths]
        assert seen[-1] == [expected[row] for row in rows]
        assert len(seen) == count + 2, "one prefill, then one forward a round"
        generated += len(round.emitted)


def test_two_interleaved_streams_keep_their_own_positions():
    """Claim: two prompts with different rope deltas, decoded turn by turn on one model object,
    answer as alone. Positions kept on the module would be the other prompt's.
    """
    model = qwen25()
    several = [video_input(0, seconds=0.5), video_input(1, (4, 6, 4), before=9, seconds=2.0)]
    alone = [hf_greedy(model, inputs, 24) for inputs in several]
    draft = noisy(qwen25, 0, 0.05)
    streams = [
        saccade.stream(model, inputs, draft=draft, method="sd", max_new_tokens=24)
        for inputs in several
    ]
    live = list(streams)
    while live:
        live = [stream for stream in live if next(stream, None) is not None]
    assert [list(stream.results[0].ids) for stream in streams] == alone
