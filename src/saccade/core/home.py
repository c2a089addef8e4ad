"""Where this machine keeps what is worth keeping between runs."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``saccade`` below SACCADE_CACHE, or below the user's cache folder."""
    named = os.environ.get("SACCADE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "saccade"
