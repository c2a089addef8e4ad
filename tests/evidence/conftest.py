"""``python -m evidence`` called in this process."""

from __future__ import annotations

import pytest
from commands import Call, caller

from evidence.__main__ import main


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Runs a command: (exit code, standard output, standard error)."""
    return caller(main, "evidence.commands", monkeypatch, capfd)
