"""``python -m lab`` called in this process, and the embedded pair."""

from __future__ import annotations

import pytest
from commands import Call, caller
from written_out import Embedded

from lab.__main__ import main
from saccade.inputs import load


@pytest.fixture(scope="session")
def embedded() -> Embedded:
    return Embedded(load("shapes"), load("shapes-draft"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs a command: (exit code, standard output, standard error)."""
    return caller(main, "lab.commands", monkeypatch, capfd)
