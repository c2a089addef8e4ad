"""Parses JSON that comes from outside: files of users, answers of models, requests."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Returns what a JSON text holds.

    ``options`` are those of ``json.loads``. Raises ValueError where the text is no JSON, and also
    where its lists and objects are nested too deeply for Python's parser, which would raise
    RecursionError.
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
