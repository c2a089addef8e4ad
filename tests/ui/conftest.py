"""The embedded pair as the page has it, loaded once."""

from __future__ import annotations

import pytest

pytest.importorskip("gradio", reason="the page is an extra: uv sync --extra ui")

from saccade.models import load  # noqa: E402
from saccade.ui.page import Pair  # noqa: E402


@pytest.fixture(scope="session")
def models() -> Pair:
    return Pair(load("shapes"), load("shapes-draft"))
