"""Claims about the draft in a process of its own: it works beside the target, stops when refused,
and whatever becomes of it, the answer is the target's.

Workers are forks of this process (``conftest.py``), since importing everything anew takes many
seconds each; one test starts one as users do. Races that a clock cannot be trusted with are played
out by ``Inside``.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import Deafening, Inside, Pace, fire, hired, paced, ran
from helpers import (
    FAMILIES,
    backbone,
    dealt,
    drafter_of,
    hf_greedy,
    input_for,
    left_padded,
    noisy,
    prompt_of,
    qwen25,
    truth,
    video_input,
)

import saccade
from lab import reference
from saccade.core.errors import DraftFailed
from saccade.core.result import Result, Round
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.drafting.parallel import drafter, process
from saccade.drafting.parallel.channel import Channel
from saccade.drafting.parallel.drafter import WorkerDrafter
from saccade.drafting.parallel.process import DraftError, Worker
from saccade.engine.generate import Stream
from saccade.methods import resolve
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")

PARALLEL = ["hippo", "pearl", "pearl-syn", "pearl-specvlm"]
GAMMA, COUNT = 5, 24
INPUTS = input_for("qwen2_5_vl")


def answer(draft: Any = None, method: str = "pearl", **settings: Any) -> Result:
    settings = {"max_new_tokens": COUNT, "do_sample": False, **settings}
    draft = backbone(noisy(qwen25, 0, 0.05)) if draft is None else draft
    target = settings.pop("target", backbone(qwen25()))
    return saccade.run(target, INPUTS, draft=draft, method=method, **settings)


@cache
def unhurried() -> Backbone:
    """The target with 20 ms before each forward, so that any draft is ready before it is done."""
    return paced(copy.deepcopy(qwen25()), Pace(step=0.02))


def drafted(result: Result) -> int:
    return sum(len(round.tokens) for round in result.rounds)


def worker_of(rounds: Stream) -> Worker:
    """The worker that drafts for this answer."""
    assert rounds.call is not None
    draft: Any = rounds.call.drafter._drafter
    assert isinstance(draft, WorkerDrafter)
    return draft._worker


# -- overlap -----------------------------------------------------------------------------------


@dataclass
class Timed:
    """One answer and who worked when, on one clock."""

    rounds: list[Round]
    result: Result
    start: float  # of decoding
    stop: float
    target: str  # logs
    draft: str

    @property
    def wall(self) -> float:
        return self.stop - self.start

    def busy(self, log: str) -> float:
        """Seconds of decoding in which this model ran."""
        spans = [(max(at.start, self.start), min(at.end, self.stop)) for at in ran(log)]
        return sum(stop - start for start, stop in spans if stop > start)


def timed(
    folder: Path, method: str, target: Pace, draft: Pace, *, amount: float = 0.0, length: int = 40
) -> Timed:
    """An answer at these paces, by a worker that is up and knows the model."""
    target.log, draft.log = str(folder / "target"), str(folder / "draft")
    one = paced(copy.deepcopy(qwen25()), target)
    two = paced(copy.deepcopy(noisy(qwen25, 0, amount) if amount else qwen25()), draft)
    saccade.run(one, INPUTS, draft=two, method=method, max_new_tokens=2)
    for log in (target.log, draft.log):
        Path(log).unlink(missing_ok=True)
    began: list[float] = []

    def phase(name: str) -> None:
        if name == "decode":
            began.append(time.monotonic())

    rounds = saccade.stream(
        one, INPUTS, draft=two, method=method, max_new_tokens=length, on_phase=phase
    )
    found = list(rounds)
    stop = time.monotonic()
    (result,) = rounds.results
    assert result.fallback_reason is None
    return Timed(found, result, began[0], stop, target.log, draft.log)


@pytest.mark.slow  # by the clock, so alone
def test_the_draft_goes_on_until_the_target_is_ready(tmp_path):
    """Claim (Sec. 5.2): beside a target's prefill of 0.8 s, a draft that needs 0.2 s and then 50 ms
    a token has about 12 ready, and all of them are judged in the first round after the opening
    although gamma is 5.

    The known delays say 13; a busy machine only takes some away, so the best of three runs counts.
    Control: pearl, which waits for the target, never has more than gamma.
    """
    ready = []
    while len(ready) < 3 and not (ready and 9 <= max(ready) <= 14):
        run = timed(tmp_path, "pearl-syn", Pace(prefill=0.8), Pace(prefill=0.2, step=0.05))
        ready.append(len(run.rounds[1].tree))
        assert len(run.rounds[1].verdict.accepted) == ready[-1]
    assert 9 <= max(ready) <= 14
    waits = timed(tmp_path, "pearl", Pace(prefill=0.8), Pace(prefill=0.2, step=0.05), length=8)
    assert len(waits.rounds[1].tree) <= GAMMA


def test_the_drafts_seconds_beside_the_target_are_told():
    """Claim (Table 2): a result tells the seconds the draft read and drafted beside the target; no
    fewer than its known delays. Control: a draft in turns has none. Fails if only the target's
    waiting is told."""
    slow = paced(copy.deepcopy(qwen25()), Pace(prefill=0.1, step=0.01))
    beside = answer(draft=slow, target=unhurried()).timings
    kept = drafted(answer(draft=slow, target=unhurried()))
    assert beside.beside_prefill >= 0.1 and beside.beside_draft >= 0.01 * kept / 2 > 0
    serial = answer(draft=slow, method="sd").timings
    assert (serial.beside_prefill, serial.beside_draft) == (0, 0)


PACES = {"target is longer": (0.3, 0.015), "draft is longer": (0.12, 0.06)}


@pytest.mark.slow  # by the clock, so alone
@pytest.mark.parametrize("name", list(PACES))
def test_a_fully_accepted_answer_takes_as_long_as_the_longer_process(name, tmp_path):
    """Claim: where all is accepted, decoding takes at most 1.15 x the longer process's own work.

    Work is what the two models' forwards took. Control: the same pair one after the other (``sd``)
    takes longer than that. Fails if either waits for the other. Best of three runs.
    """
    forward, step = PACES[name]
    ratios = []
    while len(ratios) < 3 and not (ratios and min(ratios) <= 1.15):
        run = timed(tmp_path, "pearl-syn", Pace(step=forward), Pace(step=step), length=30)
        assert all(round.verdict.own is None for round in run.rounds[2:])
        ratios.append(run.wall / max(run.busy(run.target), run.busy(run.draft)))
    assert min(ratios) <= 1.15
    serial = timed(tmp_path, "sd", Pace(step=forward), Pace(step=step), length=30)
    assert serial.wall / max(serial.busy(serial.target), serial.busy(serial.draft)) > 1.15


# -- stopping ----------------------------------------------------------------------------------


def too_many_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: bool) -> list[int]:
    """For each refusal, how many steps began on the refused chain after the news was sent."""
    sent: list[tuple[float, int]] = []
    real = Worker.send

    def noting(self: Worker, *message: Any) -> None:
        real(self, *message)
        if message[0] == "commit":
            (tokens, kept) = message[1][0]
            if kept is None:
                sent.append((time.monotonic(), tokens[-1]))

    monkeypatch.setattr(Worker, "send", noting)
    draft = Pace(step=0.03)
    if spoil:
        draft.deaf = Deafening()
    run = timed(folder, "pearl", Pace(step=0.08), draft, amount=0.05, length=40)
    assert run.result.ids == truth("qwen2_5_vl")[:40]
    found = []
    steps = [at for at in ran(run.draft) if at.rows < 16]
    for when, own in [news for news in sent if news[0] > run.start]:
        later = [at for at in steps if at.start > when]
        fresh = next((i for i, at in enumerate(later) if own in at.ids), None)
        if fresh is not None:  # None: the answer ended with it
            found.append(fresh)
    return found


def test_a_refused_draft_stops_within_one_step(tmp_path, monkeypatch):
    """Claim: after the news of a refusal is sent, at most one more step begins on what was refused.

    Counted from the draft's own log. Fails if the worker reads its mail once a batch, as the
    control does.
    """
    extra = too_many_steps(tmp_path, monkeypatch, spoil=False)
    assert len(extra) >= 4 and max(extra) <= 1


def test_control_a_worker_that_reads_no_mail_is_noticed(tmp_path, monkeypatch):
    """Control: with a worker that drafts all it may before it reads, the same count is higher."""
    fire()
    extra = too_many_steps(tmp_path, monkeypatch, spoil=True)
    fire()  # it would stay deaf
    assert max(extra) > 1


# -- faults ------------------------------------------------------------------------------------


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


def _again() -> None:
    """The next answer drafts as if nothing had been."""
    result = answer(target=unhurried())
    assert result.ids == truth("qwen2_5_vl")[:COUNT]
    assert result.fallback_reason is None and drafted(result) > 0


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
    _again()
    assert process._idle and all(one.process.pid not in pids for one in process._idle)


@pytest.mark.parametrize("round", [1, 5])
def test_a_worker_that_falls_silent_costs_its_patience_only(round, monkeypatch):
    """Claim: a stopped process is given up within PATIENCE, killed, and replaced for the next."""
    monkeypatch.setattr(drafter, "TOKEN_PATIENCE_SECONDS", 0.5)
    pids: list[int] = []
    result, longest = broken_at(round, lambda one: (pids.append(one.process.pid), _stop(one))[-1])
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None and "silent for 0.5 s" in result.fallback_reason
    assert 0.5 <= longest < 5
    with pytest.raises(OSError):
        os.kill(pids[0], 0)
    monkeypatch.undo()
    _again()


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
    monkeypatch.setattr(drafter, "TOKEN_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(drafter, "READING_PATIENCE_SECONDS", 0.5)

    def act(one: Worker) -> None:
        stopped.append(one.process.pid)
        _stop(one)

    result, _ = broken_at(0, act)
    assert result.ids == truth("qwen2_5_vl")
    assert result.fallback_reason is not None
    _again()


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


def test_a_slow_draft_is_waited_for_as_long_as_its_prefill_suggests(monkeypatch):
    """Claim: a draft whose step takes longer than PATIENCE, and no longer than its prefill did, is
    slow and not dead. Fails if it is killed for it.
    """
    monkeypatch.setattr(drafter, "TOKEN_PATIENCE_SECONDS", 0.15)
    target = paced(copy.deepcopy(qwen25()), Pace(prefill=0.7, step=0.02))
    draft = paced(copy.deepcopy(noisy(qwen25, 0, 0.05)), Pace(prefill=0.5, step=0.3))
    saccade.run(target, INPUTS, draft=draft, method="pearl-syn", max_new_tokens=2)
    result = saccade.run(target, INPUTS, draft=draft, method="pearl-syn", max_new_tokens=20)
    assert result.ids == truth("qwen2_5_vl")[:20] and result.fallback_reason is None
    assert drafted(result) > 0


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
    _again()
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
        _again()
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
    one._job = 3
    try:
        for job, token in ((1, 10), (2, 20), (3, 30), (2, 21), (3, 31), (1, 11)):
            other.send((job, "token", 0, 0, token, None, 0.0))
        heard = [one.receive(0.0) for _ in range(3)]
    finally:
        one.channel.close()
        other.close()
    assert heard == [("token", 0, 0, 30, None, 0.0), ("token", 0, 0, 31, None, 0.0), None]


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
                texts[number] += round.tokens
    assert texts == [list(truth("qwen2_5_vl")[:COUNT])] * 2
    assert all(rounds.results[0].fallback_reason is None for rounds in streams)


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


@pytest.fixture(scope="module")
def genuine() -> Iterator[Worker]:
    """A worker started the way users start one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", subprocess)
        one = Worker()
    yield one
    one.end()


@pytest.fixture
def only_genuine(genuine: Worker) -> Iterator[Worker]:
    """It is the one that is hired."""
    idle = list(process._idle)
    process._idle.clear()
    process._idle.append(genuine)
    yield genuine
    assert list(process._idle) == [genuine], "another worker was hired"
    process._idle.clear()
    process._idle.extend(idle)


def test_a_worker_starts_as_it_does_for_users(only_genuine):
    """Claim: the command that starts a worker works: a new interpreter that imports the package by
    the caller's path, reads the model and drafts.
    """
    assert isinstance(only_genuine.process, subprocess.Popen)
    result = answer(method="pearl-syn", max_new_tokens=40)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    again = answer(method="hippo/early=superset", target=unhurried(), max_new_tokens=40)
    assert again.ids == truth("qwen2_5_vl") and again.fallback_reason is None
    assert drafted(again) > 0


# -- the same tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "gamma"), dealt(PARALLEL, [1, 2, 5, 9]))
def test_an_answer_in_parallel_is_the_targets(method, gamma):
    """Claim: lossless: 40 tokens equal transformers' generate and the cache-free reference, by a
    real worker, at whatever speed it had.
    """
    result = answer(method=f"{method}/shape=chain-{gamma}", max_new_tokens=40)
    assert result.ids == truth("qwen2_5_vl") and result.fallback_reason is None
    assert result.finish_reason == "length"


def in_family(family: str, draft: Any, method: str) -> None:
    result = saccade.run(
        backbone(FAMILIES[family]()),
        input_for(family),
        draft=backbone(draft),
        method=method,
        max_new_tokens=COUNT,
    )
    assert result.ids == truth(family)[:COUNT] and result.fallback_reason is None


OTHERS = [name for name in FAMILIES if name != "qwen2_5_vl"]


@pytest.mark.parametrize(("method", "family"), dealt(PARALLEL, OTHERS))
def test_an_answer_in_parallel_is_the_targets_in_every_family(family, method):
    """Claim: the same for other families, text without any video included."""
    in_family(family, noisy(FAMILIES[family], 0, 0.05), method)


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_draft_with_a_tower_of_its_own_sees_for_itself(only_genuine, family):
    """Claim: where the two models' towers differ, the worker reads the pixels by itself, though no
    such model was ever built in its process. Fails if something a model needs stays behind.
    """
    in_family(family, FAMILIES[family](7), "pearl")


DRAFTS: dict[str, Callable[[], Any]] = {
    "the target itself": lambda: qwen25(),
    "often right": lambda: noisy(qwen25, 0, 0.05),
    "seldom right": lambda: noisy(qwen25, 0, 0.2),
    "unrelated": lambda: qwen25(9, layers=1),
}


@pytest.mark.parametrize(("draft", "method"), dealt(DRAFTS, PARALLEL))
def test_no_draft_and_no_timing_changes_a_token(method, draft):
    """Claim: the same for drafts from always right to never, over interleavings of the two sides
    that a seed names. Fails if a token of a refused chain is ever taken for one of the next.
    """
    _interleaved(method, draft, range(1), (2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("method", PARALLEL)
def test_no_draft_and_none_of_many_timings_changes_a_token(method, draft):
    """The claim above over many more interleavings and every gamma."""
    _interleaved(method, draft, range(1, 21), (1, 2, 5, 9))


def _interleaved(method: str, draft: str, seeds: range, gammas: tuple[int, ...]) -> None:
    for gamma in gammas:
        for seed in seeds:
            chance = random.Random(100 * gamma + seed)
            with hired(Inside(lambda chance=chance: chance.choice([0, 0, 1, 1, 2, 7]))):
                result = answer(
                    backbone(DRAFTS[draft]()),
                    f"{method}/shape=chain-{gamma}",
                    max_new_tokens=COUNT,
                )
            assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.fallback_reason is None


@cache
def emitted() -> list[int]:
    return list(truth("qwen2_5_vl")[:14])


@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_an_answer_ends_wherever_it_should(method):
    """Claim: an end of text amid the tokens in flight, at any of them, ends the answer there, as
    does any length; what was in flight behind it is not emitted. Each token of the answer is
    declared the end in turn.
    """
    draft = backbone(noisy(qwen25, 0, 0.05))
    for token in dict.fromkeys(emitted()):
        chance = random.Random(token)
        with hired(Inside(lambda chance=chance: chance.choice([0, 1, 3]))):
            result = answer(draft, method, eos_token_id=token)
        expected = emitted()[: emitted().index(token) + 1]
        assert list(result.ids) == expected and result.finish_reason == "stop"
        assert result.fallback_reason is None
    for length in range(1, 7):
        with hired(Inside(lambda: 2)):
            result = answer(draft, method, max_new_tokens=length)
        assert list(result.ids) == emitted()[:length] and result.finish_reason == "length"
        assert result.fallback_reason is None


def test_an_end_is_an_end_for_a_real_worker_too():
    """Claim: the same by processes: the worker is free afterwards, and the next answer is whole."""
    for token in dict.fromkeys(emitted()[2:8]):
        result = answer(method="pearl-syn", eos_token_id=token)
        assert list(result.ids) == emitted()[: emitted().index(token) + 1]
    _again()


MANY = [video_input(0), video_input(1, (2, 4, 4)), video_input(2)]


def batch(method: str, draft: Any, **settings: Any) -> list[list[int]]:
    rounds = saccade.stream(
        backbone(qwen25()), left_padded(MANY), draft=draft, method=method, **settings
    )
    found: list[list[int]] = [[] for _ in MANY]
    for round in rounds:
        found[round.request] += round.tokens
    assert all(result.fallback_reason is None for result in rounds.results)
    assert [list(result.ids) for result in rounds.results] == found
    return found


@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_a_batch_answers_each_request_as_alone(method):
    """Claim: three requests in one worker get the answers they get alone, whichever ends first."""
    alone = [hf_greedy(qwen25(), one, COUNT) for one in MANY]
    draft = backbone(noisy(qwen25, 0, 0.05))
    assert batch(method, draft, max_new_tokens=COUNT, do_sample=False) == alone
    end = alone[1][6]
    cut = [text[: text.index(end) + 1] if end in text else text for text in alone]
    assert len({len(text) for text in cut}) > 1
    for seed in range(2):
        chance = random.Random(seed)
        with hired(Inside(lambda chance=chance: chance.choice([0, 1, 4]))):
            found = batch(method, draft, max_new_tokens=COUNT, do_sample=False, eos_token_id=end)
        assert found == cut


# -- sampling ----------------------------------------------------------------------------------

SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=20, seed=11)


@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_a_seed_means_the_same_whoever_is_faster(method):
    """Claim: a sampled answer is fixed by its seed: twice the same, and the same again with a draft
    or a target made slow, and in interleavings that no clock would bring about.

    Fails if noise, a law's slot or a batch in flight depends on timing. Other seeds give other
    answers.
    """
    plain = copy.deepcopy(noisy(qwen25, 0, 0.05))
    slow = paced(copy.deepcopy(plain), Pace(step=0.01))
    quick = Backbone(plain, fused=False)
    found = {answer(draft, method, **SAMPLED).ids for draft in (quick, quick, slow)}
    for seed in range(2):
        chance = random.Random(seed)
        with hired(Inside(lambda chance=chance: chance.choice([0, 0, 1, 5]))):
            found.add(answer(quick, method, **SAMPLED).ids)
    assert len(found) == 1
    others = {answer(quick, method, **SAMPLED | {"seed": seed}).ids for seed in (1, 2)}
    assert len(found | others) == 3


def test_a_sampled_draft_that_is_the_target_is_never_refused():
    """Claim: with p = q every token is accepted, so each is judged by the law it was drawn from.

    Fails if the law of another position, or of another round, is read from the shared memory.
    """
    draft = backbone(qwen25())
    for gamma in (1, 2, 5, 9):
        result = answer(draft, f"pearl/shape=chain-{gamma}", **SAMPLED, max_new_tokens=40)
        assert result.fallback_reason is None and drafted(result) >= 37
        assert all(round.own is None for round in result.forwards)


def test_a_sampled_batch_by_the_target_itself_is_never_refused():
    """Claim: the same for three requests at once. Fails if one request's law overwrites another's
    before it is judged: then the answers do not follow the target's law.
    """
    rounds = saccade.stream(
        backbone(qwen25()),
        left_padded(MANY),
        draft=backbone(qwen25()),
        method="pearl",
        max_new_tokens=30,
        do_sample=True,  # over the whole vocabulary: a law of no mass on a token refuses nothing
        seed=3,
    )
    refused = [round.verdict.own for round in rounds if len(round.tree)]
    assert len(refused) > 9 and refused == [None] * len(refused)


# -- the parent's book-keeping -----------------------------------------------------------------


class Script(Inside):
    """A worker that says what it is told to, when it is told to."""

    def says(self, *messages: tuple[Any, ...]) -> None:
        self._inbox.extend((self._job, *message) for message in messages)

    def receive(self, patience: float) -> tuple[Any, ...] | None:
        return tuple(self._inbox.popleft()[1:]) if self._inbox else None


def scripted(method: str = "pearl-syn") -> tuple[WorkerDrafter, Script]:
    model = backbone(qwen25())
    draft = drafter_of(resolve(method), model, model, [Sampling()], 64)
    assert isinstance(draft, WorkerDrafter)
    script = Script()
    with hired(script):
        draft.encode(INPUTS)
    return draft, script


def token(epoch: int, *ids: int) -> list[tuple[Any, ...]]:
    return [("token", 0, epoch, each, None, 0.0) for each in ids]


def test_tokens_that_follow_a_refused_text_are_dropped():
    """Claim: tokens a worker sent before it heard of a refusal are not taken for the next ones,
    however late they come. Fails if epochs are not compared.
    """
    draft, script = scripted("pearl")
    script.says(("ready", {0: 0}, 0.0), *token(0, 5))
    assert draft.propose({0: None})[0].tokens == (5,)
    script.says(*token(0, 6, 7))
    assert draft.extend({0: Tree((5,), (-1,), (None,))})[0].tokens == (5, 6)
    draft.commit({0: [5, 9]})  # 6 is refused
    script.says(*token(0, 8), *token(1, 10, 11))
    assert draft.propose({0: None})[0].tokens == ()
    assert draft.extend({0: Tree()})[0].tokens == (10,)


def test_a_turn_that_samples_after_one_that_did_not_is_drafted_with_its_laws():
    """Claim: a question that is sampled gets the same rounds after a greedy question as after a
    sampled one, and each drafted token comes with the law it was drawn from. Fails if rules are
    those of the first question: what is drawn would then be judged as if it had been chosen."""
    target, draft = backbone(qwen25()), backbone(noisy(qwen25, 0, 0.05))
    found = []
    for first in ({"do_sample": False}, {"do_sample": True, "seed": 1}):
        with saccade.Conversation(target, draft=draft, method="pearl", max_new_tokens=12) as talk:
            talk.run(INPUTS, **first)
            later = list(talk.stream(INPUTS, do_sample=True, seed=5, temperature=1.5))
        found.append([(round.tree.tokens, round.tokens) for round in later])
        assert all(q is not None for round in later for q in round.tree.q)
    assert found[0] == found[1] and any(tokens for tokens, _ in found[0])


def test_silence_is_an_error_and_the_end_of_the_process():
    """Claim: a draft that says nothing while it is waited for is killed and reported."""
    draft, script = scripted("pearl")
    script.says(("ready", {0: 0}, 0.0))
    draft.propose({0: None})
    with pytest.raises(DraftFailed) as failed:
        draft.extend({0: Tree()})
    assert isinstance(failed.value.__cause__, DraftError)
    assert "silent" in str(failed.value.__cause__) and failed.value.trees == {0: Tree()}
    assert script.poll() is not None


def test_a_plain_token_that_the_draft_foresaw_makes_no_larger_batch():
    """Claim: gamma tokens are judged after full acceptance, also where an early draft, not ready
    yet, had already drafted the very token that the target took beyond those in flight.

    Nothing is in flight after that round, so x1 is judged and then gamma tokens. Fails with
    2 gamma - 1: the batch that would have been in flight is counted a second time.
    """
    draft, script = scripted()
    script.says(*token(0, 1, 2, 3))
    in_flight = draft.propose({0: None})
    assert in_flight[0].tokens == (1, 2, 3)
    script.says(*token(0, 4))  # another before it heard of the target's prefill
    assert draft.extend(in_flight)[0].tokens == (1, 2, 3)
    draft.commit({0: [1, 2, 3, 4]})  # the target's own token is 4 as well
    script.says(("ready", {0: 0}, 0.0), *token(1, *range(5, 20)))
    x1 = draft.extend({0: Tree()})
    assert x1[0].tokens == (5,)
    draft.commit({0: [5]})
    assert len(draft.propose({0: None})[0]) == GAMMA - 1
