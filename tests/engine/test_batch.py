"""Claims about batches of many requests: one target forward a round, and none knows of another."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import pytest
import torch
from helpers import (
    AMOUNT,
    WORDS,
    backbone,
    hf_greedy,
    left_padded,
    noisy,
    qwen25,
    text_input,
    video_input,
)
from torch import Tensor

import saccade
from saccade.core.result import Result
from saccade.drafting.drafters import HeadDrafter
from saccade.drafting.schedule import serial
from saccade.methods import METHODS
from saccade.model.backbone import Backbone
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("unchecked")

SOME_METHODS = [  # TABED's variants share its code
    name
    for name, recipe in METHODS.items()
    if recipe.schedule is serial
    and not name.startswith("tabed-")
    and recipe.drafter is not HeadDrafter  # The draft here is a model; see model/test_heads.py.
]
COUNT = 14
LENGTHS = (31, 44, 58, 27, 35, 62, 40, 49)  # in no order, no two the same
GRIDS = [(3, 4, 6), (2, 4, 4), (4, 4, 6), (1, 4, 4), (2, 2, 2), (5, 2, 4), (2, 6, 4), (3, 4, 4)]


@cache
def requests() -> tuple[dict[str, Tensor], ...]:
    """Eight requests of different grids and lengths, with more or less text before the video."""
    many = []
    for seed, ((t, h, w), length) in enumerate(zip(GRIDS, LENGTHS, strict=True)):
        before = 1 + 5 * seed % 7
        after = length - before - 2 - t * h * w // 4
        many.append(video_input(seed, (t, h, w), before=before, after=after))
        assert many[-1]["input_ids"].shape == (1, length)
    return tuple(many)


def streamed(inputs: Any, method: Any, **settings: Any) -> saccade.Stream:
    draft = backbone(noisy(qwen25, 0, AMOUNT))
    settings = {"max_new_tokens": COUNT, "do_sample": False, **WORDS, **settings}
    return saccade.stream(backbone(qwen25()), inputs, draft=draft, method=method, **settings)


def exhausted(stream: saccade.Stream) -> list[Result]:
    for _ in stream:
        pass
    return stream.results


@cache
def truths(**settings: Any) -> list[tuple[int, ...]]:
    """What each request answers alone, by plain decoding."""
    return [exhausted(streamed(one, "ar", **settings))[0].ids for one in requests()]


@cache
def ends() -> tuple[int, ...]:
    """Two ids that end some of the eight answers early, at different lengths."""
    answers = truths()
    return answers[1][2], answers[6][8]


class Forwards:
    """Counts each session's forwards, prefill apart."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Session, int]] = []
        self.backbones: list[Backbone] = []
        run, forward = Session._forward, Backbone.forward

        def watched(session: Session, rows: Any, **options: Any) -> Tensor:
            before = len(self.backbones)
            laws = run(session, rows, **options)
            assert len(self.backbones) == before + 1, "one run is one forward of the model"
            self.calls.append((session, len(rows.segments)))
            return laws

        def counted(backbone: Backbone, *args: Any, **named: Any) -> Tensor:
            self.backbones.append(backbone)
            return forward(backbone, *args, **named)

        patch.setattr(Session, "_forward", watched)
        patch.setattr(Backbone, "forward", counted)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", SOME_METHODS)
def test_eight_requests_answer_as_eight_runs_in_one_forward_a_round(method, monkeypatch):
    """Claim: eight requests of different lengths, left-padded, give each the answer it gets alone,
    its rounds token for token those of its own run, and a round of all of them is exactly one
    forward of the target over all that still live.

    Fails if requests share a row, a key or noise, if any is served by a forward of its own, or if a
    round costs two. The openings cost none: the prefill has said it all. Of each method a third of
    the requests, another one each time, runs alone.
    """
    stream = streamed(left_padded(requests()), method)
    openings = [next(stream) for _ in requests()]
    assert stream.batch is not None
    target = stream.batch.session
    seen = Forwards(monkeypatch)
    together = [*openings, *stream]
    monkeypatch.undo()

    rounds = max(len(result.rounds) for result in stream.results)
    assert [session for session, _ in seen.calls].count(target) == rounds - 1
    for number, (answered, one) in enumerate(zip(stream.results, requests(), strict=True)):
        assert answered.ids == truths()[number] and answered.fallback_reason is None
        if method == "auto" or (number + SOME_METHODS.index(method)) % 3:
            continue  # how long auto drafts depends on how fast it was
        (alone,) = exhausted(streamed(one, method))
        assert alone.ids == answered.ids
        mine = [record.to_record() for record in together if record.request == number]
        assert [(r.tokens, r.parents, r.emitted) for r in mine] == [
            (r.tokens, r.parents, r.emitted) for r in alone.rounds
        ]
    living = [sum(len(r.rounds) > i for r in stream.results) for i in range(rounds)]
    assert [count for session, count in seen.calls if session is target] == living[1:]


def test_the_first_round_too_is_one_forward(monkeypatch):
    """Claim: the first tokens come of the prefills, without a forward; the round that follows is
    one forward over all eight, plain decoding's too."""
    for method in ("sd", "sd-tree", "specvlm-self", "ar"):
        with monkeypatch.context() as patch:
            seen = Forwards(patch)
            stream = streamed(left_padded(requests()), method)
            assert all(next(stream).opening for _ in range(8)) and not seen.calls
            assert not next(stream).opening
            assert stream.batch is not None
            calls = [count for session, count in seen.calls if session is stream.batch.session]
            assert calls == [8]
            stream.close()


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", SOME_METHODS)
def test_requests_that_end_early_change_no_other(method):
    """Claim: with answers that end at different lengths each is what it is alone, and why it ended
    is its own. Fails if a request that is gone shifts the rows, noise or folds of the rest.
    """
    settings = dict(eos_token_id=ends())
    expected = truths(**settings)
    assert len({len(ids) for ids in expected}) > 2, "nobody ends early"
    results = exhausted(streamed(left_padded(requests()), method, **settings))
    for result, ids in zip(results, expected, strict=True):
        assert result.ids == ids and result.fallback_reason is None
        assert result.finish_reason == ("stop" if ids[-1] in ends() else "length")


def _ends_early(method: str) -> tuple[list[bool], list[bool]]:
    """As each request ends: is it out of the session, and is its cache freed?"""
    stream = streamed(left_padded(requests()), method, eos_token_id=ends())
    caches: dict[int, Any] = {}
    gone, freed, ended = [], [], None
    for round in stream:
        assert stream.batch is not None
        open_requests = stream.batch.session.requests
        if round.opening:  # the draft may take keys over from any of them yet
            if round.finish is None:
                caches[round.request] = weakref.ref(open_requests[round.request].cache)
            else:
                gone.append(round.request not in open_requests)
            continue
        if ended is not None:  # what the round itself holds is let go with the next
            freed.append(caches[ended]() is None)
        ended = round.request if round.finish is not None else None
        if ended is not None:
            gone.append(ended not in open_requests)
        del round
    return gone, freed


@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    "method",
    [
        "ar",
        "sd",
        "sd-tree",
        "tabed",
        "lookup",
        "specvlm-self",
    ],
)
def test_an_ended_requests_cache_is_gone(method):
    """Claim: when a request ends its cache is freed at once, not when the last of the batch ends.

    Fails if anybody still holds it. The session forgets the request in any case.
    """
    gone, freed = _ends_early(method)
    assert len(gone) == 8 and all(gone)
    assert len(freed) >= 3 and all(freed)


def test_an_ended_request_leaves_the_session_of_a_self_draft_too():
    """Claim: the target's session forgets a request as it ends, whoever drafts."""
    gone, _ = _ends_early("specvlm-self")
    assert gone == [True] * 8


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["ar", "sd", "sd-tree", "specvlm-self", "tabed", "lookup"])
def test_a_seeded_batch_is_the_same_whoever_ends_first(method):
    """Claim: sampled answers of a batch depend on seed and request alone: those of the first two
    requests are the same whether six others live beside them or not.
    """
    settings = dict(do_sample=True, temperature=1.1, top_k=30, seed=4, max_new_tokens=10)
    two = exhausted(streamed(left_padded(requests()[:2]), method, **settings))
    eight = exhausted(streamed(left_padded(requests()), method, eos_token_id=ends(), **settings))
    for short, long in zip(two, eight, strict=False):
        cut = next((i + 1 for i, t in enumerate(short.ids) if t in ends()), len(short.ids))
        assert long.ids == short.ids[:cut]
    assert two[0].ids != two[1].ids


@pytest.mark.extra
def test_requests_with_and_without_video_share_a_batch():
    """Claim: eight requests of which three are text alone answer as each alone."""
    many = list(requests())
    for number in (0, 3, 7):
        text = text_input(number, 9 + number)
        many[number] = text | {"mm_token_type_ids": torch.zeros_like(text["input_ids"]).int()}
    batch = left_padded([{n: one[n] for n in many[0]} for one in many])
    videos = [one for one in many if "pixel_values_videos" in one]
    for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        batch[name] = torch.cat([one[name] for one in videos])
    for method in ("sd", "specvlm", "std"):
        results = exhausted(streamed(batch, method))
        for result, one in zip(results, many, strict=True):
            assert result.ids == exhausted(streamed(one, "ar"))[0].ids
            assert result.fallback_reason is None


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["sd", "sd-tree", "specvlm-self", "lookup"])
def test_a_batch_of_mixed_lengths_and_acceptance_is_generates(method):
    """Claim: prompts of 9 to 60 tokens, with drafts right to different degrees, in one batch give
    what generate gives for each prompt alone: no offset of one row is another's.
    """
    many = [
        video_input(3, (1, 2, 2), before=1, after=6),
        video_input(4, (3, 4, 6)),
        video_input(5, (5, 4, 8), before=9, after=9),
        video_input(6, (2, 2, 4), before=3, after=30),
    ]
    out = saccade.generate(
        backbone(qwen25()),
        left_padded(many),
        draft=backbone(noisy(qwen25, 0, 0.05)),
        method=method,
        max_new_tokens=20,
    )
    assert len({one["input_ids"].shape[1] for one in many}) == len(many)
    for row, inputs in zip(out, many, strict=True):
        assert row[-20:].tolist() == hf_greedy(qwen25(), inputs, 20)
