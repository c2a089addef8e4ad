"""The embedded pair as the page has it, loaded once."""

from __future__ import annotations

import pytest

from saccade.inputs import load
from saccade.ui.asking import Pair


@pytest.fixture(scope="session")
def models() -> Pair:
    return Pair(load("shapes"), load("shapes-draft"))
