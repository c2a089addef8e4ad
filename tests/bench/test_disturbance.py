"""Claims about telling when timings were disturbed."""

from __future__ import annotations

import time

import pytest

from saccade.bench.hardware.disturbance import DisturbanceWatch, disturbance_warning
from saccade.cli.compare import Comparison
from saccade.cli.terminal import err, out
from saccade.core.free_cores import CpuSample, own_cpus


@pytest.mark.parametrize(
    ("busy", "own", "there", "plain", "reason"),
    [
        (0.0, 2, 2, [], None),
        (0.15, 2, 2, [], None),
        (0.25, 2, 2, [], "other programs kept 0.2 of 2 cores busy"),
        (1.6, 2, 2, [], "other programs kept 1.6 of 2 cores busy"),
        (6.0, 8, 16, [], None),  # on cores that were free
        (10.0, 8, 16, [], "other programs kept 10.0 of 16 cores busy"),
        (1.0, 24, 16, [], None),
        (2.0, 24, 16, [], "other programs kept 2.0 of 16 cores busy"),
        (0.0, 2, 2, [1.0, 1.2, 1.1], None),
        (0.0, 2, 2, [1.0, 5.25, 1.1], "plain decoding took 1 to 5.2 s"),
        (1.6, 2, 2, [1.0, 2.0], "cores busy and plain decoding took 1 to 2 s"),
    ],
)
def test_what_disturbs_timings_is_reported(
    busy: float, own: int, there: int, plain: list[float], reason: str | None
) -> None:
    """Claim: others' work counts as far as it takes cores from our threads, and so does plain
    decoding that took unequally long; one sentence says which, and nothing is said in peace."""
    warning = disturbance_warning(busy, own, there, plain)
    assert (warning is None) == (reason is None)
    if warning is not None and reason is not None:
        assert reason in warning and warning.endswith("quiet machine") and "\n" not in warning


def test_what_is_ours_is_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: over ten seconds in which our cores were used for 12 s, 5 s of them by us, others kept
    .7 of a core busy."""
    samples = iter([CpuSample(100.0, 55.0, 2.0), CpuSample(110.0, 67.0, 7.0)])
    monkeypatch.setattr(CpuSample, "now", lambda: next(samples))
    assert DisturbanceWatch().busy_cores() == pytest.approx(0.7)


def test_a_comparison_says_so() -> None:
    """Claim: why not to trust the times stands in a comparison's JSON and in a line under its
    table; in peace neither is there. Fails if a ratio is shown without it."""
    about = {"visual_tokens": 4, "dtype": "float32", "device": "cpu", "threads": 2, "repeat": 1}
    for warning in (None, "other programs kept 2 of 2 cores busy"):
        comparison = Comparison(about, {}, {}, "", warning)
        with err.capture() as messages, out.capture() as printed:
            comparison.print_to(out)
        assert messages.get() == ("" if warning is None else f"{warning}\n")
        assert comparison.json().get("warning") == warning and "one run each" in printed.get()


def test_a_machine_can_be_watched() -> None:
    """Claim: on this one others keep at least no and at most all cores busy."""
    watch = DisturbanceWatch()
    time.sleep(0.05)
    assert 0 <= watch.busy_cores() <= 2 * len(own_cpus())
