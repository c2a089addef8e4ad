"""Threads on a busy machine, by made-up measurements of what others use."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from helpers import backbone, llama, text_input

import saccade
from saccade.cli import application
from saccade.core import free_cores, own_processes, spinning
from saccade.core.costs import Costs
from saccade.core.free_cores import CHECK_SECONDS, CpuSample, FreeCores, threads_beside
from saccade.core.scoped_steps import each_within
from saccade.drafting.shapes import cost_measurement
from saccade.engine import scopes
from saccade.engine.request import Request
from saccade.engine.scheduler import Scheduler
from saccade.methods import resolve


class Machine:
    """A clock, and programs beside us that use some cores."""

    def __init__(self) -> None:
        self.now, self.others, self.used = 100.0, 0.0, 0.0

    def sample(self) -> CpuSample:
        return CpuSample(self.now, self.used + 7.0, 7.0)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds * self.others


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(free_cores.time, "monotonic", lambda: machine.now)
    monkeypatch.setattr(free_cores, "own_cpus", lambda: [0, 1])
    return machine


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class CpuTimes(NamedTuple):
    user: float
    system: float
    idle: float
    iowait: float = 0.0
    guest: float = 0.0


def test_time_that_a_core_idles_or_waits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: user and system time of the cores that we may run on is used; idle time, waiting for a
    disk and other cores are not, and a guest's time counts once, as user time."""
    cores = [CpuTimes(5.0, 1.0, 50.0, 3.0, 4.0), CpuTimes(2.0, 0.5, 40.0), CpuTimes(9.0, 9.0, 9.0)]
    monkeypatch.setattr(free_cores.psutil, "cpu_times", lambda percpu: cores)
    monkeypatch.setattr(free_cores, "own_cpus", lambda: [0, 1])
    assert CpuSample.now().all_programs == pytest.approx(8.5)


@pytest.mark.parametrize("is_own", [True, False])
def test_time_of_a_process_that_saccade_started_is_its_own(is_own: bool) -> None:
    """Claim: what a draft's or a decoder's process computes is not taken for other programs, while
    it runs and after it has ended. Control: a process that nobody counted is, while it runs."""
    busy = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ninput()"
    before = CpuSample.now()
    process = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        if is_own:
            own_processes.count_as_own(process)
        assert process.stdout is not None and process.stdout.readline()
        running = CpuSample.now().own - before.own
        process.communicate(b"\n")
    assert (running > 0.4) == is_own
    assert CpuSample.now().own - before.own > 0.4


@pytest.mark.parametrize(
    ("others", "threads", "cores", "expected"),
    [
        *((0.0, 2, 2, 2), (0.2, 2, 2, 2), (0.7, 2, 2, 1), (2.0, 2, 2, 1), (5.0, 2, 2, 1)),
        *((1.0, 16, 16, 15), (1.0, 4, 16, 4), (13.0, 4, 16, 3), (0.0, 1, 2, 1)),
    ],
)
def test_a_thread_for_each_core_that_is_left(
    others: float, threads: int, cores: int, expected: int
) -> None:
    """Claim: there are no more threads than free cores, never none, and little use counts as
    none."""
    assert threads_beside(others, threads, cores) == expected


def test_others_are_noticed_within_an_answer_and_forgotten_after(machine: Machine) -> None:
    """Claim: programs that begin during an answer are noticed at the next look, and those that end
    give the threads back; between two looks nothing is read. Control: an idle machine keeps all."""
    reads: list[float] = []

    def sample() -> CpuSample:
        reads.append(machine.now)
        return machine.sample()

    cores = FreeCores(sample)
    seen = []
    for others in (0.0, 2.0, 2.0, 0.0):
        machine.others = others
        for _ in range(10):
            machine.pass_time(CHECK_SECONDS / 5)
            cores.threads(2)
        seen.append(cores.threads(2))
    assert seen == [2, 1, 1, 2]
    assert len(reads) < 15


def test_what_was_seen_long_ago_says_nothing(machine: Machine) -> None:
    """Claim: the mean since long ago is not taken for now."""
    cores = FreeCores(machine.sample)
    machine.others = 2.0
    machine.pass_time(free_cores.STALE_SECONDS + 1)
    assert cores.threads(2) == 2
    machine.pass_time(1.0)
    assert cores.threads(2) == 1


def test_a_number_that_was_chosen_stays(machine: Machine) -> None:
    """Claim: with the number of threads fixed by the user a busy machine changes nothing."""
    cores = FreeCores(machine.sample)
    cores.threads_are_fixed = True
    machine.others = 2.0
    machine.pass_time(1.0)
    assert cores.threads(2) == 2


def test_a_busy_machine_warns_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Claim: one warning for a process, with the numbers; none on an idle machine."""
    cores = FreeCores(machine.sample)
    with caplog.at_level(logging.WARNING, free_cores.log.name):
        machine.pass_time(1.0)
        cores.threads(2)
        assert not caplog.messages
        machine.others = 2.0
        for _ in range(3):
            machine.pass_time(1.0)
            cores.threads(2)
    (message,) = caplog.messages
    assert "2.0 of 2 cores busy" in message and "1 of 2 threads" in message


def test_steps_are_computed_with_fewer_threads_and_callers_see_all(
    machine: Machine, two_threads: None
) -> None:
    """Claim: within a step there are as many threads as free cores, from the step at which others
    begin, and whoever takes the step sees the number from before, also after an error."""
    cores = FreeCores(machine.sample)

    def steps() -> Iterator[int]:
        for _ in range(4):
            yield torch.get_num_threads()
            machine.others = 2.0
            machine.pass_time(1.0)
        raise ValueError

    within, outside = [], []
    with pytest.raises(ValueError):
        for threads in each_within(cores.limit_threads, steps()):
            within.append(threads)
            outside.append(torch.get_num_threads())
    assert within[0] == 2 and within[-1] == 1 and set(outside) == {2}
    assert torch.get_num_threads() == 2


def test_real_samples_count_our_own_work_as_ours() -> None:
    """Claim: the machine's seconds on our cores and our own go up together while we compute, so our
    own work is not others'. Only their difference is compared, within this machine's ticks."""
    first = CpuSample.now()
    while CpuSample.now().own - first.own < 0.2:
        sum(range(10_000))
    last = CpuSample.now()
    assert last.own - first.own >= 0.2
    assert last.all_programs - first.all_programs >= last.own - first.own - 0.1
    assert last.cores_of_others(first) >= 0


@pytest.mark.parametrize("chosen", [None, "active"])
def test_the_command_line_limits_spinning_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    """Claim: the command line sets how long waiting threads spin before any command runs, and a
    wait policy of the user's stays alone."""
    for name in (*spinning.SHORT_SPINNING, spinning.WAIT_POLICY):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(spinning.WAIT_POLICY, chosen)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        application, "run_application", lambda app: seen.append(dict(spinning.os.environ))
    )
    application.main()
    limited = spinning.SHORT_SPINNING.items() <= seen[0].items()
    assert limited == (chosen is None)
    for name in spinning.SHORT_SPINNING:
        monkeypatch.delenv(name, raising=False)


def test_a_sampled_answer_is_planned_by_the_costs_of_all_threads(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    """Claim: costs belong to a number of threads, so while others keep cores busy an answer whose
    tokens are drawn is planned with all threads: a seed gives the same answer as when it is quiet.
    Control: a greedy answer is planned with the threads that it will have."""
    target = backbone(llama(0))
    monkeypatch.setattr(scopes.free_cores, "threads", lambda most: 1)
    threads: list[int] = []

    def measure(*models: Any, **settings: Any) -> Costs:
        threads.append(torch.get_num_threads())
        return Costs((1, 2), (1.0, 1.0), 0.5)

    monkeypatch.setattr(cost_measurement, "measure_costs", measure)
    monkeypatch.setattr(cost_measurement.CorrectedCosts, "load", lambda self: None)
    for sample in (True, False):
        settings: dict[str, Any] = {"do_sample": sample, "seed": 1, "max_new_tokens": 2}
        saccade.run(target, text_input(), draft=backbone(llama(1)), method="auto", **settings)
        scheduler = Scheduler(target, resolve("auto"), backbone(llama(1)))
        scheduler.join(Request.of(target, text_input(), **settings))
    assert threads == [2, 2, 1, 1]
