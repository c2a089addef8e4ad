"""Claims about serving many at once in a benchmark: the answers are one another's."""

from __future__ import annotations

from itertools import islice

import pytest

from lab.hardware import throughput
from saccade.engine.request import Request
from saccade.inputs import Loaded, load
from saccade.world.suites import suites


def _pair() -> tuple[Loaded, Loaded]:
    return load("shapes"), load("shapes-draft")


def _make_requests(target: Loaded, count: int, limit: int) -> list[Request]:
    items = islice(suites()["shapes-caption"].items(), count)
    return throughput.make_requests(target, items, limit)


@pytest.mark.slow
def test_every_number_of_rows_gives_the_same_answers():
    """Claim: four requests, one or three at a time, plain or drafted: the same tokens, all of them,
    and the run that counts for nothing is not counted.
    """
    target, draft = _pair()
    batch = _make_requests(target, 4, 20)
    runs = throughput.measure_throughput(
        target.backbone, draft.backbone, batch, ["ar", "sd"], [1, 3], 1
    )
    assert [(each.method, each.rows) for each in runs] == [
        ("ar", 1),
        ("ar", 3),
        ("sd", 1),
        ("sd", 3),
    ]
    assert all(each.same and each.tokens == 80 for each in runs)
    assert all(0 < each.first_token < each.seconds for each in runs)


@pytest.mark.extra
def test_control_another_answer_is_noticed(monkeypatch):
    """Control: where one run answers otherwise, it says so."""
    target, draft = _pair()
    batch = _make_requests(target, 2, 8)
    real = throughput._run

    def bent(*arguments):
        ids, figures = real(*arguments)
        return (
            ({number: answer[:-1] for number, answer in ids.items()}, figures)
            if (figures.rows == 2)
            else (ids, figures)
        )

    monkeypatch.setattr(throughput, "_run", bent)
    runs = throughput.measure_throughput(target.backbone, draft.backbone, batch, ["ar"], [1, 2], 1)
    assert [each.same for each in runs] == [True, False]
