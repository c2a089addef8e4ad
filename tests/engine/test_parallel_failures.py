"""Claims about a draft process that dies, falls silent or raises: it costs speed only."""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from beside import Inside, Pace, hired, paced
from helpers import (
    backbone,
    noisy,
    prompt_of,
    qwen25,
    truth,
)
from workers import COUNT, INPUTS, answer, check_next_answer, drafted, unhurried

import saccade
from lab import reference
from saccade.core.result import Result
from saccade.core.sampling import Sampling
from saccade.drafting.parallel import process, worker_drafter
from saccade.drafting.parallel.channel import Channel
from saccade.drafting.parallel.process import Worker
from saccade.drafting.parallel.worker_drafter import WorkerDrafter
from saccade.engine.generate import Stream
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")


def worker_of(rounds: Stream) -> Worker:
    """The worker that drafts for this answer."""
    assert rounds.batch is not None
    draft: Any = rounds.batch.drafter._drafter
    assert isinstance(draft, WorkerDrafter)
    return draft._worker


def broken_at(
    round: int, act: Callable[[Worker], None], target: Backbone | None = None, length: int = 40
) -> tuple[Result, float]:
    """An answer whose worker is acted on before this round (once it drafts), and the longest wait
    for a round after that."""
    begun = False

    def phase(name: str) -> None:
        nonlocal begun
        if name == "decode" and round == 0:
            act(worker_of(rounds))
            begun = True

    rounds = saccade.stream(
        unhurried() if target is None else target,
        INPUTS,
        draft=backbone(noisy(qwen25, 0, 0.05)),
        method="pearl",
        max_new_tokens=length,
        on_phase=phase,
    )
    longest, done, last = 0.0, 0, time.monotonic()
    for step in rounds:
        longest, last = max(longest, time.monotonic() - last if begun else 0.0), time.monotonic()
        done += len(step.tree) > 0
        if not begun and done == round:
            act(worker_of(rounds))
            begun, last = True, time.monotonic()
    assert begun
    return rounds.results[0], longest


def _kill(one: Worker) -> None:
    os.kill(one.process.pid, signal.SIGKILL)


def _stop(one: Worker) -> None:
    os.kill(one.process.pid, signal.SIGSTOP)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("round", [0, 1, 5])
def test_a_killed_worker_costs_speed_only(round):
    """Claim: a process that dies before or during decoding leaves the answer, the result says why,
    and the next answer hires a fresh one that drafts again.
    """
    pids = []
    result, _ = broken_at(round, lambda one: (pids.append(one.process.pid), _kill(one))[-1])
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None and "died" in result.fallback_reason
    assert all(one.process.pid not in pids for one in process._idle)
    check_next_answer()
    assert process._idle and all(one.process.pid not in pids for one in process._idle)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("round", [1, 5])
def test_a_worker_that_falls_silent_costs_its_patience_only(round, monkeypatch):
    """Claim: a stopped process is given up within PATIENCE, killed, and replaced for the next."""
    monkeypatch.setattr(worker_drafter, "TOKEN_PATIENCE_SECONDS", 0.5)
    pids: list[int] = []
    result, longest = broken_at(round, lambda one: (pids.append(one.process.pid), _stop(one))[-1])
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None and "silent for 0.5 s" in result.fallback_reason
    assert 0.5 <= longest < 5
    with pytest.raises(OSError):
        os.kill(pids[0], 0)
    monkeypatch.undo()
    check_next_answer()


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Processes to be killed afterwards, whatever happened."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    others = [one for one in process._idle if one.process.pid not in pids]
    process._idle.clear()
    process._idle.extend(others)


def test_a_worker_that_falls_silent_before_it_is_ready_is_given_up(stopped, monkeypatch):
    """Claim: a process that stops while it still reads its prompt costs speed only: the result says
    why nothing was drafted, and the next answer drafts again.
    """
    monkeypatch.setattr(worker_drafter, "TOKEN_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(worker_drafter, "READING_PATIENCE_SECONDS", 0.5)

    def act(one: Worker) -> None:
        stopped.append(one.process.pid)
        _stop(one)

    result, _ = broken_at(0, act)
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None
    check_next_answer()


@pytest.mark.extra
def test_a_worker_that_reads_nothing_holds_up_no_long_answer(stopped):
    """Claim: the target never waits for room on the line. Fails if what is sent to a worker that
    does not read (it is stopped, or still prefilling) blocks once the pipe is full.
    """

    def act(one: Worker) -> None:
        stopped.append(one.process.pid)
        _stop(one)

    blocked: list[int] = []

    def ring(number: int, frame: Any) -> None:  # killing it frees the target
        blocked.extend(stopped)
        os.kill(stopped[0], signal.SIGKILL)

    before = signal.signal(signal.SIGALRM, ring)
    left = signal.setitimer(signal.ITIMER_REAL, 12)
    try:
        result, _ = broken_at(0, act, backbone(qwen25()), length=450)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)
    assert not blocked
    # a chain or two may have left before it was stopped
    assert len(result.ids) == 450 and drafted(result) < 20


@pytest.mark.extra
def test_a_slow_draft_is_waited_for_as_long_as_its_prefill_suggests(monkeypatch):
    """Claim: a draft whose step takes longer than PATIENCE, and no longer than its prefill did, is
    slow and not dead. Fails if it is killed for it.
    """
    monkeypatch.setattr(worker_drafter, "TOKEN_PATIENCE_SECONDS", 0.15)
    target = paced(copy.deepcopy(qwen25()), Pace(prefill=0.7, step=0.02))
    draft = paced(copy.deepcopy(noisy(qwen25, 0, 0.05)), Pace(prefill=0.5, step=0.3))
    saccade.run(target, INPUTS, draft=draft, method="pearl-syn", max_new_tokens=2)
    result = saccade.run(target, INPUTS, draft=draft, method="pearl-syn", max_new_tokens=20)
    assert result.ids == truth("qwen2_5_vl")[:20] and result.fallback_reason is None
    assert drafted(result) > 0


@pytest.mark.representatives(1)
@pytest.mark.parametrize("step", [1, 3, 9])
def test_a_draft_that_raises_costs_speed_only(step):
    """Claim: an error in the draft's forward leaves the answer and is quoted as the reason; the
    worker is as good as before.
    """
    draft = paced(copy.deepcopy(noisy(qwen25, 0, 0.05)), Pace(failing=step))
    result = answer(draft, max_new_tokens=40, target=unhurried())
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None
    assert f"RuntimeError: step {step} is broken" in result.fallback_reason
    pids = [one.process.pid for one in process._idle]
    again = answer(draft, max_new_tokens=40, target=unhurried())
    assert again.ids == truth("qwen2_5_vl") and again.fallback_reason is None
    assert drafted(again) > 0 and [one.process.pid for one in process._idle] == pids


@pytest.mark.representatives(3)
@pytest.mark.parametrize("after", [0, 1, 2, 3, 7, 12])
def test_a_worker_may_die_after_any_message(after):
    """Claim: the above wherever the process dies: after each number of messages it sent."""
    with hired(Inside(dies=after)):
        result = answer(max_new_tokens=40)
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None and "died" in result.fallback_reason


def test_a_closed_stream_frees_its_worker():
    """Claim: closing an answer half-way hands its worker to the next, which takes no token of the
    first for its own: both go on from different texts, and theirs is right.

    Fails if a worker leaks at every closed stream, or if messages are not told apart by job.
    """
    check_next_answer()
    (before,) = [one.process.pid for one in process._idle]
    for _ in range(3):
        rounds = saccade.stream(
            backbone(qwen25()),
            INPUTS,
            draft=backbone(noisy(qwen25, 0, 0.05)),
            method="pearl-syn",
            max_new_tokens=40,
        )
        next(rounds)
        assert not process._idle
        rounds.close()
        assert [one.process.pid for one in process._idle] == [before]
        check_next_answer()
    assert [one.process.pid for one in process._idle] == [before]


def test_tokens_of_an_older_job_are_ignored():
    """Claim: what a worker still had to say about a closed answer is not heard by the next one.

    Its old tokens are put in front of the new ones on purpose; every drafted token of the next
    answer is then still the draft's own.
    """
    inside = Inside(lambda: 3)
    with hired(inside):
        clean = answer()
        first = saccade.stream(
            backbone(qwen25()), INPUTS, draft=backbone(qwen25(5)), method="pearl", max_new_tokens=40
        )
        next(first), next(first)  # the opening, and a round
        for _ in range(8):
            inside.turn()
        stale = len(inside._inbox)
        first.close()
        after = answer()
    assert stale > 0, "nothing was left unheard"
    assert [r.tokens for r in after.rounds] == [r.tokens for r in clean.rounds]
    assert after.ids == truth("qwen2_5_vl")[:COUNT] and after.fallback_reason is None


def test_a_message_of_an_older_job_is_not_returned():
    """Claim: on a real line, messages of older jobs and of none to come are passed over, and the
    first one of this job is returned whole.
    """
    one = Worker.__new__(Worker)
    one.channel, other = map(Channel, socket.socketpair())
    one._job_number = 3
    try:
        for job, token in ((1, 10), (2, 20), (3, 30), (2, 21), (3, 31), (1, 11)):
            other.send((job, "token", 0, 0, token, None, 0.0))
        heard = [one.receive(0.0) for _ in range(3)]
    finally:
        one.channel.close()
        other.close()
    assert heard == [("token", 0, 0, 30, None, 0.0), ("token", 0, 0, 31, None, 0.0), None]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["pearl", "pearl-syn"])
def test_every_token_in_flight_is_the_drafts_own(method):
    """Claim: whoever is faster, what the target judges is what the draft model itself says next,
    arg-max after arg-max, never a word about a chain that was refused.

    Such a token would only be refused, so answers do not show it; under sampling it would bring a
    law that it was not drawn from.
    """
    draft = noisy(qwen25, 0, 0.05)
    prompt = prompt_of(draft, INPUTS)
    refused = 0
    for seed in range(3):
        chance = random.Random(seed)
        with hired(Inside(lambda chance=chance: chance.choice([0, 0, 1, 1, 2, 7]))):
            result = answer(backbone(draft), method)
        oracle = reference.Oracle(draft, [prompt], [Sampling()])
        for round in result.rounds:
            text, tree = oracle.committed[0], list(round.tokens)
            rows = oracle.logits(0, [*text, *tree])[len(text) : len(text) + len(tree)]
            assert rows.argmax(-1).tolist() == tree
            oracle.commit({0: round.emitted})
            refused += round.kind == "recovered"
    assert refused >= 6, "hardly a refusal: the test proves nothing"


def test_two_answers_at_once_have_a_worker_each():
    """Claim: streams read in turns do not disturb each other. Fails if they share a process."""
    streams = [
        saccade.stream(
            backbone(qwen25()),
            INPUTS,
            draft=backbone(noisy(qwen25, 0, 0.05)),
            method=method,
            max_new_tokens=COUNT,
        )
        for method in ("pearl", "hippo")
    ]
    texts: list[list[int]] = [[], []]
    open_ = [0, 1]
    while open_:
        for number in list(open_):
            round = next(streams[number], None)
            if round is None:
                open_.remove(number)
            else:
                texts[number] += round.emitted
    assert texts == [list(truth("qwen2_5_vl")[:COUNT])] * 2
    assert all(rounds.results[0].fallback_reason is None for rounds in streams)


@pytest.mark.extra
def test_threads_are_given_back():
    """Claim: whatever happens to a worker, the caller's thread count is what it was."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        answer()
        assert torch.get_num_threads() == 2
        broken_at(1, _kill)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.extra
def test_a_draft_that_captures_its_steps_is_waited_for_longer():
    """Claim: a draft that says that it captures has as long as for its prefill, and as long as
    before once it has captured. Fails where a new process that compiles kernels is given up."""
    beside = object.__new__(worker_drafter.WorkerDrafter)
    beside._failure, beside._is_draft_capturing = None, False
    messages, waits = [("capturing",), ("captured",), None], []

    def receive(patience: float = 0.0) -> bool:
        waits.append(patience)
        message = messages.pop(0)
        if message is not None:
            beside._handle(message)
        return message is not None

    beside._receive = receive
    beside._wait(lambda: not messages, 2.0)
    assert waits == [2.0, worker_drafter.READING_PATIENCE_SECONDS, 2.0]
