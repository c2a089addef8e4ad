"""Claims about captured forwards, over pretended GPUs: what is captured, where, and how often."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers import AMOUNT, FAMILIES, WORDS, few, input_for, noisy, truth
from pretended import pretend_gpus

import saccade
from saccade.core.result import Result
from saccade.engine.request import Request
from saccade.engine.requests_per_round import RoundTimes
from saccade.engine.scheduler import Scheduler
from saccade.methods import resolve
from saccade.model import cuda_graphs
from saccade.model.backbone import Backbone
from saccade.model.session import Session

FAMILY = "qwen2_5_vl"
SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **WORDS}
DRAWN: dict[str, Any] = {"do_sample": True, "seed": 3, "top_p": 0.9}


@pytest.fixture(autouse=True)
def _few_keys(monkeypatch):
    """Sizes begin with few keys, which the CPU is through with sooner."""
    monkeypatch.setattr(cuda_graphs, "MIN_KEYS", 256)


def _pair(target: str = "cuda:0", draft: str = "cuda:0") -> tuple[Backbone, Backbone]:
    """A random target, and a noisy copy of it that drafts, on pretended GPUs."""
    models = deepcopy(FAMILIES[FAMILY](0)), deepcopy(noisy(FAMILIES[FAMILY], 0, AMOUNT))
    return Backbone(models[0].to(target)), Backbone(models[1].to(draft))


def _answer(pair: tuple[Backbone, Backbone], method: str, **settings: Any) -> Result:
    return saccade.run(
        pair[0], input_for(FAMILY), draft=pair[1], method=method, **{**SETTINGS, **settings}
    )


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sd", "ar", "specvlm", "tabed-mtcp"], 1))
def test_a_second_answer_captures_nothing(method, monkeypatch):
    """Claim: an answer like an earlier one captures nothing, and no capture is within a forward
    that a round times. Fails if graphs belong to a session, or are made where a new size is met."""
    during: list[int] = []
    with pretend_gpus() as record:
        score = Session.score

        def counted(self: Session, trees: Any) -> Any:
            before = record.counts["capture"]
            scores = score(self, trees)
            during.append(record.counts["capture"] - before)
            return scores

        monkeypatch.setattr(Session, "score", counted)
        pair, wanted = _pair(), truth(FAMILY)[:12]
        first = _answer(pair, method)
        captures = record.counts["capture"]
        second = _answer(pair, method)
        assert first.ids == second.ids == wanted and not second.fallback_reason
        assert 0 < captures == record.counts["capture"] and not any(during)
        assert first.timings.captures > 0 == second.timings.captures
        assert any(each.first_of_size for each in first.rounds)
        assert not any(each.first_of_size for each in second.rounds)


@pytest.mark.extra
def test_the_second_gpu_is_captured_on_its_own_stream():
    """Claim: with the target on one GPU and the draft on another both models' forwards are
    captured, none of the graphs is empty, and the answers are right. Fails if a capture is made on
    the stream of whichever GPU captured first: its graph stays empty, and every later output is the
    first one."""
    wanted = truth(FAMILY)[:12]
    for places in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
        with pretend_gpus(2) as record:
            pair = _pair(*places)
            for _ in range(2):
                result = _answer(pair, "sd")
                assert result.ids == wanted and not result.fallback_reason
            assert sum(len(round.accepted) for round in result.rounds) > 4, "the draft drafts noise"
            assert len(record.sizes) >= 3 and min(record.sizes) > 10
            assert all(model.graphs[model.key_layer_count]._captured for model in pair)


ELSEWHERE = {
    "specvlm": {}, "tabed-mtcp": DRAWN, "sd-tree": DRAWN, "auto": {}, "sage": {}, "pages": {},
}  # fmt: skip


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(ELSEWHERE, 2))
def test_a_draft_on_another_gpu_gives_the_same_answer(method):
    """Claim: with the draft on another GPU than the target each method gives the answer it gives
    with both on one, and drafts. Fails if a tensor of one GPU is used on the other."""
    results = []
    for place in ("cuda:0", "cuda:1"):
        with pretend_gpus(2):
            result = _answer(_pair("cuda:0", place), method, **ELSEWHERE[method])
        assert result.fallback_reason is None
        results.append(result)
    assert results[0].ids == results[1].ids
    if method != "auto":  # Its drafts are as long as measured costs make them.
        assert [each.accepted for each in results[0].rounds] == [
            each.accepted for each in results[1].rounds
        ]


@pytest.mark.extra
def test_a_round_of_specvlm_sends_little():
    """Claim: a round of `specvlm` copies at most 16 times between the host and the GPU. Fails if
    each layer is sent what all need, or each node of a draft is waited for by itself."""
    with pretend_gpus() as record:
        pair = _pair()
        _answer(pair, "specvlm")
        counts = []
        for length in (4, 12):
            record.clear()
            result = _answer(pair, "specvlm", max_new_tokens=length)
            counts.append((record.transfers, len(result.forwards)))
        (few, short), (many, long) = counts
        assert long > short and (many - few) / (long - short) <= 16, record.worst("upload")


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", few(["sd", "ar"], 1))
def test_several_live_requests_are_captured(method, monkeypatch):
    """Claim: requests that decode together replay captured forwards with the ids each gets alone,
    and one that ends leaves the others theirs: a second batch captures nothing. Fails if several
    requests take ordinary forwards, or if an ending forgets what was captured."""
    # How many take part in a round must not depend on how long rounds take here.
    monkeypatch.setattr(RoundTimes, "requests_per_round", lambda self, live, patience: live)
    with pretend_gpus() as record:
        pair = _pair()
        questions = [input_for(FAMILY, seed) for seed in range(3)]
        alone = [
            saccade.run(pair[0], each, method="ar", max_new_tokens=length, do_sample=False).ids
            for each, length in zip(questions, (4, 7, 10), strict=True)
        ]
        captures = []
        for _ in range(2):
            record.clear()
            scheduler = Scheduler(pair[0], resolve(method), pair[1])
            for each, length in zip(questions, (4, 7, 10), strict=True):
                settings = {"max_new_tokens": length, "do_sample": False}
                scheduler.join(Request.of(pair[0], each, **settings))
            answers, rounds = {}, 0
            while len(scheduler):
                for event in scheduler.step():
                    assert event.error is None, event.error
                    rounds += event.round is not None
                    if event.result is not None:
                        answers[event.number] = event.result.ids
            assert [answers[number] for number in sorted(answers)] == alone
            captures.append(record.counts["capture"])
        assert captures[0] > 0 == captures[1]
        assert record.counts["replay"] >= 9  # The longest answer has nine rounds.


@pytest.mark.extra
def test_exact_is_captured_bit_for_bit():
    """Claim: with `exact` forwards are captured too, and give the bits of ordinary ones. Fails if
    `exact` is sent kernel by kernel, or if a captured sum is taken in another order."""
    logits: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for captured in (False, True):
        with pretend_gpus() as record:
            pair = _pair()
            if not captured:
                pair[0].graphs = pair[1].graphs = {}
            rounds = saccade.stream(
                pair[0], input_for(FAMILY), draft=pair[1], method="sd/shape=chain-4", exact=True,
                **SETTINGS,
            )  # fmt: skip
            session = rounds.batch.session
            if not captured:
                session.cuda_graphs = None
            for round in rounds:
                logits[captured] += [row.cpu() for row in round.p.rows]
            assert (record.counts["replay"] > 10) is captured or not captured
    assert len(logits[True]) == len(logits[False])
    assert all(torch.equal(a, b) for a, b in zip(logits[True], logits[False], strict=True))
