"""Claims about conversations: a later turn computes only what is new, and caches hold the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conversations import (
    COUNT,
    FAMILY,
    SOME_METHODS,
    further,
    ids_of,
    pixels_read,
    question,
    script,
    talk_of,
    talking,
)
from helpers import (
    AMOUNT,
    FAMILIES,
    TEXT,
    WORDS,
    backbone,
    backbone_of_copy,
    dealt,
    noisy,
    qwen25,
)
from torch import Tensor

import saccade
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.methods import resolve
from saccade.model.backbone import Backbone
from saccade.model.session import RequestState, Session

pytestmark = pytest.mark.usefixtures("unchecked")


# -- only what is new --------------------------------------------------------------------------


@contextmanager
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Session, int]]]:
    """(session, rows) of every forward of decoding, as they happen."""
    seen: list[tuple[Session, int]] = []
    working: list[Session] = []
    run, forward = Session._forward, Backbone.forward

    def watched(self: Session, *args: Any, **options: Any) -> Tensor:
        working.append(self)
        laws = run(self, *args, **options)
        working.pop()
        return laws

    def counted(self: Backbone, embeds: Tensor, *args: Any, **named: Any) -> Tensor:
        if working:
            seen.append((working[-1], len(embeds)))
        else:
            seen.append((None, len(embeds)))  # type: ignore[arg-type]
        return forward(self, embeds, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_forward", watched)
        patch.setattr(Backbone, "forward", counted)
        yield seen


@pytest.mark.representatives(5)
@pytest.mark.parametrize("method", [method for method in SOME_METHODS if method != "ar"])
def test_a_later_turn_reads_only_new_tokens(method, monkeypatch):
    """Claim: in turn 2 the target's first forward holds the new question's rows, and at most the
    one token of the answer that no forward had read yet; the draft's holds at most what was
    emitted since its last draft began, and one token more. Nothing is prefilled again.

    Fails if any cached token is computed again. The control is turn 1, which reads the prompt.
    """
    (inputs, first), (more, second), _ = script("qwen2_5_vl")
    new = len(question(0))
    with talking("qwen2_5_vl", method) as conversation, forwards(monkeypatch) as seen:
        opening = conversation.run(inputs)
        # What the last rounds emitted without asking the draft, because the limit was near.
        has_draft = [len(round.tokens) > 0 for round in reversed(opening.rounds)]
        undrafted = has_draft.index(True) if True in has_draft else 0
        assert len(ids_of(inputs)) in [rows for _, rows in seen]
        del seen[:]
        assert conversation.run(more).ids == second
        target = talk_of(conversation).session
        assert all(session is not None for session, _ in seen), "a prefill"
        by_target = [rows for session, rows in seen if session is target]
        by_draft = [rows for session, rows in seen if session is not target]
        assert seen[0] == (target, by_target[0]) and new <= by_target[0] <= new + 1
        trees = [len(round.tokens) for round in conversation._last_stream.results[0].rounds]
        assert by_target[1:] == [n + (i > 0) for i, n in enumerate(trees) if n or i]
        views = 2 if method == "tabed" else 1
        if by_draft:
            # auto's also what was decoded without it
            emitted = sum(len(r.accepted) + 1 for r in opening.rounds[-1 - undrafted :])
            lacked = 1 + emitted + (len(first) if method == "auto" else 0)
            assert by_draft[0] <= (new + lacked) * views
            assert max(by_draft[1:], default=0) <= 64  # the largest tree


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["ar", "sd", "specvlm", "tabed", "specvlm-self"])
def test_no_vision_tower_runs_again(method):
    """Claim: after turn 1 neither model looks at the video, not even a draft whose tower is its
    own. Control: in turn 1 both towers are seen running.
    """
    target, draft = backbone_of_copy(qwen25()), backbone_of_copy(qwen25(9, layers=1))
    (inputs, _), (more, second), _ = script("qwen2_5_vl")
    settings = dict(method=method, max_new_tokens=COUNT, **WORDS)
    with (
        saccade.Conversation(target, draft=draft, **settings) as conversation,
        pixels_read(target.model) as by_target,
        pixels_read(draft.model) as by_draft,
    ):
        conversation.run(inputs)
        assert len(by_target) == 1
        assert len(by_draft) == (method not in ("ar", "specvlm-self"))
        del by_target[:], by_draft[:]
        result = conversation.run(more)
        assert result.ids == second and result.fallback_reason is None
        assert not by_target and not by_draft


def test_the_reported_phases_are_timed():
    """Claim: a later turn reports no vision, and phases begin with its prefill."""
    (inputs, _), (more, _), _ = script("qwen2_5_vl")
    phases: list[str] = []
    with talking("qwen2_5_vl", on_phase=phases.append) as conversation:
        assert conversation.run(inputs).timings.vision > 0
        assert phases == ["vision", "prefill", "guide", "decode"]
        del phases[:]
        assert conversation.run(more).timings.vision == 0
        assert phases == ["prefill", "guide", "decode"]


# -- what caches hold --------------------------------------------------------------------------


def cached_tensors(request: RequestState) -> list[Tensor]:
    """Committed keys and values, [kv_head, row, head_dim], layer by layer."""
    tensors = []
    for layer in range(len(request.cache.keys)):
        tensors += [side.clone() for side in request.cache.read(layer, request.cache.length)]
    return tensors


def prefilled(model: Backbone, inputs: Inputs, adopt: Backbone | None = None) -> list[Tensor]:
    """The same of a session that has read these inputs in one go."""
    prompts = (adopt or model).prompts(inputs)
    session = Session(model, [Sampling()])
    session.prefill([model.adopt(p) for p in prompts] if adopt is not None else prompts)
    return cached_tensors(session.requests[0])


def assert_held(request: RequestState, expected: list[Tensor], rows: Tensor | None = None) -> None:
    mine = cached_tensors(request)
    expected = expected[: len(mine)]
    if rows is not None:
        expected = [tensor[:, rows] for tensor in expected]
    for one, other in zip(mine, expected, strict=True):
        assert one.shape[1] <= other.shape[1] <= one.shape[1] + 3, "but for the last few tokens"
        torch.testing.assert_close(one, other[:, : one.shape[1]], atol=1e-4, rtol=1e-4)


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("method", "family"), dealt(["sd", "layerskip", "specvlm-self/view=uniform"], FAMILY)
)
def test_caches_hold_what_a_fresh_prefill_holds(method, family):
    """Claim: after every turn, and after a question that replaces another, the keys and values of
    target and draft are those of a prefill of the whole text, row for row, to 1e-4.

    The control compares with a text that differs in one token of turn 1 and must fail.
    """
    target, draft = backbone(FAMILIES[family](0)), backbone(noisy(FAMILIES[family], 0, AMOUNT))
    (inputs, first), (more, second), (most, third) = script(family)
    other = further(inputs, [*first[:4], *question(7)])
    prompt = target.prompts(inputs)[0]
    with talking(family, method) as conversation:
        for turn, answer in ((inputs, first), (more, second), (most, third), (other, None)):
            result = conversation.run(turn)
            assert answer is None or result.ids == answer
            whole = further(turn, result.ids)
            talk = talk_of(conversation)
            mine = talk.session.requests[0]
            assert mine.context == ids_of(whole)
            assert_held(mine, prefilled(target, whole))
            drafting = talk.drafter._drafter.session.requests[0]
            assert drafting.context == ids_of(whole)
            if method.startswith("sd"):
                assert_held(drafting, prefilled(draft, whole, adopt=target))
            else:
                view = resolve(method).view
                kept = view(None, prompt).places  # type: ignore[arg-type]
                later = torch.arange(len(prompt), len(ids_of(whole)))
                assert_held(drafting, prefilled(target, whole), torch.cat([kept, later]))
        wrong = list(ids_of(whole))
        wrong[len(ids_of(inputs))] = (wrong[len(ids_of(inputs))] + 1) % TEXT
        with pytest.raises(AssertionError):
            altered = further(inputs, wrong[len(ids_of(inputs)) :])
            assert_held(mine, prefilled(target, altered))
