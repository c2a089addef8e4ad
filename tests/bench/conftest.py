"""The embedded pair, loaded once a process, and a run of it that several tests look at."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest
from written_out import Embedded, Ran

from saccade.bench import runner
from saccade.inputs import load
from saccade.world import suites as shapes

METHODS = ("hf", "specvlm", "ar")  # ar not first on purpose


@pytest.fixture(scope="session")
def embedded() -> Embedded:
    return Embedded(load("shapes"), load("shapes-draft"))


@pytest.fixture(scope="session", autouse=True)
def _barely_warm() -> Iterator[None]:
    """Warm-ups are of one token: here nothing is timed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "WARM_UP_TOKENS", 1)
        yield


@pytest.fixture(scope="session")
def ran(embedded: Embedded, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two captions and two conversations by every method of METHODS, uninterrupted."""
    known = shapes.suites()
    suites = (known["shapes-caption"], known["shapes-chat"])
    plan = runner.Benchmark(suites, METHODS, limit=2, max_new_tokens=10)
    folder = tmp_path_factory.mktemp("whole")
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return Ran(plan, folder, runner.run_benchmark(plan, *embedded, folder))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
