"""Claims about answers that are left half way, in whatever order what they held is finalised: no
file of the caller's is written to, no descriptor and no process is leaked, and the next answer
drafts.

Workers are forks of this process (``conftest.py``).
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from beside import Pace, fork, paced, ran
from helpers import backbone, input_for, noisy, prompt_of, qwen25, truth

import saccade
from saccade.core.result import Result
from saccade.core.sampling import Sampling
from saccade.drafting.parallel import process
from saccade.drafting.parallel.child import Abandoned, Job, JobRunner
from saccade.drafting.parallel.process import DraftError, Lending, Worker
from saccade.drafting.shapes.policies import Chain
from saccade.drafting.views.basic import FULL
from saccade.engine.generate import Stream
from saccade.model import memory
from saccade.model.backbone import Backbone

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")
COUNT = 12


def stream(method: str = "hippo", **settings: Any) -> Stream:
    settings = {"max_new_tokens": 40, "draft": backbone(noisy(qwen25, 0, 0.05)), **settings}
    return saccade.stream(backbone(qwen25()), INPUTS, method=method, **settings)


def answer(method: str = "hippo", **settings: Any) -> Result:
    return stream(method, **{"max_new_tokens": COUNT, **settings}).finish()[0]


@cache
def unhurried() -> Backbone:
    """The target with 20 ms before each forward, so that any draft is ready before it is done."""
    return paced(copy.deepcopy(qwen25()), Pace(step=0.02))


@pytest.fixture(autouse=True)
def _no_idle_workers() -> None:
    process._dismiss()


def drafts_again(pid: int | None = None) -> None:
    """The next answer is right and drafted for, by this worker."""
    draft = backbone(noisy(qwen25, 0, 0.05))
    (result,) = saccade.stream(
        unhurried(), INPUTS, draft=draft, method="hippo", max_new_tokens=COUNT
    ).finish()
    assert result.ids == truth("qwen2_5_vl")[:COUNT] and result.fallback_reason is None
    assert any(round.tokens for round in result.rounds)
    if pid is not None:
        assert [one.process.pid for one in process._idle] == [pid]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def worker_of(rounds: Stream) -> Worker:
    assert rounds.batch is not None
    draft: Any = rounds.batch.drafter._drafter
    return draft._worker


# -- left half way -----------------------------------------------------------------------------


def _break() -> None:
    for number, _ in enumerate(stream()):
        if number == 2:
            break


def _never_begun() -> None:
    stream()


def _close_twice() -> None:
    rounds = stream()
    next(rounds), next(rounds)
    rounds.close()
    rounds.close()


def _raise() -> None:
    with pytest.raises(ZeroDivisionError):
        for _ in stream("pearl"):
            1 / 0  # noqa: B018


def _raise_in_on_phase() -> None:
    def phase(name: str) -> None:
        if name == "guide":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream("pearl-syn", on_phase=phase).finish()


def _in_a_reference_cycle() -> None:
    """Only the collector finds it."""
    rounds: Any = stream()
    next(rounds), next(rounds)
    rounds.itself = rounds


def _in_a_reference_cycle_with_its_worker() -> None:
    """Nothing but the collector ends the stream, its drafter, its lending and its generator."""
    rounds: Any = stream(do_sample=True, seed=1)
    next(rounds), next(rounds)
    draft = rounds.batch.drafter._drafter
    rounds.parts = [rounds, draft, draft._lending, worker_of(rounds)]
    draft.parts = rounds.parts


LEFT: dict[str, Callable[[], None]] = {
    each.__name__.strip("_"): each
    for each in (
        *(_break, _never_begun, _close_twice, _raise, _raise_in_on_phase),
        *(_in_a_reference_cycle, _in_a_reference_cycle_with_its_worker),
    )
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", LEFT)
def test_an_answer_that_is_left_writes_to_nobodys_file(name, tmp_path):
    """Claim: after an answer is left half way, files that the caller opens are its own: they keep
    what it writes, whatever is collected when and however many answers follow; and each of those is
    drafted for, by the same worker, without more descriptors. Fails where a line is used by its
    number, or where a worker is put back whose line is closed."""
    drafts_again()
    ((pid, before),) = [(one.process.pid, descriptors()) for one in process._idle]
    for number in range(3):
        LEFT[name]()
        gc.collect()
        with open(tmp_path / f"log{number}", "w") as log:
            log.write("a line of the caller's\n")
            log.flush()
            drafts_again(pid)
        assert (tmp_path / f"log{number}").read_text() == "a line of the caller's\n"
    assert descriptors() == before


@pytest.mark.extra
def test_an_answer_that_nobody_has_collected_holds_up_nobody():
    """Claim: an answer left in a circle keeps its worker until it is collected; meanwhile the next
    answer has another, and the caller's threads are its own."""
    gc.disable()
    try:
        torch.set_num_threads(2)
        _in_a_reference_cycle()
        assert torch.get_num_threads() == 2
        drafts_again()
    finally:
        torch.set_num_threads(1)
        gc.enable()
    gc.collect()
    assert len(process._idle) == 2
    process._idle.pop().end()


def test_the_threads_between_two_rounds_are_the_callers():
    """Claim: who reads a stream finds its own number of threads at every round, though the target
    has fewer while it works. Fails if the number is set for as long as the answer lasts."""
    inside: list[int] = []
    target = paced(copy.deepcopy(qwen25()), Pace())
    target.text.register_forward_pre_hook(lambda *_: inside.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        rounds = saccade.stream(
            target,
            INPUTS,
            draft=backbone(noisy(qwen25, 0, 0.05)),
            method="pearl-syn",
            max_new_tokens=COUNT,
        )
        outside = [torch.get_num_threads() for _ in rounds]
    finally:
        torch.set_num_threads(1)
    assert set(outside) == {2} and 1 in inside


def test_a_lending_ends_once_and_for_all():
    """Claim: a worker is given back once, by who comes first, and from then on nothing of that
    answer reaches it. Fails if closing twice puts a worker into the pool twice."""
    drafts_again()
    lending = process.lend(backbone(noisy(qwen25, 0, 0.05)))
    worker = lending.worker
    assert worker not in process._idle
    lending.close()
    lending.close()
    assert list(process._idle).count(worker) == 1
    with pytest.raises(DraftError, match="given back"):
        lending.worker.send("commit", {})
    lending = Lending(process._idle.pop())
    del lending
    assert list(process._idle).count(worker) == 1
    drafts_again(worker.process.pid)


@pytest.mark.extra
def test_a_worker_whose_line_was_closed_is_not_hired_again(tmp_path):
    """Claim: should a line be closed under an answer, the answer is right, the file that has its
    number stays as it is, and the worker is ended."""
    drafts_again()
    rounds = stream()
    round_list = [next(rounds), next(rounds)]
    worker = worker_of(rounds)
    worker.channel.close()
    with open(tmp_path / "log", "wb") as log:
        round_list += list(rounds)
        assert not log.tell() and not os.path.getsize(log.name)
    assert worker not in process._idle and worker.process.poll() is not None
    (result,) = rounds.results
    assert result.ids == truth("qwen2_5_vl")[:40] and "died" in str(result.fallback_reason)
    drafts_again()


def test_a_closed_answer_leaves_no_draft_at_work(tmp_path):
    """Claim: once an answer is closed its draft's process is idle: no forward of it begins later,
    so nobody's time depends on who answered before. Fails if it is merely told to stop."""
    log = str(tmp_path / "draft")
    # Steps so slow that the head start of a draft is far from its end, whoever else is at work.
    draft = paced(copy.deepcopy(noisy(qwen25, 0, 0.05)), Pace(step=0.2, log=log))
    rounds = stream("pearl-syn/shape=chain-9", draft=draft)
    next(rounds)
    while not (Path(log).exists() and ran(log)):  # The draft has read the prompt.
        time.sleep(0.01)
    time.sleep(0.1)  # Half a step, so that the draft is in the middle of one.
    rounds.close()
    closed = time.monotonic()
    time.sleep(0.5)
    steps = ran(log)
    assert steps and all(step.end <= closed for step in steps)


def test_a_draft_that_still_reads_its_prompt_stops_between_two_pieces():
    """Claim: a draft whose answer ends while it reads reads no further than the piece it is at."""
    model = backbone(qwen25())
    pieces: list[int] = []

    def is_abandoned() -> bool:
        pieces.append(1)
        return len(pieces) == 2

    desk = JobRunner(
        model,
        Job(FULL, [Sampling()], model.vocab, (), 8, Chain(2), None),
        lambda *message: None,
        is_abandoned,
    )
    desk._session.chunk = 8
    prompt = prompt_of(qwen25(), INPUTS)
    assert len(prompt) > 3 * 8
    with pytest.raises(Abandoned):
        desk._read([prompt])
    assert len(pieces) == 2 and not desk._session.requests


# -- descriptors -------------------------------------------------------------------------------


def _answers(count: int) -> None:
    """Answers of every kind: whole, sampled, left half way, collected late, their worker killed."""
    for number in range(count):
        if number % 5 == 1:
            answer("pearl-syn", do_sample=True, seed=number, max_new_tokens=6)
        elif number % 5 == 2:
            _break()
        elif number % 5 == 3:
            _in_a_reference_cycle()
        elif number % 10 == 4:
            rounds = stream("pearl", do_sample=True, seed=number)
            next(rounds)
            os.kill(worker_of(rounds).process.pid, signal.SIGKILL)
            assert rounds.finish()[0].fallback_reason
        else:
            answer(max_new_tokens=6)


def _assert_no_leak(count: int) -> None:
    _answers(10)
    gc.collect()
    process._dismiss()
    before = descriptors()
    _answers(count)
    gc.collect()
    process._dismiss()
    assert descriptors() == before and not process._running


@pytest.fixture
def unlogged(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged: a record would keep the frames of an error, and all that they refer to."""
    caplog.set_level(logging.CRITICAL, "saccade")


@pytest.mark.extra
def test_answers_in_a_row_take_no_descriptors(unlogged):
    """Claim: after twenty answers, some left half way and some whose draft was killed, as many
    descriptors are open as before, and no process is left."""
    _assert_no_leak(20)


@pytest.mark.slow
def test_two_hundred_answers_in_a_row_take_no_descriptors(unlogged):
    """The same for two hundred."""
    _assert_no_leak(200)


@contextmanager
def no_more_descriptors(spare: int) -> Iterator[None]:
    """In this block only so many more files can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while fillers[-1] < highest:
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in fillers:
            os.close(each)


@pytest.mark.extra
def test_a_draft_of_many_layers_takes_no_more_descriptors_than_one_of_few():
    """Claim: a worker is taught a draft of 30 layers where four descriptors are left. Fails if each
    of its weights is shared by a descriptor of its own."""
    draft = Backbone(qwen25(3, layers=30), fused=False)
    drafts_again()
    with no_more_descriptors(4):
        result = answer(draft=draft)
    assert result.fallback_reason is None and result.ids == truth("qwen2_5_vl")[:COUNT]


@pytest.mark.representatives(1)
@pytest.mark.parametrize("method", ["hippo", "pearl-syn"])
def test_without_descriptors_drafting_alone_fails(method):
    """Claim: where no descriptor is left for a worker the answer is the target's, the result says
    why nothing was drafted, and the next answer drafts. Fails if anything on the way of an answer
    needs a file."""
    answer("sd")  # Models are made, and what they import is read, before files are forbidden.
    with no_more_descriptors(0):
        result = answer(method)
    assert result.ids == truth("qwen2_5_vl")[:COUNT]
    assert result.fallback_reason is not None and "open files" in result.fallback_reason
    drafts_again()


def test_the_memory_there_is_is_estimated_without_descriptors(monkeypatch):
    """Claim: where nothing can be opened, the memory that is free is taken to be all there is, and
    the peak is not known."""
    there = psutil.virtual_memory().total
    peak = memory.PeakMemory([torch.device("cpu")])
    with no_more_descriptors(0):
        assert memory.available_bytes(torch.device("cpu")) == there
        assert peak.bytes() is None
    assert peak.bytes() is not None


# -- who dies ----------------------------------------------------------------------------------


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ends(pid: int, within: float = 20.0) -> bool:
    deadline = time.monotonic() + within
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _is_running(pid)


def _wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the draft began no step"
        time.sleep(0.05)


@pytest.mark.parametrize("step", [0.0, 60.0])
def test_a_worker_ends_with_its_parent(step, tmp_path):
    """Claim: after SIGKILL of the parent its worker ends, idle or in the middle of a step that
    takes a minute. Fails if it only looks for its parent between two steps."""
    note, begun = tmp_path / "pid", tmp_path / "begun"
    model = copy.deepcopy(noisy(qwen25, 0, 0.05))
    draft = paced(model, Pace(step=step, begun=str(begun)))

    def parent() -> None:
        rounds = stream("pearl-syn", draft=draft)
        next(rounds)  # The draft, which starts beside the prefill, is not waited for.
        (tmp_path / "new").write_text(str(worker_of(rounds).process.pid))
        (tmp_path / "new").replace(note)
        time.sleep(60)

    one = fork(parent, daemon=False)
    try:
        _wait_for(note, begun)
        pid = int(note.read_text())
        assert _is_running(pid)
    finally:
        one.kill()
        one.join()
    assert _ends(pid)


def test_a_fork_leaves_its_parents_workers_alone():
    """Claim: a process that is forked off half way through an answer can end, and answer by itself,
    without a word to its parent's worker."""
    drafts_again()
    rounds = stream()
    next(rounds)
    pid = worker_of(rounds).process.pid

    def aside() -> None:
        rounds.close()
        assert not process._idle and not process._running
        assert answer("ar").ids == truth("qwen2_5_vl")[:COUNT]

    one = fork(aside, daemon=False)
    one.join()
    assert one.exitcode == 0
    assert _is_running(pid)
    (result,) = rounds.finish()
    assert result.ids == truth("qwen2_5_vl")[:40] and result.fallback_reason is None
    drafts_again(pid)


@pytest.mark.slow
def test_an_interpreter_that_ends_half_way_ends_its_worker(tmp_path):
    """Claim: a script that ends in the middle of an answer, which its end finalises in any order,
    ends quietly, and its worker ends with it."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parents[2])!r}]
        import saccade
        from helpers import backbone, input_for, noisy, qwen25
        rounds = saccade.stream(backbone(qwen25()), input_for("qwen2_5_vl"), method="hippo",
            draft=backbone(noisy(qwen25, 0, 0.05)), max_new_tokens=40)
        next(rounds), next(rounds)
        rounds.itself = rounds
        print(rounds.batch.drafter._drafter._worker.process.pid)
        """)
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and ended.stderr == ""
    assert _ends(int(ended.stdout))


# -- what a worker knows -----------------------------------------------------------------------


def test_a_draft_that_was_changed_in_place_is_taught_anew():
    """Claim: a worker drafts with the weights there are now, also after they were changed in place:
    a draft that is made the target is never refused. Fails if it keeps its first copy."""
    model = copy.deepcopy(noisy(qwen25, 0, 0.2))
    draft = Backbone(model, fused=False)
    before = answer("pearl", draft=draft, max_new_tokens=30)
    assert any(round.kind == "recovered" for round in before.rounds)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), qwen25().parameters(), strict=True):
            mine.copy_(theirs)
    after = answer("pearl", draft=draft, max_new_tokens=30)
    assert after.ids == before.ids and after.fallback_reason is None
    assert not any(round.kind == "recovered" for round in after.rounds)


@pytest.mark.extra
def test_a_process_that_does_not_stop_is_ended(monkeypatch, tmp_path):
    """Claim: a process that is still at work a while after its answer is closed is ended, and the
    next answer has another."""
    monkeypatch.setattr(process, "STOP_SECONDS", 0.2)
    begun = tmp_path / "begun"
    draft = paced(copy.deepcopy(noisy(qwen25, 0, 0.05)), Pace(step=60.0, begun=str(begun)))
    rounds = stream("pearl-syn", draft=draft)
    next(rounds)  # The draft, which starts beside the prefill, is not waited for.
    worker = worker_of(rounds)
    _wait_for(begun)
    rounds.close()
    assert worker.process.poll() is not None and worker not in process._idle
    drafts_again()
