"""Claims about imposed acceptance: the forwards are real, the verdicts are those asked for."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
from helpers import backbone, few, noisy, qwen25, video_input

import saccade
from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
from saccade.core.errors import OptionError
from saccade.core.result import Result
from saccade.methods import resolve

pytestmark = pytest.mark.usefixtures("unlimited_drafts")


def ran(method: str, acceptance: ImposedAcceptance, count: int = 240) -> Result:
    return saccade.run(
        backbone(qwen25()),
        video_input(0),
        draft=backbone(noisy(qwen25, 0, 0.1)),
        method=impose_acceptance(resolve(method), acceptance),
        max_new_tokens=count,
        do_sample=False,
    )


def accepted(result: Result) -> list[int]:
    return [len(round.accepted) for round in result.forwards[:-1]]  # the last is cut


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["sd/shape=chain-7", "specvlm", "std"], 1))
@pytest.mark.parametrize("length", [0.0, 2.0, 2.5])
def test_an_imposed_length_is_the_mean_accepted(method: str, length: float) -> None:
    """Claim: an acceptance length is the mean number of accepted tokens a round, whatever the
    models say, and never more than one away. Fails if the models' own verdicts shine through.
    """
    lengths = accepted(ran(method, ImposedAcceptance(length=length)))
    assert abs(mean(lengths) - length) < 0.15
    assert {int(length), int(length + 0.999)} >= set(lengths)


def test_imposed_rates_hold_place_by_place() -> None:
    """Claim: place i stands with its rate where those before it stood; the last rate goes on.

    Fails if rates are counted from the round's end, or are unconditional.
    """
    acceptance = ImposedAcceptance(rates=(0.9, 0.5, 0.8))
    lengths = [acceptance.accepted(0, round, 5) for round in range(20_000)]
    for place, rate in enumerate((0.9, 0.5, 0.8, 0.8, 0.8)):
        reached = [length for length in lengths if length >= place]
        assert abs(mean(length > place for length in reached) - rate) < 0.02


def test_an_imposed_acceptance_runs_the_real_forwards() -> None:
    """Claim: with acceptance 0 there are as many target forwards as tokens after the prefill's, and
    every round drafts.

    Fails if an imposed verdict spares the draft or the target its work.
    """
    result = ran("sd/shape=chain-4", ImposedAcceptance(length=0), 30)
    assert len(result.forwards) == 29 and all(len(each.tokens) == 4 for each in result.forwards)
    assert result.fallback_reason is None


@pytest.mark.parametrize(
    "settings", [{}, {"length": -1.0}, {"rates": (0.5, 1.5)}, {"length": 1.0, "rates": (0.5,)}]
)
def test_an_acceptance_that_means_nothing_is_refused(settings: dict[str, Any]) -> None:
    """Claim: neither, both, or impossible numbers are one sentence."""
    with pytest.raises(OptionError):
        ImposedAcceptance(**settings)


def test_a_parallel_draft_takes_no_imposed_acceptance() -> None:
    """Claim: what is judged as it flies is refused by name."""
    with pytest.raises(OptionError, match="hippo drafts in parallel"):
        impose_acceptance(resolve("hippo"), ImposedAcceptance(length=1))
