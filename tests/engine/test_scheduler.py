"""Claims about requests that come and go: each answers as alone, whoever is beside it."""

from __future__ import annotations

import copy
import time
from math import ceil
from typing import Any

import pytest
import torch
from helpers import MadeBy, StubDraft, backbone, dealt, noisy, qwen25, text_input, video_input

import saccade
from saccade.core.errors import ModelError, OptionError
from saccade.core.result import Result
from saccade.core.tree import Tree, chain
from saccade.drafting import proposals
from saccade.drafting.drafters import SessionDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import serial
from saccade.drafting.setup import TextMaker
from saccade.drafting.shapes.policies import Chain
from saccade.engine.request import Request
from saccade.engine.requests_per_round import RoundTimes
from saccade.engine.scheduler import Scheduler
from saccade.methods import resolve
from saccade.model.backbone import Backbone
from saccade.model.kernels.few_bits import ROUNDINGS
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("unchecked")

METHODS = ["ar", "sd", "sd-tree", "specvlm", "specvlm-self", "std", "sage", "lookup", "auto"]
TARGET, DRAFT = backbone(qwen25()), backbone(noisy(qwen25))
MANY = [video_input(0), text_input(1), video_input(2, (2, 4, 4)), video_input(3), text_input(4)]
COUNTS = [12, 5, 17, 9, 14]


@pytest.fixture(autouse=True)
def all_in_every_round(monkeypatch):
    """Here rounds are of all: how many take part is a matter of seconds otherwise."""
    monkeypatch.setattr(RoundTimes, "requests_per_round", lambda self, live, patience: live)


def _request(number: int, **settings: Any) -> Request:
    return Request.of(TARGET, MANY[number], max_new_tokens=COUNTS[number], **settings)


def _alone(number: int, method: Any, **settings: Any) -> Result:
    settings = {"max_new_tokens": COUNTS[number], **settings}
    return saccade.run(TARGET, MANY[number], draft=DRAFT, method=method, **settings)


def _steps(scheduler: Scheduler, times: int = 1000) -> dict[int, Result]:
    """Works until all have ended; whatever failed is raised."""
    results: dict[int, Result] = {}
    while len(scheduler) and times:
        times -= 1
        for news in scheduler.step():
            if news.error is not None:
                raise news.error
            if news.result is not None:
                results[news.number] = news.result
    return results


@pytest.mark.representatives(3)
@pytest.mark.parametrize("method", [*METHODS, "hippo"])
def test_requests_that_arrive_one_by_one_answer_as_alone(method):
    """Claim: five requests, one more every third round, get their own answers (ids, reasons); two
    where each has a process of its own.
    """
    scheduler = Scheduler(TARGET, resolve(method), DRAFT)
    results: dict[int, Result] = {}
    count = 2 if method == "hippo" else len(MANY)
    for number in range(count):
        assert scheduler.join(_request(number)) == number
        for _ in range(3):
            results |= {news.number: news.result for news in scheduler.step() if news.result}
    results |= _steps(scheduler)
    for number in range(count):
        alone = _alone(number, method)
        assert results[number].ids == alone.ids, number
        assert results[number].finish_reason == alone.finish_reason
        assert results[number].fallback_reason is None
        assert results[number].prompt_tokens == alone.prompt_tokens


@pytest.mark.representatives(2)
@pytest.mark.parametrize("method", ["sd", "specvlm"])
@pytest.mark.parametrize("own", [True, False])
def test_requests_with_rounded_drafts_answer_as_alone(own, method):
    """Claim: several requests whose draft has rounded weights, another model's or the target's own,
    get the answers of plain decoding, and their drafts do not fail. Fails if a shared forward of
    the target goes by the rounded copy."""
    draft = (TARGET if own else DRAFT).rounded(ROUNDINGS["int4"]).with_prefix_cache(None)
    scheduler = Scheduler(TARGET, resolve(method), draft)
    for number in range(len(MANY)):
        scheduler.join(_request(number))
    results = _steps(scheduler)
    for number in range(len(MANY)):
        assert results[number].ids == _alone(number, "ar").ids
        assert results[number].fallback_reason is None


def test_a_round_is_one_forward_of_the_target_for_all(monkeypatch):
    """Claim: five requests that decode share each forward. Fails if each has its own."""
    scheduler = Scheduler(TARGET, resolve("ar"))
    for number in range(len(MANY)):
        scheduler.join(_request(number))
    while not all(entry.batch.has_read_prompts for entry in scheduler._entries.values()):
        list(scheduler.step())
    calls: list[int] = []
    forward = Session._forward

    def counted(self: Session, rows: Any, **options: Any) -> Any:
        calls.append(len(rows.segments))
        return forward(self, rows, **options)

    monkeypatch.setattr(Session, "_forward", counted)
    list(scheduler.step())
    assert calls == [len(scheduler)]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["ar", "sd", "hippo"])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_rounds_of_a_few_are_taken_in_turns(monkeypatch, method, most):
    """Claim: where a round has room for few, who has waited longest takes part: nobody waits more
    rounds than it takes to serve all, and answers are those given alone. Fails if the first to
    come are served first."""
    count = 2 if method == "hippo" else len(MANY)
    monkeypatch.setattr(
        RoundTimes, "requests_per_round", lambda self, live, patience: min(live, most)
    )
    scheduler = Scheduler(TARGET, resolve(method), DRAFT)
    for number in range(count):
        scheduler.join(_request(number))
    waited = dict.fromkeys(range(count), 0)
    results: dict[int, Result] = {}
    while len(scheduler):
        news = list(scheduler.step())
        served = {event.number for event in news if event.round and not event.round.opening}
        assert len(served) <= most
        decoding = [number for number, e in scheduler._entries.items() if e.batch.has_read_prompts]
        waited |= {number: waited[number] + 1 for number in decoding} | dict.fromkeys(served, 0)
        assert max(waited[number] for number in decoding or served) < ceil(count / most)
        results |= {event.number: event.result for event in news if event.result}
    for number in range(count):
        assert results[number].ids == _alone(number, method).ids


def test_the_round_size_depends_on_how_long_rounds_and_prompts_took(monkeypatch):
    """Claim: the pace is told every round, by how many were in it, and is asked with how many
    decode and the seconds the last prompt took. Fails if turns are taken by anything else."""
    folds: list[tuple[int, float]] = []
    calls: list[tuple[int, float]] = []
    monkeypatch.setattr(
        RoundTimes,
        "requests_per_round",
        lambda self, *given: calls.append(given) or max(1, given[0] // 2),
    )
    monkeypatch.setattr(RoundTimes, "fold", lambda self, *given: folds.append(given) or self)
    scheduler = Scheduler(TARGET, resolve("ar"))
    for number in range(4):
        scheduler.join(_request(number))
    scheduler._tokens_per_round = 100.0
    began = time.perf_counter()
    list(scheduler.step())
    took = time.perf_counter() - began
    assert [live for live, _ in calls] == [4] and [live for live, _ in folds] == [2]
    assert 0 < calls[0][1] < took and 0 < folds[0][1] < took and calls[0][1] + folds[0][1] < took


def test_a_burst_after_a_lull_is_read_as_far_as_rounds_gave_tokens(monkeypatch):
    """Claim: what rounds gave is remembered while nobody decodes. Fails if newcomers to an idle
    server wait for each other's rounds where its drafts are long."""
    scheduler = Scheduler(TARGET, resolve("sd"), TARGET)  # the target drafts: all is accepted
    assert scheduler._session is not None
    scheduler.join(_request(2))
    _steps(scheduler)
    list(scheduler.step())
    for number in (0, 3):
        scheduler.join(_request(number))
    scheduler._session.chunk = len(_request(0).ids[0])
    opened = {event.number for event in scheduler.step() if event.round}
    assert opened == {1, 2}


def _drafting(monkeypatch: pytest.MonkeyPatch, method: Any) -> list[int]:
    """Five requests answer; how many requests each of the draft's forwards was for."""
    scheduler = Scheduler(TARGET, method, DRAFT)
    for number in range(len(MANY)):
        scheduler.join(_request(number))
    calls: list[int] = []
    forward = Session._forward

    def counted(self: Session, rows: Any, **options: Any) -> Any:
        if self.backbone is DRAFT:
            calls.append(len(rows.segments))
        return forward(self, rows, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_forward", counted)
        results = _steps(scheduler)
    for number in range(len(MANY)):
        alone = _alone(number, method)
        assert results[number].ids == alone.ids and results[number].fallback_reason is None
        assert len(results[number].rounds) == len(alone.rounds)
    return calls


def test_a_level_of_drafting_is_one_forward_for_all(monkeypatch):
    """Claim: five requests, each with a drafter of its own, draft a level in one forward of the
    draft model, and get the drafts they get alone. Control: where drafts do not grow together,
    every forward is for one of them."""
    together = _drafting(monkeypatch, resolve("sd"))
    assert max(together) == len(MANY)
    with monkeypatch.context() as patch:
        patch.setattr(SessionDrafter, "start_growth", lambda self, states: None)
        apart = _drafting(monkeypatch, resolve("sd"))
    assert set(apart) == {1} and len(together) < len(apart) / 2


def test_a_forward_of_drafts_that_fails_is_nobodys_end(monkeypatch):
    """Claim: where the forward that drafters share fails, each drafts alone, as if there had been
    nobody beside it. Fails if one request's trouble costs another its drafts."""

    def broken(sessions: Any) -> Any:
        raise RuntimeError("only together")

    monkeypatch.setattr(proposals, "score_together", broken)
    assert set(_drafting(monkeypatch, resolve("sd"))) == {1}


def test_prompts_are_read_a_piece_a_token():
    """Claim: while others emit several tokens a round, as many pieces of a newcomer's prompt are
    read a round: it waits no more rounds than beside plain decoding tokens. Fails if long drafts
    hold up first tokens."""
    waited: dict[str, int] = {}
    for method, draft in (("ar", None), ("sd", TARGET)):  # the target drafts: all is accepted
        scheduler = Scheduler(TARGET, resolve(method), draft)
        assert scheduler._session is not None
        scheduler._session.chunk = 4
        scheduler.join(_request(2))
        while not scheduler._entries[0].batch.has_read_prompts:
            list(scheduler.step())
        list(scheduler.step())
        scheduler.join(_request(0))
        waited[method] = 0
        while 1 in scheduler._entries and not scheduler._entries[1].batch.has_read_prompts:
            list(scheduler.step())
            waited[method] += 1
    assert 1 <= waited["sd"] <= waited["ar"] / 2


@pytest.mark.parametrize("exact", [False, True], ids=["together", "in turns"])
def test_short_prompts_are_read_together_as_far_as_a_chunk_goes(exact):
    """Claim: of newcomers that come together, as many have their first token after one step as a
    chunk of prompt tokens has room for (a prompt and its pictures count once each), the longest
    waiting first; the others wait. Fails where each short prompt costs a round, or where nothing
    bounds how long those who decode are held up."""
    requests = [_request(1) for _ in range(5)]
    length = len(requests[0].ids[0])
    for room, first in ((2 * length, 1), (4 * length, 2), (20 * length, 5)):
        scheduler = Scheduler(TARGET, resolve("ar"), exact=exact)
        numbers = [scheduler.join(request) for request in requests]
        for number in numbers:
            scheduler._entries[number].batch.session.chunk = room
        opened = [event.number for event in scheduler.step() if event.round]
        assert [*dict.fromkeys(opened)] == numbers[:first], room


@pytest.mark.representatives(1)
@pytest.mark.parametrize("exact", [False, True], ids=["together", "in turns"])
@pytest.mark.parametrize("method", ["ar", "sd"])
def test_a_seed_means_the_same_beside_others(method, exact):
    """Claim: a sampled answer with a seed is the one it gets alone."""
    settings = dict(do_sample=True, temperature=1.2)
    scheduler = Scheduler(TARGET, resolve(method), DRAFT, exact=exact)
    for number in range(len(MANY)):
        scheduler.join(_request(number, seed=number + 7, **settings))
    results = _steps(scheduler)
    for number in range(len(MANY)):
        alone = _alone(number, method, seed=number + 7, exact=exact, **settings)
        assert results[number].ids == alone.ids


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("after", "drafting"),
    dealt([0, 1, 2, 4], [("sd", False), ("specvlm-self", False), ("sd", True)]),
)
def test_one_who_leaves_frees_its_cache_and_changes_no_other(after, drafting):
    """Claim: leaving while waiting, reading or decoding leaves the others' answers."""
    method, exact = drafting
    scheduler = Scheduler(TARGET, resolve(method), DRAFT, exact=exact)
    for number in range(3):
        scheduler.join(_request(number))
    for _ in range(after):
        list(scheduler.step())
    scheduler.leave(1)
    scheduler.leave(1)  # twice is nothing
    assert len(scheduler) == 2
    if scheduler._session is not None:
        assert 1 not in scheduler._session.requests
    results = _steps(scheduler)
    assert sorted(results) == [0, 2]
    for number in (0, 2):
        assert results[number].ids == _alone(number, method, exact=exact).ids


def test_a_long_prompt_holds_up_nobody(monkeypatch):
    """Claim: while a newcomer's prompt is read a chunk at a time, the others emit every step."""
    scheduler = Scheduler(TARGET, resolve("ar"))
    assert scheduler._session is not None
    scheduler._session.chunk = 4
    scheduler.join(_request(2))
    while not scheduler._entries[0].batch.has_read_prompts:
        list(scheduler.step())
    scheduler.join(_request(0))
    reading = 0
    while not scheduler._entries[1].batch.has_read_prompts:
        news = list(scheduler.step())
        assert 0 in [each.number for each in news if each.round]
        reading += 1
    assert reading > 5
    results = _steps(scheduler)
    assert results[0].ids == _alone(2, "ar").ids and results[1].ids == _alone(0, "ar").ids


def test_a_first_token_is_sent_before_the_others_round(monkeypatch):
    """Claim: as soon as a newcomer's prompt is read its first token is told, before its draft reads
    and before the round of the others. Fails if it waits for either."""
    scheduler = Scheduler(TARGET, resolve("sd"), DRAFT)
    scheduler.join(_request(2))
    while not scheduler._entries[0].batch.has_read_prompts:
        list(scheduler.step())
    scheduler.join(_request(0))
    read: list[Any] = []
    forward = Backbone.forward

    def counted(self: Backbone, *given: Any, **named: Any) -> Any:
        read.append(self)
        return forward(self, *given, **named)

    monkeypatch.setattr(Backbone, "forward", counted)
    news = next(event for event in scheduler.step() if event.number == 1)
    assert news.round is not None and news.round.opening and set(read) == {TARGET}
    monkeypatch.undo()
    assert _steps(scheduler)[1].ids == _alone(0, "ar").ids


def test_a_draft_that_fails_is_its_own_requests_affair():
    """Claim: of three requests one's draft raises: it goes on plainly, the others keep drafting."""
    right = [_alone(number, "ar").ids for number in range(3)]
    drafts: list[int] = []

    def drafter(team: Any) -> StubDraft:
        mine = len(drafts)
        drafts.append(mine)

        def propose(request: int, text: list[int], round: int) -> Tree:
            if mine == 1 and round == 1:
                raise RuntimeError("only here")
            return chain(list(right[mine][len(text) : len(text) + 2]))

        return StubDraft(propose)

    scheduler = Scheduler(TARGET, Recipe("stub", "", MadeBy(drafter), Chain(2), serial))
    for number in range(3):
        scheduler.join(_request(number))
    results = _steps(scheduler)
    assert [results[number].ids for number in range(3)] == right
    reasons = [results[number].fallback_reason for number in range(3)]
    assert reasons == [None, "drafting failed with RuntimeError: only here", None]
    assert results[0].tau > 2.5 > results[1].tau


def test_a_first_token_that_cannot_be_sent_fails_its_own_request_only(monkeypatch):
    """Claim: where the result of an answer that its first token ends cannot be made, that request
    alone gets the error; the next is well. Fails if the step itself raises."""
    text = Request.text
    failures = iter((True, False))

    def broken(self: Request, *given: Any) -> str | None:
        if next(failures):
            raise RuntimeError("no text")
        return text(self, *given)

    monkeypatch.setattr(Request, "text", broken)
    scheduler = Scheduler(TARGET, resolve("ar"))
    for number in (0, 1):
        scheduler.join(Request.of(TARGET, MANY[number], max_new_tokens=1))
    events = list(scheduler.step())
    assert [str(event.error) for event in events if event.error] == ["no text"]
    assert [event.number for event in events if event.result] == [1] and not len(scheduler)


def test_a_target_of_nan_ends_one_request_alone(monkeypatch):
    """Claim: NaN in one request's logits ends it with "error"; others, and the next, are well."""
    scheduler = Scheduler(TARGET, resolve("ar"))
    for number in range(3):
        scheduler.join(_request(number))
    score = Session.score

    def poisoned(self: Session, trees: Any) -> Any:
        scores = score(self, trees)
        if 1 in scores and scores[1].answer_length == 2:
            scores[1] = copy.copy(scores[1])
            object.__setattr__(scores[1], "rows", [row * float("nan") for row in scores[1].rows])
        return scores

    monkeypatch.setattr(Session, "score", poisoned)
    results = _steps(scheduler)
    assert results[1].finish_reason == "error" and results[1].ids == _alone(1, "ar").ids[:2]
    for number in (0, 2):
        assert results[number].ids == _alone(number, "ar").ids
    monkeypatch.undo()
    again = scheduler.join(_request(1))
    assert _steps(scheduler)[again].ids == _alone(1, "ar").ids


def test_a_forward_that_fails_ends_those_in_it_and_no_more(monkeypatch):
    """Claim: when the target itself raises, those decoding get the error and the next is well."""
    scheduler = Scheduler(TARGET, resolve("ar"))
    for number in range(2):
        scheduler.join(_request(number))
    while not all(entry.batch.has_read_prompts for entry in scheduler._entries.values()):
        list(scheduler.step())

    def broken(*_: Any, **options: Any) -> Any:
        raise RuntimeError("kernel trouble")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_forward", broken)
        news = list(scheduler.step())
    assert [str(each.error) for each in news] == ["kernel trouble"] * 2 and len(scheduler) == 0
    scheduler.join(_request(0))
    assert _steps(scheduler)[2].ids == _alone(0, "ar").ids


@pytest.mark.parametrize("method", ["ar", "hippo"])
def test_what_cannot_be_read_is_refused_in_a_sentence(method, monkeypatch):
    """Claim: a prompt that no memory holds is refused when it joins; beside others it waits."""
    scheduler = Scheduler(TARGET, resolve(method), DRAFT)
    monkeypatch.setattr("saccade.model.memory.available_bytes", lambda device: 10)
    assert not scheduler.fits(_request(0))
    with pytest.raises(ModelError, match="would fit"):
        scheduler.join(_request(0))
    assert len(scheduler) == 0
    with pytest.raises(OptionError, match="stop strings need the tokenizer"):
        Request.of(TARGET, MANY[0], stop_strings=["x"])


def test_a_view_without_its_words_is_refused_when_it_joins():
    """Claim: a method that needs a tokenizer says so at once, and nothing stays behind."""
    scheduler = Scheduler(TARGET, resolve("tabed"), DRAFT)
    with pytest.raises(OptionError, match="needs tokenizer"):
        scheduler.join(_request(0))
    assert len(scheduler) == 0 and TextMaker() == _request(0).text_maker


def test_memory_that_runs_out_over_a_tree_costs_the_draft_only(monkeypatch):
    """Claim: where the target has no room for drafted rows, the round is plain, drafting is given
    up with the reason, and the answer is unharmed: in a scheduler, in a stream, beside a process.
    """
    forward, refused = Session._forward, 0

    def small(self: Session, rows: Any, **options: Any) -> Any:
        nonlocal refused
        if self.backbone is TARGET and len(rows.ids) > 1 + len(rows.segments):
            refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, rows, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_forward", small)
        for method in ("sd", "sd-tree", "sd/schedule=parallel"):
            drafting = TARGET if "parallel" in method else DRAFT  # or nothing is ever in flight
            result = saccade.run(TARGET, MANY[0], draft=drafting, method=method, max_new_tokens=12)
            assert result.ids == _alone(0, "ar").ids
            if refused or "parallel" not in method:  # how much is in flight is a matter of speed
                assert result.fallback_reason and "no memory" in result.fallback_reason
            refused = 0
        scheduler = Scheduler(TARGET, resolve("sd"), DRAFT)
        for number in (0, 2):
            scheduler.join(_request(number))
        results = _steps(scheduler)
    for number, result in results.items():
        assert result.fallback_reason and "no memory" in result.fallback_reason
        assert result.ids == _alone(2 * number, "ar").ids
