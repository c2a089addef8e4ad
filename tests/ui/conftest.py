"""The embedded pair as the page has it, loaded once."""

from __future__ import annotations

import pytest

from saccade.inputs import load
from saccade.ui.page_run import PageModels


@pytest.fixture(scope="session")
def models() -> PageModels:
    return PageModels(load("shapes"), load("shapes-draft"))
