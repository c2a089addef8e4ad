"""Claims about the commands that check what a user meets every day."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lab.hardware.busy_machine import BusyMachine, DescribeRun
from lab.hardware.live_memory import LiveMemory

ALONE = (DescribeRun(5.0, 10.0), DescribeRun(4.0, 10.0))


@pytest.mark.parametrize(
    ("seconds", "tau", "passes"), [(14.0, 8.5, True), (16.0, 10.0, False), (5.0, 7.0, False)]
)
def test_a_busy_machine_passes_where_time_and_tau_are_within_bounds(seconds, tau, passes):
    """Claim: over 3 times the seconds, or a tau that is over 20 % away, fails the check. Fails if
    either bound is not looked at."""
    beside = (DescribeRun(5.0, 10.0), DescribeRun(seconds, tau))
    assert BusyMachine(ALONE, beside).passes is passes


@pytest.mark.parametrize(
    ("last", "equal", "passes"), [(1010, True, True), (1100, True, False), (1010, False, False)]
)
def test_a_live_video_passes_where_memory_is_flat_and_answers_are_equal(last, equal, passes):
    """Claim: growth after the warm frames, or one answer that differs, fails the check. Growth
    before does not."""
    resident = {100: 500, 200: 1000, 300: 1005, 600: last}
    assert LiveMemory(resident, (True, equal)).passes is passes


@pytest.mark.slow
def test_the_memory_of_a_live_video_is_flat():
    """Claim: a process that appends 600 frames is no larger at the end than after 200, and five
    answers are generate's. Fails if a prompt leaves memory behind that nobody collects."""
    subprocess.run([sys.executable, "-m", "lab", "live"], check=True)
