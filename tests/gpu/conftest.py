"""What the tests' own checks do on a pretended device is not counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _uncounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import integrity
    from pretended import unobserved

    monkeypatch.setattr(integrity, "around", unobserved)
    yield
