"""Claims about the hybrid pair: what it begins with, its recurrence, its commands and its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import Call
from written_out import Embedded

from lab.studies import hybrid, hybrid_page
from lab.training import agreement, build
from lab.training.hybrid_model import (
    TARGET_PATTERN,
    TARGET_SOURCES,
    convert,
    gated_delta_rule,
    run_decoder,
)
from lab.training.model import HIDDEN
from saccade.engine.generate import run
from saccade.inputs import ask
from saccade.inputs.checkpoints import EMBEDDED


@pytest.mark.parametrize("length", [1, 64, 150])
def test_the_delta_rule_is_its_recurrence(length: int) -> None:
    """Claim: chunks solved at once give what the state gives that changes token by token.

    Fails if a chunk forgets the state before it, or if decay or step are taken one token late.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, length, 3, 8)
    log_decay, beta = -torch.rand(2, length, 3), torch.rand(2, length, 3)
    unit = [torch.nn.functional.normalize(x, dim=-1) for x in (q, k)]
    state = torch.zeros(2, 3, 8, 8)
    expected = []
    for at in range(length):
        queries, keys = (x[:, at] for x in unit)
        state = state * log_decay[:, at].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", keys, state)
        step = beta[:, at, :, None] * (v[:, at] - read)
        state = state + keys[..., None] * step[..., None, :]
        expected.append(torch.einsum("bhk,bhkv->bhv", queries, state) * 8**-0.5)
    actual = gated_delta_rule(q, k, v, log_decay, beta)
    torch.testing.assert_close(actual, torch.stack(expected, 1), atol=1e-4, rtol=1e-4)


def test_added_layers_add_nothing_before_training() -> None:
    """Claim: the target's four added layers leave what its two other layers compute as it is."""
    pair = build.load(EMBEDDED / "draft-naive")
    deep = convert(pair, TARGET_PATTERN, TARGET_SOURCES)
    shallow = convert(pair, ("full_attention",) * 2, (0, 1))
    x, positions = torch.randn(1, 20, HIDDEN), torch.arange(20).expand(3, 1, -1)
    with torch.no_grad():
        assert torch.equal(run_decoder(deep, x, positions), run_decoder(shallow, x, positions))


@pytest.mark.parametrize("view", ["uniform/keep=0.1", "none"])
def test_a_draft_without_states_loses_nothing_to_them(embedded: Embedded, view: str) -> None:
    """Claim: the embedded draft, which has attention alone, guesses the same tokens whether its
    prompt is pruned or its attention. Fails if a place is off by one or a pruned token is seen."""
    target, draft = embedded
    _, clip, question = agreement.unseen_clip(3, 64)
    inputs = ask(target, question, clips=[clip])
    prefill = agreement.prefill_with_attention(target.backbone, inputs)
    ids = run(target.backbone, inputs, method="ar", max_new_tokens=32, do_sample=False).ids
    pruned = agreement.agreeing_tokens(draft, target, prefill, view, ids)
    masked = hybrid.agreeing_tokens_with_whole_states(draft, target, prefill, view, ids)
    whole = agreement.agreeing_tokens(draft, target, prefill, "full", ids)
    assert masked == pruned and pruned != whole


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_trained_or_measured_is_refused(call: Call, tmp_path: Path) -> None:
    """Claim: an unknown stage and a folder without a pair are one sentence, before any work."""
    code, printed, error = call("train-hybrid", tmp_path, "--stages", "nap")
    assert code == 2 and printed == "" and "nap" in error and len(error.strip().splitlines()) == 1
    code, printed, error = call("hybrid", tmp_path)
    assert code != 0 and printed == "" and "train-hybrid" in error


def test_the_page_has_what_was_measured() -> None:
    """Claim: figures are those of the rows, a pair each column; parts not measured are left out."""
    acceptance = [
        {
            "pair": pair,
            "size": 256,
            "views": {view: {"tau": tau} for view in hybrid.VIEWS},
            "with_whole_states": {view: {"tau": tau + 0.5} for view in hybrid.VIEWS[1:]},
        }
        for pair, tau in (("hybrid", 3.0), ("embedded", 4.0))
    ]
    ratios = {f"{part}_over_{base}": 1.5 for part in ("decode", "whole") for base in ("ar", "hf")}
    speed = [
        {"pair": row["pair"], "method": method, "same": method != "sage", "tau": 2.0} | ratios
        for row in acceptance
        for method in hybrid.TIMED
    ]
    facts = {"training": {"tower": 60.0, "early": 60.0}, "machine": "a machine", "command": "run"}
    text = hybrid_page.page(facts | {"acceptance": acceptance})
    assert "2 CPU minutes" in text and "`auto`" not in text
    pruned, in_attention, embedded = (f"{x} [{x}, {x}]" for x in ("3.00", "3.50", "4.00"))
    assert f"sees `none` | {pruned}; {in_attention} | {embedded} |" in text
    assert f"sees `full` | {pruned} | {embedded} |" in text
    text = hybrid_page.page(facts | {"acceptance": acceptance, "speed": speed})
    answers = 2 * len(hybrid.METHODS)
    assert f"Of {answers} answers {answers - 2} are" in text
    assert "| `sd`: tau; decoding, whole over `ar`; over `hf` | 2.00; 1.50, 1.50" in text
